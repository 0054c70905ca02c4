"""Cases of two GPUs, with NCCL: second derivatives, dropout, checkpoints, and what is measured of their links."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import context_cases
import links_cases
import ranks
import recompute_cases
from ranks import World

import flash_ext
from flash_ext import distributed as fd
from flash_ext.distributed import links
from flash_ext.distributed.exchange import Group


def links_of_gpus(world: World) -> None:
    """Not measured while a CUDA graph is captured; then once, and one rank may ask for what was found."""
    group = dist.new_group(list(range(world.size)))
    q = torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16, device=world.device)
    asked = Group(group), q.device, q.dtype
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        captured = q + 1
        assert links.links_of(*asked) is None
    del captured
    with links_cases.counted() as calls:
        for _ in range(2):
            assert fd.context_parallel_attention(q, q, q, group, causal=True).shape == q.shape
        assert len(calls) == 1
    found = fd.explain_context_parallel(q, q, q, group).links
    assert found is not None and set(world.everyone(found)) == {found}
    assert fd.explain_context_parallel(*[torch.empty_like(q, device="meta")] * 3, group).links == found


def nobody_measures_where_one_gpu_cannot(world: World) -> None:
    links_cases.a_rank_that_cannot_measure(world)


def computed_again_in_autograds_thread(world: World) -> None:
    """Outside of the context, with the bits of what a checkpoint did not compute again."""
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, 500, 64).to(world.device, torch.bfloat16) for heads in (4, 2, 2)]
    where = fd.positions(500, world.group, device=world.device)

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_ext.attention(q.sin(), k, v, causal=True, deterministic=True).sin()

    for method in ("ulysses", "allgather", "ring"):
        found = []
        for run in (block, recompute_cases.again(block), recompute_cases.again(block, reentrant=True)):
            leaves = [t[:, :, where].requires_grad_() for t in whole]
            with fd.context_parallel(world.group, method=method):
                out = run(*leaves)
            out.square().sum().backward()
            found.append([out.detach(), *(t.grad for t in leaves)])
        for again in found[1:]:
            assert all(map(torch.equal, again, found[0])), method


PROMISES = (
    links_of_gpus, nobody_measures_where_one_gpu_cannot, computed_again_in_autograds_thread,
    context_cases.second_derivatives, context_cases.dropout_of_one_rank,
)  # fmt: skip


def cases(size: int) -> dict[str, Callable[[World], None]]:
    return {promise.__name__: promise for promise in PROMISES}


if __name__ == "__main__":
    ranks.main(cases)
