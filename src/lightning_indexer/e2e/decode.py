"""Decode after prefill: steps of a batch of sequences through the same layers, over paged keys, two sides in turn.

Every sequence begins as a copy of one prefilled prompt, in pages of its own that lie anywhere in one pool, and goes on
from another token. A step of a layer is that of ``stack`` for one token a sequence, with

    logits = fp8_paged_mqa_logits(q [B, 1, H, D], pool, weights, lengths, block tables)           [B, context]
    selected = top_k_per_row(...), or torch.topk; or fp8_paged_mqa_topk(...) in place of both     [B, topk]

What the last layer gives is the next step's input: nothing is sampled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812

from lightning_indexer.bench.report import table
from lightning_indexer.calls.insert_k_cache import insert_k_cache
from lightning_indexer.calls.mqa_topk import fp8_paged_mqa_topk
from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.calls.prepare_q import prepare_q
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.check.memory import no_room
from lightning_indexer.e2e.cache import BLOCK_TOKENS, PagedKeys
from lightning_indexer.e2e.clock import Clock
from lightning_indexer.e2e.prompt import make_prompt
from lightning_indexer.e2e.run import INDEXER, POLICY, Plan
from lightning_indexer.e2e.stack import FUSED, TORCH, Layer, Stack, default_dtype
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.selection.registry import BackendUnavailableError

# Steps of a timed run between two of the other side.
TURN = 64
# Untimed steps of each side before: they compile.
WARM = 3


class _Keys:
    """One layer's keys of all sequences: a pool of blocks, and each sequence's row of the block table."""

    def __init__(self, prefilled: PagedKeys, batch: int, context: int, tokens: int, generator: torch.Generator) -> None:
        k, scale = prefilled.gather(context)
        blocks, head_dim = -(-tokens // BLOCK_TOKENS), k.shape[1]
        order = torch.randperm(batch * blocks, generator=generator, device=generator.device).to(k.device)
        self.tables = order.view(batch, blocks).to(torch.int32)
        self._first = self.tables.long() * BLOCK_TOKENS  # each block's slot in the pool
        self.layout = CacheLayout(BLOCK_TOKENS, head_dim)
        self.pool = torch.zeros((batch * blocks, *self.layout.block_shape), dtype=torch.uint8, device=k.device)
        flat = self.pool.view(batch * blocks, -1)
        values = flat[:, : BLOCK_TOKENS * head_dim].view(-1, BLOCK_TOKENS, head_dim)
        scales = flat[:, BLOCK_TOKENS * head_dim :].view(torch.float32)
        positions = torch.arange(context, device=k.device)
        for row in order.view(batch, blocks):
            block = row[positions // BLOCK_TOKENS]
            values[block, positions % BLOCK_TOKENS] = k.view(torch.uint8)
            scales[block, positions % BLOCK_TOKENS] = scale

    def write(self, position: int, k: torch.Tensor) -> None:
        """Quantises and stores one key of each sequence, [B, D]."""
        slots = self._first[:, position // BLOCK_TOKENS] + position % BLOCK_TOKENS
        insert_k_cache(k, self.pool, slots, layout=self.layout)


class Decoder:
    """The caches of a batch behind one prefilled prompt, and its steps."""

    def __init__(self, stack: Stack, plan: Plan, context: int, batch: int, steps: int) -> None:
        self.stack, self.batch, self.position = stack, batch, context
        prompt = make_prompt(context, plan.dims.hidden, plan.needles, stack.device, stack.dtype, plan.seed)
        kept: list[tuple[torch.Tensor, PagedKeys | None]] = []
        last = stack.prefill(
            prompt.embeddings, plan.backends[1], plan.selections[1], step=plan.step,
            max_logits_bytes=plan.max_logits_bytes, clock=Clock(stack.device), keep=kept,
        )  # fmt: skip
        generator = torch.Generator(device=stack.device).manual_seed(plan.seed)
        self.tokens = tokens = context + steps  # one width for all steps, as engines have it
        width = kept[0][0].shape[1]
        self.latents = []
        self.keys = [None if keys is None else _Keys(keys, batch, context, tokens, generator) for _, keys in kept]
        for latents, _ in kept:
            both = latents.new_empty((batch, tokens, width))
            both[:, :context] = latents
            self.latents.append(both)
        noise = torch.randn((batch, last.shape[0]), generator=generator, device=stack.device, dtype=stack.dtype)
        noise[0] = 0.0  # the first sequence goes on as the prompt would
        self.x = _norm(last + noise)

    @torch.inference_mode()
    def step(self, backend: str | None, selection: str | None, clock: Clock) -> torch.Tensor:
        """One token of each sequence; returns the residual stream behind the last layer, [B, hidden]."""
        stack, d, at, x = self.stack, self.stack.dims, self.position, self.x.clone()
        lengths = torch.full((self.batch,), at + 1, dtype=torch.int32, device=stack.device)
        selected = torch.empty((self.batch, d.index_topk), dtype=torch.int32, device=stack.device)
        for layer, latents, keys in zip(stack.layers, self.latents, self.keys, strict=True):
            with clock.phase("projections"):
                h = _norm(x)
                c = _norm(h @ layer.w_dq)
                latents[:, at, : d.kv_lora] = _norm(h @ layer.w_kv)
                latents[:, at, d.kv_lora :] = self._rotary(h @ layer.w_kr)
            if keys is not None:
                self._select(layer, keys, h, c, lengths, selected, (backend, selection), clock)
            with clock.phase("attention"):
                x += self._attend(layer, latents, c, selected)
            with clock.phase("ffn"):
                stack._add_ffn(layer, x)
        self.position += 1
        self.x = _norm(x)
        return x

    def _select(
        self,
        layer: Layer,
        keys: _Keys,
        h: torch.Tensor,
        c: torch.Tensor,
        lengths: torch.Tensor,
        out: torch.Tensor,
        backends: tuple[str | None, str | None],
        clock: Clock,
    ) -> None:
        d = self.stack.dims
        assert layer.w_iq is not None
        assert layer.w_ik is not None
        assert layer.w_iw is not None
        with clock.phase("indexer projections"):
            k = self._rotary(F.layer_norm((h @ layer.w_ik).float(), (d.index_dim,)).to(self.stack.dtype))
            q = self._rotary((c @ layer.w_iq).view(self.batch, d.index_heads, d.index_dim))
            gates = (1.0 + (h @ layer.w_iw).float()) * (d.index_heads * d.index_dim) ** -0.5
        with clock.phase("quantise"):
            keys.write(self.position, k)
            q_fp8, weights = prepare_q(q, gates, weight_scale=1.0)
            operands = q_fp8[:, None], keys.pool, weights, lengths, keys.tables
        backend, selection = backends
        with clock.phase("scoring"):
            if selection == FUSED:
                fp8_paged_mqa_topk(*operands, out.shape[1], max_context_len=self.tokens, out=out, backend=backend)
                return
            logits = fp8_paged_mqa_logits(*operands, self.tokens, clean_logits=selection == TORCH, backend=backend)
        with clock.phase("selection"):
            if selection != TORCH:
                top_k_per_row(logits, out.shape[1], None, lengths, out=out, backend=selection)
                return
            width = min(out.shape[1], logits.shape[1])
            out[:, :width] = logits.topk(width, dim=1, sorted=False).indices
            out[:, width:] = -1

    def _attend(self, layer: Layer, latents: torch.Tensor, c: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """As ``Stack._attend``, each row over its own sequence's latents."""
        d = self.stack.dims
        q = (c @ layer.w_uq).view(-1, d.heads, d.nope + d.rope)
        q_latent = torch.einsum("bhn,hnl->bhl", q[..., : d.nope], layer.w_uk)
        row = torch.arange(self.batch, device=c.device)[:, None]
        picked = latents[row, selected.clamp(min=0)]  # [B, topk, kv_lora + rope]
        scores = torch.bmm(torch.cat((q_latent, self._rotary(q[..., d.nope :])), dim=-1), picked.transpose(1, 2))
        scores = scores.float().mul_((d.nope + d.rope) ** -0.5).masked_fill_((selected < 0)[:, None], float("-inf"))
        mixed = torch.bmm(scores.softmax(dim=-1).to(self.stack.dtype), picked[..., : d.kv_lora])
        return torch.einsum("bhl,hlv->bhv", mixed, layer.w_uv).flatten(1) @ layer.w_o

    def _rotary(self, x: torch.Tensor) -> torch.Tensor:
        """As ``Stack._rotary``, all at this step's position: sequences stand where heads do."""
        return self.stack._rotary(x.reshape(1, -1, x.shape[-1]), self.position).view(x.shape)


