"""Promise: the lab executes its part of CUDA C++ as C++ says, and names what a kernel does wrong."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from flash_ext.lab import simt  # noqa: E402
from flash_ext.lab.source import SourceError, parse  # noqa: E402

BEFORE = 'extern "C" __global__ void kernel(float* out, int n) { const int i = threadIdx.x;'


def executed(body: str, threads: int = 32, size: int = 32, before: str = "", n: int = 0) -> list[float]:
    """What a block of one kernel writes."""
    out = np.zeros(size, np.float32)
    source = parse(f"{before}{BEFORE} {body} }}")
    simt.run(source, (1, 1), (threads, 1), {"out": out}, (n,), lambda access: None, np.arange(1))
    return out.tolist()


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("7 / 2", 3),
        ("-7 / 2", -3),
        ("-7 % 3", -1),
        ("7.f / 2", 3.5),
        ("1 + 2 * 3 << 1 & 0xf", 14),
        ("6 ^ 3 | 8", 13),
        ("!(2 > 1) || 3 != 4", 1),
        ("2 < 1 ? 5 : 1 ? 6 : 7", 6),
        ("~0 + 2", 1),
        ("static_cast<int>(2.75f) + min(4, max(1, 2))", 4),
        ("make_float4(1.f, 2.f, 3.f, 4.f).z", 3),
    ],
)
def test_expressions(expression: str, expected: float) -> None:
    assert executed(f"if (i == 0) out[0] = {expression};")[0] == expected


def test_branches_loops_and_returns() -> None:
    function = (
        "__device__ int sum(int i) { int s = 0; if (i > 5) return -1; for (int k = 0; k <= i; ++k) s += k; return s; }"
    )
    expected = [sum(range(i + 1)) if i <= 5 else -1 for i in range(8)]
    assert executed("out[i] = sum(i);", 8, 8, function) == expected
    assert executed("if (i % 2) return; else out[i] = 1.f; out[i] += 1.f;", 4, 4) == [2, 0, 2, 0]
    # a thread that does not take part touches nothing
    assert executed("if (i < 2 && out[i] == 0) out[i] = i < 1 ? 3.f : out[i] + 4.f;", 32, 2) == [3, 4]


def test_memory() -> None:
    shared = (
        "__shared__ float tile[2][4]; tile[i / 4][i % 4] = i; __syncthreads(); out[i] = tile[1 - i / 4][3 - i % 4];"
    )
    assert executed(shared, 8, 8) == [7, 6, 5, 4, 3, 2, 1, 0]
    local = "float own[2]; own[0] = i; own[1] = own[0] + 1; out[i] = own[1];"
    assert executed(local, 4, 4) == [1, 2, 3, 4]
    pairs = "float2 v = make_float2(1.f, 2.f); v.y = 5.f; *reinterpret_cast<float2*>(&out[2 * i]) = v; out[0] += n;"
    assert executed(pairs, 1, 2, n=10) == [11, 5]


def test_a_shuffle() -> None:
    expected = [float(i + 3 if i % 32 < 29 else i) for i in range(64)]
    assert executed("out[i] = __shfl_down_sync(0xffffffff, i, 3);", 64, 64) == expected


def test_shuffles() -> None:
    """64 threads; a thread keeps its own value, where its warp has no such lane."""
    lane = np.arange(64) % 32
    first = np.arange(64) // 32 * 32
    for name, number, expected in (
        ("up", 3, np.where(lane >= 3, lane - 3, lane)),
        ("xor", 5, lane ^ 5),
    ):
        got = executed(f"out[i] = __shfl_{name}_sync(0xffffffff, i, {number});", 64, 64)
        assert got == (first + expected).tolist()
    assert executed("out[i] = __shfl_sync(0xffffffff, i, 7);", 64, 64) == (first + 7).tolist()
    assert executed("out[i] = __shfl_sync(0xffffffff, i, i % 2);", 64, 64) == (first + lane % 2).tolist()


def test_votes_of_a_warp() -> None:
    assert executed("out[i] = __ballot_sync(0xffffffff, i == 3 || i == 33);", 64, 64) == [8.0] * 32 + [2.0] * 32
    assert executed("out[i] = __any_sync(0xffffffff, i == 40);", 64, 64) == [0.0] * 32 + [1.0] * 32
    expected = [0, 1, 2, 1, 3, 32, 32]
    assert executed("out[i] = __ffs(i < 5 ? i : 1 << 31);", 7, 7) == expected


def test_an_atomic_addition() -> None:
    """Threads take numbers one after the other, those of all blocks together; others take none."""
    source = parse(
        "__global__ void kernel(int* drawn, float* out) "
        "{ const int i = 4 * blockIdx.x + threadIdx.x; if (i % 4 != 1) out[i] = atomicAdd(drawn, 2); }"
    )
    drawn, out = np.array([5], np.int32), np.zeros(8, np.float32)
    told: list[simt.Access] = []
    simt.run(source, (2, 1), (4, 1), {"drawn": drawn, "out": out}, (), told.append, np.arange(2))
    assert out.tolist() == [5, 0, 7, 9, 11, 0, 13, 15] and drawn.tolist() == [17]
    assert [access.memory.name for access in told] == ["drawn", "out"] and told[0].store


def test_a_wait_ends_as_earlier_blocks_tell() -> None:
    """Blocks go in step: what a statement before has stored, all see."""
    source = parse(
        "__global__ void kernel(volatile int* flag, float* out) { const int i = blockIdx.x; int seen = 0; "
        "flag[i] = i + 1; __threadfence(); while (seen == 0) seen = flag[i > 0 ? i - 1 : 0]; out[i] = seen; }"
    )
    flag, out = np.zeros(3, np.int32), np.zeros(3, np.float32)
    simt.run(source, (3, 1), (1, 1), {"flag": flag, "out": out}, (), lambda access: None, np.arange(3))
    assert out.tolist() == [1, 1, 2]


def test_additions_and_barriers() -> None:
    """Of floats alone, by the threads that run; a barrier for each block."""
    source = parse(
        "__global__ void kernel(float* out) { const int i = threadIdx.x + 1; "
        "if (i > 2) out[i - 1] += 1.f - out[0]; __syncthreads(); out[0] = 2.f * i; }"
    )
    work = simt.run(source, (2, 1), (8, 1), {"out": np.zeros(8, np.float32)}, (), lambda access: None, np.arange(2))
    assert (work.additions, work.barriers) == (2 * 2 * 6, 2)


@pytest.mark.parametrize(
    "body, message",
    [
        ("out[i + 1] = 0.f;", "line 1: an access outside out"),
        ("out[i - 1] = 0.f;", "line 1: an access outside out"),
        ("\n*reinterpret_cast<float2*>(out + 1) = make_float2(0.f, 0.f);", "line 2: float2 at an address that is not"),
        ("if (i < 3) __syncthreads();", "not every thread of a block comes to this"),
        ("out[i] = exp(1.f);", "the lab has no function exp"),
        ("out[j] = 1.f;", "j is not declared"),
        ("__shared__ int x; out[i] = x;", "line 1: what is shared is an array in the lab, x is none"),
        ("do out[i] = 1.f; while (i < 3);", "'out' is read, ';' is expected"),
        ("\nwhile (out[i] == 0.f) out[i] = 0.f;", "line 2: this loop has not ended after 1,000 rounds"),
        ("if (i < 9) out[i] = __ballot_sync(0xffffffff, 1);", "the lab shuffles whole warps only"),
        ("double x = 1;", "expected"),
        ("if (i < 9) out[i] = __shfl_down_sync(0xffffffff, 1.f, 1);", "the lab shuffles whole warps only"),
        ('out[i] = "a";', "a name is expected"),
        ("out[i] = 1.f @ 2;", "does not read '@ 2;"),
    ],
)
def test_what_is_wrong_is_named(body: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simt, "ROUNDS", 1000)
    with pytest.raises(SourceError, match=message):
        executed(body)


def test_shared_memory_begins_as_nan() -> None:
    assert np.isnan(executed("__shared__ float tile[32]; out[i] = tile[i];")).all()
