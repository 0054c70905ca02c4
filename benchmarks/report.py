#!/usr/bin/env python3
"""Writes docs/numbers/results.md, and pictures, from the CSVs in benchmarks/results/<device>/.

    python benchmarks/report.py            the page between its markers, its charts, and a .png beside every CSV
    python benchmarks/report.py --check    writes nothing; exit status 1 when the page or a chart says something else

A folder is named after the device that its rows tell (nvidia-h200, amd-epyc-2-threads). It gives at most three tables:
attention alone (all attention_*.csv), the host time of a call, and steps of a language model (all train_lm*.csv); and
where it has the suite grid, a chart of it (chart.py). One table takes results of one commit and one build of the
library; results of two are refused.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
from chart import SUITE, chart_table, draw_chart, drawn_from
from figures import OURS, best_ratios, number, picture_of
from harness import BenchmarkError, command_line, device_slug, geomean, run_main
from tables import Table, make_table, markdown, read_csv
from tyro.conf import arg

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/numbers/results.md"
BEGIN = "<!-- results: written by benchmarks/report.py from benchmarks/results -->"
END = "<!-- end of results -->"
VERSIONS = ("torch", "cuda", "cudnn", "driver")


@dataclass
class Args:
    check: bool = False  # compare only; exit status 1 when the page disagrees with the CSVs
    results: Annotated[Path, arg(metavar="DIR")] = ROOT / "benchmarks/results"
    page: Annotated[Path, arg(metavar="FILE")] = PAGE
    pictures: bool = True  # with --no-pictures they are not drawn again


def read_folder(folder: Path) -> dict[Path, pd.DataFrame]:
    """The CSVs of one device, each with its rows; rows of another device are refused."""
    found = {path: rows for path in sorted(folder.glob("*.csv")) if len(rows := read_csv(path))}
    for path, rows in found.items():
        for row in rows[["gpu", "cpu", "threads"]].drop_duplicates().to_dict("records"):
            if device_slug(row) != folder.name:
                raise BenchmarkError(f"{path} has rows of {device_slug(row)}, but lies in the folder {folder.name}.")
    return found


def together(files: dict[Path, pd.DataFrame]) -> pd.DataFrame:
    """All rows of the files, which must be of one commit and of one build where they used the library."""
    rows = pd.concat([of_file.assign(file=path.name) for path, of_file in files.items()], ignore_index=True).fillna("")
    for column, word in (("commit", "commit"), ("library", "build")):
        seen = rows[rows[column] != ""].drop_duplicates(column)[[column, "file"]].values
        if len(seen) > 1:
            (one, of_one), (two, of_two) = seen[:2]
            raise BenchmarkError(
                f"{next(iter(files)).parent}: {of_one} is of {word} {one} and {of_two} of {word} {two}, and one table "
                f"takes one {word}; measure one of them again."
            )
    return rows


def caption(title: str, rows: pd.DataFrame) -> str:
    """Where a table's figures come from, in one line above it."""
    row = rows.iloc[(rows["library"] != "").argmax()]  # the first that used the library, if any
    device = row["gpu"] or f"{row['cpu']}, {row['threads']} threads"
    dirty = " with changes" if (rows["dirty"] == "1").any() else ""
    versions = ", ".join(f"{name} {row[name]}" for name in VERSIONS if row.get(name))
    return f"{title}: {device}; commit {row['commit']}{dirty}, library {row['library']}; {versions}."


def _shown(values: pd.Series, reduce: Callable[[pd.Series], float], digits: str) -> str:
    values = values.dropna()
    return f"{reduce(values):{digits}}" if len(values) else "-"


def attention_table(rows: pd.DataFrame) -> Table:
    """One line a suite, dtype and pass, in the suite grid also a head dim: flash_ext against the fastest other peer."""
    headers = ("cases", "best other / flash_ext, geomean", "lowest", "% of limit, median", "err, largest")
    table = make_table("suite", "dtype", "pass", right=headers)
    part = rows["suite"].where(rows["suite"] != "grid", "grid, D " + rows["D"])
    for key, of_line in rows.groupby([part, "dtype", "pass"], sort=False):
        ratios, ours = best_ratios(of_line), of_line[of_line["peer"] == OURS]
        limits = number(ours["percent_of_limit"]) if "percent_of_limit" in ours else pd.Series()
        table.add_row(
            *key, str(len(ratios)), _shown(ratios, geomean, ".2f"), _shown(ratios, min, ".2f"),
            _shown(limits, statistics.median, ".0f"), _shown(number(ours["err"]), max, ".2f"),
        )  # fmt: skip
    return table


def host_table(rows: pd.DataFrame) -> Table:
    """One line a kind of tensors, pass and arguments: microseconds of every peer."""
    peers = rows["peer"].unique()
    table = make_table("tensors", "pass", "arguments", right=[f"{peer}, us" for peer in peers])
    for key, of_line in rows.groupby(["tensors", "pass", "arguments"], sort=False):
        table.add_row(*key, *of_line.set_index("peer")["us"][peers])
    return table


