"""Builds one wheel for several versions of torch and of Python.

    uv run tools/build_wheel.py                                             all of them, with CUDA kernels, into dist/
    uv run tools/build_wheel.py --cpu-only --torch 2.9.1 2.15.0 --python 3.11

libflash_kernels.so is built once, libflash_ext.so once for each torch and _C for each torch and Python. No environment
is made: torch's wheel is unpacked without what it depends on, and its headers and libraries are the same for every
Python, but for libtorch_python.so, of which _C only needs the names. A Python is at hand where it has its headers; one
that is not, and one for which a torch has no wheel, is left out and said. The libraries are linked for an older glibc
(old_glibc.py), auditwheel confirms the tag, and the last line is the wheel's path.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import old_glibc
import tyro
from torch_versions import ROOT, VERSIONS, copy_source

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
GLIBC = "2.28"
PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"

# NOTE: as deep as the build folder of setup.py, so that ccache finds the kernels of either for the other.
BUILD = ROOT / "build/wheel_build"
PARTS = ROOT / "build/wheel_parts"

# What auditwheel leaves out: the process has it, because torch was imported before.
OF_TORCH = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so", "libgomp*.so*")


def run(*command: str | Path, **env: str) -> None:
    """Runs a command with a few environment variables more; shows what it says only where it fails."""
    log = PARTS / "command.log"
    with log.open("w") as file:
        code = subprocess.run(command, env=os.environ | env, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    if code != 0:
        sys.exit("\n".join([*log.read_text().splitlines()[-60:], f"error: {command[0]} ended with {code}"]))


def answer(*command: str | Path) -> str | None:
    """What a command prints, or None where it fails or is not there."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def find_python(version: str) -> Path | None:
    """An interpreter of this version that has its headers: this one, one of pyenv's, on PATH, or uv's."""
    ask = (
        "import sys, sysconfig; from pathlib import Path; header = Path(sysconfig.get_path('include'), 'Python.h'); "
        "print(sys.executable, '{}.{}'.format(*sys.version_info), header.exists())"
    )
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python")
    by_uv = ("uv", "python", "find", "--no-python-downloads", "--system", version)  # last: it looks at all there are
    for find in (sys.executable, *sorted(pyenv, reverse=True), f"python{version}", by_uv):
        candidate = answer(*find) if isinstance(find, tuple) else find
        words = (answer(candidate, "-c", ask) or "").split() if candidate else []
        if words[1:] == [version, "True"]:
            return Path(words[0])
    return None


def find_nvcc() -> tuple[Path, str]:
    """CUDACXX, PATH's, or the one beside this environment's torch, which .ci/run installs; with its version."""
    spec = importlib.util.find_spec("torch")
    beside = Path(spec.origin).parents[1].glob("nvidia/cu*/bin/nvcc") if spec and spec.origin else ()
    for candidate in (os.environ.get("CUDACXX"), shutil.which("nvcc"), *beside):
        if candidate and (release := re.search(r"release ([\d.]+)", answer(candidate, "--version") or "")):
            return Path(candidate), release[1]
    sys.exit("error: there is no nvcc: set CUDACXX, or build with --cpu-only")


def unpack_torch(version: str) -> Path:
    """A folder that holds this torch as PYTHONPATH wants it, and NVTX's headers."""
    folder = PARTS / "torch" / version
    if not (folder / f"torch-{version}.dist-info").exists():
        install = ["uv", "pip", "install", "--python", sys.executable, "--target", folder, "--no-deps"]
        run(*install, f"torch=={version}", "nvidia-nvtx")
    return folder


def has_wheel(torch: str, python: str) -> bool:
    ask = ["uv", "pip", "install", "--python", sys.executable, "--python-version", python, "--target", PARTS / "none"]
    return answer(*ask, "--dry-run", "--no-deps", "--only-binary", ":all:", f"torch=={torch}") is not None


