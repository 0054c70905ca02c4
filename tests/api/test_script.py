"""Promise: torch.jit.script compiles the drop-in, torch.jit.trace records any call; saved models run elsewhere.

What cannot be scripted says in one sentence to use torch.export.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import rand
from torch import Tensor, nn

import flash_ext
from flash_ext import reference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Causal(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


class Masked(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = q.mean(-1, keepdim=True) > k.mean(-1).repeat_interleave(2, 1).unsqueeze(-2)
        return flash_ext.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)


class Operator(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.flash_ext.attention(q, k, v, causal=True, window_left=2, softcap=3.0, gqa=True)[0]


class Native(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.attention(q, k, v, causal=True, window=(2, None), softcap=3.0)


class Merged(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.merge_attention(q, k[..., 0], q, k[..., 0])[0]


def inputs(n: int) -> list[Tensor]:
    return [rand(2, heads, n, 8) for heads in (4, 2, 2)]


def script(model: nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.script(model)


def trace(model: nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.trace(model, inputs(7))


LOAD = """
import sys, torch, flash_ext
inputs, expected = torch.load(sys.argv[1] + ".in")
torch.testing.assert_close(torch.jit.load(sys.argv[1])(*inputs), expected)
"""


@pytest.mark.parametrize(
    ("how", "model"),
    [(script, Causal), (script, Masked), (script, Operator), (trace, Causal), (trace, Masked), (trace, Native)],
)
def test_at_other_lengths_with_gradients(how: Callable[..., nn.Module], model: type[nn.Module], tmp_path: Path) -> None:
    compiled = how(model())
    given = [t.requires_grad_() for t in inputs(11)]
    for _ in range(3):  # TorchScript's executor specialises the second time
        out, expected = compiled(*given), model()(*given)
        torch.testing.assert_close(out, expected)
        for got, right in zip(
            torch.autograd.grad(out.sin().sum(), given), torch.autograd.grad(expected.sin().sum(), given), strict=True
        ):
            torch.testing.assert_close(got, right)
    if model is Causal:
        file = tmp_path / "model.pt"
        compiled.save(str(file))
        torch.save(([t.detach() for t in given], expected.detach()), f"{file}.in")
        done = subprocess.run([sys.executable, "-c", LOAD, str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_scripted_function_has_the_drop_ins_arguments() -> None:
    call = script(flash_ext.scaled_dot_product_attention)
    q, k, v = inputs(6)
    k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
    bias = rand(6, 6)
    torch.testing.assert_close(call(q, k, v, bias), reference.scaled_dot_product_attention(q, k, v, bias))
    assert (call(q, k, v, dropout_p=1.0) == 0).all()
    with pytest.raises(RuntimeError, match="only one of the two"):
        call(q, k, v, attn_mask=bias, is_causal=True)


@pytest.mark.parametrize("what", [Native(), Merged(), flash_ext.attention], ids=["attention", "merge", "itself"])
def test_what_cannot_be_scripted_points_to_export(what: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.export") as caught:
        script(what)
    assert str(caught.value).startswith("torch.jit.script knows flash_ext.scaled_dot_product_attention")
