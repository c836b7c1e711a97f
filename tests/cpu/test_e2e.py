"""The end-to-end run on a CPU: tiny layers, planted needles, two backends, traces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from faulty import FaultyBackend, install
from helpers import CPU
from lightning_indexer import Arch, fp8_mqa_logits, quantize_k
from lightning_indexer.cli import app as cli
from lightning_indexer.e2e import checks, report, run, stack, traces
from lightning_indexer.e2e.cache import BLOCK_TOKENS, PagedKeys
from lightning_indexer.e2e.clock import Clock
from lightning_indexer.e2e.dims import MODELS
from lightning_indexer.e2e.prompt import make_prompt
from lightning_indexer.selection import registry as dispatch

CONTEXT, NEEDLES, STEP = 320, 4, 128
TINY = replace(
    MODELS["glm-5.2"].small(), name="tiny", hidden=384, heads=6, q_lora=160, kv_lora=128, nope=96, v_dim=32,
    index_heads=8, index_dim=64, index_topk=32, ffn=256,
)  # fmt: skip
BUDGET = 64 * CONTEXT * 4  # 64 rows a chunk at the full context: several chunks a step


@pytest.fixture(scope="module")
def tiny():
    return stack.Stack(TINY, 2, CPU, torch.float32, seed=0)


@pytest.fixture(scope="module")
def prompt():
    return make_prompt(CONTEXT, TINY.hidden, NEEDLES, CPU, torch.float32, seed=0)


def prefill(tiny, prompt, *, backend="torch-blocked", selection=None, step=STEP, budget=BUDGET, observer=None):
    return tiny.prefill(
        prompt.embeddings, backend, selection, step=step, max_logits_bytes=budget, clock=Clock(CPU), observer=observer
    )


def largest_difference(x, y):
    assert x.shape == y.shape
    return float((x - y).abs().max())


# The paged cache


def test_the_cache_gives_back_what_was_written():
    generator = torch.Generator().manual_seed(1)
    tokens = 3 * BLOCK_TOKENS + 17
    cache = PagedKeys(tokens, 32, CPU, generator)
    assert cache.block_table[0].tolist() != sorted(cache.block_table[0].tolist())
    written = torch.randn(tokens, 32, generator=generator)
    k, scale = quantize_k(written)
    for start, stop in ((0, 5), (5, 150), (150, tokens)):
        cache.write(start, written[start:stop])
    for keys in (1, 64, 65, tokens):
        gathered, scales = cache.gather(keys)
        assert gathered.is_contiguous()
        assert torch.equal(gathered.view(torch.uint8), k[:keys].view(torch.uint8))
        assert torch.equal(scales, scale[:keys])


# The stack


def test_steps_and_chunks_do_not_change_the_result(tiny, prompt):
    """Prefill in one step of one chunk, and in many: the same token, up to the order of float32 sums."""
    whole = prefill(tiny, prompt, step=CONTEXT, budget=2**26)
    assert whole.shape == (TINY.hidden,)
    for step, budget in ((STEP, BUDGET), (71, 33 * CONTEXT * 4)):
        assert largest_difference(prefill(tiny, prompt, step=step, budget=budget), whole) < 1e-3


def test_selections_are_the_top_k_of_the_window(tiny, prompt):
    seen = []
    prefill(tiny, prompt, observer=stack.Observer(seen.append, lambda *_: None))
    assert {scored.layer for scored in seen} == {0}  # the second layer shares the first one's selection
    assert sum(scored.q.shape[0] for scored in seen) == CONTEXT
    assert len(seen) > -(-CONTEXT // STEP)
    for scored in seen:
        rows = torch.arange(scored.first_position, scored.first_position + scored.q.shape[0])
        assert torch.equal(scored.ke - scored.ks, rows.int() + 1)
        logits = fp8_mqa_logits(scored.q, (scored.k, scored.kv_scale), scored.weights, scored.ks, scored.ke)
        inside = torch.arange(logits.shape[1]) < scored.ke[:, None]
        assert torch.equal(scored.logits(torch.arange(len(rows)))[inside], logits[inside])
        for row, position in enumerate(rows.tolist()):
            chosen = scored.selected[row]
            count = min(TINY.index_topk, position + 1)
            kept = chosen[chosen >= 0].long()
            assert len(kept.unique()) == len(kept) == count
            assert int(kept.max()) <= position
            others = logits[row].clone()
            others[kept] = float("-inf")
            assert float(logits[row, kept].min()) >= float(others.max())


def test_attention_over_every_key_is_attention(tiny, prompt):
    """With as many selected keys as there are, the absorbed, gathered form equals plain attention per head."""
    d = TINY
    layer = tiny.layers[0]
    tokens = 24
    generator = torch.Generator().manual_seed(2)
    c = torch.randn(tokens, d.q_lora, generator=generator)
    latents = torch.randn(tokens, d.kv_lora + d.rope, generator=generator)
    position = torch.arange(tokens)
    selected = torch.where(position[None] <= position[:, None], position[None], -1).int()
    selected = selected[:, torch.randperm(tokens, generator=generator)]
    actual = tiny._attend(layer, latents, 0, c, selected)
    q = (c @ layer.w_uq).view(tokens, d.heads, -1)
    q_rope = tiny._rotary(q[..., d.nope :], 0)
    k = torch.einsum("nl,hdl->nhd", latents[:, : d.kv_lora], layer.w_uk)
    scores = torch.einsum("mhd,nhd->hmn", q[..., : d.nope], k) + torch.einsum(
        "mhd,nd->hmn", q_rope, latents[:, d.kv_lora :]
    )
    scores = scores * (d.nope + d.rope) ** -0.5
    scores.masked_fill_(position[None] > position[:, None], float("-inf"))
    v = torch.einsum("nl,hlv->nhv", latents[:, : d.kv_lora], layer.w_uv)
    expected = torch.einsum("hmn,nhv->mhv", scores.softmax(-1), v).flatten(1) @ layer.w_o
    assert largest_difference(actual, expected) < 1e-5
    assert float(expected.std()) > 0.01


def test_rotary_depends_on_the_distance_alone(tiny):
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 64, generator=generator)

    def product(at_q, at_k):
        return float((tiny._rotary(q, at_q) * tiny._rotary(k, at_k)).sum())

    assert product(7, 2) == pytest.approx(product(107, 102), abs=1e-3)
    assert product(7, 2) != pytest.approx(product(7, 7), abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_the_models_fit_one_gpu(model):
    """141 GB of an H200 at 128K tokens, with the layers that are run by default."""
    dims = MODELS[model]
    assert dims.q_lora >= dims.kv_lora
    assert dims.index_topk == 2048
    assert (dims.index_heads, dims.index_dim) in ((32, 128), (64, 128))
    needed = stack.needed_bytes(dims, dims.layers, 131072, 16384, 512 * 2**20, torch.bfloat16)
    assert 2**33 < needed < 40 * 2**30


def test_needed_bytes_counts_the_weights(tiny):
    layer = tiny.layers[0]
    weights = [getattr(layer, name) for name in stack.Layer.__slots__]
    assert TINY.parameters() == sum(w.numel() for w in weights)


# Needles and checks


def checked(tiny, prompt, backend="torch-blocked", selection=None):
    checker = checks.Checker(tiny, prompt, rows=24, seed=0)
    prefill(tiny, prompt, backend=backend, selection=selection, observer=checker.observer())
    return checker.result()


@pytest.mark.parametrize("selection", [stack.TORCH, None, "torch-blocked", stack.FUSED])
def test_needles_are_found_and_answered(tiny, prompt, selection):
    result = checked(tiny, prompt, selection=selection)
    assert (result.needles, result.selected, result.answered) == (NEEDLES, NEEDLES, NEEDLES)
    assert result.overlap_mean == result.overlap_worst == 1.0
    assert result.exact == result.rows >= 24


def test_a_selection_that_is_not_a_top_k_is_counted(monkeypatch, tiny, prompt):
    """Each in one slot of every row: a key twice, a key outside of the window, a worse key, a key left out."""
    select = stack.top_k_per_row
    faults = {
        "twice": lambda out, ke: out[:, 1],
        "outside": lambda out, ke: ke.clamp(max=CONTEXT - 1),
        "worse": lambda out, ke: torch.tensor(
            [min(set(range(end)) - set(row)) for row, end in zip(out.tolist(), ke.tolist(), strict=True)]
        ),
        "left out": lambda out, ke: -1,
    }
    for name, fault in faults.items():

        def wrong(logits, k, ks, ke, fault=fault, **options):
            out = select(logits, k, ks, ke, **options)
            longer = ke > k  # every key of a shorter row is selected
            if bool(longer.any()):
                out[longer, 0] = torch.as_tensor(fault(out[longer], ke[longer]), dtype=torch.int32)
            return out

        monkeypatch.setattr(stack, "top_k_per_row", wrong)
        checker = checks.Checker(tiny, prompt, rows=24, seed=0)
        prefill(tiny, prompt, observer=checker.observer())
        result = checker.result()
        assert result.exact == sum(row < TINY.index_topk for row in checker._rows) < result.rows, name


def test_equal_scores_at_the_cut_count_for_each_other():
    """Scores 3, 2, 2, 1 and k = 2: the best and any of its followers."""
    expected = torch.tensor([[2.0, 3.0, 1.0, 2.0, float("-inf")]]).expand(5, 5)
    selected = torch.tensor([[1, 0], [3, 1], [0, 3], [1, 2], [1, -1]], dtype=torch.int32)
    assert checks._overlaps(expected, selected) == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert checks._overlaps(expected[:1], torch.tensor([[1, 5]])) == [0.5]
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 4, dtype=torch.int32)
    exact = [checks._exact_rows(expected[:1], one[None], ks[:1], ke[:1]) for one in selected]
    assert exact == [1, 1, 0, 0, 0]


def test_needles_lie_before_their_questions(prompt):
    for needle in prompt.needles:
        assert 0 <= needle.key < needle.question < CONTEXT
    assert len({n.key for n in prompt.needles}) == len({n.question for n in prompt.needles}) == NEEDLES
    with pytest.raises(ValueError, match=r"^needles: got 65, expected 1 to 64 in a context of 1024 tokens$"):
        make_prompt(1024, 8, 65, CPU, torch.float32, 0)


def test_a_needle_that_is_not_planted_is_not_found(tiny, prompt):
    """The check can fail: without the contents in the keys' tokens, chance remains."""
    erased = prompt.embeddings.clone()
    for needle in prompt.needles:
        erased[needle.key] = torch.randn(TINY.hidden, generator=torch.Generator().manual_seed(needle.key))
    result = checked(tiny, replace(prompt, embeddings=erased))
    assert result.selected < NEEDLES
    assert result.answered < NEEDLES


