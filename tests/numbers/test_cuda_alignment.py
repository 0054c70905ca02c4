"""Promise: no kernel makes an access that is not aligned, or outside of a tensor, whatever lengths, strides, broadcasts
and offsets there are.

Made to be run under compute-sanitizer, too, which sees accesses that happen to do no harm:

    compute-sanitizer --tool memcheck python -m pytest -n 0 tests/numbers/test_cuda_alignment.py
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Inputs, Results, check, evaluate, leaf, make_inputs, name_of, rand
from layouts import odd_rows, odd_start
from torch import Tensor

import flash_ext
from flash_ext import reference

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = 150


def odd_pairs(tensor: Tensor) -> Tensor:
    """From a multiple of 4 or 8 bytes on, in rows of as many more."""
    cols = tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (2, 2 + cols % 2))[..., 2 : 2 + cols]


def sequence_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if tensor.dim() == 4 else tensor


def inside(tensor: Tensor) -> Tensor:
    """In rows and at an offset of whole chunks of 16 bytes, NaN or False on either side."""
    cols, nothing = tensor.shape[-1], torch.nan if tensor.is_floating_point() else False
    buffer = tensor.new_full((*tensor.shape[:-1], 32 + (cols + 15) // 16 * 16), nothing)
    return buffer[..., 16 : 16 + cols].copy_(tensor)


def dense(tensor: Tensor) -> Tensor:
    return tensor.contiguous()


LAYOUTS: list[Callable[[Tensor], Tensor]] = [dense, dense, odd_start, odd_rows, odd_pairs, sequence_first, inside]


def draw(chance: random.Random, dtype: torch.dtype, device: str) -> tuple[Inputs, dict[str, Any]]:
    """A call of odd sizes; in half of them what sm90 leaves to sm80 is left out."""
    for_tma = chance.random() < 0.6
    length = chance.choice([1, 1, 3, 17, 49, 64, 65, 67, 127, 129, 131, 200])
    keys = chance.choice([1, 5, 16, 17, 49, 64, 65, 131, 136, 139, 200, 257, 264])
    width = 8 * chance.choice([1, 5, 6, 8, 9, 12, 15, 16, 17, 24, 25]) if for_tma else chance.choice([1, 7, 33, 40, 65])
    batch, (heads, heads_k) = chance.choice([1, 2, 5]), chance.choice([(1, 1), (2, 2), (3, 1), (15, 3)])
    inputs = make_inputs((batch, heads, length, width), (batch, heads_k, keys, width), dtype=dtype, device=device)
    if not for_tma:
        inputs = {name: chance.choice(LAYOUTS)(tensor) for name, tensor in inputs.items()}
    elif chance.random() < 0.5:
        inputs = {name: chance.choice([dense, sequence_first, inside])(tensor) for name, tensor in inputs.items()}
    whole = (batch, heads, length, keys)

    def broadcast() -> tuple[int, ...]:
        shape = tuple(size if chance.random() < 0.6 else 1 for size in whole)
        return shape[chance.choice([0, 0, 1, 2, 3]) :]

    options: dict[str, Any] = {}
    kind = chance.choice(["plain", "plain", "bias", "bias", "bias", "mask", "both", "slopes", "softcap", "dropout"])
    if kind in ("bias", "both"):
        bias_dtype = chance.choice([dtype, torch.float32])
        inputs["bias"] = chance.choice(LAYOUTS)(rand(*broadcast(), dtype=bias_dtype, device=device))
    if kind in ("mask", "both"):
        mask = torch.rand(broadcast()) > 0.3
        mask[..., 0] = True
        inputs["mask"] = chance.choice(LAYOUTS)(mask.to(device))
    if kind == "slopes":
        inputs["alibi_slopes"] = torch.rand(heads).to(device)
    if kind == "softcap":
        options["softcap"] = 5.0
    if kind == "dropout":
        options["dropout_p"] = 0.2
    if chance.random() < 0.3:
        options["causal"] = True
    if chance.random() < 0.2:
        options["deterministic"] = True
    return inputs, options


def kernels(inputs: Inputs, options: dict[str, Any]) -> set[str]:
    plan = flash_ext.explain(**{name: leaf(tensor) for name, tensor in inputs.items()}, **options)
    return {plan.forward.kernel, plan.backward.kernel}


def run(inputs: Inputs, options: dict[str, Any]) -> bool:
    """False where the backend that was asked for refuses. Near the truth: test_error_rule.py has the rule."""
    try:
        got = evaluate(flash_ext.attention, inputs, options | {"return_lse": True})
    except RuntimeError as error:  # of backward it is the plain type
        if "refuses: " not in str(error):
            raise
        return False
    torch.cuda.synchronize()
    if "dropout_p" in options:
        assert all(tensor.isfinite().all() for name, tensor in got.items() if name != "lse")
        return True
    wide = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    meaning = {name: value for name, value in options.items() if name != "deterministic"} | {"return_lse": True}
    narrow = inputs["query"].dtype
    expected = evaluate(reference.attention, wide, meaning, cotangent_dtype=narrow)
    tolerance = {torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float32: 1e-4}[narrow]
    eager: Results = {}
    for name, tensor in expected.items():
        largest = float(tensor[tensor.isfinite()].abs().max()) if tensor.isfinite().any() else 0.0
        allowed = tolerance * max(largest, 1.0)
        error = torch.where(got[name] == tensor, 0.0, (got[name].double() - tensor).abs())
        if not (error <= allowed).all():  # sums that all but cancel
            eager = eager or evaluate(reference.attention, inputs, meaning | {"rounded": narrow != torch.float32})
            allowed = max(allowed, 2 * float((eager[name].double() - tensor).abs().nan_to_num().max()))
        assert (error <= allowed).all(), name
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_odd_sizes_strides_and_offsets(dtype: torch.dtype, device: str, backend: str) -> None:
    """A walk over random calls, and over all kernels that the backend has for the dtype."""
    if backend == "sm90" and dtype == torch.float32:
        pytest.skip("sm90 has no support for float32")
    chance, seen, served = random.Random(1), set(), 0
    for number in range(CASES):
        inputs, options = draw(chance, dtype, device)
        shapes = {name: (tuple(t.shape), t.stride(), t.data_ptr() % 16) for name, t in inputs.items()}
        try:
            if run(inputs, options):
                served += 1
                seen |= kernels(inputs, options)
        except Exception as error:
            raise AssertionError(f"case {number}: {shapes}, {options}") from error
    assert served > CASES // 6
    of_float = ".fp32" if dtype == torch.float32 else ""
    wanted = {
        "sm80": {f"sm80.{way}{of_float}.{kind}" for way in ("forward", "backward") for kind in ("plain", "general")},
        "sm90": {"sm90.forward", "sm90.forward.scored", "sm90.backward", "sm90.backward.scored"},
    }[backend]
    if backend == "sm80" and dtype != torch.float32:
        wanted |= {"sm80.backward.one_tile", "sm80.backward.dropout"}
    if backend == "sm90":
        wanted |= {"sm90.backward.scored, sm90.bias_gradient"}
        wanted |= {"sm90.backward.two_pass", "sm90.backward.two_pass.scored", "sm90.backward.two_pass.small_head_dim"}
    assert wanted <= seen, f"never ran: {sorted(wanted - seen)} (of {sorted(seen)})"


@pytest.mark.sm90
def test_bias_of_one_query_and_an_odd_number_of_keys(device: str) -> None:
    """Parts of its gradient begin at odd numbers of floats."""
    for heads, keys, batch in itertools.product(((15, 3), (4, 4), (1, 1)), (129, 131, 257, 513), (1, 5)):
        inputs = make_inputs((batch, heads[0], 1, 48), (batch, heads[1], keys, 48), dtype=torch.bfloat16, device=device)
        inputs["bias"] = rand(1, keys, dtype=torch.bfloat16, device=device)
        with flash_ext.use_backend("sm90"):
            check(flash_ext.attention, inputs)
