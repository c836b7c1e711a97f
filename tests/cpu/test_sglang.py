"""SGLang's scoring through AITER and DeepGEMM, against stand-ins with their signatures."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import standins
from helpers import CPU, assert_matches, expected_for
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.integrations import sglang
from lightning_indexer.integrations.notes import Notes
from lightning_indexer.integrations.patching import IntegrationError, parameters
from standins import OriginalError

ROWS, KEYS, HEADS, HEAD_DIM = 12, 77, 8, 32
ROOT = Path(__file__).resolve().parents[2]
OLD, NEW = (f"{name}.fp8_mqa_logits" for name in standins.AITER_MODULES)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] in ("aiter", "deep_gemm")]:
        monkeypatch.delitem(sys.modules, name)
    for integration in sglang._INTEGRATIONS.values():
        monkeypatch.setattr(integration, "_sites", [])
    monkeypatch.setattr(sglang, "_NOTES", Notes("SGLang", sglang._LOGGER))


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(ROWS, KEYS, HEADS, HEAD_DIM, CPU)


@pytest.fixture(scope="module")
def windows():
    return make_windows("multi_req", ROWS, KEYS, CPU)


def score_rocm(inputs, windows):
    """As SGLang's DSA indexer does on ROCm: the function is imported at each call."""
    from aiter.ops.triton.fp8_mqa_logits import fp8_mqa_logits

    return fp8_mqa_logits(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, *windows, clean_logits=False)


def score_cuda(inputs, windows):
    """And on CUDA."""
    import deep_gemm

    return deep_gemm.fp8_mqa_logits(
        inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, clean_logits=False
    )


def put_aiter(monkeypatch, *modules: str):
    function = standins.aiter_function()
    return [standins.module(monkeypatch, name, fp8_mqa_logits=function) for name in modules]


SCORE = {"rocm": score_rocm, "cuda": score_cuda}
NAMES = {"rocm": (OLD,), "cuda": ("deep_gemm.fp8_mqa_logits",)}


@pytest.fixture(params=["rocm", "cuda"])
def platform(request, monkeypatch):
    put_aiter(monkeypatch, standins.AITER_MODULES[0])
    standins.module(monkeypatch, "deep_gemm", fp8_mqa_logits=standins.deep_gemm_function())
    return request.param


def test_install_and_score(platform, inputs, windows):
    with pytest.raises(OriginalError):
        SCORE[platform](inputs, windows)
    assert sglang.install(platform) == NAMES[platform] == sglang.replaced(platform)
    with torch.inference_mode():
        logits = SCORE[platform](inputs, windows)
        assert logits.shape == (ROWS, KEYS)
        assert_matches(logits, expected_for(inputs, *windows), clean=False)


def test_infinity_may_be_scattered_into_the_result(platform, inputs, windows):
    """SGLang marks the keys that a row always keeps; they must win the top-k, and no other logit may change."""
    sglang.install(platform)
    ks, ke = windows
    with torch.inference_mode():
        logits = SCORE[platform](inputs, windows)
        kept = torch.stack((ks, ke - 1), dim=1).long()
        before = logits.clone()
        logits.scatter_(1, kept, float("inf"))
        inside = expected_for(inputs, *windows).isfinite()
        chosen = logits.masked_fill(~inside, float("-inf")).topk(2, dim=1)
    assert bool((chosen.values == float("inf")).all())
    assert torch.equal(chosen.indices.sort(dim=1).values, kept.sort(dim=1).values)
    untouched = inside.scatter(1, kept, False)
    assert torch.equal(logits[untouched], before[untouched])


def test_positional_and_compressed_calls(platform, inputs, windows):
    sglang.install("cuda")
    import deep_gemm

    kv = (inputs.k_fp8, inputs.kv_scale)
    clean = deep_gemm.fp8_mqa_logits(inputs.q_fp8, kv, inputs.weights, *windows)
    assert_matches(clean, expected_for(inputs, *windows), clean=True)
    compressed = deep_gemm.fp8_mqa_logits(inputs.q_fp8, kv, inputs.weights, *windows, False, 30)
    assert_matches(compressed, expected_for(inputs, *windows, 30), clean=False)


