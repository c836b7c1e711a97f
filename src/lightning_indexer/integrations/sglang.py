"""SGLang's prefill scoring through this library.

SGLang does not score by a function of its own: on ROCm it imports AITER's ``fp8_mqa_logits`` at each call, on CUDA it
calls ``deep_gemm.fp8_mqa_logits``. :func:`install` replaces those two names, for whoever looks them up, before the
server starts or in a plugin of one's own. docs/engines.md shows where.

What SGLang does with the result holds here: its shape is [M, N], and it may be written in place (SGLang scatters
``+inf`` over the positions that it always keeps).
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from typing import Literal

import torch

from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.integrations import aiter, deep_gemm
from lightning_indexer.integrations.patching import Function, Integration, IntegrationError, Seam, distribution_version

Platform = Literal["rocm", "cuda"]

_AITER_PARAMETERS = ("Q", "KV", "kv_scales", "weights", "cu_starts", "cu_ends")
_DEEP_GEMM_PARAMETERS = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "clean_logits")
_LOGGER = logging.getLogger("lightning_indexer.sglang")
# AITER moved the function into a package of its own and kept the older module.
_AITER_MODULES = ("aiter.ops.triton.fp8_mqa_logits", "aiter.ops.triton.attention.fp8_mqa_logits")
_INTEGRATIONS = {"rocm": Integration("AITER", "aiter", _LOGGER), "cuda": Integration("DeepGEMM", "deep_gemm", _LOGGER)}


def install(platform: Platform | None = None) -> tuple[str, ...]:
    """Replaces the functions through which SGLang scores, in this process.

    Code outside of AITER and DeepGEMM that has imported the function by name before keeps the old one; SGLang has not.

    Args:
        platform: ``"rocm"`` for AITER, ``"cuda"`` for DeepGEMM; None takes what PyTorch was built for.

    Returns:
        The full names that are replaced. A second call changes nothing and returns them again.

    Raises:
        IntegrationError: AITER or DeepGEMM is not installed, or its function is not as expected. Nothing is replaced.
        ValueError: another platform.
    """
    if _checked(platform) == "cuda":
        if not _is_there("deep_gemm"):
            raise IntegrationError("DeepGEMM, by which SGLang scores on CUDA, is not installed: nothing was replaced")
        seams = [Seam(("deep_gemm",), "fp8_mqa_logits", _DEEP_GEMM_PARAMETERS, _make_deep_gemm)]
        version = distribution_version("deep_gemm", "deep-gemm", "sgl-deep-gemm")
        return _INTEGRATIONS["cuda"].install(seams, version)
    if not _is_there("aiter"):
        raise IntegrationError("AITER, by which SGLang scores on ROCm, is not installed: nothing was replaced")
    version = distribution_version("amd-aiter", "aiter")
    modules = [name for name in _AITER_MODULES if _is_there(name)]
    if not modules:
        raise IntegrationError(
            f"AITER {version} has none of {', '.join(_AITER_MODULES)}: this version has no such seam; nothing was "
            "replaced"
        )
    return _INTEGRATIONS["rocm"].install(
        [Seam((name,), "fp8_mqa_logits", _AITER_PARAMETERS, _make_aiter) for name in modules], version
    )


def uninstall(platform: Platform | None = None) -> tuple[str, ...]:
    """Puts AITER's or DeepGEMM's own functions back, and returns their names.

    Raises:
        IntegrationError: nothing is installed, or another party has replaced them since.
        ValueError: another platform.
    """
    return _INTEGRATIONS[_checked(platform)].uninstall()


def replaced(platform: Platform | None = None) -> tuple[str, ...]:
    """Full names of the functions that are replaced now."""
    return _INTEGRATIONS[_checked(platform)].replaced


def _make_aiter(original: Function) -> Function:
    return _taking_over(aiter.fp8_mqa_logits, original, q="Q", k="KV")


def _make_deep_gemm(original: Function) -> Function:
    return _taking_over(deep_gemm.fp8_mqa_logits, original, q="q", k="kv")


def _taking_over(ours: Function, original: Function, *, q: str, k: str) -> Function:
    """``ours`` for plain fp8 operands and the arguments it knows; ``original`` for every other call."""
    signature = inspect.signature(ours)

    def fp8_mqa_logits(*args: object, **options: object) -> object:
        try:
            given = signature.bind(*args, **options).arguments
        except TypeError:  # options of another version
            return original(*args, **options)
        keys = given[k][0] if isinstance(given[k], (tuple, list)) else given[k]
        plain = all(isinstance(x, torch.Tensor) and x.dtype in FP8_DTYPES for x in (given[q], keys))
        return (ours if plain and given["weights"].dtype is torch.float32 else original)(*args, **options)

    return fp8_mqa_logits


def _checked(platform: str | None) -> str:
    if platform is None:
        return "rocm" if torch.version.hip else "cuda"
    if platform not in _INTEGRATIONS:
        raise ValueError(f"platform: got {platform!r}, expected one of {', '.join(_INTEGRATIONS)}, or None")
    return platform


def _is_there(name: str) -> bool:
    """A module that can be found; packages above it are imported for that."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
