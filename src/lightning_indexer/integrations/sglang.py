"""SGLang's prefill scoring through this library.

SGLang does not score by a function of its own: on ROCm it imports AITER's ``fp8_mqa_logits`` at each call, on CUDA it
calls ``deep_gemm.fp8_mqa_logits``. :func:`install` replaces those two names, for whoever looks them up in this process.

Models run in processes that SGLang spawns, which inherit nothing that was installed before. SGLang loads its plugins
first in each of them: the entry point ``sglang.srt.plugins`` calls :func:`register`, which installs where
``LIGHTNING_INDEXER_SGLANG=1``. docs/engines.md has the whole procedure.

What SGLang does with the result holds here: its shape is [M, N], or [M, max_seqlen_k] where SGLang gives that, and it
may be written in place (SGLang scatters ``+inf`` over the positions that it always keeps).
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch

from lightning_indexer import envs
from lightning_indexer.arch import arch_of
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.integrations import aiter, deep_gemm
from lightning_indexer.integrations.notes import Notes, check_environment
from lightning_indexer.integrations.patching import Function, Integration, IntegrationError, Seam, distribution_version

Platform = Literal["rocm", "cuda"]

_AITER_PARAMETERS = ("Q", "KV", "kv_scales", "weights", "cu_starts", "cu_ends")
_DEEP_GEMM_PARAMETERS = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "clean_logits")
_LOGGER = logging.getLogger("lightning_indexer.sglang")
# AITER moved the function into a package of its own and kept the older module.
_AITER_MODULES = ("aiter.ops.triton.fp8_mqa_logits", "aiter.ops.triton.attention.fp8_mqa_logits")
_NOTES = Notes("SGLang", _LOGGER)
_INTEGRATIONS = {"rocm": Integration("AITER", "aiter", _LOGGER), "cuda": Integration("DeepGEMM", "deep_gemm", _LOGGER)}


def register() -> None:
    """The entry point. Installs where ``LIGHTNING_INDEXER_SGLANG=1``; may be called any number of times.

    Raises:
        IntegrationError, ValueError: as :func:`install`, or the variable is neither 0 nor 1. SGLang swallows what a
            plugin raises and serves with its own functions, so it is logged here as an error first.
    """
    try:
        if envs.sglang_plugin():
            install()
    except Exception as error:
        _LOGGER.error("lightning-indexer is not installed, SGLang scores with its own functions: %s", error)
        raise


def install(platform: Platform | None = None) -> tuple[str, ...]:
    """Replaces the functions through which SGLang scores, in this process.

    Logs what it replaced, and once a process: which backends run on this GPU, the first call that was taken, and each
    reason for which a call went to the original. No device is touched.

    Code outside of AITER and DeepGEMM that has imported the function by name before keeps the old one; SGLang has not.

    Args:
        platform: ``"rocm"`` for AITER, ``"cuda"`` for DeepGEMM; None takes what PyTorch was built for.

    Returns:
        The full names that are replaced. A second call changes nothing and returns them again.

    Raises:
        IntegrationError: AITER or DeepGEMM is not installed, or its function is not as expected. Nothing is replaced.
        ValueError: another platform; a variable of the library's that no call could follow.
    """
    checked = _checked(platform)
    check_environment()
    names = _install(checked)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # else the first call tells: asking here would make a context
        _NOTES.runs_on(arch_of("cuda"), compressed=False)
    return names


def _install(platform: str) -> tuple[str, ...]:
    if platform == "cuda":
        if not _is_there("deep_gemm"):
            raise IntegrationError("DeepGEMM, by which SGLang scores on CUDA, is not installed: nothing was replaced")
        seams = [Seam(("deep_gemm",), "fp8_mqa_logits", _DEEP_GEMM_PARAMETERS, _make_deep_gemm, more=True)]
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
        [Seam((name,), "fp8_mqa_logits", _AITER_PARAMETERS, _make_aiter, more=True) for name in modules], version
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
    return _taking_over(aiter.fp8_mqa_logits, original, keys=lambda kv: kv, weights=3)


def _make_deep_gemm(original: Function) -> Function:
    return _taking_over(deep_gemm.fp8_mqa_logits, original, keys=_first, weights=2)


def _first(kv: Any) -> Any:
    return kv[0] if isinstance(kv, (tuple, list)) else kv


def _taking_over(ours: Function, original: Function, *, keys: Callable[[Any], Any], weights: int) -> Function:
    """``ours`` for plain fp8 operands and the arguments it knows; ``original`` for every other call.

    ``keys`` takes the keys out of the second argument, ``weights`` is the place of the weights. Operands by position,
    as SGLang passes them, are found without binding a signature, which would cost as much as the rest of the call.
    """
    signature = inspect.signature(ours)
    required = sum(parameter.default is parameter.empty for parameter in signature.parameters.values())
    most = len(signature.parameters)
    optional = frozenset(list(signature.parameters)[required:])

    def fp8_mqa_logits(*args: Any, **options: Any) -> object:
        if required <= len(args) <= most and options.keys() <= optional:
            given = args
        else:
            try:
                given = tuple(signature.bind(*args, **options).arguments.values())
            except TypeError as error:  # options of another version
                _NOTES.passed_on(str(error))
                return original(*args, **options)
        k = keys(given[1])
        if (reason := _not_plain_fp8(given[0], k, given[weights])) is not None:
            _NOTES.passed_on(reason)
            return original(*args, **options)
        result = ours(*args, **options)
        if not _NOTES.first_call_told and not torch.compiler.is_compiling():
            bound = signature.bind(*args, **options).arguments
            _NOTES.tell_first_call(given[0], k, bound.get("max_seqlen_k", 0), bound.get("clean_logits", True), None)
        return result

    return fp8_mqa_logits


def _not_plain_fp8(q: object, k: object, weights: object) -> str | None:
    """None for fp8 operands with float32 weights; else what is not."""
    if not isinstance(q, torch.Tensor) or q.dtype not in FP8_DTYPES:
        return f"q is {getattr(q, 'dtype', type(q).__name__)}"
    if not isinstance(k, torch.Tensor) or k.dtype not in FP8_DTYPES:
        return f"k is {getattr(k, 'dtype', type(k).__name__)}"
    dtype = getattr(weights, "dtype", type(weights).__name__)
    return None if dtype is torch.float32 else f"weights are {dtype}"


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
