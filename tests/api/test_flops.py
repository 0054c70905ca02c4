"""Promise: FlopCounterMode counts every operator, forward and backward, by torch's own rule for attention."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import rand
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flash_ext

OPS = torch.ops.flash_ext


def count(call: Callable[[], Any]) -> tuple[Any, int]:
    with FlopCounterMode(display=False) as counter:
        result = call()
    return result, counter.get_total_flops()


def qkv(heads_k: int = 4, ev: int = 8, batch_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (2, 4, 6, 8), (batch_k, heads_k, 10, 8), (batch_k, heads_k, 10, ev)
    return tuple(rand(*shape).requires_grad_() for shape in shapes)


def torchs(ev: int = 8) -> tuple[int, int]:
    """torch's forward and backward of the problem of ``qkv``, its key heads repeated."""
    q, k, v = (2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, ev)
    return sdpa_flop_count(q, k, v), sdpa_backward_flop_count((2, 4, 6, ev), q, k, v)


CALLS: dict[str, Callable[..., Tensor]] = {
    "attention": flash_ext.attention,
    "causal window": lambda *a: flash_ext.attention(*a, causal=True, window=(2, 0)),
    "lse": lambda *a: sum(part.sum() for part in flash_ext.attention(*a, return_lse=True)),
    "dropout": lambda *a: flash_ext.attention(*a, dropout_p=0.5),
    "drop-in": lambda *a: flash_ext.scaled_dot_product_attention(*a, enable_gqa=True),
    "drop-in's operator": lambda *a: OPS.scaled_dot_product_attention(*a, enable_gqa=True),
    "with rng_state": lambda *a: OPS.attention_with_rng_state(*a, torch.tensor([1, 2]), dropout_p=0.5, gqa=True)[0],
    "FlashAttention": flash_ext.FlashAttention.apply,
    "bias": lambda *a: flash_ext.attention(*a, bias=rand(6, 10).requires_grad_()),
}


@pytest.mark.parametrize("heads_k", [4, 2, 1])
@pytest.mark.parametrize("ev", [8, 5])
@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward(name: str, ev: int, heads_k: int) -> None:
    """Every head of query counts, whatever it shares; the last head dim may differ."""
    inputs = qkv(heads_k, ev)
    out, forward = count(lambda: CALLS[name](*inputs))
    _, backward = count(lambda: out.sum().backward())
    assert (forward, backward) == torchs(ev)
    assert ev != 8 or backward == 2.5 * forward


def test_a_subset_of_gradients_counts_as_all() -> None:
    """As torch's fused attention, whose backward is one operator."""
    q, k, v = qkv()
    out = flash_ext.attention(q, k.detach(), v.detach())
    assert count(lambda: out.sum().backward())[1] == torchs()[1]


def test_broadcast_and_missing_batch_dimensions_count_in_full() -> None:
    q, k, v = qkv(batch_k=1)
    out, forward = count(lambda: flash_ext.scaled_dot_product_attention(q, k[0], v))
    assert (forward, count(lambda: out.sum().backward())[1]) == torchs()
    assert count(lambda: flash_ext.scaled_dot_product_attention(q[0, 0], k[0, 0], v[0, 0]))[1] == torchs()[0] / 8


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_decomposes_counts_once(mode: Callable[[], Any]) -> None:
    with mode():
        for call in (flash_ext.scaled_dot_product_attention, OPS.scaled_dot_product_attention):
            assert count(lambda call=call: call(*qkv()))[1] == torchs()[0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_under_enable(mode: Callable[[], Any]) -> None:
    with flash_ext.enable(), mode():
        out, forward = count(lambda: F.scaled_dot_product_attention(*qkv()))
        assert forward == torchs()[0]
    if out.requires_grad:
        assert count(lambda: out.sum().backward())[1] == torchs()[1]


def test_double_backward_counts_the_products_that_it_is_made_of() -> None:
    q, k, v = qkv()
    grads = torch.autograd.grad(flash_ext.attention(q, k, v).sin().sum(), (q, k, v), create_graph=True)
    assert count(lambda: sum(g.square().sum() for g in grads).backward())[1] > torchs()[1]


def test_vmap_counts_every_sample() -> None:
    inputs = [torch.stack([t.detach()] * 3) for t in qkv()]
    assert count(lambda: torch.func.vmap(flash_ext.attention)(*inputs))[1] == 3 * torchs()[0]


@pytest.mark.parametrize("used", [None, [3, 0, 1]], ids=["all rows", "some rows"])
def test_packed_sequences_count_their_own_pairs(used: list[int] | None) -> None:
    lengths, device = [4, 0, 2], "cpu"
    cu = torch.tensor([0, 4, 4, 6], dtype=torch.int32)
    shapes = (6, 4, 8), (6, 2, 8), (6, 2, 16)
    tensors = [rand(*shape, device=device).requires_grad_() for shape in shapes]
    in_use = None if used is None else torch.tensor(used, dtype=torch.int32)
    queries = lengths if used is None else used
    pairs = 4 * sum(q * k for q, k in zip(queries, lengths, strict=True))

    def call(*tensors: Tensor) -> Tensor:
        return flash_ext.attention_varlen(*tensors, cu, max_q=5, seqused_q=in_use)

    out, forward = count(lambda: call(*tensors))
    assert forward == 2 * pairs * (8 + 16)
    assert count(lambda: out.sum().backward())[1] == 2 * pairs * (3 * 8 + 2 * 16)


def test_packed_sequences_of_unknown_lengths_are_the_longest() -> None:
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    q = torch.empty(6, 4, 8, device="meta")
    assert count(lambda: flash_ext.attention_varlen(q, q, q, cu, max_q=5))[1] == 2 * 3 * 4 * 5 * 5 * 16


LATE = """
import sys, importlib
{first}
import flash_ext
assert ("torch.utils.flop_counter" in sys.modules) is {there}, "import flash_ext imports it"
from torch.utils import flop_counter
import torch
assert torch.ops.flash_ext.attention in flop_counter.flop_registry
assert type(flop_counter.__spec__.loader).__module__.startswith("_frozen_importlib")
importlib.reload(flop_counter)
assert torch.ops.flash_ext.attention in flop_counter.flop_registry
"""


@pytest.mark.parametrize("there", [False, True])
def test_the_order_of_imports_does_not_matter(there: bool) -> None:
    script = LATE.format(there=there, first="import torch.utils.flop_counter" if there else "")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
