"""The build decides by itself, says why, and a library in the wrong place is told in one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_ext

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(flash_ext.__file__).parent
OF_TORCH = PACKAGE / ("torch_" + ".".join(torch.__version__.split(".")[:2]))

needs_source = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="needs cmake and a C++ compiler"
)


def run(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with a few environment variables more and returns its output as text."""
    return subprocess.run([str(c) for c in command], env=os.environ | env, capture_output=True, text=True, cwd=ROOT)


def one_line(text: str) -> str:
    """CMake wraps its messages."""
    return " ".join(text.split())


@pytest.fixture
def fake_libtorch(tmp_path: Path) -> Path:
    """A LibTorch of a CUDA that nobody has (9.9), as far as configure looks at it."""
    header = tmp_path / "torch/include/torch/csrc/api/include/torch/version.h"
    header.parent.mkdir(parents=True)
    header.touch()
    (tmp_path / "torch/lib").mkdir()
    (tmp_path / "torch/lib/libc10.so").write_text("_ZN3c105errorERKNSt7__cxx1112basic_stringE")
    (tmp_path / "torch/build-version").write_text("2.11.0+cu99\n")
    return tmp_path / "torch"


@pytest.fixture
def no_gpu(tmp_path: Path) -> str:
    """A PATH on which nvidia-smi sees nothing, whatever this machine has."""
    return fake_nvidia_smi(tmp_path, "exit 9")


def fake_nvidia_smi(folder: Path, script: str) -> str:
    tool = folder / "bin/nvidia-smi"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return f"{tool.parent}{os.pathsep}{os.environ['PATH']}"


def configure(libtorch: Path, **env: str) -> tuple[int, str, Path]:
    """Configures for that LibTorch; returns the exit code, what was printed and the build folder."""
    build = libtorch.parent / "build"
    result = run("cmake", "-S", ROOT, "-B", build, "-DFLASH_EXT_PYTHON=OFF", f"-DCMAKE_PREFIX_PATH={libtorch}", **env)
    return result.returncode, one_line(result.stdout + result.stderr), build


@needs_source
def test_auto_without_a_gpu_is_cpu_only_and_says_how_to_get_kernels(fake_libtorch: Path, no_gpu: str) -> None:
    code, text, _ = configure(fake_libtorch, FLASH_EXT_CUDA="AUTO", PATH=no_gpu)
    assert code == 0, text
    assert "CUDA: off (CPU-only build), AUTO sees no GPU here (FLASH_EXT_CUDA=ON builds the kernels anyway)" in text


@needs_source
def test_auto_with_a_gpu_but_without_nvcc_is_cpu_only_with_the_reason(fake_libtorch: Path, tmp_path: Path) -> None:
    path = fake_nvidia_smi(tmp_path, "echo 9.0")
    code, text, build = configure(fake_libtorch, FLASH_EXT_CUDA="AUTO", PATH=path, CUDA_VISIBLE_DEVICES="0")
    assert code == 0, text
    assert "CUDA: off (CPU-only build), AUTO sees a GPU, but there is no nvcc of CUDA 9, the version of this" in text
    info = (build / "build_info.json.in").read_text()
    assert '"enabled": false' in info and "there is no nvcc of CUDA 9" in info and '"cxx11_abi": true' in info


@needs_source
def test_auto_with_a_gpu_that_has_no_kernels_is_cpu_only(fake_libtorch: Path, tmp_path: Path) -> None:
    path = fake_nvidia_smi(tmp_path, "echo 7.5")
    code, text, _ = configure(fake_libtorch, FLASH_EXT_CUDA="AUTO", PATH=path, CUDA_VISIBLE_DEVICES="0")
    assert code == 0 and "CUDA: off (CPU-only build), AUTO sees no GPU here" in text, text