def build(torch: str, pythons: dict[str, Path], stage: Path, link: list[str], env: dict[str, str]) -> None:
    """Builds for one torch and adds the libraries to `stage`; from the second one on, ninja has the kernels."""
    folder = unpack_torch(torch)
    flags = " ".join(link)
    wanted = {python: executable for python, executable in pythons.items() if has_wheel(torch, python)}
    if absent := [python for python in pythons if python not in wanted]:
        print(f"  torch {torch} has no wheel for Python {', '.join(absent)}", flush=True)
    if not wanted:
        sys.exit(f"error: torch {torch} has a wheel for none of these Pythons")
    for python, executable in wanted.items():
        start = time.monotonic()
        run(
            *("cmake", "-G", "Ninja", "-S", ROOT, "-B", BUILD, f"-DPYTHON_EXECUTABLE={executable}"),
            *(f"-DCMAKE_SHARED_LINKER_FLAGS={flags}", f"-DCMAKE_MODULE_LINKER_FLAGS={flags}"),
            **env,
            PYTHONPATH=str(folder),
        )
        run("cmake", "--build", BUILD)
        run("cmake", "--install", BUILD, "--prefix", stage)
        print(f"  torch {torch}, Python {python}: {time.monotonic() - start:.0f} s", flush=True)


def make_wheel(stage: Path, out: Path) -> Path:
    """Packs the libraries and the Python files of this checkout, and has auditwheel confirm the tag."""
    source, plain = PARTS / "source", PARTS / "plain"
    for folder in (source, plain, PARTS / "audited"):
        shutil.rmtree(folder, ignore_errors=True)
    run("strip", *stage.rglob("*.so"))
    copy_source(source)
    pack = ["uv", "build", "--wheel", "--no-build-isolation", "--python", sys.executable]
    run(*pack, "--out-dir", plain, source, FLASH_EXT_BUILT=str(stage))
    exclude = [word for name in OF_TORCH for word in ("--exclude", name)]
    audit = [sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", *exclude]
    run(*audit, "--wheel-dir", PARTS / "audited", *plain.glob("*.whl"))
    (wheel,) = (PARTS / "audited").glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, out))


def main(
    torch: tuple[str, ...] = VERSIONS,
    python: tuple[str, ...] = PYTHONS,
    cpu_only: bool = False,
    out: Path = ROOT / "dist",
    keep: bool = False,
) -> None:
    """Builds one wheel for several versions of torch and of Python.

    Args:
        torch: versions of torch, one of a minor version
        python: versions of Python that get their _C
        cpu_only: without CUDA kernels
        out: FOLDER for the wheel
        keep: keep the unpacked torch under build/wheel_parts
    """
    for tool in ("uv", "cmake", "ninja", "patchelf"):
        if shutil.which(tool) is None:
            sys.exit(f"error: {tool} is not on PATH")
    found = {version: find_python(version) for version in python}
    pythons = {version: executable for version, executable in found.items() if executable is not None}
    if missing := [version for version in python if version not in pythons]:
        print(f"no _C for Python {', '.join(missing)}: not at hand with headers", flush=True)
    if not pythons:
        sys.exit("error: there is no Python to build with")
    env = {"FLASH_EXT_CUDA": "OFF"}
    if not cpu_only:
        nvcc, release = find_nvcc()
        env = {"FLASH_EXT_CUDA": "ON", "FLASH_EXT_CUDA_VERSION": release, "CUDACXX": str(nvcc)}
        print(f"CUDA {release}", flush=True)

    stage = PARTS / "stage"
    PARTS.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(stage, ignore_errors=True)
    link = old_glibc.link_flags(GLIBC, PARTS / "link")
    for version in torch:
        build(version, pythons, stage, link, env)
        if not keep:
            shutil.rmtree(PARTS / "torch" / version)
    wheel = make_wheel(stage, out)
    print(f"{wheel.stat().st_size / 1e6:.1f} MB, for glibc {GLIBC} and later\n{wheel}")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone))
