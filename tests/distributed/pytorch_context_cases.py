"""What test_pytorch_context.py runs on 2 and 4 ranks: `python pytorch_context_cases.py SIZE STORE [CASE ...]`.

The program is PyTorch's: its context_parallel cuts the tensors, F.scaled_dot_product_attention attends, and its
context_parallel_unshard puts out and gradients together again. They are compared with the whole call in float64, by the
error rule.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks
from context_helpers import refused
from context_parallel_cases import judge
from helpers import Inputs, cotangents_of, leaf, make_inputs
from ranks import World
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

Case = Callable[[World], None]
INPUTS = ("query", "key", "value")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def problem(dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (4, 2)) -> Inputs:
    return make_inputs((2, heads[0], 128, 64), (2, heads[1], 128, 64), dtype=dtype)


def mesh_of(world: World) -> DeviceMesh:
    return init_device_mesh(torch.device(world.device).type, (world.size,))


@contextmanager
def cut(world: World, inputs: Inputs, enabled: str = "around") -> Iterator[list[Tensor]]:
    """In torch's context, with enable() around it or inside: this rank's query, key, value and gradient of out."""
    whole = [inputs[name] for name in INPUTS]
    whole += cotangents_of([torch.empty_like(inputs["query"])], inputs["query"].dtype)
    buffers = [t.to(world.device).clone() for t in whole]
    with ExitStack() as stack:
        if enabled == "around":
            stack.enter_context(flash_ext.enable())
        stack.enter_context(
            context_parallel(
                mesh_of(world), buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
            )
        )  # fmt: skip
        if enabled == "inside":
            stack.enter_context(flash_ext.enable())
        yield [*map(leaf, buffers[:3]), buffers[3]]


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)


def compare(world: World, inputs: Inputs, results: list[Tensor], causal: bool) -> None:
    """``results``: out and gradients of this rank."""
    whole = _attention.context_parallel_unshard(mesh_of(world), [t.detach() for t in results], [2] * 4)
    names = ("out", *(f"grad of {name}" for name in INPUTS))
    judge({name: t.cpu() for name, t in zip(names, whole, strict=True)}, inputs, {"causal": causal})


def served_by(calls: int) -> None:
    assert flash_ext.enabled_calls() == calls, f"flash_ext served {flash_ext.enabled_calls()} calls, not {calls}"


def unchanged(
    world: World, dtype: torch.dtype, causal: bool = True, enabled: str = "around", backward: str = "inside",
    heads: tuple[int, int] = (4, 2),
) -> None:  # fmt: skip
    inputs, before = problem(dtype, heads), flash_ext.enabled_calls()
    with cut(world, inputs, enabled) as (*shards, grad):
        out = attend(*shards, is_causal=causal)
        if backward == "inside":
            grads = torch.autograd.grad(out, shards, grad)
    served_by(before + 1)
    if backward == "outside":
        grads = torch.autograd.grad(out, shards, grad)
    assert [t.shape for t in (out, *grads)] == [t.shape for t in (shards[0], *shards)]
    compare(world, inputs, [out, *grads], causal)


@contextmanager
def without_balance() -> Iterator[None]:
    _attention._cp_options.enable_load_balance = False
    try:
        yield
    finally:
        _attention._cp_options.enable_load_balance = True


def in_order(world: World, causal: bool) -> None:
    with without_balance():
        unchanged(world, torch.float64, causal)


def some_gradients(world: World) -> None:
    inputs = problem()
    with cut(world, inputs) as (*shards, grad):
        every = torch.autograd.grad(attend(*shards, is_causal=True), shards, grad)
        for wanted in ((0,), (2,), (0, 1)):
            leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(shards)]
            own = torch.autograd.grad(attend(*leaves, is_causal=True), [leaves[i] for i in wanted], grad)
            for i, mine in zip(wanted, own, strict=True):
                torch.testing.assert_close(mine, every[i])
        with torch.no_grad():
            without = attend(*shards, is_causal=True)
        torch.testing.assert_close(without, attend(*shards, is_causal=True))


def checkpointed(world: World) -> None:
    inputs = problem()
    call = partial(attend, is_causal=True)
    with cut(world, inputs) as (*shards, grad):
        out = torch.utils.checkpoint.checkpoint(call, *shards, use_reentrant=False)
        grads = torch.autograd.grad(out, shards, grad)
    compare(world, inputs, [out, *grads], causal=True)


class Attend(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, is_causal=True)


def by_module(world: World) -> None:
    """torch's way without a patched function: a module's hooks make the DTensors."""
    inputs, mesh, before = problem(), mesh_of(world), flash_ext.enabled_calls()
    whole = [inputs[name] for name in INPUTS] + cotangents_of([inputs["query"]], torch.float64)
    whole = [t.to(world.device) for t in whole]
    balancer = _attention._HeadTailLoadBalancer(128, world.size, world.device)
    of_sdpa = _attention._ContextParallel.AttentionType.SDPA
    module = _attention._ContextParallel(seq_dim=2, attention_type=of_sdpa)._apply(Attend(), mesh)
    *shards, grad = _attention._context_parallel_shard(mesh, whole, [2] * 4, load_balancer=balancer)
    shards = [leaf(t) for t in shards]
    _attention._enable_context_parallel_dispatcher()
    try:
        with flash_ext.enable():
            out = module(*shards)
            grads = torch.autograd.grad(out, shards, grad)
    finally:
        _attention._disable_context_parallel_dispatcher()
    served_by(before + 1)
    compare(world, inputs, [out, *grads], causal=True)


def with_dropout(world: World) -> None:
    """One map for all ranks, in backward the same: out is linear in value."""
    torch.manual_seed(world.rank)
    inputs = problem()
    with cut(world, inputs) as (*shards, grad):
        plain = attend(*shards, is_causal=True)
        out = attend(*shards, is_causal=True, dropout_p=0.5)
        (of_value,) = torch.autograd.grad(out, shards[2:], grad)
    assert not torch.allclose(out, plain)
    sums = torch.stack(((out * grad).sum(), (of_value * shards[2]).sum())).detach()
    dist.all_reduce(sums)
    torch.testing.assert_close(sums[0], sums[1])


def refusals(world: World) -> None:
    with cut(world, problem()) as (query, key, value, grad):
        mask = torch.ones(query.shape[2], 128, dtype=torch.bool, device=world.device)[None, None]
        refused("mask is given in torch's context_parallel", partial(attend, query, key, value, attn_mask=mask),
                RuntimeError)  # fmt: skip
        refused("takes query, key and value of 4 dimensions", partial(attend, query[0], key[0], value[0]), RuntimeError)
        out = attend(query, key, value, is_causal=True)
        refused("has no second derivative", partial(torch.autograd.grad, out, query, grad, create_graph=True),
                RuntimeError)  # fmt: skip


def compiled(world: World) -> None:
    """Refused, because a graph would have no collectives; not silently of this rank alone."""
    call = torch.compile(partial(attend, is_causal=True), backend="aot_eager")
    with cut(world, problem()) as (*shards, _):
        refused("a compiled function that calls attention", partial(call, *shards), Exception)


def dtensors_outside(world: World) -> None:
    """When the context is left, DTensors in rows stand for the sequence in their own order again."""
    unchanged(world, torch.float64)
    inputs, mesh = problem(), mesh_of(world)
    whole = [inputs[name].to(world.device) for name in INPUTS]
    placed: Any = [distribute_tensor(t, mesh, [Shard(2)]) for t in whole]
    with flash_ext.enable():
        out: Any = attend(*placed, is_causal=True)
    assert out.placements == (Replicate(),)
    torch.testing.assert_close(out.to_local(), attend(*whole, is_causal=True))


def left_to_pytorch(world: World) -> None:
    """A user who chose one of PyTorch's kernels has torch's ring, as without flash_ext."""
    inputs, before = problem(torch.bfloat16, (4, 4)), flash_ext.enabled_calls()
    with cut(world, inputs) as (*shards, grad), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*shards, is_causal=True)
        grads = torch.autograd.grad(out, shards, grad)
    served_by(before)
    whole = _attention.context_parallel_unshard(mesh_of(world), [t.detach() for t in (out, *grads)], [2] * 4)
    leaves = [leaf(inputs[name].double()) for name in INPUTS]
    expected = attend(*leaves, is_causal=True)
    cotangent = cotangents_of([expected], torch.bfloat16)
    for got, wanted in zip(whole, (expected, *torch.autograd.grad(expected, leaves, cotangent)), strict=True):
        torch.testing.assert_close(got.double().cpu(), wanted.detach(), rtol=0.05, atol=0.05)  # torch's own numbers


def cases(size: int, on_gpus: bool | None = None) -> dict[str, Case]:
    """``on_gpus``: also what only GPUs can: PyTorch's context_parallel has kernels of theirs alone."""
    found: dict[str, Case] = {}
    for dtype in DTYPES:
        found[f"causal, {str(dtype).removeprefix('torch.')}"] = partial(unchanged, dtype=dtype)
    found["heads that are not grouped"] = partial(unchanged, dtype=torch.float32, heads=(4, 4))
    found["not causal"] = partial(unchanged, dtype=torch.float64, causal=False)
    found["enable() inside the context"] = partial(unchanged, dtype=torch.float64, enabled="inside")
    found["backward outside the context"] = partial(unchanged, dtype=torch.float64, backward="outside")
    found["without load balance"] = partial(in_order, causal=True)
    found["without load balance, not causal"] = partial(in_order, causal=False)
    found |= {"some gradients": some_gradients, "checkpoint": checkpointed, "dropout": with_dropout}
    found |= {"refusals": refusals, "compiled": compiled, "DTensors outside the context": dtensors_outside}
    if hasattr(_attention, "_context_parallel_shard"):  # torch 2.10
        found["by a module's hooks"] = by_module
    if on_gpus if on_gpus is not None else os.environ.get("RANKS_DEVICE") == "cuda":
        found["left to PyTorch"] = left_to_pytorch
    return found


if __name__ == "__main__":
    ranks.main(cases)
