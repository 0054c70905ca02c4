"""What test_context_parallel_benchmark.py runs: the peer yunchang on two ranks beside attention of the whole sequence.

`python yunchang_ranks.py FOLDER KV_HEADS`, with the folder of the benchmarks; it prints "right".
"""

from __future__ import annotations

import json
import sys

sys.path.insert(0, sys.argv[1])

import context_parallel
import ranks
import torch
import torch.distributed as dist

import flash_ext

TOKENS = 64


def compare(kv_heads: int) -> str:
    args = context_parallel.parse([
        "--device", "cpu", "--heads", "4", "--kv-heads", str(kv_heads), "--head-dim", "16", "--dtype", "fp32",
    ])  # fmt: skip
    *inputs, grad = context_parallel.problem(args, TOKENS)
    leaves = [t.requires_grad_() for t in inputs]
    expected = flash_ext.attention(*leaves, causal=True)
    whole = (expected, *torch.autograd.grad(expected, leaves, grad))
    context_parallel.both = lambda attend, tensors: (attend, tensors)
    with context_parallel.prepared("yunchang", args, TOKENS) as (attend, tensors):
        shards = [t.requires_grad_() for t in tensors[:3]]
        out = attend(*shards)
        got = (out, *torch.autograd.grad(out, shards, tensors[3]))
    for mine, of_all in zip(got, whole, strict=True):
        torch.testing.assert_close(mine, of_all.transpose(1, 2).chunk(2, 1)[dist.get_rank()])
    return "right"


if __name__ == "__main__":
    print(json.dumps(ranks.spawn(compare, 2, "cpu", int(sys.argv[2]))))