def _noisy(problem, call, run):
    run(call)
    inside = call.result.isfinite()
    call.result[inside] += (
        0.5 * call.result[inside].std() * torch.randn(int(inside.sum()), generator=torch.Generator().manual_seed(0))
    )


def test_a_wrong_kernel_lowers_the_overlap(monkeypatch, tiny, prompt):
    install(monkeypatch, FaultyBackend(_noisy))
    result = checked(tiny, prompt, backend="faulty")
    assert result.overlap_mean < 0.95


# A B A B


def plan(tmp_path, **changes):
    values = {
        "dims": TINY, "layers": 2, "contexts": (96, 128), "backends": ("torch-blocked", "torch-blocked"),
        "selections": (stack.TORCH, None),
        "step": 64, "max_logits_bytes": 128 * 128, "repeats": 2, "needles": NEEDLES, "checked_rows": 8, "seed": 0,
        "trace_folder": tmp_path,
    }  # fmt: skip
    return run.Plan(**{**values, **changes})


def test_a_b_a_b(tmp_path, monkeypatch):
    # torch-blocked on this thread alone: the profiler does not see operations of others.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    begun = []
    chosen = plan(tmp_path)
    results = run.run(chosen, CPU, Arch.parse("cpu"), begun.append)
    assert len(begun) == run.steps(chosen)
    timed = [line.split()[:2] for line in begun if line.endswith("timed")]
    assert timed == [[str(c), side] for c in (96, 128) for side in "ABAB"]
    for result in results:
        for side in result.sides:
            assert side.passed
            assert len(side.ttft) == len(side.phases) == 2
            assert set(run.INDEXER) < set(side.phases[0])
            for total, phases in zip(side.ttft, side.phases, strict=True):
                assert 0 < sum(phases.values()) <= total
            assert side.trace is not None
            assert traces.load(side.trace)["aten::bmm"].launches > 0
    assert report.failures(results) == []
    text = report.markdown(chosen, results, {"device": "here"}, "a command")
    assert "| 128 | A | torch-blocked | torch.topk |" in text
    assert "| 128 | B | torch-blocked | policy: torch-blocked |" in text
    assert f"{NEEDLES}/{NEEDLES} | 100.000%, 100.00% | " in text
    assert text.count("| all kernels |") == 2
    paths = report.write(tmp_path, text, chosen, results, {})
    document = json.loads(paths[1].read_text())
    assert [(r["context"], r["side"]) for r in document["runs"]] == [(96, "A"), (96, "B"), (128, "A"), (128, "B")]


