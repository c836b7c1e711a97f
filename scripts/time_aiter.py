#!/usr/bin/env python3
"""Predicts AITER's public Gluon kernel and sets the times that were published of it beside the predictions.

    git clone https://github.com/ROCm/aiter && scripts/time_aiter.py aiter

The kernel is compiled from the given checkout by the Triton that is installed, with the launch parameters that AITER
had for gfx950 in August 2026. No GPU is needed, and nothing of AITER's is part of this repository. Where logits are
clean, AITER fills them by ``torch.full`` first, which is added as its bytes at the device's memory rate and a launch.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.amd import launcher_for, triton_amd
from lightning_indexer.amd.built import Built
from lightning_indexer.model import rates, timing
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, row_stride

KERNEL = "aiter/ops/triton/_gluon_kernels/gfx950/attention/fp8_mqa_logits.py"
GFX950 = Arch.parse("gfx950")


class Aiter:
    """AITER's kernel as ``model.timing.record`` takes ours."""

    def __init__(self, checkout: Path) -> None:
        text = (checkout / KERNEL).read_text()
        # A shim for Python 3.14, from a module that imports all of AITER.
        text = re.sub(r"from aiter\S* import strip_annotate", "def strip_annotate(cls):\n    return cls", text)
        folder = Path(tempfile.mkdtemp())
        (folder / "aiter_kernel.py").write_text(text)
        spec = importlib.util.spec_from_file_location("aiter_kernel", folder / "aiter_kernel.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.function = module._gluon_fp8_mqa_logits_kernel

    def config(self, problem: MqaLogitsProblem, arch: Arch) -> None:
        return None

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: None) -> Launch:
        return Launch(self.function, problem, arch)

    def build(self, problem: MqaLogitsProblem, arch: Arch) -> Built:
        q = torch.zeros(problem.rows, problem.heads, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
        k = torch.zeros(problem.keys, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
        out = torch.empty(problem.rows, row_stride(problem.width, problem.out_dtype))[:, : problem.width]
        window = torch.zeros(problem.rows, dtype=torch.int32)
        weights = torch.ones(problem.rows, problem.heads)
        call = MqaLogitsCall(q, k, torch.ones(problem.keys), weights, window, window, True, out=out)
        return self.launch(problem, arch, None).compiled(call)[0]


class Launch:
    def __init__(self, function: Any, problem: MqaLogitsProblem, arch: Arch) -> None:
        self.function, self.problem, self.arch = function, problem, arch
        few = problem.heads <= 32
        self.warps, self.rows = 2 if few else 1, 2 if few and problem.rows > 4096 else 1
        self.constants = {
            "BLOCK_KV": 64 if few else 32, "NUM_WARPS": self.warps, "NUM_BUFFERS": 2, "NUM_CHAINS": 4,
            "USE_PADDED_SHARED_LAYOUT": True, "BLOCK_M": self.rows, "MFMA_NONK_DIM": 32 if problem.heads == 32 else 16,
        }  # fmt: skip

    def compiled(self, call: MqaLogitsCall) -> tuple[Built, dict[str, Any]]:
        q, k, kv_scale, weights, ks, ke = call[:6]
        out, problem = call.result, self.problem
        values = {
            "Q_ptr": q, "KV_ptr": k, "kv_scales_ptr": kv_scale, "weights_ptr": weights, "cu_start_ptr": ks,
            "cu_end_ptr": ke, "logits_ptr": out, "seq_len": problem.rows, "seq_len_kv": problem.keys,
            "NUM_HEADS": problem.heads, "HEAD_SIZE": 128, "stride_q_s": q.stride(0), "stride_q_h": q.stride(1),
            "stride_q_d": 1, "stride_kv_s": k.stride(0), "stride_kv_d": 1, "stride_w_s": weights.stride(0),
            "stride_w_h": 1, "stride_logits_s": out.stride(0), "stride_logits_k": 1,
            "USE_BUFFER_LOAD": k.numel() < 2**31, "USE_BUFFER_STORE": problem.rows * out.stride(0) * 4 < 2**31,
            **self.constants,
        }  # fmt: skip
        values = {name: values[name] for name in self.function.arg_names}
        options = {"num_warps": self.warps, "waves_per_eu": 4}
        facts = triton_amd.specialise(self.function, values, self.arch.name, options)
        built = triton_amd.compile_triton(
            self.function, facts.signature, facts.constexprs, facts.attrs, self.arch.name, options, gluon=True
        )
        return built, values

    def __call__(self, call: MqaLogitsCall) -> None:
        built, values = self.compiled(call)
        given = [values[name] for name in built.argument_names]
        grid = (-(-self.problem.rows // self.rows), 1, 1)
        launcher_for(torch.device("cpu")).launch(built, grid, 64 * self.warps, given, outputs=("logits_ptr",))


def main() -> None:
    from cdna_sim.timing import predict

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of ROCm/aiter")
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    kernel = Aiter(options.checkout)
    print("| published | H | rows | keys | window | predicted us | published us | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for published in (*rates.AITER_MAIN, rates.AITER_HIP):
        device = timing.device_of(GFX950, published.rates.name)
        for (rows, keys, window), times in published.times.items():
            problem = MqaLogitsProblem(rows, keys, published.heads, 128, clean_logits=True)
            us = predict(device, timing.record(kernel, problem, window, GFX950, samples=options.samples)).microseconds
            if published.form == "clean":
                us += rows * keys * 4 / device.memory / 1000 + device.launch
            print(
                f"| {published.title} | {published.heads} | {rows} | {keys} | {window} | {us:.1f} | {times[0]:.1f} | "
                f"{us / times[0]:.2f} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
