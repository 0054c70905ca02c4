"""Calls that only sm90 may serve, among NaN, and what is added to their scores."""

from __future__ import annotations

from typing import Any

import torch
from features import Combination
from helpers import Inputs, Results, check, keep_mask, leaf, rng_state
from layouts import interior, poison_free_memory
from problems import STATE, Problem
from sm90_helpers import KINDS, aligned, scores_of
from torch import Tensor

import flash_ext

BOTH = (64, 96, 128)  # head dims of the narrow backward
HEAD_DIMS = (*BOTH, 192, 256)
GROUPS = ((4, 2), (8, 1), (6, 3))  # heads of query and of key
ADDED = ("", "slopes", *KINDS, *(f"{kind} and slopes" for kind in KINDS))


def attention(**arguments: Any) -> Any:
    """Forward and, as the graph keeps the name, backward are sm90's or an error."""
    poison_free_memory("cuda")
    with flash_ext.use_backend("sm90"):
        return flash_ext.attention(**arguments)


def gradients(inputs: Inputs, grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv)"""
    leaves = {name: leaf(inputs[name]) for name in ("query", "key", "value")}
    out = attention(**(inputs | leaves), **options)
    return (out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad))


def read_by_sm90(added: Inputs) -> Inputs:
    """A bias of several rows in rows that start at multiples of 16 bytes."""
    if "bias" in added and added["bias"].shape[2] > 1:
        added["bias"] = aligned(added["bias"])
    return added


def added_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Inputs:
    """One of ADDED, for scores of that shape, as sm90 reads it."""
    added: Inputs = {}
    if kind.endswith("slopes"):  # those of the paper are 2^-8 to 1/2
        added["alibi_slopes"] = 2 ** -(8 * torch.rand(shape[:2], device=device))
    kind = kind.removesuffix(" and slopes")
    return added | (read_by_sm90(scores_of(kind, shape, dtype, device)) if kind in KINDS else {})


def call_of(
    inputs: Inputs, added: Inputs, options: dict[str, Any], dropout_p: float = 0.0, features: tuple[str, ...] = ("lse",)
) -> Problem:
    """What is `added`, mostly to the scores, wants no gradient. features: "lse", "forward alone"."""
    keep, options = None, options | {"return_lse": "lse" in features}
    if dropout_p > 0:
        query, key = ((inputs | added)[name] for name in ("query", "key"))
        state = rng_state(*STATE, str(query.device))
        keep = keep_mask(state, dropout_p, query.shape[:-2], query.shape[-2], key.shape[-2])
        options["dropout_p"] = dropout_p
    return Problem(Combination.of(*features), inputs, added, options, keep, "sm90")


def check_passes(
    inputs: Inputs, added: Inputs, options: dict[str, Any], dropout_p: float = 0.0, features: tuple[str, ...] = ("lse",)
) -> Results:
    """By the error rule: out, lse and, but for "forward alone", the gradients of `inputs`."""
    call = call_of(inputs, added, options, dropout_p, features)
    device = next(iter(inputs.values())).device.type
    with flash_ext.use_backend("sm90"):
        backward = bool(call.combination.wants)
        got = check(call.among_nan(device, interior), inputs, truth=call.truth, backward=backward)
    for name, tensor in got.items():
        assert not tensor.isnan().any(), name
    return got


def of_head(tensors: Inputs, b: int, h: int, group: int = 1) -> Inputs:
    """Those of one head; what is added to scores may be the same for the batch."""
    found = {}
    for name, tensor in tensors.items():
        head = h // group if name in ("key", "value") else h
        found[name] = tensor[b if tensor.shape[0] > 1 else 0 :][:1, head : head + 1]
    return found
