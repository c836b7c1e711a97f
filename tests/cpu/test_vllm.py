"""The vLLM plugin against stand-ins with vLLM 0.33.0's signatures; ``tests/engines`` has the real modules."""

from __future__ import annotations

import logging
import re
import sys

import pytest
import torch

import lightning_indexer
import standins
from helpers import CPU, assert_matches, expected_for
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.integrations import vllm
from lightning_indexer.integrations.notes import Notes
from lightning_indexer.integrations.patching import IntegrationError
from lightning_indexer.selection import registry as dispatch
from standins import OriginalError

ROWS, KEYS, HEADS, HEAD_DIM = 12, 77, 8, 32
ROCM_NAME = f"{standins.VLLM_ROCM}.rocm_fp8_mqa_logits"
CUDA_NAMES = (f"{standins.VLLM_DEEP_GEMM}.fp8_fp4_mqa_logits", f"{standins.VLLM_LAYER}.fp8_fp4_mqa_logits")
LOGGER = "vllm.plugins.lightning_indexer"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """Nothing installed from before, and nothing left behind."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("VLLM_ROCM_USE_AITER", raising=False)
    monkeypatch.setattr(vllm, "_NOTES", Notes("vLLM", vllm._LOGGER))
    # The stand-ins have this seam; test_vllm_seams.py has the others.
    monkeypatch.setattr(vllm, "SEAMS", ("prefill",))
    monkeypatch.setattr(vllm.install, "__defaults__", (None, ("prefill",)))
    vllm._INTEGRATION._sites = []
    yield
    vllm._INTEGRATION._sites = []


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(ROWS, KEYS, HEADS, HEAD_DIM, CPU)


@pytest.fixture(scope="module")
def windows():
    return make_windows("misaligned", ROWS, KEYS, CPU)


def rocm_arguments(inputs, windows):
    # vLLM's scales are a [N, 4] byte workspace seen as [N, 1] float32.
    scales = inputs.kv_scale[:, None].contiguous().view(torch.uint8).view(torch.float32)
    return inputs.q_fp8, (inputs.k_fp8, scales), inputs.weights, *windows


def cuda_arguments(inputs, windows, width):
    return (inputs.q_fp8, None), (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, width


# What is replaced, and what it gives


@pytest.mark.parametrize("platform", ["rocm", None])
def test_rocm(monkeypatch, inputs, windows, platform):
    engine = standins.install_vllm(monkeypatch, "rocm")
    assert vllm.install(platform) == (ROCM_NAME,)
    with torch.inference_mode():
        result = engine.rocm.rocm_fp8_mqa_logits(*rocm_arguments(inputs, windows))
    assert result.shape == (ROWS, KEYS)
    assert_matches(result, expected_for(inputs, *windows), clean=False)
    with pytest.raises(OriginalError):
        engine.layer.fp8_fp4_mqa_logits(*cuda_arguments(inputs, windows, KEYS))


@pytest.mark.parametrize("platform", ["cuda", None])
@pytest.mark.parametrize("width", [1, 40, KEYS])
def test_cuda(monkeypatch, inputs, windows, platform, width):
    engine = standins.install_vllm(monkeypatch, "cuda")
    assert vllm.install(platform) == CUDA_NAMES
    with torch.inference_mode():
        result = engine.layer.fp8_fp4_mqa_logits(*cuda_arguments(inputs, windows, width))
    assert result.shape == (ROWS, width)
    assert_matches(result, expected_for(inputs, *windows, width), clean=False)
    with pytest.raises(OriginalError):
        engine.rocm.rocm_fp8_mqa_logits(*rocm_arguments(inputs, windows))


def test_keywords_are_vllms(monkeypatch, inputs, windows):
    engine = standins.install_vllm(monkeypatch, "cuda")
    vllm.install()
    q, kv, weights, ks, ke, width = cuda_arguments(inputs, windows, 40)
    result = engine.layer.fp8_fp4_mqa_logits(
        q=q, kv=kv, weights=weights, cu_seqlen_ks=ks, cu_seqlen_ke=ke, max_seqlen_k=width
    )
    assert_matches(result, expected_for(inputs, *windows, 40), clean=False)


@pytest.mark.parametrize(
    "change",
    [
        {"q_scale": torch.ones(ROWS, HEADS, dtype=torch.int32)},  # MXFP4 and MXFP8
        {"q": torch.zeros(ROWS, HEADS, HEAD_DIM // 2, dtype=torch.int8)},
        {"k": torch.zeros(KEYS, HEAD_DIM // 2, dtype=torch.int8)},
        {"kv_scale": torch.zeros(KEYS, dtype=torch.int32)},
        {"weights": torch.zeros(ROWS, HEADS, dtype=torch.bfloat16)},
        {"width": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_cuda_leaves_everything_else_to_vllm(monkeypatch, inputs, windows, change):
    engine = standins.install_vllm(monkeypatch, "cuda")
    vllm.install()
    q = (change.get("q", inputs.q_fp8), change.get("q_scale"))
    kv = (change.get("k", inputs.k_fp8), change.get("kv_scale", inputs.kv_scale))
    with pytest.raises(OriginalError):
        engine.layer.fp8_fp4_mqa_logits(
            q, kv, change.get("weights", inputs.weights), *windows, change.get("width", KEYS)
        )


def test_rocm_leaves_everything_else_to_vllm(monkeypatch, inputs, windows):
    engine = standins.install_vllm(monkeypatch, "rocm")
    vllm.install()
    q, kv, weights, *rest = rocm_arguments(inputs, windows)
    with pytest.raises(OriginalError):
        engine.rocm.rocm_fp8_mqa_logits(q, kv, weights.bfloat16(), *rest)


@pytest.mark.parametrize(
    ("value", "backend"),
    [(None, None), ("1", None), ("true", None), ("0", "torch-blocked"), ("False", "torch-blocked")],
)
def test_vllm_without_aiter_is_torch(monkeypatch, inputs, windows, value, backend):
    engine = standins.install_vllm(monkeypatch, "rocm")
    vllm.install()
    asked = []
    monkeypatch.setattr(lightning_indexer, "fp8_mqa_logits", lambda *a, **options: asked.append(options))
    if value is not None:
        monkeypatch.setenv("VLLM_ROCM_USE_AITER", value)
    engine.rocm.rocm_fp8_mqa_logits(*rocm_arguments(inputs, windows))
    assert asked == [{"clean_logits": False, "backend": backend}]


def test_without_aiter_the_result_holds_on_an_arch_with_kernels(monkeypatch, inputs, windows):
    """As gfx950 a call without a name would compile Triton; VLLM_ROCM_USE_AITER=0 keeps it in PyTorch."""
    engine = standins.install_vllm(monkeypatch, "rocm")
    vllm.install()
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx950")
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "triton-portable")
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    result = engine.rocm.rocm_fp8_mqa_logits(*rocm_arguments(inputs, windows))
    assert_matches(result, expected_for(inputs, *windows), clean=False)


# The entry point


def test_the_plugin_is_off_by_default(monkeypatch):
    engine = standins.install_vllm(monkeypatch, "cuda")
    before = engine.layer.fp8_fp4_mqa_logits
    vllm.register()
    monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", "0")
    vllm.register()
    assert engine.layer.fp8_fp4_mqa_logits is before
    assert vllm.replaced() == ()


def test_the_plugin_logs_once_what_it_replaced(monkeypatch, caplog):
    standins.install_vllm(monkeypatch, "cuda")
    monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", "1")
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.register()
        vllm.register()  # vLLM may load plugins several times in one process
    assert caplog.messages == [
        f"vLLM 0.33.0: lightning-indexer replaced {', '.join(CUDA_NAMES)}",
        f"vLLM: already installed, nothing to do: {', '.join(CUDA_NAMES)}",
    ]


def test_the_plugin_warns_where_there_is_no_gpu(monkeypatch, caplog):
    engine = standins.install_vllm(monkeypatch, None)
    before = engine.layer.fp8_fp4_mqa_logits
    monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", "1")
    vllm.register()
    assert caplog.messages == [
        "LIGHTNING_INDEXER_VLLM=1, but vLLM runs on neither ROCm nor CUDA here: nothing to replace"
    ]
    assert engine.layer.fp8_fp4_mqa_logits is before


def test_the_plugin_refuses_another_value(monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", "maybe")
    with pytest.raises(ValueError, match=r"^LIGHTNING_INDEXER_VLLM: got 'maybe', expected 0, 1 or some of prefill$"):
        vllm.register()


@pytest.mark.parametrize("arch", ["sm100", "sm103"])
def test_where_vllm_scores_with_mx_scales_nothing_is_replaced(monkeypatch, caplog, arch):
    """No call would be taken there: a server must not say that it was replaced."""
    engine = standins.install_vllm(monkeypatch, "cuda", arch=arch)
    before = engine.layer.fp8_fp4_mqa_logits
    why = "vLLM scores with MX scales on this GPU (Blackwell, SM100 family), and this library takes no such call"
    monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", "1")
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.register()
    assert caplog.messages == [f"LIGHTNING_INDEXER_VLLM=1, but {why}: nothing was replaced"]
    assert caplog.records[0].levelname == "WARNING"
    with pytest.raises(IntegrationError, match=rf"^{re.escape(why)}: nothing was replaced$"):
        vllm.install()
    assert engine.layer.fp8_fp4_mqa_logits is before
    assert vllm.replaced() == ()


# What the log says


def messages(caplog, level=logging.INFO):
    return [record.message for record in caplog.records if record.levelno >= level]


@pytest.fixture
def packages(monkeypatch):
    """Every backend's packages are there, but for those that a test takes away."""
    missing = {}
    for backend in dispatch.backends():
        monkeypatch.setattr(type(backend), "missing", lambda self: missing.get(self.name))
    return missing


