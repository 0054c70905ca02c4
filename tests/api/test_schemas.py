"""Promise: operators stay callable by programs exported earlier: arguments are only appended, with defaults, tensors
behind the positional ones (a rule of vmap gets no others) and options, keyword-only, behind all.

`python tests/api/test_schemas.py` prints the current schemas; a line of the golden file changes only by growing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_ext
from flash_ext.ops import GRADIENTS

GOLDEN = Path(__file__).parents[1] / "golden" / "schemas.txt"


def current() -> dict[str, torch._C.FunctionSchema]:
    schemas = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("flash_ext::"):
            schemas[f"{schema.name}.{schema.overload_name}".rstrip(".")] = schema
    return schemas


def golden() -> dict[str, torch._C.FunctionSchema]:
    lines = [line for line in GOLDEN.read_text().splitlines() if line and not line.startswith("#")]
    parsed = [torch._C.parse_schema(line) for line in lines]
    return {f"{schema.name}.{schema.overload_name}".rstrip("."): schema for schema in parsed}


def described(argument: torch._C.Argument) -> tuple[object, ...]:
    default = argument.default_value if argument.has_default_value() else "no default"
    return argument.name, str(argument.real_type), default, argument.kwarg_only


def incompatibility(old: torch._C.FunctionSchema, new: torch._C.FunctionSchema) -> str | None:
    """Why a call of `old` would not be a call of `new`, or None."""
    for keyword_only in (False, True):
        before, after = (
            [argument for argument in map(described, schema.arguments) if argument[3] == keyword_only]
            for schema in (old, new)
        )
        if after[: len(before)] != before:
            return f"arguments changed: {before} -> {after}"
        for name, kind, default, _ in after[len(before) :]:
            if default == "no default":
                return f"new argument {name} must have a default"
            if keyword_only == (kind == "Optional[Tensor]"):
                return f"new argument {name} of {kind} must{' not' * keyword_only} be keyword-only"
    if [str(r.real_type) for r in old.returns] != [str(r.real_type) for r in new.returns]:
        return "returns changed"
    return None


def test_every_golden_operator_is_still_there() -> None:
    assert golden() and golden().keys() <= current().keys()


@pytest.mark.parametrize("name", golden() if GOLDEN.exists() else ["golden file is missing"])
def test_arguments_are_only_appended(name: str) -> None:
    assert incompatibility(golden()[name], current()[name]) is None


def test_every_operator_is_in_the_golden_file() -> None:
    """A new operator, or a new argument, is written down with the change that makes it."""
    assert {name: str(schema) for name, schema in current().items()} == {
        name: str(schema) for name, schema in golden().items()
    }


def test_gradients_are_of_the_inputs_that_python_names() -> None:
    schema = current()["flash_ext::attention_backward"]
    names = [argument.name for argument in schema.arguments]
    assert len(schema.returns) == len(GRADIENTS) == len(schema.arguments[names.index("grad_mask")].default_value)
    assert [name for name in names if name in GRADIENTS] == list(GRADIENTS)


# Of who spreads a call over processes, which is no function of Python.
PARTS = ("dropout_first_query", "dropout_first_key", "dropout_first_head", "dropout_heads", "constant_lse")
FUNCTIONS = [flash_ext.attention, flash_ext.attention_varlen, flash_ext.explain]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_public_signatures_have_every_option(function: Callable[..., Any]) -> None:
    """By the name and with the default of the operator, but for what they spell otherwise."""
    spelled = {"window_left": "window", "window_right": "window", "bottom_right": "align"}
    parameters = inspect.signature(function).parameters
    options = [argument for argument in torch.ops.flash_ext.attention.default._schema.arguments if argument.kwarg_only]
    assert {"causal", "backend"} < {option.name for option in options}
    for option in options:
        if option.name in ("gqa", "backend", "return_lse"):  # always; use_backend; no part of a plan
            continue
        if option.name in ("max_q", "max_k"):  # of packed sequences, which must say one and may say both
            assert (option.name in parameters) == (function is not flash_ext.attention)
            continue
        if option.name in PARTS:
            assert option.name not in parameters
            continue
        assert spelled.get(option.name, option.name) in parameters
        if option.name not in spelled:
            assert parameters[option.name].default == option.default_value


def test_the_comparison_can_fail() -> None:
    old = torch._C.parse_schema("x::f(Tensor a, *, bool b=False) -> Tensor")
    good = "x::f(Tensor a, *, bool b=False, float? c=None) -> Tensor"
    also_good = "x::f(Tensor a, Tensor? c=None, *, bool b=False) -> Tensor"
    bad = [
        "x::f(Tensor a, *, float? c=None, bool b=False) -> Tensor",
        "x::f(Tensor a, Tensor c, *, bool b=False) -> Tensor",
        "x::f(Tensor a, int c=0, *, bool b=False) -> Tensor",
        "x::f(Tensor a, *, bool b=False, Tensor? c=None) -> Tensor",
        "x::f(Tensor a, *, bool b=False, float c) -> Tensor",
        "x::f(Tensor a, *, bool b=True) -> Tensor",
        "x::f(Tensor a, *, int b=0) -> Tensor",
        "x::f(Tensor a, *, bool b=False) -> (Tensor, Tensor)",
        "x::f(Tensor a) -> Tensor",
    ]
    assert all(incompatibility(old, torch._C.parse_schema(text)) is None for text in (good, also_good))
    assert all(incompatibility(old, torch._C.parse_schema(text)) is not None for text in bad)


if __name__ == "__main__":
    print("\n".join(str(schema) for _, schema in sorted(current().items())))
