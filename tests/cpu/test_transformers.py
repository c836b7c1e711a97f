"""The transformers integration in the real classes: small random models, and indexers of the published dimensions."""

from __future__ import annotations

import importlib.util
import logging

import pytest
import torch

from lightning_indexer.integrations import transformers as plugin
from lightning_indexer.integrations.patching import IntegrationError, digest_of, text_of
from lightning_indexer.integrations.transformers import selection

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


def model_of(kind: str, index_topk: int, attention: str = "sdpa", **sizes) -> torch.nn.Module:
    name, config = MODELS[kind]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**(config | sizes), **TOKENS, index_topk=index_topk)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(BF16)
    for parameter in model.parameters():
        # Weights of 0.02 leave logits so close that rounding decides tokens.
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    if kind != "deepseek_v4":  # which is eager alone
        model.set_attn_implementation(attention)
    return model


def prompts(batch=3, length=45) -> dict[str, torch.Tensor]:
    """Left-padded, each row to another extent."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(2, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : 7 * row + 3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, given, tokens=8, **options) -> torch.Tensor:
    return model.generate(**given, max_new_tokens=tokens, do_sample=False, **options)


@pytest.fixture(autouse=True)
def _uninstalled():
    yield
    if plugin.replaced():
        plugin.uninstall()


@pytest.fixture
def always_scored(monkeypatch):
    """Scores where k is all that there is, too: each key is then found, and not merely counted."""
    monkeypatch.setattr(selection, "needs_scores", lambda keys, k: True)


class Selections:
    """What the indexers of a model select, call by call, with what each row may see."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[torch.Tensor] = []
        for module in model.modules():
            if type(module).__name__.endswith("Indexer"):
                module.register_forward_hook(lambda module, args, out: self.calls.append(out.sort(-1).values))


def overlap(ours: torch.Tensor, theirs: torch.Tensor, seen: torch.Tensor) -> float:
    """The share of their selected keys, of those that rows may see, that ours has too; ``seen`` is [B, S, T]."""
    shape = (*ours.shape[:2], seen.shape[-1] + 1)
    sets = []
    for indices in (ours, theirs):
        chosen = torch.zeros(shape, dtype=torch.bool)
        chosen.scatter_(-1, torch.where(indices < 0, seen.shape[-1], indices).long(), True)
        sets.append(chosen[..., :-1] & seen)
    return float((sets[0] & sets[1]).sum() / sets[1].sum())


# generate(): where every key is selected the tokens are those of the eager code


@pytest.mark.parametrize("kind", MODELS)
def test_generate_with_left_padding(kind, always_scored):
    model, given = model_of(kind, index_topk=64), prompts()
    expected = generate(model, given)
    for precision in ("fp8", "bfloat16"):
        names = plugin.install(precision=precision)
        classes = [name.rsplit(".", 2)[1] for name in names]
        assert classes == ["DeepseekV32Indexer", "GlmMoeDsaIndexer", "DeepseekV4Indexer"]
        assert torch.equal(generate(model, given), expected), precision
        assert torch.equal(generate(model, {key: value[:1] for key, value in given.items()}), expected[:1]), precision
        assert set(plugin.uninstall()) == set(names)
    assert torch.equal(generate(model, given), expected)


