"""Quantising keys into a paged cache: the facts of a call, the checks that every call passes once, and the reference.

Row t of ``k`` is transformed (see ``transform.py``), quantised and written to place ``slot % page`` of block
``slot // page``, ``slot = slot_mapping[t]``. A slot outside of the cache, -1 among them, is skipped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.fp4 import quantize_fp4
from lightning_indexer.fp8 import quantize_rows
from lightning_indexer.problems.cache_layout import TILE, CacheLayout
from lightning_indexer.problems.checks import check_tensor, plain_arithmetic, shape_of
from lightning_indexer.problems.transform import Steps, Transform, check_steps, check_wide, transformed

OPERATION = "insert_k_cache"


class InsertProblem(NamedTuple):
    """What selection, tile heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        tokens, head_dim: T and D.
        layout: of the cache.
        transform: what precedes the quantisation.
        dtype: of k.
    """

    tokens: int
    head_dim: int
    layout: CacheLayout = CacheLayout()
    transform: Transform = Transform()
    dtype: torch.dtype = torch.bfloat16

    @property
    def operation(self) -> str:
        return OPERATION

    def adversarial(self, arch: Arch) -> InsertProblem:
        """A small problem of the same layout and transform: tokens that no tile divides, skipped ones among them."""
        layout = self.layout
        if not layout.is_fp4:
            fp8 = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
            layout = layout._replace(dtype=fp8)
        return self._replace(tokens=197, layout=layout)

    def example(self, device: torch.device) -> InsertCall:
        """A call of this problem with operands that are the same at each time."""
        return _example(self, device)

    def compare(self, call: InsertCall, expected: InsertCall) -> str | None:
        """None, or in words how the cache of ``call`` differs from that of ``expected``, both :meth:`example`."""
        return difference(self, call.kv_cache, expected.kv_cache)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"T={self.tokens} {dtype} into {self.layout}, {self.transform}"


class InsertCall(NamedTuple):
    """The arguments of one call. What a backend is given has been validated and normalised: ``k`` [T, D], last
    dimension contiguous; ``kv_cache`` as its layout says; ``slot_mapping`` int64 [T], contiguous; ``steps`` with
    contiguous vectors; ``layout``."""

    k: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    layout: CacheLayout | None = None
    steps: Steps = Steps()
    backend: str | None = None


def validate(call: InsertCall) -> InsertCall:
    """Checks one call's arguments; returns them normalised.

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
    """
    check_wide("k", call.k, "[T, D]", 2)
    tokens, head_dim = call.k.shape
    layout = call.layout
    if layout is None:
        layout = CacheLayout.implied(call.kv_cache, head_dim)
    elif not isinstance(layout, CacheLayout):
        raise TypeError(f"layout: got {type(layout).__name__}, expected a CacheLayout or None")
    if layout.validate().head_dim != head_dim:
        raise ValueError(f"layout: got D={layout.head_dim}, expected {head_dim} to match k of shape {shape_of(call.k)}")
    layout.check(call.kv_cache)
    check_tensor("slot_mapping", call.slot_mapping, (torch.int64,), ": pass slot_mapping.to(torch.int64)")
    if tuple(call.slot_mapping.shape) != (tokens,):
        raise ValueError(f"slot_mapping: got shape {shape_of(call.slot_mapping)}, expected [{tokens}] to match k")
    for name, tensor in (("kv_cache", call.kv_cache), ("slot_mapping", call.slot_mapping)):
        if tensor.device != call.k.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {call.k.device}, the device of k")
    steps = check_steps(call.steps, tokens, head_dim, call.k.device)
    return call._replace(
        k=call.k.resolve_neg(), slot_mapping=call.slot_mapping.contiguous(), layout=layout, steps=steps
    )


def problem_of(call: InsertCall) -> InsertProblem:
    """The facts of a validated call."""
    assert call.layout is not None
    return InsertProblem(call.k.shape[0], call.k.shape[1], call.layout, call.steps.transform, call.k.dtype)


def quantized(x: torch.Tensor, layout: CacheLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """What a key's bytes are made of: uint8 [T, bytes of values] in the order of channels, uint8 [T, 4] of scale."""
    if layout.is_fp4:
        return quantize_fp4(x)
    values, scale = quantize_rows(x, layout.dtype, power_of_two=layout.scales != "float32")
    bits = scale.contiguous().view(torch.int32)
    if layout.scales == "ue8m0":
        return values.view(torch.uint8), (bits >> 23).to(torch.uint8)[:, None].expand(-1, 4).contiguous()
    return values.view(torch.uint8), bits.view(torch.uint8).view(-1, 4)


