"""Promise: nested tensors of the jagged layout are packed sequences: through the drop-in, `attention` and `enable()`,
forward, backward, compiled, and twice differentiable."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import rand
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

LENGTHS = (3, 0, 7, 1)
F64 = torch.float64


def offsets(device: str = "cpu", lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device=device)


def nest(rows: Tensor, where: Tensor) -> Tensor:
    """(B, heads, j, cols), or (B, j, cols), of (rows, heads, cols) or (rows, cols)."""
    nested = torch.nested.nested_tensor_from_jagged(rows, where)
    return nested.transpose(1, 2) if rows.dim() == 3 else nested


def flat(nested: Tensor) -> Tensor:
    return nested.transpose(1, 2).values() if nested.dim() == 4 else nested.values()


def qkv(device: str = "cpu", heads: tuple[int, int, int] = (4, 2, 2), dtype: torch.dtype = F64) -> list[Tensor]:
    return [rand(sum(LENGTHS), h, 8, dtype=dtype, device=device).requires_grad_() for h in heads]


def each_alone(rows: list[Tensor], **options: Any) -> Tensor:
    ends = offsets().tolist()
    return torch.cat(
        [
            flash_ext.attention(*(t[a:b].transpose(0, 1).unsqueeze(0) for t in rows), **options)[0].transpose(0, 1)
            for a, b in itertools.pairwise(ends)
        ]
    )


def check_like_each_alone(call: Callable[..., Tensor], rows: list[Tensor], **options: Any) -> None:
    where = offsets(str(rows[0].device))
    query = nest(rows[0], where)
    got = call(query, *(nest(t, where) for t in rows[1:]))
    assert got.is_nested and got.shape == (*query.shape[:-1], 8)  # of query's ragged length
    expected = each_alone(rows, **options)
    torch.testing.assert_close(flat(got), expected)
    cotangent = torch.randn_like(expected)
    grads = [torch.autograd.grad(out, rows, cotangent) for out in (flat(got), expected)]
    torch.testing.assert_close(grads[0], grads[1])


def test_the_drop_in(device: str, backend: str) -> None:
    def call(*qkv: Tensor) -> Tensor:
        return flash_ext.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

    check_like_each_alone(call, qkv(device), causal=True)


@pytest.mark.parametrize(
    "options", [{"window": (2, 1), "align": "bottom_right"}, {"softcap": 3.0}, {"scale": 0.3}], ids=str
)
def test_attention(options: dict[str, Any], device: str, backend: str) -> None:
    check_like_each_alone(lambda *qkv: flash_ext.attention(*qkv, **options), qkv(device), **options)


def test_masks_and_biases_are_of_the_longest(device: str, backend: str) -> None:
    rows, where, longest = qkv(device), offsets(device), max(LENGTHS)
    bias = rand(len(LENGTHS), 1, longest, longest, dtype=F64, device=device).requires_grad_()
    mask = bias.detach() > -0.5
    nested = [nest(t, where) for t in rows]
    for given in ({"bias": bias}, {"mask": mask}):
        got = flat(flash_ext.attention(*nested, **given))
        for b, (first, length) in enumerate(zip(where.tolist(), LENGTHS, strict=False)):
            alone = [t[first : first + length].transpose(0, 1).unsqueeze(0) for t in rows]
            own = {name: t[b : b + 1, :, :length, :length] for name, t in given.items()}
            expected = flash_ext.attention(*alone, **own)[0].transpose(0, 1)
            torch.testing.assert_close(got[first : first + length], expected)
    dropped_in = flash_ext.scaled_dot_product_attention(*nested, mask, enable_gqa=True)
    torch.testing.assert_close(flat(dropped_in), flat(flash_ext.attention(*nested, mask=mask)))


def test_lse_is_nested() -> None:
    rows, where = qkv(), offsets()
    out, lse = flash_ext.attention(*(nest(t, where) for t in rows), return_lse=True)
    assert lse.is_nested and lse.shape == out.shape[:-1]
    _, expected = flash_ext.attention_varlen(*rows, where.int(), max_q=7, return_lse=True)
    torch.testing.assert_close(lse.values(), expected)


def test_without_heads() -> None:
    rows = [rand(sum(LENGTHS), 8, dtype=F64) for _ in "qkv"]
    got = flash_ext.scaled_dot_product_attention(*(nest(t, offsets()) for t in rows))
    torch.testing.assert_close(got.values(), each_alone([t.unsqueeze(1) for t in rows]).squeeze(1))


def test_rows_that_are_not_in_use() -> None:
    """A view of parts of a padded tensor, which has lengths beside offsets."""
    padded = rand(3, 6, 8, dtype=F64)
    lengths = torch.tensor([3, 2, 4])
    nested = torch.nested.narrow(padded, 1, torch.tensor([0, 1, 2]), lengths, layout=torch.jagged)
    got = flash_ext.scaled_dot_product_attention(nested, nested, nested)
    for part, start, length, row in zip(got.unbind(), (0, 1, 2), lengths.tolist(), padded, strict=True):
        own = row[start : start + length]
        torch.testing.assert_close(part, flash_ext.scaled_dot_product_attention(own, own, own))


def test_derivatives_of_both_orders() -> None:
    """Of leaves that are nested: PyTorch's own views of their values have no second derivative."""
    where = offsets(lengths=(3, 2))
    leaves = [nest(rand(5, 2, 4, dtype=F64), where).requires_grad_() for _ in "qkv"]

    def call(*values: Tensor) -> Tensor:
        nested = [flash_ext.nested._Nest.apply(t, True, (where, None, None, None)) for t in values]
        return flash_ext.nested._Flat.apply(flash_ext.scaled_dot_product_attention(*nested, is_causal=True))

    values = [flat(t).detach().requires_grad_() for t in leaves]
    assert gradcheck(call, values) and gradgradcheck(call, values)
    out = flash_ext.scaled_dot_product_attention(*leaves, is_causal=True)
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), create_graph=True)
    second = torch.autograd.grad(first[0].values().square().sum(), leaves)
    flat_first = torch.autograd.grad(call(*values).sum(), values, create_graph=True)
    expected = torch.autograd.grad(flat_first[0].square().sum(), values)
    torch.testing.assert_close([flat(t) for t in second], list(expected))


