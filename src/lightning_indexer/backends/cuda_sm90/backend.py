"""``cuda-sm90``: hand-written CUDA C++ for Hopper, compiled at run time by NVRTC."""

from __future__ import annotations

from typing import ClassVar

from lightning_indexer.backends.cuda_sm90.gather_k_cache import GatherKCache
from lightning_indexer.backends.cuda_sm90.insert_k_cache import InsertKCache
from lightning_indexer.backends.cuda_sm90.mqa_logits import MqaLogits
from lightning_indexer.backends.cuda_sm90.mqa_topk import MqaTopK
from lightning_indexer.backends.cuda_sm90.paged_mqa_logits import PagedMqaLogits
from lightning_indexer.backends.cuda_sm90.paged_mqa_topk import PagedMqaTopK
from lightning_indexer.backends.cuda_sm90.prepare_q import PrepareQ
from lightning_indexer.backends.cuda_sm90.top_k import TopK
from lightning_indexer.cuda import nvrtc


class CudaSm90:
    name = "cuda-sm90"
    summary = "CUDA C++ for Hopper: WGMMA and TMA, compiled at run time by NVRTC"
    kernels: ClassVar = {
        "fp8_mqa_logits": MqaLogits(),
        "fp8_mqa_topk": MqaTopK(),
        "fp8_paged_mqa_logits": PagedMqaLogits(),
        "fp8_paged_mqa_topk": PagedMqaTopK(),
        "gather_k_cache": GatherKCache(),
        "insert_k_cache": InsertKCache(),
        "prepare_q": PrepareQ(),
        "top_k_per_row": TopK(),
    }

    def missing(self) -> str | None:
        return nvrtc.missing()
