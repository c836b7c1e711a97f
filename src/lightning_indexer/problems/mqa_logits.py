"""The frozen facts of one call, and the checks that every call passes once before anything runs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.chunking import MAX_KEYS
from lightning_indexer.fp8 import FP8_DTYPES

OUT_DTYPES = (torch.float32, torch.bfloat16)
# Rows of the result start on this boundary: whole 32-byte sectors and 128-byte lines, whatever N is.
ROW_ALIGN_BYTES = 256


class Problem(NamedTuple):
    """What selection, tile heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        rows, keys, heads, head_dim: M, N, H and D.
        q_dtype, k_dtype: the fp8 dialect of each operand.
        out_dtype: ``torch.float32`` or ``torch.bfloat16``.
        clean_logits: write ``-inf`` outside the windows.
        max_seqlen_k: 0, or the width of compressed logits, where column j of row m is position ``ks[m] + j``.
        aligned: every row of q and k starts on a 16-byte boundary (TMA and 16-byte loads need it).
    """

    rows: int
    keys: int
    heads: int
    head_dim: int
    q_dtype: torch.dtype = torch.float8_e4m3fn
    k_dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype = torch.float32
    clean_logits: bool = True
    max_seqlen_k: int = 0
    aligned: bool = True

    @property
    def compressed(self) -> bool:
        return self.max_seqlen_k > 0

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.max_seqlen_k or self.keys

    def __str__(self) -> str:
        form = (
            f"compressed to {self.max_seqlen_k}" if self.compressed else "clean" if self.clean_logits else "not clean"
        )
        dtype = str(self.out_dtype).removeprefix("torch.")
        return f"M={self.rows} N={self.keys} H={self.heads} D={self.head_dim} {form} {dtype}"


class Operands(NamedTuple):
    """The validated tensors of a call, in the shapes that every backend receives.

    ``q`` [M, H, D] and ``k`` [N, D] fp8, last dimension contiguous; ``kv_scale`` [N] float32; ``weights`` [M, H]
    float32, last dimension contiguous; ``ks``, ``ke`` [M] int32, contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor


def validate(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    *,
    clean_logits: bool,
    max_seqlen_k: int,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
) -> Operands:
    """Checks one call's arguments; returns them with ``kv_scale`` flattened to [N].

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError: an argument that is not a tensor, or has the wrong dtype.
        ValueError: a wrong rank, shape, stride or device, or options that exclude each other.
    """
    for name, tensor, dtypes, rank in (
        ("q", q, FP8_DTYPES, 3),
        ("k", k, FP8_DTYPES, 2),
        ("weights", weights, (torch.float32,), 2),
        ("cu_seqlen_ks", ks, (torch.int32,), 1),
        ("cu_seqlen_ke", ke, (torch.int32,), 1),
    ):
        _check_tensor(name, tensor, dtypes)
        if tensor.dim() != rank:
            raise ValueError(f"{name}: got shape {_shape(tensor)}, expected {rank} dimensions, {_EXPECTED[name]}")
    _check_tensor("kv_scale", kv_scale, (torch.float32,))

    rows, heads, head_dim = q.shape
    keys = k.shape[0]
    if heads < 1 or head_dim < 1:
        raise ValueError(f"q: got shape {_shape(q)}, expected at least one head and one channel, {_EXPECTED['q']}")
    if keys > MAX_KEYS:
        raise ValueError(f"k: got {keys} rows, expected at most {MAX_KEYS}: positions are int32")
    if k.shape[1] != head_dim:
        raise ValueError(f"k: got shape {_shape(k)}, expected [N, {head_dim}] to match q of shape {_shape(q)}")
    if kv_scale.dim() == 2 and kv_scale.shape[1] == 1:
        kv_scale = kv_scale[:, 0]
    if kv_scale.dim() != 1 or kv_scale.shape[0] != keys:
        raise ValueError(f"kv_scale: got shape {_shape(kv_scale)}, expected [{keys}] or [{keys}, 1] to match k")
    if weights.shape[0] != rows or weights.shape[1] != heads:
        raise ValueError(f"weights: got shape {_shape(weights)}, expected [{rows}, {heads}] to match q")
    for name, tensor in (("cu_seqlen_ks", ks), ("cu_seqlen_ke", ke)):
        if tensor.shape[0] != rows:
            raise ValueError(f"{name}: got shape {_shape(tensor)}, expected [{rows}], one entry per row of q")

    for name, tensor in (
        ("k", k),
        ("kv_scale", kv_scale),
        ("weights", weights),
        ("cu_seqlen_ks", ks),
        ("cu_seqlen_ke", ke),
    ):
        if tensor.device != q.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {q.device}, the device of q")
    for name, tensor in (("q", q), ("k", k), ("weights", weights)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(f"{name}: got strides {tuple(tensor.stride())}, expected a contiguous last dimension")
    for name, tensor in (("kv_scale", kv_scale), ("cu_seqlen_ks", ks), ("cu_seqlen_ke", ke)):
        if tensor.stride(0) != 1 and tensor.shape[0] > 1:
            raise ValueError(f"{name}: got strides {tuple(tensor.stride())}, expected a contiguous tensor")

    if not isinstance(clean_logits, bool):
        raise TypeError(f"clean_logits: got {type(clean_logits).__name__}, expected a bool")
    if isinstance(max_seqlen_k, bool) or not isinstance(max_seqlen_k, (int, torch.SymInt)):
        raise TypeError(f"max_seqlen_k: got {type(max_seqlen_k).__name__}, expected an int")
    if max_seqlen_k < 0 or max_seqlen_k > MAX_KEYS:
        raise ValueError(f"max_seqlen_k: got {max_seqlen_k}, expected 0 (off) or a width in [1, {MAX_KEYS}]")
    if max_seqlen_k > 0 and clean_logits:
        raise ValueError(
            "clean_logits: got True with max_seqlen_k > 0, expected False: compressed logits are not cleaned"
        )
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype}, expected torch.float32 or torch.bfloat16")
    if out is not None:
        _check_out(out, rows, max_seqlen_k or keys, out_dtype, q.device)
    return Operands(q, k, kv_scale, weights, ks, ke)


