"""Promise: `python -m flash_ext.profiling nsys` runs nsys around a command and reports what its statistics say.

The CSV files in golden/nsys have the columns of `nsys stats`, with two steps of a model of two blocks; nsys itself is
played by a script.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from flash_ext.profiling import nsys
from flash_ext.profiling.__main__ import main
from flash_ext.profiling.nsys_report import (
    Kernel,
    StatsError,
    block_table,
    kind_table,
    markdown,
    phase_table,
    phase_times,
    read_stats,
    short_name,
    total,
    uncovered,
)

GOLDEN = Path(__file__).parents[1] / "golden/nsys"
NSYS = """#!{python}
import pathlib, shutil, subprocess, sys
mode, *rest = sys.argv[1:]
output = next(a.split("=", 1)[1] for a in rest if a.startswith("--output="))
with open("{log}", "a") as log:
    log.write(" ".join([mode, *rest]) + "\\n")
if mode == "profile":
    command = rest[max(i for i, a in enumerate(rest) if a.startswith("--")) + 1 :]
    code = subprocess.run(command).returncode
    if "{written}":
        pathlib.Path(output).with_suffix("{written}").write_text("a report")
    sys.exit(code)
for file in pathlib.Path("{golden}").glob("*.csv"):
    shutil.copy(file, output + file.name.removeprefix("naive"))
