"""Promise: flash_ext is one of the flash attentions that PyTorch's registry can make active, and then what
``sdpa_kernel(FLASH_ATTENTION)`` means."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import make_inputs
from torch import Tensor
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import flash_ext

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="this torch has no registry of flash attentions"
)
FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    fastpath = torch.backends.mha.get_fastpath_enabled()
    yield
    flash_ext.disable()
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    assert torch.backends.mha.get_fastpath_enabled() == fastpath
    assert calls_of(call) == 0


def qkv(device: str = "cpu") -> list[Tensor]:
    return [t.requires_grad_() for t in make_inputs((2, 3, 9, 8), (2, 3, 11, 8), device=device).values()]


def call(device: str = "cpu") -> Tensor:
    return F.scaled_dot_product_attention(*qkv(device))


def calls_of(work: Callable[[], object]) -> int:
    before = flash_ext.enabled_calls()
    work()
    return flash_ext.enabled_calls() - before


def in_kernels(*kernels: SDPBackend, device: str = "cpu") -> int:
    with sdpa_kernel(list(kernels)):
        return calls_of(lambda: call(device))


def test_it_is_registered_and_not_active() -> None:
    assert "FLASH_EXT" in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None


def test_active_until_it_is_restored(device: str) -> None:
    attention.activate_flash_attention_impl("FLASH_EXT")
    assert attention.current_flash_attention_impl() == "FLASH_EXT"
    assert calls_of(lambda: call(device)) == 1
    attention.activate_flash_attention_impl("FLASH_EXT")  # again
    assert calls_of(lambda: call(device)) == 1
    attention.restore_flash_attention_impl()
    assert calls_of(lambda: call(device)) == 0


def test_it_is_what_a_choice_of_flash_means(device: str) -> None:
    attention.activate_flash_attention_impl("FLASH_EXT")
    assert in_kernels(FLASH, device=device) == 1
    assert in_kernels(FLASH, MATH, device=device) == 1
    left = flash_ext.enabled_calls().left
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first call of a process that is left says so
        assert in_kernels(MATH, device=device) == 0
    assert flash_ext.enabled_calls().left == left + 1


def test_its_numbers(device: str) -> None:
    query, key, value = qkv(device)
    ours = flash_ext.scaled_dot_product_attention(query, key, value)
    grads = torch.autograd.grad(ours.sum(), (query, key, value))
    attention.activate_flash_attention_impl("FLASH_EXT")
    with sdpa_kernel(FLASH):
        out = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(out, ours)
    for grad, expected in zip(torch.autograd.grad(out.sum(), (query, key, value)), grads, strict=True):
        assert torch.equal(grad, expected)


def test_enable_and_the_registry_end_apart() -> None:
    flash_ext.enable()
    attention.activate_flash_attention_impl("FLASH_EXT")
    flash_ext.disable()
    assert in_kernels(FLASH) == 1
    with flash_ext.enable():
        attention.restore_flash_attention_impl()
        assert calls_of(call) == 1
        assert in_kernels(FLASH) == 0
    assert calls_of(call) == 0


def test_another_one_takes_its_place() -> None:
    attention.register_flash_attention_impl("another, of a test", register_fn=lambda: None)
    attention.activate_flash_attention_impl("FLASH_EXT")
    attention.activate_flash_attention_impl("another, of a test")
    assert calls_of(call) == 0


def test_a_compiled_function_follows() -> None:
    function = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    query, key, value = (t.detach() for t in qkv())
    with sdpa_kernel(FLASH):
        function(query, key, value)
    attention.activate_flash_attention_impl("FLASH_EXT")
    with sdpa_kernel(FLASH):
        assert calls_of(lambda: function(query, key, value)) >= 1  # tracing calls it, too
    attention.restore_flash_attention_impl()
    with sdpa_kernel(FLASH):
        assert calls_of(lambda: function(query, key, value)) == 0


def test_a_checkpoint_computes_again_as_it_did() -> None:
    query, key, value = qkv()
    attention.activate_flash_attention_impl("FLASH_EXT")
    with sdpa_kernel(FLASH):
        out = checkpoint(F.scaled_dot_product_attention, query, key, value, use_reentrant=False)
    attention.restore_flash_attention_impl()
    assert calls_of(lambda: out.sum().backward()) == 1
