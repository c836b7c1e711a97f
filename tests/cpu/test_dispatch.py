"""Which backend runs a call, as tables that need no GPU."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from helpers import CPU, assert_matches, expected_for, replace_launches
from lightning_indexer import (
    Arch,
    BackendUnavailableError,
    MqaLogitsProblem,
    arch_of,
    explain,
    fp8_mqa_logits,
    support_table,
)
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.selection import registry as dispatch

DEEPSEEK = MqaLogitsProblem(4096, 32768, 64, 128)
GLM = MqaLogitsProblem(4096, 32768, 32, 128)
# H and D that only torch-blocked takes.
ODD = MqaLogitsProblem(4096, 32768, 24, 48)

GPUS = [arch for arch in Arch.known() if arch.vendor in ("nvidia", "amd")]
UNLISTED = {
    "sm75": Arch("sm75", "nvidia", "none", 68, "T4", listed=False),
    "gfx906": Arch("gfx906", "amd", "none", 60, "MI50", listed=False),
    "xpu": Arch("xpu", "other", "none", 1, "a device", listed=False),
}


@pytest.fixture(autouse=True)
def _compiled_triton_only(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def reasons(problem: MqaLogitsProblem, arch: Arch, name: str | None = None) -> dict[str, str | None]:
    """Why each backend cannot run, whatever is installed here."""
    return {verdict.backend: verdict.reason for verdict in explain(problem, arch, name, installed_only=False)}


def chosen(problem: MqaLogitsProblem, arch: Arch) -> list[str]:
    """The backend of a machine on which everything is installed."""
    return [verdict.backend for verdict in explain(problem, arch, installed_only=False) if verdict.chosen]


# The table: the order in which backends are tried, and the one that runs. test_policy.py has the rules by shape.


PORTABLE = ["triton-portable", "torch-blocked"]
ORDER = {
    "cpu": ["torch-blocked", "triton-portable"],
    "sm90": ["cuda-sm90", *PORTABLE],
    "gfx942": ["flydsl", *PORTABLE],
    "gfx950": ["hip-gfx950", "gluon-gfx950", "flydsl", *PORTABLE],
    "xpu": ["torch-blocked"],
}


def order(arch: Arch) -> list[str]:
    """What the registry has of an arch's order."""
    known = [backend.name for backend in dispatch.backends()]
    return [name for name in ORDER.get(arch.name, PORTABLE) if name in known]


