"""Promise: with every combination of features, strides of any kind give the bits of contiguous tensors on a GPU, and
obey the error rule everywhere: of inputs, of what is added to the scores, and of grad_out."""

from __future__ import annotations

from features import QKV, Combination, Sizes, tried
from layouts import LAYOUTS, Layout
from problems import Problem, problem, strict
from torch import Tensor, equal

LENGTHS = {"cpu": (21, 35), "cuda": (150, 203)}
CHOICES = (*((name,) for name in (*QKV, "grad_out")), (*QKV, "grad_out", "mask", "bias"))


def laid_out(dense: Problem, names: tuple[str, ...], layout: Layout, backend: str) -> tuple[Problem, Layout]:
    """The problem with these tensors elsewhere, and what becomes of grad_out."""

    def view(name: str, tensor: Tensor) -> Tensor:
        return layout(tensor) if name in names and dense.may_lie(name, tensor, layout, backend) else tensor

    return dense.with_views(view), lambda grad: view("grad_out", grad)


def test_layouts(combination: Combination, device: str, backend: str) -> None:
    """One tensor at a time, then all; where bits may differ one layout a combination, in turn."""
    dense = problem(strict(combination, backend), Sizes(*LENGTHS[device]), device, backend)
    if backend in ("cpu", "chunked"):  # torch's products are rounded as they like
        layout = LAYOUTS[tried(backend).index(combination) % len(LAYOUTS)]
        views, of_grad = laid_out(dense, CHOICES[-1], layout, backend)
        views.check(views.among_nan(device, of_grad))
        return
    expected = dense.evaluate()
    for layout in LAYOUTS:
        for names in CHOICES:
            views, of_grad = laid_out(dense, names, layout, backend)
            got = views.evaluate(views.among_nan(device, of_grad))
            for name, tensor in expected.items():
                what = layout.__name__, names, name
                assert not dense.is_ordered(name, backend) or equal(got[name], tensor), what
                if name in ("out", *(f"grad of {name}" for name in QKV)):
                    assert got[name].stride(-1) == 1, what
