"""What the machine can do at best, measured in the same run: a matrix product in each precision, and on a GPU a copy.

Percentages of a limit in attention.py and MFU in train_lm.py are of these, so they hold for the clock and power that
the run really had.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from harness import time_calls

COPY_BYTES = 1 << 30
CUBE = {"cuda": 8192, "cpu": 1024}
PRODUCTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
SAMPLES, CALLS = 3, 8


@dataclass(frozen=True)
class Limits:
    """TFLOP/s of a matrix product by precision, and GB/s of a copy (read plus written); empty on a CPU."""

    tflops: dict[str, float] = field(default_factory=dict)
    gbs: float = float("nan")

    def of(self, dtype: torch.dtype) -> float:
        """The product's limit for a dtype; float32 means full float32, not TF32."""
        return self.tflops.get({value: name for name, value in PRODUCTS.items()}.get(dtype, ""), float("nan"))

    def __str__(self) -> str:
        products = ", ".join(f"{name} {value:.0f}" for name, value in self.tflops.items())
        return f"Limits in this run: copy {self.gbs:.0f} GB/s; matrix product {CUBE['cuda']}^3 {products} TFLOP/s"


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Within it float32 products are TF32 for "tf32", and full float32 for any other precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(call: Callable[[], Any], device: str) -> float:
    call()
    return statistics.median(time_calls(call, CALLS, device) for _ in range(SAMPLES))


@cache
def product_tflops(precision: str, device: str) -> float:
    """TFLOP/s of a matrix product of CUBE cubed; measured once a run, on random data, since zeros draw less power."""
    n = CUBE[device]
    left, right = (torch.randn(n, n, device=device).to(PRODUCTS[precision]) for _ in range(2))
    out = torch.empty_like(left)
    with float32_products(precision):
        return 2 * n**3 / _seconds(partial(torch.mm, left, right, out=out), device) / 1e12


def measure_limits() -> Limits:
    """The limits of a GPU; about a second on a large card."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    gbs = 2 * COPY_BYTES / _seconds(partial(torch.empty_like(source).copy_, source), "cuda") / 1e9
    tflops = {name: product_tflops(name, "cuda") for name in PRODUCTS}
    torch.cuda.empty_cache()
    return Limits(tflops, gbs)
