"""The site: every page and every link of it is there, archs and verbs are all listed, examples run."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import lightning_indexer
from faulty import install
from lightning_indexer import Arch
from lightning_indexer.bench import pictures
from lightning_indexer.cli.app import app
from lightning_indexer.e2e.run import INDEXER

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?\)")
# Pages of the site that are made from files elsewhere, see scripts/site_hooks.py.
MADE = {"docs/index.md", "docs/glossary.md", "docs/contributing.md", "docs/changelog.md", "docs/cdna_sim/index.md",
        "docs/cdna_sim/model.md"}  # fmt: skip
SOURCE_OF = {"docs/cdna_sim/model.md": "packages/cdna-sim/docs/model.md", "docs/index.md": "README.md"}


def anchors(path: Path) -> set[str]:
    """The names by which GitHub and the site know the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link, anchor in LINK.findall(page.read_text()):
        target = Path(os.path.normpath(page.parent / link)) if link else page
        name = str(target.relative_to(ROOT))
        if name in MADE:
            target = ROOT / SOURCE_OF.get(name, name.removeprefix("docs/"))
            continue
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor[1:] in anchors(target), f"{page.name}: {link}{anchor}"


def test_pages_of_the_navigation_are_there():
    names = re.findall(r"^ *- (?:\w[\w ]*: )?([\w/\-]+\.md)$", (DOCS / ".nav.yml").read_text(), re.MULTILINE)
    assert len(names) > 15
    missing = [name for name in names if not (DOCS / name).is_file() and f"docs/{name}" not in MADE]
    assert not missing


def test_every_arch_has_its_line():
    text = (DOCS / "hardware.md").read_text()
    for arch in Arch.known():
        assert re.search(rf"^\| {arch.name} \| {re.escape(arch.products)} \|", text, re.MULTILINE), arch


def test_every_verb_has_its_line():
    text = (DOCS / "guide" / "command-line.md").read_text()
    for verb in typer.main.get_command(app).commands:
        assert f"\n| `{verb}` |" in text, verb


def test_the_readme_is_short_and_its_claims_name_their_commands():
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    verbs = typer.main.get_command(app).commands
    named = set(re.findall(r"lightning-indexer ([a-z][\w-]*)", text))
    assert named <= set(verbs)
    assert {"bench", "verify", "report", "explain", "plot"} <= named


@pytest.mark.parametrize("path", sorted((DOCS / "results").glob("*.json")), ids=lambda path: path.name)
def test_recorded_results_have_their_pictures(path):
    document = json.loads(path.read_text())
    facts = document["environment"]
    assert {"commit", "date"} <= set(facts), "of what, and when"
    assert "device" in facts or not {"rows", "runs"} & set(document), "where it was measured"
    for kind in pictures.kinds(document):
        picture = DOCS / "pictures" / f"{path.stem}-{kind}.png"
        assert picture.read_bytes().startswith(b"\x89PNG"), picture


def test_recorded_tables_are_those_of_the_pages():
    """A number that is mended on a page is mended in the picture."""
    pages = {"h200-scores": "kernels/cuda_sm90", "h200-top_k": "kernels/top_k"}
    for name, page in pages.items():
        text, document = (DOCS / f"{page}.md").read_text(), json.loads((DOCS / "results" / f"{name}.json").read_text())
        if document.get("source") != f"docs/{page}.md":
            continue  # a run that was recorded as it was
        for row in document.get("rows", ()):
            assert row["median_us"] is None or f" {row['median_us']} |" in text, row


def test_runs_of_layers_are_those_of_their_page():
    text = (DOCS / "engines.md").read_text()
    for path in (DOCS / "results").glob("h200-e2e-*.json"):
        document = json.loads(path.read_text())
        for run in document["runs"]:
            phases = run["phases_s"][0]
            scoring = phases.get("scoring", phases.get("logits"))
            assert f" {1e3 * run['ttft_s'][0]:.1f} | {1e3 * scoring:.1f} |" in text, run
            indexer = sum(phases.get(name, 0.0) for name in (*INDEXER, "logits", "top-k"))
            assert f" {1e3 * indexer:.1f} | {100 * indexer / run['ttft_s'][0]:.1f}% |" in text, run
        steps = document.get("decode", [])
        for a, b in zip(steps[::2], steps[1::2], strict=True):
            case, times = f"| {a['context']} | {a['batch']} |", f"{a['step_ms']:.3f}, {b['step_ms']:.3f}"
            assert a["batch"] == 8 or f"{case} {times} |" in text, a


