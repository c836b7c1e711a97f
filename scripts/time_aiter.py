#!/usr/bin/env python3
"""Predicts kernels that others published, from their own code, and sets the published times beside the predictions.

    git clone https://github.com/ROCm/aiter
    git -C aiter worktree add ../aiter-before 8a9b4145f83   # before its pull request 4563: one wave a row, 32 keys
    scripts/time_aiter.py --main aiter --before aiter-before --hip fp8_mqa_logits.cu

``--main`` and ``--before``: checkouts whose Gluon kernel is compiled by the Triton that is installed, with the launch
parameters that each state had for gfx950. ``--hip``: csrc/kernels/fp8_mqa_logits.cu of AITER's pull request 5046 (also
in moreh-dev/rocm-aiter, 2706801b2ae0); its kernel is compiled with clang's builtins in place of HIP's headers, and
launched as its host code does. No GPU is needed, and nothing of either is part of this repository.

Where logits are clean, AITER fills them by ``torch.full`` before the Gluon kernel, which is added as its bytes at the
device's memory rate and a launch, and as what it pushes out of the Infinity Cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.amd import clang, launcher_for, triton_amd
from lightning_indexer.amd.built import Built
from lightning_indexer.model import rates, timing
from lightning_indexer.model.cost import windows_of
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, row_stride

KERNEL = "aiter/ops/triton/_gluon_kernels/gfx950/attention/fp8_mqa_logits.py"
GFX950 = Arch.parse("gfx950")
UNITS = 256  # that AITER's host code counts on


class Gluon:
    """AITER's Gluon kernel as ``model.timing.record`` takes ours."""

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

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: None) -> GluonLaunch:
        return GluonLaunch(self.function, problem, arch)

    def build(self, problem: MqaLogitsProblem, arch: Arch) -> Built:
        q = torch.zeros(problem.rows, problem.heads, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
        k = torch.zeros(problem.keys, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
        out = torch.empty(problem.rows, row_stride(problem.width, problem.out_dtype))[:, : problem.width]
        window = torch.zeros(problem.rows, dtype=torch.int32)
        weights = torch.ones(problem.rows, problem.heads)
        call = MqaLogitsCall(q, k, torch.ones(problem.keys), weights, window, window, True, out=out)
        return self.launch(problem, arch, None).compiled(call)[0]


class GluonLaunch:
    def __init__(self, function: Any, problem: MqaLogitsProblem, arch: Arch) -> None:
        self.function, self.problem, self.arch = function, problem, arch
        self.warps, self.rows, self.waves_per_eu = 1, 1, 3
        self.constants: dict[str, Any] = {"BLOCK_KV": 32}
        if "BLOCK_M" in function.arg_names:  # since pull request 4563
            few = problem.heads <= 32
            self.warps, self.rows, self.waves_per_eu = 2 if few else 1, 2 if few and problem.rows > 4096 else 1, 4
            self.constants = {
                "BLOCK_KV": 64 if few else 32, "BLOCK_M": self.rows, "MFMA_NONK_DIM": 32 if problem.heads == 32 else 16
            }  # fmt: skip
        self.constants |= {
            "NUM_WARPS": self.warps, "NUM_BUFFERS": 2, "NUM_CHAINS": 4, "USE_PADDED_SHARED_LAYOUT": True
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
        options = {"num_warps": self.warps, "waves_per_eu": self.waves_per_eu}
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


# What the kernel takes of HIP's headers.
SHIM = """
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(n) __attribute__((amdgpu_flat_work_group_size(1, n)))
#define INT_MAX __INT_MAX__
using __hip_fp8_storage_t = unsigned char;
using int64_t = long;
struct Lane { __device__ operator int() const { return __builtin_amdgcn_workitem_id_x(); } };
struct Lanes { Lane x; };
struct Group { int x, y; };
#define threadIdx Lanes{}
#define blockIdx Group{(int)__builtin_amdgcn_workgroup_id_x(), (int)__builtin_amdgcn_workgroup_id_y()}
#define gridDim Group{((const __attribute__((address_space(4))) int*)__builtin_amdgcn_implicitarg_ptr())[0], 0}
__device__ inline int min(int a, int b) { return a < b ? a : b; }
__device__ inline int max(int a, int b) { return a > b ? a : b; }
__device__ inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
"""


class Hip:
    """The kernel of AITER's pull request 5046, and its host code's choices for 256 units."""

    def __init__(self, source: Path) -> None:
        text = source.read_text()
        body = text[text.index("using fp8 =") : text.index("}  // namespace mqa_dense")] + "}\n"
        instance = (
            "template __global__ void mqa_dense::fp8_mqa_logits_kernel<WAVES, 4, CLEAN, false, REVERSE>(const fp8*, "
            "const fp8*, const float*, const float*, const int*, const int*, float*, int, int, int);\n"
        )
        self.source = Path(tempfile.mkdtemp()) / "fp8_mqa_logits.hip"
        self.source.write_text(SHIM + body + instance)

    def config(self, problem: MqaLogitsProblem, arch: Arch) -> None:
        return None

    def build(self, problem: MqaLogitsProblem, arch: Arch) -> Built:
        macros = {
            "WAVES": self.waves(problem), "CLEAN": int(problem.clean_logits), "REVERSE": int(problem.keys > 2048)
        }  # fmt: skip
        return clang.compile_hip(self.source, "gfx950", macros, ("-fno-honor-nans",))

    def waves(self, problem: MqaLogitsProblem) -> int:
        return 4 if problem.keys <= 2048 else 8

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: None) -> Any:
        blocks = -(-problem.rows // 4)
        splits = max(1, -(-2 * UNITS // blocks))

        def run(call: MqaLogitsCall) -> None:
            q, k, kv_scale, weights, ks, ke = call[:6]
            scalars = (problem.rows, problem.keys, splits)
            launcher_for(torch.device("cpu")).launch(
                self.build(problem, arch), (blocks, splits, 1), 64 * self.waves(problem),
                (q, k, kv_scale, weights, ks, ke, call.result, *scalars), outputs=("logits_ptr",),
            )  # fmt: skip

        return run


Column = tuple[str, Any, rates.Published, int]


def columns(options: argparse.Namespace) -> Iterator[Column]:
    """What is predicted: a name, the kernel, and the column of a published table."""
    if options.main is not None:
        gluon = Gluon(options.main)
        yield from (("Gluon, main", gluon, published, 0) for published in (*rates.AITER_MAIN, rates.AITER_GLUON))
    if options.before is not None:
        yield "Gluon, before 4563", Gluon(options.before), rates.AITER_HIP, 0
    if options.hip is not None:
        yield "HIP", Hip(options.hip), rates.AITER_HIP, 1


def main() -> None:
    from cdna_sim.timing import predict

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--main", type=Path, help="a checkout of ROCm/aiter of August 2026")
    parser.add_argument("--before", type=Path, help="one from before its pull request 4563")
    parser.add_argument("--hip", type=Path, help="fp8_mqa_logits.cu of its pull request 5046")
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    print("| code | published | H | rows | keys | window | predicted us | [published] | ratio | limit |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, kernel, published, column in columns(options):
        device = timing.device_of(GFX950, published.rates.name)
        for (rows, keys, window), times in published.times.items():
            problem = MqaLogitsProblem(rows, keys, published.heads, 128, clean_logits=published.form == "clean")
            filled = rows * keys * 4 if published.form == "clean" and name != "HIP" else 0
            ks, ke = windows_of(window, rows, keys)
            outside = filled and filled - 4 * int((ke - ks).clamp(min=0).sum())  # the rest, the kernel writes again
            traces = timing.record(kernel, problem, window, GFX950, samples=options.samples)
            found = predict(device, traces, passed=outside)
            us = found.microseconds + (filled / device.memory / 1000 + device.launch if filled else 0)
            print(
                f"| {name} | {published.title} | {published.heads} | {rows} | {keys} | {window} | {us:.1f} | "
                f"{times[column]:.1f} | {us / times[column]:.2f} | {found.limit} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
