"""Promise: a wrong call on a GPU is one sentence: no CUDA error, no memory, no random number; the next call works."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import check, make_inputs
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

OPS = torch.ops.flash_ext
Make = Callable[..., Tensor]
Q, K = (2, 4, 5, 8), (2, 4, 6, 8)


def sdpa(make: Make, query: tuple[int, ...] = Q, key: tuple[int, ...] = K, value: Any = None, **options: Any) -> Any:
    return flash_ext.scaled_dot_product_attention(make(*query), make(*key), make(*(value or key)), **options)


def attention(
    make: Make, query: tuple[int, ...] = Q, key: tuple[int, ...] = K, value: Any = None, **options: Any
) -> Any:
    return flash_ext.attention(make(*query), make(*key), make(*(value or key)), **options)


# name: (call, given a function that makes a tensor on the device; pattern of the sentence)
CASES: dict[str, tuple[Callable[[Make], Any], str]] = {
    "head_dim": (lambda t: sdpa(t, key=(2, 4, 6, 9)), r"key .*\(2, 4, 6, 9\)"),
    "lengths": (lambda t: sdpa(t, value=(2, 4, 7, 8)), r"value .*7.*key has 6"),
    "shorter_value": (lambda t: sdpa(t, value=(2, 4, 5, 8)), r"value .*5.*key has 6"),
    "batches": (lambda t: sdpa(t, key=(3, 4, 6, 8)), r"broadcast"),
    "groups": (lambda t: attention(t, key=(2, 3, 6, 8)), r"key has 3 heads.*divide.*4"),
    "mask_shape": (lambda t: sdpa(t, attn_mask=t(5, 7)), r"attn_mask of shape \(5, 7\)"),
    "mask_dtype": (lambda t: sdpa(t, attn_mask=t(5, 6).long()), r"attn_mask"),
    "bias_dtype": (lambda t: attention(t, bias=t(5, 6).double()), r"bias is of torch\.float64"),
    "mask_and_causal": (lambda t: sdpa(t, attn_mask=t(5, 6), is_causal=True), r"is_causal"),
    "dtypes": (lambda t: flash_ext.attention(t(*Q).half(), t(*K), t(*K)), r"torch\.float16.*torch\.float32"),
    "dtype": (lambda t: flash_ext.attention(t(*Q).long(), t(*K).long(), t(*K).long()), r"torch\.int64"),
    "key_on_the_cpu": (lambda t: flash_ext.attention(t(*Q), t(*K).cpu(), t(*K)), r"cpu"),
    "bias_on_the_cpu": (lambda t: attention(t, bias=torch.zeros(5, 6)), r"cpu"),
    "slopes": (lambda t: attention(t, alibi_slopes=t(3)), r"alibi_slopes of shape \(3,\)"),
    "dropout": (lambda t: sdpa(t, dropout_p=1.5), r"dropout_p is 1\.5"),
    "dropout_and_mask": (lambda t: sdpa(t, attn_mask=t(5, 7), dropout_p=0.5), r"attn_mask of shape"),
    "scale": (lambda t: sdpa(t, scale=float("nan")), r"scale is nan"),
    "softcap": (lambda t: attention(t, softcap=-1.0), r"softcap is -1"),
    "window": (lambda t: attention(t, window=(-1, 3)), r"window.*-1"),
    "rng_state": (
        lambda t: OPS.attention_with_rng_state(t(*Q), t(*K), t(*K), t(3).long(), dropout_p=0.5),
        r"rng_state of shape \(3,\)",
    ),
}


@pytest.fixture
def make(device: str) -> Make:
    return lambda *shape: torch.zeros(shape, device=device, requires_grad=True)


@pytest.mark.parametrize("name", CASES)
def test_sentence(name: str, make: Make, device: str, backend: str) -> None:
    call, pattern = CASES[name]
    gc.collect()
    torch.cuda.synchronize()
    memory, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    with pytest.raises(RuntimeError, match=pattern) as caught:  # an op called through torch.ops raises the plain type
        call(make)
    message = str(caught.value)
    assert "CUDA" not in message and "\n" not in message and len(message) < 400, message
    del caught
    gc.collect()
    torch.cuda.synchronize()  # a fault on the device would show here
    assert torch.cuda.memory_allocated() == memory
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_the_next_call_works(make: Make, device: str, backend: str) -> None:
    inputs = make_inputs((1, 2, 70, 32), (1, 2, 90, 32), dtype=torch.bfloat16, device=device)
    for call, _ in CASES.values():
        with pytest.raises(RuntimeError):
            call(make)
    check(flash_ext.attention, inputs, {"causal": True})


@pytest.mark.parametrize("saved", ["out", "lse", "grad_out", "grad_lse", "rng_state"])
def test_backward_checks_what_it_is_given(saved: str, make: Make, device: str, backend: str) -> None:
    q, k = make(*Q).detach(), make(*K).detach()
    out, lse, state = OPS.attention(q, k, k, dropout_p=0.5, return_lse=True)
    arguments = {"out": out, "lse": lse, "grad_out": out, "grad_lse": lse, "rng_state": state}
    arguments[saved] = torch.zeros(3, dtype=arguments[saved].dtype, device=device)
    memory = torch.cuda.memory_allocated()
    with pytest.raises(RuntimeError, match=rf"{saved} of shape \(3,\)"):
        OPS.attention_backward(query=q, key=k, value=k, dropout_p=0.5, **arguments)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= memory


def test_a_backend_that_is_not_for_the_gpu(make: Make, device: str, backend: str) -> None:
    with flash_ext.use_backend("cpu"), pytest.raises(flash_ext.AttentionError, match="the tensors are not on the CPU"):
        attention(make)


def test_the_kernels_refuse_tensors_of_the_cpu(device: str, backend: str) -> None:
    inputs = make_inputs(Q, K)
    with pytest.raises(flash_ext.AttentionError, match=f"{backend} refuses: the tensors are not on a CUDA device"):
        flash_ext.attention(**inputs)
