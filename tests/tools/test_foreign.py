"""Promise: tests/foreign/flash_attention.py runs a checkout's tests against flash_ext.flash_attn: the cases that it
drew, on the CPU where they ask for "cuda", with the dropout that was applied, and says what it leaves out.

The checkout is a small one of our own, which asks what FlashAttention's tests ask.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from commands import ROOT

THEIRS = """
import pytest, torch
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

is_sm80 = torch.cuda.get_device_capability("cuda") == (8, 0)


def attention_ref(q, k, v, query_padding_mask=None, key_padding_mask=None, attn_bias=None, dropout_p=0.0,
                  dropout_mask=None, causal=False, window_size=(-1, -1)):
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    attention = scores.softmax(-1)
    kept = attention if dropout_mask is None else attention * dropout_mask / (1 - dropout_p)
    return torch.einsum("bhts,bshd->bthd", kept, v), attention


def convert_flash_attn_S_to_softmax(*args, **kwargs):
    raise AssertionError("only their kernels have this layout")


normalize_flash_attn_S = convert_flash_attn_S_to_softmax


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(12, 12), (20001, 20001)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("packed", range(50))
def test_dropout(seqlen_q, seqlen_k, dropout_p, causal, packed):
    assert is_sm80
    q, k, v = (torch.randn(2, seqlen_q, 3, 16, device="cuda").to("cuda") for _ in range(3))
    if packed % 2:
        cu = torch.arange(3, device="cuda", dtype=torch.int32) * seqlen_q
        sizes = (cu, cu, seqlen_q, seqlen_k, dropout_p)
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out, _, dropped = flash_attn_varlen_func(*rows, *sizes, causal=causal, return_attn_probs=True)
        out = out.view(q.shape)
    else:
        out, _, dropped = flash_attn_func(q, k, v, dropout_p, causal=causal, return_attn_probs=True)
    mask = None
    if dropout_p:
        signs = convert_flash_attn_S_to_softmax(dropped, seqlen_q, seqlen_k, None, None, 16, True, causal=causal)
        mask = signs >= 0
        weights = normalize_flash_attn_S(signs.abs(), q, k, v, None, None, None, True, causal=causal)
        assert 0.6 < mask.float().mean() < 0.8 and torch.allclose(weights, attention_ref(q, k, v, causal=causal)[1])
    expected, _ = attention_ref(q, k, v, None, None, None, dropout_p, mask, causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("one", [5])
def test_of_one_parameter(one):
    assert one == 5


def test_of_no_parameters():
    assert apply_rotary_emb(torch.ones(1, 1, 1, 2, device="cuda"), torch.zeros(1, 1), torch.ones(1, 1)).tolist()


def test_flash_attn_race_condition():
    raise AssertionError("left out on a CPU")
"""
THEIRS_OF_3 = """
import os, pytest, torch
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache
from padding import pad_input


@pytest.mark.parametrize("has_qv", [False, True])
@pytest.mark.parametrize("d", [8, 16])
def test_output(d, has_qv):
    assert os.environ["FLASH_ATTENTION_DISABLE_FP8"] == os.environ["FLASH_ATTENTION_DISABLE_LOCAL"] == "TRUE"
    x = torch.randn(1, 4, 2, d, device="cuda")
    torch.testing.assert_close(flash_attn_func(x, x, x, qv=x if has_qv else None)[0, 0, 0].shape, (d,))


def test_flash3_bw_compatibility():
    raise AssertionError("left out")
"""
FAILS = "\n\ndef test_that_fails():\n    assert torch.ones(1, device='cuda') == 2\n"


def run(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """einops, which is no dependency of ours, is an empty module there."""
    command = [sys.executable, str(ROOT / "tests/foreign/flash_attention.py"), str(checkout), *arguments]
    env = os.environ | {"PYTHONPATH": str(checkout / "site")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder, name, text in (("tests", "test_flash_attn.py", THEIRS), ("site", "einops.py", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
def test_passes_and_names_what_it_leaves_out(checkout: Path, processes: str) -> None:
    done = run(checkout, "--cases", "9", "--processes", processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout
    assert "left out: test_flash_attn_race_condition 250 repetitions" in done.stdout
    assert "left out: test_flash_attn_generator_arg_must_be_none" in done.stdout


@pytest.fixture(scope="module")
def command() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flash_attention", ROOT / "tests/foreign/flash_attention.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chosen(command: ModuleType, *how: Any) -> list[str]:
    """The ids of the cases of a test of 400."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 20001), (12, 13)])
    @pytest.mark.parametrize(("number",), [(i,) for i in range(100)])
    @pytest.mark.slow
    def example(number: int, seqlen_q: int, seqlen_k: int, dtype: torch.dtype) -> None: ...

    command.choose(example, *how)
    other, mark = example.pytestmark
    assert other.name == "slow" and mark.args[0] == ["number", "seqlen_q", "seqlen_k", "dtype"]
    for values, name in zip(mark.args[1], mark.kwargs["ids"], strict=True):
        assert type(values[0]) is type(values[1]) is int and name == "-".join(
            str(value).removeprefix("torch.") for value in values
        )
    return mark.kwargs["ids"]


def test_the_seed_says_which_cases(command: ModuleType) -> None:
    names = chosen(command, 9, 0, "cpu")
    assert len(names) == len(set(names)) == 9 and all("-12-13-" in name for name in names)
    assert names == chosen(command, 9, 0, "cpu") != chosen(command, 9, 1, "cpu")
    assert len(set(chosen(command, 0, 0, "cpu"))) == len(set(chosen(command, 300, 0, "cpu"))) == 200
    assert len(set(chosen(command, 0, 0, "cuda"))) == len(set(chosen(command, 500, 0, "cuda"))) == 400


@pytest.mark.slow
def test_the_tests_of_version_3(checkout: Path) -> None:
    (checkout / "hopper").mkdir()
    (checkout / "hopper/test_flash_attn.py").write_text(THEIRS_OF_3)
    (checkout / "hopper/padding.py").write_text("pad_input = None")
    done = run(checkout, "--interface", "3")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert "left out: cases of windows, which come with attention_chunk there" in done.stdout
    assert "left out: cases of a second query, qv" in done.stdout


@pytest.mark.slow
def test_a_failure_is_one(checkout: Path) -> None:
    (checkout / "tests/test_flash_attn.py").write_text(THEIRS + FAILS)
    done = run(checkout, "--cases", "1", "-k", "fails or no_parameters")
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout and "test_that_fails" in done.stdout


def test_what_is_no_checkout_is_named(checkout: Path) -> None:
    done = run(checkout / "site")
    assert done.returncode == 2 and "has no tests/test_flash_attn.py; it must be a flash-attention" in done.stderr
