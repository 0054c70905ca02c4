"""Promise: on a GPU forward and backward peak at 1.01x + 4 MiB of PyTorch's leanest fused backend, or lower."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import name_of, requested_bytes
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

pytestmark = pytest.mark.gpu

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
SLACK = 4 << 20
SHAPES = [(2, 16, 4096, 128), (4, 8, 2048, 64), (2, 4, 1000, 256), (1, 3, 333, 40)]
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def _backward_in_this_thread() -> Iterator[None]:
    """NOTE: autograd's worker thread lets go of a run's gradients only when it is scheduled again, after the caller has
    long gone on; counted as "there before" the next run, they took dq + dk + dv off its peak on a busy machine."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def random(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def case(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value that want gradients, and the drop-in's options."""
    batch, heads, length, width = shape
    groups = 4 if name == "gqa" and heads % 4 == 0 else 1
    kv_shape = (batch, heads // groups, length, width)
    inputs = [random(*s, dtype=dtype, device=device).requires_grad_() for s in (shape, kv_shape, kv_shape)]
    scores = (length, length)
    options: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "gqa": {"is_causal": True, "enable_gqa": True},
        "bool_mask": {"attn_mask": torch.rand(1, 1, *scores, device=device) > 0.1},
        "bool_keys": {"attn_mask": torch.rand(batch, 1, 1, length, device=device) > 0.1},
        "bias": {"attn_mask": random(1, heads, *scores, dtype=dtype, device=device)},
        "bias_gradient": {"attn_mask": random(1, heads, *scores, dtype=dtype, device=device).requires_grad_()},
        "dropout": {"dropout_p": 0.1},
    }[name]
    return inputs, options


def peak(call: Callable[..., Tensor], inputs: list[Tensor], options: dict[str, Any]) -> int:
    """Bytes of the second of two runs above what was there before it: results and gradients included."""
    grad = torch.ones(*inputs[0].shape[:-1], inputs[2].shape[-1], dtype=inputs[0].dtype, device=inputs[0].device)
    mask = options.get("attn_mask")
    wanted = [*inputs, mask] if mask is not None and mask.requires_grad else inputs

    def run() -> None:
        torch.autograd.grad(call(*inputs, **options), wanted, grad)

    run()  # loads code and makes plans
    gc.collect()  # what earlier tests left must not go in between
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.memory_allocated() >= before, "something of the first run was still there"
    return torch.cuda.max_memory_allocated() - before


def peers(inputs: list[Tensor], options: dict[str, Any]) -> dict[str, int]:
    """Peaks of PyTorch's fused backends that accept the call."""
    found = {}
    for kind in FUSED:
        try:
            with sdpa_kernel(kind), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each reason to refuse is a warning
                found[kind.name] = peak(F.scaled_dot_product_attention, inputs, options)
        except RuntimeError:
            continue
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize(
    "name", ["plain", "causal", "gqa", "bool_mask", "bool_keys", "bias", "bias_gradient", "dropout"]
)
def test_peak_is_that_of_the_leanest(name: str, shape: tuple[int, ...], device: str, backend: str) -> None:
    inputs, options = case(name, shape, HALF, device)
    others = peers(inputs, options)
    if not others:
        pytest.skip("no fused backend of PyTorch accepts this call")
    mine = peak(flash_ext.scaled_dot_product_attention, inputs, options)
    assert mine <= 1.01 * min(others.values()) + SLACK, f"{mine} bytes; {others}"


