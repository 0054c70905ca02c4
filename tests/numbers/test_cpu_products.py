"""Promise: bfloat16 on a CPU keeps the error rule by products of its own and by those of float32, whichever the machine
prefers; FLASH_EXT_CPU_BF16 asks for one, and explain names it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

CODE = """
import json, torch, flash_ext
from helpers import check
torch.manual_seed(0)
names = set()
for queries, keys, dim, options in (
    (49, 49, 32, {}), (7, 50, 64, {}), (130, 77, 40, {"causal": True}),
    (64, 200, 64, {}), (1, 33, 64, {}), (90, 3, 24, {}),
):
    q = torch.randn(2, 3, queries, dim, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 3, keys, dim, dtype=torch.bfloat16) for _ in range(2))
    inputs = {"query": q, "key": k, "value": v}
    check(flash_ext.attention, inputs, options)
    check(flash_ext.attention, inputs | {"bias": torch.randn(3, queries, keys, dtype=torch.bfloat16)}, options)
    plan = flash_ext.explain(q, k, v, **options)
    names |= {plan.forward.kernel, plan.backward.kernel}
print(json.dumps(sorted(names)))
"""


def run_with(asked: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "FLASH_EXT_CPU_BF16"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    if asked is not None:
        environment["FLASH_EXT_CPU_BF16"] = asked
    return subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)


@cache
def kernels_with(asked: str | None) -> list[str]:
    done = run_with(asked)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_products_of_float32() -> None:
    found = kernels_with("0")
    assert found in (
        ["cpu.backward.fp32.brgemm", "cpu.forward.fp32.brgemm"],
        ["cpu.backward.fp32.loops", "cpu.forward.fp32.loops"],  # no AVX2, or another processor
    )


def test_products_of_bfloat16() -> None:
    found = kernels_with("1")
    if found[0].startswith("cpu.backward.fp32."):
        pytest.skip("this processor has no products of bfloat16")
    assert found == ["cpu.backward.bf16.brgemm", "cpu.forward.bf16.brgemm"]


def test_the_machine_chooses_one_of_them() -> None:
    assert kernels_with(None) in (kernels_with("0"), kernels_with("1"))


def test_another_value_is_an_error() -> None:
    done = run_with("yes")
    assert done.returncode != 0 and "FLASH_EXT_CPU_BF16 is 'yes', not 0 or 1" in done.stderr
