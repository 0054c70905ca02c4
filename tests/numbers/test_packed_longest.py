"""Promise: max_q and max_k may be more than any sequence, and than all rows of the tensors; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from helpers import name_of
from packed import Heads, Side, packed
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("more", [(0, 0), (1, 0), (0, 3), (40, 200)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [((1,), (200,)), ((5, 0, 3), (7, 4, 90))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=name_of)
def test_bias(
    dtype: torch.dtype,
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    causal: bool,
    more: tuple[int, int],
    device: str,
    backend: str,
) -> None:
    """Every gradient, that of the bias with 0 where there is no row."""
    sides = [Side(of, before=2) for of in lengths]
    call = packed(*sides, Heads(2, 2, 2), dtype=dtype, device=device, causal=causal, deterministic=True)
    batch, heads, rows, keys = call.scores
    bias = torch.randn(batch, heads, rows, keys, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def gradients(more_q: int, more_k: int) -> tuple[Tensor, ...]:
        wide = torch.full((batch, heads, rows + more_q, keys + more_k), torch.nan, dtype=dtype, device=device)
        wide[:, :, :rows, :keys] = bias
        wanted = [x.detach().requires_grad_() for x in (*(call.inputs[n] for n in ("query", "key", "value")), wide)]
        query, key, value, of_bias = wanted
        out = call.call(query=query, key=key, value=value, bias=of_bias, max_q=rows + more_q, max_k=keys + more_k)
        return torch.autograd.grad(out, wanted, torch.ones_like(out))

    *expected, expected_bias = gradients(0, 0)
    *got, got_bias = gradients(*more)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(got_bias[:, :, :rows, :keys], expected_bias, atol=1e-2, rtol=1e-2)
    assert got_bias[:, :, rows:].eq(0).all()
    assert got_bias[..., keys:].eq(0).all()
