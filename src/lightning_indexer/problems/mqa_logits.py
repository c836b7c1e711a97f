"""FP8 MQA logits: the facts of a call, the checks that every call passes once, and the float32 reference.

logits[m, n] = kv_scale[n] * sum_h weights[m, h] * relu(sum_d q[m, h, d] * k[n, d])     n in [ks[m], ke[m])
               -inf elsewhere

q and k are fp8, as in the published models, or both bfloat16, for keys that were never quantised.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.chunking import MAX_KEYS
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.checks import (
    as_bool,
    as_int,
    check_tensor,
    contiguous_vector,
    plain_arithmetic,
    shape_of,
)

OPERATION = "fp8_mqa_logits"
OUT_DTYPES = (torch.float32, torch.bfloat16)
# What stands outside the windows: -inf, anything, or no column at all.
Form = Literal["clean", "noclean", "compressed"]
FORMS: tuple[Form, ...] = ("clean", "noclean", "compressed")
# Rows of the result start on this boundary: whole 32-byte sectors and 128-byte lines, whatever N is.
ROW_ALIGN_BYTES = 256
# Scores [H, rows, N] of one row chunk of the reference stay under this.
_SCORE_BYTES = 2**30


class MqaLogitsProblem(NamedTuple):
    """What selection, tile heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        rows, keys, heads, head_dim: M, N, H and D.
        q_dtype, k_dtype: the fp8 dialect of each operand, or bfloat16 of both.
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
    def operation(self) -> str:
        return OPERATION

    @property
    def is_fp8(self) -> bool:
        return self.q_dtype is not torch.bfloat16

    @property
    def compressed(self) -> bool:
        return self.max_seqlen_k > 0

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.max_seqlen_k or self.keys

    @property
    def form(self) -> Form:
        """``clean``, ``noclean`` (outside the windows unspecified) or ``compressed``; part of kernels' names."""
        return "compressed" if self.compressed else "clean" if self.clean_logits else "noclean"

    def adversarial(self, arch: Arch) -> MqaLogitsProblem:
        """A small problem of the same H, D, form and alignment: row blocks and tiles that are not full."""
        fp8 = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
        dtype = fp8 if self.is_fp8 else torch.bfloat16
        width = 211 if self.compressed else 0
        return self._replace(rows=19, keys=531, q_dtype=dtype, k_dtype=dtype, max_seqlen_k=width)

    def example(self, device: torch.device) -> MqaLogitsCall:
        """A call of this problem with operands that are the same at each time, into a result full of NaN."""
        return _example(self, device)

    def compare(self, call: MqaLogitsCall, expected: MqaLogitsCall) -> str | None:
        """None, or in words how the result of ``call`` differs from that of ``expected``, both :meth:`example`."""
        return _difference(self, call, expected)

    def __str__(self) -> str:
        form = f"compressed to {self.max_seqlen_k}" if self.compressed else self.form
        dtype = str(self.out_dtype).removeprefix("torch.")
        operands = "" if self.is_fp8 else " of bfloat16 operands"
        return f"M={self.rows} N={self.keys} H={self.heads} D={self.head_dim} {form} {dtype}{operands}"


class MqaLogitsCall(NamedTuple):
    """The arguments of one call, in the order of ``fp8_mqa_logits``.

    What a backend is given has been validated and normalised: ``q`` [M, H, D] and ``k`` [N, D] fp8 of the arch's
    dialect or both bfloat16, last dimension contiguous; ``kv_scale`` [N] float32, contiguous; ``weights`` [M, H]
    float32, last dimension contiguous; ``ks`` and ``ke`` [M] int32, contiguous; ``out`` [M, width], last dimension
    contiguous. All on one device; rows of q, k, weights and out may have any stride.
    """

    q: torch.Tensor
    k: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    clean_logits: bool = True
    max_seqlen_k: int = 0
    out_dtype: torch.dtype = torch.float32
    out: torch.Tensor | None = None
    backend: str | None = None

    @property
    def result(self) -> torch.Tensor:
        """``out``, which a backend's call always has."""
        assert self.out is not None
        return self.out


def validate(call: MqaLogitsCall) -> MqaLogitsCall:
    """Checks one call's arguments; returns them normalised, ``call`` itself where nothing had to change.

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError: an argument that is not a dense tensor, or has the wrong dtype.
        ValueError: a wrong rank, shape, stride or device, or options that exclude each other.
    """
    for name, dtypes, hint in _DTYPES:
        check_tensor(_PUBLIC.get(name, name), getattr(call, name), dtypes, hint)
    if (call.q.dtype is torch.bfloat16) is not (call.k.dtype is torch.bfloat16):
        raise TypeError(f"k: got dtype {call.k.dtype} with q of {call.q.dtype}, expected both fp8 or both bfloat16")
    call = _normalised(call)
    _check_shapes(call)
    _check_options(call)
    if call.out is not None:
        _check_out(call.out, call)
    return call


