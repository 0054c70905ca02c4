"""A call of attention with a combination of features: how it is made, made again elsewhere, judged and planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from features import EDGES, QKV, Combination, Sizes, is_left_out
from fuzz.fused import fused_results, kind_of
from helpers import (
    HALF,
    OPS,
    Inputs,
    Results,
    check,
    cotangents_of,
    evaluate,
    keep_mask,
    leaf,
    make_inputs,
    name_of,
    rng_state,
)
from layouts import ALIGNED, Layout, interior, poison_free_memory, wide_rows
from sm90_helpers import BANDS, aligned
from torch import Tensor

import flash_ext
from flash_ext import reference

STATE = (2**63 + 12345, 2**40 + 7)  # of dropout


@dataclass
class Problem:
    """A call: `inputs` want a gradient, `fixed` do not."""

    combination: Combination
    inputs: Inputs
    fixed: Inputs
    options: dict[str, Any]
    keep: Tensor | None  # where dropout has a mask
    backend: str  # that computes it

    def call(self, **arguments: Any) -> Any:
        arguments = self.fixed | arguments | self.options
        if self.keep is None:
            return flash_ext.attention(**arguments)
        left, right = arguments.pop("window", (None, None))
        arguments |= {"window_left": left, "window_right": right}
        arguments["bottom_right"] = arguments.pop("align", "top_left") == "bottom_right"
        state = rng_state(*STATE, str(self.keep.device))
        out, lse = OPS.attention_with_rng_state(**arguments, rng_state=state, gqa=True)
        return (out, lse) if "lse" in self.combination else out

    def truth(self, **arguments: Any) -> Any:
        is_wide = any(arguments[name].dtype == torch.float64 for name in QKV if name in arguments)
        fixed = {name: t.double() if is_wide and t.is_floating_point() else t for name, t in self.fixed.items()}
        options = {name: value for name, value in self.options.items() if name != "deterministic"}
        dropout = {} if self.keep is None else {"keep": self.keep}
        return reference.attention(**fixed, **arguments, **options, **dropout)

    def evaluate(self, call: Callable[..., Any] | None = None) -> Results:
        return evaluate(call or self.call, self.inputs, backward=bool(self.combination.wants))

    def among_nan(self, device: str, layout: Layout | None = None) -> Callable[..., Any]:
        """The call, with free memory full of NaN before both passes, and grad_out laid out."""

        def call(**arguments: Any) -> Any:
            poison_free_memory(device)
            returned = self.call(**arguments)

            def arrives(grad: Tensor) -> Tensor:
                grad = grad if layout is None else layout(grad)
                poison_free_memory(device)
                return grad

            out = returned[0] if isinstance(returned, tuple) else returned
            if out.requires_grad:
                out.register_hook(arrives)
            return returned

        return call

    def fused(self, inputs: Mapping[str, Tensor]) -> Results:
        """What the kernels' arithmetic may give for these inputs, with the cotangents of helpers.evaluate."""
        leaves, tensors = {name: leaf(t) for name, t in inputs.items()}, self.inputs | self.fixed
        wanted = leaves if self.combination.wants else {}
        kind = kind_of(
            tensors["query"].dtype,
            tensors["key"].size(-2),
            kernels=True,
            added=bool({"bias", "alibi_slopes"} & tensors.keys()),
            wants=wanted,
            group=tensors["query"].size(1) // min(tensors[name].size(1) for name in ("key", "value")),
        )

        def call() -> Results:
            returned = self.truth(**leaves)
            return dict(zip(("out", "lse"), returned if isinstance(returned, tuple) else (returned,), strict=False))

        def cotangents(outputs: Mapping[str, Tensor]) -> Results:
            narrow = next(iter(inputs.values())).dtype
            return dict(zip(outputs, cotangents_of(outputs.values(), narrow), strict=True))

        return fused_results(kind, call, wanted, cotangents)

    def check(self, call: Callable[..., Any] | None = None) -> Results:
        """By the error rule, that of a GPU's kernels by either yardstick; all results are finite but the lse of rows
        without keys."""
        call, backward = call or self.call, bool(self.combination.wants)
        fused = self.fused if self.backend in ("sm80", "sm90") else None
        got = check(call, self.inputs, truth=self.truth, backward=backward, units=self.units, fused=fused)
        for name, tensor in got.items():
            assert not tensor.isnan().any(), name
            assert name == "lse" or tensor.isfinite().all(), name
        return got

    def with_views(self, view: Callable[[str, Tensor], Tensor]) -> Problem:
        """The same values where `view` puts them."""
        inputs, fixed = ({name: view(name, tensor) for name, tensor in x.items()} for x in (self.inputs, self.fixed))
        return replace(self, inputs=inputs, fixed=fixed)

    def plan(self) -> flash_ext.Explanation:
        """On a GPU, which need not be there."""
        wants = self.combination.wants
        tensors = {name: t.detach().requires_grad_(name in wants) for name, t in (self.inputs | self.fixed).items()}
        options = {name: value for name, value in self.options.items() if name != "return_lse"}
        return flash_ext.explain(**tensors, **options, device="cuda")

    def is_ordered(self, result: str, backend: str) -> bool:
        """Whether it is the same bits in every run: all are that are summed in one order."""
        strict = "deterministic" in self.combination or result in ("out", "lse")
        return strict or (backend == "sm90" and result in ("grad of key", "grad of value"))

    def may_lie(self, name: str, tensor: Tensor, layout: Layout, backend: str) -> bool:
        """Whether the backend reads that tensor, or grad_out, there."""
        if backend != "sm90" or name == "mask":
            return tensor.dim() == 4
        if name == "bias":
            free = tensor.shape[2] == 1 or self.combination.set["head_dim"] > 128
            return free or layout in (wide_rows, interior)
        return tensor.dim() == 4 and layout in ALIGNED

    @property
    def units(self) -> float:
        return 4.0 if "1" in self.combination and "float32" in self.combination else 0.0


