"""``lightning-indexer cost``: a model of how long AMD kernels take, from what the simulator counts and published rates.

A model, not a measurement. For each kernel a few workgroups of the real launch are simulated, over windows of several
lengths, and what they executed is split into three parts: of a workgroup that has keys (finding its windows, loading
q), of a FLOP of its matrix products (the tiles), and of a byte of -inf outside of them. The parts are then added up for
the windows of a shape. Rates are in ``rates.py``. Two times come of it:

- in order: matrix and vector instructions of a SIMD one after the other;
- overlapped: side by side, but for packed float32 instructions, which the hardware does not execute beside matrix ones.

Either is at least what scalar issue, L1, LDS and memory take. Not modelled: latencies, start-up, clock under load, L2,
tails of uneven workgroups, tiles that a window only touches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_indexer.amd import simulation
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.check.cases import REQUESTS, WINDOWS, make_windows, positions_in_windows
from lightning_indexer.model.rates import Rates, is_fp8, is_packed_f32, matrix_flop_and_cycles
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem, row_stride

if TYPE_CHECKING:
    from cdna_sim import Report

# What instructions and bytes are counted under; kinds are the simulator's.
Amounts = dict[str, float]
KINDS = ("MFMA", "VALU", "SALU", "SMEM", "BRANCH", "VMEM_LOAD", "VMEM_STORE", "LDS")
# Waits, nops and barriers occupy no unit.
_SCALAR = ("SALU", "SMEM", "BRANCH")
_LDS_WIDTH = re.compile(r"ds_(?:read|write|load|store)(2?)(?:st64)?_(?:tr_)?\w*?(\d+)")


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel, and what its launches are made of.

    Attributes:
        backend, built: which.
        group: amounts of a workgroup that has keys, beside its tiles and fills.
        flop: amounts of a FLOP of its fp8 matrix products.
        filled: amounts of a byte of the result outside of them.
    """

    backend: str
    built: Built
    group: Amounts
    flop: Amounts
    filled: Amounts

    def of_tile(self, problem: MqaLogitsProblem, keys: int = 32) -> Amounts:
        """Amounts of one row and ``keys`` keys."""
        flop = 2.0 * problem.heads * problem.head_dim * keys
        return {name: amount * flop for name, amount in self.flop.items()}


@dataclass(frozen=True)
class Prediction:
    """Seconds of one launch on a device.

    Attributes:
        units: seconds by unit: matrix, vector, packed (of vector), scalar, L1, LDS, memory.
        balance: share of the device that the last round of workgroups leaves busy on average.
        cycles_of_tile: SIMD cycles, in order, for each row and 32 keys inside a window; start-up included.
    """

    kernel: Kernel
    units: dict[str, float]
    balance: float
    cycles_of_tile: float

    @property
    def in_order(self) -> float:
        return max(self.units["matrix"] + self.units["vector"], self._others()) / self.balance

    @property
    def overlapped(self) -> float:
        units = self.units
        return max(units["matrix"] + units["packed"], units["vector"], self._others()) / self.balance

    @property
    def limit(self) -> str:
        """What the time in order is made of."""
        if self.units["matrix"] + self.units["vector"] >= self._others():
            return "matrix + vector"
        return max(("scalar", "L1", "LDS", "memory"), key=self.units.__getitem__)

    def _others(self) -> float:
        return max(self.units[name] for name in ("scalar", "L1", "LDS", "memory"))


