"""A FlyDSL kernel for test_amd.py: ``out[i] = x[i] + x[i]``, one element a lane; after FlyDSL's vector addition."""

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch


@flyc.kernel
def double_kernel(x: fx.Tensor, out: fx.Tensor, lanes: fx.Constexpr[int]):
    x_of_block = fx.slice(fx.logical_divide(x, fx.make_layout(lanes, 1)), (None, fx.block_idx.x))
    out_of_block = fx.slice(fx.logical_divide(out, fx.make_layout(lanes, 1)), (None, fx.block_idx.x))
    x_of_block = fx.logical_divide(x_of_block, fx.make_layout(1, 1))
    out_of_block = fx.logical_divide(out_of_block, fx.make_layout(1, 1))
    atom = fx.make_copy_atom(fx.UniversalCopy32b(), fx.Float32)
    register = fx.make_rmem_tensor(1, fx.Float32)
    fx.copy_atom_call(atom, fx.slice(x_of_block, (None, fx.thread_idx.x)), register)
    value = fx.memref_load_vec(register)
    fx.memref_store_vec(fx.arith.addf(value, value), register)
    fx.copy_atom_call(atom, register, fx.slice(out_of_block, (None, fx.thread_idx.x)))


@flyc.jit
def double(x: fx.Tensor, out: fx.Tensor, blocks: fx.Int32, lanes: fx.Constexpr[int], stream: fx.Stream):
    double_kernel(x, out, lanes).launch(grid=(blocks, 1, 1), block=[lanes, 1, 1], stream=stream)


def make(lanes: int):
    """The launcher and the arguments that specialise it."""
    return double, (torch.zeros(4 * lanes), torch.zeros(4 * lanes), 4, lanes, fx.Stream(None))
