"""Promise: `flash_ext.flash_attn` computes what FlashAttention's interface means, forward and backward, and programs
that import `flash_attn` run with it, unchanged.

tests/foreign/flash_attention.py runs that project's own tests against it.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caches import HEADS, appended, attended, example, ints
from flash_attn_calls import (
    ASKED,
    CACHES,
    CLOSE,
    DTYPE,
    LENGTHS,
    B,
    E,
    H,
    asked,
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
from flash_ext import flash_attn
from flash_ext.flash_attn import bert_padding
from flash_ext.flash_attn.layers import rotary

Error = flash_ext.AttentionError


@pytest.mark.parametrize("name, slopes", ASKED)
def test_dense(name: str, slopes: str | None, device: str) -> None:
    given, meaning = asked(name, slopes, device)
    made = {"dtype": DTYPE[device], "device": device}

    def ask(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: function(*tensors, return_attn_probs=True, **given)

    for queries, keys in ((9, 9), (5, 11), (11, 5)):
        q, k, v = (rand(B, n, heads, E, **made) for n, heads in ((queries, H), (keys, 2), (keys, 2)))
        compare(ask(flash_attn.flash_attn_func), lambda *t: dense_truth(*t, **meaning), [q, k, v])
        kv = torch.stack((k, v), 2)
        packed_truth = lambda q, kv: dense_truth(q, *kv.unbind(2), **meaning)  # noqa: E731
        compare(ask(flash_attn.flash_attn_kvpacked_func), packed_truth, [q, kv])
    qkv = rand(B, 9, 3, H, E, **made)
    compare(ask(flash_attn.flash_attn_qkvpacked_func), lambda x: dense_truth(*x.unbind(2), **meaning), [qkv])


@pytest.mark.parametrize("name, slopes", ASKED)
def test_packed(name: str, slopes: str | None, device: str) -> None:
    given, meaning = asked(name, slopes, device)
    meaning = {"slopes" if key == "alibi_slopes" else key: value for key, value in meaning.items()}
    made = {"dtype": DTYPE[device], "device": device}
    cu_q, cu_k = (starts(lengths, device) for lengths in LENGTHS)
    sizes = (cu_q, cu_k, max(LENGTHS[0]), max(LENGTHS[1]))
    q, k, v = (rand(sum(LENGTHS[i]), heads, E, **made) for i, heads in ((0, H), (1, 2), (1, 2)))

    def ask(function: Callable[..., Any], *sizes: Any) -> Callable[..., Any]:
        return lambda *tensors: function(*tensors, *sizes, return_attn_probs=True, **given)

    def truth(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return packed_truth(q, k, v, LENGTHS, **meaning)

    compare(ask(flash_attn.flash_attn_varlen_func, *sizes), truth, [q, k, v])
    kv_function = ask(flash_attn.flash_attn_varlen_kvpacked_func, *sizes)
    compare(kv_function, lambda q, kv: truth(q, *kv.unbind(1)), [q, torch.stack((k, v), 1)])
    qkv_function = ask(flash_attn.flash_attn_varlen_qkvpacked_func, cu_q, max(LENGTHS[0]))
    same = (LENGTHS[0], LENGTHS[0])
    qkv = rand(sum(LENGTHS[0]), 3, H, E, **made)
    compare(qkv_function, lambda x: packed_truth(*x.unbind(1), same, **meaning), [qkv])


def test_dropout_drops_what_its_map_says(device: str) -> None:
    """Padded and packed alike."""
    q, k, v = (rand(B, n, H, E, dtype=DTYPE[device], device=device) for n in (6, 8, 8))
    torch.manual_seed(5)
    rng_state = torch.ops.flash_ext.draw_rng_state(q, k, v)
    keep = torch.ops.flash_ext.dropout_mask(rng_state, 0.3, B * H, 6, 8).view(B, H, 6, 8)

    def seeded(function: Callable[..., Any], *sizes: Any) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            torch.manual_seed(5)
            return function(*tensors, *sizes, 0.3, return_attn_probs=True)

        return call

    compare(seeded(flash_attn.flash_attn_func), lambda *t: dense_truth(*t, dropout_p=0.3, keep=keep), [q, k, v])
    cu_q, cu_k = starts((6,) * B, device), starts((8,) * B, device)
    out, _, _ = seeded(flash_attn.flash_attn_varlen_func, cu_q, cu_k, 6, 8)(*(x.flatten(0, 1) for x in (q, k, v)))
    expected, _ = dense_truth(*(x.double() for x in (q, k, v)), dropout_p=0.3, keep=keep)
    torch.testing.assert_close(out.double(), expected.flatten(0, 1), **CLOSE[out.dtype])


@pytest.mark.parametrize("page", [1, 16, 48])
def test_packed_queries_attend_to_pages(page: int, device: str) -> None:
    """Without a gradient, also where a query wants one; lengths may be shorter than the room in pages."""
    call = example(page=page, dtype=DTYPE[device], device=device)
    lengths = tuple(call["cache_seqlens"].tolist())
    q = rand(12, HEADS.q, HEADS.dim, dtype=DTYPE[device], device=device).requires_grad_()
    cu_q, cu_k = starts((5, 0, 7), device), starts(lengths, device)
    out = flash_attn.flash_attn_varlen_func(
        q, call["key_cache"], call["value_cache"], cu_q, cu_k, 7, max(lengths), causal=True,
        block_table=call["block_table"],
    )  # fmt: skip
    assert not out.requires_grad
    caches = (
        torch.cat(
            [
                cache.double()[table.long()].flatten(0, 1)[:n]
                for table, n in zip(call["block_table"], lengths, strict=True)
            ]
        )
        for cache in (call["key_cache"], call["value_cache"])
    )
    expected, _ = packed_truth(q.detach().double(), *caches, ((5, 0, 7), lengths), causal=True)
    torch.testing.assert_close(out.double(), expected, **CLOSE[out.dtype])


# ---- caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [0, 1, 7])
@pytest.mark.parametrize("name", CACHES)
def test_cache(name: str, splits: int, device: str) -> None:
    call = example(**{"causal": False} | CACHES[name], dtype=DTYPE[device], device=device)
    caches = appended(call)
    expected = attended(call, *caches)
    given = in_their_names(call)
    given["q"].requires_grad_()  # it gets no gradient, and is no error
    got = flash_attn.flash_attn_with_kvcache(**given, num_splits=splits, return_softmax_lse=True)
    close = CLOSE[given["q"].dtype] | {"equal_nan": True}
    for x, truth in zip((*got, call["key_cache"], call["value_cache"]), (*expected, *caches), strict=True):
        torch.testing.assert_close(x.cpu().double(), truth, **close)
    assert not got[0].requires_grad and torch.equal(flash_attn.flash_attn_with_kvcache(**given), got[0])


@pytest.mark.parametrize("name", [name for name in CACHES if name != "pages"])
def test_cache_that_is_padded_left(name: str, device: str) -> None:
    call = example(**{"causal": False, "lengths": (9, 3, 30)} | CACHES[name], dtype=DTYPE[device], device=device)
    lengths = call["cache_seqlens"].tolist()
    first = [min(pad, n) for pad, n in zip((4, 0, 30), lengths, strict=True)]
    caches = appended(call)
    expected = padded_left(call, first, caches)
    out, lse = flash_attn.flash_attn_with_kvcache(
        **in_their_names(call), cache_leftpad=ints(first, device), return_softmax_lse=True
    )
    got = (out, lse, call["key_cache"], call["value_cache"])
    for x, truth in zip(got, (*expected, *caches), strict=True):
        torch.testing.assert_close(x.cpu().double(), truth, **CLOSE[out.dtype], equal_nan=True)


def test_one_length_for_all_and_none(device: str) -> None:
    call = in_their_names(example(lengths=(48, 48, 48), queries=2, causal=True, dtype=DTYPE[device], device=device))
    expected = flash_attn.flash_attn_with_kvcache(**call)
    for lengths in (48, None):
        assert torch.equal(flash_attn.flash_attn_with_kvcache(**call | {"cache_seqlens": lengths}), expected)
    padded = {"cache_leftpad": ints((0, 0, 0), device), "cache_seqlens": 48}
    torch.testing.assert_close(flash_attn.flash_attn_with_kvcache(**call | padded), expected)


@pytest.mark.gpu
def test_no_length_is_read_on_the_host(device: str) -> None:
    q, k = (rand(12, H, E, dtype=torch.bfloat16, device=device) for _ in "qk")
    cu = starts((5, 0, 7), device)
    call = in_their_names(example(causal=True, dtype=torch.bfloat16, added=2, queries=2, rotary=16, device=device))
    padded = {"cache_leftpad": ints((1, 0, 4), device)}

    def steps() -> None:
        flash_attn.flash_attn_varlen_func(q, k, k, cu, cu, 7, 7, causal=True)
        flash_attn.flash_attn_with_kvcache(**call)
        flash_attn.flash_attn_with_kvcache(**call | padded)

    steps()
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- the module ------------------------------------------------------------------------------------------------------


X, PACKED, CACHE = torch.zeros(2, 3, 4, 8), torch.zeros(6, 4, 8), torch.zeros(2, 16, 4, 8)
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "dimensions": (
        lambda: flash_attn.flash_attn_func(X[0], X, X),
        r"q has shape \(3, 4, 8\); it must be \(B, length, h",
    ),
    "heads": (lambda: flash_attn.flash_attn_func(X, X[:, :, :3], X), r"key"),
    "packed": (
        lambda: flash_attn.flash_attn_qkvpacked_func(X),
        r"qkv has shape \(2, 3, 4, 8\); it must be \(B, L, 3, heads, E\)",
    ),
    "two": (lambda: flash_attn.flash_attn_kvpacked_func(X, torch.zeros(2, 3, 3, 4, 8)), r"kv .* \(B, L, 2, heads, E\)"),
    "rows": (
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(PACKED, ints([0, 6]), 6),
        r"qkv has shape \(6, 4, 8\); it must be \(rows, 3, heads, E\)",
    ),
    "window": (lambda: flash_attn.flash_attn_func(X, X, X, window_size=(1,)), r"window_size has 1 entries; it must be"),
    "slopes": (
        lambda: flash_attn.flash_attn_func(X, X, X, alibi_slopes=torch.ones(3)),
        r"alibi_slopes of shape \(3,\)",
    ),
    "lengths": (
        lambda: flash_attn.flash_attn_with_kvcache(X, CACHE, CACHE, X, X),
        r"cache_seqlens is None; with k it must say where new rows go",
    ),
    "left": (
        lambda: flash_attn.flash_attn_with_kvcache(
            X, CACHE, CACHE, cache_seqlens=3, cache_leftpad=ints([0, 0]), block_table=ints([[0], [1]])
        ),
        r"cache_leftpad is given beside block_table",
    ),
    "rotary": (
        lambda: flash_attn.flash_attn_with_kvcache(
            X, CACHE, CACHE, cache_seqlens=3, cache_leftpad=ints([0, 0]), rotary_cos=X[0, :, 0], rotary_sin=X[0, :, 0]
        ),
        r"rotary_cos .* without key",
    ),
    "columns": (lambda: rotary.apply_rotary_emb(X, torch.ones(9, 5), torch.ones(9, 5)), r"cos has 5 columns"),
    "positions": (
        lambda: rotary.apply_rotary_emb(X, torch.ones(9, 4), torch.ones(9, 4), seqlen_offsets=7),
        r"cos has 9 positions; x has 3 rows from position 7 on",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_sentence(name: str) -> None:
    call, pattern = WRONG[name]
    with pytest.raises(Error, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_is_not_here_is_missing_by_name() -> None:
    for module, name in (("", "flash_attn_gpu"), (".bert_padding", "rearrange"), (".layers.rotary", "RotaryEmbedding")):
        with pytest.raises(AttributeError, match=name):
            getattr(importlib.import_module("flash_ext.flash_attn" + module), name)
    with pytest.raises(ModuleNotFoundError, match=r"flash_ext\.flash_attn\.ops"):
        importlib.import_module("flash_ext.flash_attn.ops.triton")


PROGRAM = """
import sys, flash_ext
assert "flash_ext.flash_attn" not in sys.modules  # it is imported when it is asked for
sys.modules["flash_attn"] = flash_ext.flash_attn

