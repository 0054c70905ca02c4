"""Promise: in the place of a tensor that was not asked for, an operator returns one of size 0 like any other."""

from __future__ import annotations

import pytest
import torch
from helpers import leaf, make_inputs
from torch import Tensor

import flash_ext

OPS = torch.ops.flash_ext
SHAPES = ((2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4))


def check_absent(tensor: Tensor, dtype: torch.dtype, device: str) -> None:
    assert tensor.shape == (0,) and tensor.stride() == (1,) and tensor.dtype == dtype
    assert tensor.device.type == torch.device(device).type
    assert not tensor.requires_grad and tensor.grad_fn is None
    if tensor.device.type != "meta":  # it has a storage of its own that can grow
        assert tensor.resize_(4).fill_(1).sum() == 4


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("where", ["real", "meta"])
def test_forward(where: str, requires_grad: bool, device: str) -> None:
    place = "meta" if where == "meta" else device
    qkv = [t.to(place).requires_grad_(requires_grad) for t in make_inputs(*SHAPES, device=device).values()]
    out, lse, rng_state = OPS.attention(*qkv)
    assert out.requires_grad == requires_grad
    check_absent(lse, torch.float32, place)
    check_absent(rng_state, torch.int64, place)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("where", ["real", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward(dtype: torch.dtype, where: str, requires_grad: bool, device: str) -> None:
    place = "meta" if where == "meta" else device
    qkv = [t.to(place) for t in make_inputs(*SHAPES, dtype=dtype, device=device).values()]
    out, lse, rng_state = OPS.attention(*qkv, return_lse=True)
    qkv = [t.requires_grad_(requires_grad) for t in qkv]
    wanted = [True, False, True, True, True]  # of bias and slopes there is no gradient to want
    grads = OPS.attention_backward(torch.ones_like(out), None, *qkv, out, lse, rng_state, grad_mask=wanted)
    for index in (0, 2):
        assert grads[index].shape == qkv[index].shape and grads[index].requires_grad == requires_grad
    for index in (1, 3, 4):
        check_absent(grads[index], dtype, place)


def test_inference_mode(device: str) -> None:
    qkv = list(make_inputs(*SHAPES, device=device).values())
    with torch.inference_mode():
        results = OPS.attention(*qkv, return_lse=True)
    assert all(tensor.is_inference() for tensor in results)


def test_nothing_is_filled_in_deterministic_mode(device: str) -> None:
    """torch.utils.deterministic.fill_uninitialized_memory is for what may be read before it is written; here all is."""
    qkv = [leaf(tensor) for tensor in make_inputs(*SHAPES, device=device).values()]
    expected = torch.autograd.grad(flash_ext.attention(*qkv).sum(), qkv)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        grad_out = torch.ones(2, 3, 5, 4, device=device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            torch.empty(3, device=device)
            out = flash_ext.attention(*qkv)
            grads = torch.autograd.grad(out, qkv, grad_out)
    finally:
        torch.use_deterministic_algorithms(before)
    filled = [event.input_shapes[0] for event in profile.events() if event.name == "aten::fill_"]
    assert [shape for shape in filled if shape != [0]] == [[3]], "that of torch.empty alone"
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want)