def test_enable_serves_pytorchs_function(device: str) -> None:
    rows, where = qkv(device, (2, 2, 2), torch.float32), offsets(device)
    nested = [nest(t, where) for t in rows]
    with flash_ext.enable():
        before = flash_ext.enabled_calls()
        out = F.scaled_dot_product_attention(*nested, is_causal=True)
        assert flash_ext.enabled_calls() == before + 1
    torch.testing.assert_close(flat(out), each_alone(rows, causal=True))


@pytest.mark.filterwarnings("ignore:.*goes to PyTorch")
def test_enable_leaves_what_a_user_chose() -> None:
    """One of PyTorch's kernels, which without a GPU may also fail: that is PyTorch's answer."""
    nested = [nest(t, offsets()) for t in qkv(heads=(2, 2, 2), dtype=torch.float32)]
    with flash_ext.enable(), sdpa_kernel(SDPBackend.MATH):
        before = flash_ext.enabled_calls()
        with contextlib.suppress(RuntimeError):
            F.scaled_dot_product_attention(*nested)
        after = flash_ext.enabled_calls()
    assert after == before and after.left == before.left + 1


@pytest.mark.parametrize("enabled", [False, True])
def test_compiled(enabled: bool) -> None:
    rows = qkv(heads=(2, 2, 2), dtype=torch.float32)
    function = F.scaled_dot_product_attention if enabled else flash_ext.scaled_dot_product_attention

    @torch.compile(fullgraph=True)
    def call(*nested: Tensor) -> Tensor:
        return function(*nested, is_causal=True)

    with flash_ext.enable():
        check_like_each_alone(call, rows, causal=True)


def test_errors() -> None:
    where = offsets()
    query, key, value = (nest(t, where) for t in qkv())
    strided = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    for function in (flash_ext.scaled_dot_product_attention, flash_ext.attention):
        with pytest.raises(flash_ext.AttentionError, match=r"query is a nested tensor of layout torch\.strided"):
            function(strided, strided, strided)
        with pytest.raises(flash_ext.AttentionError, match="key is not nested; query, key and value must all be"):
            function(query, torch.randn(4, 4, 5, 8), value)
    with pytest.raises(
        flash_ext.AttentionError, match=r"query of shape \(4, 'j', 4, 8\) has its ragged dimension at 1"
    ):
        flash_ext.attention(query.transpose(1, 2), key, value)
    with pytest.raises(flash_ext.AttentionError, match="have 4, 2 and 2 heads"):
        flash_ext.scaled_dot_product_attention(query, key, value)
    with pytest.raises(flash_ext.AttentionError, match="attn_mask is given together with is_causal"):
        flash_ext.scaled_dot_product_attention(query, key, value, torch.ones(7, 7) > 0, is_causal=True, enable_gqa=True)
