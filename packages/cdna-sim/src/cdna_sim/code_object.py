"""AMD code objects: the ELF file that a GPU loads, read without a GPU.

Sources: LLVM's "User Guide for AMDGPU Backend" (code object V3 to V6: ELF header, metadata, kernel descriptor, initial
register state), the System V ABI for the ELF structures.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from elftools.common.exceptions import ELFError
from elftools.construct.core import ConstructError
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import Section, SymbolTableSection

from cdna_sim.arch import ARCHS
from cdna_sim.occupancy import waves_per_simd


class CodeObjectError(ValueError):
    """The bytes are not a code object this reader understands; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: ``offset`` and ``size`` in bytes of the kernarg segment; ``kind`` is ``.value_kind``."""

    name: str
    offset: int
    size: int
    kind: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The 64-byte kernel descriptor.

    Attributes:
        lds_bytes: static LDS of a workgroup.
        scratch_bytes: private memory of a lane.
        kernarg_bytes: size of the kernarg segment; 0 where the compiler left it to the metadata.
        entry: virtual address of the first instruction.
        rsrc1, rsrc2, rsrc3: COMPUTE_PGM_RSRC registers.
        properties: KERNEL_CODE_PROPERTIES, which says what the user SGPRs hold.
        preload_offset, preload_length: kernarg dwords that arrive in SGPRs. Firmware that preloads enters 256 bytes
            after ``entry``; the code before that loads them.
    """

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload_offset: int
    preload_length: int


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel occupies.

    Attributes:
        vgpr: vector registers of a lane, accumulation registers included (one file of 512 since gfx90a).
        agpr: the accumulation registers among them.
        sgpr: scalar registers of a wave, VCC included.
        lds: bytes of a workgroup.
        scratch: bytes of a lane.
        vgpr_spills, sgpr_spills: registers that the compiler spilled.
        waves_per_simd: waves that fit one SIMD at once; None on an arch without a row in ``ARCHS``.
    """

    vgpr: int
    agpr: int
    sgpr: int
    lds: int
    scratch: int
    vgpr_spills: int
    sgpr_spills: int
    waves_per_simd: int | None


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """One kernel of a code object; ``text`` is the range of virtual addresses [start, stop) of its code."""

    name: str
    descriptor: Descriptor
    arguments: tuple[Argument, ...]
    max_workgroup: int
    wavefront: int
    text: tuple[int, int]
    resources: Resources

    @property
    def kernarg_bytes(self) -> int:
        """Size of the kernarg segment: the descriptor's, or what the arguments need."""
        needed = max((argument.offset + argument.size for argument in self.arguments), default=0)
        return max(self.descriptor.kernarg_bytes, needed)