class Model:
    """Predicts the launches of one backend over some problems on one device. Each kernel is simulated once."""

    def __init__(
        self, backend: str, kernel: Any, problems: Sequence[MqaLogitsProblem], arch: Arch, rates: Rates
    ) -> None:
        self.arch, self.rates = arch, rates
        launches = {problem: _Launch(kernel, problem, arch) for problem in problems}
        self._groups = {problem: math.prod(launch.grid) for problem, launch in launches.items()}
        self._kernels: dict[MqaLogitsProblem, Kernel] = {}
        by_code: dict[bytes, list[MqaLogitsProblem]] = {}
        built = {problem: kernel.build(problem, arch) for problem in problems}
        for problem in problems:
            by_code.setdefault(built[problem].code_object.elf, []).append(problem)
        for same in by_code.values():
            # Where a workgroup writes most, what it does once shows least in what it does for each byte.
            best = max(same, key=lambda problem: problem.rows * problem.keys / self._groups[problem])
            kernel = _take_apart(backend, built[best], launches[best])
            self._kernels |= dict.fromkeys(same, kernel)

    @property
    def kernels(self) -> list[Kernel]:
        """Each kernel once, in the order of the problems."""
        return list({id(kernel): kernel for kernel in self._kernels.values()}.values())

    def predict(self, problem: MqaLogitsProblem, window: str) -> Prediction:
        """What one launch of ``problem``, one of the model's, over a window of :func:`windows_of` takes."""
        kernel, rates, groups = self._kernels[problem], self.rates, self._groups[problem]
        ks, ke = windows_of(window, problem.rows, problem.keys)
        positions = positions_in_windows(ks, ke, problem.keys)
        written = problem.rows * problem.keys if problem.clean_logits else positions
        flop = 2.0 * problem.heads * problem.head_dim * positions
        total: dict[str, float] = {}
        for amounts, times in (
            (kernel.group, groups),
            (kernel.flop, flop),
            (kernel.filled, 4.0 * (written - positions)),
        ):
            for name, amount in amounts.items():
                total[name] = total.get(name, 0.0) + amount * times
        simd_cycles = rates.units * rates.simds * rates.clock
        moved = (problem.rows * problem.heads + problem.keys) * (problem.head_dim + 4)
        scalar = sum(total.get(kind, 0.0) for kind in _SCALAR)
        units = {
            "matrix": total["matrix cycles"] / simd_cycles,
            "vector": total["VALU"] * rates.vector_cycles / simd_cycles,
            "packed": total["packed"] * rates.vector_cycles / simd_cycles,
            "scalar": scalar * rates.vector_cycles / simd_cycles,
            "L1": total["bytes"] / (rates.l1_bytes * rates.units * rates.clock),
            "LDS": (total["LDS bytes"] / rates.lds_bytes + total["LDS conflicts"]) / (rates.units * rates.clock),
            "memory": (moved + 4.0 * written) / rates.memory_bytes,
        }
        rounds = math.ceil(groups / rates.units)
        cycles = total["matrix cycles"] + total["VALU"] * rates.vector_cycles
        return Prediction(kernel, units, groups / (rounds * rates.units), cycles / max(1.0, positions / 32))


