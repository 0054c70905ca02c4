"""Promise: zero batch, heads, queries or keys give the right shapes, zeros and gradients of zeros.

A head dimension of zero is no error either: without elements in query and key every score is 0, so the result is the
mean of value over the keys that are seen; without any in value there is nothing to return.
"""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, check, evaluate, leaf, make_inputs, name_of
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

CASES = {
    "batch": ((0, 2, 5, 8), (0, 2, 6, 8), (0, 2, 6, 4)),
    "batch_by_broadcast": ((1, 2, 5, 8), (0, 2, 6, 8), (0, 2, 6, 4)),
    "heads": ((2, 0, 5, 8), (2, 0, 6, 8), (2, 0, 6, 4)),
    "queries": ((2, 3, 0, 8), (2, 3, 6, 8), (2, 3, 6, 4)),
    "keys": ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 4)),
    "queries_and_keys": ((2, 3, 0, 8), (2, 3, 0, 8), (2, 3, 0, 4)),
    "everything": ((0, 0, 0, 8), (0, 0, 0, 8), (0, 0, 0, 4)),
    "keys_2d": ((5, 8), (0, 8), (0, 4)),
    "queries_2d": ((0, 8), (6, 8), (6, 4)),
    "keys_3d": ((3, 5, 8), (3, 0, 8), (3, 0, 4)),
    "batch_5d": ((2, 0, 3, 5, 8), (2, 0, 3, 6, 8), (2, 0, 3, 6, 4)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_drop_in(dtype: torch.dtype, is_causal: bool, case: str, device: str, backend: str) -> None:
    shapes = CASES[case]
    inputs = make_inputs(*shapes, dtype=dtype, device=device)
    got = evaluate(flash_ext.scaled_dot_product_attention, inputs, {"is_causal": is_causal})
    lead = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    assert got["out"].shape == (*lead, shapes[0][-2], shapes[2][-1])
    for name, tensor in inputs.items():
        assert got[f"grad of {name}"].shape == tensor.shape
        assert got[f"grad of {name}"].dtype == dtype
    assert all((tensor == 0).all() for tensor in got.values())


NATIVE = [name for name, (q, k, _) in CASES.items() if len(q) == 4 and q[0] == k[0]]


@pytest.mark.parametrize("case", NATIVE)
def test_native_with_everything(case: str, device: str, backend: str) -> None:
    q, k, v = CASES[case]
    inputs = make_inputs(q, k, v, device=device)
    batch, heads = q[:2]
    inputs["bias"] = torch.zeros(batch, heads, q[2], k[2], device=device)
    inputs["alibi_slopes"] = torch.ones(heads, device=device)
    inputs["mask"] = torch.ones(q[2], k[2], dtype=torch.bool, device=device)
    options = {"causal": True, "window": (2, None), "softcap": 1.0, "return_lse": True, "align": "bottom_right"}
    got = evaluate(flash_ext.attention, inputs, options)
    assert got["lse"].shape == (batch, heads, q[2])
    assert (got["lse"] == -torch.inf).all()
    assert got["grad of bias"].shape == inputs["bias"].shape
    assert (got["grad of alibi_slopes"] == 0).all() and got["grad of alibi_slopes"].shape == (heads,)


@pytest.mark.parametrize("case", CASES)
def test_with_dropout_and_mask(case: str, device: str, backend: str) -> None:
    shapes = CASES[case]
    inputs = {name: leaf(t) for name, t in make_inputs(*shapes, device=device).items()}
    mask = leaf(torch.zeros(shapes[0][-2], shapes[1][-2], device=device))
    out = flash_ext.scaled_dot_product_attention(**inputs, attn_mask=mask, dropout_p=0.5)
    assert (out == 0).all()
    grads = torch.autograd.grad(out.sum(), [*inputs.values(), mask])
    assert all((grad == 0).all() for grad in grads)


def test_grouped_heads_without_any(device: str, backend: str) -> None:
    inputs = make_inputs((0, 4, 5, 8), (0, 2, 6, 8), device=device)
    assert flash_ext.scaled_dot_product_attention(**inputs, enable_gqa=True).shape == (0, 4, 5, 8)


def test_broadcast_input_of_an_empty_result(device: str, backend: str) -> None:
    """The gradient of a broadcast input of an empty result is a zero of the input's own shape."""
    inputs = make_inputs((1, 2, 5, 8), (0, 2, 6, 8), device=device)
    got = evaluate(flash_ext.scaled_dot_product_attention, inputs)
    assert got["grad of query"].shape == (1, 2, 5, 8) and (got["grad of query"] == 0).all()


HEAD_DIMS = {"of_query": (0, 4), "of_value": (8, 0), "of_both": (0, 0)}


@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_head_dimension_of_zero(dtype: torch.dtype, dims: str, device: str) -> None:
    head_dim, head_dim_v = HEAD_DIMS[dims]
    inputs = make_inputs((2, 4, 5, head_dim), (2, 2, 7, head_dim), (2, 2, 7, head_dim_v), dtype=dtype, device=device)
    got = check(flash_ext.attention, inputs, {"return_lse": True})
    assert got["out"].shape == (2, 4, 5, head_dim_v)
    if head_dim == 0:  # seven scores of 0
        torch.testing.assert_close(got["lse"], torch.full_like(got["lse"], 7.0).log())
    check(flash_ext.attention, inputs, {"causal": True, "scale": 2.0})
    for is_causal in (False, True):  # PyTorch's own agrees
        options = {"is_causal": is_causal, "enable_gqa": True}
        got = flash_ext.scaled_dot_product_attention(**inputs, **options)
        with sdpa_kernel(SDPBackend.MATH):  # its fused kernels on a GPU return None for a value without elements
            expected = torch.nn.functional.scaled_dot_product_attention(**inputs, **options)
        torch.testing.assert_close(got, expected)


def test_head_dimension_of_zero_is_explained(device: str) -> None:
    inputs = make_inputs((2, 5, 0), (2, 7, 0), (2, 7, 4), device=device)
    plan = flash_ext.explain(**inputs, sdpa=True)
    assert plan.forward.backend == plan.backward.backend == "chunked"
    assert "head_dim is 0" in {refusal.reason for refusal in plan.refusals}
