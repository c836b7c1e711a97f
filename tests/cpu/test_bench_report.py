"""``bench``: summaries, reports, files and pictures of a run."""

from __future__ import annotations

import csv
import json
import math

import pytest

from lightning_indexer.bench import plots, report
from lightning_indexer.bench.report import Summary
from lightning_indexer.bench.sweep import Row
from lightning_indexer.bench.timing import Ceilings
from lightning_indexer.check.cases import Case

CEILINGS = Ceilings("float32", 0.5, 20.0)
PNG = b"\x89PNG\r\n\x1a\n"


def row_of(contender, median, window="causal", form="clean", heads=64, s_q=1024, diff=1e-7, note="") -> Row:
    """A row of a report, made by hand."""
    case = Case(s_q, 4096, heads, 128, window, form)
    work = {"positions": 1000, "flop": 16_384_000, "bytes": 500_000}
    if median is None:
        return Row(case, contender, **work, diff=diff, note=note)
    return Row(case, contender, **work, median=median, p20=0.9 * median, p80=1.2 * median, host=3.0,
               extra_bytes=2**21, diff=diff)  # fmt: skip


ROWS = [
    row_of("ours", 10.0), row_of("theirs", 20.0),
    row_of("ours", 20.0, form="noclean"), row_of("theirs", 10.0, form="noclean"),
    row_of("ours", 40.0, window="multi_req"), row_of("theirs", 160.0, window="multi_req"),
    row_of("ours", 5.0, form="compressed"), row_of("theirs", None, form="compressed", diff=None, note="no such form"),
    row_of("ours", None, s_q=7, diff=math.nan, note="WRONG: -inf mask differs"), row_of("theirs", 8.0, s_q=7),
]  # fmt: skip


# The summary


def test_speedups_pair_the_rows_of_one_case():
    pairs = report.speedups(ROWS, "ours", "theirs")
    assert [(row.case, ratio) for row, ratio in pairs] == [
        (ROWS[0].case, 2.0), (ROWS[2].case, 0.5), (ROWS[4].case, 4.0)
    ]  # fmt: skip
    assert [ratio for _, ratio in report.speedups(ROWS, "theirs", "ours")] == [0.5, 2.0, 0.25]


def test_summary_of_every_group():
    groups = {summary.group: summary for summary in report.summarise(ROWS, ["ours"], report.GROUPS)}
    assert set(groups) == {"causal", "multi_req", "clean_logits=True", "clean_logits=False", "all"}
    assert all((summary.subject, summary.other) == ("ours", "theirs") for summary in groups.values())
    found = {name: (s.cases, s.geomean, s.low, s.high, s.wins) for name, s in groups.items()}
    assert found["all"] == (3, pytest.approx(4 ** (1 / 3)), 0.5, 4.0, 2)
    assert found["causal"] == (2, pytest.approx(1.0), 0.5, 2.0, 1)
    assert found["multi_req"] == (1, pytest.approx(4.0), 4.0, 4.0, 1)
    assert found["clean_logits=True"] == (2, pytest.approx(8**0.5), 2.0, 4.0, 2)
    assert found["clean_logits=False"] == (1, pytest.approx(0.5), 0.5, 0.5, 0)


def test_equal_times_are_no_win():
    [summary] = [
        s for s in report.summarise([row_of("a", 3.0), row_of("b", 3.0)], ["a"], report.GROUPS) if s.group == "all"
    ]
    assert (summary.geomean, summary.wins) == (1.0, 0)


def test_compressed_logits_are_a_group_of_their_own():
    summaries = report.summarise(
        [row_of("a", 3.0, form="compressed"), row_of("b", 6.0, form="compressed")], ["a"], report.GROUPS
    )
    assert {summary.group for summary in summaries} == {"causal", "compressed", "all"}


def test_two_backends_are_compared_once():
    rows = [row_of(name, 1.0) for name in ("a", "b", "peer")]
    pairs = {(summary.subject, summary.other) for summary in report.summarise(rows, ["a", "b"], report.GROUPS)}
    assert pairs == {("a", "b"), ("a", "peer"), ("b", "peer")}


# The report


FACTS = {"device": "a device", "arch": "sm90", "commit": "0123456789ab"}
COLUMNS = ["window", "form", "H", "s_q", "s_k", "contender", "us", "p20-p80", "host us", "TFLOP/s", "GB/s",
           "of float32", "of copy", "extra MiB", "calc_diff"]  # fmt: skip


