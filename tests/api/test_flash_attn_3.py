"""Promise: `flash_ext.flash_attn_3` computes what FlashAttention 3's interface means, and refuses the rest by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from caches import appended, attended, example, ints
from flash_attn_calls import (
    CACHES,
    CLOSE,
    DTYPE,
    LENGTHS,
    OPTIONS,
    B,
    E,
    H,
    compare,
    dense_truth,
    in_their_names,
    packed_truth,
    padded_left,
    starts,
)
from helpers import rand
from torch import Tensor

import flash_ext
from flash_ext import flash_attn_3

HINTS = {"sm_margin": 3, "num_splits": 5, "pack_gqa": True}
OF_CACHES = [*(name for name in CACHES if name != "slopes"), "fp8", "fp8, pages"]
MORE = {
    "fp8": {"queries": 2, "added": 2, "fp8": True, "causal": True},
    "fp8, pages": {"queries": 2, "added": 2, "fp8": True, "page": 16},
}


def ask(function: Callable[..., Any], given: dict[str, Any], *sizes: Any) -> Callable[..., Any]:
    return lambda *tensors: function(*tensors, *sizes, return_attn_probs=True, **given)


@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name: str, device: str) -> None:
    given, meaning = OPTIONS[name]
    made = {"dtype": DTYPE[device], "device": device}
    q, k, v = (rand(B, n, heads, E, **made) for n, heads in ((5, H), (11, 2), (11, 2)))
    compare(ask(flash_attn_3.flash_attn_func, given | HINTS), lambda *t: dense_truth(*t, **meaning), [q, k, v])
    packed = ask(flash_attn_3.flash_attn_qkvpacked_func, given)
    compare(packed, lambda x: dense_truth(*x.unbind(2), **meaning), [rand(B, 9, 3, H, E, **made)])
    grouped = ask(flash_attn_3.flash_attn_qkvpacked_func, given | {"num_heads_q": H})
    compare(grouped, lambda x: dense_truth(*x.split([H, 2, 2], 2), **meaning), [rand(B, 9, H + 4, E, **made)])


def test_e4m3(device: str) -> None:
    """Descales are of key heads, those of q, too."""
    tensors = [rand(B, n, heads, E, device=device).to(torch.float8_e4m3fn) for n, heads in ((5, H), (11, 2), (11, 2))]
    descales = [torch.rand(B, 2, device=device) + 0.5 for _ in tensors]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    out, lse = flash_attn_3.flash_attn_func(*tensors, causal=True, **names, return_attn_probs=True)
    assert torch.equal(out, flash_attn_3.flash_attn_func(*tensors, causal=True, **names))

    of_heads = names | {"q_descale": descales[0].repeat_interleave(H // 2, 1)}
    meaning = {"causal": True, "align": "bottom_right", "out_dtype": torch.bfloat16, "return_lse": True}
    same, same_lse = flash_ext.attention(*(t.transpose(1, 2) for t in tensors), **meaning, **of_heads)
    assert torch.equal(out, same.transpose(1, 2))
    assert torch.equal(lse, same_lse)

    factors = [
        d.repeat_interleave(t.shape[2] // 2, 1)[:, None, :, None] for d, t in zip(descales, tensors, strict=True)
    ]
    wide = [(t.float() * f).to(torch.bfloat16) for t, f in zip(tensors, factors, strict=True)]
    true, true_lse = flash_attn_3.flash_attn_func(*wide, causal=True, return_attn_probs=True)
    close = {"rtol": 2**-4, "atol": 2**-4 * float(wide[2].abs().max())}  # probabilities may be of e4m3
    torch.testing.assert_close(out, true, **close)
    torch.testing.assert_close(lse, true_lse, rtol=1e-2, atol=1e-2)
    cu_q, cu_k = (torch.arange(B + 1, dtype=torch.int32, device=device) * n for n in (5, 11))
    rows = [t.flatten(0, 1) for t in tensors]
    packed = flash_attn_3.flash_attn_varlen_func(*rows, cu_q, cu_k, 5, 11, causal=True, **names)
    largest = float(wide[2].abs().max())  # packed calls are dequantised
    torch.testing.assert_close(packed.unflatten(0, (B, 5)), true, rtol=2**-6, atol=2**-8 * largest)


@pytest.mark.parametrize("name", OPTIONS)
def test_packed(name: str, device: str) -> None:
    given, meaning = OPTIONS[name]
    cu_q, cu_k = (starts(lengths, device) for lengths in LENGTHS)
    made = {"dtype": DTYPE[device], "device": device}
    tensors = [rand(sum(LENGTHS[i]), heads, E, **made) for i, heads in ((0, H), (1, 2), (1, 2))]
    function = ask(flash_attn_3.flash_attn_varlen_func, given | HINTS, cu_q, cu_k, max(LENGTHS[0]), max(LENGTHS[1]))
    compare(function, lambda *t: packed_truth(*t, LENGTHS, **meaning), tensors)


def test_rows_in_use(device: str) -> None:
    used = (2, 0, 7), (3, 6, 0)
    rows = [[start + i for start, n in zip((0, 5, 5), used[0], strict=True) for i in range(n)]]
    rows += [[start + i for start, n in zip((0, 4, 10), used[1], strict=True) for i in range(n)]]
    cu_q, cu_k = (starts(lengths, device) for lengths in LENGTHS)
    in_use = {"seqused_q": ints(used[0], device), "seqused_k": ints(used[1], device)}

    def truth(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = packed_truth(q[rows[0]], k[rows[1]], v[rows[1]], used, causal=True)
        at = torch.tensor(rows[0], device=device)
        whole = torch.full((H, len(q)), -torch.inf, dtype=lse.dtype, device=device).index_copy(1, at, lse)
        return torch.zeros_like(q).index_copy(0, at, out), whole

    made = {"dtype": DTYPE[device], "device": device}
    tensors = [rand(sum(LENGTHS[i]), heads, E, **made) for i, heads in ((0, H), (1, 2), (1, 2))]
    function = ask(flash_attn_3.flash_attn_varlen_func, in_use | {"causal": True}, cu_q, cu_k, 7, 6)
    compare(function, truth, tensors)


def made_for(name: str, device: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call of caches.py, and the same as theirs."""
    options = {"causal": False} | (CACHES | MORE)[name] | more
    call = example(**options, dtype=torch.float32 if "fp8" in name else DTYPE[device], device=device)
    given = in_their_names(call)
    if "block_table" in given:
        given["page_table"] = given.pop("block_table")
    return call, given


