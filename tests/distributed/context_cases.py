"""What test_context.py runs on 2 and 4 ranks: the context, shards, packed sequences (packed_cases.py), dropout and
errors, in float64 against the same call on the whole, and what is refused, on every rank.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import corner_cases
import links_cases
import packed_cases
import ranks
import recompute_cases
from context_helpers import compare, rand, refused, whole_problem
from ranks import World

import flash_ext
from flash_ext import AttentionError, reference
from flash_ext import distributed as fd
from flash_ext.distributed.layout import BALANCES

CASES: dict[str, Callable[[World], None]] = {}


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    CASES[function.__name__] = function
    return function


@case
def shards_and_positions(world: World) -> None:
    for balance in BALANCES:
        for length in (0, 1, 7, 8, 37):
            x = torch.arange(2 * length, dtype=torch.float64).view(length, 2).requires_grad_()
            part = fd.shard_sequence(x, world.group, 0, balance)
            where = fd.positions(length, world.group, balance)
            assert torch.equal(part, x[where]) and where.dtype == torch.int64
            back = fd.unshard_sequence(part, world.group, 0, balance)
            assert torch.equal(back, x)
            (grad,) = torch.autograd.grad(back.sum(), x, create_graph=True)  # of this rank's tokens, once a rank
            expected = torch.zeros_like(x).index_fill(0, where, world.size)
            assert torch.equal(grad, expected)
        lengths = list(range(3, 3 + world.size))
        held = fd.positions(lengths, world.group, balance)
        assert len(held) == lengths[world.rank]
        every = torch.cat(world.everyone(held)).sort().values
        assert torch.equal(every, torch.arange(sum(lengths)))
        x = rand(2, sum(lengths))
        assert torch.equal(fd.unshard_sequence(x[:, held], world.group, -1, balance), x)


@case
def two_dimensions_of_a_mesh(world: World) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world.size // 2, 2))
    x = rand(2, 21, 3)
    for balance in BALANCES:
        part = fd.shard_sequence(x, mesh, 1, balance)
        assert torch.equal(part, x[:, fd.positions(21, mesh, balance)])
        assert torch.equal(fd.unshard_sequence(part, mesh, 1, balance), x)


@case
def ulysses_exchanges_four_times(world: World) -> None:
    """Query, key and value in one batch, out and lse in another, and back."""
    parts = [fd.shard_sequence(t, world.group, 2).detach().requires_grad_() for t in whole_problem().values()]
    batches: list[int] = []

    def counted(operations: list[Any]) -> list[Any]:
        batches.append(len(operations))
        return send(operations)

    send, torch.distributed.batch_isend_irecv = torch.distributed.batch_isend_irecv, counted
    try:
        out, lse = fd.context_parallel_attention(*parts, world.group, method="ulysses", return_lse=True)
        forward = len(batches)
        (out.sum() + lse.sum()).backward()
    finally:
        torch.distributed.batch_isend_irecv = send
    assert (forward, len(batches)) == (2, 4), batches


@case
def the_context(world: World) -> None:
    whole = whole_problem(37)
    bias, mask = rand(4, 37, 37), rand(37, 37) > -0.5
    where = fd.positions(37, world.group)

    def native(query: Tensor, key: Tensor, value: Tensor, rows: Any = slice(None)) -> Tensor:
        out, lse = flash_ext.attention(query, key, value, causal=True, bias=bias[:, rows], return_lse=True)
        return out + lse.unsqueeze(-1)

    def drop_in(query: Tensor, key: Tensor, value: Tensor, rows: Any = slice(None)) -> Tensor:
        return flash_ext.scaled_dot_product_attention(query, key, value, mask[rows], enable_gqa=True)

    def pytorch(query: Tensor, key: Tensor, value: Tensor, rows: Any = slice(None)) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out + F.scaled_dot_product_attention(query[0], key[0], value[0], bias[:, rows], enable_gqa=True)

    for method in ("ulysses", "allgather", "ring"):
        for call in (native, drop_in, pytorch):

            def inside(call: Any = call, method: str = method, **parts: Tensor) -> Tensor:
                with fd.context_parallel(world.group, method=method), flash_ext.enable():
                    return call(**parts, rows=where)

            compare(world, call, inside, whole)
    with fd.context_parallel(world.group, method="ring"):  # backward inside calls the operator again
        parts = [fd.shard_sequence(t, world.group, 2).detach().requires_grad_() for t in whole.values()]
        inside_grads = torch.autograd.grad(flash_ext.attention(*parts, causal=True).sum(), parts)
    grads = torch.autograd.grad(flash_ext.attention(*whole.values(), causal=True).sum(), list(whole.values()))
    for mine, all_of_it in zip(inside_grads, grads, strict=True):
        torch.testing.assert_close(mine, all_of_it[:, :, where])
    # Outside of it, and without enable(), all is as it was.
    with fd.context_parallel(world.group):
        q = rand(1, 2, 3 + world.rank, 4)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), reference.attention(q, q, q))
    torch.testing.assert_close(flash_ext.attention(q, q, q), reference.attention(q, q, q))


@case
def a_module_of_torch_in_the_context(world: World) -> None:
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    whole = {"x": rand(2, 21, 16).requires_grad_()}

    def call(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0]

    def inside(x: Tensor) -> Tensor:
        with fd.context_parallel(world.group), flash_ext.enable():
            return call(x)

    compare(world, call, inside, whole, dim=1)


@case
def dropout_of_one_rank(world: World) -> None:
    whole = whole_problem(32 * world.size, device=world.device)
    for method in ("ulysses", "allgather", "ring"):
        slopes = torch.linspace(0.1, 0.5, 4, device=world.device)
        for options in (
            {"causal": True}, {}, {"alibi_slopes": slopes}, {"causal": True, "window": (21, None)},
            {"window": (37, None)}, {"window": (19, None), "alibi_slopes": slopes},
        ):  # fmt: skip

            def call(options: dict[str, Any] = options, **t: Tensor) -> Tensor:
                torch.manual_seed(3)
                return flash_ext.attention(**t, **options, dropout_p=0.3)

            def on_shards(method: str = method, options: dict[str, Any] = options, **t: Tensor) -> Tensor:
                torch.manual_seed(3 + world.rank)  # the first rank's seed is everyone's
                return fd.context_parallel_attention(**t, group=world.group, method=method, **options, dropout_p=0.3)

            compare(world, call, on_shards, whole)
    if world.size == 4:  # 16 tokens a chunk, and two heads of four a rank

        def across_and_within(**t: Tensor) -> Tensor:
            from torch.distributed.device_mesh import init_device_mesh

            torch.manual_seed(3 + world.rank)
            mesh = init_device_mesh("cpu", (2, 2))
            return fd.context_parallel_attention(**t, group=mesh, causal=True, dropout_p=0.3)

        compare(world, lambda **t: call({"causal": True}, **t), across_and_within, whole)
    q, k, v = (t.detach()[:, :, :7] for t in whole.values())
    for method in ("allgather", "ring"):
        refused(
            f"method='{method}' takes dropout_p where all chunks",
            lambda method=method: fd.context_parallel_attention(q, k, v, world.group, method=method, dropout_p=0.5),
        )
        refused(
            "and no window to the right",
            lambda method=method: fd.context_parallel_attention(
                *(t.detach()[:, :, :32] for t in whole.values()), world.group, method=method, window=(None, 3),
                dropout_p=0.5,
            ),
        )  # fmt: skip
    torch.manual_seed(0)
    assert fd.context_parallel_attention(q, k, v, world.group, dropout_p=0.5).shape == q.shape


@case
def second_derivatives(world: World) -> None:
    """Of every method, of all that has gradients; one tensor may be query, key and value."""
    bias, slopes, sinks = (t.to(world.device) for t in (rand(4, 13, 13), torch.rand(4), rand(4)))
    slopes.requires_grad_(), sinks.requires_grad_()
    where = fd.positions(13, world.group, device=world.device)

    def second(out: Tensor, lse: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        loss = out.square().sum() + (lse * lse.detach()).sum()
        grads = torch.autograd.grad(loss, tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads[:3]), tensors)

    def first_rows(t: Tensor, dim: int) -> Tensor:
        return t.index_select(dim, where)

    whole = list(whole_problem(13, device=world.device).values())
    for options in ({"causal": True}, {"window": (5, 3), "alibi_slopes": slopes, "sinks": sinks, "bias": bias}):
        shared = [options[name] for name in ("alibi_slopes", "sinks") if name in options]
        results = flash_ext.attention(*whole, **options, return_lse=True)
        expected = second(*results, [*whole, *shared])
        for method in ("ulysses", "allgather", "ring", *(("usp",) if world.size == 4 else ())):
            group = packed_cases.place_of(world, method)
            parts = [first_rows(t.detach(), 2).requires_grad_() for t in whole]
            given = options | ({"bias": bias[:, where]} if "bias" in options else {})
            results = fd.context_parallel_attention(*parts, group, method=method, **given, return_lse=True)
            got = second(*results, [*parts, *shared])
            for mine, all_of_it in zip(got[:3], expected, strict=False):
                torch.testing.assert_close(mine, first_rows(all_of_it, 2), msg=lambda m, method=method: method + m)
            for mine, all_of_it in zip(got[3:], expected[3:], strict=True):
                torch.distributed.all_reduce(mine, group=world.group)
                torch.testing.assert_close(mine, all_of_it)
    cu = torch.tensor([0, 5, 13], dtype=torch.int32, device=world.device)
    tokens = rand(13, 4, 8).to(world.device).requires_grad_()
    out = flash_ext.attention_varlen(tokens, tokens, tokens, cu_seqlens_q=cu, max_q=8, causal=True)
    (grad,) = torch.autograd.grad(out.square().sum(), tokens, create_graph=True)
    (expected_of_one,) = torch.autograd.grad(grad.square().sum(), tokens)
    for method in ("ulysses", "allgather", "ring", *(("usp",) if world.size == 4 else ())):
        own = first_rows(tokens.detach(), 0).requires_grad_()
        group = packed_cases.place_of(world, method)
        out = fd.context_parallel_attention_varlen(
            own, own, own, cu, group, max_seqlen=8, method=method, causal=True
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out.square().sum(), own, create_graph=True)
        (got_of_one,) = torch.autograd.grad(grad.square().sum(), own)
        torch.testing.assert_close(got_of_one, first_rows(expected_of_one, 0))


@case
def autocast(world: World) -> None:
    q, k, v = (t.detach().float() for t in whole_problem(16 * world.size).values())
    with torch.autocast("cpu", torch.bfloat16):
        expected = flash_ext.attention(q, k, v)
        for method in ("ulysses", "allgather", "ring"):
            parts = [fd.shard_sequence(t, world.group, 2).requires_grad_() for t in (q, k, v)]
            out = fd.context_parallel_attention(*parts, world.group, method=method)
            grads = torch.autograd.grad(out.float().sum(), parts)
            assert out.dtype == torch.bfloat16 and all(grad.dtype == torch.float32 for grad in grads)
            torch.testing.assert_close(out, fd.shard_sequence(expected, world.group, 2), atol=0.02, rtol=0.02)


@case
def the_same_bits_again(world: World) -> None:
    q, k, v = (t.detach().bfloat16() for t in whole_problem(16 * world.size, (8, 1)).values())
    for method in ("ulysses", "allgather", "ring"):
        first: list[Tensor] = []
        for _ in range(3):
            parts = [fd.shard_sequence(t, world.group, 2).requires_grad_() for t in (q, k, v)]
            out = fd.context_parallel_attention(*parts, world.group, method=method, causal=True, deterministic=True)
            results = [out, *torch.autograd.grad(out.float().square().sum(), parts)]
            first = first or results
            assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@case
def without_gradients(world: World) -> None:
    whole = {name: t.detach() for name, t in whole_problem(21).items()}
    parts = {name: fd.shard_sequence(t, world.group, 2) for name, t in whole.items()}
    expected = fd.shard_sequence(flash_ext.attention(**whole), world.group, 2)
    for mode in (torch.no_grad, torch.inference_mode):
        for method in ("ulysses", "allgather", "ring"):
            with mode():
                got = fd.context_parallel_attention(**parts, group=world.group, method=method)
            torch.testing.assert_close(got, expected)


@case
def some_gradients_alone(world: World) -> None:
    whole = whole_problem(21)
    for wanted in ("query", "key", "value"):
        grad = torch.autograd.grad(flash_ext.attention(**whole, causal=True).sum(), whole[wanted])[0]
        for method in ("ulysses", "allgather", "ring"):
            parts = {n: fd.shard_sequence(t, world.group, 2).detach() for n, t in whole.items()}
            parts[wanted].requires_grad_()
            fd.context_parallel_attention(**parts, group=world.group, method=method, causal=True).sum().backward()
            torch.testing.assert_close(parts[wanted].grad, fd.shard_sequence(grad, world.group, 2))


@case
def ranks_that_disagree(world: World) -> None:
    """One sentence with the argument's name, on every rank, and the group works afterwards."""
    last = world.rank == world.size - 1
    q = rand(2, 4, 6, 8)
    call = fd.context_parallel_attention

    def one(text: str, *, kinds: Any = AttentionError, tensors: Any = None, **differs: Any) -> None:
        args = (q, q, q) if tensors is None or not last else tensors
        refused(text, lambda: call(*args, world.group, **(differs if last else {})), kinds)

    one("causal is False on rank 0 and True on rank", causal=True)
    one("scale is None on rank 0 and 0.5 on rank", scale=0.5)
    one("window is (None, None) on rank 0 and (1, None) on rank", window=(1, None))
    one("method is auto on rank 0 and ring on rank", method="ring")
    one("the batch size is 2 on rank 0 and 1 on rank", tensors=(q[:1], q[:1], q[:1]))
    one("the number of heads of key is 4 on rank 0 and 2 on rank", tensors=(q, q[:, :2], q))
    one("the dtype of query is torch.float64 on rank 0 and torch.float32", tensors=(q.float(),) * 3)
    one("query, key and value are of torch.float32, torch.float64 and", tensors=(q.float(), q, q))
    one("sinks is None on rank 0 and", sinks=rand(4))
    one("what wants a gradient is () on rank 0 and ('query',)", tensors=(q.clone().requires_grad_(), q, q))
    one("mask is None on rank 0 and", mask=torch.ones(6, 12, dtype=torch.bool))
    # What is wrong on one rank alone is said on all.
    one("query of shape (4, 6, 8) has 3 dimensions", tensors=(q[0], q, q))
    one("key and value have 5 and 6 rows", tensors=(q, q[:, :, :5], q))
    one("window is 3; it must be (left, right)", kinds=(TypeError, AttentionError), window=3)
    one("method is 'best'; it must be \"auto\"", method="best")
    one("balance is 'striped'; it must be", balance="striped")
    mask = torch.ones(6, 6 * world.size - 1, dtype=torch.bool)
    refused(f"mask of shape (1, 1, 6, {6 * world.size - 1}) on rank 0 of the group",
            lambda: call(q, q, q, world.group, mask=mask))  # fmt: skip
    refused("the call is context_parallel_attention on rank 0 and unshard_sequence on rank",
            lambda: fd.unshard_sequence(q, world.group, 2) if last else call(q, q, q, world.group))  # fmt: skip
    assert call(q, q, q, world.group).shape == q.shape


