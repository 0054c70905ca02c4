"""Promise: the Hopper backward of packed sequences obeys the error rule in one order and in any, whichever lengths
there are, and in one order a sequence has the same bits in every run, in every graph and beside any others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import HALF, Results, check, cotangents_of, evaluate, leaf, name_of
from packed import Heads, Packed, Side, packed
from sm90_helpers import BANDS, assert_same_bits
from torch import Tensor

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

IN_ORDER, IN_ANY = "sm90.backward.packed.in_order", "sm90.backward.packed"
# Queries and keys of sequences: none, one, fewer than a tile, whole tiles and a row more, and some that are longer.
SIDES = (0, 1, 200, 5, 300, 128, 129, 640, 1), (20, 1, 390, 0, 140, 256, 129, 65, 500)


def results(call: Packed, kernel: str, **options: Any) -> Results:
    with flash_ext.use_backend(kernel):
        return evaluate(call.call, call.inputs, options)


def of_lengths(lengths: list[int], heads: Heads, dtype: torch.dtype, device: str, **options: Any) -> Packed:
    side = Side(tuple(lengths), 3, 1, 2)
    return packed(side, side, heads, dtype=dtype, device=device, return_lse=True, **options)


@pytest.mark.parametrize("kernel", [IN_ORDER, IN_ANY])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_rule(head_dim: int, band: str, dtype: torch.dtype, kernel: str, device: str) -> None:
    """What belongs to no sequence is NaN."""
    for heads in (Heads(2, 2, 2, head_dim, head_dim), Heads(4, 1, 1, head_dim, 104 - head_dim % 64)):
        call = packed(*SIDES, heads, dtype=dtype, device=device, unused=3, return_lse=True, **BANDS[band])
        with flash_ext.use_backend(kernel):
            got = check(call.call, call.inputs, truth=call.alone(reference.attention))
        for name, tensor in got.items():
            assert name == "lse" or tensor.isfinite().all(), name


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_twenty_runs(head_dim: int, band: str, dtype: torch.dtype, device: str) -> None:
    """Of thousands of tiles, on two streams; and nearly what any order gives."""
    chance = random.Random(band)
    lengths = [chance.choice([0, 1, 64, 100, 1000, chance.randint(1, 4000)]) for _ in range(24)]
    call = of_lengths(lengths, Heads(16, 4, 4, head_dim, head_dim), dtype, device, **BANDS[band])
    first, side = results(call, IN_ORDER), torch.cuda.Stream()
    for run in range(19):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if run % 2 else torch.cuda.current_stream()):
            other = results(call, IN_ORDER)
        torch.cuda.current_stream().wait_stream(side)
        assert_same_bits(tuple(other.values()), tuple(first.values()), run)
    for name, tensor in results(call, IN_ANY).items():
        largest = float(tensor[tensor.isfinite()].abs().max())
        torch.testing.assert_close(first[name], tensor, rtol=1e-2, atol=2e-2 * largest)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_neighbours_change_no_bits(head_dim: int, causal: bool, dtype: torch.dtype, device: str) -> None:
    """In deterministic mode, too: the rows of each sequence among all, among some, and alone."""
    lengths = [700, 1, 0, 2049, 128, 300, 1500, 64]
    call = of_lengths(lengths, Heads(4, 2, 2, head_dim, head_dim), dtype, device, causal=causal, deterministic=True)
    leaves = {name: leaf(tensor) for name, tensor in call.inputs.items()}
    options = {name: value for name, value in call.options.items() if name != "return_lse"}
    plan = flash_ext.explain(**leaves, **call.where, **options)
    assert plan.backward.kernel == IN_ORDER
    everywhere = evaluate(call.call, call.inputs)
    for chosen in ([0, 3], [5], [1, 2, 4, 6, 7]):
        used = call.ints(n if b in chosen else 0 for b, n in enumerate(lengths))
        some = evaluate(call.call, call.inputs, {"seqused_q": used, "seqused_k": used})
        for name, tensor in some.items():
            rows = [row for b in chosen for row in call.q.ranges[b]]
            own = (slice(None), rows) if name == "lse" else rows
            assert torch.equal(tensor[own], everywhere[name][own]), (name, chosen)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_graph_replays_read_the_new_lengths(head_dim: int, device: str) -> None:
    """Fewer tiles than the list has room for, none at all, and lengths that no sequences can have."""
    call = of_lengths([900, 40, 300, 0], Heads(4, 2, 2, head_dim, head_dim), torch.bfloat16, device, causal=True)
    where = dict(call.where)  # made once: a capture may copy nothing from the CPU
    cotangents = cotangents_of(call.call(**call.inputs), torch.bfloat16)
    leaves = {name: leaf(tensor) for name, tensor in call.inputs.items()}

    def gradients() -> tuple[Tensor, ...]:
        with flash_ext.use_backend(IN_ORDER):
            results = flash_ext.attention_varlen(**where | call.options | leaves)
            return torch.autograd.grad(results, list(leaves.values()), cotangents)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()  # loads the kernels
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients()
    for used in ([900, 40, 300, 0], [0, 0, 0, 0], [17, 40, 299, 0], [500, 1, 0, 0]):
        where["seqused_q"].copy_(call.ints(used))
        where["seqused_k"].copy_(call.ints(n // 2 for n in used))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, gradients(), used)
    where["cu_seqlens_k"].copy_(call.ints([900, 300, 200, 100, 0]))  # then nothing is a sequence's
    graph.replay()
    torch.cuda.synchronize()
    assert all((tensor == 0).all() for tensor in captured)
