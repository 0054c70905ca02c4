"""Promise: of e4m3 inputs what is attended to is each tensor times its descale, with every option; out has at most
twice the error of eager attention that rounds e^(s - its row's largest) to e4m3, and gradients that of 16 bits or,
where a kernel multiplies e4m3, of a backward that reads such an out and such an lse.

Descales of the error rule are powers of 2, so that what e4m3 inputs stand for is exact in 16 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, keep_mask, name_of, rand, rng_state
from torch import Tensor

import flash_ext
from flash_ext import reference

E4M3 = torch.float8_e4m3fn
OPS = torch.ops.flash_ext
NAMES = ("query", "key", "value")
LSE = {"return_lse": True}
# name: (lengths, heads of query, key and value, options)
CASES: dict[str, tuple[tuple[int, int], tuple[int, int, int], dict[str, Any]]] = {
    "full": ((130, 200), (2, 2, 2), LSE),
    "grouped heads": ((130, 200), (4, 2, 2), {}),
    "other heads of value": ((40, 70), (4, 1, 2), LSE),
    "causal": ((130, 130), (2, 2, 2), {"causal": True} | LSE),
    "window": ((70, 70), (2, 2, 2), {"window": (9, 0)}),
    "rows without keys": ((70, 40), (2, 2, 2), {"window": (5, 0), "align": "bottom_right"} | LSE),
    "one query": ((1, 300), (4, 2, 2), LSE),
    "one key": ((33, 1), (2, 2, 2), {}),
    "softcap": ((40, 70), (2, 2, 2), {"softcap": 5.0} | LSE),
    "scale": ((40, 70), (2, 2, 2), {"scale": 0.3}),
    "deterministic": ((70, 70), (2, 2, 2), {"causal": True, "deterministic": True}),
    "batch-invariant": ((70, 70), (4, 2, 2), {"causal": True, "batch_invariant": True} | LSE),
}
DESCALES: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "(B, H)": lambda b, h, n: (b, h),
    "(1, H)": lambda b, h, n: (1, h),
    "(B, 1)": lambda b, h, n: (b, 1),
    "(H,)": lambda b, h, n: (h,),
    "()": lambda b, h, n: (),
    "(B, H, L)": lambda b, h, n: (b, h, n),
    "(1, H, 1)": lambda b, h, n: (1, h, 1),
    "(B, 1, L)": lambda b, h, n: (b, 1, n),
}


def powers_of_2(*shape: int, device: str) -> Tensor:
    return torch.randint(-3, 4, shape).float().exp2().to(device)


def factor_of(descale: Tensor) -> Tensor:
    """As it broadcasts to its tensor of 4 dimensions."""
    return descale[..., None] if descale.dim() == 3 else descale[..., None, None]


def problem(
    lengths: tuple[int, int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    shape: str = "(B, H)",
    head_dims: tuple[int, int] = (64, 64),
) -> tuple[Inputs, list[Tensor]]:
    """16-bit tensors that are e4m3 times their descales, and these."""
    inputs, descales = {}, []
    for name, count, length in zip(NAMES, heads, (lengths[0], lengths[1], lengths[1]), strict=True):
        descale = powers_of_2(*DESCALES[shape](2, count, length), device=device)
        numbers = rand(2, count, length, head_dims[name == "value"], device=device).to(E4M3)
        inputs[name] = (numbers.float() * factor_of(descale)).to(dtype)
        descales.append(descale)
    return inputs, descales


def of_e4m3(descales: list[Tensor]) -> Callable[..., Any]:
    """Attention of the same numbers in e4m3; gradients go to the 16-bit tensors."""

    def call(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Any:
        parts = zip((query, key, value), descales, strict=True)
        small = [OPS.quantize_fp8(tensor, factor_of(descale)) for tensor, descale in parts]
        assert all(tensor.dtype == E4M3 for tensor in small)
        named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
        return flash_ext.attention(*small, **others, **named, out_dtype=query.dtype)

    return call


class Rough(torch.autograd.Function):
    """(out, lse, out_rough, lse_rough) -> the rough ones, with gradients of a backward that reads those: P is
    e^(s - lse_rough), and grad_out o out_rough is summed up where that of softmax sums up P o dP."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, out_rough: Tensor, lse_rough: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out, lse, out_rough, lse_rough)
        return out_rough.clone(), lse_rough.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor, None, None]:
        out, lse, out_rough, lse_rough = ctx.saved_tensors
        factor = (lse - lse_rough).exp().nan_to_num(1.0).double()  # of P; rows without keys have none
        if out.dtype == torch.bfloat16:  # whose rounding of grad times it is as large
            factor = torch.ones_like(factor)
        more = (grad.double() * (out_rough.double() - out.double())).sum(-1)
        return (grad * factor[..., None]).to(out.dtype), ((grad_lse - more) * factor).to(lse.dtype), None, None


