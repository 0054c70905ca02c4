"""Promise: attention of e4m3 inputs and ``quantize_fp8`` work wherever attention does, gradients are never rounded to
e4m3 without a word, and what does not fit is said in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import rand
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import flash_ext
from flash_ext import AttentionError, attention, attention_varlen, quantize_fp8
from flash_ext.fp8 import _rotated

E4M3 = torch.float8_e4m3fn
BF16, HALF = torch.bfloat16, torch.float16
OPS = torch.ops.flash_ext
HAS_GRAD_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def small(*sizes: int) -> Tensor:
    return rand(*sizes).to(E4M3)


Q, K = small(2, 4, 5, 8), small(2, 2, 6, 8)
CU = torch.tensor([0, 2, 5], dtype=torch.int32)
ROWS = small(5, 4, 8)
X = torch.zeros(2, 3, 4, 8)


def packed(**options: Any) -> Tensor:
    return attention_varlen(ROWS, ROWS, ROWS, CU, max_q=3, **options)


ONE_DTYPE = (
    "all three must have one dtype: torch.float16, torch.bfloat16, torch.float32, torch.float64 or torch.float8_e4m3fn"
)
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "mixed dtypes": (
        lambda: attention(Q, K.to(BF16), K),
        AttentionError,
        "query, key and value are of torch.float8_e4m3fn, torch.bfloat16 and torch.float8_e4m3fn; " + ONE_DTYPE,
    ),
    "another float8": (
        lambda: attention(*(t.to(torch.float8_e5m2) for t in (Q.float(), K.float(), K.float()))),
        AttentionError,
        "query, key and value are of torch.float8_e5m2, torch.float8_e5m2 and torch.float8_e5m2; " + ONE_DTYPE,
    ),
    "a descale of 16 bits": (
        lambda: attention(Q, K, K, k_descale=torch.ones(2, dtype=HALF)),
        AttentionError,
        "k_descale is of torch.float16; it must be of torch.float32",
    ),
    "a descale without e4m3": (
        lambda: attention(Q.to(BF16), K.to(BF16), K.to(BF16), q_descale=torch.ones(4)),
        AttentionError,
        "q_descale is given beside a query of torch.bfloat16; only torch.float8_e4m3fn has descales",
    ),
    "a descale of other heads": (
        lambda: attention(Q, K, K, k_descale=torch.ones(2, 4)),
        AttentionError,
        "k_descale of shape (2, 4) broadcasts neither to (2, 2) [batch, heads] nor, with 3 dimensions, to (2, 2, 6) "
        "[batch, heads, rows] of key",
    ),
    "a descale of other rows": (
        lambda: attention(Q, K, K, q_descale=torch.ones(2, 4, 6)),
        AttentionError,
        "q_descale of shape (2, 4, 6) broadcasts neither to (2, 4) [batch, heads] nor, with 3 dimensions, to (2, 4, 5) "
        "[batch, heads, rows] of query",
    ),
    "a descale of 4 dimensions": (
        lambda: attention(Q, K, K, v_descale=torch.ones(2, 2, 6, 1)),
        AttentionError,
        "v_descale of shape (2, 2, 6, 1) broadcasts neither to (2, 2) [batch, heads] nor, with 3 dimensions, to "
        "(2, 2, 6) [batch, heads, rows] of value",
    ),
    "a packed descale": (
        lambda: packed(k_descale=torch.ones(4, 5)),
        AttentionError,
        "k_descale of shape (4, 5) broadcasts neither to (2, 4) [sequences, heads] nor, with 3 dimensions, to "
        "(1, 4, 5) [1, heads, rows] of key",
    ),
    "a descale elsewhere": (
        lambda: attention(Q, K, K, q_descale=torch.ones(4, device="meta")),
        AttentionError,
        "q_descale is on meta, but query is on cpu; all tensors must be on one device",
    ),
    "a descale that wants a gradient": (
        lambda: attention(Q, K, K, q_descale=torch.ones(4, requires_grad=True)),
        AttentionError,
        "q_descale wants a gradient, which descales do not get; pass q_descale.detach()",
    ),
    "out_dtype": (
        lambda: attention(Q, K, K, out_dtype=torch.float32),
        AttentionError,
        "out_dtype is torch.float32; beside inputs of torch.float8_e4m3fn it must be None, torch.bfloat16 or "
        "torch.float16",
    ),
    "out_dtype of others": (
        lambda: attention(Q.to(BF16), K.to(BF16), K.to(BF16), out_dtype=HALF),
        AttentionError,
        "out_dtype is torch.float16; beside inputs of torch.bfloat16 it must be None or their dtype",
    ),
    "no out_dtype": (
        lambda: attention(Q, K, K, out_dtype=16),
        TypeError,
        "out_dtype is of type int; it must be a torch.dtype",
    ),
    "a bias of another dtype": (
        lambda: attention(Q, K, K, bias=torch.zeros(5, 6, dtype=HALF)),
        AttentionError,
        "bias is of torch.float16; it must be of torch.bool, torch.float32 or out's torch.bfloat16",
    ),
    "the drop-in": (
        lambda: flash_ext.scaled_dot_product_attention(Q, Q, Q),
        AttentionError,
        "query is of torch.float8_e4m3fn, which flash_ext.attention takes; scaled_dot_product_attention takes "
        "torch.float16, torch.bfloat16, torch.float32 or torch.float64",
    ),
    "FlashAttention": (
        lambda: flash_ext.FlashAttention.apply(Q, K, K),
        AttentionError,
        "q is of torch.float8_e4m3fn, which flash_ext.attention takes; FlashAttention takes wider ones",
    ),
    "a view that wants a gradient": (
        lambda: attention(quantize_fp8(X.requires_grad_())[0].transpose(1, 2), X.to(E4M3).mT.mT, X.to(E4M3)),
        AttentionError,
        "query is of torch.float8_e4m3fn, wants a gradient and is made by TransposeBackward0, where the gradient would "
        "be rounded to e4m3; call quantize_fp8 and pass its result as it is",
    ),
    "per": (lambda: quantize_fp8(X, per="row"), AttentionError, 'per is \'row\'; it must be "head" or "token"'),
    "a head dimension of 12": (
        lambda: quantize_fp8(torch.zeros(2, 3, 12), hadamard=True),
        AttentionError,
        "hadamard is True, but x has a head dimension of 12; it must be a power of 2",
    ),
    "two dimensions": (
        lambda: quantize_fp8(torch.zeros(3, 8)),
        AttentionError,
        "x of shape (3, 8) has 2 dimensions; quantize_fp8 takes 3 or more: (..., heads, length, head_dim)",
    ),
    "packed in 4 dimensions": (
        lambda: quantize_fp8(X, packed=True),
        AttentionError,
        "x of shape (2, 3, 4, 8) has 4 dimensions; quantize_fp8 takes 3: (rows, heads, head_dim)",
    ),
    "x of integers": (
        lambda: quantize_fp8(X.int()),
        AttentionError,
        "x is of torch.int32; it must be of torch.float16, torch.bfloat16, torch.float32 or torch.float64",
    ),
    "no tensor": (lambda: quantize_fp8([1.0]), TypeError, "x is of type list; it must be a torch.Tensor"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_does_not_fit_is_said_in_one_sentence(name: str) -> None:
    call, kind, sentence = ERRORS[name]
    with pytest.raises(kind, match="^" + re.escape(sentence) + "$"):
        call()


def problem(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [rand(2, heads, n, 64, dtype=dtype, device=device) for heads, n in ((4, 70), (2, 130), (2, 130))]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    (q, qd), (k, kd) = (quantize_fp8(t, hadamard=True) for t in (q, k))
    v, vd = quantize_fp8(v, per="token")
    return attention(q, k, v, q_descale=qd, k_descale=kd, v_descale=vd, **{"causal": True} | options)


def step(call: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = call(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, HALF], ids=str)
def test_gradients_reach_what_was_quantised(dtype: torch.dtype, device: str) -> None:
    """Straight through: as near to those of the call that rounds nothing as e4m3 is, and in x's dtype."""
    tensors = problem(device, dtype)
    out, *grads = step(attend, tensors)
    truth, *true_grads = step(attention, [t.double() for t in tensors], causal=True)
    assert out.dtype == BF16
    for grad, true in zip(grads, true_grads, strict=True):
        assert grad.dtype == dtype and (grad - true).norm() < 0.1 * true.norm()
    assert (out - truth).norm() < 0.1 * truth.norm()


