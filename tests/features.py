"""What a call of attention may ask for: one table of features, and which of them are tried together.

A combination has one feature of every group of TABLE. A feature says what it adds to the inputs and to the options, and
for which of the added inputs it wants a gradient. `alone` has every feature beside nothing else, `pairs` every two
features of two groups in some combination, in as few as a greedy search finds; both leave out what a backend does not
serve (`UNSERVED`). A new feature is one line of TABLE, and one of UNSERVED for a backend that refuses it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from helpers import Inputs, rand
from sm90_helpers import BANDS


@dataclass(frozen=True)
class Sizes:
    """Of the scores, and the mean of what is drawn; keys have half as many heads where they are grouped."""

    queries: int
    keys: int
    batch: int = 2
    heads: int = 2
    mean: float = 0.0

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.keys


Make = Callable[[Sizes, torch.dtype, str], Inputs]


def nothing(sizes: Sizes, dtype: torch.dtype, device: str) -> Inputs:
    return {}


def mask_of(*dims: int) -> Make:
    """A bool mask that has these dims of the scores; every row keeps a key."""

    def make(sizes: Sizes, dtype: torch.dtype, device: str) -> Inputs:
        mask = torch.rand([size if dim in dims else 1 for dim, size in enumerate(sizes.scores)]) > 0.3
        mask[..., 0] = True
        return {"mask": mask.to(device)}

    return make


def bias_of(*dims: int, wide: bool = False) -> Make:
    """A bias that has these dims of the scores, in query's dtype or, if `wide`, in float32."""

    def make(sizes: Sizes, dtype: torch.dtype, device: str) -> Inputs:
        shape = [size if dim in dims else 1 for dim, size in enumerate(sizes.scores)]
        return {"bias": rand(*shape, dtype=torch.float32 if wide else dtype, device=device, mean=sizes.mean)}

    return make


def slopes_of(*dims: int) -> Make:
    """Those of the paper are 2^-8 to 1/2."""

    def make(sizes: Sizes, dtype: torch.dtype, device: str) -> Inputs:
        return {"alibi_slopes": 2 ** -(8 * torch.rand([sizes.scores[dim] for dim in dims])).to(device)}

    return make


@dataclass(frozen=True)
class Feature:
    """`make`: what it adds to query, key and value; `options` of the call; `wants`: which inputs want a gradient, of
    query, key and value all where no feature names one; `set`: what it says of the shapes and of the dtype."""

    make: Make = nothing
    options: dict[str, Any] = field(default_factory=dict)
    wants: tuple[str, ...] = ()
    set: dict[str, Any] = field(default_factory=dict)


def dtype_of(name: str) -> Feature:
    return Feature(set={"dtype": getattr(torch, name)})


def width_of(head_dim: int, head_dim_v: int = 0) -> Feature:
    return Feature(set={"head_dim": head_dim, "head_dim_v": head_dim_v or head_dim})


# The first of a group is what a combination has that names none.
TABLE: dict[str, dict[str, Feature]] = {
    "dtype": {name: dtype_of(name) for name in ("bfloat16", "float16", "float32", "float64")},
    "width": {
        **{str(n): width_of(n) for n in (64, 1, 8, 33, 40, 80, 96, 128, 160, 192, 256, 264)},
        "64 and 48": width_of(64, 48),
        "96 and 128": width_of(96, 128),
        "192 and 128": width_of(192, 128),
    },
    "band": {name: Feature(options=options) for name, options in BANDS.items()},
    "heads": {
        "own": Feature(set={"group_k": 1, "group_v": 1}),
        "grouped": Feature(set={"group_k": 2, "group_v": 2}),
        "grouped keys": Feature(set={"group_k": 2, "group_v": 1}),
    },
    "mask": {"no mask": Feature(), "mask": Feature(mask_of(0, 1, 2, 3)), "key mask": Feature(mask_of(0, 3))},
    "bias": {
        "no bias": Feature(),
        "bias": Feature(bias_of(1, 2, 3)),
        "row bias": Feature(bias_of(0, 1, 3)),
        "float bias": Feature(bias_of(0, 1, 2, 3, wide=True)),
        "bias gradient": Feature(bias_of(1, 2, 3), wants=("bias",)),
        "row bias gradient": Feature(bias_of(0, 3), wants=("bias",)),
        "whole bias gradient": Feature(bias_of(0, 1, 2, 3), wants=("bias",)),
        "float bias gradient": Feature(bias_of(1, 2, 3, wide=True), wants=("bias",)),
    },
    "slopes": {
        "no slopes": Feature(),
        "slopes": Feature(slopes_of(1)),
        "slopes of a batch": Feature(slopes_of(0, 1)),
        "slopes gradient": Feature(slopes_of(1), wants=("alibi_slopes",)),
    },
    "softcap": {"no softcap": Feature(), "softcap": Feature(options={"softcap": 5.0})},
    "dropout": {"no dropout": Feature(), "dropout": Feature(options={"dropout_p": 0.2})},
    "order": {"any order": Feature(), "deterministic": Feature(options={"deterministic": True})},
    "lse": {"no lse": Feature(), "lse": Feature(options={"return_lse": True})},
    "wanted": {
        "all": Feature(),
        "query alone": Feature(wants=("query",)),
        "key alone": Feature(wants=("key",)),
        "value alone": Feature(wants=("value",)),
        "key and value": Feature(wants=("key", "value")),
        "forward alone": Feature(),
    },
}
DEFAULTS = {group: next(iter(features)) for group, features in TABLE.items()}
GROUP_OF = {name: group for group, features in TABLE.items() for name in features}

