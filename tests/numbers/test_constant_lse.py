"""Promise: a backward of a constant lse gives what a part of a row's keys adds to the gradients of the whole row, so
that the keys of a row may be spread over calls, as in a ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, check, evaluate, make_inputs, name_of
from torch import Tensor

from flash_ext import reference

OPS = torch.ops.flash_ext
KEYS = 203


def packed(x: Tensor) -> Tensor:
    """(1, heads, tokens, columns) -> (tokens, heads, columns)."""
    return x[0].transpose(0, 1)


def batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def forward(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
    if "cu_seqlens_q" not in call:
        out, lse, _ = OPS.attention(q, k, v, return_lse=True, **call)
        return out, lse
    out, lse, _ = OPS.attention(packed(q), packed(k), packed(v), return_lse=True, **call)
    return batched(out), lse[None]


def backward(grad_out: Tensor, grad_lse: Tensor, *tensors: Tensor, lse: Tensor, **call: Any) -> list[Tensor]:
    given = {"constant_lse": True, "grad_mask": [True] * 3 + [False] * 2, **call}
    state = lse.new_empty(0, dtype=torch.int64)
    if "cu_seqlens_q" not in call:
        return OPS.attention_backward(grad_out, grad_lse, *tensors, lse, state, **given)[:3]
    grads = OPS.attention_backward(packed(grad_out), grad_lse[0], *map(packed, tensors), lse[0], state, **given)
    return [batched(grad) for grad in grads[:3]]


class ByParts(torch.autograd.Function):
    """out and lse of all keys, from calls on some of them each; of packed sequences with ``cu_seqlens_k`` of all.

    The backend is an option of the calls, because autograd runs backward of a GPU in a thread of its own.
    """

    @staticmethod
    def forward(
        ctx: Any, parts: list[slice], options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.calls = [
            {"mask": None if mask is None else mask[..., part], "gqa": True, **options} for part in parts
        ]  # fmt: skip
        if "cu_seqlens_k" in options:
            for part, call in zip(parts, ctx.calls, strict=True):
                call["cu_seqlens_k"] = (options["cu_seqlens_k"] - part.start).clamp(0, part.stop - part.start)
        results = [
            forward(q, k[:, :, part], v[:, :, part], **call) for part, call in zip(parts, ctx.calls, strict=True)
        ]
        lses = torch.stack([lse.double() for _, lse in results])
        total = lses.logsumexp(0)
        ctx.weights = torch.exp(lses - total).masked_fill(lses == -torch.inf, 0.0).unsqueeze(-1)
        out = sum(w * r[0].double() for w, r in zip(ctx.weights, results, strict=True)).to(q.dtype)
        ctx.parts = parts
        ctx.save_for_backward(q, k, v, out, *(lse for _, lse in results))
        return out, total.to(results[0][1].dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *lses = ctx.saved_tensors
        delta = (grad_out.double() * out.double()).sum(-1) - grad_lse
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.double) for x in (q, k, v))
        nowhere = torch.full_like(out, torch.nan)
        for part, call, weight, lse in zip(ctx.parts, ctx.calls, ctx.weights, lses, strict=True):
            own = (weight * grad_out).to(q.dtype), (-weight.squeeze(-1) * delta).to(lse.dtype)
            grads = backward(*own, q, k[:, :, part], v[:, :, part], nowhere, lse=lse, **call)
            dq += grads[0]
            dk[:, :, part] += grads[1]
            dv[:, :, part] += grads[2]
        return None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "steep": {"scale": 3.0},
    "far": {"scale": 400.0},  # lse beyond 2^12
    "ordered": {"deterministic": True},
    "alone": {"batch_invariant": True},
    "mask": {},
}


# NOTE: not far in float64, whose rule allows less than the rounding of a part's lse costs: 1.95 of it.
PAIRS = [(name, dtype) for name in CALLS for dtype in DTYPES if (name, dtype) != ("far", torch.float64)]


@pytest.mark.parametrize("split", [96, KEYS - 1, KEYS - 5])
@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=name_of)
def test_error_rule(name: str, split: int, dtype: torch.dtype, device: str, backend: str) -> None:
    """out is not read. Parts of one key and of few have ways of their own."""
    parts = [slice(0, split), slice(split, KEYS)]
    for mean, columns in ((0.0, 64), (2.0, 80)) if name != "far" else ((0.0, 64),):
        inputs = make_inputs((2, 4, 150, columns), (2, 2, KEYS, columns), dtype=dtype, device=device, mean=mean)
        if name == "mask":
            inputs["mask"] = (torch.rand(150, KEYS) > 0.3).to(device)

        def call(
            query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any
        ) -> tuple[Tensor, Tensor]:
            options.pop("return_lse")
            return ByParts.apply(parts, options | {"backend": backend}, query, key, value, mask)

        check(call, inputs, CALLS[name] | {"return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_packed_sequences(dtype: torch.dtype, device: str, backend: str) -> None:
    """One has all its keys in the first part, one in both, one in the second, and one has none."""
    of_q, of_k = [0, 33, 100, 130, 150], [0, 60, 160, KEYS, KEYS]
    lengths = {"max_q": 67, "max_k": 100} | {
        name: torch.tensor(of, dtype=torch.int32, device=device)
        for name, of in (("cu_seqlens_q", of_q), ("cu_seqlens_k", of_k))
    }
    mask = torch.zeros(150, KEYS, dtype=torch.bool, device=device)
    for i in range(4):
        mask[of_q[i] : of_q[i + 1], of_k[i] : of_k[i + 1]] = True
    parts = [slice(0, 96), slice(96, KEYS)]
    for columns, options in ((64, {}), (80, {"softcap": 5.0}), (128, {"scale": 0.3})):
        inputs = make_inputs((1, 4, 150, columns), (1, 2, KEYS, columns), dtype=dtype, device=device)

        def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            options.pop("return_lse")
            return ByParts.apply(parts, options | lengths | {"backend": backend}, query, key, value, None)

        check(call, inputs, options | {"return_lse": True}, extra={"mask": mask})


def test_small_heads(device: str, backend: str) -> None:
    """Where one tile holds a part."""
    parts = [slice(0, 30), slice(30, 49)]
    for dtype in DTYPES:
        inputs = make_inputs((4, 2, 49, 32), (4, 2, 49, 32), dtype=dtype, device=device)
        check(lambda **x: ByParts.apply(parts, {"backend": backend}, *x.values(), None)[0], inputs)


def saved_of(device: str, **extra: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    inputs = make_inputs((1, 2, 8, 16), (1, 2, 9, 16), dtype=torch.float64, device=device)
    tensors = [x.requires_grad_() for x in inputs.values()]
    out, lse, state = OPS.attention(*tensors, return_lse=True, **extra)
    return [torch.ones_like(out), torch.ones_like(lse), *tensors, out.detach(), lse.detach(), state], extra


@pytest.mark.parametrize("name", ["bias", "alibi_slopes"])
def test_some_gradients_are_not_there(name: str, device: str) -> None:
    given = {"bias": torch.zeros(8, 9), "alibi_slopes": torch.zeros(2)}[name]
    tensors, extra = saved_of(device, **{name: given.to(device, torch.float32)})
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"^constant_lse is True beside the gradient of a bias or of"),
    ):
        OPS.attention_backward(*tensors, **extra, constant_lse=True, grad_mask=[True] * 5)
    OPS.attention_backward(*tensors, **extra, constant_lse=True, grad_mask=[True] * 3 + [False] * 2)


def test_no_second_derivative(device: str) -> None:
    tensors, _ = saved_of(device)
    dq, *_ = OPS.attention_backward(*tensors, constant_lse=True, grad_mask=[True] * 3 + [False] * 2)
    with pytest.raises(RuntimeError, match="constant_lse is True, and a backward of a constant lse has no derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("shift", [50.0, 1000.0, 4000.0])
def test_what_rounds_in_a_large_lse_is_no_error(shift: float, device: str) -> None:
    """Of keys that have a mean, where an error of a whole row adds up in dQ: it was three times eager's.

    NOTE: of `chunked` alone. Kernels take e^(score - lse), in whose product with the weight of a part the rounding of
    lse goes away: the gradient of value, which has that product, is the better for it, that of query is not.
    """
    parts = [slice(0, 96), slice(96, KEYS)]
    inputs = make_inputs((2, 4, 70, 64), (2, 2, KEYS, 64), dtype=torch.float32, device=device, mean=2.0)
    options = {"bias": torch.full((1, 1, 1, 1), shift, device=device)}

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return ByParts.apply(parts, options | {"backend": "chunked"}, query, key, value, None)

    options_of_truth = options | {"return_lse": True}
    wide = {name: t.double() for name, t in inputs.items()}
    truth = evaluate(reference.attention, wide, options_of_truth, cotangent_dtype=torch.float32)
    eager = evaluate(reference.attention, inputs, options_of_truth)
    got = evaluate(call, inputs)
    for name in ("grad of query", "grad of key"):
        ours, theirs = ((results[name].double() - truth[name]).square().mean().sqrt() for results in (got, eager))
        assert ours <= 1.5 * theirs, (name, float(ours / theirs))
