"""``lightning-indexer verify``: backends against the float32 oracle, over the whole sweep.

Per case: the output is poisoned with NaN and fenced with guard bands; the ``-inf`` mask must match exactly; every
position of every window must be written; nothing outside the view may be; and the values must agree with float32 on the
dequantised inputs and on the unquantised ones. A sample of cases is repeated and must be bitwise identical.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.bench.environment import no_room
from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.check.cases import (
    SMALL_SHAPES,
    VERIFY_SHAPES,
    WINDOWS,
    Case,
    Form,
    Inputs,
    make_inputs,
    make_windows,
    window_applies,
)
from lightning_indexer.check.guarded import GuardedOutput
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.mqa_logits import reference_scores, window_mask
from lightning_indexer.selection import registry as dispatch

# Against float32 on the dequantised inputs; DeepGEMM's own tests use the same two.
MAX_DIFF = {torch.float32: 5e-6, torch.bfloat16: 3e-5}
# Against float32 on the unquantised inputs. Over a handful of logits fp8 itself can cost more than this, where weights
# of both signs cancel; then the oracle's own difference is the bound, and a kernel may add this share to it.
MAX_DIFF_UNQUANTISED = 1e-3
MAX_ADDED_SHARE = 0.01
REPEATS = 20

Status = Literal["pass", "fail", "unsupported", "dropped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case on one backend. The differences are None where nothing ran."""

    case: Case
    backend: str
    status: Status
    detail: str = ""
    diff: float | None = None
    diff_unquantised: float | None = None
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """The cases that share their operands, and so one run of the oracle."""

    s_q: int
    s_k: int
    heads: int
    head_dim: int
    cases: tuple[Case, ...] = field(repr=False)


def sweep(*, full: bool) -> list[Group]:
    """The groups of a run.

    ``full``: 14 shapes x heads {32, 64, 128} x dims {64, 128} x six windows x clean {1, 0} (948 cases: ``cp`` does not
    apply to five shapes), then what that leaves out: H 8 and 16, D 32, compressed logits, bfloat16, and results past
    2^31 elements. Otherwise the same kinds at small shapes.
    """
    groups: list[Group] = []
    shapes = VERIFY_SHAPES if full else SMALL_SHAPES
    for (s_q, s_k), heads, head_dim in itertools.product(shapes, (32, 64, 128), (64, 128)):
        groups.append(_group(s_q, s_k, heads, head_dim, [("clean", torch.float32), ("noclean", torch.float32)]))
    others: list[tuple[Form, torch.dtype]] = [
        ("compressed", torch.float32),
        ("clean", torch.bfloat16),
        ("compressed", torch.bfloat16),
    ]
    more = [(17, 113), (61, 1560), (64, 8192), (2048, 4096)] if full else [(17, 113), (3, 1560), (8, 40)]
    for (s_q, s_k), heads, head_dim in itertools.product(more, (8, 16, 32, 64, 128), (32, 64, 128)):
        forms = others if heads >= 32 and head_dim >= 64 else [("clean", torch.float32), *others]
        groups.append(_group(s_q, s_k, heads, head_dim, forms))
    if full:
        every: list[tuple[Form, torch.dtype]] = [("clean", torch.float32), ("noclean", torch.float32), others[0]]
        groups.append(_group(16384, 2048, 32, 128, every))
        groups.append(_group(8192, 262144, 32, 64, every, ("causal", "multi_req")))
    return groups


def _group(
    s_q: int,
    s_k: int,
    heads: int,
    head_dim: int,
    forms: Iterable[tuple[Form, torch.dtype]],
    windows: Iterable[str] = WINDOWS,
) -> Group:
    cases = tuple(
        Case(s_q, s_k, heads, head_dim, window, form, dtype)
        for window in WINDOWS
        if window in windows and window_applies(window, s_q, s_k)
        for form, dtype in forms
    )
    return Group(s_q, s_k, heads, head_dim, cases)


def run(groups: Iterable[Group], backends: list[str], device: torch.device) -> Iterator[Outcome]:
    """Runs every case of ``groups`` on every backend, one outcome each, in order."""
    for index, group in enumerate(groups):
        reason = _no_room(group, device)
        if reason is not None:
            for case, backend in itertools.product(group.cases, backends):
                yield Outcome(case, backend, "dropped", reason)
            continue
        yield from _run_group(group, backends, device, index)


def _no_room(group: Group, device: torch.device) -> str | None:
    # The two references, the result, masks and comparisons hold about six [M, N] float32 at the peak.
    needed = 6 * 4 * group.s_q * group.s_k + 12 * group.s_q * group.heads * group.head_dim + 2**31
    return no_room(needed, device)


def _run_group(group: Group, backends: list[str], device: torch.device, index: int) -> Iterator[Outcome]:
    inputs = with_signed_scales(make_inputs(group.s_q, group.s_k, group.heads, group.head_dim, device))
    exact, unquantised = oracles(inputs)
    for number, case in enumerate(group.cases):
        ks, ke = make_windows(case.window, case.s_q, case.s_k, device)
        # One case in six is repeated, another window in each group.
        repeat = number % 6 == index % 6
        for backend in backends:
            yield _run_case(case, backend, inputs, ks, ke, exact, unquantised, repeat)


def with_signed_scales(inputs: Inputs) -> Inputs:
    """The formula is the contract for scales of any sign: every third key's is negative, so the order of scale and
    ReLU shows. The unquantised keys' scale is that sign."""
    return replace(inputs, kv_scale=inputs.kv_scale * _signs(inputs))


def _signs(inputs: Inputs) -> torch.Tensor:
    return 1.0 - 2.0 * (torch.arange(inputs.k.shape[0], device=inputs.k.device) % 3 == 1).float()