def test_options_that_pages_name_are_those_of_their_verbs():
    verbs = typer.main.get_command(app).commands
    for page in [*PAGES, ROOT / "RELEASING.md", ROOT / "Makefile", *(ROOT / ".github").rglob("*.yml")]:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        if page.suffix == ".md":  # a command in prose may go on in the next line
            text = re.sub(r"`[^`\n]+\n[^`\n]+`", lambda match: match[0].replace("\n", " "), text)
        for verb, rest in re.findall(r"lightning[-_]indexer ([a-z][a-z0-9-]*)((?: [^`|;#\n]*)?)", text):
            if verb not in verbs:
                continue
            known = {"-h", "--help", *(o for p in verbs[verb].params for o in (*p.opts, *p.secondary_opts))}
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest))
            assert named <= known, f"{page.name}: {verb} {sorted(named - known)}"


def test_files_that_pages_name_are_there():
    folders = ("src", "packages", "tests", "scripts", "examples", "docs", ".github")
    paths = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    files = {f"/{path.relative_to(ROOT)}" for path in paths}
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        if page.name != "adding-a-backend.md"  # which writes one that is not here
        for name in set(re.findall(r"`([\w./-]+\.(?:py|cuh|hip|h|md|sh|json|toml))`", page.read_text()))
        if not any(file.endswith(f"/{name}") for file in files)
    ]
    assert not missing


LOGS = ("lightning_indexer.transformers",)


def test_names_that_pages_give_are_there():
    for page in PAGES:
        for name in sorted(set(re.findall(r"`((?:lightning_indexer|cdna_sim)(?:\.\w+)+)[`(]", page.read_text()))):
            if name not in LOGS:
                pkgutil.resolve_name(name)  # raises where there is none


def ratios(name: str, ours: str, other: str, case: tuple[str, ...]) -> dict[tuple, float]:
    """Time of the other over ours, by case, as recorded."""
    rows = json.loads((DOCS / "results" / f"{name}.json").read_text())["rows"]
    times = [{tuple(r[c] for c in case): r["median_us"] for r in rows if r["contender"] == of} for of in (ours, other)]
    return {each: times[1][each] / us for each, us in times[0].items() if us and times[1].get(each)}


def test_numbers_of_the_readme_are_recorded():
    text = " ".join((ROOT / "README.md").read_text().split())
    mean = statistics.geometric_mean

    scores = ratios("h200-scores", "cuda-sm90", "deep_gemm", ("window", "heads", "s_q", "s_k", "form"))
    assert f"over {len(scores)} shapes `cuda-sm90` takes 1/{mean(scores.values()):.2f} of DeepGEMM's time" in text
    wins = sum(ratio > 1 for ratio in scores.values())
    assert f"{wins} of {len(scores)} faster, up to {max(scores.values()):.1f}x" in text

    case = ("rows", "width", "k", "window", "ties")
    sglang, flashinfer, topk = (
        ratios("h200-top_k", "cuda-sm90", peer, case) for peer in ("sglang", "flashinfer", "torch.topk")
    )
    assert all(ratio >= 1 for peer in (sglang, flashinfer, topk) for ratio in peer.values())
    assert f"behind no peer on any of {len(sglang)} shapes; geomean {mean(sglang.values()):.2f}x SGLang" in text
    assert f"{mean(flashinfer.values()):.1f}x FlashInfer, {mean(topk.values()):.0f}x `torch.topk`" in text

    decode = ratios("h200-decode", "cuda-sm90", "deep_gemm", ("batch", "next_n", "context", "heads"))
    assert f"{mean(decode.values()):.2f}x DeepGEMM, its schedule kernel not counted, over {len(decode)} shapes" in text
    assert f"geomean; {min(decode.values()):.2f}x to {max(decode.values()):.2f}x" in text

    one = ratios("h200-one-call", "cuda-sm90", "deep_gemm + sglang", ("rows", "keys", "heads"))
    assert f"{min(one.values()):.2f}x to {max(one.values()):.2f}x DeepGEMM and SGLang's top-k" in text
    two = ratios("h200-one-call", "cuda-sm90", "two calls, cuda-sm90", ("rows", "keys", "heads"))
    assert all(ratio > 1 for (_, keys, _), ratio in two.items() if keys >= 65536)
    assert all(0.95 <= ratio <= 1.05 for (_, keys, _), ratio in two.items() if keys == 32768)
    assert min(two.values()) > 0.9, "up to 10% faster"


