"""Promise: the exercises of docs/learn/index.md have these answers, each checked beside what it is about."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flash_ext

COURSE = Path(__file__).resolve().parents[2] / "docs/learn/index.md"


def test_every_exercise_has_its_answer_here() -> None:
    asked = re.findall(r"\(`(\w+)`\)", COURSE.read_text())
    assert len(asked) == 10
    assert all(callable(globals()[name]) for name in asked)


def test_every_step_has_something_to_run_what_to_see_and_an_exercise() -> None:
    _, *steps = re.split(r"^## (?=\d+\. )", COURSE.read_text(), flags=re.MULTILINE)
    assert [int(step.partition(".")[0]) for step in steps] == list(range(1, 11))
    for step in steps:
        title = step.partition("\n")[0]
        assert re.search(r"^```(bash|python)\n", step, re.MULTILINE), title
        assert step.count("**You should see**") == 1, title
        assert step.count("**Exercise.**") == 1, title


# 1


def traffic_of_naive(batch: int, heads: int, tokens: int, head_dim: int) -> int:
    """Of q k^T, the division, the mask, softmax and P v; the mask is a byte for each pair."""
    pairs, rows = 4 * batch * heads * tokens**2, 4 * batch * heads * tokens * head_dim
    product = 2 * rows + pairs
    return product + 2 * pairs + (2 * pairs + tokens**2) + 2 * pairs + (pairs + rows + rows)


def test_traffic() -> None:
    batch, heads, tokens, head_dim = 2, 8, 512, 64
    q, k, v = (torch.empty(batch, heads, tokens, head_dim) for _ in "qkv")
    hidden = torch.ones(tokens, tokens, dtype=torch.bool)
    scores = q @ k.mT
    masked = (divided := scores / 8).masked_fill(hidden, 0.0)
    p = torch.softmax(masked, -1)
    touched = [q, k, scores, scores, divided, divided, hidden, masked, masked, p, p, v, p @ v]
    assert traffic_of_naive(batch, heads, tokens, head_dim) == sum(t.numel() * t.element_size() for t in touched)
    needed = sum(t.numel() * t.element_size() for t in (q, k, v, q))
    assert traffic_of_naive(batch, heads, tokens, head_dim) > 16 * needed


# 2


def tokens_where_p_is_larger(head_dim: int) -> int:
    """L^2 > 4 L D + L."""
    return 4 * head_dim + 2


def test_tokens_where_p_is_larger() -> None:
    for head_dim in (32, 64, 128):
        tokens = tokens_where_p_is_larger(head_dim)
        assert tokens**2 > 4 * tokens * head_dim + tokens
        assert (tokens - 1) ** 2 <= 4 * (tokens - 1) * head_dim + tokens - 1


# 3


def online_attention(q: Tensor, k: Tensor, v: Tensor, tile: int = 48) -> Tensor:
    scale = q.shape[-1] ** -0.5
    row_max = q.new_full((*q.shape[:-1], 1), -torch.inf)
    row_sum, out = torch.zeros_like(row_max), torch.zeros_like(q)
    for keys, values in zip(k.split(tile, -2), v.split(tile, -2), strict=True):
        scores = scale * q @ keys.mT
        new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
        factor, p = torch.exp(row_max - new_max), torch.exp(scores - new_max)
        row_sum, out = row_sum * factor + p.sum(-1, keepdim=True), out * factor + p @ values
        row_max = new_max
    return out / row_sum


def test_online_attention() -> None:
    q, k, v = (torch.randn(2, 3, 200, 16, dtype=torch.float64) for _ in "qkv")
    torch.testing.assert_close(online_attention(q, 30 * k, v), flash_ext.attention(q, 30 * k, v))


# 4


def sectors_of_a_stride(stride: int) -> int:
    """Sectors of 32 bytes that a warp touches which reads a float every `stride` floats."""
    return len({4 * stride * lane // 32 for lane in range(32)})


def test_sectors() -> None:
    assert [sectors_of_a_stride(stride) for stride in (1, 2, 3, 8, 32)] == [4, 8, 12, 32, 32]


# 5


def swizzled_chunk(row: int, chunk: int) -> int:
    return chunk ^ row % 8


def test_swizzled_chunk() -> None:
    for chunk in range(8):
        banks = [(128 * row + 16 * swizzled_chunk(row, chunk)) // 4 % 32 for row in range(8)]
        assert len({bank + i for bank in banks for i in range(4)}) == 32  # 8 rows of 4 banks each
        assert len({(128 * row + 16 * chunk) // 4 % 32 for row in range(8)}) == 1  # as they lie: all the same
    for row in range(8):
        assert sorted(swizzled_chunk(row, chunk) for chunk in range(8)) == list(range(8))


# 6


def holder_of(row: int, col: int) -> tuple[int, int]:
    """Lane and number of its four: c0 and c1 are of row g, c2 and c3 of row g + 8."""
    return row % 8 * 4 + col // 2, row // 8 * 2 + col % 2


def test_holder() -> None:
    assert holder_of(13, 6) == (23, 2)
    held = {
        holder_of(g + 8 * half, 2 * t + i): (4 * g + t, 2 * half + i)
        for g in range(8) for t in range(4) for half in range(2) for i in range(2)
    }  # fmt: skip
    assert len(held) == 128
    assert all(place == expected for place, expected in held.items())


# 7


def delta_without_p(out: Tensor, d_out: Tensor) -> Tensor:
    return (out * d_out).sum(-1)


def test_delta() -> None:
    q, k, v, d_out = (torch.randn(2, 30, 8, dtype=torch.float64) for _ in range(4))
    p = torch.softmax(q @ k.mT, -1)
    torch.testing.assert_close(delta_without_p(p @ v, d_out), (p * (d_out @ v.mT)).sum(-1))


# 8


def where_a_sum_stops(x: float, mantissa_bits: int) -> float:
    """At the power of two from which on x is at most half the distance of two neighbours."""
    return 2.0 ** math.ceil(math.log2(2 * x * 2**mantissa_bits))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_where_a_sum_stops(dtype: torch.dtype, bits: int) -> None:
    x = torch.tensor(0.01, dtype=dtype)
    total = torch.zeros((), dtype=dtype)
    for _ in range(5000):
        total = total + x
    assert float(total) == where_a_sum_stops(float(x), bits)


# 9


def bytes_of_attention(layers: int, batch: int, tokens: int, heads: int, head_dim: int) -> tuple[int, int]:
    """Kept for backward: naive (q, k, v, P in fp32 and in bf16), and with flash_ext (q, k, v, out, lse)."""
    rows = batch * heads * tokens
    naive = 3 * 2 * rows * head_dim + (4 + 2) * rows * tokens
    return layers * naive, layers * (4 * 2 * rows * head_dim + 4 * rows)


def test_bytes_of_attention() -> None:
    """Of one layer as docs/learn/profiling.md has measured them: 256 and 128 MiB of P; 48 MiB of the rest and lse."""
    naive, ours = bytes_of_attention(1, 4, 1024, 16, 64)
    assert naive == (256 + 128 + 24) * 2**20
    assert ours == 32 * 2**20 + 256 * 2**10


def test_what_the_snapshots_show() -> None:
    """The peaks of step 9, and the line that holds P."""
    step = COURSE.read_text().partition("\n## 9. ")[2].partition("\n## 10. ")[0]
    peaks = []
    for name in re.findall(r"^python -m flash_ext.profiling memory (\S+)$", step, re.MULTILINE):
        shown = (COURSE.parents[2] / name).with_suffix(".txt").read_text()
        peaks.append(re.findall(r"peak (\S+ GiB)", shown)[0])
        held = re.findall(r"^ +(\S+ GiB) +(\d+)  \S+ naive_attention", shown, re.MULTILINE)
        assert all(f"{size} in {blocks} blocks" in step for size, blocks in held) and bool(held) == ("naive" in name)
    assert peaks == re.findall(r"peak (?:of|is) (\S+ GiB)", step) and len(peaks) == 2


# 10


def bytes_sent(parameters: int, ranks: int) -> dict[str, int]:
    """A reduce-scatter and an all-gather each send (r - 1) / r of what all ranks have together, an all-reduce is both.

    ZeRO-1 gathers parameters behind it, FSDP gathers them twice and scatters gradients.
    """
    part = 4 * parameters * (ranks - 1) // ranks
    return {"ddp": 2 * part, "zero1": 3 * part, "fsdp": 3 * part}


def test_bytes_sent() -> None:
    assert bytes_sent(1000, 2) == {"ddp": 4000, "zero1": 6000, "fsdp": 6000}