@pytest.mark.parametrize("positions", range(8))
def test_calls_by_position_and_by_keyword(monkeypatch, platform, inputs, windows, positions):
    """Each argument may be given either way; those by position cost no binding of the signature."""
    monkeypatch.setattr(sglang._NOTES, "first_call_told", True)
    sglang.install("cuda")
    sglang.install("rocm")
    import deep_gemm
    from aiter.ops.triton.fp8_mqa_logits import fp8_mqa_logits

    kv = (inputs.k_fp8, inputs.kv_scale)
    cuda = {
        "q": inputs.q_fp8, "kv": kv, "weights": inputs.weights, "cu_seq_len_k_start": windows[0],
        "cu_seq_len_k_end": windows[1], "clean_logits": False, "max_seqlen_k": 30,
    }  # fmt: skip
    rocm = {
        "Q": inputs.q_fp8, "KV": kv[0], "kv_scales": kv[1], "weights": inputs.weights, "cu_starts": windows[0],
        "cu_ends": windows[1], "clean_logits": False,
    }  # fmt: skip
    for function, arguments, width in ((deep_gemm.fp8_mqa_logits, cuda, 30), (fp8_mqa_logits, rocm, 0)):
        by_position, by_keyword = list(arguments.values())[:positions], dict(list(arguments.items())[positions:])
        logits = function(*by_position, **by_keyword)
        assert_matches(logits, expected_for(inputs, *windows, width), clean=False)
        if positions > 0:
            with pytest.raises(TypeError, match="multiple values for argument"):
                function(*by_position, **arguments)
        with pytest.raises(TypeError, match="unexpected keyword argument 'schedule'"):
            function(*by_position, **by_keyword, schedule=1)
        broken = {**arguments, "weights": None}
        with pytest.raises(OriginalError):
            function(*list(broken.values())[:positions], **dict(list(broken.items())[positions:]))


def test_other_calls_go_to_the_original(platform, inputs, windows):
    sglang.install("cuda")
    import deep_gemm

    kv = (inputs.k_fp8, inputs.kv_scale)
    calls = [
        ((inputs.q, kv, inputs.weights, *windows), {}),
        ((inputs.q_fp8, (inputs.k, inputs.kv_scale), inputs.weights, *windows), {}),
        ((inputs.q_fp8, kv, inputs.weights.bfloat16(), *windows), {}),
    ]
    for arguments, options in calls:
        with pytest.raises(OriginalError):
            deep_gemm.fp8_mqa_logits(*arguments, **options)
    # The original's own complaint, not ours.
    with pytest.raises(TypeError, match="unexpected keyword argument 'schedule'"):
        deep_gemm.fp8_mqa_logits(inputs.q_fp8, kv, inputs.weights, *windows, schedule=1)


@pytest.mark.parametrize("shared", [True, False], ids=["one function", "two functions"])
def test_both_modules_of_aiter(monkeypatch, inputs, windows, shared):
    modules = put_aiter(monkeypatch, *standins.AITER_MODULES)
    if not shared:
        monkeypatch.setattr(modules[1], "fp8_mqa_logits", standins.aiter_function())
    before = [module.fp8_mqa_logits for module in modules]
    assert set(sglang.install("rocm")) == {OLD, NEW}
    for module in modules:
        logits = module.fp8_mqa_logits(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, *windows)
        assert_matches(logits, expected_for(inputs, *windows), clean=True)
    assert set(sglang.uninstall("rocm")) == {OLD, NEW}
    assert [module.fp8_mqa_logits for module in modules] == before


def test_an_aiter_without_clean_logits(monkeypatch):
    """Before it took that argument."""

    def fp8_mqa_logits(Q, KV, kv_scales, weights, cu_starts, cu_ends):
        raise OriginalError

    standins.module(monkeypatch, standins.AITER_MODULES[0], fp8_mqa_logits=fp8_mqa_logits)
    assert sglang.install("rocm") == (OLD,)


@pytest.mark.parametrize("both", [False, True], ids=["one seam", "two seams"])
def test_two_modules_of_one_name(monkeypatch, inputs, windows, both):
    """A copy that was loaded from the same file under another key of ``sys.modules`` keeps its ``__name__``."""
    function = standins.aiter_function()
    (first,) = put_aiter(monkeypatch, standins.AITER_MODULES[0])
    monkeypatch.setattr(first, "fp8_mqa_logits", function)
    copy = ModuleType(first.__name__)
    copy.__spec__ = first.__spec__
    copy.fp8_mqa_logits = standins.aiter_function() if both else function
    if both:
        standins.module(monkeypatch, "aiter.ops.triton.attention")
    monkeypatch.setitem(sys.modules, standins.AITER_MODULES[1] if both else "aiter.copy", copy)
    originals = [first.fp8_mqa_logits, copy.fp8_mqa_logits]
    assert sglang.install("rocm") == (OLD, OLD)
    for module in (first, copy):
        logits = module.fp8_mqa_logits(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, *windows)
        assert_matches(logits, expected_for(inputs, *windows), clean=True)
    sglang.uninstall("rocm")
    assert [first.fp8_mqa_logits, copy.fp8_mqa_logits] == originals


