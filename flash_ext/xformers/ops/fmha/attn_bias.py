"""The biases of ``memory_efficient_attention``: bands, and sequences that do not see each other.

Called by ``fmha``. Invariant: no bias makes a matrix but in ``materialize``, which shows what is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

Device = str | torch.device
Self = TypeVar("Self", bound="AttentionBias")
# Options of flash_ext.attention.
ALL: Mapping[str, Any] = MappingProxyType({})
CAUSAL: Mapping[str, Any] = MappingProxyType({"causal": True})
CAUSAL_AT_END: Mapping[str, Any] = MappingProxyType({"causal": True, "align": "bottom_right"})


def _positive(name: str, size: int, least: int = 1) -> None:
    if size < least:
        raise ValueError(f"{name} is {size}; it must be {least} or more")


class AttentionBias:
    """Which keys a query sees. ``band``: as options of ``flash_ext.attention``."""

    band: Mapping[str, Any]

    def to(self: Self, device: Device) -> Self:
        """The same on another device."""
        return self

    def visible(self, queries: int, keys: int, device: Device) -> Tensor:
        """Bool (queries, keys): True where the query sees the key."""
        return _in_band(self.band, queries, keys, device)

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        """The bias as a tensor (..., queries, keys), 0 or -infinity; for tests and for looking at."""
        seen = self.visible(shape[-2], shape[-1], device)
        return torch.zeros(tuple(shape), dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def _in_band(band: Mapping[str, Any], queries: int, keys: int, device: Device) -> Tensor:
    shift = keys - queries if band.get("align") == "bottom_right" else 0
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - shift
    left, right = band.get("window", (None, None))
    right = 0 if band.get("causal") and right is None else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    return (
        seen
        & (distance >= (-left if left is not None else -keys - queries))
        & (distance <= (right if right is not None else keys + queries))
    )


# ---- one sequence a batch element ----


class LowerTriangularMask(AttentionBias):
    """Query i sees keys up to i."""

    band = CAUSAL

    def __init__(self, device: Device | None = None) -> None:
        pass

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """With a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """:class:`LowerTriangularMask` and a tensor that is added to the scores, with gradient."""

    def __init__(self, bias: Tensor) -> None:
        self.bias = bias

    def to(self, device: Device) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(self.bias.to(device))

    def materialize(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: Device = "cpu") -> Tensor:
        return super().materialize(shape, dtype, device) + self.bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """The last query sees all keys, each one before it one less."""

    band = CAUSAL_AT_END

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Of those keys only the last ``window_size``."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Of the keys of :class:`LowerTriangularFromBottomRightMask` the last ``window_size``."""

    def __init__(self, _window_size: int) -> None:
        _positive("window_size", _window_size)
        self._window_size = _window_size
        self.band = {"window": (_window_size - 1, 0), "align": "bottom_right"}


class LocalAttentionFromBottomRightMask(AttentionBias):
    """With queries and keys aligned at their ends, ``window_left`` keys before and ``window_right`` behind."""

    def __init__(self, window_left: int, window_right: int) -> None:
        _positive("window_left", window_left, 0)
        _positive("window_right", window_right, 0)
        self.window_left, self.window_right = window_left, window_right
        self.band = {"window": (window_left, window_right), "align": "bottom_right"}


# ---- sequences one behind the other ----


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
class PaddedSeqLenInfo(SeqLenInfo):
    """Sequences whose room, ``padding`` rows each, is longer than what is used of it."""

    seqlen: Tensor  # (sequences,) int32
    seqlen_py: list[int]
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

    def to(self, device: Device) -> PaddedSeqLenInfo:
        return replace(self, seqstart=self.seqstart.to(device), seqlen=self.seqlen.to(device))

    def intervals(self) -> Iterable[tuple[int, int]]:
        return ((first, first + used) for first, used in zip(self.seqstart_py, self.seqlen_py, strict=False))


