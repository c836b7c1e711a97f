"""Keys gathered out of a paged cache against the reference, in every bit: cases, and a judge.

Results are poisoned and fenced. Rows behind the last key may hold anything but are not written past N; entries of the
block table behind a sequence's last page are garbage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_indexer.calls.gather_k_cache import gather_k_cache
from lightning_indexer.check.cache import blocks_of_4_gib, layouts, pool
from lightning_indexer.check.suite import CaseSuite
from lightning_indexer.fp4 import FP4
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.gather_k_cache import (
    OPERATION,
    GatherCall,
    GatherProblem,
    compressed,
    difference,
    reference_gather,
    results_of,
)

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
LENGTHS = ("ragged", "equal", "none", "one", "page ends")
_POISON, _GUARD = 0xA7, 256

FLAT = CacheLayout()


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        batch, width: sequences, and the most keys of one.
        layout: of the cache.
        dtype: of the result; None: the call's default.
        lengths: of the sequences, one of ``LENGTHS``.
        ratio: compress_ratio.
        spare: rows of the result behind the last key; less than 0: keys that are left out.
        gap: bytes between two blocks.
        far: the pool is larger than 4 GiB, and all keys lie behind that.
        seed: of what is random.
    """

    batch: int
    width: int
    layout: CacheLayout = FLAT
    dtype: torch.dtype | None = None
    lengths: str = "ragged"
    ratio: int = 1
    spare: int = 9
    gap: int = 0
    far: bool = False
    seed: int = 0

    def __str__(self) -> str:
        options = f"{self.lengths} lengths, ratio {self.ratio}, {self.spare} rows to spare, gap {self.gap}"
        dtype = "" if self.dtype is None else f" as {str(self.dtype).removeprefix('torch.')}"
        return f"B={self.batch} W={self.width} {self.layout}{dtype}, {options}{', far' if self.far else ''}"

    @property
    def max_blocks(self) -> int:
        return -(-self.width // self.layout.page)

    def tokens(self) -> list[int]:
        """Of each sequence."""
        generator = torch.Generator("cpu").manual_seed(self.seed + self.width)
        random = torch.randint(0, self.width + 1, (self.batch,), generator=generator)
        page = self.layout.page
        keys = {
            "ragged": random * (torch.arange(self.batch) % 5 != 1),
            "equal": torch.full((self.batch,), self.width),
            "none": random * 0,
            "one": random * 0 + 1,
            "page ends": ((random // page) * page + torch.arange(self.batch) % 3 - 1).clamp(0, self.width),
        }[self.lengths]
        # A compressed sequence's last tokens may make no key.
        return [int(n) * self.ratio + (b % self.ratio) for b, n in enumerate(keys)]

    @property
    def keys(self) -> int:
        """N."""
        return max(0, sum(n // self.ratio for n in self.tokens()) + self.spare)

    @property
    def problem(self) -> GatherProblem:
        """The facts of the call."""
        dtype = self.dtype or (FN if self.layout.is_fp4 else self.layout.dtype)
        return GatherProblem(self.keys, self.batch, self.layout, self.max_blocks, dtype)

    @property
    def blocks(self) -> int:
        first = blocks_of_4_gib(self.layout, self.gap) if self.far else 0
        return first + self.batch * self.max_blocks + 1


def cases(full: bool) -> list[Case]:
    """The sweep of ``verify``; not ``full``: the same kinds at sizes for a CPU or an interpreter."""
    width = 5000 if full else 150
    found = [Case(3, width, layout, gap=gap) for layout in layouts() for gap in (0, 12)]
    found += [Case(3, width, layout) for layout in layouts(fnuz=True)[:-2]]
    found += [Case(3, width, CacheLayout.fp4(64), dtype) for dtype in (FN, FNUZ, FP4)]
    found += [Case(9, width, layout, lengths=lengths) for layout in (layouts()[0], layouts()[4]) for lengths in LENGTHS]
    found += [Case(batch, width // 3) for batch in (0, 1, 2, 4, 5, 8, 33)]
    found += [Case(4, width, ratio=ratio, lengths=lengths) for ratio in (4, 128) for lengths in ("ragged", "one")]
    found += [Case(3, width, spare=spare) for spare in (0, 500, -7, -(10**6))]
    found += [Case(3, width, CacheLayout(64, dim)) for dim in (32, 64)]
    if full:
        found += [Case(4, 32768, layout, lengths="equal") for layout in layouts()]
        found += [Case(2, 700, layout, far=True) for layout in (layouts()[0], layouts()[3], layouts()[-2])]
        found += [Case(2, 700, CacheLayout(1), far=True), Case(700, 300)]
    return found


def simulated_cases(dtype: torch.dtype) -> list[Case]:
    """Few small cases of every kind of path, for kernels that run in the simulator."""
    return [
        Case(5, 40, CacheLayout(16, 128, "preshuffled", "ue8m0", dtype)),
        Case(3, 40, CacheLayout(64, 128), gap=12, ratio=4),
        Case(2, 40, CacheLayout(1, 128, dtype=dtype)),
        Case(2, 40, CacheLayout.fp4(64), dtype),
        Case(2, 20, CacheLayout.fp4(64), FN if dtype is FNUZ else FNUZ),
        Case(2, 20, CacheLayout.fp4(64), FP4),
    ]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case."""

    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seq_lens: torch.Tensor


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """The tensors of a case, the same at each time: random bytes in permuted blocks."""
    layout = case.layout
    generator = torch.Generator("cpu").manual_seed(case.seed + case.width)
    count = case.batch * case.max_blocks
    first = case.blocks - 1 - count
    flat = torch.randint(0, 256, (count, layout.block_bytes), generator=generator, dtype=torch.uint8)
    scales = flat[:, layout.value_bytes :]
    if layout.is_fp4:
        # Blocks that lie anywhere apart, far apart, near the ends of the range, NaN.
        scales[0::4] = scales[0::4] % 15 + 110
        scales[1::4] = scales[1::4] % 40 + 100
    elif layout.scales == "ue8m0":
        scales[:] = scales[:, ::4].repeat_interleave(4, dim=1)
    if layout.is_fp4:
        flat[:, : layout.value_bytes : 48] = 0x80  # -0, and blocks of zeros
        flat[2::5, 16:32] = 0
        flat[3::5, : layout.row_bytes] = 0
    buffer, view = pool(layout, case.blocks, case.gap, device, fill=0x55)
    buffer.view(case.blocks, -1)[first : first + count, : layout.block_bytes] = flat.to(device)
    tables = torch.randperm(count, generator=generator).view(case.batch, case.max_blocks) + first
    tokens = torch.tensor(case.tokens(), dtype=torch.int64)
    behind = torch.arange(case.max_blocks) * layout.page >= (tokens // case.ratio)[:, None]
    wide = torch.full((case.batch, case.max_blocks + 3), -1, dtype=torch.int32)
    wide[:, : case.max_blocks] = torch.where(behind, 10**9, tables).int()
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), tokens.cumsum(0))).int()
    return Inputs(view, wide.to(device)[:, : case.max_blocks], cu.to(device))


Call = Callable[[Case, Inputs, "tuple[torch.Tensor, torch.Tensor]"], None]


def call_backend(backend: str) -> Call:
    """The public call on that backend, into given results."""

    def call(case: Case, inputs: Inputs, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        gather_k_cache(
            inputs.kv_cache, inputs.block_tables, inputs.cu_seq_lens, case.keys, layout=case.layout,
            compress_ratio=case.ratio, dtype=case.dtype, out=out, backend=backend,
        )  # fmt: skip

    return call


def call_of(case: Case, inputs: Inputs, out: tuple[torch.Tensor, torch.Tensor]) -> GatherCall:
    """The call that a backend is given."""
    cu_seq_lens = compressed(inputs.cu_seq_lens, case.ratio)
    dtype = case.problem.dtype
    return GatherCall(inputs.kv_cache, inputs.block_tables, cu_seq_lens, case.keys, case.layout, 1, dtype, out)


class _Guarded:
    """Bytes of a result between guards."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        size = dtype.itemsize
        for length in shape:
            size *= length
        self.size = size
        self.bytes = torch.full((2 * _GUARD + size,), _POISON, dtype=torch.uint8, device=device)
        self.view = self.bytes[_GUARD : _GUARD + size].view(dtype).view(shape)

    def intact(self) -> bool:
        return bool((self.bytes[:_GUARD] == _POISON).all() and (self.bytes[_GUARD + self.size :] == _POISON).all())


def run_case(
    case: Case, backend: str, device: torch.device, *, repeats: int = 0, call: Call | None = None
) -> list[str]:
    """Runs one case and gives what is wrong with its results, nothing where it passes.

    Args:
        repeats: how often to run it again, bitwise the same each time.
        call: what to run in place of the public call on ``backend``.
    """
    call = call or call_backend(backend)
    inputs = make_inputs(case, device)
    dtype = case.problem.dtype
    expected = reference_gather(
        inputs.kv_cache, inputs.block_tables, inputs.cu_seq_lens, case.layout, dtype, case.ratio
    )
    rows = min(case.keys, expected[1].shape[0])
    first = None
    faults: list[str] = []
    shape = GatherCall(inputs.kv_cache, inputs.block_tables, inputs.cu_seq_lens, case.keys, case.layout, 1, dtype)
    for number in range(repeats + 1):
        guarded = [_Guarded(*result, device) for result in results_of(shape)]
        out = (guarded[0].view, guarded[1].view)
        call(case, inputs, out)
        faults += [] if all(one.intact() for one in guarded) else ["wrote outside of a result"]
        found = out[0][:rows], out[1][:rows]
        if number == 0:
            first = found
            wrong = _difference(found, (expected[0][:rows], expected[1][:rows]))
            faults += [] if wrong is None else [wrong]
        elif difference(found, first or found) is not None:
            faults.append("a repeat differs")
        if faults:
            break
    return faults


def _difference(found: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> str | None:
    """As ``difference``; a NaN scale is any NaN, and the values of its key mean nothing."""
    if right[1].dtype is not torch.float32:
        return difference(found, right)
    broken = right[1].isnan()
    if not torch.equal(found[1].isnan(), broken):
        return "scales are NaN at other keys"
    return difference((found[0][~broken], found[1][~broken]), (right[0][~broken], right[1][~broken]))


class GatherKCacheSuite(CaseSuite):
    """The suite of ``gather_k_cache``."""

    operation = OPERATION
    sweep, few, run = staticmethod(cases), staticmethod(simulated_cases), staticmethod(run_case)

    def bytes_needed(self, case: Case) -> int:
        size = case.blocks * (case.layout.block_bytes + case.gap)
        return 2 * size + 40 * case.batch * case.width * case.layout.head_dim + 2**28
