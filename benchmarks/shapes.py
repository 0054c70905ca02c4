"""The problems that attention.py times: shapes, options, inputs, and how much work and traffic each one is.

A Case is one problem without dtype and pass; suites.py lists them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from harness import load_flash_ext
from torch import Tensor

E4M3 = torch.float8_e4m3fn
BOOL_MASKS = ("bool", "documents")
MASKS = ("none", *BOOL_MASKS, "float", "float_grad")
DOCUMENTS = 8  # of a mask
BACKWARD_PRODUCTS = 2.5  # five matrix products against the forward's two
MOST_PADDED_GIB = 4.0  # of one tensor: sequences that take more are not padded


@dataclass(frozen=True)
class Case:
    """One attention problem: query (b, h, sq, d), key (b, hkv, sk, d), value (b, hkv, sk, dv).

    `group` says what to expect of PyTorch on a CPU: "listed" are the eight shapes with published figures, "other" more
    shapes that its fused path takes, "math" those where it falls back to the math path and writes out the scores.
    `mask` is bool (random, or padding with dimensions b11k; "documents": eight of equal length, which see themselves),
    or a float bias with or without a gradient; `mask_dims` names each of its dimensions by a letter of
    b, h, q, k, or 1: key padding "b11k" for bool and a position bias "1hqk" for float unless told.
    `window`: with causal, the keys before its own position that a query sees. `alibi`: slopes 2^(-8 (i + 1) / h).
    `lengths`: of packed sequences, which attend to themselves; then b is how many they are, sq and sk the longest, and
    the inputs are (1, h, rows, d) of all their rows. They are equally long or causal, so that padding needs no mask,
    and have no other option but grouped heads.
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
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.lengths:
            for name, value in (("b", len(self.lengths)), ("sq", max(self.lengths)), ("sk", max(self.lengths))):
                object.__setattr__(self, name, value)
        dims = {"none": "", "bool": "b11k", "documents": "11qk"}.get(self.mask, "1hqk")
        for name, default in (("hkv", self.h), ("sk", self.sq), ("dv", self.d), ("mask_dims", dims)):
            object.__setattr__(self, name, getattr(self, name) or default)
        if self.mask not in MASKS or self.h % self.hkv or (self.window and not self.causal):
            raise ValueError(f"not a case: {self}")
        more = (self.mask != "none", self.dropout, self.window, self.softcap, self.alibi)
        if self.lengths and (any(more) or not (self.causal or len(set(self.lengths)) == 1)):
            raise ValueError(f"not a case of packed sequences: {self}")

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
            f"packed{self._spread}" if self.lengths else "",
        ]
        return ", ".join(filter(None, words)).replace("), with", ") with")

    @property
    def _spread(self) -> str:
        least, middle, most = min(self.lengths), statistics.median(self.lengths), max(self.lengths)
        return f" {least} to {most}, median {middle:g}, {self.rows} in all" if least < most else ""

    @property
    def name(self) -> str:
        """Shape and options in one line, as --case matches it: "4x12x512x64 causal"."""
        return f"{self.b}x{self.h}x{self.sq}x{self.d} {self.options}".rstrip()

    @property
    def beyond_sdpa(self) -> bool:
        """Whether an option is none of F.scaled_dot_product_attention's."""
        return bool(self.window or self.softcap or self.alibi or self.lengths)

    @property
    def rows(self) -> int:
        """Queries of one head of the whole batch."""
        return sum(self.lengths) or self.b * self.sq

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """The mask's own shape, not broadcast."""
        sizes = {"1": 1, "b": self.b, "h": self.h, "q": self.sq, "k": self.sk}
        return tuple(sizes[letter] for letter in self.mask_dims)

    def pairs(self) -> float:
        """Kept (query, key) pairs of one head of the whole batch, of packed sequences by each one's own length.

        The suite `grid` counts half of all when causal, as its peers do.
        """
        if self.lengths:
            return sum(self._pairs(length, length) for length in self.lengths)
        return self.b * self._pairs(self.sq, self.sk)

    def _pairs(self, sq: int, sk: int) -> float:
        if not self.causal:
            return sq * sk
        if self.suite == "grid":
            return sq * sk / 2
        most = min(sk, self.window + 1) if self.window else sk  # keys that a row sees at most
        full = min(sq, most)  # rows that still grow; the rest of the rows see `most` keys
        return full * (full + 1) // 2 + (sq - full) * most

    def flop(self, direction: str) -> float:
        """Floating point operations: two products forward, five backward ("fwd" | "bwd" | "e2e", the sum of both)."""
        products = {"fwd": 1, "bwd": BACKWARD_PRODUCTS, "e2e": 1 + BACKWARD_PRODUCTS}[direction]
        return 2 * self.h * self.pairs() * (self.d + self.dv) * products

    def traffic(self, direction: str, dtype: torch.dtype) -> float:
        """Bytes to move at least: q, k, v, mask, out; backward reads those and dout, writes the gradients.

        Mask and out of e4m3 inputs are bf16.
        """
        if direction == "e2e":
            return self.traffic("fwd", dtype) + self.traffic("bwd", dtype)
        keys = sum(self.lengths) or self.b * self.sk
        inputs = self.h * self.rows * self.d + self.hkv * keys * (self.d + self.dv)
        out = self.h * self.rows * self.dv
        of_out = max(dtype.itemsize, 2)
        tensors = dtype.itemsize * inputs + of_out * out
        mask = 0
        if self.mask != "none":
            mask = torch.Size(self.mask_shape).numel() * (1 if self.mask in BOOL_MASKS else of_out)
        if direction == "fwd":
            return tensors + mask
        return 2 * tensors + mask * (2 if self.mask == "float_grad" else 1)


