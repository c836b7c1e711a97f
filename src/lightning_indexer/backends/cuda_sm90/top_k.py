"""``top_k_per_row`` for Hopper: configurations, heuristic and launch of top_k.cuh."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace

import torch

from lightning_indexer import packages
from lightning_indexer.arch import Arch
from lightning_indexer.cuda import driver, nvrtc
from lightning_indexer.problems.top_k import DTYPES, MAX_K, TopKCall, TopKProblem

SOURCE = packages.beside(__name__, "top_k.cuh")
NVRTC_ARCH = "sm_90a"
INDEX_BASES = ("row", "absolute", "offset", "page")
KINDS = ("short", "stream", "across")
MAX_ROWS = (2**31 - 1) // 8
# Dynamic shared memory that a CTA may ask for, less what top_k_plan.cuh's Block takes.
SHARED_LIMIT = 225 * 1024
LISTED = 256
SHARED_BINS = 512
KEY_BINS = 1024
# Scores of a row that a thread block holds in registers.
SHORT_WIDTH = 8192
# A bitmap of longer rows does not fit in one CTA.
STREAM_WIDTH = 524288


@dataclass(frozen=True, slots=True)
class TopKConfig:
    """One instantiation of the kernel.

    Attributes:
        kind: ``short`` (a row in registers), ``stream`` (a CTA streams a row) or ``across`` (a cluster a row).
        threads, ctas_per_sm: of a CTA; the registers a thread may take follow.
        vectors: 16-byte vectors that a thread holds at once.
        capacity: candidates of a CTA.
        cluster: CTAs a row.
        bins: of the linear histograms.
        sample_stride: one of so many scores of the first tile enters the sample.
        sample_vectors: of a thread, where a cluster shares a row.
        whole_rows: loads start before the window is known; for few rows, where latency is the time.
        dtype, index_base, by_score, ties_larger, values: the problem's.
    """

    kind: str
    threads: int
    ctas_per_sm: int
    vectors: int
    capacity: int = 4096
    cluster: int = 1
    bins: int = 1024
    sample_stride: int = 1
    sample_vectors: int = 1
    whole_rows: bool = False
    dtype: torch.dtype = torch.float32
    index_base: str = "row"
    by_score: bool = False
    ties_larger: bool = False
    values: bool = False

    @property
    def name(self) -> str:
        """The kernel's name in traces."""
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [f"top_k_per_row_{self.kind}", dtype, f"t{self.threads}x{self.ctas_per_sm}", f"v{self.vectors}"]
        parts += [
            f"c{self.capacity}",
            f"cl{self.cluster}",
            f"b{self.bins}s{self.sample_stride}{self.sample_vectors}",
            self.index_base,
        ]
        flags = {"whole": self.whole_rows, "score": self.by_score, "larger": self.ties_larger, "values": self.values}
        return "_".join([*parts, *(flag for flag, on in flags.items() if on), "sm90"])

    def __str__(self) -> str:
        return self.name

    @property
    def pack(self) -> int:
        """Scores of a 16-byte vector."""
        return 16 // self.dtype.itemsize

    @property
    def held(self) -> int:
        """Scores that the CTA holds in registers."""
        return self.threads * self.vectors * self.pack

    def bitmap_words(self, width: int) -> int:
        """Words of the bitmap for rows of this width; 0 where it would not fit or none is needed."""
        if self.kind == "short":
            return 0
        positions = width + 2 * self.pack
        if self.kind == "across":
            share = -(-(positions // self.pack + 1) // self.cluster)
            positions = (-(-share // 32) * 32 + 2) * self.pack
        words = -(-positions // 128) * 4
        return words if self.plan_bytes + 4 * words <= SHARED_LIMIT else 0

    @property
    def plan_bytes(self) -> int:
        """Shared memory of top_k_plan.cuh's plans, without bitmap and staged positions."""
        if self.kind == "short":
            return 8 * LISTED + 4 * self.bins + 4 * self.threads
        plan = 8 * self.capacity + 8 * LISTED + 4 * self.bins + 16
        if self.kind == "across":
            plan += 8 * LISTED + 4 * KEY_BINS + 2 * SHARED_BINS * (1 + self.cluster)
        return plan

    def shared_bytes(self, width: int, k: int) -> int:
        """Dynamic shared memory of a CTA."""
        wanted = self.plan_bytes + 4 * self.bitmap_words(width)
        if self.kind == "short":
            wanted += -(-4 * k // 16) * 16 + 16
        if self.by_score:
            wanted = max(wanted, 8 << max(1, (k - 1).bit_length()))
        return wanted

    def macros(self) -> dict[str, str | int]:
        """What the source is compiled with."""
        return {
            "KERNEL_NAME": self.name,
            "KIND": KINDS.index(self.kind),
            "THREADS": self.threads,
            "CTAS_PER_SM": self.ctas_per_sm,
            "VECTORS": self.vectors,
            "CAPACITY": self.capacity,
            "CLUSTER": self.cluster,
            "BINS": self.bins,
            "SAMPLE_STRIDE": self.sample_stride,
            "PLAN_BYTES": self.plan_bytes,
            "SAMPLE_VECTORS": self.sample_vectors,
            "WHOLE_ROWS": int(self.whole_rows),
            "DTYPE": DTYPES.index(self.dtype),
            "INDEX_BASE": INDEX_BASES.index(self.index_base),
            "BY_SCORE": int(self.by_score),
            "TIES_LARGER": int(self.ties_larger),
            "VALUES": int(self.values),
        }


def heuristic(problem: TopKProblem, arch: Arch) -> TopKConfig:
    """By the row length and how many rows there are to fill the GPU with."""
    rows, width, units = problem.rows, problem.width, arch.units
    deep = problem.k > 2048
    span = width if problem.aligned else width + 16 // problem.dtype.itemsize - 1
    if span <= SHORT_WIDTH:
        if rows >= 512:
            config = TopKConfig("short", 256, 5, 8)
        else:
            config = TopKConfig("short", 512, 2, 4, bins=2048, whole_rows=True)
        return _of(problem, config)
    cluster = 1
    while cluster < 8 and rows * cluster * 2 <= units and width // cluster > SHORT_WIDTH:
        cluster *= 2
    if width > STREAM_WIDTH:
        cluster = 8
    if cluster > 1:
        long_parts = cluster == 2 or width // cluster > SHORT_WIDTH
        if cluster == 8:
            long_parts = rows <= 8 or width > STREAM_WIDTH
        vectors, ctas = (8, 1) if long_parts else (4, 2)  # two CTAs a multiprocessor, or not all clusters find a place
        config = TopKConfig("across", 512, ctas, vectors, capacity=8192, cluster=cluster)
    elif deep:
        config = TopKConfig("stream", 512, 2, 8, capacity=8192, sample_stride=2 if width <= 49152 else 1)
    elif width <= 49152:
        config = TopKConfig("stream", 512 if rows < 400 else 256, 2 if rows < 400 else 4, 8, sample_stride=2)
    elif rows < 400:
        config = TopKConfig("stream", 512, 2, 8, capacity=6144)
    else:
        config = TopKConfig("stream", 512, 3, 4, capacity=6144)
    return _of(problem, config)


def _of(problem: TopKProblem, config: TopKConfig) -> TopKConfig:
    """The configuration, written for float32, with the problem's traits: as many scores a thread at two bytes each."""
    return replace(
        config,
        vectors=config.vectors * problem.dtype.itemsize // 4,
        dtype=problem.dtype,
        index_base=problem.index_base,
        by_score=problem.order == "score",
        ties_larger=problem.tie == "larger",
        values=problem.values,
    )


def neighbours(problem: TopKProblem, arch: Arch) -> list[TopKConfig]:
    """What ``bench --tune`` measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    if chosen.kind == "short":
        shapes = ((256, 5, 8, 1024, False), (512, 2, 4, 2048, True), (1024, 1, 2, 2048, True))
        others = [
            replace(chosen, threads=t, ctas_per_sm=c, vectors=v * problem.dtype.itemsize // 4, bins=b, whole_rows=w)
            for t, c, v, b, w in shapes
        ]
    elif chosen.kind == "stream":
        shapes_ = ((256, 4, 8), (512, 2, 8), (512, 3, 4))
        others = [
            replace(chosen, threads=t, ctas_per_sm=c, vectors=v * problem.dtype.itemsize // 4) for t, c, v in shapes_
        ]
    else:
        others = [replace(chosen, cluster=cluster) for cluster in (2, 4, 8) if cluster * chosen.capacity <= 65536]
    return [chosen, *(other for other in others if other != chosen)]


class TopK:
    """The kernel of ``top_k_per_row`` that ``cuda-sm90`` registers."""

    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: TopKProblem, arch: Arch) -> str | None:
        if arch.name != "sm90":
            return f"needs sm90 (H100, H200), this is {arch.name}"
        if problem.dtype not in DTYPES:
            return f"takes float32, bfloat16 and float16 scores, got {problem.dtype}"
        if not 1 <= problem.k <= MAX_K:
            return f"takes k from 1 to {MAX_K}, got {problem.k}"
        if problem.rows > MAX_ROWS:
            return f"M={problem.rows} is beyond {MAX_ROWS}: a cluster a row has to fit in the grid"
        return None

    def launch(self, problem: TopKProblem, arch: Arch, config: TopKConfig) -> Launch:
        return Launch(problem, config)

    def precompile(self, problem: TopKProblem, arch: Arch) -> str:
        config = heuristic(problem, arch)
        nvrtc.cubin(SOURCE, NVRTC_ARCH, config.macros())
        return config.name


# Device; row strides of logits, indices, values and the page table, 0 of what there is not.
_Layout = tuple[int, int, int, int, int]
# The stream and the pointer to the arguments, then struct Arguments of top_k_plan.cuh: its pointers, which each call
# packs, and what stays.
_POINTERS = struct.Struct(f"<{driver.Slot.HEAD} Q 7Q")
_CONSTANTS = struct.Struct("<4q4if4x")
_ARGUMENTS = driver.Slot.POINTERS + struct.calcsize("<Q")
_START = driver.Slot.START


class Launch:
    """The kernel for one problem; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: TopKProblem, config: TopKConfig) -> None:
        self.config = config
        self.rows = problem.rows
        self.shared_bytes = config.shared_bytes(problem.width, problem.k)
        overshoot = 0.75 * config.capacity / problem.k
        if config.kind == "across":  # the sample is thinner, and the candidates of a row lie in several CTAs
            overshoot = max(6.0, overshoot)
        words = config.bitmap_words(problem.width)
        self.scalars = (problem.width, problem.k, problem.page_size, words, overshoot)
        self.bound: dict[_Layout, Bound] = {}

    def __call__(self, call: TopKCall) -> None:
        if self.rows:
            self.bind(call)(call)

    def bind(self, call: TopKCall) -> Bound:
        """What runs this call, and every other one whose device and strides are the same."""
        logits, _, _, _, pages, indices, values, _ = call
        layout = (
            indices.get_device(), logits.stride(0), indices.stride(0), 0 if values is None else values.stride(0),
            0 if pages is None else pages.stride(0),
        )  # fmt: skip
        return self.bound.get(layout) or driver.keep(self.bound, layout, Bound(self, layout))


class Bound:
    """The launch of a problem whose tensors lie in one layout: what varies is where they are."""

    def __init__(self, launch: Launch, layout: _Layout) -> None:
        self.launch, self.device, self.strides = launch, layout[0], layout[1:]
        # Room for the arguments of one launch each; a thread takes one, or makes it.
        self.slots: list[driver.Slot] = []

    def __call__(self, call: TopKCall) -> None:
        device = self.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(call)
        logits, starts, ends, offsets, pages, indices, values, _ = call
        return self.at(
            torch._C._cuda_getCurrentRawStream(device), logits.data_ptr(),
            0 if starts is None else starts.data_ptr(), 0 if ends is None else ends.data_ptr(),
            0 if offsets is None else offsets.data_ptr(), 0 if pages is None else pages.data_ptr(),
            indices.data_ptr(), 0 if values is None else values.data_ptr(),
        )  # fmt: skip

    def at(
        self, stream: int, logits: int, starts: int, ends: int, offsets: int, pages: int, indices: int, values: int
    ) -> None:
        """A call by addresses, 0 of what there is not, on a stream of the device, which is the current one."""
        try:
            slot = self.slots.pop()
        except IndexError:
            slot = self._new_slot()
        _POINTERS.pack_into(
            slot.buffer, _START, stream, slot.address + _ARGUMENTS, logits, starts, ends, offsets, pages, indices,
            values,
        )  # fmt: skip
        # The driver copies the arguments before it returns.
        status = slot.launch()
        self.slots.append(slot)
        if status:
            driver.check((status,))

    def _new_slot(self) -> driver.Slot:
        launch, config = self.launch, self.launch.config
        slot = driver.Slot(
            _function(config, self.device), (launch.rows * config.cluster, 1, 1), config.threads, launch.shared_bytes,
            _POINTERS.size + _CONSTANTS.size,
        )  # fmt: skip
        _CONSTANTS.pack_into(slot.buffer, _START + _POINTERS.size, *self.strides, *launch.scalars)
        return slot


@functools.cache
def _function(config: TopKConfig, device: int) -> int:
    """The handle of the kernel on the device, which is the current one."""
    return driver.load(nvrtc.cubin(SOURCE, NVRTC_ARCH, config.macros()), config.name, SHARED_LIMIT)
