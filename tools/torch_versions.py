"""Builds flash_ext CPU-only against several versions of torch, each in an environment of its own, and tests it there.

    uv run --no-sync python tools/torch_versions.py 2.9.1 2.15.0 --out build/torch.md

The checkout is not touched: its files are copied to build/torch/VERSION/source, uv builds and installs what is there,
and the tests import what was installed. With --wheel, that wheel is installed instead. An environment takes about 5 GB
and goes when its version is done; --keep leaves it, and the next run then builds incrementally. Exits with 1 where a
build or a test failed; the logs stay.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import astuple, dataclass
from pathlib import Path

import tyro
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent

# One of every minor version that is supported, the oldest first.
VERSIONS = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")

# Files of tests/ that meet torch's own machinery, where versions differ; but for tests marked slow or fuzz.
TESTS = {
    "api": """
        autocast bad_inputs causal_bias compile compiled_autograd drop_in enable enable_varlen export
        flash_attention_function flash_registry schemas transforms varlen_compile
    """,
    "backends": "choice",
    "numbers": "gradcheck masks",
}

NEEDED = ["setuptools>=77", "cmake>=3.24", "ninja", "numpy", "pytest", "pytest-xdist", "hypothesis", "expecttest"]
HEADER = ("torch", "CUDA", "install s", "build s", "passed", "failed", "skipped", "pytest s")


@dataclass
class Row:
    """A line of the table; "-" is what was not reached."""

    torch: str
    cuda: str = "-"
    install_s: int | str = "-"
    build_s: int | str = "-"
    passed: int | str = "-"
    failed: int | str = "-"
    skipped: int | str = "-"
    pytest_s: int | str = "-"

    @property
    def good(self) -> bool:
        return self.failed == 0 and self.passed not in (0, "-")


def run(log: Path, *command: str | Path, cwd: Path = ROOT) -> int:
    """Runs a command with all that it says in `log`; returns its seconds. Raises CalledProcessError."""
    # Without a GPU, wherever this runs: every machine tests the same.
    env = os.environ | {"FLASH_EXT_CUDA": "OFF", "CUDA_VISIBLE_DEVICES": ""}
    start = time.monotonic()
    with log.open("w") as file:
        subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=env, check=True)
    return round(time.monotonic() - start)


def copy_source(target: Path) -> None:
    """The checkout with its changes, and with its times, so that a build folder there is still good."""
    target.mkdir(parents=True, exist_ok=True)
    for entry in target.iterdir():
        if entry.name != "build":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def check(row: Row, folder: Path, wheel: Path | None) -> None:
    """Installs, builds and tests with one version, and fills in the row. Raises CalledProcessError where one fails."""
    python, source, report = folder / "env/bin/python", folder / "source", folder / "junit.xml"
    folder.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        run(folder / "env.log", "uv", "venv", "--python", sys.executable, folder / "env")
    install = ["uv", "pip", "install", "--python", python]
    row.install_s = run(folder / "install.log", *install, f"torch=={row.torch}", *NEEDED)
    copy_source(source)
    own = "--verbose --no-deps --no-build-isolation --reinstall-package flash-ext".split()  # none of uv's cache
    row.build_s = run(folder / "build.log", *install, *own, wheel or source)
    shutil.rmtree(source / "flash_ext")  # what runs there must find what was installed
    ask = "import flash_ext, json, torch; print(json.dumps([flash_ext.__file__, torch.version.cuda]))"
    run(folder / "import.log", python, "-c", ask, cwd=source)
    place, cuda = json.loads((folder / "import.log").read_text().splitlines()[-1])
    if not Path(place).is_relative_to(folder / "env"):
        raise RuntimeError(f"the tests would import {place}, which is not what was installed")
    row.cuda = cuda or "none"

    report.unlink(missing_ok=True)
    tests = [f"tests/{folder}/test_{name}.py" for folder, names in TESTS.items() for name in names.split()]
    start = time.monotonic()
    try:
        run(
            folder / "pytest.log",
            python,
            "-m",
            "pytest",
            "-m",
            "not (slow or fuzz)",
            f"--junitxml={report}",
            *tests,
            cwd=source,
        )
    finally:
        row.pytest_s = round(time.monotonic() - start)
        if report.exists():
            counts = ElementTree.parse(report).getroot()[0].attrib
            row.failed, row.skipped = int(counts["failures"]) + int(counts["errors"]), int(counts["skipped"])
            row.passed = int(counts["tests"]) - row.failed - row.skipped


def table(rows: list[Row]) -> str:
    """In Markdown, which a terminal shows as well."""
    return tabulate(map(astuple, rows), HEADER, "pipe", disable_numparse=True, stralign="right") + "\n"


def main(
    versions: tuple[str, ...] = VERSIONS, /, out: Path | None = None, keep: bool = False, wheel: Path | None = None
) -> int:
    """Builds flash_ext CPU-only against several versions of torch, each in an environment of its own, and tests it.

    Args:
        versions: of torch
        out: FILE, to write the table there, too, in Markdown
        keep: keep environments and build folders under build/torch
        wheel: of tools/build_wheel.py, which is installed in place of a build from source
    """
    if shutil.which("uv") is None:
        sys.exit("error: uv is not on PATH: pip install uv")
    rows = []
    for version in versions:
        rows.append(Row(version))
        folder = ROOT / "build/torch" / version
        print(f"torch {version} in {folder.relative_to(ROOT)}", flush=True)
        try:
            check(rows[-1], folder, wheel and wheel.resolve())
        except subprocess.CalledProcessError as error:
            log = max(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
            words = log.read_text(errors="replace").splitlines()[-60:]
            print(
                *words, f"{Path(error.cmd[0]).name} ended with {error.returncode}; more in {log}", sep="\n", flush=True
            )
            rows[-1].failed = rows[-1].failed if rows[-1].passed != "-" else "all"
        finally:
            if not keep:
                shutil.rmtree(folder / "env", ignore_errors=True)
                shutil.rmtree(folder / "source", ignore_errors=True)
        print(table(rows), flush=True)
    if out:
        out.write_text(table(rows))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)))
