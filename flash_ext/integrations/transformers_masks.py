"""The mask function of transformers: a model's mask as a band and the keys that are seen, where these can say it.

transformers describes a mask by a function of indices, made of a few functions of its own (``causal_mask_function``, an
overlay for a window, one for packed sequences, joined by ``and_masks``), and by the 2-D mask of padding. Of those that
are known here, ``read`` makes a ``Rule``, and that becomes a ``Band``: arguments of ``attention``. It travels to the
attention function as a ``BandMask``, a tensor with the shape of the mask, which is built only for somebody who looks
inside. Where no band can say it, or the model is being traced, the mask is what transformers makes for "sdpa".

Called by what ``flash_ext.integrations.transformers.register`` registers.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Build = Callable[[], Tensor]


@dataclass(frozen=True)
class Rule:
    """A query at place p sees keys from p - left to p + right (None: all), with ``ids`` those of its own sequence."""

    left: int | None = None
    right: int | None = None
    ids: Tensor | None = None  # (B, L), the number of the sequence to which a place belongs
    own_places: bool = False  # places count from the begin of their sequence, so ids must be there

    def __and__(self, other: Rule) -> Rule | None:
        if self.ids is not None and other.ids is not None:
            return None
        left = min((x for x in (self.left, other.left) if x is not None), default=None)
        right = min((x for x in (self.right, other.right) if x is not None), default=None)
        ids = other.ids if self.ids is None else self.ids
        return Rule(left, right, ids, self.own_places or other.own_places)

    def shown(self, shape: tuple[int, int, int, int], diagonal: int, seen: Tensor | None, device: Any) -> Tensor:
        """The rule as a bool mask (B, 1, L, S), where query i stands at key i + diagonal."""
        place = torch.arange(shape[2], device=device)[:, None] + diagonal
        key = torch.arange(shape[3], device=device)
        mask = torch.ones((), dtype=torch.bool, device=device)
        if self.left is not None:
            mask = mask & (key >= place - self.left)
        if self.right is not None:
            mask = mask & (key <= place + self.right)
        if self.ids is not None:
            mask = mask & (self.ids[:, None, :, None] == self.ids[:, None, None, :])
        if seen is not None:
            mask = mask & seen[:, None, None, :]
        return mask.expand(shape)


def _cells(function: Any) -> dict[str, Any]:
    values = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, values, strict=True))


def read(function: Any) -> Rule | None:
    """The rule of a mask function of transformers; None for one that is not known here."""
    if getattr(function, "__module__", None) != "transformers.masking_utils" or not hasattr(function, "__code__"):
        return None
    cells = _cells(function)
    match function.__qualname__.removesuffix(".<locals>.inner_mask"):
        case "causal_mask_function":
            return Rule(right=0)
        case "bidirectional_mask_function":
            return Rule()
        case "sliding_window_overlay":
            return Rule(left=cells["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return Rule(left=cells["sliding_window"], right=cells["sliding_window"])
        case "packed_sequence_mask_function":
            return Rule(ids=cells["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence":
            inner = read(cells["mask_function"])
            return None if inner is None or inner.ids is not None else Rule(inner.left, inner.right, None, True)
        case "and_masks.<locals>.and_mask":
            whole: Rule | None = Rule()
            for part in map(read, cells["mask_functions"]):
                whole = None if whole is None or part is None else whole & part
            return whole
    return None


@dataclass(frozen=True)
class Packed:
    """Where sequences lie among the B * L rows of a batch."""

    cu_seqlens: Tensor  # (sequences + 1,) int32
    longest: int

    @staticmethod
    def of(ids: Tensor) -> Packed:
        """One read of the device: how many sequences there are, and how long, is not known before."""
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = [*first.flatten().nonzero().flatten().tolist(), ids.numel()]
        longest = max(b - a for a, b in itertools.pairwise(starts))
        return Packed(torch.tensor(starts, dtype=torch.int32, device=ids.device), longest)


@dataclass(frozen=True)
class Band:
    """What a mask says, as arguments of ``flash_ext.attention``."""

    causal: bool
    window: tuple[int | None, int | None] | None
    align: str
    end: int  # keys behind it are seen by nobody
    keys: Tensor | None  # (B, end) bool, where not all of them are seen
    packed: Packed | None


class UnbuiltMask(Tensor):
    """A bool mask (B, 1, L, S) as transformers hands it through a model, which is built when an operator reads it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.built() if isinstance(x, UnbuiltMask) else x, (args, kwargs or {}))
        return operator(*args, **kwargs)

    def built(self) -> Tensor:
        """The mask as a plain tensor."""
        raise NotImplementedError


class BandMask(UnbuiltMask):
    """A mask that is a band."""

    band: Band
    _build: Build

    @staticmethod
    def __new__(cls, band: Band, shape: tuple[int, int, int, int], device: Any, build: Build) -> BandMask:
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.band, mask._build = band, functools.cache(build)
        return mask

    def built(self) -> Tensor:
        return self._build()


class LengthsMask(UnbuiltMask):
    """A mask (B, 1, 1, S) of one query at a static cache, of which ``lengths``, (B,) int32, keys are in use.

    A compiled model takes it, too: its graph has the lengths as an input.
    """

    lengths: Tensor

    @staticmethod
    def __new__(cls, lengths: Tensor, keys: int) -> LengthsMask:
        shape = (lengths.shape[0], 1, 1, keys)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=lengths.device)
        mask.lengths = lengths
        return mask

    def built(self) -> Tensor:
        return torch.arange(self.shape[-1], device=self.lengths.device) < self.lengths[:, None, None, None]

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["lengths"], self.shape[-1]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], keys: int, size: Any, stride: Any) -> LengthsMask:
        return LengthsMask(inner["lengths"], keys)