QKV = ("query", "key", "value")
HALF_TYPES = ("bfloat16", "float16")
MASKS, BIASES, SLOPES = (tuple(TABLE[group])[1:] for group in ("mask", "bias", "slopes"))
GRADIENTS = (*(name for name in BIASES if "gradient" in name), "slopes gradient")
ADDED = (*MASKS, *BIASES, *SLOPES, "dropout")
Rule = tuple[tuple[str, ...], ...]


def others(group: str, *names: str) -> tuple[str, ...]:
    return tuple(name for name in TABLE[group] if name not in names)


# Rules of names: what has one of each tuple is left out.
MEANINGLESS: list[Rule] = [
    (("value alone",), ("lse",)),  # it has no gradient for value
    (("forward alone",), GRADIENTS),
    # A score is one product, which eager attention rounds once; ours is a sum that was cut off (numerics.md).
    (("1",), (*ADDED, "softcap", *others("wanted", "all", "forward alone"))),
]
UNSERVED: dict[str, list[Rule]] = {
    # Any head dim is the same to them, and time is short on a CPU.
    "cpu": [(others("width", "64", "40", "33", "64 and 48"),)],
    "chunked": [(others("width", "64", "33", "264"),)],
    "sm80": [(("264",),)],
    "sm90": [
        (others("dtype", *HALF_TYPES),),
        (("1", "33"),),
        (("264",), GRADIENTS),
        (("grouped keys",), others("wanted", "forward alone")),
        (("slopes gradient",),),
        (
            ("whole bias gradient",),
            ("160", "192", "192 and 128", "256", *MASKS, *SLOPES, "softcap", "dropout", "deterministic"),
        ),
        (("whole bias gradient",), others("wanted", "all", "forward alone")),
    ],
}

# Around what tiles of the backend's kernels have.
EDGES: dict[str, list[int]] = {
    "cpu": [1, 17, 64, 129],
    "chunked": [1, 17, 64, 129],
    "sm80": [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257],
    "sm90": sorted(
        {1, 2, 33, *(n * m + i for m in (48, 64, 80, 96, 128, 192, 256) for n in (1, 2) for i in (-1, 0, 1))}
    ),
}


