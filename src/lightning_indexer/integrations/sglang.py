"""SGLang's indexer through this library.

SGLang does not score by functions of its own: on ROCm it imports AITER's ``fp8_mqa_logits`` and
``deepgemm_fp8_paged_mqa_logits`` at each call, on CUDA it calls ``deep_gemm.fp8_mqa_logits`` and
``deep_gemm.fp8_paged_mqa_logits``. :func:`install` replaces those names, for whoever looks them up in this process.
Selection is a method of SGLang's, ``DSATopKBackend.topk_transform``, which is hooked by SGLang's own registry.

Models run in processes that SGLang spawns, which inherit nothing that was installed before. SGLang loads its plugins
first in each of them: the entry point ``sglang.srt.plugins`` calls :func:`register`, which installs where
``LIGHTNING_INDEXER_SGLANG=1``. docs/engines.md has the whole procedure.

What SGLang does with the result holds here: its shape is [M, N], or [M, max_seqlen_k] where SGLang gives that, and it
may be written in place (SGLang scatters ``+inf`` over the positions that it always keeps).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from typing import Any, Literal

import torch

from lightning_indexer import envs
from lightning_indexer.arch import arch_of
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.integrations import aiter, deep_gemm
from lightning_indexer.integrations.notes import Notes, check_environment
from lightning_indexer.integrations.patching import Function, Integration, IntegrationError, Seam, distribution_version

Platform = Literal["rocm", "cuda"]

_BYTES = (torch.uint8,)
# What the log calls a selection, by SGLang's method.
_TAKEN = {"PAGED": "selection, PAGED", "RAGGED": "selection, RAGGED"}

_AITER_PARAMETERS = ("Q", "KV", "kv_scales", "weights", "cu_starts", "cu_ends")
_AITER_PAGED = ("q_fp8", "kv_cache", "weights", "out_logits", "context_lens", "kv_indices", "max_model_len")
_DEEP_GEMM_PARAMETERS = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end", "clean_logits")
_LOGGER = logging.getLogger("lightning_indexer.sglang")
# AITER moved the function into a package of its own and kept the older module.
_AITER_MODULES = ("aiter.ops.triton.fp8_mqa_logits", "aiter.ops.triton.attention.fp8_mqa_logits")
_AITER_PAGED_MODULES = ("aiter.ops.triton.pa_mqa_logits", "aiter.ops.triton.attention.pa_mqa_logits")
_REGISTRY = "sglang.srt.plugins.hook_registry"
_SELECTION = "sglang.srt.layers.attention.dsa.dsa_topk_backend.DSATopKBackend.topk_transform"
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
            _hook_selection()
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
        if hasattr(importlib.import_module("deep_gemm"), "fp8_paged_mqa_logits"):
            # The second argument has two names in use.
            seams.append(Seam(("deep_gemm",), "fp8_paged_mqa_logits", ("q",), _make_deep_gemm_paged, more=True))
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
    seams = [Seam((name,), "fp8_mqa_logits", _AITER_PARAMETERS, _make_aiter, more=True) for name in modules]
    seams += [
        Seam((name,), "deepgemm_fp8_paged_mqa_logits", _AITER_PAGED, _make_aiter_paged, more=True)
        for name in _AITER_PAGED_MODULES
        if _is_there(name)
    ]
    return _INTEGRATIONS["rocm"].install(seams, version)


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


def _hook_selection() -> None:
    """Registers :func:`topk_transform` with SGLang, which puts it in place when all plugins are loaded."""
    registry = sys.modules.get(_REGISTRY)
    if registry is None:
        _LOGGER.warning("SGLang: %s is not loaded, and SGLang selects with its own function", _REGISTRY)
        return
    registry.HookRegistry.register(_SELECTION, topk_transform, registry.HookType.AROUND)
    _LOGGER.info("SGLang: lightning-indexer hooked %s", _SELECTION)


def topk_transform(
    original: Function,
    backend: Any,
    logits: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    topk_transform_method: Any,
    attn_metadata: Any,
    cu_seqlens_q_topk: torch.Tensor | None = None,
    topk_indices_offset: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
    batch_idx_list: Any = None,
    force_unfused_topk: bool = False,
) -> torch.Tensor:
    """SGLang's ``DSATopKBackend.topk_transform``, around the ``original``: selection of decode and of ragged prefill.

    Args:
        original: bound to nothing: the function that is hooked.
        backend, logits, lengths, topk, topk_transform_method, attn_metadata, cu_seqlens_q_topk, topk_indices_offset,
            row_starts, batch_idx_list, force_unfused_topk: SGLang's.

    Returns:
        [M, topk] int32: physical slots (paged), or offset positions (ragged); -1 in unused slots.
    """
    method, rows = getattr(topk_transform_method, "name", None), logits.shape[0]
    if not backend.is_sgl_kernel():
        reason: str | None = "SGLang's configuration names another selection"
    elif force_unfused_topk or not _fuses(original):
        reason = "SGLang asks for a selection that is not fused with the page table"
    elif batch_idx_list is not None:
        reason = "rows of chosen requests (prefill context parallelism)"
    elif _takes(method, rows, lengths, attn_metadata, topk_indices_offset, row_starts):
        reason = None
    else:
        reason = f"a selection of method {method} whose rows are not those of the page table"
    if reason is not None:
        _NOTES.passed_on(reason)
        theirs: torch.Tensor = original(
            backend, logits, lengths, topk, topk_transform_method, attn_metadata, cu_seqlens_q_topk,
            topk_indices_offset, row_starts, batch_idx_list, force_unfused_topk,
        )  # fmt: skip
        return theirs
    if method == "RAGGED":
        ends = lengths if row_starts is None else lengths + row_starts
        result = top_k_per_row(logits, topk, row_starts, ends, index_base="offset", offsets=topk_indices_offset)
    else:
        page_table, page_size = attn_metadata.real_page_table, attn_metadata.page_size
        result = top_k_per_row(
            logits, topk, None, lengths, index_base="page", page_table=page_table, page_size=page_size
        )
    _NOTES.took(_TAKEN[str(method)], "M=%d k=%d", rows, topk)
    return result  # type: ignore[return-value]  # no values were asked for


def _takes(
    method: str | None,
    rows: int,
    lengths: torch.Tensor,
    attn_metadata: Any,
    offsets: torch.Tensor | None,
    row_starts: torch.Tensor | None,
) -> bool:
    """A row of logits for each row of the page table, from column 0 on; or for each offset."""
    if lengths.shape[0] != rows:
        return False
    if method == "PAGED":
        return row_starts is None and bool(attn_metadata.real_page_table.shape[0] == rows)
    return method == "RAGGED" and offsets is not None and offsets.shape[0] == rows


def _fuses(original: Function) -> bool:
    """SGLang's own switch, of the module that the function is from."""
    switches = getattr(sys.modules.get(getattr(original, "__module__", "")), "envs", None)
    return switches is None or bool(switches.SGLANG_DSA_FUSE_TOPK.get())