def test_one_module_under_two_names(monkeypatch):
    (module,) = put_aiter(monkeypatch, standins.AITER_MODULES[0])
    monkeypatch.setitem(sys.modules, "aiter.alias", module)
    monkeypatch.setitem(sys.modules, "aiter.other", module)
    assert sglang.install("rocm") == (OLD,)


# The plugin


def test_the_plugin_is_off_by_default(monkeypatch, platform):
    sglang.register()
    monkeypatch.setenv("LIGHTNING_INDEXER_SGLANG", "0")
    sglang.register()
    assert sglang.replaced("rocm") == sglang.replaced("cuda") == ()


def test_the_plugin(monkeypatch, platform, inputs, windows):
    monkeypatch.setenv("LIGHTNING_INDEXER_SGLANG", "1")
    monkeypatch.setattr(torch.version, "hip", "7.0" if platform == "rocm" else None)
    sglang.register()
    sglang.register()
    assert sglang.replaced(platform) == NAMES[platform]
    assert_matches(SCORE[platform](inputs, windows), expected_for(inputs, *windows), clean=False)


@pytest.mark.parametrize("value", ["1", "maybe"])
def test_what_the_plugin_raises_is_logged_first(monkeypatch, caplog, value):
    """SGLang swallows what a plugin raises, and serves."""
    monkeypatch.setenv("LIGHTNING_INDEXER_SGLANG", value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = IntegrationError if value == "1" else ValueError
    with pytest.raises(error) as info:
        sglang.register()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert record.message == (f"lightning-indexer is not installed, SGLang scores with its own functions: {info.value}")


def test_variables_that_no_call_could_follow(monkeypatch, caplog, platform):
    """What the log says holds: nothing is replaced."""
    monkeypatch.setenv("LIGHTNING_INDEXER_SGLANG", "1")
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "slip")
    with pytest.raises(ValueError, match=r"^LIGHTNING_INDEXER_BACKEND: got 'slip', expected one of "):
        sglang.register()
    assert caplog.messages[0].startswith("lightning-indexer is not installed, SGLang scores with its own functions: ")
    assert sglang.replaced("cuda") == sglang.replaced("rocm") == ()


def test_the_entry_point_is_declared():
    text = (ROOT / "pyproject.toml").read_text()
    group = text.split('[project.entry-points."sglang.srt.plugins"]\n')[1].split("\n\n")[0]
    assert group == 'lightning_indexer = "lightning_indexer.integrations.sglang:register"'


# As SGLang does it: the parent and each spawned scheduler load the plugins of the group, before anything else.
SPAWN = """
import importlib.metadata, multiprocessing

def load_plugins():
    for entry in importlib.metadata.entry_points(group="sglang.srt.plugins"):
        try:
            entry.load()()
        except Exception as error:
            print("swallowed", error)

def scheduler(plugins):
    if plugins:
        load_plugins()
    import deep_gemm
    print(plugins, deep_gemm.fp8_mqa_logits.__code__.co_filename.endswith("sglang.py"), flush=True)

if __name__ == "__main__":
    load_plugins()
    for plugins in (False, True):
        child = multiprocessing.get_context("spawn").Process(target=scheduler, args=(plugins,))
        child.start()
        child.join()
    scheduler(False)
"""


@pytest.mark.slow
def test_only_the_plugin_reaches_a_spawned_process(tmp_path):
    """What the parent installed, its child does not have; with the plugins loaded, it does."""
    (tmp_path / "server.py").write_text(SPAWN)
    signature = "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0"
    (tmp_path / "deep_gemm.py").write_text(f"def fp8_mqa_logits({signature}): ...\n")
    plugin = tmp_path / "lightning_indexer_double-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-indexer-double\nVersion: 1\n")
    group = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."sglang.srt.plugins"]\n')[1]
    line = group.splitlines()[0].replace('"', "")
    (plugin / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{line}\n")
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}", "LIGHTNING_INDEXER_SGLANG": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(tmp_path / "server.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False False\nTrue True\nFalse True\n"


# What the log says


