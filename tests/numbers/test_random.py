"""Promise: random shapes, strides, dtypes and options obey the error rule.

The same examples on every run, so that a failure is one of the change under test; FLASH_EXT_FUZZ=random draws new ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import is_granted_refusal
from features import QKV, Sizes, draw
from fuzz_gpu import run_case
from helpers import DTYPES, Inputs, check, check_drop_in, rand
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import ALIGNED, LAYOUTS
from problems import Problem, problem
from torch import Tensor

import flash_ext

CASES, PART = 400, 100  # of fuzz_gpu.py, and of one test
SETTINGS = settings(suppress_health_check=list(HealthCheck), max_examples=120)
LENGTHS = st.one_of(
    st.integers(1, 9), st.integers(10, 70), st.sampled_from([0, 1, 16, 17, 31, 32, 33, 64, 65, 127, 129])
)
HEAD_DIMS = st.one_of(st.integers(1, 20), st.sampled_from([24, 32, 40, 64, 72, 96, 100, 128]))


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype, device: str, mean: float) -> Tensor:
    """A tensor of the given shape with random strides: permuted, stepped, offset or expanded, NaN in the gaps."""
    rank = len(shape)
    order = draw(st.permutations(range(rank)))
    steps = [draw(st.sampled_from([1, 1, 1, 2])) for _ in range(rank)]
    pads = [draw(st.sampled_from([0, 0, 1])) for _ in range(rank)]
    expanded = [draw(st.sampled_from([False] * 7 + [True])) for _ in range(rank)]
    small = [1 if grown else size for grown, size in zip(expanded, shape, strict=True)]
    storage = [small[i] * steps[i] + 2 * pads[i] for i in order]
    wide = torch.full(storage, torch.nan, dtype=dtype, device=device).permute([order.index(i) for i in range(rank)])
    index = tuple(slice(p, p + n * s, s) for p, n, s in zip(pads, small, steps, strict=True))
    view = wide[index]
    view.copy_(rand(*small, dtype=dtype, device=device, mean=mean))
    return view.expand(shape)


def broadcastable(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to `shape`: some dims 1, some leading ones missing."""
    sizes = [draw(st.sampled_from([size, size, 1])) for size in shape]
    return tuple(sizes[draw(st.integers(0, len(shape) - 1)) :])


@st.composite
def native_calls(draw: st.DrawFn, device: str) -> tuple[Inputs, dict[str, Any]]:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype, mean = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.0, 0.0, 0.5, 2.0]))
    batch, heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 6]))
    queries, keys, e, ev = draw(LENGTHS), draw(LENGTHS), draw(HEAD_DIMS), draw(HEAD_DIMS)
    divisors = st.sampled_from([d for d in (1, 2, 3, 4, 6) if heads % d == 0])
    shapes = {
        "query": (batch, heads, queries, e),
        "key": (batch, draw(divisors), keys, e),
        "value": (batch, draw(divisors), keys, ev),
    }
    inputs = {name: draw(views(shape, dtype, device, mean)) for name, shape in shapes.items()}
    scores = (batch, heads, queries, keys)
    options: dict[str, Any] = {
        "causal": draw(st.booleans()),
        "align": draw(st.sampled_from(["top_left", "bottom_right"])),
        "return_lse": draw(st.booleans()),
    }
    side = st.one_of(st.none(), st.integers(0, 80))
    if draw(st.booleans()):
        options["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.0, 1.0, 20.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.2, 0.05, 0.3, 1.0]))
    if draw(st.booleans()):
        inputs["mask"] = (torch.rand(broadcastable(draw, scores)) > draw(st.sampled_from([0.1, 0.6]))).to(device)
    if draw(st.booleans()):
        bias_dtype = draw(st.sampled_from([dtype, dtype if dtype == torch.float64 else torch.float32]))
        bias = draw(views(broadcastable(draw, scores), bias_dtype, device, 0.0))
        removed = (torch.rand(bias.shape) > 0.8).to(device) if draw(st.booleans()) else None
        inputs["bias"] = bias if removed is None else bias.masked_fill(removed, -torch.inf)
    if draw(st.booleans()):
        inputs["alibi_slopes"] = torch.rand((heads,) if draw(st.booleans()) else (batch, heads)).to(device)
    options["deterministic"] = draw(st.sampled_from([None, True, False]))
    return inputs, options


@st.composite
def drop_in_calls(draw: st.DrawFn, device: str) -> tuple[Inputs, dict[str, Any]]:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype, mean = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.0, 0.5, 2.0]))
    lead = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=3)))
    queries, keys, e, ev = draw(LENGTHS), draw(LENGTHS), draw(HEAD_DIMS), draw(HEAD_DIMS)
    gqa = bool(lead) and draw(st.booleans())
    heads = (4, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))) if gqa else None

    def lead_of(index: int) -> tuple[int, ...]:
        if heads is not None:
            return (*lead[:-1], heads[index])
        return lead if index == 0 else tuple(draw(st.sampled_from([size, size, size, 1])) for size in lead)

    inputs = {
        "query": draw(views((*lead_of(0), queries, e), dtype, device, mean)),
        "key": draw(views((*lead_of(1), keys, e), dtype, device, mean)),
        "value": draw(views((*lead_of(2), keys, ev), dtype, device, mean)),
    }
    options: dict[str, Any] = {"enable_gqa": gqa}
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    scores = (*lead_of(0), queries, keys)
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "bool":
        inputs["attn_mask"] = (torch.rand(broadcastable(draw, scores)) > 0.3).to(device)
    elif kind == "float":
        inputs["attn_mask"] = draw(views(broadcastable(draw, scores), dtype, device, 0.0))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.2, 0.05, 0.3]))  # larger saturate: docs/use/numerics.md
    return inputs, options


