"""Bytes and time of context parallelism by the number of ranks: a model, of measured rates and assumed networks.

Measured, on one or two H200 of one host: scoring and selection of ``cuda-sm90`` (docs/kernels/), DeepGEMM's decode
scores, NCCL's collectives over NVLink. Assumed: hosts of eight GPUs, a network port of 400 Gb/s for each GPU of which
nine tenths carry data, and 10 us more for each doubling of the hosts. Nothing was measured on more than one host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Scoring, not cleaned, H=64 and 32 at D=128: (4096, 131072) causal in 7337 and 4034 us.
SCORING_FLOPS = {64: 1.18e15, 32: 1.07e15}
# Selection, k = 2048: (4096, 32768) in 159 us, (1024, 131072) in 156, (64, 131072) in 23.6; bytes read.
SELECTION_BYTES, SELECTION_START = 3.6e12, 10e-6
# Decode scores of DeepGEMM: (64, 1, 32768) in 82 us, (128, 1, 65536) in 288: bytes of cache.
DECODE_BYTES, DECODE_START = 3.9e12, 8e-6
# A launch; copies of candidates, read and written.
LAUNCH, COPY_BYTES = 5e-6, 4.2e12
# All-gathers of 17 to 138 MB, two GPUs: 38 us, and 245 GB/s received.
COLLECTIVE_START, NVLINK_BYTES = 38e-6, 245e9
# Assumed.
GPUS_OF_A_HOST = 8
NETWORK_BYTES, DOUBLING_OF_HOSTS = 0.9 * 50e9, 10e-6

FORMS = ("rows", "keys", "decode")


@dataclass(frozen=True, slots=True)
class Problem:
    """M rows of a chunk at the end of N keys, or M sequences of N cached keys; D is 128."""

    form: str
    rows: int
    keys: int
    heads: int
    k: int = 2048
    head_dim: int = 128

    @property
    def key_bytes(self) -> int:
        return self.head_dim + 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """One rank's share. Seconds and bytes.

    ``compute`` is scores, selection and merge; ``exposed`` what of the ``communication`` no compute lies over;
    ``shard_bytes`` its operands of N, ``workspace_bytes`` what else it needs, logits of 1 GiB aside.
    """

    ranks: int
    compute: float
    communication: float
    exposed: float
    received_bytes: float
    shard_bytes: float
    workspace_bytes: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def estimate(problem: Problem, ranks: int, way: str | None = None) -> Estimate:
    """One rank's time and bytes.

    Args:
        problem: of all ranks together.
        ranks: P.
        way: how candidates are merged, ``"gather"``, ``"rows"`` or ``"histogram"``, of keys and decode; None: the best.
    """
    if problem.form == "rows":
        return _rows(problem, ranks)
    if way is None:
        return min((estimate(problem, ranks, each) for each in ("gather", "rows")), key=lambda found: found.total)
    return _keys(problem, ranks, way)


def _rows(p: Problem, ranks: int) -> Estimate:
    rows = p.rows / ranks
    compute = _scoring(p, rows, p.keys) + _selection(rows, p.keys)
    received = p.keys * p.key_bytes * (ranks - 1) / ranks
    communication = collective(received, ranks)
    exposed = communication  # all keys first, then the rows
    if ranks > 1:
        # Or some rows in 1 + 2 + 4 + … shards, whose scoring covers the arrival as far as it lasts.
        pieces = math.ceil(math.log2(ranks + 1))
        early = min(rows, 2 * communication / (_scoring(p, 1, p.keys) - LAUNCH))
        extra = pieces * (LAUNCH + SELECTION_START) + _merge(early, pieces, p.k)
        left = max(0.0, communication - _scoring(p, early, p.keys))
        if extra + left < exposed:
            compute, exposed = compute + extra, left
    shard = p.keys * p.key_bytes / ranks
    return Estimate(ranks, compute, communication, exposed, received, shard, p.keys * p.key_bytes + 12 * rows * p.k)


def _keys(p: Problem, ranks: int, way: str) -> Estimate:
    keys = p.keys / ranks
    if p.form == "decode":
        scoring = DECODE_START + p.rows * keys * p.key_bytes / DECODE_BYTES
    else:
        scoring = _scoring(p, p.rows, keys)
    compute = scoring + _selection(p.rows, keys)
    held = p.keys * p.key_bytes / ranks * (p.rows if p.form == "decode" else 1)
    if ranks == 1:
        return Estimate(1, compute, 0.0, 0.0, 0.0, held, 0.0)
    lists, others = 8.0 * p.rows * p.k, (ranks - 1) / ranks
    if way == "gather":
        received = lists * (ranks - 1)
        communication = collective(received, ranks)
        compute += _merge(p.rows, ranks, p.k)
        workspace = lists * (1 + 3 * ranks)
    elif way == "rows":
        received = 1.5 * lists * others
        communication = collective(lists * others, ranks) + collective(lists / 2 * others, ranks)
        compute += _merge(p.rows / ranks, ranks, p.k)
        workspace = 6 * lists
    else:
        # 256 counts a row for each byte of (score, position), then counts and survivors, each an all-reduce.
        rounds = 4 + math.ceil(math.log2(p.keys) / 8)
        sums = [1024.0 * p.rows] * rounds + [lists]
        received = sum(2 * each * others for each in sums) + 4 * p.rows * (ranks - 1)
        communication = sum(collective(2 * each * others, ranks) for each in sums) + collective(0, ranks)
        compute += rounds * (6 * LAUNCH + 2 * lists / COPY_BYTES) + _merge(p.rows, 1, p.k)
        workspace = 5 * lists + 1024 * p.rows
    return Estimate(ranks, compute, communication, communication, received, held, workspace)


def _scoring(p: Problem, rows: float, keys: float) -> float:
    return LAUNCH + 2 * p.heads * p.head_dim * rows * keys / SCORING_FLOPS[p.heads]


def _selection(rows: float, keys: float) -> float:
    return SELECTION_START + 4 * rows * keys / SELECTION_BYTES


def _merge(rows: float, lists: int, k: int) -> float:
    """Candidates copied into rows, and the best of them selected."""
    return 4 * LAUNCH + 24 * rows * lists * k / COPY_BYTES + _selection(rows, lists * k)


def collective(received: float, ranks: int) -> float:
    """Seconds of a collective in which a rank receives this many bytes, from all others alike."""
    if ranks == 1:
        return 0.0
    near = min(ranks, GPUS_OF_A_HOST)
    from_far = received * (ranks - near) / (ranks - 1)
    hosts = ranks / near
    transfer = max((received - from_far) / NVLINK_BYTES, from_far / NETWORK_BYTES)
    return COLLECTIVE_START + DOUBLING_OF_HOSTS * math.log2(hosts) + transfer
