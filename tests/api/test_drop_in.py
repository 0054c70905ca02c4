"""Promise: scaled_dot_product_attention means what torch.nn.functional's does; its math path decides.

Truth is PyTorch's math path in float64. The yardstick is eager attention in the same dtype.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from helpers import DTYPES, check_drop_in, make_inputs, math_path, name_of, rand

import flash_ext

Shape = tuple[int, ...]


SHAPES: dict[str, tuple[Shape, Shape, Shape]] = {
    "2d": ((33, 16), (45, 16), (45, 24)),
    "3d": ((3, 33, 16), (3, 45, 16), (3, 45, 24)),
    "4d": ((2, 3, 33, 16), (2, 3, 45, 16), (2, 3, 45, 24)),
    "5d": ((2, 2, 3, 17, 16), (2, 2, 3, 19, 16), (2, 2, 3, 19, 8)),
    "6d": ((2, 1, 2, 3, 7, 8), (2, 3, 2, 3, 9, 8), (1, 3, 2, 1, 9, 8)),
    "one_kv_head": ((2, 4, 20, 16), (2, 1, 21, 16), (2, 1, 21, 16)),
    "one_query_head": ((2, 1, 20, 16), (2, 4, 21, 16), (2, 4, 21, 16)),
    "batch_of_query": ((1, 4, 20, 16), (3, 4, 21, 16), (3, 4, 21, 16)),
    "batch_of_keys": ((3, 4, 20, 16), (1, 4, 21, 16), (1, 4, 21, 16)),
    "key_and_value_differ": ((2, 3, 20, 16), (1, 3, 21, 16), (2, 1, 21, 16)),
    "crosswise": ((2, 1, 3, 9, 8), (1, 3, 1, 11, 8), (2, 3, 3, 11, 8)),
    "fewer_query_dims": ((20, 16), (2, 3, 21, 16), (2, 3, 21, 16)),
    "fewer_key_dims": ((2, 3, 20, 16), (21, 16), (3, 21, 16)),
    "value_widest": ((9, 8), (3, 11, 8), (2, 3, 11, 8)),
}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_and_broadcasting(shapes: str, is_causal: bool, device: str, backend: str) -> None:
    check_drop_in(make_inputs(*SHAPES[shapes], device=device), is_causal=is_causal)


@pytest.mark.parametrize("shapes", ["2d", "4d", "5d", "crosswise", "value_widest"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_broadcasting_in_every_dtype(dtype: torch.dtype, shapes: str, device: str, backend: str) -> None:
    check_drop_in(make_inputs(*SHAPES[shapes], dtype=dtype, device=device, mean=0.5))


@pytest.mark.parametrize("heads", [(6, 6, 6), (6, 2, 2), (6, 1, 1), (6, 3, 2), (6, 1, 3), (6, 6, 2)], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_grouped_heads(dtype: torch.dtype, heads: tuple[int, int, int], device: str, backend: str) -> None:
    """enable_gqa: key and value head counts each divide the query's and may differ."""
    hq, hk, hv = heads
    inputs = make_inputs((2, hq, 17, 16), (2, hk, 23, 16), (2, hv, 23, 16), dtype=dtype, device=device)
    check_drop_in(inputs, enable_gqa=True, is_causal=True)


def test_grouped_heads_with_leading_dims(device: str, backend: str) -> None:
    check_drop_in(make_inputs((6, 9, 8), (2, 11, 8), (3, 11, 8), device=device), enable_gqa=True)
    inputs = make_inputs((2, 1, 6, 9, 8), (3, 2, 11, 8), (1, 3, 3, 11, 8), device=device)
    inputs["attn_mask"] = rand(2, 3, 6, 1, 11, device=device)
    check_drop_in(inputs, enable_gqa=True)


def test_grouped_heads_read_consecutive_query_heads(device: str, backend: str) -> None:
    """Query head h reads key head h // (Hq / H), not h % H."""
    inputs = make_inputs((1, 6, 4, 8), (1, 2, 5, 8), device=device)
    q, k, v = inputs.values()
    grouped = flash_ext.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for head in range(6):
        single = flash_ext.scaled_dot_product_attention(q[:, head], k[:, head // 3], v[:, head // 3])
        torch.testing.assert_close(grouped[:, head], single)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0, 2, 1e-6], ids=name_of)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_finite_scale(scale: float, is_causal: bool, device: str, backend: str) -> None:
    """Zero and negative included; PyTorch's own CPU kernel gives NaN for causal with scale <= 0."""
    inputs = make_inputs((2, 2, 13, 8), (2, 2, 15, 8), device=device)
    check_drop_in(inputs, is_causal=is_causal, scale=scale)


def test_causal_is_top_left(device: str, backend: str) -> None:
    q, k, v = make_inputs((1, 1, 4, 8), (1, 1, 9, 8), device=device).values()
    before = flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(before[..., 0, :], v[..., 0, :])
    k2, v2 = k.clone(), v.clone()
    k2[..., 4:, :] = 100.0
    v2[..., 4:, :] = 100.0
    assert torch.equal(flash_ext.scaled_dot_product_attention(q, k2, v2, is_causal=True), before)


def test_signature_is_pytorchs() -> None:
    names = list(inspect.signature(flash_ext.scaled_dot_product_attention).parameters.values())
    expected = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
    assert [p.name for p in names] == expected
    assert [p.default for p in names[3:]] == [None, 0.0, False, None, False]
    assert [p.kind for p in names[6:]] == [inspect.Parameter.KEYWORD_ONLY] * 2


def test_positional_arguments(device: str, backend: str) -> None:
    q, k, v = make_inputs((2, 5, 8), (2, 6, 8), device=device).values()
    positional = flash_ext.scaled_dot_product_attention(q, k, v, None, 0.0, True)
    assert torch.equal(positional, flash_ext.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True))


@pytest.mark.parametrize("wants", ["query", "key", "value"])
def test_only_the_wanted_gradient(wants: str, device: str, backend: str) -> None:
    inputs = make_inputs((2, 2, 9, 8), (2, 2, 11, 8), device=device)
    inputs[wants].requires_grad_()
    (got,) = torch.autograd.grad(flash_ext.scaled_dot_product_attention(**inputs).sin().sum(), inputs[wants])
    (expected,) = torch.autograd.grad(math_path(**inputs).sin().sum(), inputs[wants])
    torch.testing.assert_close(got, expected)


def test_no_grad_wanted_means_none_recorded(device: str, backend: str) -> None:
    inputs = make_inputs((2, 2, 9, 8), (2, 2, 11, 8), device=device)
    assert not flash_ext.scaled_dot_product_attention(**inputs).requires_grad
    inputs["query"].requires_grad_()
    with torch.no_grad():
        assert not flash_ext.scaled_dot_product_attention(**inputs).requires_grad
    with torch.inference_mode():
        result = flash_ext.scaled_dot_product_attention(**inputs)
    assert result.is_inference()
    assert torch.equal(result, flash_ext.scaled_dot_product_attention(**inputs))


def test_query_is_key_is_value(device: str, backend: str) -> None:
    x = rand(2, 3, 12, 8, device=device).requires_grad_()
    (got,) = torch.autograd.grad(flash_ext.scaled_dot_product_attention(x, x, x).sin().sum(), x)
    (expected,) = torch.autograd.grad(math_path(x, x, x).sin().sum(), x)
    torch.testing.assert_close(got, expected)
