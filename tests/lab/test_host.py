"""Promise: what the lab counts are the addresses of the kernels themselves.

g++ compiles each `.cu` file, with stand-ins for CUDA's words and for float; every thread touches the same addresses in
the same widths as when the lab executes the file, and the results have the same bits.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

np = pytest.importorskip("numpy")

from flash_ext.lab.lessons import Launch, Lesson, Variant, lessons  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402
from flash_ext.lab.memory import Access  # noqa: E402

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SIZES = {"add": ((33, 35), (9, 68)), "transpose": ((35, 69), (36, 68)), "bank_conflicts": ((1501,), (2048,))}
SIZES["reduction"] = ((1501,), (2048,))
SIZES["scan"] = ((1501,), (5000,))
SIZES["block_size"] = ((33,), (97,))
SIZES["load_tile"] = ((33, 6, 8), (34, 31, 33), (33, 8, 12))
SIZES["matmul"] = ((35, 9, 18), (20, 68, 36))
SIZES["tiny_flash"] = ((1, 35),)
SIZES["swin"] = ((1, 2, 1),)
CASES = [(lesson, variant) for lesson in lessons() for variant in lesson.variants]
ROOM = 1_000_000


def compiled(
    lesson: Lesson, variant: Variant, folder: Path, header: str = "stand_ins.h", text: str = ""
) -> tuple[ctypes.CDLL, dict[str, int]]:
    """The kernel, or another text of it, as a library that runs a grid, and where each of its arrays begins in shared
    memory."""
    kernel = lesson.source(variant).kernel
    pointers = [kind.name for _, kind in kernel.parameters if kind.pointer]
    arguments = [
        f"reinterpret_cast<{'Float' if name == 'float' else name}*>(tensors[{i}])" for i, name in enumerate(pointers)
    ]
    arguments += [f"numbers[{i}]" for i in range(len(kernel.parameters) - len(pointers))]
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    call = f"void call_kernel() {{ {kernel.name}({', '.join(arguments)}); }}"
    text = (text or lesson.text(variant)).replace('#include "ptx.cuh"', "")
    text = re.sub(r"\b\d+\.\d*(?:e\d+)?f", r"Float(\g<0>)", text)  # or `b ? x[i] : 0.f` is of two types
    source.write_text(f'#include "{Path(__file__).with_name(header)}"\n{text}\n{call}\n')
    defines = [f"-D{name}={value}" for name, value in variant.defines.items()]
    command = [COMPILER, "-std=c++17", "-w", "-shared", "-fPIC", *defines, str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listed = subprocess.run(["nm", str(library)], capture_output=True, text=True, check=True).stdout
    symbols = {words[-1]: int(words[0], 16) for line in listed.splitlines() if len(words := line.split()) == 3}
    arrays = {}
    for symbol, address in symbols.items():  # _ZZ6matmulE1x is x of matmul
        for _, name in re.findall(rf"^_ZZ\d+{kernel.name}\w*E(\d+)(\w+)$", symbol):
            arrays[name] = address - symbols["__start_lab_shared"]
    return ctypes.CDLL(str(library)), arrays


def on_host(library: ctypes.CDLL, launch: Launch, tensors: list[torch.Tensor]) -> np.ndarray:
    """A row for each access: block, thread, memory, address, width, store.

    Without those of launch.zeros, by which blocks tell each other something: who sees what depends on their order.
    """
    library.run.restype = ctypes.c_int64
    found, zeros = np.zeros((ROOM, 6), np.int64), launch.memory()
    count = len(tensors) + len(zeros)
    data = (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in (*tensors, *zeros)))
    sizes = (ctypes.c_int64 * count)(*(tensor.nbytes for tensor in tensors))
    shape, numbers = (ctypes.c_uint32 * 4)(*launch.grid, *launch.block), (ctypes.c_int32 * 8)(*launch.numbers)
    room = ctypes.c_int64(ROOM)
    amount = library.run(shape, data, sizes, ctypes.c_int64(count), numbers, ctypes.c_void_p(found.ctypes.data), room)
    assert 0 < amount <= ROOM
    return found[:amount]


def in_the_lab(
    lesson: Lesson, variant: Variant, size: tuple[int, ...], inputs: tuple, arrays: dict[str, int]
) -> tuple[np.ndarray, torch.Tensor]:
    """The same rows, and the output."""
    names = [name for name, kind in lesson.source(variant).kernel.parameters if kind.pointer]
    told = {*names[: len(inputs) + 1]}
    rows: list[np.ndarray] = []

    def record(access: Access) -> None:
        name = access.memory.name
        if access.memory.space == "global" and name not in told:
            return
        memory, begin = (names.index(name), 0) if access.memory.space == "global" else (len(names), arrays[name])
        active = access.active
        same = np.full((int(active.sum()), 1), 1)
        columns = [access.blocks[active], access.threads[active], memory * same[:, 0], begin + access.addresses[active]]
        rows.append(np.column_stack([*columns, access.width * same, access.store * same]))

    expected = variant.reference(*inputs).contiguous()
    counted = count(lesson, variant, size, inputs, expected, record=record)
    assert counted.blocks == counted.all_blocks
    return np.concatenate(rows), counted.out


def ordered(rows: np.ndarray) -> np.ndarray:
    """A thread's accesses of one statement have no order in C++."""
    return rows[np.lexsort(rows.T[::-1])]