@pytest.mark.parametrize("kind", MODELS)
def test_what_k_covers_is_not_scored(kind, monkeypatch):
    """Every position is selected, of V4 those that the row sees; no q is projected, and K goes on into the cache."""
    model, given = model_of(kind, index_topk=64), prompts(2)
    expected, eager = generate(model, given, 3), Selections(model)
    generate(model, given, 3)
    plugin.install(model)
    expected_calls, eager.calls[:] = list(eager.calls), []
    monkeypatch.setattr(selection, "fp8_mqa_logits", None)
    monkeypatch.setattr(selection, "select_in_windows", None)
    assert torch.equal(generate(model, given, 3), expected)
    for ours, theirs in zip(eager.calls, expected_calls, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_caches_and_masks(cache, attention, monkeypatch, always_scored):
    """Additive masks (eager) and bool ones, in both caches; windows read back at every prefill."""
    monkeypatch.setattr(selection, "FEW_ROWS", 8)
    model, given = model_of("deepseek_v32", 64, attention), prompts()
    expected = generate(model, given)
    plugin.install(model)
    assert torch.equal(generate(model, given, cache_implementation=cache), expected)


def test_beams_reorder_the_bytes_of_the_cache(always_scored):
    model, given = model_of("glm_moe_dsa", index_topk=64), prompts(2, 20)
    expected = generate(model, given, num_beams=3)
    plugin.install(model)
    assert torch.equal(generate(model, given, num_beams=3), expected)


# Where keys are left out: the same ones, but for rounding


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_published_dimensions(kind):
    """One indexer with H and D as published: a prefill with left padding, more of it, then a step, side by side."""
    name, small = MODELS[kind]
    heads, hidden = {"glm_moe_dsa": 32}.get(kind, 64), 256
    sizes = {"index_n_heads": heads, "index_head_dim": 128, "hidden_size": hidden, "q_lora_rank": 192}
    rope = {"head_dim": 128, "partial_rotary_factor": 0.5} if kind == "deepseek_v4" else {"qk_rope_head_dim": 64}
    sizes |= {"index_topk": 36 if kind == "deepseek_v4" else 112}
    config = getattr(transformers, f"{name}Config")(**(small | sizes | rope), **TOKENS)
    torch.manual_seed(3)
    module = __import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["_"])
    layer = len(config.layer_types) - 1
    indexer = getattr(module, f"{name}Indexer")(*([config] if kind == "deepseek_v4" else [config, layer])).to(BF16)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    rotary = getattr(module, f"{name}RotaryEmbedding")(config)
    batch, prefill, total = 2, 300, 331
    hidden_states = torch.randn(batch, total, hidden).to(BF16)
    residual = torch.randn(batch, total, 192).to(BF16)
    pads = torch.tensor([0, 37])
    positions = (torch.arange(total) - pads[:, None]).clamp(min=0)
    keys = torch.arange(total)
    causal = (keys <= keys[:, None]) & (keys >= pads[:, None, None])

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        cache, found = transformers.DynamicCache(config=config), []
        for start, stop in ((0, prefill), (prefill, total - 1), (total - 1, total)):
            part = slice(start, stop)
            arguments = hidden_states[:, part], residual[:, part]
            if kind == "deepseek_v4":
                ratio = config.compress_rates["compressed_sparse_attention"]
                seen = torch.arange(stop // ratio) < ((positions[:, part] + 1) // ratio)[..., None]
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


def test_several_chunks_give_what_one_gives(monkeypatch):
    model, given = model_of("deepseek_v32", index_topk=8), prompts()
    plugin.install(model)
    seen = Selections(model)
    generate(model, given, 2)
    expected, seen.calls[:] = list(seen.calls), []
    visible = given["attention_mask"][:, None, :].bool() & torch.ones(45, 45, dtype=torch.bool).tril()
    for few, name, size in (
        (0, "QUERY_BYTES", 7 * 3 * 8 * 32), (0, "QUERY_BYTES", 50 * 3 * 8 * 32), (0, "WORKSPACE_BYTES", 7 * 4 * 64),
        (1000, "LOGITS_BYTES", 7 * 4 * 45), (1000, "QUERY_BYTES", 50 * 3 * 8 * 32),
    ):  # fmt: skip
        with monkeypatch.context() as changed:
            changed.setattr(selection, "FEW_ROWS", few)
            changed.setattr(selection, name, size)
            generate(model, given, 2)
        assert overlap(seen.calls[0], expected[0], visible) == 1.0
        seen.calls.clear()


@pytest.mark.parametrize("kind", ["holes", "bias"])
@pytest.mark.parametrize("few", [0, 1000])
def test_masks_with_holes_and_biases(kind, few, monkeypatch):
    monkeypatch.setattr(selection, "FEW_ROWS", few)
    model = model_of("glm_moe_dsa", index_topk=6)
    indexer = model.model.layers[0].self_attn.indexer
    torch.manual_seed(5)
    batch, tokens = 2, 30
    hidden, residual = torch.randn(batch, tokens, 64).to(BF16), torch.randn(batch, tokens, 32).to(BF16)
    positions = torch.arange(tokens)[None]
    rope = model.model.rotary_emb(hidden, positions)
    allowed = (torch.rand(batch, tokens, tokens) < 0.6).tril()
    allowed |= torch.eye(tokens, dtype=torch.bool)
    mask = allowed
    if kind == "bias":
        mask = torch.where(allowed, -0.2 * torch.rand(batch, tokens, tokens), torch.finfo(BF16).min)
    expected = indexer(hidden, residual, rope, mask, positions)
    plugin.install(model, precision="bfloat16")
    assert overlap(indexer(hidden, residual, rope, mask, positions), expected, allowed) >= 0.999


def test_a_mask_is_read_once_and_never_taken_for_another():
    masks = selection.Masks()
    mask = torch.ones(1, 600, 600, dtype=torch.bool).tril()[:, None]
    first = masks.seen(mask[:, 0], 2, 600)
    assert isinstance(first, selection.Windows)
    assert first.start.tolist() == [0] * 1200
    assert first.stop.tolist() == [*range(1, 601)] * 2
    assert masks.seen(mask[:, 0], 2, 600) is first
    mask[:, :, :, :5] = False  # in place: another version
    again = masks.seen(mask[:, 0], 2, 600)
    assert again is not first
    assert again.start.tolist()[10] == 5
    del mask
    other = torch.zeros(1, 600, 600, dtype=torch.bool)
    other[..., 100:200] = True
    assert masks.seen(other, 2, 600).start.tolist() == [100] * 1200


@pytest.mark.slow
def test_compiled_decoding_step():
    """Without a graph break, as generate() compiles it for a static cache on a GPU."""
    model, given = model_of("deepseek_v32", index_topk=8, num_hidden_layers=1), prompts(2, 20)
    plugin.install(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(**given, past_key_values=cache)
        step = {"input_ids": torch.tensor([[3], [4]]), "past_key_values": cache}
        step["attention_mask"] = torch.cat((given["attention_mask"], torch.ones(2, 1, dtype=torch.long)), 1)
        step["position_ids"] = step["attention_mask"].sum(1, keepdim=True) - 1
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        out = compiled(**step).logits
        fresh = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(**given, past_key_values=fresh)
        expected = model(**(step | {"past_key_values": fresh})).logits
    assert torch.equal(out, expected)


# Installing


def test_the_log_and_a_second_call(caplog):
    model = model_of("deepseek_v4", 4)
    with caplog.at_level(logging.INFO, "lightning_indexer.transformers"):
        names = plugin.install(model)
        assert plugin.install(model) == names
    assert names == tuple(f"model.layers.{layer}.self_attn.compressor.indexer.forward" for layer in (1, 2, 3))
    assert len(caplog.records) == 1
    assert "lightning-indexer replaced model.layers.1" in caplog.text
    with pytest.raises(IntegrationError, match="fp8 is installed, bfloat16 was asked for"):
        plugin.install(precision="bfloat16")
    assert plugin.uninstall() == names
    with pytest.raises(IntegrationError, match="nothing to uninstall"):
        plugin.uninstall()


def test_under_the_hooks_of_accelerate():
    """A hook wraps the forward that it found, and keeps it under another name."""
    model, given = model_of("deepseek_v32", 64), prompts(2, 20)
    expected = generate(model, given, 3)
    calls = []
    for module in model.modules():
        if type(module).__name__ == "DeepseekV32Indexer":
            module._old_forward = module.forward
            module.forward = lambda *args, module=module, **options: (
                calls.append(1),
                module._old_forward(*args, **options),
            )[1]
    names = plugin.install(model)
    assert all(name.endswith("indexer._old_forward") for name in names)
    assert torch.equal(generate(model, given, 3), expected)
    assert calls


def test_another_party_has_replaced_it():
    plugin.install()
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

    ours = GlmMoeDsaIndexer.forward
    GlmMoeDsaIndexer.forward = lambda self: None
    with pytest.raises(IntegrationError, match=r"GlmMoeDsaIndexer\.forward was replaced by another party"):
        plugin.uninstall()
    GlmMoeDsaIndexer.forward = ours


def test_a_class_that_changed_is_refused(monkeypatch):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as module

    def forward(self, q, compressed_kv, hidden_states):
        return q

    before = module.DeepseekV4Indexer.forward
    monkeypatch.setattr(module.DeepseekV4IndexerScorer, "forward", forward)
    with pytest.raises(IntegrationError, match=r"DeepseekV4IndexerScorer\.forward has changed since 5\.17"):
        plugin.install()
    assert module.DeepseekV4Indexer.forward is before
    assert plugin.replaced() == ()


def test_what_counts_as_the_same_text(tmp_path):
    """Layout, comments and docstring do not; anything else does."""
    texts = {
        "plain": "def f(x: int) -> int:\n    return x + 1\n",
        "worded": 'def f(x: int) -> int:\n    """Some: words."""\n\n    # why\n    return x + 1  # what\n',
        "broken": "def f(\n    x: int\n) -> int:\n    return x + 1\n",
        "other": "def f(x: int) -> int:\n    return x + 2\n",
    }
    digests = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"texts_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        digests[name] = text_of(module.f)
    assert digests["plain"] == digests["worded"] == digests["broken"] != digests["other"]
    # f-strings are taken apart by Python 3.12 and newer, and not before.
    source = "def f(x):\n    y = f\"a{x!r:>{x}} {f'{x}'}é\" + rf'''\n  {x}\n  \"'''\n    return f\"{x}\", y  # é\n"
    assert digest_of(source) == "497a3be1aee41689"
    assert digest_of(source.replace("!r", "!s")) != digest_of(source)
    with pytest.raises(IntegrationError, match="has no source to compare"):
        text_of(len)


def test_other_refusals(monkeypatch):
    with pytest.raises(ValueError, match="precision: got 'int8', expected one of fp8, bfloat16"):
        plugin.install(precision="int8")
    with pytest.raises(TypeError, match="model: got str"):
        plugin.install("model")
    with pytest.raises(IntegrationError, match="Linear has none of DeepseekV32Indexer"):
        plugin.install(torch.nn.Linear(2, 2))
    monkeypatch.setattr(plugin, "distribution_version", lambda name: "5.16.2")
    with pytest.raises(IntegrationError, match=r"5\.16\.2 is older than 5\.17"):
        plugin.install()


def test_a_cache_of_another_format():
    model, given = model_of("deepseek_v32", 64), prompts(1, 20)
    with torch.no_grad():
        cache = model(**given, use_cache=True).past_key_values
        plugin.install(model)
        with pytest.raises(IntegrationError, match="filled in another format"):
            model(input_ids=torch.tensor([[5]]), past_key_values=cache)


def test_heads_that_are_spread_over_devices():
    model, given = model_of("deepseek_v4", 4), prompts(1, 20)
    indexer = model.model.layers[1].self_attn.compressor.indexer
    indexer.q_b_proj = torch.nn.Linear(32, 4 * 32, bias=False).to(BF16)
    plugin.install(model)
    with pytest.raises(IntegrationError, match="heads of this indexer are spread over devices"), torch.no_grad():
        model(**given)
