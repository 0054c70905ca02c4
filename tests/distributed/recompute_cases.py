"""What torch.utils.checkpoint computes again is sharded as its forward was: cases of context_cases.py.

Forward is in the context; backward is inside, outside, inside another one, or in another thread, as autograd's for a
GPU. Values and gradients are those of the same function on the whole, in float64.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import packed_cases
import torch
import torch.nn.functional as F
from context_helpers import rand, whole_problem
from ranks import World
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_ext
from flash_ext import distributed as fd
from flash_ext import reference
from flash_ext.distributed import links, local

OPS = torch.ops.flash_ext
Block = Callable[..., Tensor]
TOKENS = 21
PLACES = ("inside", "outside", "another context", "another thread", "another thread, outside")


def native(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flash_ext.attention(query.sin(), key, value, causal=True).sin()


def drop_in(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return flash_ext.scaled_dot_product_attention(query.sin(), key, value, is_causal=True, enable_gqa=True).sin()


def pytorch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query.sin(), key, value, is_causal=True, enable_gqa=True).sin()


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    cu = torch.tensor([0, 5, TOKENS], dtype=torch.int32)
    q, k, v = (t[0].transpose(0, 1) for t in (query.sin(), key, value))
    out = flash_ext.attention_varlen(q, k, v, cu_seqlens_q=cu, max_q=16, causal=True)
    return out.transpose(0, 1).unsqueeze(0).sin()


def again(block: Block, reentrant: bool = False, **options: Any) -> Block:
    return lambda *tensors: checkpoint(block, *tensors, use_reentrant=reentrant, **options)


def in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def gradients_of(world: World, method: str, run: Block, tensors: list[Tensor], place: str) -> list[Tensor]:
    """out and the gradients of ``tensors``; forward in the context and an enable(), backward in ``place``."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    with ExitStack() as scope:
        scope.enter_context(flash_ext.enable())
        scope.enter_context(fd.context_parallel(packed_cases.place_of(world, method), method=method))
        out = run(*leaves)
        if "outside" in place:
            scope.close()
        other = fd.context_parallel(world.group, balance="contiguous") if place == "another context" else nullcontext()
        with other:
            loss = out.square().sum()
            if "thread" in place:
                in_a_thread(loss.backward)
            else:
                torch.autograd.backward(loss)
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


def right(world: World, method: str, block: Block, run: Block, place: str) -> None:
    whole = [t.detach()[:1].requires_grad_() for t in whole_problem(TOKENS).values()]
    out = block(*whole)
    expected = [out.detach(), *torch.autograd.grad(out.square().sum(), whole)]
    where = fd.positions(TOKENS, world.group)
    got = gradients_of(world, method, run, [t[:, :, where] for t in whole], place)
    for mine, of_all in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, of_all[:, :, where], msg=lambda text: f"{method}, {place}: {text}")


def methods(world: World) -> tuple[str, ...]:
    return ("usp",) if world.size == 4 else ("ulysses", "allgather", "ring")


def of_a_call(block: Block) -> Callable[[World], None]:
    def case(world: World) -> None:
        for method in methods(world):
            for place in PLACES:
                for reentrant in (False, True):
                    right(world, method, block, again(block, reentrant), place)

    return case


def nested(world: World) -> None:
    for method in methods(world):
        for outer in (False, True):
            for inner in (False, True):
                for place in ("inside", "another thread, outside"):

                    def twice(q: Tensor, k: Tensor, v: Tensor, inner: bool = inner) -> Tensor:
                        return again(native, inner)(again(native, inner)(q, k, v), k, v) + q

                    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                        return native(native(q, k, v), k, v) + q

                    right(world, method, block, again(twice, outer), place)


