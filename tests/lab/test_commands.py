"""Promise: `python -m flash_ext.lab` lists, runs and shows every lesson without a GPU, and refuses in one sentence."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for name in ("numpy", "matplotlib", "rich", "tyro"):
    pytest.importorskip(name)

from lab_sizes import CASES, THREADS  # noqa: E402

from flash_ext.lab import __main__ as lab  # noqa: E402
from flash_ext.lab import cuda  # noqa: E402
from flash_ext.lab.lessons import FOLDER, LESSON_NAMES, LabError, lesson, lessons  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_the_list_is_what_comes_without_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flash_ext.lab"], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for one in lessons():
        assert one.name in done.stdout and all(variant.name in done.stdout for variant in one.variants)


def test_every_kernel_belongs_to_a_lesson_and_is_short() -> None:
    files = set(FOLDER.glob("*/*.cu"))
    assert files == {one.path(variant) for one in lessons() for variant in one.variants}
    for path in files:
        lines = path.read_text().splitlines()
        assert lines[0].startswith("// ") and len(lines) <= 60 and max(map(len, lines)) <= 120, path


@pytest.mark.parametrize("name, size", CASES)
def test_every_variant_is_right_at_odd_sizes(name: str, size: str) -> None:
    """Executed on the CPU; of large sizes a sample of the blocks."""
    one = lesson(name)
    numbers = one.checked(size.split(), gpu=False)
    inputs = one.inputs(numbers)
    for variant in one.variants:
        counted = count(one, variant, numbers, inputs, variant.reference(*inputs).contiguous(), THREADS[name, size])
        assert counted.blocks == counted.all_blocks or max(numbers) >= 1000


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    "name, size",
    [
        ("add", "31"),
        ("transpose", "33 1000"),
        ("bank_conflicts", "4097"),
        ("reduction", "1"),
        ("scan", "33"),
        ("swin", "1"),
        ("block_size", "31"),
        ("load_tile", "100 63 64"),
        ("matmul", "33 40 20"),
    ],
)
def test_run(name: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.main(["run", name, "--size", *size.split(), "--out", str(tmp_path / "new")])
    told = capsys.readouterr().out
    assert "times need a card" in told and "GB/s" not in told
    table = (tmp_path / "new" / f"{name}.md").read_text()
    assert all(f"| {variant.name} |" in table and variant.name in told for variant in lesson(name).variants)
    picture = (tmp_path / "new" / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 60_000


@pytest.mark.no_gpu
def test_a_lesson_may_have_tables_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.main(["run", "block_size", "--size", "1", "--out", str(tmp_path)])
    told, written = capsys.readouterr().out, (tmp_path / "block_size.md").read_text()
    title = "Computed: a tile of queries and 64 keys"
    assert "block_size, 1 rows of 256 floats" in told and title in told
    assert f"## {title}\n\n| head dim | queries |" in written and "| 256 | 192 | 176 | 160 | 0 / 0 |" in written


@pytest.mark.parametrize("name", LESSON_NAMES)
def test_a_title_says_what_its_sizes_count(name: str) -> None:
    """Floats, where their product is how many a tensor has; else each is named."""
    one = lesson(name)
    size = one.checked((), gpu=False)
    if one.of == "floats":
        assert one.elements(size) == math.prod(size)
    else:
        assert one.of.startswith("rows of") or len(one.of.split(" x ")) == len(size)


@pytest.mark.no_gpu
def test_run_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The picture lies in the present folder; registers are left out, and it is said why."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cuda, "missing", lambda: "There is no NVRTC.")
    lab.main(["run", "add", "--size", "8"])
    told = capsys.readouterr().out
    assert "Registers are left out, of occupancy too: There is no NVRTC." in told and "occupancy" in told
    assert [path.name for path in tmp_path.iterdir()] == ["add.png"]


@pytest.mark.no_gpu
def test_a_sample_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.main(["run", "bank_conflicts", "--size", "3000000", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    assert "a part of the blocks was counted, at most 34.95%, evenly spread" in told and "~" in told


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    lab.main(["show", "transpose", "padded"])
    told = capsys.readouterr().out
    assert (FOLDER / "transpose" / "padded.cu").read_text() in told and "swizzled" not in told
    lab.main(["show", "bank_conflicts"])
    told = capsys.readouterr().out
    assert told.count("extern") == 4 and "stride_8 -DSTRIDE=8" in told and "cp.async" not in told
    lab.main(["show", "load_tile"])
    told = capsys.readouterr().out
    assert told.count("extern") == 6 and told.count("cp.async.commit_group;") == 1


@pytest.mark.parametrize(
    "command, message",
    [
        (
            "run nothing",
            "lesson nothing: there are add, transpose, bank_conflicts, reduction, scan, block_size, load_tile, matmul, "
            "tiny_flash, swin.",
        ),
        ("show add nothing", "variant nothing of add: it has row_major, column_major, "),
        ("run add --size 0", "--size 0: 0 is not a whole number from 1 on."),
        ("run add --size 8 x", "--size 8 x: x is not a whole number from 1 on."),
        ("run scan --size 300000000", "a tensor has 300,000,000 elements, at most 268,435,456 are accepted."),
        ("run block_size --size 1048577", "a tensor has 268,435,712 elements, at most 268,435,456 are accepted."),
        ("run bank_conflicts --size 4 4", "--size 4 4: 2 numbers are given, bank_conflicts takes N."),
        ("run add --size 1 2 3", "--size 1 2 3: 3 numbers are given, add takes ROWS COLUMNS."),
        ("run add --size 20000", "a tensor has 400,000,000 elements, at most 268,435,456 are accepted."),
        ("run transpose --size 1 1000000", "a kernel takes 125,000 blocks in y, at most 65,535 are accepted."),
        ("run load_tile --size 8 64 60", "--size 8 64 60: STRIDE is 60, rows of 64 floats need at least 64."),
        ("run load_tile --size 257", "--size 257: D is 257, the tile in shared memory has room for 1 to 256."),
        ("run matmul --size 1 20000 20000", "a matrix has 401,281,024 elements in tiles of 64 x 64, at most 268,"),
        ("run add --out /dev/null/x", "--out /dev/null/x: it cannot be made: Not a directory."),
    ],
)
def test_a_mistake_is_one_sentence(command: str, message: str) -> None:
    with pytest.raises(SystemExit) as end:
        lab.main(command.split())
    assert str(end.value.code).startswith("error: ") and message in str(end.value.code)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "find_spec", lambda name: None if name == "rich" else name)
    told = r"^error: rich not installed; install flash_ext with its extra lab, .* '\.\[lab\]', .* 'FILE\.whl\[lab\]'$"
    with pytest.raises(SystemExit, match=told):
        lab.main([])


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "add", torch.sub)
    one = lesson("add")
    inputs = one.inputs((4, 4))
    with pytest.raises(LabError, match="add row_major differs from torch"):
        count(one, one.variants[0], (4, 4), inputs, torch.add(*inputs))
