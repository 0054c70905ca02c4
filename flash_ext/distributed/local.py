"""One rank's share of the work: calls of the operator on a part of its rows and of the keys.

Called by the methods of context parallel, below autograd. Invariant: a call has all keys that its rows see, or (in a
ring) a part of them whose own log-sum-exp comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flash_ext.distributed.layout import Band, Segment, visible
from flash_ext.errors import AttentionError
from flash_ext.ops import require_c

_ops = torch.ops.flash_ext
MINUS_INFINITY = float("-inf")
DROPOUT_STEP = 16  # positions at which a part of the map of dropout may begin


@dataclass(frozen=True)
class Extras:
    """The tensors beside query, key and value: of this rank's rows, all keys and all heads, or a part of them."""

    mask: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    state: Tensor | None = None  # the random state of dropout, of the whole call
    first_head: int = 0

    def of_heads(self, heads: slice) -> Extras:
        return replace(
            self,
            mask=cut(self.mask, -3, heads),
            bias=cut(self.bias, -3, heads),
            slopes=part_of_heads(self.slopes, heads),
            sinks=part_of_heads(self.sinks, heads),
            first_head=self.first_head + heads.start,
        )

    def of_pairs(self, rows: slice, keys: slice) -> Extras:
        return replace(self, mask=cut(cut(self.mask, -2, rows), -1, keys), bias=cut(cut(self.bias, -2, rows), -1, keys))


def cut(tensor: Tensor | None, dim: int, part: slice) -> Tensor | None:
    """The part of a tensor along a dimension that it may lack, or be broadcast along."""
    if tensor is None or tensor.dim() < -dim or tensor.shape[dim] == 1:
        return tensor
    return tensor.narrow(dim, part.start, part.stop - part.start)


def part_of_heads(tensor: Tensor | None, heads: slice) -> Tensor | None:
    """The part of slopes or sinks, which have every head of the call, where that is one head, too."""
    return None if tensor is None else tensor.narrow(-1, heads.start, heads.stop - heads.start)


