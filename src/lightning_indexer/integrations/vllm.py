"""vLLM's prefill scoring through this library. Two seams, as at vLLM 0.33.0:

- ROCm: ``vllm.v1.attention.ops.rocm_aiter_mla_sparse.rocm_fp8_mqa_logits``: [M, N] logits, not cleaned, as vLLM asks of
  AITER. ``VLLM_ROCM_USE_AITER=0`` gives ``torch-blocked``.
- CUDA: ``vllm.utils.deep_gemm.fp8_fp4_mqa_logits``, which ``vllm.model_executor.layers.sparse_attn_indexer`` imports:
  compressed logits. FP4, MX scales and everything else that is not plain fp8 goes to vLLM's own function.

The entry point ``vllm.general_plugins`` calls :func:`register` in every process of vLLM, which installs where
``LIGHTNING_INDEXER_VLLM=1``. docs/engines.md has the whole procedure.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Literal

import torch

import lightning_indexer
from lightning_indexer import envs
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.integrations.patching import Function, Integration, IntegrationError, Seam

Platform = Literal["rocm", "cuda"]

# A child of vLLM's logger: vLLM configures that one, and no other.
_LOGGER = logging.getLogger("vllm.plugins.lightning_indexer")
_INTEGRATION = Integration("vLLM", "vllm", _LOGGER)


def register() -> None:
    """The entry point. Installs where ``LIGHTNING_INDEXER_VLLM=1``; may be called any number of times.

    Where vLLM itself runs on neither ROCm nor CUDA it warns and leaves everything as it is.

    Raises:
        IntegrationError: this vLLM does not have the seam. vLLM then does not start: it was asked to run something
            that it cannot, and an A/B measurement would compare it with itself.
        ValueError: ``LIGHTNING_INDEXER_VLLM`` is neither 0 nor 1.
    """
    if not envs.vllm_plugin():
        return
    platform = _platform()
    if platform is None:
        _LOGGER.warning("LIGHTNING_INDEXER_VLLM=1, but vLLM runs on neither ROCm nor CUDA here: nothing to replace")
        return
    install(platform)


def install(platform: Platform | None = None) -> tuple[str, ...]:
    """Replaces vLLM's prefill scoring in this process.

    Args:
        platform: ``"rocm"`` or ``"cuda"``; None asks vLLM.

    Returns:
        The full names that are replaced. A second call changes nothing and returns them again.

    Raises:
        IntegrationError: vLLM is not installed, runs on another platform, or does not have the seam. Nothing is
            replaced.
        ValueError: another platform.
    """
    if platform is None:
        _check_installed()
        platform = _platform()
        if platform is None:
            raise IntegrationError("vLLM runs on neither ROCm nor CUDA here: nothing was replaced")
    if platform not in _SEAMS:
        raise ValueError(f"platform: got {platform!r}, expected one of {', '.join(_SEAMS)}, or None")
    _check_installed()
    return _INTEGRATION.install((_SEAMS[platform],), _version())


def uninstall() -> tuple[str, ...]:
    """Puts vLLM's own functions back, and returns their names.

    Raises:
        IntegrationError: nothing is installed, or another party has replaced them since.
    """
    return _INTEGRATION.uninstall()


def replaced() -> tuple[str, ...]:
    """Full names of the functions of vLLM that are replaced now."""
    return _INTEGRATION.replaced


def _make_rocm(original: Function) -> Function:
    def rocm_fp8_mqa_logits(
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
    ) -> torch.Tensor:
        if not _takes(q, kv, weights):
            result: torch.Tensor = original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)
            return result
        backend = "torch-blocked" if envs.vllm_without_aiter() else None
        return lightning_indexer.fp8_mqa_logits(
            q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=False, backend=backend
        )

    return rocm_fp8_mqa_logits


def _make_cuda(original: Function) -> Function:
    def fp8_fp4_mqa_logits(
        q: tuple[torch.Tensor, torch.Tensor | None],
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        max_seqlen_k: int,
    ) -> torch.Tensor:
        values, scale = q
        if scale is not None or max_seqlen_k < 1 or not _takes(values, kv, weights):
            result: torch.Tensor = original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k)
            return result
        return lightning_indexer.fp8_mqa_logits(
            values, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=False, max_seqlen_k=max_seqlen_k
        )

    return fp8_fp4_mqa_logits


def _takes(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor) -> bool:
    """Plain fp8 with float32 scales and weights. On Blackwell vLLM passes MX scales as int32, and bfloat16 weights."""
    k, kv_scale = kv
    return (
        q.dtype in FP8_DTYPES
        and k.dtype in FP8_DTYPES
        and kv_scale.dtype is torch.float32
        and weights.dtype is torch.float32
    )


_WINDOWS = ("cu_seqlen_ks", "cu_seqlen_ke")
_SEAMS: dict[str, Seam] = {
    "rocm": Seam(
        ("vllm.v1.attention.ops.rocm_aiter_mla_sparse",),
        "rocm_fp8_mqa_logits",
        ("q", "kv", "weights", *_WINDOWS),
        _make_rocm,
    ),
    "cuda": Seam(
        ("vllm.utils.deep_gemm", "vllm.model_executor.layers.sparse_attn_indexer"),
        "fp8_fp4_mqa_logits",
        ("q", "kv", "weights", *_WINDOWS, "max_seqlen_k"),
        _make_cuda,
    ),
}


def _check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise IntegrationError("vLLM is not installed here: nothing was replaced")


def _platform() -> Platform | None:
    current = importlib.import_module("vllm.platforms").current_platform
    if current.is_rocm():
        return "rocm"
    return "cuda" if current.is_cuda() else None


def _version() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "of unknown version"))
