"""Promise: `python -m flash_ext.doctor` says what is here, and ends with 1 where attention is wrong on a backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flash_ext
from flash_ext import doctor

ROOT = Path(__file__).parents[2]
CASES = [(device, name, dtypes) for device, names in doctor.BACKENDS.items() for name, dtypes in names.items()]


def test_report_of_this_machine() -> None:
    command = [sys.executable, "-m", "flash_ext.doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok") and torch.__version__ in line for line in lines)
    assert any(line.startswith("ok") and "attention, cpu" in line and "float64, float32" in line for line in lines)
    assert ("GPU 0" in done.stdout) == torch.cuda.is_available()
    assert not torch.cuda.is_available() or "attention, sm80" in done.stdout


def test_findings_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == 0
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"Python", "torch", "flash_ext", "settings", "GPU kernels", "driver", "nsys", "ncu", "NVRTC"} < set(found)
    assert {finding["state"] for finding in found.values()} <= {doctor.OK, doctor.ABSENT}


@pytest.mark.parametrize(
    ("driver", "cuda", "remedy"),
    [(0, "13.0", "begin with its driver"), (13000, None, "a torch for CUDA"), (13000, "13.0", "nvidia-smi")],
)
def test_without_a_gpu_it_says_what_to_do(
    driver: int, cuda: str | None, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.ops, "_driver_version", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "examine", lambda: list(doctor.devices()))
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    (place,) = [index for index, line in enumerate(lines) if line.split()[:2] == ["absent", "GPU"] and "torch" in line]
    assert lines[place].endswith("torch sees none")
    assert lines[place + 1].lstrip().startswith("-> ") and remedy in lines[place + 1]


@pytest.mark.parametrize("name", [name for device, name, _ in CASES if device == "cpu"])
def test_wrong_numbers_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One number of one gradient, half of it."""
    right = flash_ext.attention

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            grad = grad.clone()
            grad.view(-1)[grad.abs().argmax()] /= 2
            return grad

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: object) -> object:
        return right(query, Wrong.apply(key), value, **options)

    monkeypatch.setattr(flash_ext, "attention", attention)
    finding = doctor.backend_finding(name, "cpu", (torch.float32,))
    assert finding.state == doctor.WRONG and "of what is allowed" in finding.text
    assert doctor.main([]) == 1
    assert f"WRONG  attention, {name}" in capsys.readouterr().out


def test_a_failure_and_nan_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> object:
        raise RuntimeError("CUDA error: an illegal memory access\nand more")

    monkeypatch.setattr(flash_ext, "attention", fails)
    finding = doctor.backend_finding("cpu", "cpu", (torch.float32, torch.float64))
    assert finding.state == doctor.WRONG and finding.text.count("illegal memory access") == 2
    monkeypatch.undo()
    right = flash_ext.attention
    monkeypatch.setattr(flash_ext, "attention", lambda **x: (right(**x)[0] * float("nan"), right(**x)[1]))
    assert doctor.backend_finding("cpu", "cpu", (torch.float32,)).state == doctor.WRONG


def test_a_refusal_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(**_: object) -> object:
        raise flash_ext.AttentionError("sm90 refuses: compute capability 8.0 is less than 9.0")

    monkeypatch.setattr(flash_ext, "attention", refuses)
    finding = doctor.backend_finding("cpu", "cpu", (torch.float32,))
    assert finding.state == doctor.ABSENT and "compute capability 8.0" in finding.text
    assert "other backends" in finding.remedy


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtypes"), [(name, dtypes) for device, name, dtypes in CASES if device == "cuda"])
def test_right_on_this_gpu(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    if name in {"chunked", *flash_ext.build_info()["cuda"]["backends"]}:
        assert doctor.backend_finding(name, "cuda", dtypes).state != doctor.WRONG
