"""Promise: problems of at most 64 queries and keys a head, or 144 up to head dim 32, whose backward is one kernel, obey
the error rule with every option that kernel takes, whatever the gradient of a bias is summed over, and give the same
bits in every run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, attention_by, check, leaf, make_inputs, name_of, rand

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("sm80")]

LENGTHS = {64: (1, 2, 15, 16, 17, 33, 48, 49, 63, 64), 144: (1, 16, 48, 49, 65, 81, 96, 97, 128, 143, 144)}
HEAD_DIMS = {64: (8, 32, 40, 64), 144: (7, 16, 32)}
BOTH = pytest.mark.parametrize("tile", [64, 144])
SHAPES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "1h1k", "1hq1", "1111", "hqk", "qk", "k")


def kernel_of(tile: int) -> str:
    return "sm80.backward.one_tile" if tile == 64 else f"sm80.backward.one_tile_{tile}"


def by(tile: int) -> Callable[..., Any]:
    return attention_by(kernel_of(tile))


def inputs_of(
    batch: int, heads: int, lengths: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str
) -> Inputs:
    queries, keys = lengths
    return make_inputs((batch, heads, queries, head_dim), (batch, heads, keys, head_dim), dtype=dtype, device=device)


def bias_of(shape: str, batch: int, heads: int, lengths: tuple[int, int], dtype: torch.dtype, device: str) -> Any:
    sizes = {"b": batch, "h": heads, "q": lengths[0], "k": lengths[1], "1": 1}
    return rand(*(sizes[letter] for letter in shape), dtype=dtype, device=device)


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_every_edge(tile: int, dtype: torch.dtype, device: str) -> None:
    lengths = LENGTHS[tile]
    for head_dim, queries, keys in itertools.product(HEAD_DIMS[tile], lengths, lengths):
        if (lengths.index(queries) + lengths.index(keys)) % 3 == 0:
            inputs = inputs_of(2, 2, (queries, keys), head_dim, dtype, device)
            bias = bias_of("1hqk", 2, 2, (queries, keys), dtype, device)
            check(by(tile), inputs | {"bias": bias}, {"return_lse": True})


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bias(tile: int, shape: str, dtype: torch.dtype, device: str) -> None:
    """The larger tile has no room for a bias in float."""
    lengths = (49, 60) if tile == 64 else (144, 100)
    for bias_dtype in (dtype, torch.float32) if tile == 64 else (dtype,):
        bias = bias_of(shape, 5, 3, lengths, bias_dtype, device)
        check(by(tile), inputs_of(5, 3, lengths, 32, dtype, device) | {"bias": bias})


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_options(tile: int, dtype: torch.dtype, device: str) -> None:
    """Bands, masks with rows that see nothing, slopes, another head dim of value; lse with its gradient, too."""
    lengths, dims = ((50, 60), (64, 64)) if tile == 64 else ((130, 144), (32, 32))
    mask = torch.rand(3, 1, *lengths, device=device) < 0.5
    mask[:, :, 7] = False
    row = torch.rand(3, 1, 1, lengths[1], device=device) < 0.5
    slopes = torch.tensor([0.5, 0.25], device=device)
    both = {"mask": row, "bias": rand(2, *lengths, dtype=dtype, device=device)}
    for options in (
        {"causal": True, "align": "bottom_right"},
        {"causal": True},
        {"window": (9, 4)},
        {"window": (0, 0)},
        {"mask": mask},
        *([both] if tile == 64 else []),
        {"alibi_slopes": slopes, "causal": True},
        {"scale": -0.3},
        {"scale": 30.0},
        {"deterministic": True},
    ):
        for return_lse in (False, True):
            check(by(tile), inputs_of(3, 2, lengths, dims[0], dtype, device), options | {"return_lse": return_lse})
    shapes = (3, 2, lengths[0], 32), (3, 2, lengths[1], 32), (3, 2, lengths[1], 64 if tile == 64 else 20)
    check(by(tile), make_inputs(*shapes, dtype=dtype, device=device), {"return_lse": True})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_serves_calls_that_name_no_backend(dtype: torch.dtype, device: str) -> None:
    """On Hopper, too, where both passes cost sm80 less."""
    for lengths, causal in (((49, 60), False), ((64, 64), True), ((16, 33), False), ((144, 144), False)):
        inputs = inputs_of(7 if max(lengths) <= 64 else 700, 3, lengths, 32, dtype, device)
        wanted = kernel_of(64 if max(lengths) <= 64 else 144)
        assert flash_ext.explain(**inputs, causal=causal).backward.kernel == wanted
        check(flash_ext.attention, inputs, {"causal": causal, "return_lse": True})


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_broadcast_operands_and_strides(tile: int, dtype: torch.dtype, device: str) -> None:
    inputs = inputs_of(3, 2, (40, 49) if tile == 64 else (100, 144), 32, dtype, device)
    for name in inputs:
        check(by(tile), inputs | {name: inputs[name][:1].expand(3, -1, -1, -1)})
        check(by(tile), inputs | {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2)})
        odd = torch.nn.functional.pad(inputs[name], (1, 2))[..., 1:33]
        check(by(tile), inputs | {name: odd})


@BOTH
def test_random(tile: int, device: str) -> None:
    chance = random.Random(0)
    for _ in range(60):
        lengths, dtype = (chance.randint(1, tile), chance.randint(1, tile)), chance.choice(HALF)
        batch, heads = chance.randint(1, 9), chance.randint(1, 5)
        inputs = inputs_of(batch, heads, lengths, chance.randint(1, max(HEAD_DIMS[tile])), dtype, device)
        if chance.random() < 0.7:
            shape, bias_dtype = chance.choice(SHAPES), chance.choice([dtype, torch.float32] if tile == 64 else [dtype])
            inputs["bias"] = bias_of(shape, batch, heads, lengths, bias_dtype, device)
        check(by(tile), inputs, {"causal": chance.random() < 0.3, "return_lse": chance.random() < 0.5})


@BOTH
@pytest.mark.parametrize("shape", ["1hqk", "bhqk", "k"])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_many_windows(tile: int, dtype: torch.dtype, shape: str, device: str) -> None:
    """More problems than blocks of threads, and parts of the bias's gradient; the same bits twenty times."""
    length, bias_dtype = (49, torch.float32) if tile == 64 else (144, dtype)
    inputs = inputs_of(700, 3, (length, length), 32, dtype, device) | {
        "bias": bias_of(shape, 700, 3, (length, length), bias_dtype, device)
    }
    check(by(tile), inputs)
    grad = rand(700, 3, length, 32, dtype=dtype, device=device)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
        return torch.autograd.grad(by(tile)(**leaves), list(leaves.values()), grad)

    first = gradients()
    for _ in range(19):
        for got, expected in zip(gradients(), first, strict=True):
            assert torch.equal(got, expected)


@BOTH
def test_fp16_follows_the_scale_of_the_loss(tile: int, device: str) -> None:
    length = 49 if tile == 64 else 144
    inputs = inputs_of(4, 2, (length, length), 32, torch.float16, device)
    grad = rand(4, 2, length, 32, dtype=torch.float16, device=device)

    def gradients(factor: float) -> tuple[torch.Tensor, ...]:
        leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
        return torch.autograd.grad(by(tile)(**leaves), list(leaves.values()), grad * factor)

    plain = gradients(1.0)
    for factor in (2.0**12, 2.0**-8):
        for got, expected in zip(gradients(factor), plain, strict=True):
            error = (got.double() - expected.double() * factor).abs().max()
            assert error <= 2**-8 * factor * expected.abs().max().double() + 2.0**-24