def places(kv_cache: torch.Tensor, layout: CacheLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views into a cache: values uint8 [blocks, page, tiles, bytes], a key at a place [block, inner], and scale bytes
    uint8 [blocks, page, 4]. Preshuffled values are [blocks, page/16, 16, D/16, 16], a key at [block, inner / 16,
    inner % 16]."""
    blocks, apart = kv_cache.shape[0], kv_cache.stride(0)
    start, row = kv_cache.storage_offset(), layout.row_bytes
    if layout.order == "preshuffled":
        shape = (blocks, layout.page // TILE, TILE, row // TILE, TILE)
        values = kv_cache.as_strided(shape, (apart, TILE * row, TILE, TILE * TILE, 1))
    else:
        values = kv_cache.as_strided((blocks, layout.page, 1, row), (apart, row, row, 1))
    return values, kv_cache.as_strided((blocks, layout.page, 4), (apart, 4, 1), start + layout.value_bytes)


def reference_insert(
    k: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: CacheLayout, steps: Steps | None = None
) -> None:
    """Writes the keys one by one; reads slots on the host. No backend shares code with it but the quantisation."""
    with plain_arithmetic(k.device):
        values, scales = quantized(transformed(k, steps or Steps()), layout)
        flat = kv_cache.as_strided((kv_cache.shape[0], layout.block_bytes), (kv_cache.stride(0), 1))
        capacity = kv_cache.shape[0] * layout.page
        for token, slot in enumerate(slot_mapping.tolist()):
            if not 0 <= slot < capacity:
                continue
            block, inner = divmod(slot, layout.page)
            row = flat[block]
            start = layout.value_bytes + 4 * inner
            row[start : start + 4] = scales[token]
            if layout.order == "flat":
                row[inner * layout.row_bytes : (inner + 1) * layout.row_bytes] = values[token]
                continue
            for tile in range(layout.row_bytes // TILE):
                at = inner // TILE * TILE * layout.row_bytes + tile * TILE * TILE + inner % TILE * TILE
                row[at : at + TILE] = values[token, tile * TILE : (tile + 1) * TILE]


def difference(problem: InsertProblem, found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None, or how one cache differs from another: in a bit where keys are only quantised, else by more than a step.

    What a transform gives may differ in its last bits, and a value at the middle of two codes takes either.
    """
    layout = problem.layout
    size = found.shape[0], layout.block_bytes
    got, right = (cache.as_strided(size, (cache.stride(0), 1)) for cache in (found, expected))
    if problem.transform == Transform():
        wrong = got != right
        if layout.dtype is torch.float8_e4m3fn:  # the sign of a NaN code is the conversion's
            wrong[:, : layout.value_bytes] &= ((got & right)[:, : layout.value_bytes] & 0x7F) != 0x7F
        if not bool(wrong.any()):
            return None
        block, byte = (int(place) for place in wrong.nonzero()[0])
        return (
            f"{int(wrong.sum())} bytes differ, the first at block {block}, byte {byte}: got {int(got[block, byte])}, "
            f"expected {int(right[block, byte])}"
        )
    a, b = layout.dequantize_blocks(got), layout.dequantize_blocks(right)
    # A step of e4m3 is an eighth of the value, or 2^-9 of a scale; one of e2m1 a third of a block's largest.
    step = b.abs() / 7 + b.abs().amax(dim=-1, keepdim=True) * (0.4 if layout.is_fp4 else 2.0**-16)
    off = (a - b).abs() > step
    off |= a.isnan() != b.isnan()
    count = int((a != b).sum()) - int((a.isnan() & b.isnan()).sum())
    if bool(off.any()):
        block, inner, channel = (int(place) for place in off.nonzero()[0])
        return (
            f"{int(off.sum())} channels are wrong, the first at block {block}, key {inner}, channel {channel}: got "
            f"{float(a[block, inner, channel]):.6g}, expected {float(b[block, inner, channel]):.6g}"
        )
    # A scale that is a last bit off changes a row's 128 values a little, and few are at the middle of two codes.
    exact = layout.scales == "float32"
    a, b = (torch.where(v.isfinite(), v, 0.0).double() for v in (a, b))
    error = float(((a - b) ** 2).sum() / (b**2).sum().clamp(min=1e-300))
    if error > (1e-5 if exact else 1e-3):
        return f"{count} values differ: relative square error {error:.1e}"
    return None


def example_steps(transform: Transform, tokens: int, head_dim: int, device: torch.device) -> Steps:
    """Operands of a transform, the same at each time; positions of all kinds, weights of both signs."""
    generator = torch.Generator("cpu").manual_seed(head_dim + 2 * transform.rope_dim)
    weight = bias = positions = cos_sin = None
    if transform.norm:
        weight = (torch.randn(head_dim, generator=generator) * 0.3 + 1).to(device)
        bias = (torch.randn(head_dim, generator=generator) * 0.2).to(device) if transform.bias else None
    if transform.rope is not None:
        half = transform.rope_dim // 2
        angle = torch.arange(512)[:, None] * 100.0 ** -(torch.arange(half) / half)
        cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1).to(device)
        positions = torch.randint(0, 512, (tokens,), generator=generator).to(device)
    return Steps(
        weight, bias, 1e-5, positions, cos_sin, transform.rope or "first", transform.interleaved, transform.hadamard
    )


def _example(problem: InsertProblem, device: torch.device) -> InsertCall:
    layout, tokens = problem.layout, problem.tokens
    generator = torch.Generator("cpu").manual_seed(problem.head_dim + layout.page)
    k = torch.randn((tokens, problem.head_dim), generator=generator)
    k *= torch.exp2(torch.randint(-20, 10, (tokens, 1), generator=generator).float())
    k[::7] = 0.0
    k.view(-1)[::5] = -0.0
    blocks = -(-tokens // layout.page) + 2
    slots = torch.randperm(blocks * layout.page, generator=generator)[:tokens]
    slots[::11] = -1
    kv_cache = torch.full((blocks, *layout.block_shape), 0x15, dtype=torch.uint8, device=device)
    wide = torch.zeros((tokens, problem.head_dim + 24), dtype=problem.dtype, device=device)
    wide[:, : problem.head_dim] = k.to(problem.dtype).to(device)
    steps = example_steps(problem.transform, tokens, problem.head_dim, device)
    return InsertCall(wide[:, : problem.head_dim], kv_cache, slots.to(device), layout, steps)
