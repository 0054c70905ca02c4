"""Promise: the lab's asynchronous copies are seen once they are waited for, and its mma.sync is PTX's."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from flash_ext.lab import simt  # noqa: E402
from flash_ext.lab.lessons import LabError, Lesson, lesson  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402
from flash_ext.lab.source import SourceError, parse  # noqa: E402

NAN = float("nan")
TILE = "__shared__ float4 tiles[8]; float* tile = reinterpret_cast<float*>(tiles);"


def executed(body: str, x: np.ndarray, threads: int = 1, size: int = 4) -> np.ndarray:
    """What a block of one kernel writes to out."""
    text = f'#include "ptx.cuh"\nextern "C" __global__ void kernel(const float* x, float* out) {{ {TILE} {body} }}'
    out = np.zeros(size, np.float32)
    tensors = {"x": x.astype(np.float32), "out": out}
    simt.run(parse(text), (1, 1), (threads, 1), tensors, (), lambda access: None, np.arange(1))
    return out


@pytest.mark.parametrize(
    "between, expected",
    [
        ("cp_async_commit(); cp_async_wait(0);", [1, 2]),
        ("cp_async_commit(); cp_async_wait(1);", [1, NAN]),  # the last group may still be under way
        ("cp_async_wait(0);", [1, NAN]),  # what is in no group is not waited for
        ("cp_async_commit();", [NAN, NAN]),
    ],
)
def test_a_copy_is_seen_when_it_was_waited_for(between: str, expected: list[float]) -> None:
    copies = "tile[0] = 7.f; cp_async_4(tile, x, 4); cp_async_commit(); cp_async_4(tile + 1, x + 1, 4);"
    found = executed(f"{copies} {between} out[0] = tile[0]; out[1] = tile[1];", np.array([1, 2]))
    assert np.array_equal(found[:2], np.array(expected), equal_nan=True)


def test_a_thread_waits_for_its_own_copies() -> None:
    body = "const int i = threadIdx.x; cp_async_4(tile + i, x + i, 4); cp_async_commit();"
    body += "if (i < 2) cp_async_wait(0); __syncthreads(); out[i] = tile[3 - i];"
    assert np.array_equal(executed(body, np.arange(4), threads=4), [NAN, NAN, 1, 0], equal_nan=True)


@pytest.mark.parametrize("size", [0, 4, 12, 16])
def test_what_is_not_read_is_zero(size: int) -> None:
    """And need not be there: x ends where the copy does."""
    body = f"cp_async_16(tile, x, {size}); cp_async_commit(); cp_async_wait(0);"
    body += "for (int k = 0; k < 4; ++k) out[k] = tile[k];"
    x = 1 + np.arange(size // 4)
    assert executed(body, x).tolist() == [*x, *[0] * (4 - len(x))]


@pytest.mark.parametrize("name, wait", [("load_tile", "cp_async_wait(0);"), ("matmul", "cp_async_wait(1);")])
def test_a_wait_that_is_missing_in_a_lesson_is_found(name: str, wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lesson(name)
    text = one.text(one.variant("cp_async"))
    assert text.count(wait) == 1
    monkeypatch.setattr(Lesson, "text", lambda lesson, variant: text.replace(wait, ""))
    size = (8,) * len(one.sizes)
    inputs = one.inputs(size)
    with pytest.raises(LabError, match=f"{name} cp_async differs from torch"):
        count(one, one.variant("cp_async"), size, inputs, one.variants[0].reference(*inputs).contiguous())


def test_tf32_is_the_nearest_number_of_eleven_bits() -> None:
    step = 2.0**-10
    given = np.array([1, 1 + step, 1 + 0.49 * step, 1 + 0.5 * step, -1 - 1.5 * step, 3.0e38])
    found = executed("for (int k = 0; k < 6; ++k) out[k] = to_tf32(x[k]);", given, size=6)
    assert found[:5].tolist() == [1, 1 + step, 1, 1 + step, -1 - 2 * step]
    assert abs(found[5] / 3.0e38 - 1) < step


PRODUCT = """
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const float* y = x + 16 * 8;
  float a[4], b[2], c[4];
  a[0] = x[8 * g + t];
  a[1] = x[8 * (g + 8) + t];
  a[2] = x[8 * g + t + 4];
  a[3] = x[8 * (g + 8) + t + 4];
  b[0] = y[8 * t + g];
  b[1] = y[8 * (t + 4) + g];
  for (int i = 0; i < 4; ++i) c[i] = 100.f;
  mma_tf32(c, a, b);
  for (int i = 0; i < 4; ++i) out[8 * (g + 8 * (i / 2)) + 2 * t + i % 2] = c[i];
"""


def test_a_product_of_a_warp() -> None:
    """a is 16 x 8, b 8 x 8: whole numbers, so the sums are exact; a bit that tf32 has not is not seen."""
    numbers = np.random.default_rng(0).integers(-9, 10, 16 * 8 + 8 * 8).astype(np.float32)
    a, b = numbers[:128].reshape(16, 8), numbers[128:].reshape(8, 8)
    finer = np.where(numbers == 1, 1 + 2.0**-12, numbers)
    for x in (numbers, finer):
        assert np.array_equal(executed(PRODUCT, x, 32, 128).reshape(16, 8), 100 + a @ b)


@pytest.mark.parametrize(
    "body, message",
    [
        ("cp_async_16(tile + 1, x, 16);", "float4 at an address that is not a multiple of 16 bytes"),
        ("cp_async_16(tile, x + 2, 16);", "float4 at an address that is not a multiple of 16 bytes"),
        ("cp_async_16(tile, x + 4, 16);", "an access outside x"),
        ("cp_async_4(tile, tile, 4);", "cp_async copies from global to shared memory only"),
        ("cp_async_wait(2);", r"cp_async_wait\(2\): 0 or 1 group may be under way"),
        ("cp_async_4(tile, x, 8);", "cp_async reads 0 to 4 bytes"),
        ("float c[4] = {}; mma_tf32(c, c, c);", "the lab multiplies whole warps only"),
        ("float c[4] = {1.f};", "'}' is expected"),
    ],
)
def test_what_is_wrong_is_named(body: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        executed(body, np.arange(4))