FORMS = [
    {},
    {"clean_logits": False},
    {"clean_logits": False, "max_seqlen_k": 4096},
    {"out_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("problem", [DEEPSEEK, GLM, ODD], ids=str)
@pytest.mark.parametrize("arch", [*Arch.known(), *UNLISTED.values()], ids=lambda arch: arch.name)
def test_order(arch, problem):
    for installed_only in (True, False):
        verdicts = explain(problem, arch, installed_only=installed_only)
        assert [verdict.backend for verdict in verdicts] == order(arch)
        can_run = [v.backend for v in verdicts if v.reason is None and v.passed_over is None]
        assert [verdict.backend for verdict in verdicts if verdict.chosen] == can_run[:1]
        if installed_only:
            assert dispatch.select(problem, arch).name == can_run[0]


@pytest.mark.parametrize("arch", Arch.known(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_choice(arch, heads, head_dim):
    for facts in FORMS:
        problem = MqaLogitsProblem(4096, 32768, heads, head_dim, **facts)
        (name,) = chosen(problem, arch)
        if arch.name in ("gfx942", "gfx950"):  # the choice is by shape, and by which gates are open
            assert name in order(arch)[:-1]
        else:
            assert name == order(arch)[0]


def test_hip_gfx950():
    gfx950 = Arch.parse("gfx950")
    assert chosen(GLM, gfx950) == ["hip-gfx950"]
    assert chosen(DEEPSEEK, gfx950) == ["hip-gfx950"]
    # Few keys a row: another backend's by default, this one's if it is asked for.
    for problem in (MqaLogitsProblem(4096, 32767, 32, 128), MqaLogitsProblem(4096, 4095, 64, 128)):
        assert "hip-gfx950" not in chosen(problem, gfx950)
        [passed_over] = [v.passed_over for v in explain(problem, gfx950) if v.backend == "hip-gfx950"]
        assert passed_over.startswith("preferred where D=128, H=32 and N >= 8 * M or H=64 and N >= 1 * M; this is M=")
        assert reasons(problem, gfx950, "hip-gfx950")["hip-gfx950"] is None
        assert support_table(problem)["hip-gfx950"]["gfx950"] is None
    for problem, arch, reason in (
        (GLM, "gfx942", "needs gfx950 (MI350X, MI355X), this is gfx942"),
        (MqaLogitsProblem(1, 9, 16, 128), "gfx950", "H=16 is not one of 32, 64"),
        (MqaLogitsProblem(1, 9, 32, 64), "gfx950", "D=64 is not one of 128"),
        (
            MqaLogitsProblem(1, 9, 32, 128, clean_logits=False, max_seqlen_k=9),
            "gfx950",
            "compressed logits are not built",
        ),
        (
            MqaLogitsProblem(1, 9, 32, 128, out_dtype=torch.bfloat16),
            "gfx950",
            "writes float32 logits, torch.bfloat16 is not",
        ),
        (MqaLogitsProblem(1, 9, 32, 128, aligned=False), "gfx950", "must start on 16-byte boundaries"),
        (MqaLogitsProblem(1, 2**30, 32, 128), "gfx950", "a row of logits is more than 32-bit offsets reach"),
    ):
        assert reason in reasons(problem, Arch.parse(arch), "hip-gfx950")["hip-gfx950"]


@pytest.mark.parametrize("arch", GPUS, ids=lambda arch: arch.name)
def test_other_shapes_fall_to_torch(arch):
    assert chosen(ODD, arch) == ["torch-blocked"]
    assert reasons(ODD, arch)["triton-portable"] == "H=24 is not one of 8, 16, 32, 64, 128"
    problem = MqaLogitsProblem(4096, 32768, 64, 48)
    assert chosen(problem, arch) == ["torch-blocked"]
    assert reasons(problem, arch)["triton-portable"] == "D=48 is not one of 32, 64, 128"


def test_cuda_sm90():
    sm90 = Arch.parse("sm90")
    assert reasons(ODD, sm90, "cuda-sm90") == {"cuda-sm90": "H=24 is not one of 8, 16, 32, 64, 128"}
    assert reasons(MqaLogitsProblem(1, 1, 8, 48), sm90, "cuda-sm90") == {"cuda-sm90": "D=48 is not one of 32, 64, 128"}
    unaligned = DEEPSEEK._replace(aligned=False)
    assert chosen(unaligned, sm90) == ["triton-portable"]
    assert "16-byte boundaries" in reasons(unaligned, sm90)["cuda-sm90"]
    for arch in Arch.known():
        if arch is not sm90:
            assert reasons(DEEPSEEK, arch, "cuda-sm90")["cuda-sm90"].endswith(f"this is {arch.name}")


def test_gluon_gfx950():
    gfx950 = Arch.parse("gfx950")
    assert reasons(ODD, gfx950, "gluon-gfx950") == {"gluon-gfx950": "H=24 is not one of 8, 16, 32, 64, 128"}
    unaligned = DEEPSEEK._replace(aligned=False)
    assert chosen(unaligned, gfx950) == ["triton-portable"]
    assert "start on 16 bytes" in reasons(unaligned, gfx950)["gluon-gfx950"]
    assert "has to be an int32" in reasons(DEEPSEEK._replace(keys=2**31 - 1), gfx950)["gluon-gfx950"]
    for arch in Arch.known():
        if arch is not gfx950:
            assert reasons(DEEPSEEK, arch, "gluon-gfx950")["gluon-gfx950"].endswith(f"not {arch.name}'s")


def test_the_cpu_runs_torch_even_where_triton_could(monkeypatch):
    cpu = Arch.parse("cpu")
    assert reasons(DEEPSEEK, cpu) == {
        "torch-blocked": None,
        "triton-portable": "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)",
    }
    assert dispatch.select(DEEPSEEK, cpu).name == "torch-blocked"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reasons(DEEPSEEK, cpu) == {"torch-blocked": None, "triton-portable": None}
    assert dispatch.select(DEEPSEEK, cpu).name == "torch-blocked"
    assert dispatch.select(DEEPSEEK, cpu, "triton-portable").name == "triton-portable"


@pytest.mark.parametrize("arch", UNLISTED.values(), ids=UNLISTED)
def test_an_unlisted_arch_runs_torch_alone(arch):
    assert dispatch.select(DEEPSEEK, arch).name == "torch-blocked"
    reason = reasons(DEEPSEEK, arch, "triton-portable")["triton-portable"]
    assert reason == f"{arch.name} is not a known arch; Triton needs NVIDIA sm80 or newer, or AMD gfx90a or newer"


def test_support_table_covers_every_backend_and_arch():
    for problem in (None, ODD):
        table = support_table(problem)
        assert list(table) == [backend.name for backend in dispatch.backends()]
        for name, row in table.items():
            assert list(row) == [arch.name for arch in Arch.known()]
            for arch in Arch.known():
                assert row[arch.name] == dispatch.kernel(name).supports(problem or DEEPSEEK, arch)
    assert support_table()["triton-portable"]["sm90"] is None
    assert support_table(ODD)["triton-portable"]["sm90"] == "H=24 is not one of 8, 16, 32, 64, 128"
    assert set(support_table(ODD)["torch-blocked"].values()) == {None}


def test_what_is_installed_plays_no_part_in_the_support_table(monkeypatch):
    before = support_table()
    monkeypatch.setattr(type(dispatch.get("triton-portable")), "missing", lambda self: "Triton is not installed")
    assert support_table() == before


def test_backends_are_described():
    names = [backend.name for backend in dispatch.backends()]
    assert len(set(names)) == len(names)
    assert {"triton-portable", "torch-blocked"} <= set(names)
    for backend in dispatch.backends():
        assert dispatch.get(backend.name) is backend
        assert backend.summary
        assert backend.missing() is None or isinstance(backend.missing(), str)


# Packages that are not there


def test_a_missing_package_closes_the_gate(monkeypatch):
    sentence = "Triton is not installed: pip install 'lightning-indexer[triton]'"
    monkeypatch.setattr(type(dispatch.get("triton-portable")), "missing", lambda self: sentence)
    sm80 = Arch.parse("sm80")
    assert [(v.backend, v.chosen, v.reason) for v in explain(DEEPSEEK, sm80)[-2:]] == [
        ("triton-portable", False, sentence),
        ("torch-blocked", True, None),
    ]
    assert [(v.backend, v.chosen, v.reason) for v in explain(DEEPSEEK, sm80, installed_only=False)[-2:]] == [
        ("triton-portable", True, None),
        ("torch-blocked", False, None),
    ]
    assert dispatch.select(DEEPSEEK, sm80).name == "torch-blocked"
    with pytest.raises(BackendUnavailableError, match=r"pip install 'lightning-indexer\[triton\]'"):
        dispatch.select(DEEPSEEK, sm80, "triton-portable")


def test_what_a_gate_refuses_is_not_called_missing(monkeypatch):
    monkeypatch.setattr(type(dispatch.get("triton-portable")), "missing", lambda self: "Triton is not installed")
    (verdict,) = explain(ODD, Arch.parse("sm80"), "triton-portable")
    assert verdict.reason == "H=24 is not one of 8, 16, 32, 64, 128"


# A backend asked for by name


def test_a_named_backend_is_looked_at_alone():
    sm80 = Arch.parse("sm80")
    assert [str(verdict) for verdict in explain(DEEPSEEK, sm80, "torch-blocked")] == ["-> torch-blocked: can run"]
    assert [str(verdict) for verdict in explain(ODD, sm80, "triton-portable")] == [
        "   triton-portable: H=24 is not one of 8, 16, 32, 64, 128"
    ]
    assert [str(verdict) for verdict in explain(DEEPSEEK, Arch.parse("gfx90a"))] == [
        "-> triton-portable: can run (runs on every listed GPU)",
        "   torch-blocked: can run (runs any shape on any device)",
    ]
    assert dispatch.select(DEEPSEEK, sm80, "torch-blocked").name == "torch-blocked"


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_named_backend_never_falls_back(monkeypatch, by):
    name = "triton-portable"
    if by == "variable":
        monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", name)
        name = None
    with pytest.raises(BackendUnavailableError) as info:
        dispatch.select(ODD, Arch.parse("sm90"), name)
    message = str(info.value)
    assert "M=4096 N=32768 H=24 D=48 clean float32 on sm90" in message
    assert "triton-portable: H=24 is not one of 8, 16, 32, 64, 128" in message
    assert "torch-blocked" not in message


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_a_call_never_falls_back(monkeypatch, by):
    inputs = make_inputs(4, 40, 8, 32, CPU)
    ks, ke = make_windows("misaligned", 4, 40, CPU)
    options = {}
    if by == "variable":
        monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "triton-portable")
    else:
        options["backend"] = "triton-portable"
    out = torch.full((4, 40), 7.0)
    with pytest.raises(BackendUnavailableError, match="triton-portable: Triton has no CPU target"):
        fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke, out=out, **options)
    assert bool((out == 7.0).all())


def test_an_error_of_a_backend_is_not_swallowed(monkeypatch):
    def run(call):
        raise RuntimeError("out of registers")

    replace_launches(monkeypatch, lambda *_: run)
    inputs = make_inputs(4, 40, 8, 32, CPU)
    ks, ke = make_windows("misaligned", 4, 40, CPU)
    with pytest.raises(RuntimeError, match="out of registers"):
        fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)


def test_unknown_names():
    known = ", ".join(backend.name for backend in dispatch.backends())
    for look in (dispatch.select, dispatch.prepare, explain):
        with pytest.raises(ValueError, match=f"^backend: got 'cutlass', expected one of {known}$"):
            look(DEEPSEEK, Arch.parse("sm90"), "cutlass")
    with pytest.raises(ValueError, match=f"^--backend: got 'cutlass', expected one of {known}$"):
        dispatch.get("cutlass", "--backend")


def test_the_backend_variable(monkeypatch):
    sm80 = Arch.parse("sm80")
    assert dispatch.select(DEEPSEEK, sm80).name == "triton-portable"
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "torch-blocked")
    assert dispatch.select(DEEPSEEK, sm80).name == "torch-blocked"
    assert dispatch.select(DEEPSEEK, sm80, "triton-portable").name == "triton-portable"


