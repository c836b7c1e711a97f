"""Decode steps behind a prefill: the same token that a prefill of one more gives, both sides, and the table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import CPU
from lightning_indexer.e2e import decode, stack
from lightning_indexer.e2e.clock import Clock
from lightning_indexer.e2e.dims import MODELS
from lightning_indexer.e2e.prompt import make_prompt
from lightning_indexer.e2e.run import INDEXER, Plan

CONTEXT, BATCH = 200, 3
TINY = replace(
    MODELS["glm-5.2"].small(), name="tiny", hidden=384, heads=6, q_lora=160, kv_lora=128, nope=96, v_dim=32,
    index_heads=8, index_dim=64, index_topk=32, ffn=256,
)  # fmt: skip
PLAN = Plan(
    dims=TINY, layers=2, contexts=(CONTEXT,), backends=(None, "torch-blocked"),
    selections=(stack.TORCH, "torch-blocked"), step=128, max_logits_bytes=2**20, repeats=1, needles=4, checked_rows=4,
    seed=0, trace_folder=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return stack.Stack(TINY, 2, CPU, torch.float32, seed=0)


def test_a_step_is_the_next_row_of_a_prefill(tiny):
    prompt = make_prompt(CONTEXT, TINY.hidden, PLAN.needles, CPU, torch.float32, seed=PLAN.seed).embeddings
    for scoring, selecting in (*zip(PLAN.backends, PLAN.selections, strict=True), (None, stack.FUSED)):
        decoder = decode.Decoder(tiny, PLAN, CONTEXT, BATCH, 4)
        tokens = [prompt]
        for _ in range(2):
            tokens.append(decoder.x[:1].clone())
            found = decoder.step(scoring, selecting, Clock(CPU))
            expected = tiny.prefill(
                torch.cat(tokens), None, None, step=CONTEXT + 8, max_logits_bytes=2**24, clock=Clock(CPU)
            )
            assert float((found[0] - expected).abs().max()) < 1e-3
        # The others went another way, through pages of their own.
        assert float((found[1] - found[0]).abs().max()) > 0.1
        keys = decoder.keys[0]
        assert len(keys.tables.unique()) == keys.tables.numel()


def test_the_run_and_its_table(tiny):
    begun = []
    results = decode.run(PLAN, tiny, (1, BATCH), 5, begun.append)
    assert begun == [f"{CONTEXT} decode, batch 1", f"{CONTEXT} decode, batch {BATCH}"]
    for found in results:
        assert found.left_out is None
        for side in (0, 1):
            assert sum(found.counts[side]) == 5
            assert 0.0 < found.milliseconds(side, "scoring") < found.milliseconds(side, *INDEXER)
            assert found.milliseconds(side, *INDEXER) < found.milliseconds(side)
    found = decode.records([*results, decode.Decoded(CONTEXT, 9, 5, left_out="no room")])
    assert [(row["batch"], row.get("side")) for row in found] == [(b, s) for b in (1, BATCH) for s in "AB"] + [
        (9, None)
    ]
    assert found[0]["step_ms"] == results[0].milliseconds(0)
    assert found[1]["phases_ms"]["scoring"] == results[0].milliseconds(1, "scoring")
    assert found[-1]["left_out"] == "no room"
    text = decode.markdown(PLAN, results)
    assert "A = `policy + torch.topk`, B = `torch-blocked + torch-blocked`" in text
    assert sum(line.startswith(f"| {CONTEXT} ") for line in text.splitlines()) == 4


def test_a_batch_without_room_is_left_out(tiny, monkeypatch):
    monkeypatch.setattr(decode, "no_room", lambda needed, device: f"{needed} bytes")
    (found,) = decode.run(PLAN, tiny, (BATCH,), 5, lambda what: None)
    assert found.left_out == f"{decode.needed_bytes(PLAN, tiny, CONTEXT, BATCH, 5)} bytes"
    assert "left out:" in decode.markdown(PLAN, [found])
