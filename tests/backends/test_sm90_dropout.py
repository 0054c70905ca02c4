"""Promise: the Hopper kernels drop what the map of csrc/core/dropout.h says in forward and backward, at every rate, and
obey the error rule with it. With what is added to scores, under every band: test_sm90_scores.py."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, keep_mask, leaf, make_inputs, name_of, rng_state
from layouts import poison_free_memory
from problems import STATE
from sm90_calls import BOTH, added_of, check_passes
from torch import Tensor

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

OPS = torch.ops.flash_ext


def attention(state: Tensor, p: float, **arguments: Any) -> Tensor:
    """Forward and, as the graph keeps the name, backward are sm90's or an error."""
    poison_free_memory("cuda")
    with flash_ext.use_backend("sm90"):
        return OPS.attention_with_rng_state(rng_state=state, dropout_p=p, gqa=True, **arguments)[0]


def gradients(inputs: Inputs, grad: Tensor, state: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = {name: leaf(inputs[name]) for name in ("query", "key", "value")}
    out = attention(state, 0.2, **(inputs | leaves), **options)
    return (out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad))


@pytest.mark.parametrize("p", [0.001, 0.5, 0.99])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", BOTH)
def test_the_bits_of_many_tiles(head_dim: int, dtype: torch.dtype, p: float, device: str) -> None:
    """With equal scores out shows what forward drops and dv what backward does, of every head, one tile of columns a
    call."""
    rows, keys, state = 400, 530, rng_state(*STATE, device)
    keep = keep_mask(state, p, (2, 6), rows, keys)
    query = torch.zeros(2, 6, rows, head_dim, dtype=dtype, device=device)
    key = torch.zeros(2, 3, keys, head_dim, dtype=dtype, device=device)
    for first in range(0, keys, head_dim):
        value = torch.zeros_like(key)
        there = min(head_dim, keys - first)
        value[:, :, first : first + there, :there] = torch.eye(there, dtype=dtype, device=device)
        out = attention(state, p, query=query, key=key, value=value)
        assert torch.equal(out[..., :there] > 0, keep[..., first : first + there])
    value = torch.zeros_like(key).requires_grad_()
    inputs = {"query": leaf(query), "key": leaf(key), "value": value}
    for first in range(0, rows, head_dim):
        there = min(head_dim, rows - first)
        for head in (0, 1):  # of those that share a key head
            out = attention(state, p, **inputs)
            grad = torch.zeros_like(out)
            eye = torch.eye(there, dtype=dtype, device=device)
            grad[:, head::2, first : first + there, :there] = eye
            *_, dv = torch.autograd.grad(out, list(inputs.values()), grad)
            assert torch.equal(dv.mT[:, :, :there] > 0, keep[:, head::2, first : first + there])


@pytest.mark.parametrize("p", [0.0001, 0.9, 0.999])
def test_small_and_large_rates(p: float, device: str) -> None:
    for head_dim, dtype in product(BOTH, HALF):
        inputs = make_inputs((1, 4, 300, head_dim), (1, 4, 400, head_dim), dtype=dtype, device=device)
        check_passes(inputs, {}, {}, p)


@pytest.mark.parametrize("kind", ["", "bool", "both"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_tiles_than_multiprocessors(head_dim: int, kind: str, device: str) -> None:
    for dtype, options in product(HALF, ({}, {"causal": True})):
        inputs = make_inputs((2, 20, 777, head_dim), (2, 20, 777, head_dim), dtype=dtype, device=device)
        check_passes(inputs, added_of(kind, (1, 20, 777, 777), dtype, device), options, 0.1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_another_state_drops_others(head_dim: int, device: str) -> None:
    inputs = make_inputs((2, 16, 600, head_dim), (2, 4, 600, head_dim), dtype=HALF[0], device=device)
    grad, state = torch.randn_like(inputs["query"]), rng_state(*STATE, device)
    out, again, other = (gradients(inputs, grad, s, causal=True)[0] for s in (state, state, state + 1))
    assert torch.equal(out, again) and not torch.equal(out, other)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_follow_a_loss_scale(head_dim: int, device: str) -> None:
    """Of fp16, by powers of two, to the bit but for dq, which is added up in any order."""
    inputs = make_inputs((1, 4, 500, head_dim), (1, 4, 500, head_dim), dtype=torch.float16, device=device)
    grad = torch.randn(1, 4, 500, head_dim, device=device).half() / 16
    state = rng_state(*STATE, device)
    _, dq, dk, dv = gradients(inputs, grad, state)
    for scale in (2**4, 2**8):
        _, scaled_dq, scaled_dk, scaled_dv = gradients(inputs, grad * scale, state)
        # Subnormal numbers have fewer bits.
        torch.testing.assert_close(scaled_dk, dk * scale, rtol=0, atol=2**-24 * scale)
        torch.testing.assert_close(scaled_dv, dv * scale, rtol=0, atol=2**-24 * scale)
        torch.testing.assert_close(scaled_dq, dq * scale, rtol=1e-2, atol=2**-10 * scale)


def test_who_computes_the_gradient_of_a_bias(device: str) -> None:
    """sm80's pass where it is broadcast, sm80 altogether where it is not."""
    inputs = make_inputs((2, 4, 208, 64), (2, 4, 208, 64), dtype=HALF[0], device=device)
    for shape, backend in (((1, 4, 208, 208), "sm90"), ((2, 4, 208, 208), "sm80")):
        bias = torch.randn(shape, device=device, dtype=HALF[0])
        leaves = {name: leaf(tensor) for name, tensor in (inputs | {"bias": bias}).items()}
        plan = flash_ext.explain(**leaves, dropout_p=0.1)
        assert (plan.forward.backend, plan.backward.backend) == ("sm90", backend)
        state = rng_state(*STATE, device)
        keep = keep_mask(state, 0.1, (2, 4), 208, 208)

        def call(state: Tensor = state, **arguments: Any) -> Any:
            return OPS.attention_with_rng_state(rng_state=state, dropout_p=0.1, **arguments)[0]

        def truth(keep: Tensor = keep, **arguments: Any) -> Any:
            return reference.attention(**arguments, dropout_p=0.1, keep=keep)

        check(call, inputs | {"bias": bias}, truth=truth)
