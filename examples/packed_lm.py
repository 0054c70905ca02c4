#!/usr/bin/env python3
"""Trains a small language model on documents of very different length, packed without padding and then padded.

    python examples/packed_lm.py            on a CPU a few seconds; on a GPU a larger model in bf16
    python examples/packed_lm.py --steps 50 --documents 64

Packed, a batch is one row of tokens, and `flash_ext.attention_varlen` keeps each document to itself: its positions
start at 0, and its last token predicts nothing. Padded, the same documents are rows of the longest one's length. Both
begin with the same weights and see the same documents, so their losses are equal but for rounding; the program stops
with an error where they are not.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_ext
from flash_ext import profiling

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # nats a byte between the two losses of a step
SIZES = {"cpu": (64, 2, 2), "cuda": (1024, 8, 8)}  # width, layers, heads
RATES = {"cpu": 1e-3, "cuda": 1e-4}  # of learning; the larger model diverges at 1e-3
LONGEST = {"cpu": 512, "cuda": 4096}  # tokens of a document
NOTHING = -100  # a target that the loss leaves out


@dataclass
class Batch:
    """Tokens, targets and positions, int64: (rows,) packed, (documents, longest) padded; `real` targets count."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    real: int
    longest: int
    cu_seqlens: Tensor | None = None  # (documents + 1,) int32 of packed ones


class Attention(nn.Module):
    """Causal self-attention of packed tokens (rows, width), or of padded ones (documents, longest, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # (..., heads, head dim)
        if batch.cu_seqlens is not None:
            y = flash_ext.attention_varlen(query, key, value, batch.cu_seqlens, max_q=batch.longest, causal=True)
        else:  # a causal query sees no padding, which lies behind it
            rows = (t.transpose(1, 2) for t in (query, key, value))
            y = flash_ext.attention(*rows, causal=True).transpose(1, 2)
        return self.out(y.flatten(-2))


class Model(nn.Module):
    """A Transformer over bytes; nothing but attention knows how documents lie in the batch."""

    def __init__(self, width: int, layers: int, heads: int, longest: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(longest, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, 256)

    def forward(self, batch: Batch) -> Tensor:
        x = self.bytes(batch.tokens) + self.places(batch.positions)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * i](x), batch)
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(x)


def documents(count: int, longest: int, seed: int) -> list[Tensor]:
    """Pieces of this repository's pages, (length,) int64 each; lengths are log-normal, from 8 to `longest` bytes."""
    root = Path(__file__).resolve().parent.parent
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    text = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    draw = torch.Generator().manual_seed(seed)
    spread = torch.randn(count, generator=draw) * math.log(longest / 8) / 4 + math.log(8 * longest) / 2
    lengths = spread.exp().long().clamp(8, min(longest, len(text) - 1)).tolist()
    starts = [int(torch.randint(len(text) - n, (1,), generator=draw)) for n in lengths]
    return [text[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def batch_of(texts: list[Tensor], packed: bool, device: str) -> Batch:
    """The documents behind each other, or each in a row of its own with zeros behind it."""
    longest, real = max(map(len, texts)), sum(len(text) - 1 for text in texts)
    targets = [F.pad(text[1:], (0, 1), value=NOTHING) for text in texts]  # no document predicts the next one
    if packed:
        positions = [torch.arange(len(text)) for text in texts]
        rows = (torch.cat(parts).to(device) for parts in (texts, targets, positions))
        ends = torch.tensor([0, *map(len, texts)]).cumsum(0).to(device, torch.int32)
        return Batch(*rows, real, longest, ends)
    tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    targets = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=NOTHING)
    return Batch(tokens.to(device), targets.to(device), torch.arange(longest, device=device), real, longest)


def train(packed: bool, args: argparse.Namespace) -> list[float]:
    """The loss of every step, nats a byte; prints throughput, and on a GPU the peak of memory."""
    torch.manual_seed(args.seed)
    model = Model(*SIZES[args.device], LONGEST[args.device]).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATES[args.device])
    on_gpu, losses, bytes_seen, start = args.device == "cuda", [], 0, 0.0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for step in range(args.steps + 1):  # the first one, which warms up, is not timed
        batch = batch_of(documents(args.documents, LONGEST[args.device], args.seed + step), packed, args.device)
        with profiling.range("packed step" if packed else "padded step"):
            with torch.autocast(args.device, args.dtype, enabled=args.dtype != torch.float32):
                logits = model(batch)
            total = F.cross_entropy(
                logits.float().flatten(0, -2), batch.targets.flatten(), ignore_index=NOTHING, reduction="sum"
            )
            loss = total / batch.real
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        start, bytes_seen = (start, bytes_seen + batch.real) if step else (time.perf_counter(), 0)
    rate = bytes_seen / (time.perf_counter() - start)
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB" if on_gpu else ""
    print(f"{'packed' if packed else 'padded'}: {rate:,.0f} tokens/s, loss {losses[0]:.3f} to {losses[-1]:.3f}{peak}")
    return losses


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--steps", type=int, default=20, help="timed steps, at least 1")
    parser.add_argument("--documents", type=int, help="documents of a step (default: 16, on a GPU 32)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    args.documents = args.documents or (32 if args.device == "cuda" else 16)
    packed, padded = train(True, args), train(False, args)
    apart = max(abs(a - b) for a, b in zip(packed, padded, strict=True))
    print(f"largest difference of the losses of a step: {apart:.1e}")
    if not apart <= TOLERANCE[args.dtype]:
        sys.exit(f"error: the losses differ by more than {TOLERANCE[args.dtype]}")


if __name__ == "__main__":
    main()
