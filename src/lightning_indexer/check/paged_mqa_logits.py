"""Paged decode logits against the reference: cases, and a judge.

Results are poisoned and fenced, so that a position that was not written and a write outside show. Entries of the block
table behind a row's last page are garbage, blocks that no row sees hold NaN, and so do the places of a row's last page
behind its length; repeats are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.check.guarded import GuardedOutput
from lightning_indexer.check.suite import CaseSuite
from lightning_indexer.check.verify import Finding
from lightning_indexer.check.wrong import Wrong
from lightning_indexer.fp4 import BLOCK, quantize_fp4
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.cache_layout import CacheLayout, Order, Scales
from lightning_indexer.problems.mqa_logits import MAX_DIFF
from lightning_indexer.problems.paged_mqa_logits import (
    OPERATION,
    PagedMqaLogitsCall,
    PagedMqaLogitsProblem,
    reference_paged_logits,
    row_lengths,
)

LENGTHS = ("ragged", "equal", "zeros", "one", "page ends", "past the end", "rows")
REPEATS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        batch, next_n, heads, head_dim, width: B, next_n, H, D and max_context_len.
        page, order, scales, dtype: of the cache's layout; ``dtype`` is q's too.
        lengths: what context_lens holds, one of ``LENGTHS``; ``"rows"`` are a row's own, [B, next_n].
        out_dtype, clean: the call's options.
        ragged: B tokens of fewer sequences, by ``indices``.
        gap: bytes between two blocks; not a multiple of 16, blocks are not aligned.
        fp4: the cache is MXFP4, and ``dtype`` q's alone.
        seed: of what is random.
    """

    batch: int
    next_n: int
    heads: int
    head_dim: int
    width: int
    page: int = 64
    order: Order = "flat"
    scales: Scales = "float32"
    dtype: torch.dtype = torch.float8_e4m3fn
    lengths: str = "ragged"
    out_dtype: torch.dtype = torch.float32
    clean: bool = True
    ragged: bool = False
    gap: int = 0
    fp4: bool = False
    seed: int = 0

    def __str__(self) -> str:
        shape = f"B={self.batch} next_n={self.next_n} H={self.heads} W={self.width}"
        dtype = str(self.out_dtype).removeprefix("torch.")
        options = f"{'clean' if self.clean else 'noclean'} {dtype}{' by indices' if self.ragged else ''}"
        return f"{shape} {self.layout} gap {self.gap}, {self.lengths} lengths, {options}"

    @property
    def layout(self) -> CacheLayout:
        if self.fp4:
            return CacheLayout.fp4(self.page, self.head_dim)
        return CacheLayout(self.page, self.head_dim, self.order, self.scales, self.dtype)

    @property
    def max_blocks(self) -> int:
        return -(-self.width // self.page)

    @property
    def problem(self) -> PagedMqaLogitsProblem:
        """The facts of the call."""
        apart = self.layout.block_bytes + self.gap
        return PagedMqaLogitsProblem(
            self.batch, self.next_n, self.width, self.heads, self.head_dim, self.layout, self.max_blocks, self.dtype,
            self.out_dtype, self.clean, self.lengths == "rows" and self.next_n > 1, self.ragged, apart % 16 == 0,
        )  # fmt: skip


def cases(full: bool) -> list[Case]:
    """The sweep of ``verify``; not ``full``: the same kinds at sizes for a CPU or an interpreter."""
    width = 5000 if full else 300
    batch = 37 if full else 5
    found = [Case(batch, 2, 32, 128, width, lengths=lengths) for lengths in LENGTHS]
    found += [Case(batch, next_n, 32, 128, width, lengths="rows") for next_n in (1, 2, 3, 4, 6, 8)]
    found += [Case(3, next_n, 64, 64, width, clean=False) for next_n in (1, 3, 4, 5, 8)]
    found += [Case(3, 1, heads, head_dim, width) for heads in (8, 16, 32, 64, 128) for head_dim in (32, 64, 128)]
    found += [Case(3, 8, heads, 128, width, lengths="rows") for heads in ((8, 16, 64, 128) if full else (8, 128))]
    for page in (16, 32, 64, 128):
        found += [
            Case(3, 2, 16, 64, width, page, order, lengths=lengths)
            for order in ("flat", "preshuffled")
            for lengths in ("ragged", "page ends")
        ]
    found += [Case(3, 1, 32, 128, width, 1, gap=12), Case(2, 1, 32, 128, width, 48, "preshuffled")]
    found += [Case(3, 2, 32, 128, width, scales=scales) for scales in ("power of two", "ue8m0")]
    found += [
        Case(3, 2, 32, 128, width, out_dtype=torch.bfloat16, clean=clean, lengths="rows") for clean in (True, False)
    ]
    found += [Case(3, 2, 32, 128, width, gap=gap) for gap in (4, 256)]
    found += [Case(7, next_n, 32, 128, width, ragged=True, lengths=lengths) for next_n, lengths in _RAGGED]
    found += [Case(3, 2, heads, 128, width, lengths="rows", fp4=True) for heads in (8, 16, 32, 64, 128)]
    found += [Case(3, 1, 32, 128, width, page, fp4=True, gap=gap) for page in (16, 64, 128) for gap in (0, 4)]
    found += [Case(7, 1, 32, 128, width, fp4=True, ragged=True, clean=False, out_dtype=torch.bfloat16)]
    found += [Case(0, 2, 32, 128, width), Case(2, 1, 32, 128, 1), Case(1, 1, 64, 128, 3 * width)]
    if full:
        found += [Case(size, 1, 64, 128, 2048) for size in (1, 2, 3, 16, 64, 256, 1024, 4096)]
        found += [Case(64, next_n, heads, 128, 32768) for next_n, heads in ((1, 64), (2, 32), (4, 64), (6, 32))]
        found += [Case(1, 1, 64, 128, 131072, lengths="equal"), Case(33, 1, 16, 128, 65536, lengths="equal")]
    return found


_RAGGED = ((1, "ragged"), (1, "zeros"), (2, "rows"))


def simulated_cases(dtype: torch.dtype) -> list[Case]:
    """Few small cases of every kind of path, for kernels that run in the simulator."""
    fn = torch.float8_e4m3fn
    return [
        Case(2, 1, 32, 128, 150, dtype=dtype),
        Case(2, 2, 16, 64, 150, 16, "preshuffled", dtype=dtype, lengths="rows"),
        Case(2, 3, 8, 32, 150, 64, "preshuffled", "ue8m0", dtype=dtype, clean=False),
        Case(3, 1, 64, 128, 70, 32, dtype=fn, lengths="page ends", out_dtype=torch.bfloat16),
        Case(3, 1, 32, 64, 70, 1, dtype=dtype, gap=12, ragged=True),
        Case(1, 1, 32, 128, 1200, 64, "preshuffled", dtype=fn, lengths="zeros"),
        Case(2, 2, 16, 128, 150, dtype=dtype, fp4=True, lengths="rows"),
        Case(1, 1, 32, 128, 100, 128, dtype=fn, fp4=True, gap=4),
    ]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    indices: torch.Tensor | None


def make_lengths(case: Case, generator: torch.Generator) -> torch.Tensor:
    """int32 [B], or [B, next_n] with strides that are not contiguous, on the CPU."""
    batch, width, page = case.batch, case.width, case.page
    random = torch.randint(0, width + 1, (batch,), generator=generator)
    if batch and case.lengths == "ragged":
        random[-1] = width
    lengths = {
        "ragged": random,
        "equal": torch.full((batch,), width),
        "zeros": random * (torch.arange(batch) % 2),
        "one": torch.ones(batch, dtype=torch.int64),
        "page ends": ((random // page).clamp(min=1) * page + torch.arange(batch) % 3 - 1).clamp(0, width),
        "past the end": random + width // 2,
        "rows": random,
    }[case.lengths]
    if case.lengths != "rows" or case.next_n == 1:
        return lengths.int()
    # Any order within a b; the strides of a transposed tensor.
    step = torch.tensor([0, 3, 1, -40, 2, -1, page, -page])[: case.next_n]
    return (lengths[:, None] + step).clamp(-2, width + 3).int().t().contiguous().t()


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """The tensors of a case, the same at each time: permuted blocks, garbage behind what is seen."""
    generator = torch.Generator("cpu").manual_seed(case.seed + 7919 * case.width + case.heads)
    layout, batch, blocks = case.layout, case.batch, case.max_blocks
    sequences = max(1, -(-batch // 3)) if case.ragged else batch
    lengths = make_lengths(case, generator)
    indices = (torch.arange(batch) * 5 // 3 % sequences).int() if case.ragged else None

    pool = sequences * blocks + 2
    k = torch.randn((pool, case.page, case.head_dim), generator=generator)
    k.view(-1)[::5] = -0.0
    scale = torch.rand((pool, case.page), generator=generator) + 0.1
    scale = torch.exp2(torch.log2(scale).round()) if case.scales != "float32" else scale
    if case.fp4:
        # Channels of sizes that take other exponents, 14 apart at most.
        sizes = torch.randint(-5, 6, (pool, case.page, case.head_dim // BLOCK), generator=generator)
        values, scale_bytes = quantize_fp4(k * torch.exp2(sizes.float()).repeat_interleave(BLOCK, dim=-1))
    else:
        values = k.to(case.dtype).view(torch.uint8)
    tables = torch.randperm(pool - 2, generator=generator).view(sequences, blocks) + 1
    # What no row sees: NaN values and NaN scales; entries that lie far outside of the pool.
    longest = row_lengths(lengths, case.next_n, case.width).amax(dim=1)
    seen = torch.zeros(sequences, dtype=torch.int64)
    seen.scatter_reduce_(0, indices.long() if indices is not None else torch.arange(batch), longest, "amax")
    position = torch.arange(blocks * case.page).view(blocks, case.page)
    unseen = torch.ones((pool, case.page), dtype=torch.bool)
    unseen[tables] = position >= seen[:, None, None]
    if case.fp4:
        scale_bytes[unseen] = 0xFF
    else:
        values[unseen] = 0x80 if case.dtype is torch.float8_e4m3fnuz else 0x7F
    if case.scales == "float32":
        scale[unseen] = float("nan")
    garbage = torch.tensor([-1, 2**31 - 1, -(2**31), 10**9])
    behind = torch.arange(blocks) * case.page >= seen[:, None]
    tables = torch.where(behind, garbage[torch.arange(blocks) % 4], tables)
    if indices is not None:
        indices[longest == 0] = -7

    cache = layout.pack(values, scale_bytes) if case.fp4 else layout.pack(values.view(case.dtype), scale)
    apart = layout.block_bytes + case.gap
    wide = torch.full((pool, apart), 0xA5, dtype=torch.uint8)
    wide[:, : layout.block_bytes] = cache.view(pool, -1)
    kv_cache = wide.to(device).as_strided(cache.shape, (apart, layout.row_bytes + 4, layout.row_bytes + 4, 1))
    q = torch.randn((batch, case.next_n, case.heads, case.head_dim), generator=generator)
    q.view(-1)[::7] = -0.0
    weights = torch.randn((batch * case.next_n, case.heads + 3), generator=generator)[:, : case.heads]
    wide_tables = torch.full((sequences, blocks + 5), -1, dtype=torch.int32)
    wide_tables[:, :blocks] = tables.int()
    return Inputs(
        q.to(case.dtype).to(device), kv_cache, weights.to(device), lengths.to(device),
        wide_tables.to(device)[:, :blocks], indices.to(device) if indices is not None else None,
    )  # fmt: skip


def call_of(case: Case, inputs: Inputs, out: torch.Tensor) -> PagedMqaLogitsCall:
    """The call that a backend is given."""
    given = (inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables)
    return PagedMqaLogitsCall(*given, case.width, case.layout, inputs.indices, case.clean, case.out_dtype, out)


Call = Callable[[Case, Inputs, torch.Tensor], None]


def call_backend(backend: str) -> Call:
    """The public call on that backend, into a given result."""

    def call(case: Case, inputs: Inputs, out: torch.Tensor) -> None:
        fp8_paged_mqa_logits(
            inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, case.width,
            layout=case.layout, indices=inputs.indices, clean_logits=case.clean, out_dtype=case.out_dtype, out=out,
            backend=backend,
        )  # fmt: skip

    return call


def run_case(
    case: Case, backend: str, device: torch.device, *, repeats: int = 0, call: Call | None = None,
    wrong: Wrong | None = None,
) -> list[str]:  # fmt: skip
    """Runs one case and gives what is wrong with its result, nothing where it passes.

    Args:
        repeats: how often to run it again, bitwise the same each time.
        call: what to run in place of the public call on ``backend``.
        wrong: takes where it is wrong.
    """
    wrong = wrong or Wrong()
    call = call or call_backend(backend)
    inputs = make_inputs(case, device)
    expected = reference_paged_logits(
        inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, case.width,
        layout=case.layout, indices=inputs.indices,
    )  # fmt: skip
    lengths = row_lengths(inputs.context_lens, case.next_n, case.width).reshape(-1, 1)
    inside = torch.arange(case.width, device=device) < lengths
    guarded = GuardedOutput(case.batch * case.next_n, case.width, case.out_dtype, device)
    call(case, inputs, guarded.view)
    faults = [] if guarded.intact() else ["wrote outside of the result"]
    unwritten = guarded.unwritten() if case.clean else guarded.unwritten() & inside
    if count := int(unwritten.sum()):
        wrong.note(unwritten)
        faults.append(f"{count} positions never written")
    faults += compare(case, guarded.view, expected, inside, wrong)
    for _ in range(repeats):
        again = GuardedOutput(case.batch * case.next_n, case.width, case.out_dtype, device)
        call(case, inputs, again.view)
        bits = torch.int32 if case.out_dtype is torch.float32 else torch.int16
        if not torch.equal(again.view.view(bits), guarded.view.view(bits)):
            faults.append("a repeat differs")
            break
    return faults


def compare(
    case: Case, found: torch.Tensor, expected: torch.Tensor, inside: torch.Tensor, wrong: Wrong | None = None
) -> list[str]:
    """How a result differs from the reference's; ``wrong`` takes where."""
    faults = []
    wrong = wrong or Wrong()
    if case.clean and (count := int((misplaced := torch.isneginf(found) == inside).sum())):
        wrong.note(misplaced)
        faults.append(f"-inf at {count} wrong positions")
    logits, right = found.float()[inside], expected[inside]
    if bool(logits.isnan().any()):
        wrong.note(found.isnan() & inside)
        faults.append(f"{int(logits.isnan().sum())} NaN inside")
    elif logits.numel():
        if bool((torch.signbit(logits) & (logits == 0)).any()):
            faults.append("-0.0 inside")
        # Hopper's tensor cores keep about 14 bits of a sum.
        step = 2**-7 if case.out_dtype is torch.bfloat16 else 2e-3
        off = (logits - right).abs() > step * right.abs() + 1e-3 * right.abs().amax()
        if count := int(off.sum()):
            wrong.note(torch.zeros_like(inside).masked_scatter_(inside, off))
            faults.append(f"{count} of {logits.numel()} logits are off")
        if (diff := calc_diff(found.float(), expected, inside)) >= MAX_DIFF[case.out_dtype]:
            faults.append(f"calc_diff {diff:.2e}, allowed {MAX_DIFF[case.out_dtype]:.0e}")
    return faults


class PagedMqaLogitsSuite(CaseSuite):
    """The suite of ``fp8_paged_mqa_logits``."""

    operation = OPERATION
    sweep, few, run = staticmethod(cases), staticmethod(simulated_cases), staticmethod(run_case)

    def bytes_needed(self, case: Case) -> int:
        # The pool and what it is packed from, the reference's keys and scores, the result.
        rows, keys = case.batch * case.next_n, case.batch * case.width
        return 16 * keys * case.head_dim + 24 * rows * case.width + 2**30

    def check(self, case: Case, backend: str, device: torch.device, *, repeats: int) -> Finding:
        wrong = Wrong()
        faults = run_case(case, backend, device, repeats=repeats, wrong=wrong)
        return Finding(tuple(faults), dtype=case.out_dtype, wrong=wrong.positions())
