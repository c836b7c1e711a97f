"""``triton-portable``: one Triton kernel an operation, for every arch that Triton compiles for.

Triton's runtime launches it on a GPU. On the CPU it runs in Triton's interpreter, or, where the arch is AMD's, compiled
for that arch in the simulator (see ``amd``).
"""

from __future__ import annotations

from typing import ClassVar

from lightning_indexer.amd import triton_amd
from lightning_indexer.backends.row_waves import CompiledRowWaves, measured_wave_bytes
from lightning_indexer.backends.selections import SELECTIONS
from lightning_indexer.backends.triton_portable.gather_k_cache import GatherKCache
from lightning_indexer.backends.triton_portable.insert_k_cache import InsertKCache
from lightning_indexer.backends.triton_portable.mqa_logits import MqaLogits
from lightning_indexer.backends.triton_portable.paged_mqa_logits import PagedMqaLogits
from lightning_indexer.backends.triton_portable.prepare_q import PrepareQ
from lightning_indexer.backends.triton_portable.top_k import TopK


class TritonPortable:
    name = "triton-portable"
    summary = "one Triton kernel for NVIDIA sm80 and newer and AMD gfx9/gfx12"
    kernels: ClassVar = {
        "fp8_mqa_logits": MqaLogits(),
        "fp8_mqa_topk": CompiledRowWaves(MqaLogits(), SELECTIONS, wave_bytes=measured_wave_bytes),
        "fp8_paged_mqa_logits": PagedMqaLogits(),
        "gather_k_cache": GatherKCache(),
        "insert_k_cache": InsertKCache(),
        "prepare_q": PrepareQ(),
        "fp8_paged_mqa_topk": CompiledRowWaves(PagedMqaLogits(), SELECTIONS),
        "top_k_per_row": TopK(),
    }

    def missing(self) -> str | None:
        return triton_amd.missing()
