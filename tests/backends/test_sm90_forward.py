"""Promise: the Hopper forward obeys the error rule where it splits keys over blocks and where it does not, with few
queries of grouped heads, with every head dim and over many tiles, and gives the same bits in every run and graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, make_inputs, name_of, rand, requested_bytes
from layouts import interior, poison_free_memory
from sm90_helpers import BANDS, assert_same_bits
from torch import Tensor

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEAD_DIMS = (64, 96, 128, 192, 256)
BLOCKS = (64, 80, 96, 128, 192, 256)  # of queries or keys, in one tile or another
EDGES = sorted({n * block + i for block in BLOCKS for n in (1, 2) for i in (-1, 0, 1)} | {1, 2, 15, 33})
# Keys that are many for every head dimension (with window and causal off).
LONG = sorted({-(-2600 // block) * block + i for block in BLOCKS for i in (-1, 0, 1)})


@pytest.fixture(autouse=True)
def _only_sm90(device: str) -> Iterator[None]:
    with flash_ext.use_backend("sm90"):
        yield


def poisoned_call(**arguments: Any) -> Any:
    poison_free_memory("cuda")
    return flash_ext.attention(**arguments)


CROWD = 264  # calls at once, two rounds of an H200 with every tile of theirs, so that keys are not split over blocks


def crowded(tensor: Tensor) -> Tensor:
    return tensor.expand(CROWD, -1, -1, -1)


def crowded_call(**arguments: Any) -> Any:
    crowd = {name: crowded(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    assert flash_ext.explain(**{name: x for name, x in crowd.items() if name != "return_lse"}).forward.splits == 1
    out, lse = poisoned_call(**crowd)
    assert_same_bits((out[:1], lse[:1]), (out[-1:], lse[-1:]), "the last of the crowd")
    return out[:1].clone(), lse[:1].clone()


def check_inside_nan(inputs: Inputs, options: dict[str, Any], call: Callable[..., Any] = poisoned_call) -> None:
    views = {name: interior(tensor) for name, tensor in inputs.items()}
    got = check(call, views, options | {"return_lse": True}, backward=False)
    for name, tensor in got.items():
        assert not tensor.isnan().any(), name


def forward(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    return flash_ext.attention(**inputs, return_lse=True, **options)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_edge_where_keys_are_not_split(head_dim: int, band: str, device: str) -> None:
    for i, queries in enumerate(EDGES):
        keys, dtype = EDGES[(7 * i + 3) % len(EDGES)], HALF[i % 2]
        inputs = make_inputs((1, 2, queries, head_dim), (1, 1, keys, head_dim), dtype=dtype, device=device)
        check_inside_nan(inputs, BANDS[band], crowded_call)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_edge_of_many_keys(head_dim: int, device: str) -> None:
    """In tiles of many queries, in tiles of few, and with the keys of a tile split over blocks."""
    kernels = set()
    for i, keys in enumerate(LONG):
        queries, dtype = EDGES[(7 * i + 3) % len(EDGES)], HALF[i % 2]
        inputs = make_inputs((1, 2, queries, head_dim), (1, 2, keys, head_dim), dtype=dtype, device=device)
        for call, batch in ((poisoned_call, inputs), (crowded_call, {n: crowded(x) for n, x in inputs.items()})):
            plan = flash_ext.explain(**batch).forward
            kernels.add((plan.kernel, plan.block_m))
            check_inside_nan(inputs, {}, call)
    assert {kernel for kernel, _ in kernels} == {"sm90.forward", "sm90.forward.split"}
    assert ("sm90.forward", 192 if head_dim <= 128 else 128) in kernels


def decoding(
    batch: int, heads: int, groups: int, keys: int, head_dim: int, dtype: torch.dtype, device: str, queries: int = 1
) -> Inputs:
    shapes = (batch, heads, queries, head_dim), (batch, heads // groups, keys, head_dim)
    return make_inputs(*shapes, dtype=dtype, device=device)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [72, *HEAD_DIMS])
def test_one_query(head_dim: int, band: str, device: str) -> None:
    """Heads of a group are queries of one head, keys are split over blocks or not."""
    splits = set()
    for i, keys in enumerate((1, 17, 127, 128, 129, 700, 2048, 5001)):
        for batch, heads, groups in ((1, 8, 1), (3, 8, 8), (2, 32, 4), (70, 4, 2)):
            inputs = decoding(batch, heads, groups, keys, head_dim, HALF[i % 2], device)
            if batch < 70:
                inputs = {name: interior(tensor) for name, tensor in inputs.items()}
            splits.add(flash_ext.explain(**inputs, **BANDS[band]).forward.splits)
            check(poisoned_call, inputs, BANDS[band] | {"return_lse": True}, backward=False)
    assert len(splits) > 2 or band in ("causal", "sliding", "window")


@pytest.mark.parametrize("queries", [1, 6])
def test_few_queries_in_every_run_and_graph(queries: int, device: str) -> None:
    """The same bits: parts are joined in one order."""
    inputs = decoding(2, 32, 4, 9000, 128, torch.bfloat16, device, queries)
    assert flash_ext.explain(**inputs).forward.splits > 4
    first = forward(inputs)
    for run in range(19):
        assert_same_bits(forward(inputs), first, run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(inputs)
    for name, tensor in decoding(2, 32, 4, 9000, 128, torch.bfloat16, device, queries).items():
        inputs[name].copy_(tensor)
    graph.replay()
    assert_same_bits(captured, forward(inputs), "replay")
    assert not torch.equal(captured[0], first[0])


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [72, *HEAD_DIMS])
def test_few_queries_of_grouped_heads(head_dim: int, band: str, device: str) -> None:
    """Heads of a group share tiles, in which each has a power of two of rows; their keys are split or not."""
    shared, splits = set(), set()
    shapes = ((1, 6, 2, 700), (2, 32, 4, 129), (1, 16, 1, 5001), (3, 8, 4, 2048), (40, 24, 3, 333))
    for i, queries in enumerate((2, 3, 5, 8, 13, 16, 31, 33, 64)):
        for batch, heads, groups, keys in shapes:
            inputs = decoding(batch, heads, groups, keys, head_dim, HALF[i % 2], device, queries)
            if batch < 40:
                inputs = {name: interior(tensor) for name, tensor in inputs.items()}
            plan = flash_ext.explain(**inputs, **BANDS[band]).forward
            shared.add("share tiles" in plan.schedule)
            splits.add(plan.splits > 1)
            check(poisoned_call, inputs, BANDS[band] | {"return_lse": True}, backward=False)
    assert True in shared
    assert True in splits or band in ("causal", "sliding", "window")


def test_one_head_of_queries_for_a_group(device: str) -> None:
    """There is no second row of query heads to share a tile with."""
    inputs = decoding(2, 8, 2, 700, 64, torch.bfloat16, device, 5)
    inputs["query"] = inputs["query"][:, :1].expand(-1, 8, -1, -1)
    check(poisoned_call, inputs, {"return_lse": True}, backward=False)


def test_parts_without_keys(device: str) -> None:
    """A causal head alone: tiles of few keys have fewer parts than those of many; rows without keys have none."""
    for head_dim in HEAD_DIMS:
        for length, keys in ((4096, 4096), (3000, 2000)):
            inputs = make_inputs((1, 1, length, head_dim), (1, 1, keys, head_dim), dtype=torch.bfloat16, device=device)
            options = {"causal": True, "align": "bottom_right"}
            assert flash_ext.explain(**inputs, **options).forward.splits > 1
            check(poisoned_call, inputs, options | {"return_lse": True}, backward=False)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_every_head_dim(dtype: torch.dtype, device: str) -> None:
    """Every multiple of 8, with another one for value."""
    for head_dim in range(8, 257, 8):
        for head_dim_v in (head_dim, 264 - head_dim):
            shapes = (1, 2, 150, head_dim), (1, 2, 203, head_dim), (1, 2, 203, head_dim_v)
            check_inside_nan(make_inputs(*shapes, dtype=dtype, device=device), BANDS["bottom right"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_sequences(head_dim: int, causal: bool, device: str) -> None:
    for dtype, length in ((torch.bfloat16, 4096), (torch.float16, 4095)):
        inputs = make_inputs((1, 2, length, head_dim), (1, 1, length, head_dim), dtype=dtype, device=device)
        check(flash_ext.attention, inputs, {"return_lse": True, "causal": causal}, backward=False)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("length", [700, 768])
def test_more_tiles_than_multiprocessors(length: int, band: str, device: str) -> None:
    """Blocks take several tiles, in turn (768 divides by every tile) or by a counter: the heads are those of calls of
    their own."""
    for head_dim in HEAD_DIMS:
        shapes = (4, 40, length, head_dim), (4, 10, length, head_dim)
        inputs = make_inputs(*shapes, dtype=torch.bfloat16, device=device)
        whole = forward(inputs, **BANDS[band])
        in_turn = "in turn" in flash_ext.explain(**inputs, **BANDS[band]).forward.schedule
        assert in_turn == (length == 768 and band == "full")
        for b, h in ((0, 0), (1, 17), (3, 39)):
            q, k, v = (
                inputs["query"][b : b + 1, h : h + 1],
                *(inputs[name][b : b + 1, h // 4 : h // 4 + 1] for name in ("key", "value")),
            )
            heads = {"query": q, "key": k, "value": v}  # as many as above, because that decides about tiles
            alone = forward({name: x.expand(4 * 40, -1, -1, -1) for name, x in heads.items()}, **BANDS[band])
            assert_same_bits((whole[0][b, h], whole[1][b, h]), (alone[0][9, 0], alone[1][9, 0]), (head_dim, b, h))


def test_packed_projections(device: str) -> None:
    """q, k and v as slices of one (batch, tokens, 3, heads, head dim) tensor."""
    for dtype in HALF:
        packed = rand(2, 300, 3, 4, 64, dtype=dtype, device=device)
        views = [t.transpose(1, 2) for t in packed.unbind(2)]
        got = flash_ext.scaled_dot_product_attention(*views, is_causal=True)
        assert got.stride() == (300 * 4 * 64, 64, 4 * 64, 1)
        expected = flash_ext.scaled_dot_product_attention(*(t.contiguous() for t in views), is_causal=True)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_twenty_runs_of_many_tiles(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Bit for bit, on two streams."""
    inputs = make_inputs((4, 16, 3000, head_dim), (4, 4, 3000, head_dim), dtype=dtype, device=device)
    first, side = forward(inputs, causal=True), torch.cuda.Stream()
    for run in range(19):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if run % 2 else torch.cuda.current_stream()):
            other = forward(inputs, causal=True)
        torch.cuda.current_stream().wait_stream(side)
        assert_same_bits(other, first, run)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_graph_replays_read_the_new_inputs(head_dim: int, device: str) -> None:
    """With a counter, which every replay clears."""
    shapes = (4, 20, 400, head_dim), (4, 5, 400, head_dim)
    inputs = make_inputs(*shapes, dtype=torch.bfloat16, device=device)
    assert "by a counter" in flash_ext.explain(**inputs, causal=True).forward.schedule
    forward(inputs, causal=True)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward(inputs, causal=True)
    for _ in range(3):
        for name, tensor in make_inputs(*shapes, dtype=torch.bfloat16, device=device).items():
            inputs[name].copy_(tensor)
        graph.replay()
        assert_same_bits(captured, forward(inputs, causal=True), head_dim)


