"""Promise: a sequence of a million is right, forward and backward, plain causal and with a window.

The whole truth would take 10^12 scores, so rows of out and dq and columns of dk and dv are computed in float64. With
s_ij = scale q_i k_j, p_ij = exp(s_ij - lse_i) and delta_i = <dout_i, out_i>:

    dq_i = scale sum_j p_ij (<dout_i, v_j> - delta_i) k_j                      needs row i alone
    dv_j = sum_i p_ij dout_i,   dk_j = scale sum_i p_ij (<dout_i, v_j> - delta_i) q_i      lse and delta of all rows

where the latter two come from the call under test, whose lse and out are checked against the rows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import floor_of, leaf, violations
from torch import Tensor

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.xdist_group("gpu memory")]  # one at a time

LENGTH, DIM = 1_000_003, 64
SAMPLES = (0, 1, 63, 64, 65_535, 65_536, 131_071, 499_999, 500_000, 777_777, 999_999, 1_000_002)
NAMES = ("query", "key", "value")


def problem(device: str, heads: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (1, heads, LENGTH, DIM)
    tensors = [torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(4)]
    # Longer keys make peaked rows, so that gradients do not drown in the sum over a million.
    tensors[1] *= 2
    return {name: leaf(tensor) for name, tensor in zip(NAMES, tensors[:3], strict=True)}, tensors[3]


def run(inputs: dict[str, Tensor], grad: Tensor, **options: Any) -> dict[str, Tensor]:
    out, lse = flash_ext.attention(**inputs, causal=True, return_lse=True, **options)
    grads = torch.autograd.grad(out, list(inputs.values()), grad)
    return {"out": out.detach(), "lse": lse.detach(), "dq": grads[0], "dk": grads[1], "dv": grads[2]}


def eager_dq(inputs: dict[str, Tensor], grad: Tensor, row: int) -> Tensor:
    """dq of a row of the first head, by eager attention in the inputs' dtype."""
    query, key, value = (tensor.detach()[0, 0] for tensor in inputs.values())
    leaves = [leaf(tensor) for tensor in (query[row : row + 1], key[: row + 1], value[: row + 1])]
    out = reference.attention(*leaves, rounded=True)
    return torch.autograd.grad(out, leaves[0], grad[0, 0, row : row + 1])[0][0]


def assert_close(name: str, got: Tensor, truth: Tensor, rough: float = 0.0) -> None:
    """Two percent of the largest element and of the root mean square, for p and ds rounded to bf16, or ``rough``.

    NOTE: a row that sees one key has dq = 0, which a kernel computes as a difference of two sums in float32.
    """
    error, truth = got.double() - truth, truth.double()
    assert error.isfinite().all(), name
    limit = max(floor_of(truth, got.dtype), 2e-2 * float(truth.abs().max()), rough, 1e-5)
    assert float(error.abs().max()) <= limit, f"{name}: {float(error.abs().max()):.3g} is more than {limit:.3g}"
    rms, limit = (float(tensor.square().mean().sqrt()) for tensor in (error, 2e-2 * truth))
    limit = max(limit, rough, 1e-5)
    assert rms <= limit, f"{name}: rms {rms:.3g} is more than {limit:.3g}"


@pytest.mark.parametrize("deterministic", [False, True])
def test_causal(deterministic: bool, device: str, backend: str) -> None:
    inputs, grad = problem(device)
    got = {name: tensor[0, 0] for name, tensor in run(inputs, grad, deterministic=deterministic).items()}
    query, key, value, d_out = (tensor.detach()[0, 0].double() for tensor in (*inputs.values(), grad))
    scale = 1 / math.sqrt(DIM)
    delta = (d_out * got["out"].double()).sum(-1)

    def row(i: int) -> tuple[Tensor, Tensor, Tensor]:
        """(lse, out, dq)"""
        scores = scale * (key[: i + 1] @ query[i])
        lse = scores.logsumexp(0)
        p = (scores - lse).exp()
        out = p @ value[: i + 1]
        ds = p * (value[: i + 1] @ d_out[i] - d_out[i] @ out)
        return lse, out, scale * (ds @ key[: i + 1])

    # In rows of a few keys delta tells, a sum over rounded elements of out. The rule is about tensors: twice the
    # largest error of eager attention in any such row.
    few = range(64)
    rough = 2 * max(float((eager_dq(inputs, grad, i).double() - row(i)[2]).abs().max()) for i in few)
    for i in SAMPLES:
        lse, out, dq = row(i)
        assert abs(float(got["lse"][i] - lse)) < 2e-5 * max(1.0, abs(float(lse))), i
        assert_close(f"out of row {i}", got["out"][i], out)
        assert_close(f"dq of row {i}", got["dq"][i], dq, rough if i in few else 0.0)
    for j in SAMPLES:
        p = (scale * (query[j:] @ key[j]) - got["lse"][j:].double()).exp()
        ds = p * (d_out[j:] @ value[j] - delta[j:])
        assert_close(f"dv of key {j}", got["dv"][j], p @ d_out[j:])
        assert_close(f"dk of key {j}", got["dk"][j], scale * (ds @ query[j:]))
    assert all(tensor.isfinite().all() for tensor in got.values())


def test_window(device: str, backend: str) -> None:
    """Every row and key, slice by slice, by the error rule: a slice of queries needs the window's keys before it."""
    window, rows = 1024, 8192
    inputs, grad = problem(device)
    got = run(inputs, grad, window=(window, 0))
    q, k, v = (tensor.detach() for tensor in inputs.values())
    for first in range(0, LENGTH - window, rows - window):
        before, last = min(first, window), min(first + rows, LENGTH)
        keys = slice(first - before, last)

        def part(
            wide: bool, queries: slice = slice(first, last), keys: slice = keys, whole: int = min(rows, last - first)
        ) -> dict[str, Tensor]:
            tensors = [q[:, :, queries], k[:, :, keys], v[:, :, keys], grad[:, :, queries]]
            *tensors, d_out = [tensor.double() if wide else tensor for tensor in tensors]
            leaves = [leaf(tensor) for tensor in tensors]
            options = {"causal": True, "window": (window, 0), "align": "bottom_right", "rounded": not wide}
            out = reference.attention(*leaves, **options)
            dq, dk, dv = torch.autograd.grad(out, leaves, d_out)
            # The keys whose queries all lie in this slice: from its first query on, up to a window before its end.
            skip = keys.stop - keys.start - whole
            until = None if keys.stop == LENGTH else -window
            return {"out": out.detach(), "dq": dq, "dk": dk[:, :, skip:until], "dv": dv[:, :, skip:until]}

        truth, eager = part(True), part(False)
        for name, expected in truth.items():
            start = first
            mine = got[name][:, :, start : start + expected.shape[2]]
            broken = violations(name, mine, expected, [eager[name].double().sub(expected).cpu()])
            assert not broken, f"rows from {first}: {broken}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_agree_at_the_end(dtype: torch.dtype, device: str, backend: str) -> None:
    """The last rows of a causal forward equal a call of these rows alone against the composite in float64."""
    inputs, _ = problem(device)
    query, key, value = (tensor.detach().to(dtype) for tensor in inputs.values())
    got = flash_ext.attention(query, key, value, causal=True)[:, :, -64:]
    wide = [tensor.double() for tensor in (query[:, :, -64:], key, value)]
    expected = reference.attention(*wide, causal=True, align="bottom_right")
    assert_close("out", got[0, 0], expected[0, 0])
