"""Text for train_lm.py, read as bytes: the Python standard library's own sources, or any UTF-8 file.

Nothing is downloaded. The last tenth of the text is kept for validation; batches are random windows of the rest, drawn
from a generator of their own, so the same seed gives the same batches whatever the model does with random numbers.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import BenchmarkError
from torch import Tensor

VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """A text's bytes, uint8 (n,), split in two; `name` says where it came from."""

    name: str
    train: Tensor
    validation: Tensor


def standard_library() -> bytes:
    """The top-level modules of Python's standard library, sorted by name and joined (about 5 MB)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata* is one machine's build configuration, not source text
    files = [f for f in sorted(folder.glob("*.py")) if not f.name.startswith("_sysconfigdata")]
    if not files:
        raise BenchmarkError("This Python has no standard library sources to train on; pass a text with --data FILE.")
    return b"\n".join(f.read_bytes() for f in files)


def read_text(path: Path) -> bytes:
    """The bytes of a UTF-8 file; anything else is a BenchmarkError that names the file."""
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except OSError as error:
        raise BenchmarkError(f"--data {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise BenchmarkError(f"--data {path} is not UTF-8 text: byte {error.start} is wrong.") from None
    return content


def load_text(path: Path | None, context: int) -> Text:
    """Reads `path` (None: the standard library) and splits it; each part must hold one window of context + 1 bytes."""
    content = standard_library() if path is None else read_text(path)
    name = "Python's standard library" if path is None else path.name
    split = len(content) - int(len(content) * VALIDATION_SHARE)
    if len(content) - split < context + 1:
        needed = int((context + 1) / VALIDATION_SHARE) + 1
        raise BenchmarkError(
            f"--context {context} is too long for {name} of {len(content):,} bytes: its last tenth, kept for "
            f"validation, must hold {context + 1:,} bytes, so the text needs about {needed:,}."
        )
    tokens = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return Text(name, tokens[:split], tokens[split:])


def batches(tokens: Tensor, batch: int, context: int, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets) of random windows, int64 (batch, context) each; targets are one byte ahead."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        start = torch.randint(tokens.numel() - context, (batch, 1), generator=generator)
        window = tokens[start + offsets].long().to(device)
        yield window[:, :-1], window[:, 1:]