def assert_close(got: Any, expected: Any, dtype: torch.dtype) -> None:
    for x, truth in zip(got, expected, strict=True):
        torch.testing.assert_close(x.cpu().double(), truth, **CLOSE[dtype], equal_nan=True)


@pytest.mark.parametrize("name", OF_CACHES)
def test_cache(name: str, device: str) -> None:
    call, given = made_for(name, device)
    caches = appended(call)
    expected = attended(call, *caches)
    out, lse, *rest = flash_attn_3.flash_attn_with_kvcache(**given, **HINTS, return_softmax_lse=True)
    assert rest == [None, None]
    assert_close((out, lse, call["key_cache"], call["value_cache"]), (*expected, *caches), out.dtype)


@pytest.mark.parametrize("name", [name for name in OF_CACHES if "fp8" not in name])
def test_cache_that_is_padded_left(name: str, device: str) -> None:
    call, given = made_for(name, device, lengths=(9, 3, 30))
    caches = appended(call)
    expected = padded_left(call, [4, 0, 30], caches)
    given["cache_leftpad"] = ints((4, 0, 30), device)
    out, lse, *_ = flash_attn_3.flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert_close((out, lse, call["key_cache"], call["value_cache"]), (*expected, *caches), out.dtype)


@pytest.mark.parametrize("added", [None, (3, 0, 2)])
@pytest.mark.parametrize("name", [name for name in OF_CACHES if "fp8" not in name and name != "nothing at all"])
def test_queries_and_new_rows_of_other_lengths(name: str, added: tuple[int, ...] | None, device: str) -> None:
    """Each sequence as in a call of its own, one behind the other, because they write to the same caches."""
    call, given = made_for(name, device, queries=4, **({} if added is None else {"added": 3}))
    caches, lengths = None if added else appended(call), (4, 0, 1)
    outs, lses = [], []
    for b, queries in enumerate(lengths):
        alone = call | {"query": call["query"][b : b + 1, :queries]}
        alone |= {n: call[n][b : b + 1] for n in ("cache_seqlens", "block_table") if n in call}
        if "key" in call:
            alone |= {n: call[n][b : b + 1, : added[b] if added else None] for n in ("key", "value")}
        if "block_table" not in call:
            alone["cache_batch_index"] = call.get("cache_batch_index", torch.arange(3))[b : b + 1]
        if added:
            caches = appended(alone | dict(zip(("key_cache", "value_cache"), caches or (), strict=False)))
        out, lse = attended(alone, *caches)
        outs.append(out[0])
        lses.append(lse[0])
    given["q"] = torch.cat([given["q"][b, :queries] for b, queries in enumerate(lengths)])
    given |= {"cu_seqlens_q": starts(lengths, device), "max_seqlen_q": 4}
    if added:
        given |= {n: torch.cat([given[n][b, :rows] for b, rows in enumerate(added)]) for n in ("k", "v")}
        given["cu_seqlens_k_new"] = starts(added, device)
    out, lse, *_ = flash_attn_3.flash_attn_with_kvcache(**given, return_softmax_lse=True)
    got = (out, lse, call["key_cache"], call["value_cache"])
    assert_close(got, (torch.cat(outs), torch.cat(lses, -1), *caches), out.dtype)