class Forwards(TorchDispatchMode):
    """Counts the operators that compute attention forward."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (OPS.attention.default, OPS.attention_with_rng_state.default)
        return func(*args, **(kwargs or {}))


def selective(world: World) -> None:
    """The operators' results are kept, so attention runs forward once; also in a rank's first call, which checks."""

    def policy(_: object, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        saves = operator in flash_ext.checkpoint_ops()
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    for method in (*methods(world), "auto"):
        for block in (native, pytorch, packed):
            counts = []
            for run in (block, again(block, context_fn=contexts)):
                local._taken.clear(), links._measured.clear()
                with Forwards() as forwards:
                    right(world, method, block, run, "inside")
                counts.append(forwards.count)
            assert counts[0] == counts[1], (method, counts)
            for place in PLACES:
                right(world, method, block, again(block, context_fn=contexts), place)


def a_module_of_torch(world: World) -> None:
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    x, where = rand(2, TOKENS, 16).requires_grad_(), fd.positions(TOKENS, world.group)

    def block(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0].sin()

    expected = torch.autograd.grad(block(x).square().sum(), x)
    for method in methods(world):
        for place in PLACES:
            _, grad = gradients_of(world, method, again(block), [x[:, where]], place)
            torch.testing.assert_close(grad, expected[0][:, where])


def dropout(world: World) -> None:
    whole, length = list(whole_problem(32 * world.size).values()), 32 * world.size
    where = fd.positions(length, world.group)

    def block(*tensors: Tensor) -> Tensor:
        return flash_ext.attention(*tensors, causal=True, dropout_p=0.3).sin()

    torch.manual_seed(3)
    expected = torch.autograd.grad(block(*whole).square().sum(), whole)
    for method in methods(world):
        for place in ("inside", "another thread, outside"):
            torch.manual_seed(3)
            got = gradients_of(world, method, again(block), [t[:, :, where] for t in whole], place)
            for mine, of_all in zip(got[1:], expected, strict=True):
                torch.testing.assert_close(mine, of_all[:, :, where])


def forward_outside_of_it(world: World) -> None:
    """Then it is of this rank's tokens alone, though backward is in a context; so is a context of its own."""
    x = rand(1, 4, 6 + world.rank, 8).requires_grad_()

    def attend(x: Tensor) -> Tensor:
        return flash_ext.attention(x, x, x, causal=True) + F.scaled_dot_product_attention(x.sin(), x, x)

    def block_with_a_context(x: Tensor) -> Tensor:
        with fd.context_parallel(world.group, method="allgather"):
            return native(x, x, x)

    for block in (attend, block_with_a_context):
        (expected,) = torch.autograd.grad(block(x).square().sum(), x)
        for reentrant in (False, True):
            leaf = x.detach().requires_grad_()
            out = again(block, reentrant)(leaf)
            with flash_ext.enable(), fd.context_parallel(world.group, method="ring"):
                out.square().sum().backward()
            torch.testing.assert_close(leaf.grad, expected)


def nothing_is_left_behind(world: World) -> None:
    """After a backward that failed, too."""
    from torch.overrides import _get_current_function_mode_stack

    q = rand(1, 4, 6 + world.rank, 8).requires_grad_()
    runs: list[int] = []

    def fails(x: Tensor) -> Tensor:
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("twice")
        return native(x, x, x)

    before = F.scaled_dot_product_attention
    with flash_ext.enable(), fd.context_parallel(world.group, method="allgather"):
        out = again(fails)(q)
    try:
        out.sum().backward()
        raise AssertionError("no error")
    except ValueError:
        pass
    assert F.scaled_dot_product_attention is before and not _get_current_function_mode_stack()
    torch.testing.assert_close(flash_ext.attention(q, q, q), reference.attention(q, q, q))


CALLS = {
    "attention": native, "the drop-in": drop_in, "PyTorch's attention": pytorch, "packed sequences": packed,
}  # fmt: skip
OTHERS = (nested, selective, a_module_of_torch, dropout, forward_outside_of_it, nothing_is_left_behind)


def cases(size: int) -> dict[str, Callable[[World], None]]:
    found = {f"computed again, {name}": of_a_call(block) for name, block in CALLS.items()}
    return found | {f"computed again, {case.__name__}": case for case in OTHERS}
