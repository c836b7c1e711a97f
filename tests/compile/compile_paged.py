"""Compiles ``triton-portable``'s paged kernel for one arch without its device and prints what came out, a JSON line a
problem.

Run by test_paged_compiled.py in a process of its own, because the other tests run Triton's interpreter:

    python compile_paged.py gfx950
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_indexer import Arch, CacheLayout
from lightning_indexer.backends.triton_portable.paged_mqa_logits import Launch, call_like, heuristic
from lightning_indexer.backends.triton_portable.paged_mqa_logits_kernel import fp8_paged_mqa_logits_kernel as kernel
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem

PROBLEMS = (
    PagedMqaLogitsProblem(64, 1, 32768, 64, 128, max_blocks=512),
    PagedMqaLogitsProblem(
        64, 3, 32768, 32, 128, CacheLayout(64, 128, "preshuffled", "ue8m0"), 512, out_dtype=torch.bfloat16,
        clean_logits=False, row_lengths=True, ragged=True,
    ),
    PagedMqaLogitsProblem(64, 1, 32768, 8, 32, CacheLayout(16, 32, "preshuffled"), 2048),
)  # fmt: skip
FP8 = {"fn": "*fp8e4nv", "none": "*u8"}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.uint8: "*u8"}


def compile_for_nvidia(launch: Launch, problem: PagedMqaLogitsProblem) -> dict:
    signature, constexprs, attrs = {}, {}, {}
    values = (*launch.arguments(call_like(problem)), *launch.constants.values())
    for index, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
        if value is None or name.isupper():
            signature[name], constexprs[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = FP8[launch.arch.fp8] if name == "q_ptr" else TYPES[value.dtype]
            attrs[index,] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if name == "block_words" or ("stride" in name and value % 16 == 0):
                attrs[index,] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", int(launch.arch.name[2:]), 32)
    compiled = triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=launch.options)
    return {"name": compiled.metadata.name, "shared": compiled.metadata.shared, "text": compiled.asm["ptx"]}


def compile_for_amd(launch: Launch, problem: PagedMqaLogitsProblem) -> dict:
    built = launch.build(launch.arguments(call_like(problem)))
    return {"name": built.kernel, "shared": built.resources.lds, "text": built.isa}


if __name__ == "__main__":
    arch = Arch.parse(sys.argv[1])
    for problem in PROBLEMS:
        launch = Launch(problem, arch, heuristic(problem, arch))
        compile_for = compile_for_nvidia if arch.vendor == "nvidia" else compile_for_amd
        print(json.dumps(compile_for(launch, problem)), flush=True)
