"""A stack of DeepSeek-sparse-attention layers with random weights, prefilled in steps as engines do.

One layer, for the T tokens of a step (source: DeepSeek-V3.2 technical report, section 2; GLM-5 has the same form):

    h        = norm(x)                                                           [T, hidden]
    latent   = norm(h W_kv)     k_rope = rotary(h W_kr)                          cached: [context, kv_lora + rope]
    c        = norm(h W_dq)                                                      [T, q_lora]
    k_index  = rotary(norm(h W_ik))  -> fp8, paged cache                         [T, D]
    q_index  = rotary(c W_iq)        -> fp8, its scale folded into the gates     [T, H, D]
    logits   = fp8_mqa_logits(...)   in the chunks of the planner                [rows, keys]
    selected = top_k_per_row(...), or torch.topk                                 [T, topk]
               or fp8_mqa_topk(...) of the whole step in place of both
    attention in the latents' space over the selected positions alone, then W_uv and W_o
    x        = x + attention;  x = x + ffn(norm(x))

Weights are random, but for one thing that training brings about and that a needle needs: a query looks for its own
content. The first kv_lora rows of W_dq are those of W_kv with the hidden channels rolled by half, so that a token whose
channels are rolled asks for the token that holds them; and each head's queries share a random part with its keys.
The gates are near one, as trained ones are mostly positive. Experts are one dense network of the width that a
token meets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.mqa_topk import fp8_mqa_topk
from lightning_indexer.calls.prepare_q import prepare_q
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.chunking import Chunk, Request, plan_chunks
from lightning_indexer.e2e.cache import PagedKeys
from lightning_indexer.e2e.clock import Clock
from lightning_indexer.e2e.dims import Dims

# What the gathered latents of one block of query rows, and the feed-forward activations, may take.
GATHER_BYTES = 2**30
FFN_BYTES = 2**29
# Output projections are scaled to add this much to a residual stream of RMS 1: a token keeps its content.
BRANCH_RMS = 0.1
# A selection by PyTorch, beside the names of backends.
TORCH = "torch.topk"
# Selection by the call that scores: no logits, and the planner's budget for them does not count.
FUSED = "fused"
# The score that a head gives a key of exactly its content, before the softmax: noise stays far below it.
MATCH = 40.0


@dataclass(frozen=True, slots=True)
class Scored:
    """One chunk of one layer, as an observer sees it: operands of the call, and the selected positions.

    ``logits`` gives the [some, keys] that rows were selected from, -inf or anything outside of their windows.
    """

    layer: int
    first_position: int
    q: torch.Tensor
    k: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    logits: Callable[[torch.Tensor], torch.Tensor]
    selected: torch.Tensor


@dataclass(frozen=True, slots=True)
class Observer:
    """Called with each chunk that was scored, and with each layer's attention: (layer, first position, [T, hidden])."""

    scored: Callable[[Scored], None]
    attended: Callable[[int, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer, each [in, out]; the indexer's are None where the layer reuses a selection."""

    w_dq: torch.Tensor
    w_kv: torch.Tensor
    w_kr: torch.Tensor
    w_uq: torch.Tensor
    w_uk: torch.Tensor  # [heads, nope, kv_lora]
    w_uv: torch.Tensor  # [heads, kv_lora, v_dim]
    w_o: torch.Tensor
    w_gate_up: torch.Tensor
    w_down: torch.Tensor
    w_iq: torch.Tensor | None
    w_ik: torch.Tensor | None
    w_iw: torch.Tensor | None


class Stack:
    """Layers on a device, and the prefill of one request through them."""

    def __init__(self, dims: Dims, layers: int, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.dims, self.device, self.dtype = dims, device, dtype
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.layers = [self._layer(index % dims.index_period == 0) for index in range(layers)]

    def weight_bytes(self) -> int:
        """What the layers hold on the device."""
        weights = (getattr(layer, name) for layer in self.layers for name in Layer.__slots__)
        return sum(w.numel() * w.element_size() for w in weights if w is not None)

    def _random(self, *shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype, generator=self.generator) * scale

    def _layer(self, indexes: bool) -> Layer:
        d = self.dims
        w_kv = self._random(d.hidden, d.kv_lora, scale=d.hidden**-0.5)
        rest = self._random(d.hidden, d.q_lora - d.kv_lora, scale=d.hidden**-0.5)
        w_dq = torch.cat((w_kv.roll(d.hidden // 2, dims=0), rest), dim=1)
        w_uk = self._random(d.heads, d.nope, d.kv_lora, scale=d.kv_lora**-0.5)
        w_uq = self._random(d.q_lora, d.heads * (d.nope + d.rope), scale=0.25 * d.q_lora**-0.5)
        per_head = w_uq.view(d.q_lora, d.heads, d.nope + d.rope)
        # w_uk^T w_uk is about nope / kv_lora times the identity, and a normalised latent has a square of kv_lora.
        per_head[: d.kv_lora, :, : d.nope] += MATCH * (d.nope + d.rope) ** 0.5 / d.nope * w_uk.permute(2, 0, 1)
        w_iq = w_ik = w_iw = None
        if indexes:
            shared = self._random(d.kv_lora, d.index_dim, scale=d.kv_lora**-0.5)
            # Where a key lies says nothing of its content: the rotary channels carry less.
            shared[:, max(0, d.index_dim - d.rope) :] *= 0.5
            w_ik = w_kv @ shared
            w_iq = self._random(d.q_lora, d.index_heads * d.index_dim, scale=d.q_lora**-0.5)
            w_iq.view(d.q_lora, d.index_heads, d.index_dim)[: d.kv_lora] += shared[:, None]
            w_iw = self._random(d.hidden, d.index_heads, scale=0.25 * d.hidden**-0.5)
        return Layer(
            w_dq=w_dq, w_kv=w_kv, w_kr=self._random(d.hidden, d.rope, scale=d.hidden**-0.5), w_uq=w_uq, w_uk=w_uk,
            w_uv=self._random(d.heads, d.kv_lora, d.v_dim, scale=d.kv_lora**-0.5),
            w_o=self._random(d.heads * d.v_dim, d.hidden, scale=BRANCH_RMS * (d.heads * d.v_dim) ** -0.5),
            w_gate_up=self._random(d.hidden, 2 * d.ffn, scale=d.hidden**-0.5),
            w_down=self._random(d.ffn, d.hidden, scale=BRANCH_RMS * d.ffn**-0.5),
            w_iq=w_iq, w_ik=w_ik, w_iw=w_iw,
        )  # fmt: skip

    @torch.inference_mode()
    def prefill(
        self,
        prompt: torch.Tensor,
        backend: str | None,
        selection: str | None = None,
        *,
        step: int,
        max_logits_bytes: int,
        clock: Clock,
        observer: Observer | None = None,
        keep: list[tuple[torch.Tensor, PagedKeys | None]] | None = None,
    ) -> torch.Tensor:
        """Runs [context, hidden] embeddings through the stack, ``step`` tokens at a time.

        Args:
            backend, selection: of ``fp8_mqa_logits`` and of ``top_k_per_row``; None is the library's choice, and
                ``TORCH`` selects by ``torch.topk``, ``FUSED`` by the call that scores.
            keep: is given each layer's latents and keys.

        Returns:
            The last token's residual stream, [hidden]: what the first generated token is read from.
        """
        context = prompt.shape[0]
        d = self.dims
        generator = torch.Generator(device=self.device).manual_seed(0)
        width = d.kv_lora + d.rope
        latents = [torch.empty(context, width, device=self.device, dtype=self.dtype) for _ in self.layers]
        keys = [
            PagedKeys(context, d.index_dim, self.device, generator) if layer.w_ik is not None else None
            for layer in self.layers
        ]
        x = prompt[:0]
        for start in range(0, context, step):
            x = prompt[start : start + step].clone()
            planned = plan_chunks(
                [Request(start, x.shape[0])], max_logits_bytes=None if selection == FUSED else max_logits_bytes
            )
            chunks = [(chunk, *chunk.windows(self.device)) for chunk in planned]
            selected = x.new_empty((0, 0), dtype=torch.int32)
            for index, layer in enumerate(self.layers):
                with clock.phase("projections"):
                    h = _norm(x)
                    c = _norm(h @ layer.w_dq)
                    self._cache_latents(latents[index], start, h, layer)
                paged = keys[index]
                if paged is not None:
                    selected = self._select(
                        index, layer, paged, start, h, c, chunks, (backend, selection), clock, observer
                    )
                with clock.phase("attention"):
                    attended = self._attend(layer, latents[index], start, c, selected)
                if observer is not None:
                    observer.attended(index, start, attended)
                x += attended
                with clock.phase("ffn"):
                    self._add_ffn(layer, x)
        if keep is not None:
            keep.extend(zip(latents, keys, strict=True))
        return x[-1]

    def _cache_latents(self, latents: torch.Tensor, start: int, h: torch.Tensor, layer: Layer) -> None:
        d = self.dims
        stop = start + h.shape[0]
        latents[start:stop, : d.kv_lora] = _norm(h @ layer.w_kv)
        latents[start:stop, d.kv_lora :] = self._rotary((h @ layer.w_kr)[:, None], start)[:, 0]

    def _select(
        self,
        index: int,
        layer: Layer,
        paged: PagedKeys,
        start: int,
        h: torch.Tensor,
        c: torch.Tensor,
        chunks: list[tuple[Chunk, torch.Tensor, torch.Tensor]],
        backends: tuple[str | None, str | None],
        clock: Clock,
        observer: Observer | None,
    ) -> torch.Tensor:
        """The indexer: selected positions [T, topk] int32, -1 where a row has fewer keys."""
        d = self.dims
        assert layer.w_iq is not None
        assert layer.w_ik is not None
        assert layer.w_iw is not None
        with clock.phase("indexer projections"):
            k = F.layer_norm((h @ layer.w_ik).float(), (d.index_dim,)).to(self.dtype)
            k = self._rotary(k[:, None], start)[:, 0]
            q = self._rotary((c @ layer.w_iq).view(-1, d.index_heads, d.index_dim), start)
            gates = (1.0 + (h @ layer.w_iw).float()) * (d.index_heads * d.index_dim) ** -0.5
        with clock.phase("quantise"):
            paged.write(start, k)
            q_fp8, weights = prepare_q(q, gates, weight_scale=1.0)
        selected = torch.empty((h.shape[0], d.index_topk), dtype=torch.int32, device=self.device)
        gathered = None
        backend, selection = backends
        for chunk, ks, ke in chunks:
            if chunk.gather or gathered is None:
                with clock.phase("gather"):
                    gathered = paged.gather(chunk.keys)
            rows = slice(chunk.token_start, chunk.token_stop)
            operands = (q_fp8[rows], *gathered, weights[rows], ks, ke)
            if selection == FUSED:
                with clock.phase("scoring"):
                    fp8_mqa_topk(
                        q_fp8[rows], gathered, weights[rows], ks, ke, d.index_topk, index_base="absolute",
                        out=selected[rows], backend=backend,
                    )  # fmt: skip
                logits_of: Callable[[torch.Tensor], torch.Tensor] = functools.partial(_logits_of, operands, backend)
            else:
                clean = needs_clean(selection)
                with clock.phase("scoring"):
                    logits = fp8_mqa_logits(
                        q_fp8[rows], gathered, weights[rows], ks, ke, clean_logits=clean, backend=backend
                    )
                with clock.phase("selection"):
                    _select_top_k(logits, ks, ke, selected[rows], selection)
                logits_of = logits.__getitem__
            if observer is not None:
                observer.scored(Scored(index, start + chunk.token_start, *operands, logits_of, selected[rows]))
        return selected

    def _attend(
        self, layer: Layer, latents: torch.Tensor, start: int, c: torch.Tensor, selected: torch.Tensor
    ) -> torch.Tensor:
        """Attention over the selected positions, in the space of the latents: [T, hidden]."""
        d = self.dims
        row_bytes = selected.shape[1] * latents.shape[1] * latents.element_size()
        step = max(1, GATHER_BYTES // row_bytes)
        scale = (d.nope + d.rope) ** -0.5
        result = torch.empty(c.shape[0], d.hidden, device=self.device, dtype=self.dtype)
        for first in range(0, c.shape[0], step):
            rows = slice(first, min(first + step, c.shape[0]))
            q = (c[rows] @ layer.w_uq).view(-1, d.heads, d.nope + d.rope)
            q_rope = self._rotary(q[..., d.nope :], start + first)
            q_latent = torch.einsum("thn,hnl->thl", q[..., : d.nope], layer.w_uk)
            picked = latents[selected[rows].clamp(min=0)]  # [rows, topk, kv_lora + rope]
            scores = torch.bmm(torch.cat((q_latent, q_rope), dim=-1), picked.transpose(1, 2)).float().mul_(scale)
            scores.masked_fill_((selected[rows] < 0)[:, None], float("-inf"))
            mixed = torch.bmm(scores.softmax(dim=-1).to(self.dtype), picked[..., : d.kv_lora])
            result[rows] = torch.einsum("thl,hlv->thv", mixed, layer.w_uv).flatten(1) @ layer.w_o
        return result

    def _add_ffn(self, layer: Layer, x: torch.Tensor) -> None:
        step = max(1, FFN_BYTES // (2 * self.dims.ffn * x.element_size()))
        for first in range(0, x.shape[0], step):
            gate, up = (_norm(x[first : first + step]) @ layer.w_gate_up).chunk(2, dim=-1)
            x[first : first + step] += (F.silu(gate) * up) @ layer.w_down

    def _rotary(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """Turns the last ``rope`` channels of [T, heads, channels] by their position; i pairs with i + rope / 2."""
        width = min(self.dims.rope, x.shape[-1] // 2 * 2)
        half = width // 2
        frequency = self.dims.rope_theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
        position = torch.arange(start, start + x.shape[0], device=x.device, dtype=torch.float64)
        angle = position[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
        kept, first, second = torch.split(x, [x.shape[-1] - width, half, half], dim=-1)
        return torch.cat((kept, first * cos - second * sin, second * cos + first * sin), dim=-1)


def _logits_of(operands: tuple[torch.Tensor, ...], backend: str | None, at: torch.Tensor) -> torch.Tensor:
    """Logits of some rows, which are the same bits in whichever call they are scored."""
    q, k, kv_scale, weights, ks, ke = operands
    some = q.view(torch.uint8)[at].view(q.dtype)  # fp8 tensors have no indexing on every device; their bytes do
    return fp8_mqa_logits(some, (k, kv_scale), weights[at], ks[at], ke[at], backend=backend)


def needs_clean(selection: str | None) -> bool:
    """Whether the logits need ``-inf`` outside the windows: ``torch.topk`` knows no windows."""
    return selection == TORCH


def _select_top_k(
    logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, out: torch.Tensor, selection: str | None
) -> None:
    """Writes the columns of each row's best scores into ``out`` [rows, topk], -1 behind the last."""
    topk = out.shape[1]
    if selection != TORCH:
        top_k_per_row(logits, topk, ks, ke, index_base="absolute", out=out, backend=selection)
        return
    width = min(topk, logits.shape[1])
    scores, columns = logits.topk(width, dim=1, sorted=False)
    out[:, :width] = columns.to(torch.int32).masked_fill_(scores == float("-inf"), -1)
    out[:, width:] = -1


def _norm(x: torch.Tensor) -> torch.Tensor:
    """RMS norm without a gain."""
    return F.rms_norm(x, (x.shape[-1],))


def needed_bytes(dims: Dims, layers: int, context: int, step: int, max_logits_bytes: int, dtype: torch.dtype) -> int:
    """About what a run holds at its peak: weights, prompt and caches, activations of a step, and the largest blocks."""
    size = dtype.itemsize
    step = min(step, context)
    weights = layers * dims.parameters() * size
    kept = context * (dims.hidden * size + layers * ((dims.kv_lora + dims.rope) * size + dims.index_dim + 8))
    # x, h, attended and one temporary; c; q of the indexer in two widths and as float32 while it is quantised.
    activations = step * (4 * dims.hidden + 2 * dims.q_lora) * size + step * dims.index_heads * dims.index_dim * 12
    selection = (
        step * dims.index_topk * 4 + max_logits_bytes + max_logits_bytes // max(1, context) * dims.index_topk * 12
    )
    rows = max(1, GATHER_BYTES // (dims.index_topk * (dims.kv_lora + dims.rope) * size))
    attention = GATHER_BYTES + rows * dims.heads * (dims.index_topk * (8 + 2 * size) + 4 * dims.kv_lora * size)
    # torch.topk sorts copies of its input; the checks score rows in float32.
    return weights + kept + activations + selection + max(attention, 2 * FFN_BYTES, 2 * max_logits_bytes + 2**31)


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU; float32 on a CPU, which has no fast bfloat16 products everywhere."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
