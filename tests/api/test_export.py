"""Promise: torch.export and AOTInductor carry the operators, and a program that one build made loads in the next.

The golden programs in tests/golden/programs were written by `PYTHONPATH=tests python tests/api/test_export.py`; a new
one is added when an operator grows an argument, old ones are never rewritten.
"""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import make_inputs, rand
from torch import Tensor, nn

import flash_ext

GOLDEN = Path(__file__).parents[1] / "golden" / "programs"


class Block(nn.Module):
    """Both calls, with options of every type."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_ext.attention(
            q,
            k,
            v,
            bias=bias,
            alibi_slopes=slopes,
            mask=bias > -1,
            causal=True,
            window=(12, None),
            align="bottom_right",
            softcap=3.0,
            scale=0.2,
            return_lse=True,
        )
        return flash_ext.scaled_dot_product_attention(out, k, v, is_causal=True, enable_gqa=True), lse


def example(length: int = 9, device: str = "cpu") -> tuple[Tensor, ...]:
    inputs = make_inputs((2, 4, length, 8), (2, 2, length + 4, 8), device=device)
    return (*inputs.values(), rand(4, length, length + 4, device=device), torch.rand(4).to(device))


def exported(device: str, strict: bool = False) -> torch.export.ExportedProgram:
    length = torch.export.Dim("length", min=2, max=1024)
    dynamic = {
        "q": {2: length},
        "k": {2: length + 4},
        "v": {2: length + 4},
        "bias": {1: length, 2: length + 4},
        "slopes": None,
    }
    return torch.export.export(Block(), example(device=device), dynamic_shapes=dynamic, strict=strict)


def assert_same_as_eager(call: object, device: str) -> None:
    for length in (9, 21):
        inputs = example(length, device)
        torch.testing.assert_close(call(*inputs), Block()(*inputs))  # type: ignore[operator]


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths(strict: bool, device: str) -> None:
    program = exported(device, strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert any(target.startswith("flash_ext.") for target in targets)
    assert_same_as_eager(program.module(), device)


def test_save_and_load(device: str) -> None:
    buffer = io.BytesIO()
    torch.export.save(exported(device), buffer)
    buffer.seek(0)
    assert_same_as_eager(torch.export.load(buffer).module(), device)


def test_decompositions_keep_the_operator(device: str) -> None:
    program = exported(device).run_decompositions()
    assert any(str(node.target).startswith("flash_ext.attention.") for node in program.graph.nodes)
    assert_same_as_eager(program.module(), device)


def test_exported_training_graph(device: str) -> None:
    """The joint graph of a loss holds the forward and the backward operator."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8, device=device))

        def forward(self, x: Tensor) -> Tensor:
            return (flash_ext.attention(x @ self.weight, x, x, causal=True).sin().sum(),)

    from torch._functorch.aot_autograd import aot_export_module

    graph, _ = aot_export_module(Loss(), (rand(1, 2, 5, 8, device=device),), trace_joint=True, output_loss_index=0)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert any(target.startswith("flash_ext.attention_backward") for target in targets)


@pytest.mark.slow
def test_aot_inductor_package_loads_in_another_process(device: str, tmp_path: Path) -> None:
    """The package runs where only libflash_ext.so is loaded."""
    package = torch._inductor.aoti_compile_and_package(exported(device), package_path=str(tmp_path / "block.pt2"))
    inputs = example(9, device)
    torch.save((inputs, Block()(*inputs)), tmp_path / "data.pt")
    code = f"""
        import torch, flash_ext
        inputs, expected = torch.load({str(tmp_path / "data.pt")!r})
        got = torch._inductor.aoti_load_package({package!r})(*inputs)
        torch.testing.assert_close(tuple(got), tuple(expected))
        print("equal")
    """
    done = run_python(code)
    if done.returncode < 0 and not loads_packages(device, tmp_path):
        pytest.skip(f"a package of nn.Linear alone, without flash_ext, crashes here too when loaded on {device}")
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def loads_packages(device: str, folder: Path) -> bool:
    """Whether this PyTorch loads an AOTInductor package in which nothing is of flash_ext."""
    path = str(folder / "linear.pt2")
    linear = torch.export.export(nn.Linear(8, 8, device=device), (rand(4, 8, device=device),))
    package = torch._inductor.aoti_compile_and_package(linear, package_path=path)
    return run_python(f"import torch; torch._inductor.aoti_load_package({package!r})").returncode >= 0


def golden_names() -> list[str]:
    return sorted(path.stem for path in GOLDEN.glob("*.pt2"))


def test_there_is_a_golden_program() -> None:
    assert golden_names()


@pytest.mark.parametrize("name", golden_names())
def test_golden_program_loads_and_gives_the_same(name: str) -> None:
    """Exported by an earlier build, with inputs and results beside it."""
    program = torch.export.load(GOLDEN / f"{name}.pt2")
    inputs, expected = torch.load(GOLDEN / f"{name}.pt")
    torch.testing.assert_close(tuple(program.module()(*inputs)), tuple(expected), atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    version = flash_ext.__version__ if hasattr(flash_ext, "__version__") else "0"
    GOLDEN.mkdir(parents=True, exist_ok=True)
    target = GOLDEN / f"block_{version}.pt2"
    assert not target.exists(), f"{target} exists; golden programs are never rewritten"
    arguments = example()
    torch.export.save(exported("cpu"), target)
    torch.save((arguments, Block()(*arguments)), target.with_suffix(".pt"))
    print(f"wrote {target}")
