"""Arguments that are refused, with a message that names them, and the less usual ones that are accepted."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import (
    CPU,
    INTERPRETED,
    assert_matches,
    check_guarded,
    expected_for,
    expected_logits,
    replace_launches,
    same_bits,
)
from lightning_indexer import Arch, fp8_mqa_logits
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.chunking import MAX_KEYS
from lightning_indexer.problems.mqa_logits import is_aligned, row_stride
from lightning_indexer.selection import registry as dispatch

M, N, H, D = 6, 50, 4, 32
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
META = torch.device("meta")


def good() -> dict:
    """The arguments of a call that works; kv is taken apart, so that a row can change one half of it."""
    inputs = make_inputs(M, N, H, D, CPU)
    ks, ke = make_windows("misaligned", M, N, CPU)
    return {
        "q": inputs.q_fp8, "k": inputs.k_fp8, "kv_scale": inputs.kv_scale, "weights": inputs.weights,
        "cu_seqlen_ks": ks, "cu_seqlen_ke": ke,
    }  # fmt: skip


def call(arguments: dict) -> torch.Tensor:
    options = dict(arguments)
    k, kv_scale = options.pop("k"), options.pop("kv_scale")
    return fp8_mqa_logits(**{"kv": (k, kv_scale), **options})


def every_second_of(x: torch.Tensor) -> torch.Tensor:
    """The same values with a last dimension that is not contiguous."""
    return x.repeat_interleave(2, dim=-1)[..., ::2]


# argument, the bad value made of the good one, the error, and what the message says after "argument: ".
TYPE_ROWS = [
    ("q", lambda x: [1.0], TypeError, "got list, expected a torch.Tensor"),
    ("k", lambda x: None, TypeError, "got NoneType, expected a torch.Tensor"),
    ("kv_scale", lambda x: 1.0, TypeError, "got float, expected a torch.Tensor"),
    ("weights", lambda x: x.tolist(), TypeError, "got list, expected a torch.Tensor"),
    ("cu_seqlen_ks", lambda x: x.tolist(), TypeError, "got list, expected a torch.Tensor"),
    ("cu_seqlen_ke", lambda x: 7, TypeError, "got int, expected a torch.Tensor"),
    # fnuz is read on gfx942 only
    ("q", lambda x: x.float().to(FNUZ), TypeError, "got float8_e4m3fnuz on cpu, expected float8_e4m3fn: only gfx942"),
    ("k", lambda x: x.float().to(FNUZ), TypeError, "got float8_e4m3fnuz on cpu, expected float8_e4m3fn: only gfx942"),
]

# The same, for tensors whose dtype, shape, device or strides are wrong: what a trace can see.
TENSOR_ROWS = [
    # dtype
    ("q", lambda x: x.float(), TypeError, "got dtype torch.float32, expected torch.float8_e4m3fn or"),
    ("q", lambda x: x.view(torch.uint8), TypeError, "got dtype torch.uint8, expected torch.float8_e4m3fn or"),
    ("q", lambda x: x.float().to(torch.float8_e5m2), TypeError, "got dtype torch.float8_e5m2, expected"),
    ("k", lambda x: x.half(), TypeError, "got dtype torch.float16, expected torch.float8_e4m3fn or"),
    ("kv_scale", lambda x: x.half(), TypeError, "got dtype torch.float16, expected torch.float32"),
    ("weights", lambda x: x.double(), TypeError, "got dtype torch.float64, expected torch.float32 or"),
    (
        "cu_seqlen_ks",
        lambda x: x.long(),
        TypeError,
        r"got dtype torch.int64, expected torch.int32: pass cu_seqlen_k[se].to\(torch.int32\)",
    ),
    (
        "cu_seqlen_ke",
        lambda x: x.long(),
        TypeError,
        r"got dtype torch.int64, expected torch.int32: pass cu_seqlen_k[se].to\(torch.int32\)",
    ),
    ("cu_seqlen_ke", lambda x: x.float(), TypeError, "got dtype torch.float32, expected torch.int32"),
    # rank
    ("q", lambda x: x[:, 0], ValueError, r"got shape \[6, 32\], expected 3 dimensions, \[M, H, D\]"),
    ("k", lambda x: x[None], ValueError, r"got shape \[1, 50, 32\], expected 2 dimensions, \[N, D\]"),
    ("kv_scale", lambda x: x[0], ValueError, r"got shape \[\], expected \[50\] or \[50, 1\] to match k"),
    ("weights", lambda x: x[:, :, None], ValueError, r"got shape \[6, 4, 1\], expected 2 dimensions, \[M, H\]"),
    ("cu_seqlen_ks", lambda x: x[:, None, None], ValueError, r"got shape \[6, 1, 1\], expected 1 dimensions, \[M\]"),
    ("cu_seqlen_ke", lambda x: x[0], ValueError, r"got shape \[\], expected 1 dimensions, \[M\]"),
    # shape
    ("q", lambda x: x[:, :0], ValueError, r"got shape \[6, 0, 32\], expected at least one head and one channel"),
    ("q", lambda x: x[:, :, :0], ValueError, r"got shape \[6, 4, 0\], expected at least one head and one channel"),
    (
        "k",
        lambda x: x[:, :16],
        ValueError,
        r"got shape \[50, 16\], expected \[N, 32\] to match q of shape \[6, 4, 32\]",
    ),
    ("kv_scale", lambda x: x[:-1], ValueError, r"got shape \[49\], expected \[50\] or \[50, 1\] to match k"),
    ("kv_scale", lambda x: x[None], ValueError, r"got shape \[1, 50\], expected \[50\] or \[50, 1\] to match k"),
    ("kv_scale", lambda x: x[:, None, None], ValueError, r"got shape \[50, 1, 1\], expected \[50\] or \[50, 1\]"),
    ("kv_scale", lambda x: x[:-1, None], ValueError, r"got shape \[49\], expected \[50\] or \[50, 1\] to match k"),
    ("weights", lambda x: x[:-1], ValueError, r"got shape \[5, 4\], expected \[6, 4\] to match q"),
    ("weights", lambda x: x[:, :-1], ValueError, r"got shape \[6, 3\], expected \[6, 4\] to match q"),
    ("weights", lambda x: x.t(), ValueError, r"got shape \[4, 6\], expected \[6, 4\] to match q"),
    ("cu_seqlen_ks", lambda x: x[1:], ValueError, r"got shape \[5\], expected \[6\], one entry per row of q"),
    ("cu_seqlen_ke", lambda x: x.repeat(2), ValueError, r"got shape \[12\], expected \[6\], one entry per row of q"),
    # device
    ("k", lambda x: x.to(META), ValueError, "got a tensor on meta, expected cpu, the device of q"),
    ("kv_scale", lambda x: x.to(META), ValueError, "got a tensor on meta, expected cpu, the device of q"),
    ("weights", lambda x: x.to(META), ValueError, "got a tensor on meta, expected cpu, the device of q"),
    ("cu_seqlen_ks", lambda x: x.to(META), ValueError, "got a tensor on meta, expected cpu, the device of q"),
    ("cu_seqlen_ke", lambda x: x.to(META), ValueError, "got a tensor on meta, expected cpu, the device of q"),
    # stride
    ("q", every_second_of, ValueError, r"got strides \(256, 64, 2\), expected a contiguous last dimension"),
    ("k", every_second_of, ValueError, r"got strides \(64, 2\), expected a contiguous last dimension"),
    ("weights", every_second_of, ValueError, r"got strides \(8, 2\), expected a contiguous last dimension"),
]

OPTION_ROWS = [
    ({"kv": 3}, TypeError, r"^kv: got int, expected the pair \(k, kv_scale\)"),
    ({"kv": (1, 2, 3)}, TypeError, r"^kv: got tuple, expected the pair \(k, kv_scale\)"),
    ({"kv": torch.zeros(N, D).to(FN)}, TypeError, r"^kv: got one tensor, expected the pair \(k, kv_scale\)"),
    ({"clean_logits": 1}, TypeError, "^clean_logits: got int, expected a bool"),
    ({"clean_logits": None}, TypeError, "^clean_logits: got NoneType, expected a bool"),
    ({"clean_logits": False, "max_seqlen_k": True}, TypeError, "^max_seqlen_k: got bool, expected an int"),
    ({"clean_logits": False, "max_seqlen_k": 8.0}, TypeError, "^max_seqlen_k: got float, expected an int"),
    ({"clean_logits": False, "max_seqlen_k": None}, TypeError, "^max_seqlen_k: got NoneType, expected an int"),
    ({"clean_logits": False, "max_seqlen_k": -1}, ValueError, "^max_seqlen_k: got -1, expected 0 .* or a width"),
    ({"clean_logits": False, "max_seqlen_k": MAX_KEYS + 1}, ValueError, f"^max_seqlen_k: got {MAX_KEYS + 1}, expected"),
    ({"clean_logits": True, "max_seqlen_k": 8}, ValueError, "^clean_logits: got True with max_seqlen_k > 0, expected"),
    ({"max_seqlen_k": 8}, ValueError, "^clean_logits: got True with max_seqlen_k > 0, expected False"),
    ({"out_dtype": torch.float16}, TypeError, "^out_dtype: got torch.float16, expected torch.float32 or torch.bfloat1"),
    ({"out_dtype": "float32"}, TypeError, "^out_dtype: got float32, expected torch.float32 or torch.bfloat16"),
    ({"out_dtype": None}, TypeError, "^out_dtype: got None, expected torch.float32 or torch.bfloat16"),
    ({"backend": "fastest"}, ValueError, "^backend: got 'fastest', expected one of .*torch-blocked"),
    ({"backend": ["torch-blocked"]}, TypeError, "^backend: got list, expected a str or None"),
    # out
    ({"out": [[0.0]]}, TypeError, "^out: got list, expected a torch.Tensor"),
    ({"out": torch.zeros(M, N).bfloat16()}, TypeError, "^out: got dtype torch.bfloat16, expected torch.float32$"),
    (
        {"out": torch.zeros(M, N), "out_dtype": torch.bfloat16},
        TypeError,
        "^out: got dtype torch.float32, expected torch.bfloat16$",
    ),
    ({"out": torch.zeros(M * N)}, ValueError, r"^out: got shape \[300\], expected \[6, 50\]"),
    ({"out": torch.zeros(M, N + 1)}, ValueError, r"^out: got shape \[6, 51\], expected \[6, 50\]"),
    ({"out": torch.zeros(M - 1, N)}, ValueError, r"^out: got shape \[5, 50\], expected \[6, 50\]"),
    ({"out": torch.zeros(N, M)}, ValueError, r"^out: got shape \[50, 6\], expected \[6, 50\]"),
    (
        {"out": torch.zeros(M, N), "clean_logits": False, "max_seqlen_k": 8},
        ValueError,
        r"^out: got shape \[6, 50\], expected \[6, 8\]",
    ),
    ({"out": torch.zeros(M, N, device=META)}, ValueError, "^out: got a tensor on meta, expected cpu, the device of q"),
    ({"out": torch.zeros(N, M).t()}, ValueError, r"^out: got strides \(1, 6\), expected a contiguous last dimension"),
    (
        {"out": torch.zeros(M, 2 * N)[:, ::2]},
        ValueError,
        r"^out: got strides \(100, 2\), expected a contiguous last dimension",
    ),
    (
        {"out": torch.zeros(1, N).expand(M, N)},
        ValueError,
        r"^out: got strides \(0, 1\), expected a row stride of at least 50: rows overlap",
    ),
    (
        {"out": torch.zeros(500).as_strided((M, N), (N - 1, 1))},
        ValueError,
        r"^out: got strides \(49, 1\), expected a row stride of at least 50: rows overlap",
    ),
]


def test_the_good_call_is_good():
    arguments = good()
    assert_matches(call(arguments), expected_logits(*arguments.values()), clean=True)


@pytest.mark.parametrize(("name", "spoil", "error", "message"), [*TYPE_ROWS, *TENSOR_ROWS])
def test_bad_tensors(name, spoil, error, message):
    arguments = good()
    arguments[name] = spoil(arguments[name])
    with pytest.raises(error, match=f"^{name}: {message}"):
        call(arguments)


@pytest.mark.parametrize(("options", "error", "message"), OPTION_ROWS)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        call({**good(), **options})


def test_a_stacked_pair_is_no_pair():
    with pytest.raises(TypeError, match=r"^kv: got one tensor, expected the pair"):
        call({**good(), "kv": torch.zeros(2, N, D).to(FN)})


def test_a_refused_call_writes_nothing():
    arguments = good()
    arguments["out"] = torch.full((M, N), 7.0)
    arguments["cu_seqlen_ke"] = arguments["cu_seqlen_ke"].long()
    with pytest.raises(TypeError, match=r"^cu_seqlen_ke: got dtype torch.int64"):
        call(arguments)
    assert bool((arguments["out"] == 7.0).all())


def test_more_keys_than_int32_counts():
    # Only a shape: the storage is one row.
    arguments = good()
    arguments["k"] = arguments["k"][:1].expand(2**31, D)
    with pytest.raises(ValueError, match=f"^k: got {2**31} rows, expected at most {MAX_KEYS}"):
        call(arguments)


@pytest.mark.parametrize(("name", "spoil", "error", "message"), TENSOR_ROWS)
def test_bad_tensors_are_refused_while_tracing(name, spoil, error, message):
    with FakeTensorMode() as mode:
        arguments = {key: mode.from_tensor(value) for key, value in good().items()}
        arguments[name] = spoil(arguments[name])
        with pytest.raises(error, match=f"^{name}: {message}"):
            call(arguments)


# Environment variables


def test_unknown_backend_variable(monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "tritonportable")
    with pytest.raises(ValueError, match=r"^LIGHTNING_INDEXER_BACKEND: got 'tritonportable', expected one of ") as info:
        call(good())
    for backend in dispatch.backends():
        assert backend.name in str(info.value)


def test_unknown_arch_variable(monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx000")
    with pytest.raises(ValueError, match=r"^LIGHTNING_INDEXER_ARCH: arch: got 'gfx000', expected one of ") as info:
        call(good())
    for arch in Arch.known():
        assert arch.name in str(info.value)


@pytest.mark.parametrize("variable", ["LIGHTNING_INDEXER_BACKEND", "LIGHTNING_INDEXER_ARCH"])
def test_an_empty_variable_is_unset(monkeypatch, variable):
    monkeypatch.setenv(variable, "")
    arguments = good()
    assert_matches(call(arguments), expected_logits(*arguments.values()), clean=True)


def test_an_argument_wins_over_the_variable(monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "nonsense")
    arguments = good()
    result = call({**arguments, "backend": "torch-blocked"})
    assert_matches(result, expected_logits(*arguments.values()), clean=True)


# What is accepted


def embedded(x: torch.Tensor, before: int = 3) -> torch.Tensor:
    """The same values as a slice of a larger tensor, with an odd offset and odd strides; what surrounds it is NaN."""
    shape = [size + before + 2 for size in x.shape]
    large = torch.full(shape, float("nan")).to(x.dtype)
    view = large[tuple(slice(before, before + size) for size in x.shape)]
    view.copy_(x)
    assert not view.is_contiguous() or view.dim() == 1
    return view


@pytest.mark.parametrize("changed", [("q",), ("k",), ("weights",), ("q", "k", "weights")])
@pytest.mark.parametrize("backend", [None, "torch-blocked"])
def test_slices_of_larger_tensors(changed, backend):
    arguments = good()
    expected = expected_logits(*arguments.values())
    arguments.update({name: embedded(arguments[name]) for name in changed})
    assert_matches(call({**arguments, "backend": backend}), expected, clean=True)


def test_a_slice_of_the_key_cache():
    """The keys of one request, at an offset in the gathered buffer; the rest of the buffer is NaN."""
    arguments = good()
    expected = expected_logits(*arguments.values())
    cache = torch.full((3 * N, D), float("nan")).to(FN)
    scales = torch.full((3 * N,), float("nan"))
    cache[N + 1 : 2 * N + 1] = arguments["k"]
    scales[N + 1 : 2 * N + 1] = arguments["kv_scale"]
    arguments.update(k=cache[N + 1 : 2 * N + 1], kv_scale=scales[N + 1 : 2 * N + 1])
    assert arguments["k"].storage_offset() > 0
    assert_matches(call(arguments), expected, clean=True)


def test_scales_as_a_column():
    arguments = good()
    expected = expected_logits(*arguments.values())
    arguments["kv_scale"] = arguments["kv_scale"][:, None]
    assert_matches(call(arguments), expected, clean=True)


LOOKS = {
    "a column": lambda x: x[:, None],
    "a column of a wider tensor": lambda x: x[:, None].repeat(1, 3)[:, :1],
    "strided": every_second_of,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("names", [("kv_scale",), ("cu_seqlen_ks", "cu_seqlen_ke"), ("cu_seqlen_ke",)])
def test_vectors_as_columns_and_strided(names, look):
    arguments = good()
    expected = expected_logits(*arguments.values())
    arguments.update({name: look(arguments[name]) for name in names})
    assert_matches(call(arguments), expected, clean=True)
    assert_matches(call(arguments), expected, clean=True)  # by the plan of the first


def test_windows_that_all_rows_share():
    arguments = good()
    arguments.update(cu_seqlen_ks=torch.tensor([3], dtype=torch.int32).expand(M))
    expected = expected_logits(*(value.contiguous() for value in arguments.values()))
    assert_matches(call(arguments), expected, clean=True)


def test_the_scale_of_one_key_as_a_scalar():
    inputs = make_inputs(1, 1, H, D, CPU)
    ks, ke = make_windows("causal", 1, 1, CPU)
    for scale in (inputs.kv_scale[0], inputs.kv_scale.squeeze(), inputs.kv_scale[:, None]):
        result = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, scale), inputs.weights, ks, ke)
        assert_matches(result, expected_for(inputs, ks, ke), clean=True)
    scalars = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks[0], ke.squeeze())
    assert_matches(scalars, expected_for(inputs, ks, ke), clean=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_widened(dtype):
    arguments = good()
    arguments["weights"] = arguments["weights"].to(dtype)
    expected = expected_logits(*({**arguments, "weights": arguments["weights"].float()}).values())
    assert_matches(call(arguments), expected, clean=True)


@pytest.mark.parametrize("name", ["weights", "kv_scale"])
@pytest.mark.parametrize("backend", ["torch-blocked", "triton-portable"])
def test_a_lazy_negation_is_resolved(name, backend):
    inputs = make_inputs(M, N, 8, 32, CPU)
    ks, ke = make_windows("misaligned", M, N, CPU)
    values = {"weights": inputs.weights, "kv_scale": inputs.kv_scale}
    negated = {**values, name: torch._neg_view(values[name])}
    assert negated[name].is_neg()
    expected = expected_logits(inputs.q_fp8, inputs.k_fp8, ks=ks, ke=ke, **{**values, name: -values[name]})
    for weights, kv_scale in ((values["weights"], values["kv_scale"]), (negated["weights"], negated["kv_scale"])):
        result = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, kv_scale), weights, ks, ke, backend=backend)
    assert_matches(result, expected, clean=True, tolerance=INTERPRETED)


@pytest.mark.parametrize("backend", ["torch-blocked", "triton-portable"])
def test_out_made_under_inference_mode(backend):
    inputs = make_inputs(M, N, 8, 32, CPU)
    ks, ke = make_windows("misaligned", M, N, CPU)
    with torch.inference_mode():
        out = torch.full((M, N), float("nan"))
    fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke, out=out, backend=backend)
    assert_matches(out, expected_for(inputs, ks, ke), clean=True, tolerance=INTERPRETED)


def test_a_batch_is_refused_with_what_to_do():
    arguments = good()
    arguments["q"] = arguments["q"][None]
    with pytest.raises(
        ValueError, match=r"^q: got shape \[1, 6, 4, 32\], expected 3 .* a batch packed by its windows$"
    ):
        call(arguments)


def test_windows_as_slices_and_kv_as_a_list():
    arguments = good()
    expected = expected_logits(*arguments.values())
    both = torch.stack((arguments["cu_seqlen_ks"], arguments["cu_seqlen_ke"]))
    arguments.update(cu_seqlen_ks=both[0], cu_seqlen_ke=both[1], kv=[arguments["k"], arguments["kv_scale"]])
    assert_matches(call(arguments), expected, clean=True)


@pytest.mark.parametrize("q", ["shared by all rows", "shared by all heads"])
def test_broadcast_operands(q):
    arguments = good()
    x = arguments["q"]
    arguments["q"] = x[:1].expand(M, H, D) if q == "shared by all rows" else x[:, :1].expand(M, H, D)
    arguments["weights"] = arguments["weights"][:1].expand(M, H)
    expected = expected_logits(*(value.contiguous() for value in arguments.values()))
    assert_matches(call(arguments), expected, clean=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_as_a_view_of_a_wider_buffer(dtype):
    arguments = good()
    expected = expected_logits(*arguments.values())
    returned = []

    def run(out: torch.Tensor) -> None:
        assert out.stride(0) > N
        returned.append(call({**arguments, "out": out, "out_dtype": dtype}))
        assert returned[0] is out

    check_guarded(run, expected, dtype, clean=True)


def test_out_of_one_row_may_have_any_row_stride():
    arguments = good()
    expected = expected_logits(*arguments.values())[:1]
    for name in ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke"):
        arguments[name] = arguments[name][:1]
    out = torch.zeros(N).as_strided((1, N), (1, 1))
    assert_matches(call({**arguments, "out": out}), expected, clean=True)


def test_operands_are_not_modified():
    arguments = good()
    before = {name: value.clone() for name, value in arguments.items()}
    call(arguments)
    for name, value in arguments.items():
        assert same_bits(value, before[name]), name


# The result


@pytest.mark.parametrize(("dtype", "step"), [(torch.float32, 64), (torch.bfloat16, 128)])
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 128, 129])
def test_the_result_is_a_view_with_padded_rows(dtype, step, keys):
    inputs = make_inputs(M, keys, H, D, CPU)
    ks, ke = make_windows("causal", M, keys, CPU)
    result = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke, out_dtype=dtype)
    assert result.dtype is dtype
    assert result.shape == (M, keys)
    assert result.stride() == (row_stride(keys, dtype), 1)
    assert result.stride(0) % step == 0
    assert 0 <= result.stride(0) - keys < step
    assert_matches(result, expected_for(inputs, ks, ke), clean=True)


@pytest.mark.parametrize("rows", [0, M])
@pytest.mark.parametrize("keys", [0, N])
@pytest.mark.parametrize("form", ["clean", "noclean", "compressed"])
@pytest.mark.parametrize("backend", [None, "torch-blocked"])
def test_no_rows_and_no_keys(monkeypatch, rows, keys, form, backend):
    """A result of the right shape; a backend runs only where there is something to score."""
    arguments = good()
    for name in ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke"):
        arguments[name] = arguments[name][:rows]
    for name in ("k", "kv_scale"):
        arguments[name] = arguments[name][:keys]
    width = 9 if form == "compressed" else 0
    ran = []
    replace_launches(monkeypatch, lambda *_: lambda call: ran.append(1))
    options = {"clean_logits": form == "clean", "max_seqlen_k": width, "backend": backend}
    result = call({**arguments, **options})
    assert result.shape == (rows, width or keys)
    assert result.dtype is torch.float32
    assert bool(ran) == bool(rows and keys)
    out = torch.empty(rows, width or keys)
    assert call({**arguments, **options, "out": out}) is out


def test_the_call_tells_the_backend_whether_rows_are_aligned(monkeypatch):
    problems = []
    replace_launches(monkeypatch, lambda name, problem, arch: lambda call: problems.append(problem))
    arguments = good()
    call(arguments)
    call({**arguments, "q": embedded(arguments["q"])})
    call({**arguments, "k": embedded(arguments["k"])})
    assert [problem.aligned for problem in problems] == [True, False, False]


def test_an_aligned_problem():
    arguments = good()
    q, k = arguments["q"], arguments["k"]
    assert is_aligned(q, k)
    assert is_aligned(q[1:], k[3:])
    assert is_aligned(q[:, 1:], k)
    assert not is_aligned(q[:, :, 1:], k[:, 1:])
    assert not is_aligned(q, embedded(k))
    assert not is_aligned(embedded(q), k)