@pytest.mark.parametrize(
    ("platform", "arch", "chain", "unmeasured"),
    [
        ("cuda", "sm90", "cuda-sm90, else triton-portable, else torch-blocked (H=32, 64)", None),
        ("cuda", "sm120", "triton-portable, else torch-blocked (H=32, 64)", "triton-portable"),
        ("rocm", "gfx942", "flydsl, else triton-portable, else torch-blocked (H=32, 64)", "flydsl"),
        (
            "rocm",
            "gfx950",
            "hip-gfx950, else flydsl, else triton-portable, else torch-blocked (H=32); "
            "hip-gfx950, else gluon-gfx950, else flydsl, else triton-portable, else torch-blocked (H=64)",
            "hip-gfx950",
        ),
        ("rocm", "gfx1100", "torch-blocked (H=32, 64)", "torch-blocked"),
    ],
)
def test_the_log_says_which_backends_run(monkeypatch, caplog, packages, platform, arch, chain, unmeasured):
    standins.install_vllm(monkeypatch, platform, arch=arch)
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install()
        vllm.install()
    assert messages(caplog).count(f"vLLM on {arch}: calls run {chain}") == 1
    warnings = messages(caplog, logging.WARNING)
    if unmeasured is None:
        assert warnings == []
    else:
        assert warnings[0] == f"vLLM: {unmeasured} has not been measured on {arch}: compare before you rely on it"


