"""The suite of ``fp8_mqa_logits``: sweeps on devices and in the simulator, operands, oracles and the judge.

Per case: the output is poisoned with NaN and fenced with guard bands; the ``-inf`` mask must match exactly; every
position of every window must be written; nothing outside the view may be; all values together and each one must agree
with float32 on the dequantised inputs as ``bounds.py`` says, and with the unquantised ones. Repeats are the same bits.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lightning_indexer import envs
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.check.bounds import Bounds, bounds_of
from lightning_indexer.check.cases import (
    SMALL_SHAPES,
    VERIFY_SHAPES,
    WINDOWS,
    Case,
    Inputs,
    Window,
    make_inputs,
    make_windows,
    window_applies,
)
from lightning_indexer.check.guarded import GuardedOutput
from lightning_indexer.check.verify import Finding, SimulatedCase
from lightning_indexer.check.wrong import Wrong
from lightning_indexer.fp8 import E4M3FNUZ_MAX, quantize_k
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.mqa_logits import (
    FORMS,
    OPERATION,
    Form,
    MqaLogitsProblem,
    reference_scores,
    window_mask,
)
from lightning_indexer.selection import registry

# Against float32 on the unquantised inputs. Over a handful of logits fp8 itself can cost more than this, where weights
# of both signs cancel; then the oracle's own difference is the bound, and a kernel may add this share to it.
MAX_DIFF_UNQUANTISED = 1e-3
MAX_ADDED_SHARE = 0.01

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

# In the simulator: few rows; an odd number of keys, and one that makes whole tiles.
SIMULATED_SHAPES = ((5, 301), (8, 512))
HEADS, HEAD_DIMS = (32, 64, 128), (64, 128)
# What else kernels may be built for, fewer cases of each, and the smallest shapes.
OTHER_SIZES = ((8, 32), (16, 64), (128, 32), (32, 32))
TINY_SHAPES = ((1, 1), (1, 17), (3, 130))
# Single rows, sizes around tiles, few rows over many tiles, rows that straddle workgroups; then few rows and many keys.
ODD_SHAPES = ((1, 1), (1, 17), (17, 113), (61, 160), (64, 384), (32, 32), (3, 1560), (13, 671), (2, 2049), (5, 4096))
FEW_ODD_SHAPES = ((17, 113),)
# Where configs other than the heuristic's run: rows and keys that no tile divides, and where a config has a chunk, more
# keys than one. The last is as long as the first, and ``cp`` applies.
VARIANT_SHAPE, CHUNKED_SHAPE, EVEN_SHAPE = (19, 330), (5, 1038), (18, 324)


class Oracles(NamedTuple):
    """[M, N] float32 of every position, before windows.

    Attributes:
        exact, unquantised: logits of the fp8 operands, and of the unquantised ones.
        parts: |kv_scale| * sum_h |w[h]| * |q[h] . k|, what a logit sums.
    """

    exact: torch.Tensor
    unquantised: torch.Tensor
    parts: torch.Tensor

    def map(self, change: Any) -> Oracles:
        return Oracles(*(change(each) for each in self))


class MqaLogitsSuite:
    """Keeps the operands and oracles of its last case, which the next one mostly shares."""

    operation = OPERATION

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._kept: tuple[Inputs, Oracles] | None = None

    def cases(self, *, full: bool) -> list[Case]:
        """``full``: 14 shapes x heads {32, 64, 128} x dims {64, 128} x six windows x clean {1, 0} (948 cases: ``cp``
        does not apply to five shapes), then what that leaves out: H 8 and 16, D 32, compressed logits, bfloat16, and
        results past 2^31 elements. Otherwise the same kinds at small shapes."""
        found: list[Case] = []

        def add(
            s_q: int, s_k: int, heads: int, head_dim: int, forms: Iterable[tuple[Form, torch.dtype]],
            windows: Iterable[Window] = WINDOWS,
        ) -> None:  # fmt: skip
            found.extend(
                Case(s_q, s_k, heads, head_dim, window, form, dtype)
                for window in windows
                if window_applies(window, s_q, s_k)
                for form, dtype in forms
            )

        two: list[tuple[Form, torch.dtype]] = [("clean", torch.float32), ("noclean", torch.float32)]
        others: list[tuple[Form, torch.dtype]] = [
            ("compressed", torch.float32), ("clean", torch.bfloat16), ("compressed", torch.bfloat16),
        ]  # fmt: skip
        shapes = VERIFY_SHAPES if full else SMALL_SHAPES
        for (s_q, s_k), heads, head_dim in itertools.product(shapes, (32, 64, 128), (64, 128)):
            add(s_q, s_k, heads, head_dim, two)
        more = [(17, 113), (61, 1560), (64, 8192), (2048, 4096)] if full else [(17, 113), (3, 1560), (8, 40)]
        for (s_q, s_k), heads, head_dim in itertools.product(more, (8, 16, 32, 64, 128), (32, 64, 128)):
            add(s_q, s_k, heads, head_dim, others if heads >= 32 and head_dim >= 64 else [two[0], *others])
        if full:
            add(16384, 2048, 32, 128, [*two, others[0]])
            add(8192, 262144, 32, 64, [*two, others[0]], ("causal", "multi_req"))
        return found

    def problem(self, case: Case) -> MqaLogitsProblem:
        return case.problem(_width(case))

    def bytes_needed(self, case: Case) -> int:
        # The oracles, the result, masks and comparisons hold about eight [M, N] float32 at the peak.
        return 8 * 4 * case.s_q * case.s_k + 16 * case.s_q * case.heads * case.head_dim + 2**31

    def check(self, case: Case, backend: str, device: torch.device, *, repeats: int) -> Finding:
        inputs, oracles = self._operands(case, device)
        ks, ke = make_windows(case.window, case.s_q, case.s_k, device)
        bounds = bounds_of(
            arch_of(device), case.out_dtype, interpreted=backend == "triton-portable" and envs.triton_interprets()
        )
        output = call(case, backend, inputs, ks, ke)
        finding = judge(case, output, ks, ke, oracles, bounds)
        where = None if case.form == "clean" else _inside(ks, ke, case.s_k, _width(case))
        again = (call(case, backend, inputs, ks, ke).view for _ in range(repeats))
        differing = sum(not _same_bits(logits, output.view, where) for logits in again)
        if differing:
            fault = f"{differing} of {repeats} repeats differ bitwise"
            finding = replace(finding, faults=(*finding.faults, fault))
        return finding

    def simulated_cases(
        self, arch: Arch, backends: Sequence[str], *, seed: int = 0, thorough: bool = False,
        heads: Sequence[int] | None = None, head_dims: Sequence[int] | None = None,
    ) -> list[SimulatedCase]:  # fmt: skip
        """Six windows x clean {1, 0} x heads x dims at two shapes, then compressed and bfloat16 results, configs beside
        the heuristic's, the four pairs of fp8 dialects where the arch reads fnuz; where heads and dims are left open,
        other ones and tiny shapes."""
        found: list[SimulatedCase] = []
        others = ((FN, FNUZ), (FNUZ, FN), (FNUZ, FNUZ)) if arch.fp8 == "fnuz" else ()

        def add(
            backend: str, shape: tuple[int, int], h: int, d: int, names: Iterable[Window] = WINDOWS,
            forms: Iterable[Form] = ("clean", "noclean"), facts: tuple[torch.dtype, ...] = (),
        ) -> None:  # fmt: skip
            """``facts``: dtypes of the result, of q and of k."""
            for form, window in itertools.product(forms, names):
                if window_applies(window, *shape):
                    append(backend, Case(*shape, h, d, window, form, *facts))

        def append(backend: str, case: Case, config: Any = None) -> None:
            # A seed of its own, the same whatever else is in the sweep.
            own = seed + zlib.crc32(f"{case} {config}".encode()) % 2**20
            found.append(SimulatedCase(OPERATION, case, arch.name, backend, config, own))

        for backend, h, d in itertools.product(backends, heads or HEADS, head_dims or HEAD_DIMS):
            for shape in SIMULATED_SHAPES[: 1 if h == 128 else 2]:
                add(backend, shape, h, d)
            first = SIMULATED_SHAPES[0]
            for pair in others:
                add(backend, first, h, d, ("misaligned", "multi_req"), ("clean",), (torch.float32, *pair))
            add(backend, first, h, d, ("misaligned", "past_end"), ("compressed",), (torch.bfloat16,))
            if (h, d) == (64, 128):
                # Rows that select another config; all but the last 90 have an empty window.
                add(backend, (4096, 90), h, d, ("causal",), ("clean",))
            kernel = registry.kernel(backend)
            if isinstance(kernel, registry.Varied):
                for case, config in _varied(kernel, arch, h, d, thorough):
                    append(backend, case, config)
        if not heads and not head_dims:
            for backend in backends:
                for h, d in OTHER_SIZES:
                    add(backend, SIMULATED_SHAPES[0], h, d, ("misaligned", "empty"), ("clean",))
                for shape in TINY_SHAPES:
                    add(backend, shape, 64, 128, WINDOWS, ("clean",))
        return found

    def check_simulated(self, case: SimulatedCase) -> Finding:
        facts: Case = case.case
        arch, device = Arch.parse(case.arch), torch.device("cpu")
        inputs = planted_inputs(facts, case.seed)
        ks, ke = make_windows(facts.window, facts.s_q, facts.s_k, device)
        rounds = bool(getattr(case.config, "bfloat16_sums", False))
        bounds = bounds_of(arch, facts.out_dtype, simulated=True, bfloat16_sums=rounds)
        if case.config is None:
            output = call(facts, case.backend, inputs, ks, ke)
        else:
            problem = self.problem(facts)
            output = GuardedOutput(facts.s_q, problem.width, facts.out_dtype, device)
            kernel = registry.kernel(case.backend)
            run = kernel.launch(problem, arch, case.config)
            run(facts.call(inputs, ks, ke, problem.max_seqlen_k, output.view))
        return judge(facts, output, ks, ke, oracles_of(inputs), bounds)

    def _operands(self, case: Case, device: torch.device) -> tuple[Inputs, Oracles]:
        key = (case.s_q, case.s_k, case.heads, case.head_dim, device)
        if self._key != key or self._kept is None:
            self._kept = None  # free the old ones first
            inputs = with_signed_scales(make_inputs(*key))
            self._key, self._kept = key, (inputs, oracles_of(inputs))
        return self._kept


def _varied(
    kernel: registry.Varied, arch: Arch, heads: int, head_dim: int, thorough: bool
) -> Iterator[tuple[Case, Any]]:
    """Cases of the configs that a kernel names beside the heuristic's; windows and forms in turn.

    Where there are more than a few, the first two neighbours run at odd shapes with every window, too.
    """

    def problem(shape: tuple[int, int], form: Form) -> MqaLogitsProblem:
        return Case(*shape, heads, head_dim, "causal", form).problem(0)

    if kernel.supports(problem(VARIANT_SHAPE, "clean"), arch) is not None:
        return
    configs = {form: kernel.variants(problem(VARIANT_SHAPE, form), arch, thorough=thorough) for form in FORMS[:2]}
    count = len(configs["clean"])
    turns = itertools.cycle(itertools.product(WINDOWS, FORMS[:2]))
    for number in range(count):
        for window, form in itertools.islice(turns, max(2, 12 // count)):
            config = configs[form][number]
            shape = CHUNKED_SHAPE if hasattr(config, "chunk") else VARIANT_SHAPE
            if not window_applies(window, *shape):
                shape = EVEN_SHAPE
            yield Case(*shape, heads, head_dim, window, form), config
    if count > 2:
        for shape, form in itertools.product(ODD_SHAPES if thorough else FEW_ODD_SHAPES, FORMS[:2]):
            for config in kernel.neighbours(problem(shape, form), arch)[:2]:
                for window in WINDOWS:
                    if window_applies(window, *shape):
                        yield Case(*shape, heads, head_dim, window, form), config


def with_signed_scales(inputs: Inputs) -> Inputs:
    """The formula is the contract for scales of any sign: every third key's is negative, so the order of scale and
    ReLU shows. The unquantised keys' scale is that sign."""
    return replace(inputs, kv_scale=inputs.kv_scale * _signs(inputs))


