"""Promise: head dims from 264 to 512 obey the error rule on Hopper in both passes, with whatever is added to scores;
the same bits in every run, and from every batch. The gradient of a bias is the composite's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers import HALF, check, leaf, make_inputs, name_of, rand
from sm90_calls import added_of, check_passes, gradients
from sm90_helpers import BANDS, KINDS, assert_same_bits

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEAD_DIMS = (320, 384, 512)  # two kernels of forward, the smaller one partly empty
LENGTHS = ((20, 1000), (1000, 16), (63, 64), (65, 33), (128, 129), (333, 300))


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_every_head_dim(dtype: torch.dtype, device: str) -> None:
    """Every multiple of 8, with another one for value."""
    for head_dim in range(264, 513, 8):
        for head_dim_v in (head_dim, 520 - head_dim):
            shapes = (1, 2, 150, head_dim), (1, 2, 203, head_dim), (1, 2, 203, head_dim_v)
            check_passes(make_inputs(*shapes, dtype=dtype, device=device), {}, BANDS["bottom right"])


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_lengths_and_groups(head_dim: int, band: str, device: str) -> None:
    for i, (queries, keys) in enumerate(LENGTHS):
        heads_q, heads_k = ((4, 2), (8, 1), (3, 3))[i % 3]
        shapes = (2, heads_q, queries, head_dim), (2, heads_k, keys, head_dim)
        check_passes(make_inputs(*shapes, dtype=HALF[i % 2], device=device), {}, BANDS[band])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_sequences(head_dim: int, causal: bool, device: str) -> None:
    for dtype, length in ((torch.bfloat16, 4096), (torch.float16, 4095)):
        inputs = make_inputs((1, 2, length, head_dim), (1, 1, length, head_dim), dtype=dtype, device=device)
        check_passes(inputs, {}, {"causal": causal})


@pytest.mark.parametrize("some", [("query",), ("key",), ("value",), ("query", "value")], ids="+".join)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_some_gradients(head_dim: int, some: tuple[str, ...], device: str) -> None:
    for dtype in HALF:
        inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=dtype, device=device)
        wanted = {name: inputs.pop(name) for name in some}
        got = check_passes(wanted, inputs, {"causal": True}, 0.0, () if some == ("value",) else ("lse",))
        assert {name for name in got if name.startswith("grad")} == {f"grad of {name}" for name in some}


@pytest.mark.parametrize("kind", ["", "slopes", *KINDS, "both float32 and slopes"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_added_to_scores(head_dim: int, kind: str, device: str) -> None:
    for i, band in enumerate(BANDS):
        for softcap, p in ((0.0, 0.0), (5.0, 0.2)):
            shape = (2, 4, 150, 203)
            inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=HALF[i % 2], device=device)
            added = added_of(kind, shape, HALF[i % 2], device)
            check_passes(inputs, added, BANDS[band] | {"softcap": softcap}, p)


@pytest.mark.parametrize("some", [("query",), ("key",), ("value",)], ids="+".join)
@pytest.mark.parametrize("head_dim", (256, *HEAD_DIMS))
def test_some_gradients_of_added_scores(head_dim: int, some: tuple[str, ...], device: str) -> None:
    for dtype, queries in product(HALF, (3, 150)):
        inputs = make_inputs((2, 4, queries, head_dim), (2, 2, 203, head_dim), dtype=dtype, device=device)
        wanted = {name: inputs.pop(name) for name in some}
        added = inputs | added_of("both float32", (2, 4, queries, 203), dtype, device)
        check_passes(wanted, added, {"softcap": 5.0}, 0.2, () if some == ("value",) else ("lse",))


def test_few_queries_and_keys_with_a_mask(device: str) -> None:
    """Forward is the composite's, whose lse backward reads."""
    for head_dim, dtype in product(HEAD_DIMS, HALF):
        inputs = make_inputs((2, 4, 40, head_dim), (2, 2, 40, head_dim), dtype=dtype, device=device)
        inputs["mask"] = torch.rand(40, 40, device=device) > 0.3
        plan = flash_ext.explain(**{name: leaf(tensor) for name, tensor in inputs.items()})
        assert (plan.forward.backend, plan.backward.backend) == ("chunked", "sm90")
        check(flash_ext.attention, inputs, {"return_lse": True})


