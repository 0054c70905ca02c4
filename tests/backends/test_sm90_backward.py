"""Promise: the Hopper backward obeys the error rule for every head dim, grouping and length, in one order and in any,
and gives the same bits for dk and dv in every run and graph.

Up to head dim 128 dq is summed by several blocks, in any order unless the call is deterministic, so of the others only
the rule is promised.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, leaf, make_inputs, name_of, rand, requested_bytes
from layouts import interior
from sm90_calls import check_passes
from sm90_helpers import BANDS, assert_same_bits
from torch import Tensor

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEAD_DIMS = (64, 128, 192, 256)
EDGES = sorted({n * 64 + i for n in (1, 2, 3, 4) for i in (-1, 0, 1)})
QUERIES, KEYS = [1, 2, 15, 33, *EDGES], [16, 17, 33, *EDGES]


def attention(**arguments: Any) -> Any:
    """Forward and, as the graph keeps the name, backward are sm90's or an error."""
    with flash_ext.use_backend("sm90"):
        return flash_ext.attention(**arguments)


def check_inside_nan(inputs: Inputs, options: dict[str, Any]) -> None:
    check_passes({name: interior(tensor) for name, tensor in inputs.items()}, {}, options)


def gradients(inputs: Inputs, grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv)"""
    leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
    return torch.autograd.grad(attention(**leaves, **options), list(leaves.values()), grad)


def assert_same(
    got: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: object, deterministic: bool = False
) -> None:
    """Bit for bit, but dq of narrow heads up to the order of its sums where it has none."""
    ordered = deterministic or got[0].shape[-1] > 128
    assert_same_bits(got[0 if ordered else 1 :], expected[0 if ordered else 1 :], what)
    largest = float(expected[0].abs().max())
    torch.testing.assert_close(got[0], expected[0], rtol=1e-2, atol=1e-3 * largest, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_every_head_dim(dtype: torch.dtype, device: str) -> None:
    """Every multiple of 8, with another one for value."""
    for head_dim in range(8, 257, 8):
        for head_dim_v in (head_dim, (136 if head_dim <= 128 else 264) - head_dim):
            shapes = (1, 2, 150, head_dim), (1, 2, 203, head_dim), (1, 2, 203, head_dim_v)
            check_inside_nan(make_inputs(*shapes, dtype=dtype, device=device), BANDS["bottom right"])


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (6, 3), (5, 5)], ids=name_of)
@pytest.mark.parametrize("band", BANDS)
def test_grouped_heads(band: str, heads: tuple[int, int], device: str) -> None:
    """A block adds up what all query heads of its key head say."""
    for i, head_dim in enumerate(HEAD_DIMS):
        shapes = (3, heads[0], 200, head_dim), (3, heads[1], 330, head_dim)
        check_inside_nan(make_inputs(*shapes, dtype=HALF[i % 2], device=device), BANDS[band])


@pytest.mark.parametrize("length", [(1, 1000), (1000, 16), (70, 700), (700, 70)], ids=name_of)
@pytest.mark.parametrize("band", ["full", "bottom right", "window"])
def test_lengths_that_differ(band: str, length: tuple[int, int], device: str) -> None:
    for dtype in HALF:
        for head_dim in HEAD_DIMS:
            shapes = (2, 2, length[0], head_dim), (2, 2, length[1], head_dim)
            check_inside_nan(make_inputs(*shapes, dtype=dtype, device=device), BANDS[band])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_sequences(head_dim: int, causal: bool, device: str) -> None:
    for dtype, length in ((torch.bfloat16, 4096), (torch.float16, 4095)):
        inputs = make_inputs((1, 2, length, head_dim), (1, 1, length, head_dim), dtype=dtype, device=device)
        check(attention, inputs, {"return_lse": True, "causal": causal})


@pytest.mark.parametrize("band", BANDS)
def test_more_tiles_than_multiprocessors(band: str, device: str) -> None:
    """The heads of a large call are those of calls of their own."""
    for head_dim in HEAD_DIMS:
        shapes = (4, 40, 700, head_dim), (4, 10, 700, head_dim)
        inputs = make_inputs(*shapes, dtype=torch.bfloat16, device=device)
        grad = rand(*shapes[0], dtype=torch.bfloat16, device=device)
        whole = gradients(inputs, grad, **BANDS[band])
        for b, h in ((0, 0), (1, 7), (3, 9)):
            some = slice(b, b + 1), slice(4 * h, 4 * h + 4)
            one = slice(b, b + 1), slice(h, h + 1)
            # 40 times, so that forward has as many tiles as above and does not split their keys.
            q, k, v, d = (
                tensor.repeat(40, 1, 1, 1)
                for tensor in (inputs["query"][some], inputs["key"][one], inputs["value"][one], grad[some])
            )
            alone = gradients({"query": q, "key": k, "value": v}, d, **BANDS[band])
            expected = whole[0][some], whole[1][one], whole[2][one]
            assert_same(expected, tuple(tensor[9:10] for tensor in alone), (head_dim, b, h))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_short_tiles(head_dim: int, band: str, device: str) -> None:
    """768 tiles of keys: dq is added up in order, which nobody asked for (test_sm90_plan.py says when)."""
    for dtype, length in ((torch.bfloat16, 300), (torch.float16, 257)):
        inputs = make_inputs(*((32, 8, length, head_dim),) * 2, dtype=dtype, device=device)
        check_inside_nan(inputs, BANDS[band])


def test_grad_out_as_autograd_hands_it_over(device: str) -> None:
    """Of .sum(), of a sum over some dimensions, of heads that were joined to a model's width, and of one head."""
    for heads in (1, 4):
        inputs = make_inputs((2, heads, 200, 64), (2, heads, 200, 64), dtype=torch.bfloat16, device=device)
        shape = (2, heads, 200, 64)
        number, row, column, head, batch = (
            rand(*size, dtype=torch.bfloat16, device=device)
            for size in ((), (64,), (200, 1), (2, 1, 200, 64), (heads, 200, 64))
        )
        joined = rand(2, 200, heads * 64, dtype=torch.bfloat16, device=device)
        grads = [tensor.expand(shape) for tensor in (number, row, column, head, batch)]
        for grad in (*grads, joined.view(2, 200, heads, 64).transpose(1, 2), joined[:, ::2].repeat(1, 2, 1)):
            grad = grad if grad.dim() == 4 else grad.view(2, 200, heads, 64).transpose(1, 2)
            assert_same(gradients(inputs, grad), gradients(inputs, grad.contiguous()), grad.stride())


