"""``scripts/vllm_ab.sh`` with a vLLM that is a script: order of the sides, what it measures, what stops it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Serves until it is ended; benches at once. Side B is twice as fast, and its kernel half as long.
VLLM = """#!{python}
import json, os, pathlib, signal, sys, time
arguments = sys.argv[1:]
option = lambda name: arguments[arguments.index(name) + 1]
state = pathlib.Path(os.environ["STATE"])
with (state / "calls").open("a") as calls:
    calls.write(json.dumps(arguments) + chr(10))
if arguments[0] == "serve":
    side_b = os.environ["LIGHTNING_INDEXER_VLLM"] == "1"
    ready = state / "side"

    def end(*_):
        ready.unlink()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    fault = os.environ.get("FAULT", "")
    if side_b and fault != "silent":
        print("vLLM 0.33.0: lightning-indexer replaced vllm.x", flush=True)
    if side_b and fault == "passed on":
        print("vLLM: lightning-indexer passed a call on to vLLM's own function: q is FP4", flush=True)
    if side_b and fault not in ("silent", "passed on"):
        print("vLLM: lightning-indexer took its first call: cuda-sm90", flush=True)
    if fault == "dies":
        sys.exit(3)
    folder = pathlib.Path(json.loads(option("--profiler-config"))["torch_profiler_dir"])
    event = dict(ph="X", cat="kernel", name="b_mqa_logits" if side_b else "a_mqa_logits", dur=50 if side_b else 100)
    if fault != "no trace of " + ("B" if side_b else "A"):
        (folder / "rank0.1.pt.trace.json.gz").write_bytes(__import__("gzip").compress(json.dumps([event]).encode()))
    ready.write_text("B" if side_b else "A")
    time.sleep(60)
else:
    if os.environ.get("FAULT") == "dies":
        time.sleep(2)  # a bench that fails because the server did
    speed = 2 if (state / "side").read_text() == "B" else 1
    path = pathlib.Path(option("--result-dir")) / option("--result-filename")
    path.write_text(json.dumps(dict(total_token_throughput=100.0 * speed, median_ttft_ms=500.0 / speed)))
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """A PATH with that vLLM, and this library as one of its plugins."""
    tools = tmp_path / "bin"
    tools.mkdir()
    executable(tools / "vllm", VLLM.format(python=sys.executable))
    executable(tools / "curl", f"#!/bin/sh\ntest -s {tmp_path}/side\n")
    executable(tools / "lightning-indexer", f'#!/bin/sh\nexec {sys.executable} -m lightning_indexer "$@"\n')
    executable(tools / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    executable(tools / "sleep", "#!/bin/sh\nexec /bin/sleep 0.1\n")
    plugin = tmp_path / "plugin" / "lightning_indexer_double-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-indexer-double\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nlightning_indexer = lightning_indexer:x\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "STATE": str(tmp_path), "PORT": str(port),
        "PYTHONPATH": f"{ROOT / 'src'}:{plugin.parent}",
    }  # fmt: skip


def script(machine, *arguments, **variables):
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "vllm_ab.sh"), *arguments], env={**machine, **variables}, capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
def test_a_b_a_b(machine, tmp_path):
    out = tmp_path / "out"
    result = script(machine, "a/model", str(out), CONCURRENCY="2 4", SERVE_ARGS="--max-model-len 70000")
    assert result.returncode == 0, result.stderr
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    served = [call for call in calls if call[0] == "serve"]
    assert len(served) == 4
    for call in served:
        assert call[1] == "a/model"
        assert {"--no-enable-prefix-caching", "--max-model-len", "70000"} <= set(call)
    measured = [path.name for path in out.glob("*-r*.json")]
    assert sorted(measured) == sorted(f"{side}-r{r}-c{c}.json" for side in "AB" for r in (1, 2) for c in (2, 4))
    assert sum("--profile" in call for call in calls) == 2
    assert "| 2 | 100.0 | 200.0 | +100.0% | 500.0 | 250.0 | -50.0% |" in result.stdout
    assert "| /^(?!.*paged).*mqa_logits/ | 1 | 1 | 0.10 | 0.05 | -50% | 2.00x |" in result.stdout
    assert json.loads((out / "trace-diff.json").read_text())[0]["ratio"] == 2.0


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FAULT": "silent"}, "its log does not say that lightning-indexer replaced anything"),
        ({"FAULT": "passed on"}, "its log does not say that lightning-indexer took a call"),
        ({"FAULT": "passed on"}, "lightning-indexer passed a call on to vLLM's own function: q is FP4"),
        ({"FAULT": "dies"}, "vllm_ab: the server of A ended; see "),
        ({"FAULT": "no trace of A", "TRACE": "1"}, "/traces-A"),
        ({"FAULT": "no trace of B", "TRACE": "1"}, "/traces-B"),
        ({"PYTHONPATH": str(ROOT / "src")}, "lightning-indexer is not installed as a plugin of this vLLM"),
    ],
)
def test_what_stops_it(machine, tmp_path, variables, message):
    if "PYTHONPATH" in variables:
        import importlib.metadata

        if any(e.name == "lightning_indexer" for e in importlib.metadata.entry_points(group="vllm.general_plugins")):
            pytest.skip("this environment has the plugin")
    if variables.get("FAULT") == "dies":
        executable(tmp_path / "bin" / "curl", "#!/bin/sh\nexit 1\n")
    variables = {"TRACE": "0", "ROUNDS": "1", "CONCURRENCY": "2", **variables}
    result = script(machine, "a/model", str(tmp_path / "out"), **variables)
    assert result.returncode == 1
    assert message in result.stderr
    if variables["TRACE"] == "1":
        assert result.stderr.splitlines()[-1] == f"vllm_ab: no trace in {tmp_path}/out{message}"


def test_a_server_that_is_there_already_is_not_measured(machine, tmp_path):
    with socket.create_server(("127.0.0.1", int(machine["PORT"]))):
        result = script(machine, "a/model", str(tmp_path / "out"))
    assert result.returncode == 1
    assert f"something serves on port {machine['PORT']} already" in result.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.slow
def test_a_server_that_ends_while_another_one_answers(machine, tmp_path):
    """Health comes from somewhere else: what was started has to live too."""
    executable(tmp_path / "bin" / "curl", "#!/bin/sh\nexit 0\n")
    result = script(machine, "a/model", str(tmp_path / "out"), TRACE="0", ROUNDS="1", CONCURRENCY="2", FAULT="dies")
    assert result.returncode == 1
    assert "vllm_ab: the server of A ended; see " in result.stderr


def test_usage(machine):
    result = script(machine)
    assert result.returncode == 2
    assert "scripts/vllm_ab.sh MODEL [OUT]" in result.stdout
