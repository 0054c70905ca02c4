"""Promise: `python -m flash_ext.profiling memory` tells a snapshot's peak, lines, phases and largest blocks, as text
and as a page that a browser without network shows, with the same numbers."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from snapshots import MIB, snapshot

from flash_ext.profiling import memory, memory_page
from flash_ext.profiling.__main__ import main

# Of snapshot(): 96 MiB before, 4 blocks of 16 + 64 + 32 forward, and from the second step 8 * 24 of the optimizer. The
# peak is in the second backward, beside the first block's gradient (24) and scores (64).
PEAK = (96 + 4 * (16 + 64 + 32) + 8 * 24 + 24 + 64) * MIB
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def history() -> memory.History:
    return memory.replay(snapshot(), 0)


def test_the_peak_and_what_is_in_it(history: memory.History) -> None:
    assert (history.peak, history.base) == (PEAK, 96 * MIB)
    summary = memory.summarise(history, 20)
    assert sum(size for _, size, _ in summary.by_line) == sum(live for _, live, _ in summary.by_phase) == PEAK
    assert summary.by_line[0] == ("examples/model.py:61 softmax", 4 * 64 * MIB, 4)
    assert ("SoftmaxBackward0 in examples/train.py:22 step", 64 * MIB, 1) in summary.by_line
    assert ("before recording", 96 * MIB, 1) in summary.by_line
    live = {phase: live for phase, live, _ in summary.by_phase}
    assert live == {
        "before recording": 96 * MIB,
        "forward": 4 * 112 * MIB,
        "backward": 88 * MIB,
        "optimizer": 8 * 24 * MIB,
    }
    assert [a.size for a in summary.largest[:2]] == [96 * MIB, 64 * MIB]


def test_phases_by_stack_where_nothing_is_annotated() -> None:
    with_ranges = memory.summarise(memory.replay(snapshot(), 0), 20)
    without = memory.summarise(memory.replay(snapshot(annotated=False), 0), 20)
    assert without.by_phase == with_ranges.by_phase


def test_a_history_whose_beginning_was_dropped(history: memory.History) -> None:
    whole = snapshot()
    whole["device_traces"][0] = whole["device_traces"][0][60:]
    cut = memory.replay(whole, 0)
    assert cut.totals[-1] == history.totals[-1] and cut.peak == history.peak
    assert cut.totals == history.totals[-len(cut.totals) :]


def test_out_of_memory_is_told() -> None:
    whole = snapshot()
    whole["device_traces"][0].append({"action": "oom", "size": 7 * MIB, "time_us": 9_000_000, "frames": []})
    assert "out of memory at event 135: 7.0 MiB asked for" in memory.text(memory.replay(whole, 0))


def test_layers_add_up_at_every_shown_moment(history: memory.History) -> None:
    shown = memory_page.data(history, "s")
    for layers in shown["modes"].values():
        sums = [sum(column) for column in zip(*(layer["bytes"] for layer in layers), strict=True)]
        assert sums == shown["totals"]
    assert max(shown["totals"]) == PEAK and shown["peakEvent"] in shown["events"]


def test_stacks_leave_out_the_interpreter(history: memory.History) -> None:
    (backward,) = (layer for layer in memory_page.data(history, "s")["modes"]["line"] if "MmBackward0" in layer["name"])
    assert "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)" in backward["stack"]
    assert "_PyObject_Call" not in backward["stack"] and backward["stack"][-1] == "examples/train.py:40 <module>"


def test_many_events_make_a_small_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_page, "BUCKETS", 50)
    monkeypatch.setattr(memory_page, "LAYERS", 2)
    history = memory.replay(snapshot(steps=6, blocks=12, small=20), 0)
    shown = memory_page.data(history, "s")
    assert len(shown["events"]) == 50 < len(history.totals) and max(shown["totals"]) == history.peak
    layers = shown["modes"]["line"]
    assert [len(layers), layers[-1]["name"]] == [3, "everything else"]
    sums = [sum(column) for column in zip(*(layer["bytes"] for layer in layers), strict=True)]
    assert sums == shown["totals"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    file, page = tmp_path / "s.pickle", tmp_path / "s.html"
    file.write_bytes(pickle.dumps(snapshot()))
    main(["memory", str(file), "--html", str(page)])
    printed = capsys.readouterr().out
    assert f"peak 824.0 MiB ({PEAK:,} bytes)" in printed and "8  forward, examples/model.py:61" in printed
    text = page.read_text()
    assert "<script src" not in text and "http" not in text  # nothing to fetch


class Foreign:
    """What no snapshot contains, and what a pickle could do when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("code in a pickle",)


@pytest.mark.parametrize(
    ("content", "args", "sentence"),
    [
        ([1], (), "is no memory snapshot"),
        (Foreign(), (), "it asks for builtins.print"),
        (None, (), "cannot be read as a memory snapshot"),
        (snapshot(), ("--device", "3"), "--device is 3; the snapshot has devices 0 to 0"),
    ],
    ids=["a list", "code", "empty", "device"],
)
def test_files_that_are_no_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object, args: tuple[str, ...], sentence: str
) -> None:
    pytest.importorskip("tyro")
    file = tmp_path / "s.pickle"
    file.write_bytes(b"" if content is None else pickle.dumps(content))
    with pytest.raises(SystemExit) as end:
        main(["memory", str(file), *args])
    assert str(end.value).startswith("error: ") and sentence in str(end.value)
    assert "code in a pickle" not in capsys.readouterr().out


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_in_a_browser(tmp_path: Path, history: memory.History) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    file = tmp_path / "s.html"
    file.write_text(memory_page.page(history, "s.pickle"))
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: request.url.startswith("file:") or errors.append(request.url))
        page.goto(file.as_uri())
        assert page.locator("#peak").get_attribute("data-bytes") == str(PEAK)
        assert page.locator("#moment").inner_text() == "At the peak: 824.0 MiB"
        assert page.locator("#layers tr").nth(1).inner_text().split("\t")[0] == "256.0 MiB"
        assert page.locator("#byPhase tr").nth(2).inner_text().split("\t") == ["448.0 MiB", "908.0 MiB", "forward"]

        box = page.locator("#chart").bounding_box()
        # just above the axis lies what was there before
        low = (box["x"] + 0.5 * box["width"], box["y"] + box["height"] - 45)
        page.mouse.move(*low)
        assert page.locator("#tip").inner_text().startswith("before recording\n96.0 MiB of ")
        page.mouse.click(*low)
        assert page.locator("#chosen").inner_text() == "Stack: before recording"
        assert page.locator("#moment").inner_text().startswith("At event ")

        page.click("[data-mode=phase]")
        names = page.locator("#layers td:last-child").all_inner_texts()
        assert set(names) <= {"before recording", "forward", "backward", "optimizer"}
        page.locator("#largest tr").nth(2).click()
        assert page.locator("#stack li.own").inner_text() == "examples/model.py:61 softmax"

        page.locator("#chart").scroll_into_view_if_needed()
        box = page.locator("#chart").bounding_box()
        y = box["y"] + 0.5 * box["height"]
        page.mouse.move(box["x"] + 0.3 * box["width"], y)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], y)
        page.mouse.up()
        assert page.locator("#whole").is_visible()
        page.click("#whole")
        assert not page.locator("#whole").is_visible()
        assert errors == []
        browser.close()
