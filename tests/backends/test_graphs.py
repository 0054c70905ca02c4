"""Promise: forward and backward are captured into CUDA graphs; replays see new inputs and draw new dropout masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DTYPES, HALF, Inputs, make_inputs, name_of, rand
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

OPS = torch.ops.flash_ext
WARMUPS = 3


def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """The graph of one step and the tensors that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    # NOTE: capturing writes the generator's seed on the capturing stream and a replay on its own; nothing orders the
    # two. On a busy GPU the first replay after manual_seed(5) drew with the seed of the capture.
    torch.cuda.synchronize()
    return graph, results


def problem(dtype: torch.dtype, device: str) -> Inputs:
    inputs = make_inputs((2, 4, 190, 64), (2, 2, 210, 64), dtype=dtype, device=device)
    inputs["bias"] = rand(1, 4, 190, 210, dtype=dtype, device=device)
    inputs["alibi_slopes"] = torch.rand(4).to(device)
    return inputs


def refill(inputs: Inputs) -> None:
    with torch.no_grad():
        for tensor in inputs.values():
            tensor.copy_(rand(*tensor.shape, dtype=tensor.dtype, device=str(tensor.device)).abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_forward(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = problem(dtype, device)

    def step() -> tuple[Tensor, ...]:
        return flash_ext.attention(**inputs, causal=True, softcap=20.0, return_lse=True)

    with torch.no_grad():
        graph, results = capture(step)
        for _ in range(2):
            refill(inputs)
            graph.replay()
            for got, expected in zip(results, step(), strict=True):
                assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "window": (60, 0), "softcap": 15.0}], ids=["plain", "options"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_forward_and_backward(dtype: torch.dtype, options: dict[str, Any], device: str, backend: str) -> None:
    """Every gradient of a replay equals eager's on the same inputs, bit for bit in deterministic mode."""
    inputs = problem(dtype, device)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    grad = rand(2, 4, 190, 64, dtype=dtype, device=device)

    def step() -> tuple[Tensor, ...]:
        out = flash_ext.attention(**inputs, **options, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    graph, results = capture(step)
    for _ in range(2):
        refill(inputs)
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            assert torch.equal(got, expected)


def test_backward_that_is_not_deterministic(device: str, backend: str) -> None:
    """Accumulators are cleared inside the graph: a second replay does not add to the first."""
    inputs = problem(torch.bfloat16, device)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    grad = rand(2, 4, 190, 64, dtype=torch.bfloat16, device=device)

    def step() -> tuple[Tensor, ...]:
        out = flash_ext.attention(**inputs, causal=True, deterministic=False)
        return torch.autograd.grad(out, leaves, grad)

    graph, results = capture(step)
    for _ in range(3):
        graph.replay()
    for got, expected in zip(results, step(), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name_of)
def test_make_graphed_callables(dtype: torch.dtype, device: str, backend: str) -> None:
    shape = (2, 3, 130, 64)
    samples = tuple(rand(*shape, dtype=dtype, device=device).requires_grad_() for _ in range(3))

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash_ext.attention(query, key, value, causal=True, deterministic=True)

    graphed = torch.cuda.make_graphed_callables(layer, samples)
    inputs = [rand(*shape, dtype=dtype, device=device).requires_grad_() for _ in range(3)]
    grad = rand(*shape, dtype=dtype, device=device)
    out, expected = graphed(*inputs), layer(*inputs)
    assert torch.equal(out, expected)
    got = torch.autograd.grad(out, inputs, grad)
    for a, b in zip(got, torch.autograd.grad(expected, inputs, grad), strict=True):
        assert torch.equal(a, b)


def test_dropout_masks_of_replays(device: str, backend: str) -> None:
    """Two replays draw two masks; forward and backward of one replay use the mask of its rng_state, bit for bit."""
    n, p = 96, 0.3
    query = torch.zeros(2, 3, n, 16, device=device)
    value = torch.eye(n, device=device).expand(2, 3, n, n).clone().requires_grad_()
    grad = torch.eye(n, device=device).expand(2, 3, n, n)

    def step() -> tuple[Tensor, ...]:
        out, _, state = OPS.attention(query, query, value, dropout_p=p)
        return out.detach(), *torch.autograd.grad(out, value, grad), state

    graph, (out, dv, state) = capture(step)
    masks = []
    for _ in range(3):
        graph.replay()
        keep = OPS.dropout_mask(state.clone(), p, 6, n, n).view(2, 3, n, n)
        assert torch.equal(out > 0, keep)
        assert torch.equal(dv.mT > 0, keep)
        masks.append(keep)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dropout_replay_equals_eager_with_its_state(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = problem(dtype, device)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    grad = rand(2, 4, 190, 64, dtype=dtype, device=device)
    options = {"dropout_p": 0.2, "causal": True, "gqa": True, "deterministic": True, "return_lse": True}

    def step() -> tuple[Tensor, ...]:
        out, lse, state = OPS.attention(**inputs, **options)
        return state, out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)

    graph, (state, *results) = capture(step)
    seen = []
    for _ in range(2):
        refill(inputs)
        graph.replay()
        out, lse = OPS.attention_with_rng_state(**inputs, rng_state=state.clone(), **options)
        for got, expected in zip(results, (out, lse, *torch.autograd.grad(out, leaves, grad)), strict=True):
            assert torch.equal(got, expected)
        seen.append(state.tolist())
    assert seen[0] != seen[1]


def test_manual_seed_reproduces_a_replay(device: str, backend: str) -> None:
    query, key, value = make_inputs((1, 2, 70, 32), (1, 2, 90, 32), device=device).values()
    graph, (out,) = capture(lambda: (flash_ext.attention(query, key, value, dropout_p=0.5),))
    draws = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        graph.replay()
        draws.append(out.clone())
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_a_graph_of_many_calls(device: str, backend: str) -> None:
    """Scratch of one call may be reused by the next within the graph; each result stays right."""
    query, key, value = make_inputs((1, 2, 300, 64), (1, 2, 300, 64), dtype=torch.bfloat16, device=device).values()
    leaf = query.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        results = []
        for window in (None, (10, 0), (100, 0)):
            out = flash_ext.attention(leaf, key, value, causal=True, window=window, deterministic=True)
            results += [out.detach(), *torch.autograd.grad(out.sum(), leaf)]
        return tuple(results)

    graph, results = capture(step)
    refill({"query": leaf, "key": key, "value": value})
    graph.replay()
    for got, expected in zip(results, step(), strict=True):
        assert torch.equal(got, expected)
