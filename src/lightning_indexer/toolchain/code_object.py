"""AMD code objects: the ELF file that a GPU loads, read without a GPU.

Sources: LLVM's "User Guide for AMDGPU Backend" (code object V3 to V6: ELF header, metadata, kernel descriptor, initial
register state), the System V ABI for the ELF structures.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from lightning_indexer.toolchain import msgpack
from lightning_indexer.toolchain.occupancy import waves_per_simd


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
        waves_per_simd: waves that fit one SIMD at once; None on an arch without a table here.
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
        try:
            self._sections = _sections(elf)
            self.image = _image(elf)
            self._metadata = self._read_metadata()
            self.arch = self._read_arch()
            self._symbols = self._read_symbols()
            self.kernels = self._read_kernels()
        except (struct.error, IndexError, ValueError) as error:
            if isinstance(error, CodeObjectError):
                raise
            raise CodeObjectError(f"damaged code object: {error}") from error

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

    def _read_metadata(self) -> dict[str, Any]:
        for section in self._sections.values():
            if section.type == _SHT_NOTE:
                note = self.elf[section.offset : section.offset + section.size]
                for kind, description in _notes(note):
                    if kind == _NT_AMDGPU_METADATA:
                        metadata = msgpack.unpack(description)
                        return metadata if isinstance(metadata, dict) else {}
        return {}

    def _read_arch(self) -> str:
        target = self._metadata.get("amdhsa.target")
        if target:
            # amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-
            return str(target).split(":")[0].rsplit("-", 1)[1]
        machine = struct.unpack_from("<I", self.elf, 0x30)[0] & 0xFF
        if machine not in _MACHINES:
            raise CodeObjectError(f"e_flags: got machine {machine:#x}, expected one of {', '.join(_MACHINES.values())}")
        return _MACHINES[machine]

    def _read_symbols(self) -> dict[str, tuple[int, int]]:
        """``{name: (virtual address, size)}``."""
        found: dict[str, tuple[int, int]] = {}
        for section in self._sections.values():
            if section.type not in (_SHT_SYMTAB, _SHT_DYNSYM):
                continue
            strings = list(self._sections.values())[section.link].offset
            for at in range(section.offset, section.offset + section.size, 24):
                name, _info, _other, index, value, size = struct.unpack_from("<IBBHQQ", self.elf, at)
                if name and index:  # index 0: undefined
                    found[_string(self.elf, strings + name)] = (value, size)
        return found

    def _read_kernels(self) -> dict[str, KernelInfo]:
        described = {str(kernel[".symbol"]): kernel for kernel in self._metadata.get("amdhsa.kernels", ())}
        symbols = [symbol for symbol in self._symbols if symbol.endswith(".kd")]
        if absent := described.keys() - set(symbols):
            raise CodeObjectError(f"no kernel descriptor for {', '.join(sorted(absent))}")
        kernels = (self._read_kernel(symbol, described.get(symbol, {})) for symbol in symbols)
        return {kernel.name: kernel for kernel in kernels}

    def _read_kernel(self, symbol: str, metadata: dict[str, Any]) -> KernelInfo:
        name = symbol.removesuffix(".kd")
        descriptor = _descriptor(self.image, self._symbols[symbol][0])
        start, size = self._symbols.get(name, (descriptor.entry, 0))
        text = next(s for s in self._sections.values() if s.address <= start < s.address + s.size)
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
        stop = start + size if size else text.address + text.size
        return KernelInfo(name, descriptor, arguments, max_workgroup, wavefront, (start, stop), resources)


_SHT_SYMTAB, _SHT_RELA, _SHT_NOTE, _SHT_REL, _SHT_DYNSYM = 2, 4, 7, 9, 11
_PT_LOAD = 1
_EM_AMDGPU = 224
_NT_AMDGPU_METADATA = 32
# EF_AMDGPU_MACH, the low byte of e_flags.
_MACHINES = {0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950", 0x48: "gfx1200", 0x4E: "gfx1201", 0x49: "gfx1250"}


@dataclass(frozen=True, slots=True)
class _Section:
    type: int
    address: int
    offset: int
    size: int
    link: int


def _sections(elf: bytes) -> dict[str, _Section]:
    """Section headers by name, in the order of the file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise CodeObjectError("not a 64-bit little-endian ELF file")
    if (machine := struct.unpack_from("<H", elf, 0x12)[0]) != _EM_AMDGPU:
        raise CodeObjectError(f"e_machine: got {machine}, expected {_EM_AMDGPU} (AMD GPU)")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry, count, names = struct.unpack_from("<3H", elf, 0x3A)
    raw = [struct.unpack_from("<IIQQQQIIQQ", elf, table + index * entry) for index in range(count)]
    found: dict[str, _Section] = {}
    for index, (name, kind, _flags, address, offset, size, link, _info, _align, _entry) in enumerate(raw):
        label = _string(elf, raw[names][4] + name) or f"#{index}"
        if kind in (_SHT_RELA, _SHT_REL) and size:
            raise CodeObjectError(f"section {label} holds relocations, which this loader does not apply")
        found[label if label not in found else f"{label}#{index}"] = _Section(kind, address, offset, size, link)
    return found


def _image(elf: bytes) -> bytes:
    (table,) = struct.unpack_from("<Q", elf, 0x20)
    entry, count = struct.unpack_from("<2H", elf, 0x36)
    segments = [struct.unpack_from("<IIQQQQQQ", elf, table + index * entry) for index in range(count)]
    loads = [segment for segment in segments if segment[0] == _PT_LOAD]
    if not loads:
        raise CodeObjectError("no loadable segment: an object file that has not been linked")
    image = bytearray(max(address + in_memory for _, _, _, address, _, _, in_memory, _ in loads))
    for _, _, offset, address, _, in_file, _, _ in loads:
        image[address : address + in_file] = elf[offset : offset + in_file]
    return bytes(image)


def _notes(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at + 12 <= len(data):
        name, size, kind = struct.unpack_from("<III", data, at)
        at += 12 + (name + 3 & ~3)
        found.append((kind, data[at : at + size]))
        at += size + 3 & ~3
    return found


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _descriptor(image: bytes, at: int) -> Descriptor:
    lds, scratch, kernarg = struct.unpack_from("<3I", image, at)
    (entry,) = struct.unpack_from("<q", image, at + 16)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<3I2H", image, at + 44)
    return Descriptor(
        lds, scratch, kernarg, at + entry, rsrc1, rsrc2, rsrc3, properties,
        preload_offset=preload >> 7, preload_length=preload & 0x7F,
    )  # fmt: skip
