"""vLLM's indexer through this library, as at vLLM 0.33.0: :data:`SEAMS`, each of which can be left out.

- ``cache``: on CUDA, insertion into the paged cache and the gather out of it.
- ``prefill``: scoring of a prefill chunk. ROCm: ``rocm_fp8_mqa_logits``; [M, N] logits, not cleaned, as vLLM asks of
  AITER. CUDA: ``vllm.utils.deep_gemm.fp8_fp4_mqa_logits``, which the layers import; compressed logits.
- ``prefill-topk``: its selection. CUDA: ``vllm._custom_ops.top_k_per_row_prefill``, fused with scoring where both are
  replaced; ROCm: AITER's.
- ``decode``: logits over the paged cache. ``decode-topk``: their selection, on CUDA, where vLLM's configuration names
  none.
- ``planner``: on CUDA, prefill chunks without a budget for logits, once chunks make none.

FP4, MX scales and everything else that is not plain fp8 goes to vLLM's own functions. On Blackwell of the SM100 family
that is every call: there is nothing to install there. ``VLLM_ROCM_USE_AITER=0`` gives ``torch-blocked``.

The entry point ``vllm.general_plugins`` calls :func:`register` in every process of vLLM, which installs what
``LIGHTNING_INDEXER_VLLM`` says: 1, or names of seams. docs/engines.md has the whole procedure.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from typing import Literal

from lightning_indexer import envs
from lightning_indexer.arch import Arch, forced_arch, gpu_arch
from lightning_indexer.integrations import vllm_seams
from lightning_indexer.integrations.notes import Notes, check_environment
from lightning_indexer.integrations.patching import Integration, IntegrationError, text_of

Platform = Literal["rocm", "cuda"]
PLATFORMS: tuple[Platform, ...] = ("rocm", "cuda")
SEAMS = ("cache", "prefill", "prefill-topk", "decode", "decode-topk", "planner")

# A child of vLLM's logger: vLLM configures that one, and no other.
_LOGGER = logging.getLogger("vllm.plugins.lightning_indexer")
_INTEGRATION = Integration("vLLM", "vllm", _LOGGER)
_NOTES = Notes("vLLM", _LOGGER)
_MX_SCALES = "vLLM scores with MX scales on this GPU (Blackwell, SM100 family), and this library takes no such call"


def register() -> None:
    """The entry point. Installs where ``LIGHTNING_INDEXER_VLLM`` is 1, or the seams that it names, with commas between;
    may be called any number of times.

    Where vLLM itself runs on neither ROCm nor CUDA, or would pass it no call that it can take, it warns and leaves
    everything as it is.

    Raises:
        IntegrationError: this vLLM does not have the seam. vLLM then does not start: it was asked to run something
            that it cannot, and an A/B measurement would compare it with itself.
        ValueError: ``LIGHTNING_INDEXER_VLLM`` is neither 0 nor 1, and names something else than seams.
    """
    seams = envs.vllm_seams(SEAMS)
    if not seams:
        return
    platform = _platform()
    if platform is None:
        _LOGGER.warning("LIGHTNING_INDEXER_VLLM=1, but vLLM runs on neither ROCm nor CUDA here: nothing to replace")
        return
    if platform == "cuda" and _uses_mx_scales():
        _LOGGER.warning("LIGHTNING_INDEXER_VLLM=1, but %s: nothing was replaced", _MX_SCALES)
        return
    install(platform, seams)


def install(platform: Platform | None = None, seams: Sequence[str] = SEAMS) -> tuple[str, ...]:
    """Replaces vLLM's functions in this process.

    Logs what it replaced, and once a process: which backends run on this GPU, the first call that each seam took, and
    each reason for which a call went to vLLM's own function. No device is touched.

    Args:
        platform: ``"rocm"`` or ``"cuda"``; None asks vLLM.
        seams: of :data:`SEAMS`; those that a platform does not have are passed over.

    Returns:
        The full names that are replaced. A second call changes nothing and returns them again.

    Raises:
        IntegrationError: vLLM is not installed, runs on another platform, scores with MX scales, or does not have the
            seam. Nothing is replaced.
        ValueError: another platform or seam; a variable of the library's that no call could follow.
    """
    unknown = [name for name in seams if name not in SEAMS]
    if unknown or not seams:
        raise ValueError(f"seams: got {', '.join(unknown) or 'none'}, expected some of {', '.join(SEAMS)}")
    if platform is None:
        _check_installed()
        platform = _platform()
        if platform is None:
            raise IntegrationError("vLLM runs on neither ROCm nor CUDA here: nothing was replaced")
    if platform not in PLATFORMS:
        raise ValueError(f"platform: got {platform!r}, expected one of {', '.join(PLATFORMS)}, or None")
    _check_installed()
    if platform == "cuda" and _uses_mx_scales():
        raise IntegrationError(f"{_MX_SCALES}: nothing was replaced")
    check_environment()
    deferred = platform == "cuda" and {"prefill", "prefill-topk"} <= set(seams) and _layer_is_known()
    names = _INTEGRATION.install(vllm_seams.seams(tuple(seams), platform, _NOTES, deferred=deferred), _version())
    if (arch := _arch(platform)) is not None:
        _NOTES.runs_on(
            arch, compressed=platform == "cuda", backend=vllm_seams.rocm_backend() if platform == "rocm" else None
        )
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


def _layer_is_known() -> bool:
    """Whether what vLLM does with prefill logits is what :class:`vllm_seams.Pending` was written for."""
    try:
        layer = getattr(importlib.import_module(vllm_seams.LAYER), "sparse_attn_indexer", None)
    except ImportError:  # no such seam: the installation says so
        return False
    if layer is not None and text_of(layer) == vllm_seams.LAYER_TEXT:
        return True
    _LOGGER.warning(
        "vLLM %s: %s.sparse_attn_indexer is not that of 0.33.0: prefill scores and selects in two calls, and keeps its "
        "logits budget", _version(), vllm_seams.LAYER,
    )  # fmt: skip
    return False


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