@needs_source
def test_off_is_off(fake_libtorch: Path, tmp_path: Path) -> None:
    path = fake_nvidia_smi(tmp_path, "echo 9.0")
    code, text, _ = configure(fake_libtorch, FLASH_EXT_CUDA="OFF", PATH=path)
    assert code == 0 and "CUDA: off (CPU-only build), FLASH_EXT_CUDA=OFF" in text


@needs_source
def test_on_without_nvcc_names_what_to_install(fake_libtorch: Path, no_gpu: str) -> None:
    code, text, _ = configure(fake_libtorch, FLASH_EXT_CUDA="ON", PATH=no_gpu)
    assert code != 0
    assert "FLASH_EXT_CUDA=ON, but there is no nvcc of CUDA 9, the version of this torch" in text
    assert "'nvidia-cuda-nvcc==9.9.*'" in text


@needs_source
@pytest.mark.parametrize("version", ["2.11.0+cu99", "2.11.0+cpu"])
def test_a_toolkit_of_another_cuda_than_that_of_torch(fake_libtorch: Path, no_gpu: str, version: str) -> None:
    (fake_libtorch / "build-version").write_text(version)
    code, text, _ = configure(fake_libtorch, FLASH_EXT_CUDA="ON", FLASH_EXT_CUDA_VERSION="8.7", PATH=no_gpu)
    assert code != 0
    assert "FLASH_EXT_CUDA=ON, but there is no nvcc of CUDA 8, as FLASH_EXT_CUDA_VERSION says" in text
    assert "'nvidia-cuda-nvcc==8.7.*'" in text


@needs_source
@pytest.mark.parametrize(
    ("version", "env", "sentence"),
    [
        ("2.8.0+cu99", {}, "flash_ext needs torch 2.9 or later"),
        ("2.11.0+cpu", {"FLASH_EXT_CUDA": "ON"}, "torch 2.11.0+cpu is a build without CUDA"),
        ("2.11.0+cpu", {"FLASH_EXT_CUDA": "yes"}, "FLASH_EXT_CUDA is 'yes': it must be AUTO, ON or OFF."),
    ],
)
def test_refused_configurations(fake_libtorch: Path, version: str, env: dict[str, str], sentence: str) -> None:
    (fake_libtorch / "build-version").write_text(version)
    code, text, _ = configure(fake_libtorch, **env)
    assert code != 0 and sentence in text


@needs_source
def test_a_build_isolated_from_torch_ends_in_one_sentence() -> None:
    hide_torch = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest); "
        "sys.argv = ['setup.py', '-q', 'build_ext']; runpy.run_path('setup.py', run_name='__main__')"
    )
    result = run(sys.executable, "-c", hide_torch)
    assert result.returncode != 0
    assert "built against the torch that it will run with" in result.stderr.splitlines()[-1]
    assert "pip install --no-build-isolation -e ." in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def link_or_copy(source: str, target: str) -> None:
    """Libraries are large."""
    (os.symlink if source.endswith(".so") else shutil.copy)(source, target)


def import_error(package: Path) -> str:
    """Of `import flash_ext` from there, in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(package.parent)!r}); import flash_ext"
    result = run(sys.executable, "-c", code)
    assert result.returncode != 0 and "undefined symbol" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package once more, its libraries by links."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(PACKAGE, tmp_path / "flash_ext", copy_function=link_or_copy, ignore=ignored)


def test_a_library_of_another_torch_is_one_sentence_at_import(copy: Path) -> None:
    minor = OF_TORCH.name.removeprefix("torch_")
    (copy / OF_TORCH.name).rename(copy / "torch_1.13")
    assert f"flash_ext was built for torch 1.13, not for torch {minor}; run `pip install" in import_error(copy)
    shutil.copytree(copy / "torch_1.13", copy / "torch_1.12", symlinks=True)
    assert f"flash_ext was built for torch 1.12 and 1.13, not for torch {minor}; run" in import_error(copy)
    for folder in copy.glob("torch_*"):
        shutil.rmtree(folder)
    sentence = f"flash_ext is not built: there is no torch_{minor} beside the package in {copy}; run"
    assert sentence in import_error(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cxx11_abi": not torch.compiled_with_cxx11_abi()}, "flash_ext was built with cxx11_abi="),
        ({"interface": "another"}, "that are older than its kernels; run `pip install"),
    ],
)
def test_a_library_that_does_not_fit_is_one_sentence_at_import(
    copy: Path, change: dict[str, object], words: str
) -> None:
    file = copy / OF_TORCH.name / "build_info.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert words in import_error(copy)


def test_without_the_module_of_this_python_operators_are_left(copy: Path) -> None:
    for module in (copy / OF_TORCH.name).glob("_C*"):
        module.unlink()
    code = f"""
