"""What selects from waves that another backend scores: Hopper's own, Triton's, and without either PyTorch's."""

from __future__ import annotations

from lightning_indexer.amd import triton_amd
from lightning_indexer.backends.cuda_sm90.top_k import TopK as HopperTopK
from lightning_indexer.backends.torch_blocked.top_k import TopK as TorchTopK
from lightning_indexer.backends.triton_portable.top_k import TopK as TritonTopK
from lightning_indexer.cuda import nvrtc

SELECTIONS = ((HopperTopK(), nvrtc.missing), (TritonTopK(), triton_amd.missing), (TorchTopK(), lambda: None))
