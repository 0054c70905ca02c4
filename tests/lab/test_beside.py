"""Promise: what a lesson times beside its kernels gives what it says; what cannot be called is left out, and why."""

from __future__ import annotations

import re
import sys

import pytest
import torch

pytest.importorskip("numpy")

from lab_sizes import SIZES

from flash_ext.lab import cuda
from flash_ext.lab.lessons import Call, LabError, lesson, lessons
from flash_ext.lab.measure import require_equal, time_beside
from flash_ext.lab.reduction.lesson import by_cub

CASES = [(one.name, call) for one in lessons() for call in one.beside]


@pytest.mark.parametrize("name, call", CASES, ids=lambda case: case if isinstance(case, str) else case.name)
def test_every_call_is_right(name: str, call: Call, device: str) -> None:
    if call.prepare is by_cub:
        pytest.importorskip("cuda.compute")
        if device == "cpu":
            pytest.skip("CUB reduces on a GPU")
    one = lesson(name)
    for size in SIZES[name]:
        inputs = one.inputs(one.checked(size.split(), gpu=True))
        timed = call.prepare(*(x.to(device) for x in inputs))
        require_equal(one, call, timed().cpu(), call.reference(*inputs))


def test_names_are_those_of_no_kernel() -> None:
    for one in lessons():
        names = [*(variant.name for variant in one.variants), *(call.name for call in one.beside)]
        assert len(set(names)) == len(names)


def test_times_and_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "seconds", lambda call: float(call().sum()))
    one = lesson("reduction")
    seconds, left_out = time_beside(one, (torch.ones(100),), {}, "cpu")
    assert seconds == {"torch.sum, its own kernel": 100.0}
    assert len(left_out) == 1 and re.match(r"CUB's reduction is left out: it needs .*'cuda-cccl\[minimal", left_out[0])


def test_a_wrong_result_is_found() -> None:
    one, x = lesson("scan"), torch.ones(100)
    with pytest.raises(LabError, match=r"scan torch\.cumsum, CUB's scan differs from torch"):
        time_beside(one, (x,), {one.beside[0].reference: x}, "cpu")


def test_cub_is_called_as_its_package_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in with the words of cuda.compute 1: its memory is asked for once, outside what is timed."""
    asked = []

    def reducer(*, temp_storage, d_in, d_out, num_items, op, h_init, stream):
        asked.append(temp_storage)
        if temp_storage is None:
            return 768
        assert (temp_storage.nbytes, num_items, op, h_init.shape) == (768, 100, "+", (1,)) and stream
        d_out[0] = d_in.sum()
        return 768

    module = type("compute", (), {"OpKind": type("OpKind", (), {"PLUS": "+"})})
    module.make_reduce_into = staticmethod(lambda *, d_in, d_out, op, h_init: reducer)
    monkeypatch.setitem(sys.modules, "cuda.compute", module)
    timed = by_cub(torch.ones(100))
    assert [timed().item(), timed().item()] == [100.0, 100.0]
    assert len(asked) == 3 and asked[0] is None and asked[1] is asked[2]
