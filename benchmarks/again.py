#!/usr/bin/env python3
"""Takes a folder's results again: runs, one after the other, the commands that its CSVs name.

    python benchmarks/again.py benchmarks/results/nvidia-h200                        into the same files
    python benchmarks/again.py benchmarks/results/nvidia-h200 --out results          the same files in another folder
    python benchmarks/again.py benchmarks/results/nvidia-h200 --only grid --dry-run  says what it would run
    python benchmarks/again.py benchmarks/results/nvidia-h200 --rounds 3 --seconds 0.2    in less time

Commands run in the repository's root, where --out is meant, too. One that fails, or takes longer than --limit, does not
stop the others; it is told, and the exit status is 1. What was put together from several (sweep/) or written elsewhere
(profiling/, docs/learn/profiling.md has its commands) is named and left out.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness import BenchmarkError, command_line, run_main
from tables import read_csv
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    folder: Positional[Path]  # whose CSVs, also those of folders inside
    out: Path | None = None  # where the results go (None: the folder)
    only: str = ""  # regular expression: commands in which it is found
    limit: float | None = None  # seconds of each command
    rounds: int | None = None  # --rounds of each command of attention.py (None: its own)
    seconds: float | None = None  # its --seconds
    dry_run: bool = False  # print the commands


def own_command(path: Path) -> list[str] | None:
    """The words of the command that writes this CSV, or this folder's CSVs; None where the rows name no such one."""
    commands = set(read_csv(path).get("command", []))
    words = shlex.split(commands.pop()) if len(commands) == 1 else []
    if words[:1] != ["python"] or "--out" not in words[:-1]:
        return None
    out = ROOT / words[words.index("--out") + 1]
    return words if out in (path, path.parent) else None


def moved(words: list[str], folder: Path, out: Path) -> list[str]:
    """The same command with --out in another folder."""
    at = words.index("--out") + 1
    return [*words[:at], str(out / (ROOT / words[at]).relative_to(folder)), *words[at + 1 :]]


def with_option(words: list[str], name: str, value: float | None) -> list[str]:
    """The same command of attention.py with another value of an option; other commands as they are."""
    if value is None or Path(words[1]).name != "attention.py":
        return words
    at = words.index(name) if name in words else None
    rest = words if at is None else [*words[:at], *words[at + 2 :]]
    return [*rest[:2], name, f"{value:g}", *rest[2:]]


def failure_of(words: list[str], limit: float | None) -> str:
    """Runs a command; why it failed, or nothing."""
    started = time.monotonic()
    try:
        status = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return f"took more than {limit:g} s"
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    return f"exit status {status}" if status != 0 else ""


def main() -> None:
    args = command_line(Args)
    folder = (ROOT / args.folder).resolve()
    files = sorted(folder.rglob("*.csv"))
    if not files:
        raise BenchmarkError(f"{args.folder} has no CSV to take again.")
    named = {path: own_command(path) for path in files}
    left_out = Counter(path.relative_to(folder).parts[0] for path, words in named.items() if words is None)
    for name, count in left_out.items():
        print(f"left out: {name}, {count} CSV{'s' if count > 1 else ''}", flush=True)
    commands = dict.fromkeys(shlex.join(words) for words in named.values() if words is not None)
    failures: dict[str, str] = {}
    for command in (command for command in commands if re.search(args.only, command)):
        words = shlex.split(command)
        if args.out is not None:
            words = moved(words, folder, args.out)
        words = with_option(with_option(words, "--seconds", args.seconds), "--rounds", args.rounds)
        print(shlex.join(words), flush=True)
        if not args.dry_run and (why := failure_of(words, args.limit)):
            failures[shlex.join(words)] = why
    for command, why in failures.items():
        print(f"failed: {command}: {why}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    run_main(main)
