"""Promise: torch.func's transforms of calls with e4m3 inputs give what each call gives alone."""

from __future__ import annotations

import pytest
import torch
from helpers import rand
from torch import Tensor

from flash_ext import attention

Q, K = (rand(2, heads, length, 8).to(torch.float8_e4m3fn) for heads, length in ((4, 5), (2, 6)))


def test_vmap_over_descales() -> None:
    descales = torch.tensor([[1.0, 2.0], [0.5, 4.0]])
    out = torch.func.vmap(lambda d: attention(Q, K, K, v_descale=d))(descales)
    assert all(torch.equal(out[i], attention(Q, K, K, v_descale=descales[i])) for i in range(2))


def test_vmap_over_descales_of_a_tangent() -> None:
    descales, bias = torch.tensor([[1.0, 2.0], [0.5, 4.0]]), rand(Q.shape[-2], K.shape[-2])

    def tangent(descale: Tensor) -> Tensor:
        return torch.func.jvp(lambda b: attention(Q, K, K, bias=b, v_descale=descale), (bias,), (bias + 1,))[1]

    mapped = torch.func.vmap(tangent)(descales)
    assert mapped.abs().max() > 0
    torch.testing.assert_close(mapped, torch.stack([tangent(d) for d in descales]))


def test_vmap_over_what_is_quantised() -> None:
    x = rand(3, 2, 4, 8)
    for dims in ([0, -1], [-2, 2], [-1], [0, 1, 2]):
        mapped = torch.func.vmap(lambda t, dims=dims: torch.ops.flash_ext.descale_fp8(t, dims))(x)
        assert torch.equal(mapped, torch.stack([torch.ops.flash_ext.descale_fp8(t, dims) for t in x]))
    with pytest.raises(IndexError, match="dim has 3; x of 3 dimensions takes -3 to 2"):
        torch.func.vmap(lambda t: torch.ops.flash_ext.descale_fp8(t, [3]))(x)
