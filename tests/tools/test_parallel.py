"""Promise: train_lm.py --parallel trains as one rank does, tells what a rank holds, and goes on where it was killed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import parallel_cases
import pytest
import torch
import torch.distributed as dist
from commands import BENCHMARKS, ROOT, rows_of

pytest.importorskip("tyro")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
STEPS = 12
SMALL = f"--device cpu --attention flash_ext --steps {STEPS} --batch 4 --context 16".split()
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "cp", "fsdp+cp")

pytestmark = pytest.mark.xdist_group("parallel")  # one run of the ranks


def begin(command: list[object]) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def nats(path: Path) -> dict[int, float]:
    """The curve, by step."""
    return {int(row["step"]): float(row["nats"]) for row in rows_of(path)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables and curves of one rank and of two with every strategy."""
    out = tmp_path_factory.mktemp("parallel")
    script = Path(parallel_cases.__file__)
    for launcher, names in (((sys.executable,), "none"), (TORCHRUN, ",".join(STRATEGIES))):
        process = begin([*launcher, script, names, *SMALL, "--out", out])
        _, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors
    return out


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_curve_is_that_of_one_rank(folder, name):
    one, two = nats(folder / "none_curve.csv"), nats(folder / f"{name}_curve.csv")
    assert list(one) == list(range(1, STEPS + 1))
    assert two == pytest.approx(one, rel=1e-4) and one[STEPS] < one[1] - 1


def test_what_is_computed_again_is_of_the_whole_sequence(folder, tmp_path):
    options = ("--parallel", "cp", "--checkpoint", "block", "--out", tmp_path)
    process = begin([*TORCHRUN, BENCHMARKS / "train_lm.py", *SMALL, *options])
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert nats(tmp_path / "train_lm_parallel_curve.csv") == pytest.approx(nats(folder / "none_curve.csv"), rel=1e-4)


@pytest.mark.parametrize("name", ["none", *STRATEGIES])
def test_a_run_that_starts_from_a_checkpoint_goes_on_alike(folder, name):
    first, again = nats(folder / f"{name}_curve.csv"), nats(folder / f"{name}-again_curve.csv")
    assert list(again) == [10, 11, 12]
    assert again == pytest.approx({step: first[step] for step in again}, abs=2e-6)


@pytest.mark.parametrize("name", ["none", *STRATEGIES])
def test_each_rank_holds_what_the_arithmetic_says(folder, name):
    rows = rows_of(folder / f"{name}.csv")
    assert [row["rank"] for row in rows] == (["0"] if name == "none" else ["0", "1"])
    assert (folder / f"{name}.png").exists()
    whole = int(rows_of(folder / "none.csv")[0]["parameters_bytes"])
    for kind in ("parameters", "gradients", "optimizer_state"):
        held, should = ([int(row[f"{kind}_{what}"]) for row in rows] for what in ("bytes", "should"))
        unequal = 0.2 if (name, kind) == ("zero1", "optimizer_state") else 0.0  # whole parameters are dealt out
        assert held == pytest.approx(should, rel=unequal, abs=4)
        assert sum(held) == pytest.approx(sum(should), abs=8)
    for row in rows:
        assert all(float(row[f"{part}_ms"]) > 0 for part in ("forward", "backward", "optimizer"))
        by_ulysses = 2 * 4 * 4 * 16 * 128 * 4 / 2 if "cp" in name else 0
        differ = int(row["saved_should"]) - int(row["saved_bytes"])
        assert differ == pytest.approx(0, abs=2e3) or differ == pytest.approx(by_ulysses, abs=2e3)
        assert row["peak_bytes"] == "" and row["commit"]
        activations = 4 * 16 * 128 * 4
        sent = {"none": 0, "ddp": whole, "zero1": 1.5 * whole, "fsdp": 1.5 * whole, "tp": 4 * 4 * activations}
        sent |= {"cp": whole + 8 * 4 * activations / 4, "fsdp+cp": 1.5 * whole + 8 * 4 * activations / 4}
        assert int(row["sent_bytes"]) == sent[name]
        assert bool(row["exposed_ms"]) == (name in ("ddp", "zero1", "fsdp"))


def test_what_autocast_keeps_is_what_the_arithmetic_says(bench, tmp_path):
    """On a CPU; and what two H200 kept, where DDP copies the numbers of the tokens once more."""
    command = [sys.executable, BENCHMARKS / "train_lm.py", *SMALL, "--parallel", "none", "--precision", "bf16"]
    process = begin([*command, "--steps", "1", "--no-sample", "--out", tmp_path / "one.csv"])
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    row = rows_of(tmp_path / "one.csv")[0]
    assert int(row["saved_bytes"]) == pytest.approx(int(row["saved_should"]), abs=2e3)
    kept = bench.strategies.kept_sizes
    for row in rows_of(ROOT / "benchmarks/results/nvidia-h200/two-ranks/train_lm_parallel.csv"):
        size, batch, context = bench.model.SIZES[row["size"]], int(row["batch"]), int(row["context"])
        shape = size.layers, size.heads, size.d_model, size.d_ff, batch, context, bench.model.BYTE_VOCAB, True
        sizes = bench.strategies.Sizes(int(row["ranks"]), 0, 0, 0, size.layers, **kept(*shape))
        by_ulysses = 2 * 2 * size.d_model * size.layers * batch * context / 2 if "cp" in row["parallel"] else 0
        should = bench.strategies.STRATEGIES[row["parallel"]].kept(sizes) - by_ulysses
        assert 0 <= int(row["saved_bytes"]) - should <= 8 * batch * context + 16, row["parallel"]