def test_the_log_tells_what_was_taken_and_what_was_not(monkeypatch, platform, inputs, windows, caplog):
    with caplog.at_level(logging.INFO, "lightning_indexer.sglang"):
        sglang.install("cuda")
        import deep_gemm

        kv = (inputs.k_fp8, inputs.kv_scale)
        for _ in range(2):
            with pytest.raises(OriginalError):
                deep_gemm.fp8_mqa_logits(inputs.q_fp8, kv, inputs.weights.bfloat16(), *windows)
            with pytest.raises(OriginalError):
                deep_gemm.fp8_mqa_logits(inputs.q, kv, inputs.weights, *windows)
            deep_gemm.fp8_mqa_logits(inputs.q_fp8, kv, inputs.weights, *windows, False, 30)
    passed_on = "SGLang: lightning-indexer passed a call on to SGLang's own function:"
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING][:2] == [
        f"{passed_on} weights are torch.bfloat16",
        f"{passed_on} q is torch.float32",
    ]
    assert caplog.messages[-2].startswith("SGLang on cpu: calls run torch-blocked")
    assert caplog.messages[-1] == (
        f"SGLang: lightning-indexer took its first call: torch-blocked, M={ROWS} N={KEYS} H={HEADS} D={HEAD_DIM} "
        "compressed to 30 float32 on cpu"
    )


# What is not as expected


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for platform, name in (("cuda", "DeepGEMM"), ("rocm", "AITER")):
        with pytest.raises(IntegrationError, match=f"^{name}, by which SGLang scores on .*, is not installed: nothing"):
            sglang.install(platform)
        assert sglang.replaced(platform) == ()
    with pytest.raises(ValueError, match=r"^platform: got 'tpu', expected one of rocm, cuda, or None$"):
        sglang.install("tpu")


def test_an_aiter_without_the_function(monkeypatch):
    standins.module(monkeypatch, "aiter")
    with pytest.raises(IntegrationError, match=r"^AITER .* has none of aiter\.ops\.triton\.fp8_mqa_logits, "):
        sglang.install("rocm")


def test_a_deep_gemm_of_another_form(monkeypatch):
    def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k):
        raise OriginalError

    module = standins.module(monkeypatch, "deep_gemm", fp8_mqa_logits=fp8_mqa_logits)
    with pytest.raises(IntegrationError, match=r"cu_seq_len_k_end, max_seqlen_k\), expected \(q, kv, weights, "):
        sglang.install("cuda")
    assert module.fp8_mqa_logits is fp8_mqa_logits


def test_a_deep_gemm_without_the_function(monkeypatch):
    standins.module(monkeypatch, "deep_gemm")
    with pytest.raises(
        IntegrationError, match="deep_gemm has no function fp8_mqa_logits: this version has no such seam"
    ):
        sglang.install("cuda")


# Twice, and back


def test_twice_and_back(platform, inputs, windows, caplog):
    for _ in range(2):
        with caplog.at_level(logging.INFO, "lightning_indexer.sglang"):
            names = sglang.install(platform)
            assert sglang.install(platform) == names
        assert sglang.uninstall(platform) == names
        with pytest.raises(OriginalError):
            SCORE[platform](inputs, windows)
    assert [message.split(":")[1].split()[0] for message in caplog.messages] == ["lightning-indexer", "already"] * 2
    with pytest.raises(IntegrationError, match=r"nothing to uninstall, lightning-indexer is not installed there$"):
        sglang.uninstall(platform)


def test_the_platform_is_pytorchs(monkeypatch, inputs, windows):
    put_aiter(monkeypatch, standins.AITER_MODULES[0])
    standins.module(monkeypatch, "deep_gemm", fp8_mqa_logits=standins.deep_gemm_function())
    assert sglang.install() == NAMES["cuda"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert sglang.install() == NAMES["rocm"]


# Signatures of compiled functions


class Compiled:
    """Callable without a signature, as pybind11's functions are."""

    def __init__(self, doc: str | None) -> None:
        self.__doc__ = doc
        self.__signature__ = "none"

    def __call__(self) -> None: ...


def test_parameters_of_compiled_functions():
    doc = (
        "fp8_mqa_logits(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, "
        "cu_seq_len_k_start: torch.Tensor, cu_seq_len_k_end: torch.Tensor, clean_logits: bool = True, "
        "max_seqlen_k: typing.SupportsInt = 0) -> torch.Tensor\n"
    )
    names = parameters(Compiled(doc))
    assert names == (*sglang._DEEP_GEMM_PARAMETERS, "max_seqlen_k")
    assert parameters(Compiled(None)) is None
    assert parameters(Compiled("No signature here.")) is None
    assert parameters(standins.aiter_function()) == (*sglang._AITER_PARAMETERS, "clean_logits")