@contextmanager
def refusals_pass(backend: str) -> Iterator[None]:
    """A call that the backend may refuse, and does, is no example of it."""
    try:
        yield
    except RuntimeError as error:
        if not is_granted_refusal(backend, error):
            raise


@pytest.mark.fuzz
@SETTINGS
@given(data=st.data())
def test_native(data: st.DataObject, device: str, backend: str) -> None:
    inputs, options = data.draw(native_calls(device))
    with refusals_pass(backend):
        check(flash_ext.attention, inputs, options)


@pytest.mark.fuzz
@SETTINGS
@given(data=st.data())
def test_drop_in(data: st.DataObject, device: str, backend: str) -> None:
    inputs, options = data.draw(drop_in_calls(device))
    with refusals_pass(backend):
        check_drop_in(inputs, **options)


@pytest.mark.fuzz
@pytest.mark.parametrize("kind, first", [*(("dense", i) for i in range(0, CASES, PART)), ("packed", 0), ("cache", 0)])
def test_cases(kind: str, first: int, device: str) -> None:
    """Those of tests/fuzz_gpu.py, of which a GPU gets thousands: its seed and the number of a case reproduce it."""
    seed = random.randrange(2**31) if os.environ.get("FLASH_EXT_FUZZ") == "random" else 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: others would wait in loops
    try:
        outcomes = [(number, *run_case(seed, number, device, "mixed", kind)) for number in range(first, first + PART)]
    finally:
        torch.set_num_threads(threads)
    failed = [
        f"--kind {kind} --seed {seed} --first {number} --cases 1: {text}"
        for number, what, text in outcomes
        if what == "failed"
    ]
    assert not failed, "\n".join(failed)


def elsewhere(call: Problem, chance: random.Random, backend: str) -> Problem:
    """The problem with each tensor in a random layout that the backend reads; some are shared by the batch."""

    def view(name: str, tensor: Tensor) -> Tensor:
        layout = chance.choice(LAYOUTS)
        if (backend != "sm90" or not call.combination.wants) and name in QKV and chance.random() < 0.1:
            return tensor[:1].expand_as(tensor)
        return layout(tensor) if chance.random() < 0.7 and call.may_lie(name, tensor, layout, backend) else tensor

    return call.with_views(view)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(10))
def test_combinations(seed: int, device: str, backend: str) -> None:
    """Of features.py, of any size and layout, under bands and scales of any kind."""
    chance, done = random.Random(seed), 0
    longest, number = (9.5, 60) if device == "cuda" else (6.5, 10)
    while done < number:
        combination = draw(chance, backend)
        queries, keys = (int(2 ** chance.uniform(0, longest)) for _ in range(2))
        if backend == "sm90":  # fewer are another backend's
            queries, keys = queries + 65, keys + 16
        call = problem(
            combination, Sizes(queries, keys, chance.randint(1, 3), 2 * chance.randint(1, 3)), device, backend
        )
        if chance.random() < 0.3:
            call.options["window"] = tuple(chance.choice([None, chance.randint(0, 300)]) for _ in range(2))
        if chance.random() < 0.2:
            call.options["scale"] = 10 ** chance.uniform(-2, -0.5)
        call = elsewhere(call, chance, backend)
        if (
            backend == "sm90"
            and "window" in call.options
            and combination.wants
            and call.plan().backward.backend != backend
        ):
            continue  # few keys
        call.check(call.among_nan(device, chance.choice(ALIGNED)))
        done += 1
