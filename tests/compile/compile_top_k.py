"""Compiles ``triton-portable``'s top-k for one arch without its device and prints what came out, a JSON line a problem.

Run by test_top_k_compiled.py in a process of its own, because the other tests run Triton's interpreter:

    python compile_top_k.py gfx950 [FIRST]

FIRST: leave out the problems before that one.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_indexer import Arch
from lightning_indexer.backends.triton_portable.top_k import TopKLaunch, call_like, heuristic
from lightning_indexer.backends.triton_portable.top_k_kernel import top_k_per_row_kernel as kernel
from lightning_indexer.problems.top_k import TopKProblem

PROBLEMS = (
    TopKProblem(4096, 32768, 2048),
    TopKProblem(256, 131072, 512, torch.bfloat16, "page", "score", "larger", values=True, page_size=64),
    TopKProblem(1, 1 << 20, 2048, torch.float16, "offset", starts=False),
)
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.uint8: "*u8",
}  # fmt: skip


def compile_for_nvidia(launch: TopKLaunch, arguments: dict) -> dict:
    signature, constexprs, attrs = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if value is None or name.isupper():
            signature[name], constexprs[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attrs[index,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if name.endswith("stride"):
                attrs[index,] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", int(launch.arch.name[2:]), 32)
    compiled = triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=launch.options)
    return {"name": compiled.metadata.name, "shared": compiled.metadata.shared, "text": compiled.asm["ptx"]}


def compile_for_amd(launch: TopKLaunch, arguments: dict) -> dict:
    built = launch.build(arguments)
    return {"name": built.kernel, "shared": built.resources.lds, "text": built.isa}


if __name__ == "__main__":
    arch = Arch.parse(sys.argv[1])
    for problem in PROBLEMS[int(sys.argv[2]) if len(sys.argv) > 2 else 0 :]:
        launch = TopKLaunch(problem, arch, heuristic(problem, arch))
        workspace = torch.empty(launch.workspace_bytes, dtype=torch.uint8, device="meta")
        for arguments in launch.passes(call_like(problem), workspace):
            compile_for = compile_for_nvidia if arch.vendor == "nvidia" else compile_for_amd
            print(json.dumps(compile_for(launch, arguments)), flush=True)