_OPERAND_DTYPES = (*FP8_DTYPES, torch.bfloat16)
_INT32_HINT = ": pass {name}.to(torch.int32)"
_PUBLIC = {"ks": "cu_seqlen_ks", "ke": "cu_seqlen_ke"}
_DTYPES: tuple[tuple[str, tuple[torch.dtype, ...], str], ...] = (
    ("q", _OPERAND_DTYPES, ""),
    ("k", _OPERAND_DTYPES, ""),
    ("weights", (torch.float32, torch.bfloat16, torch.float16), ""),
    ("ks", (torch.int32,), _INT32_HINT.format(name="cu_seqlen_ks")),
    ("ke", (torch.int32,), _INT32_HINT.format(name="cu_seqlen_ke")),
    ("kv_scale", (torch.float32,), ": fp8.decode_ue8m0 makes float32 of packed or byte scales"),
)
_EXPECTED = {"q": "[M, H, D]", "k": "[N, D]", "weights": "[M, H]"}


def _normalised(call: MqaLogitsCall) -> MqaLogitsCall:
    """What kernels read, made of what callers have: scales and windows as columns, scalars or strided views, weights of
    16 bits, lazy negations. ``call`` itself where all of it is so already."""
    changed: dict[str, Any] = {}
    for name, other in (("kv_scale", call.k), ("ks", call.q), ("ke", call.q)):
        tensor = getattr(call, name)
        vector = contiguous_vector(tensor, other.shape[0] if other.dim() else 0)
        if vector is not tensor:
            changed[name] = vector
    if call.weights.dtype is not torch.float32:
        changed["weights"] = call.weights.float()
    for name in MqaLogitsCall._fields[:6]:
        tensor = changed.get(name, getattr(call, name))
        if tensor.is_neg():
            changed[name] = tensor.resolve_neg()
    for name, convert in (("clean_logits", as_bool), ("max_seqlen_k", as_int)):
        given = getattr(call, name)
        value = convert(name, given)
        if value is not given:
            changed[name] = value
    return call._replace(**changed) if changed else call


def _check_shapes(call: MqaLogitsCall) -> None:
    q, k, kv_scale, weights, ks, ke = call[:6]
    for name, tensor, rank in (("q", q, 3), ("k", k, 2), ("weights", weights, 2)):
        if tensor.dim() != rank:
            batched = "; one call a sequence, or a batch packed by its windows" if tensor.dim() == rank + 1 else ""
            raise ValueError(
                f"{name}: got shape {shape_of(tensor)}, expected {rank} dimensions, {_EXPECTED[name]}{batched}"
            )
    rows, heads, head_dim = q.shape
    keys = k.shape[0]
    if heads < 1 or head_dim < 1:
        raise ValueError(f"q: got shape {shape_of(q)}, expected at least one head and one channel, {_EXPECTED['q']}")
    if keys > MAX_KEYS:
        raise ValueError(f"k: got {keys} rows, expected at most {MAX_KEYS}: positions are int32")
    if k.shape[1] != head_dim:
        raise ValueError(f"k: got shape {shape_of(k)}, expected [N, {head_dim}] to match q of shape {shape_of(q)}")
    if kv_scale.dim() != 1 or kv_scale.shape[0] != keys:
        raise ValueError(f"kv_scale: got shape {shape_of(kv_scale)}, expected [{keys}] or [{keys}, 1] to match k")
    if weights.shape[0] != rows or weights.shape[1] != heads:
        raise ValueError(f"weights: got shape {shape_of(weights)}, expected [{rows}, {heads}] to match q")
    for name, tensor in (("cu_seqlen_ks", ks), ("cu_seqlen_ke", ke)):
        if tensor.dim() != 1:
            raise ValueError(f"{name}: got shape {shape_of(tensor)}, expected 1 dimensions, [M]")
        if tensor.shape[0] != rows:
            raise ValueError(f"{name}: got shape {shape_of(tensor)}, expected [{rows}], one entry per row of q")
    for name, tensor in (
        ("k", k),
        ("kv_scale", kv_scale),
        ("weights", weights),
        ("cu_seqlen_ks", ks),
        ("cu_seqlen_ke", ke),
    ):
        if tensor.device != q.device:
            name = _PUBLIC.get(name, name)
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {q.device}, the device of q")
    for name, tensor in (("q", q), ("k", k), ("weights", weights)):
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(f"{name}: got strides {tuple(tensor.stride())}, expected a contiguous last dimension")


