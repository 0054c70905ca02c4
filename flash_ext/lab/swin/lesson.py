"""swin: attention in windows of 7 x 7 tokens of an image, shifted by 3, with a bias (Liu et al., arXiv:2103.14030)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import flash_ext
from flash_ext.lab.lessons import GRID_Y, Call, Launch, Lesson, Peer, Variant

WINDOW, SHIFT, HEAD_DIM = 7, 3, 32
TOKENS = WINDOW * WINDOW
CLOSE = 1e-4  # of the largest number: any order of sums in floats, but not tf32


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


def partition(x: Tensor, shift: int) -> Tensor:
    """(images, side, side, heads, 32) -> (images * windows, heads, 49, 32), of the shifted image."""
    images, side, _, heads, columns = x.shape
    shifted = x.roll((-shift, -shift), (1, 2)) if shift else x
    windows = shifted.view(images, side // WINDOW, WINDOW, -1, WINDOW, heads, columns)
    return windows.permute(0, 1, 3, 5, 2, 4, 6).reshape(-1, heads, TOKENS, columns)


def together(x: Tensor, like: Tensor, shift: int) -> Tensor:
    """Back to the image."""
    images, side, _, heads, columns = like.shape
    windows = x.view(images, side // WINDOW, side // WINDOW, heads, WINDOW, WINDOW, columns)
    image = windows.permute(0, 1, 4, 2, 5, 3, 6).reshape(like.shape)
    return image.roll((shift, shift), (1, 2)) if shift else image


def mask(side: int) -> Tensor:
    """(windows, 49, 49): whether two tokens of a window were neighbours before the image went around."""
    at = torch.arange(side)
    region = (at >= side - WINDOW).long() + (at >= side - SHIFT)
    of_tokens = (3 * region[:, None] + region).view(1, side, side, 1, 1)
    count = side // WINDOW
    of_windows = of_tokens.view(count, WINDOW, count, WINDOW).permute(0, 2, 1, 3).reshape(-1, TOKENS)
    return of_windows[:, :, None] == of_windows[:, None]


@functools.cache
def kept_mask(side: int, device: torch.device) -> Tensor:
    """As a model keeps it."""
    return mask(side).to(device)


def added(q: Tensor, bias: Tensor, shift: int) -> Tensor:
    """What is added to the scores of each window: the bias, and of a shifted image the mask."""
    if not shift:
        return bias[None]
    seen = kept_mask(q.shape[1], q.device)
    return bias.masked_fill(~seen[:, None], -torch.inf).repeat(q.shape[0], 1, 1, 1)


def eager(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
    """Softmax by hand: a matrix of scores for each window."""
    return torch.softmax(q @ k.transpose(-2, -1) * HEAD_DIM**-0.5 + scores, -1) @ v


def by_flash_ext(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
    return flash_ext.attention(q, k, v, bias=scores)


Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ATTENTION: dict[str, Attention] = {
    "eager": eager,
    "SDPA": torch.nn.functional.scaled_dot_product_attention,
    "flash_ext": by_flash_ext,
}


def whole(attend: Attention, shift: int) -> Attention:
    """Of images: copied to windows, which are a batch, and back."""

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        windows = [partition(x, shift) for x in (q, k, v)]
        return together(attend(*windows, added(q, bias, shift)), q, shift)

    return call


attention, side_by_side = whole(by_flash_ext, SHIFT), whole(by_flash_ext, 0)


def of_windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return partition(attention(q, k, v, bias), SHIFT)


def on_windows(attend: Attention) -> Callable[..., Callable[[], Tensor]]:
    """Attention alone: windows are copied, and bias and mask added, before."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Callable[[], Tensor]:
        windows = [partition(x, SHIFT) for x in (q, k, v)]
        return functools.partial(attend, *windows, added(q, bias, SHIFT))

    return prepare


def on_images(attend: Attention) -> Callable[..., Callable[[], Tensor]]:
    return lambda *inputs: functools.partial(whole(attend, SHIFT), *inputs)


def refusal(size: Sequence[int]) -> str:
    if size[0] * size[2] <= GRID_Y:
        return ""
    return f"{size[0] * size[2]:,} heads of all images, at most {GRID_Y:,} are accepted."


WHOLE = "flash_ext, whole"
SHIFTED, PLAIN = Peer(WHOLE, attention), Peer(f"{WHOLE}, no shift", side_by_side)


def variant(name: str, expect: str, threads: int, shift: int = SHIFT, file: str = "") -> Variant:
    defines = {"SHIFT": shift} if (file or name) == "row_each" else {}
    reference, peer = (attention, SHIFTED) if shift else (side_by_side, PLAIN)
    return Variant(name, expect, launch(threads), reference, file, defines, peer)


def beside() -> tuple[Call, ...]:
    """Each of attention on windows that are there, then with all that is around it."""
    alone = [Call(f"{name}, on windows", on_windows(attend), of_windows, CLOSE) for name, attend in ATTENTION.items()]
    return (
        *alone,
        *(Call(f"{name}, whole", on_images(attend), attention, CLOSE) for name, attend in ATTENTION.items()),
    )


def elements(size: Sequence[int]) -> int:
    return size[0] * (size[1] * WINDOW) ** 2 * size[2] * HEAD_DIM


LESSON = Lesson(
    name="swin",
    about="Many small windows: gathered where they lie, each in one block.",
    variants=(
        variant("partition", "Windows side by side, a query a thread: no shift, so no mask.", 64, 0, "row_each"),
        variant("row_each", "Shifted windows: 32 sectors for what one warp could have in 4, as before.", 64),
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
    beside=beside(),
    flops=lambda size: 4 * elements(size) * TOKENS,
)
