"""Promise: again.py runs the commands of a folder's CSVs, says which fail, and leaves out what is not one command's."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import BENCHMARKS, rows_of, start

pytest.importorskip("tyro")
RESULTS = BENCHMARKS / "results"


def write(path: Path, *commands: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["command", *(f'"{command}"' for command in commands), ""]))


def test_commands_run_in_another_folder_and_a_failing_one_does_not_stop_them(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    chosen = "--suite cpu --quick --dtypes fp32 --case GQA --no-host --peers torch eager"
    measure = f"python benchmarks/attention.py {chosen}"
    write(old / "attention_bad.csv", f"python benchmarks/attention.py --case nothing --out {old}")
    write(old / "attention_cpu.csv", f"{measure} --out {old}", f"{measure} --out {old}")
    write(old / "sweep" / "sweep.csv", f"{measure} --out {old}/points/1.csv", f"{measure} --out {old}/points/2.csv")
    write(old / "moved.csv", "python benchmarks/attention.py --out elsewhere")
    done = start("again.py", old, "--out", new, "--limit", "200")
    assert done.returncode == 1
    assert "left out: moved.csv, 1 CSV\nleft out: sweep, 1 CSV\n" in done.stdout
    assert f"{measure} --out {new}\n" in done.stdout
    failed = f"failed: python benchmarks/attention.py --case nothing --out {new}: exit status 2\n"
    assert done.stderr.endswith(failed) and done.stderr.count("failed: ") == 1
    assert {row["peer"] for row in rows_of(new / "attention_cpu.csv")} == {"torch", "eager"}
    assert not (old / "attention_cpu.md").exists()


def test_a_command_that_takes_too_long_is_told(tmp_path: Path) -> None:
    write(tmp_path / "some.csv", f"python benchmarks/train_lm.py --help --out {tmp_path}/some.csv")
    done = start("again.py", tmp_path, "--limit", "0.01")
    assert done.returncode == 1 and done.stderr.endswith("took more than 0.01 s\n")


def test_rounds_and_seconds_are_of_attention_alone(tmp_path: Path) -> None:
    attention, train = "python benchmarks/attention.py --suite cpu", "python benchmarks/train_lm.py --size small"
    write(tmp_path / "a.csv", f"{attention} --rounds 5 --calls 9 --out {tmp_path}")
    write(tmp_path / "b.csv", f"{train} --out {tmp_path}/b.csv")
    done = start("again.py", tmp_path, "--dry-run", "--rounds", "3", "--seconds", "0.2")
    short = attention.replace("--suite", "--rounds 3 --seconds 0.2 --suite")
    assert done.stdout == f"{short} --calls 9 --out {tmp_path}\n{train} --out {tmp_path}/b.csv\n"
    as_they_are = start("again.py", tmp_path, "--dry-run")
    assert f"{attention} --rounds 5 --calls 9 --out {tmp_path}\n" in as_they_are.stdout


@pytest.mark.parametrize("folder", [path.name for path in RESULTS.iterdir() if path.is_dir()])
def test_the_results_here_can_be_taken_again(folder: str) -> None:
    done = start("again.py", RESULTS / folder, "--dry-run")
    assert done.returncode == 0 and "python benchmarks/" in done.stdout
    kept = {path.stem.removeprefix("attention_") for path in (RESULTS / folder).glob("attention_*.csv")}
    assert all(f"--suite {name} " in done.stdout for name in kept)


def test_a_folder_without_results_is_told(tmp_path: Path) -> None:
    done = start("again.py", tmp_path)
    assert done.returncode == 2 and done.stderr == f"again.py: {tmp_path} has no CSV to take again.\n"
