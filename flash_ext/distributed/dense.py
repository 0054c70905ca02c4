"""Context parallel: one sequence over many ranks, each of which holds some of its tokens.

Checks what the caller gives, has the ranks agree, chooses a method and runs it. Packed sequences: ``packed.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_ext.arguments import Window, flag, number
from flash_ext.attention import check_native
from flash_ext.distributed import allgather, choose, local, ring, ulysses
from flash_ext.distributed.agree import agree
from flash_ext.distributed.exchange import Group
from flash_ext.distributed.layout import Band, Layout, busiest, check_balance, layout_of, outer_layout, within
from flash_ext.distributed.links import Links, known_links, links_of
from flash_ext.distributed.local import Call, Extras, Options
from flash_ext.distributed.pairs import Matters
from flash_ext.errors import AttentionError

_ops = torch.ops.flash_ext


def groups_of(group: Any) -> list[Group]:
    """Of a process group or a mesh of one dimension, or (across, within) of a mesh of two."""
    if not hasattr(group, "get_group"):
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is of type {type(group).__name__}; it must be a ProcessGroup or a DeviceMesh")
        return [Group(group)]
    if group.ndim not in (1, 2):
        raise AttentionError(f"group is a mesh of {group.ndim} dimensions; context parallel takes 1 or 2")
    return [Group(group.get_group(dim)) for dim in range(group.ndim)]


def sizes_of(groups: Sequence[Group]) -> tuple[int, ...]:
    return tuple(group.size for group in groups)


def flat_rank(groups: Sequence[Group]) -> int:
    return groups[0].rank if len(groups) == 1 else groups[0].rank * groups[1].size + groups[1].rank


def check_method(method: str) -> None:
    if method not in ("auto", *choose.METHODS):
        raise AttentionError(f'method is {method!r}; it must be "auto", {", ".join(map(repr, choose.METHODS))}')


def cast(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As autocast does; here, so that forward and backward, and what travels, have one dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def wants_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def shape_but_rows(tensor: Tensor | None, rows: int) -> list[Any] | None:
    """The shape of a mask or bias, without the number of its rows: its dtype, and which dimensions have a size."""
    if tensor is None:
        return None
    shape: list[Any] = [1] * (4 - tensor.dim()) + list(tensor.shape)
    shape[2:3] = ["rows" if shape[2] == rows else 1 if shape[2] == 1 else "other rows"]
    return [str(tensor.dtype), *shape]


def _describe(
    query: Tensor, key: Tensor, value: Tensor, tensors: dict[str, Tensor | None], options: dict[str, Any]
) -> dict[str, Any]:
    window, align = options["window"], options["align"]
    left, right = check_native(query, key, value, window, align)
    check_balance(options["balance"]), check_method(options["method"])
    for name in ("softcap", "dropout_p", "scale"):
        if options[name] is not None:
            options[name] = number(options[name], name)
    for name in ("causal", "batch_invariant", "return_lse"):
        flag(options[name], name)
    if options["deterministic"] is not None:
        flag(options["deterministic"], "deterministic")
    for name, tensor in tensors.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor is not None and tensor.device != query.device:
            raise AttentionError(f"{name} is on {tensor.device}, but query is on {query.device}")
    (batch, heads, rows, columns), (_, _, keys, columns_v) = query.shape, value.shape
    if key.shape[2] != keys:
        raise AttentionError(f"key and value have {key.shape[2]} and {keys} rows; they must be equal")
    if key.shape[3] != columns:
        raise AttentionError(f"query and key have {columns} and {key.shape[3]} columns; they must be equal")
    for name, of_heads in (("key", key.shape[1]), ("value", value.shape[1])):
        if of_heads == 0 or heads % of_heads:
            raise AttentionError(f"{name} has {of_heads} heads; their number must divide query's {heads}")
    for name, tensor in (("mask", tensors["mask"]), ("bias", tensors["bias"])):
        if tensor is not None and tensor.dim() > 4:
            raise AttentionError(f"{name} has {tensor.dim()} dimensions; at most 4, (batch, heads, rows, keys), fit")
    for name, tensor in (("alibi_slopes", tensors["alibi_slopes"]), ("sinks", tensors["sinks"])):
        if tensor is not None and tuple(tensor.shape) not in ((heads,), (batch, heads)):
            raise AttentionError(
                f"{name} of shape {tuple(tensor.shape)} must be ({heads},) or ({batch}, {heads}), all heads of query"
            )
    local.check(query, key, value, tensors, None, options)
    given = {"query": query, "key": key, "value": value} | tensors
    deterministic = options["deterministic"]
    equal: dict[str, Any] = {
        "the call": "context_parallel_attention",
        "the batch size": batch,
        "the number of heads of query": heads,
        "the number of heads of key": key.shape[1],
        "the number of heads of value": value.shape[1],
        "the head dim of query": columns,
        "the head dim of value": columns_v,
        "the kind of device": query.device.type,
        **{f"the dtype of {name}": str(t.dtype) for name, t in (("query", query), ("key", key), ("value", value))},
        **{name: shape_but_rows(tensors[name], rows) for name in ("mask", "bias")},
        **{name: None if t is None else [str(t.dtype), *t.shape] for name, t in tensors.items()
           if name in ("alibi_slopes", "sinks")},
        **{name: options[name] for name in ("method", "balance", "causal", "align", "softcap", "dropout_p", "scale")},
        "window": [left, right],
        "deterministic": torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        "batch_invariant": options["batch_invariant"],
        "what wants a gradient": [name for name, t in given.items() if wants_gradient(t)],
    }  # fmt: skip
    own = {"lengths": [rows, keys]}
    for name in ("mask", "bias"):
        tensor = tensors[name]
        own[name] = None if tensor is None else ([1] * 4 + list(tensor.shape))[-4:]
    return {"equal": equal, "own": own}


def _has_rows(name: str, owned: list[dict[str, Any]], sizes: tuple[int, int, int]) -> bool:
    """Whether a mask or bias has rows of its own on each rank; its shape must fit, on every rank."""
    batch, heads, keys = sizes
    if owned[0][name] is None:
        return False
    has_rows = all(own[name][2] == own["lengths"][0] for own in owned)
    for rank, own in enumerate(owned):
        shape, rows = own[name], own["lengths"][0]
        fits = all(a in (1, b) for a, b in zip(shape, (batch, heads, rows, keys), strict=True))
        if not fits or (not has_rows and shape[2] != 1):
            raise AttentionError(
                f"{name} of shape {tuple(shape)} on rank {rank} of the group does not broadcast to "
                f"{(batch, heads, rows, keys)}, [batch, heads, this rank's queries, all keys]"
            )
    return has_rows


def draw(query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group]) -> Tensor:
    """The random state of the whole call, (seed, offset): the first rank's, so that all have one map.

    Every rank draws, so that their generators keep in step.
    """
    state = _ops.draw_rng_state(query, key, value)
    for group in reversed(groups):
        if group.size > 1:
            dist.broadcast(state, group_src=0, group=group.pg)
    return state


def whole_call(options: Options, band: Band, bottom_right: bool) -> ulysses.Attend:
    """The operator on all rows of some heads, with its own autograd."""
    sides = {"window_left": band.left, "window_right": band.right, "bottom_right": bottom_right}

    def call(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        whole = Call(slice(0, q.shape[2]), slice(0, k.shape[2]), slice(0, q.shape[2]), sides)
        return local.forward(q, k, v, extras, whole, options)

    return call


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any,
    *,
    method: str = "auto",
    balance: str = "zigzag",
    causal: bool = False,
    window: Window | None = None,
    align: str = "top_left",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    check: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_ext.attention` of a sequence whose tokens are dealt over ranks; each gets its own rows of it.

    A collective: every rank of the group calls it, and runs backward through it, in the same order. Positions (of
    bands, slopes and dropout) are those in the whole sequence of L queries and S keys.

    Args:
        query: (B, Hq, n, E), the n tokens of this rank, in the order of ``positions``; other ranks may hold more or
            fewer. float16, bfloat16, float32 or float64.
        key: (B, Hk, m, E), this rank's keys; Hk divides Hq.
        value: (B, Hv, m, Ev); Hv divides Hq.
        group: a ProcessGroup, or a DeviceMesh of one dimension; for "usp" of two, (across hosts, within a host).
        method: "ulysses", "allgather", "ring" or "usp" (docs/use/distributed.md says what each takes), or "auto".
        balance: which tokens a rank holds: "zigzag", a chunk from the front and one from the back, so that all have the
            same work under a causal band; or "contiguous". The sequence is dealt by ``shard_sequence``.
        causal, window, align, softcap, dropout_p, scale, deterministic, batch_invariant: as in ``attention``, the same
            on all ranks. Dropout drops what one rank's call drops, by the generator of the group's first rank.
        mask, bias: this rank's rows against all keys in the order of the sequence, broadcastable to (B, Hq, n, S). A
            bias has its gradient in its own shape.
        sinks, alibi_slopes: of all heads, the same on all ranks, with gradient.
        return_lse: return (out, lse).
        check: whether ranks compare their arguments: None in each call where that does not wait for a GPU, else once
            for a signature of this rank; True always; False once. Other ranks' lengths are remembered with it.

    Returns:
        out (B, Hq, n, Ev) and, with ``return_lse``, lse (B, Hq, n), as the whole call has them for these rows.
        Gradients of query, key and value, and of a bias with rows, are whole. What all ranks share (sinks, slopes, a
        bias of one row) gets this rank's part: their sum over the group is the gradient, as of any other parameter
        where a rank sees some tokens alone. Second derivatives are those of "ulysses" in every method.

    Raises:
        AttentionError: shapes, dtypes or options that do not fit, that differ between ranks, or that the method does
            not take; on every rank.
        TypeError: an argument of a wrong type, on the rank that has it; the others raise an AttentionError.
    """
    groups = groups_of(group)
    tensors = {"mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    given: dict[str, Any] = {
        "method": method, "balance": balance, "causal": causal, "window": window, "align": align, "softcap": softcap,
        "dropout_p": dropout_p, "scale": scale, "deterministic": deterministic, "batch_invariant": batch_invariant,
        "return_lse": return_lse,
    }  # fmt: skip
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    if all(isinstance(t, Tensor) for t in (query, key, value)):
        query, key, value = cast((query, key, value))
    owned = agree(groups, device, lambda: _describe(query, key, value, tensors, given), check)
    queries, keys = (layout_of(tuple(own["lengths"][i] for own in owned), balance) for i in range(2))
    sizes = (query.shape[0], query.shape[1], keys.length)
    has_rows = {name: _has_rows(name, owned, sizes) for name in ("mask", "bias")}
    band = Band.of(causal, window or (None, None), align == "bottom_right", queries.length, keys.length)
    options = Options(
        given["softcap"], given["dropout_p"], given["scale"], deterministic, batch_invariant, query.shape[1]
    )
    # What others refuse does not count where "ulysses" was asked for, which has every map.
    drops = options.dropout_p > 0 and method != "ulysses"
    facts = facts_of(
        query, key, value, sizes_of(groups), (queries, keys), band, alibi_slopes is not None, drops, batch_invariant
    )
    chosen = choose.choose(method, facts, links_for(method, groups, query, options))
    state = draw(query, key, value, groups) if options.dropout_p > 0 else None
    extras = Extras(mask, bias, alibi_slopes, sinks, state)
    out, lse = run(
        chosen.method, groups, (queries, keys), band, align == "bottom_right", options, extras, has_rows,
        (query, key, value),
    )  # fmt: skip
    return (out, lse) if return_lse else out


