"""Promise: a wrong call is one sentence with the argument, the value seen and what is accepted; nothing is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_ext

sdpa, attention = flash_ext.scaled_dot_product_attention, flash_ext.attention
Error = flash_ext.AttentionError


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, K = t(2, 4, 5, 8), t(2, 4, 6, 8)
BOOL, INT, HALF, BF16, F64 = torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64
NAN, INF = float("nan"), float("inf")

# name: (call, exception, pattern of the sentence)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # shapes
    "query_1d": (lambda: sdpa(t(8), K, K), Error, r"query of shape \(8,\) has 1 dimensions?.*2 or more"),
    "key_1d": (lambda: sdpa(Q, t(8), K), Error, r"key of shape \(8,\) has 1 dimensions?.*2 or more"),
    "value_0d": (lambda: sdpa(Q, K, t()), Error, r"value of shape \(\) has 0 dimensions.*2 or more"),
    "head_dims": (lambda: sdpa(Q, t(2, 4, 6, 9), K), Error, r"key .*\(2, 4, 6, 9\).*9.*query has 8"),
    "lengths": (lambda: sdpa(Q, K, t(2, 4, 7, 8)), Error, r"value .*\(2, 4, 7, 8\).*7.*key has 6"),
    "shorter_value": (lambda: sdpa(Q, K, t(2, 4, 5, 8)), Error, r"value .*5.*key has 6"),
    "value_of_one": (lambda: sdpa(Q, K, t(2, 4, 1, 8)), Error, r"value .*1.*key has 6"),
    "batches": (lambda: sdpa(Q, t(3, 4, 6, 8), t(3, 4, 6, 8)), Error, r"\(2, 4, 5, 8\).*\(3, 4, 6, 8\).*broadcast"),
    "value_batch": (lambda: sdpa(Q, K, t(3, 4, 6, 8)), Error, r"query, key and value.*\(3, 4, 6, 8\).*broadcast"),
    "heads": (lambda: sdpa(Q, t(2, 2, 6, 8), t(2, 2, 6, 8)), Error, r"\(2, 2, 6, 8\).*broadcast"),
    "native_3d": (lambda: attention(t(4, 5, 8), K, K), Error, r"query.*\(4, 5, 8\).*\(B, H|query.*3 dimensions.*4"),
    "native_5d": (lambda: attention(Q, t(1, 2, 4, 6, 8), K), Error, r"key.*\(1, 2, 4, 6, 8\)|key.*5 dimensions.*4"),
    # dtypes and devices
    "two_dtypes": (lambda: sdpa(Q, K.half(), K), Error, r"torch\.float32, torch\.float16 and torch\.float32"),
    "value_dtype": (lambda: sdpa(Q, K, K.double()), Error, r"torch\.float32, torch\.float32 and torch\.float64"),
    "integers": (lambda: sdpa(Q.int(), K.int(), K.int()), Error, r"torch\.int32.*torch\.float16, torch\.bfloat16"),
    "complex": (lambda: sdpa(*(x.to(torch.complex64) for x in (Q, K, K))), Error, r"torch\.complex64.*torch\.float32"),
    "float8": (lambda: sdpa(*(x.to(torch.float8_e4m3fn) for x in (Q, K, K))), Error, r"torch\.float8_e4m3fn"),
    "bools": (lambda: sdpa(Q > 0, K > 0, K > 0), Error, r"torch\.bool.*torch\.float32"),
    "devices": (lambda: sdpa(Q, K.to("meta"), K), Error, r"key is on meta.*query is on cpu"),
    "mask_device": (lambda: sdpa(Q, K, K, t(5, 6).to("meta")), Error, r"attn_mask is on meta.*query is on cpu"),
    # masks
    "mask_shape": (lambda: sdpa(Q, K, K, t(5, 7)), Error, r"attn_mask of shape \(5, 7\).*\(2, 4, 5, 6\)"),
    "mask_heads": (lambda: sdpa(Q, K, K, t(3, 5, 6, dtype=BOOL)), Error, r"attn_mask of shape \(3, 5, 6\) does not"),
    "mask_1d": (lambda: sdpa(Q, K, K, t(5)), Error, r"attn_mask of shape \(5,\) does not broadcast"),
    "mask_enlarges": (lambda: sdpa(Q[:1], K[:1], K[:1], t(2, 1, 1, 1)), Error, r"attn_mask of shape \(2, 1, 1, 1\)"),
    "mask_too_deep": (lambda: sdpa(Q, K, K, t(1, 2, 4, 5, 6)), Error, r"attn_mask of shape \(1, 2, 4, 5, 6\)"),
    "mask_dtype": (lambda: sdpa(Q, K, K, t(5, 6, dtype=INT)), Error, r"attn_mask is of torch\.int64.*torch\.bool"),
    "mask_half": (lambda: sdpa(Q, K, K, t(5, 6, dtype=HALF)), Error, r"attn_mask is of torch\.float16.*torch\.float32"),
    "mask_and_causal": (lambda: sdpa(Q, K, K, t(5, 6), is_causal=True), Error, r"attn_mask.*is_causal"),
    "bool_and_causal": (lambda: sdpa(Q, K, K, t(5, 6, dtype=BOOL), 0.0, True), Error, r"attn_mask.*is_causal"),
    "native_mask_float": (lambda: attention(Q, K, K, mask=t(5, 6)), Error, r"mask is of torch\.float32.*torch\.bool"),
    "native_mask": (lambda: attention(Q, K, K, mask=t(4, 6, dtype=BOOL)), Error, r"mask of shape \(4, 6\) does not"),
    "native_bias_bool": (lambda: attention(Q, K, K, bias=t(5, 6, dtype=BOOL)), Error, r"bias is of torch\.bool"),
    "native_bias": (lambda: attention(Q, K, K, bias=t(2, 3, 5, 6)), Error, r"bias of shape \(2, 3, 5, 6\) does not"),
    "bias_wide": (lambda: attention(Q, K, K, bias=t(5, 6, dtype=F64)), Error, r"bias is of torch\.float64"),
    "bias_other_half": (
        lambda: attention(Q.half(), K.half(), K.half(), bias=t(5, 6, dtype=BF16)),
        Error,
        r"bias is of torch\.bfloat16.*torch\.float32 or query's torch\.float16",
    ),
    # grouped heads
    "gqa_key": (lambda: sdpa(Q, t(2, 3, 6, 8), K, enable_gqa=True), Error, r"key has 3 heads.*divide.*4"),
    "gqa_value": (lambda: sdpa(Q, K, t(2, 3, 6, 8), enable_gqa=True), Error, r"value has 3 heads.*divide.*4"),
    "gqa_more": (lambda: sdpa(Q, t(2, 8, 6, 8), t(2, 8, 6, 8), enable_gqa=True), Error, r"key has 8 heads.*divide"),
    "gqa_2d": (lambda: sdpa(t(5, 8), t(6, 8), t(6, 8), enable_gqa=True), Error, r"enable_gqa.*2 dim.*3 or more"),
    "gqa_2d_key": (lambda: sdpa(t(4, 5, 8), t(6, 8), t(2, 6, 8), enable_gqa=True), Error, r"enable_gqa.*key has 2 dim"),
    "gqa_no_heads": (lambda: sdpa(Q, t(2, 0, 6, 8), t(2, 0, 6, 8), enable_gqa=True), Error, r"key has 0 heads"),
    "native_heads": (lambda: attention(Q, t(2, 3, 6, 8), t(2, 3, 6, 8)), Error, r"key has 3 heads.*divide.*4"),
    # numbers
    "dropout_negative": (lambda: sdpa(Q, K, K, dropout_p=-0.1), Error, r"dropout_p is -0\.1.*0 to 1"),
    "dropout_large": (lambda: sdpa(Q, K, K, dropout_p=1.5), Error, r"dropout_p is 1\.5.*0 to 1"),
    "dropout_nan": (lambda: sdpa(Q, K, K, dropout_p=NAN), Error, r"dropout_p is nan.*0 to 1"),
    "scale_nan": (lambda: sdpa(Q, K, K, scale=NAN), Error, r"scale is nan.*finite"),
    "scale_inf": (lambda: sdpa(Q, K, K, scale=-INF), Error, r"scale is -inf.*finite"),
    "softcap_negative": (lambda: attention(Q, K, K, softcap=-1.0), Error, r"softcap is -1.*not negative"),
    "softcap_inf": (lambda: attention(Q, K, K, softcap=INF), Error, r"softcap is inf.*finite"),
    "softcap_nan": (lambda: attention(Q, K, K, softcap=NAN), Error, r"softcap is nan.*finite"),
    "window_left": (lambda: attention(Q, K, K, window=(-1, 3)), Error, r"window.*-1.*left.*not negative"),
    "window_right": (lambda: attention(Q, K, K, window=(3, -2)), Error, r"window.*-2.*right.*not negative"),
    "window_short": (lambda: attention(Q, K, K, window=(3,)), TypeError, r"window is \(3,\).*\(left, right\)"),
    "align": (lambda: attention(Q, K, K, align="center"), Error, r"align.*center.*top_left.*bottom_right"),
    "alibi_shape": (lambda: attention(Q, K, K, alibi_slopes=t(3)), Error, r"alibi_slopes of shape \(3,\).*\(4,\)"),
    "alibi_batch": (
        lambda: attention(Q, K, K, alibi_slopes=t(3, 4)),
        Error,
        r"alibi_slopes of shape \(3, 4\).*\(2, 4\)",
    ),
    "alibi_dtype": (
        lambda: attention(Q, K, K, alibi_slopes=t(4, dtype=HALF)),
        Error,
        r"alibi_slopes is of torch\.float16",
    ),
    "backend": (lambda: flash_ext.use_backend("turbo").__enter__(), Error, r"turbo.*cpu"),
    # wrong types
    "query_list": (lambda: sdpa([[1.0]], K, K), TypeError, r"query is of type list.*torch\.Tensor"),
    "key_none": (lambda: sdpa(Q, None, K), TypeError, r"key is None.*torch\.Tensor"),
    "scale_text": (lambda: sdpa(Q, K, K, scale="big"), TypeError, r"scale.*str"),
    "window_number": (lambda: attention(Q, K, K, window=3), TypeError, r"window is 3;.*\(left, right\)"),
    "mask_list": (lambda: attention(Q, K, K, mask=[True]), TypeError, r"mask is of type list.*torch\.Tensor"),
    "unknown_option": (lambda: attention(Q, K, K, is_causal=True), TypeError, r"is_causal"),
}


def test_there_are_enough() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_sentence(name: str) -> None:
    call, exception, pattern = CASES[name]
    state = torch.get_rng_state()
    with pytest.raises(exception) as caught:
        call()
    message = str(caught.value)
    assert re.search(pattern, message, re.DOTALL), message
    if exception is Error:
        assert type(caught.value) is Error
        assert "\n" not in message and len(message) < 400, message
    assert torch.equal(state, torch.get_rng_state())


def test_error_is_what_pytorch_programs_catch() -> None:
    assert issubclass(Error, RuntimeError) and issubclass(Error, ValueError)


def test_wrong_calls_leave_no_memory_behind() -> None:
    """Nothing computed, nothing leaked: no tensor survives a failed call."""
    import gc

    def live() -> int:
        gc.collect()
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    before = live()
    for _ in range(20):
        with pytest.raises(Error):
            sdpa(t(2, 4, 5, 8).requires_grad_(), K, K, t(5, 7))
    assert live() <= before


@pytest.mark.parametrize(
    "saved", ["out", "lse", "grad_out", "grad_lse", "rng_state"], ids=lambda name: f"backward_{name}"
)
def test_backward_op_checks_what_it_is_given(saved: str) -> None:
    ops = torch.ops.flash_ext
    out, lse, state = ops.attention(Q, K, K, dropout_p=0.5, return_lse=True)
    arguments = {"out": out, "lse": lse, "grad_out": out, "grad_lse": lse, "rng_state": state}
    arguments[saved] = torch.zeros(3, dtype=arguments[saved].dtype)
    with pytest.raises(RuntimeError, match=rf"{saved} of shape \(3,\)"):
        ops.attention_backward(query=Q, key=K, value=K, dropout_p=0.5, **arguments)
