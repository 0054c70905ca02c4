"""Promise: load_tile gives torch's bits for every head dim, stride and number of threads, and reads each float once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

np = pytest.importorskip("numpy")

from flash_ext.lab.lessons import Launch, Variant, lesson  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402
from flash_ext.lab.memory import Access  # noqa: E402

LESSON = lesson("load_tile")
HEAD_DIMS = [*range(1, 18), 31, 62, 64, 127, 255, 256]
every_variant = pytest.mark.parametrize("variant", LESSON.variants, ids=lambda variant: variant.name)


def require_bits_and_one_reader(variant: Variant, size: tuple[int, int, int]) -> None:
    rows, d, stride = size
    readers = np.zeros(rows * stride, np.int64)

    def record(access: Access) -> None:
        if access.memory.space == "global" and not access.store:
            wanted = access.width if access.wanted is None else access.wanted[access.active, None]
            place = np.arange(access.width // 4)
            words = access.addresses[access.active, None] // 4 + place
            np.add.at(readers, words[np.broadcast_to(4 * place < wanted, words.shape)], 1)

    inputs = LESSON.inputs(size)
    expected = variant.reference(*inputs).contiguous()
    assert torch.equal(count(LESSON, variant, size, inputs, expected, record=record).out, expected), size
    assert (readers.reshape(rows, stride) == (np.arange(stride) < d)).all(), size


@every_variant
def test_every_head_dim_and_alignment(variant: Variant) -> None:
    for d in HEAD_DIMS:
        for between in range(5):
            require_bits_and_one_reader(variant, (35, d, d + between))


@every_variant
@pytest.mark.parametrize("threads", [1, 32, 33, 96, 256])
def test_every_number_of_threads(variant: Variant, threads: int) -> None:
    other = replace(variant, launch=lambda size: Launch(variant.launch(size).grid, (threads, 1), tuple(size)))
    for size in ((1, 1, 1), (33, 13, 15), (32, 16, 20)):
        require_bits_and_one_reader(other, size)