def tables_of(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a text, as rows of cells, without the rule."""
    tables: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif tables[-1]:
            tables.append([])
    return [table[:1] + table[2:] for table in tables if table]


def markdown(facts=FACTS) -> str:
    summaries = report.summarise(ROWS, ["ours"], report.GROUPS)
    return report.markdown(ROWS, summaries, CEILINGS, facts, ["theirs: a note"], "lightning-indexer bench --heads 64")


def test_markdown_has_every_column_and_row():
    measurements, summary = tables_of(markdown())
    assert measurements[0] == COLUMNS
    assert len(measurements) == 1 + len(ROWS)
    assert all(len(cells) == len(COLUMNS) for cells in measurements)
    # 16.384e6 FLOP in 10 us are 1.638 TFLOP/s, 3.3 times the ceiling; 500 kB are 50 GB/s.
    assert measurements[1] == ["causal", "clean", "64", "1024", "4096", "ours", "10.0", "9.0-12.0", "3", "1.638", "50",
                               "328%", "250%", "2", "1.0e-07"]  # fmt: skip
    assert measurements[8][5:8] == ["theirs", "no such form", ""]
    assert measurements[9][5:8] == ["ours", "WRONG: -inf mask differs", ""]
    assert summary[0] == ["first", "against", "group", "cases", "geomean", "range", "wins"]
    assert summary[-1] == ["ours", "theirs", "all", "3", "1.59x", "0.50x - 4.00x", "2 / 3"]


def test_markdown_says_where_it_comes_from():
    text = markdown()
    for name, value in FACTS.items():
        assert f"- {name}: {value}" in text
    assert "float32 matrix product 0.5 TFLOP/s, copy 20 GB/s" in text
    assert "- theirs: a note" in text
    assert "L2 flushed" in text
    assert "Repeat with: `lightning-indexer bench --heads 64`" in text


def test_markdown_of_a_cpu_run_claims_no_flush_and_no_host_time():
    text = markdown({**FACTS, "arch": "cpu"})
    assert "L2" not in text
    [first, *_] = tables_of(text)
    assert {cells[COLUMNS.index("host us")] for cells in first[1:]} == {""}


def test_markdown_without_opponents_has_one_table():
    text = report.markdown(ROWS[:1], [], CEILINGS, FACTS, [], "bench")
    assert len(tables_of(text)) == 1
    assert "Speedup" not in text


def expected_record(row: Row) -> dict[str, object]:
    return {
        "window": row.case.window, "form": row.case.form, "heads": row.case.heads, "head_dim": row.case.head_dim,
        "s_q": row.case.s_q, "s_k": row.case.s_k, "contender": row.contender, "median_us": row.median,
        "p20_us": row.p20, "p80_us": row.p80, "host_us": row.host, "tflops": row.tflops, "gbs": row.gbs,
        "extra_bytes": row.extra_bytes, "positions": row.positions, "flop": row.flop, "bytes": row.bytes,
        "calc_diff": None if row.diff is None or math.isnan(row.diff) else row.diff, "note": row.note,
    }  # fmt: skip


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_files_hold_the_numbers(tmp_path):
    folder = tmp_path / "new" / "folder"
    summaries = report.summarise(ROWS, ["ours"], report.GROUPS)
    paths = report.write(folder, markdown(), ROWS, summaries, CEILINGS, FACTS)
    assert [path.name for path in paths] == ["bench.md", "bench.csv", "bench.json"]
    assert paths[0].read_text() == markdown()

    expected = [expected_record(row) for row in ROWS]
    with paths[1].open(newline="") as file:
        from_csv = list(csv.DictReader(file))
    assert from_csv == [{name: "" if v is None else str(v) for name, v in record.items()} for record in expected]

    document = json.loads(paths[2].read_text(), parse_constant=no_constant)
    assert document["rows"] == expected
    assert document["environment"] == FACTS
    assert document["ceilings"] == {"product": "float32", "product_tflops": 0.5, "copy_gbs": 20.0}
    assert [Summary(**summary) for summary in document["summary"]] == summaries


def test_files_of_a_run_without_rows(tmp_path):
    paths = report.write(tmp_path, "nothing\n", [], [], CEILINGS, FACTS)
    assert paths[1].read_text().strip() == ""
    assert json.loads(paths[2].read_text())["rows"] == []


# Pictures


@pytest.fixture
def figures(monkeypatch):
    """The figures that would have been saved."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: saved.append(self))
    return saved


@pytest.mark.slow
def test_pictures_are_written(tmp_path):
    plots.roofline(ROWS, CEILINGS, "title", tmp_path / "roofline.png")
    assert plots.speedup_bars(ROWS, "ours", ["theirs"], "title", tmp_path / "speedup.png")
    for name in ("roofline.png", "speedup.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_nothing_to_compare_leaves_no_picture(tmp_path):
    path = tmp_path / "speedup.png"
    assert not plots.speedup_bars(ROWS, "ours", ["nobody"], "title", path)
    assert not path.exists()


def test_roofline_shows_every_measurement_and_contender(figures, tmp_path):
    contenders = [f"contender {index}" for index in range(len(plots._COLOURS) + 2)]
    rows = [row_of(name, 10.0 * (1 + index)) for index, name in enumerate(contenders)]
    plots.roofline([*rows, *ROWS], CEILINGS, "title", tmp_path / "roofline.png")
    [axes] = figures[0].axes
    assert axes.get_legend_handles_labels()[1] == [*contenders, "ours", "theirs"]
    points = [tuple(point) for drawn in axes.collections for point in drawn.get_offsets().tolist()]
    assert sorted(points) == sorted((row.flop / row.bytes, row.tflops) for row in [*rows, *ROWS] if row.median)


def test_roofline_is_the_lower_of_the_two_ceilings(figures, tmp_path):
    plots.roofline(ROWS, CEILINGS, "title", tmp_path / "roofline.png")
    [line] = figures[0].axes[0].lines
    for intensity, height in zip(*line.get_data(), strict=True):
        assert height == pytest.approx(min(0.5, intensity * 20.0 / 1e3))
    assert len(set(line.get_data()[1])) == 2, "the slope, the ridge and the flat part"


def test_roofline_without_measurements(tmp_path):
    path = tmp_path / "roofline.png"
    plots.roofline([row_of("ours", None)], CEILINGS, "title", path)
    assert path.read_bytes().startswith(PNG)


def test_bars_are_the_speedups(figures, tmp_path):
    assert plots.speedup_bars(ROWS, "ours", ["theirs", "nobody"], "title", tmp_path / "speedup.png")
    [axes] = figures[0].axes
    assert [bar.get_width() for bar in axes.patches] == [2.0, 0.5, 4.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(ROWS[index].case) for index in (0, 2, 4)]
