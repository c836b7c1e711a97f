"""The indexers' ``forward``, by class: the model's projections and rotary embedding, this library's selection."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_indexer.integrations.patching import IntegrationError
from lightning_indexer.integrations.transformers.keys import KeyFormat, Scored, Turn
from lightning_indexer.integrations.transformers.selection import Masks, Windows, select

Forward = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Indexer:
    """A class that is replaced.

    Attributes:
        module, name: where it is.
        make: its ``forward`` for a format of K.
        texts: by method, or function, or class and method of the same module, ``text_of`` what this was written after.
    """

    module: str
    name: str
    make: Callable[[KeyFormat], Forward]
    texts: dict[str, str] = field(default_factory=dict)


def _check_cache(form: KeyFormat, cached: torch.Tensor) -> None:
    if not form.holds(cached):
        raise IntegrationError(
            "transformers: this cache was filled in another format of K: install() and uninstall() between two "
            "generations, not within one"
        )


# DeepSeek-V3.2 and GLM-5: K a token, windows by the attention mask.


def _mla(module_name: str, rotary_name: str, *, interleaved: bool) -> Callable[[KeyFormat], Forward]:
    def make(form: KeyFormat) -> Forward:
        module, masks = importlib.import_module(module_name), Masks()

        @torch.no_grad()
        def forward(
            self: Any,
            hidden_states: torch.Tensor,
            q_resid: torch.Tensor,
            position_embeddings: tuple[torch.Tensor, torch.Tensor],
            attention_mask: torch.Tensor,
            position_ids: torch.Tensor,
            past_key_values: Any = None,
        ) -> torch.Tensor:
            batch, tokens, _ = hidden_states.shape
            rotary, rope = getattr(module, rotary_name), self.qk_rope_head_dim
            # [B or 1, S, rope] of the batch's rows, one sequence behind the other; the second half repeats the first.
            cos, sin = (
                side.expand(batch, -1, -1).reshape(batch * tokens, side.shape[-1]) for side in position_embeddings
            )

            def rotated(x: torch.Tensor, rows: slice) -> torch.Tensor:
                """The first channels of [m, heads, D] rotated."""
                # The function rotates a pair; one head stands for the other.
                turned, _ = rotary(x[..., :rope], x[:, :1, :rope], cos[rows], sin[rows], unsqueeze_dim=1)
                return torch.cat((turned, x[..., rope:]), dim=-1)

            table = torch.cat((cos[:, : rope // 2], sin[:, : rope // 2]), dim=1)
            turn = Turn(rotated, table, "first", interleaved)
            cached = form.pack(self.k_norm(self.wk(hidden_states)), turn)
            if past_key_values is not None:
                layer = past_key_values.layers[self.layer_idx]
                if getattr(layer, "is_indexer_initialized", False) and layer.indexer_keys.numel():
                    _check_cache(form, layer.indexer_keys)
                cached = past_key_values.update_indexer(cached, self.layer_idx)

            hidden, residual = hidden_states.flatten(0, 1), q_resid.flatten(0, 1)
            scaling = self.softmax_scale * self.n_heads**-0.5

            def queries(rows: slice) -> Scored:
                q = self.wq_b(residual[rows]).view(-1, self.n_heads, self.head_dim)
                weights = self.weights_proj(hidden[rows].to(self.weights_proj.weight.dtype))
                return form.queries(q, weights, scaling, turn, rows)

            k_best = min(self.index_topk, cached.shape[1])
            out = torch.empty((batch, tokens, k_best), dtype=torch.int32, device=hidden_states.device)
            seen = masks.seen(attention_mask, batch, tokens)
            return select(form.unpack(cached), queries, seen, out, self.n_heads, fill=True)

        return forward

    return make


# DeepSeek-V4: K a window of tokens, causal by position.


def _compressed(form: KeyFormat) -> Forward:
    module = importlib.import_module(_V4)

    def turn_of(cos: torch.Tensor, sin: torch.Tensor, rows: int) -> Turn:
        """Of [B or 1, S, rope / 2] for the rows of a batch, one sequence behind the other."""
        batch = rows // max(1, cos.shape[1])
        cos, sin = (side.expand(batch, -1, -1).reshape(rows, side.shape[-1]) for side in (cos, sin))
        return Turn(
            lambda x, part: module.apply_rotary_pos_emb(x, cos[part], sin[part]), torch.cat((cos, sin), dim=1),
            "last", True,
        )  # fmt: skip

    def keys(self: Any, hidden_states: torch.Tensor, layer: Any) -> torch.Tensor:
        """[B, windows, W]: keys of the windows that these tokens complete, as the cache holds them."""
        ratio, head_dim = self.compress_rate, self.head_dim
        kv, gate, first = self.kv_proj(hidden_states), self.gate_proj(hidden_states), 0
        if layer is None:
            whole = kv.shape[1] // ratio * ratio
            kv, gate = kv[:, :whole], gate[:, :whole]
        else:
            kv, gate, first = layer.store_compression_weights("indexer", kv, gate)
        batch, count = kv.shape[0], kv.shape[1] // ratio
        if count == 0:
            return form.empty(kv, head_dim)
        kv = kv.view(batch, count, ratio, 2 * head_dim)
        gate = gate.view(batch, count, ratio, 2 * head_dim) + self.position_bias
        # A key is a gated mean of the second half of its own window's channels and the first half of the window before.
        before, gate_before = kv.new_zeros((batch, 1, ratio, head_dim)), None
        if layer is not None:
            prior, gate_before = layer.update_overlap_state("indexer", kv, gate, head_dim)
            before = before if prior is None else prior.to(kv.dtype)[:, None]
        if gate_before is None:
            gate_before = gate.new_full((batch, ratio, head_dim), float("-inf"))
        before = torch.cat((before, kv[:, :-1, :, :head_dim]), dim=1)
        gates = torch.cat((gate_before.to(gate.dtype)[:, None], gate[:, :-1, :, :head_dim]), dim=1)
        values = torch.cat((before, kv[..., head_dim:]), dim=2)
        gates = torch.cat((gates, gate[..., head_dim:]), dim=2).softmax(dim=2, dtype=torch.float32)
        mean = self.kv_norm((values * gates.to(values.dtype)).sum(dim=2))
        positions = (torch.arange(count, device=mean.device) * ratio + first)[None].expand(batch, -1)
        cos, sin = self.rotary_emb(mean, position_ids=positions, layer_type=self.rope_layer_type)
        return form.pack(mean, turn_of(cos, sin, batch * count))

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> torch.Tensor:
        if self.q_b_proj.weight.shape[0] != self.num_heads * self.head_dim:
            raise IntegrationError(
                "transformers: the heads of this indexer are spread over devices, and their scores are summed between "
                "scoring and selection: uninstall lightning-indexer for this model"
            )
        batch, tokens, _ = hidden_states.shape
        layer = past_key_values.layers[layer_idx] if past_key_values is not None else None
        if layer is not None and layer.compressed_kv["indexer"] is not None:
            _check_cache(form, layer.compressed_kv["indexer"])
        cached = keys(self, hidden_states, layer)
        if layer is not None:
            cached = layer.update_compressor_states("indexer", cached)
        count = cached.shape[1]
        if count == 0:
            return position_ids.new_empty((batch, tokens, 0), dtype=torch.int64)

        positions = position_ids.expand(batch, tokens)
        cos, sin = self.rotary_emb(hidden_states, position_ids=position_ids, layer_type=self.rope_layer_type)
        turn = turn_of(cos, sin, batch * tokens)
        hidden, residual = hidden_states.flatten(0, 1), q_residual.flatten(0, 1)
        scaling = self.scorer.softmax_scale * self.scorer.weights_scaling

        def queries(rows: slice) -> Scored:
            q = self.q_b_proj(residual[rows]).view(-1, self.num_heads, self.head_dim)
            return form.queries(q, self.scorer.weights_proj(hidden[rows]), scaling, turn, rows)

        # A key is seen once its window is complete.
        stop = ((positions + 1) // self.compress_rate).clamp(0, count).to(torch.int32).reshape(-1)
        out = torch.empty((batch, tokens, min(self.index_topk, count)), dtype=torch.int32, device=hidden_states.device)
        seen = Windows(torch.zeros_like(stop), stop)
        return select(form.unpack(cached), queries, seen, out, self.num_heads, fill=False).to(torch.int64)

    return forward


_V32 = "transformers.models.deepseek_v32.modeling_deepseek_v32"
_GLM = "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa"
_V4 = "transformers.models.deepseek_v4.modeling_deepseek_v4"
INDEXERS = (
    Indexer(
        _V32,
        "DeepseekV32Indexer",
        _mla(_V32, "apply_rotary_pos_emb", interleaved=False),
        {
            "forward": "a320eb88337e082c",
            "apply_rotary_pos_emb": "6aab45b5e1d47f93",
            "rotate_half": "75096ac91792d539",
            "DeepseekV32RotaryEmbedding.forward": "c18371954cc1d822",
        },
    ),
    Indexer(
        _GLM,
        "GlmMoeDsaIndexer",
        _mla(_GLM, "apply_rotary_pos_emb_interleave", interleaved=True),
        {
            "forward": "256534814be2affb",
            "apply_rotary_pos_emb_interleave": "2f34cdd3721e3b67",
            "GlmMoeDsaRotaryEmbedding.forward": "c18371954cc1d822",
        },
    ),
    Indexer(
        _V4,
        "DeepseekV4Indexer",
        _compressed,
        {
            "forward": "08aa12982b691dec",
            "DeepseekV4IndexerScorer.forward": "407cbbd669170be4",
            "apply_rotary_pos_emb": "0b47fa54e3538832",
            "rotate_half": "b3f6f5f3d9685b74",
            "DeepseekV4RotaryEmbedding.forward": "686859d7ccfabd8e",
        },
    ),
)
