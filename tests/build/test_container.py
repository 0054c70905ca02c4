"""Promise: the image is built in the order in which things change, runs as a user who is not root, holds what git knows
and no more, and the dev container is that image. tools/try_dockerfile.py runs its steps; .ci/run calls it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import try_dockerfile  # noqa: E402
from try_dockerfile import Image, Step, StepError  # noqa: E402

DOCKERFILE = (ROOT / "Dockerfile").read_text()
STEPS = try_dockerfile.steps(DOCKERFILE)


def own_steps(cuda: str) -> list[Step]:
    return try_dockerfile.of_the_last_stage(STEPS, {"CUDA": cuda})[1]


def place(beginning: str) -> int:
    (found,) = [i for i, step in enumerate(own_steps("off")) if f"{step.word} {step.text}".startswith(beginning)]
    return found


def settings(cuda: str) -> Image:
    """After all steps but those that run or copy something."""
    image = Image(Path(), {"CUDA": cuda})
    for step in own_steps(cuda):
        if step.word not in ("RUN", "COPY"):
            image.take(step)
    return image


@pytest.mark.parametrize(("cuda", "base"), [("on", "nvidia/cuda:"), ("off", "debian:12")])
def test_the_image_below(cuda: str, base: str) -> None:
    assert try_dockerfile.of_the_last_stage(STEPS, {"CUDA": cuda})[0].startswith(base)
    assert settings(cuda).env["FLASH_EXT_CUDA"] == cuda


def test_cuda_is_that_of_torch() -> None:
    import torch

    image = try_dockerfile.of_the_last_stage(STEPS, {"CUDA": "on"})[0]
    major = image.removeprefix("nvidia/cuda:").partition(".")[0]
    pyproject = (ROOT / "pyproject.toml").read_text()
    (group,) = re.findall(r"^nvcc = \[(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"==(\d+)", group)) == {major}
    if torch.version.cuda and f'"torch=={torch.__version__.partition("+")[0]}"' in pyproject:
        assert torch.version.cuda.partition(".")[0] == major


def test_what_changes_seldom_comes_first() -> None:
    order = ["RUN apt-get", "COPY --chown=flash pyproject.toml", "COPY --chown=flash csrc", "COPY --chown=flash . ."]
    places = [place(beginning) for beginning in order]
    assert places == sorted(places)
    words = [step.text for step in own_steps("off")]
    assert "build_ext" in words[places[2] + 1], "C++ is compiled before any Python is there"


def test_the_user_is_not_root() -> None:
    assert settings("off").user == "1000"
    users = [i for i, step in enumerate(own_steps("off")) if step.word == "USER"]
    assert len(users) == 1
    assert users[0] < place("COPY --chown=flash pyproject.toml")


def test_the_health_is_what_the_doctor_says() -> None:
    for word in ("HEALTHCHECK", "CMD"):
        assert any(step.word == word and '["python", "-m", "flash_ext.doctor"]' in step.text for step in STEPS)


def test_the_image_has_what_git_knows() -> None:
    """Patterns of .dockerignore are anchored, those of .gitignore are not."""

    def as_docker_says(pattern: str) -> str:
        name = pattern.rstrip("/")
        return name.lstrip("/") if "/" in name else f"**/{name}"

    def patterns(file: str) -> set[str]:
        lines = (ROOT / file).read_text().splitlines()
        return {line for line in lines if line and not line.startswith("#")}

    assert patterns(".dockerignore") == {".git", *map(as_docker_says, patterns(".gitignore"))}


def test_the_dev_container_is_the_image() -> None:
    folder = ROOT / ".devcontainer"
    config = json.loads((folder / "devcontainer.json").read_text())
    assert (folder / config["build"]["dockerfile"]).samefile(ROOT / "Dockerfile")
    assert (folder / config["build"]["context"]).samefile(ROOT)
    assert config["build"]["args"].keys() <= {step.text.partition("=")[0] for step in STEPS if step.word == "ARG"}
    image = settings("off")
    assert config["workspaceFolder"] == image.folder
    assert f"target={image.env['CCACHE_DIR']}," in config["mounts"][0]
    assert f"--shell /bin/bash {config['remoteUser']} " in DOCKERFILE


def test_the_page_names_what_the_file_has() -> None:
    page = (ROOT / "docs/use/container.md").read_text()
    arguments = set(re.findall(r"`([A-Z_]+)=[^`]*`", page)) - {"FLASH_EXT_CUDA"}  # of the dev container
    own = {step.text.partition("=")[0] for step in STEPS if step.word == "ARG"}
    assert arguments == own
    image = settings("off")
    for path in (image.folder, image.env["CCACHE_DIR"]):
        assert f":{path} " in page


def test_steps_are_read() -> None:
    text = "# no\nARG A=x\nFROM one AS first\nFROM two:$A AS second\n\nFROM second\nRUN a \\\n    # of b\n    && b\n"
    found = try_dockerfile.steps(text)
    assert found[-1] == Step("RUN", "a && b")
    assert try_dockerfile.of_the_last_stage(found, {}) == ("two:x", [found[-1]])
    assert try_dockerfile.of_the_last_stage(found, {"A": "y"})[0] == "two:y"


def test_settings_are_taken() -> None:
    image = Image(Path(), {"B": "given"}, {"A": "first"})
    words = [("ARG", "A"), ("ARG", 'B="b"'), ("ARG", 'C="c"'), ("ARG", "G"), ("ENV", 'D="$A ${B}" E=${C}:$D$F')]
    for word, text in words:
        image.take(Step(word, text))
    assert image.args == {"A": "first", "B": "given", "C": "c"}
    assert (image.env["D"], image.env["E"]) == ("first given", "c:")
    with pytest.raises(StepError, match=r"^ADD x: this program does not know the instruction\.$"):
        image.take(Step("ADD", "x"))
