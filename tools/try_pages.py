"""Runs the Python of the README and of docs/use and docs/learn as a stranger would: copied, in an empty folder.

    python tools/try_pages.py                 with the flash_ext that this Python finds, e.g. that of a wheel
    python tools/try_pages.py use/api README  some pages

A page's blocks are one program. That of distributed.md runs on two ranks, as its launch lines say. Prints a line for
each page; the exit status is 1 if one fails. Pages of another package are left out where this Python does not have it,
unless they are named.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(path for kind in ("use", "learn") for path in (ROOT / "docs" / kind).glob("*.md"))]
PAGES.remove(ROOT / "docs/use/kernel-hub.md")  # of an upload; tests/integrations/test_kernel_hub.py runs it
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SECONDS = 120
NEEDS = {"use/transformers": ("transformers",), "use/image-models": ("diffusers", "timm")}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def program_of(page: Path) -> str:
    """Without prompts and what they print."""
    lines = []
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        told = block.splitlines()
        has_prompts = any(line.startswith(">>> ") for line in told)
        lines += [line[4:] for line in told if line[:4] in (">>> ", "... ")] if has_prompts else told
    return "\n".join(lines)


def run(page: Path) -> str:
    """What went wrong; empty: nothing."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "page.py").write_text(program_of(page))
        ranks = TWO_RANKS if page.stem == "distributed" else ()
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", *ranks, "page.py"], cwd=folder, capture_output=True, text=True,
                timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it takes more than {SECONDS} s"
        return done.stderr if done.returncode != 0 else ""


def main(names: list[str]) -> int:
    unknown = set(names) - {name_of(page) for page in PAGES}
    if unknown:
        print(f"error: there is no page {', '.join(sorted(unknown))}; there are {', '.join(map(name_of, PAGES))}")
        return 2
    failed = 0
    for page in PAGES:
        if program_of(page) and (not names or name_of(page) in names):
            missing = [package for package in NEEDS.get(name_of(page), ()) if find_spec(package) is None]
            if missing and not names:
                print(f"{name_of(page):24} left out: {', '.join(missing)} not installed", flush=True)
                continue
            wrong = run(page)
            failed += wrong != ""
            print(f"{name_of(page):24} {'failed' if wrong else 'ok'}\n{wrong}".rstrip(), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
