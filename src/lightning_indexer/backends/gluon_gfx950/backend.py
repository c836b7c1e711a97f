"""``gluon-gfx950``: Gluon kernels of gfx950.

Triton's runtime launches them on a GPU. On the CPU they run compiled for gfx950 in the simulator (see ``amd``).
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import ClassVar

from lightning_indexer.amd import triton_amd
from lightning_indexer.backends.gluon_gfx950.mqa_logits import MqaLogits


class GluonGfx950:
    name = "gluon-gfx950"
    summary = "Gluon kernel for AMD gfx950: rows share key tiles that are copied to LDS ahead of their use"
    kernels: ClassVar = {"fp8_mqa_logits": MqaLogits()}

    def missing(self) -> str | None:
        return _missing()


@functools.cache
def _missing() -> str | None:
    if (reason := triton_amd.missing()) is not None:
        return reason
    spec = importlib.util.find_spec("triton")
    gluon = Path("experimental/gluon/language/amd/cdna4")
    if spec is None or not any((Path(place) / gluon).exists() for place in spec.submodule_search_locations or ()):
        return "Triton has no Gluon for gfx950: pip install 'triton>=3.6'"
    return None