@dataclass(frozen=True)
class Call:
    """Rows of this rank, positions of keys, and what the operator is told of the two."""

    rows: slice
    keys: slice
    queries: slice  # the positions of the rows
    band: dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What all calls share. ``heads`` are those of the whole call, for the map of dropout.

    ``backend``: where none is given, that of the thread of forward; autograd's has no choice of its own. So is
    ``deterministic`` what torch's switch is when this is made, in forward.
    """

    softcap: float = 0.0
    dropout_p: float = 0.0
    scale: float | None = None
    deterministic: bool | None = None
    batch_invariant: bool = False
    heads: int = 0
    backend: str | None = None
    operator: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        names = ("softcap", "dropout_p", "scale", "deterministic", "batch_invariant", "backend")
        object.__setattr__(self, "backend", self.backend or require_c().requested_backend())
        if self.deterministic is None:
            object.__setattr__(self, "deterministic", torch.are_deterministic_algorithms_enabled())
        object.__setattr__(self, "operator", {name: getattr(self, name) for name in names} | {"gqa": True})


def part_of_dropout(query: int, key: int, head: int, heads: int, own_heads: int) -> dict[str, int]:
    """What the operator is told so that it draws the mask of the whole call, which goes by position; nothing where the
    call begins as the whole one does and has all heads."""
    if query == key == 0 and own_heads == heads:
        return {}
    return {
        "dropout_first_query": query, "dropout_first_key": key, "dropout_first_head": head, "dropout_heads": heads,
    }  # fmt: skip


def _arguments(q: Tensor, extras: Extras, call: Call, options: Options) -> dict[str, Any]:
    given = {"mask": extras.mask, "bias": extras.bias, "alibi_slopes": extras.slopes, "sinks": extras.sinks}
    if options.dropout_p > 0:
        given |= part_of_dropout(
            call.queries.start, call.keys.start, extras.first_head, options.heads, q.shape[1]
        )  # fmt: skip
    return given | call.band | options.operator


def forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: Call, options: Options) -> tuple[Tensor, Tensor]:
    """out and lse of the call; tensors are those of its rows and keys."""
    arguments = _arguments(q, extras, call, options)
    # NOTE: not by ``context_parallel``, which sees the operator's calls, and in whose context backward may run.
    with torch._C.DisableTorchFunction():
        if options.dropout_p > 0:
            out, lse = _ops.attention_with_rng_state(q, k, v, extras.state, **arguments, return_lse=True)
        else:
            out, lse, _ = _ops.attention(q, k, v, **arguments, return_lse=True)
    return out, lse


_taken: set[Any] = set()


def check(
    q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor | None], lengths: Tensor | None, given: dict[str, Any]
) -> None:  # fmt: skip
    """Has the operator check what a caller gives, by tensors without memory, before any rank waits for another one.

    Of masks and biases the dtype alone: their shape is that of the whole call. Once for each signature, and unseen by
    dispatch modes: NOTE: selective checkpointing would keep its results for those of the call that is computed again.
    """
    options = {name: given[name] for name in ("softcap", "dropout_p", "scale", "deterministic", "batch_invariant")}
    of = [(t.shape, t.dtype) for t in (q, k, v)]
    small = {name: None if t is None else ((1,) if name in ("mask", "bias") else t.shape, t.dtype)
             for name, t in tensors.items()}  # fmt: skip
    signature = (tuple(of), tuple(small.items()), tuple(options.items()), lengths is not None and lengths.shape)
    if signature in _taken:
        return
    if q.dtype == torch.float8_e4m3fn:
        raise AttentionError(f"query is of {q.dtype}, which context parallel does not take; flash_ext.attention does")
    meta = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in of]
    extra = {n: None if t is None else torch.empty(t[0], dtype=t[1], device="meta") for n, t in small.items()}
    if lengths is not None:
        extra |= {"cu_seqlens_q": torch.empty(lengths.shape, dtype=lengths.dtype, device="meta")}
        options |= {"max_q": 1, "max_k": 1}
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
            _ops.attention(*meta, **extra, **options, gqa=True)
    except RuntimeError as error:  # through torch.ops it is of the plain class
        raise AttentionError(str(error)) from None
    _taken.add(signature)


def backward(
    grads: tuple[Tensor | None, Tensor | None], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    extras: Extras, call: Call, options: Options, wanted: Sequence[bool], constant_lse: bool = False,
) -> Sequence[Tensor]:  # fmt: skip
    """The gradients of query, key, value, bias and slopes, of those that are wanted; out and lse are the call's own.

    ``constant_lse``: rows have other keys, too; see partial.py. out is not read then.
    """
    state = q.new_empty(0, dtype=torch.int64) if extras.state is None else extras.state
    return _ops.attention_backward(
        *grads, q, k, v, out, lse.contiguous(), state, **_arguments(q, extras, call, options), grad_mask=list(wanted),
        constant_lse=constant_lse,
    )  # fmt: skip


def calls_of(band: Band, held: Sequence[Segment], keys: int, by_diagonal: bool, drops: bool) -> list[Call]:
    """A call for each segment of a rank's queries, with all keys that it sees; none for one that sees nothing.

    ``by_diagonal``: slopes count the distance from the diagonal, so the keys of a call end where that of its last row
    is, and the operator's bottom right is the diagonal.
    """
    calls = []
    for segment in held:
        part = visible(band, segment, Segment(0, 0, keys), DROPOUT_STEP if drops else 1)
        if part is None:
            continue
        first = segment.row + part.queries.start - segment.start
        rows = slice(first, first + part.queries.stop - part.queries.start)
        sides = part.sides
        if by_diagonal:
            if part.keys.stop != part.queries.stop + band.offset:
                raise AssertionError("slopes of keys beyond the diagonal take more than one call")
            sides = {"window_left": band.left, "window_right": 0, "bottom_right": True}
        calls.append(Call(rows, part.keys, part.queries, sides))
    return calls


def empty_results(q: Tensor, columns: int, rows_dim: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and lse of rows that see nothing, to be written to: 0, and -inf or the row's sink."""
    order = sorted(range(q.dim() - 1), key=lambda dim: -q.stride(dim))
    shape = [q.shape[dim] for dim in order]
    out = q.new_zeros([*shape, columns]).permute([*(order.index(dim) for dim in range(q.dim() - 1)), q.dim() - 1])
    leading = [size for dim, size in enumerate(q.shape[:-1]) if dim != rows_dim]
    lse = q.new_full([*leading, q.shape[rows_dim]], MINUS_INFINITY, dtype=_lse_dtype(q))
    if sinks is not None:
        lse.copy_(sinks.unsqueeze(-1).expand_as(lse))
    return out, lse


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
