"""Matrix instructions. D = A B + C with A [M, K], B [K, N], M = N; EXEC is ignored.

Layouts, from AMD's CDNA3 and CDNA4 documents:
- A and B: lane ``l`` holds row (column) ``l % M`` and, with G = 64 / M / blocks lane groups, the K / G values of k from
  ``l // M * K / G`` on, in the order of its bytes. The 8-bit operands of f8f6f4 come in two such runs of 16: registers
  0 to 3 hold 16 values of the first half of K, registers 4 to 7 of the second (tested on gfx950 by ROCm's
  composable_kernel, test/mx_mfma_op); 4-bit ones in one run of 32.
- C and D, 32x32: register ``r`` of lane ``l`` is row ``8 * (r // 4) + 4 * (l // 32) + r % 4``, column ``l % 32``;
  16x16: row ``4 * (l // 16) + r``, column ``l % 16``; several such blocks follow each other in registers. 4x4: row
  ``r``, column ``l % 4`` of block ``l // 4``.
- Scales of f8f6f4: one E8M0 byte for 32 values of k: that of lane ``l`` is for row ``l % M`` and k from
  ``32 * (l // M)`` on; op_sel chooses the byte of the scale register.

Numbers: products and sums in float64, then C is added and the sum rounded to float32 once. For fp8 products the sum
before C is exact. Hardware adds in a narrower format whose rounding AMD does not publish.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import VGPR0
from cdna_sim.isa.lanes import Lanes
from cdna_sim.ops.emit import Emitter, register_bits, unknown
from cdna_sim.ops.formats import FLOAT4, SCALE8, float8
from cdna_sim.ops.wave import Wave

_NAME = re.compile(r"V_MFMA_(SCALE_)?(F32|I32|F64)_(\d+)X(\d+)X(\d+)_(?:(\d+)B_)?(\w+)$")
_ELEMENT_BITS = {"F32": 32, "F16": 16, "BF16": 16, "I8": 8}
# f8f6f4 formats by cbsz (A) and blgp (B).
_FORMATS = {0: "FP8", 1: "BF8", 4: "FP4"}
# Operands that a launch has converted, kept by their bytes: of one that stays while another changes, and of one tile
# that several rows or waves multiply.
_KEPT = 256


class Operand:
    """How A or B lies in registers: ``registers`` of them from ``first`` on, and how to see them as [M, K] float64."""

    def __init__(self, first: int, kind: str, size: int, depth: int, blocks: int, dialect: str, halved: bool) -> None:
        self.first, self.kind, self.size, self.depth, self.blocks = first, kind, size, depth, blocks
        self.bits = {"FP8": 8, "BF8": 8, "FP4": 4}.get(kind) or _ELEMENT_BITS[kind]
        self.groups = 64 // size // blocks
        self.per_lane = depth // self.groups
        self.registers = max(1, self.per_lane * self.bits // 32)
        self.runs = 2 if halved and self.bits == 8 else 1
        self.table = float8(dialect, kind).values if kind in ("FP8", "BF8") else None
        self.layout = (kind, size, depth, blocks, dialect, halved)

    def values(self, w: Wave) -> Lanes:
        """[blocks, M, K] in float64; not to be written to."""
        known = w.known.setdefault(Operand, {})
        registers = w.V[self.first : self.first + self.registers]
        key = (self.layout, registers.tobytes())
        found: Lanes | None = known.get(key)
        if found is None:
            if len(known) >= _KEPT:
                known.clear()
            found = known[key] = self._converted(registers)
        return found

    def _converted(self, registers: Lanes) -> Lanes:
        raw = np.ascontiguousarray(registers.T)
        if self.table is not None:
            lanes = self.table.take(raw.view(np.uint8))
        elif self.kind == "FP4":
            codes = raw.view(np.uint8)
            lanes = FLOAT4[np.stack((codes & 15, codes >> 4), -1).reshape(64, -1)]
        elif self.kind == "BF16":
            lanes = (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        elif self.kind == "F16":
            lanes = raw.view(np.float16).astype(np.float64)
        elif self.kind == "I8":
            lanes = raw.view(np.int8).astype(np.float64)
        else:
            lanes = raw.view(np.float32).astype(np.float64)
        if self.groups == 1 and self.runs == 1:
            return lanes.reshape(self.blocks, self.size, self.depth)
        # [block, group, row, run, value] -> [block, row, run, group, value]
        shape = (self.blocks, self.groups, self.size, self.runs, self.per_lane // self.runs)
        return lanes.reshape(shape).transpose(0, 2, 3, 1, 4).reshape(self.blocks, self.size, self.depth)


class Mfma:
    """One matrix instruction, called with the wave.

    Attributes:
        size, depth, blocks: blocks of size x size x depth.
        f8f6f4: of the kind whose operands have formats of their own.
        factors, accumulator: registers that it multiplies, scales included, and that it adds to, as bits.
    """

    def __init__(self, ins: Instruction, e: Emitter) -> None:
        match = _NAME.match(ins.name)
        if match is None:
            raise unknown(ins, "not modelled", e.target.kernel)
        scaled, out, size, _, depth, blocks, kinds = match.groups()
        dialect = e.target.arch.fp8
        self.size, self.depth, self.blocks = int(size), int(depth), int(blocks or 1)
        if out == "F64" or kinds == "XF32":
            raise unknown(ins, "not modelled", e.target.kernel)
        self.f8f6f4 = f8f6f4 = kinds == "F8F6F4"
        accumulate = ins.bits("acc_cd")
        if f8f6f4:
            names = [_FORMATS.get(ins.bits(field), "") for field in ("cbsz", "blgp")]
            if "" in names:
                raise unknown(ins, "a 6-bit format", e.target.kernel)
        else:
            if ins.bits("cbsz") or ins.bits("blgp") or ins.bits("abid"):
                raise unknown(ins, "a broadcast (cbsz, abid, blgp)", e.target.kernel)
            names = kinds.split("_") if "_" in kinds else [kinds, kinds]
        self.a, self.b = (
            Operand(
                ins.bits(field) - VGPR0 + 256 * (ins.bits("acc") >> index & 1),
                names[index], self.size, self.depth, self.blocks, dialect, f8f6f4,
            )
            for index, field in enumerate(("src0", "src1"))
        )  # fmt: skip
        if min(ins.bits("src0"), ins.bits("src1")) < VGPR0:
            raise unknown(ins, "a scalar matrix operand", e.target.kernel)
        self.integer = out == "I32"
        self.registers = self.size * self.size * self.blocks // 64
        self.first = ins.bits("vdst") - VGPR0 + 256 * accumulate
        third = ins.bits("src2")
        self.third = third - VGPR0 + 256 * accumulate if third >= VGPR0 else None
        self.constant = 0.0 if self.third is not None else self._constant(e, ins, third)
        self.scales = [self._scale(e, ins, index) for index in range(2)] if scaled else None
        for operand in (self.a, self.b):
            e.use_vgpr(operand.first, operand.registers)
        e.write_vgpr(self.first, self.registers)
        self.factors, self.accumulator = e.read, 0
        if self.third is not None:
            self.accumulator = register_bits(self.third, self.registers)
            e.use_vgpr(self.third, self.registers)

    def _constant(self, e: Emitter, ins: Instruction, number: int) -> float:
        value = e._inline(ins, number, "u")
        if value is None:
            raise unknown(ins, "a scalar accumulator", e.target.kernel)
        dtype: Any = np.int32 if self.integer else np.float32
        return float(np.array(value, np.uint32).view(dtype))

    def _scale(self, e: Emitter, ins: Instruction, index: int) -> Callable[[Wave], Lanes]:
        """Scales of an operand, [M, K / 32], from the byte of each lane that op_sel chooses."""
        number = ins.bits(f"scale_src{index}")
        byte = (ins.bits("opsel") >> index & 1) | (ins.bits("opsel_hi") >> index & 1) << 1
        size = self.size
        if number >= VGPR0:
            register = number - VGPR0
            e.use_vgpr(register)
            return lambda w: SCALE8[w.v[register].view(np.uint8)[byte::4]].reshape(-1, size).T
        if number < 128:
            e.use_sgpr(number)
            return lambda w: np.broadcast_to(SCALE8[w.S[number] >> 8 * byte & 255], (size, 64 // size))
        value = e._inline(ins, number, "u")
        if value is None:
            raise unknown(ins, f"scale operand {number}", e.target.kernel)
        scale = np.full((size, 64 // size), SCALE8[value >> 8 * byte & 255])
        return lambda w: scale

    def __call__(self, w: Wave) -> None:
        a, b = self.a.values(w), self.b.values(w)
        if self.scales is not None:
            shape = (self.size, -1, 32)
            a, b = (
                (matrix.reshape(shape) * scale(w)[:, :, None]).reshape(1, self.size, self.depth)
                for matrix, scale in zip((a, b), self.scales, strict=True)
            )
        product = a[0] @ b[0].T if self.blocks == 1 else np.matmul(a, b.transpose(0, 2, 1))
        size = self.size
        if size == 4:  # registers [row], lanes [block, column]
            result = product.transpose(1, 0, 2).reshape(4, 64)
        else:
            # [block, group of rows, part, row in 4, column] -> registers [block, group, row in 4], lanes [part, column]
            parts = 64 // size
            shaped = product.reshape(self.blocks, size // 4 // parts, parts, 4, size).transpose(0, 1, 3, 2, 4)
            result = shaped.reshape(self.registers, 64)
        registers = slice(self.first, self.first + self.registers)
        if self.integer:
            total = result.astype(np.int64)
            if self.third is not None:
                total += w.V[self.third : self.third + self.registers].view(np.int32)
            else:
                total += int(self.constant)
            w.V[registers] = total.astype(np.uint32)
            return
        if self.third is not None:
            result = result + w.V[self.third : self.third + self.registers].view(np.float32)
        elif self.constant:
            result = result + self.constant
        w.V[registers].view(np.float32)[:] = result


def emit(e: Emitter, ins: Instruction) -> None:
    operation = Mfma(ins, e)
    e.line(f"{e.const(operation)}(w)")
