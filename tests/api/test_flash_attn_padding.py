"""Promise: `flash_ext.flash_attn.bert_padding` packs and pads what masks say, and `layers.rotary` turns rows by their
positions; both with gradients."""

from __future__ import annotations

import pytest
import torch
from caches import ints, turned
from helpers import rand
from torch import Tensor

from flash_ext.flash_attn import bert_padding
from flash_ext.flash_attn.layers import rotary


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_padding_and_back(kind: torch.dtype, device: str) -> None:
    lengths, unused = torch.tensor([3, 0, 5], device=device), torch.tensor([1, 2, 0], device=device)
    places = torch.arange(6, device=device)
    mask = places < lengths[:, None]
    room = (places < (lengths + unused)[:, None]) & ~mask
    x = rand(3, 6, 2, 4, dtype=torch.float64, device=device).requires_grad_()
    rows, indices, cu, longest, used = bert_padding.unpad_input(x, mask.to(kind))
    assert torch.equal(rows, x[mask]) and torch.equal(indices, mask.flatten().nonzero()[:, 0])
    assert cu.tolist() == [0, 3, 3, 8] and cu.dtype == torch.int32 and longest == 5 and used.tolist() == [3, 0, 5]
    back = bert_padding.pad_input(rows, indices, 3, 6)
    assert torch.equal(back, x * mask[..., None, None])
    cotangent = torch.randn_like(back)
    (grad,) = torch.autograd.grad(back, x, cotangent)
    assert torch.equal(grad, cotangent * mask[..., None, None])
    rows, _, cu, longest, used = bert_padding.unpad_input(x, mask.to(kind), room.to(kind))
    assert torch.equal(rows, x[mask | room]) and cu.tolist() == [0, 4, 6, 11]
    assert longest == 5 and used.tolist() == [3, 0, 5]


def test_several_sequences_in_a_row(device: str) -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0] * 6, [6, 0, 0, 0, 0, 0]], device=device)
    x = rand(4, 6, 5, device=device)
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat((x[0, :5], x[1, :1], x[3]))) and cu.tolist() == [0, 2, 5, 6, 12] and longest == 6
    assert torch.equal(bert_padding.pad_input(rows, indices, 4, 6)[0, :5], x[0, :5])


def test_first_axis(device: str) -> None:
    x = rand(5, 3, dtype=torch.float64, device=device).requires_grad_()
    at = torch.tensor([4, 1], device=device)
    rows, rest = bert_padding.index_first_axis_residual(x, at)
    assert torch.equal(rows, x[at]) and torch.equal(rest, x)
    (grad,) = torch.autograd.grad((rows, rest), x, (torch.full_like(rows, 2.0), torch.ones_like(rest)))
    assert grad[:, 0].tolist() == [1.0, 3.0, 1.0, 1.0, 3.0]
    put = bert_padding.index_put_first_axis(bert_padding.index_first_axis(x, at), at, 5)
    assert torch.equal(put[at], x[at]) and not put[[0, 2, 3]].any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool, device: str) -> None:
    angles = torch.rand(20, 4, dtype=torch.float64, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    x = rand(2, 5, 3, 12, dtype=torch.float64, device=device).requires_grad_()

    def truth(rows: Tensor, at: range) -> Tensor:
        return turned(rows.detach().cpu(), cos.cpu(), sin.cpu(), list(at), interleaved)

    for offsets, first in ((0, (0, 0)), (7, (7, 7)), (torch.tensor([3, 11], device=device), (3, 11))):
        got = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
        expected = torch.stack([truth(x[b], range(first[b], first[b] + 5)) for b in range(2)])
        torch.testing.assert_close(got.cpu(), expected)
    plain = rotary.apply_rotary_emb_torch(x, cos[:5], sin[:5], interleaved)
    torch.testing.assert_close(plain, rotary.apply_rotary_emb_func(x, cos, sin, interleaved))
    rows, cu = x.detach().flatten(0, 1).clone(), ints([0, 4, 4, 10], device)
    expected = torch.cat((truth(rows[:4], range(2, 6)), truth(rows[4:], range(1, 7))))
    offsets = torch.tensor([2, 5, 1], device=device)
    got = rotary.apply_rotary_emb(rows, cos, sin, interleaved, True, offsets, cu_seqlens=cu, max_seqlen=6)
    assert got is rows
    torch.testing.assert_close(rows.cpu(), expected)
    assert torch.autograd.gradcheck(lambda x: rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=7), x)
