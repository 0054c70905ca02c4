"""Promise: each kernel of matmul gives torch's bits, and one that uses a tile too early or too late is found."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numpy")

from flash_ext.lab.lessons import LabError, Lesson, Variant, lesson
from flash_ext.lab.measure import count

LESSON = lesson("matmul")


@pytest.mark.parametrize("variant", LESSON.variants, ids=lambda variant: variant.name)
def test_bits(variant: Variant) -> None:
    """Where rows are aligned, on either side or on none, and where all three sizes end in the middle of a tile."""
    for size in ((3, 5, 2), (65, 8, 17), (17, 66, 36), (12, 68, 48), (64, 64, 32)):
        inputs = LESSON.inputs(size)
        expected = torch.matmul(*inputs)
        assert torch.equal(count(LESSON, variant, size, inputs, expected).out, expected), size


def test_inputs_are_those_that_tf32_has() -> None:
    for x in LESSON.inputs((64, 64, 64)):
        assert torch.equal(x, (16 * x).round() / 16) and 2 < x.abs().max() < 2**11 / 16
        assert abs(x.std() - 1) < 0.05


@pytest.mark.parametrize("name, precision", [("cp_async", "ieee"), ("mma", "tf32")])
def test_a_peer_multiplies_in_its_precision(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves torch as it was."""
    settings, seen = torch.backends.cuda.matmul, []
    before, matmul = settings.fp32_precision, torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda a, b: seen.append(settings.fp32_precision) or matmul(a, b))
    LESSON.variant(name).peer.call(*LESSON.inputs((3, 4, 5)))
    assert seen == [precision] and settings.fp32_precision == before


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("kFloats * next, ys", "kFloats * now, ys"),  # over the tile that is read
        ("cp_async_commit();  // of nothing", "//"),  # so the wait is for a group too few
        ("y[now][deep + 3]", "y[now][deep + 2]"),
    ],
)
def test_a_wrong_pipeline_is_found(right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = LESSON.text(LESSON.variant("cp_async"))
    assert text.count(right) == 1
    monkeypatch.setattr(Lesson, "text", lambda lesson, variant: text.replace(right, wrong))
    inputs = LESSON.inputs((16, 16, 48))
    with pytest.raises(LabError, match="matmul cp_async differs from torch"):
        count(LESSON, LESSON.variant("cp_async"), (16, 16, 48), inputs, torch.matmul(*inputs))
