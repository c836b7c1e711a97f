"""Block sizes of ``torch-blocked``: a pure function of the problem and the kind of device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Rows and keys of one block, and how many keys are widened to float32 at a time."""

    block_rows: int
    block_keys: int
    panel_keys: int


def heuristic(problem: MqaLogitsProblem, arch: Arch) -> BlockConfig:
    """A CPU block's scores stay in the L2 of two cores (2 MiB); a GPU block fills the device (256 MiB at most)."""
    if arch.vendor == "cpu":
        score_rows, block_keys, panel_keys = 1024, 512, 65536
    else:
        score_rows, block_keys, panel_keys = 16384, 4096, 262144
    return BlockConfig(max(1, min(problem.rows, score_rows // problem.heads)), block_keys, panel_keys)


def neighbours(problem: MqaLogitsProblem, arch: Arch) -> list[BlockConfig]:
    """What ``bench --tune`` measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, block_rows=rows) for rows in (max(1, chosen.block_rows // 2), 2 * chosen.block_rows)]
    others += [replace(chosen, block_keys=keys) for keys in (chosen.block_keys // 2, 2 * chosen.block_keys)]
    return [chosen, *(config for config in dict.fromkeys(others) if config != chosen)]
