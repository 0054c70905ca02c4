"""Promise: a call of some rows, keys or heads of a larger one draws that one's dropout mask, where it says which they
are, so that a call may be spread over processes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers import check, keep_mask, rand, rng_state
from torch import Tensor

import flash_ext
from flash_ext import reference

OPS = torch.ops.flash_ext
ROWS, KEYS, HEADS, P = 90, 75, 6, 0.3


def inputs(device: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((2, HEADS, ROWS, 16), (2, HEADS, KEYS, 16), (2, HEADS, KEYS, 8))
    return [rand(*size, device=device).to(dtype).requires_grad_() for size in sizes]


def run(tensors: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    state = rng_state(11, 4, tensors[0].device.type)
    return OPS.attention_with_rng_state(*tensors, state, dropout_p=P, return_lse=True, gqa=True, **options)


def by_rows(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    pieces = [run([q[:, :, i : i + 32], k, v], dropout_first_query=i, **options) for i in range(0, ROWS, 32)]
    return tuple(torch.cat(both, 2) for both in zip(*pieces, strict=True))


def by_keys(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    pieces = [run([q, k[:, :, j : j + 48], v[:, :, j : j + 48]], dropout_first_key=j, **options) for j in (0, 48)]
    return flash_ext.merge_attention(*pieces[0], *pieces[1])


def by_heads(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    pieces = [
        run([x[:, h : h + 2] for x in (q, k, v)], dropout_first_head=h, dropout_heads=HEADS, **options)
        for h in range(0, HEADS, 2)
    ]
    return tuple(torch.cat(both, 1) for both in zip(*pieces, strict=True))


def by_all(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The heads of one part, of whose rows the first 16 and whose keys the first 32 are not there."""
    out, lse = run(
        [q[:, 2:5, 16:], k[:, 2:5, 32:], v[:, 2:5, 32:]],
        dropout_first_query=16, dropout_first_key=32, dropout_first_head=2, dropout_heads=HEADS, **options,
    )  # fmt: skip
    return out, lse


def whole_of_all(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    mask = (torch.arange(KEYS, device=q.device) >= 32).expand(1, 1, 1, KEYS)
    out, lse = run([q, k, v], mask=mask, **options)
    return out[:, 2:5, 16:], lse[:, 2:5, 16:]


PARTS = {"rows": (by_rows, run), "keys": (by_keys, run), "heads": (by_heads, run), "all": (by_all, whole_of_all)}


@pytest.mark.parametrize("name", PARTS)
def test_parts_make_the_whole(name: str, device: str, backend: str) -> None:
    parts, whole = PARTS[name]
    whole_of = whole if whole is not run else lambda q, k, v, **options: run([q, k, v], **options)
    tensors = inputs(device)
    grads = []
    for call in (parts, whole_of):
        results = call(*tensors)
        torch.manual_seed(1)
        loss = sum((x * rand(*x.shape, device=device).to(x.dtype)).sum() for x in results)
        grads.append((*results, *torch.autograd.grad(loss, tensors)))
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_error_rule(dtype: torch.dtype, device: str, backend: str) -> None:
    q, k, v = inputs(device, dtype)
    keep = keep_mask(rng_state(11, 4, device), P, (2, HEADS), ROWS, KEYS)
    named = {"query": q, "key": k, "value": v}
    check(
        lambda query, key, value: by_heads(query, key, value)[0],
        named,
        truth=reference.attention,
        extra={"dropout_p": P, "keep": keep},
    )


def test_packed_heads(device: str) -> None:
    """As sequences of one call, whose heads are spread."""
    q, k, v = (x.detach().transpose(1, 2).reshape(-1, HEADS, x.shape[-1]) for x in inputs(device))
    lengths = {"cu_seqlens_q": torch.tensor([0, 40, 2 * ROWS]), "cu_seqlens_k": torch.tensor([0, 75, 2 * KEYS])}
    options: dict[str, Any] = {name: x.to(device, torch.int32) for name, x in lengths.items()}
    options |= {"max_q": 140, "max_k": 75}
    whole, _ = run([q, k, v], **options)
    for h in range(0, HEADS, 2):
        part, _ = run([x[:, h : h + 2] for x in (q, k, v)], dropout_first_head=h, dropout_heads=HEADS, **options)
        assert torch.equal(part, whole[:, h : h + 2])


def test_second_derivative(device: str) -> None:
    tensors = [x.detach()[:1, :4, 16:24].requires_grad_() for x in inputs(device)]

    def call(*given: Tensor) -> tuple[Tensor, Tensor]:
        return run(
            list(given), dropout_first_query=16, dropout_first_key=32, dropout_first_head=2, dropout_heads=HEADS
        )  # fmt: skip

    assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def test_batch_invariant(device: str) -> None:
    tensors = [x.detach() for x in inputs(device)]
    options = {"dropout_first_query": 32, "dropout_first_head": 1, "dropout_heads": 9, "batch_invariant": True}
    both, _ = run(tensors, **options)
    options.pop("batch_invariant")
    torch.testing.assert_close(both, run(tensors, **options)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dropout_first_query": 8}, "dropout_first_query is 8; it must be a multiple of 16 that is not negative"),
        ({"dropout_first_key": -16}, "dropout_first_key is -16; it must be a multiple of 16 that is not negative"),
        ({"dropout_first_head": 1}, "dropout_first_head is 1 of a call with 6 heads; dropout_heads is 0, and"),
        ({"dropout_heads": 5}, "dropout_first_head is 0 of a call with 6 heads; dropout_heads is 5, and"),
        ({"dropout_first_head": -1, "dropout_heads": 9}, "dropout_first_head is -1 of a call with 6 heads"),
    ],
)
def test_bad_parts(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{sentence}"):
        run(inputs("cpu"), **options)


def test_packed_sequences_have_no_part_of_rows() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1) for x in inputs("cpu"))
    cu = {name: torch.tensor([0, n], dtype=torch.int32) for name, n in (("cu_seqlens_q", ROWS), ("cu_seqlens_k", KEYS))}
    with pytest.raises(RuntimeError, match=r"^dropout_first_key is 16 beside cu_seqlens_q; of packed"):
        run([q, k, v], **cu, max_q=ROWS, max_k=KEYS, dropout_first_key=16)


def test_the_kernels_of_the_whole_serve_a_part(device: str) -> None:
    q, k, v = inputs(device, torch.float32)
    whole, part = (
        json.loads(OPS.explain(q, k, v, gqa=True, dropout_p=P, **options))
        for options in ({}, {"dropout_first_query": 16, "dropout_first_head": 1, "dropout_heads": HEADS + 2})
    )
    for passed in ("forward", "backward"):
        assert part[passed]["backend"] == whole[passed]["backend"] != "chunked"
