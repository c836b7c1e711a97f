"""``gluon-gfx950``: Gluon kernels of gfx950.

Triton's runtime launches them on a GPU. On the CPU they run compiled for gfx950 in the simulator (see ``amd``).
"""

from __future__ import annotations

import os
from operator import attrgetter
from typing import ClassVar

from lightning_indexer import packages
from lightning_indexer.amd import triton_amd
from lightning_indexer.backends.gluon_gfx950.mqa_logits import MqaLogits
from lightning_indexer.backends.row_waves import CompiledRowWaves
from lightning_indexer.backends.selections import SELECTIONS


class GluonGfx950:
    name = "gluon-gfx950"
    summary = "Gluon kernel for AMD gfx950: rows share key tiles that are copied to LDS ahead of their use"
    kernels: ClassVar = {
        "fp8_mqa_logits": MqaLogits(),
        "fp8_mqa_topk": CompiledRowWaves(MqaLogits(), SELECTIONS, attrgetter("rows")),
    }

    def missing(self) -> str | None:
        return _missing()


def _missing() -> str | None:
    if (reason := triton_amd.missing()) is not None:
        return reason
    gluon = "experimental/gluon/language/amd/cdna4"
    if not any(os.path.exists(place / gluon) for place in packages.folders("triton")):  # noqa: PTH110
        return "Triton has no Gluon for gfx950: pip install 'triton>=3.6'"
    return None