def test_a_tensor_that_is_used_twice(device: str) -> None:
    """Gradients are added up in x's dtype, not in e4m3."""
    (x,) = (rand(2, 4, 70, 64, device=device) for _ in range(1))

    def twice(x: Tensor) -> Tensor:
        x8, d = quantize_fp8(x)
        return attention(x8, x8, x8, q_descale=d, k_descale=d, v_descale=d)

    def thrice(*xs: Tensor) -> Tensor:
        (q, qd), (k, kd), (v, vd) = map(quantize_fp8, xs)
        return attention(q, k, v, q_descale=qd, k_descale=kd, v_descale=vd)

    _, grad = step(twice, [x])
    _, *grads = step(thrice, [x, x, x])
    assert_close(grad, sum(grads), rtol=1e-6, atol=1e-6)


def test_others_that_use_the_quantised_tensor(device: str) -> None:
    """Their gradient is of x8, so that of x is divided by the descale; torch has rounded it to e4m3 by then."""
    x = (8 * rand(2, 4, 70, 64, device=device)).requires_grad_()
    x8, descale = quantize_fp8(x)
    (grad,) = torch.autograd.grad((2 * x8.float()).sum(), x)
    assert_close(grad, (2 / descale)[..., None, None].expand_as(x))


@pytest.mark.parametrize("per_row", [False, True])
def test_a_leaf_has_the_gradient_times_its_descale(per_row: bool, device: str) -> None:
    tensors = problem(device, BF16)
    per = "token" if per_row else "head"
    parts = [quantize_fp8(t, per=per) for t in tensors]
    named = {f"{name}_descale": d for name, (_, d) in zip("qkv", parts, strict=True)}
    leaves = [x8.clone().requires_grad_() for x8, _ in parts]
    seen: list[Tensor] = []
    if HAS_GRAD_DTYPE:
        for leaf in leaves:
            leaf.grad_dtype = BF16
    attention(*leaves, **named).float().square().sum().backward()
    seen = [leaf.grad for leaf in leaves]

    factors = [d[..., None] if per_row else d[..., None, None] for _, d in parts]
    wide = [(x8.double() * f).requires_grad_() for (x8, _), f in zip(parts, factors, strict=True)]
    true = torch.autograd.grad(attention(*wide).square().sum(), wide)
    for grad, of_wide, factor in zip(seen, true, factors, strict=True):
        expected = of_wide * factor
        assert grad.dtype == (BF16 if HAS_GRAD_DTYPE else E4M3)
        assert (grad.double() - expected).norm() < (0.02 if HAS_GRAD_DTYPE else 0.2) * expected.norm()


