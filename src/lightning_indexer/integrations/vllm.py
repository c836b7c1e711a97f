"""vLLM's prefill scoring through this library. Two seams, as at vLLM 0.33.0:

- ROCm: ``vllm.v1.attention.ops.rocm_aiter_mla_sparse.rocm_fp8_mqa_logits``: [M, N] logits, not cleaned, as vLLM asks of
  AITER. ``VLLM_ROCM_USE_AITER=0`` gives ``torch-blocked``.
- CUDA: ``vllm.utils.deep_gemm.fp8_fp4_mqa_logits``, which ``vllm.model_executor.layers.sparse_attn_indexer`` imports:
  compressed logits. FP4, MX scales and everything else that is not plain fp8 goes to vLLM's own function. On Blackwell
  of the SM100 family that is every call: there is nothing to install there.

The entry point ``vllm.general_plugins`` calls :func:`register` in every process of vLLM, which installs where
``LIGHTNING_INDEXER_VLLM=1``. docs/engines.md has the whole procedure.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from typing import Literal

import torch

import lightning_indexer
from lightning_indexer import envs
from lightning_indexer.arch import Arch, forced_arch, gpu_arch
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.integrations.notes import Notes, check_environment
from lightning_indexer.integrations.patching import Function, Integration, IntegrationError, Seam

Platform = Literal["rocm", "cuda"]

# A child of vLLM's logger: vLLM configures that one, and no other.
_LOGGER = logging.getLogger("vllm.plugins.lightning_indexer")
_INTEGRATION = Integration("vLLM", "vllm", _LOGGER)
_NOTES = Notes("vLLM", _LOGGER)
_MX_SCALES = "vLLM scores with MX scales on this GPU (Blackwell, SM100 family), and this library takes no such call"


def register() -> None:
    """The entry point. Installs where ``LIGHTNING_INDEXER_VLLM=1``; may be called any number of times.

    Where vLLM itself runs on neither ROCm nor CUDA, or would pass it no call that it can take, it warns and leaves
    everything as it is.

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
    if platform == "cuda" and _uses_mx_scales():
        _LOGGER.warning("LIGHTNING_INDEXER_VLLM=1, but %s: nothing was replaced", _MX_SCALES)
        return
    install(platform)


def install(platform: Platform | None = None) -> tuple[str, ...]:
    """Replaces vLLM's prefill scoring in this process.

    Logs what it replaced, and once a process: which backends run on this GPU, the first call that was taken, and each
    reason for which a call went to vLLM's own function. No device is touched.

    Args:
        platform: ``"rocm"`` or ``"cuda"``; None asks vLLM.

    Returns:
        The full names that are replaced. A second call changes nothing and returns them again.

    Raises:
        IntegrationError: vLLM is not installed, runs on another platform, scores with MX scales, or does not have the
            seam. Nothing is replaced.
        ValueError: another platform; a variable of the library's that no call could follow.
    """
    if platform is None:
        _check_installed()
        platform = _platform()
        if platform is None:
            raise IntegrationError("vLLM runs on neither ROCm nor CUDA here: nothing was replaced")
    if platform not in _SEAMS:
        raise ValueError(f"platform: got {platform!r}, expected one of {', '.join(_SEAMS)}, or None")
    _check_installed()
    if platform == "cuda" and _uses_mx_scales():
        raise IntegrationError(f"{_MX_SCALES}: nothing was replaced")
    check_environment()
    names = _INTEGRATION.install((_SEAMS[platform],), _version())
    if (arch := _arch(platform)) is not None:
        _NOTES.runs_on(arch, compressed=platform == "cuda", backend=_backend() if platform == "rocm" else None)
    return names


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
        if (reason := _not_plain_fp8(q, kv, weights)) is not None:
            _NOTES.passed_on(reason)
            theirs: torch.Tensor = original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)
            return theirs
        backend = _backend()
        result = lightning_indexer.fp8_mqa_logits(
            q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=False, backend=backend
        )
        if not _NOTES.first_call_told:
            _NOTES.tell_first_call(q, kv[0], 0, False, backend)
        return result

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
        if scale is not None:
            reason: str | None = "q has scales, which makes it FP4 or MX"
        elif max_seqlen_k < 1:
            reason = f"max_seqlen_k is {max_seqlen_k}"
        else:
            reason = _not_plain_fp8(values, kv, weights)
        if reason is not None:
            _NOTES.passed_on(reason)
            theirs: torch.Tensor = original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k)
            return theirs
        result = lightning_indexer.fp8_mqa_logits(
            values, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=False, max_seqlen_k=max_seqlen_k
        )
        if not _NOTES.first_call_told:
            _NOTES.tell_first_call(values, kv[0], max_seqlen_k, False, None)
        return result

    return fp8_fp4_mqa_logits


def _backend() -> str | None:
    """What calls on ROCm name."""
    return "torch-blocked" if envs.vllm_without_aiter() else None


def _not_plain_fp8(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor) -> str | None:
    """None for plain fp8 with float32 scales and weights; else what is not. MX scales are int32, FP4 is int8."""
    k, kv_scale = kv
    if q.dtype not in FP8_DTYPES or k.dtype not in FP8_DTYPES:
        return f"q is {q.dtype}, k is {k.dtype}"
    if kv_scale.dtype is not torch.float32 or weights.dtype is not torch.float32:
        return f"kv_scale is {kv_scale.dtype}, weights are {weights.dtype}"
    return None


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


def _uses_mx_scales() -> bool:
    """vLLM's own answer, which asks the driver's library and makes no CUDA context."""
    try:
        module = importlib.import_module("vllm.utils.deep_gemm")
    except ImportError:  # no such seam: the installation says so
        return False
    asked = getattr(module, "mqa_logits_use_mx_scales", None)
    return asked is not None and bool(asked())


def _arch(platform: Platform) -> Arch | None:
    """The GPU's, as vLLM found it without a CUDA context; None where it did not."""
    if (forced := forced_arch()) is not None:
        return forced
    if platform == "rocm":
        name = str(getattr(sys.modules.get("vllm.platforms.rocm"), "_GCN_ARCH", "")).split(":")[0]
        return gpu_arch(name) if name else None
    capability = importlib.import_module("vllm.platforms").current_platform.get_device_capability()
    return None if capability is None else gpu_arch(f"sm{capability.major}{capability.minor}")


def _version() -> str:
    return str(getattr(importlib.import_module("vllm"), "__version__", "of unknown version"))
