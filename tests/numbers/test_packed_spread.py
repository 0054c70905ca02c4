"""Promise: lengths of one packed call may differ 8000-fold: 4,095 sequences of 8 tokens and one of 65,536 have the
results and gradients that they have in calls without the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_ext import attention, attention_varlen, use_backend

pytestmark = pytest.mark.gpu

SHORT, COUNT, LONG, HEADS, KEY_HEADS = 8, 4095, 65_536, 4, 2


@pytest.mark.parametrize("served_by", ["sm80", pytest.param("sm90", marks=pytest.mark.sm90)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("long_first", [False, True])
def test_one_among_thousands(long_first: bool, head_dim: int, served_by: str, device: str) -> None:
    rows = SHORT * COUNT + LONG
    long, short = (slice(0, LONG), slice(LONG, rows)) if long_first else (slice(SHORT * COUNT, rows), slice(0, -LONG))
    lengths = [LONG] + [SHORT] * COUNT if long_first else [SHORT] * COUNT + [LONG]
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    torch.manual_seed(0)
    q, grad = (torch.randn(rows, HEADS, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(rows, KEY_HEADS, head_dim, device=device, dtype=torch.bfloat16) for _ in range(2))

    def dense(part: slice, batch: int) -> list[Tensor]:
        """The part's sequences as a batch of equally long ones, in rows again."""
        inputs = [x[part].unflatten(0, (batch, -1)).transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, causal=True)
        grads = torch.autograd.grad(out, inputs, grad[part].unflatten(0, (batch, -1)).transpose(1, 2))
        return [x.transpose(1, 2).flatten(0, 1) for x in (out, *grads)]

    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with use_backend(served_by):
        out = attention_varlen(*inputs, cu, cu, max_q=LONG, max_k=LONG, causal=True)
        packed = (out, *torch.autograd.grad(out, inputs, grad))
    for part, batch in ((short, COUNT), (long, 1)):
        for what, seen, wanted in zip(("out", "dq", "dk", "dv"), packed, dense(part, batch), strict=True):
            error = (seen[part].float() - wanted.float()).norm() / wanted.float().norm()
            assert error < 1e-2, f"{what}: {error}"
            assert seen[part].isfinite().all()
