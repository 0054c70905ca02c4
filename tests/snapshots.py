"""A memory snapshot as PyTorch writes it (torch/cuda/memory.py documents the format), made without a GPU.

Training steps of a model of `blocks` blocks: parameters from before the recording, activations that live from a block's
forward to its backward, short-lived gradients, and the optimizer's state, which the first step allocates and keeps.
"""

from __future__ import annotations

from typing import Any

MIB = 2**20
MODEL, TRAIN = "examples/model.py", "examples/train.py"


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


_ALLOCATOR = frame("??", 0, "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::malloc(unsigned long)")
_MODULE = frame("site-packages/torch/nn/modules/module.py", 1786, "_call_impl")
_MAIN = frame(TRAIN, 40, "<module>")


def _forward(line: int, name: str) -> list[dict[str, Any]]:
    return [_ALLOCATOR, frame(MODEL, line, name), _MODULE, frame(TRAIN, 20, "step"), _MAIN]


def _backward(node: str) -> list[dict[str, Any]]:
    apply = frame("??", 0, f"torch::autograd::generated::{node}::apply(std::vector<at::Tensor>&&)")
    call = frame("site-packages/torch/_tensor.py", 630, "backward")
    return [_ALLOCATOR, apply, frame("Objects/call.c", 343, "_PyObject_Call"), call, frame(TRAIN, 22, "step"), _MAIN]


def snapshot(steps: int = 2, blocks: int = 4, small: int = 3, annotated: bool = True) -> dict[str, Any]:
    """`small` short-lived allocations an operator make the trace as long as wanted."""
    trace: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    clock, address = 1_000_000, 1 << 32
    alive: dict[int, int] = {}

    def alloc(size: int, frames: list[dict[str, Any]]) -> int:
        nonlocal clock, address
        clock, address = clock + 7, address + size
        alive[address] = size
        trace.append(
            {"action": "alloc", "addr": address, "size": size, "stream": 0, "time_us": clock, "frames": frames}
        )
        return address

    def free(at: int) -> None:
        nonlocal clock
        size = alive.pop(at)
        for action in ("free_requested", "free_completed"):
            clock += 1
            trace.append({"action": action, "addr": at, "size": size, "stream": 0, "time_us": clock, "frames": []})

    def mark(name: str, stage: str) -> None:
        nonlocal clock
        clock += 1
        if annotated:
            annotations.append({"device": 0, "time_us": clock, "name": name, "stage": stage})

    forward = {name: _forward(line, name) for name, line in (("attention", 57), ("softmax", 61), ("mlp", 80))}
    backward = {node: _backward(node) for node in ("MmBackward0", "SoftmaxBackward0")}
    update = [_ALLOCATOR, frame("site-packages/torch/optim/adamw.py", 200, "step"), frame(TRAIN, 24, "step"), _MAIN]
    trace.append({"action": "segment_alloc", "addr": 1 << 32, "size": 4096 * MIB, "stream": 0, "time_us": clock})
    for step in range(steps):
        mark(f"step {step}", "START")
        mark("forward", "START")
        saved = []
        for _ in range(blocks):
            mark("block", "START")
            saved.append([alloc(16 * MIB, forward["attention"]), alloc(64 * MIB, forward["softmax"])])
            for _ in range(small):
                free(alloc(MIB // 2, forward["mlp"]))
            saved[-1].append(alloc(32 * MIB, forward["mlp"]))
            mark("block", "END")
        mark("forward", "END")
        mark("backward", "START")
        gradients = []
        for block in reversed(saved):
            gradients.append(alloc(24 * MIB, backward["MmBackward0"]))
            scores = alloc(64 * MIB, backward["SoftmaxBackward0"])
            for at in reversed(block):
                free(at)
            free(scores)
        mark("backward", "END")
        mark("optimizer", "START")
        if step == 0:
            for _ in range(2 * blocks):
                alloc(24 * MIB, update)
        for at in gradients:
            free(at)
        mark("optimizer", "END")
        mark(f"step {step}", "END")

    parameters = {"size": 96 * MIB, "requested_size": 96 * MIB, "address": 1 << 31, "state": "active_allocated"}
    held = [
        {"size": size, "requested_size": size, "address": at, "state": "active_allocated", "frames": []}
        for at, size in alive.items()
    ]
    common = {"device": 0, "stream": 0, "segment_type": "large"}
    segments = [
        {**common, "address": 1 << 31, "total_size": 128 * MIB, "blocks": [{**parameters, "frames": []}]},
        {**common, "address": 1 << 32, "total_size": 4096 * MIB, "blocks": held},
    ]
    return {
        "segments": segments,
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": annotations,
    }