def go_by_links(method: str, groups: Sequence[Group], options: Options) -> bool:
    """Whether what was measured may decide: not where the bits of a result may not change from run to run."""
    return method == "auto" and len(groups) == 1 and not (options.deterministic or options.batch_invariant)


def links_for(method: str, groups: Sequence[Group], query: Tensor, options: Options) -> Links | None:
    """What "auto" estimates with; a collective the first time."""
    return links_of(groups[0], query.device, query.dtype) if go_by_links(method, groups, options) else None


def facts_of(
    query: Tensor, key: Tensor, value: Tensor, ranks: tuple[int, ...], layouts: tuple[Layout, Layout], band: Band,
    slopes: bool, drops: bool, batch_invariant: bool,
) -> choose.Facts:  # fmt: skip
    queries, keys = layouts
    return choose.Facts(
        ranks=ranks,
        batch=query.shape[0],
        heads=(query.shape[1], key.shape[1], value.shape[1]),
        columns=(query.shape[3], value.shape[3]),
        lengths=(queries.length, keys.length),
        itemsize=query.element_size(),
        seen=band.share(keys.length),
        dropout_has_map=not drops or ring.has_dropout_map(band, queries, keys, slopes),
        batch_invariant=batch_invariant,
        busiest=busiest(band, queries, keys.length),
    )


