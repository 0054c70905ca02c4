"""Runs a kernel on the CPU, all threads of many blocks at once, and tells every access to memory.

A value is one number for all threads or an array with one row a thread; what a branch leaves out is masked, as a warp
does it. Blocks go statement by statement together, so `__syncthreads()` has nothing to do, and a missing one is not
seen. An access outside a tensor, or not at a multiple of its width, is a SourceError, as are threads that part before
`__syncthreads()`. Shared memory begins as NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flash_ext.lab import ptx, warp
from flash_ext.lab.memory import WARP, WIDTHS, WORD, Access, Memory, Pointer, Value
from flash_ext.lab.source import Function, Node, Source, SourceError, Type

THREADS_AT_ONCE = 1 << 17
ROUNDS = 1 << 16  # of a loop
COMPARE = {"<": np.less, ">": np.greater, "<=": np.less_equal, ">=": np.greater_equal, "==": np.equal}
COMPARE["!="] = np.not_equal
COMPUTE = {"+": np.add, "-": np.subtract, "*": np.multiply, "&": np.bitwise_and, "|": np.bitwise_or}
COMPUTE |= {"^": np.bitwise_xor, "<<": np.left_shift, ">>": np.right_shift}


@dataclass
class Work:
    """Additions of floats, by all threads; barriers, by all blocks."""

    additions: int = 0
    barriers: int = 0


@dataclass
class Frame:
    """A call: its variables, innermost scope last, and who has returned what."""

    returned: np.ndarray
    scopes: list[dict[str, Value]] = field(default_factory=lambda: [{}])
    value: Value = 0


def run(
    source: Source,
    grid: Sequence[int],
    block: Sequence[int],
    tensors: dict[str, np.ndarray],
    numbers: Sequence[int],
    record: Callable[[Access], None],
    blocks: np.ndarray,
) -> Work:
    """The kernel with flat arrays and whole numbers as arguments; ``blocks``: which of the grid's, in one row."""
    padded = -(-block[0] * block[1] // WARP) * WARP
    step, work = max(1, THREADS_AT_ONCE // padded), Work()
    for first in range(0, len(blocks), step):
        Threads(source, grid, block, record, blocks[first : first + step], work).start(tensors, numbers)
    return work


def is_float(value: Value) -> bool:
    return np.asarray(value).dtype.kind == "f"


def quotient(a: Value, b: Value) -> Value:
    """Of whole numbers, towards zero, as C++ has it; of 0 where a lane without work divides by it."""
    with np.errstate(divide="ignore"):
        return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


class Threads:
    """The threads of some blocks."""

    def __init__(
        self,
        source: Source,
        grid: Sequence[int],
        block: Sequence[int],
        record: Callable[[Access], None],
        blocks: np.ndarray,
        work: Work,
    ) -> None:
        self.source, self.record, self.work = source, record, work
        count = block[0] * block[1]
        padded = -(-count // WARP) * WARP
        self.blocks = np.repeat(np.arange(len(blocks)), padded)  # which of these each thread is in
        self.block_ids, self.thread_ids = blocks[self.blocks], np.tile(np.arange(padded), len(blocks))
        self.started = self.thread_ids < count
        self.mask = self.started
        place, own = self.block_ids, self.thread_ids
        self.builtin = {
            "threadIdx": {"x": own % block[0], "y": own // block[0]},
            "blockIdx": {"x": place % grid[0], "y": place // grid[0]},
            "blockDim": {"x": block[0], "y": block[1]},
            "gridDim": {"x": grid[0], "y": grid[1]},
        }
        self.frames: list[Frame] = []
        self.copies = ptx.Copies(np.zeros(len(self.started), np.int64))
        self.constants: dict[str, Value] = {}

    def start(self, tensors: dict[str, np.ndarray], numbers: Sequence[int]) -> None:
        """Runs the kernel."""
        self.frames.append(self.frame())
        for declaration in self.source.constants:
            self.statement(declaration)
        self.constants = self.frames.pop().scopes[0]
        names = [name for name, _ in self.source.kernel.parameters]
        kinds = [kind for _, kind in self.source.kernel.parameters]
        arguments: list[Value] = []
        for name, kind, array in zip(names, kinds, tensors.values(), strict=False):
            width = WIDTHS[kind.name]
            arguments.append(Pointer(Memory(name, "global", array, array.size), 0, kind.name, (width,)))
        with np.errstate(all="ignore"):  # threads that a branch left out have numbers, too
            self.call(self.source.kernel, [*arguments, *numbers])

    def frame(self) -> Frame:
        return Frame(np.zeros(len(self.started), bool))

    def call(self, function: Function, arguments: Sequence[Value]) -> Value:
        frame, mask = self.frame(), self.mask
        for (name, kind), value in zip(function.parameters, arguments, strict=True):
            frame.scopes[0][name] = value if isinstance(value, Pointer) else self.convert(value, kind)
        self.frames.append(frame)
        self.statement(function.body)
        self.frames.pop()
        self.mask = mask
        return frame.value

    # ---- statements ----

    def statement(self, node: Node) -> None:
        getattr(self, f"do_{node.kind}")(node, *node.parts)

    def do_block(self, node: Node, *statements: Node) -> None:
        scopes = self.frames[-1].scopes
        scopes.append({})
        for statement in statements:
            if not self.mask.any():
                break
            self.statement(statement)
        scopes.pop()

    def do_evaluate(self, node: Node, value: Node) -> None:
        self.value(value)

    def do_declare(
        self, node: Node, shared: bool, kind: Type, items: tuple[tuple[str, tuple, Node | None], ...]
    ) -> None:
        for name, sizes, value in items:
            if shared and not sizes:
                raise SourceError(f"line {node.line}: what is shared is an array in the lab, {name} is none")
            if sizes:
                new = self.array(name, kind, [int(self.value(size)) for size in sizes], shared)
                if value:  # {}
                    new.memory.data[:] = 0
            else:
                new = self.value(value) if value else np.zeros(self.shape(kind), np.float32)
                new = new if isinstance(new, Pointer) else self.convert(new, kind)
            self.frames[-1].scopes[-1][name] = new

    def shape(self, kind: Type) -> tuple[int, ...]:
        parts = WIDTHS.get(kind.name, WORD) // WORD
        return (len(self.mask), parts) if parts > 1 else (len(self.mask),)

    def array(self, name: str, kind: Type, sizes: list[int], shared: bool) -> Pointer:
        width = WIDTHS[kind.name]
        strides = tuple(width * int(np.prod(sizes[index + 1 :])) for index in range(len(sizes)))
        words = int(np.prod(sizes)) * width // WORD
        owner = self.blocks if shared else np.arange(len(self.mask))
        filled = np.full((owner[-1] + 1) * words, np.nan, np.float32)
        data = filled if kind.name.startswith("float") else np.zeros(filled.size, np.int32)
        return Pointer(Memory(name, "shared" if shared else "local", data, words, owner * words), 0, kind.name, strides)

    def do_if(self, node: Node, condition: Node, then: Node, other: Node | None) -> None:
        holds, mask = np.asarray(self.value(condition)) != 0, self.mask
        for branch, taken in ((then, mask & holds), (other, mask & ~holds)):
            if branch and taken.any():
                self.mask = taken
                self.statement(branch)
        self.mask = mask & ~self.frames[-1].returned

    def do_for(self, node: Node, first: Node | None, condition: Node, step: Node | None, body: Node) -> None:
        """``while`` has neither first nor step."""
        scopes, mask = self.frames[-1].scopes, self.mask
        scopes.append({})
        if first:
            self.statement(first)
        for _ in range(ROUNDS):
            self.mask = self.mask & (np.asarray(self.value(condition)) != 0)
            if not self.mask.any():
                break
            self.statement(body)
            if not self.mask.any():
                break
            if step:
                self.value(step)
        else:
            raise SourceError(f"line {node.line}: this loop has not ended after {ROUNDS:,} rounds")
        scopes.pop()
        self.mask = mask & ~self.frames[-1].returned

    def do_return(self, node: Node, value: Node | None) -> None:
        frame = self.frames[-1]
        if value:
            frame.value = self.merge(self.value(value), frame.value)
        frame.returned = frame.returned | self.mask
        self.mask = np.zeros_like(self.mask)

    # ---- values ----

    def convert(self, value: Value, kind: Type) -> Value:
        """To a variable's type."""
        if isinstance(value, Pointer) != kind.pointer:
            raise SourceError(f"a {kind.name}{' *' if kind.pointer else ''} is given what is {type(value).__name__}")
        if kind.name.startswith("float"):
            return np.asarray(value, np.float32)
        return np.asarray(value) != 0 if kind.name == "bool" else np.asarray(np.trunc(value), np.int64)

    def merge(self, new: Value, old: Value) -> Value:
        """The new value for the threads that run, the old one for the rest."""
        if isinstance(new, Pointer) or self.mask.all():
            return new
        mask = self.mask[:, None] if np.ndim(new) == 2 else self.mask
        return np.where(mask, new, old)

    def value(self, node: Node) -> Value:
        return getattr(self, f"of_{node.kind}")(node, *node.parts)

    def under(self, mask: np.ndarray, node: Node) -> Value:
        """Where ``mask`` holds; 0, without a look at memory, where it holds nowhere."""
        before, self.mask = self.mask, mask
        value = self.value(node) if mask.any() else 0
        self.mask = before
        return value

    def of_number(self, node: Node, number: float) -> Value:
        return np.int64(number) if isinstance(number, int) else np.float32(number)

    def of_name(self, node: Node, name: str) -> Value:
        for scope in (*reversed(self.frames[-1].scopes), self.constants, self.builtin):
            if name in scope:
                return scope[name]
        raise SourceError(f"line {node.line}: {name} is not declared")

    def of_unary(self, node: Node, operator: str, operand: Node) -> Value:
        if operator == "&":
            memory, offset, kind = self.place(operand)
            return Pointer(memory, offset, kind, (WIDTHS[kind],))
        if operator == "*":
            return self.load(node, *self.place(node))
        value = self.value(operand)
        return {"-": np.negative, "!": np.logical_not, "~": np.invert}[operator](value)

    def of_binary(self, node: Node, operator: str, left: Node, right: Node) -> Value:
        a = self.value(left)
        if operator == "&&":
            return np.logical_and(a, self.under(self.mask & (np.asarray(a) != 0), right))
        if operator == "||":
            return np.logical_or(a, self.under(self.mask & (np.asarray(a) == 0), right))
        return self.compute(operator, a, self.value(right))

    def compute(self, operator: str, a: Value, b: Value) -> Value:
        if isinstance(a, Pointer):
            return a.plus(b if operator == "+" else -b)
        if operator in COMPARE:
            return COMPARE[operator](a, b)
        if is_float(a) or is_float(b):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            self.work.additions += int(self.mask.sum()) * (operator in "+-")
            return a / b if operator == "/" else COMPUTE[operator](a, b)
        if operator == "/":
            return quotient(a, b)
        return a - quotient(a, b) * b if operator == "%" else COMPUTE[operator](a, b)

    def of_choose(self, node: Node, condition: Node, then: Node, other: Node) -> Value:
        holds = np.asarray(self.value(condition)) != 0
        a, b = self.under(self.mask & holds, then), self.under(self.mask & ~holds, other)
        vectors = max(np.ndim(a), np.ndim(b)) == 2
        return np.where(holds[:, None] if vectors and holds.ndim else holds, a, b)

    def of_cast(self, node: Node, target: Type, operand: Node) -> Value:
        value = self.value(operand)
        if target.pointer:
            return Pointer(value.memory, value.offset, target.name, (WIDTHS[target.name],))
        return self.convert(value, target)

    def of_call(self, node: Node, name: str, arguments: tuple[Node, ...]) -> Value:
        values = [self.value(argument) for argument in arguments]
        if name in self.source.functions:
            return self.call(self.source.functions[name], values)
        if name == "__syncthreads":
            if not np.array_equal(self.mask, self.started):
                raise SourceError(f"line {node.line}: not every thread of a block comes to this __syncthreads()")
            self.work.barriers += int(self.blocks[-1]) + 1
            return 0
        if name in ("make_float2", "make_float4"):
            rows = [np.broadcast_to(np.asarray(value, np.float32), len(self.mask)) for value in values]
            return np.stack(rows, axis=1)
        if function := warp.FUNCTIONS.get(name) or ptx.FUNCTIONS.get(name):
            return function(self, node, *values)
        raise SourceError(f"line {node.line}: the lab has no function {name}")

    def of_assign(self, node: Node, operator: str, target: Node, operand: Node) -> Value:
        value = self.value(operand)
        if operator != "=":
            value = self.compute(operator[:-1], self.value(target), value)
        if target.kind == "name":
            self.set(target.parts[0], value)
        elif target.kind == "member" and target.parts[0].kind == "name":
            vector = np.array(self.value(target.parts[0]))
            vector[:, "xyzw".index(target.parts[1])] = value
            self.set(target.parts[0].parts[0], vector)
        else:
            self.store(target, *self.place(target), value)
        return value

    def set(self, name: str, value: Value) -> None:
        """A variable of the threads that run."""
        scope = next((scope for scope in reversed(self.frames[-1].scopes) if name in scope), None)
        if scope is None:
            raise SourceError(f"{name} cannot be assigned")
        old = scope[name]
        scope[name] = self.merge(value if isinstance(value, Pointer) else np.asarray(value, old.dtype), old)

    # ---- memory ----

    def place(self, node: Node) -> tuple[Memory, Value, str]:
        """Where an element lies: memory, bytes, its type."""
        if node.kind == "member":
            memory, offset, _ = self.place(node.parts[0])
            return memory, offset + WORD * "xyzw".index(node.parts[1]), "float"
        starred = node.kind == "unary" and node.parts[0] == "*"
        pointer = self.value(node.parts[1]) if starred else self.element(node)
        return pointer.memory, pointer.offset, pointer.type

    def element(self, node: Node) -> Pointer:
        base = self.value(node.parts[0]) if node.kind == "index" else None
        if not isinstance(base, Pointer):
            raise SourceError(f"line {node.line}: this is not an element of memory")
        return replace(base.plus(self.value(node.parts[1])), strides=base.strides[1:])

    def of_index(self, node: Node, array: Node, index: Node) -> Value:
        pointer = self.element(node)
        return pointer if pointer.strides else self.load(node, pointer.memory, pointer.offset, pointer.type)

    def of_member(self, node: Node, of: Node, name: str) -> Value:
        if of.kind == "index":
            return self.load(node, *self.place(node))
        value = self.value(of)
        return value[name] if isinstance(value, dict) else value[:, "xyzw".index(name)]

    def words(
        self, node: Node, memory: Memory, offset: Value, kind: str, store: bool, wanted: np.ndarray | None = None
    ) -> np.ndarray:
        """Which elements of the memory's data an access takes, after it was told; ``wanted``: bytes, if not all."""
        width = WIDTHS[kind]
        addresses = np.broadcast_to(np.asarray(offset, np.int64), len(self.mask))
        active = addresses[self.mask]
        if (active % width).any():
            raise SourceError(f"line {node.line}: {kind} at an address that is not a multiple of {width} bytes")
        end = active + (width if wanted is None else wanted[self.mask])
        if (active < 0).any() or (end > memory.size * WORD).any():
            raise SourceError(f"line {node.line}: an access outside {memory.name}")
        if memory.space != "local":
            place = self.thread_ids, self.block_ids
            self.record(Access(node, memory, store, width, addresses, self.mask, *place, wanted))
        first = np.where(self.mask, memory.base + addresses // WORD, 0)
        return first if width == WORD else first[:, None] + np.arange(width // WORD)

    def load(self, node: Node, memory: Memory, offset: Value, kind: str) -> Value:
        value = memory.data[self.words(node, memory, offset, kind, store=False)]
        return value if value.dtype.kind == "f" else value.astype(np.int64)

    def store(self, node: Node, memory: Memory, offset: Value, kind: str, value: Value) -> None:
        words = self.words(node, memory, offset, kind, store=True)
        memory.data[words[self.mask]] = np.broadcast_to(value, words.shape)[self.mask]
