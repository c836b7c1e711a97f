"""A command line of every verb, wrong ones too, and stand-ins for the work that takes more than a moment."""

from __future__ import annotations

import gzip
import json
import sys
from types import SimpleNamespace

import torch
from typer.testing import CliRunner

from cdna_sim import Resources
from lightning_indexer.amd import cdna
from lightning_indexer.backends.triton_portable.mqa_logits import MqaLogits as TritonPortable
from lightning_indexer.bench import distributed, mqa_topk, paged, pictures, sweep, timing, top_k
from lightning_indexer.bench.timing import Ceilings
from lightning_indexer.calls import prebuild as builder
from lightning_indexer.check import device, wrong
from lightning_indexer.check.verify import Finding, Outcome
from lightning_indexer.chunking import Request
from lightning_indexer.cli import app as cli
from lightning_indexer.cli import bench as cli_bench
from lightning_indexer.cli import demo
from lightning_indexer.cli import report as cli_report
from lightning_indexer.e2e import decode as e2e_decode
from lightning_indexer.e2e import run as e2e_run
from lightning_indexer.e2e.checks import Checked
from lightning_indexer.model import cost, survey
from lightning_indexer.model import timing as timing_model

CPU = torch.device("cpu")
CEILINGS = Ceilings("fp8", 1281.25, 4239.5)
BENCH = ("--device", "cpu", "--results", "results")

# A command line of each verb, of some with what prints other tables.
VERBS = {
    "info": (),
    "explain": ("--arch", "gfx950", "--shape", "4096x32768"),
    "explain table": ("--table",),
    "plan": ("--request", "32768:4096,0:512,1048576:2048", "--request", "70000:300"),
    "demo": ("--device", "cpu", "--picture", "demo.png"),
    "verify": ("--device", "cpu", "--backend", "torch-blocked"),
    "bench": (*BENCH, "--backend", "torch-blocked", "--shape", "16x64"),
    "bench top_k": (*BENCH, "--operation", "top_k_per_row"),
    "bench paged": (*BENCH, "--operation", "fp8_paged_mqa_logits"),
    "bench one call": (*BENCH, "--operation", "fp8_mqa_topk", "--backend", "torch-blocked"),
    "bench distributed": (*BENCH, "--distributed"),
    "report": ("--device", "cpu", "--output", "report.md"),
    "plot": ("selection.json", "--output", "results"),
    "resources": ("--arch", "gfx942", "--backend", "triton-portable"),
    "cost": ("--backend", "triton-portable", "--heads", "32"),
    "timing": ("--backend", "triton-portable", "--shape", "4096x32768", "--heads", "32,64"),
    "disasm": ("--arch", "gfx942", "--backend", "triton-portable"),
    "prebuild": ("--arch", "sm90", "--backend", "cuda-sm90"),
    "cache": (),
    "scale": ("--ranks", "1,8"),
    "e2e": ("--device", "cpu", "--context", "1024,2048", "--decode", "8", "--results", "results"),
    "trace-diff": ("a.json.gz", "b.json.gz"),
}