# Examples


def test_examples_are_short():
    assert len(EXAMPLES) >= 5
    for path in EXAMPLES:
        assert path.read_text().count("\n") <= 60, path.name
        assert path.name in (ROOT / "examples" / "README.md").read_text()


RUNNER = """
import os, runpy, sys
import torch, lightning_indexer, lightning_indexer.calls.mqa_logits
failed = []
for path in sys.argv[1:]:
    child = os.fork()  # each in a process of its own, PyTorch is imported once
    if child == 0:
        runpy.run_path(path, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(path)
sys.exit(", ".join(failed) or 0)
"""


@pytest.mark.slow
def test_examples_run(tmp_path):
    if sys.version_info < (3, 11):
        chosen = [path for path in EXAMPLES if path.name != "debug_in_simulator.py"]  # the decoder needs 3.11
    else:
        chosen = EXAMPLES
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "LIGHTNING_INDEXER_CACHE_DIR": str(tmp_path / "kernels"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", RUNNER, *map(str, chosen)], cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "170 queries have their keys" in done.stdout


def test_the_backend_of_the_examples_is_right(monkeypatch):
    """By the sweep, whose scales are negative too."""
    example = runpy.run_path(str(ROOT / "examples" / "new_backend.py"), run_name="new_backend")
    name = install(monkeypatch, example["RowByRow"]())
    only = ("--operation", "fp8_mqa_logits", "--heads", "32", "--head-dim", "64")
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", "--backend", name, *only, "--json"])
    assert json.loads(done.stdout)["summary"][0]["count"]["pass"] > 50
    assert done.exit_code == 0, done.output


def test_calls_of_the_reference_are_public():
    assert lightning_indexer.__all__
    for name in lightning_indexer.__all__:
        assert getattr(lightning_indexer, name).__doc__ or name == "__version__", name


# The project


def test_the_address_is_the_same_everywhere():
    [address] = re.findall(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"repo_url: {address}\n" in (ROOT / "mkdocs.yml").read_text()
    others = [*PAGES, ROOT / "SECURITY.md", ROOT / ".github/ISSUE_TEMPLATE/config.yml", ROOT / "pyproject.toml"]
    for path in others:
        for found in re.findall(r"https://github\.com/[\w-]+/lightning-indexer\b", path.read_text()):
            assert found == address, path


def test_pythons_of_the_metadata_are_those_of_ci():
    text = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    tested = re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/cpu.yml").read_text())
    assert named == re.findall(r'"(.*?)"', tested[1]) == ["3.10", "3.11", "3.12", "3.13"]


def test_the_sdist_has_what_it_names():
    included = re.search(
        r"tool.hatch.build.targets.sdist\]\ninclude = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    for name in re.findall(r'"(.*?)"', included[1]):
        assert (ROOT / name).exists(), name


def test_versions_that_make_installs_are_pinned():
    """What an extra of the project names has a line in constraints.txt."""
    pinned = {line.split("=")[0].split(">")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    for name in ("mkdocs", "mkdocs-material", "mkdocstrings", "mkdocs-awesome-nav", "build", "twine", "hatchling"):
        assert name in pinned, name
