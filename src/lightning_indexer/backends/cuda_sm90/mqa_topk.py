"""``fp8_mqa_topk`` for Hopper: scores that pass a gate are appended to lists, and the rows are selected from those.

A sample of the keys is scored first and gives each row its gate; the product of all keys then keeps what passes, and a
CTA a row selects from it. Where the counts do not show that the result is exact, one more kernel scores and selects the
row again. Nothing is read back to the host. Other calls go by row waves: :func:`gated` says which.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lightning_indexer import packages
from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90 import mqa_logits
from lightning_indexer.backends.cuda_sm90.config import KernelConfig
from lightning_indexer.backends.cuda_sm90.mqa_logits import MqaLogits
from lightning_indexer.backends.cuda_sm90.top_k import TopK
from lightning_indexer.backends.row_waves import RowWaves, Waves
from lightning_indexer.cuda import driver, nvrtc
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem, row_stride
from lightning_indexer.problems.mqa_topk import ALIGN_BYTES, MqaTopKCall, MqaTopKProblem

HEADS = (32, 64)
# A bitmap of a row's positions has to fit in a CTA, and a row's sample in the registers of one.
MAX_KEYS = 2**20
# Where the gate pays: below, two calls in waves whose scores stay in the cache do.
LEAST_KEYS = 16384
LEAST_SCORES = 2**25
# A list's keys are every 16th of 128: one that begins and ends inside of a row's window has so many more.
LIST_SLACK = 48
# CTAs of the product, which have a place of their own in the middle of a row block, beyond those that equal cuts make.
SPARE_PLACES = 16
INDEX_BASES = ("row", "absolute", "offset", "page")
SELECT_THREADS = 256
# struct SelectionRoom of selection.cuh and struct Block of mqa_topk_select.cuh; struct SelectionShared.
SELECT_STATIC, REDO_SELECTION = 8 * 1024, 24 * 1024
SHARED_OF_SM = 227 * 1024
VALUES_PER_LANE = 16


@dataclass(frozen=True, slots=True)
class GateConfig:
    """How one call goes through the gate.

    Attributes:
        product, redo: of the kernels that score; the sample is scored by ``fp8_mqa_logits``' own.
        stride: one of so many keys is in the sample.
        rank: the gate is the sampled score of this rank: about ``rank * stride`` candidates pass.
        room: candidates of a list, of which a row has one for each math warp.
        sampled: rows whose samples are scored at a time.
        wave: rows that are scored and selected from at a time, whole row blocks.
        places: of lists, one for each row block of a wave and the others for pieces in the middle of one.
        again: rows that are scored again at a time.
    """

    product: KernelConfig
    redo: KernelConfig
    sample: KernelConfig
    stride: int
    rank: int
    room: int
    sampled: int
    wave: int
    places: int
    again: int

    @property
    def lists(self) -> int:
        """Of a row and a piece of the product."""
        return 4 * self.product.workers

    @property
    def capacity(self) -> int:
        """Candidates of a row."""
        return self.lists * self.room

    @property
    def ungated(self) -> int:
        """Windows that are not longer need no gate."""
        return self.lists * (self.room - LIST_SLACK)

    def __str__(self) -> str:
        return (
            f"{self.product.name}, one key of {self.stride} sampled, {self.rank * self.stride} of {self.capacity} "
            f"candidates, waves of {self.wave} rows"
        )


def rank_of(expected: float, miss: float) -> int:
    """The rank in the sample that a gate takes: it misses a row with probability ``miss``.

    Of independent scores, the sample holds a Poisson number of the k first, ``expected`` on average; the gate is too
    high where it holds ``rank`` or more.
    """
    term, at = math.exp(-expected), 0
    below = term
    while 1.0 - below > miss and at < 16 * expected + 64:
        at += 1
        term *= expected / at
        below += term
    return at + 1


def room_of(rank: int, stride: int, lists: int, deviations: float = 5.0) -> int:
    """Room of a list: its share of ``rank * stride`` candidates, and some deviations more."""
    share = rank * stride / lists
    return -(-int(share + deviations * math.sqrt(share * share / rank + share)) // 16) * 16


def refusal(problem: MqaTopKProblem, arch: Arch) -> str | None:
    """None, or why a call cannot go through the gate."""
    scoring, selection = problem.scoring, problem.selection
    if arch.name != "sm90" or not scoring.aligned:
        return "needs sm90 and rows on 16-byte boundaries"
    if scoring.heads not in HEADS:
        return f"H={scoring.heads}: registers reach for {HEADS}"
    if scoring.compressed or problem.force_first or problem.force_last:
        return "windows are bounded or positions are always kept"
    if selection.order == "score" or selection.tie == "larger":
        return "ascending positions, the smaller of equals"
    if not problem.k <= problem.keys <= MAX_KEYS:
        return f"N={problem.keys}: from k to {MAX_KEYS}"
    return None


def gated(problem: MqaTopKProblem, arch: Arch) -> bool:
    """Whether a call goes through the gate, measured: docs/kernels/cuda_sm90_mqa_topk.md."""
    if refusal(problem, arch) is not None:
        return False
    return problem.keys >= LEAST_KEYS and problem.rows * problem.keys >= LEAST_SCORES


def gate_config(
    problem: MqaTopKProblem, arch: Arch, *, stride: int | None = None, rank: int | None = None, room: int | None = None
) -> GateConfig | None:
    """The gate's configuration; None where the workspace is too small for it."""
    scoring = problem.scoring
    base = KernelConfig(scoring.heads, scoring.head_dim, "noclean", "f32", arch.units)
    product = replace(base, epilogue="append")
    lists = 4 * product.workers
    if stride is None:
        stride = 32 if problem.keys <= 65536 else 64
    if rank is None:
        rank = rank_of(problem.k / stride, 1e-5)
    if room is None:
        room = room_of(rank, stride, lists)
    if lists * (room - LIST_SLACK) < problem.k:
        room = -(-problem.k // lists // 16) * 16 + 64
    config = GateConfig(product, replace(base, epilogue="listed"), base, stride, rank, room, 0, 0, 0, 0)

    block_rows = product.rows
    blocks = -(-problem.rows // block_rows)
    # Counters and counts come before: an upper bound of them first.
    for waves in range(1, blocks + 1):
        in_wave = -(-blocks // waves)
        wanted = in_wave + max(0, arch.units - in_wave) + SPARE_PLACES
        trial = replace(config, wave=in_wave * block_rows, places=wanted)
        plan = Plan(problem, trial)
        if plan.fixed + plan.place_bytes * wanted <= problem.workspace_bytes:
            break
    else:
        return None
    spare = (problem.workspace_bytes - plan.fixed) // (plan.place_bytes + plan.counts_of_place)
    config = replace(trial, places=max(wanted, min(spare, in_wave + arch.units)))
    plan = Plan(problem, config)
    main = problem.workspace_bytes - plan.fixed
    again = _whole(min(blocks * block_rows, main // plan.again_bytes), block_rows)
    sampled = min(blocks * block_rows, main // plan.sample_bytes)
    sampled = _whole(sampled, config.wave if sampled >= config.wave else block_rows)
    if not again or not sampled:
        return None
    if sampled < config.wave:
        config = replace(config, wave=sampled)
    return replace(config, again=again, sampled=sampled)


def _whole(rows: int, unit: int) -> int:
    """As many rows in whole units, or fewer than one unit."""
    return rows if rows < unit else rows // unit * unit


class Plan:
    """Where things lie in the workspace: what all of a call shares, then what one step after the other works in."""

    def __init__(self, problem: MqaTopKProblem, config: GateConfig) -> None:
        rows, keys, dim = problem.rows, problem.keys, problem.head_dim
        self.samples = -(-keys // config.stride)
        self.sample_stride = row_stride(self.samples, torch.float32)
        self.key_stride = row_stride(keys, torch.float32)
        self.waves = -(-rows // max(1, config.wave))
        self.counters = 2 + self.waves  # listed rows, CTAs at a meeting, places taken in each wave
        lists = config.product.rows * config.lists
        self.counts_of_place = 2 * 4 * lists
        self.place_bytes = 8 * lists * config.room
        self.sample_bytes = 4 * self.sample_stride
        self.again_bytes = problem.heads * dim + 4 * self.key_stride
        self.offset: dict[str, int] = {}
        at = 0
        for name, size in (
            ("counters", 4 * self.counters), ("gates", 16 * rows), ("sampled_ks", 4 * rows), ("sampled_ke", 4 * rows),
            ("redo", 4 * rows), ("middles", 8 * config.product.ctas), ("sampled_scale", 4 * self.samples),
            ("sampled_k", dim * self.samples), ("counts", self.counts_of_place * config.places),
        ):  # fmt: skip
            self.offset[name] = at
            at += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        self.fixed = at
        self.offset["main"] = at
        gathered = -(-config.again * problem.heads * dim // ALIGN_BYTES) * ALIGN_BYTES
        self.offset["again"] = at + gathered
        self.bytes = at + max(
            self.place_bytes * config.places, self.sample_bytes * config.sampled,
            gathered + 4 * self.key_stride * config.again,
        )  # fmt: skip


class MqaTopK:
    """The kernel of ``fp8_mqa_topk`` that ``cuda-sm90`` registers."""

    def __init__(self) -> None:
        self.waves = RowWaves(MqaLogits(), [(TopK(), nvrtc.missing)], lambda config: config.rows)

    def supports(self, problem: MqaTopKProblem, arch: Arch) -> str | None:
        return self.waves.supports(problem, arch)

    def config(self, problem: MqaTopKProblem, arch: Arch) -> GateConfig | Waves:
        if gated(problem, arch) and (config := gate_config(problem, arch)) is not None:
            return config
        return self.waves.config(problem, arch)

    def neighbours(self, problem: MqaTopKProblem, arch: Arch) -> Sequence[GateConfig | Waves]:
        """The heuristic's choice first, then the other path, and gates of other samples."""
        others: list[GateConfig | Waves | None] = [*self.waves.neighbours(problem, arch)]
        if refusal(problem, arch) is None:
            for stride in (16, 32, 64):
                for miss in (1e-4, 1e-9):
                    others.append(gate_config(problem, arch, stride=stride, rank=rank_of(problem.k / stride, miss)))
        chosen = self.config(problem, arch)
        return [chosen, *(config for config in dict.fromkeys(others) if config not in (None, chosen))]

    def launch(self, problem: MqaTopKProblem, arch: Arch, config: GateConfig | Waves) -> Any:
        if isinstance(config, GateConfig):
            return Launch(problem, arch, config)
        return self.waves.launch(problem, arch, config)

    def precompile(self, problem: MqaTopKProblem, arch: Arch) -> str:
        config = self.config(problem, arch)
        if isinstance(config, Waves):
            MqaLogits().precompile(problem.scoring, arch)
            return TopK().precompile(problem.selection._replace(rows=config.rows), arch)
        for part in parts(problem, config).values():
            part.compile()
        nvrtc.cubin(mqa_logits.SOURCE, mqa_logits.NVRTC_ARCH, config.sample.macros())
        return config.product.name


class Part(NamedTuple):
    """One kernel of the gate: its source, its macros, which hold its name, and how it is launched.

    ``structs``: of its parameters, each packed; tensor maps come before, two of them where ``maps``.
    """

    file: str
    macros: tuple[tuple[str, str | int], ...]
    threads: int
    shared_bytes: int
    structs: tuple[str, ...]
    maps: bool = False
    cooperative: bool = False

    def compile(self) -> bytes:
        return nvrtc.cubin(packages.beside(__name__, self.file), mqa_logits.NVRTC_ARCH, dict(self.macros))

    @property
    def name(self) -> str:
        return str(dict(self.macros)["KERNEL_NAME"])


_PRODUCT = "3q4i"  # of struct Arguments of shared.cuh, behind six pointers
_OUTPUT = "4Q3q2i"
STRUCTS = {
    "sample": ("9Qq6i",),
    "gate": ("4Qq2i",),
    "product": (f"6Q{_PRODUCT}5Q3i4x",),
    "select": (f"8Q{_OUTPUT}8i",),
    "redo": (f"6Q{_PRODUCT}Q", f"4Q2q2i{_OUTPUT}"),
}


def parts(problem: MqaTopKProblem, config: GateConfig) -> dict[str, Part]:
    """The kernels of a call, in the order of their first launches, but for the one that scores the sample."""
    selection, product = problem.selection, config.product
    traits: dict[str, str | int] = {
        "INDEX_BASE": INDEX_BASES.index(selection.index_base), "VALUES": int(selection.values),
    }  # fmt: skip
    suffix = f"{selection.index_base}{'_values' if selection.values else ''}_sm90"
    samples = Plan(problem, config).samples
    warps = 1
    while warps * 32 * VALUES_PER_LANE < samples:
        warps *= 2
    per_lane = VALUES_PER_LANE
    while warps > 32:
        warps, per_lane = warps // 2, per_lane * 2
    words = bitmap_words(problem)
    select_bytes = 8 * config.capacity + 4 * words + (4 * selection.k if selection.values else 0)
    ctas = max(1, min(4, SHARED_OF_SM // (select_bytes + SELECT_STATIC)))

    def part(name: str, file: str, macros: dict[str, str | int], threads: int, shared: int = 0, **more: Any) -> Part:
        sizes = {"ARGUMENT_BYTES": struct.calcsize("<" + STRUCTS[name][0])}
        if len(STRUCTS[name]) > 1:
            sizes["REDO_BYTES"] = struct.calcsize("<" + STRUCTS[name][1])
        return Part(file, tuple({**macros, **sizes}.items()), threads, shared, STRUCTS[name], **more)

    return {
        "sample": part(
            "sample", "mqa_topk_sample.cuh",
            {"HEAD_DIM": problem.head_dim, "KERNEL_NAME": f"fp8_mqa_topk_sample_D{problem.head_dim}_sm90"}, 256,
        ),
        "gate": part(
            "gate", "mqa_topk_gate.cuh",
            {"RANK": config.rank, "WARPS": warps, "VALUES_PER_LANE": per_lane,
             "KERNEL_NAME": f"fp8_mqa_topk_gate_r{config.rank}_w{warps}_v{per_lane}_sm90"}, 32 * warps,
        ),
        "product": part(
            "product", "mqa_topk_product.cuh", product.macros(), product.threads, product.shared_bytes, maps=True,
        ),
        "select": part(
            "select", "mqa_topk_select.cuh",
            {**traits, "ROWS": product.rows, "LISTS": config.lists, "THREADS": SELECT_THREADS, "CTAS_PER_SM": ctas,
             "KERNEL_NAME": f"fp8_mqa_topk_select_r{product.rows}_l{config.lists}_x{ctas}_{suffix}"},
            SELECT_THREADS, select_bytes,
        ),
        "redo": part(
            "redo", "mqa_topk_redo.cuh", {**config.redo.macros(), **traits, "SELECTION_BYTES": REDO_SELECTION,
             "KERNEL_NAME": f"{config.redo.name.removesuffix('_sm90')}_{suffix}"},
            config.redo.threads, max(config.redo.shared_bytes, REDO_SELECTION + 4 * words), maps=True, cooperative=True,
        ),
    }  # fmt: skip


def bitmap_words(problem: MqaTopKProblem) -> int:
    """Of a bitmap of a row's positions, whole vectors."""
    return -(-problem.keys // 128) * 4


class _Kernel:
    """A part on one device; called with the stream, the grid's CTAs and its parameters, it is launched."""

    def __init__(self, part: Part, ctas: int) -> None:
        code = part.compile()
        self.function = driver.load(code, part.name, part.shared_bytes)
        self.part, self.ctas = part, ctas
        self.attributes = ctypes.addressof(driver.cooperative()) if part.cooperative else 0
        structs = [struct.Struct("<" + form) for form in part.structs]
        pointers = (2 if part.maps else 0) + len(structs)
        self.packed = struct.Struct(f"<{driver.Slot.HEAD_WITH} {pointers}Q {' '.join(part.structs)}")
        self.places, at = [], struct.calcsize(f"<{driver.Slot.HEAD_WITH} {pointers}Q") + driver.Slot.START
        for each in structs:
            self.places.append(at)
            at += each.size
        self.slots: dict[int, list[driver.Slot]] = {}

    def __call__(self, stream: int, *arguments: int, maps: tuple[int, ...] = (), ctas: int = 0) -> None:
        ctas = ctas or self.ctas
        slots = self.slots.setdefault(ctas, [])
        try:
            slot = slots.pop()
        except IndexError:
            part = self.part
            slot = driver.Slot(self.function, (ctas, 1, 1), part.threads, part.shared_bytes, self.packed.size)
        self.packed.pack_into(
            slot.buffer, driver.Slot.START, stream, self.attributes, int(self.attributes != 0), *maps,
            *(slot.address + place for place in self.places), *arguments,
        )  # fmt: skip
        # The driver copies what the pointers point to before it returns.
        status = slot.launch()
        slots.append(slot)
        if status:
            driver.check((status,))


@dataclass
class _Bound:
    """The kernels of a call on one device, and the tensor maps made so far."""

    kernels: dict[str, _Kernel]
    sample: dict[int, Any]
    maps: dict[Any, Any] = field(default_factory=dict)


MAX_KEPT = 1024


class Launch:
    """The gate for one problem; called with the tensors, its kernels run on the current stream."""

    def __init__(self, problem: MqaTopKProblem, arch: Arch, config: GateConfig) -> None:
        self.problem, self.config, self.arch = problem, config, arch
        self.plan = Plan(problem, config)
        self.workspace_bytes = self.plan.bytes
        self.bound: dict[int, _Bound] = {}
        self.marks: list[Any] | None = None  # events between the steps, for measurements

    @torch.no_grad()
    def __call__(self, call: MqaTopKCall) -> None:
        if not self.problem.rows:
            return
        device = call.q.get_device()
        with torch.cuda.device(device):
            self._run(call, self.bound.get(device) or self._bind(device), device)

    def _run(self, call: MqaTopKCall, bound: _Bound, device: int) -> None:
        problem, config, plan = self.problem, self.config, self.plan
        workspace = call.workspace
        if workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=call.q.device)
        base, rows, keys = workspace.data_ptr(), problem.rows, problem.keys
        at = {name: base + offset for name, offset in plan.offset.items()}
        stream = torch._C._cuda_getCurrentRawStream(device)
        kernels = bound.kernels
        unscored = 0 if problem.selection.values else problem.k
        q, ks, ke = call.q.data_ptr(), call.ks.data_ptr(), call.ke.data_ptr()
        weights, w_stride = call.weights.data_ptr(), call.weights.stride(0)
        q_stride, kv_scale = call.q.stride(0), call.kv_scale.data_ptr()
        k_map = self._map(bound, "k", call.k.data_ptr(), keys, call.k.stride(0))
        output = self._output(call)
        self._mark()
        kernels["sample"](
            stream, call.k.data_ptr(), kv_scale, ks, ke, at["sampled_k"], at["sampled_scale"], at["sampled_ks"],
            at["sampled_ke"], at["counters"], call.k.stride(0), rows, keys, config.stride, config.ungated,
            plan.counters, 0,
        )  # fmt: skip
        self._mark()
        wave_of_all = 0
        for first in range(0, rows, config.sampled):
            past = min(rows, first + config.sampled)
            self._score_sample(call, bound, workspace, slice(first, past))
            self._mark()
            kernels["gate"](
                stream, at["main"], at["sampled_ks"] + 4 * first, at["sampled_ke"] + 4 * first,
                at["gates"] + 16 * first, plan.sample_stride, keys, config.stride, ctas=past - first,
            )  # fmt: skip
            self._mark()
            for start in range(first, past, config.wave):
                count = min(past, start + config.wave) - start
                q_map = self._map(bound, "q", q + start * q_stride, count, q_stride, call.q.stride(1))
                kernels["product"](
                    stream, 0, kv_scale, weights + 4 * start * w_stride, ks + 4 * start, ke + 4 * start, 0, q_stride,
                    w_stride, 0, count, keys, keys, config.product.enter_cost, at["gates"] + 16 * start, at["main"],
                    at["counts"], at["middles"], at["counters"] + 4 * (2 + wave_of_all), unscored, config.room,
                    config.places, maps=(q_map, k_map),
                )  # fmt: skip
                self._mark()
                kernels["select"](
                    stream, at["main"], at["counts"], at["middles"], at["gates"] + 16 * start, ks + 4 * start,
                    ke + 4 * start, at["counters"], at["redo"], *_moved(output, start), count, keys, start,
                    config.product.ctas, unscored, config.room, bitmap_words(problem), config.capacity, ctas=count,
                )  # fmt: skip
                self._mark()
                wave_of_all += 1
        gathered = self._map(
            bound, "again", at["main"], config.again, problem.heads * problem.head_dim, problem.head_dim
        )
        kernels["redo"](
            stream, 0, kv_scale, weights, ks, ke, at["again"], problem.heads * problem.head_dim, w_stride,
            plan.key_stride, config.again, keys, keys, config.redo.enter_cost, at["redo"], at["counters"],
            at["counters"] + 4, q, at["main"], q_stride, call.q.stride(1), config.again, bitmap_words(problem), *output,
            maps=(gathered, k_map),
        )  # fmt: skip
        self._mark()

    def _score_sample(self, call: MqaTopKCall, bound: _Bound, workspace: torch.Tensor, rows: slice) -> None:
        plan, count = self.plan, rows.stop - rows.start
        samples, dim = plan.samples, self.problem.head_dim

        def view(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
            return workspace[plan.offset[name] : plan.offset[name] + size].view(dtype)

        scores = view("main", count * plan.sample_bytes, torch.float32).view(count, plan.sample_stride)
        bound.sample[count](
            MqaLogitsCall(
                call.q[rows], view("sampled_k", samples * dim, call.k.dtype).view(samples, dim),
                view("sampled_scale", 4 * samples, torch.float32), call.weights[rows],
                view("sampled_ks", 4 * self.problem.rows, torch.int32)[rows],
                view("sampled_ke", 4 * self.problem.rows, torch.int32)[rows], False, 0, torch.float32,
                scores[:, :samples],
            )
        )  # fmt: skip

    def _output(self, call: MqaTopKCall) -> tuple[int, ...]:
        """struct Output of selection.cuh."""
        offsets, pages, indices, values = call.offsets, call.page_table, call.indices, call.values
        return (
            0 if offsets is None else offsets.data_ptr(), 0 if pages is None else pages.data_ptr(), indices.data_ptr(),
            0 if values is None else values.data_ptr(), indices.stride(0), 0 if values is None else values.stride(0),
            0 if pages is None else pages.stride(0), self.problem.k, self.problem.selection.page_size,
        )  # fmt: skip

    def _map(self, bound: _Bound, operand: str, address: int, count: int, stride: int, stride_h: int = 0) -> int:
        """The address of the tensor map of q, of gathered q or of k."""
        key = (operand, address, count, stride, stride_h)
        if (kept := bound.maps.get(key)) is None:
            product = self.config.product
            if operand == "k":
                made = mqa_logits._k_map(product, address, count, stride)
            else:
                made = mqa_logits._q_map(product, address, count, stride, stride_h)
            if len(bound.maps) >= MAX_KEPT:
                bound.maps.clear()
            kept = bound.maps[key] = (made, int(made.getPtr()))
        return int(kept[1])

    def _bind(self, device: int) -> _Bound:
        problem, config = self.problem, self.config
        units = config.product.ctas
        kernels = {name: _kernel(part, units) for name, part in parts(problem, config).items()}
        rows, step = problem.rows, config.sampled
        scoring = MqaLogitsProblem(
            rows, self.plan.samples, problem.heads, problem.head_dim, problem.scoring.q_dtype, problem.scoring.k_dtype,
            clean_logits=False,
        )  # fmt: skip
        sample = {
            count: mqa_logits.Launch(scoring._replace(rows=count), config.sample)
            for count in {min(step, rows - first) for first in range(0, rows, step)}
        }
        self.bound[device] = _Bound(kernels, sample)
        return self.bound[device]

    def _mark(self) -> None:
        if self.marks is not None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self.marks.append(event)


def _moved(output: tuple[int, ...], row: int) -> tuple[int, ...]:
    """struct Output for rows from ``row`` on."""
    offsets, pages, indices, values, indices_stride, values_stride, page_stride, *rest = output
    return (
        offsets and offsets + 4 * row, pages and pages + 4 * row * page_stride, indices + 4 * row * indices_stride,
        values and values + 4 * row * values_stride, indices_stride, values_stride, page_stride, *rest,
    )  # fmt: skip


@functools.cache
def _kernel_on(device: int, part: Part, ctas: int) -> _Kernel:
    return _Kernel(part, ctas)


def _kernel(part: Part, ctas: int) -> _Kernel:
    """The kernel on the current device, loaded once."""
    return _kernel_on(torch.cuda.current_device(), part, ctas)