def test_the_log_warns_of_a_missing_package(monkeypatch, caplog, packages):
    packages["cuda-sm90"] = "cuda-core is not installed: pip install it"
    standins.install_vllm(monkeypatch, "cuda", arch="sm90")
    vllm.install()
    assert messages(caplog, logging.WARNING) == [
        "vLLM: cuda-sm90 would run on sm90, but cuda-core is not installed: pip install it; what runs instead is "
        "slower than DeepGEMM"
    ]


def test_the_log_follows_the_environment(monkeypatch, caplog, packages):
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx942")
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "torch-blocked")
    standins.install_vllm(monkeypatch, "rocm", arch="gfx950")
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install()
    assert "vLLM on gfx942: calls run torch-blocked (H=32, 64)" in messages(caplog)


def test_the_log_follows_vllms_own_switch(monkeypatch, caplog, packages):
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    standins.install_vllm(monkeypatch, "rocm", arch="gfx950")
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install()
    assert "vLLM on gfx950: calls run torch-blocked (H=32, 64)" in messages(caplog)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("BACKEND", "LIGHTNING_INDEXER_BACKEND: got 'slip', expected one of "),
        ("ARCH", "LIGHTNING_INDEXER_ARCH: arch: got 'slip', expected one of "),
        ("KERNELS", "LIGHTNING_INDEXER_KERNELS: got 'slip', expected 0 or 1"),
    ],
)
def test_variables_that_no_call_could_follow(monkeypatch, variable, message):
    """Found before anything is replaced, not at the first request."""
    engine = standins.install_vllm(monkeypatch, "cuda", arch="sm90")
    before = engine.layer.fp8_fp4_mqa_logits
    monkeypatch.setenv(f"LIGHTNING_INDEXER_{variable}", "slip")
    with pytest.raises(ValueError, match=f"^{message}"):
        vllm.install()
    assert engine.layer.fp8_fp4_mqa_logits is before