@dataclass(slots=True)
class Decoded:
    """One batch at one context: by side, seconds of each run of some steps, and by phase."""

    context: int
    batch: int
    steps: int
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    phases: tuple[list[dict[str, float]], list[dict[str, float]]] = field(default_factory=lambda: ([], []))
    counts: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    left_out: str | None = None

    def milliseconds(self, side: int, *phases: str) -> float:
        """Of one step, median over the runs; of the whole step without phases."""
        runs = zip(self.seconds[side], self.phases[side], self.counts[side], strict=True)
        return statistics.median(
            1e3 * (sum(by.get(phase, 0.0) for phase in phases) if phases else total) / count
            for total, by, count in runs
        )


def run(plan: Plan, stack: Stack, batches: Sequence[int], steps: int, progress: Callable[[str], None]) -> list[Decoded]:
    """``steps`` decode steps of each side, in turn by some at a time, for each context and batch of the plan."""
    results = []
    for context in plan.contexts:
        for batch in batches:
            found = Decoded(context, batch, steps)
            results.append(found)
            needed = needed_bytes(plan, stack, context, batch, steps)
            if (reason := no_room(needed, stack.device)) is not None:
                found.left_out = reason
                continue
            progress(f"{context} decode, batch {batch}")
            try:
                _measure(plan, stack, found)
            except (torch.OutOfMemoryError, BackendUnavailableError) as error:  # others keep their results
                found.left_out = str(error).splitlines()[0]
    return results


