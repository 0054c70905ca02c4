"""Promise: opcheck passes on every op, and torch.func, vmap and forward-mode AD see ordinary functions.

Numerical derivatives of every order stand in test_gradcheck.py, torch.compile in test_compile.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import make_inputs, rand
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import flash_ext
from flash_ext import reference

OPS = torch.ops.flash_ext
F64 = torch.float64


@pytest.fixture(autouse=True)
def _no_fallback_warning() -> Iterator[None]:
    """vmap without a batching rule only warns; here that is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule.*")
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


def qkv(device: str, lead: tuple[int, ...] = (), kv_heads: int = 2) -> list[Tensor]:
    shapes = ((*lead, 1, 2, 4, 3), (*lead, 1, kv_heads, 5, 3))
    return list(make_inputs(*shapes, dtype=F64, device=device).values())


def same(got: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


# ---- opcheck --------------------------------------------------------------------------------------------------------

OPTION_SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "band": {"causal": True, "window_left": 2, "bottom_right": True, "return_lse": True},
    "scores": {"softcap": 2.0, "scale": 0.3},
    "gqa": {"gqa": True, "return_lse": True},
    "deterministic": {"deterministic": True},
    "batch_invariant": {"batch_invariant": True},
}


def op_tensors(device: str, requires_grad: bool, gqa: bool, extras: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    tensors = [t.float().requires_grad_(requires_grad) for t in qkv(device, kv_heads=1 if gqa else 2)]
    if not extras:
        return tensors, {}
    return tensors, {
        "mask": (torch.rand(4, 5) > 0.2).to(device),
        "bias": rand(2, 1, 5, device=device).requires_grad_(requires_grad),
        "alibi_slopes": torch.rand(2).to(device).requires_grad_(requires_grad),
    }


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", OPTION_SETS)
def test_opcheck_forward(options: str, requires_grad: bool, extras: bool, device: str) -> None:
    chosen = OPTION_SETS[options]
    tensors, more = op_tensors(device, requires_grad, chosen.get("gqa", False), extras)
    torch.library.opcheck(OPS.attention.default, tuple(tensors), more | chosen)
    state = torch.tensor([3, 1], device=device)
    torch.library.opcheck(
        OPS.attention_with_rng_state.default, (*tensors, state), more | chosen | {"dropout_p": 0.3}
    )  # fmt: skip


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_forward_with_dropout(requires_grad: bool, device: str) -> None:
    """Random: everything but the comparison of two runs."""
    tensors, more = op_tensors(device, requires_grad, False, True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.attention.default, tuple(tensors), more | {"dropout_p": 0.5}, test_utils=checks)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", OPTION_SETS)
def test_opcheck_backward(options: str, requires_grad: bool, extras: bool, device: str) -> None:
    chosen = {name: value for name, value in OPTION_SETS[options].items() if name != "return_lse"}
    tensors, more = op_tensors(device, False, chosen.get("gqa", False), extras)
    out, lse, state = OPS.attention(*tensors, **more, **chosen, dropout_p=0.5, return_lse=True)
    given = [rand(*out.shape, device=device), rand(*lse.shape, device=device), *tensors]
    if requires_grad:
        given = [tensor.requires_grad_() for tensor in given]
    arguments = more | chosen | {"dropout_p": 0.5, "grad_mask": [True, True, True, extras, extras]}
    torch.library.opcheck(OPS.attention_backward.default, (*given, out, lse, state), arguments)


def test_opcheck_others(device: str) -> None:
    tensors = [t.float().requires_grad_() for t in qkv(device)]
    torch.library.opcheck(OPS.dropout_mask.default, (torch.tensor([1, 2], device=device), 0.5, 2, 3, 4), {"q0": 1})
    torch.library.opcheck(OPS.scaled_dot_product_attention.default, tuple(tensors), {"is_causal": True})
    mask = rand(4, 5, device=device).requires_grad_()
    torch.library.opcheck(OPS.scaled_dot_product_attention.default, (*tensors, mask), {"scale": 0.4})


# ---- torch.func -----------------------------------------------------------------------------------------------------


def loss_of(call: Callable[..., Any]) -> Callable[..., Tensor]:
    """A scalar of every input and both outputs."""

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        out, lse = call(q, k, v, bias=bias, alibi_slopes=slopes, causal=True, softcap=3.0, return_lse=True)
        return (out.sin().sum() + lse.cos().sum()) * 0.5

    return loss


MINE, THEIRS = loss_of(flash_ext.attention), loss_of(reference.attention)
NAMES = ("query", "key", "value", "bias", "alibi_slopes")


def everything(device: str, lead: tuple[int, ...] = ()) -> list[Tensor]:
    tensors = qkv(device, lead)
    return [*tensors, rand(*lead, 2, 4, 5, dtype=F64, device=device), torch.rand(*lead, 2).to(device)]


def test_grad_of_every_input(device: str) -> None:
    inputs, every = everything(device), tuple(range(5))
    for got, expected in zip(grad(MINE, every)(*inputs), grad(THEIRS, every)(*inputs), strict=True):
        same(got, expected, 1e-6 if got.dtype == torch.float32 else 1e-10)


def test_vjp_and_jacrev(device: str) -> None:
    q, k, v = qkv(device)
    out, pull = vjp(flash_ext.attention, q, k, v)
    expected, pull_reference = vjp(reference.attention, q, k, v)
    same(out, expected)
    same(pull(out.cos()), pull_reference(out.cos()))
    same(jacrev(flash_ext.attention, (0, 1, 2))(q, k, v), jacrev(reference.attention, (0, 1, 2))(q, k, v))


@pytest.mark.parametrize("index", range(5), ids=NAMES)
def test_forward_mode_tangent_of_every_input(index: int, device: str) -> None:
    """A tangent must never silently become zero."""
    inputs = everything(device)
    tangents = [torch.zeros_like(t) for t in inputs]
    tangents[index] = rand(*inputs[index].shape, dtype=inputs[index].dtype, device=device)

    def outputs(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, b, s: call(q, k, v, bias=b, alibi_slopes=s, softcap=2.0, return_lse=True)

    got = jvp(outputs(flash_ext.attention), tuple(inputs), tuple(tangents))
    expected = jvp(outputs(reference.attention), tuple(inputs), tuple(tangents))
    same(got, expected, 1e-6)
    assert got[1][0].abs().max() > 1e-6
    assert bool(got[1][1].abs().max() > 1e-6) is (index != 2)  # value does not enter lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_mode_in_lower_precision(dtype: torch.dtype, device: str) -> None:
    inputs = tuple(t.to(dtype) for t in qkv(device))
    tangents = tuple(torch.ones_like(t) for t in inputs)
    _, got = jvp(lambda *a: flash_ext.scaled_dot_product_attention(*a, is_causal=True), inputs, tangents)
    _, expected = jvp(lambda *a: reference.scaled_dot_product_attention(*a, is_causal=True), inputs, tangents)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=5e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)


def test_dual_tensors(device: str) -> None:
    """forward_ad's own interface, one input dual at a time and both outputs."""
    import torch.autograd.forward_ad as fwd

    inputs = qkv(device)
    for index in range(3):
        tangent = rand(*inputs[index].shape, dtype=F64, device=device)
        results = []
        for call in (flash_ext.attention, reference.attention):
            with fwd.dual_level():
                dual = [fwd.make_dual(t, tangent) if i == index else t for i, t in enumerate(inputs)]
                results.append([fwd.unpack_dual(x).tangent for x in call(*dual, return_lse=True)])
        for got, expected in zip(*results, strict=True):
            if expected is None:
                assert got is None or (got == 0).all()
            else:
                same(got, expected)


@pytest.mark.parametrize("index", range(4), ids=NAMES[:4])
def test_forward_over_reverse(index: int, device: str) -> None:
    """jvp of grad, from a tangent in one input to the gradient of every input, lse in the loss."""
    inputs = tuple(everything(device))
    tangents = [torch.zeros_like(t) for t in inputs]
    tangents[index] = rand(*inputs[index].shape, dtype=F64, device=device)
    every = tuple(range(4))
    _, got = jvp(grad(MINE, every), inputs, tuple(tangents))
    _, expected = jvp(grad(THEIRS, every), inputs, tuple(tangents))
    same(got, expected, 1e-7)
    assert all(t.abs().max() > 0 for t in got)


@pytest.mark.parametrize("form", ["hessian", "forward_over_forward", "reverse_over_reverse", "reverse_over_forward"])
def test_second_derivatives(form: str, device: str) -> None:
    q, k, v = qkv(device)
    transforms: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "hessian": hessian,
        "forward_over_forward": lambda f: jacfwd(jacfwd(f)),
        "reverse_over_reverse": lambda f: jacrev(jacrev(f)),
        "reverse_over_forward": lambda f: jacrev(jacfwd(f)),
    }

    def second(call: Callable[..., Any]) -> Tensor:
        return transforms[form](lambda x: (call(x, k, v, causal=True).sin() * 0.3).sum())(q)

    same(second(flash_ext.attention), second(reference.attention))


