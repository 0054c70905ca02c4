"""Promise: the forward of problems of at most 64 queries and keys a head, or 144 up to head dim 32, obeys the error
rule with every option that it takes, whatever heads share of a bias or mask, with many heads to a block of threads, and
gives the same bits in every run.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import HALF, attention_by, check, make_inputs, name_of, rand

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("sm80")]

LENGTHS = {64: (1, 8, 15, 17, 33, 49, 56, 63, 64), 144: (1, 16, 48, 49, 65, 81, 96, 97, 128, 143, 144)}
HEAD_DIMS = {64: (8, 20, 32, 40, 64), 144: (7, 16, 20, 32)}
BOTH = pytest.mark.parametrize("tile", [64, 144])
SHAPES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "1hq1", "k")


def kernel_of(tile: int) -> str:
    return "sm80.forward.one_tile" if tile == 64 else f"sm80.forward.one_tile_{tile}"


def by(tile: int) -> Callable[..., Any]:
    return attention_by(kernel_of(tile))


def scores_of(shape: str, batch: int, heads: int, lengths: tuple[int, int], dtype: torch.dtype, device: str) -> Any:
    sizes = {"b": batch, "h": heads, "q": lengths[0], "k": lengths[1], "1": 1}
    return rand(*(sizes[letter] for letter in shape), dtype=dtype, device=device)


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_every_edge(tile: int, dtype: torch.dtype, device: str) -> None:
    lengths = LENGTHS[tile]
    for head_dim, queries, keys in itertools.product(HEAD_DIMS[tile], lengths, lengths):
        if (lengths.index(queries) + lengths.index(keys)) % 3 == 0:
            inputs = make_inputs((2, 2, queries, head_dim), (2, 2, keys, head_dim), dtype=dtype, device=device)
            check(by(tile), inputs, {"return_lse": True})


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_bias_and_mask(tile: int, shape: str, dtype: torch.dtype, device: str) -> None:
    lengths = (49, 60) if tile == 64 else (144, 100)
    inputs = make_inputs((5, 3, lengths[0], 32), (5, 3, lengths[1], 32), dtype=dtype, device=device)
    for bias_dtype in (dtype, torch.float32):
        check(by(tile), inputs | {"bias": scores_of(shape, 5, 3, lengths, bias_dtype, device)})
    check(by(tile), inputs, {"mask": scores_of(shape, 5, 3, lengths, torch.float32, device) < 0.5})


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_options(tile: int, dtype: torch.dtype, device: str) -> None:
    (queries, keys), dim = ((50, 60), 64) if tile == 64 else ((130, 144), 32)
    mask = torch.rand(3, 1, queries, keys, device=device) < 0.5
    mask[:, :, 7] = False  # a row that sees nothing
    for options in (
        {"causal": True, "align": "bottom_right"},
        {"causal": True},
        {"window": (9, 4)},
        {"window": (0, 0)},
        {"mask": mask, "sinks": torch.tensor([0.5, -1.0], device=device)},
        {"mask": mask, "bias": rand(2, queries, keys, dtype=dtype, device=device), "softcap": 3.0},
        {"alibi_slopes": torch.tensor([0.5, 0.25], device=device), "causal": True},
        {"softcap": 2.0, "window": (20, 20)},
        {"sinks": torch.tensor([3.0, -2.0], device=device)},
        {"scale": -0.3},
        {"scale": 30.0},
    ):
        inputs = make_inputs((3, 2, queries, dim), (3, 2, keys, dim), dtype=dtype, device=device)
        check(by(tile), inputs, options | {"return_lse": True})
    other = (3, 2, queries, 32), (3, 2, keys, 32), (3, 2, keys, 64 if tile == 64 else 20)
    check(by(tile), make_inputs(*other, dtype=dtype, device=device), {"return_lse": True})


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_grouped_heads_and_two_batch_dimensions(tile: int, dtype: torch.dtype, device: str) -> None:
    for heads_k, heads_v in ((2, 2), (1, 3), (6, 2)):
        shapes = (2, 6, 40, 32), (2, heads_k, tile - 15, 32), (2, heads_v, tile - 15, 40 if tile == 64 else 24)
        check(by(tile), make_inputs(*shapes, dtype=dtype, device=device), {"causal": True})
    inputs = make_inputs((2, 3, 2, 40, 32), (2, 3, 2, tile - 15, 32), dtype=dtype, device=device)
    bias = rand(3, 1, 40, tile - 15, dtype=dtype, device=device)
    with flash_ext.use_backend(kernel_of(tile)):
        out = flash_ext.scaled_dot_product_attention(*inputs.values(), bias)
    for one in range(2):
        for other in range(3):
            of_one = {name: tensor[one, other][None] for name, tensor in inputs.items()}
            assert torch.equal(out[one, other], by(tile)(**of_one, bias=bias[other])[0])


@BOTH
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_broadcast_operands_and_strides(tile: int, dtype: torch.dtype, device: str) -> None:
    inputs = make_inputs((3, 2, tile - 24, 32), (3, 2, tile - 15, 32), dtype=dtype, device=device)
    for name in inputs:
        check(by(tile), inputs | {name: inputs[name][:1].expand(3, -1, -1, -1)})
        check(by(tile), inputs | {name: inputs[name].transpose(1, 2).contiguous().transpose(1, 2)})
        check(by(tile), inputs | {name: torch.nn.functional.pad(inputs[name], (1, 2))[..., 1:33]})


@BOTH
def test_random(tile: int, device: str) -> None:
    chance = random.Random(1)
    for _ in range(60):
        lengths, dtype = (chance.randint(1, tile), chance.randint(1, tile)), chance.choice(HALF)
        batch, heads, dim = chance.randint(1, 9), chance.randint(1, 5), chance.randint(1, max(HEAD_DIMS[tile]))
        shapes = (batch, heads, lengths[0], dim), (batch, heads, lengths[1], dim)
        inputs = make_inputs(*shapes, dtype=dtype, device=device)
        if chance.random() < 0.5:
            bias_dtype = chance.choice([dtype, torch.float32])
            inputs["bias"] = scores_of(chance.choice(SHAPES), batch, heads, lengths, bias_dtype, device)
        options = {"causal": chance.random() < 0.3, "return_lse": chance.random() < 0.5}
        if chance.random() < 0.3:
            options["mask"] = scores_of(chance.choice(SHAPES), batch, heads, lengths, torch.float32, device) < 0.5
        check(by(tile), inputs, options)


@BOTH
@pytest.mark.parametrize("bias", ["", "1hqk", "bhqk"])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_many_heads_to_a_block(tile: int, dtype: torch.dtype, bias: str, device: str) -> None:
    """More than are found at once, a mask for each batch element, and the same bits twenty times."""
    batch, heads = 27001, 3
    inputs = make_inputs((batch, heads, 9, 8), (batch, heads, 12, 8), dtype=dtype, device=device)
    inputs["mask"] = torch.rand(batch, 1, 9, 12, device=device) < 0.7
    if bias:
        inputs["bias"] = scores_of(bias, batch, heads, (9, 12), dtype, device)
    with torch.no_grad():
        first = by(tile)(**inputs)
        for _ in range(19):
            assert torch.equal(by(tile)(**inputs), first)
        some = torch.randint(batch, (400,), device=device)
        of_some = {n: x[some] if x.shape[0] == batch else x for n, x in inputs.items()}
        assert torch.equal(first[some], by(tile)(**of_some))
    check(by(tile), of_some)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_serves_windows(dtype: torch.dtype, device: str) -> None:
    """Of its own accord: with a bias any number of heads, without one many."""
    for batch, bias, length, kernel in (
        (2, True, 49, kernel_of(64)),
        (700, False, 49, kernel_of(64)),
        (2, False, 49, "sm80.forward.plain"),
        (700, True, 144, kernel_of(144)),
    ):
        inputs = make_inputs((batch, 3, length, 32), (batch, 3, length, 32), dtype=dtype, device=device)
        options = {"bias": rand(3, length, length, dtype=dtype, device=device)} if bias else {}
        assert flash_ext.explain(**inputs, **options).forward.kernel == kernel
    for refused in ({"dropout_p": 0.1}, {"batch_invariant": True}):
        with pytest.raises(flash_ext.AttentionError, match="no support for"):
            by(144)(**inputs, **refused)
