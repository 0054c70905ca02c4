"""Promise: windows are those of the paper: PyTorch gives the same by a mask, and a token sees only its neighbours."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numpy")

from flash_ext.lab.swin import lesson as swin

SHIFTS = pytest.mark.parametrize("shift", [0, 3])


@pytest.mark.parametrize("size", [(1, 1, 1), (2, 3, 2)])
def test_the_reference_is_that_of_pytorch(size: tuple[int, int, int]) -> None:
    q, k, v, bias = swin.inputs(size)
    seen = swin.mask(q.shape[1]).repeat(size[0], 1, 1)[:, None]
    windows = [swin.partition(x, 3) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*windows, bias.masked_fill(~seen, -torch.inf))
    torch.testing.assert_close(swin.attention(q, k, v, bias), swin.together(out, q, 3))


def test_without_a_shift_a_window_is_a_corner_of_the_image() -> None:
    """And all of its tokens see each other."""
    q, k, v, bias = swin.inputs((1, 2, 2))
    corner = [x[0, :7, 7:].permute(2, 0, 1, 3).reshape(2, 49, 32) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*corner, bias).view(2, 7, 7, 32).permute(1, 2, 0, 3)
    torch.testing.assert_close(swin.side_by_side(q, k, v, bias)[0, :7, 7:], expected)


@SHIFTS
def test_together_undoes_partition(shift: int) -> None:
    x = swin.inputs((2, 2, 3))[0]
    assert torch.equal(swin.together(swin.partition(x, shift), x, shift), x)


def test_beside_the_kernels_is_what_a_model_calls() -> None:
    """Each of attention alone, then the whole, of which flash_ext's is the one that kernels are compared with."""
    one = swin.LESSON
    names = [f"{name}, {part}" for part in ("on windows", "whole") for name in ("eager", "SDPA", "flash_ext")]
    assert [call.name for call in one.beside] == names and one.peer.name == names[-1]
    assert [variant.peer.name == names[-1] for variant in one.variants] == [False, True, True, True]


def test_only_neighbours_are_seen() -> None:
    """In an image of 14 x 14: of each window, the pairs of tokens that lie at most 6 apart in both directions."""
    side = 14
    at = torch.arange(side * side, dtype=torch.float32)
    y, x = (swin.partition(c.view(1, side, side, 1, 1), 3).view(4, 49) for c in (at // side, at % side))
    far = ((y[:, :, None] - y[:, None]).abs() > 6) | ((x[:, :, None] - x[:, None]).abs() > 6)
    assert torch.equal(swin.mask(side), ~far)


def test_too_many_heads_are_refused() -> None:
    assert swin.refusal((1000, 1, 66)) == "66,000 heads of all images, at most 65,535 are accepted."
