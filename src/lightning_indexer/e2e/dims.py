"""Sizes of the models whose layers the end-to-end run is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Dims:
    """One model's layer, in the names of its configuration file.

    Attributes:
        hidden: width of the residual stream.
        heads: attention heads.
        q_lora, kv_lora: ranks of the compressed queries and of the latents that are cached.
        nope, rope, v_dim: channels of a head without and with rotary embedding, and of its values.
        index_heads, index_dim, index_topk: H and D of the indexer, and the keys that it selects for a row.
        index_period: layers that share one selection; the first of them has the indexer.
        ffn: width of the feed-forward network. For a mixture of experts, the width that one token meets.
        layers: layers of the stack by default.
        rope_theta: base of the rotary embedding.
    """

    name: str
    hidden: int
    heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    index_period: int
    ffn: int
    layers: int
    rope_theta: float

    def small(self) -> Dims:
        """A layer that a CPU runs in seconds, with the indexer's own H and D."""
        return replace(
            self, name=f"{self.name} (small)", hidden=512, heads=8, q_lora=192, kv_lora=128, nope=128, rope=16,
            v_dim=64,
            index_topk=128, ffn=1024, layers=min(self.layers, 2), index_period=min(self.index_period, 2),
        )  # fmt: skip

    def parameters(self) -> int:
        """Weights of one layer with an indexer."""
        attention = self.hidden * (self.q_lora + self.kv_lora + self.rope)
        attention += self.heads * (self.q_lora * (self.nope + self.rope) + self.kv_lora * (self.nope + self.v_dim))
        attention += self.heads * self.v_dim * self.hidden
        indexer = self.q_lora * self.index_heads * self.index_dim + self.hidden * (self.index_dim + self.index_heads)
        return attention + indexer + 3 * self.hidden * self.ffn


# From the models' public configuration files. Nine experts of width 2048 meet a token, eight routed and one shared.
MODELS: dict[str, Dims] = {
    "glm-5.2": Dims("glm-5.2", 6144, 64, 2048, 512, 192, 64, 256, 32, 128, 2048, 4, 9 * 2048, 4, 8e6),
    "deepseek-v3.2": Dims("deepseek-v3.2", 7168, 128, 1536, 512, 128, 64, 128, 64, 128, 2048, 1, 9 * 2048, 2, 1e4),
}