# Verb x wrong input: the exit status, and what the message has.
WRONG = [
    (("info", "--nonsense"), 2, "No such option"),
    (("explain", "--arch", "gfx999"), 2, "--arch"),
    (("explain", "--operation", "nothing"), 2, "--operation"),
    (("explain", "--shape", "5"), 2, "expected MxN"),
    (("explain", "--arch", "sm80", "--backend", "cuda-sm90"), 1, ""),
    (("explain", "--arch", "sm90", "--arch", "sm80"), 2, "'--arch': given more than once, and it takes one value"),
    (("plan",), 2, "--request"),
    (("plan", "--request", "5"), 2, "expected CONTEXT:NEW"),
    (("plan", "--request", "9:5", "--max-gather-keys", "3"), 2, "max_gather_keys"),
    (("demo", "--picture", "a.json.gz/x.png"), 2, "cannot write"),
    (("demo", "--device", "tpu"), 2, "--device"),
    (("verify", "--backend", "cuda"), 2, "--backend"),
    (("verify", "--heads", "7"), 2, "no case"),
    (("verify", "--picture", "kernels"), 2, "cannot write"),
    (("verify", "--arch", "sm90"), 2, "--arch"),
    (("bench", "--device", "cpu", "--backend", "cuda-sm90", "--results", "a.json.gz"), 2, "cannot write into"),
    (("bench", "--device", "cpu", "--shape", "16"), 2, "expected MxN"),
    (("bench", "--device", "cpu", "--budget-ms", "nan"), 2, "--budget-ms"),
    (("bench", "--device", "cuda"), 2, "PyTorch sees no GPU here"),
    (("bench", "--operation", "fp8_mqa_topk", "--form", "clean"), 2, "fp8_mqa_topk has no such option"),
    (("bench", "--operation", "top_k_per_row", "--shape", "8x8", "--k", "9999"), 2, "--k"),
    (("bench", "--distributed", "--form", "clean"), 2, "--form"),
    (("bench", "--distributed", "--results", "a.json.gz"), 2, "cannot write into"),
    (("report", "--minutes", "nan"), 2, "--minutes"),
    (("report", "--arch", "sm90"), 2, "--arch"),
    (("report", "--arch", "gfx950", "--device", "cpu"), 2, "takes no --device"),
    (("report", "--device", "cpu", "--output", "a.json.gz/r.md"), 2, "cannot write"),
    (("plot", "none.json"), 2, "none.json"),
    (("plot", "selection.json", "--kind", "nothing"), 2, "--kind"),
    (("plot", "selection.json", "--format", "gif"), 2, "--format"),
    (("plot", "selection.json", "--output", "a.json.gz"), 2, "cannot write into"),
    (("plot", "empty.json"), 1, "nothing to draw"),
    (("resources", "--arch", "gfx942", "--heads", "7"), 2, "H=7"),
    (("resources",), 2, "--arch"),
    (("cost", "--heads", "7"), 2, "nothing was published for H=[7], only for 32, 64"),
    (("cost", "--shape", "999999999999x5"), 2, "got '999999999999x5', expected MxN"),
    (("timing", "--device", "MI999"), 2, "--device"),
    (("timing", "--arch", "gfx942"), 2, "no times were published for gfx942"),
    (("timing", "--shape", "8x8", "--window", "cp"), 2, "causal, multi_req"),
    (("timing", "--picture", "kernels"), 2, "cannot write"),
    (("disasm", "--arch", "gfx942", "--shape", "1"), 2, "expected MxN"),
    (("prebuild", "--arch", "sm90", "--heads", "7"), 2, "nothing for sm90"),
    (("prebuild",), 2, "--arch"),
    (("cache", "--older-than-days", "nan"), 2, "--older-than-days"),
    (("scale", "--heads", "7"), 2, "expected 32 or 64"),
    (("scale", "--way", "nothing"), 2, "--way"),
    (("scale", "--ranks", "0"), 2, "--ranks"),
    (("scale", "--shape", "8"), 2, "expected MxN"),
    (("e2e", "--device", "cpu", "--results", "a.json.gz"), 2, "cannot write into"),
    (("e2e", "--device", "cpu", "--context", "9"), 2, "for 16 needles"),
    (("e2e", "--device", "cpu", "--model", "nothing"), 2, "--model"),
    (("e2e", "--device", "cpu", "--a", "cuda-sm90"), 2, "--a"),
    (("trace-diff", "none.json", "b.json.gz"), 2, "none.json"),
    (("trace-diff", "a.json.gz", "b.json.gz", "--group", "("), 2, "group"),
]  # fmt: skip


