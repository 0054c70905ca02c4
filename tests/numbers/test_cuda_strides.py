"""Promise: on a GPU any strides give the bits of contiguous inputs, also where the last dimension is not contiguous."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import DTYPES, check, evaluate, leaf, make_inputs, name_of, rand, requested_bytes
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

B, H, L, S = 2, 3, 150, 203
OPTIONS = {"causal": True, "align": "bottom_right", "deterministic": True, "return_lse": True}


def transposed(t: Tensor) -> Tensor:
    """As q.transpose(-1, -2) leaves it: rows are contiguous, columns are not."""
    return t.mT.contiguous().mT


def every_other_column(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2]


def last_dim_outermost(t: Tensor) -> Tensor:
    return t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def sequence_first(t: Tensor) -> Tensor:
    """(B, S, H, D) in memory: the layout of a projection."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def odd_start(t: Tensor) -> Tensor:
    """One element past an aligned address."""
    memory = t.new_empty(t.numel() + 1)[1:]
    return memory.view(t.shape).copy_(t)


def odd_rows(t: Tensor) -> Tensor:
    """Rows of an odd number of elements: no row but the first is aligned to 16 bytes."""
    return torch.nn.functional.pad(t, (0, 1 if t.shape[-1] % 2 == 0 else 2))[..., : t.shape[-1]]


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    transposed, every_other_column, last_dim_outermost, sequence_first, odd_start, odd_rows,
]  # fmt: skip


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_layouts(
    dtype: torch.dtype, layout: Callable[[Tensor], Tensor], head_dim: int, device: str, backend: str
) -> None:
    """One tensor at a time, then all: results are those of contiguous inputs."""
    inputs = make_inputs((B, H, L, head_dim), (B, 1, S, head_dim), dtype=dtype, device=device)
    expected = evaluate(flash_ext.attention, inputs, OPTIONS)
    for names in (["query"], ["key"], ["value"], ["query", "key", "value"]):
        views = {name: layout(tensor) if name in names else tensor for name, tensor in inputs.items()}
        assert all(torch.equal(views[name], tensor) for name, tensor in inputs.items())
        got = evaluate(flash_ext.attention, views, OPTIONS)
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), (names, name)
            assert got[name].stride(-1) == 1, (names, name)


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
def test_transposed_inputs_obey_the_rule(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = make_inputs((B, H, L, 64), (B, H, S, 64), (B, H, S, 48), dtype=dtype, device=device)
    inputs = {name: transposed(tensor) for name, tensor in inputs.items()}
    inputs["bias"] = rand(1, H, S, L, dtype=dtype, device=device).mT
    inputs["mask"] = (torch.rand(S, L) > 0.2).to(device).mT
    check(flash_ext.attention, inputs, OPTIONS)


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
