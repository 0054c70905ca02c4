"""What test_context_parallel.py runs on 2, 4 and 8 ranks: `python context_parallel_cases.py SIZE STORE [CASE ...]`.

Every rank makes the whole problem from one seed and keeps its own rows. Results and gradients of all ranks are put
together and compared with the whole call in float64, by the error rule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks
from helpers import HALF, RESAMPLES, Results, cotangents_of, evaluate, jittered, leaf, rand, violations
from ranks import World

import flash_ext
from flash_ext import reference
from flash_ext.distributed import allgather, context_parallel_attention
from flash_ext.distributed.layout import Layout, even_layout, layout_of

Case = Callable[[World], None]
SHARED = ("alibi_slopes", "sinks")


def rows_of(layout: Layout, rank: int) -> Tensor:
    return torch.cat([torch.arange(segment.start, segment.end) for segment in layout.ranks[rank]])


def has_rows(name: str, tensor: Tensor) -> bool:
    return name in ("mask", "bias") and tensor.dim() > 1 and tensor.shape[-2] != 1


def share(name: str, tensor: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """This rank's part of an argument."""
    if has_rows(name, tensor):
        return tensor[..., queries, :]
    if name in ("mask", "bias", *SHARED):
        return tensor
    return tensor[:, :, queries if name == "query" else keys]


def sharded(
    world: World, inputs: Mapping[str, Tensor], options: Mapping[str, Any], layouts: tuple[Layout, Layout],
    group: Any, **how: Any,
) -> Results | None:  # fmt: skip
    """out, lse and gradients of the whole, as the ranks computed them; on rank 0."""
    own = [rows_of(layout, world.rank) for layout in layouts]
    leaves = {name: leaf(share(name, tensor, *own).to(world.device)) for name, tensor in inputs.items()}
    returned = context_parallel_attention(
        **{name: leaves[name] for name in ("query", "key", "value")}, group=group,
        **{name: t for name, t in leaves.items() if name not in ("query", "key", "value")}, **options, **how,
    )  # fmt: skip
    outputs = returned if isinstance(returned, tuple) else (returned,)
    batch, heads, length, _ = inputs["query"].shape
    shapes = [(batch, heads, length, inputs["value"].shape[-1]), (batch, heads, length)][: len(outputs)]
    like = [o.new_empty(s, device="cpu") for o, s in zip(outputs, shapes, strict=True)]
    whole = cotangents_of(like, inputs["query"].dtype)
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(outputs, list(wanted.values()), [c[:, :, own[0]].to(world.device) for c in whole])
    results = dict(zip(("out", "lse"), (o.detach().cpu() for o in outputs), strict=False))
    results |= {f"grad of {name}": grad.cpu() for name, grad in zip(wanted, grads, strict=True)}
    for name, grad in zip(wanted, grads, strict=True):
        assert grad.shape == leaves[name].shape and grad.dtype == leaves[name].dtype
    everyone = world.everyone(results)
    if world.rank:
        return None
    put_together: Results = {}
    for name, mine in results.items():
        parts = [said[name] for said in everyone]
        argument = name.removeprefix("grad of ")
        tensor = inputs.get(argument)
        if tensor is not None and (argument in SHARED or (argument == "bias" and not has_rows("bias", tensor))):
            put_together[name] = sum(part.double() for part in parts).to(mine.dtype)
            continue
        dim = -2 if name not in ("out", "lse") else 2
        layout = layouts[argument in ("key", "value")]
        shape = list(mine.shape)
        shape[dim] = layout.length
        put_together[name] = mine.new_full(shape, float("nan"))
        for rank, part in enumerate(parts):
            put_together[name].index_copy_(dim, rows_of(layout, rank), part)
    return put_together


def judge(got: Results, inputs: Mapping[str, Tensor], options: Mapping[str, Any], **extra: Any) -> None:
    """The error rule, as ``helpers.check`` has it, for results that are there already."""
    dtype = inputs["query"].dtype
    meaning = {k: v for k, v in options.items() if k not in ("deterministic", "batch_invariant")} | extra

    def exact(tensors: Mapping[str, Tensor]) -> Results:
        wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        return evaluate(reference.attention, wide, meaning, cotangent_dtype=dtype)

    expected = exact(inputs)
    assert got.keys() == expected.keys(), (got.keys(), expected.keys())
    errors: dict[str, list[Tensor]] = {name: [] for name in got}
    broken: list[str] = []
    for again in range(1 + RESAMPLES):
        others = jittered(inputs) if again else inputs
        true = exact(others) if again else expected
        rough = evaluate(reference.attention, others, meaning | {"rounded": dtype in HALF})
        for name, t in true.items():
            errors[name].append((rough[name].double() - t)[t.isfinite()])
        broken = [text for name in got for text in violations(name, got[name], expected[name], errors[name])]
        if not broken:
            return
    raise AssertionError("; ".join(broken))


