"""swin: attention in windows of 7 x 7 tokens of an image, shifted by 3, with a bias (Liu et al., arXiv:2103.14030)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import flash_ext
from flash_ext.lab.lessons import GRID_Y, Launch, Lesson, Peer, Variant

WINDOW, SHIFT, HEAD_DIM = 7, 3, 32
TOKENS = WINDOW * WINDOW


def launch(threads: int) -> Callable[[Sequence[int]], Launch]:
    """A block for each window, head and image."""
    return lambda size: Launch((size[1] ** 2, size[0] * size[2]), (threads, 1), (size[1] * WINDOW, size[2]))


def inputs(size: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as a model's linear layers leave them, (images, side, side, heads, 32), and the bias of each pair."""
    images, windows, heads = size
    generator = torch.Generator().manual_seed(0)
    shape = (images, windows * WINDOW, windows * WINDOW, heads, HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator) for _ in "qkv")
    return q, k, v, torch.randn((heads, TOKENS, TOKENS), generator=generator)


def partition(x: Tensor) -> Tensor:
    """(images, side, side, heads, 32) -> (images * windows, heads, 49, 32), of the shifted image."""
    images, side, _, heads, columns = x.shape
    shifted = x.roll((-SHIFT, -SHIFT), (1, 2)).view(images, side // WINDOW, WINDOW, -1, WINDOW, heads, columns)
    return shifted.permute(0, 1, 3, 5, 2, 4, 6).reshape(-1, heads, TOKENS, columns)


def together(x: Tensor, like: Tensor) -> Tensor:
    """Back to the image."""
    images, side, _, heads, columns = like.shape
    windows = x.view(images, side // WINDOW, side // WINDOW, heads, WINDOW, WINDOW, columns)
    return windows.permute(0, 1, 4, 2, 5, 3, 6).reshape(like.shape).roll((SHIFT, SHIFT), (1, 2))


def mask(side: int) -> Tensor:
    """(windows, 49, 49): whether two tokens of a window were neighbours before the image went around."""
    at = torch.arange(side)
    region = (at >= side - WINDOW).long() + (at >= side - SHIFT)
    of_tokens = (3 * region[:, None] + region).view(1, side, side, 1, 1)
    count = side // WINDOW
    of_windows = of_tokens.view(count, WINDOW, count, WINDOW).permute(0, 2, 1, 3).reshape(-1, TOKENS)
    return of_windows[:, :, None] == of_windows[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """By flash_ext: windows are a batch, and the mask is added to the bias."""
    seen = mask(q.shape[1]).to(q.device)
    scores = bias.masked_fill(~seen[:, None], -torch.inf)
    scores = scores.repeat(q.shape[0], 1, 1, 1)
    return together(flash_ext.attention(*map(partition, (q, k, v)), bias=scores), q)


def refusal(size: Sequence[int]) -> str:
    if size[0] * size[2] <= GRID_Y:
        return ""
    return f"{size[0] * size[2]:,} heads of all images, at most {GRID_Y:,} are accepted."


OURS = Peer("flash_ext in float32", attention)


def variant(name: str, expect: str, threads: int) -> Variant:
    return Variant(name, expect, launch(threads), attention, peer=OURS)


def elements(size: Sequence[int]) -> int:
    return size[0] * (size[1] * WINDOW) ** 2 * size[2] * HEAD_DIM


LESSON = Lesson(
    name="swin",
    about="Many small windows: gathered where they lie, each in one block.",
    variants=(
        variant("row_each", "A query a thread: 32 sectors for what one warp could have in 4.", 64),
        variant("shared", "Keys and values once, by neighbours.", 64),
        variant("warp", "A query a warp: the bias by neighbours, too.", 128),
    ),
    sizes={"images": (1, 64), "windows": (2, 8), "heads": (2, 3)},
    of="(images x windows a side x heads)",
    inputs=inputs,
    elements=elements,
    moved=lambda size: 4 * (4 * elements(size) + size[2] * TOKENS**2),
    pictured=(("global", False), ("shared", False)),
    refusal=refusal,
    flops=lambda size: 4 * elements(size) * TOKENS,
)
