"""Promise: the context, shards, packed sequences and dropout over ranks; what is wrong is one sentence on all ranks.

context_cases.py runs once for each number of ranks, on gloo; each of its cases is a test here.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import context_cases
import gpu_cases
import packed_cases
import pytest
import ranks
import torch

from flash_ext import reference
from flash_ext.distributed import allgather
from flash_ext.distributed.layout import BALANCES, Band, Segment, even_layout, layout_of, outer_layout, visible, within
from flash_ext.distributed.local import Options

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[str]]]:
    return cache(lambda size: ranks.run(context_cases.__file__, size, tmp_path_factory.mktemp("store")))


@pytest.mark.parametrize("name", context_cases.cases(2))
@pytest.mark.parametrize("size", [2, 4])
def test_case(said: Callable[[int], dict[str, list[str]]], size: int, name: str) -> None:
    assert set(said(size)[name]) == {ranks.RIGHT}, said(size)[name]


@pytest.mark.gpu(2)
def test_packed_sequences_on_two_gpus(tmp_path: Path) -> None:
    for name, told in ranks.run(packed_cases.__file__, 2, tmp_path, "cuda").items():
        assert set(told) == {ranks.RIGHT}, (name, told)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", gpu_cases.cases(2))
def test_case_on_two_gpus(tmp_path: Path, name: str) -> None:
    assert ranks.run(gpu_cases.__file__, 2, tmp_path, "cuda", [name]) == {name: [ranks.RIGHT] * 2}


@pytest.mark.parametrize("what", ["dies", "sleeps", "never_comes"])
def test_an_absent_rank_ends_the_others(tmp_path: Path, what: str) -> None:
    """With an error, and by torch's time-out at the latest, which is 5 seconds here; one that lives does not help."""
    script = str(Path(ranks.__file__).with_name("dying_rank.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, str(tmp_path / "store"), what],
        capture_output=True, text=True, timeout=120, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = map(int, done.stdout.split())
    assert last == 3 and first != 0
    assert "RuntimeError" in done.stderr or "DistBackendError" in done.stderr
    assert what == "dies" or "time" in done.stderr.splitlines()[-1].lower(), done.stderr


def test_what_is_visible() -> None:
    """A part of a band has sides that are not negative, and is all that the two segments see of each other."""
    rng = random.Random(0)
    for _ in range(2000):
        rows, keys = rng.randint(1, 12), rng.randint(1, 12)
        window = tuple(rng.choice([None, rng.randint(0, 6)]) for _ in "lr")
        causal, bottom_right = rng.random() < 0.5, rng.random() < 0.5
        align = "bottom_right" if bottom_right else "top_left"
        whole = reference.band_mask(rows, keys, causal=causal, window=window, align=align)
        q0, k0 = rng.randrange(rows), rng.randrange(keys)
        held, read = Segment(q0, 0, rng.randint(0, rows - q0)), Segment(k0, 0, rng.randint(0, keys - k0))
        expected = torch.zeros_like(whole)
        expected[q0 : held.end, k0 : read.end] = whole[q0 : held.end, k0 : read.end]
        part = visible(Band.of(causal, window, bottom_right, rows, keys), held, read)
        assert (part is None) == (not expected.any())
        if part is not None:
            got = torch.zeros_like(whole)
            sizes = [s.stop - s.start for s in (part.queries, part.keys)]
            got[part.queries, part.keys] = reference.band_mask(*sizes, window=(part.left, part.right))
            assert torch.equal(got, expected)


@pytest.mark.parametrize("balance", BALANCES)
def test_layouts(balance: str) -> None:
    """Segments are the sequence, in order; a mesh's rows hold together what their ranks hold."""
    for lengths in ((3, 0, 7, 4), (5, 5, 5, 5), (0, 0, 0, 0), (1, 0, 0, 0)):
        layout = layout_of(lengths, balance)
        segments = sorted((s for held in layout.ranks for s in held if s.size), key=lambda s: s.start)
        assert [s.start for s in segments] == [0, *(s.end for s in segments)][: len(segments)]
        assert sum(s.size for s in segments) == layout.length == sum(lengths)
        outer = outer_layout(layout, 2, 2)
        for rank in range(2):
            together = within(layout, rank, 2)
            ours = [p for s in outer.ranks[rank] for p in range(s.start, s.end)]
            held = {}
            for member, segments_ in enumerate(together.ranks):
                for near, far in zip(segments_, layout.ranks[2 * rank + member], strict=True):
                    held |= dict(zip(range(near.start, near.end), range(far.start, far.end), strict=True))
            assert [held[i] for i in range(together.length)] == ours
    assert [even_layout(10, 4, balance).size(rank) for rank in range(4)] == [3, 3, 2, 2]


def test_under_a_causal_band_zigzag_has_equal_work() -> None:
    layout = even_layout(64, 4, "zigzag")
    keep = reference.band_mask(64, 64, causal=True)
    work = [sum(int(keep[s.start : s.end].sum()) for s in held) for held in layout.ranks]
    assert len(set(work)) == 1


def test_heads_are_cut_into_chunks_alike() -> None:
    """By the length of the whole, so on every rank, whatever it reads."""
    assert allgather.MAX_CHUNKS > 1
    from types import SimpleNamespace

    for units in (1, 2, 3, 6, 8, 12):
        q, k = torch.empty(1, 2 * units, 5, 8, device="meta"), torch.empty(1, units, 5, 8, device="meta")
        plan = SimpleNamespace(rows_dim=2, length=1 << 30, options=Options())
        chunks = allgather._chunks(plan, q, k, k, False)
        assert len(chunks) == {1: 1, 2: 2, 3: 3, 6: 6, 8: 8, 12: 6}[units]
        assert [h for _, heads, _ in chunks for h in range(heads.start, heads.stop)] == list(range(units))
        assert len(allgather._chunks(plan, q, k, k, True)) == 1


def test_it_is_imported_when_it_is_asked_for() -> None:
    script = """
import sys, flash_ext
assert "flash_ext.distributed" not in sys.modules
assert flash_ext.distributed.context_parallel_attention
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
