"""Compiles ``triton-portable`` for one arch without its device and prints what came out, as one JSON line a problem.

Run by test_triton.py in a process of its own, because the other tests run Triton's interpreter:

    python compile_triton.py gfx950 '[[4096, 32768, 64, 128, {"clean_logits": true}]]'
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.triton_launch import call_like
from lightning_indexer.backends.triton_portable.config import heuristic
from lightning_indexer.backends.triton_portable.mqa_logits import Launch, constants, options
from lightning_indexer.backends.triton_portable.mqa_logits_kernel import fp8_mqa_logits_kernel

FP8 = {"fn": "*fp8e4nv", "none": "*u8"}


def compile_for_nvidia(arch: Arch, problem: MqaLogitsProblem) -> dict:
    config = heuristic(problem, arch)
    signature = {
        "q_ptr": FP8[arch.fp8], "k_ptr": FP8[arch.fp8], "kv_scale_ptr": "*fp32", "w_ptr": "*fp32", "ks_ptr": "*i32",
        "ke_ptr": "*i32", "out_ptr": "*fp32" if problem.out_dtype is torch.float32 else "*bf16",
        "rows": "i32", "keys": "i32", "width": "i32", "chunk": "i32",
        "q_stride_m": "i32", "q_stride_h": "i32", "k_stride": "i32", "w_stride": "i32", "out_stride": "i32",
    }  # fmt: skip
    constexprs = constants(problem, config, arch.fp8 == "none")
    # Pointers and strides divisible by 16, as torch tensors of these shapes have.
    names = fp8_mqa_logits_kernel.arg_names
    attrs = {
        (names.index(name),): [["tt.divisibility", 16]] for name in signature if name not in ("rows", "keys", "width")
    }
    source = ASTSource(
        fp8_mqa_logits_kernel, {**signature, **dict.fromkeys(constexprs, "constexpr")}, constexprs, attrs
    )
    target = GPUTarget("cuda", int(arch.name[2:]), 32)
    kernel = triton.compile(source, target=target, options=options(config, arch))
    return {"name": kernel.metadata.name, "shared": kernel.metadata.shared, "text": kernel.asm["ptx"]}


def compile_for_amd(arch: Arch, problem: MqaLogitsProblem) -> dict:
    launch = Launch(problem, arch, heuristic(problem, arch))
    arguments = dict(zip(fp8_mqa_logits_kernel.arg_names, launch.arguments(call_like(problem, arch)), strict=False))
    if not problem.aligned:
        arguments["k_stride"] += 4  # as of rows of a packed cache, with the scale behind the channels
    built = launch.build(tuple(arguments.values()))
    return {"name": built.kernel, "shared": built.resources.lds, "text": built.isa}


if __name__ == "__main__":
    arch = Arch.parse(sys.argv[1])
    compile_for = compile_for_nvidia if arch.vendor == "nvidia" else compile_for_amd
    for m, n, h, d, facts in json.loads(sys.argv[2]):
        if "out_dtype" in facts:
            facts["out_dtype"] = getattr(torch, facts["out_dtype"])
        print(json.dumps(compile_for(arch, MqaLogitsProblem(m, n, h, d, **facts))), flush=True)
