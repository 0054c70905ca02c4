"""The biases of ``memory_efficient_attention``: bands, and sequences that do not see each other.

Called by ``fmha``. Invariant: no bias makes a matrix but in ``materialize``, which shows what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from .seq_lens import Device, GappySeqLenInfo, PaddedSeqLenInfo, SeqLenInfo

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

    def rows(self, x: Tensor) -> Tensor:
        """Key or value, (rows, heads, columns), as ``flash_ext.attention_varlen`` takes it."""
        return x

    def lengths(self) -> dict[str, Any]:
        """As arguments of ``flash_ext.attention_varlen``."""
        given: dict[str, Any] = {"cu_seqlens_q": self.q_seqinfo.seqstart, "cu_seqlens_k": self.k_seqinfo.seqstart}
        if isinstance(self.k_seqinfo, GappySeqLenInfo):
            given["seqused_k"] = self.k_seqinfo.seqlen
        return given | {"max_q": self.q_seqinfo.max_seqlen, "max_k": self.k_seqinfo.max_seqlen}


class BlockDiagonalMask(_Sequences):
    """Sequences one behind the other, each of which sees itself alone."""

    @classmethod
    def from_seqlens(
        cls: Any, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Device | None = None
    ) -> Any:
        """Of these lengths; the keys' are the queries' by default."""
        _as_many(q_seqlen, kv_seqlen if kv_seqlen is not None else q_seqlen)
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


def _as_many(q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(f"q_seqlen has {len(q_seqlen)} sequences and kv_seqlen {len(kv_seqlen)}")


class BlockDiagonalPaddedKeysMask(_Sequences):
    """Keys have room for ``kv_padding`` a sequence, of which the first ``kv_seqlen`` are there."""

    @classmethod
    def from_seqlens(
        cls: Any, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], causal_diagonal: Any = None, *,
        device: Device | None = None,
    ) -> Any:  # fmt: skip
        """Of these lengths. ``causal_diagonal`` is not used, as in xformers."""
        _as_many(q_seqlen, kv_seqlen)
        queries = SeqLenInfo.from_seqlens(q_seqlen, device=device)
        return cls(queries, PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device))

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """With queries and keys aligned at their ends, ``window_left`` keys before and ``window_right`` behind."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(
            self.q_seqinfo, self.k_seqinfo, window_left=window_left, window_right=window_right
        )

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: Any) -> Any:
        """The same of keys in pages, as a ``paged_type``."""
        return paged_type(self.q_seqinfo, self.k_seqinfo, block_tables=block_tables, page_size=page_size)


class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalPaddedKeysMask`, causal in each sequence, aligned at the end of what is there."""

    band = CAUSAL_AT_END


@dataclass(eq=False)
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalPaddedKeysMask` and a window, aligned at the end of what is there."""

    window_left: int = -1
    window_right: int = -1

    def __post_init__(self) -> None:
        self.band = LocalAttentionFromBottomRightMask(self.window_left, self.window_right).band

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int, window_right: int, *,
        device: Device | None = None,
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:  # fmt: skip
        """Of these lengths."""
        whole = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen, device=device)
        return whole.make_local_attention(window_left, window_right)


@dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """:class:`BlockDiagonalCausalWithOffsetPaddedKeysMask`, and of those keys the last ``window_size``."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        self.band = LowerTriangularFromBottomRightLocalAttentionMask(self._window_size).band

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int, *,
        device: Device | None = None,
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:  # fmt: skip
        """Of these lengths."""
        whole = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, kv_padding, kv_seqlen, device=device)
        return cls(whole.q_seqinfo, whole.k_seqinfo, _window_size=window_size)


class BlockDiagonalGappyKeysMask(_Sequences):
    """Keys of a sequence are ``kv_seqlen`` from ``kv_seqstarts`` on, in order; what lies between belongs to none."""

    @classmethod
    def from_seqlens(
        cls: Any, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *,
        device: Device | None = None,
    ) -> Any:  # fmt: skip
        """Of these lengths; the last of ``kv_seqstarts`` is how many keys there are in all."""
        _as_many(q_seqlen, kv_seqlen)
        keys = GappySeqLenInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, device=device)
        return cls(SeqLenInfo.from_seqlens(q_seqlen, device=device), keys)

    def rows(self, x: Tensor) -> Tensor:
        """From the first sequence on: ``attention_varlen`` begins there."""
        return x[self.k_seqinfo.seqstart_py[0] :]

    def lengths(self) -> dict[str, Any]:
        return super().lengths() | {"cu_seqlens_k": self.k_seqinfo.seqstart - self.k_seqinfo.seqstart_py[0]}


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """:class:`BlockDiagonalGappyKeysMask`, causal in each sequence, aligned at the end of its keys."""

    band = CAUSAL_AT_END


@dataclass(eq=False)
class PagedBlockDiagonalPaddedKeysMask(_Sequences):
    """Keys lie in pages of ``page_size`` rows, one behind the other; ``block_tables`` has those of each sequence."""

    block_tables: Tensor = None  # (sequences, pages of the longest) int32
    page_size: int = 0

    @classmethod
    def from_seqlens(
        cls: Any, q_seqlen: Sequence[int], kv_seqlen: Sequence[int], block_tables: Tensor, page_size: int, *,
        device: Device | None = None,
    ) -> Any:  # fmt: skip
        """Of these lengths."""
        room = block_tables.shape[1] * page_size
        whole = BlockDiagonalPaddedKeysMask.from_seqlens(q_seqlen, room, kv_seqlen, device=device)
        return whole.make_paged(block_tables, page_size, cls)

    def to(self: Any, device: Device) -> Any:
        return replace(super().to(device), block_tables=self.block_tables.to(device))

    def rows(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.page_size))

    def visible(self, queries: int, keys: int, device: Device) -> Tensor:
        """``keys`` are the rows of all pages."""
        seen = torch.zeros(queries, keys, dtype=torch.bool, device=device)
        places = torch.arange(keys, device=device).unflatten(0, (-1, self.page_size))
        tables = self.block_tables.to(places.device).long()
        for (q0, q1), used, table in zip(self.q_seqinfo.intervals(), self.k_seqinfo.seqlen_py, tables, strict=True):
            seen[q0:q1, places[table].flatten()[:used]] = _in_band(self.band, q1 - q0, used, device)
        return seen

    def lengths(self) -> dict[str, Any]:
        given = super().lengths() | {"block_table": self.block_tables}
        return {name: value for name, value in given.items() if name != "cu_seqlens_k"}


class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """:class:`PagedBlockDiagonalPaddedKeysMask`, causal in each sequence, aligned at the end of its keys."""

    band = CAUSAL_AT_END
