"""Windows out of attention masks."""

from __future__ import annotations

import torch


def windows_from_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The windows of a mask whose rows each allow one run of keys: causal, sliding-window and packed-batch masks do.

    A batch becomes one row after the other: the windows of ``mask[b]`` fit the call on ``q[b]`` and ``k[b]``, and
    ``ks.view(B, M)`` takes them apart.

    Args:
        mask: [M, N], or with leading dimensions of any size, such as [B, 1, M, N]. Bool, True where the key takes part;
            or floating-point and additive, 0 where it does and ``-inf`` or the dtype's lowest value where it does not.

    Returns:
        ``ks`` and ``ke``, int32 [M] or [B * M], for ``cu_seqlen_ks`` and ``cu_seqlen_ke``; 0 and 0 for a row without
        keys. The mask is read on its device, and the check awaits the result.

    Raises:
        TypeError: not a tensor, or of another dtype.
        ValueError: fewer than two dimensions; a row that allows more than one run of keys; an additive mask with other
            values, such as a bias.
    """
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask: got {type(mask).__name__}, expected a torch.Tensor")
    if mask.layout is not torch.strided or mask.is_nested:
        raise TypeError("mask: got a sparse or nested tensor, expected a dense one")
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask: got dtype {mask.dtype}, expected torch.bool or an additive mask of 0 and -inf")
    if mask.dim() < 2:
        raise ValueError(f"mask: got shape {list(mask.shape)}, expected [M, N] or [..., M, N]")
    ks, ke, exact = spans_of(mask)
    if not bool(exact.all()):
        _complain(mask.reshape(-1, mask.shape[-1]), int((~exact).nonzero()[0]))
    return ks, ke


def spans_of(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`windows_from_mask` finds, of any mask, and nothing is awaited.

    Returns:
        Each row's first allowed key and one past its last, int32 [rows], 0 and 0 without one; and bool [rows], False
        where keys between the two are not allowed, or have a bias. A bias allows its key.
    """
    rows, keys = mask.shape[:-1].numel(), mask.shape[-1]
    mask = mask.reshape(rows, keys)
    if rows == 0 or keys == 0:
        nothing = torch.zeros(rows, dtype=torch.int32, device=mask.device)
        return nothing, nothing.clone(), torch.ones(rows, dtype=torch.bool, device=mask.device)
    step = max(1, _CHUNK // keys)
    parts = [_spans(mask[row : row + step]) for row in range(0, rows, step)]
    ks, ke, exact = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return ks, ke, exact


# Mask entries that are looked at together: temporaries are some bytes each.
_CHUNK = 2**24


def allowed_keys(mask: torch.Tensor) -> torch.Tensor:
    """True where a bool or additive mask allows the key; one that is NaN is not allowed."""
    return mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min


def _spans(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    allowed = allowed_keys(mask)
    codes = allowed.view(torch.uint8)  # argmax knows no bool
    count = allowed.sum(dim=1)
    empty = count == 0
    ks = codes.argmax(dim=1).masked_fill(empty, 0)
    ke = (mask.shape[1] - codes.flip(1).argmax(dim=1)).masked_fill(empty, 0)
    exact = ke - ks == count
    if mask.dtype is not torch.bool:
        exact &= ~((allowed & (mask != 0)) | mask.isnan()).any(dim=1)
    return ks.int(), ke.int(), exact


def _complain(mask: torch.Tensor, row: int) -> None:
    """Raises of the first row that has no window."""
    values = mask[row]
    if mask.dtype is not torch.bool:
        other = (values != 0) & (values > torch.finfo(mask.dtype).min) | values.isnan()
        if bool(other.any()):
            key = int(other.nonzero()[0])
            raise ValueError(f"mask: got {float(values[key])} at row {row}, key {key}, expected 0 or -inf")
    allowed = allowed_keys(values)
    places = allowed.nonzero()[:, 0]
    start, stop = int(places[0]), int(places[-1]) + 1
    gap = start + int((~allowed[start:]).int().argmax())
    raise ValueError(
        f"mask: row {row} allows {len(places)} keys in [{start}, {stop}), but not key {gap}, expected one run of keys: "
        "a window has no holes"
    )
