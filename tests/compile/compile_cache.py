"""Compiles ``triton-portable``'s kernels of the cache for one arch without its device and prints what came out, a JSON
line a problem.

Run by test_cache_compiled.py in a process of its own, because the other tests run Triton's interpreter:

    python compile_cache.py gfx950
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_indexer import Arch, CacheLayout
from lightning_indexer.backends.triton_portable import gather_k_cache, insert_k_cache, paged_mqa_logits, prepare_q
from lightning_indexer.problems.gather_k_cache import GatherProblem
from lightning_indexer.problems.insert_k_cache import InsertProblem
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem
from lightning_indexer.problems.prepare_q import PrepareQProblem
from lightning_indexer.problems.transform import Transform

NORM_ROPE = Transform(True, True, "first", 64)
MODULES = {
    "insert_k_cache": insert_k_cache,
    "gather_k_cache": gather_k_cache,
    "prepare_q": prepare_q,
    "fp8_paged_mqa_logits": paged_mqa_logits,
}
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.uint8: "*u8", torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e4m3fnuz: "*fp8e4b8",
}  # fmt: skip


def problems(arch: Arch) -> list:
    fp8 = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
    flat, shuffled = CacheLayout(dtype=fp8), CacheLayout(16, 128, "preshuffled", "ue8m0", fp8)
    tokens = 131072
    return [
        InsertProblem(tokens, 128, flat),
        InsertProblem(tokens, 128, flat, NORM_ROPE),
        InsertProblem(tokens, 128, shuffled, NORM_ROPE._replace(interleaved=True, rope="last")),
        InsertProblem(tokens, 128, CacheLayout.fp4(), NORM_ROPE._replace(hadamard=True)),
        GatherProblem(tokens, 4, flat, 2048, fp8),
        GatherProblem(tokens, 4, shuffled, 2048, fp8),
        GatherProblem(tokens, 4, CacheLayout.fp4(), 2048, fp8),
        PrepareQProblem(4096, 64, 128, Transform(False, False, "first", 64), out_dtype=fp8),
        PrepareQProblem(4096, 64, 128, Transform(False, False, "last", 64, True, True), out_dtype=fp8, fp4=True),
        PagedMqaLogitsProblem(64, 1, 32768, 64, 128, CacheLayout.fp4(), 512, fp8),
    ]


def compile_for_nvidia(launch, kernel, arguments) -> dict:
    signature, constexprs, attrs = {}, {}, {}
    values = (*arguments, *launch.constants.values())
    for index, (name, value) in enumerate(zip(kernel.arg_names, values, strict=True)):
        if value is None or name.isupper():
            signature[name], constexprs[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attrs[index,] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i64" if value >= 2**31 else "i32"
            if name == "block_words" or ("stride" in name and value % 16 == 0):
                attrs[index,] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", int(launch.arch.name[2:]), 32)
    compiled = triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=target, options=launch.options)
    return {
        "name": compiled.metadata.name, "shared": compiled.metadata.shared, "text": compiled.asm["ptx"],
        "cubin": compiled.asm["cubin"].hex() if "--cubin" in sys.argv else "",
    }  # fmt: skip


def compile_for_amd(launch, arguments) -> dict:
    built = launch.build(arguments)
    return {"name": built.kernel, "shared": built.resources.lds, "text": built.isa}


def main() -> None:
    arch = Arch.parse(sys.argv[1])
    for problem in problems(arch):
        module = MODULES[problem.operation]
        launch = module.Launch(problem, arch, module.heuristic(problem, arch))
        arguments = launch.arguments(module.call_like(problem))
        if arch.vendor == "amd":
            found = compile_for_amd(launch, arguments)
        elif problem.operation == "fp8_paged_mqa_logits":
            found = compile_for_nvidia(launch, paged_kernel(), arguments)
        else:
            found = compile_for_nvidia(launch, launch.kernel(), arguments)
        print(json.dumps(found), flush=True)


def paged_kernel():
    from lightning_indexer.backends.triton_portable.paged_mqa_logits_kernel import fp8_paged_mqa_logits_kernel

    return fp8_paged_mqa_logits_kernel


if __name__ == "__main__":
    main()