STEP_KEYS = ["size", "batch", "context", "precision", "mode", "compile", "checkpoint", "attention"]


def step_table(rows: pd.DataFrame) -> Table:
    """One line a setting, the one with most warm-up: the step, its throughput, MFU and peak memory."""
    figures = ("step, ms", "tokens/s", "MFU %", "peak MiB")
    table = make_table("size", "batch x context", "precision", "mode", "attention", right=figures)
    for _, of_setting in rows.groupby(STEP_KEYS, sort=False):
        row = of_setting.loc[of_setting["warmup"].astype(int).idxmax()]
        options = "".join(f", {name}" for name in ("compile", "checkpoint") if row[name] not in ("0", "none"))
        step = row["status"] if row["status"] != "ok" else f"{row['step_ms']} ± {row['step_std'] or '-'}"
        costs = (row[name] or "-" for name in ("tokens_s", "mfu_percent", "peak_mib"))
        windows = f"{row['batch']} x {row['context']}"
        table.add_row(row["size"], windows, row["precision"], row["mode"] + options, row["attention"], step, *costs)
    return table


# title, which files, which of their columns tell that they are of this kind, the table
KINDS: tuple[tuple[str, str, str, Callable[[pd.DataFrame], Table]], ...] = (
    ("Attention alone", "attention_*.csv", "Sq", attention_table),
    ("Host time of one call", "*host_overhead.csv", "us", host_table),
    ("A language model's step", "train_lm*.csv", "step_ms", step_table),
)


CHART = "Times faster, suite grid, geometric mean over head dims and masks (lowest case)"


def chart_rows(folder: Path) -> pd.DataFrame:
    """The rows that the chart of one device shows; none where the suite grid was not measured there."""
    path = folder / f"attention_{SUITE}.csv"
    return read_csv(path) if path.is_file() else pd.DataFrame()


def report_of(folder: Path) -> str:
    """The Markdown of one device."""
    files, parts = read_folder(folder), [f"## {folder.name}"]
    grid = chart_rows(folder)
    if len(grid):
        parts += [f"![Times faster than cuDNN and FlashAttention-2]({folder.name}.png)", caption(CHART, grid)]
        parts += [chart_table(grid)]
    for title, pattern, column, table in KINDS:
        chosen = {path: rows for path, rows in files.items() if path.match(pattern) and column in rows}
        if chosen:
            rows = together(chosen)
            parts += [caption(title, rows), markdown(table(rows))]
    return "\n\n".join(parts)


def report(results: Path) -> str:
    """The Markdown of all devices."""
    folders = sorted(folder for folder in results.iterdir() if any(folder.glob("*.csv"))) if results.is_dir() else []
    if not folders:
        raise BenchmarkError(f"--results {results} has no folder with a CSV.")
    return "\n\n".join(report_of(folder) for folder in folders)


def split(page: Path) -> tuple[str, str, str]:
    """The page before its results, the results, and what follows; the markers belong to what is around."""
    text = page.read_text() if page.is_file() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BenchmarkError(f"--page {page} does not have the markers {BEGIN!r} and {END!r} once each, in this order.")
    before, rest = text.split(BEGIN)
    found, after = rest.split(END)
    return before + BEGIN, found, END + after


def first_difference(found: str, expected: str) -> str:
    """The first line that the page has wrong, and what it should be."""
    pairs = zip([*found.splitlines(), ""], [*expected.splitlines(), ""], strict=False)
    wrong, right = next(((a, b) for a, b in pairs if a != b), ("", ""))
    return f"it says {wrong!r} where the CSVs give {right!r}"


def main() -> None:
    """Writes, or with --check compares."""
    args = command_line(Args)
    expected = f"\n\n{report(args.results)}\n\n"
    before, found, after = split(args.page)
    charts = {args.page.with_name(f"{path.name}.png"): chart_rows(path) for path in sorted(args.results.iterdir())}
    if args.check:
        if found != expected:
            print(
                f"report.py: {args.page} is not what {args.results} gives: {first_difference(found, expected)}; "
                "run benchmarks/report.py.",
                file=sys.stderr,
            )
            sys.exit(1)
        for path, rows in charts.items():
            if len(rows) and drawn_from(path) != chart_table(rows):
                print(f"report.py: {path} is not drawn from {args.results}; run benchmarks/report.py.", file=sys.stderr)
                sys.exit(1)
        return
    args.page.write_text(before + expected + after)
    print(f"Written: {args.page}")
    for path, rows in charts.items() if args.pictures else ():
        if len(rows):
            dtypes = ", ".join(sorted(rows["dtype"].unique()))
            draw_chart(rows, caption(f"Suite {SUITE}, {dtypes}", rows), path)
            print(f"Written: {path}")
    for path in sorted(args.results.glob("*/*.csv")) if args.pictures else ():
        rows = read_csv(path)
        drawing = picture_of(rows) if len(rows) else None
        if drawing is not None:
            drawing(rows, path.with_suffix(".png"))
            print(f"Written: {path.with_suffix('.png')}")


if __name__ == "__main__":
    run_main(main)
