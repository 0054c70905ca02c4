"""Promise: lab_times.py writes what a GPU took for the lab's kernels, beside its limit, and the lab's page shows it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from commands import ROOT, rows_of, start

for name in ("numpy", "matplotlib", "pandas", "rich", "tyro"):
    pytest.importorskip(name)

from flash_ext.lab.lessons import LESSON_NAMES, LabError, Lesson, lesson  # noqa: E402
from flash_ext.lab.measure import Times  # noqa: E402

KINDS = ("csv", "md", "tex", "png")
ORIGIN = {"commit": "a" * 12, "dirty": "0", "torch": "2.11.0", "driver": "580", "gpu": "NVIDIA H200"}


def times_of(one: Lesson) -> Times:
    """Of 1, 2, 3, ... ms, beside a copy of 4 TB/s or libraries of 50 and 51 TFLOP/s."""
    seconds = {variant.name: 1e-3 * number for number, variant in enumerate(one.variants, 1)}
    peers = dict.fromkeys(variant.peer for variant in one.variants if variant.peer)
    rates = {peer: (50 + number) * 1e12 for number, peer in enumerate(peers)}
    beside = {call.name: 1e-3 * number for number, call in enumerate(one.beside, len(one.variants) + 1)}
    return Times(seconds, rates, None if one.flops else 4e12, beside)


@pytest.fixture
def page() -> ModuleType:
    """What writes the page's tables."""
    spec = importlib.util.spec_from_file_location("page_of_the_lab", ROOT / "tests/lab/test_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(bench: SimpleNamespace, results: Path, one: Lesson, **other: str) -> None:
    """A file as a run with these times writes it."""
    sizes = {one.name: one.checked((), gpu=True)} | bench.lab_times.OTHER_SIZES.get(one.name, {})
    rows = [row for table, size in sizes.items() for row in bench.lab_times.rows_of(one, table, size, times_of(one))]
    origin = ORIGIN | other
    path = results / origin["gpu"].lower().replace(" ", "-") / "lab" / f"{one.name}.csv"
    bench.tables.write_results(path, rows, origin, [bench.lab_times.shown(rows)], None)


def test_rows(bench: SimpleNamespace) -> None:
    one = lesson("transpose")
    rows = bench.lab_times.rows_of(one, "transpose", (8192, 8192), times_of(one))
    assert len(rows) == len(one.variants)
    assert rows[1] == {
        "table": "transpose",
        "size": "8192 x 8192",
        "of": "floats",
        "variant": "coalesced_reads",
        "us": "2000.000",
        "gbs": "268.4",  # 512 MiB in 2 ms
        "tflops": "",
        "limit": "a copy",
        "limit_gbs": "4000",
        "limit_tflops": "",
        "percent_of_limit": "6.7",
    }
    one = lesson("matmul")
    last = bench.lab_times.rows_of(one, "matmul", (2048, 2048, 2048), times_of(one))[-1]
    assert (last["limit"], last["limit_tflops"], last["gbs"]) == ("cuBLAS in tf32", "51", "")
    assert last["tflops"] == f"{2 * 2048**3 / 7e-3 / 1e12:.4g}"


def test_a_run_shows_its_progress_and_writes_after_each_lesson(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(one: Lesson, table: str, size: tuple[int, ...]) -> list[dict[str, str]]:
        if one.name == "add":
            raise LabError("add row_major differs from torch")
        return bench.lab_times.rows_of(one, table, size, times_of(one))

    monkeypatch.setattr(bench.lab_times, "measured", measured)
    chosen = [lesson(name) for name in ("load_tile", "matmul")]
    tables, written = bench.lab_times.measure_all(chosen, tmp_path, ORIGIN)
    marks = ["load_tile", "load_tile 256 64 64", "load_tile 256 62 63", "matmul"]
    told = capsys.readouterr().err.splitlines()
    assert told == [f"lab {number}/4 {mark}" for number, mark in enumerate(marks, 1)]
    assert len(tables) == 4 and [line.rpartition(" ")[2] for line in written] == ["load_tile.png", "matmul.png"]
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("load_tile", "matmul"))
    with pytest.raises(LabError, match="differs"):
        bench.lab_times.measure_all([lesson("swin"), lesson("add")], tmp_path / "wrong", ORIGIN)
    assert {path.name for path in (tmp_path / "wrong").iterdir()} == {f"swin.{kind}" for kind in KINDS}


def test_pictures_are_chosen_by_columns(bench: SimpleNamespace) -> None:
    for folder, drawing in (("lab", "draw_lab_times"), ("image-models", "draw_image_models")):
        for path in (ROOT / "benchmarks/results").glob(f"*/{folder}/*.csv"):
            assert bench.figures.picture_of(bench.tables.read_csv(path)) is getattr(bench.figures, drawing)
            assert path.with_suffix(".png").stat().st_size > 5000


def test_a_call_beside_the_kernels_is_a_row(bench: SimpleNamespace) -> None:
    one = lesson("reduction")
    rows = bench.lab_times.rows_of(one, "reduction", (1 << 26,), times_of(one))
    assert [row["variant"] for row in rows[-2:]] == ["torch.sum, its own kernel", "CUB's reduction"]
    assert (rows[-1]["us"], rows[-1]["gbs"], rows[-1]["limit"]) == ("7000.000", "38.35", "a copy")


def test_other_sizes_can_be_and_have_a_table_on_the_page(bench: SimpleNamespace) -> None:
    for name, sizes in bench.lab_times.OTHER_SIZES.items():
        text = (ROOT / f"docs/learn/lab/{name}.md").read_text()
        for table, size in sizes.items():
            assert f"<!-- table: {table} -->" in text and table.startswith(f"{name} ")
            assert lesson(name).checked(tuple(map(str, size)), gpu=True) == size


def test_the_page_shows_times_where_there_is_a_file(bench: SimpleNamespace, page: ModuleType, tmp_path: Path) -> None:
    without = page.table("transpose", tmp_path)
    assert "time, us" not in without and without.endswith("|\n")
    write(bench, tmp_path, lesson("transpose"))
    lines = page.table("transpose", tmp_path).split("\n")
    assert lines[0].endswith("| requests | time, us | GB/s | of a copy |")
    assert lines[3] == "| coalesced_reads | 4 | 32 | 22.2% | - | - | 16,384 | 2000.0 | 268 | 7% |"
    assert [line.rsplit(" | ", 3)[0] for line in lines[2:8]] == [line[:-2] for line in without.split("\n")[2:8]]
    assert lines[8:] == [
        "",
        "Times: NVIDIA H200, 8192 x 8192 floats; a copy at 4,000 GB/s; commit aaaaaaaaaaaa, torch 2.11.0, driver 580.",
        "",
    ]


def test_the_page_shows_arithmetic_and_several_cards(bench: SimpleNamespace, page: ModuleType, tmp_path: Path) -> None:
    write(bench, tmp_path, lesson("matmul"), dirty="1")
    lines = page.table("matmul", tmp_path).split("\n")
    assert lines[0].endswith("| time, us | TFLOP/s | of cuBLAS |")
    assert lines[8].endswith("| 7000.0 | 2.45 | 4.8% |")
    assert " ".join(lines[10:]).strip() == (
        "Times: NVIDIA H200, 2048 x 2048 x 2048 (m x n x k); cuBLAS at 50 TFLOP/s; cuBLAS in tf32 at 51 TFLOP/s; "
        "commit aaaaaaaaaaaa with changes, torch 2.11.0, driver 580."
    )
    write(bench, tmp_path, lesson("matmul"), gpu="NVIDIA A100")
    lines = page.table("matmul", tmp_path).split("\n")
    assert "| time, us, NVIDIA A100 | " in lines[0] and lines[0].endswith("| of cuBLAS, NVIDIA H200 |")


def test_a_share_of_what_is_compared_no_longer_is_not_shown(
    bench: SimpleNamespace, page: ModuleType, tmp_path: Path
) -> None:
    write(bench, tmp_path, lesson("matmul"))
    path = tmp_path / "nvidia-h200/lab/matmul.csv"
    path.write_text(path.read_text().replace(",cuBLAS,", ",another library,"))
    lines = page.table("matmul", tmp_path).split("\n")
    assert lines[2].endswith("| 1000.0 | 17.18 | - |") and lines[8].endswith("| 7000.0 | 2.45 | 4.8% |")
    assert "another" not in lines[10] and "cuBLAS in tf32 at 51 TFLOP/s" in lines[10]


def test_the_page_shows_each_table_of_a_file(bench: SimpleNamespace, page: ModuleType, tmp_path: Path) -> None:
    write(bench, tmp_path, lesson("load_tile"))
    for mark, size in {"load_tile": "262144 x 126 x 128", "load_tile 256 62 63": "262144 x 126 x 127"}.items():
        assert f"Times: NVIDIA H200, {size} " in page.table(mark, tmp_path)


def test_the_page_shows_what_is_beside_the_kernels(bench: SimpleNamespace, page: ModuleType, tmp_path: Path) -> None:
    """Where it was timed: times and nothing counted."""
    assert "CUB" not in page.table("scan", tmp_path)
    write(bench, tmp_path, lesson("scan"))
    line = page.table("scan", tmp_path).split("\n")[7]
    assert line == "| torch.cumsum, CUB's scan |" + " - |" * 8 + " 6000.0 | 89 | 2% |"


def test_a_kernel_that_came_later_has_no_time(bench: SimpleNamespace, page: ModuleType, tmp_path: Path) -> None:
    """One that is there no longer is found."""
    write(bench, tmp_path, lesson("add"))
    path = tmp_path / "nvidia-h200/lab/add.csv"
    path.write_text("".join(line for line in path.open() if ",float2," not in line))
    lines = page.table("add", tmp_path).split("\n")
    assert lines[6].startswith("| float2 |") and lines[6].endswith("| - | - | - |")
    assert lines[7].endswith("| 6000.0 | 134 | 3% |")
    path.write_text(path.read_text().replace(",float4,", ",float8,"))
    with pytest.raises(AssertionError, match=r"run benchmarks/lab_times\.py again"):
        page.table("add", tmp_path)


@pytest.mark.no_gpu
def test_without_a_gpu_it_is_said(tmp_path: Path) -> None:
    done = start("lab_times.py", "add", "--out", tmp_path / "lab")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lab_times.py: the lab's kernels are timed on a GPU, and PyTorch sees none here.\n"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["add", "matmul", "load_tile"])
def test_a_run(name: str, bench: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("cuda.core", exc_type=ImportError, reason="needs cuda-core and what it binds")
    done = start("lab_times.py", name, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / f"{name}.csv")
    assert {row["table"] for row in rows} == {name, *bench.lab_times.OTHER_SIZES.get(name, {})}
    assert all(float(row["us"]) > 0 and 0 < float(row["percent_of_limit"]) < 200 for row in rows)
    assert all(row["gpu"] and row["torch"] and name in LESSON_NAMES for row in rows)


def test_results_lie_in_the_folder_of_their_card(bench: SimpleNamespace) -> None:
    """And are of one commit and one build."""
    for folder in (ROOT / "benchmarks/results").glob("*/lab"):
        files = list(folder.glob("*.csv"))
        rows = [row for path in files for row in rows_of(path)]
        assert {path.stem for path in files} <= set(LESSON_NAMES)
        assert {bench.harness.device_slug(row) for row in rows} == {folder.parent.name}
        assert len({(row["commit"], row["library"]) for row in rows}) == 1
