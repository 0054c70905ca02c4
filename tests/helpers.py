"""Inputs of known mean, and the error rule: the measure that every numerical test uses, also for the drop-in and for
a dropout mask that is known.

The rule (design.md, Numbers): max and rms error against float64 at most 2x those of eager attention in the same dtype
with each intermediate rounded to that dtype (float32 and float64: the math path), with a floor of 1e-6 (fp32), 1e-12
(fp64) and one rounding of the largest element (half types).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext
from flash_ext import reference

OPS = torch.ops.flash_ext
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)
MEANS = (0.0, 0.5, 2.0, 8.0)
RESAMPLES = 15

Inputs = dict[str, Tensor]
Results = dict[str, Tensor]
Call = Callable[..., Any]
Yardstick = Callable[[Mapping[str, Tensor]], Results]  # what other attention gives for these inputs


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


def requested_bytes(which: str) -> int:
    """GPU memory that tensors asked for, "current" or "peak".

    NOTE: not torch.cuda.memory_allocated: a block may be up to 1 MiB larger than what was asked for, wherever the gap
    that tensors of earlier tests leave is.
    """
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


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
        narrow = cotangent_dtype or next(iter(inputs.values())).dtype
        grads = torch.autograd.grad(outputs, list(wanted.values()), cotangents_of(outputs, narrow))
        results.update({f"grad of {name}": grad for name, grad in zip(wanted, grads, strict=True)})
    return results


def cotangents_of(outputs: Iterable[Tensor], narrow: torch.dtype) -> list[Tensor]:
    """Fixed random numbers, rounded first to the narrow dtype, so that the float64 truth gets the same."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(narrow).to(o.dtype).to(o.device)
        for o in outputs
    ]


