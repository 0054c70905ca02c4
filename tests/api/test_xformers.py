"""Promise: flash_ext.xformers has xformers' memory_efficient_attention and its biases, with the same meaning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import HALF, check, name_of, rand
from torch import Tensor

import flash_ext
from flash_ext import reference
from flash_ext.xformers import ops
from flash_ext.xformers.ops import fmha, memory_efficient_attention
from flash_ext.xformers.ops.fmha import attn_bias as biases


def drawn(bias: biases.AttentionBias, queries: int, keys: int) -> list[str]:
    """One line a query, an x where it sees the key."""
    matrix = bias.materialize((2, queries, keys))
    assert matrix.shape == (2, queries, keys) and torch.equal(matrix[0], matrix[1])
    assert torch.equal((matrix == 0) | (matrix == -torch.inf), torch.ones_like(matrix, dtype=torch.bool))
    return ["".join("x" if seen else "." for seen in row) for row in (matrix[0] == 0).tolist()]


def test_bands_as_they_are_drawn() -> None:
    assert drawn(biases.LowerTriangularMask(), 3, 5) == ["x....", "xx...", "xxx.."]
    at_end = biases.LowerTriangularFromBottomRightMask()
    assert drawn(at_end, 3, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert drawn(at_end, 4, 2) == ["..", "..", "x.", "xx"]
    assert drawn(at_end.make_local_attention(2), 3, 5) == [".xx..", "..xx.", "...xx"]
    local = biases.LocalAttentionFromBottomRightMask(window_left=1, window_right=2)
    assert drawn(local, 4, 4) == ["xxx.", "xxxx", ".xxx", "..xx"]
    assert drawn(local, 4, 5) == ["xxxx.", ".xxxx", "..xxx", "...xx"]


def test_sequences_as_they_are_drawn() -> None:
    some = biases.BlockDiagonalMask.from_seqlens([2, 3], [3, 4], device="cpu")
    first, second = slice(0, 2), slice(2, 5)
    for bias, one, two in (
        (some, ["xxx", "xxx"], ["xxxx"] * 3),
        (some.make_causal(), ["x..", "xx."], ["x...", "xx..", "xxx."]),
        (some.make_causal_from_bottomright(), ["xx.", "xxx"], ["xx..", "xxx.", "xxxx"]),
        (some.make_local_attention(2), ["x..", "xx."], ["x...", "xx..", ".xx."]),
        (some.make_local_attention_from_bottomright(2), ["xx.", ".xx"], ["xx..", ".xx.", "..xx"]),
    ):
        rows = drawn(bias, 5, 7)
        assert rows[first] == [row + "...." for row in one] and rows[second] == ["..." + row for row in two]
    padded = fmha.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([1, 2], 4, [3, 2], device="cpu")
    assert drawn(padded, 3, 8) == ["xxx.....", "....x...", "....xx.."]
    whole = fmha.BlockDiagonalPaddedKeysMask.from_seqlens([1, 2], 4, [3, 2], device="cpu")
    assert drawn(whole, 3, 8) == ["xxx.....", "....xx..", "....xx.."]
    assert drawn(whole.make_local_attention(1, 0), 3, 8) == [".xx.....", "....x...", "....xx.."]
    assert drawn(whole.make_local_attention(0, 1), 3, 8) == ["..x.....", "....xx..", ".....x.."]
    local = biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
        [1, 2], 4, [3, 2], 1, device="cpu"
    )
    assert drawn(local, 3, 8) == ["..x.....", "....x...", ".....x.."]
    gaps = biases.BlockDiagonalGappyKeysMask.from_seqlens([1, 2], [1, 5, 8], [3, 2], device="cpu")
    assert drawn(gaps, 3, 8) == [".xxx....", ".....xx.", ".....xx."]
    gaps = biases.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens([1, 2], [1, 5, 8], [3, 2], device="cpu")
    assert drawn(gaps, 3, 8) == [".xxx....", ".....x..", ".....xx."]
    tables = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    pages = padded.make_paged(tables, 2, biases.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    assert drawn(pages, 3, 8) == ["x.....xx", "..x.....", "..xx...."]


BANDS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "triangle": biases.LowerTriangularMask,
    "triangle at the end": biases.LowerTriangularFromBottomRightMask,
    "local triangle": lambda: biases.LowerTriangularFromBottomRightLocalAttentionMask(7),
    "local": lambda: biases.LocalAttentionFromBottomRightMask(9, 4),
}
SEQUENCES: dict[str, Callable[[Any], Any]] = {
    "whole": lambda bias: bias,
    "causal": lambda bias: bias.make_causal(),
    "causal at the end": lambda bias: bias.make_causal_from_bottomright(),
    "local": lambda bias: bias.make_local_attention(5),
    "local at the end": lambda bias: bias.make_local_attention_from_bottomright(5),
}


def by_matrix(bias: Any) -> Callable[..., Any]:
    """The reference on (batch, rows, heads, columns) with what the bias shows."""

    def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen = None
        if bias is not None:
            seen = bias.to(query.device).visible(query.shape[1], key.shape[1], query.device)
        turned = (x.transpose(1, 2) for x in (query, key, value))
        return reference.attention(*turned, mask=seen, **options).transpose(1, 2)

    return call


def inputs_of(batch: int, rows: int, keys: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    shapes = {"query": (batch, rows, 3, 16), "key": (batch, keys, 3, 16), "value": (batch, keys, 3, 24)}
    return {name: rand(*shape, dtype=dtype, device=device) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name_of)
@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str, dtype: torch.dtype, device: str) -> None:
    bias = BANDS[name]()
    check(
        lambda **x: memory_efficient_attention(**x, attn_bias=bias, scale=0.3),
        inputs_of(2, 20, 33, dtype, device),
        truth=lambda **x: by_matrix(bias)(**x, scale=0.3),
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name_of)
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str, dtype: torch.dtype, device: str) -> None:
    bias = SEQUENCES[name](fmha.BlockDiagonalMask.from_seqlens([5, 1, 17], [8, 3, 19], device=device))
    check(
        lambda **x: memory_efficient_attention(**x, attn_bias=bias),
        inputs_of(1, 23, 30, dtype, device),
        truth=by_matrix(bias),
    )


PADDED = {"kv_padding": 10, "kv_seqlen": [10, 7, 0]}
SOME_KEYS: dict[str, Callable[..., Any]] = {
    "padded": lambda **on: fmha.BlockDiagonalPaddedKeysMask.from_seqlens([1, 4, 2], **PADDED, **on),
    "causal padded": lambda **on: fmha.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [1, 4, 2], **PADDED, **on
    ),
    "local padded": lambda **on: fmha.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
        [1, 4, 2], **PADDED, window_left=3, window_right=1, **on
    ),
    "causal local padded": lambda **on: fmha.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
        [1, 4, 2], **PADDED, window_size=3, **on
    ),
    "gappy": lambda **on: fmha.BlockDiagonalGappyKeysMask.from_seqlens([1, 4, 2], [3, 14, 22, 30], [9, 7, 0], **on),
    "causal gappy": lambda **on: fmha.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
        [1, 4, 2], [3, 14, 22, 30], [9, 7, 0], **on
    ),
}


@pytest.mark.parametrize("name", SOME_KEYS)
def test_keys_that_are_not_used_are_not_read(name: str, device: str) -> None:
    bias = SOME_KEYS[name](device=device)
    inputs = inputs_of(1, 7, 30, torch.float64, device)
    check(lambda **x: memory_efficient_attention(**x, attn_bias=bias), inputs, truth=by_matrix(bias))
    expected = by_matrix(bias)(**inputs)
    used = {row for first, end in bias.k_seqinfo.intervals() for row in range(first, end)}
    for tensor in ("key", "value"):
        inputs[tensor][:, [row for row in range(30) if row not in used]] = torch.nan
    torch.testing.assert_close(memory_efficient_attention(**inputs, attn_bias=bias), expected)


@pytest.mark.parametrize("kind", ["PaddedKeysMask", "CausalWithOffsetPaddedKeysMask"])
def test_pages(kind: str, device: str) -> None:
    """The same as their rows one behind the other."""
    tables = torch.tensor([[5, 0], [1, 2], [4, 4]], dtype=torch.int32, device=device)
    paged, plain = (getattr(fmha, f"{paging}BlockDiagonal{kind}") for paging in ("Paged", ""))
    bias = paged.from_seqlens([1, 4, 2], [10, 7, 0], tables, 5, device=device)
    inputs = inputs_of(1, 7, 30, torch.float32, device)
    got = memory_efficient_attention(**inputs, attn_bias=bias)
    torch.testing.assert_close(got, by_matrix(bias)(**inputs))
    rows = torch.cat([inputs[x].unflatten(1, (6, 5))[:, tables.long()].flatten(1, 3) for x in ("key", "value")], -1)
    key, value = rows.split([16, 24], -1)
    whole = plain.from_seqlens([1, 4, 2], **PADDED, device=device)
    torch.testing.assert_close(got, memory_efficient_attention(inputs["query"], key, value, whole))
    made = whole.make_paged(tables, 5, paged).to(device)
    assert torch.equal(memory_efficient_attention(**inputs, attn_bias=made), got)


@pytest.mark.parametrize("shape", [(20, 33), (3, 20, 33), (2, 3, 20, 33), (2, 1, 20, 1)], ids=name_of)
def test_a_tensor_as_bias(shape: tuple[int, ...], device: str) -> None:
    """With its gradient, alone and with a triangle."""
    inputs = inputs_of(2, 20, 33, torch.float64, device) | {"attn_bias": rand(*shape, device=device).double()}
    for triangle in (False, True):

        def ours(attn_bias: Tensor, triangle: bool = triangle, **x: Tensor) -> Tensor:
            bias = biases.LowerTriangularMask().add_bias(attn_bias) if triangle else attn_bias
            return memory_efficient_attention(**x, attn_bias=bias)

        def truth(attn_bias: Tensor, triangle: bool = triangle, rounded: bool = False, **x: Tensor) -> Tensor:
            return by_matrix(biases.LowerTriangularMask() if triangle else None)(**x, bias=attn_bias)

        check(ours, inputs, truth=truth)


def test_three_and_five_dimensions(device: str) -> None:
    """One head; groups of heads, whose keys are expanded or are not; gradients reach what was expanded."""
    x = {name: t[:, :, 0] for name, t in inputs_of(2, 9, 9, torch.float64, device).items()}
    one = memory_efficient_attention(*(t.unsqueeze(2) for t in x.values()), biases.LowerTriangularMask())
    torch.testing.assert_close(memory_efficient_attention(*x.values(), biases.LowerTriangularMask()), one.squeeze(2))
    bias = rand(2, 9, 9, device=device).double()
    expected = memory_efficient_attention(*(t.unsqueeze(2) for t in x.values()), bias.unsqueeze(1)).squeeze(2)
    torch.testing.assert_close(memory_efficient_attention(*x.values(), bias), expected)

    query, key, value = (
        rand(2, 9, *heads, 8, device=device).double().requires_grad_() for heads in ((2, 4), (2, 1), (2, 1))
    )
    wide = [t.expand(2, 9, 2, 4, 8) for t in (key, value)]
    got = memory_efficient_attention(query, *wide, biases.LowerTriangularMask())
    flat = [t.reshape(2, 9, 8, 8) for t in (query, *wide)]
    expected = memory_efficient_attention(*flat, biases.LowerTriangularMask()).unflatten(2, (2, 4))
    torch.testing.assert_close(got, expected)
    cotangent = rand(*got.shape, device=device).double()
    for mine, right in zip(
        *(torch.autograd.grad(x, (query, key, value), cotangent) for x in (got, expected)), strict=True
    ):
        torch.testing.assert_close(mine, right)
    copies = [t.contiguous() for t in wide]
    torch.testing.assert_close(memory_efficient_attention(query, *copies, biases.LowerTriangularMask()), expected)
    of_groups = rand(2, 2, 4, 9, 9, device=device).double()
    torch.testing.assert_close(
        memory_efficient_attention(query, *wide, of_groups),
        memory_efficient_attention(*flat, of_groups.flatten(1, 2)).unflatten(2, (2, 4)),
    )


def test_lists_of_tensors_come_back(device: str) -> None:
    tensors = [rand(b, rows, 2, 8, device=device) for b, rows in ((1, 3), (2, 5), (1, 1))]
    bias, whole = fmha.BlockDiagonalCausalMask.from_tensor_list(tensors)
    assert whole.shape == (1, 14, 2, 8) and bias.q_seqinfo.seqstart.tolist() == [0, 3, 8, 13, 14]
    assert bias.q_seqinfo.seqstart.device.type == device
    for mine, given in zip(bias.split(whole), tensors, strict=True):
        assert torch.equal(mine, given)
    for mine, x in zip(bias.split(memory_efficient_attention(whole, whole, whole, bias)), tensors, strict=True):
        torch.testing.assert_close(mine, memory_efficient_attention(x, x, x, biases.LowerTriangularMask()))
    keys = [rand(b, rows, 2, 8, device=device) for b, rows in ((1, 4), (2, 2), (1, 3))]
    bias, q, k, v = fmha.BlockDiagonalMask.from_tensor_lists_qkv(tensors, keys, keys)
    assert q.shape[1] == 14 and k.shape[1] == v.shape[1] == 11
    assert [x.shape for x in bias.split_kv(k)] == [x.shape for x in keys]
    with pytest.raises(ValueError, match="queries and keys have other lengths"):
        bias.split(q)


def test_dropout_dtype_and_lse(device: str) -> None:
    x = inputs_of(2, 20, 33, torch.bfloat16, device)
    torch.manual_seed(5)
    got = memory_efficient_attention(**x, p=0.3, output_dtype=torch.float32, op=("any", None))
    torch.manual_seed(5)
    turned = (t.transpose(1, 2) for t in x.values())
    assert torch.equal(got, flash_ext.attention(*turned, dropout_p=0.3).transpose(1, 2).float())
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(**x, attn_bias=biases.LowerTriangularMask())
    assert lse.shape == (2, 3, 20) and lse.dtype == torch.float32 and not out.requires_grad
    q = {name: t.requires_grad_() for name, t in x.items()}
    assert not fmha.memory_efficient_attention_forward(**q).requires_grad
    with pytest.raises(NotImplementedError, match=r"p is 0\.5"):
        fmha.memory_efficient_attention_forward_requires_grad(**x, p=0.5)


OPS = {
    "MemoryEfficientAttentionCkOp": ("ck", "ck"),
    "MemoryEfficientAttentionCutlassFwdFlashBwOp": ("cutlass", "flash"),
    "MemoryEfficientAttentionCutlassOp": ("cutlass", "cutlass"),
    "MemoryEfficientAttentionFlashAttentionOp": ("flash", "flash"),
    "MemoryEfficientAttentionSplitKCkOp": ("ck_splitk", "ck"),
}


def test_ops_are_names_that_choose_nothing() -> None:
    x = inputs_of(1, 7, 7, torch.float32, "cpu")
    expected = memory_efficient_attention(**x)
    for name, (forward, backward) in OPS.items():
        op = getattr(ops, name)
        assert op is getattr(fmha, name) and name in ops.__all__ and name in fmha.__all__
        assert op == (getattr(fmha, forward).FwOp, getattr(fmha, backward).BwOp)
        assert torch.equal(memory_efficient_attention(**x, op=op), expected)
        assert torch.equal(fmha.memory_efficient_attention_forward(**x, op=op[0]), expected)
    for module in ("ck", "ck_splitk", "cutlass", "cutlass_blackwell", "flash", "flash3", "triton_splitk"):
        forward = getattr(fmha, module).FwOp
        assert issubclass(forward, fmha.AttentionFwOpBase)
        assert forward.NAME.startswith(module)
        assert torch.equal(memory_efficient_attention(**x, op=(forward, None)), expected)


def test_errors() -> None:
    q = torch.zeros(2, 4, 1, 8)
    with pytest.raises(ValueError, match="query has batch size 2; with BlockDiagonalMask it must be 1"):
        memory_efficient_attention(q, q, q, fmha.BlockDiagonalMask.from_seqlens([2, 2], device="cpu"))
    with pytest.raises(ValueError, match="query has 4 dimensions, key 3 and value 4"):
        memory_efficient_attention(q, q[0], q)
    for make in (lambda: biases.LocalAttentionFromBottomRightMask(-1, 0),
                 lambda: biases.LowerTriangularFromBottomRightMask().make_local_attention(0),
                 lambda: fmha.BlockDiagonalMask.from_seqlens([3], device="cpu").make_local_attention(0),
                 lambda: fmha.BlockDiagonalMask.from_seqlens([3], [1, 2], device="cpu"),
                 lambda: fmha.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [5], device="cpu"),
                 lambda: fmha.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens([1], 4, [3], device="cpu"),
                 lambda: fmha.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens([1], 4, [3], device="cpu"),
                 lambda: fmha.BlockDiagonalGappyKeysMask.from_seqlens([1], [0], [3], device="cpu"),
                 lambda: fmha.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [2, 0, 4], [1, 1], device="cpu"),
                 lambda: fmha.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [0, 2, 4], [3, 1], device="cpu")
    ):  # fmt: skip
        with pytest.raises(ValueError):
            make()


PROGRAM = """
import sys, torch, flash_ext
sys.modules["xformers"] = flash_ext.xformers
import xformers
import xformers.ops as xops
from xformers.ops import MemoryEfficientAttentionFlashAttentionOp, fmha, memory_efficient_attention
from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, LowerTriangularMask
from xformers.ops.fmha.cutlass import FwOp

x = torch.randn(1, 12, 2, 8)
bias = fmha.BlockDiagonalMask.from_seqlens([5, 7], device="cpu").make_causal()
assert isinstance(bias, BlockDiagonalCausalMask)
assert xops.memory_efficient_attention(x, x, x, attn_bias=bias).shape == x.shape
assert memory_efficient_attention(x, x, x, xops.LowerTriangularMask()).shape == x.shape
for op in (MemoryEfficientAttentionFlashAttentionOp, (FwOp, None)):
    assert memory_efficient_attention(x, x, x, op=op).shape == x.shape
try:
    from xformers.ops import SwiGLU
except ImportError as error:
    print("right", xformers.__version__ >= "0.0.2")
"""


def test_an_unchanged_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.split() == ["right", "True"], done.stderr
