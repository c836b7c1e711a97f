"""``timing --sweep``: predictions of the performance sweep, a row at a time into a file, so that none is lost."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_indexer.arch import Arch
from lightning_indexer.check.cases import PERFORMANCE_SHAPES
from lightning_indexer.model.cost import COST_WINDOWS
from lightning_indexer.model.survey import HEAD_DIM, Launch
from lightning_indexer.model.timing import Row, device_of, predicted
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem

HEADS = (32, 64)
FORMS = ("clean", "noclean")
LAUNCHES: tuple[Launch, ...] = tuple((*shape, window) for shape in PERFORMANCE_SHAPES for window in COST_WINDOWS)
Record = dict[str, Any]
Key = tuple[Any, ...]


def model_version() -> str:
    """Changes with every line of the model, so that a file never mixes predictions of two."""
    import cdna_sim.timing

    digest = hashlib.sha256()
    for path in sorted(Path(cdna_sim.timing.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Recorded:
    """The file of a sweep: rows that the present model predicted of the present code are kept."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        self.head: Record = {"kind": "timing", "environment": dict(environment), "model": model_version()}
        self.rows: dict[Key, Record] = {}
        if path.exists() and path.stat().st_size:
            before = json.loads(path.read_text())
            if before.get("model") == self.head["model"]:
                self.rows = {_key(row): row for row in before["rows"]}

    def has(self, key: Key, code: str) -> bool:
        return key in self.rows and self.rows[key]["code"] == code

    def add(self, row: Record) -> None:
        """Keeps a row, on the disk too."""
        self.rows[_key(row)] = row
        self.save()

    def save(self) -> None:
        """The file as the rows are, in the sweep's order; whole, or as it was."""
        document: Record = {**self.head, "rows": sorted(self.rows.values(), key=_order)}
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        beside.replace(self.path)


def sweep(
    recorded: Recorded, kernels: Mapping[str, Mapping[str, Any]], heads: Iterable[int], forms: Iterable[str],
    launches: Iterable[Launch], samples: int,
) -> Iterator[tuple[Record, bool]]:  # fmt: skip
    """Every launch on every kernel whose gate admits it: the row, and whether it was predicted now.

    Args:
        recorded: what is there already, and where rows go.
        kernels: by arch and backend.
    """
    launches = sorted(launches, key=lambda launch: launch[0] * launch[1])
    for form in forms:
        for name, of_arch in kernels.items():
            arch = Arch.parse(name)
            device = device_of(arch)
            for h in heads:
                for launch in launches:
                    problem = MqaLogitsProblem(launch[0], launch[1], h, HEAD_DIM, clean_logits=form == "clean")
                    for backend, kernel in of_arch.items():
                        if kernel.supports(problem, arch) is not None:
                            continue
                        code = hashlib.sha256(kernel.build(problem, arch).isa.encode()).hexdigest()[:12]
                        key = (name, h, form, *launch, backend)
                        if recorded.has(key, code):
                            yield recorded.rows[key], False
                            continue
                        row = predicted(kernel, backend, h, launch, form, arch, device, samples, None)
                        recorded.add(record(row, arch, form, code))
                        yield recorded.rows[key], True


def record(row: Row, arch: Arch, form: str, code: str) -> Record:
    """One prediction as JSON has it; shares of time are rounded to a thousandth."""
    p = row.prediction
    return {
        "arch": arch.name, "device": row.device.name, "heads": row.heads, "head_dim": HEAD_DIM, "form": form,
        "rows": row.launch[0], "keys": row.launch[1], "window": row.launch[2], "backend": row.backend,
        "predicted_us": round(p.microseconds, 2), "sampling_error": round(p.error, 4), "limit": p.limit,
        "workgroups": p.workgroups, "resident": p.resident, "tail": round(p.tail, 3), "issued": round(p.issued, 3),
        "stalls": {cause: round(share, 3) for cause, share in p.stalls.items()},
        "busy": {unit: round(share, 3) for unit, share in p.busy.items()}, "kernel": row.traces.kernel, "code": code,
    }  # fmt: skip


def _key(row: Record) -> Key:
    return row["arch"], row["heads"], row["form"], row["rows"], row["keys"], row["window"], row["backend"]


def _order(row: Record) -> tuple[Any, ...]:
    launch = row["rows"], row["keys"], row["window"]
    place = LAUNCHES.index(launch) if launch in LAUNCHES else len(LAUNCHES)
    return row["form"], row["arch"] != "gfx950", row["arch"], row["heads"], place, launch