# Preparation, once per problem


@pytest.fixture
def launched(monkeypatch):
    """Every (backend, problem, arch) that is asked to launch; what it returns is its own name."""
    asked = []

    def launch(name, problem, arch):
        asked.append((name, problem, arch.name))
        return name

    replace_launches(monkeypatch, launch)
    return asked


def prepared(problem: MqaLogitsProblem, arch: Arch, name: str | None = None) -> str:
    found = dispatch.prepare(problem, arch, name)
    assert found.run == found.backend
    assert found.settled
    return found.backend


def test_the_winner_alone_is_launched(launched):
    sm80, gfx950 = Arch.parse("sm80"), Arch.parse("gfx950")
    assert prepared(DEEPSEEK, sm80) == "triton-portable"
    assert prepared(DEEPSEEK, gfx950) == "hip-gfx950"
    assert prepared(DEEPSEEK, sm80, "torch-blocked") == "torch-blocked"
    assert prepared(ODD, sm80) == "torch-blocked"
    assert launched == [
        ("triton-portable", DEEPSEEK, "sm80"),
        ("hip-gfx950", DEEPSEEK, "gfx950"),
        ("torch-blocked", DEEPSEEK, "sm80"),
        ("torch-blocked", ODD, "sm80"),
    ]


def test_preparation_follows_the_environment(launched, monkeypatch):
    sm80, cpu = Arch.parse("sm80"), Arch.parse("cpu")
    assert prepared(DEEPSEEK, sm80) == "triton-portable"
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "torch-blocked")
    assert prepared(DEEPSEEK, sm80) == "torch-blocked"
    assert prepared(DEEPSEEK, sm80, "triton-portable") == "triton-portable"
    monkeypatch.delenv("LIGHTNING_INDEXER_BACKEND")
    assert prepared(DEEPSEEK, sm80) == "triton-portable"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert prepared(DEEPSEEK, cpu, "triton-portable") == "triton-portable"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendUnavailableError, match="Triton has no CPU target"):
        dispatch.prepare(DEEPSEEK, cpu, "triton-portable")


