#!/usr/bin/env python3
"""Generates with a paged cache, and then with a dense one: requests that come and go, and a prefix that all share.

    python examples/generate.py             on a CPU a few seconds; on a GPU a larger model in bf16
    python examples/generate.py --requests 100 --batch 16

Up to --batch requests run at a time; where one has ended, the next takes its place. `flash_ext.attention_with_cache`
turns queries and keys, appends the new rows to the cache and attends to them. A paged cache has rows for what there is,
and the pages of the prefix are every request's. A dense one has rows for the longest request, in each of its slots.
The model has random weights, and takes the likeliest byte each time: both caches give the same text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import flash_ext
from flash_ext import profiling

SIZES = {"cpu": (64, 2, 4, 2), "cuda": (1024, 8, 16, 4)}  # width, layers, heads, heads of keys
LENGTHS = {"cpu": (128, 48, 48), "cuda": (1024, 512, 256)}  # bytes of the prefix, at most of a prompt, of an answer
PAGE = 16  # rows


@dataclass
class Request:
    prompt: list[int]  # behind the prefix
    count: int  # bytes to generate
    answer: list[int] = field(default_factory=list)
    rows: int = 0  # in the cache
    slot: int = 0  # of a dense cache
    pages: list[int] = field(default_factory=list)


class Dense:
    """`slots` of `rows` each: key and value (slots, rows, heads, head dim) of every layer."""

    def __init__(self, shape: tuple[int, int, int], slots: int, rows: int, like: dict) -> None:
        layers, heads, dim = shape
        self.caches = [[torch.zeros(slots, rows, heads, dim, **like) for _ in "kv"] for _ in range(layers)]
        self.free, self.device = list(range(slots)), like["device"]
        self.most = slots * rows  # rows that take memory

    def open(self, request: Request) -> None:
        request.slot = self.free.pop()

    def grow(self, request: Request, rows: int) -> None:
        pass

    def close(self, request: Request) -> None:
        self.free.append(request.slot)

    def places(self, requests: list[Request]) -> dict[str, Tensor]:
        """Arguments of attention_with_cache that say where each request's rows lie."""
        slots = [request.slot for request in requests]
        return {"cache_batch_index": torch.tensor(slots, dtype=torch.int32, device=self.device)}


class Paged(Dense):
    """A pool of pages, (pages, PAGE, heads, head dim). Those of the prefix are the first of every request, and stay."""

    def __init__(self, shape: tuple[int, int, int], pages: int, like: dict) -> None:
        super().__init__(shape, pages, PAGE, like)
        self.prefix: list[int] = []
        self.most = 0

    def open(self, request: Request) -> None:
        request.pages, request.rows = list(self.prefix), PAGE * len(self.prefix)

    def grow(self, request: Request, rows: int) -> None:
        while PAGE * len(request.pages) < rows:
            request.pages.append(self.free.pop())
        self.most = max(self.most, PAGE * (len(self.caches[0][0]) - len(self.free)))

    def close(self, request: Request) -> None:
        self.free += request.pages[len(self.prefix) :]

    def places(self, requests: list[Request]) -> dict[str, Tensor]:
        longest = max(len(request.pages) for request in requests)
        table = [request.pages + [-1] * (longest - len(request.pages)) for request in requests]
        return {"block_table": torch.tensor(table, dtype=torch.int32, device=self.device)}


class Model(nn.Module):
    """A Transformer over bytes, with rotary positions and grouped heads."""

    def __init__(self, width: int, layers: int, heads: int, heads_k: int, longest: int) -> None:
        super().__init__()
        self.heads, self.heads_k, self.dim = heads, heads_k, width // heads
        self.bytes, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(width, width + 2 * heads_k * self.dim) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        angles = torch.arange(longest)[:, None] * 10000 ** (-torch.arange(0, self.dim, 2) / self.dim)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, cache: Dense, requests: list[Request]) -> Tensor:
        """The logits behind the last of tokens (B, n), whose rows are appended to the cache."""
        count, device = tokens.shape[1], tokens.device
        for request in requests:
            cache.grow(request, request.rows + count)
        rows = torch.tensor([request.rows for request in requests], dtype=torch.int32, device=device)
        where = cache.places(requests)
        x = self.bytes(tokens)
        for i, (key_cache, value_cache) in enumerate(cache.caches):
            parts = self.qkv[i](self.norms[2 * i](x)).unflatten(-1, (-1, self.dim))
            query, key, value = parts.split((self.heads, self.heads_k, self.heads_k), 2)
            y = flash_ext.attention_with_cache(
                query, key_cache, value_cache, key=key, value=value, cache_seqlens=rows, rotary_cos=self.cos,
                rotary_sin=self.sin, **where,
            )  # fmt: skip
            x = x + self.out[i](y.flatten(-2))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        for request in requests:
            request.rows += count
        return self.head(x[:, -1])


