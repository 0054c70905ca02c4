"""``numerics``: where half precision loses accuracy, in small experiments whose right answers are known.

    python -m flash_ext.profiling numerics            the table; --device cuda for a GPU's arithmetic

Three families: sums and matrix products by the precision of their values and of their accumulator; LayerNorm, softmax
and variance computed in half precision or, as autocast does, in fp32; and what autocast makes of a small model's parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """One experiment: what came out, and how far it is from the exact answer."""

    family: str
    case: str
    values: str  # dtype of the numbers that go in
    accumulator: str  # dtype that sums are kept in, or that the function computes in
    result: str
    error: float | None  # relative to the exact answer, or None where the row tells a dtype
    why: str


def _name(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]


def _relative(got: Tensor, exact: Tensor) -> float:
    """The largest deviation over the largest element; inf where there is a nan or an infinity."""
    error = ((got.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-300)).item()
    return error if error == error else float("inf")


def accumulation(device: str = "cpu") -> list[Row]:
    """0.01 added a thousand times, one by one: 10 exactly. Then a long dot product."""
    rows = []
    reasons = {
        ("fp32", "fp32"): "the reference in single precision",
        ("fp16", "fp16"): "from 8 on neighbours are 2^-7 apart: additions of 0.01 round to that",
        ("bf16", "bf16"): "8 bits: from 4 on 0.01 is less than half the gap, so the sum stands still",
        ("fp16", "fp32"): "left is the rounding of 0.01 itself",
        ("bf16", "fp32"): "left is the rounding of 0.01 itself",
    }
    for (values, accumulator), why in reasons.items():
        by_name = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        total = torch.zeros((), dtype=by_name[accumulator], device=device)
        step = torch.tensor(0.01, dtype=by_name[values], device=device)
        for _ in range(1000):
            total += step
        exact = torch.tensor(10.0, dtype=torch.float64, device=device)
        text = f"{total.item():.6g}"
        rows.append(Row("sum", "0.01 added 1000 times", values, accumulator, text, _relative(total, exact), why))
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(4096, generator=generator).to(device) for _ in "ab")
    for dtype in HALVES:
        x, y = a.to(dtype), b.to(dtype)
        exact = (x.double() * y.double()).sum()
        in_half = torch.zeros((), dtype=dtype, device=device)
        for product in x * y:
            in_half += product
        for total, accumulator, why in (
            (in_half, _name(dtype), "each of 4096 additions rounds; large sums swallow small products"),
            (x @ y, "fp32", "what matrix units do: products and sums in fp32, one rounding at the end"),
        ):
            text = f"{total.item():.6g}"
            case = "dot product of 4096"
            rows.append(Row("sum", case, _name(dtype), accumulator, text, _relative(total, exact), why))
    return rows


def normalisation(device: str = "cpu") -> list[Row]:
    """Functions that sum or exponentiate, step by step in half precision and as autocast computes them."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    large = (torch.randn(8, 1024, generator=generator) * 300).to(device)
    shifted = (torch.randn(8, 1024, generator=generator) + 64).to(device)
    scores = (torch.randn(8, 4096, generator=generator) * 4).to(device)
    for dtype in HALVES:
        name = _name(dtype)
        for case, given, why in (
            ("LayerNorm, values around 300", large, "fp16: 300^2 overflows 65504" if dtype == torch.float16 else ""),
            ("LayerNorm, mean 64, deviation 1", shifted, "x - mean cancels, and the mean is rounded"),
        ):
            x = given.to(dtype)
            exact = F.layer_norm(x.double(), x.shape[-1:])
            mean = x.mean(-1, keepdim=True)
            variance = (x - mean).square().sum(-1, keepdim=True) / x.shape[-1]
            by_hand = (x - mean) / (variance + 1e-5).sqrt()
            rows.append(_function_row(case, name, name, by_hand, exact, why or "sums in 8 bits"))
            with torch.autocast(device, dtype=dtype):
                automatic = F.layer_norm(x, x.shape[-1:])
            why = f"statistics in fp32; result in {_name(automatic.dtype)}"
            rows.append(_function_row(case, name, "autocast", automatic, exact, why))
        x = scores.to(dtype)
        exact = x.double().softmax(-1)
        numerators = (x - x.amax(-1, keepdim=True)).exp()
        total = torch.zeros_like(numerators[:, :1])
        for column in numerators.split(1, dim=1):
            total += column
        case = "softmax of 4096 scores"
        why = "the denominator swallows small terms"
        rows.append(_function_row(case, name, name, numerators / total, exact, why))
        with torch.autocast(device, dtype=dtype):
            automatic = x.softmax(-1)
        why = f"sums in fp32; result in {_name(automatic.dtype)}"
        rows.append(_function_row(case, name, "autocast", automatic, exact, why))
    tiny = torch.tensor(2.0**-26, device=device)
    for scale in (1.0, 65536.0):
        half = (tiny * scale).half()
        back = half.double() / scale
        case = f"gradient 2^-26 in fp16, loss scale {scale:g}"
        why = "below 2^-25 fp16 is 0" if scale == 1 else "what GradScaler is for"
        rows.append(Row("scale", case, "fp16", "-", f"{back.item():.3g}", _relative(back, tiny.double()), why))
    return rows


def _function_row(case: str, values: str, computed: str, got: Tensor, exact: Tensor, why: str) -> Row:
    result = "not finite" if not got.isfinite().all() else "finite" if got.any() else "all zero"
    return Row("function", case, values, computed, result, _relative(got, exact), why)


class _Toy(nn.Module):
    """Two layers and a norm, the smallest model whose parts autocast treats differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.first(x)
        norm = self.norm(F.relu(first))
        logits = self.second(norm)
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))
        return {"linear": first, "LayerNorm": norm, "logits": logits, "cross entropy": loss}


def autocast_dtypes(device: str = "cpu") -> list[Row]:
    """The dtype of each part of a small model under autocast, and of its gradients."""
    rows = []
    for dtype in HALVES:
        torch.manual_seed(0)
        model = _Toy().to(device)
        with torch.autocast(device, dtype=dtype):
            parts = model(torch.randn(5, 8, device=device))
        parts["cross entropy"].backward()
        seen = {name: part.dtype for name, part in parts.items()}
        seen |= {"parameters": model.first.weight.dtype, "gradients": model.first.weight.grad.dtype}
        for name, found in seen.items():
            rows.append(Row("autocast", f"{name} under autocast", _name(dtype), "-", _name(found), None, ""))
    return rows


def numerics(device: str = "cpu") -> list[Row]:
    """All experiments, on one device; a second on a CPU."""
    return accumulation(device) + normalisation(device) + autocast_dtypes(device)
