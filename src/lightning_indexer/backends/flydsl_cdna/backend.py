"""``flydsl``: kernels in FlyDSL for CDNA3 and CDNA4.

FlyDSL compiles, and no more than that (``amd.flydsl``); this library's launchers run the code object: HIP on a GPU, the
simulator for tensors on the CPU. Has not run on hardware.
"""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from lightning_indexer.amd import flydsl
from lightning_indexer.backends.flydsl_cdna.mqa_logits import MqaLogits
from lightning_indexer.backends.row_waves import CompiledRowWaves
from lightning_indexer.backends.selections import SELECTIONS


class FlyDsl:
    name = "flydsl"
    summary = "FlyDSL kernels for AMD CDNA3 and CDNA4; executed in simulation only"
    kernels: ClassVar = {
        "fp8_mqa_logits": MqaLogits(),
        "fp8_mqa_topk": CompiledRowWaves(MqaLogits(), SELECTIONS, attrgetter("rows")),
    }

    def missing(self) -> str | None:
        return flydsl.missing()