def test_packed_projections(device: str) -> None:
    """q, k and v as slices of one (batch, tokens, 3, heads, head dim) tensor."""
    for dtype in HALF:
        packed = rand(2, 300, 3, 4, 64, dtype=dtype, device=device)
        views = dict(zip(("query", "key", "value"), (t.transpose(1, 2) for t in packed.unbind(2)), strict=True))
        grad = rand(2, 300, 4, 64, dtype=dtype, device=device).transpose(1, 2)
        got = gradients(views, grad, causal=True)
        assert all(tensor.stride() == (300 * 4 * 64, 64, 4 * 64, 1) for tensor in got)
        dense = {name: tensor.contiguous() for name, tensor in views.items()}
        assert_same(got, gradients(dense, grad.contiguous(), causal=True), dtype)


def test_what_is_not_seen_has_no_gradient(device: str) -> None:
    """Rows without keys and keys that no row sees: exactly 0."""
    for dtype in HALF:
        for head_dim in HEAD_DIMS:
            long, short = (1, 2, 300, head_dim), (1, 2, 100, head_dim)
            inputs = make_inputs(long, short, dtype=dtype, device=device)
            grad = rand(*long, dtype=dtype, device=device)
            dq, dk, dv = gradients(inputs, grad, causal=True, align="bottom_right")
            assert (dq[:, :, :200] == 0).all() and all(t.isfinite().all() and t.any() for t in (dq, dk, dv))
            inputs = make_inputs(short, long, dtype=dtype, device=device)
            for band in ({"causal": True}, {"causal": True, "window": (40, 0)}):
                dq, dk, dv = gradients(inputs, grad[:, :, :100], **band)
                assert (dk[:, :, 100:] == 0).all() and (dv[:, :, 100:] == 0).all()
                assert all(t.isfinite().all() and t.any() for t in (dq, dk, dv))


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_twenty_runs_of_many_tiles(deterministic: bool, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """On two streams."""
    inputs = make_inputs((4, 16, 3000, head_dim), (4, 4, 3000, head_dim), dtype=dtype, device=device)
    grad = rand(4, 16, 3000, head_dim, dtype=dtype, device=device)
    assert_stable(inputs, grad, {"causal": True, "deterministic": deterministic})


def assert_stable(inputs: Inputs, grad: Tensor, options: dict[str, Any]) -> None:
    first, side = gradients(inputs, grad, **options), torch.cuda.Stream()
    for run in range(19):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if run % 2 else torch.cuda.current_stream()):
            other = gradients(inputs, grad, **options)
        torch.cuda.current_stream().wait_stream(side)
        assert_same(other, first, run, options["deterministic"])