def _signs(inputs: Inputs) -> torch.Tensor:
    return 1.0 - 2.0 * (torch.arange(inputs.k.shape[0], device=inputs.k.device) % 3 == 1).float()


def planted_inputs(case: Case, seed: int) -> Inputs:
    """The case's operands in its dialects, scales of both signs. Every seventh byte of fn operands is 0x80, -0.0 there
    and NaN in fnuz."""
    inputs = make_inputs(case.s_q, case.s_k, case.heads, case.head_dim, torch.device("cpu"), seed)
    q, k = inputs.q.clone(), inputs.k.clone()
    for wide, dtype in ((q, case.q_dtype), (k, case.k_dtype)):
        if dtype is FN:
            wide.view(-1)[::7] = -0.0
    q_fp8 = q.clamp(-E4M3FNUZ_MAX, E4M3FNUZ_MAX).to(case.q_dtype)
    k_fp8, kv_scale = quantize_k(k, dtype=case.k_dtype)
    return with_signed_scales(replace(inputs, q=q, k=k, q_fp8=q_fp8, k_fp8=k_fp8, kv_scale=kv_scale))


def oracles_of(inputs: Inputs) -> Oracles:
    """The float32 oracles of these operands."""
    exact = reference_scores(inputs.q_fp8, inputs.k_fp8, inputs.weights) * inputs.kv_scale + 0.0
    unquantised = reference_scores(inputs.q, inputs.k, inputs.weights) * _signs(inputs) + 0.0
    q, weights = inputs.q_fp8.float(), inputs.weights.abs()
    parts = reference_scores(q, inputs.k_fp8, weights)  # |x| = relu(x) + relu(-x)
    parts += reference_scores(-q, inputs.k_fp8, weights)
    return Oracles(exact, unquantised, parts * inputs.kv_scale.abs())


