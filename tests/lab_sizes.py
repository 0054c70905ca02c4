"""Sizes at which every kernel of a lesson of the lab has to be right, as words of --size; the last one is small."""

from __future__ import annotations

from flash_ext.lab.lessons import LESSON_NAMES

SIZES = dict.fromkeys(LESSON_NAMES, ("1", "31", "33", "1000", "4097"))
SIZES["load_tile"] = ("1", "31", "33", "1000 256 258", "4097 129 132")
SIZES["matmul"] = ("1", "31", "33", "130 36 68", "33 7 300", "4097 33 5", "1000 33 5")
SIZES["tiny_flash"] = ("1", "31", "33 1", "1 33", "2 65")
SIZES["swin"] = ("1", "2 2 3", "33 1 1", "4097 1 1", "1 3 2")
# What takes a CPU too long
ON_A_GPU = {
    "matmul": ("1000", "4097 33 65", "33 4097 1000"),
    "tiny_flash": ("33", "1000 1", "1 1000", "4097 1", "1 4097"),
    "swin": ("31 1 1", "33 1 2", "1000 1 1", "4097 1 2", "1 33 1"),
}
CASES = [(name, size) for name, sizes in SIZES.items() for size in sizes]
THREADS = dict.fromkeys(CASES, 1 << 15) | {("swin", "4097 1 1"): 1 << 11}  # that a CPU executes: of more, a sample