def _measure(plan: Plan, stack: Stack, found: Decoded) -> None:
    """Both sides in turn, some steps at a time."""
    decoder = Decoder(stack, plan, found.context, found.batch, 2 * (found.steps + WARM))
    sides = list(zip(plan.backends, plan.selections, strict=True))
    for backend, selection in sides:
        for _ in range(WARM):
            decoder.step(backend, selection, Clock(stack.device))
    for first in range(0, found.steps, TURN):
        count = min(TURN, found.steps - first)
        for side, (backend, selection) in enumerate(sides):
            clock = Clock(stack.device)
            clock.begin()
            for _ in range(count):
                decoder.step(backend, selection, clock)
            total, phases = clock.end()
            found.seconds[side].append(total)
            found.phases[side].append(phases)
            found.counts[side].append(count)


def after(
    plan: Plan, device: torch.device, batches: Sequence[int], steps: int, progress: Callable[[str], None]
) -> list[Decoded]:
    """:func:`run` on a stack of the plan's own."""
    stack = Stack(plan.dims, plan.layers, device, default_dtype(device), plan.seed)
    return run(plan, stack, batches, steps, progress)


def needed_bytes(plan: Plan, stack: Stack, context: int, batch: int, steps: int) -> int:
    """About what a batch holds beside the weights: its caches, the one they are copies of, and what is gathered."""
    d, size = plan.dims, stack.dtype.itemsize
    token = len(stack.layers) * ((d.kv_lora + d.rope) * size + d.index_dim + 4)
    gathered = batch * d.index_topk * (d.kv_lora + d.rope) * size
    return (batch + 1) * (context + 2 * steps) * token + 4 * gathered + batch * (context + 2 * steps) * 8


def records(results: Sequence[Decoded]) -> list[dict[str, object]]:
    """A flat record of each batch and side, for JSON; a batch that was left out has one, with its reason."""
    found: list[dict[str, object]] = []
    for result in results:
        case: dict[str, object] = {"context": result.context, "batch": result.batch, "steps": result.steps}
        if result.left_out is not None:
            found.append({**case, "left_out": result.left_out})
            continue
        for side in (0, 1):
            phases = dict.fromkeys(name for run in result.phases[side] for name in run)
            parts = {name: result.milliseconds(side, name) for name in phases}
            found.append({**case, "side": "AB"[side], "step_ms": result.milliseconds(side), "phases_ms": parts})
    return found


def markdown(plan: Plan, results: Sequence[Decoded]) -> str:
    """Time of a step by phase, of both sides."""
    sides = [f"{plan.backends[side] or POLICY} + {plan.selections[side] or POLICY}" for side in (0, 1)]
    columns = ("scoring", "selection", "indexer", "attention", "projections", "ffn")
    rows = []
    for found in results:
        if found.left_out is not None:
            rows.append(
                (str(found.context), str(found.batch), f"left out: {found.left_out}", *[""] * (len(columns) + 2))
            )
            continue
        for side in (0, 1):
            step = found.milliseconds(side)
            parts = [found.milliseconds(side, *(INDEXER if name == "indexer" else (name,))) for name in columns]
            rows.append(
                (
                    str(found.context), str(found.batch), "AB"[side], f"{step:.3f}", f"{1e3 * found.batch / step:.0f}",
                    *(f"{part:.3f}" for part in parts),
                )
            )  # fmt: skip
    header = ("context", "batch", "side", "step ms", "tokens/s", *(f"{name} ms" for name in columns))
    lines = [
        f"## Decode, A = `{sides[0]}`, B = `{sides[1]}`",
        "",
        f"Steps of one token a sequence behind a prefill, in turn by {TURN}; medians of the turns. Kernels are "
        "launched one by one, without a CUDA graph: at small batches a step is as long as its launches take.",
        "",
        *table(header, rows),
    ]
    return "\n".join(lines) + "\n"


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))