def _check_options(call: MqaLogitsCall) -> None:
    width = call.max_seqlen_k
    if width < 0 or width > MAX_KEYS:
        raise ValueError(f"max_seqlen_k: got {width}, expected 0 (off) or a width in [1, {MAX_KEYS}]")
    if width > 0 and call.clean_logits:
        raise ValueError(
            "clean_logits: got True with max_seqlen_k > 0, expected False: compressed logits are not cleaned"
        )
    if call.out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype: got {call.out_dtype}, expected torch.float32 or torch.bfloat16")


def _check_out(out: torch.Tensor, call: MqaLogitsCall) -> None:
    rows, width = call.q.shape[0], call.max_seqlen_k or call.k.shape[0]
    check_tensor("out", out, (call.out_dtype,))
    if out.dim() != 2 or out.shape[0] != rows or out.shape[1] != width:
        raise ValueError(f"out: got shape {shape_of(out)}, expected [{rows}, {width}]")
    if out.device != call.q.device:
        raise ValueError(f"out: got a tensor on {out.device}, expected {call.q.device}, the device of q")
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise ValueError(f"out: got strides {tuple(out.stride())}, expected a contiguous last dimension")
    if out.shape[0] > 1 and out.stride(0) < width:
        raise ValueError(
            f"out: got strides {tuple(out.stride())}, expected a row stride of at least {width}: rows overlap"
        )


def check_dialect(call: MqaLogitsCall, arch: Arch) -> None:
    """fnuz operands are read where the matrix unit reads fnuz, and only there; elsewhere their values would double.

    Raises:
        TypeError: an fnuz operand on any other arch.
    """
    if arch.fp8 == "fnuz":
        return
    for name, tensor in (("q", call.q), ("k", call.k)):
        if tensor.dtype is torch.float8_e4m3fnuz:
            raise TypeError(
                f"{name}: got float8_e4m3fnuz on {arch.name}, expected float8_e4m3fn: only gfx942 reads fnuz"
            )


def problem_of(call: MqaLogitsCall) -> MqaLogitsProblem:
    """The facts of a validated call."""
    rows, heads, head_dim = call.q.shape
    return MqaLogitsProblem(
        rows, call.k.shape[0], heads, head_dim, call.q.dtype, call.k.dtype, call.out_dtype, call.clean_logits,
        call.max_seqlen_k, is_aligned(call.q, call.k),
    )  # fmt: skip


def is_aligned(q: torch.Tensor, k: torch.Tensor) -> bool:
    """True when every row of q and k starts on a 16-byte boundary."""
    strides = q.stride(0) | q.stride(1) | k.stride(0)
    return not ((q.data_ptr() | k.data_ptr() | strides * q.itemsize) & 15)  # q and k have one size


def unit_scale(k: object) -> torch.Tensor:
    """[N] float32 ones: the scales of bfloat16 keys that come without.

    Raises:
        TypeError: fp8 keys, or no tensor.
    """
    check_tensor("k", k, _OPERAND_DTYPES)
    assert isinstance(k, torch.Tensor)
    if k.dtype is not torch.bfloat16:
        raise TypeError(
            f"kv_scale: got None with k of {k.dtype}, expected float32 scales: bfloat16 keys alone have none"
        )
    return k.new_ones(k.shape[:1], dtype=torch.float32)


def row_stride(width: int, out_dtype: torch.dtype) -> int:
    """Elements between two rows of a result that the library allocates."""
    step = ROW_ALIGN_BYTES // out_dtype.itemsize
    return (width + step - 1) // step * step


def allocate(problem: MqaLogitsProblem, device: torch.device) -> torch.Tensor:
    """An uninitialised result of the problem whose row stride is padded."""
    stride = row_stride(problem.width, problem.out_dtype)
    return torch.empty_strided((problem.rows, problem.width), (stride, 1), dtype=problem.out_dtype, device=device)


# A small call that is hard to get right, and its comparison: what a kernel has to pass on hardware it has not seen.

# calc_diff against float32 on the dequantised operands that every kernel has to keep, docs/semantics.md.
MAX_DIFF = {torch.float32: 5e-6, torch.bfloat16: 3e-5}


