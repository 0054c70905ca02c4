"""What test_context.py starts: of two ranks the last dies before a call, sleeps through it, or never joins the group.

`python dying_rank.py STORE dies|sleeps|never_comes`; prints the exit status of each.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ranks
import torch

from flash_ext.distributed import context_parallel_attention

STORE, WHAT = sys.argv[1:]
ENDED = Path(f"{STORE}.ended")  # written when the first rank has ended, by itself


def absent() -> None:
    """Lives, without a word, until the other rank has ended."""
    until = time.monotonic() + 60
    while not ENDED.exists() and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(3 if ENDED.exists() else 4)


def work(rank: int) -> None:
    if rank == 1 and WHAT == "never_comes":
        absent()
    world = ranks.start(rank, 2, STORE, seconds=5)
    q = torch.randn(1, 2, 8, 4)
    context_parallel_attention(q, q, q, world.group)
    if rank == 1:
        absent() if WHAT == "sleeps" else os._exit(3)
    context_parallel_attention(q, q, q, world.group)


def first_tells(rank: int) -> None:
    try:
        work(rank)
    finally:
        if rank == 0:
            ENDED.touch()


if __name__ == "__main__":
    print(*ranks.fork(2, first_tells))