class _Launch:
    """The launch of a problem, of which some workgroups are simulated."""

    def __init__(self, kernel: Any, problem: MqaLogitsProblem, arch: Arch) -> None:
        self.arch, self.problem = arch, problem
        self.run = kernel.launch(problem, arch, kernel.config(problem, arch))
        dtype = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
        rows, keys, heads, dim = problem.rows, problem.keys, problem.heads, problem.head_dim
        # Values play no part in what is executed.
        q = torch.zeros(rows, heads, dim, dtype=torch.uint8).view(dtype)
        k = torch.zeros(keys, dim, dtype=torch.uint8).view(dtype)
        self.tensors = (q, k, torch.ones(keys), torch.ones(rows, heads))
        self.out = torch.empty(rows, row_stride(problem.width, problem.out_dtype), dtype=problem.out_dtype)
        self.grid = self.simulate([], 0).grid

    def simulate(self, workgroups: list[tuple[int, int, int]], length: int) -> Report:
        """Runs these workgroups with every row's window at [0, length)."""
        from cdna_sim import Options

        ks = torch.zeros(self.problem.rows, dtype=torch.int32)
        options = Options(deferred=False, strict=False, workgroups=frozenset(workgroups))
        with simulation(self.arch.name, options) as launcher:
            self.run(MqaLogitsCall(*self.tensors, ks, ks + length, out=self.out[:, : self.problem.width]))
        [report] = launcher.reports
        return report

    def spread(self, count: int) -> list[tuple[int, int, int]]:
        """Workgroups from all over the grid."""
        x, y, _ = self.grid
        numbers = {round(index * (math.prod(self.grid) - 1) / (count - 1)) for index in range(count)}
        return [(number % x, number // x % y, number // (x * y)) for number in sorted(numbers)]


# Keys of the longest window that is simulated: enough that each wave of a split grid has some.
LONGEST = 8192


def _take_apart(backend: str, built: Built, launch: _Launch) -> Kernel:
    problem = launch.problem
    most = min(problem.keys, LONGEST)
    while (windows := _two_windows(launch, most)) is None:
        if most == problem.keys:
            raise ValueError(f"{backend}: no two windows of {problem} give one workgroup different work")
        most = min(problem.keys, 4 * most)  # of many splits, each has a single tile of the shorter one
    empty, shorter, longest = windows

    stored = _stored(empty)
    filled = {name: amount / stored for name, amount in empty.items()} if stored else {}

    def without_fill(amounts: Amounts) -> Amounts:
        """Less what fills the columns outside of the tiles; each position of a tile is one float stored."""
        inside = amounts["flop"] / (2 * problem.heads * problem.head_dim) * 4
        outside = max(0.0, _stored(amounts) - inside)
        return {name: amount - filled.get(name, 0.0) * outside for name, amount in amounts.items()}

    more, less = without_fill(longest), without_fill(shorter)
    names = more.keys() | less.keys()
    flop = {name: (more.get(name, 0.0) - less.get(name, 0.0)) / (longest["flop"] - shorter["flop"]) for name in names}
    group = {name: max(0.0, more.get(name, 0.0) - flop[name] * longest["flop"]) for name in names}
    return Kernel(backend, built, group, flop, filled)


def _two_windows(launch: _Launch, most: int) -> tuple[Amounts, Amounts, Amounts] | None:
    """What one workgroup does without keys, with some, and with more in a window of ``most``; None: it has no more."""

    def work(group: tuple[int, int, int]) -> tuple[float, float]:
        amounts = _amounts(launch.simulate([group], most))
        return amounts["flop"], _stored(amounts)

    # A workgroup that has keys in the longest window, and all of its rows: the last one may lack some.
    busy = max(launch.spread(9), key=work)
    longest = _amounts(launch.simulate([busy], most))
    # A window that ends among its keys, wherever they are.
    low, high = 0, most
    while high - low > 1:
        length = (low + high) // 2
        shorter = _amounts(launch.simulate([busy], length))
        if 0 < shorter["flop"] < longest["flop"]:
            return _amounts(launch.simulate([busy], 0)), shorter, longest
        low, high = (length, high) if shorter["flop"] == 0 else (low, length)
    return None


def _stored(amounts: Amounts) -> float:
    """Bytes of all stores."""
    return sum(amount for name, amount in amounts.items() if name.startswith("store "))


def _amounts(report: Report) -> Amounts:
    """What a report counts, by the names that the model uses."""
    found: Amounts = dict.fromkeys(KINDS, 0.0) | dict(report.by_kind)
    found |= {"flop": 0.0, "matrix cycles": 0.0, "packed": 0.0, "LDS bytes": 0.0}
    for opcode, times in report.by_opcode.items():
        if "mfma" in opcode:
            flop, cycles = matrix_flop_and_cycles(opcode)
            # The scores' products; a kernel may sum heads on the matrix unit too, in bfloat16.
            found["flop"] += flop * times if is_fp8(opcode) else 0
            found["matrix cycles"] += cycles * times
        elif is_packed_f32(opcode):
            found["packed"] += times
        elif (access := _LDS_WIDTH.match(opcode)) is not None:
            found["LDS bytes"] += 64 * int(access[2]) / 8 * (2 if access[1] else 1) * times
    found["LDS conflicts"] = report.lds_bank_conflicts
    found["bytes"] = sum(report.loaded.values()) + sum(report.stored.values())
    found |= {f"load {name}": amount for name, amount in report.loaded.items()}
    found |= {f"store {name}": amount for name, amount in report.stored.items()}
    return found


def bytes_of(amounts: Amounts, access: str, tensor: str) -> float:
    """Bytes that a kernel loads from or stores to one operand; backends name their arguments alike but for endings.

    Args:
        amounts: of a kernel.
        access: ``load`` or ``store``.
        tensor: how the argument's name begins: q, k, w, out. kv_scale, ks and ke are not k.
    """
    names = {name: name.split()[1] for name in amounts if name.startswith(f"{access} ")}
    own = {name for name, argument in names.items() if argument.lower().removesuffix("_ptr") == tensor}
    own = own or {name for name, argument in names.items() if argument.lower().startswith(tensor)}
    return sum(amounts[name] for name in own)


COST_WINDOWS = ("causal", "multi_req")
COMPRESSED_WINDOW = "multi_req/4"


def windows_of(name: str, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ks, ke)`` [rows] int32 of one of the six windows of the sweeps, or of ``multi_req/4``.

    ``multi_req/4``: four requests from their first token on, with keys compressed four to one: token i of a request
    sees the first (i + 1) / 4 of its keys.
    """
    if name != COMPRESSED_WINDOW:
        if name not in WINDOWS:
            raise ValueError(f"name: got {name!r}, expected one of {', '.join((*WINDOWS, COMPRESSED_WINDOW))}")
        return make_windows(name, rows, keys, torch.device("cpu"))
    row = torch.arange(rows)
    tokens = -(-rows // REQUESTS)
    ks = row // tokens * (keys // REQUESTS)
    return ks.to(torch.int32), (ks + (row % tokens + 1) // 4).to(torch.int32)


EXPLANATION = """\
This is a model. Nothing here was measured by this project: the counts are the simulator's, the rates those that AMD
publishes (bench/rates.py holds every input with its source), and no AMD GPU was at hand. "in order": matrix and vector
instructions of a SIMD one after the other; "overlapped": side by side, but for packed float32 instructions. Latencies,
start-up, clocks under load, L2 and uneven workgroups are not in it, so it is a floor, furthest off where launches are
short. Columns with a name in brackets were published by the authors of those kernels, for their own code; "in order is"
compares with the one of the same kind."""