def test_third_derivative(device: str) -> None:
    q, k, v = qkv(device)
    direction = rand(*q.shape, dtype=F64, device=device)

    def third(call: Callable[..., Any]) -> Tensor:
        def along(x: Tensor) -> Tensor:
            return call(q + x * direction, k, v).sin().sum()

        return grad(grad(grad(along)))(torch.zeros((), dtype=F64, device=device))

    same(third(flash_ext.attention), third(reference.attention), 1e-8)


# ---- vmap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (2, 4, 1), (-1, 0, 3)])
def test_vmap(in_dims: tuple[int | None, ...], device: str) -> None:
    tensors = qkv(device)
    batched = []
    for tensor, dim in zip(tensors, in_dims, strict=True):
        stack = torch.stack([tensor + 0.1 * i * tensor.sin() for i in range(3)])
        batched.append(tensor if dim is None else stack.movedim(0, dim))
    for call, theirs in (
        (flash_ext.attention, reference.attention),
        (flash_ext.scaled_dot_product_attention, reference.scaled_dot_product_attention),
    ):
        same(vmap(call, in_dims=in_dims)(*batched), vmap(theirs, in_dims=in_dims)(*batched))


@pytest.mark.parametrize("which", ["mask", "bias", "alibi_slopes"])
@pytest.mark.parametrize("shape", [(4, 5), (2, 1, 5), (1, 2, 4, 5), (5,)])
def test_vmap_over_masks(shape: tuple[int, ...], which: str, device: str) -> None:
    """Only the mask, the bias or the slopes carry the mapped dim."""
    q, k, v = qkv(device)
    extra = {
        "mask": (torch.rand(3, *shape) > 0.3).to(device),
        "bias": rand(3, *shape, dtype=F64, device=device),
        "alibi_slopes": torch.rand(3, 2).to(device),
    }[which]
    for lse in (False, True):

        def mapped(call: Callable[..., Any], lse: bool = lse) -> Any:
            return vmap(lambda x: call(q, k, v, **{which: x}, return_lse=lse))(extra)

        same(mapped(flash_ext.attention), mapped(reference.attention), 1e-6)


