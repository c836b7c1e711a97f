"""Gathering keys out of a paged cache: the facts of a call, the checks that every call passes once, and the reference.

    k[n], kv_scale[n] = key p of sequence b,    n = cu[b] + p,    cu[b] <= n < cu[b + 1]

Key p of b lies at place ``p % page`` of block ``block_tables[b, p // page]``. ``cu`` is ``cu_seq_lens``, or of
compressed sequences the sums of ``(cu_seq_lens[b + 1] - cu_seq_lens[b]) // compress_ratio``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.chunking import MAX_KEYS
from lightning_indexer.fp4 import FP4, fp4_to_fp8
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.checks import as_int, check_tensor, plain_arithmetic, shape_of

OPERATION = "gather_k_cache"


class GatherProblem(NamedTuple):
    """What selection, tile heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        keys, batch: N, rows of the result, and B.
        layout: of the cache.
        max_blocks: entries of a row of the block table.
        dtype: of the result.
    """

    keys: int
    batch: int
    layout: CacheLayout = CacheLayout()
    max_blocks: int = 0
    dtype: torch.dtype = torch.float8_e4m3fn

    @property
    def operation(self) -> str:
        return OPERATION

    @property
    def head_dim(self) -> int:
        return self.layout.head_dim

    def adversarial(self, arch: Arch) -> GatherProblem:
        """A small problem of the same layout: sequences that end within pages, empty ones, rows behind the last."""
        blocks = max(3, -(-150 // self.layout.page))
        layout, dtype = self.layout, self.dtype
        if not layout.is_fp4:
            dtype = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
            layout = layout._replace(dtype=dtype)
        return GatherProblem(5 * blocks * layout.page, 7, layout, blocks, dtype)

    def example(self, device: torch.device) -> GatherCall:
        """A call of this problem with operands that are the same at each time, into results full of 0x5A."""
        return _example(self, device)

    def compare(self, call: GatherCall, expected: GatherCall) -> str | None:
        """None, or in words how the results of ``call`` differ from those of ``expected``, both :meth:`example`.

        Rows behind the last key hold anything, and do not count.
        """
        keys = int(expected.cu_seq_lens[-1])
        (k, scale), (right_k, right_scale) = call.results, expected.results
        return difference((k[:keys], scale[:keys]), (right_k[:keys], right_scale[:keys]))

    def __str__(self) -> str:
        return f"N={self.keys} B={self.batch} {self.layout} as {str(self.dtype).removeprefix('torch.')}"


class GatherCall(NamedTuple):
    """The arguments of one call. What a backend is given has been validated and normalised: ``kv_cache`` as its layout
    says; ``block_tables`` int32 [B, max_blocks], last dimension contiguous; ``cu_seq_lens`` int32 [B + 1], contiguous,
    of keys; ``out`` the results, contiguous."""

    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seq_lens: torch.Tensor
    keys: int
    layout: CacheLayout | None = None
    compress_ratio: int = 1
    dtype: torch.dtype | None = None
    out: tuple[torch.Tensor, torch.Tensor] | None = None
    backend: str | None = None

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``out``, which a backend's call always has."""
        assert self.out is not None
        return self.out


def validate(call: GatherCall) -> GatherCall:
    """Checks one call's arguments; returns them normalised, but for ``cu_seq_lens`` of compressed sequences.

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
    """
    layout = call.layout
    if layout is None:
        layout = CacheLayout.implied(call.kv_cache)
    elif not isinstance(layout, CacheLayout):
        raise TypeError(f"layout: got {type(layout).__name__}, expected a CacheLayout or None")
    layout.validate().check(call.kv_cache)
    dtype = call.dtype if call.dtype is not None else torch.float8_e4m3fn if layout.is_fp4 else layout.dtype
    if dtype not in ((*FP8_DTYPES, FP4) if layout.is_fp4 else (layout.dtype,)):
        known = " or ".join(map(str, (*FP8_DTYPES, FP4) if layout.is_fp4 else (layout.dtype,)))
        raise TypeError(f"dtype: got {dtype}, expected {known} of a cache with {layout}")
    for name, tensor in (("block_tables", call.block_tables), ("cu_seq_lens", call.cu_seq_lens)):
        check_tensor(name, tensor, (torch.int32,), f": pass {name}.to(torch.int32)")
        if tensor.device != call.kv_cache.device:
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}, expected {call.kv_cache.device}, the device of kv_cache"
            )
    if call.block_tables.dim() != 2:
        raise ValueError(f"block_tables: got shape {shape_of(call.block_tables)}, expected [B, max_blocks]")
    if call.block_tables.shape[1] > 1 and call.block_tables.stride(1) != 1:
        got = tuple(call.block_tables.stride())
        raise ValueError(f"block_tables: got strides {got}, expected a contiguous last dimension")
    batch = call.block_tables.shape[0]
    if tuple(call.cu_seq_lens.shape) != (batch + 1,):
        raise ValueError(f"cu_seq_lens: got shape {shape_of(call.cu_seq_lens)}, expected [{batch + 1}]")
    ratio: Any = as_int("compress_ratio", call.compress_ratio)
    if not 1 <= ratio <= MAX_KEYS:
        raise ValueError(f"compress_ratio: got {ratio}, expected 1 to {MAX_KEYS}")
    keys: Any = as_int("keys", call.keys)
    if not 0 <= keys <= MAX_KEYS:
        raise ValueError(f"keys: got {keys}, expected 0 to {MAX_KEYS}")
    call = call._replace(
        cu_seq_lens=call.cu_seq_lens.contiguous(), keys=keys, layout=layout, compress_ratio=ratio, dtype=dtype
    )
    if call.out is not None:
        _check_out(call, call.out)
    return call


