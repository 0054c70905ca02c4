"""Promise: `explain(...).html()` draws the plan as it is, in one page that a browser without network shows, for
any call, with the numbers that the plan has."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import webbrowser
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from h100_plan import BACKWARD, CALL, FORWARD, PLAN

import flash_ext
from flash_ext import explain_page
from flash_ext.explain import Explanation
from flash_ext.explain_tiles import Band, matrix_of
from flash_ext.profiling.__main__ import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_the_call_is_told() -> None:
    q, k = torch.empty(2, 4, 1, 64), torch.empty(2, 2, 40, 64)
    mask = torch.ones(1, 40, dtype=torch.bool)
    call = flash_ext.explain(q, k, k, mask=mask, causal=True, window=(7, 0), align="bottom_right").call
    assert (call.batch, call.heads_q, call.heads_k, call.len_q, call.len_k, call.added) == (2, 4, 2, 1, 40, ("mask",))
    assert (call.window, call.align, call.dtype) == ((7, 0), "bottom_right", "float32")
    assert Band.of(call) == Band(32, 39) and call.folds
    drop_in = flash_ext.explain(torch.empty(3, 30, 8), torch.empty(5, 3, 40, 8), torch.empty(1, 40, 8), sdpa=True).call
    assert (drop_in.batch, drop_in.heads_q, drop_in.len_k) == (5, 3, 40)
    rows, cu = torch.empty(50, 4, 64), torch.tensor([0, 20, 50], dtype=torch.int32)
    packed = flash_ext.explain(rows, rows, rows, cu_seqlens_q=cu, max_q=30, causal=True)
    assert packed.call.packed and (packed.call.batch, packed.call.len_q, packed.call.len_k) == (2, 30, 30)
    assert "2 packed sequences, the longest drawn" in explain_page.data(packed)["call"]


def test_one_query_of_grouped_heads_is_one_head_of_queries() -> None:
    q, k = torch.empty(1, 8, 1, 64), torch.empty(1, 2, 100, 64)
    shown = explain_page.data(flash_ext.explain(q, k, k, window=(19, 0), align="bottom_right"))
    forward, backward = (part["matrix"] for part in shown["passes"])
    assert (forward["lenQ"], forward["lenK"], backward["lenQ"], backward["lenK"]) == (4, 20, 1, 100)
    assert forward["note"].startswith("One query of grouped heads runs as one head of 4 queries")


class Reader(HTMLParser):
    """Tags that are open, and what a page would fetch."""

    VOID = ("meta", "input", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_self_contained(text: str) -> None:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == [] and reader.fetched == []
    assert not re.search(r"https?:|//cdn|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
    assert "@DATA@" not in text


def calls() -> dict[str, Explanation]:
    q, k = torch.empty(1, 8, 1024, 64), torch.empty(1, 2, 1024, 64)
    half = torch.empty(1, 4, 200, 64, dtype=torch.bfloat16, device="meta")
    rows, cu = torch.empty(50, 4, 64), torch.tensor([0, 20, 50], dtype=torch.int32)
    with flash_ext.use_backend("chunked"):
        chunked = flash_ext.explain(half, half, half, device="cuda")
    return {
        "gpu": PLAN,
        "splits": replace(PLAN, call=replace(CALL, len_q=8), forward=replace(FORWARD, splits=4, split_keys=1024)),
        "cpu": flash_ext.explain(q, k, k, causal=True),
        "window": flash_ext.explain(q[..., :300, :], k, k, window=(100, 50), align="bottom_right"),
        "packed": flash_ext.explain(rows, rows, rows, cu_seqlens_q=cu, max_q=30),
        "packed gpu": replace(PLAN, call=replace(CALL, packed=True)),
        "chunked": chunked,
        "refused": replace(
            PLAN,
            backward=replace(
                BACKWARD,
                backend="none",
                kernel="none: <b>",
                block_m=0,
                block_n=0,
                on_chip=(),
                schedule="",
                grid=0,
                waves=0.0,
            ),
        ),
        "empty": flash_ext.explain(q, k[:, :, :0], k[:, :, :0]),
        "large": replace(PLAN, call=replace(CALL, len_q=60_000, len_k=60_000, window=(8000, 0))),
        "no call": replace(PLAN, call=None),
    }


NAMES = ("gpu", "splits", "cpu", "window", "packed", "packed gpu", "chunked", "refused", "empty", "large", "no call")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_for_any_call(name: str) -> None:
    plan = calls()[name]
    text = plan.html()
    assert_self_contained(text)
    shown = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1))
    assert shown == json.loads(json.dumps(explain_page.data(plan)))
    assert shown["text"] == str(plan) and [p["kernel"] for p in shown["passes"]] == [
        plan.forward.kernel,
        plan.backward.kernel,
    ]
    for part, of in zip(shown["passes"], (plan.forward, plan.backward), strict=True):
        assert sum(size for _, size in part["chip"]["uses"]) == of.on_chip_bytes + of.static_bytes
        assert all(meaning for _, meaning in part["schedule"])
    assert len(text) < 150_000


def test_every_schedule_is_explained() -> None:
    """The names that csrc/kernels/sm90/rows.cpp gives."""
    source = (Path(__file__).resolve().parents[2] / "csrc/kernels/sm90/rows.cpp").read_text()
    lines = re.findall(r"(?:plan\.schedule =|return (?:schedule|counted)|: \"(?:ping|over)).*?;", source, re.DOTALL)
    names = {name for line in lines for name in re.findall(r'"([^"]+)"', line)}
    assert len(names) >= 10
    assert {phrase for name in names for phrase in name.split(", ")} == set(explain_page.SCHEDULE)


def test_show_writes_and_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    written = PLAN.show(tmp_path / "plan.html")
    assert written == tmp_path / "plan.html" and written.read_text() == PLAN.html() and opened == []
    temporary = PLAN.show()
    assert temporary.parent == tmp_path and temporary.read_text() == PLAN.html() and opened == [temporary.as_uri()]
    with pytest.raises(OSError, match="no folder"):
        PLAN.show(tmp_path / "no folder" / "plan.html")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tyro")
    page = tmp_path / "plan.html"
    sizes = ["--queries", "200", "--keys", "300", "--heads", "4", "--key-heads", "2", "--head-dim", "32"]
    main(["plan", *sizes, "--dtype", "float32", "--causal", "--align", "bottom_right", "--html", str(page)])
    q, k = torch.empty(1, 4, 200, 32), torch.empty(1, 2, 300, 32)
    plan = flash_ext.explain(q, k, k, causal=True, align="bottom_right")
    assert capsys.readouterr().out == f"{plan}\n" and page.read_text() == plan.html()
    with pytest.raises(SystemExit, match=r"^error: .*heads"):
        main(["plan", "--heads", "4", "--key-heads", "3"])


# Runs in the page: what is wrong ends in the title.
PROBE = """<script>
const says = (name) => document.getElementById(name + "-said").textContent, found = {};
const move = (at) => {
  const step = document.getElementById("forward-step");
  step.value = at;
  step.dispatchEvent(new Event("input"));
};
move(1);
found.first = says("forward");
found.later = document.querySelectorAll("#forward .cover.later").length;
move(32);
found.last = says("forward");
found.none = document.querySelectorAll("#forward .cover.later").length;
move(0);
const svg = document.querySelector("#forward-scores svg"), at = svg.getBoundingClientRect();
const point = (x, y) => document.querySelector("#forward-scores").dispatchEvent(new MouseEvent("mousemove", {
  clientX: at.left + x * at.width, clientY: at.top + y * at.height, bubbles: true}));
