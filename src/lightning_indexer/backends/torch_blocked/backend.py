"""``torch-blocked``: the operations in PyTorch, block by block. The CPU backend, and the fallback everywhere."""

from __future__ import annotations

from operator import attrgetter
from typing import ClassVar

from lightning_indexer.backends.row_waves import RowWaves
from lightning_indexer.backends.torch_blocked.gather_k_cache import GatherKCache
from lightning_indexer.backends.torch_blocked.insert_k_cache import InsertKCache
from lightning_indexer.backends.torch_blocked.mqa_logits import MqaLogits
from lightning_indexer.backends.torch_blocked.paged_mqa_logits import PagedMqaLogits
from lightning_indexer.backends.torch_blocked.prepare_q import PrepareQ
from lightning_indexer.backends.torch_blocked.top_k import TopK

_SELECTIONS = [(TopK(), lambda: None)]


class TorchBlocked:
    name = "torch-blocked"
    summary = "PyTorch, block by block; any device, any H and D; exact float32"
    kernels: ClassVar = {
        "fp8_mqa_logits": MqaLogits(),
        "fp8_mqa_topk": RowWaves(MqaLogits(), _SELECTIONS, attrgetter("block_rows")),
        "fp8_paged_mqa_logits": PagedMqaLogits(),
        "gather_k_cache": GatherKCache(),
        "insert_k_cache": InsertKCache(),
        "prepare_q": PrepareQ(),
        "fp8_paged_mqa_topk": RowWaves(PagedMqaLogits(), _SELECTIONS),
        "top_k_per_row": TopK(),
    }

    def missing(self) -> str | None:
        return None