@dataclass(eq=False)
class _Sequences(AttentionBias):
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo
    _batch_sizes: Sequence[int] | None = None

    band = ALL

    def to(self: Any, device: Device) -> Any:
        return replace(self, q_seqinfo=self.q_seqinfo.to(device), k_seqinfo=self.k_seqinfo.to(device))

    def visible(self, queries: int, keys: int, device: Device) -> Tensor:
        room = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if (queries, keys) != room:
            raise ValueError(f"the shape ends with {(queries, keys)}; it must end with {room}")
        seen = torch.zeros(queries, keys, dtype=torch.bool, device=device)
        for (q0, q1), (k0, k1) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True):
            seen[q0:q1, k0:k1] = _in_band(self.band, q1 - q0, k1 - k0, device)
        return seen

    def lengths(self) -> dict[str, Any]:
        """As arguments of ``flash_ext.attention_varlen``."""
        given: dict[str, Any] = {"cu_seqlens_q": self.q_seqinfo.seqstart, "cu_seqlens_k": self.k_seqinfo.seqstart}
        if isinstance(self.k_seqinfo, PaddedSeqLenInfo):
            given["seqused_k"] = self.k_seqinfo.seqlen
        return given | {"max_q": self.q_seqinfo.max_seqlen, "max_k": self.k_seqinfo.max_seqlen}


class BlockDiagonalMask(_Sequences):
    """Sequences one behind the other, each of which sees itself alone."""

    @classmethod
    def from_seqlens(
        cls: Any, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Device | None = None
    ) -> Any:
        """Of these lengths; the keys' are the queries' by default."""
        if kv_seqlen is not None and len(q_seqlen) != len(kv_seqlen):
            raise ValueError(f"q_seqlen has {len(q_seqlen)} sequences and kv_seqlen {len(kv_seqlen)}")
        queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        alike = kv_seqlen is None or list(q_seqlen) == list(kv_seqlen)
        return cls(queries, queries if alike else SeqLenInfo.from_seqlens(kv_seqlen or (), device=device))

    @classmethod
    def from_tensor_list(cls: Any, tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """The bias of tensors (b, rows, ...), and these one behind the other, (1, all rows, ...)."""
        bias, whole, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        return bias, whole

    @classmethod
    def from_tensor_lists_qkv(
        cls: Any, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple[Any, Tensor, Tensor, Tensor | None]:
        """The same of lists of query, key and value."""
        counts = [x.shape[0] for x in tensors_q]
        for others in (tensors_k, tensors_v):
            if others is not None and [x.shape[0] for x in others] != counts:
                raise ValueError(f"the lists have batch sizes {counts} and {[x.shape[0] for x in others]}")
        lengths = [[x.shape[1] for x in tensors for _ in range(x.shape[0])] for tensors in (tensors_q, tensors_k)]
        bias = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        bias._batch_sizes = counts
        q, k = (_behind_each_other(tensors) for tensors in (tensors_q, tensors_k))
        return bias, q, k, None if tensors_v is None else _behind_each_other(tensors_v)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """(1, all rows, ...) as the list that it came from."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """The same of rows of key or value."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The same where queries and keys have the same lengths."""
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            raise ValueError("queries and keys have other lengths; use split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Causal in each sequence."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Causal in each sequence, aligned at the ends."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Causal in each sequence, and of those keys the last ``window_size``."""
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """The same, aligned at the ends."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


def _behind_each_other(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], 1)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """:class:`BlockDiagonalMask`, causal in each sequence."""

    band = CAUSAL


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """:class:`BlockDiagonalMask`, causal in each sequence, aligned at the ends."""

    band = CAUSAL_AT_END


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """:class:`BlockDiagonalCausalMask`, and of those keys the last ``window_size``."""

    _window_size: int = 0
    _align = "top_left"

    def __post_init__(self) -> None:
        _positive("window_size", self._window_size)
        self.band = {"window": (self._window_size - 1, 0), "align": self._align}


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalLocalAttentionMask):
    """The same, aligned at the ends."""

    _align = "bottom_right"


class BlockDiagonalPaddedKeysMask(_Sequences):
    """Keys have room for ``kv_padding`` a sequence, of which the first ``kv_seqlen`` are there."""

    @classmethod
    def from_seqlens(
        cls: Any, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], causal_diagonal: Any = None, *,
        device: Device | None = None,
    ) -> Any:  # fmt: skip
        """Of these lengths. ``causal_diagonal`` is not used, as in xformers."""
        if len(q_seqlen) != len(kv_seqlen):
            raise ValueError(f"q_seqlen has {len(q_seqlen)} sequences and kv_seqlen {len(kv_seqlen)}")
        queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        return cls(queries, PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device))


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalPaddedKeysMask`, causal in each sequence, aligned at the end of what is there."""

    band = CAUSAL_AT_END
