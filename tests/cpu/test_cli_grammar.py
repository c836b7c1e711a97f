"""What holds for every verb: tables in any width, ``--json``, one name an option, lists.

The work of the verbs is replaced where it takes more than a moment; other tests do it.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
import typer

from lightning_indexer.check import device
from lightning_indexer.cli import app as cli
from lightning_indexer.cli import tables
from lightning_indexer.model import cost as model
from verbs import VERBS, WRONG, replace_work, run, words

WIDTHS = (60, 80, 120, None)
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?")


@pytest.fixture(autouse=True)
def _replaced(monkeypatch, tmp_path):
    replace_work(monkeypatch, tmp_path)


def test_every_verb_is_here():
    verbs = set(typer.main.get_command(cli.app).commands)
    assert {verb.split()[0] for verb in VERBS} == verbs
    assert {arguments[0] for arguments, _, _ in WRONG} == verbs


# Tables


@pytest.mark.parametrize("verb", VERBS)
def test_no_number_is_cut_at_any_width(verb):
    whole = run(*words(verb))
    assert whole.exit_code in (0, 1), whole.output
    # Times of this very run differ from run to run.
    numbers = Counter(NUMBER.findall(whole.stdout)) if verb != "demo" else Counter()
    for width in WIDTHS:
        narrow = run(*words(verb), width=width)
        assert narrow.exit_code == whole.exit_code
        missing = numbers - Counter(NUMBER.findall(narrow.stdout))
        assert not missing, f"at {width}: {missing}"
        if width is not None and verb != "disasm":
            for line in narrow.stdout.splitlines():
                # What has to be pasted as it is, and one long name, may be longer.
                whole_line = line.startswith(("FAIL", "repeat the first", "  wrong at", "and "))
                assert len(line) <= width or whole_line or max(map(len, line.split())) > 24, line


def test_tables_of_numbers_become_blocks_where_they_do_not_fit():
    wide, narrow = (run(*words("resources"), width=width).stdout for width in (120, 60))
    assert re.search(r"kernel +VGPR", wide)
    assert re.search(r"^  VGPR +256$", narrow, re.MULTILINE)
    assert "34304" in wide
    assert "34304" in narrow


def test_names_fold_and_text_wraps_between_words():
    table = tables.Table(("name", tables.Column("us", format=".1f"), "note"))
    table.add("fp8_mqa_logits_with_a_long_name_of_a_kernel", 12345.67, "one or two words of which each is short")
    for width in range(44, 120, 3):
        text = table.render(width)
        assert "12345.7" in text
        assert max(map(len, text.splitlines())) <= width
    assert table.records() == [{"name": "fp8_mqa_logits_with_a_long_name_of_a_kernel", "us": 12345.67,
                                "note": "one or two words of which each is short"}]  # fmt: skip
    with pytest.raises(ValueError, match="row: got 1 values, expected 3"):
        table.add("x")


def test_markdown_is_set_anew_only_where_it_does_not_fit():
    text = "# a\n\n| case | us |\n| --- | --- |\n| (4096, 32768) causal | 1034.25 |\n"
    assert tables.markdown(text, 80) == text
    narrow = tables.markdown(text, 26).splitlines()
    assert narrow[0] == "# a"
    assert narrow[4:] == ["(4096, 32768)      1034.25", "causal"]
    assert tables.markdown(text, 20).splitlines()[2:] == ["case (4096, 32768)", "  causal", "  us  1034.25"]


# JSON


@pytest.mark.parametrize("verb", VERBS)
def test_json_is_one_document(verb):
    result = run(*words(verb), "--json")
    document = json.loads(result.stdout)
    assert document
    assert result.exit_code == run(*words(verb)).exit_code


def test_every_verb_has_json():
    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, name


def test_json_keeps_numbers():
    rows = json.loads(run(*words("resources"), "--json").stdout)["kernels"]
    assert (rows[0]["vgpr"], rows[0]["agpr"], rows[0]["vgpr_spills"]) == (256, 64, 22)
    found = json.loads(run(*words("cost"), "--json").stdout)
    launch = next(row for row in found["launches"] if row["published"])
    assert launch["in_order_us"] == pytest.approx(1.2e3 / 0.875)
    assert launch["same_kind"] == "Triton"
    assert found["notes"][-1] == model.EXPLANATION
    assert {(row["device"], row["heads"]) for row in found["launches"]} == {("MI355X", 32)}


# Lists


def test_options_have_one_name_on_all_verbs():
    """A name means one thing, whatever the verb; its plural is the same option."""
    group = typer.main.get_command(cli.app)
    plural = {"--backend", "--window", "--form", "--shape", "--operation", "--length", "--head-dim", "--context"}
    for verb, command in group.commands.items():
        for parameter in command.params:
            names = [option for option in parameter.opts if option.startswith("--")]
            for name in names:
                assert f"{name}s" not in plural or name in plural, (verb, name)
            if getattr(parameter, "multiple", False) and names and names[0] in plural:
                assert names == [names[0], f"{names[0]}s"], (verb, names)


@pytest.mark.parametrize(
    "given", [("--heads", "8,64"), ("--heads", "8", "--heads", "64"), ("--heads", "8", "--heads", "64,8")]
)
def test_lists_take_commas_and_repetition(given, monkeypatch):
    seen = []
    monkeypatch.setattr(device, "run", lambda suite, cases, backends, where: seen.extend(cases) or iter(()))
    run("verify", "--operation", "fp8_mqa_logits", "--backend", "torch-blocked", *given)
    assert {case.heads for case in seen} == {8, 64}


def test_backends_take_commas(monkeypatch):
    seen = []
    monkeypatch.setattr(device, "run", lambda suite, cases, backends, where: seen.append(backends) or iter(()))
    run("verify", "--operation", "fp8_mqa_logits", "--backend", "torch-blocked,triton-portable")
    assert seen == [["torch-blocked", "triton-portable"]]