@pytest.mark.parametrize("lengths", [(1, 5000), (700, 333), (1000, 2049), (2049, 1000)], ids=name_of)
@pytest.mark.parametrize("band", BANDS)
def test_deterministic_runs(band: str, lengths: tuple[int, int], device: str) -> None:
    """Where some tiles of queries meet no keys or one tile of them, and heads are grouped or not."""
    queries = max(lengths[0], 33) if band in ("causal", "sliding") else lengths[0]  # fewer see fewer than 16 keys
    for head_dim, heads, dtype in ((64, 2, HALF[0]), (128, 8, HALF[1]), (40, 4, HALF[1])):
        shapes = (3, 8, queries, head_dim), (3, heads, lengths[1], head_dim)
        inputs = make_inputs(*shapes, dtype=dtype, device=device)
        grad = rand(*shapes[0], dtype=dtype, device=device)
        assert_stable(inputs, grad, BANDS[band] | {"deterministic": True})


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_deterministic_results(head_dim: int, band: str, device: str) -> None:
    """They obey the same rule; free memory is NaN, so what is stored first and added to later is all that is read."""
    for i, queries in enumerate(QUERIES):
        if band in ("causal", "sliding"):
            queries = max(queries, 33)
        for dtype in HALF:
            keys = KEYS[(5 * i + 1) % len(KEYS)]
            inputs = make_inputs((1, 4, queries, head_dim), (1, 2, keys, head_dim), dtype=dtype, device=device)
            check_inside_nan(inputs, BANDS[band] | {"deterministic": True})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_long_sequences(head_dim: int, causal: bool, device: str) -> None:
    """More tiles of keys than run at once, against what the other mode says."""
    inputs = make_inputs((1, 4, 20000, head_dim), (1, 2, 20000, head_dim), dtype=torch.bfloat16, device=device)
    grad = rand(1, 4, 20000, head_dim, dtype=torch.bfloat16, device=device)
    strict, loose = (gradients(inputs, grad, causal=causal, deterministic=value) for value in (True, False))
    for a, b in zip(strict, loose, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))
    assert_same_bits(gradients(inputs, grad, causal=causal, deterministic=True), strict, head_dim)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_graph_replays_read_the_new_inputs(head_dim: int, deterministic: bool, device: str) -> None:
    options = {"causal": True, "deterministic": deterministic}
    shapes = (2, 8, 400, head_dim), (2, 2, 400, head_dim)
    inputs = make_inputs(*shapes, dtype=torch.bfloat16, device=device)
    grad = rand(*shapes[0], dtype=torch.bfloat16, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(inputs, grad, **options)  # loads the kernels
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(inputs, grad, **options)
    for _ in range(3):
        for name, tensor in make_inputs(*shapes, dtype=torch.bfloat16, device=device).items():
            inputs[name].copy_(tensor)
        grad.copy_(rand(*shapes[0], dtype=torch.bfloat16, device=device))
        graph.replay()
        assert_same(captured, gradients(inputs, grad, **options), head_dim, deterministic)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fp16_follows_the_scale_of_the_loss(head_dim: int, device: str) -> None:
    """Gradients of a loss times 2^n are those of the loss times 2^n, far beyond the range of a rounded dS."""
    inputs = make_inputs((1, 4, 500, head_dim), (1, 2, 500, head_dim), dtype=torch.float16, device=device)
    grad = rand(1, 4, 500, head_dim, dtype=torch.float16, device=device)
    expected = gradients(inputs, grad, causal=True)
    for factor in (2.0**12, 2.0**-8):
        for got, plain in zip(gradients(inputs, grad * factor, causal=True), expected, strict=True):
            error = (got.double() - plain.double() * factor).abs().max()
            assert error <= 2**-8 * factor * plain.abs().max().double() + 2.0**-24


def test_nan_is_not_hidden(device: str) -> None:
    for dtype in HALF:
        inputs = make_inputs((1, 1, 300, 64), (1, 1, 300, 64), dtype=dtype, device=device)
        grad = rand(1, 1, 300, 64, dtype=dtype, device=device)
        grad[0, 0, 70, 3] = torch.nan
        dq, dk, dv = gradients(inputs, grad, causal=True)
        assert dq[0, 0, 70].isnan().all() and dk[0, 0, :71].isnan().all() and dv[0, 0, :71, 3].isnan().all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_allocates_what_is_planned(head_dim: int, device: str) -> None:
    inputs = make_inputs((2, 4, 1024, head_dim), (2, 2, 1024, head_dim), dtype=torch.bfloat16, device=device)
    leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
    grad = rand(2, 4, 1024, head_dim, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        out = attention(**leaves)
        gc.collect()  # what earlier tests left in cycles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes("current")
        with torch.autograd.set_multithreading_enabled(False):  # its worker lets go of gradients late
            grads = torch.autograd.grad(out, list(leaves.values()), grad)
        peak = requested_bytes("peak") - before
        results = sum(tensor.nbytes for tensor in grads)
        del out, grads
    scratch = flash_ext.explain(**leaves).backward.scratch_bytes
    assert results + scratch <= peak <= results + scratch + 4096


def test_by_name_it_says_what_it_refuses(device: str) -> None:
    inputs = make_inputs((1, 2, 100, 64), (1, 2, 100, 64), dtype=torch.bfloat16, device=device)
    leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
    out, lse = attention(**leaves, return_lse=True)
    odd = rand(1, 2, 100, 65, dtype=torch.bfloat16, device=device)
    shifted = rand(1, 2, 100, 72, dtype=torch.bfloat16, device=device)
    cases: list[tuple[Tensor, list[Tensor], Tensor, str]] = [
        (out, list(leaves.values()), odd[..., :64], "grad_out has a stride that is not a multiple of 16 bytes"),
        (out, list(leaves.values()), shifted[..., 1:65], "grad_out does not start at a multiple of 16 bytes"),
        (lse, list(leaves.values())[:2], torch.ones_like(lse), "a backward without grad_out is not supported"),
    ]
    for result, wanted, grad, reason in cases:
        with pytest.raises(RuntimeError, match=f"sm90 refuses: {reason}"):
            torch.autograd.grad(result, wanted, grad, retain_graph=True)
    with pytest.raises(RuntimeError, match="sm90 refuses: a backward without grad_out is not supported"):
        torch.autograd.grad(lse, list(leaves.values()), torch.ones_like(lse), allow_unused=True)


def unaligned(grad: Tensor) -> Tensor:
    return torch.nn.functional.pad(grad, (1, 7))[..., 1:-7]


REST: dict[str, tuple[int, int, dict[str, Any]]] = {  # head dim, keys, options
    "few keys": (64, 9, {}),
    "one key": (64, 260, {"window": (0, 0)}),
}


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("name", REST)
def test_the_rest_is_another_backends(name: str, dtype: torch.dtype, device: str) -> None:
    """out and lse are handed over: gradients obey the rule, with a gradient of lse, too."""
    head_dim, keys, options = REST[name]
    inputs = make_inputs((2, 4, 200, head_dim), (2, 2, keys, head_dim), dtype=dtype, device=device)
    plan = flash_ext.explain(**inputs, **options)
    if plan.forward.backend != "sm90":
        pytest.skip("this build has no sm90 forward of this head dimension")
    assert plan.backward.backend == "sm80"
    check(flash_ext.attention, inputs, options | {"align": "bottom_right", "return_lse": True})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_a_grad_out_that_it_refuses_is_another_backends(dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs((2, 4, 200, 64), (2, 2, 260, 64), dtype=dtype, device=device)

    def call(**arguments: Any) -> Tensor:
        out = flash_ext.attention(**arguments)
        out.register_hook(unaligned)
        return out

    check(call, inputs, {"causal": True})
