"""Promise: PyTorch's CausalBias is understood where a mask is, and gives what PyTorch gives for it.

It is a tensor without elements: an operator that reads it as a mask reads whatever lies in that memory.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import evaluate, leaf, make_inputs
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flash_ext

KINDS = {"upper_left": causal_upper_left, "lower_right": causal_lower_right}
LENGTHS = {"square": (9, 9), "more_keys": (5, 12), "one_query": (1, 12)}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_pytorch(kind: str, lengths: str, device: str) -> None:
    queries, keys = LENGTHS[lengths]
    inputs = make_inputs((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 8), dtype=torch.float64, device=device)
    options = {"attn_mask": KINDS[kind](queries, keys), "enable_gqa": True, "scale": 0.5}
    got = evaluate(flash_ext.scaled_dot_product_attention, inputs, options)
    # PyTorch has no lower right diagonal on every device, but the mask itself.
    mask = options["attn_mask"]._materialize(torch.device(device))
    expected = evaluate(F.scaled_dot_product_attention, inputs, options | {"attn_mask": mask})
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_under_enable(kind: str) -> None:
    """Only on the CPU: on a GPU, PyTorch hands a lower right diagonal to its own kernels."""
    inputs = make_inputs((2, 3, 5, 8), (2, 3, 12, 8))
    bias = KINDS[kind](5, 12)
    expected = F.scaled_dot_product_attention(**inputs, attn_mask=bias)
    before = flash_ext.enabled_calls()
    with flash_ext.enable():
        got = F.scaled_dot_product_attention(**inputs, attn_mask=bias)
    assert flash_ext.enabled_calls() == before + 1
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: str, device: str) -> None:
    inputs = {name: leaf(t) for name, t in make_inputs((2, 3, 5, 8), (2, 3, 12, 8), device=device).items()}
    bias = KINDS[kind](5, 12)

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return flash_ext.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(evaluate(compiled, inputs), evaluate(call, inputs))


def test_wrong_calls(device: str) -> None:
    inputs = make_inputs((2, 3, 5, 8), (2, 3, 12, 8), device=device)
    with pytest.raises(flash_ext.AttentionError, match="attn_mask is given together with is_causal=True"):
        flash_ext.scaled_dot_product_attention(**inputs, attn_mask=causal_upper_left(5, 12), is_causal=True)
    with pytest.raises(flash_ext.AttentionError, match=r"attn_mask is a CausalBias of \(5, 11\).*\(5, 12\)"):
        flash_ext.scaled_dot_product_attention(**inputs, attn_mask=causal_lower_right(5, 11))
