"""Promise: train_lm.py measures what it says: phases, warm-up, precisions, running out of memory, profilers' ranges."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from commands import rows_of, start

import flash_ext

pytest.importorskip("tyro")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
SMALL = ("--device", "cpu", "--steps", "2", "--batch", "2", "--context", "16", "--warmup", "1")


def setting(bench, **changes):
    """A tiny setting; two blocks would do, but sizes have names."""
    values = {"size": "tiny", "context": 12, "attention": "naive", "precision": "fp32", "mode": "train-step"}
    values |= {"warmup": 1, "batch": 2, "steps": 2, "compiled": False, "recompute": "none", "device": "cpu", "seed": 0}
    return bench.stepping.Setting(**(values | changes))


def test_lists_make_one_table(bench, monkeypatch, capsys, tmp_path):
    lists = (
        "--mode",
        "forward,forward-backward,train-step",
        "--attention",
        "sdpa,flash_ext",
        "--precision",
        "fp32,bf16",
    )
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *SMALL, *lists, "--out", str(tmp_path)])
    bench.train_lm.main()
    rows = rows_of(tmp_path / "train_lm_steps.csv")
    assert len(rows) == 12
    timed = {"forward": "forward", "forward-backward": "forward loss backward"}
    timed["train-step"] = "forward loss backward optimizer"
    for row in rows:
        assert [p for p in timed["train-step"].split() if row[f"{p}_ms"]] == timed[row["mode"]].split()
        assert len(row["each_step_ms"].split()) == 2
        assert sum(float(row[f"{p}_ms"]) for p in timed[row["mode"]].split()) <= float(row["step_ms"]) * 1.01
        assert all(float(row[name]) > 0 for name in ("step_ms", "tokens_s", "peak_tflops"))
        assert row["step_std"] and row["mfu_percent"]
        assert row["status"] == "ok" and all(row[name] for name in ("commit", "library", "command"))
    shown = capsys.readouterr().out
    assert "size tiny, batch 2, context 16, compile 0, checkpoint none, warmup 1" in " ".join(shown.split())
    assert all((tmp_path / f"train_lm_steps{kind}").stat().st_size > 500 for kind in (".md", ".tex", ".png"))


def test_the_warm_up_study_measures_each_in_a_new_process(tmp_path):
    study = (
        "--device",
        "cpu",
        "--steps",
        "1",
        "--batch",
        "1",
        "--context",
        "8",
        "--warmup",
        "0,1",
        "--attention",
        "sdpa",
    )
    done = start("train_lm.py", *study, "--out", tmp_path / "study.csv")
    assert done.returncode == 0, done.stderr
    assert [row["warmup"] for row in rows_of(tmp_path / "study.csv")] == ["0", "1"]
    assert "tiny 8 sdpa fp32 train-step 2/2" in done.stderr


def test_a_time_budget_starts_no_further_setting(bench, monkeypatch, capsys, tmp_path):
    budget = ("--attention", "sdpa,naive", "--time-budget", "0.001")
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *SMALL, *budget, "--out", str(tmp_path)])
    bench.train_lm.main()
    assert [row["attention"] for row in rows_of(tmp_path / "train_lm_steps.csv")] == ["sdpa"]
    told = "The time budget of 0.001 s is used up: 1 of 2 settings were not measured."
    assert told in capsys.readouterr().err


def test_fp16_trains_with_a_scaled_loss_and_float32_weights(bench):
    work = bench.stepping.build(setting(bench, precision="fp16"))
    before = [parameter.detach().clone() for parameter in work.model.parameters()]
    work.step()
    assert work.scaler.is_enabled() and work.scaler.get_scale() > 1
    assert all(parameter.dtype == torch.float32 for parameter in work.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, work.model.parameters(), strict=True))


def test_memory_that_runs_out_is_a_row(bench, monkeypatch):
    def no_memory(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    fits = bench.stepping.measure(setting(bench), bench.stepping.Tools())
    monkeypatch.setattr(bench.stepping, "build", no_memory)
    results = [fits, bench.stepping.measure(setting(bench, size="10B"), bench.stepping.Tools())]
    rows = [bench.stepping.row_of(result, peak_tflops=1.0) for result in results]
    assert [row["status"] for row in rows] == ["ok", "OOM"]
    assert rows[0].keys() == rows[1].keys()
    assert (rows[1]["step_ms"], rows[1]["tokens_s"], rows[1]["mfu_percent"]) == ("", "", "")
    table = bench.stepping.step_table(rows, "a card")
    assert list(bench.tables.frame(table).loc[1]) == ["10B", "-", "-", "-", "-", "OOM", "-", "-", "-"]


def test_training_that_runs_out_of_memory_is_a_row_too(bench, monkeypatch, capsys, tmp_path):
    steps = bench.training.training_steps

    def few_steps(*arguments):
        yield next(steps(*arguments))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(bench.training, "training_steps", few_steps)
    small = ("--device", "cpu", "--steps", "3", "--batch", "2", "--context", "16", "--compare", "sdpa", "naive")
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *small, "--out", str(tmp_path)])
    bench.train_lm.main()
    assert "out of memory" in capsys.readouterr().out
    rows = rows_of(tmp_path / "train_lm.csv")
    assert [(row["attention"], row["step"], row["loss"] == "OOM") for row in rows] == [
        (name, step, step == "2") for name in ("sdpa", "naive") for step in ("1", "2")
    ]
    assert (tmp_path / "train_lm.png").stat().st_size > 5000


def test_the_arithmetic_of_a_forward_is_what_torch_counts(bench):
    from torch.utils.flop_counter import FlopCounterMode

    s = setting(bench, mode="forward")
    work, size = bench.stepping.build(s), bench.model.SIZES["tiny"]
    with FlopCounterMode(display=False) as counter:
        work.model(work.tokens[:, :-1])
    hidden = s.context * (s.context - 1) // 2  # pairs that naive attention computes and then masks
    extra = 4 * size.layers * s.batch * hidden * size.d_model
    assert counter.get_total_flops() == bench.stepping.forward_flop(size, s.batch, s.context) + extra


# ---- the same model, however it runs ----


@pytest.mark.parametrize(
    "change", [{"compiled": True}, *({"recompute": name} for name in ("block", "nested", "sqrt"))], ids=str
)
def test_checkpointing_and_compiling_change_nothing(bench, monkeypatch, change):
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="aot_eager"))
    gradients = []
    for changes in ({}, change):
        work = bench.stepping.build(setting(bench, attention="flash_ext", mode="forward-backward", **changes))
        loss = bench.training.cross_entropy(work.model(work.tokens[:, :-1]), work.tokens[:, 1:])
        loss.backward()
        gradients.append([parameter.grad for parameter in work.model.parameters()])
    for plain, changed in zip(*gradients, strict=True):
        torch.testing.assert_close(changed, plain, rtol=1e-5, atol=1e-7)


# ---- what profilers see ----


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_ranges_nest_as_the_model_does(bench, recompute):
    opened: list[str] = []
    seen: list[str] = []

    @contextmanager
    def record(name):
        opened.append(name)
        seen.append("/".join(opened))
        yield
        assert opened.pop() == name

    work = bench.stepping.build(setting(bench, recompute=recompute))
    with bench.model.mark_ranges(record):
        work.step()
    assert not opened
    blocks = [f"block {index}" for index in range(bench.model.SIZES["tiny"].layers)]
    parts = ["computing attention scores", "computing softmax", "final matmul"]
    expected = ["forward"]
    expected += [f"forward/{path}" for block in blocks for path in (block, *(f"{block}/{part}" for part in parts))]
    expected += ["loss", "backward"]
    for block in reversed(blocks):
        again = [f"backward/{block} backward/{part}" for part in parts] if recompute == "block" else []
        expected += [f"backward/{block} backward", *again]
    assert seen == [*expected, "optimizer"]
    seen.clear()
    work.step()
    assert not seen


def test_the_trace_has_the_ranges_of_the_measured_steps(bench, tmp_path):
    path = tmp_path / "trace.json"
    bench.stepping.measure(setting(bench), bench.stepping.Tools(nvtx=True, torch_profiler=path))
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for name, times in {
        "measured steps": 1,
        "forward": 2,
        "block 0": 2,
        "final matmul": 8,
        "block 3 backward": 2,
    }.items():
        assert names.count(name) == times, name
    assert "warm-up" not in names


def test_ranges_are_off_unless_a_profiler_is_asked_for(bench):
    tools = bench.stepping.Tools
    assert not tools()
    assert all(map(bool, (tools(nvtx=True), tools(torch_profiler="t.json"), tools(memory_snapshot="s.pickle"))))
    assert bench.stepping.profiling() is flash_ext.profiling


@pytest.mark.gpu
def test_steps_on_a_gpu(bench, tmp_path):
    s = replace(setting(bench), device="cuda", attention="flash_ext", precision="bf16")
    snapshot = tmp_path / "step.pickle"
    result = bench.stepping.measure(s, bench.stepping.Tools(nvtx=True, memory_snapshot=snapshot))
    assert result.peak_mib > 0 and len(result.step_ms) == 2 and snapshot.stat().st_size > 1000
    lists = ("--attention", "naive,sdpa,flash_ext,compiled-naive", "--mode", "forward,train-step", "--compile")
    chosen = ("--size", "small", "--context", "128", "--batch", "1", "--steps", "2", "--precision", "bf16")
    done = start("train_lm.py", *lists, *chosen, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "train_lm_steps.csv")
    assert len(rows) == 8
    assert all(row["status"] == "ok" and float(row["peak_mib"]) > 0 and row["cudnn"] and row["driver"] for row in rows)


# ---- what recomputation saves ----


def test_the_peak_of_a_step_is_counted_by_storage(bench):
    kept = torch.zeros(1000)
    with bench.peak_memory.StoragePeak() as counter:
        a = torch.ones(100) + kept[:100]  # two of 400 bytes, one of which goes
        b = a.view(10, 10).relu()
        del a
        c = b.add_(1).t()
        assert counter.now == 400
        del b, c
        d = torch.zeros(250)
    assert (counter.peak, counter.now) == (1000, 1000)
    del d
    assert counter.now == 0


def test_recomputation_keeps_less_as_predicted(bench, monkeypatch, capsys, tmp_path):
    lists = ("--checkpoint", "none,block,nested,sqrt", "--mode", "train-step", "--attention", "sdpa")
    shape = ("--device", "cpu", "--steps", "1", "--batch", "2", "--context", "256", "--warmup", "1")
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *shape, *lists, "--out", str(tmp_path)])
    monkeypatch.setitem(bench.model.SIZES, "tiny", replace(bench.model.SIZES["tiny"], layers=9))
    monkeypatch.setattr(bench.stepping, "VOCAB", 64)
    bench.train_lm.main()
    rows = rows_of(tmp_path / "train_lm_steps.csv")
    peaks = {row["checkpoint"]: float(row["step_mib"]) for row in rows}
    assert list(peaks) == ["none", "block", "nested", "sqrt"]
    assert peaks["none"] > peaks["sqrt"] > max(peaks["block"], peaks["nested"])
    for row in rows:
        assert float(row["step_mib"]) == pytest.approx(float(row["predicted_mib"]), rel=0.25), row["checkpoint"]
    assert "predicted MiB" in capsys.readouterr().out
