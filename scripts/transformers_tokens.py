"""Tokens of transformers' models with an indexer, eager and through this library, and why they differ where they do.

    python scripts/transformers_tokens.py                          # each class, on a GPU if there is one
    python scripts/transformers_tokens.py --device cpu --threads 1 --kinds deepseek_v4 --prompts 4096

Few layers, random weights, H, D, k and rates of compression as published. The eager bfloat16 model makes tokens by
greedy ``generate()``; so does the library in both precisions; and each side says its next token behind each prefix that
the eager model made: teacher-forced. Sides:

    bfloat16    this library, ``install(model, precision="bfloat16")``
    fp8         this library, as the published models score
    exchanged   the eager code, where each row takes as many other keys as it takes in fp8 in the first indexer: those
                that follow by score for the last ones of its selection
    float32     the eager code and the same weights in float32: what rounding to bfloat16 changes by itself

"Moved by" is the standard deviation of a step's logits less the eager ones; "predicted" the agreement of the eager
logits with themselves under normal noise of that size; a margin, how far the best eager logit is above the next.
"Eager input": the indexer alone, in the eager run; "own input": in the side's run behind the eager tokens. Of the rows
that see more than k keys.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import transformers

from lightning_indexer.integrations import transformers as plugin

# H of the indexer, hidden size and rank of q: the models' configurations.
KINDS = {
    "deepseek_v32": ("DeepseekV32", 64, 7168, 1536),
    "glm_moe_dsa": ("GlmMoeDsa", 32, 6144, 2048),
    "deepseek_v4": ("DeepseekV4", 64, 4096, 1024),
}
MODEL = {
    "vocab_size": 4096, "intermediate_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 8, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "max_position_embeddings": 65536,
}  # fmt: skip
# Of the first layers that have one: V4 has layers without an indexer, and layers whose experts a table gives.
V4_LAYERS = {
    "layer_types": ["heavily_compressed_attention"] + ["compressed_sparse_attention"] * 2,
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}
# What a CPU runs in minutes. Channels that rotary embedding turns stay 64, as published.
NARROW = {
    "hidden_size": 512, "q_lora_rank": 192, "num_attention_heads": 4, "intermediate_size": 512,
    "moe_intermediate_size": 128,
}  # fmt: skip
NARROW_MLA = {"num_key_value_heads": 4, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "v_head_dim": 64}
NARROW_V4 = {"head_dim": 128, "partial_rotary_factor": 0.5, "o_groups": 2, "o_lora_rank": 128}
PRECISIONS = ("bfloat16", "fp8")
COMPRESSED = 4  # tokens a key of deepseek_v4


def config_of(kind: str, **options: object) -> object:
    name, heads, hidden, rank = KINDS[kind]
    sizes = {"index_n_heads": heads, "index_head_dim": 128, "hidden_size": hidden, "q_lora_rank": rank}
    return getattr(transformers, f"{name}Config")(**(sizes | options))


def random_(module: torch.nn.Module) -> torch.nn.Module:
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif "norm" in name and "weight" in name:
            torch.nn.init.ones_(parameter)
    for name, buffer in module.named_buffers():
        if name.endswith("tid2eid"):  # experts by token, zeros but in a checkpoint
            buffer.copy_(torch.rand(buffer.shape[0], MODEL["n_routed_experts"]).topk(buffer.shape[1]).indices)
    return module


def model_of(kind: str, device: str, narrow: bool) -> torch.nn.Module:
    """Of three layers, random, in bfloat16."""
    options = dict(MODEL)
    if narrow:
        options |= NARROW | (NARROW_V4 if kind == "deepseek_v4" else NARROW_MLA)
    if kind == "deepseek_v4":
        for name in ("intermediate_size", "num_key_value_heads", "n_group", "topk_group", "first_k_dense_replace"):
            options.pop(name)
        options |= V4_LAYERS
    torch.manual_seed(0)
    with torch.device(device):
        config = config_of(kind, **options)
        net = random_(getattr(transformers, f"{KINDS[kind][0]}ForCausalLM")(config).eval().to(torch.bfloat16))
    if kind != "deepseek_v4":  # which is eager alone
        net.set_attn_implementation("sdpa")
    return net


def indexers_of(net: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in net.modules() if type(module).__name__.endswith("Indexer")]


@dataclass
class Run:
    """A generation. Of each indexer, what the prompt's rows select, [P, k], and each step's, [1, k].

    ``others``: by precision and indexer, what the library selects for the prompt's rows from this run's own input.
    """

    tokens: list[int]
    logits: torch.Tensor  # [new, vocabulary] float32
    selected: list[list[torch.Tensor]]
    others: dict[str, list[torch.Tensor]]


class Forced(transformers.LogitsProcessor):
    """The tokens of another run, whatever the logits."""

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self.tokens, self.prompt = tokens, prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, float("-inf"))
        only[:, self.tokens[ids.shape[1] - self.prompt]] = 0
        return only


def generated(
    net: torch.nn.Module, ids: torch.Tensor, new: int, tokens: list[int] | None = None, others: tuple[str, ...] = ()
) -> Run:
    """Greedy, or behind ``tokens``. ``others``: precisions that are asked too, where nothing is installed."""
    indexers, prompt = indexers_of(net), ids.shape[1]
    calls: list[list[torch.Tensor]] = [[] for _ in indexers]
    asked: dict[str, list[torch.Tensor]] = {precision: [] for precision in others}

    def seen(number: int, indexer: torch.nn.Module, given: tuple, named: dict, out: torch.Tensor) -> None:
        calls[number].append(out[0].to(torch.int32))
        if out.shape[1] < prompt:
            return
        call = inspect.signature(indexer.forward).bind(*given, **named).arguments | {"past_key_values": None}
        for precision, found in asked.items():
            plugin.install(indexer, precision=precision)
            found.append(indexer.forward(**call)[0].to(torch.int32))
            plugin.uninstall()

    hooks = [
        indexer.register_forward_hook(functools.partial(seen, number), with_kwargs=True)
        for number, indexer in enumerate(indexers)
    ]
    out = net.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True,
        logits_processor=[] if tokens is None else [Forced(tokens, prompt)],
    )  # fmt: skip
    for hook in hooks:
        hook.remove()
    return Run(out.sequences[0, prompt:].tolist(), torch.cat(out.logits).float().cpu(), calls, asked)


@contextmanager
def exchanged(net: torch.nn.Module, counts: torch.Tensor) -> Iterator[None]:
    """Each row's last selected keys, by score, for those that would be next: ``counts`` says by position how many."""
    most = int(counts.max())

    def changed(indexer: torch.nn.Module) -> Callable[..., torch.Tensor]:
        forward, k = indexer.forward, indexer.index_topk

        def call(*given: torch.Tensor, **named: object) -> torch.Tensor:
            indexer.index_topk = k + most
            try:
                best = forward(*given, **named)
            finally:
                indexer.index_topk = k
            if best.shape[-1] < k + most:
                return best[..., :k]
            # What a row does not see comes last: its score is -inf. V4 gives it as -1.
            positions = inspect.signature(forward).bind(*given, **named).arguments["position_ids"][..., None]
            count = counts[positions]
            last = best.gather(-1, k + count - 1)
            count = torch.where((last >= 0) & (last <= positions), count, 0)
            slot = torch.arange(k, device=best.device)
            return best.gather(-1, torch.where(slot < k - count, slot, slot + count))

        return call

    found = indexers_of(net)
    for indexer in found:
        indexer.forward = changed(indexer)
    try:
        yield
    finally:
        for indexer in found:
            del indexer.forward


