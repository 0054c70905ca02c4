"""Where sequences that lie one behind the other start, and what is used of each. Called by ``attn_bias``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Device = str | torch.device


def _default_device(device: Device | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@dataclass(eq=False)
class SeqLenInfo:
    """Where sequences start, in a tensor and in a list, and the longest and the shortest."""

    seqstart: Tensor  # (sequences + 1,) int32
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Device | None = None) -> SeqLenInfo:
        lengths, starts = list(seqlens), [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        tensor = torch.tensor(starts, dtype=torch.int32, device=_default_device(device))
        return cls(tensor, max(lengths, default=0), min(lengths, default=0), starts)

    def to(self, device: Device) -> SeqLenInfo:
        return replace(self, seqstart=self.seqstart.to(device))

    def intervals(self) -> Iterable[tuple[int, int]]:
        """(first, one behind the last) of each sequence."""
        return zip(self.seqstart_py, self.seqstart_py[1:], strict=False)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """(1, rows, ...) in tensors (b, rows of a sequence, ...), of b equally long sequences each."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ValueError(f"the tensor has shape {tuple(x.shape)}; it must be (1, {self.seqstart_py[-1]}, ...)")
        pieces, first = [], 0
        for count in batch_sizes or [1] * (len(self.seqstart_py) - 1):
            begin, end = self.seqstart_py[first], self.seqstart_py[first + count]
            pieces.append(x[:, begin:end].reshape(count, -1, *x.shape[2:]))
            first += count
        return pieces


@dataclass(eq=False)
class GappySeqLenInfo(SeqLenInfo):
    """Sequences with rows between them that are not used."""

    seqlen: Tensor  # (sequences,) int32
    seqlen_py: list[int]

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], *, device: Device | None = None
    ) -> GappySeqLenInfo:
        starts, lengths = list(seqstarts), list(seqlens)
        if len(starts) != len(lengths) + 1:
            raise ValueError(f"there are {len(starts)} starts; there must be {len(lengths) + 1}, the last one an end")
        for first, used, after in zip(starts, lengths, starts[1:], strict=False):
            if not 0 <= first <= first + used <= after:
                raise ValueError(f"a sequence of {used} keys starts at {first}, and the next one at {after}")
        start, used = (torch.tensor(x, dtype=torch.int32, device=_default_device(device)) for x in (starts, lengths))
        return cls(start, max(lengths, default=0), min(lengths, default=0), starts, used, lengths)

    def to(self: Any, device: Device) -> Any:
        return replace(self, seqstart=self.seqstart.to(device), seqlen=self.seqlen.to(device))

    def intervals(self) -> Iterable[tuple[int, int]]:
        return ((first, first + used) for first, used in zip(self.seqstart_py, self.seqlen_py, strict=False))


@dataclass(eq=False)
class PaddedSeqLenInfo(GappySeqLenInfo):
    """Sequences whose room, ``padding`` rows each, is longer than what is used of it."""

    padding: int

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: Device | None = None
    ) -> PaddedSeqLenInfo:
        if max(seqlens, default=0) > padding:
            raise ValueError(f"a sequence has {max(seqlens)} keys; padding is {padding}")
        room = SeqLenInfo.from_seqlens([padding] * len(seqlens), device=device)
        used = torch.tensor(seqlens, dtype=torch.int32, device=room.seqstart.device)
        longest, shortest = max(seqlens, default=0), min(seqlens, default=0)
        return cls(room.seqstart, longest, shortest, room.seqstart_py, used, list(seqlens), padding)