def problem(combination: Combination, sizes: Sizes, device: str, backend: str) -> Problem:
    of = combination.set
    (batch, heads, queries, keys), dtype = sizes.scores, of["dtype"]
    tensors = make_inputs(
        (batch, heads, queries, of["head_dim"]),
        (batch, heads // of["group_k"], keys, of["head_dim"]),
        (batch, heads // of["group_v"], keys, of["head_dim_v"]),
        dtype=dtype, device=device, mean=sizes.mean,
    )  # fmt: skip
    for feature in combination.features:
        tensors |= feature.make(sizes, dtype, device)
    if backend == "sm90" and "bias" in tensors and of["head_dim"] <= 128 and tensors["bias"].shape[2] > 1:
        tensors["bias"] = aligned(tensors["bias"])
    keep = None
    if "dropout" in combination:
        keep = keep_mask(rng_state(*STATE, device), combination.options["dropout_p"], (batch, heads), queries, keys)
    wants = combination.wants or QKV[:1]  # of forward alone: the first decides about the dtype
    inputs = {name: tensors.pop(name) for name in wants}
    return Problem(combination, inputs, tensors, combination.options, keep, backend)


def at_edges(combination: Combination, backend: str) -> Iterator[tuple[Combination, Sizes, int]]:
    """At the edges of tiles: every length as queries and as keys, in other pairs; half types, lse's gradient and, where
    the combination has none, bands by turns. Then columns for either side: mostly 16 bytes, which keep the wide loads;
    an odd number of them forbids those."""
    edges, dtype = EDGES[backend], combination.set["dtype"]
    for i, queries in enumerate(edges):
        keys = edges[(5 * i + 3) % len(edges)]
        turn = combination.but(name_of(HALF[i % 2] if dtype in HALF else dtype))
        if i // 2 % 2 and not is_left_out(backend, turn.but("lse").names):
            turn = turn.but("lse")
        if "full" in turn and i % 3 == 0:
            turn = turn.but(tuple(BANDS)[1 + i // 3 % 4])
        if backend == "sm90" and turn.wants:
            keys = max(keys, 16)  # fewer are another backend's
            if "causal" in turn or "sliding" in turn:
                queries = max(queries, 33)  # the first rows see few keys
        if backend == "sm90" and max(queries, keys) <= 64 and not turn.is_plain:
            queries += 64
        yield turn, Sizes(queries, keys), 8 if backend == "sm90" or i % 4 else 3


def strict(combination: Combination, backend: str) -> Combination:
    """Deterministic, so that all bits can be compared; as it is where that is another kernel."""
    return combination if backend == "sm90" else combination.but("deterministic")
