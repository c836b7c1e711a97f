"""The dispatch policy, as a table that needs no GPU; and that selection follows it over any registry."""

from __future__ import annotations

import pytest

from lightning_indexer import Arch, MqaLogitsProblem, explain
from lightning_indexer.selection import policy
from lightning_indexer.selection import registry as dispatch

TRITON_TORCH = ("triton-portable", "torch-blocked")
FLYDSL_TRITON_TORCH = ("flydsl", *TRITON_TORCH)


def tried(arch: str, rows: int, keys: int, heads: int, head_dim: int = 128, kernels: bool = True) -> tuple[str, ...]:
    """The backends that the policy would try, in order."""
    problem = MqaLogitsProblem(rows, keys, heads, head_dim)
    steps = policy.chain(problem, Arch.parse(arch), kernels=kernels)
    return tuple(step.backend for step in steps if step.passed_over is None)


@pytest.mark.parametrize(
    ("arch", "shape", "expected"),
    [
        ("sm90", (4096, 32768, 64), ("cuda-sm90", *TRITON_TORCH)),
        ("sm90", (1, 1, 8, 32), ("cuda-sm90", *TRITON_TORCH)),
        # gfx950, H=32: HIP where K is long beside the rows.
        ("gfx950", (4096, 32768, 32), ("hip-gfx950", *FLYDSL_TRITON_TORCH)),
        ("gfx950", (4096, 32767, 32), FLYDSL_TRITON_TORCH),
        ("gfx950", (128, 1024, 32), ("hip-gfx950", *FLYDSL_TRITON_TORCH)),
        ("gfx950", (128, 1023, 32), FLYDSL_TRITON_TORCH),
        ("gfx950", (8192, 8192, 32), FLYDSL_TRITON_TORCH),
        ("gfx950", (1, 8, 32), ("hip-gfx950", *FLYDSL_TRITON_TORCH)),
        ("gfx950", (4096, 32768, 32, 64), FLYDSL_TRITON_TORCH),
        ("gfx950", (1024, 131072, 16), FLYDSL_TRITON_TORCH),
        # gfx950, H=64: HIP where no row is without a key of its own, then Gluon where rows are many.
        ("gfx950", (4096, 32768, 64), ("hip-gfx950", "gluon-gfx950", *FLYDSL_TRITON_TORCH)),
        ("gfx950", (4096, 4095, 64), ("gluon-gfx950", *FLYDSL_TRITON_TORCH)),
        ("gfx950", (4096, 1, 64), ("gluon-gfx950", *FLYDSL_TRITON_TORCH)),
        ("gfx950", (4095, 32768, 64), ("hip-gfx950", *FLYDSL_TRITON_TORCH)),
        ("gfx950", (4095, 4094, 64), FLYDSL_TRITON_TORCH),
        ("gfx950", (8192, 8192, 64, 64), FLYDSL_TRITON_TORCH),
        ("gfx950", (8192, 8192, 128), FLYDSL_TRITON_TORCH),
        ("gfx942", (4096, 32768, 32), FLYDSL_TRITON_TORCH),
        ("gfx942", (4096, 32768, 64), FLYDSL_TRITON_TORCH),
        ("cpu", (4096, 32768, 64), ("torch-blocked", "triton-portable")),
    ],
    ids=str,
)
def test_the_table(arch, shape, expected):
    assert tried(arch, *shape) == expected


OTHERS = [a.name for a in Arch.known() if a.name not in ("cpu", "sm90", "gfx942", "gfx950")]


@pytest.mark.parametrize("arch", OTHERS)
@pytest.mark.parametrize("shape", [(4096, 32768, 32), (4096, 32768, 64), (1, 1, 8, 32)])
def test_every_other_arch_that_triton_supports(arch, shape):
    assert tried(arch, *shape) == TRITON_TORCH


def test_a_device_that_triton_does_not_know():
    xpu = Arch("xpu", "other", "none", 1, "a device", listed=False)
    assert [step.backend for step in policy.chain(MqaLogitsProblem(1, 1, 8, 32), xpu)] == ["torch-blocked"]


