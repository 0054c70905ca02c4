"""Promise: examples/generate.py gives one text with both caches, gives pages back, and tells where texts differ."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch
from commands import load_example


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_example("generate", "--device cpu --requests 5 --batch 2", monkeypatch)
    monkeypatch.setitem(module.LENGTHS, "cpu", (40, 20, 16))
    return module


def test_both_caches_give_one_text(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    paged, dense, same = capsys.readouterr().out.splitlines()
    assert same == "5 of 5 answers are the same"
    sizes = [float(re.search(r"take (\S+) MiB", line)[1]) for line in (paged, dense)]
    assert 0 < sizes[0] <= sizes[1]


def test_a_wrong_page_is_an_error(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    places = example.Paged.places

    def swapped(cache, requests):
        return {name: table.flip(1) for name, table in places(cache, requests).items()}

    monkeypatch.setattr(example.Paged, "places", swapped)
    with pytest.raises(SystemExit, match="the two caches gave other answers"):
        example.main()


@torch.inference_mode()
def test_pages_come_back_and_the_prefix_is_shared(example: ModuleType) -> None:
    model = example.Model(32, 1, 2, 1, 80)
    cache = example.Paged((1, 1, 16), 12, {"dtype": torch.float32, "device": "cpu"})
    prefix = list(range(40))
    shared = example.Request(prefix, 0)
    cache.open(shared)
    model(torch.tensor([prefix]), cache, [shared])
    assert len(shared.pages) == 3 and cache.most == 48
    cache.prefix = shared.pages[:2]  # whole pages alone may be shared
    requests = [example.Request([7, 8, 9], count) for count in (3, 9, 1, 5)]
    example.serve(model, cache, requests, prefix, batch=2)
    assert [len(request.answer) for request in requests] == [3, 9, 1, 5]
    assert requests[1].answer[:5] == requests[3].answer and requests[1].answer[:3] == requests[0].answer
    assert len(cache.free) == 12 - 3
    assert all(request.pages[:2] == cache.prefix for request in requests)
