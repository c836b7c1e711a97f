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
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask: got dtype {mask.dtype}, expected torch.bool or an additive mask of 0 and -inf")
    if mask.dim() < 2:
        raise ValueError(f"mask: got shape {list(mask.shape)}, expected [M, N] or [..., M, N]")
    rows, keys = mask.shape[:-1].numel(), mask.shape[-1]
    mask = mask.reshape(rows, keys)
    allowed = mask
    if mask.dtype is not torch.bool:
        allowed = mask == 0
        other = ~allowed & (mask > torch.finfo(mask.dtype).min)  # a NaN is neither
        other |= mask.isnan()
        if bool(other.any()):
            row, key = other.nonzero()[0].tolist()
            raise ValueError(f"mask: got {float(mask[row, key])} at row {row}, key {key}, expected 0 or -inf")
    count = allowed.sum(dim=1)
    if keys == 0:
        return count.int(), count.int()
    # The first allowed key, and one past the last.
    ks = allowed.int().argmax(dim=1)
    ke = keys - allowed.flip(1).int().argmax(dim=1)
    empty = count == 0
    ks, ke = ks.masked_fill(empty, 0), ke.masked_fill(empty, 0)
    broken = ke - ks != count
    if bool(broken.any()):
        row = int(broken.nonzero()[0])
        start = int(ks[row])
        gap = start + int((~allowed[row, start:]).int().argmax())
        raise ValueError(
            f"mask: row {row} allows {int(count[row])} keys in [{start}, {int(ke[row])}), but not key {gap}, expected "
            "one run of keys: a window has no holes"
        )
    return ks.int(), ke.int()
