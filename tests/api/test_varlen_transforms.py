"""Promise: torch.func, vmap, forward-mode AD and derivatives of every order see `attention_varlen` as `attention`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import evaluate, leaf, rand
from packed import QKV, Heads, Packed, Side, packed
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
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


NARROW = Heads(2, 1, 1, 2, 2)
SIDES = Side((3, 0, 1), before=1), Side((2, 1, 2), between=1)  # small: a derivative is as many calls as elements


def small(device: str, heads: Heads = NARROW, **options: Any) -> Packed:
    """Float64, with rows of nobody, which are 0 so that differences of them exist."""
    call = packed(*SIDES, heads, dtype=F64, device=device, **options)
    return call.with_inputs(**{name: tensor.nan_to_num() for name, tensor in call.inputs.items()})


def same(got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


# ---- opcheck --------------------------------------------------------------------------------------------------------

OPTION_SETS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "band": {"causal": True, "window_left": 2, "bottom_right": True, "return_lse": True},
    "scores": {"softcap": 2.0, "scale": 0.3, "deterministic": True},
    "batch_invariant": {"batch_invariant": True},
}


def op_arguments(
    device: str, requires_grad: bool, extras: bool, p: float = 0.0, whole: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    """whole: with a bias of all scores, whose gradient is not the composite's."""
    call = small(device, Heads(2, 1, 1, 4, 3), gqa=True, dropout_p=p)
    tensors = [x.float().requires_grad_(requires_grad) for x in call.inputs.values()]
    options = call.where | call.options
    if extras:
        options["mask"] = (torch.rand(3, 2) > 0.2).to(device)
        shape = call.scores if whole else (3, 1, 1, 2)
        options["bias"] = rand(*shape, device=device).requires_grad_(requires_grad)
        options["alibi_slopes"] = torch.rand(3, 2).to(device).requires_grad_(requires_grad)
    return tensors, options


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", OPTION_SETS)
def test_opcheck_forward(options: str, requires_grad: bool, extras: bool, device: str) -> None:
    tensors, more = op_arguments(device, requires_grad, extras, whole=options == "batch_invariant")
    more |= OPTION_SETS[options]
    torch.library.opcheck(OPS.attention.default, tuple(tensors), more)
    state = torch.tensor([3, 1], device=device)
    torch.library.opcheck(OPS.attention_with_rng_state.default, (*tensors, state), more | {"dropout_p": 0.3})


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", OPTION_SETS)
def test_opcheck_backward(options: str, requires_grad: bool, extras: bool, device: str) -> None:
    tensors, more = op_arguments(device, False, extras, 0.5, whole=options == "batch_invariant")
    more |= {name: value for name, value in OPTION_SETS[options].items() if name != "return_lse"}
    out, lse, state = OPS.attention(*tensors, **more, return_lse=True)
    given = [rand(*out.shape, device=device), rand(*lse.shape, device=device), *tensors]
    given = [tensor.requires_grad_(requires_grad) for tensor in given]
    more["grad_mask"] = [True, True, True, extras, extras]
    torch.library.opcheck(OPS.attention_backward.default, (*given, out, lse, state), more)


# ---- derivatives ----------------------------------------------------------------------------------------------------


def both(call: Packed, *names: str, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """out and lse of tensors in order, with the -inf of empty rows taken out so that differences exist."""

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = call.call(**dict(zip((*QKV, *names), tensors, strict=True)), return_lse=True, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return run


MASK = torch.tensor([[1, 0], [0, 0], [1, 1]], dtype=torch.bool)

# name: (shape of a bias, options)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((), {}),
    "causal": ((), {"causal": True, "align": "bottom_right"}),
    "window": ((), {"window": (0, 1)}),
    "mask": ((), {"mask": MASK}),
    "softcap": ((), {"softcap": 1.5, "scale": -0.7}),
    "slopes": ((), {"alibi_slopes": torch.tensor([0.3, 0.8])}),
    "bias": ((3, 2, 3, 2), {}),
    "bias of keys": ((3, 1, 1, 2), {"softcap": 2.0}),
    "bias of queries": ((2, 3, 1), {"causal": True}),
}


def derivative_case(case: str, device: str) -> tuple[Callable[..., Any], list[Tensor]]:
    bias, options = CASES[case]
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    call = small(device)
    tensors = [leaf(x) for x in call.inputs.values()]
    if bias:
        tensors.append(leaf(rand(*bias, dtype=F64, device=device)))
    return both(call, *(["bias"] if bias else []), **options), tensors


@pytest.mark.parametrize("case", CASES)
def test_first_derivatives(case: str, device: str, backend: str) -> None:
    """Reverse and forward mode, also batched; those of nobody's rows are 0."""
    function, tensors = derivative_case(case, device)
    assert gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)


