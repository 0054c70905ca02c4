"""Which backend computes what: the tables of README.md and docs/use/support.md, made by asking `explain`.

    uv run tools/support_matrix.py            # writes them into both files
    uv run tools/support_matrix.py --check    # or says which of them is not what explain says, and exits with 1

A feature is a few calls; a cell names the backends that these calls are given to, forward and backward. Needs a build
with the GPU kernels, and no GPU: plans for 9.0 are made without one, and what 8.0 serves is asked of sm80 by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flash_ext

ROOT = Path(__file__).resolve().parent.parent
HALF, FLOAT = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
INPUTS = ("query", "key", "value")
ORDER = ("cpu", "sm90", "sm80", "chunked")


def strided(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Columns that are not contiguous (transposed), rows of one column more (odd), one row of memory (repeated)."""

    def memory(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    if layout == "transposed":
        return memory(*shape[:-2], shape[-1], shape[-2]).mT
    if layout == "odd":
        return memory(*shape[:-1], shape[-1] + 1)[..., :-1]
    return memory(shape[-1]).expand(shape) if layout == "repeated" else memory(*shape)


@dataclass(frozen=True)
class Call:
    """Sizes are [batch, heads, rows, columns], or packed [rows of both sequences, heads, columns]."""

    dtype: torch.dtype = torch.bfloat16
    heads_k: int = 4
    queries: int = 512
    keys: int = 512
    head_dim: int = 64
    head_dim_v: int | None = None
    layout: str = "dense"  # of query, key and value, see strided()
    packed: bool = False
    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    wants: tuple[str, ...] = INPUTS
    options: dict[str, Any] = field(default_factory=dict)

    def backends(self, device: str) -> tuple[str, str]:
        """Of forward and backward."""

        def tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            result = strided(self.layout if name in INPUTS else "dense", shape, dtype)
            return result.requires_grad_() if name in self.wants else result

        cols_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        arguments = {
            "query": tensor("query", (2, 4, self.queries, self.head_dim), self.dtype),
            "key": tensor("key", (2, self.heads_k, self.keys, self.head_dim), self.dtype),
            "value": tensor("value", (2, self.heads_k, self.keys, cols_v), self.dtype),
        }
        arguments |= {name: tensor(name, shape, dtype) for name, shape, dtype in self.tensors}
        if self.packed:
            for name in INPUTS:
                batch, heads, rows, cols = arguments[name].shape
                arguments[name] = tensor(name, (batch * rows, heads, cols), self.dtype)
            lengths = torch.empty(3, dtype=torch.int32, device="meta")
            arguments |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_q": self.queries, "max_k": self.keys}
        if device != "8.0":
            plan = flash_ext.explain(**arguments, **self.options, device="cuda" if device == "9.0" else "cpu")
            return plan.forward.backend, plan.backward.backend
        try:
            with flash_ext.use_backend("sm80"):
                plan = flash_ext.explain(**arguments, **self.options, device="cuda")
        except flash_ext.AttentionError:
            return "chunked", "chunked"
        return "sm80", "sm80" if plan.backward.backend == "sm80" else "chunked"


def calls(dtypes: Iterable[torch.dtype] = HALF, **choices: Iterable[Any]) -> Iterator[Call]:
    """Each dtype with each choice, `name=values` of the fields of Call."""
    for dtype, *values in product(dtypes, *choices.values()):
        yield Call(dtype=dtype, **dict(zip(choices, values, strict=True)))


SCORES = (2, 4, 512, 512)
MASK, BIAS = ("mask", SCORES, torch.bool), ("bias", SCORES, torch.bfloat16)
SLOPES = ("alibi_slopes", (4,), torch.float32)
SINKS = ("sinks", (4,), torch.float32)
MODES: tuple[dict[str, Any], ...] = ({}, {"deterministic": True})
BANDS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": True, "align": "bottom_right"},
    {"window": (100, 30)},
)
FEATURES: dict[str, list[Call]] = {
    "fp16, bf16": [*calls(options=MODES, head_dim=(64, 128, 256))],
    "fp32, fp64": [*calls(FLOAT, options=MODES, head_dim=(64, 128, 256))],
    "any head dim up to 256, another one for value": [*calls(head_dim=(80, 81, 200), head_dim_v=(None, 40))],
    "larger head dims": [*calls(head_dim=(257, 512))],
    "causal, sliding windows, both alignments": [*calls(options=BANDS, head_dim=(64, 256))],
    "grouped heads": [*calls(heads_k=(1, 2), head_dim=(64, 256))],
    "any strides": [*calls(layout=("dense", "transposed", "odd", "repeated"))],
    "bool mask": [*calls(tensors=[(MASK,)], head_dim=(64, 256), options=MODES)],
    "float mask or bias": [*calls([torch.bfloat16], tensors=[(BIAS,)], head_dim=(64, 256), options=MODES)],
    "gradient of a float mask or bias": [
        *calls([torch.bfloat16], tensors=[(BIAS,), (BIAS, MASK)], wants=[(*INPUTS, "bias")], head_dim=(64, 256))
    ],
    "ALiBi slopes": [*calls(tensors=[(SLOPES,)], head_dim=(64, 256))],
    "gradient of ALiBi slopes": [*calls(tensors=[(SLOPES,)], wants=[(*INPUTS, "alibi_slopes")])],
    "sinks, with their gradient": [*calls(tensors=[(SINKS,)], head_dim=(64, 256), options=MODES)],
    "softcap": [*calls(options=[{"softcap": 30.0}], head_dim=(64, 256))],
    "softcap beside a mask or bias": [
        *calls([torch.bfloat16], options=[{"softcap": 30.0}], tensors=[(MASK,), (BIAS,)])
    ],
    "dropout, the same map on every backend": [*calls(options=[{"dropout_p": 0.1}], head_dim=(64, 256))],
    "gradients of some inputs alone": [*calls(wants=[("query",), ("key", "value")])],
    "a few queries, a few keys": [*calls(queries=(1, 40), keys=(8, 512))],
    "packed sequences, nested tensors": [*calls(packed=[True], options=MODES, head_dim=(64, 256))],
}
# Of README.md: the features that a row stands for.
SHORT: dict[str, tuple[str, ...]] = {
    "fp16, bf16": ("fp16, bf16",),
    "fp32, fp64": ("fp32, fp64",),
    "any head dim up to 256": ("any head dim up to 256, another one for value",),
    "larger head dims": ("larger head dims",),
    "causal, sliding windows, grouped heads, any strides": (
        "causal, sliding windows, both alignments",
        "grouped heads",
        "any strides",
    ),
    "masks, biases, ALiBi, softcap, dropout": (
        "bool mask",
        "float mask or bias",
        "ALiBi slopes",
        "softcap",
        "softcap beside a mask or bias",
        "dropout, the same map on every backend",
    ),
    "gradient of a bias": ("gradient of a float mask or bias",),
    "gradient of ALiBi slopes": ("gradient of ALiBi slopes",),
    "packed sequences, nested tensors": ("packed sequences, nested tensors",),
}
DEVICES = {"CPU": "cpu", "CUDA, 8.0 and above": "8.0", "Hopper, 9.0": "9.0"}


