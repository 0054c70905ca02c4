"""Promise: enable() reaches every caller of PyTorch's function, leaves alone what it must, and undoes itself."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import leaf, make_inputs, rand
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_earlier

import flash_ext


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    fastpath = torch.backends.mha.get_fastpath_enabled()
    yield
    flash_ext.disable()
    assert torch.backends.mha.get_fastpath_enabled() == fastpath


def calls_of(work: Callable[[], object]) -> int:
    before = flash_ext.enabled_calls()
    work()
    return flash_ext.enabled_calls() - before


def qkv(device: str, **options: object) -> list[Tensor]:
    return list(make_inputs((2, 3, 9, 8), (2, 3, 11, 8), device=device, **options).values())  # type: ignore[arg-type]


def unscripted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@functools.cache
def scripted() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A caller in C++: TorchScript's interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(unscripted)


CALLERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "functional": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "imported_earlier": lambda q, k, v: imported_earlier(q, k, v),
    "operator": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),
    "cpp": lambda q, k, v: scripted()(q, k, v),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("caller", CALLERS)
def test_reaches_every_caller(caller: str, requires_grad: bool, device: str) -> None:
    inputs = [t.requires_grad_(requires_grad) for t in qkv(device)]
    call = CALLERS[caller]
    assert calls_of(lambda: call(*inputs)) == 0
    with flash_ext.enable():
        assert calls_of(lambda: call(*inputs)) == 1
        assert torch.equal(call(*inputs), flash_ext.scaled_dot_product_attention(*inputs))
    assert calls_of(lambda: call(*inputs)) == 0


def test_right_where_pytorch_is_wrong(device: str) -> None:
    """Causal with a negative scale is NaN in PyTorch's CPU kernel."""
    inputs = [leaf(t) for t in qkv(device)]
    with flash_ext.enable():
        out = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=-0.5)
        grads = torch.autograd.grad(out.sum(), inputs)
    assert out.isfinite().all() and all(grad.isfinite().all() for grad in grads)


def test_gradients_and_options(device: str) -> None:
    inputs = [leaf(t) for t in (*qkv(device), rand(9, 11, device=device))]
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, scale=0.4).sin().sum(), inputs)
    with flash_ext.enable():
        got = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, scale=0.4).sin().sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_disable_and_idempotence(device: str) -> None:
    q, k, v = qkv(device)
    flash_ext.enable()
    flash_ext.enable()
    assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 1
    flash_ext.disable()
    assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 0
    flash_ext.disable()
    flash_ext.enable()
    assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 1


def test_contexts_nest(device: str) -> None:
    q, k, v = qkv(device)
    with flash_ext.enable():
        with flash_ext.enable():
            pass
        assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 1
        with pytest.raises(KeyError), flash_ext.enable():
            raise KeyError
        assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 1
    assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 0


@pytest.mark.parametrize("before", [True, False])
def test_fast_path_of_multihead_attention_is_restored(before: bool) -> None:
    original = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before)
    try:
        with flash_ext.enable():
            assert not torch.backends.mha.get_fastpath_enabled()
            with flash_ext.enable():
                pass
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(original)


def test_process_wide(device: str) -> None:
    q, k, v = qkv(device)
    counts: list[int] = []
    with flash_ext.enable():
        thread = threading.Thread(
            target=lambda: counts.append(calls_of(lambda: F.scaled_dot_product_attention(q, k, v)))
        )
        thread.start()
        thread.join()
    assert counts == [1]


