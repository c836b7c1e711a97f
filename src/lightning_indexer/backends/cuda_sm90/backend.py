"""``cuda-sm90``: hand-written CUDA C++ for Hopper, compiled at run time by NVRTC."""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from lightning_indexer.backends.cuda_sm90.mqa_logits import MqaLogits
from lightning_indexer.backends.cuda_sm90.paged_mqa_logits import PagedMqaLogits
from lightning_indexer.backends.cuda_sm90.top_k import TopK
from lightning_indexer.backends.row_waves import RowWaves
from lightning_indexer.cuda import nvrtc


class CudaSm90:
    name = "cuda-sm90"
    summary = "CUDA C++ for Hopper: WGMMA and TMA, compiled at run time by NVRTC"
    kernels: ClassVar = {
        "fp8_mqa_logits": MqaLogits(),
        "fp8_paged_mqa_logits": PagedMqaLogits(),
        "fp8_mqa_topk": RowWaves(MqaLogits(), [(TopK(), nvrtc.missing)], attrgetter("rows")),
        "fp8_paged_mqa_topk": RowWaves(PagedMqaLogits(), [(TopK(), nvrtc.missing)]),
        "top_k_per_row": TopK(),
    }

    def missing(self) -> str | None:
        return nvrtc.missing()