import sys; sys.path.insert(0, {str(copy.parent)!r})
import torch, flash_ext
assert flash_ext.__file__.startswith({str(copy)!r})
print(torch.ops.flash_ext.attention(*(torch.ones(1, 1, 2, 8),) * 3)[0].sum().item())
"""
    result = run(sys.executable, "-c", code)
    assert result.stdout.strip() == "16.0", result.stderr


def test_build_info_is_the_file_beside_the_library() -> None:
    info = json.loads((OF_TORCH / "build_info.json").read_text())
    assert json.loads(torch.ops.flash_ext.build_info()) == info
    assert flash_ext.build_info().items() >= info.items()
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert isinstance(info["cuda"]["enabled"], bool) and info["cuda"]["reason"]
    assert isinstance(info["nvtx"], bool)
    assert re.fullmatch("[0-9a-f]{40}|", info["git_commit"])
    assert info["cpu_variants"][0] == "baseline"


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_the_libraries_need_no_python_and_one_no_torch() -> None:
    symbols = run("nm", "-D", "--undefined-only", OF_TORCH / "libflash_ext.so").stdout
    assert "aten" in symbols.lower() or "c10" in symbols
    python = r"\bU (_?Py\w+|\w*THPVariable\w*)"
    assert not re.findall(python, symbols)
    assert not re.findall(r"\bU _ZNK?3c104cuda", symbols)  # weak, for a torch without CUDA
    kernels = run("nm", "-D", "--undefined-only", PACKAGE / "libflash_kernels.so").stdout
    assert not re.findall(python + r"|N2at\d|c10|GOMP|omp_", kernels)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf (binutils)")
def test_the_library_needs_no_path_and_no_second_cuda_runtime() -> None:
    """Whoever loads it has loaded torch; what it has of libcudart is inside and hidden."""
    needed = {}
    for library in (PACKAGE / "libflash_kernels.so", OF_TORCH / "libflash_ext.so"):
        dynamic = run("readelf", "-d", library).stdout
        needed[library.name] = re.findall(r"NEEDED.*\[(.+)\]", dynamic)
        assert re.findall(r"RUNPATH.*\[(.+)\]", dynamic) == ["$ORIGIN:$ORIGIN/.."]
        if shutil.which("nm"):
            assert not re.findall(r" T (cuda[A-Z]\w+|__cuda\w+)", run("nm", "-D", "--defined-only", library).stdout)
    assert not [name for names in needed.values() for name in names if "cudart" in name or "torch_cuda" in name]
    assert not [name for name in needed["libflash_kernels.so"] if "torch" in name or "c10" in name or "omp" in name]
    assert "libflash_kernels.so" in needed["libflash_ext.so"]
    assert "libc10_cuda.so" not in needed["libflash_ext.so"]  # which a torch without CUDA has not


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime_in_the_process() -> None:
    code = (
        "import torch, flash_ext; q = torch.randn(2, 4, 300, 32); flash_ext.scaled_dot_product_attention(q, q, q); "
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line or 'libomp' in line})"
    )
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    assert len(eval(result.stdout)) == 1, result.stdout
