"""Tiles that a mask hides are left out, and no bit of a result shows it.

A call of at least 2^20 pairs a multiprocessor looks for the ranges of its mask (csrc/core/mask_ranges.h). Smaller calls
of the same batch elements do not, and are the same kernels with the same tiles.
"""

import pytest
import torch

from flash_ext import attention, use_backend

pytestmark = pytest.mark.gpu

LENGTH, HEADS, KEY_HEADS = 1024, 16, 4
NAMES = ["causal", "documents", "padding", "windows of heads", "rows", "transposed", "padding and documents", "random"]


def masks(batch: int, device: str) -> dict[str, torch.Tensor]:
    """Of (..., LENGTH, LENGTH), each broadcast differently."""
    at = torch.arange(LENGTH, device=device)
    query, key = at[:, None], at[None]
    lengths = torch.randint(0, LENGTH, (batch, 1, 1, 1), device=device)
    heads = torch.randint(1, 500, (HEADS, 1, 1), device=device)
    return {
        "causal": query >= key,
        "documents": query // 300 == key // 300,
        "padding": (key < lengths).contiguous(),
        "windows of heads": (query - key).abs() < heads,
        "rows": (at < lengths).reshape(batch, 1, LENGTH, 1).expand(batch, 1, LENGTH, LENGTH),
        "transposed": (query // 200 >= key // 200).T,
        "padding and documents": (key >= lengths) & (query // 400 == key // 400),
        "random": torch.rand(batch, HEADS, LENGTH, LENGTH, device=device) < 0.5,
    }


def part(mask: torch.Tensor, elements: slice) -> torch.Tensor:
    return mask[elements] if mask.dim() == 4 and mask.shape[0] > 1 else mask


@pytest.mark.parametrize("served_by", ["sm80", pytest.param("sm90", marks=pytest.mark.sm90)])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("name", NAMES)
def test_hidden_tiles_change_no_bit(name: str, head_dim: int, served_by: str, device: str) -> None:
    batch = torch.cuda.get_device_properties(0).multi_processor_count // HEADS + 1
    torch.manual_seed(0)
    mask = masks(batch, device)[name]
    new = lambda heads: torch.randn(batch, heads, LENGTH, head_dim, device=device, dtype=torch.bfloat16)  # noqa: E731
    inputs = [new(HEADS), new(KEY_HEADS), new(KEY_HEADS)]
    grad = new(HEADS)

    def call(elements: slice) -> tuple[torch.Tensor, ...]:
        q, k, v = (x[elements].clone().requires_grad_() for x in inputs)
        with use_backend(served_by):
            out, lse = attention(q, k, v, mask=part(mask, elements), return_lse=True)
            return (out, lse, *torch.autograd.grad(out, (q, k, v), grad[elements]))

    whole = call(slice(None))
    half = batch // 2
    parts = [torch.cat(x) for x in zip(call(slice(0, half)), call(slice(half, batch)), strict=True)]
    for what, wanted, seen in zip(("out", "lse", "dq", "dk", "dv"), parts, whole, strict=True):
        if what == "dq":  # added up in any order
            torch.testing.assert_close(seen, wanted, rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(seen, wanted), what


def test_dropout_and_bias_beside_hidden_tiles(device: str) -> None:
    """Bits of dropout and elements of a bias belong to positions, whichever tiles are left out."""
    batch = torch.cuda.get_device_properties(0).multi_processor_count // HEADS + 1
    at = torch.arange(LENGTH, device=device)
    visible = (at[:, None] // 300 == at[None] // 300) & (at[:, None] >= at[None])
    q, k, v, grad = (torch.randn(batch, HEADS, LENGTH, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=device, dtype=torch.bfloat16)
    results = []
    for options in (
        {"mask": visible, "bias": bias.requires_grad_()},
        {"bias": bias.detach().masked_fill(~visible, float("-inf")).requires_grad_()},
    ):
        torch.manual_seed(1)
        out = attention(q, k, v, dropout_p=0.3, **options)
        results.append((out, *torch.autograd.grad(out, (q, k, v, options["bias"]), grad)))
    for seen, wanted in zip(*results, strict=True):
        torch.testing.assert_close(seen, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("served_by", ["sm80", pytest.param("sm90", marks=pytest.mark.sm90)])
def test_batch_invariant_shows_no_tile(served_by: str, device: str) -> None:
    """What is no number tells whether a tile was left out: an element has the same bits alone and in a large batch."""
    batch = torch.cuda.get_device_properties(0).multi_processor_count // HEADS + 1
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, LENGTH, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    v[:, :, 900] = torch.nan
    mask = (torch.arange(LENGTH, device=device) < 512).expand(1, 1, LENGTH, LENGTH)
    with use_backend(served_by):
        whole = attention(q, k, v, mask=mask, batch_invariant=True)
        alone = attention(q[:1], k[:1], v[:1], mask=mask, batch_invariant=True)
    assert torch.equal(whole[:1].isnan(), alone.isnan())
    assert torch.equal(whole[:1].nan_to_num(), alone.nan_to_num())
