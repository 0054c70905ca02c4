"""Promise: an NVTX tool sees each operator, forward and backward, with its shapes, and the ranges that Python names.

The tool is tests/nvtx_injection.c, loaded by a process of its own: NVTX looks for one once.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flash_ext

ROOT = Path(__file__).resolve().parents[2]
PLACES = [*Path(torch.__file__).parent.parent.glob("nvidia/*/include"), Path("/usr/local/cuda/include")]
HEADERS = [place for place in PLACES if (place / "nvtx3/nvToolsExtPayload.h").exists()]

pytestmark = [
    pytest.mark.xdist_group("nvtx"),  # one run of the tool
    pytest.mark.skipif(not flash_ext.build_info()["nvtx"], reason="this build has no NVTX"),
    pytest.mark.skipif(not HEADERS or shutil.which("cc") is None, reason="needs NVTX's headers and a C compiler"),
]

PROGRAM = """
import torch, flash_ext
from flash_ext.profiling import range
q = torch.randn(2, 3, 4, 40, 16, dtype=torch.bfloat16, requires_grad=True)
k, v = (torch.randn(2, 3, 2, 50, size, dtype=torch.bfloat16) for size in (16, 24))
for _ in "ab":
    with range("forward"):
        out = flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with range("backward"):
        out.sum().backward()
try:
    with range("outer"), range("inner"):
        raise KeyError
except KeyError:
    pass
x = torch.randn(1, 1, 8, 8, dtype=torch.float64, requires_grad=True)
grad, = torch.autograd.grad(flash_ext.attention(x, x, x).square().sum(), x, create_graph=True)
grad.sum().backward()
torch.ops.flash_ext.dropout_mask(torch.tensor([1, 2]), 0.5, 2, 16, 16)
torch.func.jvp(lambda q: flash_ext.attention(q, q, q), (x.detach(),), (x.detach(),))
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the tool wrote."""
    folder = tmp_path_factory.mktemp("nvtx")
    library, text = folder / "tool.so", folder / "log"
    source = ROOT / "tests/nvtx_injection.c"
    include = ["-isystem", str(HEADERS[0])]
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", *include, source, "-o", library], check=True)
    env = os.environ | {"NVTX_INJECTION64_PATH": str(library), "NVTX_LOG": str(text), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True)
    return text.read_text().splitlines()


def names(log: list[str]) -> dict[str, str]:
    """Registered strings by number."""
    return dict(line.split(" ", 2)[1:] for line in log if line.startswith("string "))


def events(log: list[str]) -> Iterator[tuple[int, str, dict[str, object]]]:
    """(depth, name, payload) of each range, in the order of their beginnings."""
    (schema,) = (line for line in log if line.startswith("schema "))
    title, _, fields = schema.partition(": ")
    assert title == "schema flash_ext call size 80"
    depth, registered = 0, names(log)
    for line in log:
        if line.startswith("push "):
            domain, message_type, name, *extended = line.split()[1:]
            assert (domain, message_type) == ("1", "3")  # ours, and a registered string
            payload: dict[str, object] = {}
            if extended:
                assert extended[0] == "77"
                data = bytes.fromhex(extended[1])
                for field in fields.split():
                    key, offset = field.rsplit("/", 1)[0].split("@")
                    text = data[int(offset) :].rstrip(b"\0").decode() if key == "dtype" else None
                    payload[key] = text if key == "dtype" else struct.unpack_from("<q", data, int(offset))[0]
            yield depth, registered[name], payload
            depth += 1
        elif line.startswith("pop "):
            depth -= 1
    assert depth == 0


def test_one_domain_and_registered_strings(log: list[str]) -> None:
    assert [line for line in log if line.startswith("domain ")] == ["domain flash_ext"]
    registered = list(names(log).values())
    assert len(set(registered)) == len(registered)  # each string once, however often its range is entered
    assert {"attention", "attention_backward", "attention_double_backward", "dropout_mask"} <= set(registered)
    assert {"forward", "backward", "outer", "inner"} <= set(registered)


def test_operators_nest_in_python_ranges(log: list[str]) -> None:
    shown = [(depth, name) for depth, name, _ in events(log)]
    step = [(0, "forward"), (1, "attention"), (0, "backward"), (1, "attention_backward")]
    assert shown[:8] == step * 2
    assert shown[8:10] == [(0, "outer"), (1, "inner")]
    rest = [name for _, name in shown[10:]]
    assert rest[:3] == ["attention", "attention_backward", "attention_double_backward"]
    assert rest[-2:] == ["dropout_mask", "attention"]


def test_shapes_are_the_payload(log: list[str]) -> None:
    payloads = {(name, payload["dtype"]): payload for _, name, payload in events(log) if payload}
    expected = {"batch": 6, "heads_q": 4, "heads_k": 2, "len_q": 40, "len_k": 50, "head_dim": 16, "head_dim_v": 24}
    for name in ("attention", "attention_backward"):
        assert payloads[name, "bfloat16"] == expected | {"causal": 1, "dtype": "bfloat16"}
    double = payloads["attention_double_backward", "float64"]
    assert (double["len_q"], double["head_dim"], double["causal"]) == (8, 8, 0)
