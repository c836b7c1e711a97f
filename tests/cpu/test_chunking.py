"""The chunk planner: coverage of every causal pair, budgets, windows, and the plans that vLLM is known to make."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_indexer.chunking import MAX_KEYS, Chunk, Request, Slice, parse_requests, plan_chunks

MIB = 2**20
DEFAULT_BUDGET = 512 * MIB


def keys_of(request: Request, ratio: int) -> int:
    return (request.context + request.new) // ratio


def rows_of(requests: list[Request]) -> int:
    return sum(request.new for request in requests)


def shapes(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.rows, chunk.keys) for chunk in chunks]


def true_pairs(requests: list[Request], ratio: int) -> torch.Tensor:
    """[tokens, all keys of all requests], 1 where the key is in the causal window of the token, by brute force."""
    counts = torch.zeros(rows_of(requests), sum(keys_of(request, ratio) for request in requests), dtype=torch.int32)
    token = base = 0
    for request in requests:
        for i in range(request.new):
            for position in range(keys_of(request, ratio)):
                # Key p stands for tokens [p * ratio, (p + 1) * ratio); it exists once the last of them is present.
                counts[token, base + position] = int((position + 1) * ratio <= request.context + i + 1)
            token += 1
        base += keys_of(request, ratio)
    return counts


def planned_pairs(chunks: list[Chunk], requests: list[Request], ratio: int) -> torch.Tensor:
    """The same matrix as a caller would reach it: how often the windows of all chunks cover each pair."""
    counts = torch.zeros(rows_of(requests), sum(keys_of(request, ratio) for request in requests), dtype=torch.int32)
    bases = [0]
    for request in requests:
        bases.append(bases[-1] + keys_of(request, ratio))
    gathered: list[int] = []
    for chunk in chunks:
        if chunk.gather:
            gathered = [bases[part.request] + j for part in chunk.slices for j in range(part.keys)]
        assert len(gathered) == chunk.keys
        ks, ke = chunk.windows("cpu")
        for m in range(chunk.rows):
            for column in gathered[int(ks[m]) : int(ke[m])]:
                counts[chunk.token_start + m, column] += 1
    return counts


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Request], dict[str, int | None]]:
    """A batch and budgets under which it can be planned, from the tightest to the loosest."""
    length = st.integers(0, 12)
    requests = draw(st.lists(st.builds(Request, length, length), max_size=6))
    ratio = draw(st.integers(1, 5))
    bytes_per_logit = draw(st.sampled_from((2, 4)))
    widest = max((keys_of(request, ratio) for request in requests if request.new), default=0)
    total = sum(keys_of(request, ratio) for request in requests)
    logits = draw(st.integers(max(widest, 1), max(widest, 1) * 40))
    gather = draw(st.none() | st.integers(max(widest, 1), max(total, widest, 1)))
    spare = draw(st.integers(0, bytes_per_logit - 1))
    return requests, {
        "max_logits_bytes": logits * bytes_per_logit + spare,
        "max_gather_keys": gather,
        "compress_ratio": ratio,
        "bytes_per_logit": bytes_per_logit,
    }


@settings(deadline=None, max_examples=150)
@given(problems())
def test_every_causal_pair_is_covered_once(problem):
    requests, options = problem
    ratio = options["compress_ratio"]
    chunks = plan_chunks(requests, **options)
    assert torch.equal(planned_pairs(chunks, requests, ratio), true_pairs(requests, ratio))


@settings(deadline=None, max_examples=150)
@given(problems())
def test_budgets_hold(problem):
    requests, options = problem
    for chunk in plan_chunks(requests, **options):
        assert chunk.rows * chunk.keys * options["bytes_per_logit"] <= options["max_logits_bytes"]
        assert options["max_gather_keys"] is None or chunk.keys <= options["max_gather_keys"]


@settings(deadline=None, max_examples=150)
@given(problems())
def test_rows_are_contiguous_and_in_order(problem):
    requests, options = problem
    token = 0
    for chunk in plan_chunks(requests, **options):
        assert chunk.rows > 0
        assert chunk.token_start == token
        key = 0
        for part in chunk.slices:
            request = requests[part.request]
            assert part.rows > 0
            assert part.context == request.context
            assert part.keys == keys_of(request, options["compress_ratio"])
            assert part.token_start == token == rows_of(requests[: part.request]) + part.row_start
            assert part.key_start == key
            token += part.rows
            key += part.keys
        assert chunk.token_stop == token
    assert token == rows_of(requests)


@settings(deadline=None, max_examples=150)
@given(problems())
def test_windows_are_int32_and_in_range(problem):
    requests, options = problem
    for chunk in plan_chunks(requests, **options):
        ks, ke = chunk.windows("cpu")
        for window in (ks, ke):
            assert window.dtype is torch.int32
            assert window.shape == (chunk.rows,)
            assert window.is_contiguous()
        assert bool(((ks >= 0) & (ks <= ke) & (ke <= chunk.keys)).all())


@settings(deadline=None, max_examples=150)
@given(problems())
def test_chunks_are_as_full_as_the_rules_allow(problem):
    requests, options = problem
    budget = options["max_logits_bytes"] // options["bytes_per_logit"]
    gather = options["max_gather_keys"] or MAX_KEYS
    chunks = plan_chunks(requests, **options)

    def is_alone(chunk: Chunk) -> bool:
        part = chunk.slices[0]
        return requests[part.request].new * part.keys > budget

    for chunk, following in itertools.pairwise(chunks):
        part = following.slices[0]
        if is_alone(chunk):
            # A cut request: every chunk but its last is one row short of too many, and only its first one gathers.
            assert len(chunk.slices) == 1
            assert following.gather == (part.request != chunk.slices[0].request)
            if not following.gather:
                assert (chunk.rows + 1) * chunk.keys > budget
        elif not is_alone(following):
            rows, keys = chunk.rows + part.rows, chunk.keys + part.keys
            assert keys > gather or rows * keys > budget
    assert not chunks or chunks[0].gather


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(32_768, (4096, 32_768)), (65_536, (2048, 65_536)), (131_072, (1024, 131_072))],
)
def test_long_requests_make_the_known_shapes(keys, expected):
    new = 8192
    chunks = plan_chunks([Request(keys - new, new)])
    assert shapes(chunks) == [expected] * (new // expected[0])
    assert [chunk.gather for chunk in chunks] == [True] + [False] * (len(chunks) - 1)


def test_a_request_of_exactly_the_budget_stays_whole():
    assert shapes(plan_chunks([(32_768 - 4096, 4096)])) == [(4096, 32_768)]
    assert shapes(plan_chunks([(32_768 - 4097, 4097)])) == [(4096, 32_768), (1, 32_768)]


def test_half_width_logits_double_the_rows():
    assert shapes(plan_chunks([(32_768 - 8192, 8192)], bytes_per_logit=2)) == [(8192, 32_768)]


def test_case_1_8192_rows_of_300000_keys():
    chunks = plan_chunks([Request(context=300_000 - 8192, new=8192)])
    rows = DEFAULT_BUDGET // (300_000 * 4)
    assert shapes(chunks) == [(rows, 300_000)] * (8192 // rows) + [(8192 % rows, 300_000)]
    assert sum(chunk.gather for chunk in chunks) == 1
    ks = torch.cat([chunk.windows("cpu")[0] for chunk in chunks])
    ke = torch.cat([chunk.windows("cpu")[1] for chunk in chunks])
    assert not ks.any()
    assert torch.equal(ke, torch.arange(300_000 - 8192 + 1, 300_000 + 1, dtype=torch.int32))


def test_case_6_requests_without_rows_are_left_out():
    assert plan_chunks([]) == []
    assert plan_chunks([(0, 0), (128, 0)]) == []
    (chunk,) = plan_chunks([(7, 0), (2, 3), (9, 0), (0, 2), (0, 0)])
    assert [part.request for part in chunk.slices] == [1, 3]
    assert (chunk.rows, chunk.keys, chunk.token_start, chunk.token_stop) == (5, 7, 0, 5)
    # Keys that nothing queries need not fit any budget.
    assert shapes(plan_chunks([(10**6, 0), (0, 2)], max_gather_keys=2)) == [(2, 2)]


def test_case_21_the_first_three_rows_are_empty_with_ratio_4():
    (chunk,) = plan_chunks([(0, 9), (0, 6)], compress_ratio=4)
    assert (chunk.rows, chunk.keys) == (15, 3)
    ks, ke = chunk.windows("cpu")
    assert ks.tolist() == [0] * 9 + [2] * 6
    assert ke.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]


def test_rows_of_a_request_without_keys_stay_in_the_plan():
    (chunk,) = plan_chunks([(0, 3)], compress_ratio=4)
    assert (chunk.rows, chunk.keys) == (3, 0)
    ks, ke = chunk.windows("cpu")
    assert ks.tolist() == ke.tolist() == [0, 0, 0]
    # Between others, its rows add to M and may overflow the budget.
    assert shapes(plan_chunks([(2, 2), (0, 3)], compress_ratio=4, max_logits_bytes=5 * 4)) == [(5, 1)]
    assert shapes(plan_chunks([(2, 2), (0, 3)], compress_ratio=4, max_logits_bytes=4 * 4)) == [(2, 1), (3, 0)]
    # A budget below one logit is enough for no keys.
    assert shapes(plan_chunks([(0, 3), (0, 2)], compress_ratio=4, max_logits_bytes=3)) == [(5, 0)]


def test_windows_of_packed_requests():
    (chunk,) = plan_chunks([(5, 2), (0, 3)])
    ks, ke = chunk.windows("cpu")
    assert ks.tolist() == [0, 0, 7, 7, 7]
    assert ke.tolist() == [6, 7, 8, 9, 10]


def test_windows_follow_the_default_device():
    (chunk,) = plan_chunks([(5, 2)])
    ks, ke = chunk.windows()
    assert ks.device == ke.device == torch.empty(0).device
    with torch.device("meta"):
        assert [window.device.type for window in chunk.windows()] == ["meta", "meta"]
    assert chunk.windows("meta")[0].shape == (2,)


def test_windows_are_right_where_positions_pass_int32():
    # The tokens pass 2**31, their compressed keys do not.
    context = 2**33
    (chunk,) = plan_chunks([(context, 8)], compress_ratio=8, max_logits_bytes=2**40)
    assert chunk.windows("cpu")[1].tolist() == [2**30] * 7 + [2**30 + 1]


def test_packing_stops_at_the_gather_workspace():
    chunks = plan_chunks([(60, 4), (30, 6), (28, 1)], max_gather_keys=100)
    assert [[part.request for part in chunk.slices] for chunk in chunks] == [[0, 1], [2]]
    assert [chunk.slices[0].key_start for chunk in chunks] == [0, 0]
    assert [chunk.token_start for chunk in chunks] == [0, 10]


def test_packing_stops_at_the_logits_budget():
    # Two requests of 4 x 16 together need 8 x 32 logits.
    pair = [(12, 4), (12, 4)]
    assert shapes(plan_chunks(pair, max_logits_bytes=8 * 32 * 4)) == [(8, 32)]
    assert shapes(plan_chunks(pair, max_logits_bytes=8 * 32 * 4 - 1)) == [(4, 16), (4, 16)]


def test_without_a_logits_budget_the_gather_workspace_alone_bounds_chunks():
    batch = [(131_000, 20_000), (0, 3), (200_000, 16_384), (5, 0), (9, 1)]
    assert shapes(plan_chunks(batch, max_logits_bytes=None)) == [(36_388, 367_397)]
    chunks = plan_chunks(batch, max_logits_bytes=None, max_gather_keys=216_390)
    assert shapes(chunks) == [(20_003, 151_003), (16_384, 216_384), (1, 10)]
    assert [chunk.longest for chunk in chunks] == [151_000, 216_384, 10]
    assert all(chunk.gather for chunk in chunks)
    with pytest.raises(ValueError, match="max_gather_keys: got 216383"):
        plan_chunks(batch, max_logits_bytes=None, max_gather_keys=216_383)


def test_an_oversize_request_shares_no_chunk():
    chunks = plan_chunks([(0, 2), (6, 4), (0, 1)], max_logits_bytes=30 * 4)
    assert [(chunk.rows, chunk.keys, chunk.gather) for chunk in chunks] == [
        (2, 2, True),
        (3, 10, True),
        (1, 10, False),
        (1, 1, True),
    ]
    assert chunks[2].slices == (Slice(1, 6, row_start=3, row_stop=4, token_start=5, key_start=0, keys=10),)
    assert [window.tolist() for window in chunks[2].windows("cpu")] == [[0], [10]]


@pytest.mark.parametrize("max_gather_keys", [None, 2**40])
def test_packing_stops_at_int32(max_gather_keys):
    long = (MAX_KEYS - 10, 1)
    chunks = plan_chunks([long, (8, 1), (0, 1)], max_logits_bytes=2**40, max_gather_keys=max_gather_keys)
    assert shapes(chunks) == [(2, MAX_KEYS), (1, 1)]
    assert chunks[0].windows("cpu")[1].tolist() == [MAX_KEYS - 9, MAX_KEYS]


def test_requests_and_tuples_give_the_same_plan():
    assert plan_chunks([Request(3, 2), Request(0, 4)]) == plan_chunks([(3, 2), (0, 4)]) == plan_chunks(((3, 2), (0, 4)))


@pytest.mark.parametrize(
    ("requests", "options", "error", "message"),
    [
        (
            [(0, 1), (90, 11)],
            {"max_gather_keys": 100},
            ValueError,
            r"max_gather_keys: got 100, .* 101, .*requests\[1\]",
        ),
        (
            [(0, 1), (90, 11)],
            {"max_logits_bytes": 403},
            ValueError,
            r"max_logits_bytes: got 403, .* 404, .*requests\[1\]",
        ),
        ([(MAX_KEYS, 1)], {}, ValueError, rf"requests\[0\]: got {MAX_KEYS + 1} keys, expected at most {MAX_KEYS}"),
        ([(0, 1)], {"max_logits_bytes": 0}, ValueError, "max_logits_bytes: got 0, expected"),
        ([(0, 1)], {"max_logits_bytes": 1.5}, TypeError, "max_logits_bytes: got 1.5 of type float, expected an int"),
        ([(0, 1)], {"max_gather_keys": -1}, ValueError, "max_gather_keys: got -1, expected"),
        ([(0, 1)], {"compress_ratio": 0}, ValueError, "compress_ratio: got 0, expected"),
        ([(0, 1)], {"compress_ratio": True}, TypeError, "compress_ratio: got True of type bool, expected an int"),
        ([(0, 1)], {"bytes_per_logit": 8}, ValueError, "bytes_per_logit: got 8, expected 2"),
        ([(0, 1), 7], {}, TypeError, r"requests\[1\]: got 7, expected a Request or a \(context, new\) tuple"),
        ([(0, 1, 2)], {}, TypeError, r"requests\[0\]: got \(0, 1, 2\), expected a Request"),
        ([(0, -1)], {}, ValueError, r"requests\[0\]\.new: got -1, expected"),
        ([("0", 1)], {}, TypeError, r"requests\[0\]\.context: got '0' of type str, expected an int"),
    ],
)
def test_errors_name_the_argument(requests, options, error, message):
    with pytest.raises(error, match=message):
        plan_chunks(requests, **options)


@pytest.mark.parametrize("field", ["context", "new"])
@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (True, TypeError), (1.0, TypeError), (None, TypeError), ("4", TypeError)]
)
def test_a_request_checks_its_lengths(field, value, error):
    with pytest.raises(error, match=rf"^{field}: got {value!r}.*expected an int"):
        Request(**{"context": 1, "new": 1, field: value})


def test_parse_requests():
    assert parse_requests("32768:4096,0:512") == [Request(32_768, 4096), Request(0, 512)]
    assert parse_requests(" 1:2 , 3:4 ") == [Request(1, 2), Request(3, 4)]


@pytest.mark.parametrize("item", ["", "5", "1:", ":1", "-1:2", "1:2:3", "a:b", "1 :2", "1.5:2", "٣:٤"])
def test_parse_requests_quotes_the_item_it_cannot_read(item):
    with pytest.raises(ValueError, match="CONTEXT:NEW") as caught:
        parse_requests(f"0:1,{item},2:3")
    assert f"got {item!r}" in str(caught.value)


# Lengths as other libraries have them


@pytest.mark.parametrize("make", [np.int32, np.int64, np.uint16, torch.tensor, lambda n: torch.tensor([n]), np.array])
def test_lengths_of_other_types(make):
    request = Request(make(5), make(2))
    assert request == Request(5, 2)
    assert type(request.context) is type(request.new) is int
    expected = plan_chunks([(5, 2), (0, 3)], max_logits_bytes=80, max_gather_keys=9, bytes_per_logit=4)
    assert plan_chunks(
        [(make(5), make(2)), (make(0), make(3))], max_logits_bytes=make(80), max_gather_keys=make(9)
    ) == (expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_requests_as_a_tensor_or_an_array(dtype):
    pairs = torch.tensor([[5, 2], [9, 0], [0, 3]], dtype=dtype)
    expected = plan_chunks([(5, 2), (9, 0), (0, 3)])
    for requests in (pairs, pairs.numpy(), list(pairs), list(pairs.numpy()), pairs.tolist()):
        assert plan_chunks(requests) == expected
    assert plan_chunks(pairs[:0]) == []
    contexts, new = pairs.unbind(1)
    assert plan_chunks(list(zip(contexts, new, strict=True))) == expected


@pytest.mark.parametrize(
    ("requests", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), ValueError, r"^requests: got shape \[3\], expected \[requests, 2\]"),
        (np.zeros((2, 3), dtype=int), ValueError, r"^requests: got shape \[2, 3\], expected \[requests, 2\]"),
        (torch.zeros(3, 2), TypeError, "^requests: got dtype torch.float32, expected integers"),
        (np.zeros((3, 2), dtype=bool), TypeError, "^requests: got dtype bool, expected integers"),
        (
            [(np.float32(4), 1)],
            TypeError,
            r"^requests\[0\]\.context: got np.float32\(4.0\) of type float32, expected an int",
        ),
        (
            [(torch.tensor(4.0), 1)],
            TypeError,
            r"^requests\[0\]\.context: got tensor\(4\.\) of type Tensor, expected an int",
        ),
        ([(torch.tensor([4, 4]), 1)], TypeError, r"^requests\[0\]\.context: got tensor\(\[4, 4\]\) of type Tensor"),
        ([(torch.tensor(True), 1)], TypeError, r"^requests\[0\]\.context: got tensor\(True\) of type Tensor"),
        ([(np.bool_(True), 1)], TypeError, r"^requests\[0\]\.context: got .*True.* of type bool"),
        (torch.tensor([[-1, 1]]), ValueError, r"^requests\[0\]\.context: got -1, expected an int of at least 0"),
    ],
)
def test_requests_of_other_types_are_refused(requests, error, message):
    with pytest.raises(error, match=message):
        plan_chunks(requests)