@pytest.mark.parametrize("name", ["plain", "causal", "bias"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=name_of)
def test_peak_in_other_dtypes(dtype: torch.dtype, name: str, device: str, backend: str) -> None:
    inputs, options = case(name, (2, 8, 2048, 64), dtype, device)
    others = peers(inputs, options)
    assert others, "the memory-efficient backend takes every one of these"
    mine = peak(flash_ext.scaled_dot_product_attention, inputs, options)
    assert mine <= 1.01 * min(others.values()) + SLACK, f"{mine} bytes; {others}"


@pytest.mark.parametrize("lengths", [(64, 64), (192, 64), (128, 128), (1024, 128)], ids=name_of)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_peak_with_one_tile_of_keys(head_dim: int, dropout_p: float, lengths: tuple[int, int], device: str) -> None:
    """PyTorch's memory-efficient backend sums dQ in memory only where there are more keys than a tile holds."""
    queries, keys = lengths
    batch = 65536 // (8 * queries)
    shapes = [(batch, 8, queries, head_dim), *[(batch, 8, keys, head_dim)] * 2]
    inputs = [random(*shape, dtype=HALF, device=device).requires_grad_() for shape in shapes]
    others = peers(inputs, {"dropout_p": dropout_p})
    assert others, "the memory-efficient backend takes every one of these"
    mine = peak(flash_ext.scaled_dot_product_attention, inputs, {"dropout_p": dropout_p})
    assert mine <= 1.01 * min(others.values()) + SLACK, f"{mine} bytes; {others}"


def test_gradient_of_a_float32_bias_is_not_copied(device: str, backend: str) -> None:
    """It is summed in float32, so what it is summed in is the result."""
    inputs = [random(1, 2, 2048, 16, dtype=torch.float32, device=device).requires_grad_() for _ in range(3)]
    bias = random(1, 2, 2048, 2048, dtype=torch.float32, device=device).requires_grad_()
    seen = peak(flash_ext.scaled_dot_product_attention, inputs, {"attn_mask": bias})
    assert seen < 1.5 * bias.numel() * bias.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_peak_is_linear_in_the_length(dropout_p: float, dtype: torch.dtype, device: str, backend: str) -> None:
    """With every feature: at most out, four gradients, lse, delta and float32 copies of dq, dk and dv of the result."""
    heads, length, width = 4, 8192, 32
    query = random(1, heads, length, width, dtype=dtype, device=device).requires_grad_()
    key, value = (random(1, 2, length, width, dtype=dtype, device=device).requires_grad_() for _ in range(2))
    bias = random(1, heads, 1, length, dtype=dtype, device=device).requires_grad_()
    slopes = torch.rand(heads, device=device).requires_grad_()
    wanted = [query, key, value, bias, slopes]
    whole = query.numel() * max(dtype.itemsize, 4)
    seen = 0
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = flash_ext.attention(
            query, key, value, bias=bias, alibi_slopes=slopes, softcap=9.0, causal=True, dropout_p=dropout_p
        )
        torch.autograd.grad(out, wanted, torch.ones_like(out))
        del out
        seen = torch.cuda.max_memory_allocated() - before
    assert seen < 8 * whole + SLACK < heads * length * length  # the last: a byte a score


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name_of)
def test_forward_without_gradients_allocates_its_result(dtype: torch.dtype, device: str, backend: str) -> None:
    """No lse, no scratch of the size of an input."""
    query, key, value = (random(2, 8, 2048, 64, dtype=dtype, device=device) for _ in range(3))
    for options in ({}, {"causal": True}, {"dropout_p": 0.1}):
        flash_ext.attention(query, key, value, **options)
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes("current")
        out = flash_ext.attention(query, key, value, **options)
        assert requested_bytes("peak") - before <= out.numel() * out.element_size() + 4096
        del out


def test_nothing_stays_allocated(device: str, backend: str) -> None:
    """After results are dropped not a byte of a call is left."""
    inputs, options = case("bias_gradient", (2, 4, 300, 64), HALF, device)
    gc.collect()  # what other tests left in cycles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        out = flash_ext.scaled_dot_product_attention(*inputs, **options)
        grads = torch.autograd.grad(out.sum(), [*inputs, options["attn_mask"]])
        del out, grads
    assert torch.cuda.memory_allocated() == before
