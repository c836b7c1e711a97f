"""``fp8_mqa_topk`` for Hopper: scores that pass a gate are appended to lists, and the rows are selected from those.

A sample of the keys is scored first and gives each row its gate; the product of all keys then keeps what passes, and a
CTA a row selects from it. Where the counts do not show that the result is exact, one more kernel scores and selects the
row again. Nothing is read back to the host. Other calls go by row waves: :func:`gated` says which.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Iterator, Sequence
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


_START = driver.Slot.START


class _Kernel:
    """A part on one device: its function, and how what it is given is packed."""

    def __init__(self, part: Part) -> None:
        self.part, self.function = part, driver.load(part.compile(), part.name, part.shared_bytes)
        self.attributes = 0
        if part.cooperative or part.dependent:
            self.attributes = ctypes.addressof(driver.cooperative() if part.cooperative else driver.dependent())
        pointers = (2 if part.maps else 0) + len(part.structs)
        head = f"<{driver.Slot.HEAD_WITH} {pointers}Q"
        self.packed = struct.Struct(f"{head} {' '.join(part.structs)}")
        # Of the structs and of the numbers in them, from the start of a slot.
        at = _START + struct.calcsize(head)
        self.places, self.number_places = [], []
        for form in part.structs:
            self.places.append(at)
            for count, code in re.findall(r"(\d*)(\w)", form):
                for _ in range(int(count or 1)):
                    self.number_places.append(at)
                    at += struct.calcsize(f"<{code}")


class _At(NamedTuple):
    """Of what a kernel is given, what each call says: so many bytes behind one of its addresses, see ``_BASES``."""

    base: str
    offset: int = 0


class _Step:
    """One launch of a call: a kernel, its CTAs, and what it is given: numbers, which stay, and addresses.

    Args:
        maps: its two tensor maps, or none.
        arguments: of its structs, number by number.
    """

    def __init__(self, kernel: _Kernel, ctas: int, *arguments: int | _At, maps: tuple[_At, ...] = ()) -> None:
        self.kernel, self.ctas, self.arguments, self.maps = kernel, ctas, arguments, maps
        placed = [(_START, _At("stream"))]
        placed += [(driver.Slot.POINTERS + 8 * number, each) for number, each in enumerate(maps)]
        for place, argument in zip(kernel.number_places, arguments, strict=True):
            if isinstance(argument, _At):
                placed.append((place, argument))
        # Addresses, by the word of a slot that takes them.
        self.words = [(place // 8, *at) for place, at in placed]

    def slot(self) -> driver.Slot:
        """Room for one launch at a time, with what stays in it."""
        kernel, part = self.kernel, self.kernel.part
        slot = driver.Slot(kernel.function, (self.ctas, 1, 1), part.threads, part.shared_bytes, kernel.packed.size)
        kernel.packed.pack_into(
            slot.buffer, _START, 0, kernel.attributes, int(kernel.attributes != 0), *(0 for _ in self.maps),
            *(slot.address + place for place in kernel.places),
            *(0 if isinstance(argument, _At) else argument for argument in self.arguments),
        )  # fmt: skip
        return slot


# Device; strides of q; row strides of k, weights, indices, values and the page table, 0 of what there is not.
_Layout = tuple[int, tuple[int, ...], int, int, int, int, int]


class Launch:
    """The gate for one problem; called with the tensors, its kernels run on the current stream."""

    def __init__(self, problem: MqaTopKProblem, arch: Arch, config: GateConfig) -> None:
        self.problem, self.config = problem, config
        self.plan = Plan(problem, config)
        self.workspace_bytes = self.plan.bytes
        self.bound: dict[_Layout, _Bound] = {}
        self.marks: list[Any] | None = None  # events between the steps, for measurements

    def __call__(self, call: MqaTopKCall) -> None:
        if self.problem.rows:
            self.bind(call)(call)

    def bind(self, call: MqaTopKCall) -> _Bound:
        """What runs this call, and every other one whose device and strides are the same."""
        values, pages = call.values, call.page_table
        layout = (
            call.q.get_device(), call.q.stride(), call.k.stride(0), call.weights.stride(0), call.indices.stride(0),
            0 if values is None else values.stride(0), 0 if pages is None else pages.stride(0),
        )  # fmt: skip
        return self.bound.get(layout) or driver.keep(self.bound, layout, _Bound(self, layout))

    def mark(self) -> None:
        """Puts an event behind what has been launched."""
        assert self.marks is not None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.marks.append(event)


class _Bound:
    """The launches of a problem whose operands lie in one layout: what varies is where they are."""

    def __init__(self, launch: Launch, layout: _Layout) -> None:
        self.launch, self.device, self.workspace_bytes = launch, layout[0], launch.workspace_bytes
        # Tensor maps of a call: by name, where each begins and what else it is made of.
        self.map_facts: dict[str, tuple[_At, str, int, int, int]] = {}
        self.maps: dict[tuple[Any, ...], tuple[Any, int]] = {}
        # All of a call by the addresses of q, k and the workspace, as engines reuse their buffers: the maps, and where.
        self.maps_of: dict[tuple[int, int, int], tuple[list[Any], list[int]]] = {}
        with torch.cuda.device(self.device):
            self.steps = list(self._steps(layout))
        bases = {name: place for place, name in enumerate((*_BASES, *self.map_facts))}
        self.words = [[(word, bases[base], offset) for word, base, offset in step.words] for step in self.steps]
        # Room for one call each, slots and their words; a thread takes one, or makes it.
        self.rooms: list[list[tuple[driver.Slot, memoryview]]] = []

    def __call__(self, call: MqaTopKCall) -> None:
        device = self.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(call)
        q, k, kv_scale, weights, ks, ke, offsets, pages, indices, values, workspace = call
        if workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=q.device)
        places = (q.data_ptr(), k.data_ptr(), workspace.data_ptr())
        maps = self.maps_of.get(places) or self._encode(places)
        bases = (
            torch._C._cuda_getCurrentRawStream(device), *places, kv_scale.data_ptr(), weights.data_ptr(),
            ks.data_ptr(), ke.data_ptr(), 0 if offsets is None else offsets.data_ptr(),
            0 if pages is None else pages.data_ptr(), indices.data_ptr(), 0 if values is None else values.data_ptr(),
            *maps[1],
        )  # fmt: skip
        try:
            room = self.rooms.pop()
        except IndexError:
            room = [(slot, slot.buffer.cast("Q")) for slot in map(_Step.slot, self.steps)]
        marked = self.launch.marks is not None
        if marked:
            self.launch.mark()
        for words, (slot, view) in zip(self.words, room, strict=True):
            for word, base, offset in words:
                view[word] = bases[base] + offset
            # The driver copies what the pointers point to before it returns.
            status = slot.launch()
            if status:
                break
            if marked:
                self.launch.mark()
        self.rooms.append(room)
        if status:
            driver.check((status,))
        return None

    def _steps(self, layout: _Layout) -> Iterator[_Step]:
        """The launches of a call."""
        problem, config, plan = self.launch.problem, self.launch.config, self.launch.plan
        device, (q_stride, q_stride_h, _), k_stride, w_stride, indices_stride, values_stride, page_stride = layout
        rows, keys = problem.rows, problem.keys
        ctas = config.product.ctas
        kernels = {name: _kernel_on(device, part) for name, part in parts(problem, config).items()}

        def room(name: str, offset: int = 0) -> _At:
            return _At("workspace", plan.offset[name] + offset)

        def output(row: int) -> tuple[int | _At, ...]:
            """struct Output of selection.cuh, for rows from ``row`` on."""
            selection = problem.selection
            return (
                _At("offsets", 4 * row) if selection.index_base == "offset" else 0,
                _At("pages", 4 * row * page_stride) if selection.index_base == "page" else 0,
                _At("indices", 4 * row * indices_stride),
                _At("values", 4 * row * values_stride) if selection.values else 0,
                indices_stride, values_stride, page_stride, problem.k, selection.page_size,
            )  # fmt: skip

        k_map = self._map("k", _At("k"), keys, k_stride)
        yield _Step(
            kernels["sample"], ctas, _At("k"), _At("kv_scale"), _At("ks"), _At("ke"), room("sampled_k"),
            room("sampled_scale"), room("sampled_ks"), room("sampled_ke"), room("counters"), k_stride, rows, keys,
            config.stride, config.ungated, plan.counters, 0,
        )  # fmt: skip
        sampled_map = self._map("k", room("sampled_k"), plan.samples, problem.head_dim)
        wave_of_all = 0
        for first in range(0, rows, config.sampled):
            past = min(rows, first + config.sampled)
            q_map = self._map("q", _At("q", first * q_stride), past - first, q_stride, q_stride_h)
            yield _Step(
                kernels["score"], ctas, 0, room("sampled_scale"), _At("weights", 4 * first * w_stride),
                room("sampled_ks", 4 * first), room("sampled_ke", 4 * first), room("main"), q_stride, w_stride,
                plan.sample_stride, past - first, plan.samples, plan.samples, config.sample.enter_cost,
                maps=(q_map, sampled_map),
            )  # fmt: skip
            yield _Step(
                kernels["gate"], past - first, room("main"), room("sampled_ks", 4 * first),
                room("sampled_ke", 4 * first), room("gates", 16 * first), plan.sample_stride, keys, config.stride,
            )  # fmt: skip
            for start in range(first, past, config.wave):
                count = min(past, start + config.wave) - start
                q_map = self._map("q", _At("q", start * q_stride), count, q_stride, q_stride_h)
                yield _Step(
                    kernels["product"], ctas, 0, _At("kv_scale"), _At("weights", 4 * start * w_stride),
                    _At("ks", 4 * start), _At("ke", 4 * start), 0, q_stride, w_stride, 0, count, keys, keys,
                    config.product.enter_cost, room("gates", 16 * start), room("main"), room("counts"),
                    room("middles"), room("counters", 4 * (2 + wave_of_all)), config.room, config.places,
                    maps=(q_map, k_map),
                )  # fmt: skip
                yield _Step(
                    kernels["select"], count, room("main"), room("counts"), room("middles"), room("gates", 16 * start),
                    _At("ks", 4 * start), _At("ke", 4 * start), room("counters"), room("redo"), *output(start), count,
                    keys, start, ctas, config.room, select_words(problem), config.warp_room, 0,
                )  # fmt: skip
                wave_of_all += 1
        gathered = self._map("q", room("main"), config.again, problem.heads * problem.head_dim, problem.head_dim)
        yield _Step(
            kernels["redo"], ctas, 0, _At("kv_scale"), _At("weights"), _At("ks"), _At("ke"), room("again"),
            problem.heads * problem.head_dim, w_stride, plan.key_stride, config.again, keys, keys,
            config.redo.enter_cost, room("redo"), room("counters"), room("counters", 4), _At("q"), room("main"),
            q_stride, q_stride_h, config.again, bitmap_words(problem), *output(0), maps=(gathered, k_map),
        )  # fmt: skip

    def _map(self, operand: str, at: _At, count: int, stride: int, stride_h: int = 0) -> _At:
        """The tensor map of k, or of q, as of all rows from an address on."""
        facts = (at, operand, count, stride, stride_h)
        for name, others in self.map_facts.items():
            if others == facts:
                return _At(name)
        name = f"map {len(self.map_facts)}"
        self.map_facts[name] = facts
        return _At(name)

    def _encode(self, places: tuple[int, int, int]) -> tuple[list[Any], list[int]]:
        product, kept = self.launch.config.product, []
        for at, operand, count, stride, stride_h in self.map_facts.values():
            address = places[_BASES.index(at.base) - 1] + at.offset
            key = (operand, address, count, stride, stride_h)
            if key not in self.maps:
                if operand == "k":
                    made = mqa_logits._k_map(product, address, count, stride)
                else:
                    made = mqa_logits._q_map(product, address, count, stride, stride_h)
                driver.keep(self.maps, key, (made, int(made.getPtr())))
            kept.append(self.maps[key])
        return driver.keep(self.maps_of, places, ([made for made, _ in kept], [address for _, address in kept]))


# What addresses are told by: the stream, then tensors; the maps of a call come behind.
_BASES = (
    "stream", "q", "k", "workspace", "kv_scale", "weights", "ks", "ke", "offsets", "pages", "indices", "values",
)  # fmt: skip


@functools.cache
def _kernel_on(device: int, part: Part) -> _Kernel:
    """The kernel on the device, which is the current one, loaded once."""
    return _Kernel(part)
