"""Promise: a number argument is a number or, as in PyTorch, a 0-d tensor that wants no gradient.

A tensor that wants a gradient would silently get none: that is a TypeError everywhere, in one sentence.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import flash_ext

CALLS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "attention": (flash_ext.attention, ("scale", "softcap", "dropout_p")),
    "drop-in": (flash_ext.scaled_dot_product_attention, ("scale", "dropout_p")),
    "explain": (flash_ext.explain, ("scale", "softcap", "dropout_p")),
}
PAIRS = [(name, argument) for name, (_, arguments) in CALLS.items() for argument in arguments]
LEARNED = "wants a gradient"


def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ``_C`` was built for another Python."""
    for name in ("attention", "sdpa"):
        monkeypatch.setattr(sys.modules[f"flash_ext.{name}"], "_eager", None)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def q(device: str = "cpu") -> Tensor:
    return torch.randn(1, 2, 4, 8, device=device)


@pytest.fixture(params=["eager", "without _C", "torch function mode", "compiled"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Calls a function of ``CALLS`` in each of the ways that reach it."""
    if request.param == "without _C":
        without_c(monkeypatch)

    def call(name: str, **options: Any) -> Any:
        function = CALLS[name][0]
        if request.param == "compiled" and name != "explain":  # which is never part of a graph
            torch._dynamo.reset()
            function = torch.compile(lambda x, **o: CALLS[name][0](x, x, x, **o), backend="eager")
            return function(q(), **options)
        return function(q(), q(), q(), **options)

    if request.param == "torch function mode":
        with Mode():
            yield call
    else:
        yield call


@pytest.mark.parametrize(("name", "argument"), PAIRS)
def test_a_tensor_that_wants_a_gradient_is_a_type_error(run: Callable[..., Any], name: str, argument: str) -> None:
    for learned in (torch.nn.Parameter(torch.tensor(0.5)), torch.tensor([0.5], requires_grad=True)):
        with pytest.raises(TypeError) as caught:
            run(name, **{argument: learned})
        text = str(caught.value).splitlines()[0]
        assert text.startswith(f"{argument} is a tensor that wants a gradient"), text
        assert ("multiply the query" in text) is (argument == "scale"), text


@pytest.mark.parametrize(("name", "argument"), PAIRS)
def test_a_tensor_without_dimensions_is_a_number(run: Callable[..., Any], name: str, argument: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (torch.tensor(0.5), torch.tensor(1), np.float32(0.5), 1, True):
            if argument != "dropout_p" or value != 1:
                run(name, **{argument: value})


@pytest.mark.parametrize(("name", "argument"), PAIRS)
@pytest.mark.parametrize("value", [torch.tensor([0.5]), torch.tensor(1j), "0.5", 1j, torch.tensor(1.0).to("meta")])
def test_what_is_no_number_is_a_type_error(run: Callable[..., Any], name: str, argument: str, value: Any) -> None:
    with pytest.raises((TypeError, torch._dynamo.exc.TorchRuntimeError), match=f"{argument} is |to meta"):
        run(name, **{argument: value})


@pytest.mark.parametrize("name", ["attention", "drop-in", "explain"])
@pytest.mark.parametrize("value", [1, None, torch.tensor(True)])
def test_a_flag_is_a_bool(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    option = {"attention": "causal", "drop-in": "is_causal", "explain": "causal"}[name]
    for _ in range(2):
        with pytest.raises(TypeError, match=f"{option} is of type .*; it must be a bool"):
            CALLS[name][0](q(), q(), q(), **{option: value})
        without_c(monkeypatch)


def test_the_value_is_that_of_the_tensor() -> None:
    x = q()
    for scale in (0.3, torch.tensor(0.3, dtype=torch.float64)):
        torch.testing.assert_close(
            flash_ext.attention(x, x, x, scale=scale), F.scaled_dot_product_attention(x, x, x, scale=0.3)
        )


def test_derivatives_of_torch_func_are_wanted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a gradient nor a tangent becomes a silent zero."""
    x, scale = q(), torch.tensor(0.3)

    def loss(s: Tensor) -> Tensor:
        return flash_ext.attention(x, x, x, scale=s).sum()

    for _ in range(2):
        with pytest.raises(TypeError, match=LEARNED):
            torch.func.grad(loss)(scale)
        with pytest.raises(TypeError, match=LEARNED):
            torch.func.jvp(loss, (scale,), (torch.ones(()),))
        without_c(monkeypatch)


def test_under_enable_pytorch_refuses_by_itself() -> None:
    x = q()
    with flash_ext.enable(), pytest.raises(TypeError, match="'scale' must be float"):
        F.scaled_dot_product_attention(x, x, x, scale=torch.nn.Parameter(torch.tensor(0.3)))


def test_in_a_full_graph_it_is_an_error_too() -> None:
    x = q()
    compiled = torch.compile(lambda s: flash_ext.attention(x, x, x, scale=s), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=LEARNED):
        compiled(torch.nn.Parameter(torch.tensor(0.3)))


@pytest.mark.gpu
def test_reading_a_tensor_of_the_device_is_told(device: str) -> None:
    """It waits for the device, as PyTorch does; never silently."""
    x, scale = q(device), torch.tensor(0.3, device=device)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="scale is a tensor on cuda:0; reading it waits for the device"):
            flash_ext.attention(x, x, x, scale=scale)
    finally:
        torch.set_warn_always(before)
