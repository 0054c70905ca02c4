"""The problems that attention.py times: shapes, options, inputs, and how much work and traffic each one is.

A Case is one problem without dtype and pass; suites.py lists them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MASKS = ("none", "bool", "float", "float_grad")
BACKWARD_PRODUCTS = 2.5  # five matrix products against the forward's two


@dataclass(frozen=True)
class Case:
    """One attention problem: query (b, h, sq, d), key (b, hkv, sk, d), value (b, hkv, sk, dv).

    `group` says what to expect of PyTorch on a CPU: "listed" are the eight shapes with published figures, "other" more
    shapes that its fused path takes, "math" those where it falls back to the math path and writes out the scores.
    `mask` is bool, or a float bias with or without a gradient; `mask_dims` names each of its dimensions by a letter of
    b, h, q, k, or 1: key padding "b11k" for bool and a position bias "1hqk" for float unless told.
    `window`: with causal, the keys before its own position that a query sees. `alibi`: slopes 2^(-8 (i + 1) / h).
    """

    b: int
    h: int
    sq: int
    d: int
    causal: bool = False
    hkv: int = 0  # 0: as many as h
    sk: int = 0  # 0: as many as sq
    dv: int = 0  # 0: as wide as d
    mask: str = "none"
    dropout: float = 0.0
    suite: str = "cpu"
    group: str = "other"
    mask_dims: str = ""
    window: int = 0
    softcap: float = 0.0
    alibi: bool = False

    def __post_init__(self) -> None:
        dims = {"none": "", "bool": "b11k"}.get(self.mask, "1hqk")
        for name, default in (("hkv", self.h), ("sk", self.sq), ("dv", self.d), ("mask_dims", dims)):
            object.__setattr__(self, name, getattr(self, name) or default)
        if self.mask not in MASKS or self.h % self.hkv or (self.window and not self.causal):
            raise ValueError(f"not a case: {self}")

    @property
    def options(self) -> str:
        """What is special about it, for a table: "causal", "GQA 16/4", "Ev 128"; empty for nothing."""
        kind, _, gradient = self.mask.partition("_")
        words = [
            "causal" if self.causal else "",
            f"window {self.window}" if self.window else "",
            f"GQA {self.h}/{self.hkv}" if self.hkv != self.h else "",
            f"Sk {self.sk}" if self.sk != self.sq else "",
            f"Ev {self.dv}" if self.dv != self.d else "",
            f"{kind} mask ({','.join(self.mask_dims)})" if self.mask != "none" else "",
            "with gradient" if gradient else "",
            f"softcap {self.softcap:g}" if self.softcap else "",
            "ALiBi" if self.alibi else "",
            f"dropout {self.dropout}" if self.dropout else "",
        ]
        return ", ".join(filter(None, words)).replace("), with", ") with")

    @property
    def name(self) -> str:
        """Shape and options in one line, as --case matches it: "4x12x512x64 causal"."""
        return f"{self.b}x{self.h}x{self.sq}x{self.d} {self.options}".rstrip()

    @property
    def beyond_sdpa(self) -> bool:
        """Whether an option is none of F.scaled_dot_product_attention's."""
        return bool(self.window or self.softcap or self.alibi)

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The mask's own shape, not broadcast."""
        sizes = {"1": 1, "b": self.b, "h": self.h, "q": self.sq, "k": self.sk}
        return tuple(sizes[letter] for letter in self.mask_dims)

    def pairs(self) -> float:
        """Kept (query, key) pairs of one head; the suite `grid` counts half of them when causal, as its peers do."""
        if not self.causal:
            return self.sq * self.sk
        if self.suite == "grid":
            return self.sq * self.sk / 2
        most = min(self.sk, self.window + 1) if self.window else self.sk  # keys that a row sees at most
        full = min(self.sq, most)  # rows that still grow; the rest of the rows see `most` keys
        return full * (full + 1) // 2 + (self.sq - full) * most

    def flop(self, direction: str) -> float:
        """Floating point operations: two products forward, five backward ("fwd" | "bwd" | "e2e", the sum of both)."""
        products = {"fwd": 1, "bwd": BACKWARD_PRODUCTS, "e2e": 1 + BACKWARD_PRODUCTS}[direction]
        return 2 * self.b * self.h * self.pairs() * (self.d + self.dv) * products

    def traffic(self, direction: str, dtype: torch.dtype) -> float:
        """Bytes to move at least: q, k, v, mask, out; backward reads those and dout, writes the gradients."""
        if direction == "e2e":
            return self.traffic("fwd", dtype) + self.traffic("bwd", dtype)
        inputs = self.b * (self.h * self.sq * self.d + self.hkv * self.sk * (self.d + self.dv))
        out = self.b * self.h * self.sq * self.dv
        tensors = dtype.itemsize * (inputs + out)
        mask = 0
        if self.mask != "none":
            mask = torch.Size(self.mask_shape).numel() * (1 if self.mask == "bool" else dtype.itemsize)
        if direction == "fwd":
            return tensors + mask
        return 2 * tensors + mask * (2 if self.mask == "float_grad" else 1)


@dataclass
class Inputs:
    """A case's tensors; `mask` is None, bool or in query's dtype; `slopes` None or (h,) float32; `grad_out` as out."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    grad_out: Tensor
    slopes: Tensor | None = None

    def wanting_gradients(self) -> list[Tensor]:
        """The tensors whose gradient a backward pass computes."""
        return [t for t in (self.query, self.key, self.value, self.mask) if t is not None and t.requires_grad]


def make_inputs(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Random normal tensors, contiguous (b, h, s, d); q, k and v want gradients, and the mask if the case says so."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    mask = None
    if case.mask == "bool" and case.mask_dims == "b11k":  # each sequence keeps its first keys, the first one all
        kept = torch.linspace(case.sk, case.sk // 2 + 1, case.b).long()
        mask = (torch.arange(case.sk) < kept[:, None])[:, None, None].to(device)
    elif case.mask == "bool":
        mask = torch.rand(case.mask_shape, generator=generator, device=device) < 0.8
    elif case.mask.startswith("float"):
        mask = normal(*case.mask_shape).requires_grad_(case.mask == "float_grad")
    exponents = torch.arange(1, case.h + 1, device=device, dtype=torch.float32) * (-8 / case.h)
    return Inputs(
        query=normal(case.b, case.h, case.sq, case.d).requires_grad_(),
        key=normal(case.b, case.hkv, case.sk, case.d).requires_grad_(),
        value=normal(case.b, case.hkv, case.sk, case.dv).requires_grad_(),
        mask=mask,
        grad_out=normal(case.b, case.h, case.sq, case.dv),
        slopes=torch.exp2(exponents) if case.alibi else None,
    )
