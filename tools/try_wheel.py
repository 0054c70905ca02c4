"""Installs a wheel into fresh environments, one a torch and Python, and tries it there.

    uv run tools/try_wheel.py dist/flash_ext-0.1.0-py3-none-manylinux_2_28_x86_64.whl --torch 2.9.1 2.15.0

An environment lies in a temporary folder outside the checkout. Torch comes first, by uv; then pip installs the wheel,
with a PATH on which there is nothing but the environment: no compiler, no CUDA. There it is imported, a forward and a
backward pass are compared with PyTorch's own, and `import` is timed in processes that have imported torch, the least
of several. "call us" is a small call, and "without _C us" one as it is for a Python without that module.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import tyro
from build_wheel import find_python, has_wheel
from tabulate import tabulate
from torch_versions import VERSIONS

TIMES = 5
HEADER = ("torch", "Python", "result", "pip install s", "import s", "call us", "without _C us")

TIME_IMPORT = "import time, torch; t = time.perf_counter(); import flash_ext; print(time.perf_counter() - t)"

CHECK = """
import importlib.metadata, json, sys, torch, torch.nn.functional as F
from torch.utils.benchmark import Timer
import flash_ext
from flash_ext import ops, sdpa
assert flash_ext.__file__.startswith(sys.prefix), flash_ext.__file__
info = flash_ext.build_info()
assert info["version"] == importlib.metadata.version("flash_ext")
assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2], info
torch.manual_seed(0)
for causal in (False, True):
    inputs = [torch.randn(2, 4, 130, 64, requires_grad=True) for _ in range(3)]
    results = []
    for function in (F.scaled_dot_product_attention, flash_ext.scaled_dot_product_attention):
        out = function(*inputs, is_causal=causal)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for expected, seen in zip(*results, strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
try:
    explained = str(flash_ext.explain(*inputs))
except ImportError as error:
    assert ops.C is None and "has no module _C for Python" in str(error), error
else:
    assert ops.C is not None and "cpu" in explained, explained

def microseconds(call):
    return Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.5).median * 1e6

with torch.no_grad():
    small = [torch.randn(1, 1, 16, 16) for _ in range(3)]
    call = lambda: flash_ext.scaled_dot_product_attention(*small)
    times = [None if ops.C is None else microseconds(call)]
    sdpa._eager = None
    times.append(microseconds(call))
print(json.dumps(times))
"""


@dataclass
class Row:
    """A line of the table; "-" is what was not reached."""

    torch: str
    python: str
    result: str = "failed"
    pip_s: str = "-"
    import_s: str = "-"
    call_us: str = "-"
    without_us: str = "-"


def run(*command: str | Path, cwd: Path, path: str = os.environ["PATH"]) -> str:
    """What it prints. Raises CalledProcessError, with what it says to stderr."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PATH": path}
    return subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout


def attempt(wheel: Path, row: Row, interpreter: Path, folder: Path) -> None:
    """Fills in the row. Raises CalledProcessError where something fails."""
    python = folder / "env/bin/python"
    run("uv", "venv", "--seed", "--python", interpreter, folder / "env", cwd=folder)
    run("uv", "pip", "install", "--python", python, f"torch=={row.torch}", "numpy", cwd=folder)
    start = time.monotonic()
    run(python, "-m", "pip", "install", wheel, cwd=folder, path=str(python.parent))
    row.pip_s = f"{time.monotonic() - start:.1f}"
    row.import_s = f"{min(float(run(python, '-c', TIME_IMPORT, cwd=folder)) for _ in range(TIMES)):.3f}"
    with_c, without = json.loads(run(python, "-c", CHECK, cwd=folder).splitlines()[-1])
    row.call_us = "no _C" if with_c is None else f"{with_c:.1f}"
    row.without_us, row.result = f"{without:.1f}", "passed"


def main(wheel: Path, /, torch: tuple[str, ...] = VERSIONS, python: tuple[str, ...] = ("3.10", "3.13")) -> int:
    """Installs a wheel into fresh environments, one a torch and Python, and tries it there.

    Args:
        wheel: of tools/build_wheel.py
        torch: versions of torch
        python: versions of Python
    """
    rows = [Row(version, minor) for version in torch for minor in python]
    for row in rows:
        interpreter = find_python(row.python)
        if interpreter is None:
            row.result = "Python is not at hand"
        elif not has_wheel(row.torch, row.python):
            row.result = "torch has no wheel"
        else:
            folder = Path(tempfile.mkdtemp(prefix="flash_ext_wheel_"))
            try:
                attempt(wheel.resolve(), row, interpreter, folder)
            except subprocess.CalledProcessError as error:
                print(f"torch {row.torch}, Python {row.python}:", error.stdout[-4000:], error.stderr[-4000:], sep="\n")
            finally:
                shutil.rmtree(folder)
    print(tabulate(map(astuple, rows), HEADER, "pipe", disable_numparse=True))
    return 0 if rows and "failed" not in [row.result for row in rows] else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)))
