"""Kernels at the ends of what their gates let through: the last columns of long rows, rows far apart."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")


from layouts import POISON, contiguous, copy, sparse  # noqa: E402

from lightning_indexer import Arch, MqaLogitsProblem, calc_diff, reference_logits  # noqa: E402
from lightning_indexer.amd import simulation  # noqa: E402
from lightning_indexer.backends.gluon_gfx950 import config as gluon  # noqa: E402
from lightning_indexer.backends.gluon_gfx950 import mqa_logits as gluon_kernel  # noqa: E402
from lightning_indexer.backends.triton_portable import config as triton  # noqa: E402
from lightning_indexer.backends.triton_portable import mqa_logits as triton_kernel  # noqa: E402
from lightning_indexer.check.cases import make_inputs  # noqa: E402
from lightning_indexer.problems.mqa_logits import MqaLogitsCall  # noqa: E402
from lightning_indexer.selection import registry  # noqa: E402

CPU, GFX950 = torch.device("cpu"), Arch.parse("gfx950")


def windows_at_the_end(keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    ends = ((70, 0), (33, 0), (500, 3), (64, 1))
    ks, ke = zip(*((keys - start, keys - stop) for start, stop in ends), strict=True)
    return torch.tensor(ks, dtype=torch.int32), torch.tensor(ke, dtype=torch.int32)


@pytest.mark.parametrize(
    ("backend", "keys", "changes"),
    [
        ("hip-gfx950", 2**29 - 1, {"strategy": "stream", "unroll2": True, "split_n": 1}),
        ("hip-gfx950", 2**29 - 1, {"strategy": "lds", "unroll2": False, "split_n": 1}),
        ("hip-gfx950", 2**30 - 64, {"strategy": "stream", "unroll2": False, "split_n": 1}),
        # In chunks of their own sizes there are more blocks than a test simulates.
        ("flydsl", 2**29 - 1, {"chunk": 2**28}),
    ],
)
def test_the_end_of_the_longest_rows(backend, keys, changes):
    rows, near = 4, 512
    problem = MqaLogitsProblem(rows, keys, 32, 128, clean_logits=False)
    kernel = registry.kernel(backend)
    if (reason := registry.get(backend).missing()) is not None:
        pytest.skip(reason)
    assert kernel.supports(problem, GFX950) is None
    inputs = make_inputs(rows, near, 32, 128, CPU)
    # Rows of k overlap, as those of a sliding view do: 16 bytes from one to the next.
    bytes_of_tail = torch.cat((inputs.k_fp8.view(torch.uint8)[:, :16].reshape(-1), torch.zeros(112, dtype=torch.uint8)))
    k = sparse((keys, 128), (16, 1), torch.float8_e4m3fn)
    tail = k[keys - near :]
    tail.view(torch.uint8).as_strided((16 * near + 112,), (1,)).copy_(bytes_of_tail)
    kv_scale = sparse((keys,), (1,), torch.float32)
    kv_scale[keys - near :].copy_(inputs.kv_scale)
    ks, ke = windows_at_the_end(keys)
    out = sparse((rows, keys), (-(-keys // 64) * 64, 1), torch.float32)
    poisoned = out[:, keys - near :]
    poisoned.view(torch.int32).fill_(POISON)
    call = MqaLogitsCall(inputs.q_fp8, k, kv_scale, inputs.weights, ks, ke, clean_logits=False, out=out)
    with simulation("gfx950"):
        kernel.launch(problem, GFX950, dataclasses.replace(kernel.config(problem, GFX950), **changes))(call)
    expected = reference_logits(
        inputs.q_fp8, (tail, inputs.kv_scale), inputs.weights, ks - (keys - near), ke - (keys - near)
    )
    inside = expected.isfinite()
    assert inside.sum(1).tolist() == [70, 33, 497, 63]
    assert calc_diff(poisoned, expected, inside) < 1e-9
    if backend == "hip-gfx950":  # where not clean, it writes what windows hold and nothing else
        assert bool((poisoned.view(torch.int32)[~inside] == POISON).all())


@pytest.mark.parametrize("strategy", ["stream", "lds"])
def test_rows_of_logits_as_far_apart_as_an_offset_reaches(strategy):
    rows, keys, stride = 5, 301, 2**30 - 64
    problem = MqaLogitsProblem(rows, keys, 32, 128)
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    ks, ke = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
    out = sparse((rows, keys), (stride, 1), torch.float32)
    k = copy(inputs.k_fp8, contiguous(inputs.k_fp8.shape))
    kernel = registry.kernel("hip-gfx950")
    config = dataclasses.replace(kernel.config(problem, GFX950), strategy=strategy, unroll2=False)
    with simulation("gfx950"):
        kernel.launch(problem, GFX950, config)(
            MqaLogitsCall(inputs.q_fp8, k, inputs.kv_scale, inputs.weights, ks, ke, out=out)
        )
    expected = reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    assert calc_diff(out, expected, expected.isfinite()) < 1e-9


@pytest.mark.parametrize(("config", "kernel"), [(triton, triton_kernel), (gluon, gluon_kernel)])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm90"])
def test_the_end_of_the_last_chunk_is_an_int32(config, kernel, arch):
    for rows, keys, heads in ((1, 1, 8), (1, kernel.MAX_POSITION, 64), (4096, 131072, 128), (8192, 2**24, 64)):
        problem = MqaLogitsProblem(rows, keys, heads, 128)
        for chosen in config.neighbours(problem, Arch.parse(arch)):
            last = (kernel.MAX_POSITION - 1) // chosen.chunk * chosen.chunk
            assert last + chosen.chunk + 4 * chosen.block <= 2**31 - 1
            assert chosen.chunk % chosen.block == 0