@case
def what_a_method_does_not_take(world: World) -> None:
    q = rand(2, 4, 6, 8)
    slopes, call, group = torch.ones(4), fd.context_parallel_attention, world.group
    refused("method='usp' takes a mesh of two dimensions", lambda: call(q, q, q, group, method="usp"))
    small = q.to(torch.float8_e4m3fn)
    refused("query is of torch.float8_e4m3fn, which context parallel does not take",
            lambda: call(small, small, small, group))  # fmt: skip
    with fd.context_parallel(group):
        refused("q_descale, k_descale, v_descale or out_dtype is given in context_parallel",
                lambda: flash_ext.attention(small, small, small, v_descale=slopes))  # fmt: skip
    cu, p = torch.tensor([0, 6 * world.size], dtype=torch.int32), rand(6, 4, 8)

    def packed(**options: Any) -> Any:
        return fd.context_parallel_attention_varlen(p, p, p, cu, group, max_seqlen=6 * world.size, **options)

    refused("method='ring' takes no mask, bias or dropout_p for packed",
            lambda: packed(method="ring", causal=True, dropout_p=0.5))  # fmt: skip
    for option in ({"window": (3, 3)}, {"alibi_slopes": slopes}):
        refused("method='allgather' takes packed sequences with causal=True, or with no window",
                lambda option=option: packed(method="allgather", **option))  # fmt: skip
    refused(
        "method='allgather' takes no mask, bias or dropout_p for packed",
        lambda: packed(method="allgather", dropout_p=0.5),
    )
    for method in ("ulysses", "allgather", "ring"):
        refused("softcap", lambda method=method: call(q, q, q, group, method=method, softcap=-1.0))
    with fd.context_parallel(group):
        wants = q.clone().requires_grad_()
        refused("FlashAttention is called in context_parallel", lambda: flash_ext.FlashAttention.apply(wants, q, q))
    refused("group is of type int", lambda: call(q, q, q, 3), TypeError)
    # "auto" finds one that does.
    for heads in (3, 4):
        x = rand(1, heads, 6, 8)
        assert call(x, x, x, group, alibi_slopes=torch.ones(heads)).shape == x.shape