def check_dialect(q: torch.Tensor, k: torch.Tensor, arch: Arch) -> None:
    """fnuz operands are read on gfx942 only (case 9 of the field's bug reports).

    Raises:
        TypeError: an fnuz operand on any other arch.
    """
    if arch.fp8 == "fnuz" or (q.dtype is torch.float8_e4m3fn and k.dtype is torch.float8_e4m3fn):
        return
    for name, tensor in (("q", q), ("k", k)):
        if tensor.dtype is torch.float8_e4m3fnuz:
            raise TypeError(
                f"{name}: got float8_e4m3fnuz on {arch.name}, expected float8_e4m3fn: only gfx942 reads fnuz"
            )


def is_aligned(q: torch.Tensor, k: torch.Tensor) -> bool:
    """True when every row of q and k starts on a 16-byte boundary."""
    return not (
        (q.data_ptr() | k.data_ptr() | q.stride(0) | q.stride(1) | k.stride(0)) & 15  # fp8: one byte an element
    )


def row_stride(width: int, out_dtype: torch.dtype) -> int:
    """Elements between two rows of a result that the library allocates."""
    step = ROW_ALIGN_BYTES // out_dtype.itemsize
    return (width + step - 1) // step * step


def _check_out(out: torch.Tensor, rows: int, width: int, out_dtype: torch.dtype, device: torch.device) -> None:
    _check_tensor("out", out, (out_dtype,))
    if out.dim() != 2 or out.shape[0] != rows or out.shape[1] != width:
        raise ValueError(f"out: got shape {_shape(out)}, expected [{rows}, {width}]")
    if out.device != device:
        raise ValueError(f"out: got a tensor on {out.device}, expected {device}, the device of q")
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(f"out: got strides {tuple(out.stride())}, expected a contiguous last dimension")
    if out.shape[0] > 1 and out.stride(0) < width:
        raise ValueError(
            f"out: got strides {tuple(out.stride())}, expected a row stride of at least {width}: rows overlap"
        )


def _check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {value.dtype}, expected {' or '.join(str(dtype) for dtype in dtypes)}")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


_EXPECTED = {
    "q": "[M, H, D]",
    "k": "[N, D]",
    "weights": "[M, H]",
    "cu_seqlen_ks": "[M]",
    "cu_seqlen_ke": "[M]",
}
