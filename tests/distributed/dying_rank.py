"""What test_context.py starts: of two ranks the last one dies before a call. `python dying_rank.py STORE`."""

from __future__ import annotations

import os
import sys

import ranks
import torch

from flash_ext.distributed import context_parallel_attention


def work(rank: int) -> None:
    world = ranks.start(rank, 2, sys.argv[1], seconds=5)
    q = torch.randn(1, 2, 8, 4)
    context_parallel_attention(q, q, q, world.group)
    if rank == 1:
        os._exit(3)
    context_parallel_attention(q, q, q, world.group)


if __name__ == "__main__":
    print(*ranks.fork(2, work))
