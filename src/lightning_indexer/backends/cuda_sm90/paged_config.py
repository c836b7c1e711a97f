"""Configuration of ``fp8_paged_mqa_logits`` on ``cuda-sm90``: a pure function of the problem and the arch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90.config import SHARED_LIMIT
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem

TILE_KEYS = 64
MAX_PAIRS = 256
# fp4 keys lie in registers beside the products.
MAX_FP4_PAIRS = 128
# Of a multiprocessor's 228 KiB the system takes 1 KiB a CTA.
_SHARED_OF_SM = 228 * 1024
# Ints of paged_geometry.cuh's prefix sums, words of its -inf, entries of its magnitudes of fp4.
_PREFIX, _NEG_INF, _DEPTHS = 512, 512, 32


@dataclass(frozen=True, slots=True)
class PagedConfig:
    """One instantiation of the kernel and its grid: all sizes that the source is compiled with.

    The source takes them as :meth:`macros`; the static asserts of ``paged_geometry.cuh`` say which values it is written
    for.

    Attributes:
        heads, head_dim, next_n, page: H, D, and the problem's.
        ue8m0: scales are exponents.
        form: ``clean`` or ``noclean``.
        out: ``f32`` or ``bf16``.
        units: multiprocessors.
        rows: of a sequence whose heads are the N of one WGMMA.
        workers: of a CTA, each a producer warp and a math warpgroup with queues of its own.
        ctas_per_sm: persistent CTAs of a multiprocessor.
        k_stages: tiles of 64 keys between TMA and the tensor cores, for each worker.
        q_stages: sequences of q, likewise.
        fp4: keys are MXFP4.
    """

    heads: int
    head_dim: int
    next_n: int
    page: int
    ue8m0: bool
    form: str
    out: str
    units: int
    rows: int
    workers: int = 2
    ctas_per_sm: int = 2
    k_stages: int = 3
    q_stages: int = 2
    fp4: bool = False

    @property
    def name(self) -> str:
        """The kernel's name in traces."""
        return (
            f"fp8_paged_mqa_logits_H{self.heads}_D{self.head_dim}_n{self.next_n}_p{self.page}_r{self.rows}"
            f"_w{self.workers}x{self.ctas_per_sm}_k{self.k_stages}_q{self.q_stages}"
            f"_{self.form}_{self.out}{'_fp4' if self.fp4 else '_ue8m0' if self.ue8m0 else ''}_sm90"
        )

    @property
    def ctas(self) -> int:
        """Of the grid."""
        return self.units * self.ctas_per_sm

    @property
    def pieces(self) -> int:
        """Workers of the grid."""
        return self.ctas * self.workers

    @property
    def groups(self) -> int:
        """Of rows: products with each tile."""
        return -(-self.next_n // self.rows)

    @property
    def pairs(self) -> int:
        """(row, head) pairs of a group, the N of its WGMMA."""
        return self.rows * self.heads

    @property
    def lanes_of_row(self) -> int:
        """Lanes of a quad that share the heads of a row."""
        return 1 if self.rows % 4 == 0 else 2 if self.rows % 2 == 0 else 4

    @property
    def threads(self) -> int:
        """Of a CTA: a math warpgroup for each worker, and one of producer and fill warps."""
        return 128 * self.workers + 128

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of a math warpgroup, and of the other warps (setmaxnreg); zeros: all stay as they start."""
        moved = {(2, 2): (88, 64), (1, 2): (192, 64), (2, 1): (216, 72), (3, 1): (144, 80)}
        if self.fp4:
            moved[2, 2] = 96, 48
        return moved.get((self.workers, self.ctas_per_sm), (0, 0))

    @property
    def row_bytes(self) -> int:
        """Of a key in the cache."""
        return self.head_dim // 2 if self.fp4 else self.head_dim

    @property
    def scales_in_load(self) -> bool:
        """One load brings a page with its scales."""
        return self.page == TILE_KEYS

    @property
    def q_box(self) -> tuple[int, ...]:
        """TMA box of q: channels; heads that lie side by side; rows; groups of such heads; sequences."""
        return self.head_dim, 2 * self.lanes_of_row, 4 // self.lanes_of_row, self.heads // self.lanes_of_row // 2, 1

    @property
    def k_box(self) -> tuple[int, ...]:
        """TMA box of the cache: channels; keys, and the rows that their scales fill; pages. Of fp4 keys, bytes that
        are copied as they lie."""
        keys = min(self.page, TILE_KEYS)
        return self.row_bytes, keys + (4 * keys // self.row_bytes if self.scales_in_load else 0), 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, as ``struct Shared`` of paged_geometry.cuh lays it out."""
        q = _up(self.groups * self.pairs * self.head_dim, 1024)
        k = _up(TILE_KEYS * (self.row_bytes + 4), 1 if self.fp4 else 1024)
        weights = 4 * self.groups * _up(self.pairs, 16)
        segment = 4 * (3 + self.next_n)
        worker = self.q_stages * (q + weights) + self.k_stages * k + 32 * 32
        worker = _up(worker + self.q_stages * segment, 8) + 16 * (self.q_stages + self.k_stages)
        other = _up(4 * (_NEG_INF + 4 * self.workers + _PREFIX + 1), 8) + 8 * _DEPTHS
        return _up(self.workers * _up(worker, 1024) + other, 1024)

    @property
    def shared_limit(self) -> int:
        """What a CTA may ask for and leave room for the others of its multiprocessor."""
        return min(SHARED_LIMIT, _SHARED_OF_SM // self.ctas_per_sm - 1024)

    def macros(self) -> dict[str, str | int]:
        """What the source is compiled with."""
        math_registers, other_registers = self.registers
        return {
            "HEADS": self.heads,
            "HEAD_DIM": self.head_dim,
            "NEXT_N": self.next_n,
            "PAGE": self.page,
            "FP4": int(self.fp4),
            "UE8M0": int(self.ue8m0),
            "CLEAN": int(self.form == "clean"),
            "OUT_BF16": int(self.out == "bf16"),
            "GROUP_ROWS": self.rows,
            "WORKERS": self.workers,
            "CTAS_PER_SM": self.ctas_per_sm,
            "K_STAGES": self.k_stages,
            "Q_STAGES": self.q_stages,
            "MATH_REGISTERS": math_registers,
            "OTHER_REGISTERS": other_registers,
            "Q_BOX": ",".join(map(str, self.q_box)),
            "K_BOX": ",".join(map(str, self.k_box)),
            "SHARED_BYTES": self.shared_bytes,
            "SHARED_LIMIT": self.shared_limit,
            "KERNEL_NAME": self.name,
        }


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def heuristic(problem: PagedMqaLogitsProblem, arch: Arch) -> PagedConfig:
    """By what a tile is multiplied with, and how many bytes of keys there may be."""
    heads, next_n = problem.heads, problem.next_n
    groups = -(-next_n // max(1, (MAX_FP4_PAIRS if problem.layout.is_fp4 else MAX_PAIRS) // heads))
    return of_shape(problem, arch, -(-next_n // groups))


def of_shape(
    problem: PagedMqaLogitsProblem, arch: Arch, rows: int, workers: int = 0, ctas_per_sm: int = 0, k_stages: int = 0
) -> PagedConfig:
    """The configuration with ``rows`` rows a product; zeros are chosen by it, stages by what shared memory leaves."""
    pairs = rows * problem.heads
    config = PagedConfig(
        problem.heads, problem.head_dim, problem.next_n, problem.layout.page, problem.layout.scales == "ue8m0",
        problem.form, "f32" if problem.out_dtype is torch.float32 else "bf16", arch.units, rows,
        fp4=problem.layout.is_fp4,
    )  # fmt: skip
    if workers == 0:
        # Up to 64 columns there are registers for four workers of a multiprocessor, up to 128 for three.
        workers, ctas_per_sm = (2, 2) if pairs <= 64 else (3, 1) if pairs <= 128 else (2, 1)
        if config.fp4:
            # Keys lie beside the products, of which two fit three workers up to 64 columns. Beyond, one group of few
            # rows is better off with three workers, others with two products.
            workers, ctas_per_sm = (3 if pairs <= 64 or (config.groups == 1 and rows <= 3) else 2), 1
    if k_stages == 0:
        most = {(2, 2): 4 if pairs < 64 else 3, (3, 1): 3}.get((workers, ctas_per_sm), 5)
        k_stages = most * (128 // problem.head_dim) if not config.fp4 else 8
    shapes = [(workers, ctas_per_sm, k_stages, 2)]
    if config.fp4:
        shapes.append((workers, ctas_per_sm, k_stages, 1))
    shapes += [(count, 1, 8 if config.fp4 else 5, q) for count in (2, 1) for q in (2, 1)]
    for count, ctas, most, q_stages in shapes:
        least = 4 if config.fp4 else 3 if ctas > 1 else 2
        for stages in range(most, 1, -1):
            found = replace(config, workers=count, ctas_per_sm=ctas, k_stages=stages, q_stages=q_stages)
            if found.shared_bytes <= found.shared_limit and stages >= least:
                return found
    raise AssertionError(f"{problem}: no stages fit")


def neighbours(problem: PagedMqaLogitsProblem, arch: Arch) -> list[PagedConfig]:
    """What a tuning run measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    pairs = chosen.pairs
    shapes = [(2, 2, 3), (2, 2, 4), (1, 2, 6), (1, 2, 8)] if pairs <= 64 else []
    shapes += [(1, 2, 6), (1, 2, 8), (3, 1, 4), (2, 1, 6)] if 64 < pairs <= 128 else []
    shapes += [(2, 1, 3), (2, 1, 4)] if pairs > 128 else []
    if chosen.fp4:
        shapes = [(3, 1, 5), (3, 1, 12), (2, 1, 12)] if pairs <= 64 else [(2, 1, 8), (2, 1, 5)]
        shapes += [(3, 1, 5), (3, 1, 8)] if pairs > 64 and chosen.rows <= 3 else []
        shapes += [(2, 2, 6), (2, 2, 8)] if pairs <= 32 else []
    others = [of_shape(problem, arch, chosen.rows, *shape) for shape in shapes]
    if chosen.groups * chosen.rows >= 2 and chosen.rows > 1:
        others.append(of_shape(problem, arch, -(-chosen.rows // 2)))
    if (more := replace(chosen, q_stages=chosen.q_stages + 1)).shared_bytes <= more.shared_limit:
        others.append(more)
    return [chosen, *(config for config in dict.fromkeys(others) if config != chosen)]
