"""Promise: any strides are read right, every element of a result is written, and results have known strides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import check, evaluate, leaf, make_inputs, name_of, rand
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_ext

OPS = torch.ops.flash_ext
B, H, L, S, E = 2, 3, 9, 11, 8
PERMUTATIONS = list(itertools.permutations(range(4)))


def laid_out(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The same values with dims laid out in memory in `order`, outermost first."""
    inverse = [order.index(i) for i in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)


def stride_order(tensor: Tensor) -> list[int]:
    """Dims of more than one element, outermost first."""
    return sorted((i for i in range(tensor.dim()) if tensor.size(i) > 1), key=lambda i: -tensor.stride(i))


def is_dense(tensor: Tensor) -> bool:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 0 or extent == tensor.numel()


@pytest.mark.parametrize("order", PERMUTATIONS, ids=lambda order: "".join(map(str, order)))
def test_every_layout(order: tuple[int, ...], device: str, backend: str) -> None:
    """All 24 layouts of q, k and v; out and gradients keep the order, but the last dim is innermost."""
    inputs = make_inputs((B, H, L, E), (B, H, S, E), device=device)
    inputs = {name: laid_out(tensor, order) for name, tensor in inputs.items()}
    got = check(flash_ext.attention, inputs, {"causal": True, "return_lse": True})
    expected = [i for i in order if i != 3] + [3]
    for name in ("out", "grad of query", "grad of key", "grad of value"):
        assert is_dense(got[name]), name
        assert stride_order(got[name]) == expected, name
    assert got["lse"].is_contiguous()


def odd_views(shape: tuple[int, ...], device: str) -> dict[str, Tensor]:
    """Views of the same shape with unusual strides."""
    batch, heads, length, width = shape
    return {
        "contiguous": rand(*shape, device=device),
        "bshd": rand(batch, length, heads, width, device=device).transpose(1, 2),
        "packed_qkv": rand(batch, length, 3, heads, width, device=device)[:, :, 1].transpose(1, 2),
        "every_other_row": rand(batch, heads, 2 * length, width, device=device)[:, :, ::2],
        "every_other_column": rand(batch, heads, length, 2 * width, device=device)[..., 1::2],
        "last_dim_outermost": laid_out(rand(*shape, device=device), (3, 0, 1, 2)),
        "expanded_batch": rand(1, heads, length, width, device=device).expand(shape),
        "expanded_heads": rand(batch, 1, length, width, device=device).expand(shape),
        "expanded_rows": rand(batch, heads, 1, width, device=device).expand(shape),
        "expanded_columns": rand(batch, heads, length, 1, device=device).expand(shape),
        "one_number": rand(1, 1, 1, 1, device=device).expand(shape),
        "overlapping": rand(batch * heads * length + width, device=device).as_strided(shape, (heads, 1, 2, 1)),
        "odd_offset": rand(batch * heads * length * width + 1, device=device)[1:].view(shape),
    }


NAMES = list(odd_views((1, 1, 1, 1), "cpu"))


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("name", NAMES)
def test_odd_strides(name: str, which: str, device: str, backend: str) -> None:
    inputs = make_inputs((B, H, L, E), (B, H, S, E), device=device)
    inputs[which] = odd_views(tuple(inputs[which].shape), device)[name]
    got = check(flash_ext.attention, inputs, {"return_lse": True})
    assert is_dense(got["out"]) and is_dense(got[f"grad of {which}"])
    assert got["out"].stride(-1) == 1