import torch, flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_with_kvcache
from flash_attn.layers.rotary import apply_rotary_emb

x = torch.randn(2, 6, 4, 8)
rows, indices, cu, longest, _ = unpad_input(x, torch.ones(2, 6, dtype=torch.bool))
out = pad_input(flash_attn_varlen_func(rows, rows, rows, cu, cu, longest, longest, causal=True), indices, 2, 6)
torch.testing.assert_close(out, flash_attn_func(x, x, x, causal=True))
assert tuple(int(n) for n in flash_attn.__version__.split("+")[0].split(".")) >= (2, 8)
"""


def test_a_program_runs_unchanged() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compile(device: str) -> None:
    torch._dynamo.reset()
    cu, x = starts((5, 0, 7), device), rand(12, 3, H, E, device=device)

    def step(x: Tensor) -> Tensor:
        out, lse, _ = flash_attn.flash_attn_varlen_qkvpacked_func(
            x, cu, 7, causal=True, window_size=(3, -1), return_attn_probs=True
        )
        return flash_attn.flash_attn_qkvpacked_func(x[None], window_size=(4, 4)).sum() + out.sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted = [x.clone().requires_grad_() for _ in range(2)]
    results = [call(leaf) for call, leaf in zip((step, compiled), wanted, strict=True)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(r, leaf)[0] for r, leaf in zip(results, wanted, strict=True)))


def test_every_public_function_says_what_it_takes() -> None:
    for module in (flash_attn, bert_padding, rotary):
        for name in module.__all__:
            assert re.search(r"\(.*\)", getattr(module, name).__doc__), name
