"""Promise: scores of any finite size have right results and gradients: equal ones share, exact ones are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, Inputs, check, evaluate, make_inputs, name_of, rand
from torch import Tensor

import flash_ext
from flash_ext import reference

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (40, 0)},
    "deterministic": {"deterministic": True},
    "groups": {"heads": (4, 2)},
    "few keys": {"lengths": (100, 3)},
    "one tile": {"lengths": (50, 60)},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "dropout": {"dropout_p": 0.5},
}
CASES = [(kind, 64) for kind in KINDS] + [
    (kind, head_dim) for kind in ("plain", "causal") for head_dim in (8, 32, 40, 128, 200, 256)
]


def inputs_of(kind: str, dtype: torch.dtype, head_dim: int, device: str) -> tuple[Inputs, dict[str, Any]]:
    options = dict(KINDS[kind])
    queries, keys = options.pop("lengths", (170, 200))
    heads_q, heads_k = options.pop("heads", (2, 2))
    inputs = make_inputs((1, heads_q, queries, head_dim), (1, heads_k, keys, head_dim), dtype=dtype, device=device)
    if options.pop("mask", False):
        inputs["mask"] = (rand(1, 1, queries, keys) > -1).to(device)
    if options.pop("bias", False):
        inputs["bias"] = torch.zeros(1, 1, queries, keys, device=device, dtype=dtype)
    return inputs, options


def kept_by(dropout_p: float, inputs: Inputs) -> Tensor | None:
    """What dropout of a call right after manual_seed(1) keeps."""
    if dropout_p == 0.0:
        return None
    torch.manual_seed(1)
    plain = [torch.zeros(1, 1, 1, 8, device=inputs["query"].device) for _ in range(3)]
    state = torch.ops.flash_ext.attention(*plain, dropout_p=dropout_p)[2]
    shape = (*inputs["query"].shape[:-1], inputs["key"].size(-2))
    return torch.ops.flash_ext.dropout_mask(state, dropout_p, shape[0] * shape[1], *shape[2:]).view(shape)


def check_gradients(inputs: Inputs, options: dict[str, Any]) -> None:
    """lse has a cotangent: without it dQ of equal keys is 0."""
    dtype = inputs["query"].dtype
    options = options | {"return_lse": True}
    torch.manual_seed(1)
    got = evaluate(flash_ext.attention, inputs, options)
    options.pop("deterministic", None)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    keep = kept_by(options.get("dropout_p", 0.0), inputs)
    truth = evaluate(reference.attention, wide, options | {"keep": keep}, cotangent_dtype=dtype)
    allowed = max(2 * torch.finfo(dtype).eps, 1e-5) if dtype != torch.float64 else 1e-12
    for name in ("out", "grad of query", "grad of key", "grad of value"):
        error = (got[name].double() - truth[name]).square().mean().sqrt()
        assert error <= allowed * truth[name].square().mean().sqrt(), (name, error)


@pytest.mark.parametrize(("kind", "head_dim"), CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_equal_scores(dtype: torch.dtype, kind: str, head_dim: int, device: str, backend: str) -> None:
    """Scores of 1e11, in fp16 of 5e5, where a step of lse is 16384 and 0.03; of either sign."""
    number = 240.0 if dtype == torch.float16 else 133120.0
    for sign in (1, -1):
        inputs, options = inputs_of(kind, dtype, head_dim, device)
        inputs["query"].fill_(number)
        inputs["key"].fill_(sign * number)
        check_gradients(inputs, options)


@pytest.mark.parametrize(("kind", "head_dim"), CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_exact_scores(dtype: torch.dtype, kind: str, head_dim: int, device: str, backend: str) -> None:
    """Integers times a power of two, in some rows zero: whatever the order of a sum, no score is rounded."""
    for exponent in (9,) if dtype == torch.float16 else (20, 28):
        inputs, options = inputs_of(kind, dtype, head_dim, device)
        for name in ("query", "key"):
            inputs[name] = inputs[name].float().mul(2).round().clamp(-4, 4).to(dtype)
        inputs["query"][..., 1::7, :] = 0
        inputs["value"] /= 32  # in fp16 gradients must not overflow
        check_gradients(inputs, options | {"scale": 2.0**exponent})


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("low", ["key", "bias", "row of bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_key_far_below(dtype: torch.dtype, low: str, head_dim: int, device: str, backend: str) -> None:
    """Scores of 5120 and a few more or less, exact in every dtype, and one key whose score is -2e6 or finfo.min: what
    rounding may have done to that one says nothing about the others."""
    inputs, _ = inputs_of("plain", dtype, head_dim, device)
    for name, first in (("query", 1280), ("key", 4)):
        x = inputs[name]
        x[..., 1:4] = torch.randint(-1, 2, (*x.shape[:-1], 3))
        x[..., 4:] = 0
        x[..., 0] = first
    if low == "key":
        inputs["key"][..., 5, 0] = -1600
    else:
        shape = (1, 1, inputs["query"].size(-2) if low == "bias" else 1, inputs["key"].size(-2))
        inputs["bias"] = torch.zeros(shape, dtype=dtype, device=device)
        inputs["bias"][..., 5] = torch.finfo(dtype).min
    check_gradients(inputs, {"scale": 1.0})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_one_query_of_many(dtype: torch.dtype, device: str, backend: str) -> None:
    """One row far from 0 among ordinary ones changes nothing for them."""
    inputs = make_inputs((1, 2, 150, 64), (1, 2, 200, 64), dtype=dtype, device=device)
    plain = evaluate(flash_ext.attention, inputs)
    factor = 2.0 ** (9 if dtype.itemsize == 2 else 20)
    inputs["query"][:, :, 70] = torch.randint(-2, 3, (1, 2, 64)).to(device, dtype) * factor
    got = check(flash_ext.attention, inputs)
    others = torch.arange(150, device=device) != 70
    tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    for name in ("out", "grad of query"):
        torch.testing.assert_close(got[name][:, :, others], plain[name][:, :, others], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_keys_split_over_blocks(dtype: torch.dtype, queries: int, device: str, backend: str) -> None:
    """Parts of a row tell how many keys they had, though their lse cannot."""
    inputs = make_inputs((1, 1, queries, 64), (1, 1, 5000, 64), dtype=dtype, device=device)
    inputs["query"].fill_(240.0)
    inputs["key"].fill_(240.0 if dtype == torch.float16 else 133120.0)
    inputs["value"] = rand(1, 1, 5000, 64, mean=1.0).to(device, dtype)
    inputs["value"][:, :, :4500] -= 1
    got = evaluate(flash_ext.attention, inputs, backward=False)["out"]
    mean = inputs["value"].double().mean(-2, keepdim=True).expand(got.shape)
    torch.testing.assert_close(got.double(), mean, atol=2e-3, rtol=2e-2)
