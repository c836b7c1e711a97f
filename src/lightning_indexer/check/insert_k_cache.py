"""Keys written into a paged cache against the reference: cases, and a judge.

What a key is only quantised to is the same in every bit; behind LayerNorm, RoPE or a rotation it is within a step.
Blocks lie apart in a larger buffer, and no byte that is not a key's changes. Every layout is also read back: through
paged logits, and through a gather and the prefill logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_indexer.calls.gather_k_cache import gather_k_cache
from lightning_indexer.calls.insert_k_cache import insert_k_cache
from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.check.cache import blocks_of_4_gib, layouts, pool
from lightning_indexer.check.suite import CaseSuite
from lightning_indexer.fp4 import dequantize_fp4, quantize_fp4
from lightning_indexer.fp8 import quantize_q, quantize_rows
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.insert_k_cache import (
    OPERATION,
    InsertCall,
    InsertProblem,
    difference,
    example_steps,
    reference_insert,
)
from lightning_indexer.problems.mqa_logits import MAX_DIFF, reference_logits
from lightning_indexer.problems.transform import Steps, Transform, transformed
from lightning_indexer.selection import policy

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
SLOTS = ("shuffled", "some skipped", "all skipped", "in order", "past the end")
PLAIN = Transform()
NORM = Transform(norm=True, bias=True)
# What engines fuse: DeepSeek-V3.2 and GLM-5, SGLang's rotation, DeepSeek-V4, which turns the last channels.
TRANSFORMS = (
    PLAIN, NORM, Transform(True, True, "first", 64), Transform(True, True, "first", 64, True),
    Transform(True, False, "last", 64, True, True), Transform(False, False, "last", 64, False, True),
    Transform(False, False, "first", 128), Transform(hadamard=True),
)  # fmt: skip
_GUARD = 64

FLAT = CacheLayout()


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        tokens, layout, transform, dtype: of the problem.
        slots: which places the keys go to, one of ``SLOTS``.
        gap: bytes between two blocks.
        strided: k is a slice of wider rows.
        end_to_end: the cache is then scored, by each path.
        far: the pool is larger than 4 GiB, and all keys lie behind that.
        seed: of what is random.
    """

    tokens: int
    layout: CacheLayout = FLAT
    transform: Transform = PLAIN
    dtype: torch.dtype = torch.bfloat16
    slots: str = "some skipped"
    gap: int = 0
    strided: bool = True
    end_to_end: bool = False
    far: bool = False
    seed: int = 0

    def __str__(self) -> str:
        kind = "read back, " if self.end_to_end else ""
        options = f"{self.slots}, gap {self.gap}{', strided' if self.strided else ''}{', far' if self.far else ''}"
        return f"{kind}{self.problem}, {options}"

    @property
    def problem(self) -> InsertProblem:
        """The facts of the call."""
        return InsertProblem(self.tokens, self.layout.head_dim, self.layout, self.transform, self.dtype)

    @property
    def blocks(self) -> int:
        page = self.layout.page
        first = blocks_of_4_gib(self.layout, self.gap) if self.far else 0
        return first + -(-self.tokens // page) + 2


def cases(full: bool) -> list[Case]:
    """The sweep of ``verify``; not ``full``: the same kinds at sizes for a CPU or an interpreter."""
    tokens = 5003 if full else 67
    found = [Case(tokens, layout, gap=gap) for layout in layouts() for gap in (0, 12)]
    found += [Case(tokens, layout, dtype=torch.float32, slots="shuffled") for layout in layouts(fnuz=True)[:-2]]
    found += [Case(tokens, transform=transform, dtype=dtype) for transform in TRANSFORMS for dtype in _DTYPES]
    found += [Case(tokens, CacheLayout.fp4(64), transform) for transform in TRANSFORMS]
    found += [Case(tokens, CacheLayout(32, 128, "preshuffled", "ue8m0"), transform) for transform in TRANSFORMS]
    found += [Case(tokens, CacheLayout(64, dim), NORM._replace(rope="last", rope_dim=32)) for dim in (32, 64)]
    found += [Case(tokens, slots=slots, strided=strided) for slots in SLOTS for strided in (True, False)]
    found += [Case(count, layout) for count in (0, 1, 2, 31, 33) for layout in (CacheLayout(), CacheLayout.fp4(64))]
    found += [Case(tokens, layout, PLAIN, slots="shuffled", end_to_end=True) for layout in layouts()]
    found += [Case(tokens, CacheLayout(), TRANSFORMS[i], slots="shuffled", end_to_end=True) for i in (2, 4)]
    if full:
        found += [Case(size, transform=TRANSFORMS[2]) for size in (4096, 32768, 131072)]
        found += [Case(700, layout, TRANSFORMS[2], far=True) for layout in (layouts()[0], layouts()[3], layouts()[-2])]
        found += [Case(700, CacheLayout(1), far=True)]
    return found


_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def simulated_cases(dtype: torch.dtype) -> list[Case]:
    """Few small cases of every kind of path, for kernels that run in the simulator."""
    return [
        Case(37, CacheLayout(64, 128, dtype=dtype)),
        Case(21, CacheLayout(16, 128, "preshuffled", "ue8m0", dtype), TRANSFORMS[2], gap=12),
        Case(21, CacheLayout(1, 128, "flat", "power of two", dtype), TRANSFORMS[4], torch.float32),
        Case(21, CacheLayout(64, 128), TRANSFORMS[5], torch.float16, "past the end"),  # fn, on gfx942 too
        Case(21, CacheLayout.fp4(64), TRANSFORMS[2]),
        Case(21, CacheLayout.fp4(64), TRANSFORMS[4]),
    ]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case."""

    k: torch.Tensor
    slot_mapping: torch.Tensor
    steps: Steps


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """The tensors of a case, the same at each time: rows of all sizes, zeros of both signs, a row of NaN."""
    tokens, head_dim, page = case.tokens, case.layout.head_dim, case.layout.page
    generator = torch.Generator("cpu").manual_seed(case.seed + 31 * tokens + page)
    k = torch.randn((tokens, head_dim), generator=generator)
    if not case.end_to_end:
        k *= torch.exp2(torch.randint(-14, 9, (tokens, 1), generator=generator).float())
        k.view(-1)[::5] = -0.0
        k[3::7] = 0.0
        if case.transform == PLAIN and not case.layout.is_fp4:
            k[5:6, 3] = float("nan")
    wide = torch.full((tokens, head_dim + (40 if case.strided else 0)), 1e4, dtype=case.dtype, device=device)
    wide[:, :head_dim] = k.to(case.dtype).to(device)
    first, capacity = (case.blocks - (-(-tokens // page) + 2)) * page, case.blocks * page
    slots = torch.randperm(capacity - first, generator=generator)[:tokens] + first
    if case.slots in ("some skipped", "past the end"):
        slots[::3] = -1 if case.slots == "some skipped" else capacity + 5
        slots[1::11] = -(2**63) if case.slots == "some skipped" else 2**62
    elif case.slots == "all skipped":
        slots[:] = -1
    elif case.slots == "in order":
        slots = torch.arange(tokens) + first + 1
    steps = example_steps(case.transform, tokens, head_dim, device)
    return Inputs(wide[:, :head_dim], slots.to(device), steps)


def make_cache(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of bytes, and the cache in it, its blocks ``gap`` bytes apart."""
    return pool(case.layout, case.blocks, case.gap, device, fill=0x15, guard=_GUARD)


Call = Callable[[Case, Inputs, torch.Tensor], None]


def call_backend(backend: str) -> Call:
    """The public call on that backend."""

    def call(case: Case, inputs: Inputs, kv_cache: torch.Tensor) -> None:
        insert_k_cache(
            inputs.k, kv_cache, inputs.slot_mapping, layout=case.layout, **inputs.steps._asdict(), backend=backend
        )

    return call


def call_of(case: Case, inputs: Inputs, kv_cache: torch.Tensor) -> InsertCall:
    """The call that a backend is given."""
    return InsertCall(inputs.k, kv_cache, inputs.slot_mapping, case.layout, inputs.steps)


def run_case(
    case: Case, backend: str, device: torch.device, *, repeats: int = 0, call: Call | None = None
) -> list[str]:
    """Runs one case and gives what is wrong with the cache, nothing where it passes.

    Args:
        repeats: how often to run it again, bitwise the same each time.
        call: what to run in place of the public call on ``backend``.
    """
    call = call or call_backend(backend)
    inputs = make_inputs(case, device)
    buffer, cache = make_cache(case, device)
    call(case, inputs, cache)
    if case.far:
        faults = _far(case, inputs, cache)
    else:
        _, right = make_cache(case, device)
        reference_insert(inputs.k, right, inputs.slot_mapping, case.layout, inputs.steps)
        wrong = difference(case.problem, cache, right)
        faults = [wrong] if wrong is not None else []
        faults += _untouched(case, inputs, buffer, cache)
    for _ in range(repeats if not case.far else 0):
        again, view = make_cache(case, device)
        call(case, inputs, view)
        if not torch.equal(again, buffer):
            faults.append("a repeat differs")
            break
    if case.end_to_end:
        faults += read_back(case, inputs, cache, backend or None)
    return faults


def _untouched(case: Case, inputs: Inputs, buffer: torch.Tensor, cache: torch.Tensor) -> list[str]:
    """Bytes that belong to no key of the call hold what they held."""
    layout = case.layout
    written = torch.zeros_like(buffer, dtype=torch.bool)
    view = written.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    flat = view.as_strided((case.blocks, layout.block_bytes), (cache.stride(0), 1), cache.storage_offset())
    slots = inputs.slot_mapping
    slots = slots[(slots >= 0) & (slots < case.blocks * layout.page)]
    block, inner = slots // layout.page, slots % layout.page
    row = layout.row_bytes
    column = torch.arange(row, device=buffer.device)
    if layout.order == "preshuffled":
        place = (inner // 16 * 16 * row + inner % 16 * 16)[:, None] + column // 16 * 256 + column % 16
    else:
        place = inner[:, None] * row + column
    flat[block[:, None], place] = True
    scale = layout.value_bytes + inner[:, None] * 4 + torch.arange(4, device=buffer.device)
    flat[block[:, None], scale] = True
    changed = int(((buffer != 0x15) & ~written).sum())
    return [f"{changed} bytes changed that are no key's"] if changed else []


def _far(case: Case, inputs: Inputs, cache: torch.Tensor) -> list[str]:
    """As :func:`run_case` judges, of the blocks behind 4 GiB alone; none before them changed."""
    count = -(-case.tokens // case.layout.page) + 2
    first = case.blocks - count
    small = torch.full((count, *case.layout.block_shape), 0x15, dtype=torch.uint8, device=cache.device)
    slots = inputs.slot_mapping - first * case.layout.page
    slots = torch.where(inputs.slot_mapping < 0, -1, slots)
    reference_insert(inputs.k, small, slots, case.layout, inputs.steps)
    wrong = difference(case.problem, cache[first:], small)
    faults = [wrong] if wrong is not None else []
    step = 2**28 // case.layout.block_bytes
    if any(bool((cache[start : min(start + step, first)] != 0x15).any()) for start in range(0, first, step)):
        faults.append("blocks before the keys' changed")
    return faults


def read_back(case: Case, inputs: Inputs, cache: torch.Tensor, backend: str | None) -> list[str]:
    """Scores of the cache by paged decode, and by a gather and the prefill call, against those of the keys themselves.

    Every slot of the case is a place of its own. Of a cache that a backend for some layouts wrote, the library chooses
    the readers.
    """
    backend = backend if backend in (policy.PORTABLE, policy.FALLBACK) else None
    layout, device = case.layout, cache.device
    generator = torch.Generator("cpu").manual_seed(case.seed + 1)
    heads, page = 32, layout.page
    dtype = layout.dtype if not layout.is_fp4 else FN
    q = quantize_q(torch.randn((1, 1, heads, layout.head_dim), generator=generator)).to(dtype).to(device)
    weights = torch.randn((1, heads), generator=generator).to(device)
    # Keys went anywhere; here they are asked for in the order of their places.
    blocks = torch.arange(case.blocks, dtype=torch.int32, device=device)[None]
    width = case.blocks * page
    lengths = torch.tensor([width], dtype=torch.int32, device=device)
    keys = torch.zeros((width, layout.head_dim), device=device)
    x = transformed(inputs.k, inputs.steps)
    if layout.is_fp4:
        keys[inputs.slot_mapping] = dequantize_fp4(*quantize_fp4(x))
    else:
        values, scale = quantize_rows(x, layout.dtype, power_of_two=layout.scales != "float32")
        keys[inputs.slot_mapping] = values.float() * scale[:, None]
    zero, end = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, width))
    expected = reference_logits(q[0].float(), (keys, torch.ones(width, device=device)), weights, zero, end)
    there = torch.zeros(width, dtype=torch.bool, device=device)
    there[inputs.slot_mapping] = True
    faults = []
    found = {
        "paged logits": fp8_paged_mqa_logits(q, cache, weights, lengths, blocks, width, layout=layout, backend=backend)
    }
    k, kv_scale = gather_k_cache(
        cache, blocks, torch.tensor([0, width], dtype=torch.int32, device=device), width, layout=layout,
        backend=backend,
    )  # fmt: skip
    found["gather and prefill logits"] = fp8_mqa_logits(q[0], (k, kv_scale), weights, zero, end, backend=backend)
    for name, logits in found.items():
        if bool(logits[:, there].isnan().any()):
            faults.append(f"{name}: NaN")
        elif (diff := calc_diff(logits, expected, there[None])) >= MAX_DIFF[torch.float32]:
            faults.append(f"{name}: calc_diff {diff:.2e}, allowed {MAX_DIFF[torch.float32]:.0e}")
    return faults


class InsertKCacheSuite(CaseSuite):
    """The suite of ``insert_k_cache``."""

    operation = OPERATION
    sweep, few, run = staticmethod(cases), staticmethod(simulated_cases), staticmethod(run_case)

    def bytes_needed(self, case: Case) -> int:
        # Two caches, k in float32 some times over; a pool past 4 GiB and its comparison.
        size = case.blocks * (case.layout.block_bytes + case.gap)
        return 6 * size + 40 * case.tokens * case.layout.head_dim + 2**28