@pytest.mark.parametrize("arch", [arch.name for arch in Arch.known()])
@pytest.mark.parametrize("shape", [(4096, 32768, 32), (4096, 32768, 64)])
def test_kernels_off_is_torch_everywhere(arch, shape):
    assert tried(arch, *shape, kernels=False) == ("torch-blocked",)


def test_what_has_been_measured_exists():
    names = {backend.name for backend in dispatch.backends()}
    for backend, arch in policy.MEASURED["fp8_mqa_logits"]:
        assert backend in names
        assert backend in tried(arch, 4096, 32768, 64)


# The four cases of vLLM's own dispatch test: gfx942, gfx950, another arch, and AITER disabled.
VLLM_CASES = [
    ("gfx942", True, (4096, 32768, 32), "flydsl"),
    ("gfx950", True, (8192, 32768, 32), "flydsl"),
    ("gfx90a", True, (4096, 32768, 32), "triton-portable"),
    ("gfx950", False, (8192, 32768, 32), "torch-blocked"),
]


class Open:
    """A backend that runs everything, everywhere."""

    summary = "a double"

    def __init__(self, name: str, gate: str | None = None, missing: str | None = None) -> None:
        self.name, self._gate, self._missing = name, gate, missing
        self.kernels = {"fp8_mqa_logits": self}

    def missing(self) -> str | None:
        return self._missing

    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        return self._gate

    def config(self, problem: MqaLogitsProblem, arch: Arch) -> str:
        return "a config"

    def neighbours(self, problem: MqaLogitsProblem, arch: Arch) -> list[str]:
        return ["a config"]

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: str):
        return self.name


NAMES = ("cuda-sm90", "hip-gfx950", "gluon-gfx950", "flydsl", "triton-portable", "torch-blocked")


def registry(monkeypatch, *backends: Open) -> None:
    """A registry of doubles: those given, and open ones for the other names."""
    named = {backend.name: backend for backend in backends}
    monkeypatch.setattr(dispatch, "_BACKENDS", {name: named.get(name, Open(name)) for name in NAMES})
    dispatch.changed()


def select(arch: str, *shape: int) -> str:
    return dispatch.select(MqaLogitsProblem(*shape, *(128,) * (4 - len(shape))), Arch.parse(arch)).name


@pytest.mark.parametrize(("arch", "kernels", "shape", "expected"), VLLM_CASES)
def test_the_four_cases_of_vllms_dispatch_test(monkeypatch, arch, kernels, shape, expected):
    registry(monkeypatch)
    monkeypatch.setenv("LIGHTNING_INDEXER_KERNELS", "1" if kernels else "0")
    assert select(arch, *shape) == expected
    assert dispatch.prepare(MqaLogitsProblem(*shape, 128), Arch.parse(arch)).run == expected


def test_a_faster_rule_goes_before_flydsl(monkeypatch):
    registry(monkeypatch)
    assert select("gfx950", 4096, 32768, 32) == "hip-gfx950"
    assert select("gfx950", 4096, 32768, 64) == "hip-gfx950"
    assert select("gfx950", 4096, 4095, 64) == "gluon-gfx950"


def test_a_name_that_the_registry_does_not_have_is_skipped(monkeypatch):
    registry(monkeypatch)
    for name, then in (("hip-gfx950", "flydsl"), ("flydsl", "triton-portable"), ("triton-portable", "torch-blocked")):
        del dispatch._BACKENDS[name]
        assert select("gfx950", 4096, 32768, 32) == then


@pytest.mark.parametrize("obstacle", ["gate", "missing"])
def test_a_closed_gate_or_a_missing_package_hands_on(monkeypatch, obstacle):
    registry(monkeypatch, Open("hip-gfx950", **{obstacle: "no"}), Open("flydsl", **{obstacle: "no"}))
    assert select("gfx950", 4096, 32768, 32) == "triton-portable"
    assert select("gfx942", 4096, 32768, 32) == "triton-portable"