def test_second_derivatives(device: str) -> None:
    tensors = problem(device)

    def twice(call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        grads = torch.autograd.grad(call(*leaves, causal=True).float().square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.float().square().sum() for g in grads), leaves))

    for grad, true in zip(twice(attend, torch.float32), twice(attention, torch.float64), strict=True):
        assert (grad - true).norm() < 0.15 * true.norm()


def test_forward_mode_is_refused_where_a_tangent_would_be_lost() -> None:
    with pytest.raises(RuntimeError, match="x has a tangent, which quantize_fp8 does not pass on"):
        torch.func.jvp(lambda x: quantize_fp8(x)[0], (X,), (X,))


@pytest.mark.parametrize("packed_rows", [False, True])
@pytest.mark.parametrize("backend_name", ["aot_eager", "inductor"])
def test_compiled(backend_name: str, packed_rows: bool, device: str) -> None:
    torch.compiler.reset()

    def of_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q, qd), (k, kd), (v, vd) = (quantize_fp8(t, packed=True, per="token") for t in (q, k, v))
        cu = torch.arange(0, 211, 70, dtype=torch.int32, device=device)
        return attention_varlen(q, k, v, cu, max_q=70, q_descale=qd, k_descale=kd, v_descale=vd, out_dtype=HALF)

    call = of_rows if packed_rows else attend
    tensors = [rand(210, 4, 64, dtype=BF16, device=device) for _ in "qkv"] if packed_rows else problem(device, BF16)
    for got, expected in zip(
        step(torch.compile(call, backend=backend_name, fullgraph=True), tensors), step(call, tensors), strict=True
    ):
        assert got.dtype == expected.dtype
        assert_close(got, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_an_input_of_a_compiled_graph_that_wants_a_gradient() -> None:
    torch.compiler.reset()
    leaf = Q.clone().requires_grad_()
    with pytest.raises(Exception, match=r"query is of torch\.float8_e4m3fn, wants a gradient and comes from outside"):
        torch.compile(lambda q: attention(q, K, K), backend="aot_eager", fullgraph=True)(leaf)


def test_compiled_autograd(device: str) -> None:
    tensors = problem(device, BF16)
    torch.compiler.reset()
    _, *expected = step(attend, tensors)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        leaves = [t.detach().requires_grad_() for t in tensors]
        attend(*leaves).float().square().sum().backward()
    assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, expected, strict=True))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda t: t,
    "rows first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "columns last but one": lambda t: t.mT.contiguous().mT,
    "a part": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "one for the batch": lambda t: t[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fake", [False, True])
def test_meta_and_fake_tensors_have_the_real_results(layout: str, fake: bool) -> None:
    with torch.no_grad():
        tensors = [LAYOUTS[layout](t.view(torch.uint8)).view(E4M3) for t in (Q, K, K)]
    descales = [torch.ones(t.shape[1]) for t in tensors]
    state = torch.zeros(0, dtype=torch.int64)

    def both(tensors: list[Tensor], descales: list[Tensor], state: Tensor) -> list[Tensor]:
        others = (None, None, None, None, None, None, None, None, *descales)
        out, lse, _ = OPS.attention(*tensors, *others, gqa=True, out_dtype=HALF, return_lse=True)
        return [
            out,
            lse,
            *OPS.attention_backward(out, lse, *tensors, out, lse, state, *others, gqa=True, out_dtype=HALF),
        ]

    real = both(tensors, descales, state)
    assert [t.dtype for t in real[2:5]] == [HALF] * 3
    if fake:
        mode = FakeTensorMode()
        tensors, descales = ([mode.from_tensor(t) for t in part] for part in (tensors, descales))
        with mode:
            planned = both(tensors, descales, mode.from_tensor(state))
    else:
        planned = both(
            [
                t.to("meta")
                if layout == "dense"
                else torch.empty_strided(t.size(), t.stride(), dtype=E4M3, device="meta")
                for t in tensors
            ],
            [t.to("meta") for t in descales],
            state.to("meta"),
        )
    for one, other in zip(real, planned, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_explain() -> None:
    plan = flash_ext.explain(Q, K, K, q_descale=torch.ones(4), out_dtype=HALF)
    assert plan.forward.backend == plan.backward.backend == "cpu"
    assert [(c.argument, c.bytes) for c in plan.copies] == [("query", 640), ("key", 384), ("value", 384)]
    with pytest.raises(AttentionError, match="q_descale of shape"):
        flash_ext.explain(Q, K, K, q_descale=torch.ones(3))


def test_vmap(device: str) -> None:
    pairs = [torch.stack((t, 3 * t)) for t in problem(device)]
    grads_of = torch.func.grad(lambda *t: attend(*t).float().square().sum(), argnums=(0, 1, 2))
    out, grads = torch.func.vmap(attend)(*pairs), torch.func.vmap(grads_of)(*pairs)
    for i in range(2):
        one = [pair[i] for pair in pairs]
        assert torch.equal(out[i], attend(*one))
        for grad, expected in zip(grads, grads_of(*one), strict=True):
            assert torch.equal(grad[i], expected)


def test_autocast(device: str) -> None:
    """e4m3 stays as it is; out is of autocast's dtype, if nobody says another one."""
    q, k, v = (t.to(E4M3) for t in problem(device))
    bias = rand(70, 130, dtype=BF16, device=device)
    with torch.autocast(device, dtype=HALF):
        out = attention(q, k, v)
        assert out.dtype == HALF
        assert attention(q, k, v, out_dtype=BF16).dtype == BF16
        assert torch.equal(attention(q, k, v, bias=bias), attention(q, k, v, bias=bias.to(HALF)))
        with pytest.raises(AttentionError, match=r"are of torch\.float8_e4m3fn, torch\.bfloat16"):
            attention(q, k.to(BF16), v)
    assert torch.equal(out, attention(q, k, v, out_dtype=HALF))


def test_checkpoint(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    tensors = problem(device)
    again = step(lambda *t: checkpoint(attend, *t, use_reentrant=False), tensors)
    assert all(torch.equal(a, b) for a, b in zip(again, step(attend, tensors), strict=True))


def test_what_is_not_finite_and_what_is_0(device: str) -> None:
    x = torch.zeros(3, 4, 16, device=device)
    x[0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    x[0, 1, 0] = 7.0
    x[1, 2, 5] = 1e-43  # its 448th part is no normal number
    x8, descale = quantize_fp8(x)
    assert_close(descale, torch.tensor([7 / 448, torch.finfo(torch.float32).tiny, 1.0], device=device))
    values = x8.float()
    assert values[0, 0, 0].isnan() and values[0, 0, 1:3].tolist() == [448.0, -448.0] and values[0, 1, 0] == 448
    assert not values[1:].any() and values[0].isnan().sum() == 1


def test_the_rotation_is_orthonormal_and_comes_before(device: str) -> None:
    matrix = _rotated(torch.eye(32, dtype=torch.float64, device=device).expand(1, 32, 32))[0]
    assert_close(matrix.abs(), torch.full_like(matrix, 32**-0.5))
    assert_close(matrix @ matrix.T, torch.eye(32, dtype=torch.float64, device=device))
    x = rand(2, 3, 9, 32, dtype=torch.float64, device=device)
    for got, expected in zip(quantize_fp8(x, hadamard=True), quantize_fp8(x @ matrix), strict=True):
        assert_close(got.float(), expected.float())


@pytest.mark.parametrize("per", ["head", "token"])
def test_packed_and_empty_shapes(per: str) -> None:
    x = rand(7, 3, 16)
    x8, descale = quantize_fp8(x, per=per, packed=True)
    other, wanted = quantize_fp8(x.transpose(0, 1), per=per)
    assert torch.equal(x8.float(), other.transpose(0, 1).float())
    assert torch.equal(descale, wanted if per == "head" else wanted[None])
    empty = {False: (2, 3, 0, 16), True: (0, 3, 16)}
    for is_packed, sizes in empty.items():
        x8, descale = quantize_fp8(torch.zeros(sizes), per=per, packed=is_packed)
        heads = (3,) if is_packed else (2, 3)
        rows = (1, 3, 0) if is_packed else (2, 3, 0)
        assert x8.shape == sizes and descale.shape == (heads if per == "head" else rows) and (descale == 1).all()


def test_a_backend_by_name_computes_the_16_bits() -> None:
    outs = []
    for name in ("cpu", "chunked"):
        with flash_ext.use_backend(name):
            outs.append(attention(Q, K, K))
            assert torch.equal(outs[-1], attention(*(t.to(BF16) for t in (Q, K, K))))
    assert_close(*outs, rtol=2e-2, atol=2e-2)


def test_nested_tensors() -> None:
    parts = [small(n, 4, 8) for n in (3, 5)]
    nested = torch.nested.nested_tensor_from_jagged(torch.cat(parts), torch.tensor([0, 3, 8])).transpose(1, 2)
    descale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    out = attention(nested, nested, nested, v_descale=descale)
    for part, one in zip(parts, out.unbind(), strict=True):
        dense = part.transpose(0, 1)[None]
        assert_close(one, attention(dense, dense, dense, v_descale=descale)[0])
