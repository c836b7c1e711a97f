"""Every argument of the calls, by every odd value: refused by name, with what came, whatever calls came before."""

from __future__ import annotations

import functools
import inspect

import numpy as np
import pytest
import torch
import torch.distributed

from helpers import int32
from lightning_indexer import (
    Arch,
    BackendUnavailableError,
    CacheLayout,
    MqaLogitsProblem,
    explain,
    fp4,
    fp8_mqa_logits,
    fp8_mqa_topk,
    fp8_paged_mqa_logits,
    fp8_paged_mqa_topk,
    gather_k_cache,
    insert_k_cache,
    plan_chunks,
    prepare_q,
    quantize_k,
    quantize_q,
    support_table,
    top_k_per_row,
    windows_from_mask,
)
from lightning_indexer.distributed import (
    KeySharding,
    paged_top_k_of_sharded_keys,
    top_k_of_sharded_keys,
    top_k_of_sharded_rows,
)

FN = torch.float8_e4m3fn
T, M, N, H, D, PAGE = 5, 6, 200, 8, 64, 64


def fp8(*shape: int) -> torch.Tensor:
    return torch.ones(shape).to(FN)


ROWS = {"weights": torch.ones(M, H), "k": 16}
WINDOWS = {"cu_seqlen_ks": int32(*[0] * M), "cu_seqlen_ke": int32(*[N] * M)}
KV = (fp8(N, D), torch.ones(N))
SHARDING = KeySharding.even(N, 1)
CACHE = torch.zeros(3, PAGE, 1, D + 4, dtype=torch.uint8)
PAGED = {
    "q": fp8(2, 1, H, D), "kv_cache": CACHE, "weights": torch.ones(2, H), "block_tables": torch.zeros(2, 2).int(),
}  # fmt: skip
ROTATION = {"positions": torch.arange(T), "cos_sin_cache": torch.ones(9, 32)}

# A call that is right, and those of its arguments that may be None.
CALLS = [
    (fp8_mqa_logits, {"q": fp8(M, H, D), "kv": KV, "weights": ROWS["weights"], **WINDOWS}),
    (fp8_mqa_topk, {"q": fp8(M, H, D), "kv": KV, **ROWS, **WINDOWS}),
    (fp8_paged_mqa_logits, {**PAGED, "context_lens": int32(70, 3), "max_context_len": 128}),
    (fp8_paged_mqa_topk, {**PAGED, "context_lens": int32(70, 3), "k": 16}),
    (top_k_per_row, {"logits": torch.ones(M, N), "k": 16}),
    (
        insert_k_cache,
        {"k": torch.ones(T, D), "kv_cache": CACHE, "slot_mapping": torch.arange(T), "norm_weight": torch.ones(D)}
        | ROTATION,
    ),
    (
        gather_k_cache,
        {"kv_cache": CACHE, "block_tables": torch.zeros(2, 2).int(), "cu_seq_lens": int32(0, 70, 75), "keys": 80},
    ),
    (prepare_q, {"q": torch.ones(T, H, D), "weights": torch.ones(T, H), **ROTATION}),
    (plan_chunks, {"requests": [(10, 5), (0, 7)], "max_logits_bytes": None}),
    (
        top_k_of_sharded_keys,
        {"q": fp8(M, H, D), "kv": KV, **ROWS, "windows": SHARDING.windows(*WINDOWS.values(), 0), "sharding": SHARDING},
    ),
    (top_k_of_sharded_rows, {"q": fp8(M, H, D), "kv": KV, **ROWS, **WINDOWS, "sharding": SHARDING}),
    (
        paged_top_k_of_sharded_keys,
        {**PAGED, "lengths": int32(70, 3)[:, None], "max_length": 128, "k": 16, "sharding": KeySharding.even(128, 1)},
    ),
]
# What stands for an argument in a message: the parts of a pair, the ones that a call hands on.
PARTS = {"kv": ("k", "kv_scale"), "kv_cache": ("layout",)}
NUMBERS = (True, np.bool_(True), 2.0, float("nan"), "2", -1, 10**30, 2**40, torch.tensor(True), [2])
NOTHING = (object(), "nonsense", b"row", 1.5, float("nan"), -7, [], (), {}, torch.tensor(1.5), torch.float16)


