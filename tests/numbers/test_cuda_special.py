"""Promise: on a GPU, NaN and infinities of an input are where eager attention has them, in results and in gradients.

What a kernel does not read, or multiplies by 0 where eager attention does not, would hide one; a float that is split
in two would make NaN of an infinity. Judged as the random calls are (tests/fuzz/judge.py).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from conftest import is_granted_refusal
from fuzz.cases import Case, Low, Special, View
from fuzz.judge import judge

import flash_ext

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "float64", "bfloat16", "float16")
SPECIALS = [
    Special(tensor, value, ("element", "row")[i % 2])
    for i, (tensor, value) in enumerate(
        product(("query", "key", "value", "bias", "grad"), ("nan", "inf", "-inf")),
    )
]
SHAPES: dict[str, tuple[tuple[int, int, int], int]] = {  # query heads, queries and keys; columns
    "tiles": ((2, 200, 150), 64),
    "wide": ((2, 130, 140), 128),
    "few_columns": ((2, 70, 90), 8),
    "few_keys": ((4, 100, 3), 32),
    "one_key": ((4, 70, 1), 64),
    "one_tile": ((4, 49, 49), 32),
    "one_query": ((4, 1, 200), 64),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "capped": {"softcap": 5.0},
}


def make_case(
    dtype: str, shape: str, special: Special, bias: str, low: Low | None = None, wants_bias: bool = True, **options: Any
) -> Case:
    (heads, queries, keys), cols = SHAPES[shape]
    kv = (1, heads // 2, keys, cols)
    biases = {"none": None, "whole": (heads, queries, keys), "of_keys": (1, keys), "of_queries": (queries, 1)}
    wants = ("query", "key", "value", *(["bias"] if bias != "none" and wants_bias else []))
    dropout_p = options.pop("dropout_p", 0.0)
    return Case(
        seed=3,
        number=len(shape) + 16 * SPECIALS.index(special),
        entry="attention",
        dtype=dtype,
        shapes=((1, heads, queries, cols), kv, kv),
        views=(View(), View(), View()),
        numbers="normal",
        mean=0.0,
        bias=biases[bias],
        bias_dtype=dtype,
        bias_view=View(),
        bias_numbers="normal",
        low=low,
        mask=None,
        mask_share=0.0,
        mask_view=View(),
        slopes=None,
        sinks=None,
        sinks_level=0.0,
        special=special,
        wants=wants,
        outputs=("out", "lse"),
        grad_view=View(),
        autocast=None,
        dropout_p=dropout_p,
        options=tuple({**options, "return_lse": True}.items()),
        pick=0.0,
    )


def check_all(dtype: str, shape: str, device: str, backend: str, **options: Any) -> None:
    for i, special in enumerate(SPECIALS):
        bias = ("none", "whole", "of_keys", "of_queries")[i % 4]
        if special.tensor == "bias" and bias == "none":
            bias = "whole"
        case = make_case(dtype, shape, special, bias, **options)
        verdict = judge(case, device, backend)
        if verdict.refusal is not None:
            assert is_granted_refusal(backend, RuntimeError(verdict.refusal)), verdict.refusal
        assert not verdict.wrong, f"{verdict.wrong} {case.describe()}"


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_dropout(dtype: str, shape: str, option: str, device: str, backend: str) -> None:
    check_all(dtype, shape, device, backend, **OPTIONS[option])


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_dropout_removes(dtype: str, shape: str, p: float, device: str, backend: str) -> None:
    """A probability that is NaN stays so times 0, and so does 0 times an infinity."""
    check_all(dtype, shape, device, backend, dropout_p=p)


@pytest.mark.parametrize("wants_bias", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_a_bias_empties(
    dtype: str, shape: str, p: float, wants_bias: bool, device: str, backend: str
) -> None:
    """A row of -inf has gradients of 0, whatever stands in value or in the gradient of its out."""
    for i, special in enumerate(SPECIALS):
        if special.tensor not in ("value", "grad", "key"):
            continue
        low = Low("-inf", ("rows", "all")[i % 4 == 0], 0.5)
        bias = ("whole", "of_queries")[i % 2]
        case = make_case(dtype, shape, special, bias, low, wants_bias, dropout_p=p, softcap=2.0 if i % 3 == 0 else 0.0)
        verdict = judge(case, device, backend)
        if verdict.refusal is not None:
            assert is_granted_refusal(backend, RuntimeError(verdict.refusal)), verdict.refusal
        assert not verdict.wrong, f"{verdict.wrong} {case.describe()}"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_query_whose_keys_are_split(dtype: str, head_dim: int, device: str) -> None:
    """Every part of its row is NaN."""
    query = torch.randn(1, 2, 4, head_dim, device=device).to(getattr(torch, dtype))
    key = torch.randn(1, 2, 20_000, head_dim, device=device).to(query.dtype)
    query[0, 1, 2, 5] = torch.nan
    out, lse = flash_ext.attention(query, key, key, return_lse=True)
    assert lse.isnan().sum() == 1 and lse[0, 1, 2].isnan()
    assert out.isnan().sum() == head_dim and out[0, 1, 2].isnan().all()
