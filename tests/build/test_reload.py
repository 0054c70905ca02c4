"""Promise: importlib.reload, and another import after removal from sys.modules, leave everything working.

Notebooks with autoreload do the first, plug-in hosts and test runners the second. Each case is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

WORKS = """
import importlib, pickle, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
import flash_ext

def works(module):
    q, k, v = (torch.randn(2, 4, 16, 16, requires_grad=True) for _ in "qkv")
    plain = F.scaled_dot_product_attention(q, k, v)
    before = module.enabled_calls()
    with module.enable():
        served = F.scaled_dot_product_attention(q, k, v)
    F.scaled_dot_product_attention(q, k, v)
    assert module.enabled_calls() == before + 1
    torch.testing.assert_close(served, plain)
    torch.testing.assert_close(torch.func.vmap(module.scaled_dot_product_attention)(q, k, v), plain)
    torch.testing.assert_close(module.FlashAttention.apply(q, k, v), plain)
    served.sum().backward()
    assert torch.ops.flash_ext.attention(*(t.to("meta") for t in (q, k, v)))[0].shape == plain.shape
    with FlopCounterMode(display=False) as counter:
        module.attention(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 16 * 16 * 16
    with module.use_backend("chunked"):
        assert module.explain(q, k, v).forward.backend == "chunked"
    for error in {module.AttentionError, flash_ext.AttentionError}:  # also the one that was imported first
        try:
            module.attention(q, k[..., :3], v)
            raise AssertionError("no error")
        except error as caught:
            assert type(pickle.loads(pickle.dumps(caught))) is type(caught)

works(flash_ext)
"""

RELOAD = """
for _ in range(2):
    assert importlib.reload(flash_ext) is flash_ext
    works(flash_ext)
"""

AGAIN = """
from flash_ext import attention
for _ in range(2):
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_ext"]:
        del sys.modules[name]
    module = importlib.import_module("flash_ext")
    assert module is not flash_ext
    works(module)
    works(flash_ext)
"""

EVERY_MODULE = """
for _ in range(2):
    for name in sorted(name for name in sys.modules if name.split(".")[0] == "flash_ext"):
        if name != "flash_ext._C":
            importlib.reload(sys.modules[name])
    works(flash_ext)
"""

ENABLED = """
flash_ext.enable()
{again}
q = torch.randn(1, 2, 4, 8)
before = module.enabled_calls()
F.scaled_dot_product_attention(q, q, q)
assert module.enabled_calls() == before + 1
module.disable()
F.scaled_dot_product_attention(q, q, q)
assert module.enabled_calls() == before + 1
assert torch.backends.mha.get_fastpath_enabled()
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", WORKS + script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", [RELOAD, AGAIN, EVERY_MODULE], ids=["reload", "import again", "every module"])
def test_works(script: str) -> None:
    run(script)


@pytest.mark.parametrize("how", ["reload", "import again"])
def test_a_scope_of_enable_survives(how: str) -> None:
    again = {
        "reload": "module = importlib.reload(flash_ext)",
        "import again": "[sys.modules.pop(n) for n in list(sys.modules) if n.split('.')[0] == 'flash_ext']\n"
        "module = importlib.import_module('flash_ext')",
    }[how]
    run(ENABLED.format(again=again))
