"""Promise: sizes that only the run knows, as of the rows that a bool mask keeps, are never guarded on.

One graph, exported or compiled, forward and backward, serves no row, one row and many.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import rand
from torch import Tensor, nn

import flash_ext

ROWS = 12
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def batch(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """Three unknown batch sizes, which turn out equal."""
    q, k, v = x[keep], y[keep], y[keep].sin()
    return flash_ext.attention(q, k, v, causal=True) + flash_ext.scaled_dot_product_attention(q, k, v)


def fused(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """Views of one projection, in another order than their strides'."""
    q, k, v = torch.cat([x, y, y.cos()], -1)[keep].transpose(1, 2).unflatten(-1, (3, 8)).unbind(-2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return flash_ext.attention(q, k, v) + flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True)


def lengths(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    """Unknown numbers of queries and of keys, grouped heads, lse."""
    q, k, v = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (x[keep], y[~keep], y[~keep].sin()))
    out, lse = flash_ext.attention(q, k[:, :2], v[:, :1], window=(9, None), align="bottom_right", return_lse=True)
    dropped = flash_ext.scaled_dot_product_attention(q, k[:, :2], v[:, :2], dropout_p=1.0, enable_gqa=True)
    return out + lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1) + dropped


def heads(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    q, k, v = x[keep].flatten(0, 1), y[keep].flatten(0, 1), y[keep].flatten(0, 1)
    grouped = flash_ext.attention(q.unsqueeze(0), k[:1].unsqueeze(0), v.unsqueeze(0))
    return flash_ext.scaled_dot_product_attention(q, k, v) + grouped[0]


def masks(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    q, k = x[keep], y[keep]
    bias = x[keep] @ y[keep].mT
    mask = bias[:, :1].detach() > -1
    slopes = y[keep][..., 0, 0].abs()
    out = flash_ext.attention(q, k, k, mask=mask, bias=bias[:, :, :1], alibi_slopes=slopes, softcap=3.0)
    return out + flash_ext.scaled_dot_product_attention(q, k, k, bias)


def enabled(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[keep], y[keep], y[keep])


CALLS = {call.__name__: call for call in (batch, fused, lengths, heads, masks, enabled)}


class Model(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
        return self.call(x, y, keep)


def inputs(device: str) -> tuple[Tensor, Tensor, Tensor]:
    keep = torch.arange(ROWS, device=device) % 3 > 0
    return rand(ROWS, 4, 5, 8, device=device), rand(ROWS, 4, 5, 8, device=device), keep


def kept(name: str, device: str) -> list[Tensor]:
    """All rows, some, one, none (which the grouped heads of ``heads`` cannot be)."""
    counts = [ROWS, 5, 1] if name == "heads" else [ROWS, 5, 1, 0]
    return [torch.arange(ROWS, device=device) < count for count in counts]


@pytest.fixture(autouse=True)
def _one_graph() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_export(name: str, strict: bool, device: str) -> None:
    x, y, keep = inputs(device)
    with flash_ext.enable():
        program = torch.export.export(Model(CALLS[name]), (x, y, keep), strict=strict).run_decompositions().module()
        for mask in kept(name, device):
            torch.testing.assert_close(program(x, y, mask), CALLS[name](x, y, mask))


# NOTE: Inductor's own code for several unknown sizes (their gradients by index, products of them) raises in torch 2.11.
@pytest.mark.parametrize(("name", "compiler"), [*((name, "aot_eager") for name in CALLS), ("fused", "inductor")])
def test_training(name: str, compiler: str, device: str) -> None:
    x, y, _ = inputs(device)
    with flash_ext.enable(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(CALLS[name], fullgraph=True, backend=compiler)
        for mask in kept(name, device):
            results = []
            for call in (compiled, CALLS[name]):
                leaves = [t.clone().requires_grad_() for t in (x, y)]
                out = call(*leaves, mask)
                results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
            torch.testing.assert_close(*results)


def test_what_must_be_equal_is_checked_when_it_is_known(device: str) -> None:
    """Key and value keep different numbers of rows: an error of the run, not a wrong result."""

    def call(x: Tensor, y: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1) for t in (x[:, 0], y[keep][:, 0], y[keep.roll(1) & keep][:, 0]))
        return flash_ext.scaled_dot_product_attention(q, k, v)

    x, y, keep = inputs(device)
    program = torch.export.export(Model(call), (x, y, keep), strict=False).module()
    with pytest.raises(RuntimeError):
        program(x, y, torch.arange(ROWS, device=device) < 5)
    everything = torch.ones_like(keep)
    torch.testing.assert_close(program(x, y, everything), call(x, y, everything))


def test_wrong_sizes_that_are_known_are_told_as_before(device: str) -> None:
    x, y, keep = inputs(device)
    with pytest.raises(RuntimeError, match=r"key of shape .* has head dimension 7, but query has 8"):
        torch.export.export(
            Model(lambda x, y, keep: flash_ext.attention(x[keep], y[keep][..., :7], y[keep])),
            (x, y, keep),
            strict=False,
        )
