"""What the kernel is written in: FlyDSL's values next to MLIR's own operations, types by their text, control flow."""

from __future__ import annotations

import contextlib

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm, scf
from flydsl.expr import arith, rocdl
from flydsl.expr.typing import as_ir_value


def ty(text):
    return ir.Type.parse(text)


def i32(value):
    return fx.Int32(value)


def wide(value):
    """An int32 that is not negative, as int64."""
    return fx.Int64(fx.Uint32(value))


def select(condition, a, b):
    return type(a)(arith.select(condition, a, b))


def uniform(value):
    """An int32 that is the same in every lane: from here on in a scalar register."""
    return fx.Int32(rocdl.readfirstlane(ty("i32"), value))


def constant(value, kind="i32"):
    attribute = ir.FloatAttr if isinstance(value, float) else ir.IntegerAttr
    return llvm.mlir_constant(attribute.get(ty(kind), value))


def no_policy():
    """The cache policy of an access that asks for none."""
    return ir.IntegerAttr.get(ty("i32"), 0)


def zeros(count):
    return llvm.mlir_constant(
        ir.DenseElementsAttr.get_splat(ty(f"vector<{count}xf32>"), ir.FloatAttr.get(ty("f32"), 0.0))
    )


def element(vector, index):
    return llvm.extractelement(vector, constant(index))


def pair(a, b):
    """Two floats as the vector that packed instructions take."""
    both = llvm.insertelement(llvm.mlir_undef(ty("vector<2xf32>")), a, constant(0))
    return llvm.insertelement(both, b, constant(1))


def shuffle(a, b, mask, kind="i32"):
    return llvm.shufflevector(ty(f"vector<{len(mask)}x{kind}>"), a, b, mask)


def bits(value):
    return llvm.bitcast(ty("i32"), value)


def floats(value):
    return llvm.bitcast(ty("f32"), value)


def at(base, offset, space=1):
    """base + offset bytes, in global memory (1) or LDS (3)."""
    byte, dynamic = ir.IntegerType.get_signless(8), [-(2**31)]
    return llvm.getelementptr(
        ty(f"!llvm.ptr<{space}>"), base, [as_ir_value(offset)], dynamic, byte, llvm.GEPNoWrapFlags.none
    )


def load(kind, base, offset, align, space=1):
    return llvm.load(ty(kind), at(base, offset, space), alignment=align)


@contextlib.contextmanager
def when(condition):
    """``with when(condition):`` is ``if condition:``."""
    branch = scf.IfOp(as_ir_value(condition), [], has_else=False)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.YieldOp([])


class Loop:
    """``with Loop(start, stop, step, values) as (index, loop):`` is ``for index in range(start, stop, step):``.

    ``loop.carried`` holds the values at the beginning of a pass, and at its end what to begin the next one with.
    """

    def __init__(self, start, stop, step, values=()):
        self.op = scf.ForOp(*(as_ir_value(i32(v)) for v in (start, stop, step)), [as_ir_value(v) for v in values])
        self.carried = list(self.op.inner_iter_args)

    def __enter__(self):
        self.point = ir.InsertionPoint(self.op.body)
        self.point.__enter__()
        return i32(self.op.induction_variable), self

    def __exit__(self, *error):
        if error[0] is None:
            scf.YieldOp([as_ir_value(v) for v in self.carried])
        return self.point.__exit__(*error)
