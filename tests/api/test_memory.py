"""Promise: autograd saves references to the caller's tensors, out, lse and rng_state, and nothing grows as L x S."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref
from typing import Any

import pytest
import torch
from helpers import leaf, make_inputs, rand
from torch import Tensor

import flash_ext

Q, K = (2, 4, 10, 8), (2, 2, 12, 8)


def saved_by(call: Any) -> list[Tensor]:
    """What autograd saves while `call` runs; a tensor without elements stands for an absent one."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.detach()) or t, lambda t: t):
        call()
    return [tensor for tensor in saved if tensor.numel()]


def key_of(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("extras", [False, True])
def test_saved_tensors(extras: bool, p: float, device: str, backend: str) -> None:
    """The caller's own tensors (expanded ones not copied), out, lse and, with dropout, rng_state: nothing else."""
    inputs = {name: leaf(t) for name, t in make_inputs(Q, K, device=device).items()}
    if extras:
        inputs["bias"] = leaf(rand(10, 1, device=device)).expand(10, 12)
        inputs["mask"] = torch.ones(12, dtype=torch.bool, device=device)
        inputs["alibi_slopes"] = leaf(torch.rand(4).to(device))
    results: list[Tensor] = []
    saved = saved_by(lambda: results.extend(flash_ext.attention(**inputs, dropout_p=p, return_lse=True)))
    expected = [key_of(t) for t in (*inputs.values(), *results)]
    rest = [t for t in saved if key_of(t) not in expected]
    assert {key_of(t) for t in saved} >= set(expected)
    assert len(saved) == len(expected) + (p > 0)
    assert [(t.dtype, t.shape) for t in rest] == ([(torch.int64, (2,))] if p > 0 else [])


def test_saved_tensors_without_lse_asked(device: str, backend: str) -> None:
    inputs = [leaf(t) for t in make_inputs(Q, K, device=device).values()]
    saved = saved_by(lambda: flash_ext.attention(*inputs))
    sizes = sorted(t.numel() for t in saved)
    assert sizes == sorted([*(t.numel() for t in inputs), inputs[0].numel(), 2 * 4 * 10])


def test_nothing_is_saved_without_gradients(device: str, backend: str) -> None:
    inputs = make_inputs(Q, K, device=device)
    assert saved_by(lambda: flash_ext.attention(**inputs, return_lse=True)) == []
    inputs["query"].requires_grad_()
    with torch.no_grad():
        assert saved_by(lambda: flash_ext.attention(**inputs)) == []
    _, lse, _ = torch.ops.flash_ext.attention(**make_inputs(Q, Q, device=device))
    assert lse.numel() == 0


@pytest.mark.parametrize("which", ["query", "key", "value", "bias", "mask", "out"])
def test_in_place_change_raises(which: str, device: str, backend: str) -> None:
    inputs = {name: leaf(t) for name, t in make_inputs(Q, K, device=device).items()}
    moved = {name: t.sin() for name, t in inputs.items()}
    moved["bias"] = leaf(rand(10, 12, device=device)).sin()
    moved["mask"] = torch.ones(12, dtype=torch.bool, device=device)
    out = flash_ext.attention(**moved)
    with torch.no_grad():
        (out if which == "out" else moved[which]).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice_needs_retain_graph(device: str, backend: str) -> None:
    inputs = [leaf(t) for t in make_inputs(Q, K, device=device).values()]
    out = flash_ext.attention(*inputs)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), inputs)


def test_offload_to_the_cpu(device: str, backend: str) -> None:
    """save_on_cpu replaces what was saved; the gradients are the same bits."""
    inputs = [leaf(t) for t in make_inputs(Q, K, device=device).values()]
    expected = torch.autograd.grad(flash_ext.attention(*inputs, causal=True).sum(), inputs)
    with torch.autograd.graph.save_on_cpu():
        out = flash_ext.attention(*inputs, causal=True)
    for a, b in zip(torch.autograd.grad(out.sum(), inputs), expected, strict=True):
        assert torch.equal(a, b)


def test_graph_is_freed(device: str, backend: str) -> None:
    """No reference cycle keeps saved tensors alive after the output is gone."""

    class Token:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    tokens: list[weakref.ref[Token]] = []

    def pack(tensor: Tensor) -> Token:
        token = Token(tensor.detach())
        tokens.append(weakref.ref(token))
        return token

    inputs = [leaf(t) for t in make_inputs(Q, K, device=device).values()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.tensor):
        out = flash_ext.attention(*inputs)
    assert tokens and all(token() is not None for token in tokens)
    del out
    assert all(token() is None for token in tokens)


PEAK = """
    import resource, torch, flash_ext
    torch.set_num_threads(2)
    length, options = {length}, dict({options})
    inside = flash_ext.use_backend({backend!r})
    inside.__enter__()

    def step(n, differentiate_twice=False):
        q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
        out = flash_ext.attention(q, k, v, **options)
        if differentiate_twice:
            (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
            dq.sum().backward()
        else:
            out.sum().backward()

    step(64, {twice})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(length, {twice})
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def peak_growth(length: int, options: str, backend: str, twice: bool = False) -> int:
    """Bytes by which a long call raises the resident peak of a fresh process."""
    code = textwrap.dedent(PEAK.format(length=length, options=options, backend=backend, twice=twice))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.parametrize("options", ["", "causal=True, softcap=5.0, dropout_p=0.1"], ids=["plain", "options"])
def test_cpu_peak_does_not_grow_as_the_scores(options: str) -> None:
    """Forward and backward at 12,288 x 12,288: the scores would be 576 MiB in float32."""
    assert peak_growth(12288, options, "cpu") < 48 << 20


@pytest.mark.slow
@pytest.mark.parametrize("twice", [False, True], ids=["backward", "double_backward"])
def test_chunked_peak_is_that_of_a_block(twice: bool) -> None:
    """A block of queries holds 64 MiB of scores, about ten times in double backward; the whole would be four blocks."""
    assert peak_growth(8192, "", "chunked", twice) < 900 << 20


class _Buffer(bytearray):
    """Memory of a tensor that can be asked whether it is still held."""


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_graph_without_owner_is_freed(create_graph: bool, backward: bool) -> None:
    """A node keeps its own results; it must not keep itself by them."""
    buffer = _Buffer(4 * 2 * 4 * 10 * 8)
    held = weakref.ref(buffer)
    query = torch.frombuffer(buffer, dtype=torch.float32).view(Q).requires_grad_()
    del buffer
    _, key, value = (leaf(t) for t in make_inputs(Q, K).values())
    out, lse = flash_ext.attention(query, key, value, return_lse=True)
    grads: tuple[Tensor, ...] = ()
    if backward:
        grads = torch.autograd.grad(out.sum() + lse.sum(), (query, key), create_graph=create_graph)
    assert held() is not None
    del query, out, lse, grads
    assert held() is None
