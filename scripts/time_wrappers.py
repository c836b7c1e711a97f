"""What the seams of SGLang and vLLM cost the host: each around calls of the library that do nothing. Needs no GPU.

    python scripts/time_wrappers.py

A row is a function as the engine calls it: what a call takes beyond one of a function that does nothing. Microseconds,
the least of some hundred runs of 400 calls: what else the machine does is no cost of theirs.
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import lightning_indexer
from lightning_indexer.integrations import sglang, top_k, vllm, vllm_seams

CALLS, REPEATS = 400, 300


def nothing(*args: object, **options: object) -> torch.Tensor:
    return RESULT


RESULT = torch.zeros(1, dtype=torch.int32)


def microseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return min(times)


def operands() -> SimpleNamespace:
    """Of a prefill chunk, and of a decode step, H=64, D=128, page 64."""
    fp8 = torch.float8_e4m3fn
    return SimpleNamespace(
        q=torch.zeros(8, 64, 128).to(fp8), kv=(torch.zeros(64, 128).to(fp8), torch.ones(64)),
        weights=torch.zeros(8, 64), ks=torch.zeros(8, dtype=torch.int32), ke=torch.full((8,), 64, dtype=torch.int32),
        q4=torch.zeros(8, 1, 64, 128).to(fp8), cache=torch.zeros(8, 64, 1, 132, dtype=torch.uint8),
        lengths=torch.ones(8, dtype=torch.int32), tables=torch.zeros(8, 1, dtype=torch.int32),
        logits=torch.zeros(8, 64), out=torch.zeros(8, 16, dtype=torch.int32),
    )  # fmt: skip


def sglang_rows(o: SimpleNamespace) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    module = types.ModuleType("sglang_standin")
    module.envs = SimpleNamespace(SGLANG_DSA_FUSE_TOPK=SimpleNamespace(get=lambda: True))  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module

    def original(*args: object) -> None:
        raise AssertionError("the call was passed on")

    original.__module__ = module.__name__
    backend = SimpleNamespace(is_sgl_kernel=lambda: True)
    paged = SimpleNamespace(real_page_table=o.tables, page_size=64)
    ragged, method = torch.zeros(8, dtype=torch.int32), SimpleNamespace
    return {
        "SGLang, deep_gemm.fp8_mqa_logits": (
            sglang._make_deep_gemm(original), (o.q, o.kv, o.weights, o.ks, o.ke), {"clean_logits": False},
        ),
        "SGLang, deep_gemm.fp8_paged_mqa_logits": (
            sglang._make_deep_gemm_paged(original),
            (o.q4, o.cache, o.weights, o.lengths, o.tables, None, 64), {"clean_logits": False},
        ),
        "SGLang, AITER's fp8_mqa_logits": (
            sglang._make_aiter(original), (o.q, *o.kv, o.weights, o.ks, o.ke), {"clean_logits": False},
        ),
        "SGLang, topk_transform, paged": (
            sglang.topk_transform,
            (original, backend, o.logits, o.lengths, 16, method(name="PAGED"), paged), {},
        ),
        "SGLang, topk_transform, ragged": (
            sglang.topk_transform,
            (original, backend, o.logits, o.lengths, 16, method(name="RAGGED"), paged, None, ragged, o.ks), {},
        ),
    }  # fmt: skip


def vllm_rows(o: SimpleNamespace) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    notes, state = vllm._NOTES, vllm_seams.State()
    notes.first_call_told = True
    scoring = vllm_seams._prefill(nothing, notes=notes, state=state, defer=True)
    windows = (o.ks, o.ke)
    pending = scoring((o.q, None), o.kv, o.weights, *windows, 64)
    return {
        "vLLM, fp8_fp4_mqa_logits, fused": (scoring, ((o.q, None), o.kv, o.weights, *windows, 64), {}),
        "vLLM, top_k_per_row_prefill, fused": (
            vllm_seams._prefill_top_k(nothing, notes=notes), (pending, o.ks, o.ke, o.out, 8, 64, 1, 16), {},
        ),
        "vLLM, fp8_fp4_paged_mqa_logits": (
            vllm_seams._decode(nothing, notes=notes),
            ((o.q4, None), o.cache, o.weights, o.lengths, o.tables, None, 64), {},
        ),
        "vLLM, decode selection": (
            vllm_seams._decode_top_k(lambda backend: nothing, notes=notes)("auto"),
            (o.logits, o.lengths, 1, o.out, 16, 64), {},
        ),
    }  # fmt: skip


def main() -> None:
    for module, name in (
        (lightning_indexer, "fp8_mqa_logits"), (lightning_indexer, "fp8_paged_mqa_logits"), (top_k, "top_k_per_row"),
        (sglang, "top_k_per_row"), (vllm_seams, "select_in_windows"),
    ):  # fmt: skip
        setattr(module, name, nothing)
    # What is told once a process is told.
    sglang._NOTES.first_call_told = True
    given = operands()
    print("| seam | us a call |\n| --- | --- |")
    rows = {"the sum in ragged topk_transform, a tensor": (torch.add, (given.lengths, given.ks), {})}
    for name, (function, args, options) in (sglang_rows(given) | rows | vllm_rows(given)).items():
        for _ in range(3):
            function(*args, **options)
        bare = microseconds(lambda a=args, o=options: nothing(*a, **o))
        own = microseconds(lambda f=function, a=args, o=options: f(*a, **o))
        print(f"| {name} | {own - bare:.2f} |", flush=True)


if __name__ == "__main__":
    main()
