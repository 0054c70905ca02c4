"""FlashAttention's own tests of its Python interfaces, tests/test_flash_attn.py of version 2 and
hopper/test_flash_attn.py of version 3, run against flash_ext.flash_attn and flash_ext.flash_attn_3.

    python tests/foreign/flash_attention.py CHECKOUT --device cpu --cases 20
    python tests/foreign/flash_attention.py CHECKOUT --device cuda --cases 200 --processes 8 -k "varlen or kvcache"
    python tests/foreign/flash_attention.py CHECKOUT --device cpu --cases 20 --interface 3

CHECKOUT is a clone of https://github.com/Dao-AILab/flash-attention; nothing of it is part of this repository. Its tests
import einops. Its parameters multiply to half a million cases, so `--cases` of each test function are drawn by `--seed`
before pytest sees them; 0 takes all.

This file is the command and, in the processes that pytest starts, its plugin. The plugin

- lets `flash_attn` be `flash_ext.flash_attn`, with the two names of the other package's inside that the tests import,
  and `flash_attn_interface`, as version 3's is called, `flash_ext.flash_attn_3`;
- redirects "cuda" to the CPU where it is asked to;
- gives the tests the dropout that was applied. They read it from the matrix of probabilities that only their kernels
  return, by functions that know its layout. Here these get the map of flash_ext's operator; so out and gradients are
  compared with the same pairs dropped, and the probabilities themselves are not compared;
- sets FLASH_EXT_CHECK=1, because one test wants an error for lengths, which no call reads otherwise;
- leaves out what LEFT_OUT, SWITCHED_OFF and TOO_LARGE_FOR_A_CPU name.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import math
import os
import random
import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OPTIONS = "FLASH_EXT_FOREIGN"  # device, cases, seed and version, for the processes that have the plugin
FILES = {2: "tests/test_flash_attn.py", 3: "hopper/test_flash_attn.py"}

LEFT_OUT = {
    "test_flash3_bw_compatibility": "asks for the schemas of flash_attn's operators",
    "test_flash_attn_generator_arg_must_be_none": "calls the functions of flash_attn's extension module, which has no "
    "counterpart",
    "test_flash_attn_varlen_paged_kv_num_splits": "calls a private function for an option that the public one has not",
}
SWITCHED_OFF = {  # by the variables that version 3's tests have for it
    "FLASH_ATTENTION_DISABLE_FP8": "fp8 queries, which flash_ext does not have",
    "FLASH_ATTENTION_DISABLE_LOCAL": "windows, which come with attention_chunk there, which flash_ext does not have",
}
NOT_HERE = {"has_qv": "a second query, qv, which flash_ext does not have"}
TOO_LARGE_FOR_A_CPU = {
    "test_flash_attn_cluster": "a large call, for the clusters of a GPU's blocks",
    "test_flash_attn_race_condition": "250 repetitions of a batch of 60, to find races of a GPU's blocks",
}
MOST_KEYS_ON_A_CPU = 20000
MOST_PAIRS_ON_A_CPU = 1_100_000  # of a query and a key


# ---- choosing cases -------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any]) -> tuple[list[str], list[list[tuple[Any, ...]]]]:
    """The names of all parametrize marks of a test, and for each mark its values."""
    names, columns = [], []
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            given, values = mark.args[:2]
            is_alone = isinstance(given, str) and "," not in given  # its values are no tuples then
            names += [name.strip() for name in given.split(",")] if isinstance(given, str) else given
            columns.append([(value,) if is_alone else value for value in values])
    return names, columns


def case(columns: list[list[tuple[Any, ...]]], number: int) -> tuple[Any, ...]:
    """Case `number` of the product of all marks."""
    values: list[Any] = []
    for column in columns:
        number, place = divmod(number, len(column))
        values += column[place]
    return tuple(values)


def is_here(names: list[str], values: tuple[Any, ...]) -> bool:
    given = dict(zip(names, values, strict=True))
    return not any(given.get(name) for name in NOT_HERE)


def is_too_large(names: list[str], values: tuple[Any, ...]) -> bool:
    given = dict(zip(names, values, strict=True))
    queries, keys = (given.get(name, given.get("seqlen", 0)) for name in ("seqlen_q", "seqlen_k"))
    joined = math.prod(given.get(name, 0) for name in ("num_splits", "seqlen", "d"))  # of one head
    return max(queries, keys) > MOST_KEYS_ON_A_CPU or queries * keys > MOST_PAIRS_ON_A_CPU or joined > 1e6


def drawn(number: int, cases: int, name: str, fits: Callable[[int], bool]) -> list[int]:
    """`cases` of the numbers below `number` that fit, all of them for 0."""
    if not 0 < cases < number:
        return [place for place in range(number) if fits(place)]
    dice, seen, chosen = random.Random(name), set(), []
    while len(chosen) < cases and len(seen) < number:
        place = dice.randrange(number)
        if place not in seen and fits(place):
            chosen.append(place)
        seen.add(place)
    return chosen


def choose(function: Callable[..., Any], cases: int, seed: int, device: str, **_: Any) -> None:
    """In place of its marks, one mark with the cases that are drawn."""
    names, columns = parameters(function)
    if not names:
        return

    def fits(place: int) -> bool:
        values = case(columns, place)
        return is_here(names, values) and not (device == "cpu" and is_too_large(names, values))

    places = drawn(math.prod(map(len, columns)), cases, f"{seed} {function.__name__}", fits)
    chosen = [case(columns, place) for place in places]
    ids = ["-".join(str(value).removeprefix("torch.") for value in values) for values in chosen]
    others = [mark for mark in function.pytestmark if mark.name != "parametrize"]
    function.pytestmark = [*others, pytest.mark.parametrize(names, chosen, ids=ids).mark]


# ---- what their module imports and calls ----------------------------------------------------------------------------


def install() -> None:
    import flash_ext

    sys.modules["flash_attn"] = flash_ext.flash_attn
    sys.modules["flash_attn_interface"] = flash_ext.flash_attn_3
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    interface.USE_TRITON_ROCM = False
    interface._get_block_size_n = None  # asked for the layout of probabilities, in a function that is replaced below


class Dropped:
    """In place of the probabilities: what was dropped, by flash_ext's map."""

    def __init__(self, rng_state: Any, dropout_p: float, batch: int, heads: int) -> None:
        self.rng_state, self.dropout_p, self.batch, self.heads = rng_state, dropout_p, batch, heads

    def signs(self, queries: int, keys: int, *_: Any, **__: Any) -> Any:
        """(batch, heads, queries, keys): 1 where a pair was kept, else -1."""
        import torch

        draw = torch.ops.flash_ext.dropout_mask
        kept = draw(self.rng_state, self.dropout_p, self.batch * self.heads, queries, keys)
        return torch.where(kept.view(self.batch, self.heads, queries, keys), 1.0, -1.0)


