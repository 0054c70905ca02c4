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
SIZES["load_tile"] = ((33, 6, 8), (34, 31, 33), (33, 8, 12))
SIZES["matmul"] = ((35, 9, 18), (20, 68, 36))
CASES = [(lesson, variant) for lesson in lessons() for variant in lesson.variants]
ROOM = 500_000


def compiled(lesson: Lesson, variant: Variant, folder: Path) -> tuple[ctypes.CDLL, dict[str, int]]:
    """The kernel as a library that runs a grid, and where each of its arrays begins in shared memory."""
    kernel = lesson.source(variant).kernel
    pointers = [kind.pointer for _, kind in kernel.parameters]
    count = sum(pointers)
    arguments = [f"reinterpret_cast<Float*>(tensors[{i}])" for i in range(count)]
    arguments += [f"numbers[{i}]" for i in range(len(pointers) - count)]
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    header = Path(__file__).with_name("stand_ins.h")
    call = f"void call_kernel() {{ {kernel.name}({', '.join(arguments)}); }}"
    text = lesson.text(variant).replace('#include "ptx.cuh"', "")
    text = re.sub(r"\b\d+\.\d*f", r"Float(\g<0>)", text)  # or `b ? x[i] : 0.f` is of two types
    source.write_text(f'#include "{header}"\n{text}\n{call}\n')
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
    """A row for each access: block, thread, memory, address, width, store."""
    library.run.restype = ctypes.c_int64
    found = np.zeros((ROOM, 6), np.int64)
    data = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    sizes = (ctypes.c_int64 * len(tensors))(*(tensor.nbytes for tensor in tensors))
    shape, numbers = (ctypes.c_uint32 * 4)(*launch.grid, *launch.block), (ctypes.c_int32 * 8)(*launch.numbers)
    room = ctypes.c_int64(ROOM)
    amount = library.run(
        shape, data, sizes, ctypes.c_int64(len(tensors)), numbers, ctypes.c_void_p(found.ctypes.data), room
    )
    assert 0 < amount <= ROOM
    return found[:amount]


def in_the_lab(
    lesson: Lesson, variant: Variant, size: tuple[int, ...], inputs: tuple, arrays: dict[str, int]
) -> tuple[np.ndarray, torch.Tensor]:
    """The same rows, and the output."""
    names = [name for name, kind in lesson.source(variant).kernel.parameters if kind.pointer]
    rows: list[np.ndarray] = []

    def record(access: Access) -> None:
        name = access.memory.name
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
        assert torch.equal(again, out)