def call_of(rows: int = 4) -> tuple:
    inputs = make_inputs(rows, 40, 8, 32, CPU)
    ks, ke = make_windows("misaligned", rows, 40, CPU)
    return inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke


def test_calls_that_agree_are_planned_once(monkeypatch):
    asked = []
    replace_launches(monkeypatch, lambda name, problem, arch: lambda call: asked.append(problem) if not asked else None)
    launches = []
    kernel = dispatch.kernel("torch-blocked")
    monkeypatch.setattr(kernel, "launch", lambda *_: launches.append(1) or (lambda call: None))
    for _ in range(3):
        fp8_mqa_logits(*call_of())
    assert len(launches) == 1
    fp8_mqa_logits(*call_of(5))
    assert len(launches) == 2
    wider = torch.empty(4, 60)[:, :40]
    for _ in range(2):
        fp8_mqa_logits(*call_of(), out=wider)
    assert len(launches) == 3


def test_what_cannot_run_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match="H=24 is not one of"):
            dispatch.prepare(ODD, Arch.parse("sm80"), "triton-portable")


# The arch


def test_known_archs_are_consistent():
    names = [arch.name for arch in Arch.known()]
    assert len(set(names)) == len(names)
    assert [Arch.parse(name) for name in names] == list(Arch.known())
    for arch in Arch.known():
        assert arch.listed
        assert arch.units > 0
        assert arch.products
        if arch.vendor == "nvidia":
            assert arch.name.startswith("sm")
            assert arch.fp8 == ("fn" if int(arch.name[2:]) >= 89 else "none")
        elif arch.vendor == "amd":
            assert arch.name.startswith("gfx")
    assert [arch.name for arch in Arch.known() if arch.fp8 == "fnuz"] == ["gfx942"]