def test_a_run_that_loses_a_rank_goes_on_where_it_was(folder, tmp_path):
    saving = ("--parallel", "fsdp", "--resume", tmp_path / "saved", "--save-every", 3)
    command = [*TORCHRUN, BENCHMARKS / "train_lm.py", *SMALL, *saving, "--out", tmp_path]
    first = begin(command)
    while not list((tmp_path / "saved").glob("step-*/.metadata")):
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.005)
    victim = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[-1]
    os.kill(int(victim), signal.SIGKILL)
    first.communicate(timeout=600)
    assert first.returncode != 0 and not (tmp_path / "train_lm_parallel.csv").exists()
    second = begin(command)
    _, errors = second.communicate(timeout=600)
    assert second.returncode == 0, errors
    curve = nats(tmp_path / "train_lm_parallel_curve.csv")
    steps = list(curve)
    assert steps[0] > 1 and steps == list(range(steps[0], STEPS + 1)) and steps[0] % 3 == 1
    whole = nats(folder / "none_curve.csv")
    assert curve == pytest.approx({step: whole[step] for step in steps}, rel=1e-4)
    saved = sorted(path.parent.name for path in (tmp_path / "saved").glob("step-*/.metadata"))
    assert saved == ["step-00000009", "step-00000012"]


def test_help_names_every_strategy(bench, capsys):
    with pytest.raises(SystemExit):
        bench.train_lm.parse(["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"on torchrun's ranks ({', '.join(bench.strategies.STRATEGIES)})" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--parallel", "pp"), "--parallel pp is none of none, ddp, zero1, fsdp, tp, cp, fsdp+cp."),
        (("--parallel", "ddp", "--precision", "fp16"), "--precision fp16 scales the loss, which --parallel does not"),
        (("--parallel", "ddp", "--compile"), "--compile is not for --parallel."),
        (("--parallel", "ddp", "--compare"), "--compare is not for --parallel."),
        (("--parallel", "ddp", "--mode", "forward"), "--parallel is for training, but --mode asks for measuring."),
        (("--resume", "saved"), "--resume saved is for --parallel."),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(bench, arguments, words):
    with pytest.raises(bench.harness.BenchmarkError) as told:
        bench.train_lm.parse(["--device", "cpu", *arguments])
    assert str(told.value).startswith(words)


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({"parallel": "none"}, 2, "--parallel none is one rank's, but torchrun started 2."),
        ({"parallel": "ddp", "batch": 3}, 2, "--batch 3 is not a multiple of 2 ranks."),
        ({"parallel": "cp", "context": 15}, 2, "--context 15 is not a multiple of 2 ranks."),
        (
            {"parallel": "cp", "context": 16, "attention": "sdpa"},
            2,
            "--attention sdpa knows one rank's tokens alone; cp takes flash_ext.",
        ),
        ({"parallel": "tp"}, 3, "--size tiny has 4 heads, which 3 ranks do not divide evenly."),
    ],
)
def test_what_does_not_fit_the_ranks_is_told(bench, monkeypatch, changes, ranks, words):
    monkeypatch.setattr(bench.parallel.dist, "get_world_size", lambda: ranks)
    args = bench.train_lm.parse(["--device", "cpu", "--parallel", "ddp"])
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(bench.harness.BenchmarkError) as told:
        bench.parallel.check(args)
    assert str(told.value) == words


def test_ranks_that_disagree_are_told_on_each(tmp_path):
    line = [*map(str, (sys.executable, BENCHMARKS / "train_lm.py", *SMALL, "--out", tmp_path)), "--parallel", "ddp"]
    script = f"{shlex.join(line)} --seed $RANK"
    process = begin([*TORCHRUN, "--no-python", "bash", "-c", script])
    _, errors = process.communicate(timeout=600)
    assert process.returncode != 0 and not list(tmp_path.iterdir())
    assert errors.count("--seed is 0 on rank 0 and 1 on rank 1.") == 2, errors


def test_a_checkpoint_of_another_run_is_refused(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.parallel.dist, "get_world_size", lambda: 2)
    args = bench.train_lm.parse(["--device", "cpu", "--parallel", "ddp", "--resume", str(tmp_path)])
    (tmp_path / "step-00000003").mkdir()
    assert bench.parallel.resume(None, args) == 0  # it is not complete
    (tmp_path / "step-00000003/.metadata").touch()
    other = bench.parallel.settings_of(args) | {"size": "small"}
    (tmp_path / "settings.json").write_text(bench.parallel.json.dumps(other))
    with pytest.raises(bench.harness.BenchmarkError, match="it was written with size small, not tiny"):
        bench.parallel.resume(None, args)


def test_nvtx_ranges_hold_what_backward_launches(bench, monkeypatch, tmp_path):
    """Nsight Systems counts a kernel for the thread that launched it, which is autograd's own on a GPU otherwise."""
    threads, step = [], bench.parallel.step

    def told(*given):
        threads.append(torch._C._is_multithreading_enabled())
        return step(*given)

    monkeypatch.setattr(bench.parallel, "step", told)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for nvtx in ((), ("--nvtx",)):
            args = bench.train_lm.parse([*SMALL[:4], "--steps", "1", "--context", "16", "--parallel", "none", *nvtx])
            bench.parallel.run(args, bench.parallel.load_text(args.data, args.context))
    finally:
        dist.destroy_process_group()
    assert threads == [True, False]