@pytest.mark.parametrize("case", CASES)
def test_second_derivatives(case: str, device: str, backend: str) -> None:
    """Reverse over reverse and forward over reverse."""
    function, tensors = derivative_case(case, device)
    assert gradgradcheck(function, tensors, check_fwd_over_rev=True)


def test_derivatives_under_dropout(device: str, backend: str) -> None:
    call = small(device, dropout_p=0.3, gqa=True)
    state = torch.tensor([12, 3], device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return OPS.attention_with_rng_state(q, k, v, state, **call.where, **call.options)[0]

    tensors = [leaf(x) for x in call.inputs.values()]
    assert gradcheck(run, tensors, check_forward_ad=True)
    assert gradgradcheck(run, tensors, check_fwd_over_rev=True)


def loss_of(call: Packed, attend: Callable[..., Any]) -> Callable[..., Tensor]:
    """A scalar of every input and both outputs; rows without keys count by their out alone."""

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        tensors = {"query": q, "key": k, "value": v, "bias": bias, "alibi_slopes": slopes}
        out, lse = attend(**tensors, causal=True, softcap=3.0, return_lse=True)
        return (out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()) * 0.5

    return loss


def everything(device: str, lead: tuple[int, ...] = ()) -> tuple[Packed, list[Tensor]]:
    call = small(device)
    tensors = [x + 0.1 * rand(*lead, *x.shape, dtype=F64, device=device) for x in call.inputs.values()]
    return call, [*tensors, rand(*lead, 3, 2, 3, 2, dtype=F64, device=device), torch.rand(*lead, 2).to(device)]


NAMES = (*QKV, "bias", "alibi_slopes")


def test_grad_of_every_input(device: str) -> None:
    call, tensors = everything(device)
    mine, theirs = loss_of(call, call.call), loss_of(call, call.alone(reference.attention))
    for name, got, expected in zip(NAMES, *(grad(f, tuple(range(5)))(*tensors) for f in (mine, theirs)), strict=True):
        same(got, expected, 1e-6 if name == "alibi_slopes" else 1e-9)


@pytest.mark.parametrize("index", range(5), ids=NAMES)
def test_forward_mode_tangent_of_every_input(index: int, device: str) -> None:
    """A tangent must never silently become zero, but in nobody's rows."""
    call, tensors = everything(device)
    tangents = [torch.zeros_like(x) for x in tensors]
    tangents[index] = rand(*tensors[index].shape, dtype=tensors[index].dtype, device=device)

    def outputs(attend: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *x: attend(**dict(zip(NAMES, x, strict=True)), softcap=2.0, return_lse=True)

    got = jvp(outputs(call.call), tuple(tensors), tuple(tangents))
    expected = jvp(outputs(call.alone(reference.attention)), tuple(tensors), tuple(tangents))
    same(got, expected, 1e-6)
    assert got[1][0].abs().max() > 1e-6
    assert bool(got[1][1].abs().max() > 1e-6) is (index != 2)  # value does not enter lse
    assert (got[1][0][call.q.unused] == 0).all()


@pytest.mark.parametrize("poisoned", QKV)
def test_nan_in_nobodys_rows_reaches_no_tangent_and_no_second_derivative(poisoned: str, device: str) -> None:
    call = packed((2, 0, 3), (3, 2, 1), NARROW, dtype=F64, device=device, unused=1)
    tensors = [x if name == poisoned else x.nan_to_num() for name, x in call.inputs.items()]
    clean = [x.nan_to_num() for x in tensors]
    function = both(call)
    tangents = [rand(*x.shape, dtype=F64, device=device) for x in tensors]

    def second(*x: Tensor) -> Any:
        return jvp(grad(lambda *y: function(*y)[0].sin().sum(), (0, 1, 2)), x, tuple(tangents))

    for run in (lambda *x: jvp(function, x, tuple(tangents)), second):
        same(run(*tensors), run(*clean), 0.0)


@pytest.mark.parametrize("form", ["hessian", "forward_over_forward", "reverse_over_reverse", "reverse_over_forward"])
def test_second_derivatives_of_torch_func(form: str, device: str) -> None:
    call = small(device, causal=True)
    q, k, v = call.inputs.values()
    transforms: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "hessian": hessian,
        "forward_over_forward": lambda f: jacfwd(jacfwd(f)),
        "reverse_over_reverse": lambda f: jacrev(jacrev(f)),
        "reverse_over_forward": lambda f: jacrev(jacfwd(f)),
    }

    def second(attend: Callable[..., Any]) -> Tensor:
        return transforms[form](lambda x: (attend(query=x, key=k, value=v).sin() * 0.3).sum())(q)

    same(second(call.call), second(call.alone(reference.attention)))


EMPTY = {
    "no sequence": (Side((), behind=2), Side((), behind=3)),
    "no rows": (Side((0, 0)), Side((0, 0))),
    "no queries": (Side((0, 0)), Side((3, 2))),
    "no keys": (Side((3, 2)), Side((0, 0))),
}


@pytest.mark.parametrize("case", EMPTY)
def test_tangents_and_second_derivatives_of_nothing(case: str, device: str) -> None:
    call = packed(*EMPTY[case], NARROW, dtype=F64, device=device)
    tensors = tuple(x.nan_to_num() for x in call.inputs.values())
    tangents = tuple(torch.ones_like(x) for x in tensors)

    def attend(*x: Tensor) -> Tensor:
        return call.call(**dict(zip(QKV, x, strict=True)))

    out, tangent = jvp(attend, tensors, tangents)
    assert out.shape == tangent.shape and (out == 0).all() and (tangent == 0).all()
    leaves = [leaf(x) for x in tensors]
    first = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.sin().sum() for x in first), leaves, allow_unused=True, materialize_grads=True)
    assert all((x == 0).all() for x in (*first, *second))