@dataclass
class Inputs:
    """A case's tensors; `mask` is None, bool or in query's dtype; `slopes` None or (h,) float32; `grad_out` as out.

    `cu_seqlens`, of packed sequences: (b + 1,) int32, the first row of each and the end.
    `descales`, of e4m3 query, key and value: (b, heads) float32 of each; a mask that is not bool and grad_out are bf16.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    grad_out: Tensor
    slopes: Tensor | None = None
    cu_seqlens: Tensor | None = None
    descales: tuple[Tensor, ...] = ()

    def named_descales(self) -> dict[str, Tensor]:
        """As the call takes them."""
        return dict(zip(("q_descale", "k_descale", "v_descale"), self.descales, strict=False))

    def dequantised(self, dtype: torch.dtype) -> Inputs:
        """What e4m3 tensors stand for, without gradients."""
        tensors, exact = (self.query, self.key, self.value), torch.promote_types(dtype, torch.float32)
        pairs = zip(tensors, self.descales, strict=True)
        query, key, value = ((t.to(exact) * d[..., None, None].to(exact)).to(dtype) for t, d in pairs)
        return replace(self, query=query, key=key, value=value, descales=())

    def packed(self) -> list[Tensor]:
        """Query, key and value of packed sequences as (rows, heads, head dim), contiguous."""
        return [t.squeeze(0).transpose(0, 1) for t in (self.query, self.key, self.value)]

    def wanting_gradients(self) -> list[Tensor]:
        """The tensors whose gradient a backward pass computes."""
        return [t for t in (self.query, self.key, self.value, self.mask) if t is not None and t.requires_grad]


def make_inputs(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Random normal tensors, contiguous (b, h, s, d); q, k and v want gradients, and the mask if the case says so.

    Of packed sequences they are (1, h, rows, d), in memory (rows, h, d). e4m3 is quantised from bf16 and wants none.
    """
    if dtype == E4M3:
        wide = make_inputs(case, torch.bfloat16, device, seed)
        quantize = load_flash_ext().quantize_fp8
        pairs = [quantize(t.detach()) for t in (wide.query, wide.key, wide.value)]
        (query, key, value), descales = zip(*pairs, strict=True)
        return replace(wide, query=query, key=key, value=value, descales=descales)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    def rows(heads: int, length: int, width: int) -> Tensor:
        if case.lengths:
            return normal(case.rows, heads, width).transpose(0, 1)[None]
        return normal(case.b, heads, length, width)

    mask = None
    if case.mask == "bool" and case.mask_dims == "b11k":  # each sequence keeps its first keys, the first one all
        kept = torch.linspace(case.sk, case.sk // 2 + 1, case.b).long()
        mask = (torch.arange(case.sk) < kept[:, None])[:, None, None].to(device)
    elif case.mask == "bool":
        mask = torch.rand(case.mask_shape, generator=generator, device=device) < 0.8
    elif case.mask == "documents":
        rows_of, cols_of = (torch.arange(size, device=device) * DOCUMENTS // size for size in (case.sq, case.sk))
        mask = (rows_of[:, None] == cols_of).expand(case.mask_shape)
    elif case.mask.startswith("float"):
        mask = normal(*case.mask_shape).requires_grad_(case.mask == "float_grad")
    exponents = torch.arange(1, case.h + 1, device=device, dtype=torch.float32) * (-8 / case.h)
    return Inputs(
        query=rows(case.h, case.sq, case.d).requires_grad_(),
        key=rows(case.hkv, case.sk, case.d).requires_grad_(),
        value=rows(case.hkv, case.sk, case.dv).requires_grad_(),
        mask=mask,
        grad_out=rows(case.h, case.sq, case.dv),
        slopes=torch.exp2(exponents) if case.alibi else None,
        cu_seqlens=torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=device),
    )


def _places(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """(b, sq) each, of a padded position: the row of packed sequences that lies there, and whether it is no padding."""
    lengths = torch.tensor(case.lengths, device=device)[:, None]
    position = torch.arange(case.sq, device=device)
    return lengths.cumsum(0) - lengths + position % lengths, position < lengths


def pad(case: Case, x: Inputs) -> Inputs:
    """Packed sequences as contiguous (b, h, sq, d); as they are where one tensor would take too many GiB.

    Padding repeats the sequence, since zeros draw less power, and its gradient is 0, as that of what no loss sees.
    """
    if case.b * case.h * case.sq * max(case.d, case.dv) * x.query.element_size() > MOST_PADDED_GIB * 2**30:
        return x
    rows, inside = _places(case, x.query.device)

    def padded(tensor: Tensor) -> Tensor:
        return tensor.detach()[0][:, rows].transpose(0, 1).contiguous()

    query, key, value = (padded(t).requires_grad_() for t in (x.query, x.key, x.value))
    return replace(x, query=query, key=key, value=value, grad_out=padded(x.grad_out) * inside[:, None, :, None])


def unpad(case: Case, tensor: Tensor) -> Tensor:
    """What became of padded inputs as (1, h, rows, d), any other tensor as it is."""
    if not case.lengths or len(tensor) == 1:
        return tensor
    _, inside = _places(case, tensor.device)
    return tensor.transpose(1, 2)[inside].transpose(0, 1)[None]
