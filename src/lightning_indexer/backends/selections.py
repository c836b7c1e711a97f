"""What selects where a backend has no kernel of ``top_k_per_row``: Triton's, and without Triton PyTorch's."""

from __future__ import annotations

from lightning_indexer.amd import triton_amd
from lightning_indexer.backends.torch_blocked.top_k import TopK as TorchTopK
from lightning_indexer.backends.triton_portable.top_k import TopK as TritonTopK

SELECTIONS = ((TritonTopK(), triton_amd.missing), (TorchTopK(), lambda: None))