@case
def heads_that_do_not_divide(world: World) -> None:
    for heads in ((6, 3), (3, 1), (1, 1), (6, 2), (12, 3)):
        compare(
            world, lambda **t: flash_ext.attention(**t, causal=True),
            lambda **t: fd.context_parallel_attention(**t, group=world.group, method="ulysses", causal=True),
            whole_problem(21, heads),
        )  # fmt: skip


@case
def checks_once(world: World) -> None:
    q = rand(2, 4, 6, 8)
    expected = fd.context_parallel_attention(q, q, q, world.group)
    for check in (False, False, True):
        assert torch.equal(fd.context_parallel_attention(q, q, q, world.group, check=check), expected)


@case
def the_program_of_the_page(world: World) -> None:
    page = Path(__file__).parents[2] / "docs/use/distributed.md"
    (program,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    os.environ["WORLD_SIZE"] = str(world.size)  # as torchrun sets it
    names: dict[str, Any] = {}
    exec(compile(program, page.name, "exec"), names)
    q = names["tokens"].unflatten(-1, (4, 16)).transpose(1, 2)
    torch.testing.assert_close(names["whole"], flash_ext.attention(q, q, q, causal=True))
    assert torch.equal(names["tokens"][:, names["where"]], names["x"])


@case
def what_is_explained(world: World) -> None:
    q, k = (torch.empty(1, heads, 65536, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    page = (Path(__file__).parents[2] / "docs/use/distributed.md").read_text()
    assert str(fd.explain_context_parallel(q, k, k, ranks=2, causal=True)) in page
    chosen = {ranks: fd.explain_context_parallel(q, k, k, ranks, causal=True).method for ranks in (2, 8, 12, (4, 8))}
    assert chosen == {2: "allgather", 8: "ulysses", 12: "allgather", (4, 8): "usp"}
    # 80 ranks of 65,536 tokens: 10 GiB a rank would not do.
    assert fd.explain_context_parallel(q, k, k, 80).method == "ring"
    slopes = torch.ones(32)
    assert fd.explain_context_parallel(q, k, k, 12, causal=True, alibi_slopes=slopes).method == "allgather"
    assert fd.explain_context_parallel(q, k, k, 12, alibi_slopes=slopes).method == "allgather"
    # One head of query and one rank more: what is sent is what the exchanges carry.
    small = torch.empty(1, 4, 16, 8, device="meta")
    sent = fd.explain_context_parallel(small, small, small, 4).sent
    one = 4 * 16 * 8 * 4  # bytes of a rank's query
    assert sent["ulysses"] == (4 * one * 3 // 4, 4 * one * 3 // 4)
    assert sent["allgather"] == (3 * 2 * one, 3 * 4 * one) and sent["ring"] == (3 * 2 * one, 3 * 2 * one + 4 * 2 * one)


def cases(size: int) -> dict[str, Callable[[World], None]]:
    return (
        CASES
        | packed_cases.cases(size)
        | links_cases.cases(size)
        | corner_cases.cases(size)
        | recompute_cases.cases(size)
    )


if __name__ == "__main__":
    ranks.main(cases)