def test_what_does_not_fit_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_indexer.e2e.run.no_room", lambda needed, device: "needs more")
    chosen = plan(tmp_path)
    results = run.run(chosen, CPU, Arch.parse("cpu"), lambda _: None)
    assert [result.left_out for result in results] == ["needs more", "needs more"]
    assert report.failures(results) == ["no context could be run"]
    assert "left out: context 128: needs more" in report.markdown(chosen, results, {}, "")


def test_every_context_is_asked_for_its_room(tmp_path, monkeypatch):
    """Also the second, for which the weights are there already."""
    asked = []

    def no_room(needed, device):
        asked.append(needed)
        return "needs more" if len(asked) == 2 else None

    monkeypatch.setattr("lightning_indexer.e2e.run.no_room", no_room)
    chosen = plan(tmp_path, contexts=(128, 96), repeats=1, trace_folder=None)
    first, second = run.run(chosen, CPU, Arch.parse("cpu"), lambda _: None)
    assert [side.label for side in first.sides] == ["A", "B"]
    assert (first.left_out, second.left_out, second.sides) == (None, "needs more", ())
    weights = stack.Stack(TINY, 2, CPU, torch.float32, seed=0).weight_bytes()
    sizes = [stack.needed_bytes(TINY, 2, c, 64, 128 * 128, torch.float32) for c in (128, 96)]
    assert asked == [sizes[0], sizes[1] - weights]
    assert 0 < weights <= 2 * 4 * TINY.parameters()


