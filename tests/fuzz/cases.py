"""Random calls of attention: a case is a few plain numbers, drawn from one number, and builds its own tensors.

`draw(seed, number)` gives the case; `build(case, device)` its inputs as they lie in memory. Nothing here knows what is
right: that is in judge.py. What is rare in programs and has broken kernels is drawn often: rows and columns of
finfo.min, infinities and NaN, one row, one key, odd offsets and strides, expanded dims, lengths around a tile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
LENGTHS = (1, 1, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 257)
HEAD_DIMS = (1, 8, 8, 16, 32, 40, 48, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256)
HEADS = ((1, 1, 1), (2, 2, 2), (3, 3, 3), (4, 2, 2), (4, 4, 1), (6, 2, 3), (6, 3, 2), (8, 1, 1), (15, 3, 3), (5, 1, 5))
MOST_SCORES = 60_000  # batch * heads * queries * keys: a case takes milliseconds


@dataclass(frozen=True)
class View:
    """How a tensor lies in its storage, which is NaN wherever the tensor is not (a bool's is True)."""

    order: Shape = ()  # dims from the outermost in memory to the innermost; empty: as they are
    steps: Shape = ()  # elements of the storage from one to the next, for each dim; empty: 1
    pads: Shape = ()  # elements before and after, for each dim; empty: 0
    offset: int = 0  # elements before the first
    expanded: Shape = ()  # dims of stride 0


@dataclass(frozen=True)
class Low:
    """Numbers of a bias that stand for "almost never": how low, and which."""

    value: str  # "min" (finfo.min), "half_min", "-inf" or a number
    where: str  # "elements", "rows", "columns" or "all"
    share: float


@dataclass(frozen=True)
class Special:
    """NaN or an infinity in one of the tensors."""

    tensor: str  # an input or "grad", the cotangent of out
    value: str
    where: str  # "element", "row" or "all"


@dataclass(frozen=True)
class Case:
    seed: int
    number: int
    entry: str  # "attention" or "drop_in"
    dtype: str
    shapes: tuple[Shape, Shape, Shape]  # of query, key and value
    views: tuple[View, View, View]
    numbers: str  # "normal", "equal" (query and key constant) or "integers"
    mean: float
    bias: Shape | None
    bias_dtype: str
    bias_view: View
    bias_numbers: str  # "normal" or "zero", before `low` is put in
    low: Low | None
    mask: Shape | None
    mask_share: float  # of keys that are removed
    mask_view: View
    slopes: Shape | None
    special: Special | None
    wants: tuple[str, ...]  # whose gradients are asked for
    outputs: tuple[str, ...]  # which of out and lse have a cotangent
    grad_view: View
    autocast: str | None
    dropout_p: float
    options: tuple[tuple[str, Any], ...]
    pick: float  # in [0, 1): which backend, where several may be asked
    sinks: Shape | None
    sinks_level: float

    @property
    def scores(self) -> Shape:
        return _score_shape(self.shapes)

    def describe(self) -> str:
        parts = [self.entry, self.dtype, *(f"{name}{list(s)}" for name, s in zip("qkv", self.shapes, strict=True))]
        parts += [f"{name}={value}" for name, value in self.options]
        for name in ("numbers", "mean", "low", "mask", "slopes", "sinks", "special", "autocast", "dropout_p"):
            value = getattr(self, name)
            if value not in (None, 0.0, "normal"):
                parts.append(f"{name}={value}")
        if self.bias is not None:
            parts.append(f"bias={list(self.bias)} {self.bias_dtype} {self.bias_numbers}")
        return " ".join(parts) + f" wants={','.join(self.wants)} of={','.join(self.outputs)}"


def draw(seed: int, number: int) -> Case:
    """The case of that number, whatever was drawn before it."""
    rng = random.Random(f"{seed}:{number}")
    chance = lambda p: rng.random() < p  # noqa: E731
    entry = "attention" if chance(0.7) else "drop_in"
    dtype = rng.choice(("bfloat16", "bfloat16", "bfloat16", "float16", "float16", "float32", "float32", "float64"))
    special = _draw_special(rng) if chance(0.12) else None
    shapes = _draw_shapes(rng, entry, special is not None)
    numbers = rng.choice(("normal",) * 17 + ("equal", "integers", "integers"))
    options = _draw_options(rng, entry, numbers, dtype == "float16")
    scores = _score_shape(shapes)

    has_bias = chance(0.4) or (special is not None and special.tensor == "bias")
    has_mask = chance(0.2)
    if entry == "drop_in":
        has_mask = has_mask and not has_bias
        if has_bias or has_mask:
            options.pop("is_causal", None)
    # Scores beyond 1e5 that are exact: what is added to them must be exact, too, or absorbed in float64 as in float32.
    huge = numbers == "equal" or abs(options.get("scale", 0.0)) >= 4096.0
    has_slopes = entry == "attention" and chance(0.15) and not huge
    bias = _broadcastable(rng, scores) if has_bias else None
    mask = _broadcastable(rng, scores) if has_mask else None
    slopes = (scores[-3:-2] if chance(0.5) else scores[-4:-2]) if has_slopes else None
    names = ["query", "key", "value"] + ["bias"] * has_bias + ["alibi_slopes"] * has_slopes
    wants = names if chance(0.6) else [name for name in names if chance(0.4)]
    outputs = ["out"]
    if options.get("return_lse"):
        outputs = rng.choice((["out"], ["lse"], ["out", "lse"], ["out", "lse"]))
    if special is not None and special.tensor == "grad" and outputs == ["lse"]:
        outputs = ["out", "lse"]
    autocast = None
    if dtype == "float32" and not has_bias and not has_slopes and special is None and chance(0.1):
        autocast = "bfloat16" if numbers == "integers" else rng.choice(("bfloat16", "float16"))
    of_sinks = random.Random(f"{seed}:{number}:sinks")  # its own: other draws stay
    has_sinks = entry == "attention" and special is None and of_sinks.random() < 0.15
    sinks = of_sinks.choice((scores[-3:-2], scores[-4:-2])) if has_sinks else None
    level = of_sinks.choice((0.0, 0.0, 4.0, -30.0, 60.0))
    if has_sinks and of_sinks.random() < 0.7:
        wants = [*wants, "sinks"]
    return Case(
        seed=seed,
        number=number,
        entry=entry,
        dtype=dtype,
        shapes=shapes,
        views=(_draw_view(rng, shapes[0]), _draw_view(rng, shapes[1]), _draw_view(rng, shapes[2])),
        numbers=numbers,
        mean=rng.choice((0.0, 0.0, 0.0, 0.5, 2.0, 8.0)) if numbers == "normal" else 0.0,
        bias=bias,
        bias_dtype=dtype if dtype == "float64" or (chance(0.6) and not (huge and dtype == "float16")) else "float32",
        bias_view=_draw_view(rng, bias) if bias is not None else View(),
        bias_numbers="normal" if chance(0.5) and not huge else "zero",
        low=_draw_low(rng, huge) if chance(0.6) else None,
        mask=mask,
        mask_share=rng.choice((0.1, 0.6, 1.0)),
        mask_view=_draw_view(rng, mask) if mask is not None else View(),
        slopes=slopes,
        special=special,
        wants=tuple(wants),
        outputs=tuple(outputs),
        grad_view=_draw_view(rng, (*scores[:-1], shapes[2][-1])),
        autocast=autocast,
        dropout_p=rng.choice((0.1, 0.5, 0.9, 1.0)) if chance(0.12) else 0.0,
        options=tuple(options.items()),
        pick=rng.random(),
        sinks=sinks,
        sinks_level=level,
    )


def _score_shape(shapes: tuple[Shape, Shape, Shape]) -> Shape:
    """(..., Hq, L, S)"""
    lead = torch.broadcast_shapes(*(shape[:-3] for shape in shapes))
    heads = [max(shape[-3] for shape in shapes)] if len(shapes[0]) > 2 else []
    return (*lead, *heads, shapes[0][-2], shapes[1][-2])


def _draw_shapes(rng: random.Random, entry: str, small: bool) -> tuple[Shape, Shape, Shape]:
    queries, keys = rng.choice(LENGTHS), rng.choice(LENGTHS)
    if rng.random() < 0.2:
        queries, keys = rng.randint(1, 150), rng.randint(1, 150)
    e = rng.choice(HEAD_DIMS) if rng.random() < 0.85 else rng.randint(1, 300)
    ev = e if rng.random() < 0.7 else rng.choice((*HEAD_DIMS, rng.randint(1, 300)))
    hq, hk, hv = rng.choice(HEADS)
    batch: Shape = (rng.choice((1, 1, 2, 3)),)
    if small:
        e, ev, queries, keys, batch = min(e, 128), min(ev, 128), min(queries, 130), min(keys, 130), (1,)
    most = max(1, MOST_SCORES // (queries * keys * (4 if small else 1)))
    while prod(batch) * hq > most and (hq > 1 or prod(batch) > 1):
        batch, (hq, hk, hv) = (
            ((1,), (hq, hk, hv)) if prod(batch) > 1 else (batch, rng.choice(HEADS[: 4 if hq > 4 else 1]))
        )
    lead = [batch, batch, batch]
    if entry == "drop_in":
        rank = rng.choice((2, 3, 4, 4, 4, 5))
        if rank == 2:
            return (queries, e), (keys, e), (keys, ev)
        if rank == 3:
            lead = [(), (), ()]
        elif rank == 5:
            lead = [(2, *batch)] * 3
        if rng.random() < 0.4:  # leading dims that broadcast, heads too
            hk = hv = hq
            whole = (*lead[0], hq)
            parts = [tuple(size if rng.random() < 0.7 else 1 for size in whole) for _ in range(3)]
            lead, (hq, hk, hv) = [p[:-1] for p in parts], (p[-1] for p in parts)
    return (*lead[0], hq, queries, e), (*lead[1], hk, keys, e), (*lead[2], hv, keys, ev)


def _draw_options(rng: random.Random, entry: str, numbers: str, is_fp16: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.35:
        options["causal" if entry == "attention" else "is_causal"] = True
    if rng.random() < 0.4:
        options["scale"] = rng.choice((0.0, -0.3, -0.05, 0.05, 0.3, 1.0))
        if numbers == "integers" and rng.random() < 0.6:  # large: only where every dtype has the scores exactly
            options["scale"] = rng.choice((1, -1)) * 2.0 ** rng.choice((3, 6) if is_fp16 else (3, 6, 12, 20, 28))
    if entry == "drop_in":
        return options
    options["align"] = rng.choice(("top_left", "bottom_right"))
    if rng.random() < 0.35:
        sides = (None, 0, 0, 1, 15, 16, 63, 64, rng.randint(0, 130))
        options["window"] = rng.choice(
            ((0, 0), (0, 63), (rng.choice(sides), None), (rng.choice(sides), rng.choice(sides)))
        )
    # Not beside large scales: 1 - tanh^2 of a large score is what its rounding leaves.
    if rng.random() < 0.15 and abs(options.get("scale", 0.0)) < 8:
        options["softcap"] = rng.choice((0.5, 1.0, 15.0, 30.0, 5000.0))
    if rng.random() < 0.5:
        options["deterministic"] = rng.random() < 0.5
    if rng.random() < 0.5:
        options["return_lse"] = True
    return options


def _draw_special(rng: random.Random) -> Special:
    tensor = rng.choice(("query", "key", "value", "value", "bias", "bias", "grad"))
    return Special(tensor, rng.choice(("nan", "inf", "inf", "-inf")), rng.choice(("element", "row", "row", "all")))


def _draw_low(rng: random.Random, huge: bool) -> Low:
    values = ("min", "min", "min", "half_min", "-1e30", "-inf", "-inf", "-1e9", "-10000")
    value = rng.choice(values[:-2] if huge else values)
    return Low(value, rng.choice(("elements", "rows", "columns", "columns", "all")), rng.choice((0.2, 0.5, 0.9)))


def _broadcastable(rng: random.Random, shape: Shape) -> Shape:
    """A shape that broadcasts to `shape`: some dims 1, some leading ones missing."""
    sizes = [size if rng.random() < 0.65 else 1 for size in shape]
    return tuple(sizes[rng.randint(0, len(shape) - 1) :])


def _draw_view(rng: random.Random, shape: Shape) -> View:
    rank = len(shape)
    kind = rng.choice(("plain", "plain", "plain", "sequence", "offset", "offset", "any", "any", "expanded"))
    if kind == "sequence" and rank >= 3:  # (B, S, H, D) in memory, as a projection leaves it
        return View(order=(*range(rank - 3), rank - 2, rank - 3, rank - 1), offset=rng.choice((0, 0, 1, 2)))
    if kind == "offset":
        pads = (*(0 for _ in range(rank - 1)), rng.choice((0, 0, 1)))
        return View(pads=pads, offset=rng.choice((1, 2, 3, 4, 8)))
    if kind == "expanded":
        return View(expanded=tuple(i for i in range(rank) if rng.random() < 0.4), offset=rng.choice((0, 0, 1)))
    if kind == "any":
        order = list(range(rank))
        rng.shuffle(order)
        steps = tuple(rng.choice((1, 1, 1, 2, 3)) for _ in range(rank))
        return View(tuple(order), steps, tuple(rng.choice((0, 0, 1)) for _ in range(rank)), rng.choice((0, 0, 1, 2, 3)))
    return View()


# ---- tensors --------------------------------------------------------------------------------------------------------


def place(values: Tensor, view: View, device: str) -> Tensor:
    """A tensor of these values (of dims that are expanded, the first ones) that lies as `view` says."""
    rank, shape = values.dim(), values.shape
    for dim in view.expanded:
        values = values.narrow(dim, 0, 1)
    if view == View():
        return values.to(device)
    order = view.order or tuple(range(rank))
    steps, pads = view.steps or (1,) * rank, view.pads or (0,) * rank
    sizes = [values.shape[i] * steps[i] + 2 * pads[i] for i in order]
    gaps: Any = True if values.dtype == torch.bool else torch.nan
    storage = torch.full((view.offset + prod(sizes),), gaps, dtype=values.dtype)
    wide = storage[view.offset :].view(sizes).permute([order.index(i) for i in range(rank)])
    spans = [slice(pads[i], pads[i] + values.shape[i] * steps[i], steps[i]) for i in range(rank)]
    wide[tuple(spans)] = values
    # The storage moves as it is: a copy of the view would lose its strides.
    moved = storage.to(device)
    target = wide[tuple(spans)]
    return moved.as_strided(target.shape, target.stride(), target.storage_offset()).expand(shape)


def build(case: Case, device: str, again: int = 0) -> dict[str, Tensor]:
    """Inputs by the names of the call, and the cotangents "grad" and "grad_lse". again: other numbers of the case."""
    generator = torch.Generator().manual_seed((case.seed << 32) + case.number * 64 + again)
    dtype = DTYPES[case.dtype]
    narrow = DTYPES[case.autocast or case.dtype]
    random_of: Callable[..., Tensor] = lambda shape: torch.randn(shape, generator=generator)  # noqa: E731

    def numbers(name: str, shape: Shape) -> Tensor:
        if name != "value" and case.numbers == "equal":
            return torch.full(shape, equal_number(case))
        if name != "value" and case.numbers == "integers":
            return torch.randint(-2, 3, shape, generator=generator).float()
        return random_of(shape) + case.mean

    def put_special(name: str, values: Tensor) -> Tensor:
        special = case.special
        if special is None or special.tensor != name or values.numel() == 0:
            return values
        row = tuple(int(torch.randint(size, (), generator=generator)) for size in values.shape[:-1])
        column = int(torch.randint(values.shape[-1], (), generator=generator))
        index: Any = {"element": (*row, column), "row": row, "all": ...}[special.where]
        values[index] = float(special.value)
        return values

    result = {}
    for name, shape, view in zip(("query", "key", "value"), case.shapes, case.views, strict=True):
        result[name] = place(put_special(name, numbers(name, shape)).to(dtype), view, device)
    scores = case.scores
    if case.bias is not None:
        bias_dtype = DTYPES[case.bias_dtype]
        values = random_of(case.bias) if case.bias_numbers == "normal" else torch.zeros(case.bias)
        values = values.to(bias_dtype)
        if case.low is not None:
            values[_low_places(case.low, case.bias, generator)] = _low_value(case.low.value, bias_dtype)
        name = "bias" if case.entry == "attention" else "attn_mask"
        result[name] = place(put_special("bias", values), case.bias_view, device)
    if case.mask is not None:
        kept = torch.rand(case.mask, generator=generator) >= case.mask_share
        result["mask" if case.entry == "attention" else "attn_mask"] = place(kept, case.mask_view, device)
    if case.slopes is not None:
        result["alibi_slopes"] = torch.rand(case.slopes, generator=generator).to(device)
    if case.sinks is not None:
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        result["sinks"] = (random_of(case.sinks) + case.sinks_level).to(device, wide)
    out = (*scores[:-1], case.shapes[2][-1])
    result["grad"] = place(put_special("grad", random_of(out)).to(narrow), case.grad_view, device)
    # Rounded to the narrow dtype, so that the float64 truth and eager attention get the same.
    result["grad_lse"] = random_of(scores[:-1]).to(narrow).to(device)
    return result


def equal_number(case: Case) -> float:
    """What query and key are made of where they are "equal": scores of 1e11, which every dtype has exactly."""
    return 240.0 if "float16" in (case.dtype, case.autocast) else 133120.0


def _low_value(name: str, dtype: torch.dtype) -> float:
    lowest = torch.finfo(dtype).min
    if name == "-inf":
        return -torch.inf
    return {"min": lowest, "half_min": lowest / 2}.get(name) or max(float(name), lowest)


def _low_places(low: Low, shape: Shape, generator: torch.Generator) -> Tensor:
    if low.where == "all":
        return torch.ones(shape, dtype=torch.bool)
    sizes = list(shape)
    if low.where == "rows":
        sizes[-1] = 1
    elif low.where == "columns" and len(sizes) > 1:
        sizes[-2] = 1
    return (torch.rand(sizes, generator=generator) < low.share).expand(shape)