def results_of(call: GatherCall) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of a validated call's results."""
    assert call.layout is not None
    assert call.dtype is not None
    if call.dtype is FP4:
        return ((call.keys, call.layout.row_bytes), torch.uint8), ((call.keys, 4), torch.uint8)
    return ((call.keys, call.layout.head_dim), call.dtype), ((call.keys,), torch.float32)


def _check_out(call: GatherCall, out: tuple[torch.Tensor, torch.Tensor]) -> None:
    for name, tensor, (shape, dtype) in zip(("out[0]", "out[1]"), out, results_of(call), strict=True):
        check_tensor(name, tensor, (dtype,))
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: got shape {shape_of(tensor)}, strides {tuple(tensor.stride())}, expected {list(shape)}, "
                "contiguous"
            )
        if tensor.device != call.kv_cache.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {call.kv_cache.device}")


def problem_of(call: GatherCall) -> GatherProblem:
    """The facts of a validated call."""
    assert call.layout is not None
    assert call.dtype is not None
    batch, max_blocks = call.block_tables.shape
    return GatherProblem(call.keys, batch, call.layout, max_blocks, call.dtype)


def compressed(cu_seq_lens: torch.Tensor, ratio: int) -> torch.Tensor:
    """Cumulative keys of sequences whose every ``ratio`` tokens make a key."""
    if ratio == 1:
        return cu_seq_lens
    keys = torch.zeros_like(cu_seq_lens)
    torch.cumsum((cu_seq_lens[1:] - cu_seq_lens[:-1]) // ratio, 0, dtype=torch.int32, out=keys[1:])
    return keys


def reference_gather(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, cu_seq_lens: torch.Tensor, layout: CacheLayout,
    dtype: torch.dtype, compress_ratio: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Keys and scales of all sequences, one after the other; reads lengths on the host."""
    with plain_arithmetic(kv_cache.device):
        lengths = (cu_seq_lens[1:] - cu_seq_lens[:-1]).tolist()
        parts = []
        for b, length in enumerate(lengths):
            keys = length // compress_ratio
            blocks = block_tables[b, : -(-keys // layout.page)].long()
            k, scale = layout.unpack(kv_cache[blocks])
            parts.append((k.view(torch.uint8).flatten(0, 1)[:keys], scale.flatten(0, 1)[:keys]))
        if not parts:
            k, scale = layout.unpack(kv_cache[:0])
            parts = [(k.view(torch.uint8).flatten(0, 1), scale.flatten(0, 1))]
        k, scale = (torch.cat(some) for some in zip(*parts, strict=True))
    if not layout.is_fp4:
        return k.view(layout.dtype), scale
    return (k, scale) if dtype is FP4 else fp4_to_fp8(k, scale, dtype)


def difference(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> str | None:
    """None, or where two results differ in a bit."""
    for name, got, right in zip(("k", "kv_scale"), found, expected, strict=True):
        wrong = got.contiguous().view(torch.uint8) != right.contiguous().view(torch.uint8)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0][0]) // (1 if wrong.dim() > 1 else 4)
            return f"{int(wrong.sum())} bytes of {name} differ, the first in key {row}"
    return None


def _example(problem: GatherProblem, device: torch.device) -> GatherCall:
    layout, batch, blocks = problem.layout, problem.batch, problem.max_blocks
    generator = torch.Generator("cpu").manual_seed(layout.page + layout.head_dim)
    pool = batch * blocks + 2
    flat = torch.randint(0, 256, (pool, layout.block_bytes), generator=generator, dtype=torch.uint8)
    if layout.is_fp4:  # blocks whose exponents lie within 14
        flat[:, layout.value_bytes :] = flat[:, layout.value_bytes :] % 15 + 110
    elif layout.scales == "ue8m0":
        flat[:, layout.value_bytes :] = flat[:, layout.value_bytes :: 4].repeat_interleave(4, dim=1)
    cache = flat.view(pool, *layout.block_shape).to(device)
    tables = torch.randperm(pool, generator=generator)[: batch * blocks].view(batch, blocks)
    longest = blocks * layout.page
    lengths = torch.tensor([longest, 0, 1, layout.page, layout.page + 1, 0, longest - 3])[torch.arange(batch) % 7]
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).clamp(max=problem.keys)
    call = GatherCall(cache, tables.int().to(device), cu.int().to(device), problem.keys, layout, 1, problem.dtype)
    out = tuple(
        torch.full((*shape, dtype.itemsize), 0x5A, dtype=torch.uint8, device=device).view(dtype)[..., 0]
        for shape, dtype in results_of(call)
    )
    return call._replace(out=out)  # type: ignore[arg-type]