def test_positions_that_are_not_the_lengths(device: str) -> None:
    """`rotary_seqlens` moves the angles: as tables that are moved."""
    _, given = made_for("rotary", device, lengths=(9, 9, 9))
    caches = [given[name].clone() for name in ("k_cache", "v_cache")]
    got = flash_attn_3.flash_attn_with_kvcache(**given, rotary_seqlens=ints((4, 4, 4), device))
    moved = {name: given[name].roll(5, 0) for name in ("rotary_cos", "rotary_sin")}
    moved |= {"k_cache": caches[0], "v_cache": caches[1]}
    expected = flash_attn_3.flash_attn_with_kvcache(**given | moved)
    close = CLOSE[got.dtype] | {"equal_nan": True}
    torch.testing.assert_close(got, expected, **close)
    torch.testing.assert_close(given["k_cache"], caches[0], **close)


def test_pages_of_slots(device: str) -> None:
    _, given = made_for("pages", device)
    expected = flash_attn_3.flash_attn_with_kvcache(**given)
    table, at = given["page_table"], ints((2, 0, 1), device)
    by_slot = {"page_table": table[at.long().argsort()], "cache_batch_idx": at}
    assert torch.equal(flash_attn_3.flash_attn_with_kvcache(**given | by_slot), expected)


def test_parts_are_joined(device: str) -> None:
    q, k, v = (rand(B, n, H, E, dtype=torch.float32, device=device) for n in (5, 12, 12))
    parts = [
        flash_attn_3.flash_attn_func(q, k[:, i : i + 4], v[:, i : i + 4], return_attn_probs=True) for i in (0, 4, 8)
    ]
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, lse = flash_attn_3.flash_attn_combine(outs, lses)
    expected, expected_lse = flash_attn_3.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse.transpose(1, 2))
    place = torch.empty_like(out, dtype=torch.bfloat16)
    assert flash_attn_3.flash_attn_combine(outs, lses, place)[0] is place and torch.equal(place, out.bfloat16())
    assert flash_attn_3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0].dtype == torch.float16
    for parts in (1, 3):  # those that saw nothing count for nothing, whatever they hold
        empty = lses[:parts].clone()
        empty[0, 0] = -torch.inf
        held = outs[:parts].clone()
        held[0, 0] = torch.nan
        out, lse = flash_attn_3.flash_attn_combine(held, empty)
        if parts == 1:
            assert not out[0].any() and bool((lse[0] == -torch.inf).all())
        else:
            torch.testing.assert_close(out[0], flash_attn_3.flash_attn_combine(outs[1:], lses[1:])[0][0])
        torch.testing.assert_close(out[1:], flash_attn_3.flash_attn_combine(outs[:parts], lses[:parts])[0][1:])
    assert flash_attn_3.get_scheduler_metadata(B, 5, 12, H, H, E, ints([12] * B)) is None


X, CACHE, ROWS = torch.zeros(2, 3, 4, 8), torch.zeros(2, 16, 4, 8), torch.zeros(6, 4, 8)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "qv": (lambda: flash_attn_3.flash_attn_func(X, X, X, qv=X), r"qv is given, which flash_ext does not have"),
    "chunk": (lambda: flash_attn_3.flash_attn_func(X, X, X, attention_chunk=4), r"attention_chunk is given"),
    "descale": (
        lambda: flash_attn_3.flash_attn_varlen_func(*[ROWS] * 3, *[ints([0, 6])] * 2, 6, 6, k_descale=X[:, 0, :, 0]),
        r"k_descale is given beside a key of torch\.float32; only torch\.float8_e4m3fn has descales",
    ),
    "descale of a cache": (
        lambda: flash_attn_3.flash_attn_with_kvcache(X, CACHE, CACHE, cache_seqlens=3, q_descale=X[:, 0, :, 0]),
        r"q_descale is given, which flash_ext does not have",
    ),
    "heads": (
        lambda: flash_attn_3.flash_attn_qkvpacked_func(X, num_heads_q=3),
        r"num_heads_q is 3; for qkv of shape \(2, 3, 4, 8\) it must be the number of query heads",
    ),
    "lengths": (lambda: flash_attn_3.flash_attn_with_kvcache(X, CACHE, CACHE, X, X), r"cache_seqlens is None; with k"),
    "longest": (
        lambda: flash_attn_3.flash_attn_with_kvcache(ROWS, CACHE, CACHE, cu_seqlens_q=ints([0, 2, 6])),
        r"max_seqlen_q is None; with cu_seqlens_q",
    ),
    "fp8": (
        lambda: flash_attn_3.flash_attn_with_kvcache(
            ROWS, *[CACHE.to(torch.float8_e4m3fn)] * 2, cu_seqlens_q=ints([0, 2, 6]), max_seqlen_q=4
        ),
        r"k_cache is torch.float8_e4m3fn; with cu_seqlens_q",
    ),
    "rotary": (
        lambda: flash_attn_3.flash_attn_with_kvcache(
            ROWS, CACHE, CACHE, cache_seqlens=3, cu_seqlens_q=ints([0, 2, 6]), max_seqlen_q=4, rotary_cos=X[0, :, 0]
        ),
        r"rotary_cos is given without k, v or rotary_sin",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_sentence(name: str) -> None:
    call, pattern = WRONG[name]
    with pytest.raises(flash_ext.AttentionError, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)
