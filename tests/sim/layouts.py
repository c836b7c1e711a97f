"""What test_layouts.py asks for, as JSON: ``python layouts.py BACKEND ARCH``.

One launched ``Run`` is given one problem in memory of several kinds, in turn and back: what a compiler specialised on
at one call must not be used at the next.
"""

from __future__ import annotations

import json
import math
import mmap
import sys
from collections.abc import Callable, Sequence

import torch

from lightning_indexer import Arch, MqaLogitsProblem, calc_diff, reference_logits
from lightning_indexer.amd import simulation, triton_amd
from lightning_indexer.backends.triton_portable.mqa_logits import Launch
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.problems.mqa_logits import MqaLogitsCall
from lightning_indexer.selection import registry

# A width on 16: Triton is told so, and kernels are kept.
ROWS, KEYS, HEAD_DIM = 3, 208, 128
# No device has these bits in a result.
POISON = 0x7FC5A5A5


def sparse(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, *, before: int = 0, after: int = 0
) -> torch.Tensor:
    """A tensor ``before`` elements into memory that ends ``after`` elements behind it; untouched pages take none."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    size = (before + last + 1 + after) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    flat = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8).view(dtype)
    return flat.as_strided(tuple(shape), tuple(strides), before)


def contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[index + 1 :]) for index in range(len(shape))]


def copy(source: torch.Tensor, strides: Sequence[int] | None = None, **place: int) -> torch.Tensor:
    target = sparse(source.shape, strides or contiguous(source.shape), source.dtype, **place)
    if source.dtype.itemsize == 1:
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    else:
        target.copy_(source)
    return target


def layouts(plain: MqaLogitsCall) -> dict[str, MqaLogitsCall]:
    """Rows of q and k lie on 16 bytes in each, which is a fact of the problem."""
    q, k, kv_scale, weights, ks, ke = plain[:6]
    rows, keys, heads, head_dim = *q.shape[:1], *k.shape[:1], *q.shape[1:]
    gib = 2**30

    def out(stride: int, **place: int) -> torch.Tensor:
        return sparse((rows, keys), (stride, 1), torch.float32, **place)

    near = plain._replace(
        q=copy(q), k=copy(k), kv_scale=copy(kv_scale), weights=copy(weights), ks=copy(ks), ke=copy(ke), out=out(320)
    )
    return {
        "near": near,
        "result in 4 GiB": near._replace(out=out(320, before=gib - 64 * 320)),
        "result in 2 GiB and a row": near._replace(out=out(320, before=gib // 2 - 64)),
        "operands in 4 GiB": near._replace(
            q=copy(q, before=4 * gib), k=copy(k, before=16, after=4 * gib), weights=copy(weights, after=gib),
            kv_scale=copy(kv_scale, before=gib), ks=copy(ks, before=gib), ke=copy(ke, after=gib),
        ),
        "rows apart": near._replace(
            q=copy(q, (2**12 * heads, 2 * head_dim, 1)), k=copy(k, (head_dim + 48, 1)),
            weights=copy(weights, (heads + 16, 1)), out=out(1024),
        ),
        "rows off 16 bytes": near._replace(
            weights=copy(weights, (heads + 3, 1), before=1), kv_scale=copy(kv_scale, before=1), ks=copy(ks, before=3),
            ke=copy(ke, before=1), out=out(keys + 1, before=1),
        ),
        "rows of a GiB": near._replace(
            q=copy(q, (gib, head_dim, 1)), k=copy(k, (2**25 + 16, 1)), weights=copy(weights, (gib // 4 + 16, 1)),
            out=out(gib - 64),
        ),
        "rows beyond 32 bits": near._replace(
            q=copy(q, (2**32 + 64, head_dim, 1)), weights=copy(weights, (gib + 4, 1)), out=out(gib + 64),
        ),
        "shared rows": near._replace(q=near.q[:1].expand_as(q), weights=near.weights[:1].expand_as(weights)),
    }  # fmt: skip


def problem_of(form: str, heads: int, dtype: torch.dtype) -> MqaLogitsProblem:
    width = KEYS if form == "compressed" else 0
    return MqaLogitsProblem(ROWS, KEYS, heads, HEAD_DIM, dtype, dtype, clean_logits=form == "clean", max_seqlen_k=width)


def wrong_layouts(run: Callable[[MqaLogitsCall], None], problem: MqaLogitsProblem) -> list[str]:
    """What is wrong, by layout and turn; ``run`` is the one launched run of the problem."""
    inputs = make_inputs(problem.rows, problem.keys, problem.heads, problem.head_dim, torch.device("cpu"))
    ks, ke = make_windows("misaligned", problem.rows, problem.keys, torch.device("cpu"))
    q, k = inputs.q_fp8, inputs.k_fp8
    if problem.q_dtype is torch.float8_e4m3fnuz:
        q, k = (0.5 * q.float()).to(problem.q_dtype), (0.5 * k.float()).to(problem.q_dtype)  # their largest is 240
    plain = MqaLogitsCall(
        q, k, inputs.kv_scale, inputs.weights, ks, ke, problem.clean_logits, problem.max_seqlen_k, problem.out_dtype
    )
    found = []
    calls = layouts(plain)
    for turn, name in enumerate([*calls, *reversed(calls)]):
        call = calls[name]
        call.result.view(torch.int32).fill_(POISON)
        run(call)
        expected = reference_logits(call.q, (call.k, call.kv_scale), call.weights, ks, ke)
        inside = expected.isfinite()
        result = call.result
        if problem.compressed:
            position = ks.long()[:, None] + torch.arange(problem.width)
            exists = (position >= 0) & (position < problem.keys)
            place = position.clamp(0, problem.keys - 1)
            expected, inside = expected.gather(1, place), inside.gather(1, place) & exists
        diff = calc_diff(result, expected, inside)
        outside = result[~inside]
        masked = bool((outside == float("-inf")).all()) if problem.clean_logits else True
        if not (diff < 1e-9 and masked and inside.any()):
            found.append(f"turn {turn}, {name}: calc_diff {diff}, mask {'right' if masked else 'wrong'}")
    return found


def wrong_keys(launch: Launch) -> list[str]:
    """Layouts that Triton compiles different kernels for, and that triton-portable would keep one kernel for."""
    from lightning_indexer.backends.triton_portable.mqa_logits_kernel import fp8_mqa_logits_kernel as kernel

    rows, keys = launch.sizes[:2]
    heads, dtype = launch.constants["HEADS"], torch.float8_e4m3fn
    starts = torch.zeros(rows, dtype=torch.int32)
    plain = MqaLogitsCall(
        torch.zeros(rows, heads, HEAD_DIM).to(dtype), torch.zeros(keys, HEAD_DIM).to(dtype), torch.zeros(keys),
        torch.zeros(rows, heads), starts, starts,
    )  # fmt: skip
    known: dict[object, tuple[str, str]] = {}
    found = []
    for name, call in layouts(plain).items():
        arguments = launch.arguments(call)
        values = dict(zip(kernel.arg_names, (*arguments, *launch.constants.values()), strict=True))
        facts = triton_amd.specialise(kernel, values, launch.arch.name, launch.options)
        compiled = repr((facts.signature, facts.constexprs, facts.attrs))
        key = launch._key(arguments)
        other, expected = known.setdefault(key, (name, compiled)) if key is not None else (name, compiled)
        if compiled != expected:
            found.append(f"{name} has the key of {other}")
    return found if len(known) > 2 else [*found, f"{len(known)} keys"]


def main(backend: str, name: str) -> list[str]:
    arch = Arch.parse(name)
    dtype = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
    kernel = registry.kernel(backend)
    found, ran = [], 0
    for form, heads in (("clean", 32), ("compressed", 32)):
        problem = problem_of(form, heads, dtype)
        if kernel.supports(problem, arch) is not None:
            continue
        run = kernel.launch(problem, arch, kernel.config(problem, arch))
        with simulation(name):
            wrong = wrong_layouts(run, problem)
        if isinstance(run, Launch):
            wrong += wrong_keys(run)
        found += [f"{form}, {text}" for text in wrong]
        ran += 1
    return found if ran else ["no problem is supported"]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
