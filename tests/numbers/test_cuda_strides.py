"""Promise: on a GPU broadcasts are not copied, and any strides of what is broadcast or of grad_out give the bits of
contiguous tensors."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, evaluate, leaf, make_inputs, name_of, rand, requested_bytes
from layouts import LAYOUTS

import flash_ext

pytestmark = pytest.mark.gpu

B, H, L, S = 2, 3, 150, 203
OPTIONS = {"causal": True, "align": "bottom_right", "deterministic": True, "return_lse": True}


def test_a_copy_keeps_broadcasts(device: str, backend: str) -> None:
    """Keys that are transposed and shared by all batches are copied once, not once for each."""
    batch, heads, length, width = 64, 4, 512, 64
    query = rand(batch, heads, 16, width, dtype=torch.bfloat16, device=device)
    shared = rand(1, heads, width, length, dtype=torch.bfloat16, device=device).mT
    key = shared.expand(batch, heads, length, width)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested_bytes("current")
        out = flash_ext.attention(query, key, key)
        peak = requested_bytes("peak") - before
    assert peak < 2 * shared.nbytes + out.nbytes + (1 << 20) < key.nbytes
    assert torch.equal(out, flash_ext.attention(query, key.contiguous(), key.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layouts_of_grad_out(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = [leaf(t) for t in make_inputs((B, H, L, 64), (B, H, S, 64), dtype=dtype, device=device).values()]
    out = flash_ext.attention(*inputs, deterministic=True)
    dense = rand(B, H, L, 64, dtype=dtype, device=device)
    one = torch.ones((), dtype=dtype, device=device).expand_as(out)  # as .sum() makes it
    row = rand(64, dtype=dtype, device=device).expand_as(out)
    for grad in (*(layout(dense) for layout in LAYOUTS), one, row):
        got = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        for a, b in zip(got, torch.autograd.grad(out, inputs, grad.contiguous(), retain_graph=True), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_expanded_inputs(dtype: torch.dtype, device: str, backend: str) -> None:
    """Stride 0 over the batch, heads, rows and columns; the gradient is that of the whole tensor."""
    whole = make_inputs((B, H, L, 64), (B, H, S, 64), dtype=dtype, device=device)
    for dims in ((0,), (1,), (2,), (3,), (0, 1, 2, 3)):
        views, copies = {}, {}
        for name, tensor in whole.items():
            shape = [1 if i in dims else size for i, size in enumerate(tensor.shape)]
            views[name] = rand(*shape, dtype=dtype, device=device).expand(tensor.shape)
            copies[name] = views[name].contiguous()
        got, expected = (evaluate(flash_ext.attention, tensors, OPTIONS) for tensors in (views, copies))
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), (dims, name)
