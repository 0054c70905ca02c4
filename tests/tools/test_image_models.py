"""Promise: image_models.py times models of timm and diffusers with PyTorch's attention and with ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import rows_of, start

for name in ("timm", "diffusers", "pandas", "rich", "tyro"):
    pytest.importorskip(name)


@pytest.mark.parametrize("model, calls", [("vit", 2), ("swin", 4), ("swin, timm's own", 0), ("dit", 2)])
def test_a_model(model: str, calls: int, tmp_path: Path) -> None:
    arguments = ("--models", model, "--device", "cpu", "--rounds", "1", "--out", tmp_path)
    done = start("image_models.py", *arguments)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "image_models.csv")
    assert [row["pass"] for row in rows] == ["forward", "step"]
    for row in rows:
        assert (row["model"], row["calls"], row["dtype"]) == (model, str(calls), "float32")
        assert float(row["torch_ms"]) > 0 and float(row["flash_ext_ms"]) > 0
    progress = [line for line in done.stderr.splitlines() if line.startswith("image models ")]
    assert progress == [f"image models 1/2 {model}, forward", f"image models 2/2 {model}, step"]
    assert (tmp_path / "image_models.png").stat().st_size > 5000
    assert done.stdout.splitlines()[-1].endswith(", image_models.tex, image_models.png")
    assert f"{float(rows[0]['torch_ms']) / float(rows[0]['flash_ext_ms']):.3f}" in done.stdout


def test_an_unknown_model_is_named() -> None:
    done = start("image_models.py", "--models", "vgg", "--device", "cpu")
    assert done.returncode == 2 and "vgg is none of vit, swin" in done.stderr
