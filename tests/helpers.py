"""Inputs of known mean, and the error rule: the measure that every numerical test uses.

The rule (design.md, Numbers): max and rms error against float64 at most 2x those of eager attention in the same dtype
with each intermediate rounded to that dtype (float32 and float64: the math path), with a floor of 1e-6 (fp32), 1e-12
(fp64) and one rounding of the largest element (half types).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from flash_ext import reference

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
MEANS = (0.0, 0.5, 2.0, 8.0)
DIFFERENTIABLE = ("query", "key", "value", "bias", "attn_mask", "alibi_slopes")

Inputs = dict[str, Tensor]
Results = dict[str, Tensor]
Call = Callable[..., Any]


def name_of(value: object) -> str:
    """Short test ids for dtypes, shapes and numbers."""
    return str(value).removeprefix("torch.").replace(" ", "")


def rand(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", mean: float = 0.0) -> Tensor:
    """Normal numbers of the given mean and unit variance; the same on every device."""
    return (torch.randn(shape, dtype=torch.float64) + mean).to(dtype).to(device)


def make_inputs(
    query: Iterable[int],
    key: Iterable[int],
    value: Iterable[int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    mean: float = 0.0,
) -> Inputs:
    shapes = {"query": tuple(query), "key": tuple(key), "value": tuple(value if value is not None else key)}
    return {name: rand(*shape, dtype=dtype, device=device, mean=mean) for name, shape in shapes.items()}


def leaf(tensor: Tensor) -> Tensor:
    """The same storage and strides as a leaf that wants its gradient, where its dtype has one."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def evaluate(
    call: Call,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any] | None = None,
    *,
    backward: bool = True,
    cotangent_dtype: torch.dtype | None = None,
) -> Results:
    """out, lse (where asked for) and the gradient of every floating input, under fixed random cotangents."""
    leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
    returned = call(**leaves, **(options or {}))
    outputs = returned if isinstance(returned, tuple) else (returned,)
    results = dict(zip(("out", "lse"), (output.detach() for output in outputs), strict=False))
    wanted = {name: tensor for name, tensor in leaves.items() if tensor.requires_grad}
    if backward and wanted:
        # Rounded first to the narrow dtype, so that the float64 truth gets the same cotangents.
        narrow = cotangent_dtype or inputs["query"].dtype
        generator = torch.Generator().manual_seed(1)
        cotangents = [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(narrow).to(o.dtype).to(o.device)
            for o in outputs
        ]
        grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents)
        results.update({f"grad of {name}": grad for name, grad in zip(wanted, grads, strict=True)})
    return results


def floor_of(truth: Tensor, dtype: torch.dtype) -> float:
    if dtype in HALF:
        finite = truth[truth.isfinite()]
        return float(finite.abs().max()) * torch.finfo(dtype).eps / 2 if finite.numel() else 0.0
    return {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]


def assert_within_rule(name: str, got: Tensor, truth: Tensor, eager: Tensor, factor: float = 2.0) -> None:
    """The error rule for one tensor; NaN and infinities must stand exactly where the truth has them."""
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    floor = floor_of(truth, got.dtype)
    got, truth, eager = (tensor.double().cpu() for tensor in (got, truth, eager))
    assert torch.equal(got.isnan(), truth.isnan()), f"{name}: NaN in the wrong places"
    finite = truth.isfinite()
    assert torch.equal(got[~finite].nan_to_num(1.0), truth[~finite].nan_to_num(1.0)), f"{name}: wrong infinities"
    if not finite.any():
        return
    error, allowed = (got - truth)[finite], (eager - truth)[finite]
    for measure, reduce in (("max", lambda x: x.abs().max()), ("rms", lambda x: x.square().mean().sqrt())):
        seen, limit = float(reduce(error)), max(factor * float(reduce(allowed)), floor)
        assert seen <= limit, f"{name}: {measure} error {seen:.3g} is {seen / limit:.2f} of what the rule allows"


def check(
    call: Call,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any] | None = None,
    *,
    truth: Call = reference.attention,
    eager: Call | None = None,
    backward: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Results:
    """Asserts the error rule for the outputs of ``call`` and for every gradient; returns what ``call`` gave.

    ``truth`` runs on float64 copies; ``eager`` (default: ``truth`` with rounded=True) in the inputs' own dtypes;
    ``extra`` are options of those two alone, e.g. the dropout mask.
    """
    options, extra = dict(options or {}), dict(extra or {})
    narrow = inputs["query"].dtype
    wide = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    meaning = {name: value for name, value in options.items() if name != "deterministic"} | extra
    got = evaluate(call, inputs, options, backward=backward)
    expected = evaluate(truth, wide, meaning, backward=backward, cotangent_dtype=narrow)
    rounding = {"rounded": narrow in HALF} if eager is None else {}
    yardstick = evaluate(eager or truth, inputs, meaning | rounding, backward=backward)
    assert got.keys() == expected.keys() == yardstick.keys()
    for name, tensor in got.items():
        assert_within_rule(name, tensor, expected[name], yardstick[name])
    return got
