"""Rows of a sharded sequence, sent from the ranks that hold them to the ranks that read them, and back.

A buffer is (rows, columns) and contiguous, so that any range of rows travels as it lies. All is point to point in one
batch: lengths may differ, and a rank is sent only what it reads. On a GPU the batch runs on NCCL's own stream, beside
what is computed until ``Transfer.wait``.

Called by the methods of context parallel. Invariant: both ends list what travels between two ranks in the same order,
by the sender's segments (there) or the reader's ranges (back), each cut by the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_ext.distributed.layout import Layout

Ranges = tuple[slice, ...]  # positions, ascending, apart


class Group:
    """A process group, or a mesh of one dimension, as this rank sees it."""

    def __init__(self, group: Any) -> None:
        self.pg = group.get_group() if hasattr(group, "get_group") else group
        self.rank, self.size = dist.get_rank(self.pg), dist.get_world_size(self.pg)

    def send(self, tensor: Tensor, to: int) -> dist.P2POp:
        return dist.P2POp(dist.isend, tensor, group=self.pg, group_peer=to)

    def receive(self, tensor: Tensor, source: int) -> dist.P2POp:
        return dist.P2POp(dist.irecv, tensor, group=self.pg, group_peer=source)


class Transfer:
    """A batch under way. What it reads and writes is kept until it is waited for."""

    def __init__(self, operations: list[dist.P2POp]) -> None:
        self._tensors = [operation.tensor for operation in operations]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """On the CPU until it is done; on a GPU the present stream waits, the host does not."""
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []


def _length(part: slice) -> int:
    return part.stop - part.start


class Exchange:
    """Who sends which rows to whom, where ``reads[r]`` are the positions that rank r reads."""

    def __init__(self, group: Group, layout: Layout, reads: Sequence[Ranges]) -> None:
        self.group = group
        mine = reads[group.rank]
        self.rows = sum(map(_length, mine))  # of the buffer that this rank reads
        self.held = layout.size(group.rank)
        self._starts = [(part, sum(map(_length, mine[:i]))) for i, part in enumerate(mine)]
        # Rows that this rank holds and rank r reads; rows of this rank's buffer that rank r holds.
        self.sent: list[list[slice]] = []
        self.received: list[list[slice]] = []
        for rank in range(group.size):
            pairs = [
                (max(segment.start, part.start), min(segment.end, part.stop), segment)
                for segment in layout.ranks[group.rank]
                for part in reads[rank]
            ]
            self.sent.append([slice(s.row + a - s.start, s.row + b - s.start) for a, b, s in pairs if a < b])
            wanted = [
                (max(segment.start, part.start), min(segment.end, part.stop))
                for segment in layout.ranks[rank]
                for part in mine
            ]
            self.received.append([self.place(slice(a, b)) for a, b in wanted if a < b])

    def place(self, positions: slice) -> slice:
        """Where the buffer has a range of positions, which lies in one of those that this rank reads."""
        for part, row in self._starts:
            if part.start <= positions.start and positions.stop <= part.stop:
                return slice(row + positions.start - part.start, row + positions.stop - part.start)
        raise AssertionError(f"positions {positions.start} to {positions.stop} are not among those that are read")

    def gather(self, rows_for: Callable[[int], Tensor], buffer: Tensor) -> list[dist.P2POp]:
        """What fills the buffer (rows, own columns) from every rank's ``rows_for(reader)`` (held, its columns).

        The own part is written at once.
        """
        operations = []
        for rank in range(self.group.size):
            rows = rows_for(rank) if self.sent[rank] else None
            if rank == self.group.rank:
                for source, target in zip(self.sent[rank], self.received[rank], strict=True):
                    buffer[target] = rows[source]
                continue
            operations += [self.group.send(rows[part], rank) for part in self.sent[rank]]
            operations += [self.group.receive(buffer[part], rank) for part in self.received[rank]]
        return operations

    def scatter(self, buffer: Tensor, parts: Sequence[Tensor | None]) -> list[dist.P2POp]:
        """The way back: ``parts[r]`` (held, columns of rank r) gets the rows of rank r's buffer that this rank holds.

        Rows that rank r does not read are left as they are. The own part is not written: see ``received``.
        """
        operations = []
        for rank in range(self.group.size):
            if rank != self.group.rank:
                operations += [self.group.send(buffer[part], rank) for part in self.received[rank]]
                operations += [self.group.receive(parts[rank][part], rank) for part in self.sent[rank]]
        return operations


def merge_ranges(ranges: Sequence[slice]) -> Ranges:
    """Ascending and apart: those that touch or overlap become one."""
    merged: list[slice] = []
    for part in sorted(ranges, key=lambda part: part.start):
        if merged and part.start <= merged[-1].stop:
            merged[-1] = slice(merged[-1].start, max(merged[-1].stop, part.stop))
        else:
            merged.append(part)
    return tuple(merged)


def as_rows(tensor: Tensor, dim: int) -> Tensor:
    """Dimension ``dim`` first, the others flat: (rows, columns)."""
    moved = tensor.movedim(dim, 0)
    return moved.reshape(moved.shape[0], math.prod(moved.shape[1:]))


def from_rows(rows: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """A view of (rows, columns) as a tensor of ``shape``, whose size at ``dim`` is that of the rows."""
    others = [size for i, size in enumerate(shape) if i != dim]
    return rows.view(rows.shape[0], *others).movedim(0, dim)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
