"""By operation, the shape by which backends are looked up where none is named: DeepSeek-V3.2's."""

from __future__ import annotations

from typing import Any

from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.gather_k_cache import OPERATION as GATHER
from lightning_indexer.problems.gather_k_cache import GatherProblem
from lightning_indexer.problems.insert_k_cache import OPERATION as INSERT
from lightning_indexer.problems.insert_k_cache import InsertProblem
from lightning_indexer.problems.mqa_logits import OPERATION, MqaLogitsProblem
from lightning_indexer.problems.mqa_topk import OPERATION as MQA_TOPK
from lightning_indexer.problems.mqa_topk import MqaTopKProblem
from lightning_indexer.problems.paged_mqa_logits import OPERATION as PAGED
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem
from lightning_indexer.problems.paged_mqa_topk import OPERATION as PAGED_MQA_TOPK
from lightning_indexer.problems.paged_mqa_topk import PagedMqaTopKProblem
from lightning_indexer.problems.prepare_q import OPERATION as PREPARE_Q
from lightning_indexer.problems.prepare_q import PrepareQProblem
from lightning_indexer.problems.top_k import OPERATION as TOP_K
from lightning_indexer.problems.top_k import TopKProblem

USUAL: dict[str, Any] = {
    OPERATION: MqaLogitsProblem(rows=4096, keys=32768, heads=64, head_dim=128),
    PAGED: PagedMqaLogitsProblem(64, 1, 32768, 64, 128, CacheLayout(), 512),
    TOP_K: TopKProblem(rows=4096, width=32768, k=2048),
    INSERT: InsertProblem(4096, 128),
    GATHER: GatherProblem(32768, 1, CacheLayout(), 512),
    PREPARE_Q: PrepareQProblem(4096, 64, 128),
}
USUAL[PAGED_MQA_TOPK] = PagedMqaTopKProblem(
    USUAL[PAGED]._replace(clean_logits=False), TopKProblem(rows=64, width=32768, k=2048, starts=False)
)
USUAL[MQA_TOPK] = MqaTopKProblem(USUAL[OPERATION]._replace(clean_logits=False), USUAL[TOP_K])
