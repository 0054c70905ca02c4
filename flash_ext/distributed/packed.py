"""Context parallel of packed sequences: their tokens, one behind the other, are dealt over ranks as one sequence is.

A rank's tokens from t0 to t1 cut sequence b to its rows max(cu[b], t0) to min(cu[b + 1], t1). With keys that end at t1
the diagonal of each sequence ends in its bottom right, whatever was cut off in front:

    cu_seqlens_q = clamp(cu - t0, 0, t1 - t0)        cu_seqlens_k = clamp(cu, max = t1)

so causal bands, windows to the left and slopes are the operator's. Lengths stay on the device.

In a ring: packed_ring.py.

Called by users and by ``context_parallel``. Positions in a sequence (of masks, biases, dropout) would need where each
one was cut, which the operator is not told; Ulysses, which computes whole sequences, has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_ext.arguments import Window, check_band, flag, number
from flash_ext.distributed import allgather, choose, local, packed_ring, ring, ulysses
from flash_ext.distributed.agree import agree
from flash_ext.distributed.dense import cast, check_method, draw, groups_of, links_for, sizes_of, wants_gradient
from flash_ext.distributed.exchange import Group
from flash_ext.distributed.layout import Band, Layout, busiest, check_balance, layout_of, outer_layout, within
from flash_ext.distributed.local import Call, Extras, Options
from flash_ext.errors import AttentionError

_HAS_NO_ROWS = {"mask": False, "bias": False}  # of a rank's own: each has all of it


def _describe(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    tensors: dict[str, Tensor | None], options: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    left, right = check_band(options["window"], options["align"])
    check_balance(options["balance"]), check_method(options["method"])
    given = {"query": query, "key": key, "value": value, "cu_seqlens": cu_seqlens} | tensors
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name not in tensors):
            raise TypeError(f"{name} is of type {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor is not None and tensor.device != query.device:
            raise AttentionError(f"{name} is on {tensor.device}, but query is on {query.device}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.shape[0] == 0:
        raise AttentionError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; it must be torch.int32 of "
            "(sequences + 1,)"
        )
    if not isinstance(max_seqlen, int):
        raise TypeError(f"max_seqlen is of type {type(max_seqlen).__name__}; it must be an int, a number of rows")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise AttentionError(f"{name} of shape {tuple(tensor.shape)} must be (rows, heads, columns)")
        if tensor.shape[0] != query.shape[0]:
            raise AttentionError(
                f"query and {name} have {query.shape[0]} and {tensor.shape[0]} rows; they must be equal"
            )
        if tensor.shape[1] == 0 or query.shape[1] % tensor.shape[1]:
            raise AttentionError(
                f"{name} has {tensor.shape[1]} heads; their number must divide query's {query.shape[1]}"
            )
    for name in ("softcap", "dropout_p", "scale"):
        if options[name] is not None:
            options[name] = number(options[name], name)
    for name in ("causal", "batch_invariant", "return_lse"):
        flag(options[name], name)
    local.check(query, key, value, tensors, cu_seqlens, options)
    deterministic = options["deterministic"]
    equal: dict[str, Any] = {
        "the call": "context_parallel_attention_varlen",
        **{f"the heads and columns of {name}": list(given[name].shape[1:]) for name in ("query", "key", "value")},
        **{f"the dtype of {name}": str(given[name].dtype) for name in ("query", "key", "value")},
        "the kind of device": query.device.type,
        **{name: None if given[name] is None else [str(given[name].dtype), *given[name].shape]
           for name in ("cu_seqlens", *tensors)},
        "max_seqlen": max_seqlen,
        **{name: options[name] for name in ("method", "balance", "causal", "align", "softcap", "dropout_p", "scale")},
        "window": [left, right],
        "deterministic": torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        "batch_invariant": options["batch_invariant"],
        "what wants a gradient": [name for name, t in given.items() if wants_gradient(t)],
    }  # fmt: skip
    return {"equal": equal, "own": {"length": query.shape[0]}}


def context_parallel_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    group: Any,
    *,
    max_seqlen: int,
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
    """:func:`flash_ext.attention_varlen` of packed tokens that are dealt over ranks; each gets its own rows of it.

    A collective, as :func:`context_parallel_attention`, whose arguments mean the same here. Sequences may begin on one
    rank and end on another.

    Args:
        query: (n, Hq, E), the packed tokens that this rank holds, of T in all. float16, bfloat16, float32 or float64.
        key: (n, Hk, E); Hk divides Hq. value: (n, Hv, Ev); Hv divides Hq.
        cu_seqlens: (sequences + 1,) int32, of the whole: from 0 to T, the same on all ranks; not read on the host.
        group: a ProcessGroup, or a DeviceMesh of one dimension; for "usp" of two, (across hosts, within a host).
        max_seqlen: the length of the longest sequence, or more.
        method: "ulysses", which takes every option; "allgather", with causal=True, or with no window and no
            alibi_slopes, and no mask, bias or dropout_p; "ring" and "usp", which take any window and slopes, but none
            of those three either; or "auto".
        mask, bias: broadcastable to (sequences, Hq, max_seqlen, max_seqlen), all of it on every rank.
        alibi_slopes: (Hq,) or (sequences, Hq). sinks: (Hq,).

    Returns:
        out (n, Hq, Ev) and, with ``return_lse``, lse (Hq, n). Of mask-like and shared tensors each rank has its part of
        the gradient.

    Raises:
        AttentionError, TypeError: as :func:`context_parallel_attention`.
    """
    groups = groups_of(group)
    tensors = {"mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    given: dict[str, Any] = {
        "method": method, "balance": balance, "causal": causal, "window": window, "align": align, "softcap": softcap,
        "dropout_p": dropout_p, "scale": scale, "deterministic": deterministic, "batch_invariant": batch_invariant,
        "return_lse": return_lse,
    }  # fmt: skip
    if all(isinstance(t, Tensor) for t in (query, key, value)):
        query, key, value = cast((query, key, value))
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    owned = agree(groups, device, lambda: _describe(query, key, value, cu_seqlens, max_seqlen, tensors, given), check)
    layout = layout_of(tuple(own["length"] for own in owned), balance)
    band = Band.of(causal, window or (None, None), False, 0, 0)
    seen = band.share(layout.length) * min(1.0, max_seqlen / max(layout.length, 1))
    # No row sees more keys than the longest sequence has, to either side.
    reach = [max_seqlen if side is None else min(side, max_seqlen) for side in (band.left, band.right)]
    facts = choose.Facts(
        ranks=sizes_of(groups), batch=1, heads=(query.shape[1], key.shape[1], value.shape[1]),
        columns=(query.shape[2], value.shape[2]), lengths=(layout.length, layout.length),
        itemsize=query.element_size(), packed=True, seen=seen,
        scores=mask is not None or bias is not None or given["dropout_p"] > 0,
        band_is_packable=band.right == 0 or (band.left is None and band.right is None and alibi_slopes is None),
        batch_invariant=batch_invariant, busiest=busiest(Band(*reach, 0), layout, layout.length),
    )  # fmt: skip
    options = Options(
        given["softcap"], given["dropout_p"], given["scale"], deterministic, batch_invariant, query.shape[1]
    )
    chosen = choose.choose(method, facts, links_for(method, groups, query, options))
    state = draw(query, key, value, groups) if options.dropout_p > 0 else None
    extras = Extras(mask, bias, alibi_slopes, sinks, state)
    again = _by_heads(groups[0], layout, band, cu_seqlens, max_seqlen, options)
    if chosen.method == "ulysses":
        out, lse = again(query, key, value, extras)
    elif chosen.method == "ring":
        around = packed_ring.plan(groups[0], layout, band, cu_seqlens, max_seqlen, options, alibi_slopes is not None)
        out, lse = ring.attend(around, again, extras, query, key, value)
    elif chosen.method == "usp":
        across, inside = groups
        outer = outer_layout(layout, across.size, inside.size)
        around = packed_ring.plan(across, outer, band, cu_seqlens, max_seqlen, options, alibi_slopes is not None)
        again = _by_heads(across, outer, band, cu_seqlens, max_seqlen, options)
        of_rows = within(layout, across.rank, inside.size)
        out, lse = ulysses.attend(
            ulysses.plan(inside, of_rows, of_rows, query.shape[1], 0), extras, _HAS_NO_ROWS, query, key, value,
            lambda q, k, v, own: ring.attend(around, again, own, q, k, v),
        )  # fmt: skip
    else:
        own = groups[0].rank
        calls = [
            _calls(layout, rank, band, cu_seqlens if rank == own else None, max_seqlen)
            for rank in range(groups[0].size)
        ]  # fmt: skip
        plan = allgather.plan(groups[0], layout, calls, options, 0)
        out, lse = allgather.attend(plan, again, extras, query, key, value)
    return (out, lse) if return_lse else out


def _by_heads(
    group: Group, layout: Layout, band: Band, cu_seqlens: Tensor, max_seqlen: int, options: Options
) -> ulysses.Attend:  # fmt: skip
    rows = slice(0, layout.length)
    sides = {"window_left": band.left, "window_right": band.right}
    lengths = {"cu_seqlens_q": cu_seqlens, "max_q": max_seqlen, "max_k": max_seqlen}
    whole = Call(rows, rows, rows, sides | lengths)

    def call(q: Tensor, k: Tensor, v: Tensor, own: Extras) -> tuple[Tensor, Tensor]:
        return ulysses.attend(
            ulysses.plan(group, layout, layout, q.shape[1], 0), own, _HAS_NO_ROWS, q, k, v,
            lambda q, k, v, own: local.forward(q, k, v, own, whole, options),
        )  # fmt: skip

    return call


def _calls(layout: Layout, rank: int, band: Band, cu_seqlens: Tensor | None, max_seqlen: int) -> list[Call]:
    """A call for each of a rank's segments, with the keys up to its end, or all. Without ``cu_seqlens`` it says what is
    read and no more."""
    calls = []
    for segment in layout.ranks[rank]:
        if segment.size == 0:
            continue
        end = segment.end if band.right == 0 else layout.length
        told: dict[str, Any] = {}
        if cu_seqlens is not None:
            told = {
                "cu_seqlens_q": (cu_seqlens - segment.start).clamp(0, segment.size),
                "cu_seqlens_k": cu_seqlens.clamp(max=end),
                "max_q": min(max_seqlen, segment.size),
                "max_k": min(max_seqlen, end),
                "window_left": band.left,
                "window_right": band.right,
                "bottom_right": band.right == 0,
            }
        calls.append(Call(segment.rows, slice(0, end), slice(segment.start, segment.end), told))
    return calls