def test_rows_without_keys(device: str) -> None:
    for head_dim in HEAD_DIMS:
        inputs = make_inputs((1, 2, 300, head_dim), (1, 2, 100, head_dim), dtype=torch.float16, device=device)
        out, lse = forward(inputs, causal=True, align="bottom_right")
        assert (out[:, :, :200] == 0).all() and (lse[:, :, :200] == -torch.inf).all()
        assert lse[:, :, 200:].isfinite().all()


def test_nan_and_infinities_are_not_hidden(device: str) -> None:
    """A NaN in query spoils its row; a NaN key, every row that sees it; as the math path has it."""
    q, k, v = make_inputs((1, 1, 300, 64), (1, 1, 300, 64), dtype=torch.bfloat16, device=device).values()
    q[0, 0, 70, 3] = torch.nan
    k[0, 0, 200, 5] = torch.nan
    out = flash_ext.attention(q, k, v, causal=True)
    bad = out.isnan().all(-1)[0, 0]
    assert bad.tolist() == [row == 70 or row >= 200 for row in range(300)]
    assert out[0, 0, ~bad].isfinite().all()


def test_allocates_nothing_but_its_results(device: str) -> None:
    q = rand(4, 16, 1024, 128, dtype=torch.bfloat16, device=device)
    assert flash_ext.explain(q, q, q).forward.scratch_bytes == 0
    flash_ext.attention(q, q, q)
    gc.collect()  # a cycle of another test's may be freed at any time
    torch.cuda.reset_peak_memory_stats()
    before = requested_bytes("current")
    out = flash_ext.attention(q, q, q)
    assert requested_bytes("peak") - before == out.nbytes
