"""What ``insert_k_cache``, ``gather_k_cache`` and ``prepare_q`` share: config, gate, variants and launch."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.cuda import driver, nvrtc
from lightning_indexer.fp8 import WIDE_DTYPES
from lightning_indexer.packages import Source
from lightning_indexer.problems.transform import Transform

NVRTC_ARCH = "sm_90a"
HEAD_DIM = 128
# Rows of a warp at a time: four lanes have a row.
WARP_ROWS = 8
MAX_ROWS = 2**31 - 2**16


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """How one CTA works.

    Attributes:
        warps: of the CTA.
        groups: of eight rows, of a warp.
        ctas: that an SM shall hold at least; the registers a thread may take follow.
    """

    warps: int
    groups: int
    ctas: int

    def __str__(self) -> str:
        return f"w{self.warps}g{self.groups}c{self.ctas}"

    @property
    def rows(self) -> int:
        """Of a CTA."""
        return self.warps * self.groups * WARP_ROWS

    def macros(self) -> dict[str, str | int]:
        """What the source is compiled with."""
        return {"WARPS": self.warps, "GROUPS": self.groups, "CTAS": self.ctas}


class Operands(NamedTuple):
    """What a kernel is compiled for besides the problem's facts.

    Attributes:
        wide: every row that is read starts on 16 bytes.
        store: bytes of a store.
        weight, bias, table, gates: dtypes, None where there is no such tensor.
        position_bytes: of a position.
    """

    wide: bool = True
    store: int = 8
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    table: torch.dtype | None = None
    gates: torch.dtype | None = None
    position_bytes: int = 8

    def macros(self) -> dict[str, str | int]:
        """What the source is compiled with."""
        types = {"WEIGHT": self.weight, "BIAS": self.bias, "TABLE": self.table, "GATES": self.gates}
        return {
            "WIDE": int(self.wide),
            "STORE": self.store,
            "POSITION_BYTES": self.position_bytes,
            **{f"{name}_TYPE": -1 if dtype is None else WIDE_DTYPES.index(dtype) for name, dtype in types.items()},
        }


def heuristic(rows: int, transform: Transform, arch: Arch, *, registers: int = 48) -> RowsConfig:
    """Small CTAs, so that loads of one fall into the arithmetic of others; of one warp where rows are few.

    48 registers a thread let 40 warps of an SM wait for loads and shuffles; with LayerNorm's gains 64 are better.
    """
    if rows < 2 * arch.units * 2 * WARP_ROWS:
        return RowsConfig(1, 1, 16)
    return RowsConfig(2, 1, 20 if registers == 48 and not transform.norm else 16)


def neighbours(rows: int, transform: Transform, arch: Arch) -> list[RowsConfig]:
    """What a tuning run measures, the heuristic's choice first."""
    chosen = heuristic(rows, transform, arch)
    sizes = ((2, 1, 10), (2, 1, 12), (2, 1, 16), (2, 1, 20), (2, 2, 12), (2, 4, 12), (4, 1, 8), (4, 2, 5))
    return [chosen, *(other for other in (RowsConfig(*size) for size in sizes) if other != chosen)]


def unsupported(arch: Arch, head_dim: int, rows: int, transform: Transform) -> str | None:
    """None, or why these kernels do not run rows of that kind there."""
    if arch.name != "sm90":
        return f"needs sm90 (H100, H200), this is {arch.name}"
    if head_dim != HEAD_DIM:
        return f"D={head_dim} is not {HEAD_DIM}"
    if rows > MAX_ROWS:
        return f"{rows} rows are more than {MAX_ROWS}: a row's number is an int32"
    if transform.rope is not None and transform.rope_dim % (32 if transform.interleaved else 64):
        pairs = "interleaved pairs" if transform.interleaved else "pairs"
        multiple = 32 if transform.interleaved else 64
        return (
            f"RoPE of {transform.rope_dim} channels is not of a multiple of {multiple}, whose {pairs} lie in one lane"
        )
    return None


