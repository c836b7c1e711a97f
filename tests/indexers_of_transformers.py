"""The indexers of transformers, eager and through this library, side by side on one device."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer.integrations import transformers as plugin

transformers = pytest.importorskip("transformers", minversion="5.17")

BF16 = torch.bfloat16
MLA = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_nope_head_dim": 16, "index_head_dim": 32, "index_n_heads": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
V4 = {
    "vocab_size": 97, "hidden_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
    "head_dim": 32, "q_lora_rank": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2,
    "o_lora_rank": 16, "index_n_heads": 8, "index_head_dim": 32, "sliding_window": 16, "partial_rotary_factor": 0.25,
    "layer_types": ["heavily_compressed_attention", *["compressed_sparse_attention"] * 3],
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 512}
MODELS = {
    "deepseek_v32": ("DeepseekV32", MLA),
    "glm_moe_dsa": ("GlmMoeDsa", MLA | {"indexer_types": ["full", "shared", "full"]}),
    "deepseek_v4": ("DeepseekV4", V4),
}


def overlap(ours: torch.Tensor, theirs: torch.Tensor, seen: torch.Tensor) -> float:
    """The share of their selected keys, of those that rows may see, that ours has too; ``seen`` is [B, S, T]."""
    shape = (*ours.shape[:2], seen.shape[-1] + 1)
    sets = []
    for indices in (ours, theirs):
        chosen = torch.zeros(shape, dtype=torch.bool, device=seen.device)
        chosen.scatter_(-1, torch.where(indices < 0, seen.shape[-1], indices).long(), True)
        sets.append(chosen[..., :-1] & seen)
    return float((sets[0] & sets[1]).sum() / sets[1].sum())


def side_by_side(kind: str, device: torch.device, *, prefill: int, total: int, k: int) -> None:
    """One indexer, H and D as published: a prefill with left padding, more of it, then a step, in both precisions."""
    name, small = MODELS[kind]
    heads, hidden = {"glm_moe_dsa": 32}.get(kind, 64), 256
    sizes = {"index_n_heads": heads, "index_head_dim": 128, "hidden_size": hidden, "q_lora_rank": 192}
    rope = {"head_dim": 128, "partial_rotary_factor": 0.5} if kind == "deepseek_v4" else {"qk_rope_head_dim": 64}
    sizes["index_topk"] = k
    config = getattr(transformers, f"{name}Config")(**(small | sizes | rope), **TOKENS)
    torch.manual_seed(3)
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["_"])
    layer = len(config.layer_types) - 1
    indexer = getattr(module, f"{name}Indexer")(*([config] if kind == "deepseek_v4" else [config, layer])).to(BF16)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    indexer = indexer.to(device)
    rotary = getattr(module, f"{name}RotaryEmbedding")(config).to(device)
    batch, pads = 2, torch.tensor([0, 37])
    hidden_states = torch.randn(batch, total, hidden).to(device, BF16)
    residual = torch.randn(batch, total, 192).to(device, BF16)
    positions = (torch.arange(total) - pads[:, None]).clamp(min=0).to(device)
    keys = torch.arange(total)
    causal = ((keys <= keys[:, None]) & (keys >= pads[:, None, None])).to(device)

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        cache, found = transformers.DynamicCache(config=config), []
        for start, stop in ((0, prefill), (prefill, total - 1), (total - 1, total)):
            part = slice(start, stop)
            arguments = hidden_states[:, part], residual[:, part]
            if kind == "deepseek_v4":
                ratio = config.compress_rates["compressed_sparse_attention"]
                seen = torch.arange(stop // ratio, device=device) < ((positions[:, part] + 1) // ratio)[..., None]
                found.append((indexer(*arguments, positions[:, part], cache, layer), seen))
            else:
                seen = causal[:, part, :stop]
                rope = rotary(hidden_states, positions[:, part])
                found.append((indexer(*arguments, rope, seen, positions[:, part], cache), seen))
        return found

    expected = run()
    for precision, least in (("bfloat16", 0.999), ("fp8", 0.985)):
        plugin.install(indexer, precision=precision)
        result, shares = run(), []
        plugin.uninstall()
        for (ours, seen), (theirs, _) in zip(result, expected, strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            assert -1 <= int(ours.min()) <= int(ours.max()) < seen.shape[-1]
            assert kind == "deepseek_v4" or int(ours.min()) >= 0  # the eager code fills up with what a row does not see
            # Each row has distinct keys, and where it may see fewer than k, all of them.
            sorted_keys = ours.sort(-1).values
            assert bool(((sorted_keys.diff(dim=-1) > 0) | (sorted_keys[..., 1:] < 0)).all())
            shares.append((overlap(ours, theirs, seen), seen.shape[:2].numel()))
            few = (seen.sum(-1) <= ours.shape[-1])[..., None] & seen
            if bool(few.any()):
                assert overlap(ours, theirs, few) == 1.0
        # A step has few rows: what one key more or less makes there is much.
        assert all(share >= least - 0.02 for share, _ in shares), (precision, shares)
        assert sum(share * rows for share, rows in shares) / sum(rows for _, rows in shares) >= least, precision
