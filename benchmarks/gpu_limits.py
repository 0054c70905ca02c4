"""What the card can do at best, measured in the same run: a copy, and a matrix product of 8192 cubed in each precision.

Percentages of a limit in attention.py are of these, so they hold for the clock and power that the run really had.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from harness import time_calls

COPY_BYTES = 1 << 30
CUBE = 8192
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
        return f"Limits in this run: copy {self.gbs:.0f} GB/s; matrix product {CUBE}^3 {products} TFLOP/s"


@contextmanager
def _float32_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _seconds(call: Callable[[], Any]) -> float:
    call()
    return statistics.median(time_calls(call, CALLS, "cuda") for _ in range(SAMPLES))


def measure_limits() -> Limits:
    """About a second on a large card; random data, since zeros draw less power."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    gbs = 2 * COPY_BYTES / _seconds(partial(torch.empty_like(source).copy_, source)) / 1e9
    tflops = {}
    for name, dtype in PRODUCTS.items():
        left, right = (torch.randn(CUBE, CUBE, device="cuda").to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        with _float32_precision("high" if name == "tf32" else "highest"):
            seconds = _seconds(partial(torch.mm, left, right, out=out))
        tflops[name] = 2 * CUBE**3 / seconds / 1e12
    torch.cuda.empty_cache()
    return Limits(tflops, gbs)
