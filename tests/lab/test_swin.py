"""Promise: windows are those of the paper: PyTorch gives the same by a mask, and a token sees only its neighbours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numpy")

from flash_ext.lab.swin import lesson as swin


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 2)])
def test_the_reference_is_that_of_pytorch(size: tuple[int, int, int]) -> None:
    q, k, v, bias = swin.inputs(size)
    seen = swin.mask(q.shape[1]).repeat(size[0], 1, 1)[:, None]
    windows = F.scaled_dot_product_attention(*map(swin.partition, (q, k, v)), bias.masked_fill(~seen, -torch.inf))
    torch.testing.assert_close(swin.attention(q, k, v, bias), swin.together(windows, q))


def test_together_undoes_partition() -> None:
    x = swin.inputs((2, 2, 3))[0]
    assert torch.equal(swin.together(swin.partition(x), x), x)


def test_only_neighbours_are_seen() -> None:
    """In an image of 14 x 14: of each window, the pairs of tokens that lie at most 6 apart in both directions."""
    side = 14
    at = torch.arange(side * side, dtype=torch.float32)
    y, x = (swin.partition(c.view(1, side, side, 1, 1)).view(4, 49) for c in (at // side, at % side))
    far = ((y[:, :, None] - y[:, None]).abs() > 6) | ((x[:, :, None] - x[:, None]).abs() > 6)
    assert torch.equal(swin.mask(side), ~far)


def test_too_many_heads_are_refused() -> None:
    assert swin.refusal((1000, 1, 66)) == "66,000 heads of all images, at most 65,535 are accepted."
