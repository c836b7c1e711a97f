"""FP8 MQA logits: the "lightning indexer" scoring step of DeepSeek-V3.2/V4 and GLM-5 sparse attention.

:func:`fp8_mqa_logits` and, over the paged cache of decode steps, :func:`fp8_paged_mqa_logits` run on every accelerator.
Importing this package touches no device, no compiler and no optional package: backends load when a call selects them.
"""

from lightning_indexer._version import __version__
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.chunking import Chunk, Request, plan_chunks
from lightning_indexer.fp8 import decode_ue8m0, dequantize_k, quantize_k, quantize_q
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem, reference_logits
from lightning_indexer.selection.registry import BackendUnavailableError, explain, register, support_table
from lightning_indexer.windows import windows_from_mask

__all__ = [
    "Arch",
    "BackendUnavailableError",
    "CacheLayout",
    "Chunk",
    "MqaLogitsProblem",
    "Request",
    "__version__",
    "arch_of",
    "calc_diff",
    "decode_ue8m0",
    "dequantize_k",
    "explain",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "plan_chunks",
    "quantize_k",
    "quantize_q",
    "reference_logits",
    "register",
    "support_table",
    "windows_from_mask",
]
