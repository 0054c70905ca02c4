"""Promise: where cu_seqlens descend, which no caller should pass, rows that no sequence has are zeros all the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import name_of
from packed import QKV, Heads, Side, packed
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Where each of three sequences begins, and where the last one ends: the second has no rows, because the numbers
# descend there, and the third lies before the first.
STARTS = {"q": [40, 75, 3, 24], "k": [35, 70, 2, 33]}
ROWS = {"q": 80, "k": 72}
ASCENDING = {"q": [3, 24, 40, 75], "k": [2, 33, 35, 70]}
CASES = {"queries": "q", "keys": "k", "both": "qk"}


def lengths_of(descending: str) -> dict[str, list[int]]:
    return {side: (STARTS if side in descending else ASCENDING)[side] for side in "qk"}


def claimed(starts: list[int]) -> list[range]:
    return [range(first, max(first, last)) for first, last in itertools.pairwise(starts)]


def call_of(descending: str, dtype: torch.dtype, device: str, used: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, whose rows of nobody are NaN, and where sequences lie."""
    sides = {side: Side((), behind=ROWS[side]) for side in "qk"}
    call = packed(sides["q"], sides["k"], Heads(4, 2, 2), dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(1)
    where: dict[str, Any] = {"max_q": 40, "max_k": 40}
    inputs = {}
    for side, names in (("q", ("query",)), ("k", ("key", "value"))):
        starts = lengths_of(descending)[side]
        where[f"cu_seqlens_{side}"] = call.ints(starts)
        if used:
            where[f"seqused_{side}"] = call.ints(max(len(rows) - 4, 0) for rows in claimed(starts))
        for name in names:
            like = call.inputs[name]
            inputs[name] = torch.full_like(like, torch.nan)
            for rows in claimed(starts):
                fresh = torch.randn(len(rows), *like.shape[1:], generator=generator).to(like)
                inputs[name][rows.start : rows.stop] = fresh
    return inputs, where


def rows_of_nobody(descending: str, side: str, used: bool) -> list[int]:
    own = [list(rows)[: max(len(rows) - 4, 0) if used else None] for rows in claimed(lengths_of(descending)[side])]
    return sorted(set(range(ROWS[side])) - {row for rows in own for row in rows})


@pytest.mark.parametrize("used", [False, True], ids=["all rows", "rows in use"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_forward(dtype: torch.dtype, case: str, used: bool, device: str, backend: str) -> None:
    """out is 0 and lse -infinity; on a CPU a sequence that has rows is attended to, wherever it lies."""
    inputs, where = call_of(CASES[case], dtype, device, used)
    out, lse = flash_ext.attention_varlen(**inputs, **where, causal=True, return_lse=True)
    nobodys = rows_of_nobody(CASES[case], "q", used)
    assert (out[nobodys] == 0).all() and (lse[:, nobodys] == -torch.inf).all()
    if backend != "cpu":
        return
    places = [claimed(lengths_of(CASES[case])[side]) for side in "qk"]
    for q, k in zip(*places, strict=True):
        n, keys = (max(len(rows) - 4 * used, 0) for rows in (q, k))
        if n == 0 or keys == 0:
            assert (out[q.start : q.start + n] == 0).all()
            continue
        rows = [slice(q.start, q.start + n), *[slice(k.start, k.start + keys)] * 2]
        alone = [inputs[name][at].transpose(0, 1)[None] for name, at in zip(QKV, rows, strict=True)]
        assert torch.equal(out[rows[0]].transpose(0, 1), flash_ext.attention(*alone, causal=True)[0])


@pytest.mark.parametrize("used", [False, True], ids=["all rows", "rows in use"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_gradients(dtype: torch.dtype, case: str, used: bool, device: str, backend: str) -> None:
    """Those of rows of nobody are 0, also where grad_out is NaN there."""
    inputs, where = call_of(CASES[case], dtype, device, used)
    leaves = [inputs[name].requires_grad_() for name in QKV]
    out = flash_ext.attention_varlen(*leaves, **where, causal=True, deterministic=True)
    grad_out = torch.ones_like(out)
    grad_out[rows_of_nobody(CASES[case], "q", used)] = torch.nan
    for side, grad in zip("qkk", torch.autograd.grad(out, leaves, grad_out), strict=True):
        assert (grad[rows_of_nobody(CASES[case], side, used)] == 0).all(), side
