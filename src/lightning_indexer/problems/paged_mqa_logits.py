"""FP8 MQA logits over a paged cache: the facts of a call, the checks that every call passes once, and the reference.

    logits[b * next_n + j, n] = scale[n] * sum_h weights[b * next_n + j, h] * relu(sum_d q[b, j, h, d] * k[n, d])
                                for n < length(b, j), -inf behind

k[n] and scale[n] are position ``n % page`` of block ``block_tables[b, n // page]``. ``length(b, j)`` is
``context_lens[b, j]``, or, of lengths ``[B]``, ``context_lens[b] - next_n + 1 + j``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.chunking import MAX_KEYS
from lightning_indexer.fp4 import dequantize_fp4, quantize_fp4
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.cache_layout import SCALE_BYTES, CacheLayout
from lightning_indexer.problems.checks import as_bool, as_int, check_tensor, plain_arithmetic, shape_of
from lightning_indexer.problems.mqa_logits import MAX_DIFF, OUT_DTYPES, reference_scores, row_stride

OPERATION = "fp8_paged_mqa_logits"


class PagedMqaLogitsProblem(NamedTuple):
    """What selection, tile heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        batch, next_n: B and the rows of each; the result has ``B * next_n`` rows.
        width: max_context_len, columns of the result.
        heads, head_dim: H and D.
        layout: of the cache.
        max_blocks: entries of a row of the block table: rows see at most ``max_blocks * page`` positions.
        q_dtype: the fp8 dialect of q; the cache's is ``layout.dtype``.
        out_dtype: ``torch.float32`` or ``torch.bfloat16``.
        clean_logits: write ``-inf`` behind each row's length.
        row_lengths: context_lens is ``[B, next_n]``, each row's own length; else ``[B]``.
        ragged: the call has ``indices``: row b of q reads row ``indices[b]`` of the block table.
        aligned: q's heads, the cache and its blocks start on 16-byte boundaries.
    """

    batch: int
    next_n: int
    width: int
    heads: int
    head_dim: int
    layout: CacheLayout = CacheLayout()
    max_blocks: int = 0
    q_dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype = torch.float32
    clean_logits: bool = True
    row_lengths: bool = False
    ragged: bool = False
    aligned: bool = True

    @property
    def operation(self) -> str:
        return OPERATION

    @property
    def rows(self) -> int:
        """Rows of the result."""
        return self.batch * self.next_n

    @property
    def keys(self) -> int:
        """The most positions that a row can see."""
        return min(self.width, self.max_blocks * self.layout.page)

    @property
    def form(self) -> str:
        """``clean`` or ``noclean``; part of kernels' names."""
        return "clean" if self.clean_logits else "noclean"

    def adversarial(self, arch: Arch) -> PagedMqaLogitsProblem:
        """A small problem of the same next_n, H, D, layout and form: pages that are not full, empty rows."""
        fp8 = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
        page = self.layout.page
        blocks = max(3, -(-700 // page))
        return self._replace(
            batch=9, width=blocks * page - page // 3, max_blocks=blocks, q_dtype=fp8,
            layout=self.layout if self.layout.is_fp4 else self.layout._replace(dtype=fp8),
        )  # fmt: skip

    def example(self, device: torch.device) -> PagedMqaLogitsCall:
        """A call of this problem with operands that are the same at each time, into a result full of NaN."""
        return _example(self, device)

    def compare(self, call: PagedMqaLogitsCall, expected: PagedMqaLogitsCall) -> str | None:
        """None, or in words how the result of ``call`` differs from that of ``expected``, both :meth:`example`."""
        return _difference(self, call, expected)

    def __str__(self) -> str:
        dtype = str(self.out_dtype).removeprefix("torch.")
        shape = f"B={self.batch} next_n={self.next_n} W={self.width} H={self.heads}"
        return f"{shape} {self.layout} {self.form} {dtype}"


class PagedMqaLogitsCall(NamedTuple):
    """The arguments of one call, in the order of ``fp8_paged_mqa_logits``.

    What a backend is given has been validated and normalised: ``q`` [B, next_n, H, D] fp8, last dimension
    contiguous, q and cache in the arch's dialect, or on gfx942 in any, which its kernels have to read; ``kv_cache``
    uint8 [blocks, page, 1, D + 4] (D / 2 + 4 of fp4) or without the 1, each block contiguous, blocks ``stride(0)``
    bytes apart, its address and that a multiple of 4; ``weights`` [B * next_n, H] float32, last dimension contiguous;
    ``context_lens`` int32 [B], or [B, next_n] where the problem has ``row_lengths``, any strides; ``block_tables``
    int32 [B, max_blocks] ([sequences, max_blocks] with ``indices``), last dimension contiguous; ``layout``;
    ``indices`` None or int32 [B], contiguous; ``out`` [B * next_n, max_context_len], last dimension contiguous. All
    on one device. Where a length is not positive, neither the table nor ``indices`` mean anything; entries of the
    table behind a row's last page mean nothing either.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_context_len: int
    layout: CacheLayout | None = None
    indices: torch.Tensor | None = None
    clean_logits: bool = True
    out_dtype: torch.dtype = torch.float32
    out: torch.Tensor | None = None
    backend: str | None = None

    @property
    def result(self) -> torch.Tensor:
        """``out``, which a backend's call always has."""
        assert self.out is not None
        return self.out


_DTYPES: tuple[tuple[str, tuple[torch.dtype, ...], str], ...] = (
    ("q", FP8_DTYPES, ""),
    ("weights", (torch.float32, torch.bfloat16, torch.float16), ""),
    ("context_lens", (torch.int32,), ": pass context_lens.to(torch.int32)"),
    ("block_tables", (torch.int32,), ": pass block_tables.to(torch.int32)"),
)


def validate(call: PagedMqaLogitsCall) -> PagedMqaLogitsCall:
    """Checks one call's arguments; returns them normalised, ``call`` itself where nothing had to change.

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError: an argument that is not a dense tensor, or has the wrong dtype or type.
        ValueError: a wrong rank, shape, stride or device, or a cache that does not fit its layout.
    """
    for name, dtypes, hint in _DTYPES:
        check_tensor(name, getattr(call, name), dtypes, hint)
    if call.indices is not None:
        check_tensor("indices", call.indices, (torch.int32,), ": pass indices.to(torch.int32)")
    if call.q.dim() != 4:
        raise ValueError(f"q: got shape {shape_of(call.q)}, expected 4 dimensions, [B, next_n, H, D]")
    call = _normalised(call)
    _check_shapes(call)
    _check_devices(call)
    if call.out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype: got {call.out_dtype}, expected torch.float32 or torch.bfloat16")
    if call.out is not None:
        _check_out(call.out, call)
    return call


def _normalised(call: PagedMqaLogitsCall) -> PagedMqaLogitsCall:
    """What kernels read, made of what callers have: the layout that the operands imply, lengths [B] of next_n 1,
    weights of 16 bits, lazy negations, strided indices. ``call`` itself where all of it is so already."""
    changed: dict[str, Any] = {}
    batch, next_n, _, head_dim = call.q.shape
    if call.layout is None:
        changed["layout"] = CacheLayout.implied(call.kv_cache, head_dim, call.q.dtype)
    elif not isinstance(call.layout, CacheLayout):
        raise TypeError(f"layout: got {type(call.layout).__name__}, expected a CacheLayout or None")
    lengths = call.context_lens
    if next_n == 1 and lengths.dim() == 2 and lengths.shape[1] == 1:
        changed["context_lens"] = lengths[:, 0]
    elif lengths.dim() == 0 and batch == 1:
        changed["context_lens"] = lengths.reshape(1)
    if call.weights.dtype is not torch.float32:
        changed["weights"] = call.weights.float()
    if call.indices is not None and not call.indices.is_contiguous():
        changed["indices"] = call.indices.contiguous()
    for name in ("q", "kv_cache", "weights", "context_lens", "block_tables", "indices"):
        tensor = changed.get(name, getattr(call, name))
        if isinstance(tensor, torch.Tensor) and tensor.is_neg():
            changed[name] = tensor.resolve_neg()
    for name, convert in (("clean_logits", as_bool), ("max_context_len", as_int)):
        given = getattr(call, name)
        value = convert(name, given)
        if value is not given:
            changed[name] = value
    return call._replace(**changed) if changed else call


def _check_shapes(call: PagedMqaLogitsCall) -> None:
    q, kv_cache, weights, lengths, tables = call[:5]
    batch, next_n, heads, head_dim = q.shape
    if next_n < 1 or heads < 1 or head_dim < 1:
        raise ValueError(f"q: got shape {shape_of(q)}, expected at least one row, head and channel, [B, next_n, H, D]")
    assert call.layout is not None
    layout = call.layout.validate()
    if layout.head_dim != head_dim:
        raise ValueError(f"layout: got D={layout.head_dim}, expected {head_dim} to match q of shape {shape_of(q)}")
    layout.check(kv_cache)
    if weights.dim() != 2 or weights.shape[0] != batch * next_n or weights.shape[1] != heads:
        raise ValueError(f"weights: got shape {shape_of(weights)}, expected [{batch * next_n}, {heads}] to match q")
    if tuple(lengths.shape) not in ((batch,), (batch, next_n)):
        raise ValueError(
            f"context_lens: got shape {shape_of(lengths)}, expected [{batch}] or [{batch}, {next_n}] to match q"
        )
    if tables.dim() != 2 or (call.indices is None and tables.shape[0] != batch):
        rows = "sequences" if call.indices is not None else batch
        raise ValueError(f"block_tables: got shape {shape_of(tables)}, expected [{rows}, max_blocks]")
    if call.indices is not None and tuple(call.indices.shape) != (batch,):
        raise ValueError(f"indices: got shape {shape_of(call.indices)}, expected [{batch}], a sequence for each of q")
    if not 0 <= call.max_context_len <= MAX_KEYS:
        raise ValueError(f"max_context_len: got {call.max_context_len}, expected 0 to {MAX_KEYS}: positions are int32")
    if call.max_context_len > 0 and batch > 0 and call.indices is not None and tables.shape[0] == 0:
        raise ValueError(f"block_tables: got shape {shape_of(tables)}, expected at least one sequence")
    for name, tensor in (("q", q), ("weights", weights), ("block_tables", tables)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: got strides {tuple(tensor.stride())}, expected a contiguous last dimension")


def _check_devices(call: PagedMqaLogitsCall) -> None:
    for name in ("kv_cache", "weights", "context_lens", "block_tables", "indices", "out"):
        tensor = getattr(call, name)
        if isinstance(tensor, torch.Tensor) and tensor.device != call.q.device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {call.q.device}, the device of q")


def _check_out(out: torch.Tensor, call: PagedMqaLogitsCall) -> None:
    rows, width = call.q.shape[0] * call.q.shape[1], call.max_context_len
    check_tensor("out", out, (call.out_dtype,))
    if tuple(out.shape) != (rows, width):
        raise ValueError(f"out: got shape {shape_of(out)}, expected [{rows}, {width}]")
    if width > 1 and out.stride(1) != 1:
        raise ValueError(f"out: got strides {tuple(out.stride())}, expected a contiguous last dimension")
    if rows > 1 and out.stride(0) < width:
        raise ValueError(
            f"out: got strides {tuple(out.stride())}, expected a row stride of at least {width}: rows overlap"
        )


def check_dialect(call: PagedMqaLogitsCall, arch: Arch) -> None:
    """fnuz operands are read where the matrix unit reads fnuz, and only there; elsewhere their values would double.

    Raises:
        TypeError: fnuz on any other arch.
    """
    assert call.layout is not None
    for name, dtype in (("q", call.q.dtype), ("layout.dtype", call.layout.dtype)):
        if arch.fp8 != "fnuz" and dtype is torch.float8_e4m3fnuz:
            raise TypeError(
                f"{name}: got float8_e4m3fnuz on {arch.name}, expected float8_e4m3fn: only gfx942 reads fnuz"
            )


def check_address(kv_cache: torch.Tensor) -> None:
    """Scales are words.

    Raises:
        ValueError: a cache that starts between two of them.
    """
    if kv_cache.data_ptr() % SCALE_BYTES:
        raise ValueError(f"kv_cache: got an address off a {SCALE_BYTES}-byte boundary, expected one on it")


def problem_of(call: PagedMqaLogitsCall) -> PagedMqaLogitsProblem:
    """The facts of a validated call."""
    batch, next_n, heads, head_dim = call.q.shape
    assert call.layout is not None
    return PagedMqaLogitsProblem(
        batch, next_n, call.max_context_len, heads, head_dim, call.layout, call.block_tables.shape[1], call.q.dtype,
        call.out_dtype, call.clean_logits, call.context_lens.dim() == 2, call.indices is not None,
        is_aligned(call.q, call.kv_cache),
    )  # fmt: skip


def is_aligned(q: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """True when every head of q, the cache and every block of it start on a 16-byte boundary."""
    apart = kv_cache.stride(0) if kv_cache.shape[0] > 1 else 0
    return not (
        (q.data_ptr() | q.stride(0) | q.stride(1) | q.stride(2) | kv_cache.data_ptr() | apart) & 15
    )  # fp8: one byte an element


def allocate(problem: PagedMqaLogitsProblem, device: torch.device) -> torch.Tensor:
    """An uninitialised result of the problem whose row stride is padded."""
    stride = row_stride(problem.width, problem.out_dtype)
    return torch.empty_strided((problem.rows, problem.width), (stride, 1), dtype=problem.out_dtype, device=device)


def row_lengths(context_lens: torch.Tensor, next_n: int, limit: int) -> torch.Tensor:
    """[B, next_n] int64: positions that each row sees, within [0, limit]."""
    lengths = context_lens.long()
    if lengths.dim() == 1:
        lengths = lengths[:, None] - next_n + 1 + torch.arange(next_n, device=lengths.device)
    return lengths.clamp(0, limit)


def reference_paged_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    *,
    layout: CacheLayout | None = None,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The [B * next_n, max_context_len] float32 logits, ``-inf`` behind each row's length; reads lengths on the host.

    Arguments as in ``fp8_paged_mqa_logits``. Sequence by sequence: the pages that its rows see, unpacked, and the
    formula. No backend shares code with it.
    """
    batch, next_n = q.shape[:2]
    layout = layout or CacheLayout(kv_cache.shape[1], q.shape[3], dtype=q.dtype)
    with plain_arithmetic(q.device):
        shape = (batch * next_n, max_context_len)
        logits = torch.full(shape, float("-inf"), dtype=torch.float32, device=q.device)
        lengths = row_lengths(context_lens, next_n, min(max_context_len, block_tables.shape[1] * layout.page))
        for b, row_of in enumerate(lengths.tolist()):
            longest = max(row_of)
            if longest == 0:
                continue
            sequence = b if indices is None else int(indices[b])
            blocks = block_tables[sequence, : -(-longest // layout.page)].long()
            k, kv_scale = layout.unpack(kv_cache[blocks])
            rows = slice(b * next_n, (b + 1) * next_n)
            if layout.is_fp4:
                keys = dequantize_fp4(k, kv_scale).reshape(-1, layout.head_dim)[:longest]
                found = reference_scores(q[b], keys, weights[rows])
            else:
                keys, scales = k.float().reshape(-1, layout.head_dim)[:longest], kv_scale.reshape(-1)[:longest]
                found = reference_scores(q[b], keys, weights[rows]) * scales
            found += 0.0  # -0.0 becomes +0.0, as the contract says
            seen = torch.arange(longest, device=q.device) < lengths[b, :, None]
            logits[rows, :longest] = found.masked_fill_(~seen, float("-inf"))
        return logits


# A small call that is hard to get right, and its comparison: what a kernel has to pass on hardware it has not seen.


def _example(problem: PagedMqaLogitsProblem, device: torch.device) -> PagedMqaLogitsCall:
    batch, next_n, heads, head_dim = problem.batch, problem.next_n, problem.heads, problem.head_dim
    layout, width, page = problem.layout, problem.width, problem.layout.page
    generator = torch.Generator("cpu").manual_seed(heads * head_dim + page)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    # Negative zeros, which are NaN in the other dialect; scales of both signs where the layout has signs.
    pool = batch * problem.max_blocks + 3
    k, values = normal(pool, page, head_dim), normal(batch, next_n, heads, head_dim)
    k.view(-1)[::5], values.view(-1)[::7] = -0.0, -0.0
    scale = normal(pool, page).abs() + 0.1
    if layout.scales == "float32":
        scale.view(-1)[1::3] *= -1.0
    else:
        scale = torch.exp2(torch.log2(scale).round())
    packed = quantize_fp4(k) if layout.is_fp4 else (k.to(layout.dtype), scale)
    blocks = layout.pack(*packed).view(pool, layout.block_bytes)
    # What is not aligned starts four bytes into what is.
    shift, apart = 0 if problem.aligned else 4, -(-layout.block_bytes // 16) * 16 + 16
    wide = torch.zeros((pool, apart), dtype=torch.uint8, device=device)
    place = wide[:, shift : shift + layout.block_bytes]
    place.copy_(blocks.to(device))
    kv_cache = place.as_strided((pool, *layout.block_shape), (apart, layout.row_bytes + 4, layout.row_bytes + 4, 1))
    q = torch.zeros((batch, next_n, heads, head_dim + 16), dtype=problem.q_dtype, device=device)
    q = q[..., shift : shift + head_dim]
    q.copy_(values.to(problem.q_dtype).to(device))
    # Lengths: whole, none, one position, exact ends of pages, past the end.
    kinds = torch.tensor([problem.keys, 0, 1, 2 * page, 2 * page + 1, problem.keys + 9, page - 1, 3 * page - 7, page])
    lengths = kinds.repeat(-(-batch // len(kinds)))[:batch]
    if problem.row_lengths:
        lengths = (lengths[:, None] - torch.arange(next_n) * 5 % 7).contiguous()
    tables = torch.randperm(batch * problem.max_blocks, generator=generator).view(batch, problem.max_blocks)
    out = torch.full(
        (problem.rows, row_stride(width, problem.out_dtype)), float("nan"), dtype=problem.out_dtype, device=device
    )
    return PagedMqaLogitsCall(
        q, kv_cache, normal(problem.rows, heads).to(device), lengths.int().to(device), tables.int().to(device), width,
        layout, (torch.arange(batch) * 2 % batch).int().to(device) if problem.ragged else None, problem.clean_logits,
        problem.out_dtype, out[:, :width],
    )  # fmt: skip


def _difference(problem: PagedMqaLogitsProblem, call: PagedMqaLogitsCall, expected: PagedMqaLogitsCall) -> str | None:
    found, right = call.result.float(), expected.result.float()
    lengths = row_lengths(call.context_lens, problem.next_n, problem.keys).reshape(-1, 1)
    inside = torch.arange(problem.width, device=found.device) < lengths
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
    diff, allowed = calc_diff(found, right, inside), MAX_DIFF[problem.out_dtype]
    return None if diff < allowed else f"calc_diff {diff:.2e}, allowed {allowed:.0e}"