@pytest.mark.parametrize("kind", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_sdpa_kernel_context_is_pytorchs(kind: SDPBackend) -> None:
    q, k, v = qkv("cpu")
    with sdpa_kernel(kind):
        expected = F.scaled_dot_product_attention(q, k, v)
    with flash_ext.enable():
        with sdpa_kernel(kind):
            assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 0
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
        assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 1


def test_sdpa_kernel_context_naming_all_is_pytorchs() -> None:
    """Any sdpa_kernel context asks for PyTorch's own backends, also one that lists them all."""
    q, k, v = qkv("cpu")
    kinds = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with flash_ext.enable(), sdpa_kernel(kinds):
        assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 0


def test_need_weights_stays_pytorchs(device: str) -> None:
    module = nn.MultiheadAttention(16, 2, batch_first=True).to(device)
    x = rand(2, 5, 16, device=device)
    expected = module(x, x, x, need_weights=True)
    with flash_ext.enable():
        assert calls_of(lambda: module(x, x, x, need_weights=True)) == 0
        torch.testing.assert_close(module(x, x, x, need_weights=True), expected)
        assert calls_of(lambda: module(x, x, x, need_weights=False)) == 1
        # Rows with no key, as docs/use/errors.md says: PyTorch's are NaN, ours are the projection of 0.
        nothing = torch.ones(x.shape[:2], dtype=torch.bool, device=device)
        assert module(x, x, x, key_padding_mask=nothing, need_weights=True)[0].isnan().all()
        out = module(x, x, x, key_padding_mask=nothing, need_weights=False)[0]
        torch.testing.assert_close(out, module.out_proj.bias.expand_as(out))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_pytorchs(device: str) -> None:
    """Those of the jagged layout run here: test_nested.py."""
    parts = [rand(2, n, 8, device=device) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided)
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    with flash_ext.enable():
        before = flash_ext.enabled_calls()
        got = F.scaled_dot_product_attention(nested, nested, nested)
        assert flash_ext.enabled_calls() == before
    for a, b in zip(got.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b)


def test_meta_tensors_are_pytorchs() -> None:
    q = torch.empty(2, 3, 9, 8, device="meta")
    with flash_ext.enable():
        assert calls_of(lambda: F.scaled_dot_product_attention(q, q, q)) == 0


class Wrapper(torch.Tensor):
    """A subclass with its own idea of an operator."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is F.scaled_dot_product_attention:
            return "its own"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensor_subclasses_keep_their_say(device: str) -> None:
    q = rand(2, 3, 9, 8, device=device).as_subclass(Wrapper)
    with flash_ext.enable():
        assert F.scaled_dot_product_attention(q, q, q) == "its own"


def test_dispatch_subclass_is_pytorchs() -> None:
    """A wrapper subclass with __torch_dispatch__ sees PyTorch's operators, not ours."""
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = rand(2, 3, 9, 8), rand(2, 3, 9, 8)
    expected = F.scaled_dot_product_attention(TwoTensor(a, b), TwoTensor(a, b), TwoTensor(a, b))
    with flash_ext.enable():
        got = F.scaled_dot_product_attention(TwoTensor(a, b), TwoTensor(a, b), TwoTensor(a, b))
    torch.testing.assert_close(got.a, expected.a)
    torch.testing.assert_close(got.b, expected.b)


def test_under_vmap_and_grad(device: str) -> None:
    q, k, v = make_inputs((4, 2, 3, 9, 8), (4, 2, 3, 11, 8), device=device).values()

    def loss(x: Tensor) -> Tensor:
        return torch.vmap(F.scaled_dot_product_attention)(x, k, v).sin().sum()

    # PyTorch's memory-efficient backward, its choice on CUDA, raises for these 9 queries.
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.vmap(F.scaled_dot_product_attention)(q, k, v)
        expected_grad = torch.func.grad(loss)(q)
    with flash_ext.enable():
        assert calls_of(lambda: torch.vmap(F.scaled_dot_product_attention)(q, k, v)) >= 1
        torch.testing.assert_close(torch.vmap(F.scaled_dot_product_attention)(q, k, v), expected)
        torch.testing.assert_close(torch.func.grad(loss)(q), expected_grad)


def test_under_autocast(device: str) -> None:
    inputs = [leaf(t) for t in qkv(device)]
    with flash_ext.enable(), torch.autocast(device, dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(*inputs)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, flash_ext.scaled_dot_product_attention(*inputs))
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.sum(), inputs))


def test_forward_mode(device: str) -> None:
    q, k, v = qkv(device)
    tangents = tuple(torch.ones_like(t) for t in (q, k, v))
    expected = torch.func.jvp(flash_ext.scaled_dot_product_attention, (q, k, v), tangents)
    with flash_ext.enable():
        got = torch.func.jvp(F.scaled_dot_product_attention, (q, k, v), tangents)
    torch.testing.assert_close(got, expected)
    assert got[1].abs().max() > 0


def test_bad_calls_are_runtime_errors(device: str) -> None:
    q, k, v = qkv(device)
    with flash_ext.enable():
        for bad in (
            lambda: F.scaled_dot_product_attention(q, k, v, rand(9, 12, device=device)),
            lambda: F.scaled_dot_product_attention(q, k, v, rand(9, 11, device=device), is_causal=True),
            lambda: F.scaled_dot_product_attention(q, k.double(), v),
        ):
            with pytest.raises(RuntimeError):
                bad()


def test_dropout_reproduces(device: str) -> None:
    q, k, v = qkv(device)
    with flash_ext.enable():
        torch.manual_seed(4)
        first = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(4)
        assert torch.equal(first, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
        torch.manual_seed(4)
        assert torch.equal(first, flash_ext.scaled_dot_product_attention(q, k, v, dropout_p=0.5))


def test_a_compiled_function_follows(device: str) -> None:
    """It is compiled again for another choice, and both stay."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=counter)
    q, k, v = qkv(device)
    plain = compiled(q, k, v)
    for _ in range(2):
        with flash_ext.enable():
            assert torch.equal(compiled(q, k, v), flash_ext.scaled_dot_product_attention(q, k, v))
        assert torch.equal(compiled(q, k, v), plain)
    assert counter.frame_count == 2


def test_compiles_while_enabled(device: str) -> None:
    torch._dynamo.reset()
    inputs = [leaf(t) for t in qkv(device)]
    with flash_ext.enable():
        compiled = torch.compile(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v), fullgraph=True, backend="aot_eager"
        )
        out = compiled(*inputs)
        torch.testing.assert_close(out, flash_ext.scaled_dot_product_attention(*inputs))
        torch.autograd.grad(out.sum(), inputs)
