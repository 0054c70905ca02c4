"""Promise: the gradient of a bias obeys the error rule on Hopper for every broadcast, band and head dim, and is the
same bits in every run and layout."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, leaf, make_inputs, name_of, rand
from sm90_calls import attention
from sm90_helpers import BANDS, aligned, assert_same_bits
from torch import Tensor

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEAD_DIMS = (40, 64, 96, 128)


def with_bias(inputs: Inputs, shape: tuple[int, ...], mean: float = 0.0) -> Inputs:
    """A bias of this shape, in the inputs' dtype; several rows start at multiples of 16 bytes."""
    query = inputs["query"]
    bias = rand(*shape, dtype=query.dtype, mean=mean).to(query.device)
    return inputs | {"bias": aligned(bias) if shape[-2] > 1 else bias}


def check_all(inputs: Inputs, options: dict[str, Any]) -> None:
    plan = flash_ext.explain(**{name: leaf(t) for name, t in inputs.items()}, **options)
    assert plan.backward.kernel == "sm90.backward.scored, sm90.bias_gradient"
    got = check(attention, inputs, options | {"return_lse": True})
    for name, tensor in got.items():
        assert not tensor.isnan().any(), name


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_broadcast(head_dim: int, device: str) -> None:
    """Under every band, with grouped heads; sums over queries, heads and batch, in parts and not."""
    sizes = 3, 4, 200, 264
    for i, (shape, band) in enumerate(product(product(*((1, size) for size in sizes)), BANDS.values())):
        if shape[2] > 1 and shape[3] == 1:  # sm80's
            continue
        inputs = make_inputs((3, 4, 200, head_dim), (3, 2, 264, head_dim), dtype=HALF[i % 2], device=device)
        check_all(with_bias(inputs, shape), band)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_windows_of_an_image(dtype: torch.dtype, device: str) -> None:
    """Few tiles of the gradient, many items: parts are added up by a kernel of its own."""
    inputs = make_inputs((150, 3, 152, 32), (150, 3, 152, 32), dtype=dtype, device=device)
    check_all(with_bias(inputs, (1, 3, 152, 152)), {})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_rows_far_from_zero_and_without_keys(dtype: torch.dtype, device: str) -> None:
    """A row of finfo.min weighs all its keys alike, which its lse cannot say, so it has no gradient here; one of -inf
    has no key, and its gradient is 0."""
    for head_dim in HEAD_DIMS:
        inputs = make_inputs((2, 2, 190, head_dim), (2, 2, 200, head_dim), dtype=dtype, device=device)
        bias = with_bias(inputs, (1, 1, 190, 200))["bias"]
        bias[:, :, 3] = torch.finfo(dtype).min
        bias[:, :, 130:140, 50:] = -torch.inf
        bias[:, :, 77] = -torch.inf
        got = check(attention, inputs | {"bias": bias})
        assert (got["grad of bias"][:, :, 77] == 0).all()


def test_layouts(device: str) -> None:
    """One row of every stride, rows of any multiple of 16 bytes: the same bits."""
    inputs = make_inputs((2, 2, 150, 64), (2, 2, 264, 64), dtype=torch.bfloat16, device=device)
    grad = torch.randn(2, 2, 150, 64, device=device, dtype=torch.bfloat16)

    def gradient(bias: Tensor) -> Tensor:
        leaves = {name: leaf(t) for name, t in inputs.items()} | {"bias": leaf(bias)}
        return torch.autograd.grad(attention(**leaves), list(leaves.values()), grad)[-1]

    row = rand(1, 2, 1, 264, dtype=torch.bfloat16).to(device)
    wide = row.new_full((1, 2, 1, 600), torch.nan)
    for view in (wide[..., 1:265], wide[..., :528:2], wide[..., 3:531:2]):
        assert_same_bits((gradient(view.detach().copy_(row)),), (gradient(row.clone()),), view.stride())
    rows = rand(1, 2, 150, 264, dtype=torch.bfloat16).to(device)
    wide = rows.new_full((1, 3, 152, 320), torch.nan)
    view = wide[:, 1:, 1:-1, 8:272]
    assert_same_bits((gradient(view.detach().copy_(rows)),), (gradient(rows.clone()),), "inside")


def test_twenty_runs(device: str) -> None:
    """dq is added up in any order, the bias's gradient in one."""
    for shape in ((1, 4, 600, 600), (1, 1, 1, 600), (3, 1, 600, 600)):
        inputs = make_inputs((3, 4, 600, 128), (3, 2, 600, 128), dtype=torch.bfloat16, device=device)
        leaves = {name: leaf(t) for name, t in with_bias(inputs, shape).items()}
        grad = torch.randn(3, 4, 600, 128, device=device, dtype=torch.bfloat16)

        def gradients(leaves: Inputs = leaves, grad: Tensor = grad) -> tuple[Tensor, ...]:
            out = attention(**leaves, causal=True)
            return torch.autograd.grad(out, list(leaves.values()), grad)[1:]

        first = gradients()
        for run in range(19):
            assert_same_bits(gradients(), first, (shape, run))
