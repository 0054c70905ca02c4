"""Packed sequences: how a call of `attention_varlen` is made, and the same call as each sequence alone or padded.

Every row of query, key and value that belongs to no sequence is NaN, as whatever a program leaves there may be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from helpers import Call, Inputs, rand
from torch import Tensor

import flash_ext


@dataclass(frozen=True)
class Side:
    """Where sequences lie in the rows of queries, or of keys."""

    lengths: tuple[int, ...]
    before: int = 0  # rows of nobody in front of the first sequence
    between: int = 0  # rows of each sequence that are not in use, behind the others
    behind: int = 0  # rows of nobody behind the last one

    @property
    def starts(self) -> list[int]:
        """B + 1 of them."""
        return list(accumulate((length + self.between for length in self.lengths), initial=self.before))

    @property
    def rows(self) -> int:
        return self.starts[-1] + self.behind

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def ranges(self) -> list[range]:
        """Rows in use of each sequence."""
        return [range(first, first + n) for first, n in zip(self.starts, self.lengths, strict=False)]

    @property
    def used(self) -> list[int]:
        return [row for rows in self.ranges for row in rows]

    @property
    def unused(self) -> list[int]:
        return sorted(set(range(self.rows)) - set(self.used))

    def poison(self, tensor: Tensor) -> Tensor:
        """In place: NaN in the rows of nobody."""
        tensor[self.unused] = torch.nan
        return tensor


@dataclass(frozen=True)
class Heads:
    """Of query, key and value, and how wide they are."""

    q: int = 4
    k: int = 4
    v: int = 4
    dim: int = 64
    dim_v: int = 64


@dataclass(frozen=True)
class Packed:
    """A call: `inputs` are the tensors that may want a gradient and the mask, `options` the rest of the arguments."""

    q: Side
    k: Side
    inputs: Inputs
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.inputs["query"].device

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """What masks and biases broadcast to."""
        return len(self.q.lengths), self.inputs["query"].shape[1], self.q.longest, self.k.longest

    @property
    def where(self) -> dict[str, Any]:
        """The arguments that say where sequences lie."""
        result: dict[str, Any] = {"max_q": self.q.longest, "max_k": self.k.longest}
        for name, side in (("q", self.q), ("k", self.k)):
            result[f"cu_seqlens_{name}"] = self.ints(side.starts)
            if side.between:
                result[f"seqused_{name}"] = self.ints(side.lengths)
        return result

    def ints(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def call(self, **arguments: Any) -> Any:
        """With other tensors, and more options."""
        return flash_ext.attention_varlen(**self.where | self.options | arguments)

    def alone(self, attend: Call) -> Call:
        """The same as a call of `attend` for each sequence, whose results are packed again; differentiable."""

        def call(**arguments: Any) -> Any:
            arguments = {name: value for name, value in (self.options | arguments).items() if value is not None}
            parts = [attend(**self.cut(arguments, b)) for b in range(len(self.q.lengths))]
            query, value = arguments["query"], arguments["value"]
            heads, wide = query.shape[1], torch.float64 if query.dtype == torch.float64 else torch.float32
            # A sum without terms: every input has a gradient, also where no sequence reads it.
            nothing = sum(
                t.flatten()[:0].sum() for t in arguments.values() if isinstance(t, Tensor) and t.dtype.is_floating_point
            )
            outs = [part[0] if isinstance(part, tuple) else part for part in parts]
            out = self.join([o[0].transpose(0, 1) for o in outs], query.new_zeros(self.q.rows, heads, value.shape[2]))
            out = out + nothing
            if not arguments.get("return_lse"):
                return out.to(query.dtype)
            empty = query.new_full((self.q.rows, heads), -torch.inf, dtype=wide)
            return out.to(query.dtype), self.join([part[1][0].mT for part in parts], empty).mT

        return call

    def cut(self, arguments: dict[str, Any], b: int) -> dict[str, Any]:
        """The arguments of sequence b alone, as `attention` takes them."""
        result = dict(arguments)
        for name, side in (("query", self.q), ("key", self.k), ("value", self.k)):
            rows = side.ranges[b]
            result[name] = arguments[name][rows.start : rows.stop].transpose(0, 1)[None]
        for name in ("mask", "bias", "keep"):
            if name in arguments:
                result[name] = self.cut_scores(arguments[name], b)
        if "alibi_slopes" in arguments and arguments["alibi_slopes"].dim() == 2:
            result["alibi_slopes"] = arguments["alibi_slopes"][b % len(arguments["alibi_slopes"])]
        return result

    def cut_scores(self, tensor: Tensor, b: int) -> Tensor:
        tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tensor.shape)
        tensor = tensor[b : b + 1] if tensor.shape[0] > 1 else tensor
        tensor = tensor[:, :, : self.q.lengths[b]] if tensor.shape[2] > 1 else tensor
        return tensor[..., : self.k.lengths[b]] if tensor.shape[3] > 1 else tensor

    def join(self, parts: list[Tensor], empty: Tensor) -> Tensor:
        """Rows of sequences where they belong, and those of `empty` between them."""
        pieces, at = [], 0
        for rows, part in zip(self.q.ranges, parts, strict=True):
            pieces += [empty[at : rows.start], part]
            at = rows.stop
        return torch.cat([*pieces, empty[at:]])

    # ---- padded ------------------------------------------------------------------------------------------------------

    def pad(self, side: Side, tensor: Tensor) -> Tensor:
        """(B, heads, longest, cols) of (rows, heads, cols), zeros in the padding; differentiable."""
        padded = [
            torch.nn.functional.pad(tensor[rows.start : rows.stop], (0, 0, 0, 0, 0, side.longest - len(rows)))
            for rows in side.ranges
        ]
        return torch.stack(padded).transpose(1, 2)

    def padded(self, **arguments: Any) -> Any:
        """The same as one dense call of the padded batch, with a mask that hides the padding."""
        tensors = {name: self.pad(self.q if name == "query" else self.k, arguments.pop(name)) for name in QKV}
        exists = [
            torch.arange(side.longest, device=self.device) < self.ints(side.lengths)[:, None]
            for side in (self.q, self.k)
        ]
        mask = (exists[0][:, :, None] & exists[1][:, None, :])[:, None]
        if "mask" in arguments:
            mask = mask & arguments.pop("mask")
        arguments = self.options | arguments
        returned = flash_ext.attention(**tensors, mask=mask, **arguments)
        out, lse = returned if isinstance(returned, tuple) else (returned, None)
        rows = [out[b].transpose(0, 1)[: len(rows)] for b, rows in enumerate(self.q.ranges)]
        packed = self.join(rows, out.new_zeros(self.q.rows, *out.shape[1::2]))
        if lse is None:
            return packed
        lses = [lse[b].mT[: len(rows)] for b, rows in enumerate(self.q.ranges)]
        return packed, self.join(lses, lse.new_full((self.q.rows, lse.shape[1]), -torch.inf)).mT

    def with_inputs(self, **inputs: Tensor) -> Packed:
        return replace(self, inputs=self.inputs | inputs)


QKV = ("query", "key", "value")


def packed(
    queries: Iterable[int] | Side,
    keys: Iterable[int] | Side,
    heads: Heads = Heads(),
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    unused: int = 0,
    **options: Any,
) -> Packed:
    """Normal numbers in every sequence; `unused` rows before and behind them, and of each sequence, on either side."""
    q, k = (side if isinstance(side, Side) else Side(tuple(side), unused, unused, unused) for side in (queries, keys))
    inputs = {
        "query": q.poison(rand(q.rows, heads.q, heads.dim, dtype=dtype, device=device)),
        "key": k.poison(rand(k.rows, heads.k, heads.dim, dtype=dtype, device=device)),
        "value": k.poison(rand(k.rows, heads.v, heads.dim_v, dtype=dtype, device=device)),
    }
    return Packed(q, k, inputs, options)
