"""Promise: the Hopper kernels drop what the map of csrc/core/dropout.h says in forward and backward, alone, with a
mask, a bias and slopes, under every band, and obey the error rule with it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, keep_mask, leaf, make_inputs, name_of, rng_state
from layouts import poison_free_memory
from sm90_helpers import BANDS, KINDS, aligned, scores_of
from torch import Tensor

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

OPS = torch.ops.flash_ext
BOTH = (64, 96, 128)  # head dims that backward has
FORWARD = (*BOTH, 192, 256)
STATE = (2**63 + 12345, 2**40 + 7)


def attention(state: Tensor, p: float, **arguments: Any) -> Any:
    """Forward and, as the graph keeps the name, backward are sm90's or an error."""
    arguments = dict(arguments)
    left, right = arguments.pop("window", (None, None))
    arguments |= {"window_left": left, "window_right": right}
    arguments["bottom_right"] = arguments.pop("align", "top_left") == "bottom_right"
    poison_free_memory("cuda")
    with flash_ext.use_backend("sm90"):
        out, lse = OPS.attention_with_rng_state(rng_state=state, dropout_p=p, **arguments)
    return (out, lse) if arguments.get("return_lse") else out


def check_passes(
    inputs: Inputs, p: float, added: Inputs | None = None, options: dict[str, Any] | None = None, *, backward: bool
) -> None:
    """Of query, key and value; what is `added` to the scores wants no gradient."""
    state = rng_state(*STATE, "cuda")
    (*batch, _, rows, _), heads, cols = inputs["query"].shape, inputs["query"].shape[1], inputs["key"].shape[2]
    keep = keep_mask(state, p, (*batch, heads), rows, cols)

    def call(**arguments: Any) -> Any:
        return attention(state, p, gqa=True, **arguments, **(added or {}))

    def truth(**arguments: Any) -> Any:
        is_wide = arguments["query"].dtype == torch.float64
        wide = {name: t.double() if is_wide and t.is_floating_point() else t for name, t in (added or {}).items()}
        return reference.attention(**arguments, **wide, dropout_p=p, keep=keep)

    got = check(call, inputs, (options or {}) | {"return_lse": True}, truth=truth, backward=backward)
    for name, tensor in got.items():
        assert not tensor.isnan().any(), name


def read_by_sm90(added: Inputs) -> Inputs:
    if "bias" in added:
        added["bias"] = aligned(added["bias"])
    return added


def gradients(inputs: Inputs, grad: Tensor, state: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = {name: leaf(inputs[name]) for name in ("query", "key", "value")}
    out = attention(state, 0.2, **(inputs | leaves), gqa=True, **options)
    return (out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad))


@pytest.mark.parametrize("kind", ["alone", "slopes", *KINDS])
@pytest.mark.parametrize("head_dim", FORWARD)
def test_every_band_and_score(head_dim: int, kind: str, device: str) -> None:
    for i, band in enumerate(BANDS.values()):
        dtype, p = HALF[i % 2], (0.1, 0.5)[i // 2 % 2]
        inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=dtype, device=device)
        added: Inputs = {}
        if kind == "slopes":
            added["alibi_slopes"] = torch.rand(4, device=device)
        elif kind != "alone":
            added = read_by_sm90(scores_of(kind, (2, 4, 150, 203), dtype, device))
        check_passes(inputs, p, added, band, backward=head_dim in BOTH)


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
        out = attention(state, p, query=query, key=key, value=value, gqa=True)
        assert torch.equal(out[..., :there] > 0, keep[..., first : first + there])
    value = torch.zeros_like(key).requires_grad_()
    inputs = {"query": leaf(query), "key": leaf(key), "value": value}
    for first in range(0, rows, head_dim):
        there = min(head_dim, rows - first)
        for head in (0, 1):  # of those that share a key head
            out = attention(state, p, **inputs, gqa=True)
            grad = torch.zeros_like(out)
            eye = torch.eye(there, dtype=dtype, device=device)
            grad[:, head::2, first : first + there, :there] = eye
            *_, dv = torch.autograd.grad(out, list(inputs.values()), grad)
            assert torch.equal(dv.mT[:, :, :there] > 0, keep[:, head::2, first : first + there])


@pytest.mark.parametrize("p", [0.0001, 0.9, 0.999])
def test_small_and_large_rates(p: float, device: str) -> None:
    for head_dim, dtype in product(BOTH, HALF):
        inputs = make_inputs((1, 4, 300, head_dim), (1, 4, 400, head_dim), dtype=dtype, device=device)
        check_passes(inputs, p, backward=True)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (6, 3)], ids=name_of)
def test_grouped_heads(heads: tuple[int, int], device: str) -> None:
    for head_dim, (i, band) in product((64, 128), enumerate(BANDS.values())):
        shapes = (2, heads[0], 300, head_dim), (2, heads[1], 200, head_dim)
        check_passes(make_inputs(*shapes, dtype=HALF[i % 2], device=device), 0.1, None, band, backward=True)


@pytest.mark.parametrize("kind", ["alone", "bool", "both"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_tiles_than_multiprocessors(head_dim: int, kind: str, device: str) -> None:
    for dtype, options in product(HALF, ({}, {"causal": True})):
        inputs = make_inputs((2, 20, 777, head_dim), (2, 20, 777, head_dim), dtype=dtype, device=device)
        added = {} if kind == "alone" else read_by_sm90(scores_of(kind, (1, 20, 777, 777), dtype, device))
        check_passes(inputs, 0.1, added, options, backward=True)


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
