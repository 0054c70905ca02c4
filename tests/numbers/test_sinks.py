"""Promise: `sinks` is one more logit in each row of a head, with value 0, with every option and with gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, check, evaluate, make_inputs, name_of, rand
from torch import Tensor

import flash_ext
from flash_ext import AttentionError

LSE = {"return_lse": True}
# name: (lengths, options); a window of (0, 0) at the bottom right leaves rows without keys where there are more queries
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "full": ((40, 70), {}),
    "lse": ((40, 70), LSE),
    "causal": ((70, 70), {"causal": True} | LSE),
    "window": ((70, 70), {"window": (9, 0)} | LSE),
    "rows without keys": ((70, 40), {"window": (5, 0), "align": "bottom_right"} | LSE),
    "one key": ((33, 1), LSE),
    "one query": ((1, 300), LSE),
    "softcap": ((40, 70), {"softcap": 5.0} | LSE),
    "deterministic": ((70, 70), {"causal": True, "deterministic": True}),
}


def inputs_of(lengths: tuple[int, int], dtype: torch.dtype, device: str, level: float = 0.0) -> dict[str, Tensor]:
    inputs = make_inputs((2, 4, lengths[0], 64), (2, 2, lengths[1], 64), dtype=dtype, device=device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return inputs | {"sinks": rand(4, dtype=wide, device=device) + level}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rule(dtype: torch.dtype, case: str, device: str, backend: str) -> None:
    lengths, options = CASES[case]
    got = check(flash_ext.attention, inputs_of(lengths, dtype, device), options)
    assert all(tensor.isfinite().all() for tensor in got.values())


@pytest.mark.parametrize("level", [-1e4, -60.0, 8.0, 60.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_far_from_the_scores(dtype: torch.dtype, level: float, device: str, backend: str) -> None:
    """One that is far below takes nothing, one that is far above takes all."""
    inputs = inputs_of((40, 70), dtype, device, level)
    # A float lse has half a unit of its last place, which is that of a sink's probability.
    got = check(flash_ext.attention, inputs, LSE, units=8 if dtype == torch.float32 else 0)
    assert all(tensor.isfinite().all() for tensor in got.values())
    if level == 1e4:
        assert not got["out"].any() and torch.equal(got["lse"], inputs["sinks"][:, None].expand(2, 4, 40))
    if level == -1e4:
        del inputs["sinks"]
        without = evaluate(flash_ext.attention, inputs, LSE)
        assert torch.equal(got["out"], without["out"]) and torch.equal(got["lse"], without["lse"])


def test_no_sink_is_minus_infinity(device: str, backend: str) -> None:
    inputs = inputs_of((70, 40), torch.float32, device)
    inputs["sinks"].fill_(-torch.inf)
    options = {"window": (5, 0), "align": "bottom_right"} | LSE
    got = evaluate(flash_ext.attention, inputs, options)
    del got["grad of sinks"], inputs["sinks"]
    for name, tensor in evaluate(flash_ext.attention, inputs, options).items():
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_with_everything(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = inputs_of((40, 70), dtype, device)
    inputs |= {"bias": rand(4, 40, 70, dtype=dtype, device=device), "alibi_slopes": rand(4, device=device).abs()}
    mask = rand(2, 1, 1, 70, device=device) > -0.5
    options = {"mask": mask, "causal": True, "align": "bottom_right", "softcap": 8.0, "scale": 0.2} | LSE
    check(flash_ext.attention, inputs, options)


def test_dropout_drops_what_it_drops_without(device: str, backend: str) -> None:
    """Of the keys alone: the sink has its weight, dropped or not."""
    inputs = inputs_of((40, 70), torch.float32, device)
    torch.manual_seed(3)
    got = evaluate(flash_ext.attention, inputs, {"dropout_p": 0.3} | LSE)
    torch.manual_seed(3)
    del (rest := dict(inputs))["sinks"]
    without = evaluate(flash_ext.attention, rest, {"dropout_p": 0.3} | LSE)
    share = torch.sigmoid(without["lse"] - inputs["sinks"][:, None])
    torch.testing.assert_close(got["out"], without["out"] * share[..., None])


def test_no_keys(device: str, backend: str) -> None:
    inputs = inputs_of((5, 0), torch.float32, device)
    got = evaluate(flash_ext.attention, inputs, LSE)
    assert not got["out"].any() and torch.equal(got["lse"], inputs["sinks"][:, None].expand(2, 4, 5))
    assert got["grad of sinks"].isfinite().all() and got["grad of sinks"].any()


def test_rows_of_nobody_add_nothing(device: str, backend: str) -> None:
    """Whatever the gradient of their lse is."""
    rows = {name: rand(12, heads, 64, device=device) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
    sinks, where = rand(4, device=device).requires_grad_(), torch.tensor([2, 7, 9], dtype=torch.int32, device=device)
    _, lse = flash_ext.attention_varlen(**rows, sinks=sinks, cu_seqlens_q=where, max_q=5, return_lse=True)
    assert (lse[:, :2] == -torch.inf).all() and (lse[:, 9:] == -torch.inf).all()
    (grad,) = torch.autograd.grad(lse.exp().sum() + lse.square().sum(), sinks)
    of_rows = lse[:, 2:9].detach()
    expected = ((of_rows.exp() + 2 * of_rows) * (sinks.detach()[:, None] - of_rows).exp()).sum(-1)
    torch.testing.assert_close(grad, expected)


def test_derivatives_of_any_order() -> None:
    inputs = {name: tensor.requires_grad_() for name, tensor in inputs_of((5, 7), torch.float64, "cpu").items()}
    inputs = {name: tensor[..., :3].detach().requires_grad_() if tensor.dim() > 1 else tensor
              for name, tensor in inputs.items()}  # fmt: skip

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = dict(zip(inputs, tensors, strict=True))
        return flash_ext.attention(**arguments, window=(1, 0), return_lse=True)

    assert torch.autograd.gradcheck(call, tuple(inputs.values()), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, tuple(inputs.values()))


def test_compiled(device: str) -> None:
    inputs = inputs_of((40, 70), torch.float32, device)
    torch._dynamo.reset()
    compiled = torch.compile(flash_ext.attention, fullgraph=True)
    expected = evaluate(flash_ext.attention, inputs, LSE)
    for name, tensor in evaluate(compiled, inputs, LSE).items():
        torch.testing.assert_close(tensor, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
def test_of_each_batch_element(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = inputs_of((40, 70), dtype, device)
    check(flash_ext.attention, inputs | {"sinks": rand(2, 4, dtype=inputs["sinks"].dtype, device=device)}, LSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("columns", [1, 70])
def test_what_a_row_of_scores_shares(columns: int, dtype: torch.dtype, device: str, backend: str) -> None:
    """A bias that is the same for all keys, and slopes where every key is far away: the sum of dS over the keys is dlse
    without sinks, and not with them."""
    inputs = inputs_of((40, 70), dtype, device)
    inputs |= {"bias": rand(4, 40, columns, dtype=dtype, device=device), "alibi_slopes": rand(4, device=device).abs()}
    check(flash_ext.attention, inputs, {"window": (3, 9), "align": "bottom_right"} | LSE)
    inputs["alibi_slopes"] = inputs["alibi_slopes"] / 64
    check(flash_ext.attention, inputs | {"query": inputs["query"][:, :, :5], "bias": inputs["bias"][:, :5]}, LSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("level", [-5e3, 5e3, 5.003e3])
def test_scores_far_from_zero(level: float, dtype: torch.dtype, device: str, backend: str) -> None:
    """Rows that backward measures again, beside a sink of their size or one that is nothing to them."""
    inputs = inputs_of((40, 70), dtype, device, level)
    inputs["bias"] = (rand(1, 1, 40, 70, device=device) + 5e3).to(torch.float32)
    check(flash_ext.attention, inputs, LSE)


@pytest.mark.parametrize("wanted", [("sinks",), ("sinks", "value"), ("query",)], ids=" and ".join)
def test_some_gradients(wanted: tuple[str, ...], device: str, backend: str) -> None:
    inputs = inputs_of((40, 70), torch.float32, device)
    generator = torch.Generator(device).manual_seed(5)
    leaves = {name: tensor.detach().requires_grad_(name in wanted) for name, tensor in inputs.items()}
    everything = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out, lse = flash_ext.attention(**leaves, return_lse=True)
    cotangents = [torch.randn(t.shape, device=device, generator=generator) for t in (out, lse)]
    grads = torch.autograd.grad((out, lse), [leaves[name] for name in wanted], cotangents)
    results = flash_ext.attention(**everything, return_lse=True)
    for name, grad in zip(wanted, grads, strict=True):
        (expected,) = torch.autograd.grad(results, everything[name], cotangents, retain_graph=True)
        torch.testing.assert_close(grad, expected)


def test_vmap(device: str) -> None:
    inputs = inputs_of((9, 12), torch.float32, device)
    sinks = rand(3, 4, device=device)
    rest = {name: tensor for name, tensor in inputs.items() if name != "sinks"}

    def loss(of_sinks: Tensor, query: Tensor) -> Tensor:
        out, lse = flash_ext.attention(**(rest | {"query": query}), sinks=of_sinks, causal=True, return_lse=True)
        return out.square().sum() + lse.sum()

    grad = torch.func.grad(loss, argnums=(0, 1))
    mapped = torch.func.vmap(grad, in_dims=(0, None))(sinks, rest["query"])
    for i in range(3):
        for got, expected in zip(mapped, grad(sinks[i], rest["query"]), strict=True):
            torch.testing.assert_close(got[i], expected)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"^sinks of shape \(3,\) is (neither|not) \(4,\) \[heads\]"),
        (torch.zeros(2, 4), r"^sinks of shape \(2, 4\) is (neither|not) \(4,\) \[heads\]"),
        (
            torch.zeros(4, dtype=torch.bfloat16),
            r"^sinks is of torch.bfloat16; it must be of torch.float32 beside a query of torch.float32$",
        ),
        (torch.zeros(4, device="meta"), r"^sinks is on meta, but query is on cpu; all tensors must be on one device$"),
    ],
)
def test_bad_sinks(sinks: Tensor, message: str) -> None:
    inputs = make_inputs((1, 4, 5, 8), (1, 4, 5, 8))
    with pytest.raises(AttentionError, match=message):
        flash_ext.attention(**inputs, sinks=sinks)
    lengths = torch.tensor([0, 5], dtype=torch.int32)
    rows = {name: tensor[0].transpose(0, 1) for name, tensor in inputs.items()}
    with pytest.raises(AttentionError, match=message):
        flash_ext.attention_varlen(**rows, cu_seqlens_q=lengths, max_q=5, sinks=sinks)


def test_plan() -> None:
    """They change no plan here; shapes are checked."""
    inputs = make_inputs((1, 4, 5, 8), (1, 4, 5, 8))
    plan = flash_ext.explain(**inputs, sinks=torch.zeros(4))
    assert plan.forward == flash_ext.explain(**inputs).forward
    with pytest.raises(AttentionError, match=r"^sinks of shape \(3,\)"):
        flash_ext.explain(**inputs, sinks=torch.zeros(3))


def test_nested(device: str) -> None:
    rows = [rand(4, length, 16, device=device) for length in (5, 1, 9)]
    nested = torch.nested.nested_tensor([t.transpose(0, 1) for t in rows], layout=torch.jagged).transpose(1, 2)
    sinks = rand(4, device=device)
    out, lse = flash_ext.attention(nested, nested, nested, sinks=sinks, causal=True, return_lse=True)
    for got, of_rows, t in zip(out.unbind(), lse.unbind(), rows, strict=True):
        expected = flash_ext.attention(t[None], t[None], t[None], sinks=sinks, causal=True, return_lse=True)
        torch.testing.assert_close(got, expected[0][0])
        torch.testing.assert_close(of_rows, expected[1][0])


def test_a_cache_gives_no_gradient() -> None:
    cache = torch.zeros(1, 8, 4, 16)
    with pytest.raises(AttentionError, match=r"^sinks wants a gradient, which attention_with_cache does not have;"):
        flash_ext.attention_with_cache(
            cache[:, :1],
            cache,
            cache,
            cache_seqlens=torch.tensor([3], dtype=torch.int32),
            sinks=torch.zeros(4).requires_grad_(),
        )