def oracles(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, N] float32 logits of every position, for the fp8 operands and for the unquantised ones."""
    exact = reference_scores(inputs.q_fp8, inputs.k_fp8, inputs.weights) * inputs.kv_scale + 0.0
    return exact, reference_scores(inputs.q, inputs.k, inputs.weights) * _signs(inputs) + 0.0


def _run_case(
    case: Case,
    backend: str,
    inputs: Inputs,
    ks: torch.Tensor,
    ke: torch.Tensor,
    exact: torch.Tensor,
    unquantised: torch.Tensor,
    repeat: bool,
) -> Outcome:
    max_seqlen_k = compressed_width(ks, ke, case.s_k) if case.form == "compressed" else 0
    [verdict] = dispatch.explain(case.problem(max_seqlen_k), arch_of(ks.device), backend)
    if verdict.reason is not None:
        return Outcome(case, backend, "unsupported", verdict.reason)
    output = call(case, backend, inputs, ks, ke, max_seqlen_k)
    faults, diff, diff_unquantised = judge(case, output, ks, ke, exact, unquantised)
    if repeat:
        again = (call(case, backend, inputs, ks, ke, max_seqlen_k).view for _ in range(REPEATS))
        where = None if case.form == "clean" else _inside(ks, ke, case.s_k, max_seqlen_k)
        differing = sum(not _same_bits(logits, output.view, where) for logits in again)
        if differing:
            faults.append(f"{differing} of {REPEATS} repeats differ bitwise")
    return Outcome(case, backend, "fail" if faults else "pass", "; ".join(faults), diff, diff_unquantised, repeat)


def call(
    case: Case, backend: str, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, max_seqlen_k: int
) -> GuardedOutput:
    """Runs the case into a guarded output; ``max_seqlen_k`` is its compressed width, 0 in the other forms."""
    output = GuardedOutput(case.s_q, max_seqlen_k or case.s_k, case.out_dtype, ks.device)
    fp8_mqa_logits(
        inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke,
        clean_logits=case.form == "clean", max_seqlen_k=max_seqlen_k, out_dtype=case.out_dtype,
        out=output.view, backend=backend,
    )  # fmt: skip
    return output


def judge(
    case: Case,
    output: GuardedOutput,
    ks: torch.Tensor,
    ke: torch.Tensor,
    exact: torch.Tensor,
    unquantised: torch.Tensor,
) -> tuple[list[str], float, float]:
    """What is wrong with a result, and its calc_diff to both oracles."""
    logits = output.view
    width = logits.shape[1] if case.form == "compressed" else 0
    inside, expected, expected_unquantised = _inside(ks, ke, case.s_k, width), exact, unquantised
    if width:
        expected, expected_unquantised = compress(exact, ks, width), compress(unquantised, ks, width)

    faults: list[str] = []
    if not output.intact():
        faults.append("wrote outside the view")
    unwritten = int((output.unwritten() & (inside if case.form != "clean" else True)).sum())
    if unwritten:
        faults.append(f"{unwritten} positions never written")
    if case.form == "clean":
        wrong = int((torch.isneginf(logits) == inside).sum())
        if wrong:
            faults.append(f"-inf mask differs at {wrong} positions")
    nan = int((torch.isnan(logits) & inside).sum())
    if nan:
        faults.append(f"{nan} NaN inside windows")
    negative_zero = int(((logits == 0) & torch.signbit(logits) & inside).sum())
    if negative_zero:
        faults.append(f"{negative_zero} times -0.0 inside windows")
    diff = calc_diff(logits, expected, inside)
    if not diff < MAX_DIFF[case.out_dtype]:
        faults.append(f"calc_diff {diff:.2e}, allowed {MAX_DIFF[case.out_dtype]:.0e}")
    diff_unquantised = calc_diff(logits, expected_unquantised, inside)
    if not diff_unquantised < MAX_DIFF_UNQUANTISED:
        bound = max(MAX_DIFF_UNQUANTISED, (1 + MAX_ADDED_SHARE) * calc_diff(expected, expected_unquantised, inside))
        if not diff_unquantised <= bound:
            faults.append(f"calc_diff {diff_unquantised:.2e} to unquantised, allowed {bound:.2e}")
    return faults, diff, diff_unquantised


def _inside(ks: torch.Tensor, ke: torch.Tensor, keys: int, width: int) -> torch.Tensor:
    """[M, N] bool, or [M, width]: which positions of the result lie in the windows."""
    mask = window_mask(ks, ke, keys)
    return compress(mask, ks, width) if width else mask


def compressed_width(ks: torch.Tensor, ke: torch.Tensor, keys: int) -> int:
    """The least ``max_seqlen_k`` that holds every window of these rows; 1 if all are empty."""
    return max(1, int((ke.clamp(max=keys).long() - ks.long()).max()))


def compress(full: torch.Tensor, ks: torch.Tensor, width: int) -> torch.Tensor:
    """Column j of row m becomes what ``full`` [M, N] holds at ``ks[m] + j``; zero (False) outside it."""
    positions = ks.long()[:, None] + torch.arange(width, device=ks.device)
    inside = (positions >= 0) & (positions < full.shape[1])
    return full.gather(1, positions.clamp(0, full.shape[1] - 1)).masked_fill_(~inside, 0)


def _same_bits(a: torch.Tensor, b: torch.Tensor, where: torch.Tensor | None) -> bool:
    bits = torch.int32 if a.dtype is torch.float32 else torch.int16
    same = a.view(bits) == b.view(bits)
    return bool((same if where is None else same | ~where).all())