def _by_diagonal(band: Band, queries: Layout, keys: Layout) -> bool:
    """Whether no query sees a key beyond its diagonal, and all diagonals lie within the keys: one call has slopes."""
    return band.right == 0 and queries.length + band.offset <= keys.length


def explain_context_parallel(
    query: Tensor, key: Tensor, value: Tensor, ranks: Any, *, method: str = "auto",
    balance: str = "zigzag", causal: bool = False, window: Window | None = None, align: str = "top_left",
    alibi_slopes: Tensor | None = None, dropout_p: float = 0.0, deterministic: bool | None = None,
    batch_invariant: bool = False,
) -> choose.Choice:  # fmt: skip
    """Which method computes a call of ``context_parallel_attention``, why, what each one sends and what it refuses.

    Nothing is computed or communicated, so one rank may ask alone. With a number of ranks bytes alone decide. With a
    group what its links carry counts as in the call, once the first call of "auto" in the group has measured it; this
    does not. Printed, it is a line for each method.

    Args:
        query, key, value: this rank's tokens, as in the call; the others are taken to hold as many. They may be on the
            device "meta".
        ranks: how many there are, or (across, within) of a mesh; or the group or the mesh itself.
        method, balance, causal, window, align, alibi_slopes, dropout_p, deterministic, batch_invariant: as in the call.
            No other option matters.

    Returns:
        ``method``, ``why``, ``sent`` (bytes that a rank sends, forward and backward, for each method that takes the
        call; an upper bound, since no band is counted), ``refused`` (why a method does not), and with a group whose
        links were measured ``links`` and ``seconds`` (estimated, for each method).

    Raises:
        AttentionError: a method that was asked for does not take the call.
    """
    left, right = check_native(query, key, value, window, align)
    check_balance(balance), check_method(method)
    groups = [] if isinstance(ranks, (int, tuple, list)) else groups_of(ranks)
    mesh = sizes_of(groups) or ((ranks,) if isinstance(ranks, int) else tuple(ranks))
    total = math.prod(mesh)
    queries, keys = (layout_of((t.shape[2],) * total, balance) for t in (query, key))
    band = Band.of(causal, (left, right), align == "bottom_right", queries.length, keys.length)
    facts = facts_of(
        query, key, value, mesh, (queries, keys), band, alibi_slopes is not None, dropout_p > 0, batch_invariant
    )
    options = Options(deterministic=deterministic, batch_invariant=batch_invariant)
    if total == 1 or not go_by_links(method, groups, options):
        return choose.choose(method, facts)
    links = known_links(groups[0], query.device, query.dtype)
    chosen = choose.choose(method, facts, links)
    note = "" if links else "nothing; the first call of method='auto' in the group measures its links, if it can"
    return replace(chosen, note=note)