def odd_tensors(name: str, given: torch.Tensor):
    yield from NOTHING
    yield np.zeros(3)
    yield given[None]
    if given.dim() != 4 or given.dtype is not torch.uint8:  # a block of a cache is a cache of rows
        yield given[0]
    for dtype in (torch.bool, torch.complex64, torch.int8, torch.float64):
        yield torch.zeros(given.shape, dtype=dtype)
    if name != "logits":  # of which a call may have no other
        yield given.to("meta")
    yield torch.zeros(given.shape).to_sparse()
    yield torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    if given.dim() > 1:
        yield given.view(torch.uint8).repeat_interleave(2, dim=-1).view(given.dtype)[..., ::2].transpose(0, 1)
    elif given.shape[0] > 1:
        yield given[:, None].expand(-1, 3)


def odd_values(name: str, given: object, default: object):
    value = default if given is None else given
    if isinstance(value, torch.Tensor):
        yield from odd_tensors(name, value)
    elif isinstance(value, bool):
        yield from (0, 1, *NOTHING)
    elif isinstance(value, int):
        yield from NUMBERS
    elif isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor):
        yield from (*NOTHING, value[:1], (*value, value[1]), (None, value[1]), (value[0], "x"), value[0])
    else:
        yield from NOTHING


def a_refusal(call, arguments, name: str) -> str | None:
    """None where an argument is refused as it should be, or in words what happens."""
    known = {name, *PARTS.get(name, ()), *arguments, *inspect.signature(call).parameters}
    try:
        call(**arguments)
    except (TypeError, ValueError, BackendUnavailableError) as error:
        said = str(error).split(":")[0].split("[")[0].split(".")[0]
        return None if said in {*known, *PARTS["kv"], "requests"} and "got" in str(error) else f"says {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "is accepted"


