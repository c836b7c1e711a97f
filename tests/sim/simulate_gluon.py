"""What test_gluon_simulated.py asks for, as JSON: ``python simulate_gluon.py many_rows|windows|faults|counts``."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

from cdna_sim import Options, SimulationFault, listing
from lightning_indexer import Arch, MqaLogitsProblem, calc_diff, fp8_mqa_logits, reference_logits
from lightning_indexer.amd import simulation
from lightning_indexer.amd.simulated import SimLauncher
from lightning_indexer.backends.gluon_gfx950.config import heuristic, many_rows
from lightning_indexer.backends.gluon_gfx950.mqa_logits import Launch
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.problems.mqa_logits import MqaLogitsCall
from lightning_indexer.selection import registry as dispatch

CPU, ARCH = torch.device("cpu"), Arch.parse("gfx950")
kernels: list[str] = []


def watch_kernels() -> None:
    launch = SimLauncher.launch

    def watched(self: SimLauncher, built: Any, *arguments: Any, **options: Any) -> None:
        kernels.append(built.kernel)
        launch(self, built, *arguments, **options)

    SimLauncher.launch = watched  # type: ignore[method-assign]


def many_rows_of_narrow_windows() -> dict[str, Any]:
    """M = 4096 through the public function: narrow windows in a few groups of rows, at tile edges and across jumps."""
    rows, keys = 4096, 90
    inputs = make_inputs(rows, keys, 64, 128, CPU)
    row = torch.arange(rows)
    ks = (row * 7 % 60).to(torch.int32)
    ke = torch.where(row % 64 < 6, ks + row % 11, ks - 3).to(torch.int32)
    with simulation("gfx950", Options(order="shuffled", seed=3)):
        logits = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    expected = reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    inside = expected.isfinite()
    return {
        "backend": dispatch.select(MqaLogitsProblem(rows, keys, 64, 128), ARCH).name,
        "kernels": kernels,
        "mask": torch.equal(logits == float("-inf"), ~inside),
        "diff": calc_diff(logits[inside], expected[inside]),
        "inside": int(inside.sum()),
    }


def windows() -> dict[str, Any]:
    """Seven rows, the last group of four incomplete; keys outside of the windows hold NaN."""
    rows, keys, stride = 7, 300, 2**21
    inputs = make_inputs(rows, keys, 64, 128, CPU)
    ks, ke = make_windows("misaligned", rows, keys, CPU)
    k, scale = inputs.k_fp8.clone(), inputs.kv_scale.clone()
    first, last = int(ks.min()), int(ke.max())
    for outside in (slice(0, first), slice(last, keys)):
        k.view(torch.uint8)[outside] = 0x7F
        scale[outside] = float("nan")
    expected = reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    inside = expected.isfinite()
    problem = MqaLogitsProblem(rows, keys, 64, 128)
    config = dataclasses.replace(many_rows(problem, ARCH), chunk=512)

    def call(options: Options, k: torch.Tensor = k, wide: bool = False) -> torch.Tensor:
        out = torch.full((rows, keys + 21), 5.0)
        with simulation("gfx950", options):
            call = MqaLogitsCall(inputs.q_fp8, k, scale, inputs.weights, ks, ke, out=out[:, :keys])
            Launch(problem, ARCH, config, wide=wide)(call)
        return out

    def same(out: torch.Tensor) -> bool:
        return torch.equal(out.view(torch.int32), plain.view(torch.int32))

    plain = call(Options())
    orders = (Options(order="shuffled", seed=1), Options(order="reversed", deferred=False))
    found = {
        "close": torch.equal(plain[:, :keys] == float("-inf"), ~inside)
        and bool((plain[:, :keys] - expected)[inside].abs().max() < 1e-3),
        "untouched gaps": bool((plain[:, keys:] == 5.0).all()),
        "same bits in every order of waves": all(same(call(options)) for options in orders),
        "same bits with 64-bit pointers": same(call(Options(order="shuffled", seed=2), wide=True)),
    }
    # 300 keys, 2 MiB from one to the next: a chunk of 512 and its tiles leave what buffer instructions reach. Memory is
    # that of the keys alone.
    far = torch.empty(keys * stride, dtype=torch.uint8).view(k.dtype).as_strided((keys, 128), (stride, 1))
    far.copy_(k)
    found["same bits of keys far apart"] = same(call(Options(), far))
    found["kernel of keys far apart"] = kernels[-1]
    for shift in (24, 25):  # a tile of 128 keys is then 2^31 bytes long, and 2^32
        far = torch.empty(keys << shift, dtype=torch.uint8).view(k.dtype).as_strided((keys, 128), (1 << shift, 1))
        far.copy_(k)
        found[f"same bits of keys 2^{shift} bytes apart"] = same(call(Options(), far))
    return found


def reach() -> dict[str, Any]:
    """Heads further apart than 2^31 / H bytes; a compressed row whose only columns lie past 2 GiB."""
    rows, keys, heads, head_dim, stride = 2, 64, 128, 32, 17_000_000
    inputs = make_inputs(rows, keys, heads, head_dim, CPU)
    ks, ke = make_windows("causal", rows, keys, CPU)
    q = torch.empty(heads * stride, dtype=torch.uint8).view(inputs.q_fp8.dtype)
    q = q.as_strided((rows, heads, head_dim), (head_dim, stride, 1))
    q.copy_(inputs.q_fp8)
    problem = MqaLogitsProblem(rows, keys, heads, head_dim)
    results = []
    for of in (inputs.q_fp8, q):
        out = torch.empty(rows, keys)
        with simulation("gfx950"):
            call = MqaLogitsCall(of, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke, out=out)
            Launch(problem, ARCH, heuristic(problem, ARCH))(call)
        results.append(out.view(torch.int32))

    rows, keys, before = 1, 100, 600_000_000
    inputs = make_inputs(rows, keys, 64, 128, CPU)
    ks, ke = torch.tensor([-before], dtype=torch.int32), torch.tensor([keys], dtype=torch.int32)
    expected = reference_logits(
        inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, torch.zeros_like(ks), ke
    )  # fmt: skip
    problem = MqaLogitsProblem(rows, keys, 64, 128, clean_logits=False, max_seqlen_k=before + keys)
    out = torch.empty(rows, before + keys)
    out[:, before:] = 7.0
    with simulation("gfx950"):
        call = MqaLogitsCall(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke, out=out)
        Launch(problem, ARCH, heuristic(problem, ARCH))(call)
    return {
        "heads": torch.equal(*results),
        "columns": bool((out[:, before:] - expected).abs().max() < 1e-3),
    }


def faults() -> dict[str, Any]:
    """Operands shorter than the kernel is told; then its loop without its wait, and without its barrier."""
    rows, keys = 8, 700
    inputs = make_inputs(rows, keys, 64, 128, CPU)
    ks, ke = make_windows("causal", rows, keys, CPU)
    problem = MqaLogitsProblem(rows, keys, 64, 128)
    launch = Launch(problem, ARCH, dataclasses.replace(many_rows(problem, ARCH), chunk=1024))
    k, scale, weights, out = inputs.k_fp8, inputs.kv_scale, inputs.weights, torch.empty(rows, 704)

    def fault(
        options: Options, k: torch.Tensor = k, scale: torch.Tensor = scale, weights: torch.Tensor = weights,
        out: torch.Tensor = out[:, :keys],
    ) -> str:  # fmt: skip
        with simulation("gfx950", options):
            try:
                launch(MqaLogitsCall(inputs.q_fp8, k, scale, weights, ks, ke, out=out))
            except SimulationFault as found:
                return str(found)
        return "no fault"

    shuffled = Options(order="shuffled", seed=2)
    call = MqaLogitsCall(inputs.q_fp8, k, scale, weights, ks, ke, out=out[:, :keys])
    built = launch.build(launch.arguments(call))
    lines = list(listing(built.code_object, built.kernel))
    # The other one is behind the loop.
    barrier = next(index for index, (_, _, text) in enumerate(lines) if text.startswith("s_barrier"))
    waits = [pc for pc, _, text in lines[barrier - 3 : barrier] if text.startswith("s_waitcnt")]
    return {
        "k_ptr": fault(shuffled, k=k[: keys - 1]),
        "kv_scale_ptr": fault(shuffled, scale=scale[: keys - 1]),
        "w_ptr": fault(shuffled, weights=weights.view(-1)[:-1].as_strided((rows, 63), (64, 1))),
        "out_ptr": fault(shuffled, out=out[:, : keys - 1]),
        "no wait": fault(dataclasses.replace(shuffled, drop=frozenset(waits))),
        "no barrier": fault(dataclasses.replace(shuffled, drop=frozenset({lines[barrier][0]}))),
    }


def counts() -> dict[str, Any]:
    """Instructions per row and key of whole tiles, in parts of ``triton-portable``'s; what 1024 keys more cost."""
    from lightning_indexer.backends.triton_portable import mqa_logits as triton
    from lightning_indexer.backends.triton_portable.config import heuristic as triton_heuristic

    def report(launch: Callable[[MqaLogitsProblem], Any], rows: int, keys: int, heads: int, head_dim: int) -> Any:
        inputs = make_inputs(rows, keys, heads, head_dim, CPU)
        ks, ke = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
        with simulation("gfx950") as launcher:
            operands = (inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke)
            launch(MqaLogitsProblem(rows, keys, heads, head_dim))(MqaLogitsCall(*operands, out=torch.empty(rows, keys)))
        return launcher.reports[0]

    found = {}
    for heads, head_dim in ((64, 128), (32, 128), (128, 64), (8, 32)):
        facts = MqaLogitsProblem(4096, 32768, heads, head_dim)
        config = dataclasses.replace(heuristic(facts, ARCH), chunk=8192)
        other = dataclasses.replace(triton_heuristic(facts, ARCH), chunk=8192)
        ours, theirs = (
            [report(launch, rows, keys, heads, head_dim) for keys in (1024, 2048)]
            for launch, rows in (
                (lambda problem, config=config: Launch(problem, ARCH, config), config.rows),
                (lambda problem, config=other: triton.Launch(problem, ARCH, config), 1),
            )
        )
        per_row = (ours[1].instructions - ours[0].instructions) / config.rows
        found[f"H={heads} D={head_dim}"] = {
            "instructions": per_row / (theirs[1].instructions - theirs[0].instructions),
            "conflicts": ours[1].lds_bank_conflicts,
            "reads": sum(n for name, n in ours[1].by_opcode.items() if re.match("(?i)ds_read_b128", name)),
        }
    return found


if __name__ == "__main__":
    watch_kernels()
    jobs = {
        "many_rows": many_rows_of_narrow_windows,
        "windows": windows,
        "reach": reach,
        "faults": faults,
        "counts": counts,
    }
    print(json.dumps(jobs[sys.argv[1]]()), flush=True)