# ---- vmap -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (1, 3, 2), (-1, 0, 1)])
def test_vmap(in_dims: tuple[int | None, ...], device: str) -> None:
    """The truth is a loop over samples, each of which is a loop over sequences."""
    call, tensors = everything(device, (3,))
    tensors = [x if dim is not None else x[0] for x, dim in zip(tensors[:3], in_dims, strict=True)]
    batched = [x if dim is None else x.movedim(0, dim) for x, dim in zip(tensors, in_dims, strict=True)]
    alone = call.alone(flash_ext.attention)
    got = vmap(lambda *x: call.call(**dict(zip(QKV, x, strict=True)), return_lse=True), in_dims)(*batched)
    for i in range(3):
        one = [x if dim is None else x[i] for x, dim in zip(tensors, in_dims, strict=True)]
        same(tuple(x[i] for x in got), alone(**dict(zip(QKV, one, strict=True)), return_lse=True))


@pytest.mark.parametrize("which", ["mask", "bias", "alibi_slopes"])
def test_vmap_over_what_is_added(which: str, device: str) -> None:
    call = small(device)
    extra = {
        "mask": (torch.rand(4, 3, 1, 3, 2) > 0.3).to(device),
        "bias": rand(4, 3, 2, 3, 2, dtype=F64, device=device),
        "alibi_slopes": torch.rand(4, 3, 2).to(device),
    }[which]
    got = vmap(lambda x: call.call(**call.inputs, **{which: x}))(extra)
    alone = call.alone(reference.attention)
    same(got, torch.stack([alone(**call.inputs, **{which: x}) for x in extra]), 1e-6)


