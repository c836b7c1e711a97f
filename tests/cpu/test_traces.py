"""Sums of kernel traces, and two of them side by side, on small traces written by hand."""

from __future__ import annotations

import gzip
import json

import pytest
from typer.testing import CliRunner

from lightning_indexer.cli import app as cli
from lightning_indexer.e2e import traces
from lightning_indexer.e2e.traces import Sum, TraceError

OURS = "fp8_mqa_logits_H32_D128_m64n256"
THEIRS = "_gluon_fp8_mqa_logits_kernel"


def event(name, duration, *, start=0.0, category="kernel", thread=7, **more):
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": start, "dur": duration, **more}


def write(path, events, *, wrapped=True):
    text = json.dumps({"traceEvents": events} if wrapped else events).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.fixture
def pair(tmp_path):
    a = [
        event(THEIRS, 300.0), event(THEIRS, 100.0), event("gemm", 50.0),
        event("copy", 5.0, category="gpu_memcpy"), event("aten::mm", 999.0, category="cpu_op"),
        {"ph": "M", "name": "process_name"}, {"ph": "i", "cat": "kernel", "name": "mark"},
    ]  # fmt: skip
    b = [event(OURS, 160.0), event("gemm", 60.0), event("gemm", 1.0), event("copy", 5.0, category="gpu_memcpy")]
    return write(tmp_path / "a.json.gz", a), write(tmp_path / "b.json", b, wrapped=False)


def test_kernels_are_summed_by_name(pair):
    assert traces.load(pair[0]) == {THEIRS: Sum(2, 400.0), "gemm": Sum(1, 50.0), "copy": Sum(1, 5.0)}
    assert traces.load(pair[1]) == {OURS: Sum(1, 160.0), "gemm": Sum(2, 61.0), "copy": Sum(1, 5.0)}


def test_a_trace_of_a_cpu_counts_each_operator_without_what_it_called(tmp_path):
    events = [
        event("aten::linear", 10.0, start=0.0, category="cpu_op"),
        event("aten::mm", 6.0, start=1.0, category="cpu_op"),
        event("aten::empty", 1.0, start=2.0, category="cpu_op"),
        event("aten::empty", 2.0, start=8.0, category="cpu_op"),
        event("aten::mm", 4.0, start=10.0, category="cpu_op"),
        event("aten::mm", 5.0, start=0.5, category="cpu_op", thread=8),
    ]
    assert traces.load(write(tmp_path / "t.json", events)) == {
        "aten::linear": Sum(1, 2.0),
        "aten::mm": Sum(3, 14.0),
        "aten::empty": Sum(2, 3.0),
    }


def test_the_difference(pair):
    found = traces.diff(*map(traces.load, pair))
    assert [row.name for row in found.rows] == [THEIRS, OURS, "gemm", "copy"]
    (group,) = found.groups
    assert (group.a, group.b) == (Sum(2, 400.0), Sum(1, 160.0))
    assert group.ratio == 2.5
    assert group.change == pytest.approx(-0.6)
    assert (found.total.a, found.total.b) == (Sum(4, 455.0), Sum(4, 226.0))
    assert found.rows[0].ratio is None
    assert found.rows[1].change is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read as a trace"),
        (b"\x1f\x8b\x00", "cannot be read as a trace"),
        (b'{"events": []}', "got no list of events, expected a trace in Chrome's format"),
        (b'{"traceEvents": []}', "holds neither kernels of a GPU nor operators of a CPU"),
        (None, "cannot be read as a trace"),
    ],
)
def test_what_is_not_a_trace(tmp_path, content, message):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=f"^{path}: {message}"):
        traces.load(path)


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        (OURS, True),
        (THEIRS, True),
        ("void deep_gemm::sm90_fp8_mqa_logits<32u, 128u>(unsigned int)", True),
        ("void deep_gemm::sm90_fp8_paged_mqa_logits<1u, 32u>(unsigned int)", False),
        ("void deep_gemm::smxx_paged_mqa_logits_metadata<32u>(unsigned int)", False),
        ("_gluon_deepgemm_fp8_paged_mqa_logits_preshuffle", False),
        ("persistent_topk", False),
    ],
)
def test_the_default_group_is_prefill_alone(name, scores):
    """Paged kernels score for decode, which neither side changes."""
    (group,) = traces.diff({name: Sum(1, 2.0)}, {}).groups
    assert (group.a.launches == 1) is scores


# The command


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["trace-diff", *map(str, arguments)])


def test_the_command(pair):
    result = invoke(*pair)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "| /^(?!.*paged).*mqa_logits/ | 2 | 1 | 0.40 | 0.16 | -60% | 2.50x |" in lines
    assert f"| {THEIRS} | 2 | 0 | 0.40 | 0.00 | -100% | - |" in lines
    assert "| all kernels | 4 | 4 | 0.46 | 0.23 | -50% | 2.01x |" in lines
    records = json.loads(invoke(*pair, "--json").stdout)
    assert [record["kind"] for record in records] == ["group", *["kernel"] * 4, "total"]
    assert records[0]["ratio"] == 2.5


def test_groups_and_the_length_of_the_list(pair):
    result = invoke(*pair, "--group", "gem+", "--group", "nothing", "--top", "1")
    assert "| /gem+/ | 1 | 2 | 0.05 | 0.06 | +22% | 0.82x |" in result.output
    assert "no kernel of either trace has a name with 'nothing'" in result.output
    assert (
        sum(line.startswith("| ") for line in result.output.splitlines()) == 5
    )  # header, rule, group, one kernel, all


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("missing.json",), "missing.json: cannot be read as a trace"), (("--group", "("), "is not a regular expression")],
)
def test_bad_arguments(pair, arguments, message):
    paths = pair if arguments[0] == "--group" else (pair[0],)
    result = invoke(*paths, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
