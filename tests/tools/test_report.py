"""Promise: docs/numbers has the tables and charts of the CSVs in benchmarks/results, and mixes no commits or builds."""

from __future__ import annotations

import re
import shutil
import sys

import pandas as pd
import pytest
from commands import BENCHMARKS

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")
PAGE = BENCHMARKS.parent / "docs/numbers/results.md"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def run(bench, monkeypatch, capsys):
    """Runs report.py with arguments; returns its exit status and what it said on stderr."""

    def report(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        try:
            bench.harness.run_main(bench.report.main)
        except SystemExit as end:
            return int(end.code), capsys.readouterr().err
        return 0, capsys.readouterr().err

    return report


def test_the_page_says_what_the_results_say(run):
    status, told = run("--check")
    assert status == 0, told


def test_a_changed_number_is_found_in_the_page_and_in_a_csv(run, tmp_path):
    page, results = tmp_path / PAGE.name, tmp_path / "results"
    for path in PAGE.parent.glob("*.*"):
        shutil.copy(path, tmp_path)
    shutil.copytree(RESULTS, results)
    where = ("--page", page, "--results", results)
    assert run("--check", *where) == (0, "")
    before, after = page.read_text().split("<!-- results:")
    number = re.search(r"\| (\d+\.\d+) \|", after).group(1)
    page.write_text(f"{before}<!-- results:{after.replace(number, f'{float(number) + 1:.2f}', 1)}")
    status, told = run("--check", *where)
    assert status == 1
    assert "where the CSVs give" in told and "run benchmarks/report.py." in told
    assert run(*where, "--no-pictures")[0] == 0
    assert run("--check", *where) == (0, "")
    assert page.read_text() == PAGE.read_text()

    path = sorted(results.glob("*/attention_*.csv"))[0]
    lines = path.read_text().splitlines()
    column = lines[0].split(",").index("ms")
    for index, line in enumerate(lines[1:], 1):
        cells = line.split(",")
        if cells[0] == "flash_ext":
            cells[column] = "0.0001"
            lines[index] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")
    assert run("--check", *where)[0] == 1


def make_results(bench, folder, suites, **origin):
    """One small CSV a suite: a peer of 2 ms and flash_ext of 1 ms."""
    same = {"dtype": "bfloat16", "pass": "fwd", "D": 64, "Sq": 512, "causal": 0, "name": "case"}
    for suite, changes in suites.items():
        rows = [
            {"peer": peer, "suite": suite, **same, "ms": ms, "err": err, "percent_of_limit": percent}
            for peer, ms, err, percent in (
                ("torch-flash", "2.0", "", "40"),
                ("fa3", "OOM", "", ""),
                ("flash_ext", "1.0", "0.5", "80"),
            )
        ]
        bench.tables.write_csv(folder / f"attention_{suite}.csv", rows, {**origin, **changes})


def test_commits_and_builds_are_not_mixed_and_devices_not_confused(bench, run, tmp_path):
    origin = {
        "commit": "a" * 12,
        "dirty": "0",
        "library": "1" * 12,
        "cpu": "AMD EPYC",
        "gpu": "NVIDIA H200",
        "threads": "2",
    }
    origin |= {"torch": "2.11.0", "cuda": "13.0", "cudnn": "91900", "driver": "580", "command": "python"}
    results, page = tmp_path / "results", tmp_path / "page.md"
    folder = results / "nvidia-h200"
    page.write_text(f"before\n{bench.report.BEGIN}\n{bench.report.END}\nafter\n")
    where = ("--page", page, "--results", results)
    make_results(bench, folder, {"grid": {}, "short": {}}, **origin)
    assert run(*where)[0] == 0
    text = page.read_text()
    assert "| grid, D 64 | bfloat16 | fwd | 1 | 2.00 | 2.00 | 80 | 0.50 |" in text
    assert (
        f"NVIDIA H200; commit {'a' * 12}, library {'1' * 12}; torch 2.11.0, cuda 13.0, cudnn 91900, driver 580." in text
    )
    assert text.startswith("before\n") and text.endswith("after\n")
    assert (folder / "attention_grid.png").stat().st_size > 5000
    assert "| forward | FlashAttention-2 | 2.00 (2.00) | 2.00 (2.00) |" in text

    make_results(bench, folder, {"grid": {}, "short": {"commit": "b" * 12}}, **origin)
    assert run("--check", *where) == (
        2,
        f"report.py: {folder}: attention_grid.csv is of commit {'a' * 12} and attention_short.csv of commit {'b' * 12}"
        ", and one table takes one commit; measure one of them again.\n",
    )
    make_results(bench, folder, {"grid": {}, "short": {"library": "2" * 12}}, **origin)
    assert f"of build {'1' * 12} and attention_short.csv of build {'2' * 12}" in run("--check", *where)[1]
    make_results(bench, folder, {"grid": {}, "short": {"gpu": "NVIDIA H100"}}, **origin)
    assert "has rows of nvidia-h100, but lies in the folder nvidia-h200." in run("--check", *where)[1]


def test_a_page_without_markers_and_no_results_are_told(run, tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    assert "does not have the markers" in run("--page", tmp_path / "page.md")[1]
    assert run("--results", tmp_path)[1] == f"report.py: --results {tmp_path} has no folder with a CSV.\n"


def test_a_chart_of_other_numbers_is_found(bench, run, tmp_path):
    """The picture carries its table: one that was drawn from other numbers, and a missing one, fail the check."""
    for path in PAGE.parent.glob("*.*"):
        shutil.copy(path, tmp_path)
    where = ("--check", "--page", tmp_path / PAGE.name)
    chart = tmp_path / "nvidia-h200.png"
    assert chart.stat().st_size < 100_000 and run(*where) == (0, "")
    rows = bench.report.chart_rows(RESULTS / "nvidia-h200")
    slow = rows["peer"] == "flash_ext"
    slower = rows.assign(ms=rows["ms"].where(~slow, (2 * rows["ms"].where(slow).astype(float)).astype(str)))
    bench.chart.draw_chart(slower, "slower", chart)
    assert "(0.5" in bench.chart.drawn_from(chart)
    assert run(*where)[0] == 1
    chart.unlink()
    assert f"{chart} is not drawn from" in run(*where)[1]


def test_the_chart_is_the_geometric_mean_and_shows_the_lowest_case(bench):
    same = {"dtype": "bfloat16", "causal": "0", "Sq": "512", "pass": "fwd"}
    rows = [
        {**same, "D": d, "peer": peer, "ms": ms}
        for d, peer, ms in (
            ("64", "torch-cudnn", "4.0"), ("64", "flash_ext", "1.0"),
            ("128", "torch-cudnn", "0.5"), ("128", "flash_ext", "1.0"),
            ("256", "torch-cudnn", "OOM"), ("256", "flash_ext", "1.0"),
        )
    ]  # fmt: skip
    table = bench.chart.chart_table(pd.DataFrame(rows))
    assert table.splitlines()[2:] == ["| forward | cuDNN | 1.41 (0.50) | 1.41 (0.50) |"]