@pytest.mark.parametrize("lesson, variant", CASES, ids=lambda case: case.name)
def test_addresses_are_those_of_the_kernel(lesson: Lesson, variant: Variant, tmp_path: Path) -> None:
    library, arrays = compiled(lesson, variant, tmp_path)
    for size in SIZES[lesson.name]:
        inputs = lesson.inputs(size)
        expected, out = in_the_lab(lesson, variant, size, inputs, arrays)
        again = torch.full_like(out, torch.nan)
        found = on_host(library, variant.launch(size), [*inputs, again])
        assert np.array_equal(ordered(found), ordered(expected))
        if "expf" in lesson.text(variant):  # whose last bit is not the same everywhere
            torch.testing.assert_close(again, out)
        else:
            assert torch.equal(again, out)


def ended_at_once(library: ctypes.CDLL, launch: Launch, tensors: list[torch.Tensor], seed: int) -> bool:
    """Whether all blocks have, four at a time and in random order."""
    library.run_at_once.restype = ctypes.c_int64
    every = [*tensors, *launch.memory()]
    data = (ctypes.c_void_p * len(every))(*(tensor.data_ptr() for tensor in every))
    shape, numbers = (ctypes.c_uint32 * 4)(*launch.grid, *launch.block), (ctypes.c_int32 * 8)(*launch.numbers)
    return library.run_at_once(shape, data, numbers, ctypes.c_uint64(seed)) > 0


TELLING = [case for case in CASES if case[1].launch((64,) * len(case[0].sizes)).zeros]


@pytest.mark.parametrize("lesson, variant", TELLING, ids=lambda case: case.name)
def test_blocks_that_wait_for_each_other_end(lesson: Lesson, variant: Variant, tmp_path: Path) -> None:
    """In whatever order they start, and the result is right. Memory is never stale here, so no fence is missed."""
    launch, inputs = variant.launch((8000,)), lesson.inputs((8000,))
    library, _ = compiled(lesson, variant, tmp_path, "blocks_at_once.h")
    for seed in range(2):
        out = torch.full_like(inputs[0], torch.nan)
        assert ended_at_once(library, launch, [*inputs, out], seed)
        assert torch.equal(out, variant.reference(*inputs))


def test_blocks_that_take_their_place_in_the_grid_hang(tmp_path: Path) -> None:
    """Those that have room wait for one that has none."""
    ((lesson, variant),) = TELLING
    launch, inputs, text = variant.launch((8000,)), lesson.inputs((8000,)), lesson.text(variant)
    drawn = text.replace("atomicAdd(drawn, 1)", "blockIdx.x")
    assert drawn != text
    library, _ = compiled(lesson, variant, tmp_path, "blocks_at_once.h", drawn)
    assert not ended_at_once(library, launch, [*inputs, inputs[0].clone()], seed=1)
