"""Promise: the gradient of a bias in bf16 that few batch elements share, or none, comes out of sm80's main backward
kernel where the device has TMA: right at every edge of a tile, 0 where a band lets nobody look, the same bits in every
run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import Inputs, check, evaluate, leaf, make_inputs, rand
from layouts import poison_free_memory
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window, softcap": {"window": (70, 5), "softcap": 5.0},
    "in order": {"deterministic": True},
}


def heads_that_fill(len_k: int) -> int:
    """So many that tiles of keys of one batch element are whole waves of blocks."""
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    return processors // math.gcd(processors, -(-len_k // 128))


def attention(**arguments: Any) -> Any:
    poison_free_memory("cuda")
    with flash_ext.use_backend("sm80"):
        return flash_ext.attention(**arguments)


def problem(batch: int, len_q: int, len_k: int, head_dim: int, *, group: int = 1, mean: float = 0.0) -> Inputs:
    heads = heads_that_fill(len_k)
    shapes = (batch, heads * group, len_q, head_dim), (batch, heads, len_k, head_dim)
    inputs = make_inputs(*shapes, dtype=DTYPE, device="cuda", mean=mean)
    return inputs | {"bias": rand(1, heads * group, len_q, len_k, dtype=DTYPE, device="cuda")}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_every_edge(batch: int, head_dim: int, option: str, device: str) -> None:
    for i, (len_q, len_k) in enumerate(((63, 136), (64, 512), (65, 120), (130, 400))):
        mean = 0.0 if "softcap" in option else i % 2 * 2.0  # a saturated cap leaves gradients that are below the floor
        got = check(attention, problem(batch, len_q, len_k, head_dim, mean=mean), OPTIONS[option])
        assert not got["grad of bias"].isnan().any()


@pytest.mark.parametrize("case", ["groups", "mask", "dlse", "odd rows", "a row for all", "transposed", "many elements"])
def test_beside_what(case: str, device: str) -> None:
    inputs = problem(9 if case == "many elements" else 2, 130, 129 if case == "odd rows" else 128, 64, group=2)
    options: dict[str, Any] = {"return_lse": True} if case == "dlse" else {}
    if case == "mask":
        options["mask"] = rand(1, 1, 130, 128, device="cuda") > -1
    if case == "a row for all":
        inputs["bias"] = inputs["bias"][:, :, :1].contiguous()
    if case == "transposed":
        inputs["bias"] = inputs["bias"].transpose(-1, -2).contiguous().transpose(-1, -2)
    check(attention, inputs, options)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_nothing_where_the_band_ends(head_dim: int, device: str) -> None:
    inputs = problem(2, 600, 520, head_dim)
    grad = evaluate(attention, inputs, {"causal": True, "window": (40, 0)})["grad of bias"]
    outside = torch.ones(600, 520, device="cuda", dtype=torch.bool).triu(1)
    outside |= torch.ones(600, 520, device="cuda", dtype=torch.bool).tril(-41)
    assert grad.count_nonzero() > 0 and not grad.isnan().any()
    assert not grad[..., outside].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_bits(deterministic: bool, device: str) -> None:
    inputs = problem(8, 200, 512, 128)
    first = evaluate(attention, inputs, {"deterministic": deterministic})["grad of bias"]
    for _ in range(19):
        again = evaluate(attention, inputs, {"deterministic": deterministic})["grad of bias"]
        assert torch.equal(first, again)


@pytest.mark.parametrize(("batch", "main", "own"), [(1, 1, 0), (2, 2, 0), (8, 8, 0), (9, 1, 1)])
def test_who_makes_it(batch: int, main: int, own: int, device: str) -> None:
    """One launch for each batch element that shares the bias, up to eight; more are a pass of its own."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs TMA, compute capability 9.0")
    tensors = {name: leaf(tensor) for name, tensor in problem(batch, 130, 512, 64).items()}
    out = attention(**tensors)

    def backward() -> list[Tensor]:
        return list(torch.autograd.grad(out.sum(), list(tensors.values()), retain_graph=True))

    backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        backward()
        torch.cuda.synchronize()
    counts = dict.fromkeys(("backward_kernel", "bias_gradient_kernel"), 0)
    for event in profiler.key_averages():
        for name in counts:
            counts[name] += event.count if f"{name}<" in event.key else 0
    assert counts == {"backward_kernel": main, "bias_gradient_kernel": own}