def _example(problem: MqaLogitsProblem, device: torch.device) -> MqaLogitsCall:
    rows, keys, heads, head_dim = problem[:4]
    generator = torch.Generator("cpu").manual_seed(rows * heads + head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def operand(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Rows that are not aligned start one element into rows that are.
        wide = torch.zeros((*values.shape[:-1], head_dim + 16), dtype=dtype, device=device)
        place = wide[..., :head_dim] if problem.aligned else wide[..., 1 : head_dim + 1]
        place.copy_(values.to(dtype).to(device))
        return place

    # Negative zeros, which are NaN in the other dialect, negative scales, windows of every kind.
    q, k = normal(rows, heads, head_dim), normal(keys, head_dim)
    q.view(-1)[::7], k.view(-1)[::5] = -0.0, -0.0
    kv_scale = (normal(keys).abs() + 0.1) * (1.0 - 2.0 * (torch.arange(keys) % 3 == 1).float())
    row = torch.arange(rows)
    ks = torch.where(row % 4 == 1, keys // 2, (row * 37) % (keys // 2) - 3)
    ke = torch.where(row % 4 == 1, keys // 2 - row // 4 % 2, keys + 5 - (row * 59) % (keys // 3))
    ke = torch.where(row % 5 == 2, ks + 67, ke)
    out = torch.full(
        (rows, row_stride(problem.width, problem.out_dtype)), float("nan"), dtype=problem.out_dtype, device=device
    )
    return MqaLogitsCall(
        operand(q, problem.q_dtype), operand(k, problem.k_dtype), kv_scale.to(device), normal(rows, heads).to(device),
        ks.int().to(device), ke.int().to(device), problem.clean_logits, problem.max_seqlen_k, problem.out_dtype,
        out[:, : problem.width],
    )  # fmt: skip


def _difference(problem: MqaLogitsProblem, call: MqaLogitsCall, expected: MqaLogitsCall) -> str | None:
    found, right = call.result.float(), expected.result.float()
    inside = window_mask(call.ks, call.ke, problem.keys)
    if problem.compressed:
        positions = call.ks.long()[:, None] + torch.arange(problem.width, device=found.device)
        real = (positions >= 0) & (positions < problem.keys)
        inside = inside.gather(1, positions.clamp(0, problem.keys - 1)) & real
    if problem.clean_logits and (wrong := int((torch.isneginf(found) == inside).sum())):
        return f"-inf at {wrong} wrong positions"
    off = (found - right).abs() > 0.02 * right.abs() + 1e-3 * right[inside].abs().amax()
    off = (off | found.isnan()) & inside
    if bool(off.any()):
        row, column = (int(place) for place in off.nonzero()[0])
        return (
            f"{int(off.sum())} of {int(inside.sum())} logits are wrong, the first at [{row}, {column}]: "
            f"got {float(found[row, column]):.6g}, expected {float(right[row, column]):.6g}"
        )
    diff = calc_diff(found, right, inside)
    return (
        None
        if diff < MAX_DIFF[problem.out_dtype]
        else f"calc_diff {diff:.2e}, allowed {MAX_DIFF[problem.out_dtype]:.0e}"
    )


# The reference: the formula in float32, row chunk by row chunk. No backend shares code with it.


def reference_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Unmasked, unscaled logits: ``sum_h weights[m, h] * relu(q[m, h] . k[n])``.

    Args:
        q: [M, H, D], any floating dtype; fp8 is read as it is.
        k: [N, D], any floating dtype.
        weights: [M, H].

    Returns:
        [M, N] float32.
    """
    with plain_arithmetic(q.device):
        rows, heads, _ = q.shape
        keys = k.shape[0]
        k = k.float()
        result = torch.empty((rows, keys), dtype=torch.float32, device=q.device)
        step = max(1, _SCORE_BYTES // max(1, heads * keys * 4))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            scores = torch.einsum("mhd,nd->mhn", q[start:stop].float(), k).relu_()
            result[start:stop] = torch.einsum("mh,mhn->mn", weights[start:stop].float(), scores)
        return result


def window_mask(ks: torch.Tensor, ke: torch.Tensor, keys: int) -> torch.Tensor:
    """[M, N] bool: position n lies in row m's window."""
    positions = torch.arange(keys, device=ks.device)
    return (positions >= ks[:, None]) & (positions < ke[:, None])


def reference_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
) -> torch.Tensor:
    """The [M, N] float32 logits with ``-inf`` outside the windows; arguments as in ``fp8_mqa_logits``.

    Also takes float32 ``q`` and ``k`` with a ``kv_scale`` of ones, to measure the error of quantisation. The same bits
    under autocast, another default dtype or matmul precision.
    """
    k, kv_scale = kv
    with plain_arithmetic(q.device):
        logits = reference_scores(q, k, weights) * kv_scale.float().reshape(1, -1)
        logits += 0.0  # -0.0 becomes +0.0, as the contract says
        outside = ~window_mask(cu_seqlen_ks.reshape(-1), cu_seqlen_ke.reshape(-1), k.shape[0])
        return logits.masked_fill_(outside, float("-inf"))
