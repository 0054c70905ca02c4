"""Sizes at which every kernel of a lesson of the lab has to be right, as words of --size."""

from __future__ import annotations

from flash_ext.lab.lessons import LESSON_NAMES

SIZES = dict.fromkeys(LESSON_NAMES, ("1", "31", "33", "1000", "4097"))
SIZES["load_tile"] = ("1", "31", "33", "1000 256 258", "4097 129 132")
SIZES["matmul"] = ("1", "31", "33", "130 36 68", "33 7 300", "1000 33 5")
SIZES["tiny_flash"] = ("1", "31", "1 33", "2 65")
SIZES["swin"] = ("1", "2 2 3", "1 3 2")
CASES = [(name, size) for name, sizes in SIZES.items() for size in sizes]
