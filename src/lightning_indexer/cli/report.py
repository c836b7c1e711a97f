"""``lightning-indexer report``: everything that this project wants to know of a machine, in one file.

Each part is a command of this command line in a process of its own: a kernel that crashes or hangs costs its own part,
not the others. A part whose time is up is interrupted, and gives what it has until then; what it leaves of its share
goes to those behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lightning_indexer import envs
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.cli import bench, common
from lightning_indexer.cli.common import DeviceOption, JsonOption, err
from lightning_indexer.problems.mqa_logits import OPERATION

FORMAT = 1
# What a part may take beyond its time: to end its running case, and to write what it has.
GRACE = 30.0
# The least that a part gets, seconds: PyTorch is imported and a kernel compiled. Without half of it, it is not begun.
LEAST = 20.0
# Of the sweep, what a CPU does in a minute.
CPU_SHAPES = {
    "fp8_mqa_logits": ("--shape", "256x4096", "--heads", "32"),
    "fp8_paged_mqa_logits": ("--shape", "4x1x8192", "--heads", "32"),
    "top_k_per_row": ("--shape", "64x8192"),
    "fp8_mqa_topk": ("--shape", "64x4096", "--heads", "32"),
}
STATUSES = {0: "passed", 1: "failed", 130: "stopped, its time was up"}
NOT_RUN = "not run, no time was left"
NO_RESULT = "stopped before its first result"
# No verdict on what was to run.
OUT_OF_TIME = (STATUSES[130], NO_RESULT, NOT_RUN)


@dataclass(frozen=True, slots=True)
class Part:
    """One command; ``weight`` is its share of the time."""

    title: str
    arguments: tuple[str, ...]
    weight: float

    @property
    def shown(self) -> str:
        """The command, without the folder of this machine that its results go to."""
        return shlex.join(["lightning-indexer", *self.arguments]).split(" --results ")[0]


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a part. ``document`` is what its ``--json`` printed, None where it printed none."""

    title: str
    command: str
    status: str
    seconds: float
    document: Any
    error: str


