"""Compares the machine code of two builds, kernel by kernel: python tools/compare_sass.py BEFORE.so AFTER.so

What a refactoring of the host must not change. Kernels are the same where each architecture has the same instructions
with the same registers; parameters may lie elsewhere in the constant bank, where a structure before them has become
smaller or larger. Exit status 1 where a kernel differs or is in one build only. Needs cuobjdump: of the CUDA toolkit,
or triton's.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
NUMBER = re.compile(r"0x[0-9a-f]+")
PARAMETER = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
UNIT = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_")  # names a unit by its path


def cuobjdump() -> str:
    """The program's path."""
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if found is None and (triton := importlib.util.find_spec("triton")) is not None and triton.origin:
        found = shutil.which("cuobjdump", path=str(Path(triton.origin).parent / "backends/nvidia/bin"))
    if found is None:
        sys.exit("cuobjdump is on no path: install the CUDA toolkit or triton")
    return found


def kernels(library: str) -> dict[tuple[str, str], list[str]]:
    """(architecture, mangled name) -> instructions. Kernels that are static in several units are numbered."""
    listing = subprocess.run([cuobjdump(), "-sass", library], capture_output=True, text=True, check=True).stdout
    result: dict[tuple[str, str], list[str]] = {}
    architecture, lines = "", []
    for line in listing.splitlines():
        if line.startswith("arch = "):
            architecture = line.split()[-1]
        elif "Function : " in line:
            key = name = UNIT.sub("_GLOBAL__N__", line.split()[-1])
            number = 0
            while (architecture, key) in result:
                number += 1
                key = f"{name} #{number}"
            result[architecture, key] = lines = []
        elif (match := INSTRUCTION.match(line)) is not None:
            lines.append(match.group(2))
    return result


def numbers(pattern: re.Pattern[str], lines: list[str]) -> list[int]:
    return [int(number, 16) for line in lines for number in pattern.findall(line)]


def difference(before: list[str], after: list[str]) -> str:
    """Empty where both are the same code, "moved" where only parameters lie elsewhere, else the first that differs.

    Parameters that lie elsewhere, and addresses of parameters, are numbers that differ by what a structure before them
    became smaller or larger: by one amount, or by a second where the next one is aligned.
    """
    if before == after:
        return ""
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        if NUMBER.sub("", old) != NUMBER.sub("", new):
            return f"instruction {number}: {old}  ->  {new}"
    if len(before) != len(after):
        return f"{len(before)} instructions -> {len(after)}"
    shifts = {new - old for old, new in zip(numbers(NUMBER, before), numbers(NUMBER, after), strict=True)} - {0}
    pairs = set(zip(numbers(PARAMETER, before), numbers(PARAMETER, after), strict=True))
    one_to_one = len({old for old, _ in pairs}) == len(pairs) == len({new for _, new in pairs})
    is_layout = len(shifts) <= 2 and (max(shifts) < 0 or min(shifts) > 0)
    return "moved" if is_layout and one_to_one else f"numbers differ by {sorted(shifts)}"


def main(before: str, after: str) -> int:
    old, new = kernels(before), kernels(after)
    found: Counter[str] = Counter()
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new:
            found["in one build only"] += 1
            print(f"only {'after' if key in new else 'before'}: {' '.join(key)}")
            continue
        different = difference(old[key], new[key])
        if different in ("", "moved"):
            found["the same" if not different else "the same, parameters elsewhere"] += 1
        else:
            found["different"] += 1
            print(f"{' '.join(key)}\n    {different}")
    print(", ".join(f"{count} {what}" for what, count in found.items()) or "no kernels")
    return 1 if found["different"] or found["in one build only"] or not found else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
