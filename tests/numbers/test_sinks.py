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
    got = check(flash_ext.attention, inputs, LSE)
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


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"^sinks of shape \(3,\) is not \(4,\), one number for each head of query$"),
        (torch.zeros(2, 4), r"^sinks of shape \(2, 4\) is not \(4,\)"),
        (torch.zeros(4, dtype=torch.bfloat16), r"^sinks is of torch.bfloat16; it must be of torch.float32, or"),
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


def test_explain_checks_them() -> None:
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
