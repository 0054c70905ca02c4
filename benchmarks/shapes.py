"""The problems that attention.py times: shapes, options, inputs, and how much work and traffic each one is.

A Case is one problem without dtype and pass. SUITES maps a suite's name to its cases; a new suite is one more function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

MASKS = ("none", "bool", "float", "float_grad")


@dataclass(frozen=True)
class Case:
    """One attention problem: query (b, h, sq, d), key (b, hkv, sk, d), value (b, hkv, sk, dv).

    `group` says what to expect of PyTorch: "listed" are the eight shapes with published figures, "other" more shapes
    that its fused path takes, "math" those where it falls back to the math path and writes out the scores.
    `mask`: bool is key padding (b, 1, 1, sk); float is a position bias (1, h, sq, sk), with or without a gradient.
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

    def __post_init__(self) -> None:
        for name, default in (("hkv", self.h), ("sk", self.sq), ("dv", self.d)):
            object.__setattr__(self, name, getattr(self, name) or default)
        if self.mask not in MASKS or self.h % self.hkv:
            raise ValueError(f"not a case: {self}")

    @property
    def options(self) -> str:
        """What is special about it, for a table: "causal", "GQA 16/4", "Ev 128"; empty for nothing."""
        words = [
            "causal" if self.causal else "",
            f"GQA {self.h}/{self.hkv}" if self.hkv != self.h else "",
            f"Sk {self.sk}" if self.sk != self.sq else "",
            f"Ev {self.dv}" if self.dv != self.d else "",
            f"{self.mask} mask".replace("float_grad mask", "float mask with gradient") if self.mask != "none" else "",
            f"dropout {self.dropout}" if self.dropout else "",
        ]
        return ", ".join(filter(None, words))

    @property
    def name(self) -> str:
        """Shape and options in one line, as --case matches it: "4x12x512x64 causal"."""
        return f"{self.b}x{self.h}x{self.sq}x{self.d} {self.options}".rstrip()

    def pairs(self) -> float:
        """Kept (query, key) pairs of one head; the suite `grid` counts half of them when causal, as its peers do."""
        if not self.causal:
            return self.sq * self.sk
        if self.suite == "grid":
            return self.sq * self.sk / 2
        full = min(self.sq, self.sk)  # rows that still grow; the rest of the rows see every key
        return full * (full + 1) // 2 + (self.sq - full) * self.sk

    def flop(self, direction: str) -> float:
        """Floating point operations: two products forward, five backward ("fwd" | "bwd")."""
        return 2 * self.b * self.h * self.pairs() * (self.d + self.dv) * (1 if direction == "fwd" else 2.5)

    def traffic(self, direction: str, dtype: torch.dtype) -> float:
        """Bytes to move at least: q, k, v, out; backward reads those and dout, writes dq, dk, dv. Masks not counted."""
        inputs = self.b * (self.h * self.sq * self.d + self.hkv * self.sk * (self.d + self.dv))
        out = self.b * self.h * self.sq * self.dv
        return dtype.itemsize * (inputs + out if direction == "fwd" else 2 * inputs + 2 * out)


@dataclass
class Inputs:
    """The tensors of a case; `mask` is None, bool or in query's dtype; `grad_out` (b, h, sq, dv)."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    grad_out: Tensor

    def wanting_gradients(self) -> list[Tensor]:
        """The tensors whose gradient a backward pass computes."""
        return [t for t in (self.query, self.key, self.value, self.mask) if t is not None and t.requires_grad]


def make_inputs(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Random normal tensors, contiguous (b, h, s, d); q, k and v want gradients, and the mask if the case says so."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    mask = None
    if case.mask == "bool":  # every sequence keeps its first keys, the first sequence all of them
        kept = torch.linspace(case.sk, case.sk // 2 + 1, case.b).long()
        mask = (torch.arange(case.sk) < kept[:, None])[:, None, None].to(device)
    elif case.mask.startswith("float"):
        mask = normal(1, case.h, case.sq, case.sk).requires_grad_(case.mask == "float_grad")
    return Inputs(
        query=normal(case.b, case.h, case.sq, case.d).requires_grad_(),
        key=normal(case.b, case.hkv, case.sk, case.d).requires_grad_(),
        value=normal(case.b, case.hkv, case.sk, case.dv).requires_grad_(),
        mask=mask,
        grad_out=normal(case.b, case.h, case.sq, case.dv),
    )


def cpu_cases() -> list[Case]:
    """Eight listed shapes, then the odd lengths, widths and options that real models have."""
    listed = [
        Case(b, h, s, d, causal, group="listed")
        for b, h, s, d in ((4, 12, 512, 64), (1, 8, 2048, 64), (1, 8, 2048, 128), (1, 4, 8192, 64))
        for causal in (False, True)
    ]
    others = [
        Case(8, 12, 77, 64, causal=True),  # CLIP's text
        Case(8, 12, 197, 64),  # ViT's patches
        Case(2, 8, 1000, 64),
        Case(2, 8, 1000, 64, causal=True),
        Case(2, 8, 1024, 64, sk=77),  # diffusion's cross attention
        Case(2, 8, 1024, 32),
        Case(2, 8, 1024, 80),
        Case(2, 8, 1024, 96, causal=True),
        Case(2, 16, 1024, 64, causal=True, hkv=4),
        Case(4, 12, 512, 64, mask="bool"),
        Case(4, 12, 512, 64, mask="float"),
    ]
    math = [
        Case(4, 12, 512, 64, mask="float_grad", group="math"),
        Case(4, 12, 512, 64, dropout=0.1, group="math"),
        Case(4, 12, 512, 64, causal=True, dropout=0.1, group="math"),
        Case(2, 8, 1024, 64, dv=128, group="math"),
        Case(2, 8, 1024, 96, dv=64, causal=True, group="math"),
    ]
    return listed + others + math


def quick(cases: list[Case]) -> list[Case]:
    """One small case of each kind, for CI: one batch of 4 heads, at most 256 queries and keys."""
    seen, chosen = set(), []
    for case in cases:
        kind = (case.mask, case.dropout > 0, case.hkv != case.h, case.dv != case.d, case.causal)
        if kind not in seen:
            seen.add(kind)
            small = {"b": 1, "h": 4, "hkv": 4 if case.hkv == case.h else 1}
            chosen.append(replace(case, **small, sq=min(case.sq, 256), sk=min(case.sk, 256)))
    return chosen


SUITES: dict[str, Callable[[], list[Case]]] = {"cpu": cpu_cases}