def product_in_13_bits(query: Tensor, key: Tensor) -> Tensor:
    """query key^T as wgmma adds products of e4m3 up: 32 at a time, with what is there, cut off 13 bits behind the
    point of the largest."""
    total = torch.zeros(*query.shape[:-1], key.shape[-2], device=query.device)
    for q, k in zip(query.float().split(32, -1), key.float().split(32, -1), strict=True):
        terms = torch.cat([q[..., :, None, :] * k[..., None, :, :], total[..., None]], -1)
        place = torch.exp2(terms.abs().amax(-1, keepdim=True).clamp_min(1e-30).log2().floor() - 13)
        total = ((terms / place).trunc() * place).sum(-1)
    return total


def eager(*, value: Tensor, rounded: bool = True, by_forward: bool = False, **others: Any) -> Any:
    """Out with probabilities, before they are normalised, in e4m3; gradients as 16-bit eager attention has them, or as
    a backward that reads such an out and the lse of such scores."""
    wants_lse = others.pop("return_lse", False)
    out, lse = reference.attention(value=value, rounded=rounded, return_lse=True, **others)
    with torch.no_grad():
        others = {
            name: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in others.items()
        }
        keys, heads = value.shape[-2], others["query"].shape[-3]
        every = torch.eye(keys, device=value.device).expand(*value.shape[:-2], keys, keys)
        p = reference.attention(value=every, **others)
        largest = p.amax(-1, keepdim=True).clamp_min(1e-30)
        wide = value.float().repeat_interleave(heads // value.shape[-3], -3)
        rough = ((p / largest).to(E4M3).float() @ wide * largest).to(value.dtype)
        if by_forward:
            query, key = others["query"], others["key"].repeat_interleave(heads // others["key"].shape[-3], -3)
            score = product_in_13_bits(query, key) * others.get("scale", query.shape[-1] ** -0.5)
            others |= {"query": torch.zeros_like(query), "bias": score}
            lse_rough = reference.attention(value=every, return_lse=True, **others)[1].to(lse.dtype)
    if by_forward:
        out, lse = Rough.apply(out, lse, rough, lse_rough)
    else:
        out = out + (rough - out).detach()
    return (out, lse) if wants_lse else out


def rule(inputs: Inputs, descales: list[Tensor], options: dict[str, Any], **others: Any) -> None:
    got = check(of_e4m3(descales), inputs, options, eager=others.pop("eager", eager), **others)
    assert got["out"].dtype == inputs["query"].dtype


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_rule(dtype: torch.dtype, case: str, device: str, backend: str) -> None:
    lengths, heads, options = CASES[case]
    by_forward = backend == "sm90" and "softcap" not in options  # where a kernel multiplies e4m3
    rule(*problem(lengths, heads, dtype, device), options, eager=functools.partial(eager, by_forward=by_forward))


@pytest.mark.parametrize("head_dims", [(128, 128), (256, 256), (16, 64), (80, 112), (96, 32), (12, 20), (192, 128)])
def test_head_dims(head_dims: tuple[int, int], device: str, backend: str) -> None:
    problem_of = functools.partial(problem, (130, 400), (4, 2, 1), torch.bfloat16, device, head_dims=head_dims)
    rule(*problem_of(), {"causal": True, "align": "bottom_right"}, backward=False)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_keys(head_dim: int, device: str, backend: str) -> None:
    """So many tiles of keys that sums of e4m3 leave the tensor core's accumulators more than once."""
    parts = problem((70, 4100), (2, 1, 1), torch.bfloat16, device, head_dims=(head_dim, head_dim))
    rule(*parts, LSE, backward=False)


@pytest.mark.parametrize("shape", DESCALES)
def test_shapes_of_descales(shape: str, device: str, backend: str) -> None:
    rule(*problem((70, 130), (4, 2, 2), torch.bfloat16, device, shape), {"causal": True} | LSE)


def test_per_head_beside_per_row(device: str, backend: str) -> None:
    inputs, descales = problem((70, 130), (4, 2, 2), torch.bfloat16, device)
    other, of_rows = problem((70, 130), (4, 2, 2), torch.bfloat16, device, "(B, H, L)")
    rule(inputs | {"key": other["key"]}, [descales[0], of_rows[1], descales[2]], {})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_with_everything(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs, descales = problem((40, 70), (4, 2, 2), dtype, device, "(B, H, L)")
    inputs |= {"bias": rand(4, 40, 70, dtype=dtype, device=device), "alibi_slopes": rand(4, device=device).abs()}
    inputs |= {"sinks": rand(4, device=device)}
    mask = rand(2, 1, 1, 70, device=device) > -0.5
    options = {"mask": mask, "causal": True, "align": "bottom_right", "softcap": 8.0, "scale": 0.2} | LSE
    rule(inputs, descales, options)


def test_dropout(device: str, backend: str) -> None:
    state, p = rng_state(3, 5, device), 0.3
    inputs, descales = problem((70, 130), (4, 2, 2), torch.bfloat16, device)
    keep = keep_mask(state, p, (2, 4), 70, 130)

    def call(**tensors: Tensor) -> Tensor:
        small = [OPS.quantize_fp8(t, factor_of(d)) for t, d in zip(tensors.values(), descales, strict=True)]
        others = (None, None, None, None, None, None, None, None, *descales)
        return OPS.attention_with_rng_state(*small, state, *others, dropout_p=p, gqa=True)[0]

    check(call, inputs, {}, extra={"dropout_p": p, "keep": keep})


def quantised(*shape: int, device: str, per: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    x8, descale = flash_ext.quantize_fp8(rand(*shape, dtype=dtype, device=device), per=per, **options)
    return x8, descale


@pytest.mark.parametrize("per", ["head", "token"])
def test_numbers_that_quantize_fp8_gives(per: str, device: str, backend: str) -> None:
    parts = [quantised(2, h, n, 64, device=device, per=per) for h, n in ((4, 70), (2, 130), (2, 130))]
    (q, qd), (k, kd), (v, vd) = parts
    out, lse = flash_ext.attention(q, k, v, q_descale=qd, k_descale=kd, v_descale=vd, causal=True, return_lse=True)
    wide = [x8.double() * (d[..., None] if per == "token" else d[..., None, None]) for x8, d in parts]
    truth, true_lse = reference.attention(*wide, causal=True, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert (out - truth).abs().max() < 0.03 * truth.abs().max() and (lse - true_lse).abs().max() < 0.02


PACKED = {"(H,)": (None, False), "(1, H)": (1, False), "(B, H)": (3, False), "(1, H, rows)": (None, True)}


@pytest.mark.parametrize("shape", PACKED)
def test_packed_is_dense_of_each_sequence(shape: str, device: str, backend: str) -> None:
    batch, per_row = PACKED[shape]
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([0, 70, 70, 201], [0, 90, 180, 311]))
    small, descales = [], []
    for heads, rows in ((4, 205), (2, 311), (2, 311)):
        sizes = (1, heads, rows) if per_row else (heads,) if batch is None else (batch, heads)
        descales.append(powers_of_2(*sizes, device=device))
        small.append(rand(rows, heads, 64, device=device).to(E4M3))
    named = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    cotangent = rand(205, 4, 64, device=device)

    def step(call: Callable[..., Any], *tensors: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = call(*leaves)
        return [out.detach().float(), *(g.float() for g in torch.autograd.grad((out * cotangent).sum(), leaves))]

    def factors(cu: Tensor, descale: Tensor, rows: int) -> Tensor:
        if per_row:
            return descale[0].T[..., None]
        if batch is None or batch == 1:
            return descale.reshape(-1, 1).expand(-1, 1)
        whole = torch.ones(rows, descale.shape[1], 1, device=device)
        for b, (first, last) in enumerate(zip(cu.tolist()[:-1], cu.tolist()[1:], strict=True)):
            whole[first:last] = descale[b][:, None]
        return whole

    each = [factors(cu, d, x.shape[0]) for cu, d, x in zip((cu_q, cu_k, cu_k), descales, small, strict=True)]
    wide = [(x.float() * f).to(torch.bfloat16) for x, f in zip(small, each, strict=True)]
    options: dict[str, Any] = {"max_q": 131, "max_k": 131, "causal": True, "align": "bottom_right"}

    def of_small(q: Tensor, k: Tensor, v: Tensor) -> Any:
        tensors = [OPS.quantize_fp8(x, f) for x, f in zip((q, k, v), each, strict=True)]
        return flash_ext.attention_varlen(*tensors, cu_q, cu_k, **named, **options)

    def of_each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = [torch.zeros(0, 4, 64, device=device)]
        for b in range(3):
            rows = slice(*cu_q.tolist()[b : b + 2]), slice(*cu_k.tolist()[b : b + 2])
            parts = (q[rows[0]], k[rows[1]], v[rows[1]])
            dense = [t.double().transpose(0, 1) for t in parts]
            outs.append(reference.attention(*dense, causal=True, align="bottom_right").transpose(0, 1))
        return torch.cat([*outs, torch.zeros(4, 4, 64, device=device)])

    for got, truth in zip(step(of_small, *wide), step(of_each, *wide), strict=True):
        assert (got - truth).abs().max() < 0.03 * truth.abs().max()


@pytest.mark.parametrize("sizes", [(0, 4, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)])
def test_nothing_to_attend_to(sizes: tuple[int, int, int, int], device: str, backend: str) -> None:
    batch, heads, queries, keys = sizes
    (q, qd), (k, kd) = (quantised(batch, heads, n, 16, device=device, per="head") for n in (queries, keys))
    named = {"q_descale": qd, "k_descale": kd, "v_descale": kd, "out_dtype": torch.float16}
    leaves = [t.detach().requires_grad_() for t in (q, k, k)]
    out, lse = flash_ext.attention(*leaves, **named, return_lse=True)
    assert out.shape == (batch, heads, queries, 16) and out.dtype == torch.float16 and not out.any()
    assert lse.isneginf().all() and lse.dtype == torch.float32
    assert not any(g.float().any() for g in torch.autograd.grad(out.float().sum() + lse[lse.isfinite()].sum(), leaves))


def test_no_sequences(device: str, backend: str) -> None:
    cu = torch.zeros(1, dtype=torch.int32, device=device)
    leaves = [torch.zeros(3, 2, 16, device=device).to(E4M3).requires_grad_() for _ in NAMES]
    descale = torch.ones(0, 2, device=device)
    out = flash_ext.attention_varlen(*leaves, cu, max_q=3, q_descale=descale, k_descale=descale, v_descale=descale)
    assert out.shape == (3, 2, 16) and not out.any()
    assert not any(grad.float().any() for grad in torch.autograd.grad(out.float().sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("per", ["head", "token"])
def test_quantised_is_the_nearest(per: str, dtype: torch.dtype, device: str) -> None:
    """Of what e4m3 has, 448 the largest: at most half a unit of the last of 4 binary places away."""
    x = rand(2, 3, 50, 64, dtype=dtype, device=device) * torch.tensor([1e-3, 1.0, 50.0], device=device)[:, None, None]
    x8, descale = flash_ext.quantize_fp8(x.to(dtype), per=per)
    factor = descale[..., None] if per == "token" else descale[..., None, None]
    x = x.to(dtype).double()
    largest = x.abs().amax(-1 if per == "token" else (-2, -1))
    assert descale.dtype == torch.float32 and torch.allclose(descale.double(), largest / 448, rtol=1e-6, atol=0)
    assert x8.float().abs().amax() == 448
    allowed = torch.maximum(x.abs() / 16, factor * 2.0**-10) * (1 + 1e-5)
    assert ((x8.double() * factor - x).abs() <= allowed).all()


# name: (shape, a view of it, options of quantize_fp8, whether kernels serve it)
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], dict[str, Any], bool]] = {
    "dense": ((2, 3, 300, 64), lambda x: x, {}, True),
    "heads behind rows": ((2, 70, 3, 128), lambda x: x.transpose(1, 2), {}, True),
    "rows apart": ((2, 3, 70, 192), lambda x: x[..., 64:128], {}, True),
    "every other column": ((2, 3, 70, 64), lambda x: x[..., ::2], {}, False),
    "odd columns": ((2, 3, 70, 20), lambda x: x, {}, False),
    "expanded": ((1, 3, 1, 64), lambda x: x.expand(2, 3, 40, 64), {}, True),
    "one head": ((3, 5, 8), lambda x: x, {}, True),
    "many dimensions": ((2, 2, 2, 30, 64), lambda x: x, {}, False),
    "packed": ((333, 3, 64), lambda x: x, {"packed": True}, True),
    "wide": ((1, 2, 30, 512), lambda x: x, {}, True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per", ["head", "token"])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_quantised_has_the_same_bits_on_a_gpu(dtype: torch.dtype, per: str, layout: str) -> None:
    """By kernels, and by torch's operations where they do not serve x."""
    shape, view, options, has_kernels = LAYOUTS[layout]
    whole = rand(*shape).to(dtype)
    if layout == "dense":
        whole[0, 1] = 0
        whole[1, 2, :4, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-30], dtype=dtype)
    x, on_gpu = view(whole), view(whole.to("cuda"))
    assert on_gpu.stride() == x.stride()
    of_operations = flash_ext.quantize_fp8(x, per=per, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        got = flash_ext.quantize_fp8(on_gpu, per=per, **options)
        torch.cuda.synchronize()
    names = " ".join(event.key for event in profiler.key_averages())
    assert ("largest_kernel" in names, "quantize_kernel" in names) == (has_kernels, has_kernels)
    assert torch.equal(got[1].cpu(), of_operations[1]) and got[0].stride() == of_operations[0].stride()
    assert torch.equal(got[0].cpu().float().nan_to_num(1e9), of_operations[0].float().nan_to_num(1e9))