# Taken for calls that are written for another library, and not read.
IGNORED = ("schedule_meta",)
# Values that are right after all: options by number that are numbers, a scalar weight of any sign.
FINE = {
    "norm_eps": (1.5,), "weight_scale": (1.5, -7), "timeout": (1.5,), "max_logits_bytes": (2**40, 10**30),
    "max_gather_keys": (2**40, 10**30), "logits_bytes": (2**40, 10**30), "workspace": (2**40, 10**30),
    "rows_in_pieces": (2**40, 10**30), "requests": ([], (), {}), "max_context_len": (2**40,),
}  # fmt: skip
# The options whose default is None: a value of the kind that they take.
KINDS = {
    "out": (fp8(2, 3), torch.ones(2)), "max_logits_bytes": 4096, "max_gather_keys": 4096, "logits_bytes": 4096,
    "page_size": 16, "rows_in_pieces": 3, "layout": CacheLayout(),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors
@pytest.mark.parametrize(("call", "right"), CALLS, ids=[call.__name__ for call, _ in CALLS])
def test_odd_arguments_are_refused_by_name(call, right):
    call(**right)  # what a right call leaves behind must not let wrong ones through
    faults = []
    for name, parameter in inspect.signature(call).parameters.items():
        if name in IGNORED:
            continue
        default = KINDS.get(name, parameter.default)
        for odd in odd_values(name, right.get(name), default):
            fine = any(type(odd) is type(value) and odd == value for value in FINE.get(name, ()))
            if fine or (isinstance(odd, str) and odd == default):
                continue
            fault = a_refusal(call, {**right, name: odd}, name)
            if fault is not None:
                dense = isinstance(odd, torch.Tensor) and not odd.is_nested
                what = f"{odd.dtype} {list(odd.shape)}" if dense else repr(odd)[:60]
                faults.append(f"{name}={what}: {fault[:200]}")
    assert not faults, "\n".join(faults)


SELECTING = [pair for pair in CALLS if pair[0] in (fp8_mqa_topk, fp8_paged_mqa_topk, top_k_per_row)]


@pytest.mark.parametrize("name", ["out", "values", "workspace"])
@pytest.mark.parametrize(("call", "right"), SELECTING)
def test_results_on_meta_are_refused(call, right, name):
    given = {
        "out": torch.empty(M, 16, dtype=torch.int32, device="meta"), "values": torch.empty(M, 16, device="meta"),
        "workspace": torch.empty(2**20, dtype=torch.uint8, device="meta"),
    }  # fmt: skip
    rows = M if "context_lens" not in right else right["context_lens"].numel()
    with pytest.raises(ValueError, match=rf"^{name}: got "):
        call(**right, **{name: given[name] if name == "workspace" else given[name][:rows]})


SPARSE = torch.zeros(2, 2).to_sparse()
CODES, BYTES = torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "names", "odd"),
    [
        (quantize_q, ("q",), (None, *NOTHING[:6], torch.zeros(3, dtype=torch.int8), SPARSE)),
        (quantize_k, ("k",), (*NOTHING, SPARSE)),
        (windows_from_mask, ("mask",), (*NOTHING, SPARSE)),
        (fp4.quantize_fp4, ("x",), (*NOTHING, SPARSE, torch.ones(3, 33), CODES, torch.ones(2, 0))),
        *(
            (
                functools.partial(call, **{other: right}),
                ("values", "scales"),
                (*NOTHING, SPARSE, CODES[:2], CODES.int()),
            )
            for call in (fp4.dequantize_fp4, fp4.fp4_to_fp8, fp4.spread)
            for other, right in (("values", CODES), ("scales", BYTES))
        ),
        (functools.partial(explain, MqaLogitsProblem(4, 4, 8, 64)), ("arch",), (*NOTHING, None)),
        (functools.partial(explain, arch="sm90"), ("problem",), (*NOTHING, None)),
        (support_table, ("problem",), NOTHING),
        (Arch.parse, ("arch",), (*NOTHING, None)),
    ],
)
def test_helpers_name_what_is_wrong(call, names, odd):
    free = [name for name in names if name not in getattr(call, "keywords", {})]
    for value in odd:
        with pytest.raises((TypeError, ValueError), match=rf"^({'|'.join(names)}): got "):
            call(**{free[0]: value}) if len(names) > 1 else call(value)


@pytest.mark.parametrize("make", [KeySharding.even, KeySharding.zigzag, KeySharding.interleaved])
def test_shardings_take_counts(make):
    for odd in (10.5, "10", None, True, -1, torch.tensor(1.5), np.float32(2)):
        for name, arguments in (("keys", (odd, 2)), ("ranks", (10, odd))):
            with pytest.raises((TypeError, ValueError), match=f"^{name}: got "):
                make(*arguments)
    assert make(np.int64(10), torch.tensor(2)) == make(10, 2)


def test_shardings_name_what_is_wrong():
    sharding, ends = KeySharding.even(10, 2), int32(3, 10)
    for odd in (None, 5, [1.5], ["1"], [True], [-1], []):
        with pytest.raises((TypeError, ValueError), match=r"^sizes"):
            KeySharding.contiguous(odd)
    for odd in (2, -1, "0", None, True):
        for use in (
            sharding.size,
            lambda rank: sharding.windows(None, ends, rank),
            lambda rank: sharding.local(ends, rank),
        ):
            with pytest.raises((TypeError, ValueError), match=r"^rank: got "):
                use(odd)
    for odd in (None, [1], ends.long(), ends.float()):
        with pytest.raises(TypeError, match=r"^ends: got "):
            sharding.windows(None, odd, 0)
        with pytest.raises(TypeError, match=r"^context_lens: got "):
            sharding.lengths(odd, 1, 0)
    with pytest.raises(ValueError, match=r"^starts: got shape \[1\] on cpu, expected \[2\]"):
        sharding.windows(ends[:1], ends, 0)
    with pytest.raises(ValueError, match=r"^context_lens: got shape \[2, 1\], expected \[B\] or \[B, 3\]"):
        sharding.lengths(ends[:, None], 3, 0)
