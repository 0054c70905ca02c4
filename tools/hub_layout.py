"""Lays a wheel out as a repository of Hugging Face's kernel hub, for ``kernels.get_kernel``.

    uv run tools/build_wheel.py
    uv run tools/hub_layout.py dist/flash_ext-*.whl --repo NAME/flash-ext --out build/hub

``build/<variant>/`` for each torch, with and without CUDA: metadata.json, the package of the wheel with the libraries
of that torch, and an ``__init__.py`` that loads it. Files that several variants share are hard links. build.toml tells
the hub's own tools name and version; they compile nothing, because the wheel has what they would.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

NAME = "flash-ext"
MAJOR = 1  # of the hub, where it is raised when callers must change
# torch of a CUDA takes a variant of its major version and a minor version that is no newer. The kernels bring their own
# runtime, so they serve a torch of CUDA 12 as well, where the driver is new enough for them.
CUDAS = ("cu126", "cu130")
LIBRARIES = re.compile(r"torch_(\d+)\.(\d+)")

INIT = '''"""{name}, loaded by Hugging Face's kernels: the package beside this file, under its own name.

Its operators are torch.ops.flash_ext, so a process has one flash_ext, from here or from elsewhere.
"""

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).parent / "flash_ext" / "__init__.py"
_loaded = sys.modules.get("flash_ext")
if _loaded is None:
    _spec = importlib.util.spec_from_file_location("flash_ext", _FILE)
    _loaded = sys.modules["flash_ext"] = importlib.util.module_from_spec(_spec)
    try:
        _spec.loader.exec_module(_loaded)
    except BaseException:
        del sys.modules["flash_ext"]
        raise
elif Path(_loaded.__file__).resolve() != _FILE.resolve():
    raise ImportError(f"flash_ext is loaded already, from {{_loaded.__file__}}: a process has one, not also {{_FILE}}.")

from flash_ext import *  # noqa: E402, F403
from flash_ext import __all__, __version__  # noqa: E402
from flash_ext.flash_attn import *  # noqa: E402, F403
from flash_ext.flash_attn import __all__ as _flash_attn  # noqa: E402

__all__ = [*__all__, *_flash_attn]
'''

CARD = """---
library_name: kernels
license: bsd-3-clause
tags:
- kernels
---

# {name}

Exact attention for PyTorch, forward and backward, that never materialises the score matrix.

```python
from kernels import get_kernel

flash_ext = get_kernel("{repo}", version={major}, trust_remote_code=["{repo}"])
out = flash_ext.attention(q, k, v, causal=True)  # [batch, heads, tokens, head dim]
```

It also has `flash_attn_func` and its like, with FlashAttention's layouts. A process has one version of it.
"""

BUILD = """# For the hub's tools, as `kernel-builder upload`. The libraries are those of {name}'s own wheel.
[general]
name = "{name}"
version = {major}
edition = 5
license = "BSD-3-Clause"
backends = ["cpu", "cuda"]

[general.hub]
repo-id = "{repo}"

[torch]
src = []
"""


class LayoutError(Exception):
    """What is given can't be laid out, in one sentence."""


@dataclass(frozen=True)
class Args:
    wheel: tyro.conf.Positional[Path]
    """With libraries for one or more torch."""
    repo: str
    """Of the hub: NAME/flash-ext."""
    out: Path = Path("build/hub")
    """A folder that does not exist yet."""


def architectures(info: dict[str, Any]) -> list[str]:
    """As the hub says them: 8.0 is code for 8.x from there on, 8.0+PTX for all newer cards, too."""

    def said(arch: object) -> str:
        number, _, kind = str(arch).partition("-")
        return f"{number[:-1]}.{number[-1]}" + ("+PTX" if kind == "virtual" else "")

    return sorted({said(arch) for arch in info["cuda"]["architectures"]})


def link(source: Path, to: Path) -> None:
    """A hard link where that can be."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, to)
    except OSError:
        shutil.copy2(source, to)


def variants(info: dict[str, Any]) -> list[str]:
    return ["cpu", *(CUDAS if info["cuda"]["enabled"] else ())]


def metadata(info: dict[str, Any], variant: str) -> dict[str, Any]:
    backend: dict[str, Any] = {"type": "cpu"}
    if variant != "cpu":
        backend = {"type": "cuda", "archs": architectures(info)}
    commit = info["git_commit"][:12] or "unknown"
    return {
        "id": f"_flash_ext_{variant}_{commit}",
        "name": NAME,
        "version": MAJOR,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": backend,
    }


def lay_out(package: Path, repo: str, out: Path) -> list[str]:
    """``package``: the folder flash_ext of a wheel. Returns the variants' names."""
    if not re.fullmatch(r"[\w.-]+/" + NAME, repo):
        raise LayoutError(f"--repo {repo}: NAME/{NAME} is accepted, because the hub takes the folder's name from it.")
    if out.exists():
        raise LayoutError(f"--out {out}: the folder exists; a new one is accepted.")
    folders = {match: path for path in package.iterdir() if (match := LIBRARIES.fullmatch(path.name))}
    if not folders:
        raise LayoutError(f"{package}: there is no torch_X.Y in it; a package with built libraries is accepted.")
    shared = [
        path
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not LIBRARIES.match(path.relative_to(package).parts[0])
    ]
    made = []
    for match, folder in folders.items():
        info = json.loads((folder / "build_info.json").read_text())
        abi = "cxx11" if info["cxx11_abi"] else "cxx98"
        for variant in variants(info):
            name = f"torch{match[1]}{match[2]}-{abi}-{variant}-x86_64-linux"
            root = out / "build" / name
            for path in (*shared, *folder.iterdir()):
                link(path, root / "flash_ext" / path.relative_to(package))
            (root / "__init__.py").write_text(INIT.format(name=NAME))
            (root / "metadata.json").write_text(json.dumps(metadata(info, variant), indent=2) + "\n")
            made.append(name)
    words = {"name": NAME, "repo": repo, "major": MAJOR}
    (out / "README.md").write_text(CARD.format(**words))
    (out / "build.toml").write_text(BUILD.format(**words))
    return sorted(made)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as folder:
        with zipfile.ZipFile(args.wheel) as wheel:
            wheel.extractall(folder)
        try:
            print(*lay_out(Path(folder) / "flash_ext", args.repo, args.out), sep="\n")
        except LayoutError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