def serve(model: Model, cache: Dense, requests: list[Request], prefix: list[int], batch: int) -> None:
    """Answers every request, up to `batch` at a time."""
    device = model.cos.device
    waiting, running = deque(requests), []

    def step(tokens: list[list[int]], those: list[Request]) -> None:
        logits = model(torch.tensor(tokens, device=device), cache, those)
        for request, byte in zip(those, logits.argmax(-1).tolist(), strict=True):
            request.answer.append(byte)

    while waiting or running:
        while waiting and len(running) < batch:
            request = waiting.popleft()
            cache.open(request)
            with profiling.range("prompt"):
                step([(prefix + request.prompt)[request.rows :]], [request])
            running.append(request)
        still = [request for request in running if len(request.answer) < request.count]
        for request in running:
            if request not in still:
                cache.close(request)
        running = still
        if running:
            with profiling.range("byte of each request"):
                step([request.answer[-1:] for request in running], running)


def run(paged: bool, args: argparse.Namespace) -> list[list[int]]:
    """The answers; prints throughput and what the cache takes."""
    torch.manual_seed(args.seed)
    prefix_bytes, most, longest = LENGTHS[args.device]
    rows = prefix_bytes + most + longest
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    width, layers, heads, heads_k = SIZES[args.device]
    model = Model(width, layers, heads, heads_k, rows).to(args.device, dtype)
    draw = torch.Generator().manual_seed(args.seed)
    number = lambda least, most: int(torch.randint(least, most + 1, (), generator=draw))  # noqa: E731
    text = lambda count: torch.randint(256, (count,), generator=draw).tolist()  # noqa: E731
    prefix = text(prefix_bytes)
    requests = [Request(text(number(1, most)), number(longest // 8, longest)) for _ in range(args.requests)]
    like = {"dtype": dtype, "device": args.device}
    shape = (layers, heads_k, width // heads)
    if paged:
        cache = Paged(shape, (args.batch + 1) * rows // PAGE, like)
        shared = Request(prefix, 0)
        cache.open(shared)
        model(torch.tensor([prefix], device=args.device), cache, [shared])
        cache.prefix = shared.pages[: prefix_bytes // PAGE]  # whole ones; the rest is of each prompt
    else:
        cache = Dense(shape, args.batch, rows, like)
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    serve(model, cache, requests, prefix, args.batch)
    rate = sum(request.count for request in requests) / (time.perf_counter() - start)
    size = cache.most * 2 * layers * heads_k * (width // heads) * dtype.itemsize / 2**20
    peak = f", peak of all {torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB" if on_gpu else ""
    print(
        f"{'paged' if paged else 'dense'}: {rate:,.0f} tokens/s, rows in the cache take {size:,.1f} MiB at most{peak}"
    )
    return [request.answer for request in requests]


@torch.inference_mode()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--requests", type=int, help="default: 24, on a GPU 96")
    parser.add_argument("--batch", type=int, help="requests at a time (default: 8, on a GPU 32)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.requests = args.requests or (96 if args.device == "cuda" else 24)
    args.batch = args.batch or (32 if args.device == "cuda" else 8)
    paged, dense = run(True, args), run(False, args)
    same = sum(a == b for a, b in zip(paged, dense, strict=True))
    print(f"{same} of {len(dense)} answers are the same")
    if args.device == "cpu" and same < len(dense):  # bf16 may find two bytes equally likely
        sys.exit("error: the two caches gave other answers")


if __name__ == "__main__":
    main()
