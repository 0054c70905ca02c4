#!/usr/bin/env python3
"""Runs a benchmark over a grid of arguments with submitit, on this machine or on Slurm, and joins the results.

    python benchmarks/sweep.py train_lm.py --grid size=small,medium --grid context=256,512 --out benchmarks/out -- \\
        --mode train-step --attention naive,sdpa,flash_ext
    python benchmarks/sweep.py attention.py --grid suite=scaling,flash,short --out benchmarks/out -- --no-check
    python benchmarks/sweep.py train_lm.py --grid size=small,medium,large,xl --out benchmarks/out \\
        --slurm-partition gpu --gpus 1 --timeout 30 -- --mode train-step
    python benchmarks/sweep.py train_lm.py --grid parallel=ddp,zero1,fsdp --out benchmarks/out \\
        --ranks 8 --slurm-partition gpu --gpus 8 -- --size medium

Each combination of the --grid values is a point: the command with --NAME VALUE of each, and with what stands after --.
A point's CSV and log lie in a folder of its own below --out. The same command again runs only the points that have not
finished, so a sweep goes on after a crash; after a commit all run again, so that no table mixes two. A point that fails
is a row with the reason, and the exit status is 1. At the end --out has all rows as sweep.csv, a table and a picture.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pandas as pd
from figures import picture_of
from harness import BenchmarkError, Reporter, command_line, make_folder, provenance, run_main, stdout_console, word
from rich.markup import escape
from tables import Table, make_table, read_csv, write_results
from tyro.conf import Positional, UseAppendAction, arg

if TYPE_CHECKING:
    from submitit import AutoExecutor

HERE = Path(__file__).resolve().parent
FINISHED, RESULT, LOG = "finished", "result.csv", "log.txt"  # in a point's folder
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
POLL_S = 0.2
MOST_COLUMNS, WIDEST_CELL = 14, 24  # of the table on the terminal


@dataclass(frozen=True)
class Point:
    """One combination of the grid: its name, such as "size=small context=256", its command and its folder."""

    name: str
    command: tuple[str, ...]
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / FINISHED).exists()


def run_point(command: tuple[str, ...], folder: str, environment: dict[str, str | None]) -> str:
    """In the job: runs the command with some variables set (None: not set); returns why it failed, or nothing."""
    variables = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    log = Path(folder, LOG)
    with log.open("w") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=variables).returncode
    if status < 0:
        return f"killed by signal {-status}"
    if status:
        lines = log.read_text().strip().splitlines() or [f"exit status {status}"]
        # What a script says of itself stands above what torchrun says of its ranks.
        scripts = tuple(f"{Path(word).name}: " for word in command if word.endswith(".py"))
        return next((line for line in lines if line.startswith(scripts)), lines[-1])
    Path(folder, FINISHED).touch()
    return ""


def points_of(args: Args) -> list[Point]:
    """The grid's points; a folder's name has a hash of command and commit: another of either is another point."""
    names, commit, points = [name for name, _ in args.grid], provenance("cpu")["commit"], []
    for values in itertools.product(*(values for _, values in args.grid)):
        words = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        chosen = [part for word in words for part in ("--" + word.split("=")[0], word.split("=", 1)[1])]
        ranks = () if args.ranks is None else (*TORCHRUN, str(args.ranks))
        line = shlex.join([commit, *ranks, args.script.name, *chosen, *args.rest])
        mark = hashlib.sha256(line.encode()).hexdigest()[:8]
        folder = args.out / "points" / f"{'_'.join(words).replace('/', '-')}-{mark}".replace("=", "-")
        command = (sys.executable, *ranks, str(args.script), *chosen, *args.rest, "--out", str(folder / RESULT))
        points.append(Point(" ".join(words), command, folder))
    return points


def make_executor(args: Args) -> AutoExecutor:
    """submitit's executor: processes here, or jobs of Slurm where a partition is named."""
    if find_spec("submitit") is None:
        raise BenchmarkError(
            "submitit is not installed; it is in the extra bench: pip install --no-build-isolation -e '.[bench]'."
        )
    import submitit

    on_slurm = args.slurm_partition is not None
    if on_slurm and shutil.which("sbatch") is None:
        raise BenchmarkError(f"--slurm-partition {args.slurm_partition}: there is no sbatch here, so no Slurm.")
    executor = submitit.AutoExecutor(args.out / "jobs", cluster="slurm" if on_slurm else "local")
    executor.update_parameters(timeout_min=args.timeout)
    if on_slurm:
        executor.update_parameters(
            name=f"sweep-{args.script.stem}", gpus_per_node=args.gpus, cpus_per_task=args.cpus,
            slurm_partition=args.slurm_partition, slurm_account=args.slurm_account,
        )  # fmt: skip
    return executor


def outcome(job: Any) -> str:
    """Why a job's point failed, or nothing; a job that died without a result tells so by an exception."""
    try:
        return job.result()
    except Exception as error:  # submitit's, or whatever the job raised
        return (str(error) or type(error).__name__).splitlines()[0]


