"""Promise: on the CPU the gradient of a bias that batches and heads share is the formula's for any number of threads.

Items of several threads add up parts of it apart (csrc/kernels/cpu/bias_route.h), and other tests run on one thread.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import rand
from torch import Tensor

import flash_ext

# Shape of the bias of a batch of 2 x 5 with 3 heads, key heads, options.
CASES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "all batches": ((1, 1, 3, 49, 49), 3, {}),
    "the outer batch": ((1, 5, 3, 49, 49), 3, {}),
    "the inner batch": ((2, 1, 3, 49, 49), 3, {}),
    "heads": ((2, 5, 1, 49, 49), 3, {}),
    "everything": ((1, 1, 1, 49, 49), 3, {}),
    "everything, one key head": ((1, 1, 1, 49, 49), 1, {}),
    "all batches, one key head": ((1, 1, 3, 49, 49), 1, {}),
    "rows": ((1, 1, 3, 1, 49), 3, {}),
    "nobody": ((2, 5, 3, 49, 49), 3, {}),
    "hidden tiles": ((1, 3, 300, 300), 3, {"causal": True, "window": (20, None)}),
}


def gradients(shape: tuple[int, ...], heads_k: int, options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    batch, length, truth = (2, 5) if len(shape) == 5 else (10,), shape[-1], dtype == torch.float64
    q, k, v, g = (rand(*batch, heads, length, 16) for heads in (3, heads_k, heads_k, 3))
    q, k, v, bias = (x.to(dtype).requires_grad_() for x in (q, k, v, rand(*shape)))
    if len(shape) == 5:  # the drop-in takes any number of dimensions
        call = F.scaled_dot_product_attention if truth else flash_ext.scaled_dot_product_attention
        out = call(q, k, v, attn_mask=bias, enable_gqa=heads_k == 1)
    else:
        out = (flash_ext.reference.attention if truth else flash_ext.attention)(q, k, v, bias=bias, **options)
    return list(torch.autograd.grad(out, (q, k, v, bias), g.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_threads(name: str, dtype: torch.dtype) -> None:
    expected = gradients(*CASES[name], torch.float64)
    bound = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4, 7):
            torch.set_num_threads(threads)
            for got, want in zip(gradients(*CASES[name], dtype), expected, strict=True):
                error = (got.double() - want).norm() / want.norm()
                assert error < bound, f"{threads} threads: {error:.2e}"
            first, second = (gradients(*CASES[name], dtype) for _ in range(2))
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), f"{threads} threads"
    finally:
        torch.set_num_threads(before)
