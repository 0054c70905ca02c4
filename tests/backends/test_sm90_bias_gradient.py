"""Promise: the gradient of a bias obeys the error rule on Hopper at every tile edge, for every broadcast,
layout and band, reads nothing outside of a tensor, and is the same bits in every run."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from helpers import HALF, MEANS, Inputs, check, leaf, make_inputs, name_of, rand
from sm90_helpers import (
    BANDS,
    aligned,
    assert_same_bits,
    inside_nan,
    poison_free_memory,
    random_layout,
    random_options,
)
from torch import Tensor

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEAD_DIMS = (40, 64, 96, 128)
QUERIES = (2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 700)
KEYS = (65, 127, 128, 129, 200, 255, 256, 257, 513)


def attention(**arguments: Any) -> Any:
    """Forward and, as the graph keeps the name, backward are sm90's or an error."""
    poison_free_memory("cuda")
    with flash_ext.use_backend("sm90"):
        return flash_ext.attention(**arguments)


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


@pytest.mark.parametrize("rows", ["own", "one"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_edge_of_queries_and_keys(head_dim: int, rows: str, device: str) -> None:
    for i, (queries, keys) in enumerate(product(QUERIES, KEYS)):
        dtype, heads = HALF[i % 2], (1, 4)[i // 2 % 2]
        inputs = make_inputs((2, 4, queries, head_dim), (2, 2, keys, head_dim), dtype=dtype, device=device)
        inputs = {name: inside_nan(tensor) for name, tensor in inputs.items()}
        shape = (1, heads, queries if rows == "own" else 1, keys)
        bands = list(BANDS.values())
        band = (
            bands[i % len(bands)] if queries > 15 else {}
        )  # a band may leave so few queries less than 16 keys: sm80's
        check_all(with_bias(inputs, shape), band)


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
    inputs = make_inputs((150, 3, 144, 32), (150, 3, 144, 32), dtype=dtype, device=device)
    check_all(with_bias(inputs, (1, 3, 144, 144)), {})


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_means(dtype: torch.dtype, mean: float, device: str) -> None:
    inputs = make_inputs((2, 2, 300, 64), (2, 2, 300, 64), dtype=dtype, device=device, mean=mean)
    check_all(with_bias(inputs, (1, 2, 300, 300), mean), {"causal": True})


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


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(6))
def test_random_calls(seed: int, device: str) -> None:
    """300 shapes, bands, groupings, broadcasts and layouts."""
    chance = random.Random(seed)
    for _ in range(50):
        batch, heads, group = chance.randint(1, 4), chance.choice([1, 2, 3]), chance.choice([1, 2, 3])
        queries, keys = (int(2 ** chance.uniform(6.1, 9.5)) for _ in range(2))
        head_dim = 8 * chance.randint(1, 16)
        shapes = (batch, heads * group, queries, head_dim), (batch, heads, keys, head_dim)
        inputs = make_inputs(*shapes, dtype=chance.choice(HALF), device=device)
        inputs = {name: random_layout(chance, tensor) for name, tensor in inputs.items()}
        sizes = (batch, heads * group, queries, keys)
        shape = tuple(chance.choice([1, size]) for size in sizes)
        if shape[3] == 1:
            shape = (1, 1, 1, keys)
        check(attention, with_bias(inputs, shape), random_options(chance) | {"return_lse": True})
