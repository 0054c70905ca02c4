"""Promise: `run --ncu` shows what Nsight Compute measures beside what is counted, and on a GPU the two agree.

Here ncu is a program that writes a CSV of its format; a GPU's own is asked where there is one and ncu is found.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

for name in ("numpy", "matplotlib", "rich", "tyro"):
    pytest.importorskip(name)

from flash_ext.lab import __main__ as lab  # noqa: E402
from flash_ext.lab import commands, ncu, report  # noqa: E402
from flash_ext.lab.lessons import LESSON_NAMES, LabError, lesson, lessons  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402

PERMISSION = (
    "==PROF== Connected to process 7\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA "
    "GPU Performance Counters on the target device 0.\n==PROF== Disconnected from process 7\n"
)
# scan's look_back looks as far back as the run lets it, and spins; in the others the compiler joins neighbouring loads
# of shared memory to wider ones
SPURIOUS = 0.005  # of requests and passes, at most
DEPENDS_ON_THE_RUN = {("scan", "look_back")}
JOINED = {
    ("scan", "blelloch"),
    ("load_tile", "tail"),
    ("matmul", "shared"),
    ("matmul", "registers"),
    ("tiny_flash", "tile"),
    ("swin", "shared"),
}


def raw_page(launches: list[dict[str, str]]) -> str:
    """As ncu prints it; what a launch does not name is 0."""
    there = re.fullmatch(r"regex:\^\((.*)\)\\.sum\$", ncu.pattern())[1].split("|")
    fixed = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
    lines = [[*fixed, *(f"{metric}.sum" for metric in there)], [""] * len(fixed) + ["inst"] * len(there)]
    for place, launch in enumerate(launches):
        known = [str(place), "7", "python3.11", "127.0.0.1", "transpose", "1", "7"]
        lines.append([*known, *(launch.get(metric, "0") for metric in there)])
    table = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f"==PROF== Connected to process 7\n==PROF== Disconnected from process 7\n{table}\n"


def padded_tile(**other: str) -> dict[str, str]:
    """What a launch of transpose's padded has, of 512 x 512 floats."""
    found = {
        "l1tex__t_requests_pipe_lsu_mem_global_op_ld": "8,192",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld": "32,768",
    }
    found |= {
        "l1tex__t_requests_pipe_lsu_mem_global_op_st": "8192",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st": "32768.00",
    }
    for kind in ("ld", "st"):
        found[f"smsp__inst_executed_op_shared_{kind}_pred_on_any"] = "8192"
        found[f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{kind}"] = "8192"
    return found | other


def fake(folder: Path, text: str, status: int = 0) -> str:
    """A program that writes the text to where --log-file says, and its arguments beside itself."""
    program = folder / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"open({str(folder / 'arguments')!r}, 'w').write('\\n'.join(sys.argv[1:]))\n"
        f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({text!r})\nsys.exit({status})\n"
    )
    program.chmod(0o755)
    return str(program)


def test_the_command_line() -> None:
    line = ncu.command("/opt/ncu", lesson("scan"), (1024,), Path("log.csv"))
    assert line[0] == "/opt/ncu" and line[-4:] == ["-m", "flash_ext.lab.launch", "scan", "1024"]
    options = dict(pairwise(line))
    assert options["--kernel-name"] == "regex:^(scan)$" and options["--target-processes"] == "all"
    assert options["--clock-control"] == "none" and options["--page"] == "raw" and options["--print-units"] == "base"
    wanted = re.compile(options["--metrics"].removeprefix("regex:"))
    for metric in (
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_requests_pipe_lsu_mem_global_op_atom.sum",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
        "smsp__inst_executed_op_shared_ld_pred_on_any.sum",
        "smsp__inst_executed_op_ldgsts_pred_on_any.sum",
    ):
        assert wanted.match(metric), metric
    assert not wanted.match("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.avg") and "," not in options["--metrics"]


def test_every_kernel_of_a_lesson_has_the_name_that_is_profiled() -> None:
    """And no other than those is launched between them."""
    for one in lessons():
        assert len({one.source(variant).kernel.name for variant in one.variants}) == 1


def test_a_raw_page() -> None:
    copies = {"smsp__inst_executed_op_ldgsts_pred_on_any": "16"}
    plain, both = map(ncu.measured, ncu.rows(raw_page([padded_tile(), padded_tile(**copies)])))
    assert plain.requests == dict.fromkeys(ncu.KINDS, 8192)
    assert plain.costs == {**dict.fromkeys(ncu.KINDS, 8192), ("global", False): 32768, ("global", True): 32768}
    assert both.requests == {**plain.requests, ("shared", True): 8208}
    assert both.costs == {key: cost for key, cost in plain.costs.items() if key != ("shared", True)}


def test_a_metric_that_is_not_there_is_named() -> None:
    page = raw_page([padded_tile(l1tex__t_sectors_pipe_lsu_mem_global_op_st="n/a")])
    with pytest.raises(LabError, match=r"have no l1tex__t_sectors_pipe_lsu_mem_global_op_st\.sum; leave --ncu out"):
        ncu.measured(ncu.rows(page)[0])


def test_what_is_measured_stands_beside() -> None:
    one, size = lesson("transpose"), (512, 512)
    variant, inputs = one.variant("padded"), one.inputs(size)
    row = report.Row(variant, 256, count(one, variant, size, inputs, variant.reference(*inputs).contiguous()), {})
    conflicts = {"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld": "12288"}
    (found,) = map(ncu.measured, ncu.rows(raw_page([padded_tile(**conflicts)])))
    assert report.beside([row], [found]) == [
        ["variant", "sectors a load", "sectors a store", "ways, shared load", "ways, shared store", "requests"],
        ["padded", "4 / 4", "4 / 4", "1 / 1.5", "1 / 1", "32,768 / 32,768"],
    ]


