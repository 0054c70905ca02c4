"""Promise: each kernel of tiny_flash obeys the error rule, as flash_ext does: twice the error of eager attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("numpy")

from helpers import check

from flash_ext import reference
from flash_ext.lab import cuda
from flash_ext.lab.lessons import Variant, lesson
from flash_ext.lab.measure import count

LESSON = lesson("tiny_flash")


def rounded_to_tf32(x: Tensor) -> Tensor:
    """To 11 bits, ties away from 0, as cvt.rna does."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def eager_in_tf32(query: Tensor, key: Tensor, value: Tensor, rounded: bool = False) -> Tensor:
    """With P in the type of its product; the lesson's inputs are exact in it."""
    p = (query @ key.mT / 8).softmax(-1)
    return rounded_to_tf32(p) @ value


def result_of(variant: Variant, inputs: tuple[Tensor, ...], size: tuple[int, int]) -> Tensor:
    """Executed on the CPU, or by the GPU where the inputs are."""
    inputs = tuple(x.detach() for x in inputs)
    expected = variant.reference(*inputs).contiguous()
    if not expected.is_cuda:
        return count(LESSON, variant, size, inputs, expected, at_most=1 << 20).out
    out = torch.full_like(expected, torch.nan)
    cuda.kernel_call(LESSON, variant, variant.launch(size), (*inputs, out))()
    return out


@pytest.mark.parametrize("variant", LESSON.variants, ids=lambda variant: variant.name)
def test_the_error_rule(variant: Variant, device: str) -> None:
    size = (2, 65)
    inputs = tuple(x.to(device) for x in LESSON.inputs(size))
    check(
        lambda query, key, value: result_of(variant, (query[0], key[0], value[0]), size)[None],
        {name: x[None] for name, x in zip(("query", "key", "value"), inputs, strict=True)},
        truth=reference.attention,
        eager=eager_in_tf32 if variant.close else None,
        backward=False,
    )
