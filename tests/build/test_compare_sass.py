"""Promise: tools/compare_sass.py tells a kernel that moved a parameter from one that changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/compare_sass.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("compare_sass", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BEFORE = ["MOV R1, c[0x0][0x28]", "FMUL R2, R1, c[0x0][0x30]", "FADD R3, R2, c[0x0][0x30]", "EXIT"]


def moved(offset: int, *, also: int | None = None) -> list[str]:
    """The same code, with the second parameter elsewhere; `also`: where its second reader takes it from."""
    return [
        BEFORE[0],
        BEFORE[1].replace("0x30", hex(offset)),
        BEFORE[2].replace("0x30", hex(also or offset)),
        BEFORE[3],
    ]


def test_the_same_code(tool) -> None:
    assert tool.difference(BEFORE, list(BEFORE)) == ""


def test_parameters_may_move_together(tool) -> None:
    assert tool.difference(BEFORE, moved(0x38)) == "moved"


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (moved(0x38, also=0x40), "numbers differ by [8, 16]"),
        (moved(0x28), "numbers differ by [-8]"),
        ([*BEFORE[:2], "FADD R3, R4, c[0x0][0x30]", "EXIT"], "instruction 2: FADD R3, R2"),
        ([*BEFORE, "NOP"], "4 instructions -> 5"),
    ],
)
def test_what_differs_is_said(tool, after: list[str], said: str) -> None:
    assert tool.difference(BEFORE, after).startswith(said)


def test_a_listing_becomes_kernels(tool, monkeypatch) -> None:
    listing = """
arch = sm_80
\t\tFunction : one
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x00000a0000017a02 */
                                                            /* 0x000fe40000000f00 */
        /*0010*/                   EXIT ;                   /* 0x000000000000794d */
arch = sm_90a
\t\tFunction : one
        /*0000*/                   EXIT ;                   /* 0x000000000000794d */
\t\tFunction : one
        /*0000*/                   NOP ;                    /* 0x0000000000007918 */
"""
    monkeypatch.setattr(tool, "cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(tool.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": listing}))
    assert tool.kernels("any.so") == {
        ("sm_80", "one"): ["MOV R1, c[0x0][0x28]", "EXIT"],
        ("sm_90a", "one"): ["EXIT"],
        ("sm_90a", "one #1"): ["NOP"],
    }
