"""Builds libflash_ext.so and _C by driving CMake; every flag and every choice is in CMakeLists.txt.

The extension is built against the torch that it will run with, so the build is not isolated from it:
`uv sync` (pyproject.toml says so to uv) or `pip install --no-build-isolation .`
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILT = os.environ.get("FLASH_EXT_BUILT")  # a folder of libraries for several torch and Python (tools/build_wheel.py)


def find_tool(name: str) -> str | None:
    """A tool of this environment first (it need not be on PATH), then one on PATH."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


class CMakeBuild(build_ext):
    """Installs both libraries into the package's folder: the source's own for an editable install."""

    def run(self) -> None:
        if BUILT is not None:
            shutil.copytree(BUILT, Path(self.build_lib) / "flash_ext", dirs_exist_ok=True)
            return
        if importlib.util.find_spec("torch") is None:
            raise SystemExit(
                "flash_ext is built against the torch that it will run with, and this build sees none: "
                "install torch>=2.9, setuptools, cmake and ninja, then `pip install --no-build-isolation -e .`"
            )
        cmake, ninja = find_tool("cmake"), find_tool("ninja")
        if cmake is None:
            raise SystemExit("flash_ext needs cmake 3.24 or later: `pip install cmake ninja`")
        minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-torch-{minor}"  # kept: the next build is incremental
        package = ROOT / "flash_ext" if self.inplace else Path(self.build_lib).resolve() / "flash_ext"
        configure = [cmake, "-S", ROOT, "-B", build, f"-DPYTHON_EXECUTABLE={sys.executable}"]
        if ninja is not None:
            configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        try:
            subprocess.run(configure, check=True)
            subprocess.run([cmake, "--build", build], check=True)
            subprocess.run([cmake, "--install", build, "--prefix", package], check=True)
        except subprocess.CalledProcessError:
            raise SystemExit("flash_ext was not built: the reason is CMake's or the compiler's error above") from None

    def get_outputs(self) -> list[str]:
        return []


class Wheel(bdist_wheel):
    """Of libraries for several Python: the one that fits is chosen at import, so the tag names none."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if BUILT is None else ("py3", "none", platform)


setup(
    ext_modules=[Extension("flash_ext._C", sources=[])],
    cmdclass={"bdist_wheel": Wheel, "build_ext": CMakeBuild},
)