def fake_and_real(inputs: dict[str, Tensor], **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of the forward and backward ops, real and fake."""

    def run(tensors: dict[str, Tensor]) -> list[Tensor]:
        out, lse, state = OPS.attention(**tensors, return_lse=True, **options)
        grads = (torch.empty_like(out), torch.empty_like(lse))
        qkv, bias = [tensors[name] for name in ("query", "key", "value")], tensors.get("bias")
        wanted = [True, True, True, bias is not None, False]
        return [
            *(out, lse, state),
            *OPS.attention_backward(*grads, *qkv, out, lse, state, bias=bias, grad_mask=wanted, **options),
        ]

    real = run(inputs)
    mode = FakeTensorMode()
    with mode:
        fake = run({name: mode.from_tensor(tensor) for name, tensor in inputs.items()})
    return fake, real


@pytest.mark.parametrize("name", NAMES)
def test_fake_strides_are_the_real_ones(name: str, device: str) -> None:
    inputs = {
        which: odd_views((B, H, L if which == "query" else S, E), device)[name] for which in ("query", "key", "value")
    }
    inputs["bias"] = odd_views((B, H, L, S), device)[name]
    for fake, real in zip(*fake_and_real(inputs), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
            real.shape,
            real.stride(),
            real.dtype,
            real.device,
        )


@pytest.mark.parametrize("shapes", [((5, 4), (6, 4)), ((3, 5, 4), (6, 4)), ((1, 3, 5, 4), (2, 1, 6, 4))], ids=name_of)
def test_fake_strides_under_broadcasting(shapes: tuple[tuple[int, ...], tuple[int, ...]], device: str) -> None:
    inputs = make_inputs(*shapes, device=device)
    for fake, real in zip(*fake_and_real(inputs), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_every_element_is_written(dtype: torch.dtype, device: str, backend: str) -> None:
    """Fresh memory is filled with NaN (torch.utils.deterministic); none may survive in a result."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for lengths in [(1, 1), (17, 33), (70, 5)]:
            inputs = make_inputs((2, 4, lengths[0], 24), (2, 2, lengths[1], 24), dtype=dtype, device=device)
            inputs["bias"] = rand(1, 4, *lengths, dtype=dtype, device=device)
            inputs["alibi_slopes"] = torch.rand(2, 4).to(device)
            options = {"window": (3, 3), "align": "bottom_right", "return_lse": True}
            got = check(flash_ext.attention, inputs, options)
            assert not any(tensor.isnan().any() for tensor in got.values())
    finally:
        torch.use_deterministic_algorithms(before)


def test_gradient_of_a_sum_has_stride_zero(device: str, backend: str) -> None:
    """`.sum()` hands backward a grad_out of stride 0 everywhere; transposed and sliced ones are right too."""
    inputs = [leaf(t) for t in make_inputs((B, H, L, E), (B, H, S, E), device=device).values()]
    for make in (
        lambda out: torch.ones((), device=device).expand_as(out),
        lambda out: rand(B, H, E, L, device=device).mT,
        lambda out: rand(B, H, L, 2 * E, device=device)[..., ::2],
        lambda out: rand(H, 1, E, device=device).expand_as(out),
    ):
        out = flash_ext.attention(*inputs)
        grad = make(out)
        got = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        expected = torch.autograd.grad(out, inputs, grad.contiguous())
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("which", ["query", "key", "value", "mask"])
def test_slices_of_huge_buffers(which: str, device: str, backend: str) -> None:
    """Strides over 2**31 bytes: offsets are computed in 64 bits. Only the touched pages of the buffer exist."""
    far = 2**31 + 64  # elements of 2 bytes, or of 1
    inputs = make_inputs((1, 2, 1, 16), (1, 2, 3, 16), dtype=torch.bfloat16, device=device)
    inputs["mask"] = torch.tensor([[[[True, False, True]], [[True, True, False]]]], device=device)
    small = inputs[which]
    rows, cols = small.shape[-2:]
    try:
        buffer = torch.empty(far + rows * cols, dtype=small.dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room for a buffer of {far * small.element_size() >> 20} MiB: {error}")
    inputs[which] = buffer.as_strided(small.shape, (2 * far, far, cols, 1)).copy_(small)
    got = evaluate(flash_ext.attention, inputs)
    inputs[which] = small
    for name, tensor in evaluate(flash_ext.attention, inputs).items():
        assert torch.equal(tensor, got[name]), name
