"""Promise: first and second derivatives of every input and output agree with finite differences in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import rand
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import flash_ext

F64 = torch.float64


def inputs_of(device: str, query: tuple[int, ...], key: tuple[int, ...], *bias: int) -> list[Tensor]:
    shapes = [query, key, key] + ([bias] if bias else [])
    return [rand(*shape, dtype=F64, device=device).requires_grad_() for shape in shapes]


def both(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """out and lse, with the -inf of empty rows taken out so that differences exist."""
    out, lse = flash_ext.attention(q, k, v, return_lse=True, **options)
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


Q, K = (1, 2, 3, 2), (1, 2, 4, 2)
MASK = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)

CASES: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "plain": ((Q, K), flash_ext.attention),
    "lse": ((Q, K), both),
    "causal": ((Q, K), lambda *a: both(*a, causal=True)),
    "window": ((Q, K), lambda *a: both(*a, window=(0, 1), align="bottom_right")),
    "empty_rows": ((K, Q), lambda *a: both(*a, causal=True, align="bottom_right")),
    "mask": ((Q, K), lambda *a: both(*a, mask=MASK.to(a[0].device))),
    "softcap": ((Q, K), lambda *a: both(*a, softcap=1.5, scale=-0.7)),
    "gqa": (((1, 2, 3, 2), (1, 1, 4, 2)), lambda *a: both(*a, causal=True)),
    "broadcast": (((2, 3, 2), (1, 4, 2)), flash_ext.scaled_dot_product_attention),
    "bias_full": ((Q, K, 1, 2, 3, 4), lambda q, k, v, b: both(q, k, v, bias=b)),
    "bias_row": ((Q, K, 4), lambda q, k, v, b: both(q, k, v, bias=b, softcap=2.0)),
    "bias_column": ((Q, K, 3, 1), lambda q, k, v, b: both(q, k, v, bias=b, causal=True)),
    "bias_head": ((Q, K, 2, 1, 1), lambda q, k, v, b: both(q, k, v, bias=b)),
    "drop_in_mask": ((Q, K, 3, 4), flash_ext.scaled_dot_product_attention),
    "merge": (
        (Q, K),
        lambda q, k, v: flash_ext.merge_attention(
            *both(q, k[:, :, :1], v[:, :, :1]), *both(q, k[:, :, 1:], v[:, :, 1:])
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_first_derivatives(case: str, device: str, backend: str) -> None:
    """Reverse and forward mode, also batched."""
    shapes, call = CASES[case]
    inputs = inputs_of(device, *shapes[:2], *shapes[2:])
    assert gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)


@pytest.mark.parametrize("case", CASES)
def test_second_derivatives(case: str, device: str, backend: str) -> None:
    """Reverse over reverse and forward over reverse."""
    shapes, call = CASES[case]
    inputs = inputs_of(device, *shapes[:2], *shapes[2:])
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True)


def test_slopes(device: str, backend: str) -> None:
    """alibi_slopes are float32 by contract; the step of the differences is as wide as that needs."""
    q, k, v = inputs_of(device, Q, K)
    slopes = torch.tensor([0.3, 0.8], device=device, requires_grad=True)

    def total(q: Tensor, s: Tensor) -> Tensor:
        out, lse = flash_ext.attention(q, k, v, alibi_slopes=s, return_lse=True)
        return out.sin().sum() + lse.sum()

    (got,) = torch.autograd.grad(total(q, slopes), slopes)
    for head in range(2):
        step = torch.zeros(2, device=device)
        step[head] = 2**-10
        difference = (total(q, slopes.detach() + step) - total(q, slopes.detach() - step)) / 2**-9
        torch.testing.assert_close(got[head].double(), difference.detach(), atol=1e-5, rtol=1e-4)
    # Second order, mixed: d/dslopes of a function of dq.
    (dq,) = torch.autograd.grad(total(q, slopes), q, create_graph=True)
    (mixed,) = torch.autograd.grad(dq.sin().sum(), slopes)

    def first(s: Tensor) -> Tensor:
        return torch.autograd.grad(total(q, s.requires_grad_()), q)[0].sin().sum()

    for head in range(2):
        step = torch.zeros(2, device=device)
        step[head] = 2**-10
        difference = (first(slopes.detach() + step) - first(slopes.detach() - step)) / 2**-9
        torch.testing.assert_close(mixed[head].double(), difference, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout(p: float, device: str, backend: str) -> None:
    state = torch.tensor([12, 3], device=device)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.flash_ext.attention_with_rng_state(q, k, v, state, dropout_p=p, return_lse=True)

    inputs = inputs_of(device, Q, K)
    assert gradcheck(call, inputs, check_forward_ad=True)
    assert gradgradcheck(call, inputs, check_fwd_over_rev=True)


def test_only_some_inputs(device: str, backend: str) -> None:
    for index in range(3):
        inputs = [t.requires_grad_(i == index) for i, t in enumerate(inputs_of(device, Q, K))]
        assert gradcheck(both, inputs, check_forward_ad=True)
        assert gradgradcheck(both, inputs)


def test_gradient_of_a_gradient_penalty(device: str, backend: str) -> None:
    """The usual use of double backward, float32, through the drop-in."""
    from flash_ext import reference

    def penalty(call: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
        (dx,) = torch.autograd.grad(call(*tensors, is_causal=True).sum(), tensors[0], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), tensors)

    inputs = [t.detach().float().requires_grad_() for t in inputs_of(device, (1, 2, 7, 8), (1, 2, 7, 8))]
    got = penalty(flash_ext.scaled_dot_product_attention, inputs)
    for a, b in zip(got, penalty(reference.scaled_dot_product_attention, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