def test_ways_of_wide_requests() -> None:
    """Four passes of a float4 are one way."""
    one, size = lesson("bank_conflicts"), (1 << 10,)
    variant, inputs = one.variant("float4"), one.inputs(size)
    counted = count(one, variant, size, inputs, variant.reference(*inputs).contiguous())
    requests = {key: sum(site.requests for site in counted.counts.of(*key)) for key in ncu.KINDS}
    costs = {key: (16 if key[0] == "global" else 4) * number for key, number in requests.items()}
    (_, line) = report.beside([report.Row(variant, 256, counted, {})], [ncu.Measured(requests, costs)])
    assert line[1:5] == ["16 / 16", "16 / 16", "1 / 1", "1 / 1"]


def test_ncu_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lesson("transpose")
    program = fake(tmp_path, raw_page([padded_tile()] * len(one.variants)))
    monkeypatch.setattr(ncu, "needed", lambda: program)
    found = ncu.measure(one, (512, 512))
    assert len(found) == len(one.variants) and found[0].costs[("global", True)] == 32768
    assert (tmp_path / "arguments").read_text().split("\n")[-3:] == ["transpose", "512", "512"]


@pytest.mark.parametrize(
    "text, status, message",
    [
        (PERMISSION, 1, "counters to root alone; run this as root, in a container also with --cap-add SYS_ADMIN, or "),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n", 11, "status 11: Failed to initialize the"),
        ("==PROF== x\n==WARNING== No kernels were profiled.\n", 0, "status 0: ==PROF== x ==WARNING== No kernels were"),
        ("", 3, "ncu ended with status 3: it says nothing"),
        (raw_page([padded_tile()]), 0, "ncu ended with status 0: ==PROF== Connected"),
    ],
)
def test_why_there_are_no_counters(
    text: str, status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake(tmp_path, text, status)
    monkeypatch.setattr(ncu, "needed", lambda: program)
    with pytest.raises(LabError) as error:
        ncu.measure(lesson("add"), (8, 8))
    assert str(error.value).startswith("--ncu: ") and message in " ".join(str(error.value).split())


@pytest.mark.no_gpu
def test_without_a_gpu_it_is_said() -> None:
    with pytest.raises(
        SystemExit, match="error: --ncu: Nsight Compute measures on a GPU, and there is none here; leave"
    ):
        lab.main(["run", "add", "--size", "8", "--ncu"])


def test_without_ncu_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
    with pytest.raises(LabError, match="--ncu: ncu is neither on PATH nor in the usual places; install NVIDIA Nsight"):
        ncu.needed()


@pytest.mark.no_gpu
def test_the_run_shows_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = fake(tmp_path, raw_page([padded_tile()] * len(lesson("transpose").variants)))
    monkeypatch.setattr(ncu, "needed", lambda: program)
    lab.main(["run", "transpose", "--size", "512", "--out", str(tmp_path), "--ncu"])
    told, written = capsys.readouterr().out, (tmp_path / "transpose.md").read_text()
    assert commands.MEASURED in told and "32 / 1" in told
    assert f"## {commands.MEASURED}\n\n| variant | sectors a load |" in written
    assert "| shared | 4 / 4 | 4 / 4 | 32 / 1 | 1 / 1 | 32,768 / 32,768 |" in written


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(ncu.find_ncu() is None, reason="needs ncu")
@pytest.mark.parametrize("name", LESSON_NAMES)
def test_a_gpu_measures_what_is_counted(name: str) -> None:
    """Requests and sectors of global memory exactly, passes of shared memory where the compiler joins none.

    Of shared memory an H200 reports some more, other ones in each run: up to 19 requests (of 6,400) with the same
    passes, and 2 passes (of 576) with the same requests. A copy by cp.async that is told fewer bytes than it has room
    for took a sector more on an H200. Passes are at least those counted where all threads ask for 4 bytes; a wider load
    of few words takes fewer on a card than by quarters.
    """
    one = lesson(name)
    size = one.checked((), gpu=False)
    inputs = one.inputs(size)
    for variant, measured in zip(one.variants, ncu.measure(one, size), strict=True):
        if (name, variant.name) in DEPENDS_ON_THE_RUN:
            continue
        counted = count(one, variant, size, inputs, variant.reference(*inputs).contiguous())
        assert counted.blocks == counted.all_blocks
        joined, copies = (name, variant.name) in JOINED, "cp_async" in one.text(variant)
        for key in ncu.KINDS:
            sites = counted.counts.of(*key)
            requests, costs = sum(site.requests for site in sites), measured.costs.get(key)
            passes = sum(site.sectors if key[0] == "global" else site.passes for site in sites)
            told = (variant.name, key, "measured", measured.requests[key], costs, "counted", requests, passes)
            if key[0] == "global":
                assert measured.requests[key] == requests, told
                assert costs >= passes if copies else costs == passes, told
                continue
            assert measured.requests[key] <= requests * (1 + SPURIOUS), told
            assert joined or measured.requests[key] >= requests, told
            if costs is None:
                assert copies, told
                continue
            assert costs <= passes * (1 + SPURIOUS), told
            assert joined or any(site.width != 4 for site in sites) or costs >= passes, told
