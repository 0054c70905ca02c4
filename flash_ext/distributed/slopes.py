"""alibi_slopes of a part of a row's keys: the operator's own on the diagonal, elsewhere a bias and a shift of lse.

With d = the position of the part's first row, on the diagonal, less that of its first key, row a is |a + d - b| away
from key b. That is the operator's own distance where d is 0. Where all R rows lie on one side of all K keys,

    behind them    a + d - b = (a + d - K + 1) + (K - 1 - b)        of the row + of the key, both at least 0
    before them    b - a - d = (-d - a) + b

so that the key's share is a bias of one row, and the row's only moves the part's lse, of which merging makes a weight.
A part that is neither is cut in two that are. Packed keys that are not the rows themselves lie on one side of them, and
one sequence at most has some of both; where it begins stands on the device, and so do the shares.

Called by pairs.py, packed_ring.py and partial.py, and by ring.py, which asks for parts alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_ext.distributed.layout import Band, Part, Segment, visible
from flash_ext.distributed.local import Extras


def parts_of(band: Band, rows: Segment, keys: Segment, apart: bool, step: int = 1) -> list[Part]:
    """What is seen of rows x keys; with ``apart`` in parts of which each is one of the three kinds above.

    ``step``: of ``visible``.
    """
    part = visible(band, rows, keys, step)
    if part is None:
        return []
    d = diagonal(band, part)
    count_q, count_k = part.queries.stop - part.queries.start, part.keys.stop - part.keys.start
    if not apart or d == 0 or d >= count_k - 1 or count_q - 1 + d <= 0:
        return [part]
    # The second piece of keys, or of rows, begins on the diagonal.
    mine, theirs = (_cut(segment, of) for segment, of in ((rows, part.queries), (keys, part.keys)))
    if d > 0:
        halves = [(mine, _cut(theirs, piece)) for piece in _pieces(part.keys, d)]
    else:
        halves = [(_cut(mine, piece), theirs) for piece in _pieces(part.queries, -d)]
    return [found for half in halves for found in parts_of(band, *half, apart, step)]


def _pieces(positions: slice, at: int) -> tuple[slice, slice]:
    middle = positions.start + at
    return slice(positions.start, middle), slice(middle, positions.stop)


def _cut(segment: Segment, positions: slice) -> Segment:
    return Segment(
        positions.start, segment.row + positions.start - segment.start, positions.stop - positions.start
    )  # fmt: skip


def diagonal(band: Band, part: Part) -> int:
    return part.queries.start + band.offset - part.keys.start


@dataclass(frozen=True)
class Between:
    """Packed rows and keys that are apart: the number of the sequence that has some of both, and the shares in it."""

    sequence: Tensor
    to_key: Tensor
    to_row: Tensor


@dataclass(frozen=True)
class InCall:
    """What the slopes are in one call. ``to_key``, ``to_row``: the shares of the distance; None: the operator's own.

    ``every``: of each of packed sequences, where ``slopes`` are those of one; ``hidden``: rows without any key.
    """

    extras: Extras
    slopes: Tensor | None = None
    to_key: Tensor | None = None
    to_row: Tensor | None = None
    every: Tensor | None = None
    sequence: Tensor | None = None
    hidden: Tensor | None = None

    def moved(self, lse: Tensor, sign: int) -> Tensor:
        """From the call's own lse to that of the distances (1), or back (-1), in double."""
        lse = lse.double()
        if self.slopes is not None and self.to_row is not None:
            lse = lse - sign * self.slopes.double().unsqueeze(-1) * self.to_row
        return lse if self.hidden is None else lse.masked_fill(self.hidden, -torch.inf)

    def shown(self, rows: Tensor | None) -> Tensor | None:
        """(1, heads, rows, columns) or (1, heads, rows), 0 where a row has no key, whatever other sequences hold."""
        if self.hidden is None or rows is None:
            return rows
        return rows.masked_fill(self.hidden if rows.dim() == 3 else self.hidden.unsqueeze(-1), 0.0)

    def wanted(self, of_inputs: list[bool]) -> list[bool]:
        """Which gradients the operator is asked for: of query, key, value, bias and slopes."""
        *others, of_bias, of_slopes = of_inputs
        if self.to_key is None:
            return [*others, of_bias, of_slopes]
        return [*others, of_bias or of_slopes, False]

    def gradients(self, grads: list[Tensor], bias: Tensor | None, grad_lse: Tensor | None, lse: Tensor) -> list[Tensor]:
        """The operator's gradients, with those of the given bias and of the slopes in their places.

        The sum of dS over a row is ``grad_lse``, where the row has a key.
        """
        if self.slopes is None or self.to_key is None or self.to_row is None:
            return grads
        of_sum = grads[3].double()
        of_slopes = -(of_sum * self.to_key).sum((-2, -1)).sum_to_size(self.slopes.shape)
        if grad_lse is not None:
            sums = grad_lse.double().masked_fill(lse == -torch.inf, 0.0)
            of_slopes -= (sums * self.to_row).sum(-1).sum_to_size(self.slopes.shape)
        if self.every is not None:
            numbers = torch.arange(self.every.shape[0], device=of_slopes.device)
            of_slopes = torch.where((numbers == self.sequence).unsqueeze(-1), of_slopes, 0.0)
        of_bias = of_sum.sum_to_size(bias.shape) if bias is not None else grads[3]
        return [*grads[:3], of_bias, of_slopes]


def in_part(extras: Extras, slopes: Tensor | None, d: int, rows: int, keys: int, wide: torch.dtype) -> InCall:
    """``extras``: those of the part, without slopes."""
    if slopes is None:
        return InCall(extras)
    if d == 0:
        return InCall(replace(extras, slopes=slopes), slopes)
    a, b = torch.arange(rows, device=slopes.device), torch.arange(keys, device=slopes.device)
    behind = d >= keys - 1
    to_key, to_row = (keys - 1 - b, a + d - keys + 1) if behind else (b, -d - a)
    of_key = -slopes.to(wide)[..., None, None] * to_key.to(wide)
    bias = of_key if extras.bias is None else extras.bias.to(wide) + of_key
    return InCall(replace(extras, bias=bias), slopes, to_key.double(), to_row.double())


def in_sequence(extras: Extras, slopes: Tensor | None, between: Between | None, wide: torch.dtype) -> InCall:
    """Of packed sequences. ``slopes``: (heads,) or (sequences, heads)."""
    if slopes is None:
        return InCall(extras)
    if between is None:
        return InCall(replace(extras, slopes=slopes), slopes)
    every = slopes if slopes.dim() == 2 else None
    own = slopes if every is None else every.index_select(0, between.sequence).squeeze(0)
    bias = -own.to(wide)[:, None, None] * between.to_key.to(wide)
    return InCall(
        replace(extras, bias=bias), own, between.to_key.double(), between.to_row.double(), every, between.sequence
    )  # fmt: skip