def test_a_context_that_runs_out_of_memory_is_left_out(tmp_path, monkeypatch):
    """The others keep their results, and the report has both."""
    prefilled = stack.Stack.prefill

    def prefill(self, prompt, *args, **options):
        if prompt.shape[0] == 112:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.\nMore of it")
        return prefilled(self, prompt, *args, **options)

    monkeypatch.setattr(stack.Stack, "prefill", prefill)
    chosen = plan(tmp_path, contexts=(96, 112, 128), repeats=1, trace_folder=None)
    results = run.run(chosen, CPU, Arch.parse("cpu"), lambda _: None)
    assert [len(result.sides) for result in results] == [2, 0, 2]
    reason = "ran out of memory: CUDA out of memory. Tried to allocate 8 GiB."
    assert results[1].left_out == reason
    text = report.markdown(chosen, results, {}, "")
    assert f"left out: context 112: {reason}" in text
    paths = report.write(tmp_path, text, chosen, results, {})
    document = json.loads(paths[1].read_text())
    assert document["left_out"] == {"112": reason}
    assert [r["context"] for r in document["runs"]] == [96, 96, 128, 128]


# A side without a name


def test_the_calls_of_a_layer_are_the_planners(tiny, prompt):
    """What is counted before the run is what is scored in it."""
    seen = []
    prefill(tiny, prompt, observer=stack.Observer(seen.append, lambda *_: None))
    calls = run.problems(TINY, CONTEXT, STEP, BUDGET)
    assert [(s.q.shape[0], s.k.shape[0], *s.q.shape[1:]) for s in seen] == [
        (p.rows, p.keys, p.heads, p.head_dim) for p in calls
    ]
    assert len(calls) > 3


def test_a_side_without_a_name_follows_each_calls_shape(monkeypatch):
    """At H=32 the policy of gfx950 changes with the length of K beside the rows."""
    for backend in dispatch.backends():
        monkeypatch.setattr(type(backend), "missing", lambda self: None)
    calls = run.problems(MODELS["glm-5.2"], 131072, 16384, 512 * 2**20)
    found = run.ran(calls, Arch.parse("gfx950"), None)
    assert set(found) == {"hip-gfx950", "flydsl"}
    assert sum(found.values()) == len(calls)
    assert run.ran(calls, Arch.parse("gfx950"), "flydsl") == {"flydsl": len(calls)}


def test_the_report_says_what_the_policy_ran(tmp_path, monkeypatch):
    asked = []
    scored = stack.fp8_mqa_logits

    def score(*args, clean_logits, backend):
        asked.append(backend)
        return scored(*args, clean_logits=clean_logits, backend=backend)

    monkeypatch.setattr(stack, "fp8_mqa_logits", score)
    chosen = plan(tmp_path, contexts=(96,), backends=("torch-blocked", None), repeats=1, trace_folder=None)
    results = run.run(chosen, CPU, Arch.parse("cpu"), lambda _: None)
    assert set(asked) == {"torch-blocked", None}  # None all through: the library chooses for each call
    text = report.markdown(chosen, results, {}, "")
    calls = len(run.problems(TINY, 96, 64, 128 * 128))
    assert "A = `torch-blocked + torch.topk`, B = `policy + policy`" in text
    assert "| 96 | B | policy: torch-blocked | policy: torch-blocked |" in text
    assert f"B, scoring: the policy's choice; calls of one layer by backend: torch-blocked {calls}" in text
    assert f"B, selection: the policy's choice; calls of one layer by backend: torch-blocked {calls}" in text
    document = json.loads(report.write(tmp_path, text, chosen, results, {})[1].read_text())
    assert [(r["backend"], r["ran"]) for r in document["runs"]] == [
        ("torch-blocked", {"torch-blocked": calls}),
        ("policy", {"torch-blocked": calls}),
    ]
    assert [(r["selection"], r["selection_ran"]) for r in document["runs"]] == [
        ("torch.topk", {"torch.topk": calls}),
        ("policy", {"torch-blocked": calls}),
    ]


