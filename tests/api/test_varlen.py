"""Promise: `attention_varlen` says in one sentence what is wrong with a call, and is an ordinary function of torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import evaluate, leaf, name_of
from packed import QKV, Heads, Packed, packed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint

import flash_ext

Error = flash_ext.AttentionError


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


Q, K = t(7, 4, 8), t(9, 2, 8)
CU_Q, CU_K = ints(0, 3, 7), ints(0, 4, 9)
RIGHT = {"query": Q, "key": K, "value": K, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_q": 4, "max_k": 5}
BOOL, HALF, F64 = torch.bool, torch.float16, torch.float64

# name: (arguments that differ from RIGHT, exception, pattern of the sentence)
CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # query, key and value
    "query_4d": ({"query": Q[None]}, Error, r"query of shape \(1, 7, 4, 8\) has 4 dimensions.*take 3.*rows"),
    "key_2d": ({"key": K[0]}, Error, r"key of shape \(2, 8\) has 2 dimensions.*take 3"),
    "value_1d": ({"value": t(8)}, Error, r"value of shape \(8,\) has 1 dimensions?.*take 3"),
    "key_dim": ({"key": t(9, 2, 9)}, Error, r"key of shape \(9, 2, 9\) has head dimension 9, but query has 8"),
    "value_rows": ({"value": K[:8]}, Error, r"value of shape \(8, 2, 8\) has 8 rows, but key has 9"),
    "key_heads": ({"key": t(9, 3, 8)}, Error, r"key has 3 heads.*divide.*4"),
    "value_heads": ({"value": t(9, 3, 8)}, Error, r"value has 3 heads.*divide.*4"),
    "no_heads": ({"key": K[:, :0], "value": K[:, :0]}, Error, r"key has 0 heads.*divide.*4"),
    "two_dtypes": ({"key": K.half()}, Error, r"torch\.float32, torch\.float16 and torch\.float32"),
    "integers": ({"query": Q.int(), "key": K.int(), "value": K.int()}, Error, r"torch\.int32.*torch\.float16"),
    "key_device": ({"key": K.to("meta")}, Error, r"key is on meta.*query is on cpu"),
    "query_list": ({"query": [1.0]}, TypeError, r"query is of type list.*torch\.Tensor"),
    "key_none": ({"key": None}, TypeError, r"key is None.*torch\.Tensor"),
    # where sequences lie
    "cu_q_none": ({"cu_seqlens_q": None}, TypeError, r"cu_seqlens_q is of type NoneType.*torch\.Tensor"),
    "cu_q_list": ({"cu_seqlens_q": [0, 3, 7]}, TypeError, r"cu_seqlens_q is of type list.*torch\.Tensor"),
    "cu_q_dtype": ({"cu_seqlens_q": CU_Q.long()}, Error, r"cu_seqlens_q of shape \(3,\) and torch\.int64 is not"),
    "cu_q_2d": ({"cu_seqlens_q": CU_Q[None]}, Error, r"cu_seqlens_q of shape \(1, 3\).*\(sequences \+ 1,\)"),
    "cu_q_empty": ({"cu_seqlens_q": CU_Q[:0]}, Error, r"cu_seqlens_q of shape \(0,\).*\(sequences \+ 1,\)"),
    "cu_q_device": ({"cu_seqlens_q": CU_Q.to("meta")}, Error, r"cu_seqlens_q is on meta.*query is on cpu"),
    "cu_k_list": ({"cu_seqlens_k": [0, 4, 9]}, TypeError, r"cu_seqlens_k is of type list.*torch\.Tensor"),
    "cu_k_dtype": ({"cu_seqlens_k": CU_K.float()}, Error, r"cu_seqlens_k .*torch\.float32.*torch\.int32"),
    "cu_k_size": ({"cu_seqlens_k": CU_K[:2]}, Error, r"cu_seqlens_k of shape \(2,\).*size of cu_seqlens_q"),
    "cu_k_device": ({"cu_seqlens_k": CU_K.to("meta")}, Error, r"cu_seqlens_k is on meta.*query is on cpu"),
    "cu_k_missing": ({"cu_seqlens_k": None}, Error, r"cu_seqlens_k is None.*key has 9 rows and query 7"),
    "used_q_size": ({"seqused_q": CU_Q}, Error, r"seqused_q of shape \(3,\).*\(sequences,\) of torch\.int32"),
    "used_q_dtype": ({"seqused_q": t(2)}, Error, r"seqused_q .*torch\.float32.*torch\.int32"),
    "used_k_2d": ({"seqused_k": ints(1, 2)[None]}, Error, r"seqused_k of shape \(1, 2\).*\(sequences,\)"),
    "used_k_device": ({"seqused_k": ints(1, 2).to("meta")}, Error, r"seqused_k is on meta.*query is on cpu"),
    "used_k_list": ({"seqused_k": [1, 2]}, TypeError, r"seqused_k is of type list.*torch\.Tensor"),
    "max_q_negative": ({"max_q": -1}, Error, r"max_q is -1.*not negative"),
    "max_k_negative": ({"max_k": -5}, Error, r"max_k is -5.*not negative"),
    "max_q_float": ({"max_q": 4.0}, TypeError, r"max_q is of type float.*int"),
    "max_q_bool": ({"max_q": True}, TypeError, r"max_q is of type bool.*int"),
    "max_q_tensor": ({"max_q": torch.tensor(4)}, TypeError, r"max_q is of type Tensor.*int"),
    "max_q_none": ({"max_q": None}, TypeError, r"max_q is of type NoneType.*int"),
    "max_k_text": ({"max_k": "5"}, TypeError, r"max_k is of type str.*int"),
    "max_q_wide": ({"max_q": 2**63}, TypeError, r"max_q .*64 bits"),
    # what is added to scores
    "mask_shape": ({"mask": t(4, 6, dtype=BOOL)}, Error, r"mask of shape \(4, 6\).*\(2, 4, 4, 5\)"),
    "mask_batch": ({"mask": t(3, 1, 4, 5, dtype=BOOL)}, Error, r"mask of shape \(3, 1, 4, 5\).*\(2, 4, 4, 5\)"),
    "mask_deep": ({"mask": t(1, 2, 4, 4, 5, dtype=BOOL)}, Error, r"mask of shape \(1, 2, 4, 4, 5\)"),
    "mask_dtype": ({"mask": t(4, 5)}, Error, r"mask is of torch\.float32.*torch\.bool"),
    "bias_of_rows": ({"bias": t(4, 7, 9)}, Error, r"bias of shape \(4, 7, 9\).*\(2, 4, 4, 5\)"),
    "bias_dtype": ({"bias": t(4, 5, dtype=F64)}, Error, r"bias is of torch\.float64"),
    "bias_device": ({"bias": t(4, 5).to("meta")}, Error, r"bias is on meta.*query is on cpu"),
    "slopes_heads": ({"alibi_slopes": t(3)}, Error, r"alibi_slopes of shape \(3,\).*\(4,\)"),
    "slopes_batch": ({"alibi_slopes": t(3, 4)}, Error, r"alibi_slopes of shape \(3, 4\).*\(2, 4\)"),
    "slopes_dtype": ({"alibi_slopes": t(4, dtype=HALF)}, Error, r"alibi_slopes is of torch\.float16"),
    # options
    "window_number": ({"window": 3}, TypeError, r"window is 3;.*\(left, right\)"),
    "window_long": ({"window": (1, 2, 3)}, TypeError, r"window is \(1, 2, 3\);.*\(left, right\)"),
    "window_float": ({"window": (1.0, None)}, TypeError, r"window is \(1\.0, None\);.*\(left, right\)"),
    "window_negative": ({"window": (-1, 2)}, Error, r"window.*-1.*left.*not negative"),
    "align": ({"align": "center"}, Error, r"align.*center.*top_left.*bottom_right"),
    "dropout": ({"dropout_p": 1.5}, Error, r"dropout_p is 1\.5.*0 to 1"),
    "softcap": ({"softcap": -1.0}, Error, r"softcap is -1.*not negative"),
    "scale": ({"scale": float("nan")}, Error, r"scale is nan.*finite"),
    "scale_learned": ({"scale": leaf(torch.tensor(0.3))}, TypeError, r"scale is a tensor that wants a gradient"),
    "causal": ({"causal": 1}, TypeError, r"causal is of type int.*bool"),
    "deterministic": ({"deterministic": 1}, TypeError, r"deterministic is of type int.*bool"),
    "batch_invariant": ({"batch_invariant": None}, TypeError, r"batch_invariant is of type NoneType.*bool"),
    "return_lse": ({"return_lse": 1}, TypeError, r"return_lse is of type int.*bool"),
}  # fmt: skip


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_sentence(name: str, p: float) -> None:
    """And nothing is drawn from the generator."""
    arguments, exception, pattern = CASES[name]
    flash_ext.attention_varlen(**RIGHT)
    state = torch.get_rng_state()
    with pytest.raises(exception) as caught:
        flash_ext.attention_varlen(**RIGHT | {"dropout_p": p} | arguments)
    message = str(caught.value)
    assert type(caught.value) is exception and re.search(pattern, message), message
    assert "\n" not in message and len(message) < 400, message
    assert torch.equal(state, torch.get_rng_state())


LENGTHS = {"cu_seqlens_k": CU_K, "seqused_q": ints(1, 2), "seqused_k": ints(1, 2), "max_q": 3, "max_k": 3}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_operator_takes_lengths_only_of_packed_sequences(name: str) -> None:
    x = t(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match=f"{name} is given without cu_seqlens_q"):
        torch.ops.flash_ext.attention(x, x, x, **{name: LENGTHS[name]})


def test_max_q_must_be_given() -> None:
    with pytest.raises(TypeError, match="max_q"):
        flash_ext.attention_varlen(Q, K, K, CU_Q, CU_K)


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("added", [{}, {"causal": True, "bias": t(4, 4, 5), "dropout_p": 0.5, "seqused_k": ints(1, 2)}])
def test_explain_names_who_computes(added: dict[str, Any], where: str) -> None:
    plan = flash_ext.explain(**RIGHT, **added, device=where)
    for one in (plan.forward, plan.backward):
        assert one.backend in (("cpu",) if where == "cpu" else ("sm80", "sm90", "chunked"))
        assert one.kernel in str(plan)


def test_explain_takes_meta_and_fake_tensors() -> None:
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in RIGHT.items()}
    assert flash_ext.explain(**meta).forward == flash_ext.explain(**RIGHT).forward
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in RIGHT.items()}
        assert flash_ext.explain(**fake).forward == flash_ext.explain(**RIGHT).forward


@pytest.mark.parametrize("name", ["query_4d", "cu_k_dtype", "max_q_negative", "mask_shape", "max_q_float"])
def test_explain_refuses_what_the_call_refuses(name: str) -> None:
    arguments, exception, pattern = CASES[name]
    with pytest.raises(exception, match=pattern):
        flash_ext.explain(**RIGHT | arguments)


# ---- without a device -----------------------------------------------------------------------------------------------


def example(device: str, **options: Any) -> Packed:
    """Queries with the heads outside in memory."""
    call = packed((5, 0, 9, 3), (7, 2, 4, 3), Heads(4, 2, 2, 16, 8), device=device, unused=1, **options)
    return call.with_inputs(query=call.inputs["query"].transpose(0, 1).contiguous().transpose(0, 1))


def laid_out(tensors: tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(tuple(x.shape), tuple(x.stride()), x.dtype) for x in tensors]


@pytest.mark.parametrize("place", ["meta", "fake"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=name_of)
def test_shapes_and_strides_without_data(dtype: torch.dtype, place: str, device: str) -> None:
    """Of results and gradients, as in a real call."""
    call = example(device, causal=True, dropout_p=0.5, return_lse=True)
    tensors = {name: x.to(dtype) for name, x in call.inputs.items()} | {"bias": t(4, 9, 7).to(device, dtype)}
    mode = FakeTensorMode()

    def run(place: Callable[[Tensor], Tensor]) -> list[tuple[Any, ...]]:
        leaves = [leaf(place(x)) for x in tensors.values()]
        where = {name: place(x) if isinstance(x, Tensor) else x for name, x in call.where.items()}
        results = flash_ext.attention_varlen(**dict(zip(tensors, leaves, strict=True)), **where, **call.options)
        grads = torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])
        return laid_out((*results, *grads))

    expected = run(lambda x: x)
    with mode if place == "fake" else nullcontext():
        assert run(mode.from_tensor if place == "fake" else lambda x: x.to("meta")) == expected


def test_symbolic_fake_tensors(device: str) -> None:
    """Rows and the number of sequences stay symbolic through both passes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    call = example(device)
    where = {name: x for name, x in call.where.items() if isinstance(x, Tensor)}
    q, k, v, *lengths = (mode.from_tensor(x, static_shapes=False) for x in (*call.inputs.values(), *where.values()))
    with mode:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out, lse = flash_ext.attention_varlen(
            *inputs, **dict(zip(where, lengths, strict=True)), max_q=9, max_k=7, return_lse=True
        )
        grads = torch.autograd.grad(out.sum() + lse.sum(), inputs)
    assert isinstance(out.shape[0], torch.SymInt)
    assert out.shape == (*q.shape[:2], v.shape[2]) and lse.shape == q.shape[1::-1]
    assert [x.shape for x in grads] == [x.shape for x in inputs]