def macros_of(transform: Transform, dtype: torch.dtype) -> dict[str, str | int]:
    """What a source is compiled with for a transform of rows of a dtype."""
    return {
        "TYPE": WIDE_DTYPES.index(dtype),
        "PLAIN": int(transform == Transform()),
        "ROPE_DIM": transform.rope_dim if transform.rope is not None else 0,
        "ROPE_LAST": int(transform.rope == "last"),
        "INTERLEAVED": int(transform.interleaved),
        "HADAMARD": int(transform.hadamard),
    }


def steps_name(transform: Transform) -> str:
    """A transform, in a kernel's name."""
    parts = ["_norm"] if transform.norm else []
    if transform.rope is not None:
        parts.append(f"_rope{transform.rope_dim}{transform.rope}{'i' if transform.interleaved else ''}")
    return "".join([*parts, *(["_hadamard"] if transform.hadamard else [])])


def address(tensor: torch.Tensor | None) -> int:
    """Of the first element, 0 of none."""
    return 0 if tensor is None else tensor.data_ptr()


class RowsLaunch:
    """A kernel for one problem; called with the tensors, it runs on the current stream.

    A class that derives from it says its source, its arguments' struct behind the stream and the pointer to it, what
    the kernel is compiled for given a call, and the arguments of a call.
    """

    source: Source
    packed: struct.Struct

    def __init__(self, name: str, rows: int, config: RowsConfig, facts: dict[str, str | int]) -> None:
        self.name, self.rows, self.config, self.facts = name, rows, config, facts
        self.offset = driver.Slot.POINTERS + struct.calcsize("<Q")
        self.argument_bytes = self.packed.size - struct.calcsize(f"<{driver.Slot.HEAD} Q")
        # By device and operands: room for the arguments of one launch each; a thread takes one, or makes it.
        self.slots: dict[tuple[int, tuple[Any, ...]], list[driver.Slot]] = {}

    def usual(self) -> Operands:
        """What it is compiled for ahead of a call: vectors and tables of float32, tensors as torch allocates them."""
        raise NotImplementedError

    def arguments(self, call: Any) -> tuple[Any, ...]:
        """The fields of the arguments' struct."""
        raise NotImplementedError

    def kinds(self, call: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The fields of ``Operands`` that the kernel has to be compiled for to run this call."""
        raise NotImplementedError

    def operands(self, call: Any) -> Operands:
        """The same, of a call alone."""
        return Operands(*self.kinds(call, self.arguments(call)))

    def macros(self, operands: Operands) -> dict[str, str | int]:
        """What the source is compiled with."""
        own: dict[str, str | int] = {"KERNEL_NAME": self.name, "ARGUMENT_BYTES": self.argument_bytes}
        return {**own, **self.config.macros(), **self.facts, **operands.macros()}

    def precompile(self, operands: Operands) -> str:
        """Compiles the kernel into the disk cache; gives its name."""
        nvrtc.cubin(self.source, NVRTC_ARCH, self.macros(operands))
        return self.name

    def __call__(self, call: Any) -> None:
        device = call[0].get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(call)
        arguments = self.arguments(call)
        key = device, self.kinds(call, arguments)
        try:
            slot = self.slots[key].pop()
        except (KeyError, IndexError):
            slot = self._new_slot(*key)
        stream = torch._C._cuda_getCurrentRawStream(device)
        self.packed.pack_into(slot.buffer, driver.Slot.START, stream, slot.address + self.offset, *arguments)
        # The driver copies the arguments before it returns.
        status = slot.launch()
        self.slots[key].append(slot)
        if status:
            driver.check((status,))
        return None

    def _new_slot(self, device: int, kinds: tuple[Any, ...]) -> driver.Slot:
        self.slots.setdefault((device, kinds), [])
        function = _function(self.source, self.name, tuple(self.macros(Operands(*kinds)).items()), device)
        grid = (-(-self.rows // self.config.rows), 1, 1)
        return driver.Slot(function, grid, 32 * self.config.warps, 0, self.packed.size)


@functools.cache
def _function(source: Source, name: str, macros: tuple[tuple[str, str | int], ...], device: int) -> int:
    """The handle of a kernel on the device, which is the current one."""
    return driver.load(nvrtc.cubin(source, NVRTC_ARCH, dict(macros)), name, 0)