def problem(
    lengths: tuple[int, int], dtype: torch.dtype = torch.float32, heads: tuple[int, int, int] = (4, 2, 2),
    columns: tuple[int, int] = (16, 16),
) -> dict[str, Tensor]:  # fmt: skip
    (rows, keys), (column, column_v) = lengths, columns
    return {
        "query": rand(2, heads[0], rows, column, dtype=dtype),
        "key": rand(2, heads[1], keys, column, dtype=dtype),
        "value": rand(2, heads[2], keys, column_v, dtype=dtype),
    }


LENGTHS = {2: (37, 37), 4: (53, 53), 8: (83, 83)}
CROSS = {2: (30, 45), 4: (45, 60), 8: (70, 101)}
FEWER = {2: (45, 30), 4: (60, 45), 8: (101, 70)}


def extras_of(names: str, lengths: tuple[int, int], heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    rows, keys = lengths
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made: dict[str, Callable[[], Tensor]] = {
        "mask": lambda: rand(2, 1, rows, keys) > -0.5,
        "mask of one row": lambda: rand(2, heads, 1, keys) > -0.5,
        "bias": lambda: rand(heads, rows, keys, dtype=dtype),
        "bias of one head": lambda: rand(2, 1, rows, keys, dtype=dtype),
        "bias of one row": lambda: rand(2, heads, 1, keys, dtype=dtype),
        "bias of one column": lambda: rand(heads, rows, 1, dtype=dtype),
        "sinks": lambda: rand(heads, dtype=wide),
        "sinks of each": lambda: rand(2, heads, dtype=wide),
        "alibi_slopes": lambda: rand(heads).abs().float() / 8,
        "alibi_slopes of each": lambda: rand(2, heads).abs().float() / 8,
    }
    return {name.split(" of ")[0]: made[name]() for name in names.split(", ") if name}


# name: (lengths, heads, tensors, options)
OPTIONS: dict[str, tuple[dict[int, tuple[int, int]], tuple[int, int, int], str, dict[str, Any]]] = {
    "full": (LENGTHS, (4, 2, 2), "", {}),
    "causal": (LENGTHS, (4, 4, 4), "", {"causal": True}),
    "window": (LENGTHS, (4, 2, 2), "", {"window": (9, 4)}),
    "causal window": (LENGTHS, (4, 2, 2), "", {"causal": True, "window": (7, None)}),
    "more keys": (CROSS, (4, 2, 2), "", {"causal": True, "align": "bottom_right"}),
    "more keys, top left": (CROSS, (4, 2, 2), "", {"causal": True}),
    "more queries": (FEWER, (4, 2, 2), "", {"causal": True, "align": "bottom_right"}),
    "more queries, window": (FEWER, (4, 2, 2), "", {"window": (5, 2)}),
    "grouped": (LENGTHS, (8, 2, 4), "", {"causal": True, "scale": 0.5}),
    "one key head": (LENGTHS, (8, 1, 1), "", {"causal": True}),
    "softcap": (LENGTHS, (4, 2, 2), "", {"causal": True, "softcap": 3.0}),
    "mask": (LENGTHS, (4, 2, 2), "mask", {}),
    "mask of one row": (CROSS, (4, 2, 2), "mask of one row", {"causal": True}),
    "bias": (CROSS, (4, 2, 2), "bias", {}),
    "bias of one head": (LENGTHS, (4, 2, 2), "bias of one head", {"causal": True}),
    "bias of one row": (LENGTHS, (4, 2, 2), "bias of one row", {"causal": True}),
    "bias of one column": (LENGTHS, (4, 2, 2), "bias of one column", {"window": (20, 20)}),
    "sinks": (LENGTHS, (4, 2, 2), "sinks", {"causal": True}),
    "sinks of each, rows without keys": (FEWER, (4, 2, 2), "sinks of each", {"causal": True, "align": "bottom_right"}),
    "slopes": (LENGTHS, (4, 2, 2), "alibi_slopes", {"causal": True}),
    "slopes, more keys": (CROSS, (4, 2, 2), "alibi_slopes of each", {"causal": True, "align": "bottom_right"}),
    "slopes, window": (LENGTHS, (4, 2, 2), "alibi_slopes", {"causal": True, "window": (11, None)}),
    "together": (CROSS, (8, 4, 2), "mask, bias, sinks",
                 {"window": (25, 9), "softcap": 4.0, "scale": 0.3, "align": "bottom_right"}),
    "deterministic": (LENGTHS, (4, 2, 2), "", {"causal": True, "deterministic": True}),
    "batch invariant": (LENGTHS, (4, 2, 2), "", {"causal": True, "batch_invariant": True}),
}  # fmt: skip
BOTH_SIDES = {  # of the diagonal
    "slopes beyond the diagonal": (LENGTHS, (4, 2, 2), "alibi_slopes", {}),
    "slopes, bias, more keys": (CROSS, (4, 2, 2), "alibi_slopes of each, bias of one row, mask", {}),
    "slopes, bias, window": (FEWER, (4, 2, 2), "alibi_slopes, bias of one head, sinks",
                             {"window": (20, 9), "align": "bottom_right", "softcap": 4.0}),
}  # fmt: skip
FEWER_CASES = {
    4: ("causal", "window", "more keys", "more queries, window", "grouped", "one key head", "mask of one row",
        "bias of one head", "bias of one row", "sinks of each, rows without keys", "slopes, more keys", "together"),
    8: ("causal", "together", "one key head"),
}  # fmt: skip
BF16 = ("full", "causal", "window", "grouped", "sinks", "bias", "together")


def compare(
    world: World, method: str, balance: str, which: str, dtype: torch.dtype, deal: str = "even", chunks: bool = False
) -> None:
    lengths_of, heads, tensors, options = (OPTIONS | BOTH_SIDES)[which]
    lengths = lengths_of[world.size]
    columns = (16, 24) if which in ("grouped", "together") else (16, 16)
    inputs = problem(lengths, dtype, heads, columns) | extras_of(tensors, lengths, heads[0], dtype)
    layouts = tuple(DEALS[deal](length, world.size, balance) for length in lengths)
    before, allgather.CHUNK_BYTES = allgather.CHUNK_BYTES, 1 if chunks else allgather.CHUNK_BYTES
    group = mesh_of(world) if method == "usp" else world.group
    how = {"method": method, "balance": balance, "return_lse": True}
    try:
        got = sharded(world, inputs, options, layouts, group, **how)  # type: ignore[arg-type]
    finally:
        allgather.CHUNK_BYTES = before
    if got is not None:
        judge(got, inputs, options | {"return_lse": True})


def uneven(length: int, ranks_: int, balance: str) -> Layout:
    """Rank r holds in the proportion of r; the first one nothing."""
    total = ranks_ * (ranks_ - 1) // 2
    sizes = [length * rank // total for rank in range(ranks_)]
    sizes[-1] += length - sum(sizes)
    return layout_of(tuple(sizes), balance)


DEALS: dict[str, Callable[[int, int, str], Layout]] = {"even": even_layout, "uneven": uneven}
_meshes: dict[tuple[int, ...], Any] = {}


def mesh_of(world: World, shape: tuple[int, ...] = ()) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    shape = shape or (world.size // 2, 2)
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh(torch.device(world.device).type, shape)
    return _meshes[shape]


def backward_is_of_forwards_backend(world: World) -> None:
    """Also in a thread that has no choice of its own, as that of autograd for a GPU."""
    tensors = [rand(2, heads, 40, 16).requires_grad_() for heads in (4, 2, 2)]

    def attend(method: str) -> Tensor:
        return context_parallel_attention(*tensors, world.group, method=method, causal=True).square().sum()

    for method in ("ulysses", "allgather", "ring"):
        with flash_ext.use_backend("chunked"):
            expected, loss = torch.autograd.grad(attend(method), tensors), attend(method)
        with ThreadPoolExecutor(1) as pool:
            got = pool.submit(torch.autograd.grad, loss, tensors).result()
        other = torch.autograd.grad(attend(method), tensors)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), method
        assert not all(torch.equal(a, b) for a, b in zip(got, other, strict=True)), method


def cases(size: int) -> dict[str, Case]:
    found: dict[str, Case] = {}

    def add(method: str, balance: str, which: str, dtype: torch.dtype = torch.float32, **how: Any) -> None:
        name = " ".join([method, balance, which, str(dtype).removeprefix("torch."), *map(str, how.values())])
        found[name] = partial(compare, method=method, balance=balance, which=which, dtype=dtype, **how)

    methods = ("allgather", "ulysses", "ring", *(("usp",) if size > 2 else ()))
    for i, which in enumerate(OPTIONS):
        for j, method in enumerate(methods):
            if which not in FEWER_CASES.get(size, OPTIONS):
                continue
            for balance in (
                ("zigzag", "contiguous")[(i + j) % 2 : (i + j) % 2 + 1] if size > 2 else ("zigzag", "contiguous")
            ):
                add(method, balance, which)
    for method in methods:
        for balance in ("zigzag", "contiguous"):
            for which in ("causal", "together") if size == 2 else ("causal",):
                add(method, balance, which, deal="uneven")
        if size == 2:
            for which in BF16:
                add(method, "zigzag", which, torch.bfloat16)
    for which in ("causal", "together", "slopes", "bias of one row"):
        add("allgather", "zigzag", which, chunks=True)
    for which in BOTH_SIDES:
        for method in methods:
            add(method, "zigzag", which)
        add("allgather", "contiguous", which, chunks=True)
    for method in ("ring", "allgather"):
        add(method, "contiguous", "slopes, bias, more keys", deal="uneven")
        add(method, "zigzag", "slopes, bias, window", torch.float64)
    add("ring", "zigzag", "grouped", torch.float64)
    if size == 4:
        found["backward is of forward's backend"] = backward_is_of_forwards_backend
    return found


if __name__ == "__main__":
    ranks.main(cases)
