"""``plot``: pictures of what was recorded."""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lightning_indexer.bench import pictures
from lightning_indexer.cli import app as cli
from lightning_indexer.e2e.run import INDEXER

FACTS = {"device": "a device", "torch": "2.13", "commit": "0badcafe", "date": "2026-01-02"}


def scores(extra: int | None = None) -> dict:
    rows = [
        {"window": "causal", "form": "compressed", "heads": heads, "head_dim": 128, "s_q": 128, "s_k": s_k,
         "contender": name, "median_us": us, "extra_bytes": extra}
        for heads in (32, 64) for s_k in (1024, 4096) for name, us in (("ours", 10.0), ("deep_gemm", 20.0))
    ]  # fmt: skip
    return {"environment": FACTS, "rows": rows}


DOCUMENTS = {
    "scores": scores(),
    "memory": scores(2**20),
    "selection": {"environment": FACTS, "rows": [
        {"rows": 4, "width": 8, "k": 2, "window": "whole", "ties": False, "contender": "ours", "median_us": 5.0,
         "floor_us": 4.0}]},
    "decode": {"environment": FACTS, "ceilings": {"copy_gbs": 4000.0}, "rows": [
        {"batch": 4, "next_n": 1, "context": 8, "heads": 32, "contender": "ours", "median_us": 5.0, "gbs": 3000.0}]},
    "one-call": {"environment": FACTS, "rows": [
        {"rows": 4, "keys": 8, "heads": 32, "k": 2, "window": "causal", "contender": name, "alone_us": 4.0,
         "median_us": us, "extra_bytes": None} for name, us in (("ours", 5.0), ("two calls, ours", 6.0))]},
    "one-call memory": {"environment": FACTS, "rows": [
        {"rows": 4, "keys": keys, "heads": 32, "k": 2, "window": "causal", "contender": "ours", "alone_us": 4.0,
         "median_us": 5.0, "extra_bytes": 2**20} for keys in (8, 16)]},
    "model": {"kind": "model", "launches": [
        {"device": "MI355X", "heads": 32, "rows": 4, "keys": 8, "window": "causal", "backend": "ours",
         "in_order_us": 5.0, "published": {"Triton": 6.0}, "published_unit": "us", "same_kind": "Triton"}]},
    "phases": {"environment": FACTS, "runs": [
        {"context": 8, "side": "A", "backend": "x", "selection": "y", "ttft_s": [3.0, 4.0, 5.0],
         "phases_s": [{"scoring": 1.0, "ffn": 2.0}, {"scoring": 3.0}, {"scoring": 2.0}]},
        {"context": 8, "side": "earlier", "backend": "x", "ttft_s": [1.0], "phases_s": [{"logits": 1.0}]}]},
    "support": {"environment": FACTS, "problem": "a problem", "archs": {
        "cpu": {"ours": None, "theirs": "needs sm90, not cpu"}, "sm90": {"ours": None, "theirs": None}}},
    "chunks": {"environment": FACTS, "compress_ratio": 4, "chunks": [
        {"chunk": 0, "rows": 3, "keys": 40, "logits_mib": 1.0, "gather": "yes", "slices": [
            {"request": 0, "context": 155, "row_start": 2, "row_stop": 5, "key_start": 0, "keys": 40}]},
        {"chunk": 1, "rows": 2, "keys": 9, "logits_mib": 1.0, "gather": "reuse", "slices": [
            {"request": 1, "context": 34, "row_start": 0, "row_stop": 2, "key_start": 0, "keys": 9}]}]},
    "wrong": {"environment": FACTS, "failures": [
        {"backend": "ours", "case": "a case", "wrong": {
            "shape": [2, 3], "count": 1, "first": [[1, 2]], "map": ["...", "..#"]}},
        {"backend": "ours", "case": "another", "wrong": None}]},
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_gives(name):
    wanted = {"memory": ["scores", "memory"], "one-call memory": ["one-call", "memory"]}
    assert pictures.kinds(DOCUMENTS[name]) == wanted.get(name, [name])


@pytest.mark.slow
def test_every_kind_is_drawn_and_says_where_it_is_from(tmp_path):
    pytest.importorskip("matplotlib")
    paths = []
    for kind, document in DOCUMENTS.items():
        paths.append(tmp_path / f"{kind}.json")
        paths[-1].write_text(json.dumps(document))
    folder = tmp_path / "pictures"
    result = CliRunner().invoke(
        cli.app, ["plot", *map(str, paths), "--output", str(folder), "--format", "svg", "--json"]
    )
    assert result.exit_code == 0, result.output
    said = {}
    for document, path in zip(DOCUMENTS.values(), paths, strict=True):
        for kind in pictures.kinds(document):
            picture = folder / f"{path.stem}-{kind}.svg"
            assert str(picture) in json.loads(result.stdout)["wrote"][str(path)]
            said[picture.stem] = " ".join(re.findall(r"<!-- (.*?) -->", picture.read_text()))
            if "environment" in document:
                assert "a device · torch 2.13 · commit 0badcafe · date 2026-01-02" in said[picture.stem]
            assert path.name in said[picture.stem]
    assert said["scores-scores"].count("2.00x") == 4
    assert "1.50x" in said["one-call-one-call"]
    assert "8 earlier: x + torch.topk" in said["phases-phases"], "the first files name no selection"
    assert "needs sm90, not another" in said["support-support"]
    assert "keys still there" in said["chunks-chunks"]
    assert "ours a case: 1 wrong" in said["wrong-wrong"]


@pytest.mark.slow
def test_the_phases_of_a_prefill_have_a_colour_each():
    pytest.importorskip("matplotlib")
    phases = ("projections", *INDEXER, "attention", "ffn")
    run = {"context": 8, "side": "A", "backend": "x", "selection": "y", "phases_s": [dict.fromkeys(phases, 1.0)]}
    [axes] = pictures._phases({"runs": [run]}).axes
    assert len({patch.get_facecolor() for patch in axes.patches}) == len(axes.patches) == len(phases)


def test_the_parts_of_a_report_are_drawn_one_by_one():
    report = {"kind": "lightning-indexer-report", "environment": FACTS, "parts": [
        {"title": "bench fp8_mqa_logits", "document": scores()}, {"title": "bench x", "document": None},
        {"title": "info", "document": {}}]}  # fmt: skip
    parts = pictures.parts(report)
    assert list(parts) == ["-bench-fp8_mqa_logits"]
    assert pictures.kinds(parts["-bench-fp8_mqa_logits"]) == ["scores"]


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("[1]", 2, "got a list"),
        ("{", 2, "is no JSON"),
        ('{"rows": []}', 1, "nothing to draw"),
        (None, 2, "No such file"),
    ],
)
def test_what_cannot_be_drawn(text, status, message, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace())
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    result = CliRunner().invoke(cli.app, ["plot", str(path), "--output", str(tmp_path / "out")])
    assert result.exit_code == status
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_page_without_a_document(tmp_path):
    path = tmp_path / "r.md"
    path.write_text("no block")
    with pytest.raises(ValueError, match="has no JSON block"):
        pictures.load(path)