def run(
    method: str, groups: Sequence[Group], layouts: tuple[Layout, Layout], band: Band, bottom_right: bool,
    options: Options, extras: Extras, has_rows: dict[str, bool], tensors: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    queries, keys = layouts
    query, key, value = tensors
    drops = options.dropout_p > 0
    by_key = extras.mask is not None or extras.bias is not None or drops
    matters = Matters(keys=by_key, rows=drops, distance=extras.slopes is not None)

    def by_heads(group: Group, of_queries: Layout, of_keys: Layout) -> ulysses.Attend:
        def call(q: Tensor, k: Tensor, v: Tensor, own: Extras) -> tuple[Tensor, Tensor]:
            plan = ulysses.plan(group, of_queries, of_keys, q.shape[1], 2)
            return ulysses.attend(plan, own, has_rows, q, k, v, whole_call(options, band, bottom_right))

        return call

    again = by_heads(groups[0], queries, keys)
    if method == "ulysses":
        return again(query, key, value, extras)
    if method == "allgather" and matters.distance and not _by_diagonal(band, queries, keys):
        plan = allgather.plan_by_distance(groups[0], queries, keys, band, options)
        return allgather.attend(plan, again, extras, query, key, value)
    if method == "allgather":
        calls = [local.calls_of(band, held, keys.length, extras.slopes is not None, drops) for held in queries.ranks]
        return allgather.attend(allgather.plan(groups[0], keys, calls, options, 2), again, extras, query, key, value)
    if method == "ring":
        plan = ring.plan(groups[0], queries, keys, band, options, matters)
        return ring.attend(plan, again, extras, query, key, value)
    across, inside = groups
    outer = [outer_layout(layout, across.size, inside.size) for layout in layouts]
    around, again = ring.plan(across, *outer, band, options, matters), by_heads(across, *outer)
    of_queries, of_keys = (within(layout, across.rank, inside.size) for layout in layouts)
    plan = ulysses.plan(inside, of_queries, of_keys, query.shape[1], 2)
    return ulysses.attend(
        plan, extras, has_rows, query, key, value, lambda q, k, v, own: ring.attend(around, again, own, q, k, v)
    )
