"""The "lightning indexer" of DeepSeek-V3.2/V4 and GLM-5 sparse attention: scores, and the positions they select.

:func:`fp8_mqa_logits` scores, :func:`fp8_paged_mqa_logits` scores over the paged cache of decode steps,
:func:`top_k_per_row` selects, :func:`fp8_mqa_topk` and :func:`fp8_paged_mqa_topk` do both at once;
:func:`insert_k_cache`, :func:`gather_k_cache` and :func:`prepare_q` make what is scored. They run on every accelerator.
Importing this package touches no device, no compiler and no optional package: backends load when a call selects them.
"""

from lightning_indexer._version import __version__
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.calls.gather_k_cache import gather_k_cache
from lightning_indexer.calls.insert_k_cache import insert_k_cache
from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.mqa_topk import fp8_mqa_topk, fp8_paged_mqa_topk
from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.calls.prepare_q import prepare_q
from lightning_indexer.calls.top_k import top_k_per_row, top_k_workspace_bytes
from lightning_indexer.chunking import Chunk, Request, plan_chunks
from lightning_indexer.fp8 import decode_ue8m0, dequantize_k, quantize_k, quantize_q
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem, reference_logits
from lightning_indexer.problems.mqa_topk import MqaTopKProblem, reference_mqa_topk
from lightning_indexer.problems.paged_mqa_topk import PagedMqaTopKProblem
from lightning_indexer.problems.top_k import TopKProblem, reference_top_k
from lightning_indexer.selection.registry import BackendUnavailableError, explain, register, support_table
from lightning_indexer.windows import windows_from_mask

__all__ = [
    "Arch",
    "BackendUnavailableError",
    "CacheLayout",
    "Chunk",
    "MqaLogitsProblem",
    "MqaTopKProblem",
    "PagedMqaTopKProblem",
    "Request",
    "TopKProblem",
    "__version__",
    "arch_of",
    "calc_diff",
    "decode_ue8m0",
    "dequantize_k",
    "explain",
    "fp8_mqa_logits",
    "fp8_mqa_topk",
    "fp8_paged_mqa_logits",
    "fp8_paged_mqa_topk",
    "gather_k_cache",
    "insert_k_cache",
    "plan_chunks",
    "prepare_q",
    "quantize_k",
    "quantize_q",
    "reference_logits",
    "reference_mqa_topk",
    "reference_top_k",
    "register",
    "support_table",
    "top_k_per_row",
    "top_k_workspace_bytes",
    "windows_from_mask",
]
