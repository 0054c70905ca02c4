"""Promise: sweep.py runs a grid through submitit, survives a killed point, and runs only what has not finished."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import BENCHMARKS, rows_of, start

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")
pytest.importorskip("submitit")

# A benchmark that kills itself on its second value until a file is there, and tells how often it ran and how
POINT = """
import argparse, csv, os, pathlib, signal
parser = argparse.ArgumentParser()
for name in ("--value", "--unit", "--out"):
    parser.add_argument(name)
args = parser.parse_args()
here = pathlib.Path(__file__).parent
with (here / "runs").open("a") as file:
    print(args.value, args.unit, os.environ.get("CUDA_VISIBLE_DEVICES"), args.out.split(os.sep)[0], file=file)
if args.value == "2" and not (here / "healed").exists():
    os.kill(os.getpid(), signal.SIGKILL)
with open(args.out, "w") as file:
    csv.writer(file).writerows([["value", "ms"], [args.value, 10 * int(args.value)]])
"""


def test_a_killed_point_is_a_row_and_runs_again_alone(tmp_path, monkeypatch):
    script, out = tmp_path / "point.py", Path("out")
    script.write_text(POINT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.chdir(tmp_path)
    sweep = (script, "--grid", "value=1,2,3", "--out", out, "--at-once", "2", "--", "--unit", "a b")
    done = start("sweep.py", *sweep)
    assert done.returncode == 1, done.stderr
    assert "value=2 failed: killed by signal 9" in done.stderr
    rows = rows_of(out / "sweep.csv")
    assert [(row["point"], row["failure"], row["ms"]) for row in rows] == [
        *(("value=1", "", "10"), ("value=2", "killed by signal 9", ""), ("value=3", "", "30")),
    ]
    assert sorted((tmp_path / "runs").read_text().splitlines()) == ["1 a b 3 out", "2 a b 3 out", "3 a b 3 out"]

    (tmp_path / "healed").touch()
    done = start("sweep.py", *sweep)
    assert done.returncode == 0, done.stderr
    assert "3 points, 2 of them finished before" in done.stderr
    assert [row["ms"] for row in rows_of(out / "sweep.csv")] == ["10", "20", "30"]
    assert (tmp_path / "runs").read_text().splitlines()[3:] == ["2 a b 3 out"]
    assert "| value=2 | 2 | 20 |" in (out / "sweep.md").read_text()
    assert (out / "sweep.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nobody.py", "--grid", "a=1"), "nobody.py is neither a benchmark in benchmarks/ nor a file."),
        (("train_lm.py", "--grid", "a"), "'a' is not of the form NAME=VALUE,VALUE"),
        (("train_lm.py", "--grid", "a=1", "--at-once", "0"), "--at-once 0 must be at least 1."),
        (("train_lm.py", "--grid", "a=1", "--ranks", "0"), "--ranks 0 must be at least 1."),
        (("train_lm.py", "--grid", "a=1", "--slurm-partition", "gpu"), "there is no sbatch here, so no Slurm."),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(bench, monkeypatch, capsys, tmp_path, arguments, words):
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments, "--out", str(tmp_path)])
    monkeypatch.setattr(bench.sweep.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        bench.harness.run_main(bench.sweep.main)
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_points_of_a_grid(bench, tmp_path):
    args = bench.sweep.parse(
        [
            "train_lm.py",
            "--grid",
            "size=tiny,small",
            "--grid",
            "context=8",
            "--out",
            str(tmp_path),
            "--",
            "--steps",
            "1",
        ]
    )
    points = bench.sweep.points_of(args)
    assert [point.name for point in points] == ["size=tiny context=8", "size=small context=8"]
    folder = points[0].folder
    expected = (str(BENCHMARKS / "train_lm.py"), "--size", "tiny", "--context", "8", "--steps", "1", "--out")
    assert points[0].command == (sys.executable, *expected, str(folder / "result.csv"))
    assert folder.parent == tmp_path / "points" and len({point.folder for point in points}) == 2
    args.rest = ["--steps", "2"]
    assert bench.sweep.points_of(args)[0].folder != folder


# Rank 0 of several writes the result; a value that it does not take ends all
RANKS = """
import os, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if arguments["--value"] == "3":
    if os.environ["RANK"] != "0":
        time.sleep(60)  # torchrun ends it; two sentences at once might be one line
    sys.exit("ranks.py: no value 3")
if os.environ["RANK"] == "0":
    with open(arguments["--out"], "w") as file:
        file.write(f"ranks,ms\\n{os.environ['WORLD_SIZE']},10\\n")
"""


def test_a_point_of_several_ranks(tmp_path):
    script, out = tmp_path / "ranks.py", tmp_path / "out"
    script.write_text(RANKS)
    done = start("sweep.py", script, "--grid", "value=1,3", "--out", out, "--ranks", "2")
    assert done.returncode == 1, done.stderr
    rows = rows_of(out / "sweep.csv")
    assert [(row["ranks"], row["failure"]) for row in rows] == [("2", ""), ("", "ranks.py: no value 3")]