def run(*arguments, width=None):
    """Runs the command line in this process, on a terminal of that width or into a pipe."""
    environment = {"COLUMNS": None if width is None else str(width)}
    result = CliRunner().invoke(cli.app, list(arguments), prog_name="lightning-indexer", env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def words(verb):
    """The command line of a key of ``VERBS``."""
    return [verb.split()[0], *VERBS[verb]]


def timed(cls, case, contender, **more):
    return cls(case, contender, median=1234.5678, p20=1200.25, p80=1300.75, host=13.75, extra_bytes=2**31, **more)


def fake_sweep(plan, found, where):
    for case in plan.cases()[:3]:
        for name in (*plan.backends, *(peer.name for peer in found)):
            yield timed(sweep.Row, case, name, positions=10**9, flop=10**13, bytes=10**9, diff=4.9e-8)


def fake_top_k(plan, found, where):
    for case in plan.cases:
        for name in (*plan.backends, *(peer.name for peer in found)):
            yield timed(top_k.Row, case, name, bytes=10**9, floor=140.8, cpu=2.5)


def fake_paged(plan, found, where):
    for case in plan.cases:
        yield timed(paged.Row, case, plan.backends[0], bytes=10**9, flop=10**12, floor=99.5, cpu=2.5)


def fake_one_call(plan, scoring, selecting, where):
    for case in plan.cases:
        for name in mqa_topk.contenders(plan, scoring, selecting):
            yield timed(mqa_topk.Row, case, name, floor=917.25)


def fake_distributed(cases, at, budget_ms):
    for case in cases:
        yield distributed.Row(case, at.ranks, "gather", alone=9876.5, median=1234.5, peak_bytes=2**31)


def fake_verify(suite, cases, backends, where):
    mask = torch.zeros(17, 113, dtype=torch.bool)
    mask[3, 5::7] = True
    collected = wrong.Wrong()
    collected.note(mask)
    positions = collected.positions()
    for number, case in enumerate(cases):
        bad = number % 3 == 0
        finding = Finding(("off by 1.5e-03",) if bad else (), 4.9e-8, 3.2e-4, 1.1e-7, torch.float32,
                          positions if bad else None)  # fmt: skip
        yield Outcome(suite.operation, case, backends[0], "fail" if bad else "pass", "off" if bad else "", finding)


def fake_predict(published, kernels, arch, begins):
    units = {"matrix": 1e-3, "vector": 2e-4, "packed": 1e-5, "scalar": 1e-6, "L1": 1e-6, "LDS": 1e-6, "memory": 1e-4}
    times = {launch: {"triton-portable": cost.Prediction(None, units, 0.875, 1234.5)} for launch in published.times}
    kernel = SimpleNamespace(built=SimpleNamespace(kernel="fp8_mqa_logits_H32_D128_block128_warps4_clean_triton"))
    return survey.Predicted(published, times, [(kernel, None)])


def fake_timing(kernels, arch, device, heads, launches, samples):
    from cdna_sim.timing import Prediction

    stalls = {"vector memory": 0.5, "barrier": 0.1, "matrix unit busy": 0.05}
    for launch in launches:
        for name in kernels:
            for h in heads:
                prediction = Prediction(1234.5, 1e5, 0.021, 0.1, 2, 256, stalls, 0.3, {"address": 0.9, "vector": 0.4})
                yield timing_model.Row(device, name, h, launch, prediction, None, 1717.25)


def fake_e2e(plan, where, arch, progress):
    for context in plan.contexts:
        sides = []
        for label, seconds in zip("AB", (1.25, 1.5), strict=True):
            checked = Checked(plan.needles, plan.needles, plan.needles, 0.99975, 0.9875, 64, 64)
            phases = {"scoring": seconds / 8, "selection": seconds / 16, "attention": seconds / 2}
            sides.append(
                e2e_run.Side(label, None, "torch.topk", checked, {"torch-blocked": 12}, {"torch.topk": 12},
                             [seconds, 1.75 * seconds], [phases, phases], 2**31)
            )  # fmt: skip
        yield e2e_run.Result(context, tuple(sides))


def fake_decode(plan, where, batches, steps, progress):
    for batch in batches:
        found = e2e_decode.Decoded(1024, batch, steps)
        for side in (0, 1):
            found.seconds[side].append(0.0625)
            found.phases[side].append({"scoring": 0.0125})
            found.counts[side].append(steps)
        yield found


def fake_report(parts, seconds):
    verified = {"cases": 12, "failures": [], "summary": [{"count": {"pass": 12}, "diff": {"float32": 4.9e-8}}]}
    bench = {"rows": [{"contender": "torch-blocked", "median_us": 1234.5}]}
    documents = {"verify": verified, "bench": bench, "info": {}}
    return [
        cli_report.Done(part.title, part.shown, "passed", 12.5, documents[part.title.split()[0]], "") for part in parts
    ], False


def replace_work(monkeypatch, folder):
    """Every verb answers at once, in ``folder``; there is no GPU."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(folder / "kernels"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "ceilings", lambda where: CEILINGS)
    monkeypatch.setattr(sweep, "run", fake_sweep)
    monkeypatch.setattr(top_k, "run", fake_top_k)
    monkeypatch.setattr(paged, "run", fake_paged)
    monkeypatch.setattr(mqa_topk, "run", fake_one_call)
    monkeypatch.setattr(distributed, "join", lambda name: distributed.Ranks(0, 8, CPU))
    monkeypatch.setattr(distributed, "run", fake_distributed)
    monkeypatch.setattr(distributed, "leave", lambda: None)
    monkeypatch.setattr(device, "run", fake_verify)
    monkeypatch.setattr(demo, "REQUESTS", (Request(60, 4), Request(0, 50)))
    monkeypatch.setattr(demo, "HEADS", 8)
    monkeypatch.setattr(demo, "NEEDLES", 4)
    monkeypatch.setattr(survey, "predict", fake_predict)
    monkeypatch.setattr(survey, "parts", lambda kernel, problem: ([1.25] * 8, [1234.0] * 3))
    monkeypatch.setattr(timing_model, "rows", fake_timing)
    monkeypatch.setattr(e2e_run, "run", lambda *given: list(fake_e2e(*given)))
    monkeypatch.setattr(e2e_decode, "after", lambda *given: list(fake_decode(*given)))
    monkeypatch.setattr(cli_report, "_run", fake_report)
    monkeypatch.setattr(pictures, "draw", lambda document, kind, source, path: path.write_bytes(b"drawn"))
    monkeypatch.setattr(cdna, "simulator_missing", lambda: None)
    monkeypatch.setattr("lightning_indexer.envs.stop_triton_interpreter", lambda: None)
    built = SimpleNamespace(
        kernel="fp8_mqa_logits_H32_D128_block128_chunk4096_warps4_compressed_bfloat16_triton",
        resources=Resources(256, 64, 48, 34304, 92, 22, 3, 2), compiler="Triton 3.9.0 with LLVM 23.0.0", isa="s_endpgm",
    )  # fmt: skip
    monkeypatch.setattr(TritonPortable, "build", lambda self, problem, arch: built)
    monkeypatch.setattr(builder, "run", lambda batches, jobs: (builder.Prebuilt(b, ("k1", "k2")) for b in batches))
    # What draws is tested elsewhere: `demo` goes without, `bench` and `plot` draw nothing.
    monkeypatch.setattr(cli_bench, "_pictures", lambda *given: [])
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _files(folder)


def _files(folder):
    kernels = folder / "kernels"
    kernels.mkdir()
    (kernels / ("0123456789" * 4 + ".cubin")).write_bytes(b"x" * 3_000_000)
    (kernels / "notes.txt").write_text("mine")
    for name, duration in (("a", 300.25), ("b", 161.5)):
        event = {"ph": "X", "cat": "kernel", "name": f"fp8_mqa_logits_H32_D128_{name}", "pid": 0, "tid": 7, "ts": 0,
                 "dur": duration}  # fmt: skip
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [event] * 3}).encode()))
    row = {"rows": 64, "width": 8192, "k": 2048, "window": "whole", "contender": "torch-blocked", "median_us": 12.5}
    (folder / "selection.json").write_text(json.dumps({"rows": [row]}))
    (folder / "empty.json").write_text('{"rows": []}')