def _make_aiter(original: Function) -> Function:
    return _taking_over(aiter.fp8_mqa_logits, original, pair=False, weights=3)


def _make_deep_gemm(original: Function) -> Function:
    return _taking_over(deep_gemm.fp8_mqa_logits, original, pair=True, weights=2)


def _make_deep_gemm_paged(original: Function) -> Function:
    return _taking_over(deep_gemm.fp8_paged_mqa_logits, original, pair=False, weights=2, keys=_BYTES)


def _make_aiter_paged(original: Function) -> Function:
    return _taking_over(aiter.deepgemm_fp8_paged_mqa_logits, original, pair=False, weights=2, keys=_BYTES)


def _taking_over(
    ours: Function, original: Function, *, pair: bool, weights: int, keys: tuple[torch.dtype, ...] = FP8_DTYPES
) -> Function:
    """``ours`` for plain fp8 operands and the arguments it knows; ``original`` for every other call.

    The second argument holds the keys, of these dtypes: a cache has them as bytes; ``pair``: with their scales.
    ``weights`` is the place of the weights. Operands by position, as SGLang passes them, are found without binding a
    signature, which would cost as much as the rest of the call.
    """
    signature = inspect.signature(ours)
    required = sum(parameter.default is parameter.empty for parameter in signature.parameters.values())
    most = len(signature.parameters)
    optional = frozenset(list(signature.parameters)[required:])
    known, float32, told = optional.issuperset, torch.float32, False

    def fp8_mqa_logits(*args: Any, **options: Any) -> object:
        nonlocal told
        if told and required <= len(args) <= most and known(options):
            try:
                k = args[1][0] if pair else args[1]
                if args[0].dtype in FP8_DTYPES and k.dtype in keys and args[weights].dtype is float32:
                    return ours(*args, **options)
            except (AttributeError, TypeError, IndexError):  # operands of other kinds: the checks below say which
                pass
        if required <= len(args) <= most and options.keys() <= optional:
            given = args
        else:
            try:
                given = tuple(signature.bind(*args, **options).arguments.values())
            except TypeError as error:  # options of another version
                _NOTES.passed_on(str(error))
                return original(*args, **options)
        k = given[1][0] if pair and isinstance(given[1], (tuple, list)) else given[1]
        if (reason := _not_plain(given[0], k, given[weights], keys)) is not None:
            _NOTES.passed_on(reason)
            return original(*args, **options)
        result = ours(*args, **options)
        if not torch.compiler.is_compiling():
            told = True
            if keys is _BYTES:
                _NOTES.took("decode", "q %s", given[0].shape)
            elif not _NOTES.first_call_told:
                bound = signature.bind(*args, **options).arguments
                width, clean = bound.get("max_seqlen_k", 0), bound.get("clean_logits", True)
                _NOTES.tell_first_call(given[0], k, width, clean, None)
        return result

    return fp8_mqa_logits


def _not_plain(q: object, k: object, weights: object, keys: tuple[torch.dtype, ...]) -> str | None:
    """None for fp8 q, keys of these dtypes and float32 weights; else what is not."""
    if not isinstance(q, torch.Tensor) or q.dtype not in FP8_DTYPES:
        return f"q is {getattr(q, 'dtype', type(q).__name__)}"
    if not isinstance(k, torch.Tensor) or k.dtype not in keys:
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