def _tracing(*tensors: Any) -> bool:
    """Whether values must not be read."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    return any(isinstance(t, (torch.fx.Proxy, fake)) for t in tensors)


def _seen_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """(B, kv_length) bool, or None where all are seen: reads the device as transformers itself does for "sdpa"."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    keys = torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
    keys = keys[:, kv_offset : kv_offset + kv_length].bool()
    return None if bool(keys.all()) else keys


def _first_place(places: Tensor) -> int | None:
    """The first of consecutive numbers; None where they are not."""
    first, consecutive = torch.stack([places[0], (places.diff() == 1).all().to(places.dtype)]).tolist()
    return first if consecutive else None


def _diagonal(rule: Rule, queries: int, keys: int, kv_offset: int, call: dict[str, Any]) -> int | None:
    """d, where query i stands at key i + d; None where it stands at no one place."""
    places = call.get("cache_position")
    if places is None:  # newer versions say where the first query stands
        return int(call.get("q_offset", 0)) - kv_offset
    if rule.ids is not None or (queries == 1 and call.get("allow_is_causal_skip", True)):
        return keys - queries  # no cache, or one that grows: the last query stands at the last key
    first = _first_place(places)
    return None if first is None else first - kv_offset


def _band(rule: Rule, queries: int, keys: int, diagonal: int, seen: Tensor | None) -> Band | None:
    """None where ``attention`` has no such band."""
    left = None if rule.left is None or rule.left >= diagonal + queries - 1 else rule.left
    right = None if rule.right is None or diagonal + rule.right >= keys - 1 else rule.right
    end = keys
    if left is None and right is None:
        align = "top_left"
    elif rule.right == 0 and 0 <= diagonal <= keys - queries:
        end, right, align = diagonal + queries, 0, "bottom_right"
    elif diagonal in (0, keys - queries):
        align = "top_left" if diagonal == 0 else "bottom_right"
    else:
        return None
    causal = right == 0
    window = None if left is None and (causal or right is None) else (left, right)
    seen = None if seen is None else seen[:, :end]
    return Band(causal, window, align, end, seen, None)


def _lengths(rule: Rule, call: dict[str, Any]) -> LengthsMask | None:
    """For one query that sees what is before it, all of which is in use; reads nothing of the device."""
    keys = call["kv_length"]
    if rule.right != 0 or not (rule.left is None or rule.left >= keys - 1):
        return None
    if call.get("attention_mask") is not None or rule.ids is not None:
        return None
    places = call.get("cache_position")
    place = call.get("q_offset", 0) if places is None else places[0]
    device = place.device if isinstance(place, Tensor) else call.get("device", "cpu")
    lengths = torch.zeros(call["batch_size"], dtype=torch.int32, device=device)
    return LengthsMask(lengths.add_(place + 1 - call.get("kv_offset", 0)), keys)


def mask_function(sdpa_mask: Callable[..., Tensor | None], **call: Any) -> Tensor | None:
    """What a model gets as its mask.

    Args:
        sdpa_mask: transformers' own function for "sdpa".
        call: its arguments, by name, as ``transformers.masking_utils`` passes them.

    Returns:
        None where "sdpa" would get None: plain causal or full attention. A ``BandMask`` where a band, the keys that are
        seen or the lengths of packed sequences say the mask; a ``LengthsMask`` for one query at a static cache;
        (B, 1, L, S) bool that repeats the padding's (B, S) for every query where nothing else hides a key; and what
        ``sdpa_mask`` makes elsewhere.
    """
    padding, places = call.get("attention_mask"), call.get("cache_position")
    if _tracing(padding, places, call.get("q_offset"), call.get("kv_offset")):
        return sdpa_mask(**call)
    rule = read(call.get("mask_function"))
    batch, keys = call["batch_size"], call["kv_length"]
    queries = call["q_length"] if places is None else places.shape[0]
    skip = call.get("allow_is_causal_skip", True) or call.get("allow_is_bidirectional_skip", False)
    if rule is None or (rule.own_places and rule.ids is None):
        return sdpa_mask(**call)
    if queries == 1 and not skip:  # at a static cache: of a compiled model, which waits for nothing
        mask = _lengths(rule, call)
        return sdpa_mask(**call) if mask is None else mask

    kv_offset = int(call.get("kv_offset", 0))
    seen = _seen_keys(padding, keys, kv_offset)
    diagonal = _diagonal(rule, queries, keys, kv_offset, call)
    band = None if diagonal is None else _band(rule, queries, keys, diagonal, seen)
    if rule.ids is not None and (seen is not None or diagonal != 0 or rule.ids.shape != (batch, keys)):
        band = None
    if band is None:
        return sdpa_mask(**call | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    shape = (batch, 1, queries, keys)
    if rule.ids is not None:
        band = replace(band, align="top_left", packed=Packed.of(rule.ids))
    elif band.window is None and not band.causal:
        if seen is not None:
            return seen[:, None, None, :].expand(shape)
        if skip and (queries == 1 or rule.right != 0):
            return None
    elif band.window is None and diagonal == 0 and seen is None and skip:
        return None
    device = next((t.device for t in (padding, places, rule.ids) if t is not None), call.get("device", "cpu"))
    return BandMask(band, shape, device, functools.partial(rule.shown, shape, diagonal, seen, device))