def test_nested_vmap_and_grad(device: str) -> None:
    inputs = everything(device, (2, 3))
    every = tuple(range(5))
    got = vmap(vmap(grad(MINE, every)))(*inputs)
    same(got, vmap(vmap(grad(THEIRS, every)))(*inputs), 1e-5)
    q, k, v = (t[0] for t in inputs[:3])

    def summed(call: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda x: vmap(call)(x, k, v).sin().sum()

    same(grad(summed(flash_ext.attention))(q), grad(summed(reference.attention))(q))
    rest = [t[0, 0] for t in inputs[1:]]
    same(vmap(hessian(lambda x: MINE(x, *rest)))(q), vmap(hessian(lambda x: THEIRS(x, *rest)))(q), 1e-6)


def test_vmap_over_the_cotangent(device: str) -> None:
    """is_grads_batched: many cotangents through one backward."""
    inputs = [t.requires_grad_() for t in qkv(device)]
    out = flash_ext.attention(*inputs, causal=True)
    cotangents = rand(5, *out.shape, dtype=F64, device=device)
    got = torch.autograd.grad(out, inputs, cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(5):
        same([g[i] for g in got], list(torch.autograd.grad(out, inputs, cotangents[i], retain_graph=True)))


def test_vmap_of_grouped_heads_and_drop_in_shapes(device: str) -> None:
    q, k, v = make_inputs((3, 4, 5, 8), (3, 2, 6, 8), dtype=F64, device=device).values()

    def run(call: Callable[..., Tensor]) -> Tensor:
        return vmap(lambda a, b, c: call(a, b, c, enable_gqa=True))(q, k, v)

    same(run(flash_ext.scaled_dot_product_attention), run(reference.scaled_dot_product_attention))
    q, k, v = make_inputs((3, 5, 8), (3, 6, 8), dtype=F64, device=device).values()
    same(vmap(flash_ext.scaled_dot_product_attention)(q, k, v), reference.scaled_dot_product_attention(q, k, v))


def test_vmap_over_an_empty_dimension_of_keys(device: str) -> None:
    q, k, v = make_inputs((3, 1, 2, 5, 8), (3, 1, 2, 0, 8), device=device).values()
    assert (vmap(flash_ext.attention)(q, k, v) == 0).all()


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_randomness(randomness: str, device: str) -> None:
    """Dropout obeys the mode: refused, one mask for all, or one each."""
    n = 16
    q = torch.zeros(4, 1, 1, n, 8, device=device)
    v = torch.eye(n, device=device).expand(4, 1, 1, n, n)

    def run() -> Tensor:
        return vmap(lambda a, b: flash_ext.attention(a, a, b, dropout_p=0.5), randomness=randomness)(q, v) > 0

    if randomness == "error":
        with pytest.raises(RuntimeError, match="random"):
            run()
        return
    kept = run()
    equal = [torch.equal(kept[0], kept[i]) for i in range(1, 4)]
    assert equal == [randomness == "same"] * 3
    assert 0.3 < kept.float().mean() < 0.7


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_randomness_with_only_values_mapped(randomness: str, device: str) -> None:
    n = 16
    q, v = torch.zeros(1, 1, n, 8, device=device), torch.eye(n, device=device).expand(3, 1, 1, n, n)
    kept = vmap(lambda b: flash_ext.attention(q, q, b, dropout_p=0.5), randomness=randomness)(v) > 0
    assert torch.equal(kept[0], kept[1]) is (randomness == "same")


def test_vmap_of_dropout_gradient(device: str) -> None:
    """Per-sample gradients use each sample's own forward mask."""
    n = 16
    q = torch.zeros(4, 1, 1, n, 8, device=device)
    v = torch.eye(n, device=device).expand(4, 1, 1, n, n)

    def loss(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        out = flash_ext.attention(a, a, b, dropout_p=0.5)
        return (out * torch.eye(n, device=device)).sum(), out

    dv, out = vmap(grad(loss, 1, has_aux=True), randomness="different")(q, v)
    same(dv, out.mT)  # out[i, j] = P[i, j] and dv[j, e] = P[e, j]