@dataclass(frozen=True)
class Combination:
    """A name of every group of TABLE."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(name for name in self.names if name not in DEFAULTS.values()) or "plain"

    def __contains__(self, name: str) -> bool:
        return name in self.names

    @staticmethod
    def of(*names: str) -> Combination:
        """These beside the defaults; of two names of a group the last."""
        return Combination(tuple((DEFAULTS | grouped(*names)).values()))

    def but(self, *names: str) -> Combination:
        """With these instead of what it has of their groups."""
        return Combination(tuple((dict(zip(TABLE, self.names, strict=True)) | grouped(*names)).values()))

    @property
    def features(self) -> list[Feature]:
        return [TABLE[group][name] for group, name in zip(TABLE, self.names, strict=True)]

    @property
    def set(self) -> dict[str, Any]:
        return {key: value for feature in self.features for key, value in feature.set.items()}

    @property
    def options(self) -> dict[str, Any]:
        return {key: value for feature in self.features for key, value in feature.options.items()}

    @property
    def is_plain(self) -> bool:
        """Nothing is added to the scores, and no gradient is asked for in a way of its own."""
        return all(
            name == DEFAULTS[group] or name == "forward alone" or group in ("dtype", "width", "band", "heads", "lse")
            for group, name in zip(TABLE, self.names, strict=True)
        )

    @property
    def wants(self) -> tuple[str, ...]:
        """The inputs that want a gradient, query, key and value first."""
        if "forward alone" in self:
            return ()
        wants = tuple(name for feature in self.features for name in feature.wants)
        return tuple(name for name in QKV if name in wants or not set(wants) & set(QKV)) + tuple(
            name for name in wants if name not in QKV
        )


def grouped(*names: str) -> dict[str, str]:
    return {GROUP_OF[name]: name for name in names}


def is_left_out(backend: str, names: Collection[str]) -> bool:
    return any(all(set(part) & set(names) for part in rule) for rule in (*MEANINGLESS, *UNSERVED[backend]))


# Kernels add up scores of several kinds, and a backward may have to do everything at once.
TOGETHER: tuple[tuple[str, ...], ...] = (
    ("mask", "bias"),
    ("mask", "float bias"),
    ("grouped", "mask", "float bias", "slopes", "softcap", "dropout", "deterministic", "lse"),
    ("grouped keys", "mask", "bias gradient", "slopes gradient", "softcap", "dropout", "deterministic", "lse"),
)

WIDTHS = ("64", "33", "40", "96", "128", "192", "192 and 128", "256")  # each has kernels of its own on some backend


@cache
def alone(backend: str) -> tuple[Combination, ...]:
    """Every feature beside the defaults, and what is in TOGETHER, with each of WIDTHS; forward alone where there is no
    backward."""
    found = {}
    singly = [(name,) for name in GROUP_OF]
    for width, names in (
        *itertools.product(WIDTHS, (*singly, *TOGETHER)),
        *((name, (name,)) for name in TABLE["width"]),
    ):
        for more in ((), ("forward alone",)):
            combination = Combination.of(width, *more, *names)
            if width in combination and not is_left_out(backend, combination.names):
                found[combination] = None
                break
    if backend in ("cpu", "chunked"):
        return tuple(combination for combination in found if "64" in combination)
    return tuple(found)


def pairs_of(names: tuple[str, ...]) -> Iterator[frozenset[str]]:
    return map(frozenset, itertools.combinations(names, 2))


@cache
def pairs(backend: str) -> tuple[Combination, ...]:
    """Combinations in which every two features stand together that can."""
    todo = {
        frozenset((a, b)): None
        for a, b in itertools.combinations(GROUP_OF, 2)
        if GROUP_OF[a] != GROUP_OF[b] and not is_left_out(backend, (a, b))
    }

    def complete(names: dict[str, str], rest: list[str]) -> dict[str, str] | None:
        """With a name of each group of `rest`, of those first that stand beside most others for the first time."""
        if not rest:
            return names
        if rest[0] in names:
            return complete(names, rest[1:])
        new = {name: sum(frozenset((name, other)) in todo for other in names.values()) for name in TABLE[rest[0]]}
        for name in sorted(new, key=lambda name: -new[name]):
            if not is_left_out(backend, (*names.values(), name)):
                found = complete(names | {rest[0]: name}, rest[1:])
                if found is not None:
                    return found
        return None

    found = []
    while todo:
        first = grouped(*next(iter(todo)))
        # What is wanted decides most about what else may be, so it comes first.
        names = complete(first, [group for group in ("wanted", *DEFAULTS) if group not in first])
        if names is None:  # every combination of the two has something that is left out
            del todo[frozenset(first.values())]
            continue
        found.append(Combination(tuple(names[group] for group in TABLE)))
        for pair in pairs_of(found[-1].names):
            todo.pop(pair, None)
    return tuple(found)


@cache
def tried(backend: str) -> tuple[Combination, ...]:
    """What the tests of one property each run with."""
    return tuple(dict.fromkeys((*alone(backend), *pairs(backend))))


def draw(chance: random.Random, backend: str) -> Combination:
    """Any combination."""
    while True:
        names = [chance.choice(list(features)) for features in TABLE.values()]
        # Most of what is added is left out, so that few things meet.
        names = [DEFAULTS[GROUP_OF[name]] if chance.random() < 0.4 else name for name in names]
        if not is_left_out(backend, names):
            return Combination(tuple(names))
