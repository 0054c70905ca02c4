"""Promise: examples/packed_lm.py loses the same on packed documents as on padded ones, and tells where it does not."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch
from commands import load_example


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_example("packed_lm", "--device cpu --steps 2 --documents 4", monkeypatch)


def test_both_losses_agree(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    packed, padded, apart = capsys.readouterr().out.splitlines()
    losses = [re.findall(r"loss (\S+) to (\S+)", line) for line in (packed, padded)]
    assert losses[0] == losses[1] and float(losses[0][0][1]) < float(losses[0][0][0])
    assert float(apart.split()[-1]) < 1e-4


def test_documents_that_see_each_other_are_an_error(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_of = example.batch_of

    def joined(texts: list[torch.Tensor], packed: bool, device: str):
        batch = batch_of(texts, packed, device)
        if packed:
            batch.cu_seqlens, batch.longest = batch.cu_seqlens[[0, -1]], len(batch.tokens)
        return batch

    monkeypatch.setattr(example, "batch_of", joined)
    monkeypatch.setitem(example.TOLERANCE, torch.float32, 1e-5)
    with pytest.raises(SystemExit, match="the losses differ by more than 1e-05"):
        example.main()


def test_a_batch_is_the_documents_without_padding(example: ModuleType) -> None:
    texts = [torch.arange(n) + 1 for n in (3, 1, 4)]
    packed, padded = (example.batch_of(texts, kind, "cpu") for kind in (True, False))
    assert packed.tokens.tolist() == [1, 2, 3, 1, 1, 2, 3, 4]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert packed.targets.tolist() == [2, 3, -100, -100, 2, 3, 4, -100]
    assert (packed.cu_seqlens.tolist(), packed.longest) == ([0, 3, 4, 8], 4)
    assert padded.targets.tolist() == [[2, 3, -100, -100], [-100] * 4, [2, 3, 4, -100]]
    assert packed.real == padded.real == 5 == int((padded.targets != -100).sum())
