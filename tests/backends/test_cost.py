"""Promise: of the kernels that accept a call, the one that `explain` chooses is as fast as any by the recorded times,
and so are the tiles of sm90's forward where two choices of them were timed.

The CSVs of benchmarks/results/nvidia-h200 are of the calls as they were served, which was by sm90, those of its folder
sm80 of the same calls by name; those of the suite choice are of both by name. A table of docs/lab has short calls,
whose heads are many or few, another one few queries of grouped heads in tiles of their own and in shared ones.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch

import flash_ext

pytestmark = [pytest.mark.kernels("sm90"), pytest.mark.no_gpu]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
SHORT = ROOT / "docs" / "lab" / "2026-11-22-short-calls.md"
FEW_QUERIES = ROOT / "docs" / "lab" / "2026-11-22-few-queries.md"
SIZES = ("B", "H", "Hkv", "Sq", "Sk", "D", "Ev", "causal", "mask", "dropout", "dtype", "pass")


def recorded(folder: Path) -> dict[tuple[str, ...], float]:
    """Milliseconds of flash_ext by the columns of SIZES."""
    times = {}
    for suite in ("grid", "masks"):
        with (folder / f"attention_{suite}.csv").open() as file:
            for row in csv.DictReader(file):
                plain = row["mask"] == "none" and "softcap" not in row["name"] and "alibi" not in row["name"].lower()
                if row["peer"] == "flash_ext" and row["ms"] and row["pass"] in ("fwd", "bwd") and plain:
                    times[tuple(row[name] for name in SIZES)] = float(row["ms"])
    return times


def chosen(key: tuple[str, ...]) -> str:
    at = dict(zip(SIZES, key, strict=True))
    batch, heads, heads_k, queries, keys, dim, dim_v = (int(at[name]) for name in SIZES[:7])

    def half(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, at["dtype"]), device="meta")

    q, k = half(batch, heads, queries, dim), half(batch, heads_k, keys, dim)
    options = {"causal": at["causal"] == "1", "dropout_p": float(at["dropout"])}
    if at["mask"] == "float":
        options["bias"] = half(1, heads, queries, keys)
    plan = flash_ext.explain(q, k, half(batch, heads_k, keys, dim_v), device="cuda", **options)
    return (plan.forward if at["pass"] == "fwd" else plan.backward).backend


def test_the_choice_is_as_fast_as_any_recorded_kernel() -> None:
    """Within 5 % of the fastest in 95 % of the calls."""
    times = {"sm90": recorded(RESULTS), "sm80": recorded(RESULTS / "sm80")}
    calls = times["sm90"].keys() & times["sm80"].keys()
    assert len(calls) >= 72
    slower = [key for key in calls if times[chosen(key)][key] > 1.05 * min(of[key] for of in times.values())]
    assert len(slower) <= 0.05 * len(calls), slower


def short_calls() -> list[tuple[int, int, int, int, float]]:
    """Head dim, queries, keys, heads, and the time of sm90's forward over that of sm80's."""
    header, _, *rows = [line.strip("|").split("|") for line in SHORT.read_text().splitlines() if line.startswith("|")]
    heads = [int(re.search(r"\d+", cell)[0]) for cell in header[1:]]
    found = []
    for label, *cells in rows:
        if (sizes := re.search(r"head dim (\d+), (\d+) x (\d+)", label)) is None:
            break
        dim, queries, keys = map(int, sizes.groups())
        found += [(dim, queries, keys, count, float(cell)) for count, cell in zip(heads, cells, strict=True)]
    return found


def test_the_choice_of_short_forwards() -> None:
    """Within 5 % of the faster one in 95 % of the calls."""
    calls = short_calls()
    assert len(calls) == 36
    slower = []
    for dim, queries, keys, heads, ratio in calls:
        q, k = (torch.empty(1, heads, n, dim, dtype=torch.bfloat16, device="meta") for n in (queries, keys))
        backend = flash_ext.explain(q, k, k, device="cuda").forward.backend
        lost = {"sm90": ratio, "sm80": 1 / ratio}[backend]
        if lost > 1.05:
            slower.append((dim, queries, keys, heads, backend, ratio))
    assert len(slower) <= 0.05 * len(calls), slower


def test_the_choice_of_short_calls() -> None:
    """Within 5 % of the faster backend in 95 % of the passes that were timed with both by name."""
    times: dict[tuple[str, ...], dict[str, float]] = {}
    with (RESULTS / "choice" / "attention_choice.csv").open() as file:
        for row in csv.DictReader(file):
            backend = row["peer"].removeprefix("flash_ext-")
            if backend in ("sm80", "sm90") and row["ms"] != "failed":
                times.setdefault(tuple(row[name] for name in SIZES), {})[backend] = float(row["ms"])
    both = {key: of for key, of in times.items() if len(of) == 2}
    assert len(both) >= 180
    slower = [(key, of) for key, of in both.items() if of[chosen(key)] > 1.05 * min(of.values())]
    assert len(slower) <= 0.05 * len(both), slower


def shared_tiles() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Query heads, key heads, head dim, batch, keys and queries; microseconds in tiles of a head, in shared ones."""
    found, heads = [], ()
    text = FEW_QUERIES.read_text()
    rows = [line for line in text[text.index("| heads | batch x keys |") :].splitlines() if line.startswith("|")]
    lengths = numbers(rows[0])
    for label, sizes, *cells in (line.strip("|").split("|") for line in rows[2:]):
        heads = numbers(label) or heads
        found += [((*heads, *numbers(sizes), n), numbers(cell)) for n, cell in zip(lengths, cells, strict=True)]
    return found


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def test_the_choice_of_shared_tiles() -> None:
    """Within 5 % of the faster tiles in 95 % of the calls: few queries of grouped heads."""
    calls = shared_tiles()
    assert len(calls) == 36
    slower = []
    for call, (own, shared) in calls:
        heads, heads_k, dim, batch, keys, queries = call
        q = torch.empty(batch, heads, queries, dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(batch, heads_k, keys, dim, dtype=torch.bfloat16, device="meta")
        with flash_ext.use_backend("sm90"):
            is_shared = "share tiles" in flash_ext.explain(q, k, k, device="cuda").forward.schedule
        if (shared if is_shared else own) > 1.05 * min(own, shared):
            slower.append((call, own, shared))
    assert len(slower) <= 0.05 * len(calls), slower


def test_memory_is_worth_time() -> None:
    """A sum of dQ in float beyond 3 MiB is left to a kernel that needs none: up to 128 keys and 64 columns; sm90 needs
    none there either, but with dropout."""
    for queries, keys, dim, dropout_p, backend in (
        (1024, 77, 64, 0.1, "sm80"),
        (1024, 77, 64, 0.0, "sm90"),
        (64, 77, 64, 0.1, "sm90"),
        (1024, 300, 64, 0.1, "sm90"),
        (1024, 77, 128, 0.1, "sm90"),
    ):
        q, k = (torch.empty(8, 16, n, dim, dtype=torch.bfloat16, device="meta") for n in (queries, keys))
        assert flash_ext.explain(q, k, k, device="cuda", dropout_p=dropout_p).backward.backend == backend