def call(case: Case, backend: str, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor) -> GuardedOutput:
    """Runs the case through the public call into a guarded output."""
    width = _width(case)
    output = GuardedOutput(case.s_q, width or case.s_k, case.out_dtype, ks.device)
    fp8_mqa_logits(
        inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke,
        clean_logits=case.form == "clean", max_seqlen_k=width, out_dtype=case.out_dtype,
        out=output.view, backend=backend,
    )  # fmt: skip
    return output


def judge(
    case: Case, output: GuardedOutput, ks: torch.Tensor, ke: torch.Tensor, oracles: Oracles, bounds: Bounds
) -> Finding:
    """What is wrong with a result, and how far it is from the oracles."""
    logits = output.view
    width = logits.shape[1] if case.form == "compressed" else 0
    inside = _inside(ks, ke, case.s_k, width)
    exact, unquantised, parts = oracles.map(lambda full: compress(full, ks, width)) if width else oracles

    faults: list[str] = []
    where = Wrong()

    def count(what: str, wrong: torch.Tensor) -> None:
        if number := int(wrong.sum()):
            where.note(wrong)
            faults.append(f"{what.format(number)}, the first at {_first(wrong)}")

    if not output.intact():
        faults.append("wrote outside the view")
    count("{} positions never written", output.unwritten() & (inside if case.form != "clean" else True))
    if case.form == "clean":
        count("-inf mask differs at {} positions", torch.isneginf(logits) == inside)
    count("{} NaN inside windows", torch.isnan(logits) & inside)
    count("{} times -0.0 inside windows", (logits == 0) & torch.signbit(logits) & inside)
    diff = calc_diff(logits, exact, inside)
    if not diff < bounds.diff:
        faults.append(f"calc_diff {diff:.2e}, allowed {bounds.diff:.0e}")
    error = (logits.float() - exact).abs_().masked_fill_(~inside, 0.0)
    off = error > bounds.of_sum * parts + bounds.of_value * exact.abs()
    if number := int(off.sum()):
        where.note(off)
        row, column = _first(off)
        faults.append(
            f"{number} of {int(inside.sum())} logits are off by more than {bounds.of_sum:.0e} of what they sum, the "
            f"first at {[row, column]}: got {float(logits[row, column]):.7g}, expected {float(exact[row, column]):.7g}"
        )
    worst = float(error.div_(parts.clamp_min(torch.finfo(torch.float32).tiny)).max()) if error.numel() else 0.0
    diff_unquantised = calc_diff(logits, unquantised, inside)
    if not diff_unquantised < MAX_DIFF_UNQUANTISED:
        bound = max(MAX_DIFF_UNQUANTISED, (1 + MAX_ADDED_SHARE) * calc_diff(exact, unquantised, inside))
        if not diff_unquantised <= bound:
            faults.append(f"calc_diff {diff_unquantised:.2e} to unquantised, allowed {bound:.2e}")
    return Finding(tuple(faults), diff, diff_unquantised, worst, case.out_dtype, where.positions())


def _first(wrong: torch.Tensor) -> list[int]:
    """Row and column of the first True of a [rows, columns] mask."""
    row = int(wrong.any(1).int().argmax())
    return [row, int(wrong[row].int().argmax())]


def _inside(ks: torch.Tensor, ke: torch.Tensor, keys: int, width: int) -> torch.Tensor:
    """[M, N] bool, or [M, width]: which positions of the result lie in the windows."""
    mask = window_mask(ks, ke, keys)
    return compress(mask, ks, width) if width else mask


@functools.lru_cache(maxsize=64)
def _width(case: Case) -> int:
    """The case's ``max_seqlen_k``: 0 where its logits are not compressed."""
    if case.form != "compressed":
        return 0
    return compressed_width(*make_windows(case.window, case.s_q, case.s_k, torch.device("cpu")), case.s_k)


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