point(0.1, 0.5);
found.kept = says("forward");
point(0.9, 0.1);
found.skipped = says("forward");
document.querySelectorAll("#backward .hit")[2].dispatchEvent(new MouseEvent("mousemove"));
found.bar = says("backward");
found.fetched = performance.getEntriesByType("resource").length;
document.documentElement.dataset.found = JSON.stringify(found);
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("name", NAMES)
def test_the_page_in_a_browser(tmp_path: Path, name: str) -> None:
    plan, file = calls()[name], tmp_path / "plan.html"
    watch = "<script>window.onerror = (text) => { document.documentElement.dataset.wrong = text; };</script>"
    text = plan.html().replace("<style>", f"{watch}<style>", 1)
    file.write_text(text.replace("</html>", (PROBE if name == "gpu" else "") + "</html>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run([*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120)
    assert "data-wrong" not in done.stdout.split(">", 2)[1], done.stdout[:300]
    body = done.stdout.partition("<body")[2]
    for part, plan_of in (("forward", plan.forward), ("backward", plan.backward)):
        section = body.partition(f'<section id="{part}">')[2].partition("</section>")[0]
        assert html.escape(plan_of.kernel, quote=False) in section
        assert f"{plan_of.scratch_bytes:,} bytes" in section
        shown = [int(size) for size in re.findall(r'data-bytes="(\d+)"', section)]
        assert shown == [size for _, size in plan_of.on_chip]
        matrix = plan.call and matrix_of(plan.call, plan_of, part)
        assert ("<svg" in section) == bool(matrix)
        if matrix and plan_of.block_m:
            counts = matrix.counts()
            for kind in ("kept", "boundary", "skipped"):
                number = f"{getattr(counts, kind):,}"
                assert re.search(rf'data-kind="{kind}">.*?<b> {number}</b>', section), (kind, number)
    if name == "gpu":
        found = json.loads(html.unescape(re.search(r'data-found="(.*?)"', done.stdout).group(1)))
        assert found == {
            "first": "1 of 32 in order: queries 3,968 to 4,095, keys 0 to 4,095: 32 tiles",
            "later": 31,
            "last": "32 of 32 in order: queries 0 to 127, keys 0 to 127: 1 tile",
            "none": 0,
            "kept": found["kept"],
            "skipped": found["skipped"],
            "bar": "3 of 32 in order: queries 256 to 4,095, keys 256 to 383: 60 tiles",
            "fetched": 0,
        }
        assert re.fullmatch(r"queries [\d,]+ to [\d,]+, keys 128 to 255: kept, \d+ of 32 in order", found["kept"])
        assert re.fullmatch(r"queries [\d,]+ to [\d,]+, keys [\d,]+ to [\d,]+: skipped", found["skipped"])
