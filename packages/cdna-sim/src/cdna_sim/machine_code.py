"""Machine code to a code object: no assembler, no linker."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgpack

from cdna_sim.arch import ARCHS
from cdna_sim.code_object import CodeObject

_KINDS = {"pointer": ("global_buffer", 8), "u32": ("by_value", 4), "f32": ("by_value", 4), "u64": ("by_value", 8)}
_PRELOADED = 14  # of 16 user SGPRs, two hold the pointer to the arguments
_TEXT = 0x100  # where the code lies; the descriptor is before it, at 0xc0
_S_ENDPGM = b"\x00\x00\x81\xbf"


def from_machine_code(
    code: bytes,
    arch: str,
    arguments: Sequence[tuple[str, str]] = (),
    *,
    name: str = "kernel",
    vgprs: int = 256,
    agprs: int = 0,
    lds: int = 0,
    scratch: int = 0,
    workgroup: int = 1024,
) -> CodeObject:
    """A code object with one kernel of that machine code.

    It starts with the pointer to its arguments in s[0:1]; then, from s2 on, the arguments themselves, if they take at
    most 14 registers; then the numbers of the workgroup along x, y, z. v0 holds those of the work-item, ten bits each.

    Args:
        code: instructions, the last of them s_endpgm.
        arch: e.g. ``gfx950``.
        arguments: (name, type) each; types are ``pointer``, ``u32``, ``f32``, ``u64``, aligned to their size.
        name: the kernel's.
        vgprs, agprs: vector and accumulation registers of a lane.
        lds, scratch: bytes of a workgroup, and of a lane.
        workgroup: the most work-items of one.

    Raises:
        ValueError: an arch or a type that is not known, or code that does not end in s_endpgm.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch: got {arch!r}, expected one of {', '.join(ARCHS)}")
    if code[-4:] != _S_ENDPGM:
        raise ValueError(f"code: got {code[-4:].hex()} at its end, expected {_S_ENDPGM.hex()} (s_endpgm)")
    described, size = [], 0
    for argument, kind in arguments:
        if kind not in _KINDS:
            raise ValueError(f"{argument}: got type {kind!r}, expected one of {', '.join(_KINDS)}")
        value_kind, width = _KINDS[kind]
        size = -(-size // width) * width
        described.append({".name": argument, ".offset": size, ".size": width, ".value_kind": value_kind})
        size += width
    dwords = -(-size // 4)
    preloaded = dwords if dwords <= _PRELOADED else 0
    vector = -(-vgprs // 4) * 4  # AGPRs start at a multiple of four
    metadata = {
        "amdhsa.version": [1, 2],
        "amdhsa.target": f"amdgcn-amd-amdhsa--{arch}",
        "amdhsa.kernels": [{
            ".name": name, ".symbol": f"{name}.kd", ".args": described, ".kernarg_segment_size": 4 * dwords,
            ".kernarg_segment_align": 8, ".group_segment_fixed_size": lds, ".private_segment_fixed_size": scratch,
            ".max_flat_workgroup_size": workgroup, ".wavefront_size": 64, ".sgpr_count": 102,
            ".vgpr_count": vector + agprs, ".agpr_count": agprs,
        }],
    }  # fmt: skip
    # Firmware that preloads arguments enters 256 bytes further on.
    text = (_S_ENDPGM * 64 if preloaded else b"") + code
    descriptor = _descriptor(lds, scratch, 4 * dwords, vector, agprs, preloaded)
    return CodeObject(_elf(ARCHS[arch].machine, name, descriptor, text, msgpack.packb(metadata)))


def _descriptor(lds: int, scratch: int, kernarg: int, vgprs: int, agprs: int, preloaded: int) -> bytes:
    # Granules of 8 VGPRs and of 16 SGPRs; denormals kept in both precisions; DX10 clamp and IEEE mode.
    rsrc1 = (-(-(vgprs + agprs) // 8) - 1) | 12 << 6 | 0xF0 << 12 | 1 << 21 | 1 << 23
    # Scratch; user SGPRs; the workgroup's three numbers; the work-item's three.
    rsrc2 = bool(scratch) | 2 + preloaded << 1 | 7 << 7 | 2 << 11
    rsrc3 = vgprs // 4 - 1
    kernarg_pointer = 1 << 3
    return struct.pack("<III4xq20xIIIHH4x", lds, scratch, kernarg, 64, rsrc3, rsrc1, rsrc2, kernarg_pointer, preloaded)


def _elf(machine: int, name: str, descriptor: bytes, text: bytes, metadata: bytes) -> bytes:
    """One segment: headers, descriptor, text; behind it the note, symbols and names, which are not loaded."""
    loaded = _TEXT + len(text)
    note = struct.pack("<III8s", 7, len(metadata), 32, b"AMDGPU\0\0") + metadata + bytes(-len(metadata) % 4)
    names = b"\0" + name.encode() + b"\0" + name.encode() + b".kd\0"
    symbols = bytes(24)
    for at, kind, section, value, size in ((1, 0x12, 2, _TEXT, len(text)), (len(name) + 2, 0x11, 1, _TEXT - 64, 64)):
        symbols += struct.pack("<IBBHQQ", at, kind, 0, section, value, size)
    headers = b"\0.rodata\0.text\0.note\0.symtab\0.strtab\0.shstrtab\0"
    start = loaded + -loaded % 8
    places = [start]
    for part in (note, symbols, names, headers):
        places.append(places[-1] + len(part) + -len(part) % 8)
    #   name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [
        (0,) * 10,
        (1, 1, 2, _TEXT - 64, _TEXT - 64, 64, 0, 0, 64, 0),
        (9, 1, 6, _TEXT, _TEXT, len(text), 0, 0, 256, 0),
        (15, 7, 0, 0, places[0], len(note), 0, 0, 4, 0),
        (21, 2, 0, 0, places[1], len(symbols), 5, 1, 8, 24),
        (29, 3, 0, 0, places[2], len(names), 0, 0, 1, 0),
        (37, 3, 0, 0, places[3], len(headers), 0, 0, 1, 0),
    ]
    ident = b"\x7fELF\x02\x01\x01\x40\x03" + bytes(7)  # 64 bits, little-endian, AMDGPU HSA, code object V5
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 3, 224, 1, 0, 64, places[-1], machine, 64, 56, 1, 64, len(sections), len(sections) - 1
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, loaded, loaded, 0x1000)
    file = bytearray(places[-1])
    starts = (0, 64, _TEXT - 64, _TEXT, *places[:-1])
    parts = (header, segment, descriptor, text, note, symbols, names, headers)
    for at, part in zip(starts, parts, strict=True):
        file[at : at + len(part)] = part
    return bytes(file) + b"".join(struct.pack("<IIQQQQIIQQ", *section) for section in sections)
