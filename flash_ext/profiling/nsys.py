"""``python -m flash_ext.profiling nsys -- COMMAND``: runs Nsight Systems around the measured steps and reports.

``COMMAND`` says what is measured with cudaProfilerStart and -Stop (``torch.cuda.profiler``), as
``benchmarks/train_lm.py --nvtx`` does. Kernels are told apart by NVTX ranges: those of ``flash_ext.profiling.range``
and of flash_ext's operators.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flash_ext.profiling.nsys_report import REPORTS, StatsError, markdown, read_stats

# Folders that hold an nsys: CUDA toolkits, Nsight Systems' own and Nsight Compute's, which brings one along.
PLACES = (
    "usr/local/cuda*/bin/nsys",
    "opt/nvidia/nsight-systems*/bin/nsys",
    "opt/nvidia/nsight-systems*/*/bin/nsys",
    "opt/nvidia/nsight-compute*/*/host/target-linux-*/nsys",
    "usr/local/cuda*/nsight-compute*/host/target-linux-*/nsys",
    "opt/nvidia/nsight-compute*/host/target-linux-*/nsys",
)
WHERE_TO_GET = "install Nsight Systems from https://docs.nvidia.com/nsight-systems, or name its nsys with --nsys"


class NsysError(Exception):
    """One sentence for the terminal."""


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(path)))


def find_nsys(given: str | None = None, root: Path = Path("/")) -> Path:
    """The nsys that was named, else that of PATH, of CUDA_HOME, or the newest in the usual places.

    Raises:
        NsysError: there is none.
    """
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise NsysError(f"--nsys is {given!r}, which cannot be run; it must be the program nsys")
        return Path(found)
    homes = [str(Path(os.environ[name]) / "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for path in (None, *homes):
        if found := shutil.which("nsys", path=path):
            return Path(found)
    for place in PLACES:
        if candidates := sorted(root.glob(place), key=_version):
            return candidates[-1]
    raise NsysError(f"nsys is not on PATH nor in a CUDA toolkit's or Nsight's folder; {WHERE_TO_GET}")


def _run(command: list[str], what: str) -> None:
    print("+ " + shlex.join(command), file=sys.stderr, flush=True)
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise NsysError(f"{what} ended with exit code {code}; its own words are above")


def profile(nsys: Path, command: list[str], report: Path) -> Path:
    """Runs the command under nsys; returns the report's file."""
    report = report.with_suffix(".nsys-rep")
    intermediate = report.with_suffix(".qdstrm")
    for old in (report, intermediate):
        old.unlink(missing_ok=True)
    options = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"]
    options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"]
    _run([str(nsys), "profile", *options, f"--output={report}", *command], f"nsys profile {shlex.join(command)}")
    if not report.exists() and intermediate.exists():
        # NOTE: seen with the nsys in Nsight Compute's folder: it does not find the importer that lies beside it.
        importers = sorted(nsys.resolve().parent.parent.glob("*/QdstrmImporter"))
        if not importers:
            raise NsysError(
                f"nsys wrote {intermediate} but has no QdstrmImporter to make a report of it; {WHERE_TO_GET}"
            )
        _run([str(importers[0]), f"--input-file={intermediate}", f"--output-file={report}"], str(importers[0]))
    if not report.exists():
        raise NsysError(
            "nsys recorded nothing: the command must call cudaProfilerStart (torch.cuda.profiler.start), "
            "as benchmarks/train_lm.py --nvtx does on a GPU"
        )
    intermediate.unlink(missing_ok=True)
    return report


def write_stats(nsys: Path, report: Path, folder: Path) -> None:
    """The three statistics of a report, as CSV files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:  # for the database that nsys makes of the report
        database = Path(scratch) / "report.sqlite"
        names = [part for name in REPORTS for part in ("--report", name)]
        outputs = ["--format", "csv", "--force-overwrite=true", "--force-export=true", f"--sqlite={database}"]
        _run([str(nsys), "stats", *names, *outputs, f"--output={folder / report.stem}", str(report)], "nsys stats")


def main(
    command: tuple[str, ...] = (), /, out: Path = Path("nsys"), name: str | None = None, title: str | None = None,
    top: int = 15, nsys: str | None = None, report: Path | None = None, stats_dir: Path | None = None,
) -> None:  # fmt: skip
    """Runs a program under Nsight Systems and reports on it: writes NAME.nsys-rep, NAME_*.csv and NAME.md, prints that.

    Args:
        command: what to run and measure, after --
        out: folder for everything written
        name: of the files in it (None: profile, or that of the report)
        title: heading of the Markdown report (None: its name)
        top: how many kernels to list
        nsys: the program itself (None: that of PATH, of CUDA or in Nsight's folders)
        report: FILE.nsys-rep to report on; runs no command
        stats_dir: folder of CSV files of `nsys stats` to report on; runs nothing

    Raises:
        NsysError: one sentence.
    """
    if sum(map(bool, (command, report, stats_dir))) != 1:
        raise NsysError("nsys takes one of -- COMMAND, --report FILE.nsys-rep and --stats-dir DIR")
    name = name or (report.stem if report else stats_dir.name if stats_dir else "profile")
    out.mkdir(parents=True, exist_ok=True)
    if stats_dir is None:
        program = find_nsys(nsys)
        report = report or profile(program, list(command), out / name)
        if not report.exists():
            raise NsysError(f"--report is {str(report)!r}, which does not exist; it must be a file that nsys wrote")
        stats_dir = out / f"{name}_stats"
        write_stats(program, report, stats_dir)
    try:
        text = markdown(read_stats(stats_dir), title or name, shlex.join(command), top)
    except StatsError as error:
        raise NsysError(str(error)) from None
    target = out / f"{name}.md"
    target.write_text(text)
    print(text)
    print(f"written: {target}", file=sys.stderr)
