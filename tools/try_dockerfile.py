"""Runs the Dockerfile's own steps without a container engine: python tools/try_dockerfile.py, as root, on Debian.

A clean Debian of mmdebstrap takes the place of the base image. FROM, ARG, ENV, SHELL, WORKDIR, USER, COPY and RUN do
what they do in an engine, as far as this Dockerfile uses them; each RUN in mounts of its own. Last come the commands of
``--then``, as the image's user and in its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE = "bookworm"
RUN_SECONDS = 1800
# Where Debian has it, which is not on everybody's PATH.
CHROOT = shutil.which("chroot", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "chroot"
# What a step has of the machine beside its layers: names, certificates, where packages come from.
HOST_FILES = ("etc/resolv.conf", "etc/pip.conf", "etc/uv/uv.toml")
HOST_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
HOST_VARIABLES += ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX", "UV_DEFAULT_INDEX")
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
COPY_OF_CERTIFICATES = "var/machine.crt"  # the package ca-certificates writes its own


class StepError(Exception):
    """A step that failed or that this program does not know, in one sentence."""


@dataclass(frozen=True)
class Step:
    """``word``: RUN, COPY, ...; ``text``: the rest, on one line."""

    word: str
    text: str


def steps(dockerfile: str) -> list[Step]:
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Step(*line.strip().split(maxsplit=1)) for line in whole.splitlines()]


def substitute(text: str, values: Mapping[str, str]) -> str:
    """``$NAME`` and ``${NAME}``; what is not set is empty."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: values.get(match[1] or match[2], ""), text)


def of_the_last_stage(all_steps: Sequence[Step], given: Mapping[str, str]) -> tuple[str, list[Step]]:
    """The image that it begins with, and its steps. Stages before it are names of images alone."""
    values: dict[str, str] = {}
    images: dict[str, str] = {}
    first = 0
    for i, step in enumerate(all_steps):
        if step.word == "ARG" and first == 0:
            name, _, default = step.text.partition("=")
            values[name] = given.get(name, default)
        if step.word == "FROM":
            image, _, name = substitute(step.text, values).partition(" AS ")
            images[name] = images.get(image, image)
            first = i + 1
    return images[""], list(all_steps[first:])


@dataclass
class Image:
    """What a container would begin with. ``given``: --build-arg."""

    root: Path
    given: Mapping[str, str]
    defaults: Mapping[str, str] = field(default_factory=dict)  # of ARG in front of FROM
    env: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    args: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    folder: str = "/"
    user: str = "0"

    @property
    def values(self) -> dict[str, str]:
        return {**self.args, **self.env}

    def take(self, step: Step) -> None:
        if step.word == "ARG":
            name, equals, default = step.text.partition("=")
            value = self.given.get(name, default.strip('"') if equals else self.defaults.get(name))
            if value is not None:
                self.args[name] = value
        elif step.word == "ENV":
            for word in shlex.split(substitute(step.text, self.values)):
                name, _, value = word.partition("=")
                self.env[name] = value
        elif step.word == "SHELL":
            self.shell = json.loads(step.text)
        elif step.word == "WORKDIR":
            self.folder = step.text
        elif step.word == "USER":
            self.user = substitute(step.text, self.values)
        elif step.word == "COPY":
            self.copy(step.text.split())
        elif step.word == "RUN":
            self.run(step.text)
        elif step.word not in ("HEALTHCHECK", "CMD"):
            raise StepError(f"{step.word} {step.text}: this program does not know the instruction.")

    def copy(self, words: list[str]) -> None:
        """Of what git knows, or would; .dockerignore leaves out no more and no less."""
        options = [word for word in words if word.startswith("--")]
        *sources, to = [word for word in words if word not in options]
        listed = subprocess.run(
            ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *sources],
            check=True, capture_output=True, text=True,
        ).stdout.split("\0")[:-1]  # fmt: skip
        place = self.root / self.folder.lstrip("/")
        for name in filter(lambda name: (ROOT / name).exists(), listed):
            relative = Path(name)
            if to not in (".", "./"):  # a folder's contents
                relative = Path(to, *relative.parts[len(Path(sources[0]).parts) :])
            (place / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / relative)
        if owners := [option.partition("=")[2] for option in options if option.startswith("--chown=")]:
            self.in_root(["chown", "-R", f"{owners[0]}:", self.folder], user="0")

    def run(self, text: str) -> None:
        """Caches of --mount are plain folders of the user's."""
        for target in re.findall(r"--mount=type=cache,target=([^,\s]+)\S*", text):
            self.in_root(["install", "-d", "-o", self.user, substitute(target, self.values)], user="0")
        command = re.sub(r"--mount=\S+\s+", "", text)
        self.in_root([*self.shell, command])

    def in_root(self, command: Sequence[str], user: str | None = None) -> None:
        user = self.user if user is None else user
        home = "/root" if user == "0" else "/srv/flash"
        outside = {name: os.environ[name] for name in HOST_VARIABLES if name in os.environ}
        if (self.root / COPY_OF_CERTIFICATES).exists():
            outside |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), f"/{COPY_OF_CERTIFICATES}")
        # uv's cache is a folder of the root here, so links into it do, which take no space.
        env = {"HOME": home, "DEBIAN_FRONTEND": "noninteractive", **self.values, **outside, "UV_LINK_MODE": "hardlink"}
        root = shlex.quote(str(self.root))
        script = (
            f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev && "
            f"exec {CHROOT} --userspec={user}:{user} {root} "
            f"/usr/bin/env -i -C {self.folder} {shlex.join(f'{name}={value}' for name, value in env.items())} "
            f"{shlex.join(command)}"
        )
        done = subprocess.run(["unshare", "--mount", "sh", "-c", script], stdin=subprocess.DEVNULL, timeout=RUN_SECONDS)
        if done.returncode != 0:
            raise StepError(f"{shlex.join(command)[:200]}: ended with status {done.returncode}.")


def clean_debian(root: Path) -> None:
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", SUITE, root], check=True)
    for source, to in (*((name, name) for name in HOST_FILES), (CERTIFICATES, COPY_OF_CERTIFICATES)):
        if Path("/", source).exists():
            (root / to).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(Path("/", source), root / to)


def build(dockerfile: str, root: Path, given: Mapping[str, str]) -> Image:
    everything = steps(dockerfile)
    base, own = of_the_last_stage(everything, given)
    if not base.startswith("debian:"):
        raise StepError(f"FROM {base}: only an image of Debian can be replaced by mmdebstrap.")
    clean_debian(root)
    before = everything[: next(i for i, step in enumerate(everything) if step.word == "FROM")]
    defaults = dict(step.text.split("=", 1) for step in before if step.word == "ARG" and "=" in step.text)
    image = Image(root, given, defaults)
    for step in own:
        print(f"::: {step.word} {step.text[:100]}", flush=True)
        image.take(step)
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="a folder that does not exist yet; some GB")
    parser.add_argument("--build-arg", action="append", default=["CUDA=off"], help="NAME=VALUE")
    parser.add_argument("--then", action="append", default=[], help="a command for the image, in bash")
    args = parser.parse_args()
    try:
        image = build((ROOT / "Dockerfile").read_text(), args.root, dict(x.split("=", 1) for x in args.build_arg))
        for command in args.then:
            print(f"::: {command}", flush=True)
            image.in_root(["/bin/bash", "-c", command])
    except StepError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