def report(
    device: DeviceOption = None,
    arch: Annotated[
        str | None, typer.Option(help=f"{common.SIMULATED_ARCHS}: of that arch in the simulator; nothing is timed.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="About how long it may take.")] = 9.0,
    output: Annotated[Path | None, typer.Option(help="The file. Default: lightning-indexer-ARCH-DATE.md.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify every backend, time the sweep beside the peers that are here, and write one file to attach to an issue.

    It holds hardware, versions and commit, and no names of users, hosts or folders. Exit status 1 where a part failed,
    not where its time was up; 130 where it was stopped: the file has the parts until then.

    Examples: `lightning-indexer report`, `lightning-indexer report --device cuda --minutes 5`,
    `lightning-indexer report --arch gfx950 --minutes 2 --output gfx950.md`
    """
    common.number("--minutes", minutes, 0.0)
    if arch is not None and device is not None:
        raise typer.BadParameter("the simulator takes no --device", param_hint="--arch")
    where = torch.device("cpu") if arch is not None else common.device(device)
    target = common.simulated_arch(arch) if arch is not None else arch_of(where)
    facts = _facts(where, target, simulated=arch is not None)
    path = output or Path(f"lightning-indexer-{target.name}-{facts['date']}.md")
    common.writable_file("--output", path)
    with tempfile.TemporaryDirectory(prefix="lightning-indexer-report-") as folder:
        parts = _simulated(target) if arch is not None else _on_device(where, Path(folder))
        done, stopped = _run(parts, 60 * minutes)
        document = {"kind": "lightning-indexer-report", "format": FORMAT, "environment": facts,
                    "parts": [asdict(each) for each in done]}  # fmt: skip
        text = markdown(facts, done, _reports(Path(folder)))
    path.write_text(f"{text}\n<details><summary>Everything, as JSON</summary>\n\n```json\n"
                    f"{json.dumps(document, allow_nan=False)}\n```\n\n</details>\n")  # fmt: skip
    if as_json:
        common.show_json(document)
    else:
        common.show_markdown(_head(facts, done))
    err.print(f"wrote {path}: please attach it to an issue", markup=False, highlight=False, soft_wrap=True)
    if stopped:
        raise typer.Exit(130)
    if any(each.status not in (STATUSES[0], *OUT_OF_TIME) for each in done):
        raise typer.Exit(1)


def markdown(facts: dict[str, str], done: Sequence[Done], reports: Sequence[str]) -> str:
    """The readable part of the file."""
    lines = [_head(facts, done)]
    for each in done:
        failures = (each.document or {}).get("failures") or []
        if failures or each.error:
            lines += ["", f"## {each.title}", "", f"`{each.command}`", ""]
            lines += [f"- {f['case']}: {f['detail']}" for f in failures[:20]]
            lines += [f"- and {len(failures) - 20} more"] if len(failures) > 20 else []
            lines += ["```", each.error, "```"] if each.error else []
    for text in reports:
        lines += ["", text.replace("# lightning-indexer bench", "## bench", 1)]
    return "\n".join(lines)


def _head(facts: dict[str, str], done: Sequence[Done]) -> str:
    from lightning_indexer.bench.report import table

    lines = [f"# lightning-indexer on {facts['arch']}", "", *(f"- {name}: {value}" for name, value in facts.items())]
    rows = [(each.title, each.status, f"{each.seconds:.0f}", _result(each)) for each in done]
    return "\n".join([*lines, "", *table(("part", "status", "seconds", "result"), rows)])


def _result(each: Done) -> str:
    """One line of a part's document."""
    found = each.document or {}
    if each.title.startswith("verify") and "summary" in found:
        passed, cases = (sum(s["count"]["pass"] for s in found["summary"]), found["cases"])
        worst = [value for s in found["summary"] for value in s["diff"].values() if value is not None]
        diff = f", worst calc_diff {max(worst):.1e}" if worst else ""
        left = f"; {len(found['left_out'])} reasons to leave cases out" if found.get("left_out") else ""
        return f"{passed} passed, {len(found['failures'])} failed, of {cases} cases{diff}{left}"
    if each.title.startswith("bench") and "rows" in found:
        timed = [row for row in found["rows"] if row["median_us"]]
        contenders = ", ".join(dict.fromkeys(row["contender"] for row in timed))
        return f"{len(timed)} of {len(found['rows'])} measurements: {contenders}"
    if "kernels" in found:
        return f"{len(found['kernels'])} kernels"
    return ""


def _facts(where: torch.device, arch: Arch, *, simulated: bool) -> dict[str, str]:
    from lightning_indexer.bench import environment

    facts = environment.record(where)
    if simulated:
        facts |= {"device": f"simulated {arch.name}", "arch": arch.name}
    elif where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        facts["memory"] = f"{properties.total_memory / 2**30:.0f} GiB"
        facts["multiprocessors"] = str(properties.multi_processor_count)
        facts["devices"] = str(torch.cuda.device_count())
    return {**facts, "system": f"{platform.system()} {platform.machine()}"}


def _on_device(where: torch.device, folder: Path) -> list[Part]:
    from lightning_indexer.check import verify

    parts = [Part("info", ("info",), 0.2)]
    # What is timed too comes first: where time runs out, the small kernels are left.
    for operation in dict.fromkeys((*bench.OPTIONS, *verify.operations())):
        suite = verify.suite(operation)
        for name in verify.backends_of(suite, suite.cases(full=False), arch_of(where)):
            named = ("--operation", operation, "--backend", name, "--device", str(where))
            parts.append(Part(f"verify {operation} {name}", ("verify", *named), 1.0))
        if operation not in bench.OPTIONS:
            continue
        chosen: tuple[str, ...] = ("--operation", operation, "--device", str(where), "--budget-ms", "25")
        if "--form" in bench.OPTIONS[operation]:
            chosen += ("--form", "clean,compressed")
        if where.type == "cpu":
            chosen += CPU_SHAPES.get(operation, ())
        parts.append(Part(f"bench {operation}", ("bench", *chosen, "--results", str(folder)), 3.0))
    return parts


def _simulated(arch: Arch) -> list[Part]:
    from lightning_indexer.check import verify

    parts = [Part("info", ("info",), 0.2), Part("resources", ("resources", "--arch", arch.name), 1.0)]
    # Scores have by far the most cases: last, they have what the others leave.
    for operation in sorted(verify.operations(), key=lambda operation: operation == OPERATION):
        if common.installed(common.compiled_kernels(None, arch, operation), None, []):
            chosen = ("--arch", arch.name, "--operation", operation)
            parts.append(Part(f"verify {operation}", ("verify", *chosen), 1.0))
    return parts


def _run(parts: Sequence[Part], seconds: float) -> tuple[list[Done], bool]:
    """Runs the parts within the time; what was done, and whether the user stopped it."""
    deadline = time.monotonic() + seconds
    done: list[Done] = []
    with common.progress() as progress:
        task = progress.add_task("report", total=len(parts))
        for number, part in enumerate(parts):
            progress.update(task, description=part.title)
            left = deadline - time.monotonic()
            share = left * part.weight / sum(each.weight for each in parts[number:])
            if left < LEAST / 2:
                done.append(Done(part.title, part.shown, NOT_RUN, 0.0, None, ""))
                continue
            try:
                done.append(_one(part, min(left, max(LEAST, share))))
            except KeyboardInterrupt:
                return done, True
            progress.update(task, advance=1)
    return done, False


def _one(part: Part, seconds: float) -> Done:
    begun = time.monotonic()
    command = [sys.executable, "-m", "lightning_indexer", *part.arguments, "--json"]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with _interruptible():
            process = subprocess.Popen(
                command, stdout=out, stderr=errors, text=True, env=envs.for_process(), start_new_session=True
            )
        try:
            status = _wait(process, seconds)
        finally:
            _signal(process, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read())
    try:
        document = json.loads(texts[0])
    except ValueError:
        document = None
    # Interrupted where its work was done, as it ended: what it printed is whole.
    status = 130 if status == -signal.SIGINT else status
    word = STATUSES.get(status, f"crashed, exit status {status}")
    if status == 130 and document is not None and document.get("good"):
        word = STATUSES[0]
    if document is None and status != 0:
        word = f"crashed, exit status {status}" if status != 130 else NO_RESULT
    error = "" if status in (0, 130) and document is not None else "\n".join(texts[1].strip().splitlines()[-15:])
    seconds = time.monotonic() - begun
    # Folders of this machine are nobody's business.
    return Done(part.title, part.shown, word, seconds, document, error.replace(str(Path.home()), "~"))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A process that starts in here can be interrupted, even where this one ignores that: `report &` of a script."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before == signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)


def _wait(process: subprocess.Popen[str], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGINT)
    try:
        return process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """To a part and the processes that it started, as a terminal does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _reports(folder: Path) -> list[str]:
    """What the parts wrote for people, without the command that names this machine's folders."""
    return [path.read_text().split("\nRepeat with:")[0].rstrip() for path in sorted(folder.glob("*.md"))]
