"""The indexers of transformers, eager and through this library, side by side on one GPU. docs/engines.md has a run.

    python scripts/transformers_ab.py                  # one indexer of each class, published dimensions; small models
    python scripts/transformers_ab.py --tokens 8192 --skip-models
    python scripts/transformers_ab.py --tokens 16384 --profile     # and what the time goes to

Weights are random. Times are of CUDA events; "first" is the first layer of a forward, which reads the mask.
Memory is the peak above what stood before the call, its result included. Where tokens differ, transformers_tokens.py
says why.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import importlib
import pstats
import re
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from transformers_tokens import KINDS, config_of, model_of, random_

from lightning_indexer.integrations import transformers as plugin

SIDES = ("eager", "fp8", "bfloat16")
GIB = 2**30


def indexer_call(kind: str, tokens: int) -> tuple[torch.nn.Module, Callable[[], torch.Tensor], Callable[[], object]]:
    """One indexer, a prefill of ``tokens`` through it without a cache, and what makes its mask a new one."""
    config = config_of(kind, num_hidden_layers=4)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    make = getattr(module, f"{KINDS[kind][0]}Indexer")
    with torch.device("cuda"):
        torch.manual_seed(0)
        indexer = random_((make(config) if kind == "deepseek_v4" else make(config, 3)).to(torch.bfloat16))
        if kind != "deepseek_v4":
            indexer.weights_proj.float()  # which the models keep so
        hidden = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16)
        residual = torch.randn(1, tokens, config.q_lora_rank, dtype=torch.bfloat16)
        positions = torch.arange(tokens)[None]
        if kind == "deepseek_v4":
            return indexer, lambda: indexer(hidden, residual, positions, None, 3), lambda: None
        rope = getattr(module, f"{KINDS[kind][0]}RotaryEmbedding")(config)(hidden, positions)
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril_()
        call = lambda: indexer(hidden, residual, rope, mask[:, 0], positions)  # noqa: E731
        return indexer, call, lambda: mask[..., :1].fill_(True)


def measured(call: Callable[[], torch.Tensor], repeats: int) -> tuple[float, float, float]:
    """Milliseconds of the first call, and of one of three behind each other, as layers are: the median of such threes;
    and GiB of peak memory."""
    times = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for count in [1] + [3] * repeats:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / count)
    return times[0], statistics.median(times[1:]), (torch.cuda.max_memory_allocated() - before) / GIB


def kernels(call: Callable[[], object], shown: int = 16) -> list[str]:
    """The kernels of a call that take the most time."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    rows = [row for row in profile.key_averages() if row.self_device_time_total]
    rows.sort(key=lambda row: -row.self_device_time_total)
    total, launches = sum(row.self_device_time_total for row in rows), sum(row.count for row in rows)
    lines = [f"    {total / 1e3:8.3f} ms  {launches:4} kernels"]
    return lines + [
        f"    {row.self_device_time_total / 1e3:8.3f} ms  {row.count:4}  {row.key[:100]}" for row in rows[:shown]
    ]


def overlap(
    ours: torch.Tensor, theirs: torch.Tensor, visible: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[float, float]:
    """Mean and worst share of a row's keys, on rows spread over the prefill."""
    shares = []
    for row in range(ours.shape[1] // 64 - 1, ours.shape[1], max(1, ours.shape[1] // 64)):
        sets = [set(side[0, row].tolist()) for side in (ours, theirs)]
        sets = [{key for key in side if 0 <= key < visible(torch.tensor(row))} for side in sets]
        shares.append(len(sets[0] & sets[1]) / max(1, len(sets[1])))
    return statistics.mean(shares), min(shares)


@torch.no_grad()
def indexers(kind: str, tokens: int, eager_up_to: int, profiled: bool) -> list[str]:
    lines, found, profiles = [], {}, []
    indexer, call, renew = indexer_call(kind, tokens)
    for side in SIDES:
        if side == "eager" and tokens > eager_up_to:
            lines.append(f"| {kind} | {tokens} | eager | not run | | | |")
            continue
        if side != "eager":
            plugin.install(indexer, precision=side)
        try:
            if side != "eager":
                call()  # compiles
                renew()
            first, others, gib = measured(call, 3 if tokens > 2**15 else 5)
            found[side] = call()
            text = f"{first:.1f} | {others:.2f} | {gib:.2f}"
            if profiled and side != "eager":
                profiles += ["", f"    {kind}, {tokens} tokens, {side}", *kernels(call)]
        except torch.OutOfMemoryError as error:
            asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
            text = f"out of memory, asked for {asked[1] if asked else '?'} | | "
        finally:
            if side != "eager":
                plugin.uninstall()
            gc.collect()
            torch.cuda.empty_cache()
        same = ""
        if side != "eager" and side in found and "eager" in found:
            ratio = 4 if kind == "deepseek_v4" else 1
            mean, worst = overlap(found[side], found["eager"], lambda row, r=ratio: (int(row) + 1) // r)
            same = f"{100 * mean:.3f}%, {100 * worst:.2f}%"
        lines.append(f"| {kind} | {tokens} | {side} | {text} | {same} |")
    return lines + profiles


@torch.no_grad()
def model(kind: str, prompt: int, new: int, profiled: bool) -> list[str]:
    """``generate()`` of a model of few layers; what the first indexer selects, and the tokens."""
    net = model_of(kind, "cuda", narrow=False)
    ids = torch.randint(2, net.config.vocab_size, (1, prompt), device="cuda")
    lines, tokens = [], {}
    for side in SIDES:
        if side != "eager":
            plugin.install(net, precision=side)
        # Compiles what each length of the steps needs: with it on disk, a later process would not.
        net.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        times = {}
        for count in (1, new):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            out = net.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            torch.cuda.synchronize()
            times[count] = time.perf_counter() - begin
        tokens[side] = out[0, prompt:].tolist()
        if profiled:
            profile = cProfile.Profile()
            profile.runcall(net.generate, ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
            print(f"    {kind}, prompt {prompt}, {side}: host time")
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        rate = (new - 1) / (times[new] - times[1])
        same = ""
        if side != "eager":
            plugin.uninstall()
            equal = [a == b for a, b in zip(tokens[side], tokens["eager"], strict=True)]
            same = f"{sum(equal)} of {new}" + ("" if all(equal) else f", the first other one at {equal.index(False)}")
        lines.append(f"| {kind} | {prompt} | {side} | {1e3 * times[1]:.0f} | {rate:.1f} | {same} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--eager-up-to", type=int, default=65536)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 6144])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--skip-models", action="store_true")
    parser.add_argument("--profile", action="store_true", help="kernels of each indexer, host time of each model")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.cuda.get_device_name()}")
    print("\n| indexer | tokens | side | first, ms | next layers, ms | GiB | overlap with eager: mean, worst row |")
    print("| --- " * 7 + "|")
    for kind in given.kinds:
        for tokens in given.tokens:
            print("\n".join(indexers(kind, tokens, given.eager_up_to, given.profile)), flush=True)
    if given.skip_models:
        return
    print("\n| model | prompt | side | generate() of one token, ms | decode, tokens/s | tokens as eager |")
    print("| --- " * 6 + "|")
    for kind in given.kinds:
        for prompt in given.prompts:
            print("\n".join(model(kind, prompt, given.new, given.profile)), flush=True)


if __name__ == "__main__":
    main()
