"""The calls of a ring on packed sequences: rows t0 to t1 of this rank, keys u0 to u1 of another one.

    cu_seqlens_q = clamp(cu - t0, 0, t1 - t0)        cu_seqlens_k = clamp(cu - u0, 0, u1 - u0)

Where both are the same tokens, band and slopes are the operator's. Else one sequence at most has some of both: with
keys in front of the rows that of row t0, whose keys end at u1; with keys behind them that of row t1 - 1, whose keys
begin at u0. Where it has its other end stands on the device. What is seen whole needs no more. A window that cuts keys
off is a band only where rows and keys have one end in common. So the call takes the n rows that may see a key for rows
of that sequence, aligned with its keys at their known end, and those that are not are hidden afterwards:

    keys in front    n = left - (t0 - u1) rows from t0 on    aligned bottom right, to the left by left - (t0 - u1) - n
    keys behind      n = right - (u0 - t1) rows up to t1     aligned top left, to the right by right - (u0 - t1) - n

Causal or without a band, and without slopes, several segments are one call as in pairs.py: a sequence's tokens are side
by side among a rank's own, in order.

Called by ``context_parallel_attention_varlen``. Invariant: nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_ext.distributed import ring
from flash_ext.distributed.exchange import Group
from flash_ext.distributed.layout import Band, Layout, Segment
from flash_ext.distributed.local import Call, Options
from flash_ext.distributed.pairs import Pair
from flash_ext.distributed.partial import Setting
from flash_ext.distributed.slopes import Between

END = torch.iinfo(torch.int32).max


def plan(
    group: Group, layout: Layout, band: Band, cu_seqlens: Tensor, max_seqlen: int, options: Options, slopes: bool
) -> ring.Plan:  # fmt: skip
    packed = _Packed(band, cu_seqlens, max_seqlen, slopes)
    held = sorted(layout.ranks[group.rank], key=lambda segment: segment.row)
    positions = [torch.arange(segment.start, segment.end, device=cu_seqlens.device) for segment in held]
    pairs = ring.by_source(group.rank, [packed.pairs(held, of_rank) for of_rank in layout.ranks])
    return ring.Plan(group, layout, pairs, Setting(options, torch.cat(positions) < cu_seqlens[-1]))


@dataclass(frozen=True)
class _Packed:
    band: Band
    cu: Tensor
    longest: int
    slopes: bool
    lengths: dict[tuple[Segment, ...], Tensor] = field(default_factory=dict)  # of the sequences in segments

    def pairs(self, rows: Sequence[Segment], keys: Sequence[Segment]) -> list[Pair]:
        """What the rows of one rank see of the keys of one rank."""
        band = self.band
        seen = [(r, k) for r in rows for k in keys if r.size and k.size and not self._is_hidden(r, k)]
        if len(seen) > 1 and band.left is None and band.right in (0, None) and not self.slopes:
            of_rows, of_keys = (list(dict.fromkeys(side)) for side in zip(*seen, strict=True))
            on_diagonal = of_rows == of_keys
            if on_diagonal or len(seen) == len(of_rows) * len(of_keys):
                return [self._tight(of_rows, of_keys, band.right if on_diagonal else None)]
        return [self._pair(r, k) for r, k in seen]

    def _is_hidden(self, rows: Segment, keys: Segment) -> bool:
        left, right = self.band.left, self.band.right
        return (left is not None and keys.end <= rows.start - left) or (
            right is not None and keys.start >= rows.end + right
        )

    def _pair(self, rows: Segment, keys: Segment) -> Pair:
        left, right = self.band.left, self.band.right
        if keys == rows:
            return self._tight([rows], [keys], right, left)
        in_front = keys.start < rows.start
        if in_front and left is not None and keys.start < rows.end - 1 - left:
            return self._cut(rows, keys, left - (rows.start - keys.end), in_front)
        if not in_front and right is not None and rows.start + right < keys.end - 1:
            return self._cut(rows, keys, right - (keys.start - rows.end), in_front)
        return self._tight([rows], [keys], between=self._between(rows, keys, in_front))

    def _lengths_in(self, segments: Sequence[Segment]) -> Tensor:
        which = tuple(segments)
        if which not in self.lengths:
            parts = [(self.cu - segment.start).clamp(0, segment.size) for segment in which]
            self.lengths[which] = torch.stack(parts).sum(0, dtype=torch.int32)
        return self.lengths[which]

    def _tight(
        self, rows: Sequence[Segment], keys: Sequence[Segment], right: int | None = None, left: int | None = None,
        between: Between | None = None,
    ) -> Pair:  # fmt: skip
        """Each sequence has its own rows."""
        lengths = {"cu_seqlens_q": self._lengths_in(rows), "max_q": min(self.longest, sum(of.size for of in rows))}
        return self._of(rows, keys, lengths, {"window_left": left, "window_right": right}, between)

    def _cut(self, rows: Segment, keys: Segment, reach: int, in_front: bool) -> Pair:
        """A window of which ``reach`` rows see something at most, the nearest ones."""
        count = min(rows.size, reach, self.longest)
        near = min(keys.size, reach)
        if in_front:
            rows = Segment(rows.start, rows.row, count)
            keys = Segment(keys.end - near, keys.row + keys.size - near, near)
            anchor, sides = rows.start, {"window_left": reach - count, "bottom_right": True}
            end = torch.where(self.cu > anchor, self.cu, END).min()
        else:
            rows = Segment(rows.end - count, rows.row + rows.size - count, count)
            keys = Segment(keys.start, keys.row, near)
            anchor, sides = rows.end - 1, {"window_right": reach - count}
            end = torch.where(self.cu <= anchor, self.cu, 0).max()
        positions = torch.arange(rows.start, rows.end, device=self.cu.device)
        lengths = {"cu_seqlens_q": (self.cu > anchor).to(torch.int32) * count, "max_q": count}
        between = self._between(rows, keys, in_front)
        return self._of([rows], [keys], lengths, sides, between, positions >= end if in_front else positions < end)

    def _of(
        self, rows: Sequence[Segment], keys: Sequence[Segment], lengths: dict[str, Any], sides: dict[str, Any],
        between: Between | None, hidden: Tensor | None = None,
    ) -> Pair:  # fmt: skip
        first, last = rows[0], rows[-1]
        read = slice(keys[0].row, keys[-1].row + keys[-1].size)
        lengths |= {"cu_seqlens_k": self._lengths_in(keys), "max_k": min(self.longest, read.stop - read.start)}
        # Positions are asked for by masks, biases and dropout alone, which packed tokens do not have here.
        call = Call(slice(first.row, last.row + last.size), read, slice(first.start, last.end), sides | lengths)
        return Pair(call, read, between=between, hidden=hidden)

    def _between(self, rows: Segment, keys: Segment, in_front: bool) -> Between | None:
        """The shares of the distance of the operator's j-th key of the sequence that has rows and keys here."""
        if not self.slopes:
            return None
        device = self.cu.device
        anchor = rows.start if in_front else rows.end - 1
        sequence = (self.cu[1:-1] <= anchor).sum().view(1)
        j = torch.arange(min(self.longest, keys.size), device=device)
        positions = torch.arange(rows.start, rows.end, device=device)
        if not in_front:
            return Between(sequence, j, keys.start - positions)
        first = self.cu.index_select(0, sequence).clamp(min=keys.start)
        return Between(sequence, (keys.end - 1 - first - j).clamp(min=0), positions - (keys.end - 1))
