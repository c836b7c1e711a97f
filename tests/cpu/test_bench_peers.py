"""``bench``: the peers of scoring: how they are found, what they are given."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from helpers import CPU
from lightning_indexer import calc_diff, reference_logits
from lightning_indexer.bench import peers
from lightning_indexer.check.cases import Case, make_inputs, make_windows

GPU = torch.device("cuda")
S_Q, S_K, HEADS, HEAD_DIM = 16, 64, 8, 32
# Two float32 sums in different orders.
ORACLE_DIFF = 1e-12


# Peers


FP32_CASES = {form: Case(S_Q, S_K, 64, HEAD_DIM, "causal", form) for form in ("clean", "noclean", "compressed")}


def module_with(**functions) -> ModuleType:
    module = ModuleType("deep_gemm")
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def first_form(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
    return ("fp8_mqa_logits", q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def both_dtypes(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
    raise AssertionError("the fp8 function is there")


def compressed_only(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k):
    return ("fp8_fp4_mqa_logits", q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k)


@pytest.mark.parametrize(
    "module",
    [module_with(fp8_mqa_logits=first_form), module_with(fp8_mqa_logits=first_form, fp8_fp4_mqa_logits=both_dtypes)],
    ids=["fp8 alone", "fp8 and fp4"],
)
def test_deep_gemm_of_its_own(module):
    module.__version__ = "2.5.0"
    peer = peers.DeepGemm(module)
    assert peer.note == "deep_gemm 2.5.0, all forms, -inf in a second pass"
    inputs = make_inputs(S_Q, S_K, 64, HEAD_DIM, CPU)
    ks, ke = make_windows("causal", S_Q, S_K, CPU)
    for form, case in FP32_CASES.items():
        assert peer.supports(case, GPU) is None
        width = S_K if form == "compressed" else 0
        name, q, (k, scale), weights, start, end, clean, max_seqlen_k = peer.prepare(case, inputs, ks, ke, width)()
        assert name == "fp8_mqa_logits"
        assert q is inputs.q_fp8
        assert k is inputs.k_fp8
        assert scale is inputs.kv_scale
        assert weights is inputs.weights
        assert start is ks
        assert end is ke
        assert (clean, max_seqlen_k) == (form == "clean", width)


def test_deep_gemm_as_vllm_bundles_it():
    peer = peers.DeepGemm(module_with(fp8_mqa_logits=None, fp8_fp4_mqa_logits=compressed_only))
    assert "compressed logits only" in peer.note
    for form in ("clean", "noclean"):
        assert peer.supports(FP32_CASES[form], GPU) == "compressed logits only"
    case = FP32_CASES["compressed"]
    assert peer.supports(case, GPU) is None
    inputs = make_inputs(S_Q, S_K, 64, HEAD_DIM, CPU)
    ks, ke = make_windows("causal", S_Q, S_K, CPU)
    name, (q, q_scale), (k, k_scale), weights, start, end, width = peer.prepare(case, inputs, ks, ke, 77)()
    assert name == "fp8_fp4_mqa_logits"
    assert q is inputs.q_fp8
    assert q_scale is None
    assert k is inputs.k_fp8
    assert k_scale is inputs.kv_scale
    assert weights is inputs.weights
    assert start is ks
    assert end is ke
    assert width == 77


def test_functions_of_pybind11_are_read_off_their_docstring():
    # DeepGEMM's functions are such: inspect finds no signature.
    function = torch._C._jit_get_operation
    with pytest.raises(ValueError, match="no signature"):
        peers.inspect.signature(function)
    assert peers.takes(function, "qualified_name")
    assert not peers.takes(function, "clean_logits")
    assert peers.DeepGemm(module_with(fp8_fp4_mqa_logits=function)).compressed_only


@pytest.mark.parametrize(
    "case", [Case(1, 1, 16, 128, "causal"), Case(1, 1, 64, 128, "causal", "clean", torch.bfloat16)]
)
def test_deep_gemm_says_what_it_cannot(case):
    peer = peers.DeepGemm(module_with(fp8_mqa_logits=first_form))
    assert peer.supports(case, GPU) in ("H 32 and 64 only", "float32 only here")


def test_aiter_gets_its_arguments_in_its_order():
    peer = peers.Aiter(lambda *arguments: arguments)
    inputs = make_inputs(S_Q, S_K, 64, HEAD_DIM, CPU)
    ks, ke = make_windows("causal", S_Q, S_K, CPU)
    for form in ("clean", "noclean"):
        arguments = peer.prepare(FP32_CASES[form], inputs, ks, ke, 0)()
        expected = (inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke)
        assert all(got is wanted for got, wanted in zip(arguments[:-1], expected, strict=True))
        assert arguments[-1] is (form == "clean")
    assert peer.supports(FP32_CASES["compressed"], GPU) == "float32 [M, N] only"


def test_einsum_is_right_and_says_when_its_scores_do_not_fit(monkeypatch):
    case = FP32_CASES["clean"]
    inputs = make_inputs(S_Q, S_K, 64, HEAD_DIM, CPU)
    ks, ke = make_windows("misaligned", S_Q, S_K, CPU)
    logits = peers.Einsum().prepare(case, inputs, ks, ke, 0)()
    expected = reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    assert torch.equal(logits.isneginf(), expected.isneginf())
    assert calc_diff(logits, expected, expected.isfinite()) < ORACLE_DIFF
    assert peers.Einsum().supports(case, CPU) is None
    monkeypatch.setattr(peers, "available_bytes", lambda device: 2**31)
    assert "GiB for its scores" in peers.Einsum().supports(case, CPU)


def importing(monkeypatch, present: dict[str, object]):
    """Makes exactly these modules importable for ``peers``; an exception as the value is raised."""

    def import_module(name):
        if name not in present:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        if isinstance(present[name], Exception):
            raise present[name]
        return present[name]

    monkeypatch.setattr(peers.importlib, "import_module", import_module)


def test_absent_peers_are_listed(monkeypatch):
    importing(monkeypatch, {})
    found, absent = peers.find(GPU)
    assert found == []
    assert absent == [
        "deep_gemm: no module deep_gemm; no module vllm",
        "aiter.ops.triton.attention.fp8_mqa_logits: no module aiter",
    ]


def test_present_peers_are_found_under_either_name(monkeypatch):
    bundled = module_with(fp8_fp4_mqa_logits=compressed_only)
    aiter = module_with(fp8_mqa_logits=first_form)
    importing(monkeypatch, {"vllm.third_party.deep_gemm": bundled, "aiter.ops.triton.fp8_mqa_logits": aiter})
    found, absent = peers.find(GPU)
    assert [peer.name for peer in found] == ["deep_gemm", "aiter"]
    assert found[0].module is bundled
    assert found[1].function is first_form
    assert absent == []


@pytest.mark.parametrize("error", [ImportError("libcuda.so.1"), OSError("libcuda.so.1"), RuntimeError("libcuda.so.1")])
def test_a_peer_that_breaks_at_import_is_listed_with_its_error(monkeypatch, error):
    importing(monkeypatch, {"deep_gemm": error})
    found, absent = peers.find(GPU)
    assert found == []
    assert absent[0] == f"deep_gemm: {type(error).__name__}: libcuda.so.1; no module vllm"


def test_a_cpu_has_one_peer():
    found, absent = peers.find(CPU)
    assert [peer.name for peer in found] == ["einsum"]
    assert absent == ["deep_gemm, aiter: GPU only"]
