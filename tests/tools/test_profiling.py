"""Promise: flash_ext.profiling's Python interface: ranges, saved tensors, memory snapshots, numerics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flash_ext
from flash_ext import profiling
from flash_ext.profiling.__main__ import main


def test_the_module_is_there_when_asked_for() -> None:
    program = "import sys, flash_ext; assert 'flash_ext.profiling' not in sys.modules; print(flash_ext.profiling.range)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and "range" in done.stdout, done.stderr
    with pytest.raises(AttributeError, match="module 'flash_ext' has no attribute 'profile'"):
        flash_ext.profile  # noqa: B018


def test_range_without_a_listener_is_one_shared_object() -> None:
    assert profiling.range("a") is profiling.range("b")
    with profiling.range("a"), profiling.range("a"):
        pass


def test_torchs_profiler_sees_ranges() -> None:
    with torch.profiler.profile(acc_events=True) as profiler:
        with profiling.range("a named part"):
            torch.ones(3) + 1
        with pytest.raises(KeyError), profiling.range("a failing part"):
            raise KeyError
    seen = [event.name for event in profiler.events()]
    assert seen.count("a named part") == 1 and seen.count("a failing part") == 1


def test_range_in_compiled_code() -> None:
    def part(x: Tensor) -> Tensor:
        with profiling.range("part"):
            return x + 1

    compiled = torch.compile(part, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2))


# ---- saved_tensors ----


def test_saved_tensors_tells_who_and_what() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Softmax(-1))
    x = torch.randn(4, 8)
    saved = profiling.saved_tensors(lambda: model(x))
    found = {row.node.split("Backward0")[0]: row for row in saved}
    # the weight needs no saving: nothing before it wants a gradient
    assert {name: row.kind for name, row in found.items()} == {"Mm": "input", "Softmax": "activation"}
    assert found["Mm"].shape == (4, 8) and found["Mm"].dtype == torch.float32 and found["Mm"].bytes == 128
    assert found["Softmax"].node == "SoftmaxBackward0.result" and found["Softmax"].held == 4 * 16 * 4
    assert found["Mm"].where.startswith("test_profiling.py:")
    assert (saved.total("input"), saved.total("activation"), saved.total()) == (128, 256, 384)


def test_saved_tensors_knows_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    saved = profiling.saved_tensors(lambda: model(torch.randn(4, 8)))
    (weight,) = (row for row in saved if row.kind == "parameter")
    assert weight.held == 16 * 4 * 4 and weight.node.startswith("AddmmBackward0.")


def test_a_shared_storage_counts_once() -> None:
    x = torch.randn(6, requires_grad=True)

    def call() -> Tensor:
        y = x.exp()
        return y * y.sin() * y[:3].sum()

    saved = profiling.saved_tensors(call)
    storages = [row for row in saved if row.held]
    assert sum(row.bytes for row in saved) > saved.total()
    assert saved.total("activation") == sum(row.held for row in storages if row.kind == "activation")
    assert saved.total("input") == 0  # exp saves its result, not x


def test_saved_tensors_of_a_custom_function() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    x = torch.randn(5, requires_grad=True)
    (row,) = profiling.saved_tensors(lambda: Square.apply(x))
    assert (row.node, row.kind, row.held) == ("SquareBackward.saved_tensors", "input", 20)


def test_flash_ext_saves_no_scores() -> None:
    q, k, v = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in "qkv")
    naive = profiling.saved_tensors(lambda: (q @ k.mT).softmax(-1) @ v)
    ours = profiling.saved_tensors(lambda: flash_ext.scaled_dot_product_attention(q, k, v))
    scores = 2 * 256 * 256 * 4
    assert naive.total("activation") >= scores > 4 * ours.total("activation")
    assert {row.node for row in ours} == {"AttentionBackward"}
    assert max(row.held for row in ours) == q.nbytes  # the result; beside it the log-sum-exp
    text = str(ours)
    assert "AttentionBackward" in text and "kept alive for backward" in text


# ---- memory_snapshot ----


@pytest.mark.no_gpu
def test_memory_snapshot_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="torch sees no CUDA device"), profiling.memory_snapshot(tmp_path / "s"):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_memory_snapshot_always_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def record(enabled: str | None = "all", **options: object) -> None:
        calls.append(enabled)
        if enabled is not None:
            assert options["max_entries"] == 1_000_000

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    path = tmp_path / "s.pickle"
    if fails:
        with pytest.raises(torch.OutOfMemoryError), profiling.memory_snapshot(path):
            raise torch.OutOfMemoryError
    else:
        with profiling.memory_snapshot(path):
            pass
    assert calls == ["all", str(path), None]
    with pytest.raises(FileNotFoundError, match="whose folder does not exist"):
        profiling.memory_snapshot(tmp_path / "none/s.pickle").__enter__()
    assert len(calls) == 3  # nothing was started


@pytest.mark.gpu
def test_a_snapshot_of_a_gpu(tmp_path: Path) -> None:
    from flash_ext.profiling import memory

    path = tmp_path / "s.pickle"
    kept = torch.empty(3 << 20, device="cuda")
    with profiling.memory_snapshot(path):
        with profiling.range("forward"):
            made = torch.empty(5 << 20, device="cuda")
        with profiling.range("backward"):
            del made
            torch.empty(1 << 20, device="cuda")
    history = memory.replay(memory.load(path), memory.busiest_device(memory.load(path)))
    summary = memory.summarise(history, 10)
    assert history.base >= kept.nbytes and history.peak == history.base + (20 << 20)
    allocated = {phase: everything for phase, _, everything in summary.by_phase}
    assert (allocated["forward"], allocated["backward"]) == (20 << 20, 4 << 20)
    assert any("test_profiling.py" in line for line, _, _ in summary.by_line)


# ---- numerics ----


def test_numerics_shows_what_half_precision_loses() -> None:
    rows = {(row.case, row.values, row.accumulator): row for row in profiling.numerics()}
    stands = rows["0.01 added 1000 times", "bf16", "bf16"]
    assert stands.result == "4" and stands.error == pytest.approx(0.6)
    half, single = (rows["0.01 added 1000 times", "fp16", accumulator] for accumulator in ("fp16", "fp32"))
    assert single.error < 3e-4 < half.error
    overflow = rows["LayerNorm, values around 300", "fp16", "fp16"]
    assert overflow.error == 1 and overflow.result == "all zero"
    for case in ("LayerNorm, mean 64, deviation 1", "softmax of 4096 scores"):
        for half in ("fp16", "bf16"):
            assert rows[case, half, "autocast"].error < rows[case, half, half].error
    assert rows["parameters under autocast", "bf16", "-"].result == "fp32"


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("tyro")
    out = tmp_path / "numerics.md"
    command = [sys.executable, "-m", "flash_ext.profiling", "numerics", "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == out.read_text() and "| bf16" in result.stdout


@pytest.mark.parametrize("name", ["nsys", "memory", "numerics"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: python -m flash_ext.profiling {name}")


def test_a_wrong_argument_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    with pytest.raises(SystemExit, match="2"):
        main(["numerics", "--device", "tpu"])
    assert "invalid choice 'tpu' for argument '--device'. Expected one of ('cpu', 'cuda')." in capsys.readouterr().err


def test_without_the_extra_only_the_commands_are_missing() -> None:
    missing = "import sys; sys.modules.update(dict.fromkeys(['tyro', 'tabulate', 'rich', 'pandas']))"
    run = "import flash_ext.profiling.__main__ as commands; print('imported'); commands.main(['numerics'])"
    done = subprocess.run([sys.executable, "-c", f"{missing}; {run}"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "imported\n")
    told = "error: tyro is not installed; install flash_ext with its extra profiling, in a clone pip install "
    told += "--no-build-isolation -e '.[profiling]', of a wheel pip install 'FILE.whl[profiling]'\n"
    assert done.stderr.endswith(told)
