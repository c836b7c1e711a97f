"""``hip-gfx950``: hand-written HIP C++ for CDNA4.

On tensors in host memory it runs in the simulator (see ``amd``); it has not run on hardware.
"""

from __future__ import annotations

from operator import attrgetter

from lightning_indexer.amd import clang
from lightning_indexer.backends.hip_gfx950.config import Tunables
from lightning_indexer.backends.hip_gfx950.mqa_logits import MqaLogits
from lightning_indexer.backends.row_waves import CompiledRowWaves
from lightning_indexer.backends.selections import SELECTIONS


class HipGfx950:
    """``tunables``: kept in place of the heuristic's choices, for measurements; the library's own has none."""

    name = "hip-gfx950"
    summary = "HIP C++ for CDNA4 (MI350X, MI355X), H 32 and 64, D 128; executed in simulation only"

    def __init__(self, tunables: Tunables | None = None) -> None:
        scoring = MqaLogits(tunables)
        waves = CompiledRowWaves(scoring, SELECTIONS, attrgetter("rows_of_block"))
        self.kernels = {"fp8_mqa_logits": scoring, "fp8_mqa_topk": waves}

    def missing(self) -> str | None:
        return clang.missing()