"""


def fake_nsys(folder: Path, written: str = ".nsys-rep") -> Path:
    """A script in place of nsys that logs its arguments."""
    program = folder / "nsys"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(NSYS.format(python=sys.executable, log=folder / "log", golden=GOLDEN, written=written))
    program.chmod(0o755)
    return program


def cli(*args: object) -> None:
    pytest.importorskip("tyro")
    main(["nsys", *map(str, args)])


def rows(table: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: rest for name, *rest in cells}


def test_phases_blocks_and_kinds() -> None:
    stats = read_stats(GOLDEN)
    assert stats.steps == 2
    times = phase_times(stats)
    assert list(times) == ["forward", "loss", "backward", "optimizer"]
    assert sum(times.values()) == total(stats.kernels)  # every kernel is in one phase
    phases = rows(phase_table(stats))
    assert phases["forward"] == ["1.981", "34.1 %", "1.999", "0.155", "23"]
    assert phases["full step"][:2] == ["5.803", "100.0 %"]
    kinds = rows(kind_table(stats))
    assert kinds["softmax"] == ["0.220", "11.1 %", "0.560", "9.7 %"]
    assert kinds["matmul"][1] == "76.8 %" and kinds["fused attention"][1] == "0.0 %"
    assert rows(block_table(stats))["mean"] == ["0.968", "1.646"]


def test_backward_by_autograds_own_thread_is_what_is_left(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "naive_nvtx_kern_sum.csv"
    text = file.read_text()
    expected = phase_times(read_stats(tmp_path))["backward"]
    lines = [line.replace("flash_ext:backward,PushPop,", ",,") for line in text.splitlines()]
    file.write_text("\n".join(lines) + "\n")
    stats = read_stats(tmp_path)
    assert phase_times(stats)["backward"] == expected
    assert "launched by another thread" in markdown(stats, "", "")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void flash_ext::sm80::forward_kernel<flash_ext::sm80::Traits<cutlass>>(int)", "fused attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "fused attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", "fused attention"),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash>(Flash_bwd_params)",
            "fused attention",
        ),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT", "matmul"),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>(T1::Params)", "matmul"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false>(float)", "softmax"),
        ("triton_per_fused__softmax_masked_fill_3", "softmax"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>(int)", "rest"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert Kernel(name, 1, 1.0).kind == kind


def test_short_names() -> None:
    full = "void at::native::<unnamed>::cunn_SoftMaxForward<(int)8, float>(T4 *, const T2 *, int)"
    assert short_name(full) == "cunn_SoftMaxForward<8, float>"
    assert len(short_name("x" * 300)) == 90


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("nvtx_kern_sum", None, "has no file *nvtx_kern_sum.csv"),
        ("cuda_gpu_kern_sum", "Instances", "has no column 'Instances'"),
        ("nvtx_gpu_proj_sum", "", "is empty: nsys found no such data"),
    ],
)
def test_files_that_are_not_statistics(tmp_path: Path, name: str, change: str | None, sentence: str) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.glob(f"*{name}.csv")
    if change is None:
        file.unlink()
    else:
        file.write_text(change and file.read_text().replace(change, "Other"))
    with pytest.raises(StatsError) as error:
        read_stats(tmp_path)
    assert sentence in str(error.value)


def test_a_run_from_command_to_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program, out, mark = fake_nsys(tmp_path / "bin"), tmp_path / "out", tmp_path / "ran"
    cli("--nsys", program, "--out", out, "--name", "naive", "--title", "Naive", "--", "touch", mark)
    assert mark.exists()
    text = (out / "naive.md").read_text()
    assert capfd.readouterr().out.strip() == text.strip()
    assert text.startswith(f"# Naive\n\n`touch {mark}`\n") and "## Phases" in text and "## Blocks" in text
    assert (out / "naive_stats/naive_nvtx_kern_sum.csv").exists()
    profiled, stats = (tmp_path / "bin/log").read_text().splitlines()
    assert "--trace=cuda,nvtx --sample=none --cpuctxsw=none" in profiled
    assert "--capture-range=cudaProfilerApi --capture-range-end=stop" in profiled
    reports = ("nvtx_gpu_proj_sum", "cuda_gpu_kern_sum", "nvtx_kern_sum", "cuda_gpu_trace")
    assert " ".join(f"--report {report}" for report in reports) + " --format csv" in stats
    body = text.split("\n\n")[2:]  # without heading and command
    cli("--stats-dir", out / "naive_stats", "--out", tmp_path / "again")
    assert (tmp_path / "again/naive_stats.md").read_text().split("\n\n")[1:] == body
    cli("--nsys", program, "--report", out / "naive.nsys-rep", "--out", tmp_path / "given")
    assert (tmp_path / "given/naive.md").read_text().split("\n\n")[1:] == body


def test_the_importer_is_run_where_nsys_does_not_find_it(tmp_path: Path) -> None:
    program = fake_nsys(tmp_path / "host/target-linux-x64", ".qdstrm")
    with pytest.raises(SystemExit, match="has no QdstrmImporter"):
        cli("--nsys", program, "--out", tmp_path / "out", "--", "true")
    importer = tmp_path / "host/linux-desktop/QdstrmImporter"
    importer.parent.mkdir()
    importer.write_text('#!/bin/sh\nfor a; do case "$a" in --output-file=*) touch "${a#*=}";; esac; done\n')
    importer.chmod(0o755)
    cli("--nsys", program, "--out", tmp_path / "out", "--", "true")
    assert (tmp_path / "out/profile.md").exists()


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    program = fake_nsys(tmp_path / "bin", "")
    for args, sentence in (
        ((), "takes one of -- COMMAND, --report FILE.nsys-rep and --stats-dir DIR"),
        (("--stats-dir", tmp_path), "has no file *nvtx_gpu_proj_sum.csv"),
        (("--nsys", program, "--report", tmp_path / "x.nsys-rep"), "which does not exist"),
        (("--nsys", tmp_path / "none", "--", "true"), "it must be the program nsys"),
        (("--nsys", program, "--", "true"), "the command must call cudaProfilerStart"),
        (("--nsys", program, "--", "false"), "ended with exit code 1"),
    ):
        with pytest.raises(SystemExit) as end:
            cli("--out", tmp_path / "out", *args)
        assert str(end.value).startswith("error: ") and sentence in str(end.value)


def test_where_nsys_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(nsys.NsysError, match=r"nsys is not on PATH .* install Nsight Systems from"):
        nsys.find_nsys(root=tmp_path)
    compute = tmp_path / "opt/nvidia/nsight-compute"
    old, new = (fake_nsys(compute / version / "host/target-linux-x64") for version in ("2024.10.0", "2025.3.1"))
    assert nsys.find_nsys(root=tmp_path) == new != old
    toolkit = fake_nsys(tmp_path / "toolkit/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert nsys.find_nsys(root=tmp_path) == toolkit
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert nsys.find_nsys(root=tmp_path) == toolkit
    assert nsys.find_nsys(root=tmp_path) != fake_nsys(tmp_path / "path") == nsys.find_nsys(root=tmp_path)


def test_collectives_and_what_hides_them(tmp_path: Path) -> None:
    """Times of kernels on each GPU; of an older folder without the trace there is no such table."""
    assert uncovered([(0, 10)], []) == 10
    assert uncovered([(0, 4), (2, 10)], [(3, 5), (4, 6), (9, 12)]) == 3 + 3
    assert uncovered([(0, 1), (5, 6)], [(0, 10)]) == 0
    assert uncovered([], [(0, 1)]) == 0
    for file in GOLDEN.glob("*.csv"):
        shutil.copy(file, tmp_path)
    assert "## Collectives" not in markdown(read_stats(tmp_path), "", "")
    lines = ["Start (ns),Duration (ns),Device,Name", "0,4000000,GPU (0),ncclDevKernel_AllReduce(x)"]
    lines += ["1000000,2000000,GPU (0),gemm", "0,5000000,GPU (1),gemm", "2000000,8000000,GPU (1),ncclDevKernel_X"]
    (tmp_path / "naive_cuda_gpu_trace.csv").write_text("\n".join(lines))
    stats = read_stats(tmp_path)
    assert stats.collectives == {"GPU (0)": (4e6, 2e6), "GPU (1)": (8e6, 5e6)}
    row = f"| GPU (1) | {8 / stats.steps:.3f} | {5 / stats.steps:.3f} | 37.5 % |"
    assert row in markdown(stats, "", "")
