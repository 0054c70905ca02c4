"""Promise: NVRTC compiles every kernel of the lab for 8.0 and 9.0; on a GPU each gives what torch gives."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numpy")
pytest.importorskip("cuda.core", exc_type=ImportError, reason="needs cuda-core and what it binds")

from lab_sizes import ON_A_GPU, SIZES

from flash_ext.lab import __main__ as lab
from flash_ext.lab import cuda
from flash_ext.lab.counts import LIMITS, occupancy
from flash_ext.lab.lessons import LESSON_NAMES, LabError, Lesson, Variant, lesson, lessons
from flash_ext.lab.measure import count, measure

CASES = [(one, variant) for one in lessons() for variant in one.variants]
every_variant = pytest.mark.parametrize("one, variant", CASES, ids=lambda case: case.name)
for_cuda = pytest.mark.skipif(not torch.version.cuda, reason="needs the NVRTC of a torch for CUDA")


@for_cuda
@every_variant
def test_every_kernel_compiles(one: Lesson, variant: Variant) -> None:
    """And has the shared memory that was counted."""
    size = one.checked(SIZES[one.name][0].split(), gpu=False)
    inputs = one.inputs(size)
    counted = count(one, variant, size, inputs, variant.reference(*inputs).contiguous())
    for cc in LIMITS:
        compiled = cuda.compiled(one, variant, cc.replace(".", ""))
        registers, bytes_shared = compiled.registers, compiled.shared
        bytes_counted = sum(counted.counts.shared.values())
        assert 0 < registers < 240  # beyond are stores to memory
        assert bytes_shared == bytes_counted


@for_cuda
def test_what_does_not_compile_is_said() -> None:
    assert cuda.missing() == ""
    with pytest.raises(LabError, match=r"NVRTC cannot compile the kernel: (?s:.*)identifier \"y\" is undefined"):
        cuda.build('extern "C" __global__ void kernel(int* x) { *x = y; }', (), "80")


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(LabError, match="This torch is a build without CUDA"):
        cuda.cuda_core()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "one, variant, size",
    [(one, v, size) for one, v in CASES for size in (*SIZES[one.name], *ON_A_GPU.get(one.name, ()))],
    ids=lambda case: case if isinstance(case, str) else case.name,
)
def test_every_kernel_is_right(one: Lesson, variant: Variant, size: str) -> None:
    numbers = one.checked(size.split(), gpu=True)
    inputs = one.inputs(numbers)
    expected = variant.reference(*inputs).contiguous().cuda()
    assert measure(one, variant, numbers, tuple(x.cuda() for x in inputs), expected) > 0


@pytest.mark.gpu
def test_a_kernel_runs_on_the_stream_of_torch() -> None:
    """It waits for what was queued there before it."""
    one = lesson("add")
    x, y = (tensor.cuda() for tensor in one.inputs((64, 64)))
    z = torch.full_like(x, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        call = cuda.kernel_call(one, one.variants[0], one.variants[0].launch((64, 64)), (x, y, z))
        torch.cuda._sleep(100_000_000)
        x.mul_(2)
        call()
        torch.cuda.current_stream().synchronize()
    assert torch.equal(z, x + y)


@pytest.mark.gpu
@every_variant
def test_occupancy_is_what_the_driver_says(one: Lesson, variant: Variant) -> None:
    major, minor = torch.cuda.get_device_capability()
    size = one.checked(SIZES[one.name][1].split(), gpu=True)
    launch, inputs = variant.launch(size), one.inputs(size)
    output = variant.reference(*inputs).contiguous().cuda()
    cuda.kernel_call(one, variant, launch, (*(x.cuda() for x in inputs), output))
    compiled = cuda.compiled(one, variant, f"{major}{minor}")
    kernel = compiled.code.get_kernel(one.source(variant).kernel.name)
    threads = launch.block[0] * launch.block[1]
    blocks = kernel.occupancy.max_active_blocks_per_multiprocessor(threads, 0)
    limits = LIMITS.get(f"{major}.{minor}")
    assert (
        limits is None or occupancy(limits, threads, compiled.shared, compiled.registers)[0] == blocks * threads / 2048
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", LESSON_NAMES)
def test_run_tells_times(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lab.main(["run", name, "--size", *SIZES[name][-1].split()])
    told = capsys.readouterr().out
    for call in lesson(name).beside:
        assert call.name in told or f"{call.name} is left out: " in told
    if lesson(name).flops:
        assert all(f"{variant.peer.name} does" in told for variant in lesson(name).variants)
        assert "TFLOP/s" in told and "GB/s" not in told
    else:
        assert "A copy by torch reads and writes" in told and "GB/s" in told
