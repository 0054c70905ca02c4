#!/usr/bin/env python3
"""Writes a page of HTML for each public module, from its docstrings: python tools/reference.py --out build/reference

By pdoc. A warning of it is an error, and so is a public function or class without a docstring.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from pathlib import Path

import pdoc
import pdoc.doc
import pdoc.render

MODULES = (
    "flash_ext",
    "flash_ext.distributed",
    "flash_ext.flash_attn",
    "flash_ext.flash_attn_3",
    "flash_ext.integrations.transformers",
    "flash_ext.profiling",
    "flash_ext.xformers",
)


def undocumented(name: str) -> list[str]:
    """Public functions and classes of a module that have no docstring."""
    members = pdoc.doc.Module(importlib.import_module(name)).own_members
    return [
        m.fullname for m in members
        if m.kind in ("function", "class") and not m.name.startswith("_") and not m.docstring.strip()
    ]  # fmt: skip


def write(out: Path) -> None:
    """The pages, into a folder that need not exist."""
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*MODULES, output_directory=out)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder for the pages")
    out = parser.parse_args(argv).out
    if missing := [name for module in MODULES for name in undocumented(module)]:
        print(f"no docstring: {', '.join(missing)}", file=sys.stderr)
        return 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(out)
    print(out / "flash_ext.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