def test_vmap_over_lengths(device: str) -> None:
    """Each sample has its own, in any column of a table."""
    call = packed(Side((12,)), Side((12,)), Heads(2, 1, 1, 4, 3), dtype=F64, device=device)
    cu = torch.tensor([[0, 4, 12], [2, 2, 9], [0, 11, 12]], dtype=torch.int32, device=device)

    def attend(x: Tensor) -> Tensor:
        return flash_ext.attention_varlen(**call.inputs, cu_seqlens_q=x, max_q=12, causal=True)

    expected = torch.stack([attend(x) for x in cu])
    same(vmap(attend)(cu), expected)
    same(vmap(attend, in_dims=1)(cu.mT), expected)


def test_vmap_of_gradients(device: str) -> None:
    call, tensors = everything(device, (2, 3))
    every = tuple(range(5))
    mine, theirs = loss_of(call, call.call), loss_of(call, call.alone(reference.attention))
    got = vmap(vmap(grad(mine, every)))(*tensors)
    for i in range(2):
        for j in range(3):
            same([x[i, j] for x in got], list(grad(theirs, every)(*(x[i, j] for x in tensors))), 1e-5)


def test_vmap_over_the_cotangent(device: str) -> None:
    """is_grads_batched: many cotangents through one backward."""
    call = small(device)
    inputs = [leaf(x) for x in call.inputs.values()]
    out = call.call(**dict(zip(QKV, inputs, strict=True)))
    cotangents = rand(4, *out.shape, dtype=F64, device=device)
    got = torch.autograd.grad(out, inputs, cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(4):
        same([g[i] for g in got], list(torch.autograd.grad(out, inputs, cotangents[i], retain_graph=True)))


def test_vjp_and_jacobians(device: str) -> None:
    call = small(device)
    attends = call.call, call.alone(reference.attention)
    functions = [lambda *x, a=attend: a(**dict(zip(QKV, x, strict=True))) for attend in attends]
    tensors = tuple(call.inputs.values())
    (out, pull), (expected, other) = (vjp(function, *tensors) for function in functions)
    same(out, expected)
    same(pull(out.cos()), other(out.cos()))
    for jacobian in (jacrev, jacfwd):
        same(*(jacobian(function, (0, 1, 2))(*tensors) for function in functions))


@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, None, 0)], ids=["all", "value"])
@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_randomness(randomness: str, mapped: tuple[int | None, ...], device: str) -> None:
    """Dropout obeys the mode: refused, one mask for all samples, or one each; its gradient is of the same mask."""
    n = 16
    call = packed((n, n), (n, n), Heads(1, 1, 1, 8, n), device=device, dropout_p=0.5)
    q = torch.zeros_like(call.inputs["query"])
    v = torch.eye(n, device=device).repeat(2, 1)[:, None].expand(4, 2 * n, 1, n)
    q = q if mapped[0] is None else q.expand(4, *q.shape)

    def loss(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        out = call.call(query=a, key=b, value=c)
        return out.sum(), out

    def run() -> tuple[Tensor, Tensor]:
        return vmap(grad(loss, 2, has_aux=True), mapped, randomness=randomness)(q, q, v)

    if randomness == "error":
        with pytest.raises(RuntimeError, match="random"):
            run()
        return
    dv, out = run()
    equal = [torch.equal(out[0], out[i]) for i in range(1, 4)]
    assert equal == [randomness == "same"] * 3
    assert 0.3 < (out > 0).float().mean() < 0.7
    halves = out.view(4, 2, n, n).sum(2).view(4, 2 * n)  # of each key, over the queries of its sequence
    same(dv[:, :, 0, 0], halves, 1e-5)


def test_gradients_of_a_gradient_penalty(device: str, backend: str) -> None:
    """The usual use of double backward, float32."""
    call = packed((5, 1, 9), (7, 3, 9), Heads(2, 1, 1, 8, 8), device=device, causal=True)

    def penalty(attend: Callable[..., Any]) -> Callable[..., Tensor]:
        def run(**tensors: Tensor) -> Tensor:
            (dx,) = torch.autograd.grad(attend(**tensors).sum(), tensors["query"], create_graph=True)
            return dx.square()

        return run

    expected = evaluate(penalty(call.alone(reference.attention)), call.inputs)
    for name, tensor in evaluate(penalty(call.call), call.inputs).items():
        same(tensor, expected[name], 1e-4)
