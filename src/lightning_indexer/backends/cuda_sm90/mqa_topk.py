"""``fp8_mqa_topk`` for Hopper: scores that pass a gate are appended to lists, and the rows are selected from those.

A sample of the keys is scored first and gives each row its gate; the product of all keys then keeps what passes, and a
CTA a row selects from it. Where the counts do not show that the result is exact, one more kernel scores and selects the
row again. Nothing is read back to the host. Other calls go by row waves: :func:`gated` says which.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_indexer import packages
from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90 import mqa_logits
from lightning_indexer.backends.cuda_sm90.mqa_logits import MqaLogits
from lightning_indexer.backends.cuda_sm90.mqa_topk_config import (
    CANDIDATE_BYTES,
    INDEX_BASES,
    REDO_SELECTION,
    SELECT_STATIC,
    SELECT_THREADS,
    SHARED_OF_SM,
    SHARED_OF_SYSTEM,
    STRUCTS,
    VALUES_PER_LANE,
    GateConfig,
    Plan,
    bitmap_bytes,
    bitmap_words,
    gate_config,
    gated,
    rank_of,
    refusal,
    select_words,
)
from lightning_indexer.backends.cuda_sm90.top_k import TopK
from lightning_indexer.backends.row_waves import RowWaves, Waves, measured_wave_bytes
from lightning_indexer.cuda import driver, nvrtc
from lightning_indexer.problems.mqa_topk import MqaTopKCall, MqaTopKProblem


class MqaTopK:
    """The kernel of ``fp8_mqa_topk`` that ``cuda-sm90`` registers."""

    def __init__(self) -> None:
        self.waves = RowWaves(
            MqaLogits(), [(TopK(), nvrtc.missing)], lambda config: config.rows, wave_bytes=measured_wave_bytes
        )

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
    dependent: bool = False

    def compile(self) -> bytes:
        return nvrtc.cubin(packages.beside(__name__, self.file), mqa_logits.NVRTC_ARCH, dict(self.macros))

    @property
    def name(self) -> str:
        return str(dict(self.macros)["KERNEL_NAME"])


def parts(problem: MqaTopKProblem, config: GateConfig) -> dict[str, Part]:
    """The kernels of a call, in the order of their first launches."""
    selection, product, sample = problem.selection, config.product, config.sample
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
    candidates = CANDIDATE_BYTES * config.lists * config.warp_room
    select_bytes = candidates + bitmap_bytes(problem, select_words(problem))
    redo_bytes = REDO_SELECTION + bitmap_bytes(problem, bitmap_words(problem))
    ctas = max(1, min(5, SHARED_OF_SM // (select_bytes + SELECT_STATIC + SHARED_OF_SYSTEM)))

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
        "score": Part(
            "mqa_logits.cuh", tuple(sample.macros().items()), sample.threads, sample.shared_bytes, STRUCTS["score"],
            maps=True,
        ),
        "gate": part(
            "gate", "mqa_topk_gate.cuh",
            {"RANK": config.rank, "WARPS": warps, "VALUES_PER_LANE": per_lane,
             "KERNEL_NAME": f"fp8_mqa_topk_gate_r{config.rank}_w{warps}_v{per_lane}_sm90"}, 32 * warps,
            dependent=config.dependent,
        ),
        "product": part(
            "product", "mqa_topk_product.cuh",
            product.macros(), product.threads, product.shared_bytes, maps=True, dependent=config.dependent,
        ),
        "select": part(
            "select", "mqa_topk_select.cuh",
            {**traits, "ROWS": product.rows, "LISTS": config.lists, "THREADS": SELECT_THREADS, "CTAS_PER_SM": ctas,
             "BIN_BITS": 10, "STATIC_BYTES": SELECT_STATIC,
             "KERNEL_NAME": f"fp8_mqa_topk_select_r{product.rows}_l{config.lists}_x{ctas}_{suffix}"},
            SELECT_THREADS, select_bytes, dependent=config.dependent,
        ),
        "redo": part(
            "redo", "mqa_topk_redo.cuh", {**config.redo.macros(), **traits, "BIN_BITS": 10,
             "SELECTION_BYTES": REDO_SELECTION,
             "KERNEL_NAME": f"{config.redo.name.removesuffix('_sm90')}_{suffix}"},
            config.redo.threads, max(config.redo.shared_bytes, redo_bytes), maps=True, cooperative=True,
        ),
    }  # fmt: skip


class _Kernel:
    """A part on one device; called with the stream, the grid's CTAs and its parameters, it is launched."""

    def __init__(self, part: Part, ctas: int) -> None:
        code = part.compile()
        self.function = driver.load(code, part.name, part.shared_bytes)
        self.part, self.ctas = part, ctas
        self.attributes = 0
        if part.cooperative or part.dependent:
            self.attributes = ctypes.addressof(driver.cooperative() if part.cooperative else driver.dependent())
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
        sampled_map = self._map(bound, "k", at["sampled_k"], plan.samples, problem.head_dim)
        wave_of_all = 0
        for first in range(0, rows, config.sampled):
            past = min(rows, first + config.sampled)
            q_map = self._map(bound, "q", q + first * q_stride, past - first, q_stride, call.q.stride(1))
            kernels["score"](
                stream, 0, at["sampled_scale"], weights + 4 * first * w_stride, at["sampled_ks"] + 4 * first,
                at["sampled_ke"] + 4 * first, at["main"], q_stride, w_stride, plan.sample_stride, past - first,
                plan.samples, plan.samples, config.sample.enter_cost, maps=(q_map, sampled_map),
            )  # fmt: skip
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
                    at["counts"], at["middles"], at["counters"] + 4 * (2 + wave_of_all), config.room,
                    config.places, maps=(q_map, k_map),
                )  # fmt: skip
                self._mark()
                kernels["select"](
                    stream, at["main"], at["counts"], at["middles"], at["gates"] + 16 * start,
                    ks + 4 * start, ke + 4 * start, at["counters"], at["redo"], *_moved(output, start), count, keys,
                    start, config.product.ctas, config.room, select_words(problem), config.warp_room, 0, ctas=count,
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
        ctas = self.config.product.ctas
        kernels = {name: _kernel(part, ctas) for name, part in parts(self.problem, self.config).items()}
        self.bound[device] = _Bound(kernels)
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
