"""Promise: within ``enable()``, torch.nn.attention.varlen.varlen_attn runs here: numbers, gradients, lse, compiled, and
only then."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers import rand
from torch import Tensor
from torch.autograd import gradgradcheck

import flash_ext

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no torch.nn.attention.varlen")

LENGTHS_Q, LENGTHS_K = (3, 0, 7, 1), (5, 2, 7, 4)
TAKES = set(inspect.signature(varlen.varlen_attn).parameters)


@pytest.fixture(autouse=True)
def _off() -> Iterator[None]:
    yield
    flash_ext.disable()


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def qkv(dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (4, 4), dim_v: int = 8) -> list[Tensor]:
    shapes = ((sum(LENGTHS_Q), heads[0], 8), (sum(LENGTHS_K), heads[1], 8), (sum(LENGTHS_K), heads[1], dim_v))
    return [rand(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def attend(*tensors: Tensor, **options: Any) -> Any:
    where = starts(LENGTHS_Q), starts(LENGTHS_K)
    return varlen.varlen_attn(*tensors, *where, max(LENGTHS_Q), max(LENGTHS_K), **options)


def expected(
    tensors: list[Tensor], left: int = -1, right: int = -1, scale: float = 8**-0.5, used: tuple[int, ...] = LENGTHS_K
) -> tuple[Tensor, Tensor]:
    """Each sequence in float64, its diagonal ending in the last query and the last key; out and lse."""
    q, k, v = (t.double() for t in tensors)
    outs, lses = [], []
    at_q, at_k = (starts(lengths).tolist() for lengths in (LENGTHS_Q, LENGTHS_K))
    for b, (first, last) in enumerate(itertools.pairwise(at_q)):
        keys = slice(at_k[b], at_k[b] + used[b])
        group = q.shape[1] // k.shape[1]
        key, value = (t[keys].repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:last], key) * scale
        ahead = torch.arange(used[b]) - (torch.arange(last - first) + used[b] - (last - first))[:, None]
        hidden = (ahead > right) & (right >= 0) | (ahead < -left) & (left >= 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]]:
    """Arguments, what they mean to `expected`, and heads."""
    result: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int]]] = {"plain": ({}, {}, (4, 4))}
    if "is_causal" in TAKES:
        result["causal"] = ({"is_causal": True}, {"right": 0}, (4, 4))
    if "scale" in TAKES:
        result["scale"] = ({"scale": 0.7}, {"scale": 0.7}, (4, 4))
    if "window_size" in TAKES:
        result["causal"] = ({"window_size": (-1, 0)}, {"right": 0}, (4, 4))
        result["window"] = ({"window_size": (2, 1)}, {"left": 2, "right": 1}, (4, 4))
    if "enable_gqa" in TAKES:
        result["gqa"] = ({"enable_gqa": True}, {}, (4, 2))
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", cases())
def test_numbers_and_gradients(name: str, dtype: torch.dtype) -> None:
    options, means, heads = cases()[name]
    tensors = qkv(dtype, heads)
    with flash_ext.enable():
        before = flash_ext.enabled_calls()
        out, lse = attend(*tensors, **options, return_aux=varlen.AuxRequest(lse=True))
        assert flash_ext.enabled_calls() == before + 1
    right, right_lse = expected(tensors, **means)
    assert out.dtype == dtype and lse.dtype == torch.float32 and lse.shape == (4, sum(LENGTHS_Q))
    close = {"atol": 3e-2, "rtol": 3e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, right.to(dtype), **close)
    torch.testing.assert_close(lse, right_lse.float(), **close)
    cotangent = rand(*out.shape, dtype=dtype)
    got = torch.autograd.grad(out, tensors, cotangent)  # after the context: as forward was
    torch.testing.assert_close(got, torch.autograd.grad(right, tensors, cotangent.double()), **close)


@pytest.mark.skipif("seqused_k" not in TAKES, reason="this torch's varlen_attn has no seqused_k")
def test_rows_in_use() -> None:
    tensors, used = [t.detach() for t in qkv()], (3, 1, 7, 2)
    with flash_ext.enable():
        out = attend(*tensors, seqused_k=torch.tensor(used, dtype=torch.int32))
    torch.testing.assert_close(out, expected(tensors, used=used)[0].float())


def test_second_derivatives() -> None:
    def call(*tensors: Tensor) -> Tensor:
        return attend(*tensors)

    with flash_ext.enable():
        assert gradgradcheck(call, qkv(torch.float64, (2, 2)), atol=1e-4)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(compiler: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: attend(*tensors).sin(), fullgraph=True, backend=compiler)
    rows = [t.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in qkv()]
    with flash_ext.enable():
        out = compiled(*rows)
    right = expected(rows)[0].sin()
    torch.testing.assert_close(out, right.float())
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), rows), torch.autograd.grad(right.sum(), rows), check_dtype=False
    )


def test_autocast_changes_nothing() -> None:
    tensors = qkv()
    with flash_ext.enable(), torch.autocast("cpu", torch.bfloat16):
        out = attend(*tensors)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected(tensors)[0].float())


def test_backward_is_of_forwards_backend() -> None:
    """Also in a thread that has no choice of its own, as that of autograd for a GPU."""
    tensors = qkv()
    with flash_ext.enable():
        with flash_ext.use_backend("chunked"):
            expected, loss = torch.autograd.grad(attend(*tensors).sum(), tensors), attend(*tensors).sum()
        with ThreadPoolExecutor(1) as pool:
            got = pool.submit(torch.autograd.grad, loss, tensors).result()
        other = torch.autograd.grad(attend(*tensors).sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(got, other, strict=True))


def test_off_after_disable() -> None:
    """Without a GPU PyTorch's own raises."""
    with flash_ext.enable():
        with flash_ext.enable():
            pass
        attend(*qkv())
    before = flash_ext.enabled_calls()
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        attend(*qkv())
    assert flash_ext.enabled_calls() == before


@pytest.mark.parametrize("which", ["head dims", "e4m3"])
def test_what_only_pytorch_serves_is_counted(which: str) -> None:
    q, k, v = (t.detach() for t in qkv())
    where = starts(LENGTHS_Q), starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)
    with flash_ext.enable():
        before = flash_ext.enabled_calls()
        with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
            if which == "e4m3":  # out is promised in the dtype of query, and there are no descales
                torch.ops.torch_attn._varlen_attn(*(t.to(torch.float8_e4m3fn) for t in (q, k, v)), *where)
            else:
                torch.ops.torch_attn._varlen_attn(q, k.unsqueeze(1), v.unsqueeze(1), *where)
        after = flash_ext.enabled_calls()
    assert after == before and after.left == before.left + 1
    assert any(reason.startswith("varlen_attn has an argument") for reason in flash_ext.why_not())


@pytest.mark.parametrize("order", ["before", "after"])
def test_imported_before_or_after(order: str) -> None:
    lines = ["import flash_ext; flash_ext.enable()", "from torch.nn.attention.varlen import varlen_attn"]
    program = [
        "import torch",
        *(lines if order == "after" else reversed(lines)),
        "where = torch.tensor([0, 2, 5], dtype=torch.int32)",
        "varlen_attn(*(torch.randn(5, 2, 8) for _ in 'qkv'), where, where, 3, 3)",
        "assert flash_ext.enabled_calls() == 1",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(program)], check=True)
