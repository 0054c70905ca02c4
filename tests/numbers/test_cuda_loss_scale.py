"""Promise: fp16 gradients neither overflow under a loss scale of 65,536 nor vanish where they are representable.

Backward rounds ds_ij = p_ij (<dout_i, v_j> - delta_i) to fp16 before it is multiplied by q and k. It may exceed 65,504
although dq and dk do not, and over a long row its elements may lie below 2^-24 although their sum with k does not.
"""

from __future__ import annotations

import pytest
import torch
from helpers import leaf
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

LOSS_SCALE = 65536.0
LARGEST, SMALLEST = 65504.0, 2.0**-24
LENGTHS = [8192, pytest.param(65536, marks=pytest.mark.slow)]
DIM = 64


def gradients(
    tensors: list[Tensor], grad: Tensor, causal: bool, dtype: torch.dtype, backend: str
) -> tuple[Tensor, ...]:
    leaves = [leaf(tensor.to(dtype)) for tensor in tensors]
    with flash_ext.use_backend(backend):
        out = flash_ext.attention(*leaves, causal=causal)
    return torch.autograd.grad(out, leaves, grad.to(dtype))


def assert_right(tensors: list[Tensor], grad: Tensor, causal: bool, backend: str) -> tuple[Tensor, ...]:
    """Against float64: within 2^-7 of the largest element (rms: of the rms) and one step of the smallest numbers."""
    truth = gradients(tensors, grad, causal, torch.float64, "chunked")
    got = gradients(tensors, grad, causal, torch.float16, backend)
    for name, mine, true in zip(("dq", "dk", "dv"), got, truth, strict=True):
        assert true.abs().max() < LARGEST, f"the case itself: {name} does not fit into fp16"
        assert mine.isfinite().all(), f"{name} overflows"
        error = (mine.double() - true).abs()
        assert float(error.max()) <= 2**-7 * float(true.abs().max()) + SMALLEST, f"{name}: {float(error.max()):.3g}"
        rms = float(error.square().mean().sqrt())
        assert rms <= 2**-7 * float(true.square().mean().sqrt()) + SMALLEST / 2, f"{name}: rms {rms:.3g}"
    return truth


def normal(device: str, *shape: int, deviation: float) -> Tensor:
    return (torch.randn(shape, device=device) * deviation).half()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_mean_under_the_loss_scale(length: int, causal: bool, device: str, backend: str) -> None:
    """The gradient of scale * mean(loss): what a GradScaler sends through the last layer."""
    shape = (1, 1, length, DIM)
    tensors = [normal(device, *shape, deviation=1.0) for _ in range(3)]
    grad = normal(device, *shape, deviation=LOSS_SCALE / length)
    truth = assert_right(tensors, grad, causal, backend)
    assert all(float(t.square().mean().sqrt()) > 8 * SMALLEST for t in truth), "the case itself shows something"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("keys", [4, 32])
def test_ds_beyond_the_largest_number(keys: int, length: int, causal: bool, device: str, backend: str) -> None:
    """Few keys, so that p is not small, with large values: ds exceeds 65,504; times small q and k it fits."""
    q = normal(device, 1, 1, length, DIM, deviation=0.002)
    k = normal(device, 1, 1, keys, DIM, deviation=0.02)
    v = normal(device, 1, 1, keys, DIM, deviation=80.0 * keys)
    grad = torch.zeros_like(q)
    step = length // 4096
    grad[:, :, ::step] = normal(device, 1, 1, 4096, DIM, deviation=250.0)
    dp = grad.double() @ v.double().mT
    ds = (dp - dp.mean(-1, keepdim=True)) / keys
    assert float(ds.abs().max()) > 2 * LARGEST, "the case itself: ds fits into fp16"
    assert_right([q, k, v], grad, causal, backend)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_ds_below_the_smallest_number(length: int, causal: bool, device: str, backend: str) -> None:
    """value = key makes dq the sum of elements of ds that fp16 cannot show: it must not come out as 0."""
    q, k = (normal(device, 1, 1, length, DIM, deviation=deviation) for deviation in (0.1, 1.0))
    grad = normal(device, 1, 1, length, DIM, deviation=length * SMALLEST / 64)
    (true_dq, _, _) = assert_right([q, k, k.clone()], grad, causal, backend)
    last = true_dq[:, :, length // 2 :]  # rows that see many keys, causal or not
    typical_ds = float(grad.double().std()) * DIM**0.5 / length
    assert typical_ds < SMALLEST, "the case itself: ds is representable"
    assert float(last.square().mean().sqrt()) > 8 * SMALLEST, "the case itself: dq is not representable"
