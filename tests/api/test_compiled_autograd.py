"""Promise: torch.compile may trace the backward of an eager forward (compiled autograd), every option included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled_autograd
from helpers import leaf, make_inputs, rand
from torch import Tensor

import flash_ext


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def inputs_of(device: str, grow: int = 0) -> dict[str, Tensor]:
    inputs = make_inputs((2, 4, 9 + grow, 8), (2, 2, 11 + grow, 8), device=device)
    inputs["bias"] = rand(4, 9 + grow, 11 + grow, device=device)
    inputs["alibi_slopes"] = torch.rand(4).to(device)
    return {name: leaf(tensor) for name, tensor in inputs.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True, "causal": True},
    "options": {"window": (3, None), "align": "bottom_right", "softcap": 2.0, "scale": 0.3, "deterministic": True},
    "batch_invariant": {"batch_invariant": True, "return_lse": True},
    "dropout": {"dropout_p": 0.5},
}


def gradients(options: dict[str, Any], inputs: dict[str, Tensor], backward: Callable[[Tensor], None]) -> list[Tensor]:
    torch.manual_seed(3)
    results = flash_ext.attention(**inputs, **options)
    results = results if isinstance(results, tuple) else (results,)
    backward(sum(result.sin().sum() for result in results))
    grads = [tensor.grad for tensor in inputs.values()]
    for tensor in inputs.values():
        tensor.grad = None
    return [grad for grad in grads if grad is not None]


def compiled_backward(loss: Tensor) -> None:
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_eager(name: str, device: str) -> None:
    for grow in (0, 3):  # the second is another shape, and may be a graph with symbolic sizes
        inputs = inputs_of(device, grow)
        expected = gradients(OPTIONS[name], inputs, lambda loss: loss.backward())
        got = gradients(OPTIONS[name], inputs, compiled_backward)
        assert len(got) == len(expected) == 5
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_a_graph_is_not_used_for_other_options(device: str) -> None:
    inputs = inputs_of(device)
    for options in ({"scale": 0.3}, {"scale": 0.7}, {"causal": True}, {"softcap": 1.0}):
        expected = gradients(options, inputs, lambda loss: loss.backward())
        for a, b in zip(gradients(options, inputs, compiled_backward), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_a_subset_of_gradients(device: str) -> None:
    for wanted in (("query",), ("key", "bias"), ("value", "alibi_slopes")):
        inputs = {name: tensor.requires_grad_(name in wanted) for name, tensor in inputs_of(device).items()}
        expected = gradients({}, inputs, lambda loss: loss.backward())
        got = gradients({}, inputs, compiled_backward)
        assert len(got) == len(expected) == len(wanted)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_saved_tensors_hooks(device: str) -> None:
    inputs = inputs_of(device)
    expected = gradients({}, inputs, lambda loss: loss.backward())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        got = gradients({}, inputs, compiled_backward)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