def test_installing_touches_no_device(monkeypatch):
    """vLLM forks its engine from the process that loads plugins first: a CUDA context there would break it."""

    def touched(*args, **options):
        raise AssertionError("the device was touched")

    for name in ("is_available", "device_count", "current_device", "get_device_properties", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    for platform, arch in (("cuda", "sm90"), ("rocm", "gfx950"), ("cuda", None)):
        standins.install_vllm(monkeypatch, platform, arch=arch)
        vllm.install()
        vllm.uninstall()


def test_the_first_call_is_told_once(monkeypatch, caplog, inputs, windows):
    engine = standins.install_vllm(monkeypatch, "cuda")
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install()
        for width in (40, 41):
            engine.layer.fp8_fp4_mqa_logits(*cuda_arguments(inputs, windows, width))
    told = [line for line in messages(caplog) if "first call" in line]
    assert told == [
        f"vLLM: lightning-indexer took its first call: torch-blocked, M={ROWS} N={KEYS} H={HEADS} D={HEAD_DIM} "
        "compressed to 40 float32 on cpu"
    ]
    # The arch was not known before.
    assert sum(line.startswith("vLLM on cpu: calls run torch-blocked") for line in messages(caplog)) == 1


def test_the_first_call_on_rocm_is_told(monkeypatch, caplog, inputs, windows):
    engine = standins.install_vllm(monkeypatch, "rocm")
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx950")
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install()
        engine.rocm.rocm_fp8_mqa_logits(*rocm_arguments(inputs, windows))
    assert messages(caplog)[-1] == (
        f"vLLM: lightning-indexer took its first call: torch-blocked, M={ROWS} N={KEYS} H={HEADS} D={HEAD_DIM} "
        "noclean float32 on gfx950"
    )


def test_calls_that_are_passed_on_are_told_with_their_reason(monkeypatch, caplog, inputs, windows):
    engine = standins.install_vllm(monkeypatch, "cuda")
    vllm.install()
    q, kv, weights, ks, ke, width = cuda_arguments(inputs, windows, 40)
    fp4 = (torch.zeros(ROWS, HEADS, HEAD_DIM // 2, dtype=torch.int8), torch.ones(ROWS, HEADS, dtype=torch.int32))
    for call in (
        (fp4, kv, weights, ks, ke, width),
        (q, kv, weights.bfloat16(), ks, ke, width),
        (q, kv, weights, ks, ke, 0),
    ):
        for _ in range(2):
            with pytest.raises(OriginalError):
                engine.layer.fp8_fp4_mqa_logits(*call)
    assert messages(caplog, logging.WARNING) == [
        f"vLLM: lightning-indexer passed a call on to vLLM's own function: {reason}"
        for reason in (
            "q has scales, which makes it FP4 or MX",
            "kv_scale is torch.float32, weights are torch.bfloat16",
            "max_seqlen_k is 0",
        )
    ]
    assert not any("first call" in line for line in messages(caplog))


def test_the_entry_point_is_declared():
    from pathlib import Path

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    group = text.split('[project.entry-points."vllm.general_plugins"]\n')[1].split("\n\n")[0]
    assert group == 'lightning_indexer = "lightning_indexer.integrations.vllm:register"'


# What is not as expected: a clear message, and nothing is changed


def test_vllm_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for platform in (None, "rocm", "cuda"):
        with pytest.raises(IntegrationError, match=r"^vLLM is not installed here: nothing was replaced$"):
            vllm.install(platform)


def test_vllm_on_another_platform(monkeypatch):
    standins.install_vllm(monkeypatch, None)
    with pytest.raises(IntegrationError, match="neither ROCm nor CUDA here: nothing was replaced"):
        vllm.install()
    with pytest.raises(ValueError, match=r"^platform: got 'tpu', expected one of rocm, cuda, or None$"):
        vllm.install("tpu")


@pytest.mark.parametrize("register", [False, True])
def test_a_version_without_the_seam(monkeypatch, register):
    """vLLM 0.11 had fp8_mqa_logits there, and no fp8_fp4_mqa_logits."""
    engine = standins.install_vllm(monkeypatch, "cuda", version="0.11.0")
    monkeypatch.delattr(engine.layer, "fp8_fp4_mqa_logits")
    before = engine.deep_gemm.fp8_fp4_mqa_logits
    monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", "1")
    message = (
        rf"^vLLM 0\.11\.0: {standins.VLLM_LAYER} has no function fp8_fp4_mqa_logits: this version has no such seam; "
        "nothing was replaced$"
    )
    with pytest.raises(IntegrationError, match=message):
        vllm.register() if register else vllm.install()
    assert engine.deep_gemm.fp8_fp4_mqa_logits is before
    assert vllm.replaced() == ()


def test_a_version_without_the_module(monkeypatch):
    engine = standins.install_vllm(monkeypatch, "cuda")
    monkeypatch.delitem(sys.modules, standins.VLLM_LAYER)
    before = engine.deep_gemm.fp8_fp4_mqa_logits
    with pytest.raises(IntegrationError, match=rf"{standins.VLLM_LAYER} cannot be imported \(No module named"):
        vllm.install()
    assert engine.deep_gemm.fp8_fp4_mqa_logits is before


def test_a_version_with_another_signature(monkeypatch):
    engine = standins.install_vllm(monkeypatch, "rocm", version="0.40.0")

    def rocm_fp8_mqa_logits(q, k, scale, weights, cu_seqlen_ks, cu_seqlen_ke):
        raise OriginalError

    monkeypatch.setattr(engine.rocm, "rocm_fp8_mqa_logits", rocm_fp8_mqa_logits)
    with pytest.raises(IntegrationError) as info:
        vllm.install()
    assert str(info.value) == (
        f"vLLM 0.40.0: {ROCM_NAME} takes (q, k, scale, weights, cu_seqlen_ks, cu_seqlen_ke), expected (q, kv, weights, "
        "cu_seqlen_ks, cu_seqlen_ke): this version has another seam; nothing was replaced"
    )
    assert engine.rocm.rocm_fp8_mqa_logits is rocm_fp8_mqa_logits


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_a_version_whose_function_takes_more(monkeypatch, platform):
    """A caller may pass it, and the replacement would not understand."""
    engine = standins.install_vllm(monkeypatch, platform, version="0.41.0")

    def rocm_fp8_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, causal=True):
        raise OriginalError

    def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k, logits_dtype=None):
        raise OriginalError

    monkeypatch.setattr(engine.rocm, "rocm_fp8_mqa_logits", rocm_fp8_mqa_logits)
    for module in (engine.deep_gemm, engine.layer):
        monkeypatch.setattr(module, "fp8_fp4_mqa_logits", fp8_fp4_mqa_logits)
    more = {"rocm": "causal", "cuda": "logits_dtype"}[platform]
    with pytest.raises(IntegrationError, match=rf", {more}\), expected \(q, kv, .*: this version has another seam"):
        vllm.install()
    assert engine.rocm.rocm_fp8_mqa_logits is rocm_fp8_mqa_logits
    assert engine.layer.fp8_fp4_mqa_logits is fp8_fp4_mqa_logits


def test_a_version_whose_parameters_cannot_be_read(monkeypatch):
    class Compiled:
        __signature__ = "none"
        __doc__ = None

        def __call__(self): ...

    engine = standins.install_vllm(monkeypatch, "rocm")
    monkeypatch.setattr(engine.rocm, "rocm_fp8_mqa_logits", Compiled())
    with pytest.raises(IntegrationError, match="takes parameters that cannot be read, expected"):
        vllm.install()


def test_someone_else_was_there_first(monkeypatch):
    engine = standins.install_vllm(monkeypatch, "cuda")
    monkeypatch.setattr(engine.layer, "fp8_fp4_mqa_logits", standins.vllm_cuda_function())
    with pytest.raises(IntegrationError, match=r"something else has replaced it; nothing was replaced$"):
        vllm.install()


def test_a_change_that_fails_is_taken_back(monkeypatch):
    engine = standins.install_vllm(monkeypatch, "cuda")
    before = engine.deep_gemm.fp8_fp4_mqa_logits

    class Frozen(type(engine.layer)):
        def __setattr__(self, name, value):
            if name == "fp8_fp4_mqa_logits":
                raise AttributeError("frozen")
            super().__setattr__(name, value)

    engine.layer.__class__ = Frozen
    try:
        with pytest.raises(AttributeError, match="frozen"):
            vllm.install()
    finally:
        engine.layer.__class__ = type(engine.deep_gemm)
    assert engine.deep_gemm.fp8_fp4_mqa_logits is before
    assert vllm.replaced() == ()


# Twice, and back


def test_installing_twice_changes_nothing(monkeypatch):
    engine = standins.install_vllm(monkeypatch, "cuda")
    first = vllm.install()
    replacement = engine.layer.fp8_fp4_mqa_logits
    assert vllm.install() == first
    assert engine.layer.fp8_fp4_mqa_logits is replacement


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_uninstall(monkeypatch, platform):
    engine = standins.install_vllm(monkeypatch, platform)
    before = (engine.layer.fp8_fp4_mqa_logits, engine.deep_gemm.fp8_fp4_mqa_logits, engine.rocm.rocm_fp8_mqa_logits)
    for _ in range(2):
        assert vllm.install() == vllm.replaced()
        assert vllm.uninstall() == ((ROCM_NAME,) if platform == "rocm" else CUDA_NAMES)
        after = (engine.layer.fp8_fp4_mqa_logits, engine.deep_gemm.fp8_fp4_mqa_logits, engine.rocm.rocm_fp8_mqa_logits)
        assert all(a is b for a, b in zip(after, before, strict=True))
    message = "^vLLM: nothing to uninstall, lightning-indexer is not installed there$"
    with pytest.raises(IntegrationError, match=message):
        vllm.uninstall()


def test_modules_that_hold_the_function_too(monkeypatch):
    """GLM's layer imports the same name: before the installation, or after it."""
    engine = standins.install_vllm(monkeypatch, "cuda")
    original = engine.deep_gemm.fp8_fp4_mqa_logits
    before = standins.module(monkeypatch, "vllm.models.glm5next.nvidia.sparse_indexer", fp8_fp4_mqa_logits=original)
    assert vllm.install() == (*CUDA_NAMES, f"{before.__name__}.fp8_fp4_mqa_logits")
    late = standins.module(monkeypatch, "vllm.models.later", fp8_fp4_mqa_logits=engine.deep_gemm.fp8_fp4_mqa_logits)
    assert late.fp8_fp4_mqa_logits is before.fp8_fp4_mqa_logits is not original
    assert f"{late.__name__}.fp8_fp4_mqa_logits" in vllm.uninstall()
    assert late.fp8_fp4_mqa_logits is before.fp8_fp4_mqa_logits is engine.layer.fp8_fp4_mqa_logits is original


def test_uninstall_leaves_what_someone_else_has_put_over_it(monkeypatch):
    engine = standins.install_vllm(monkeypatch, "cuda")
    vllm.install()
    ours = engine.deep_gemm.fp8_fp4_mqa_logits
    monkeypatch.setattr(engine.layer, "fp8_fp4_mqa_logits", standins.vllm_cuda_function())
    message = rf"^vLLM: {standins.VLLM_LAYER}\.fp8_fp4_mqa_logits was replaced by standins\..*fp8_fp4_mqa_logits since"
    for call in (vllm.uninstall, vllm.install):
        with pytest.raises(IntegrationError, match=message):
            call()
        assert engine.deep_gemm.fp8_fp4_mqa_logits is ours
