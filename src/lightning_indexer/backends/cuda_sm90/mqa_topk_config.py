"""The gate of ``fp8_mqa_topk`` for Hopper: which calls go through it, with what sample, and where things lie.

All of it is a pure function of the problem and the arch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90.config import KernelConfig
from lightning_indexer.problems.mqa_logits import row_stride
from lightning_indexer.problems.mqa_topk import ALIGN_BYTES, MqaTopKProblem

HEADS = (32, 64)
# A bitmap of a row's positions has to fit in a CTA, and a row's sample in the registers of one.
MAX_KEYS = 2**20
# Where the gate pays, measured at 8192 and at 32768: in shorter rows too many keys are candidates.
LEAST_KEYS = 32768
LEAST_SCORES = 2**24
# Room of a warp of the selection beyond a list's: each part of a list is brought in whole vectors of two.
WARP_SLACK = 32
CANDIDATE_BYTES = 8
# A list's keys are every 16th of 128: one that begins and ends inside of a row's window has so many more.
LIST_SLACK = 48
# CTAs of the product, which have a place of their own in the middle of a row block, beyond those that equal cuts make.
SPARE_PLACES = 16
# How rarely a gate may be too high. Two rows of 100,000 that are done again cost what one step of the rank does.
MISS = 2.5e-5
# Of the structs that kernels take, each packed.
_PRODUCT = "3q4i"  # of struct Arguments of shared.cuh, behind six pointers
_OUTPUT = "4Q3q2i"
STRUCTS = {
    "sample": ("9Qq6i",),
    "score": (f"6Q{_PRODUCT}",),
    "gate": ("4Qq2i",),
    "product": (f"6Q{_PRODUCT}5Q2i",),
    "select": (f"8Q{_OUTPUT}8i",),
    "redo": (f"6Q{_PRODUCT}Q", f"4Q2q2i{_OUTPUT}"),
}
INDEX_BASES = ("row", "absolute", "offset", "page")
SELECT_THREADS = 256
# struct SelectionRoom of selection.cuh and struct Block of mqa_topk_select.cuh; struct SelectionShared.
SELECT_STATIC, REDO_SELECTION = 6912, 24 * 1024
SHARED_OF_SM, SHARED_OF_SYSTEM = 228 * 1024, 1024  # the latter of every CTA
VALUES_PER_LANE = 16
# Of a bitmap, at a time, in the selection of candidates: several parts take 20 us more at (512, 262144), measured.
SELECT_WORDS = 8192


@dataclass(frozen=True, slots=True)
class GateConfig:
    """How one call goes through the gate.

    Attributes:
        product, redo: of the kernels that score; the sample is scored by ``fp8_mqa_logits``' own.
        stride: one of so many keys is in the sample.
        rank: the gate is the sampled score of this rank: about ``rank * stride`` candidates pass.
        room: candidates of a list, of which a row has one for each math warp.
        sampled: rows whose samples are scored at a time.
        wave: rows that are scored and selected from at a time, whole row blocks.
        places: of lists, one for each row block of a wave and the others for pieces in the middle of one.
        again: rows that are scored again at a time.
        dependent: product and selection start while the kernel in front of them ends.
    """

    product: KernelConfig
    redo: KernelConfig
    sample: KernelConfig
    stride: int
    rank: int
    room: int
    sampled: int
    wave: int
    places: int
    again: int
    dependent: bool = True

    @property
    def lists(self) -> int:
        """Of a row and a piece of the product."""
        return 4 * self.product.workers

    @property
    def capacity(self) -> int:
        """Candidates of a row."""
        return self.lists * self.room

    @property
    def warp_room(self) -> int:
        """Candidates of a warp of the selection, in shared memory."""
        return self.room + WARP_SLACK

    @property
    def ungated(self) -> int:
        """Windows that are not longer need no gate."""
        return self.lists * (self.room - LIST_SLACK)

    def __str__(self) -> str:
        return (
            f"{self.product.name}, one key of {self.stride} sampled, {self.rank * self.stride} of {self.capacity} "
            f"candidates, waves of {self.wave} rows"
        )


def rank_of(expected: float, miss: float) -> int:
    """The rank in the sample that a gate takes: it misses a row with probability ``miss``.

    Of independent scores, the sample holds a Poisson number of the k first, ``expected`` on average; the gate is too
    high where it holds ``rank`` or more.
    """
    term, at = math.exp(-expected), 0
    below = term
    while 1.0 - below > miss and at < 16 * expected + 64:
        at += 1
        term *= expected / at
        below += term
    return at + 1


def room_of(rank: int, stride: int, lists: int, deviations: float = 5.0) -> int:
    """Room of a list: its share of ``rank * stride`` candidates, and some deviations more."""
    share = rank * stride / lists
    return -(-int(share + deviations * math.sqrt(share * share / rank + share)) // 16) * 16


def refusal(problem: MqaTopKProblem, arch: Arch) -> str | None:
    """None, or why a call cannot go through the gate."""
    scoring, selection = problem.scoring, problem.selection
    if arch.name != "sm90" or not scoring.aligned:
        return "needs sm90 and rows on 16-byte boundaries"
    if scoring.heads not in HEADS:
        return f"H={scoring.heads}: registers reach for {HEADS}"
    if scoring.compressed or problem.force_first or problem.force_last:
        return "windows are bounded or positions are always kept"
    if selection.order == "score" or selection.tie == "larger":
        return "ascending positions, the smaller of equals"
    if not problem.k <= problem.keys <= MAX_KEYS:
        return f"N={problem.keys}: from k to {MAX_KEYS}"
    return None


def gated(problem: MqaTopKProblem, arch: Arch) -> bool:
    """Whether a call goes through the gate, measured: docs/kernels/cuda_sm90_mqa_topk.md."""
    if refusal(problem, arch) is not None:
        return False
    # Where all scores fit into the workspace, two calls are as fast or faster.
    scores = problem.rows * row_stride(problem.keys, torch.float32)
    return problem.keys >= LEAST_KEYS and scores >= LEAST_SCORES and 4 * scores > problem.workspace_bytes


def gate_config(
    problem: MqaTopKProblem,
    arch: Arch,
    *,
    stride: int | None = None,
    rank: int | None = None,
    room: int | None = None,
    dependent: bool = True,
) -> GateConfig | None:
    """The gate's configuration; None where the workspace is too small for it."""
    scoring = problem.scoring
    base = KernelConfig(scoring.heads, scoring.head_dim, "noclean", "f32", arch.units)
    product = replace(base, epilogue="append")
    lists = 4 * product.workers
    if stride is None:
        stride = 32 if problem.keys <= 65536 else 64
    if rank is None:
        rank = rank_of(problem.k / stride, MISS)
    if room is None:
        room = room_of(rank, stride, lists)
    if lists * (room - LIST_SLACK) < problem.k:
        room = -(-problem.k // lists // 16) * 16 + 64
    listed = replace(base, epilogue="listed")
    config = GateConfig(product, listed, base, stride, rank, room, 0, 0, 0, 0, dependent)

    block_rows = product.rows
    blocks = -(-problem.rows // block_rows)
    # Counters and counts come before: an upper bound of them first.
    for waves in range(1, blocks + 1):
        in_wave = -(-blocks // waves)
        wanted = in_wave + max(0, arch.units - in_wave) + SPARE_PLACES
        trial = replace(config, wave=in_wave * block_rows, places=wanted)
        plan = Plan(problem, trial)
        if plan.fixed + plan.place_bytes * wanted <= problem.workspace_bytes:
            break
    else:
        return None
    spare = (problem.workspace_bytes - plan.fixed) // (plan.place_bytes + plan.counts_of_place)
    config = replace(trial, places=max(wanted, min(spare, in_wave + arch.units)))
    plan = Plan(problem, config)
    main = problem.workspace_bytes - plan.fixed
    again = min(blocks * block_rows, main // plan.again_bytes)
    again = _whole(again, block_rows)
    sampled = min(blocks * block_rows, main // plan.sample_bytes)
    if sampled < problem.rows:
        sampled = _whole(sampled, config.wave if sampled >= config.wave else block_rows)
    if not again or not sampled:
        return None
    if sampled < config.wave:
        config = replace(config, wave=sampled)
    return replace(config, again=again, sampled=sampled)


def _whole(rows: int, unit: int) -> int:
    """As many rows in whole units, or fewer than one unit."""
    return rows if rows < unit else rows // unit * unit


class Plan:
    """Where things lie in the workspace: what all of a call shares, then what one step after the other works in."""

    def __init__(self, problem: MqaTopKProblem, config: GateConfig) -> None:
        rows, keys, dim = problem.rows, problem.keys, problem.head_dim
        self.samples = -(-keys // config.stride)
        self.sample_stride = row_stride(self.samples, torch.float32)
        self.key_stride = row_stride(keys, torch.float32)
        self.waves = -(-rows // max(1, config.wave))
        self.counters = 2 + self.waves  # listed rows, CTAs at a meeting, places taken in each wave
        lists = config.product.rows * config.lists
        self.counts_of_place = 2 * 4 * lists
        self.place_bytes = CANDIDATE_BYTES * lists * config.room
        self.sample_bytes = 4 * self.sample_stride
        self.again_bytes = problem.heads * dim + 4 * self.key_stride
        self.offset: dict[str, int] = {}
        at = 0
        for name, size in (
            ("counters", 4 * self.counters), ("gates", 16 * rows), ("sampled_ks", 4 * rows), ("sampled_ke", 4 * rows),
            ("redo", 4 * rows), ("middles", 8 * config.product.ctas), ("sampled_scale", 4 * self.samples),
            ("sampled_k", dim * self.samples), ("counts", self.counts_of_place * config.places),
        ):  # fmt: skip
            self.offset[name] = at
            at += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        self.fixed = at
        self.offset["main"] = at
        gathered = -(-config.again * problem.heads * dim // ALIGN_BYTES) * ALIGN_BYTES
        self.offset["again"] = at + gathered
        self.bytes = at + max(
            self.place_bytes * config.places, self.sample_bytes * config.sampled,
            gathered + 4 * self.key_stride * config.again,
        )  # fmt: skip


def bitmap_words(problem: MqaTopKProblem) -> int:
    """Of a bitmap of a row's positions, whole vectors."""
    return -(-problem.keys // 128) * 4


def select_words(problem: MqaTopKProblem) -> int:
    """The same for the selection of candidates, which goes over long rows in parts."""
    return min(bitmap_words(problem), SELECT_WORDS)


def bitmap_bytes(problem: MqaTopKProblem, words: int) -> int:
    """Of a bitmap, with a count for each vector where values are asked for."""
    return 5 * words if problem.selection.values else 4 * words