def test_what_is_passed_over_is_never_a_fallback_but_runs_by_name(monkeypatch):
    registry(monkeypatch, Open("flydsl", missing="no"), Open("triton-portable", gate="no"))
    assert select("gfx950", 8192, 8192, 32) == "torch-blocked"
    problem, gfx950 = MqaLogitsProblem(8192, 8192, 32, 128), Arch.parse("gfx950")
    assert dispatch.select(problem, gfx950, "hip-gfx950").name == "hip-gfx950"
    monkeypatch.setenv("LIGHTNING_INDEXER_KERNELS", "0")
    assert dispatch.select(problem, gfx950, "hip-gfx950").name == "hip-gfx950"
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "hip-gfx950")
    assert dispatch.select(problem, gfx950).name == "hip-gfx950"


def test_explain_prints_the_chain_with_each_reason(monkeypatch):
    registry(monkeypatch, Open("flydsl", missing="FlyDSL is not installed: pip install it"))
    problem = MqaLogitsProblem(4096, 16384, 32, 128)
    this = "this is M=4096 N=16384 H=32 D=128"
    assert [str(verdict) for verdict in explain(problem, Arch.parse("gfx950"))] == [
        f"   hip-gfx950: can run by name (preferred where D=128, H=32 and N >= 8 * M or H=64 and N >= 1 * M; {this})",
        f"   gluon-gfx950: can run by name (preferred where H=64, D=128 and M >= 4096; {this})",
        "   flydsl: FlyDSL is not installed: pip install it (written for CDNA)",
        "-> triton-portable: can run (runs on every listed GPU)",
        "   torch-blocked: can run (runs any shape on any device)",
    ]
    monkeypatch.setenv("LIGHTNING_INDEXER_KERNELS", "0")
    assert [str(verdict) for verdict in explain(problem, Arch.parse("sm90"))] == [
        "   cuda-sm90: can run by name (kernels are switched off)",
        "   triton-portable: can run by name (kernels are switched off)",
        "-> torch-blocked: can run (runs any shape on any device)",
    ]


def test_preparation_follows_the_switch(monkeypatch):
    registry(monkeypatch)
    problem, sm90 = MqaLogitsProblem(4096, 32768, 64, 128), Arch.parse("sm90")
    for value, expected in (("1", "cuda-sm90"), ("0", "torch-blocked"), ("on", "cuda-sm90"), ("", "cuda-sm90")):
        monkeypatch.setenv("LIGHTNING_INDEXER_KERNELS", value)
        assert dispatch.prepare(problem, sm90).run == expected
    monkeypatch.setenv("LIGHTNING_INDEXER_KERNELS", "perhaps")
    with pytest.raises(ValueError, match=r"^LIGHTNING_INDEXER_KERNELS: got 'perhaps', expected 0 or 1$"):
        dispatch.prepare(problem, sm90)


def test_a_call_follows_the_switch(monkeypatch):
    """The plan of an earlier call with the same facts is not used again once the variable changes."""
    from helpers import CPU, assert_matches, expected_for
    from lightning_indexer import fp8_mqa_logits
    from lightning_indexer.check.cases import make_inputs, make_windows

    ran = []
    monkeypatch.setattr(
        dispatch.kernel("triton-portable"), "launch", lambda problem, arch, config: lambda call: ran.append(arch.name)
    )
    monkeypatch.setattr(type(dispatch.get("triton-portable")), "missing", lambda self: None)
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "sm80")
    inputs = make_inputs(4, 40, 8, 32, CPU)
    ks, ke = make_windows("misaligned", 4, 40, CPU)
    arguments = (inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    fp8_mqa_logits(*arguments)
    assert ran == ["sm80"]
    monkeypatch.setenv("LIGHTNING_INDEXER_KERNELS", "0")
    assert_matches(fp8_mqa_logits(*arguments), expected_for(inputs, ks, ke), clean=True)
    assert ran == ["sm80"]