def cell(names: Iterable[str]) -> str:
    found = set(names)
    return ", ".join(f"`{name}`" for name in ORDER if name in found)


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    rule = "|" + "---|" * len(header)
    return "\n".join([f"| {' | '.join(header)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def tables() -> dict[Path, str]:
    """The table of each file."""
    served = {
        name: {place: [call.backends(device) for call in of] for place, device in DEVICES.items()}
        for name, of in FEATURES.items()
    }
    whole = [
        [name, *(cell(pair[i] for pair in served[name][place]) for place in DEVICES for i in range(2))]
        for name in FEATURES
    ]
    short = []
    for label, names in SHORT.items():
        first = 1 if label.startswith("gradient") else 0  # of a gradient the backward alone
        pairs = {place: [pair for name in names for pair in served[name][place]] for place in DEVICES}
        short.append([label, *(cell(x for pair in pairs[place] for x in pair[first:]) for place in DEVICES)])
    passes = [f"{place}: {name}" for place in DEVICES for name in ("forward", "backward")]
    return {
        ROOT / "README.md": markdown(["feature", *DEVICES], short),
        ROOT / "docs" / "use" / "support.md": markdown(["feature", *passes], whole),
    }


def with_table(text: str, table: str) -> str:
    """The text with its table whose first cell is "feature" replaced."""
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("| feature |"))
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return "\n".join([*lines[:first], table, *lines[last:]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    if "sm90" not in flash_ext.build_info()["cuda"]["backends"] or torch.cuda.is_available():
        print("needs a build with the kernels for 9.0, and no GPU, for which plans would be made", file=sys.stderr)
        return 2
    stale = 0
    for path, table in tables().items():
        text = path.read_text()
        if with_table(text, table) == text:
            continue
        stale += 1
        if check:
            print(f"{path.relative_to(ROOT)} is not what explain says", file=sys.stderr)
        else:
            path.write_text(with_table(text, table))
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
