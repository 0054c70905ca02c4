"""Promise: an operator works on the current stream and device only, and never waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import DTYPES, Inputs, evaluate, leaf, make_inputs, name_of, rand
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

CYCLES = 600_000_000  # a third of a second of a GPU's clock: far longer than any call here
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "dropout": {"dropout_p": 0.2, "window": (50, 50), "softcap": 10.0},
    "deterministic": {"deterministic": True, "causal": True},
}


def problem(dtype: torch.dtype, device: str, everything: bool = False) -> Inputs:
    inputs = make_inputs((2, 4, 150, 64), (2, 2, 170, 64), dtype=dtype, device=device)
    if everything:
        inputs["bias"] = rand(4, 1, 170, dtype=dtype, device=device)
        inputs["alibi_slopes"] = torch.rand(4).to(device)
        inputs["mask"] = (torch.rand(2, 1, 1, 170) > 0.2).to(device)
    return inputs


def occupy() -> torch.cuda.Event:
    """Keeps the current stream busy; the event has happened once it is free again."""
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_side_stream_beside_a_busy_default_stream(dtype: torch.dtype, device: str, backend: str) -> None:
    """Forward and backward are complete as soon as their own stream is, while the default stream still works."""
    inputs = {name: leaf(tensor) for name, tensor in problem(dtype, device).items()}
    grad = rand(2, 4, 150, 64, dtype=dtype, device=device)
    side = torch.cuda.Stream()

    # NOTE: detached, because a graph that is kept keeps autograd's nodes of the leaves, and these remember the stream
    # of their making: every later backward of the same leaves would wait for the default stream.
    def step() -> tuple[Tensor, ...]:
        out = flash_ext.attention(**inputs, causal=True, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, list(inputs.values()), grad)

    expected = step()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # the first call may load code, which waits for the device
        assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    busy = occupy()
    with torch.cuda.stream(side):
        got = [tensor.clone() for tensor in step()]  # as they stand when this stream comes to them
        side.synchronize()
        still_busy = not busy.query()
    torch.cuda.synchronize()
    assert still_busy, "the side stream waited for the default stream"
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_results_wait_for_their_inputs(device: str, backend: str) -> None:
    """Inputs written late on the same side stream are seen: nothing runs ahead on another stream."""
    source = problem(torch.bfloat16, device, everything=True)
    options = {"deterministic": True, "return_lse": True}
    expected = evaluate(flash_ext.attention, source, options)
    late = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES // 4)
        for name, tensor in late.items():
            tensor.copy_(source[name])
        got = evaluate(flash_ext.attention, late, options)
        side.synchronize()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), name


def test_backward_from_another_stream(device: str, backend: str) -> None:
    """Forward on a side stream, backward called from the default one: autograd orders them."""
    inputs = [leaf(tensor) for tensor in problem(torch.float16, device).values()]
    grad = rand(2, 4, 150, 64, dtype=torch.float16, device=device)
    expected = torch.autograd.grad(flash_ext.attention(*inputs, deterministic=True), inputs, grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES // 10)
        out = flash_ext.attention(*inputs, deterministic=True)
    got = torch.autograd.grad(out, inputs, grad)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def sync_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("everything", [False, True], ids=["qkv", "everything"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_nothing_waits_for_the_gpu(
    dtype: torch.dtype, feature: str, everything: bool, device: str, backend: str, sync_is_an_error: None
) -> None:
    """Forward and backward return while work queued before them still runs, and call nothing that synchronises."""
    inputs = {name: leaf(tensor) for name, tensor in problem(dtype, device, everything).items()}
    wanted = [tensor for tensor in inputs.values() if tensor.requires_grad]
    grad = rand(2, 4, 150, 64, dtype=dtype, device=device)

    def step() -> tuple[Tensor, ...]:
        out, lse = flash_ext.attention(**inputs, **FEATURES[feature], return_lse=True)
        return torch.autograd.grad((out, lse), wanted, (grad, torch.zeros_like(lse)))

    step()  # loads code and fills the allocator's cache
    busy = occupy()
    torch.cuda.set_sync_debug_mode("error")
    grads = step()
    torch.cuda.set_sync_debug_mode("default")
    still_busy = not busy.query()
    torch.cuda.synchronize()
    assert still_busy, "a call waited for the GPU"
    assert all(tensor.isfinite().all() for tensor in grads)


def test_dropout_mask_does_not_wait(device: str, backend: str, sync_is_an_error: None) -> None:
    state = torch.tensor([3, 4], device=device)
    torch.ops.flash_ext.dropout_mask(state, 0.5, 2, 33, 65)
    busy = occupy()
    torch.cuda.set_sync_debug_mode("error")
    torch.ops.flash_ext.dropout_mask(state, 0.5, 2, 33, 65)
    torch.cuda.set_sync_debug_mode("default")
    assert not busy.query()
    torch.cuda.synchronize()


@pytest.mark.gpu(2)
def test_another_device_than_the_current_one(device: str, backend: str) -> None:
    inputs, options = problem(torch.bfloat16, device, everything=True), {"deterministic": True, "return_lse": True}
    expected = evaluate(flash_ext.attention, inputs, options)
    with torch.cuda.device(0):
        got = evaluate(flash_ext.attention, {name: t.to("cuda:1") for name, t in inputs.items()}, options)
        dropped = flash_ext.attention(*(inputs[n].to("cuda:1") for n in ("query", "key", "value")), dropout_p=0.5)
        assert torch.cuda.current_device() == 0
    assert dropped.device == torch.device("cuda:1")
    for name, tensor in expected.items():
        assert got[name].device == torch.device("cuda:1"), name
        torch.testing.assert_close(got[name].cpu(), tensor.cpu(), msg=name)
