"""Promise: a table has what was measured and counted, and leaves out what no kernel of the lesson has."""

from __future__ import annotations

import pytest

for name in ("numpy", "matplotlib"):
    pytest.importorskip(name)

from flash_ext.lab import cuda, report  # noqa: E402
from flash_ext.lab.lessons import lesson  # noqa: E402
from flash_ext.lab.measure import Times, count  # noqa: E402

REGISTERS = {"8.0": 40, "9.0": 32}


def row(seconds: float | None, at_most: int = 1 << 18, registers: dict[str, int] | None = None) -> report.Row:
    """transpose, padded, at 256 x 128."""
    one, size = lesson("transpose"), (256, 128)
    variant, inputs = one.variant("padded"), one.inputs(size)
    counted = count(one, variant, size, inputs, variant.reference(*inputs).contiguous(), at_most)
    return report.Row(variant, 256, counted, REGISTERS if registers is None else registers, seconds)


def table(rows: list[report.Row], copy_rate: float | None, name: str = "transpose") -> dict[str, str]:
    """The first row by title."""
    titles, first = report.cells(report.columns(lesson(name), (256, 128), rows, copy_rate), rows)
    return dict(zip(titles, first, strict=True))


def test_times_and_counts() -> None:
    """256 x 128 floats are read and written in a microsecond: 262 GB/s, where a copy reaches 524."""
    assert table([row(1e-6)], 2 * 2 * 4 * 256 * 128 / 1e-6) == {
        "variant": "padded",
        "time, us": "1.0",
        "GB/s": "262",
        "of a copy": "50%",
        "sectors a load": "4",
        "sectors a store": "4",
        "their bytes used": "100%",
        "ways, shared load": "1",
        "ways, shared store": "1",
        "requests": "4,096",
        "registers 8.0 / 9.0": "40 / 32",
        "occupancy 8.0 / 9.0": "75% / 100%",  # 1280 registers a warp: 48 warps
        "limited by": "registers / threads",
    }


def test_arithmetic_beside_its_peer() -> None:
    """64 x 64 x 64 in a microsecond: 0.52 TFLOP/s; 1,024 sectors are loaded, and c stored in 512 or 1,024 of them."""
    one, size, rows = lesson("matmul"), (64, 64, 64), []
    for name, rate in (("cp_async", 2 * 2 * 64**3 / 1e-6), ("mma", 4 * 2 * 64**3 / 1e-6)):
        variant, inputs = one.variant(name), one.inputs(size)
        counted = count(one, variant, size, inputs, variant.reference(*inputs))
        rows.append(report.Row(variant, 256, counted, {}, 1e-6, rate))
    titles, *lines = report.cells(report.columns(one, size, rows, None), rows)
    assert titles[:4] == ["variant", "time, us", "TFLOP/s", "of cuBLAS"]
    assert [line[:4] for line in lines] == [["cp_async", "1.0", "0.52", "50.0%"], ["mma", "1.0", "0.52", "25.0%"]]
    intensity = [line[titles.index("FLOP a byte")] for line in lines]
    assert intensity == [report.short(2 * 64**3 / 32 / (1024 + stores)) for stores in (512, 1024)]
    assert report.notes(rows, None)[:2] == [
        "cuBLAS does 1.0 TFLOP/s on this card; compared with it: cp_async.",
        "cuBLAS in tf32 does 2.1 TFLOP/s on this card; compared with it: mma.",
    ]


def test_what_is_beside_has_times_alone() -> None:
    """65,536 floats are read and written in 2 us: 262 GB/s."""
    one, size = lesson("scan"), (1 << 16,)
    times = Times({}, {}, 1e12, {"torch.cumsum": 2e-6})
    (line,) = report.calls(one, size, times)
    assert line == {"variant": "torch.cumsum", "time, us": "2.0", "GB/s": "262", "of a copy": "26%"}
    shown = {"variant": lambda row: "", "requests": lambda row: "", "GB/s": lambda row: ""}
    assert report.cells(shown, [], [line])[1:] == [["torch.cumsum", "-", "262"]]
    one, size = lesson("matmul"), (64, 64, 64)
    (line,) = report.calls(one, size, Times({}, {one.peer: 2 * 2 * 64**3 / 1e-6}, None, {"another": 1e-6}))
    assert (line["TFLOP/s"], line["of cuBLAS"]) == ("0.52", "50.0%")


def test_what_is_not_there_has_no_column() -> None:
    shown = table([row(None, registers={})], None)
    assert not {"time, us", "GB/s", "of a copy", "registers 8.0 / 9.0"} & set(shown)
    assert (shown["occupancy 8.0 / 9.0"], shown["limited by"]) == ("100%", "threads")


def test_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing", lambda: "")
    assert report.notes([row(None)], None) == ["There is no GPU here: times need a card, counts do not."]
    half = row(1e-6, at_most=256 * 16)
    assert half.requests() == "~4,096"
    assert report.notes([half, row(1e-6)], 2e12) == [
        "A copy by torch reads and writes 2000 GB/s together on this card.",
        "Of 1 variants a part of the blocks was counted, at most 50.00%, evenly spread.",
    ]


def test_markdown() -> None:
    assert report.markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|--:|\n| 1 | 2 |\n"
