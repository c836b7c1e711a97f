"""Strategy, tiles and grid of ``hip-gfx950``: a pure function of the problem, the arch and what the caller fixes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem

TILE = 32  # keys of one matrix product
STAGE = 64  # keys of one stage in LDS
# Rows and heads of a wave in registers: q takes 16 registers of a lane for each 32 heads, their weights 16 more.
MAX_HEADS_OF_WAVE = 256
MAX_SPLITS = 65535  # of the grid's y
# Up to this many rows, keys are streamed: through LDS, half of a block's waves would have no rows. Of more rows, the
# address unit limits streaming: 64 lanes that load 16 bytes of 32 keys share no line, and take an access each.
STREAM_ROWS = 8
# By heads, how many times the rows keys have to be for the policy to prefer this backend.
KEYS_A_ROW = {32: 8, 64: 1}
PREFERRED_HEAD_DIM = 128

Strategy = Literal["stream", "lds"]
Relu = Literal["clamp", "max"]
Reduce = Literal["fma", "mfma"]


@dataclass(frozen=True, slots=True)
class Tunables:
    """What a caller may fix; zero (None for the switches) leaves it to the heuristic.

    Attributes:
        strategy: ``stream`` (keys into registers) or ``lds`` (keys through LDS); empty: by shape.
        block_m: query rows that a wave holds: 2, 4 or 8, at most 256 heads together.
        split_n: workgroups that share the tiles of a row block, 1 to 65535.
        num_warps: waves of a workgroup: 1, 2, 4 or 8. In ``stream`` they split tiles, in ``lds`` rows.
        unroll2: two tiles in registers, one on its way while the other is used; ``stream`` alone.
        reverse_rows: row blocks start from the last one.
        relu: ``max``, one ``v_max_f32`` a value, or ``clamp``, a packed clamped product; the latter only where it
            is asked for, since no hardware has shown that packed float32 products obey ``clamp``.
        reduce: ``fma``, the head sum in float32, or ``mfma``, a second matrix product of values rounded to bfloat16;
            never the heuristic's choice.
    """

    strategy: Strategy | Literal[""] = ""
    block_m: int = 0
    split_n: int = 0
    num_warps: int = 0
    unroll2: bool | None = None
    reverse_rows: bool | None = None
    relu: Relu | Literal[""] = ""
    reduce: Reduce | Literal[""] = ""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("strategy", ("", "stream", "lds")),
            ("block_m", (0, 2, 4, 8)),
            ("num_warps", (0, 1, 2, 4, 8)),
            ("unroll2", (None, False, True)),
            ("reverse_rows", (None, False, True)),
            ("relu", ("", "clamp", "max")),
            ("reduce", ("", "fma", "mfma")),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, allowed))}")
        if not 0 <= self.split_n <= MAX_SPLITS:
            raise ValueError(f"split_n: got {self.split_n!r}, expected 0 (the heuristic's) to {MAX_SPLITS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig(Tunables):
    """One kernel and its grid: every tunable set, and ``heads`` and ``clean`` of the problem."""

    heads: int
    clean: bool

    @property
    def bfloat16_sums(self) -> bool:
        """Values are rounded to bfloat16 before heads are summed."""
        return self.reduce == "mfma"

    @property
    def name(self) -> str:
        """The kernel's name in traces; what is a launch argument is not in it."""
        form = "clean" if self.clean else "noclean"
        pipeline = f"k{1 + bool(self.unroll2)}" if self.strategy == "stream" else f"lds2x{STAGE}"
        return (
            f"fp8_mqa_logits_H{self.heads}_D128_mfma32x32x64_{self.strategy}_r{self.block_m}_w{self.num_warps}"
            f"_{pipeline}_{self.relu}{'_bf16sum' if self.reduce == 'mfma' else ''}_{form}_hip"
        )

    @property
    def rows_of_block(self) -> int:
        """Query rows of a workgroup."""
        return self.block_m * (self.num_warps if self.strategy == "lds" else 1)

    @property
    def occupancy(self) -> int:
        """Waves of a SIMD that the registers are held to: 512 of a lane, shared."""
        held = self.block_m * self.heads
        return 3 if held <= 64 else 2 if held <= 128 else 1

    def macros(self) -> dict[str, str | int]:
        """What the source is compiled with."""
        return {
            "HEADS": self.heads,
            "BLOCK_M": self.block_m,
            "WAVES": self.num_warps,
            "UNROLL2": int(bool(self.unroll2)),
            "CLEAN": int(self.clean),
            "RELU_CLAMP": int(self.relu == "clamp"),
            "REDUCE_MFMA": int(self.reduce == "mfma"),
            "OCCUPANCY": self.occupancy,
            "KERNEL_NAME": self.name,
        }

    def grid(self, rows: int) -> tuple[int, int, int]:
        """(row blocks, splits, 1)."""
        return -(-rows // self.rows_of_block), self.split_n, 1


def heuristic(problem: MqaLogitsProblem, arch: Arch, fixed: Tunables | None = None) -> KernelConfig:
    """The config of a problem; what ``fixed`` sets is kept.

    Raises:
        ValueError: fixed values that no kernel is built for; the message names them.
    """
    fixed = fixed or Tunables()
    strategy: Strategy = fixed.strategy or ("stream" if problem.rows <= STREAM_ROWS else "lds")
    # Four rows of 32 heads: 128 registers of q and weights, two waves a SIMD; docs/kernels/hip_gfx950.md.
    block_m = fixed.block_m or (2 if problem.rows <= 2 or problem.heads > 32 else 4)
    if block_m * problem.heads > MAX_HEADS_OF_WAVE:
        raise ValueError(
            f"block_m: got {block_m} with H={problem.heads}, expected at most {MAX_HEADS_OF_WAVE // problem.heads}: "
            "q and weights of a wave's rows lie in its registers"
        )
    num_warps = fixed.num_warps or 4
    if block_m * problem.heads > MAX_HEADS_OF_WAVE // 2 and num_warps > 4:
        raise ValueError(
            f"num_warps: got {num_warps} with block_m {block_m} and H={problem.heads}, expected at most 4: eight waves "
            f"of a workgroup have 256 registers each, which hold q and weights of {MAX_HEADS_OF_WAVE // 2} heads"
        )
    unroll2 = strategy == "stream" if fixed.unroll2 is None else fixed.unroll2
    if unroll2 and strategy == "lds":
        raise ValueError("unroll2: got True with strategy 'lds', whose stages lie in LDS, expected False")
    # Longest rows first, where their lengths differ by enough to show.
    reverse = problem.keys > 2048 if fixed.reverse_rows is None else fixed.reverse_rows
    config = KernelConfig(
        heads=problem.heads, clean=problem.clean_logits, strategy=strategy, block_m=block_m, split_n=1,
        num_warps=num_warps, unroll2=unroll2, reverse_rows=reverse, relu=fixed.relu or "max",
        reduce=fixed.reduce or "fma",
    )  # fmt: skip
    return replace(config, split_n=fixed.split_n or _splits(problem, arch, config))


def _splits(problem: MqaLogitsProblem, arch: Arch, config: KernelConfig) -> int:
    """Enough workgroups to fill the device twice over, while each wave still has eight tiles to spread its prologue."""
    blocks = config.grid(problem.rows)[0]
    resident = arch.units * 4 * config.occupancy // config.num_warps
    tiles = -(-problem.keys // TILE)
    wanted = -(-2 * resident // blocks)
    most = tiles // (8 * (config.num_warps if config.strategy == "stream" else 1))
    return max(1, min(wanted, most, MAX_SPLITS))


def neighbours(problem: MqaLogitsProblem, arch: Arch) -> list[KernelConfig]:
    """What ``bench --tune`` measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    other: Strategy = "lds" if chosen.strategy == "stream" else "stream"
    found = [Tunables(strategy=other), Tunables(relu="clamp")]
    found += [Tunables(split_n=splits) for splits in {max(1, chosen.split_n // 2), chosen.split_n * 2}]
    found += [Tunables(num_warps=warps) for warps in (2, 8)]
    found += [Tunables(block_m=2)]
    configs = [heuristic(problem, arch, fixed) for fixed in found]
    return [chosen, *(config for config in dict.fromkeys(configs) if config != chosen)]


def variants(problem: MqaLogitsProblem, arch: Arch, *, thorough: bool) -> list[KernelConfig]:
    """Checked beside the heuristic's: every combination that kernels are built for, or a few in both strategies."""
    return [heuristic(problem, arch, fixed) for fixed in (_combinations if thorough else _few)(problem.heads)]


def _combinations(heads: int) -> Iterator[Tunables]:
    for strategy, block_m, warps, splits, reverse, relu, unroll2 in itertools.product(
        ("stream", "lds"), (2, 4, 8), (1, 2, 4, 8), (1, 3), (False, True), ("clamp", "max"), (False, True)
    ):
        held = block_m * heads
        if held > MAX_HEADS_OF_WAVE or (held > MAX_HEADS_OF_WAVE // 2 and warps > 4) or (unroll2 and strategy == "lds"):
            continue
        yield Tunables(strategy, block_m, splits, warps, unroll2, reverse, relu)  # type: ignore[arg-type]
    yield from _SUMS


def _few(heads: int) -> Iterator[Tunables]:
    widest = min(8, MAX_HEADS_OF_WAVE // heads)
    yield Tunables("stream", split_n=3)
    yield Tunables("lds", split_n=3)
    yield Tunables("stream", block_m=2, num_warps=2, unroll2=False, reverse_rows=True, split_n=1, relu="clamp")
    yield Tunables("lds", block_m=widest, num_warps=2, reverse_rows=False, split_n=3, relu="clamp")
    yield from _SUMS


_SUMS = (Tunables("stream", reduce="mfma"), Tunables("lds", split_n=2, reduce="mfma"))