def shared(kind: str, first: int, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> torch.Tensor:
    """[rows]: how many keys of their selection are in ours, and -1 of a row that sees no more than k.

    The first row sees ``first`` tokens: of one call with a prompt, or of a call for each step.
    """
    mine, other = torch.cat(ours).long(), torch.cat(theirs).long()
    seen = torch.arange(first, first + len(mine), device=mine.device)
    seen = (seen // COMPRESSED if kind == "deepseek_v4" else seen)[:, None]
    width, chosen = int(seen.max()), []
    for side in (mine, other):
        found = torch.zeros(len(side), width + 1, dtype=torch.bool, device=side.device)
        found.scatter_(1, torch.where((side < 0) | (side >= seen), width, side), True)
        chosen.append(found[:, :width])
    return torch.where(seen[:, 0] > other.shape[1], (chosen[0] & chosen[1]).sum(1), -1)


def overlap(kind: str, first: int, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The mean share of rows that see more keys than k."""
    rows = shared(kind, first, ours, theirs)
    rows = rows[rows >= 0].float() / theirs[0].shape[1]
    return float(rows.mean()) if len(rows) else 1.0


def margins(logits: torch.Tensor) -> torch.Tensor:
    best = logits.topk(2).values
    return best[:, 0] - best[:, 1]


def predicted(logits: torch.Tensor, noise: torch.Tensor, draws: int = 100) -> float:
    """Tokens of ``logits`` that stay, of all, under normal noise of a size for each step."""
    generator, best = torch.Generator().manual_seed(1), logits.argmax(-1)
    kept = 0
    for _ in range(draws):
        moved = logits + noise[:, None] * torch.randn(logits.shape, generator=generator)
        kept += int((moved.argmax(-1) == best).sum())
    return kept / draws


def agreement(side: str, free: Run | None, forced: Run, eager: Run) -> str:
    margin, agree = margins(eager.logits), forced.logits.argmax(-1) == eager.logits.argmax(-1)
    other = (~agree).nonzero()[:, 0].tolist()
    moved = forced.logits - eager.logits
    noise = moved.std(-1)  # a shift of all logits moves no token
    same = "" if free is None else str(sum(a == b for a, b in zip(free.tokens, eager.tokens, strict=True)))
    at = f"{other[0]}: {margin[other[0]]:.3f}" if other else "none"
    sizes = ", ".join(f"{float(size):.3f}" for size in noise.quantile(torch.tensor([0.5, 0.9, 1.0])))
    lost = ", ".join(f"{float(part.median()):.3f}" if len(part) else "-" for part in (margin[agree], margin[~agree]))
    return f"| {side} | {same} | {at} | {int(agree.sum())} | {predicted(eager.logits, noise):.1f} | {sizes} | {lost} |"


def selections(kind: str, prompt: int, side: str, forced: Run, eager: Run) -> str:
    columns: list[list[float]] = [[], [], []]
    for number, (ours, theirs) in enumerate(zip(forced.selected, eager.selected, strict=True)):
        if side in eager.others:
            columns[0].append(overlap(kind, 1, [eager.others[side][number]], theirs[:1]))
        columns[1].append(overlap(kind, 1, ours[:1], theirs[:1]))
        columns[2].append(overlap(kind, prompt + 1, ours[1:], theirs[1:]))
    cells = [", ".join(f"{100 * share:.2f}" for share in column) for column in columns]
    return f"| {side} | {' | '.join(cells)} |"


@torch.no_grad()
def tokens_of(kind: str, prompt: int, new: int, device: str, narrow: bool) -> None:
    """Prints the sides of one class."""
    began = time.perf_counter()
    net = model_of(kind, device, narrow)
    config, k = net.config, net.config.index_topk
    ids = torch.randint(2, config.vocab_size, (1, prompt), device=device)
    eager = generated(net, ids, new, others=PRECISIONS)
    margin = margins(eager.logits).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    print(
        f"\n{kind}: prompt {prompt}, {prompt // (COMPRESSED if kind == 'deepseek_v4' else 1)} keys, k={k}, "
        f"H={config.index_n_heads}, D={config.index_head_dim}, hidden size {config.hidden_size}, "
        f"{config.num_hidden_layers} layers, {len(indexers_of(net))} indexers\n"
        f"eager logits: standard deviation {float(eager.logits.std(-1).mean()):.3f}; the best is above the next by "
        f"{margin[1]:.3f} (median; quartiles {margin[0]:.3f}, {margin[2]:.3f})\n\n"
        f"| side | tokens as eager, of {new} | first other: eager margin | teacher-forced | predicted | "
        "a step's logits moved by: median, 90%, most | median margin: same, other |\n" + "| --- " * 7 + "|",
        flush=True,
    )
    lines = []

    def shown(side: str, own: bool) -> Run:
        free = generated(net, ids, new) if own else None
        # A free run that gives the same tokens is the forced one.
        same = free is not None and free.tokens == eager.tokens
        forced = free if free is not None and same else generated(net, ids, new, eager.tokens)
        print(agreement(side, free, forced, eager), flush=True)
        lines.append(selections(kind, prompt, side, forced, eager))
        return forced

    for precision in PRECISIONS:
        plugin.install(net, precision=precision)
        try:
            last = shown(precision, own=True)
        finally:
            plugin.uninstall()
    # The first indexer's input is that of the eager run, in steps too.
    ours, theirs = last.selected[0], eager.selected[0]
    counts = torch.cat((shared(kind, 1, ours[:1], theirs[:1]), shared(kind, prompt + 1, ours[1:], theirs[1:])))
    with exchanged(net, torch.where(counts < 0, 0, k - counts)):
        shown("exchanged", own=False)
    net.float()
    shown("float32", own=False)
    print(
        "\n| keys as eager, % by indexer | prompt, eager input | prompt, own input | steps, own input |\n"
        + "| --- " * 4 + "|\n" + "\n".join(lines) + f"\n{time.perf_counter() - began:.0f} s",
        flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--prompts", type=int, nargs="+", default=[3072])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--wide", action="store_true", help="hidden sizes as published on a CPU too")
    parser.add_argument("--threads", type=int, default=0, help="of PyTorch on a CPU; 0: its own choice")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {name}")
    for kind in given.kinds:
        for prompt in given.prompts:
            tokens_of(kind, prompt, given.new, given.device, given.device == "cpu" and not given.wide)


if __name__ == "__main__":
    main()
