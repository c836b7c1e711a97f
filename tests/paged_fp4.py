"""fp4 keys that no recipe makes, against their conversion to e4m3 in PyTorch."""

from __future__ import annotations

import torch

from lightning_indexer import CacheLayout
from lightning_indexer.check.paged_mqa_logits import Call, Case, Inputs, make_inputs
from lightning_indexer.fp4 import BLOCK, fp4_to_fp8
from lightning_indexer.problems.paged_mqa_logits import reference_paged_logits, row_lengths


def any_exponents(case: Case, device: torch.device) -> Inputs:
    """The case with keys of random codes (8, -0, among them) and blocks 0 to 25 exponents apart, some of zeros.

    A row of q sees one block of each key, so that what becomes of a small one shows.
    """
    inputs = make_inputs(case, torch.device("cpu"))
    generator = torch.Generator().manual_seed(case.heads + case.page)
    pool, page = inputs.kv_cache.shape[0], case.page
    values = torch.randint(0, 256, (pool, page, 64), generator=generator, dtype=torch.uint8)
    byte = torch.randint(100, 126, (pool, page, 4), generator=generator, dtype=torch.uint8)
    kind = torch.randint(0, 12, (pool, page), generator=generator)
    blocks = values.view(pool, page, 4, 16)
    # Zeros below and above the others; of both signs; nothing but zeros.
    blocks[kind == 0, 1], byte[kind == 0] = 0, torch.tensor([120, 1, 121, 119], dtype=torch.uint8)
    blocks[kind == 1, 2], byte[kind == 1] = 0x80, torch.tensor([120, 110, 254, 119], dtype=torch.uint8)
    values[kind == 2] = 0x08
    byte[kind == 3] = torch.tensor([3, 0, 1, 6], dtype=torch.uint8)
    byte[kind == 4] = torch.tensor([140, 128, 126, 122], dtype=torch.uint8)  # 0, 12, 14 and 18 apart
    byte[kind == 5, 3] = 255
    cache = case.layout.pack(values, byte).to(device).as_strided(
        inputs.kv_cache.shape, (case.layout.block_bytes, *inputs.kv_cache.stride()[1:])
    )  # fmt: skip
    head, row = torch.arange(case.heads) % 4, torch.arange(case.batch * case.next_n) % 4
    channel = torch.arange(case.head_dim) // BLOCK
    inputs.q.view(torch.uint8)[..., head[:, None] != channel] = 0
    inputs.weights[row[:, None] != head] = 0.0
    moved = (None if tensor is None else tensor.to(device) for tensor in (
        inputs.q, inputs.weights, inputs.context_lens, inputs.block_tables, inputs.indices,
    ))  # fmt: skip
    q, weights, lengths, tables, indices = moved
    return Inputs(q, cache, weights, lengths, tables, indices)


def check_any_exponents(case: Case, device: torch.device, call: Call) -> list[str]:
    """What is wrong with the logits of :func:`any_exponents`: key by key, for a key may be 2^100 times another."""
    inputs = any_exponents(case, device)
    out = torch.full((case.batch * case.next_n, case.width), float("nan"), device=device)
    call(case, inputs, out)
    values, byte = case.layout.unpack(inputs.kv_cache)
    wide = CacheLayout(case.page, case.head_dim)
    k, kv_scale = fp4_to_fp8(values, byte)
    common = (inputs.context_lens, inputs.block_tables, case.width)
    options = {"layout": wide, "indices": inputs.indices}
    expected = reference_paged_logits(inputs.q, wide.pack(k, kv_scale), inputs.weights, *common, **options)
    # What a key's logits are sums of: their errors are a part of it, and cancel nothing.
    most = reference_paged_logits(
        inputs.q.float().abs().to(inputs.q.dtype), wide.pack(k.float().abs().to(k.dtype), kv_scale),
        inputs.weights.abs(), *common, **options,
    )  # fmt: skip
    lengths = row_lengths(inputs.context_lens, case.next_n, case.width).reshape(-1, 1)
    inside = torch.arange(case.width, device=device) < lengths
    faults = []
    if case.clean and not torch.equal(torch.isneginf(out), ~inside):
        faults.append("-inf at wrong positions")
    if not torch.equal(out.isnan() & inside, expected.isnan() & inside):
        faults.append(f"NaN at {int(((out.isnan() != expected.isnan()) & inside).sum())} wrong positions")
    known = inside & ~expected.isnan()
    off = ((out - expected).abs() > 2**-11 * most) & known
    if bool(off.any()):
        row, column = (int(place) for place in off.nonzero()[0])
        faults.append(
            f"{int(off.sum())} of {int(known.sum())} are off, the first at [{row}, {column}]: "
            f"{float(out[row, column])} for {float(expected[row, column])} of {float(most[row, column])}"
        )
    return faults