# ---- as other functions of PyTorch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=name_of)
def test_autocast(low: torch.dtype, device: str, backend: str) -> None:
    """Casts query, key and value; gradients come back in their own dtype."""
    call = example(device, deterministic=True)
    leaves = {name: leaf(x) for name, x in call.inputs.items()}
    with torch.autocast(device, dtype=low):
        out = call.call(**leaves)
    assert out.dtype == low
    cast = {name: leaf(x.to(low)) for name, x in call.inputs.items()}
    expected = call.call(**cast)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(out.float().sum(), list(leaves.values()))
    for grad, other in zip(grads, torch.autograd.grad(expected.float().sum(), list(cast.values())), strict=True):
        assert grad.dtype == torch.float32 and torch.equal(grad, other.float())


def test_autocast_leaves_float64_alone(device: str) -> None:
    call = example(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert call.call(**{name: x.double() for name, x in call.inputs.items()}).dtype == torch.float64


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_checkpoint(p: float, device: str, backend: str) -> None:
    """What is computed again drops the same."""
    call = example(device, dropout_p=p, deterministic=True)

    def again(**tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        run = lambda *x: call.call(**dict(zip(QKV, x, strict=True))).sin()  # noqa: E731
        return checkpoint(run, *tensors.values(), use_reentrant=False)

    def once(**tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return call.call(**tensors).sin()

    expected = evaluate(once, call.inputs)
    for name, tensor in evaluate(again, call.inputs).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_saved_tensors(p: float, device: str, backend: str) -> None:
    """The caller's own, where sequences lie, out, lse and, with dropout, its state: no copies, no scores."""
    call = example(device, dropout_p=p, return_lse=True)
    leaves, where = {name: leaf(x) for name, x in call.inputs.items()}, call.where
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.detach()) or x, lambda x: x):
        out, lse = flash_ext.attention_varlen(**leaves, **where, **call.options)
    lengths = [x for x in where.values() if isinstance(x, Tensor)]
    expected = {x.data_ptr() for x in (*leaves.values(), *lengths, out, lse)}
    there = {x.data_ptr(): x for x in saved if x.numel()}
    assert expected <= there.keys()
    rest = [x for place, x in there.items() if place not in expected]
    assert [(x.dtype, tuple(x.shape)) for x in rest] == ([(torch.int64, (2,))] if p else [])


def test_saved_tensors_may_lie_elsewhere(device: str, backend: str) -> None:
    """Packed away and back between the passes, lengths too."""
    call = example(device, return_lse=True, deterministic=True)
    expected = evaluate(call.call, call.inputs)

    def away(**tensors: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
            return call.call(**tensors)

    for name, tensor in evaluate(away, call.inputs).items():
        assert torch.equal(tensor, expected[name]), name


def test_lengths_changed_between_the_passes_are_told(device: str) -> None:
    """As any saved tensor that was written to."""
    call = example(device)
    cu = call.where["cu_seqlens_q"]
    out = call.call(**{name: leaf(x) for name, x in call.inputs.items()}, cu_seqlens_q=cu)
    cu += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_only_some_inputs_want_a_gradient(device: str, backend: str) -> None:
    call = example(device, return_lse=True, deterministic=True)
    whole = evaluate(call.call, call.inputs)
    for wanted in QKV:
        rest = {name: x for name, x in call.inputs.items() if name != wanted}
        got = evaluate(lambda **x: call.call(**rest, **x), {wanted: call.inputs[wanted]})  # noqa: B023
        torch.testing.assert_close(got[f"grad of {wanted}"], whole[f"grad of {wanted}"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_points_to_export() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script knows .*torch\.export"):
        torch.jit.script(flash_ext.attention_varlen)


def test_a_copy_of_a_module_that_calls_it() -> None:
    """Nothing of the call is kept between calls that a copy would share or could not take."""
    import copy
    import pickle

    model = torch.nn.Linear(8, 8)
    model.attend = flash_ext.attention_varlen
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.attend is flash_ext.attention_varlen


# ---- contents of the lengths ----------------------------------------------------------------------------------------

# What is wrong with a call of 7 rows of query and 9 of key: the arguments, and the sentence.
WRONG_ENTRIES: dict[str, tuple[str, str]] = {
    "beyond": ("[0, 3, 8], [0, 4, 9]", "cu_seqlens_q has 8 at entry 2; it must be from 0 to the 7 rows"),
    "negative": ("[-1, 3, 7], [0, 4, 9]", "cu_seqlens_q has -1 at entry 0; it must be from 0 to the 7 rows"),
    "falls": ("[0, 3, 2], [0, 4, 9]", "cu_seqlens_q has 2 at entry 2; it must not be less than the 3 before it"),
    "longer": (
        "[0, 3, 7], [0, 3, 9]",
        "cu_seqlens_k has 9 at entry 2; the sequence that ends there has 6 rows, more than max_k, which is 5",
    ),
    "used": (
        "[0, 3, 7], [0, 4, 9], [3, 5]",
        "seqused_q has 5 at entry 1; it must be from 0 to the 4 rows of the sequence",
    ),
    "used, longer": (
        "[0, 6, 7], [0, 4, 9], [5, 1]",
        "seqused_q has 5 at entry 0; it must be at most max_q, which is 4",
    ),
}
CHECKED = """
import torch, flash_ext
def call(cu_q, cu_k, used=None):
    ints = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (cu_q, cu_k, used)]
    q, k = torch.zeros(7, 4, 8), torch.zeros(9, 2, 8)
    flash_ext.attention_varlen(q, k, k, *ints[:2], max_q=4, max_k=5, seqused_q=ints[2])
call([0, 3, 7], [0, 4, 9], [0, 4])
call([0, 6, 7], [0, 4, 9], [4, 1])  # rows that are not in use may be beyond max_q
wrong = {wrong}
for name, (arguments, sentence) in wrong.items():
    try:
        eval("call(" + arguments + ")")
    except flash_ext.AttentionError as error:
        assert str(error) == sentence, (name, str(error))
    else:
        raise AssertionError(name)
"""


def test_entries_are_checked_where_it_is_asked_for() -> None:
    script = CHECKED.replace("{wrong}", repr(WRONG_ENTRIES))
    checked = os.environ | {"FLASH_EXT_CHECK": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=checked)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "AssertionError: beyond" in done.stderr  # it is not asked for
