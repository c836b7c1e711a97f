"""The transformers integration in the real classes: small random models, and indexers of the published dimensions."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from pathlib import Path

import pytest
import torch

from helpers import CPU
from indexers_of_transformers import MODELS, TOKENS, overlap, side_by_side
from lightning_indexer.integrations import transformers as plugin
from lightning_indexer.integrations.patching import IntegrationError, digest_of, text_of
from lightning_indexer.integrations.transformers import selection

transformers = pytest.importorskip("transformers", minversion="5.17")

BF16 = torch.bfloat16


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


def test_v4_as_it_is_loaded(tmp_path, always_scored):
    """``from_pretrained`` keeps norms and the bias of the gates float32; its own bfloat16 code then needs autocast."""
    given = prompts(2, 30)
    model_of("deepseek_v4", index_topk=64, num_hidden_layers=2).save_pretrained(tmp_path)
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    indexer = model.model.layers[1].self_attn.compressor.indexer
    assert (indexer.kv_norm.weight.dtype, indexer.kv_proj.weight.dtype) == (torch.float32, BF16)
    with torch.autocast("cpu", BF16):
        expected = generate(model, given, 3)
        for precision in ("fp8", "bfloat16"):
            plugin.install(model, precision=precision)
            assert torch.equal(generate(model, given, 3), expected), precision
            plugin.uninstall()


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
    side_by_side(kind, CPU, prefill=300, total=331, k=36 if kind == "deepseek_v4" else 112)


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


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_of_whole_models_that_leave_keys_out(kind, monkeypatch, capsys):
    """The report of ``scripts/transformers_tokens.py``, of small models: rows select 8 of 24 to 26 keys."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    script = importlib.import_module("transformers_tokens")
    model = model_of(kind, index_topk=8)
    monkeypatch.setattr(script, "model_of", lambda *given: model)
    script.tokens_of(kind, 99 if kind == "deepseek_v4" else 24, 4, "cpu", narrow=True)
    text = capsys.readouterr().out
    tokens, keys = (
        {row[1].strip(): [cell.strip() for cell in row[2:-1]] for row in (line.split("|") for line in part)}
        for part in tables(text)
    )
    assert list(tokens) == list(keys) == ["bfloat16", "fp8", "exchanged", "float32"], text
    # The first indexer's input is that of the eager code: as many keys stay as in fp8.
    first = {side: [cell.split(", ")[0] for cell in keys[side]] for side in ("fp8", "exchanged")}
    assert first["exchanged"] == ["", *first["fp8"][1:]], text
    assert first["fp8"][1] != "100.00", text
    same = {side: [float(share) for share in keys[side][0].split(", ")] for side in ("bfloat16", "fp8")}
    assert min(same["bfloat16"]) > 99.5, text
    assert min(same["fp8"]) > 96, text
    assert tokens["bfloat16"][:3] == ["4", "none", "4"], text


def tables(text: str) -> list[list[str]]:
    """Rows of the tables in it, without their heads."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if not line.startswith("|"):
            found.append([])
        elif set(line) - set("| -"):
            found[-1].append(line)
    return [rows[1:] for rows in found if rows]


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
