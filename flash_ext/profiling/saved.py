"""``saved_tensors``: what autograd keeps for backward, and who saved it.

PyTorch's saved-tensor hooks see every tensor that is packed, also by operators of libraries (flash_ext's among them).
They do not say which node packs it: that is asked afterwards, by walking the graph of the results and unpacking each
``_saved_...`` attribute. Nodes of C++ libraries show none of theirs: what they saved is told by the line that ran.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

KINDS = ("parameter", "input", "activation")


@dataclass(frozen=True)
class SavedTensor:
    """One tensor kept for backward."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str  # "parameter", "input" (there before the call: arguments, buffers) or "activation" (made by it)
    bytes: int  # of its elements
    held: int  # of its storage; 0 where an earlier row has the same storage
    node: str  # the autograd node and its attribute, e.g. "MmBackward0.self"; "" where the node does not show it
    where: str  # the innermost line outside torch that was running, "file.py:12 function"


class SavedTensors(Sequence[SavedTensor]):
    """The rows in the order of saving. ``print`` it for a table, largest first."""

    def __init__(self, rows: list[SavedTensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]

    def total(self, kind: str | None = None) -> int:
        """Bytes kept alive, each storage counted once: of one kind, or of all."""
        return sum(row.held for row in self._rows if kind in (None, row.kind))

    def __str__(self) -> str:
        groups: dict[tuple, list[SavedTensor]] = {}
        for row in self._rows:
            groups.setdefault((row.kind, row.node, row.where, row.shape, row.dtype), []).append(row)
        table = [("count", "shape", "dtype", "kept alive", "kind", "saved by", "at")]
        for rows in sorted(groups.values(), key=lambda rows: -sum(row.held for row in rows)):
            first = rows[0]
            held = sum(row.held for row in rows)
            dtype = str(first.dtype).removeprefix("torch.")
            kept = size_text(held) if held else "(shared)"
            table.append((str(len(rows)), str(first.shape), dtype, kept, first.kind, first.node or "-", first.where))
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        totals = ", ".join(f"{size_text(self.total(kind))} of {kind}s" for kind in KINDS)
        return "\n".join([*lines, f"kept alive for backward, each storage once: {totals}"])


def saved_tensors(call: Callable[[], object]) -> SavedTensors:
    """Runs ``call()`` (a forward pass; its result is dropped) and lists what autograd keeps for its backward.

    Works on every device. Tensors that existed before the call are parameters or inputs; what the call made itself is
    an activation, also a copy of a parameter (autocast's casts, for one).
    """
    before = _storages_of_parameters_and_others()
    packed: list[Tensor] = []
    wheres: list[str] = []
    nodes: dict[int, str] = {}
    opaque: set[str] = set()
    asking: list[str] = []  # the attribute that is being unpacked, if any

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach())
        wheres.append(_innermost_line())
        return len(packed) - 1

    def unpack(index: int) -> Tensor:
        if asking:
            nodes.setdefault(index, asking[-1])
        return packed[index]

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = call()
        for name, read in _saved_attributes(result, opaque):
            asking.append(name)
            read()
            asking.pop()

    rest = next(iter(opaque)) if len(opaque) == 1 else ""  # with one such node, what nobody shows is its own
    rows, seen = [], set()
    for index, tensor in enumerate(packed):
        storage = tensor.untyped_storage()
        held = 0 if storage._cdata in seen else storage.nbytes()
        seen.add(storage._cdata)
        kind = before.get(storage._cdata, "activation")
        size = tensor.numel() * tensor.element_size()
        node = nodes.get(index, rest)
        rows.append(SavedTensor(tuple(tensor.shape), tensor.dtype, kind, size, held, node, wheres[index]))
    return SavedTensors(rows)


def _storages_of_parameters_and_others() -> dict[int, str]:
    """The storage of every tensor that Python knows, as "parameter" or "input"."""
    kinds: dict[int, str] = {}
    for thing in gc.get_objects():
        # NOTE: the type is asked, not isinstance: proxies answer that by running code.
        if not issubclass(type(thing), Tensor) or thing.layout != torch.strided:
            continue
        try:
            storage = thing.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # a wrapper without storage
            continue
        if isinstance(thing, nn.Parameter):
            kinds[storage] = "parameter"
        else:
            kinds.setdefault(storage, "input")
    return kinds


def _saved_attributes(result: object, opaque: set[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """("MmBackward0.self", what unpacks it) of every node behind the tensors in ``result``.

    The names of nodes that show nothing to Python are added to ``opaque``.
    """
    todo = [leaf.grad_fn for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if type(node).__name__ == "CppFunction":
            opaque.add(node.name())
        for attribute in dir(node):
            if attribute.startswith("_saved_"):
                name = f"{node.name()}.{attribute.removeprefix('_saved_')}"
                yield name, lambda node=node, attribute=attribute: getattr(node, attribute)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield f"{node.name()}.saved_tensors", lambda node=node: node.saved_tensors
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


_TORCH = str(Path(torch.__file__).parent)


def _innermost_line() -> str:
    """The line of the program that is running, below torch's own and this file's."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_TORCH) and code.co_filename != __file__:
            return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "-"


def size_text(count: int) -> str:
    """Bytes for people: 1.5 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