def run_points(points: list[Point], args: Args) -> dict[Point, str]:
    """Runs the points that have not finished, so many at once; returns why those failed that did."""
    waiting = [point for point in points if not point.finished]
    print(f"{len(points)} points, {len(points) - len(waiting)} of them finished before", file=sys.stderr)
    if not waiting:
        return {}
    executor, running, failures = make_executor(args), {}, {}
    # NOTE: submitit hides all GPUs from local jobs that do not ask for some by number; on Slurm, Slurm decides.
    environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")} if not args.slurm_partition else {}
    with Reporter("sweep", len(waiting)) as progress:
        try:
            while waiting or running:
                while waiting and len(running) < args.at_once:
                    point = waiting.pop(0)
                    point.folder.mkdir(parents=True, exist_ok=True)
                    running[executor.submit(run_point, point.command, str(point.folder), environment)] = point
                for job in [job for job in running if job.done()]:
                    point = running.pop(job)
                    reason = outcome(job)
                    if reason:
                        failures[point] = reason
                    progress.advance(f"{point.name} {reason}")
                time.sleep(POLL_S)
        finally:
            for job in running:  # none, unless the sweep is interrupted
                job.cancel(check=False)
    return failures


def joined(points: list[Point], failures: dict[Point, str]) -> pd.DataFrame:
    """The rows of all points with the point's name before them; a point without a result is one row with the reason."""
    parts = []
    for point in points:
        path = point.folder / RESULT
        failure = failures.get(point, "" if path.exists() else f"it wrote no {RESULT}")
        parts.append(pd.DataFrame([{}]) if failure else read_csv(path))
        parts[-1].insert(0, "point", point.name)
        parts[-1].insert(1, "failure", failure)
    return pd.concat(parts, ignore_index=True).fillna("")


def table_of(rows: pd.DataFrame) -> Table:
    """The point and the first columns in which rows differ, but for where a row comes from and what is too wide."""
    result = rows.drop(columns=["point", "failure", *provenance("cpu")], errors="ignore")
    differ = (result[rows.failure == ""].nunique() > 1) & (result.map(len).max() <= WIDEST_CELL)
    columns = ["point", *result.columns[differ][:MOST_COLUMNS], *(["failure"] if rows.failure.any() else [])]
    table = make_table(*columns, title="All points of the sweep")
    for line in rows[columns].values:
        table.add_row(*map(escape, line))
    return table


def axis(text: str) -> tuple[str, list[str]]:
    """An argument of --grid: NAME=VALUE,VALUE."""
    name, _, values = text.partition("=")
    if not name or not all(values.split(",")):
        raise ValueError(f"{text!r} is not of the form NAME=VALUE,VALUE")
    return name.removeprefix("--"), values.split(",")


@dataclass
class Args:
    """The command line; `rest` is what stands after --."""

    script: Positional[Path]  # attention.py, train_lm.py, or the path of a script with --out FILE.csv
    # an argument of the script, without its dashes, and its values; several make a product
    grid: UseAppendAction[list[Annotated[tuple[str, list[str]], word(axis, "NAME=V,V")]]]
    out: Annotated[Path, arg(metavar="DIR")]  # sweep.csv, .md, .tex, .png, points/ and jobs/ go here
    at_once: int | None = None  # points that run at the same time (None: 1, on Slurm 16)
    timeout: Annotated[int, arg(metavar="MINUTES")] = 60  # of one point
    ranks: int | None = None  # of a point, started by torchrun on one host (None: the script alone)
    slurm_partition: str | None = None  # run on Slurm, in this partition (None: on this machine)
    slurm_account: str | None = None  # whom to charge on Slurm
    gpus: int = 1  # GPUs of a point on Slurm
    cpus: int = 4  # CPUs of a point on Slurm
    rest: list[str] = field(init=False)


def parse(argv: list[str]) -> Args:
    """Arguments, checked."""
    own, rest = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = command_line(Args, own)
    args.rest = rest
    beside = HERE / args.script
    args.script = beside if beside.is_file() else args.script.resolve()
    if not args.script.is_file():
        raise BenchmarkError(f"{args.script.name} is neither a benchmark in {HERE.name}/ nor a file.")
    if not args.grid:
        raise BenchmarkError("--grid NAME=V,V is missing: it says which arguments to run over.")
    args.at_once = args.at_once if args.at_once is not None else 16 if args.slurm_partition else 1
    for name in ("at_once", "timeout", "ranks"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise BenchmarkError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1.")
    args.out = make_folder(args.out)  # as it was given: it is part of the commands that results name
    return args


def main() -> None:
    """Runs what has not finished, joins all results; exit status 1 when a point failed."""
    args = parse(sys.argv[1:])
    points = points_of(args)
    failures = run_points(points, args)
    rows = joined(points, failures)
    table = table_of(rows)
    stdout_console(width=200).print(table)
    print(write_results(args.out / "sweep.csv", rows, {}, [table], picture_of(rows)))
    for point, reason in failures.items():
        print(f"{point.name} failed: {reason}; its log: {point.folder / LOG}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    run_main(main)