def generator_state(device: str, state: Any = None) -> Any:
    """torch's generator of the device, set to `state` where one is given."""
    import torch

    if state is None:
        return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    return torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state)


def told(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the interface, with `Dropped` as third result where there is dropout."""
    import torch

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        query = given["qkv"].unbind(-3)[0] if "qkv" in given else given["q"]
        before = generator_state(query.device.type)
        results = function(*args, **kwargs)
        if not (given["return_attn_probs"] and given["dropout_p"]):
            return results
        after = generator_state(query.device.type)
        generator_state(query.device.type, before)
        rng_state = torch.ops.flash_ext.draw_rng_state(query, query, query)
        generator_state(query.device.type, after)
        lengths = given.get("cu_seqlens", given.get("cu_seqlens_q"))
        batch = query.shape[0] if lengths is None else len(lengths) - 1
        return *results[:2], Dropped(rng_state, given["dropout_p"], batch, query.shape[-2])

    return call


def prepare(module: ModuleType) -> None:
    """Their module: its functions of the interface, and those that read the probabilities."""

    def normalized(_: Any, q: Any, k: Any, v: Any, queries: Any, keys: Any, bias: Any, __: Any, **band: Any) -> Any:
        return module.attention_ref(q, k, v, queries, keys, bias, **band)[1]

    if wanted().version == 3:  # which has no dropout
        return
    for name, value in list(vars(module).items()):
        if name.startswith("flash_attn_") and name.endswith("_func"):
            setattr(module, name, told(value))
    module.convert_flash_attn_S_to_softmax = lambda dropped, *args, **kwargs: dropped.signs(*args, **kwargs)
    module.normalize_flash_attn_S = normalized


# ---- a CPU in place of a GPU ----------------------------------------------------------------------------------------


def redirect() -> Any:
    """A mode in which torch makes on the CPU what is asked for on "cuda"."""
    import torch
    from torch.overrides import TorchFunctionMode

    def moved(value: Any) -> Any:
        names_a_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
        return torch.device("cpu") if names_a_gpu else value

    class Redirect(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {name: moved(value) for name, value in (kwargs or {}).items()}
            return func(*map(moved, args), **kwargs)

    return Redirect()


def describe_a_gpu() -> None:
    """What their module asks about the card: an 8.0 with 80 GB, so that nothing is left out."""
    import torch

    torch.cuda.get_device_capability = lambda *_: (8, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(total_memory=80e9)


# ---- pytest's plugin ------------------------------------------------------------------------------------------------


def wanted() -> SimpleNamespace:
    device, *numbers = os.environ[OPTIONS].split()
    return SimpleNamespace(device=device, **dict(zip(("cases", "seed", "version"), map(int, numbers), strict=True)))


def pytest_configure(config: pytest.Config) -> None:
    if wanted().device == "cpu":
        describe_a_gpu()
    install()


def left_out() -> dict[str, str]:
    return LEFT_OUT | (TOO_LARGE_FOR_A_CPU if wanted().device == "cpu" else {})


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> list[Any] | None:
    module = collector.module
    if not hasattr(module, "flash_ext_is_prepared"):
        prepare(module)
        module.flash_ext_is_prepared = True
    if not name.startswith("test_"):
        return None
    if name in left_out():
        return []
    choose(obj, **vars(wanted()))
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with redirect() if wanted().device == "cpu" else nullcontext():
        return (yield)


def pytest_runtest_teardown() -> None:
    """What a case leaves in torch's cache is the card's again, which several processes share."""
    if wanted().device == "cuda":
        import torch

        torch.cuda.empty_cache()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name, reason in left_out().items():
        terminalreporter.write_line(f"left out: {name} {reason}")
    for reason in (*SWITCHED_OFF.values(), *NOT_HERE.values()) if wanted().version == 3 else ():
        terminalreporter.write_line(f"left out: cases of {reason}")
    if wanted().device == "cpu":
        terminalreporter.write_line(
            f"left out: cases of more than {MOST_KEYS_ON_A_CPU:,} keys, or {MOST_PAIRS_ON_A_CPU:,} pairs of a query "
            "and a key, for which a CPU takes minutes, or with parts to join of more than a gigabyte"
        )


# ---- the command ----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of the flash-attention repository")
    parser.add_argument("--interface", type=int, choices=FILES, default=2, help="version 2 (default) or 3")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", type=int, default=20, help="of each test function; 0: all (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="which cases (default 0)")
    parser.add_argument("--processes", type=int, default=0, help="of pytest-xdist; 0: in this process (default)")
    parser.add_argument("-k", default="", help="pytest's -k: only tests whose names fit")
    parser.add_argument("--list", action="store_true", help="only lists the cases")
    options = parser.parse_args()
    name = FILES[options.interface]
    file = options.checkout.resolve() / name
    if not file.exists():
        parser.error(f"{options.checkout} has no {name}; it must be a flash-attention checkout")
    try:
        importlib.import_module("einops")
    except ImportError:
        parser.error("the tests of flash-attention import einops, which is not installed: pip install einops")
    os.environ[OPTIONS] = f"{options.device} {options.cases} {options.seed} {options.interface}"
    os.environ["FLASH_EXT_CHECK"] = "1"
    os.environ |= dict.fromkeys(SWITCHED_OFF, "TRUE")
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parent), str(here.parents[2]), str(file.parent)]  # this plugin, flash_ext, what they share
    arguments = [str(file), "-c", os.devnull, f"--rootdir={file.parents[1]}", "--noconftest", "--import-mode=importlib"]
    arguments += ["-q", "-p", "no:cacheprovider", "-p", here.stem, "--tb=short", "--show-capture=no", "-ra"]
    arguments += ["-k", options.k] if options.k else []
    arguments += ["--collect-only"] if options.list else []
    arguments += ["-n", str(options.processes)] if options.processes else []
    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