def test_gradient_of_a_bias(device: str) -> None:
    """Forward is sm90's, backward reads its lse."""
    shape = (1, 2, 150, 512)
    inputs = make_inputs(shape, shape, device=device, dtype=HALF[0])
    inputs["bias"] = rand(1, 1, 150, 150, dtype=HALF[0], device=device)
    inputs = {name: leaf(tensor) for name, tensor in inputs.items()}
    plan = flash_ext.explain(**inputs)
    assert (plan.forward.backend, plan.backward.backend) == ("sm90", "chunked")
    grad = rand(*shape, dtype=HALF[0], device=device)
    got = torch.autograd.grad(flash_ext.attention(**inputs), list(inputs.values()), grad)
    exact = {name: leaf(tensor.detach().double()) for name, tensor in inputs.items()}
    scores = exact["query"] @ exact["key"].mT * 512**-0.5 + exact["bias"]
    expected = torch.autograd.grad(scores.softmax(-1) @ exact["value"], list(exact.values()), grad.double())
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.02 * float(b.abs().max()))


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_runs_and_graphs(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Bit for bit, and a replay reads the new inputs; more tiles than a card has multiprocessors."""
    shapes = (2, 16, 1000, head_dim), (2, 4, 1000, head_dim)
    inputs = make_inputs(*shapes, dtype=dtype, device=device)
    grad = rand(*shapes[0], dtype=dtype, device=device)
    first = gradients(inputs, grad, causal=True)
    for run in range(5):
        assert_same_bits(gradients(inputs, grad, causal=True), first, run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_ext.attention(**inputs, causal=True)
    for name, tensor in make_inputs(*shapes, dtype=dtype, device=device).items():
        inputs[name].copy_(tensor)
    graph.replay()
    assert torch.equal(captured, flash_ext.attention(**inputs, causal=True))
    some = {name: tensor[1:, : 4 if name == "query" else 1] for name, tensor in inputs.items()}
    alone = gradients(some, grad[1:, :4], causal=True)
    whole = gradients(inputs, grad, causal=True)
    assert_same_bits(alone, tuple(x[1:, : y.shape[1]] for x, y in zip(whole, alone, strict=True)), "a group alone")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_fp16_follows_the_scale_of_the_loss(head_dim: int, device: str) -> None:
    """Gradients of a loss times 2^n are those of the loss times 2^n, far beyond the range of a rounded dS."""
    inputs = make_inputs((1, 4, 300, head_dim), (1, 2, 300, head_dim), dtype=torch.float16, device=device)
    grad = rand(1, 4, 300, head_dim, dtype=torch.float16, device=device)
    expected = gradients(inputs, grad, causal=True)[1:]
    for factor in (2.0**12, 2.0**-8):
        for got, plain in zip(gradients(inputs, grad * factor, causal=True)[1:], expected, strict=True):
            error = (got.double() - plain.double() * factor).abs().max()
            assert error <= 2**-8 * factor * plain.abs().max().double() + 2.0**-24


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_packed_sequences_are_calls_of_their_own(head_dim: int, device: str) -> None:
    lengths = (70, 0, 200, 1, 333)
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    rows = int(ends[-1])
    q, k, v = (rand(rows, heads, head_dim, dtype=torch.bfloat16, device=device) for heads in (4, 2, 2))
    with flash_ext.use_backend("sm90"):
        out = flash_ext.attention_varlen(q, k, v, ends, max_q=max(lengths), causal=True)
        for first, length in zip(ends.tolist(), lengths, strict=False):
            own = [x[first : first + length].transpose(0, 1)[None] for x in (q, k, v)]
            if length > 0:
                expected = flash_ext.attention(*own, causal=True)[0].transpose(0, 1)
                assert torch.equal(out[first : first + length], expected), length