# The command


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["e2e", "--device", "cpu", *arguments])


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_indexer.cli.engines.MODELS", {"glm-5.2": TINY})
    monkeypatch.setattr(type(TINY), "small", lambda self: self)
    folder = tmp_path / "r"
    result = invoke(
        "--context", "128", "--repeats", "1", "--needles", "4", "--no-trace", "--rows", "4", "--results", str(folder)
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "A = `policy + torch.topk`, B = `policy + policy`" in result.output
    assert "A and B are both" not in result.output
    assert (folder / "e2e.md").is_file()
    assert json.loads((folder / "e2e.json").read_text())["runs"][0]["selected"] == 4


def test_the_command_where_scoring_selects(tmp_path, monkeypatch):
    """A side without a phase of selection has no ratio of it."""
    monkeypatch.setattr("lightning_indexer.cli.engines.MODELS", {"glm-5.2": TINY})
    monkeypatch.setattr(type(TINY), "small", lambda self: self)
    arguments = ("--context", "128", "--repeats", "1", "--needles", "4", "--no-trace", "--rows", "4")
    result = invoke(*arguments, "--select-a", "policy", "--select-b", "fused", "--results", str(tmp_path))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "e2e.md").read_text()
    assert "indexer A / B" in text
    assert "selection A / B" not in text


def test_sides_that_name_backends_select_alike(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_indexer.cli.engines.MODELS", {"glm-5.2": TINY})
    monkeypatch.setattr(type(TINY), "small", lambda self: self)
    arguments = ("--context", "128", "--repeats", "1", "--needles", "4", "--no-trace", "--rows", "4")
    result = invoke(*arguments, "--a", "torch-blocked", "--results", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "A = `torch-blocked + policy`, B = `policy + policy`" in result.output
    assert "A and B are both torch-blocked + torch-blocked" in result.output
    result = invoke(*arguments, "--select-b", "torch.topk", "--results", str(tmp_path))
    assert "A and B are both torch-blocked + torch.topk" in result.output


def test_the_command_fails_where_a_backend_loses_needles(tmp_path, monkeypatch):
    def silent(problem, call, run):
        run(call)
        call.result[call.result.isfinite()] = 0.0

    install(monkeypatch, FaultyBackend(silent))
    monkeypatch.setattr("lightning_indexer.cli.engines.MODELS", {"glm-5.2": TINY})
    monkeypatch.setattr(type(TINY), "small", lambda self: self)
    arguments = ("--context", "128", "--repeats", "1", "--needles", "4", "--no-trace", "--rows", "4")
    result = invoke(*arguments, "--b", "faulty", "--results", str(tmp_path))
    assert result.exit_code == 1
    assert "FAIL context 128, B faulty, selection policy: torch-blocked: needles" in result.output
    assert "A torch-blocked" not in result.output.split("FAIL")[1]


def test_results_that_cannot_be_written_are_refused_before_the_run(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("it ran"))
    for place in ("file", "file/folder"):
        result = invoke("--context", "1024", "--results", str(tmp_path / place))
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)
        text = " ".join(result.output.replace("│", " ").split())
        assert "Invalid value for --results: cannot write into" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt"), "got 'gpt', expected one of glm-5.2, deepseek-v3.2"),
        (("--size", "huge"), "got 'huge', expected one of full, small"),
        (("--context", "long"), "got 'long', expected positive integers"),
        (("--context", "32"), "got 32 tokens, expected at least 64 for 16 needles"),
        (("--a", "cutlass"), "got 'cutlass', expected one of"),
        (("--a", "torch.topk"), "got 'torch.topk', expected one of"),
        (("--select-a", "torch"), "got 'torch', expected one of"),
        (("--select-b", "cuda-sm90"), "needs sm90 (H100, H200), this is cpu"),
        (("--b", "cuda-sm90"), "needs sm90 (H100, H200), this is cpu"),
        (("--context", "1048576", "--max-logits-mb", "1"), "got 1 MiB, less than one row of 1048576 logits"),
    ],
)
def test_bad_options(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text