class CodeObject:
    """A loaded code object.

    Attributes:
        elf: the file.
        arch: e.g. ``gfx950``.
        image: the loadable segments at their virtual addresses, from 0; what is not in the file is zero.
        kernels: by name.
    """

    def __init__(self, elf: bytes) -> None:
        """Reads ``elf``.

        Raises:
            CodeObjectError: not an AMD GPU ELF file, truncated, or with relocations that a loader would have to apply.
        """
        self.elf = elf
        if elf[:6] != b"\x7fELF\x02\x01":
            raise CodeObjectError("not a 64-bit little-endian ELF file")
        try:
            machine = struct.unpack_from("<H", elf, 0x12)[0]
            if machine != _EM_AMDGPU:
                raise CodeObjectError(f"e_machine: got {machine}, expected {_EM_AMDGPU} (AMD GPU)")
            file = ELFFile(io.BytesIO(elf))
            sections = list(_sections(file))
            self.image = _image(file)
            metadata = _metadata(sections)
            self.arch = _arch(file, metadata)
            self.kernels = self._read_kernels(metadata, sections)
        except _DAMAGE as error:
            if isinstance(error, CodeObjectError):
                raise
            raise CodeObjectError(f"damaged code object: {error}") from error

    @classmethod
    def load(cls, source: bytes | bytearray | memoryview | str | Path) -> CodeObject:
        """A code object from its bytes, or from the file at a path.

        Raises:
            CodeObjectError: as the class.
            OSError: the file cannot be read.
        """
        if isinstance(source, str | Path):
            return cls(Path(source).read_bytes())
        return cls(bytes(source))

    def kernel(self, name: str | None = None) -> KernelInfo:
        """The kernel of that name; without a name, the only one.

        Raises:
            CodeObjectError: no such kernel, or several and no name.
        """
        if name is None and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise CodeObjectError(f"kernel: got {name!r}, expected one of {', '.join(self.kernels) or 'none at all'}")
        return self.kernels[name]

    def _read_kernels(self, metadata: dict[str, Any], sections: list[Section]) -> dict[str, KernelInfo]:
        described = {str(kernel[".symbol"]): kernel for kernel in metadata.get("amdhsa.kernels", ())}
        symbols = dict(_symbols(sections))
        descriptors = [name for name in symbols if name.endswith(".kd")]
        if absent := described.keys() - set(descriptors):
            raise CodeObjectError(f"no kernel descriptor for {', '.join(sorted(absent))}")
        ranges = [(int(section["sh_addr"]), int(section["sh_size"])) for section in sections]
        kernels = (self._read_kernel(name, described.get(name, {}), symbols, ranges) for name in descriptors)
        return {kernel.name: kernel for kernel in kernels}

    def _read_kernel(
        self,
        symbol: str,
        metadata: dict[str, Any],
        symbols: dict[str, tuple[int, int]],
        ranges: list[tuple[int, int]],
    ) -> KernelInfo:
        name = symbol.removesuffix(".kd")
        descriptor = _descriptor(self.image, symbols[symbol][0])
        start, size = symbols.get(name, (descriptor.entry, 0))
        end = next((at + length for at, length in ranges if at <= start < at + length), None)
        if end is None:
            raise CodeObjectError(f"damaged code object: the code of {name}, at {start:#x}, is in no section")
        wavefront = int(metadata.get(".wavefront_size", 32 if descriptor.properties >> 10 & 1 else 64))
        max_workgroup = int(metadata.get(".max_flat_workgroup_size", 1024))
        arguments = tuple(
            Argument(str(a.get(".name", "")), int(a[".offset"]), int(a[".size"]), str(a[".value_kind"]))
            for a in metadata.get(".args", ())
        )
        vgpr = int(metadata.get(".vgpr_count", ((descriptor.rsrc1 & 0x3F) + 1) * 8))
        sgpr = int(metadata.get(".sgpr_count", ((descriptor.rsrc1 >> 6 & 0xF) // 2 + 1) * 16))
        # Without metadata: AGPRs start at ACCUM_OFFSET, in steps of four.
        agpr = int(metadata.get(".agpr_count", max(0, vgpr - ((descriptor.rsrc3 & 0x3F) + 1) * 4)))
        resources = Resources(
            vgpr, agpr, sgpr, descriptor.lds_bytes, descriptor.scratch_bytes,
            int(metadata.get(".vgpr_spill_count", 0)), int(metadata.get(".sgpr_spill_count", 0)),
            waves_per_simd(self.arch, vgpr, sgpr, descriptor.lds_bytes, -(-max_workgroup // wavefront)),
        )  # fmt: skip
        text = (start, start + size if size else end)
        return KernelInfo(name, descriptor, arguments, max_workgroup, wavefront, text, resources)


_EM_AMDGPU = 224
_NT_AMDGPU_METADATA = 32
# EF_AMDGPU_MACH, the low byte of e_flags.
_MACHINES = {arch.machine: arch.name for arch in ARCHS.values()} | {
    0x48: "gfx1200", 0x4E: "gfx1201", 0x49: "gfx1250",
}  # fmt: skip
# What the readers of ELF and MessagePack raise on bytes that are not what they seem.
_DAMAGE = (
    struct.error, IndexError, KeyError, TypeError, AttributeError, ValueError, OverflowError, AssertionError,
    MemoryError, ELFError, ConstructError, msgpack.exceptions.UnpackException,
)  # fmt: skip


def _sections(file: ELFFile) -> Iterator[Section]:
    """Every section; what is not all in the file is refused."""
    length = file.stream.seek(0, io.SEEK_END)
    for section in file.iter_sections():
        if isinstance(section, RelocationSection) and section["sh_size"]:
            raise CodeObjectError(f"section {section.name} holds relocations, which this loader does not apply")
        if section["sh_type"] != "SHT_NOBITS" and section["sh_offset"] + section["sh_size"] > length:
            raise CodeObjectError(f"damaged code object: section {section.name} goes on past the end of the file")
        yield section


def _image(file: ELFFile) -> bytes:
    loads = [segment for segment in file.iter_segments() if segment["p_type"] == "PT_LOAD"]
    if not loads:
        raise CodeObjectError("no loadable segment: an object file that has not been linked")
    size = max(segment["p_vaddr"] + segment["p_memsz"] for segment in loads)
    if size > _LARGEST:
        raise CodeObjectError(f"damaged code object: an image of {size} bytes")
    image = bytearray(size)
    for segment in loads:
        data = segment.data()
        image[segment["p_vaddr"] : segment["p_vaddr"] + len(data)] = data
    return bytes(image)


# Far more than any code object takes; a damaged header may ask for anything.
_LARGEST = 1 << 30


def _metadata(sections: list[Section]) -> dict[str, Any]:
    for section in sections:
        if section["sh_type"] == "SHT_NOTE":
            for kind, description in _notes(section.data()):
                if kind == _NT_AMDGPU_METADATA:
                    metadata = msgpack.unpackb(description, strict_map_key=False)
                    return metadata if isinstance(metadata, dict) else {}
    return {}


def _notes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, description) of each note. pyelftools names the types of other vendors' notes only, and reads their names
    as text."""
    at = 0
    while at + 12 <= len(data):
        name, size, kind = struct.unpack_from("<III", data, at)
        at += 12 + (name + 3 & ~3)
        yield kind, data[at : at + size]
        at += size + 3 & ~3


def _arch(file: ELFFile, metadata: dict[str, Any]) -> str:
    target = metadata.get("amdhsa.target")
    if target:
        # amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-
        return str(target).split(":")[0].rsplit("-", 1)[1]
    machine = int(file["e_flags"]) & 0xFF
    if machine not in _MACHINES:
        raise CodeObjectError(f"e_flags: got machine {machine:#x}, expected one of {', '.join(_MACHINES.values())}")
    return _MACHINES[machine]


def _symbols(sections: list[Section]) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (virtual address, size)) of what is defined."""
    for section in sections:
        if isinstance(section, SymbolTableSection):
            for symbol in section.iter_symbols():
                if symbol.name and symbol["st_shndx"] != "SHN_UNDEF":
                    yield symbol.name, (int(symbol["st_value"]), int(symbol["st_size"]))


def _descriptor(image: bytes, at: int) -> Descriptor:
    lds, scratch, kernarg = struct.unpack_from("<3I", image, at)
    (entry,) = struct.unpack_from("<q", image, at + 16)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<3I2H", image, at + 44)
    return Descriptor(
        lds, scratch, kernarg, at + entry, rsrc1, rsrc2, rsrc3, properties,
        preload_offset=preload >> 7, preload_length=preload & 0x7F,
    )  # fmt: skip