def test_an_unknown_arch_lists_the_known_ones():
    known = ", ".join(arch.name for arch in Arch.known())
    with pytest.raises(ValueError, match=f"^arch: got 'gfx951', expected one of {known}$"):
        Arch.parse("gfx951")


def test_an_arch_is_frozen_and_hashable():
    arch = Arch.parse("gfx950")
    with pytest.raises(dataclasses.FrozenInstanceError):
        arch.units = 1
    assert hash(arch) == hash(Arch.parse("gfx950"))


def test_devices_without_kernels():
    assert arch_of("cpu") == Arch.parse("cpu")
    assert arch_of(torch.device("meta")) == Arch(
        "meta", "other", "none", 1, "a device this library has no kernels for", listed=False
    )


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda", "cuda:3"])
def test_the_arch_variable_counts_for_every_device(monkeypatch, device):
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx950")
    assert arch_of(device) == Arch.parse("gfx950")


def fake_cuda(monkeypatch, properties: SimpleNamespace, hip: str | None) -> list[int]:
    asked = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or properties)
    return asked


def test_an_nvidia_device(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=114, name="NVIDIA H100 PCIe")
    asked = fake_cuda(monkeypatch, properties, None)
    assert arch_of("cuda:2") == dataclasses.replace(Arch.parse("sm90"), units=114)
    assert arch_of("cuda") == dataclasses.replace(Arch.parse("sm90"), units=114)
    arch_of("cuda:2")
    assert asked == [2, 5]


@pytest.mark.parametrize("name", ["gfx942:sramecc+:xnack-", "gfx942"])
def test_an_amd_device(monkeypatch, name):
    properties = SimpleNamespace(gcnArchName=name, major=9, minor=4, multi_processor_count=80, name="MI308X")
    fake_cuda(monkeypatch, properties, "6.4")
    assert arch_of("cuda:0") == dataclasses.replace(Arch.parse("gfx942"), units=80)


@pytest.mark.parametrize(
    ("properties", "hip", "name", "vendor"),
    [
        (SimpleNamespace(major=7, minor=5, multi_processor_count=40, name="Tesla T4"), None, "sm75", "nvidia"),
        (SimpleNamespace(major=13, minor=0, multi_processor_count=40, name="Next"), None, "sm130", "nvidia"),
        (SimpleNamespace(gcnArchName="gfx1100", multi_processor_count=40, name="RX 7900"), "6.4", "gfx1100", "amd"),
    ],
)
def test_a_device_that_is_not_in_the_table(monkeypatch, properties, hip, name, vendor):
    fake_cuda(monkeypatch, properties, hip)
    arch = arch_of("cuda:0")
    assert arch == Arch(name, vendor, "none", 40, properties.name, listed=False)
    assert dispatch.select(DEEPSEEK, arch).name == "torch-blocked"


def test_the_arch_variable_reaches_selection(monkeypatch):
    """As gfx942, a CPU call takes Triton, which is replaced here by a mark."""
    ran = []
    monkeypatch.setattr(
        dispatch.kernel("triton-portable"), "launch", lambda problem, arch, config: lambda call: ran.append(arch.name)
    )
    inputs = make_inputs(4, 40, 8, 32, CPU)
    ks, ke = make_windows("misaligned", 4, 40, CPU)
    arguments = (inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    assert_matches(fp8_mqa_logits(*arguments), expected_for(inputs, ks, ke), clean=True)
    assert ran == []
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx942")
    fp8_mqa_logits(*arguments)
    assert ran == ["gfx942"]


# The facts of a call


def test_problem_texts_and_width():
    assert str(DEEPSEEK) == "M=4096 N=32768 H=64 D=128 clean float32"
    assert str(MqaLogitsProblem(1, 2, 8, 32, clean_logits=False)) == "M=1 N=2 H=8 D=32 noclean float32"
    compressed = MqaLogitsProblem(1, 20, 8, 32, clean_logits=False, max_seqlen_k=7, out_dtype=torch.bfloat16)
    assert str(compressed) == "M=1 N=20 H=8 D=32 compressed to 7 bfloat16"
    assert (compressed.width, compressed.compressed) == (7, True)
    assert (DEEPSEEK.width, DEEPSEEK.compressed) == (32768, False)
    assert len({DEEPSEEK, GLM, MqaLogitsProblem(4096, 32768, 64, 128)}) == 2
