"""What ``resources`` and ``cost`` show: kernels compiled, and launches predicted, beside what others published."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.check.cases import PERFORMANCE_SHAPES
from lightning_indexer.model import rates
from lightning_indexer.model.cost import COST_WINDOWS, Kernel, Model, Prediction, bytes_of
from lightning_indexer.model.rates import Published
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem

Launch = tuple[int, int, str]  # rows, keys, window
HEAD_DIM = 128


def compiled(
    kernels: Mapping[str, Any], problems: Sequence[MqaLogitsProblem], arch: Arch, begins: Callable[[str], None]
) -> tuple[list[Built], list[str]]:
    """Each kernel built for each problem that its gate admits, and a sentence for each that it does not; ``begins`` is
    told what comes next."""
    built = []
    refused: dict[str, None] = {}
    for name, kernel in kernels.items():
        for problem in problems:
            begins(f"{name} H={problem.heads} D={problem.head_dim}")
            if (reason := kernel.supports(problem, arch)) is not None:
                refused[f"{name}: {reason}"] = None
            else:
                built.append(kernel.build(problem, arch))
    return built, list(refused)


def launches(heads: Iterable[int], shapes: Sequence[tuple[int, int]] | None) -> list[Published]:
    """The launches to predict, with what was published of them; None: the published ones, and all of their shapes."""
    if shapes is None:
        whole = rates.AITER_HIP  # all windows of all of its shapes, also where no time was published
        every = {(*shape, window): whole.times.get((*shape, window), ()) for shape in PERFORMANCE_SHAPES
                 for window in COST_WINDOWS}  # fmt: skip
        return [replace(p, times=every) if p is whole else p for p in rates.PUBLISHED if p.heads in set(heads)]
    found = []
    device = next(iter(rates.DEVICES.values()))
    for h in heads:
        known = next((p for p in rates.PUBLISHED if p.heads == h and p.form == "clean"), None)
        known = known or Published("", device, h, "clean", (), {}, {})
        wanted_launches = [(*shape, window) for shape in shapes for window in COST_WINDOWS]
        found.append(replace(known, times={launch: known.times.get(launch, ()) for launch in wanted_launches}))
    return found


@dataclass
class Predicted:
    """The launches of one table.

    Attributes:
        times: by launch and backend.
        kernels: of every prediction, with a problem that runs it.
        refused: sentences of the gates of backends that run none of them.
    """

    published: Published
    times: dict[Launch, dict[str, Prediction]]
    kernels: list[tuple[Kernel, MqaLogitsProblem]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def predict(published: Published, kernels: Mapping[str, Any], arch: Arch, begins: Callable[[str], None]) -> Predicted:
    """Predicts the launches with every kernel; ``begins`` is told what comes next."""
    found = Predicted(published, {launch: {} for launch in published.times})
    problems = {
        launch: MqaLogitsProblem(
            launch[0], launch[1], published.heads, HEAD_DIM, clean_logits=published.form == "clean",
            max_seqlen_k=launch[1] if published.form == "compressed" else 0,
        )
        for launch in published.times
    }  # fmt: skip
    for name, kernel in kernels.items():
        begins(f"{name} H={published.heads}")
        reasons = {launch: kernel.supports(problem, arch) for launch, problem in problems.items()}
        able = {launch: problems[launch] for launch, reason in reasons.items() if reason is None}
        if not able:
            found.refused += [f"{name}: {reason}" for reason in dict.fromkeys(reasons.values())]
            continue
        model = Model(name, kernel, list(dict.fromkeys(able.values())), arch, published.rates)
        for launch, problem in able.items():
            found.times[launch][name] = model.predict(problem, launch[2])
        found.kernels += [(each, next(iter(able.values()))) for each in model.kernels]
    return found


def beside(predicted: Predicted, launch: Launch, name: str) -> str:
    """A predicted time in parts of the published one of the same kind of kernel; "-" where there is none.

    Where only sums over launches were published, the proportion of two kernels stands beside the published one.
    """
    published, predictions = predicted.published, predicted.times[launch]
    times, kind = published.times[launch], published.kinds.get(name)
    us = predictions[name].in_order * 1e6
    if times and kind is not None and published.unit == "us":
        return f"{us / times[kind]:.2f} of it"
    if times and kind:
        [base] = [other for other, at in published.kinds.items() if at == 0]
        if base in predictions:
            return f"{us / (predictions[base].in_order * 1e6):.2f} of {base}, [{times[kind] / times[0]:.2f}]"
    return "-"


def records(predicted: Predicted) -> list[dict[str, object]]:
    """One flat record a launch and backend, for JSON; times in microseconds."""
    published = predicted.published
    return [
        {
            "device": published.rates.name,
            "heads": published.heads,
            "head_dim": HEAD_DIM,
            "form": published.form,
            "rows": launch[0],
            "keys": launch[1],
            "window": launch[2],
            "backend": name,
            "in_order_us": 1e6 * prediction.in_order,
            "overlapped_us": 1e6 * prediction.overlapped,
            "limit": prediction.limit,
            "published": dict(zip(published.kernels, published.times[launch], strict=False)),
            "published_unit": published.unit,
            "published_of": published.title,
            "same_kind": _same_kind(published, name),
        }
        for launch, predictions in predicted.times.items()
        for name, prediction in predictions.items()
    ]


def _same_kind(published: Published, name: str) -> str | None:
    """The published kernel that is of the same kind as a backend's, if there is one."""
    at = published.kinds.get(name)
    return None if at is None else tuple(published.kernels)[at]


# What was counted of a kernel: of each row and 32 keys, then of each workgroup.
TILE_PARTS = ("MFMA", "VALU", "packed", "SALU", "VMEM", "LDS", "k B", "logits B")
GROUP_PARTS = ("VALU", "q B", "weights B")


def parts(kernel: Kernel, problem: MqaLogitsProblem) -> tuple[list[float], list[float]]:
    """The numbers of ``TILE_PARTS`` and of ``GROUP_PARTS``."""
    tile, group = kernel.of_tile(problem), kernel.group
    numbers = [tile["MFMA"], tile["VALU"], tile["packed"], tile["SALU"]]
    numbers += [tile["VMEM_LOAD"] + tile["VMEM_STORE"], tile["LDS"]]
    numbers += [bytes_of(tile, "load", "k"), bytes_of(tile, "store", "out")]
    return numbers, [group["VALU"], bytes_of(group, "load", "q"), bytes_of(group, "load", "w")]
