"""Promise: what tools/hub_layout.py makes is loaded by Hugging Face's kernels, from a folder outside of sys.path."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext import ops

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import hub_layout  # noqa: E402
from hub_layout import LayoutError, lay_out  # noqa: E402

needs_kernels = pytest.mark.skipif(not importlib.util.find_spec("kernels"), reason="needs kernels, the hub's loader")
PACKAGE = Path(flash_ext.__file__).parent
HERE = "torch{}{}-cxx11-cpu-x86_64-linux".format(*torch.__version__.split(".")[:2])

LOAD = """
import sys, torch
from pathlib import Path
from kernels import get_kernel, get_local_kernel
assert "flash_ext" not in sys.modules
kernel = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert kernel.attention.__module__ == "flash_ext.attention", kernel.attention.__module__
file = Path(sys.modules["flash_ext"].__file__)
assert file.is_relative_to(sys.argv[1]), file
q, k, v = (torch.randn(2, 4, 33, 16, requires_grad=True) for _ in "qkv")
out = kernel.attention(q, k, v, causal=True)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected)
out.sum().backward()
turned = kernel.flash_attn_func(*(x.transpose(1, 2).bfloat16() for x in (q, k, v)), causal=True)
torch.testing.assert_close(turned.transpose(1, 2).float(), expected, rtol=0.05, atol=0.05)
with kernel.enable():
    torch.nn.functional.scaled_dot_product_attention(q, k, v)
import flash_ext.distributed
assert get_local_kernel(Path(sys.argv[1]), backend="cpu") is kernel
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "repository"
    assert HERE in lay_out(PACKAGE, "someone/flash-ext", out)
    return out


def run(repository: Path, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a folder from which flash_ext can't be imported, without the network."""
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    hide = "import sys; sys.meta_path[:] = [x for x in sys.meta_path if 'editable' not in repr(x)]\n"
    hide += f"sys.path[:] = [x for x in sys.path if x != {str(ROOT)!r}]\n"
    command = [sys.executable, "-c", hide + program, str(repository)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@needs_kernels
@pytest.mark.kernels("cpu")
def test_the_loader_takes_it(repository: Path, tmp_path: Path) -> None:
    done = run(repository, LOAD, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_kernels
def test_the_lines_of_the_page_and_of_the_card(repository: Path, tmp_path: Path) -> None:
    """As they stand, with the folder in the place of what is uploaded, and on the CPU."""
    programs = {}
    pages = {"NAME/flash-ext": ROOT / "docs/use/kernel-hub.md", "someone/flash-ext": repository / "README.md"}
    for name, file in pages.items():
        programs[name] = re.search(r"^```python\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)[1]
    before = "import functools, kernels, os, sys, torch\n"
    before += "kernels.get_kernel = functools.partial(kernels.get_kernel, backend='cpu')\n"
    for name, program in programs.items():
        assert len([line for line in program.splitlines() if line]) <= 5
        assert f'trust_remote_code=["{name}"]' in program  # the hub's loader asks for it, a folder does not
        given = f"os.environ['LOCAL_KERNELS'] = '{name}=' + sys.argv[1]\n"
        given += "q, k, v = (torch.randn(1, 2, 9, 8) for _ in 'qkv')\n"
        done = run(repository, before + given + program, tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]


@needs_kernels
def test_a_second_one_is_refused_in_one_sentence(repository: Path, tmp_path: Path) -> None:
    """Also where the first is an installed one."""
    second = tmp_path / "second"
    lay_out(PACKAGE, "someone/flash-ext", second)
    program = f"""
import sys
from pathlib import Path
from kernels import get_local_kernel
get_local_kernel(Path(sys.argv[1]), backend="cpu")
try:
    get_local_kernel(Path({str(second)!r}), backend="cpu")
except ImportError as error:
    print(error)
"""
    done = run(repository, program, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"flash_ext is loaded already, from {repository}")
    assert done.stdout.count("\n") == 1


@needs_kernels
def test_the_hubs_own_parser_reads_the_files(repository: Path) -> None:
    from kernels._rust import Build, Metadata

    assert [str(backend) for backend in Build.open(repository).general.backends] == ["cpu", "cuda"]
    for file in repository.glob("build/*/metadata.json"):
        read = Metadata.read_from_file(file)
        assert (read.name.python_name, read.version) == ("flash_ext", hub_layout.MAJOR)


def test_a_variant_has_its_torch_alone(repository: Path) -> None:
    root = repository / "build" / HERE
    assert [path.name for path in (root / "flash_ext").glob("torch_*")] == [ops.LIBRARIES[1].parent.name]
    sources = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert {path.relative_to(root / "flash_ext") for path in root.glob("flash_ext/**/*.py")} == sources
    assert not list(repository.rglob("*.pyc"))


def test_cards_are_named_as_the_hub_does() -> None:
    info = {"git_commit": "", "cxx11_abi": True, "cuda": {"enabled": True, "architectures": [80, "80-virtual", "90"]}}
    assert hub_layout.variants(info) == ["cpu", "cu126", "cu130"]
    made = hub_layout.metadata(info, "cu130")
    assert made["backend"] == {"type": "cuda", "archs": ["8.0", "8.0+PTX", "9.0"]}
    assert made["id"].isidentifier()
    assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize(
    ("repo", "out", "package", "sentence"),
    [
        ("flash-ext", "new", PACKAGE, "--repo flash-ext: NAME/flash-ext is accepted"),
        ("a/flash_ext", "new", PACKAGE, "--repo a/flash_ext: NAME/flash-ext is accepted"),
        ("a/flash-ext", "", PACKAGE, "the folder exists; a new one is accepted."),
        ("a/flash-ext", "new", ROOT / "tools", "there is no torch_X.Y in it"),
    ],
)
def test_what_is_refused(tmp_path: Path, repo: str, out: str, package: Path, sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        lay_out(package, repo, tmp_path / out)
    assert not list(tmp_path.iterdir())
