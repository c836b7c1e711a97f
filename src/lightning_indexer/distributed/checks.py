"""What the sharded calls ask of their arguments before the first collective: a rank that refuses its own makes none."""

from __future__ import annotations

from typing import get_args

import torch

from lightning_indexer.distributed.merge import Exchange
from lightning_indexer.distributed.sharding import KeySharding, LocalWindows
from lightning_indexer.fp8 import FP8_DTYPES, WIDE_DTYPES
from lightning_indexer.problems.checks import as_bool, as_int, check_pair, check_tensor, shape_of
from lightning_indexer.problems.top_k import MAX_K, Order

_BASES, _ORDERS, _EXCHANGES = ("row", "absolute"), get_args(Order), get_args(Exchange)
_OPERANDS = (*FP8_DTYPES, torch.bfloat16)


def check_rows(q: torch.Tensor, weights: torch.Tensor, dimensions: int) -> int:
    """M: rows of q, as many as the weights have. What else there is to say of the two, the calls on them say.

    Raises:
        TypeError, ValueError: as :func:`check_options`.
    """
    check_tensor("q", q, _OPERANDS)
    if q.dim() != dimensions:
        shape = "[M, H, D]" if dimensions == 3 else "[B, next_n, H, D]"
        raise ValueError(f"q: got shape {shape_of(q)}, expected {dimensions} dimensions, {shape}")
    rows = q.shape[0] if dimensions == 3 else q.shape[0] * q.shape[1]
    check_tensor("weights", weights, WIDE_DTYPES)
    if weights.dim() != 2 or weights.shape[0] != rows:
        raise ValueError(f"weights: got shape {shape_of(weights)}, expected [{rows}, {q.shape[-2]}] to match q")
    return rows


def check_keys(kv: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A rank's keys and their scales.

    Raises:
        TypeError, ValueError: as :func:`check_options`.
    """
    check_pair("kv", kv, "(k, kv_scale)")
    check_tensor("k", kv[0], _OPERANDS)
    if kv[0].dim() != 2:
        raise ValueError(f"k: got shape {shape_of(kv[0])}, expected 2 dimensions, [N, D]")
    check_tensor("kv_scale", kv[1], (torch.float32,))


def check_vector(name: str, vector: torch.Tensor, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> None:
    """int32 of one of these shapes, on that device.

    Raises:
        TypeError, ValueError: as :func:`check_options`.
    """
    check_tensor(name, vector, (torch.int32,), f": pass {name}.to(torch.int32)")
    if tuple(vector.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: got shape {shape_of(vector)}, expected {expected} to match q")
    if vector.device != device:
        raise ValueError(f"{name}: got a tensor on {vector.device}, expected {device}, the device of q")


def check_windows(windows: LocalWindows, rows: int, device: torch.device) -> None:
    """What ``KeySharding.windows`` made of the rows' windows.

    Raises:
        TypeError, ValueError: as :func:`check_options`.
    """
    if not isinstance(windows, LocalWindows):
        raise TypeError(f"windows: got {type(windows).__name__}, expected what sharding.windows(ks, ke, rank) gives")
    check_vector("windows.ends", windows.ends, ((rows,),), device)


def check_options(
    sharding: KeySharding,
    k: int,
    *,
    index_base: str = "row",
    order: str = "index",
    values: bool = False,
    exchange: Exchange | None = None,
    logits_bytes: int | None = None,
) -> int:
    """The options of a call; k as an int.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
    """
    if not isinstance(sharding, KeySharding):
        raise TypeError(f"sharding: got {type(sharding).__name__}, expected a KeySharding")
    chosen = (("index_base", index_base, _BASES), ("order", order, _ORDERS))
    for name, given, kinds in chosen if exchange is None else (*chosen, ("exchange", exchange, _EXCHANGES)):
        if not isinstance(given, str) or given not in kinds:
            raise ValueError(f"{name}: got {given!r}, expected one of {', '.join(kinds)}")
    as_bool("values", values)
    if logits_bytes is not None and as_int("logits_bytes", logits_bytes) < 1:
        raise ValueError(f"logits_bytes: got {logits_bytes}, expected at least 1")
    count = int(as_int("k", k))
    if not 1 <= count <= MAX_K:
        raise ValueError(f"k: got {count}, expected 1 to {MAX_K}")
    return count
