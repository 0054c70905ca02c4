"""Promise: problems of at most 64 queries and keys a head, whose backward is one kernel, obey the error rule with every
option that kernel takes, whatever the gradient of a bias is summed over, and give the same bits in every run.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, leaf, make_inputs, name_of, rand

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("sm80")]

LENGTHS = (1, 2, 15, 16, 17, 33, 48, 49, 63, 64)
SHAPES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "1h1k", "1hq1", "1111", "hqk", "qk", "k")


def attention(**arguments: Any) -> Any:
    """By the kernel under test, or an error."""
    with flash_ext.use_backend("sm80"):
        planned = flash_ext.explain(**{name: value for name, value in arguments.items() if name != "return_lse"})
        assert planned.backward.kernel == "sm80.backward.one_tile"
        return flash_ext.attention(**arguments)


def inputs_of(
    batch: int, heads: int, lengths: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str
) -> Inputs:
    queries, keys = lengths
    return make_inputs((batch, heads, queries, head_dim), (batch, heads, keys, head_dim), dtype=dtype, device=device)


def bias_of(shape: str, batch: int, heads: int, lengths: tuple[int, int], dtype: torch.dtype, device: str) -> Any:
    sizes = {"b": batch, "h": heads, "q": lengths[0], "k": lengths[1], "1": 1}
    return rand(*(sizes[letter] for letter in shape), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64])
def test_every_edge(head_dim: int, dtype: torch.dtype, device: str) -> None:
    for queries, keys in itertools.product(LENGTHS, LENGTHS):
        if (LENGTHS.index(queries) + LENGTHS.index(keys)) % 3 == 0:
            inputs = inputs_of(2, 2, (queries, keys), head_dim, dtype, device)
            bias = bias_of("1hqk", 2, 2, (queries, keys), dtype, device)
            check(attention, inputs | {"bias": bias}, {"return_lse": True})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bias(shape: str, dtype: torch.dtype, device: str) -> None:
    for bias_dtype in (dtype, torch.float32):
        bias = bias_of(shape, 5, 3, (49, 60), bias_dtype, device)
        check(attention, inputs_of(5, 3, (49, 60), 32, dtype, device) | {"bias": bias})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_options(dtype: torch.dtype, device: str) -> None:
    """Bands, masks with rows that see nothing, slopes, another head dim of value; lse with its gradient, too."""
    mask = torch.rand(3, 1, 50, 60, device=device) < 0.5
    mask[:, :, 7] = False
    row = torch.rand(3, 1, 1, 60, device=device) < 0.5
    slopes = torch.tensor([0.5, 0.25], device=device)
    for options in (
        {"causal": True, "align": "bottom_right"},
        {"causal": True},
        {"window": (9, 4)},
        {"window": (0, 0)},
        {"mask": mask},
        {"mask": row, "bias": rand(2, 50, 60, dtype=dtype, device=device)},
        {"alibi_slopes": slopes, "causal": True},
        {"scale": -0.3},
        {"deterministic": True},
    ):
        for return_lse in (False, True):
            check(attention, inputs_of(3, 2, (50, 60), 64, dtype, device), options | {"return_lse": return_lse})
    wide = make_inputs((3, 2, 50, 32), (3, 2, 60, 32), (3, 2, 60, 64), dtype=dtype, device=device)
    check(attention, wide, {"return_lse": True})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_serves_calls_that_name_no_backend(dtype: torch.dtype, device: str) -> None:
    """On Hopper, too, where both passes cost sm80 less."""
    for lengths, causal in (((49, 60), False), ((64, 64), True), ((16, 33), False)):
        inputs = inputs_of(7, 3, lengths, 32, dtype, device)
        assert flash_ext.explain(**inputs, causal=causal).backward.kernel == "sm80.backward.one_tile"
        check(flash_ext.attention, inputs, {"causal": causal, "return_lse": True})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_broadcast_operands_and_strides(dtype: torch.dtype, device: str) -> None:
    inputs = inputs_of(3, 2, (40, 49), 32, dtype, device)
    for name in inputs:
        check(attention, inputs | {name: inputs[name][:1].expand(3, -1, -1, -1)})
        check(attention, inputs | {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2)})
        odd = torch.nn.functional.pad(inputs[name], (1, 2))[..., 1:33]
        check(attention, inputs | {name: odd})


def test_random(device: str) -> None:
    chance = random.Random(0)
    for _ in range(60):
        lengths, dtype = (chance.randint(1, 64), chance.randint(1, 64)), chance.choice(HALF)
        batch, heads = chance.randint(1, 9), chance.randint(1, 5)
        inputs = inputs_of(batch, heads, lengths, chance.randint(1, 64), dtype, device)
        if chance.random() < 0.7:
            shape, bias_dtype = chance.choice(SHAPES), chance.choice([dtype, torch.float32])
            inputs["bias"] = bias_of(shape, batch, heads, lengths, bias_dtype, device)
        check(attention, inputs, {"causal": chance.random() < 0.3, "return_lse": chance.random() < 0.5})


@pytest.mark.parametrize("shape", ["1hqk", "bhqk", "k"])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_many_windows(dtype: torch.dtype, shape: str, device: str) -> None:
    """More problems than blocks of threads, and parts of the bias's gradient; the same bits twenty times."""
    inputs = inputs_of(700, 3, (49, 49), 32, dtype, device) | {
        "bias": bias_of(shape, 700, 3, (49, 49), torch.float32, device)
    }
    check(attention, inputs)
    grad = rand(700, 3, 49, 32, dtype=dtype, device=device)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
        return torch.autograd.grad(attention(**leaves), list(leaves.values()), grad)

    first = gradients()
    for _ in range(19):
        for got, expected in zip(gradients(), first, strict=True):
            assert torch.equal(got, expected)


def test_fp16_follows_the_scale_of_the_loss(device: str) -> None:
    inputs = inputs_of(4, 2, (49, 49), 32, torch.float16, device)
    grad = rand(4, 2, 49, 32, dtype=torch.float16, device=device)

    def gradients(factor: float) -> tuple[torch.Tensor, ...]:
        leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
        return torch.autograd.grad(attention(**leaves), list(leaves.values()), grad * factor)

    plain = gradients(1.0)
    for factor in (2.0**12, 2.0**-8):
        for got, expected in zip(gradients(factor), plain, strict=True):
            error = (got.double() - expected.double() * factor).abs().max()
            assert error <= 2**-8 * factor * expected.abs().max().double() + 2.0**-24