def floor_of(truth: Tensor, dtype: torch.dtype) -> float:
    finite = truth[truth.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    if dtype in HALF:  # sums are kept in float32, whose own floor holds where the truth is 0
        return max(largest * torch.finfo(dtype).eps / 2, 1e-6)
    # The truth of float64 is float64 itself, so its floor follows the size of the numbers.
    return 1e-6 if dtype == torch.float32 else 1e-12 * max(1.0, largest)


MEASURES: dict[str, Callable[[Tensor], float]] = {
    "max": lambda error: float(error.abs().max()) if error.numel() else 0.0,
    "rms": lambda error: float(error.square().mean().sqrt()) if error.numel() else 0.0,
}


def violations(
    name: str, got: Tensor, truth: Tensor, errors: list[Tensor], factor: float = 2.0, units: float = 0.0
) -> list[str]:
    """What breaks the error rule for one tensor; NaN and infinities must stand exactly where the truth has them.

    ``errors``: eager's at the finite elements, for each draw, or a second yardstick's; the worst counts. ``units``: of
    the largest element's last place, that are allowed whatever those errors are.
    """
    if got.shape != truth.shape:
        return [f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"]
    floor = floor_of(truth, got.dtype)
    if units > 0 and truth.isfinite().any():
        floor = max(floor, units * torch.finfo(got.dtype).eps * float(truth[truth.isfinite()].abs().max()))
    got, truth = got.double().cpu(), truth.double().cpu()
    finite = truth.isfinite()
    if not torch.equal(got.isnan(), truth.isnan()) or not torch.equal(got[truth.isinf()], truth[truth.isinf()]):
        return [f"{name}: NaN or infinities in the wrong places"]
    error = (got - truth)[finite]
    found = []
    for measure, value_of in MEASURES.items():
        seen, limit = value_of(error), max(factor * max(map(value_of, errors)), floor)
        if not seen <= limit:
            found.append(f"{name}: {measure} error {seen:.3g} is {seen / limit:.2f} of what the rule allows")
    return found


def jittered(inputs: Mapping[str, Tensor]) -> Inputs:
    """The same problem nudged by a part in 64: as hard, with other roundings. Infinite and huge elements stay."""
    result = {}
    for name, tensor in inputs.items():
        if tensor.is_floating_point():
            factor = 1 + torch.randn(tensor.shape, dtype=torch.float64).to(tensor.device) / 64
            tensor = torch.where(tensor.abs() < 1e3, (tensor.double() * factor).to(tensor.dtype), tensor)
        result[name] = tensor
    return result


def check(
    call: Call,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any] | None = None,
    *,
    truth: Call = reference.attention,
    eager: Call | None = None,
    backward: bool = True,
    extra: Mapping[str, Any] | None = None,
    units: float = 0.0,
    fused: Yardstick | None = None,
) -> Results:
    """Asserts the error rule for the outputs of ``call`` and for every gradient; returns what ``call`` gave.

    ``truth`` runs on float64 copies; ``eager`` (default: ``truth`` with rounded=True) in the inputs' own dtypes;
    ``extra`` are options of those two alone, e.g. the dropout mask; ``units`` as in ``violations``; ``fused``: a second
    yardstick (docs/use/numerics.md), which is asked where eager's error does not allow what was seen.
    """
    options, extra = dict(options or {}), dict(extra or {})
    narrow = next(iter(inputs.values())).dtype
    only_bits = ("deterministic", "batch_invariant")
    meaning = {name: value for name, value in options.items() if name not in only_bits} | extra
    rounding = {"rounded": narrow in HALF} if eager is None else {}

    def exact(tensors: Mapping[str, Tensor]) -> Results:
        wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        return evaluate(truth, wide, meaning, backward=backward, cotangent_dtype=narrow)

    def rough(tensors: Mapping[str, Tensor]) -> Results:
        return evaluate(eager or truth, tensors, meaning | rounding, backward=backward)

    got, expected = evaluate(call, inputs, options, backward=backward), exact(inputs)
    assert got.keys() == expected.keys()
    errors: dict[str, list[Tensor]] = {name: [] for name in got}
    broken: list[str] = []
    # An error is a random number; over a few elements one draw may be luckily small: draw again before failing.
    for yardstick in (rough,) if fused is None else (rough, fused):
        for again in range(1 + RESAMPLES):
            others = jittered(inputs) if again else inputs
            true, other = exact(others) if again else expected, yardstick(others)
            for name, t in true.items():
                errors[name].append((other[name].double() - t)[t.isfinite()].cpu())
            broken = [s for name in got for s in violations(name, got[name], expected[name], errors[name], units=units)]
            if not broken:
                return got
    raise AssertionError("\n".join(broken))


def math_path(*args: Any, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def attention_by(name: str) -> Callable[..., Any]:
    """attention by that kernel, with its backend in the other pass, or by that backend; or an error."""

    def attention(**arguments: Any) -> Any:
        with flash_ext.use_backend(name):
            return flash_ext.attention(**arguments)

    return attention


def check_drop_in(inputs: Inputs, units: float = 0.0, **options: Any) -> None:
    """The rule for the result and for every gradient, the mask's included; ``units`` as in ``violations``."""

    def eager(rounded: bool = inputs["query"].dtype.itemsize == 2, **arguments: Any) -> Tensor:
        return reference.scaled_dot_product_attention(**arguments, rounded=rounded)

    check(flash_ext.scaled_dot_product_attention, inputs, options, truth=math_path, eager=eager, units=units)


def rng_state(seed: int, offset: int, device: str = "cpu") -> Tensor:
    wrap = [(x + 2**63) % 2**64 - 2**63 for x in (seed, offset)]
    return torch.tensor(wrap, dtype=torch.int64, device=device)


def keep_mask(state: Tensor, p: float, batch: tuple[int, ...], rows: int, cols: int) -> Tensor:
    """Bool (*batch, rows, cols): batch holds every leading dim of the result, heads last."""
    flat = OPS.dropout_mask(state, p, int(torch.Size(batch).numel()), rows, cols)
    return flat.view(*batch, rows, cols)


def dropped(keep: Tensor, p: float, rounded: bool = False) -> Any:
    def call(**arguments: Any) -> Any:
        return reference.attention(**arguments, dropout_p=p, keep=keep, rounded=rounded)

    return call
