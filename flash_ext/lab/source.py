"""A small part of CUDA C++, parsed: what a lesson's `.cu` file may be written in.

Functions, int, float, float2 and float4, pointers, `__shared__` and local arrays, if, for, while, return, and
expressions. `simt` runs the tree. What is not known here is a SourceError that names the line, so that a lesson keeps
to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*.*?\*/|\#pragma unroll[^\n]*|\#include \"ptx\.cuh\")|(?P<string>\"[^\"]*\")"
    r"|(?P<number>\d+\.\d*(?:e\d+)?f?|0x[0-9a-fA-F]+|\d+u?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator><<=|>>=|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|[-+*/%&|^<>=!~?:;,.(){}\[\]])",
    re.DOTALL,
)
SCALARS = ("void", "int", "unsigned", "bool", "float", "float2", "float4")
QUALIFIERS = ("const", "constexpr", "volatile", "static", "inline", "__restrict__", "__forceinline__")
LEVELS = ("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %")
PRECEDENCE = {operator: level for level, operators in enumerate(LEVELS) for operator in operators.split()}
ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")


class SourceError(Exception):
    """A `.cu` file has what the lab cannot read."""


@dataclass(frozen=True)
class Type:
    """Of a value, or of what a pointer points to."""

    name: str
    pointer: bool = False


@dataclass(frozen=True, eq=False)
class Node:
    """``kind`` says what ``parts`` are. Compared by identity: a node is a place in a file."""

    kind: str
    parts: tuple[Any, ...] = field(repr=False)
    line: int


@dataclass(frozen=True)
class Function:
    name: str
    returns: Type
    parameters: tuple[tuple[str, Type], ...]
    body: Node
    kernel: bool


@dataclass
class Source:
    """A parsed file: its functions, and its constants as declarations."""

    functions: dict[str, Function] = field(default_factory=dict)
    constants: list[Node] = field(default_factory=list)

    @property
    def kernel(self) -> Function:
        """The only one of the file."""
        (kernel,) = (function for function in self.functions.values() if function.kernel)
        return kernel


def parse(text: str, defines: Mapping[str, int] | None = None) -> Source:
    """A file's text; ``defines`` stand for -D of a compiler."""
    return Parser(text, defines or {}).file()


class Parser:
    """By recursive descent; expressions by precedence."""

    def __init__(self, text: str, defines: Mapping[str, int]) -> None:
        self.tokens: list[tuple[str, str, int]] = []  # kind, text, line
        at, line = 0, 1
        while at < len(text):
            match = TOKEN.match(text, at)
            if match is None:
                raise SourceError(f"line {line}: the lab does not read {text[at : at + 20].splitlines()[0]!r}")
            kind, word = str(match.lastgroup), match.group()
            if word in defines:
                kind, word = "number", str(defines[word])
            if kind != "space":
                self.tokens.append((kind, word, line))
            line += match.group().count("\n")
            at = match.end()
        self.tokens.append(("end", "the end of the file", line))
        self.at = 0

    # ---- tokens ----

    @property
    def word(self) -> str:
        return self.tokens[self.at][1]

    @property
    def line(self) -> int:
        return self.tokens[self.at][2]

    def fail(self, wanted: str) -> SourceError:
        return SourceError(f"line {self.line}: {self.word!r} is read, {wanted} is expected")

    def take(self, word: str) -> bool:
        """Steps over the word if it is the next one."""
        found = self.word == word and self.tokens[self.at][0] != "string"
        self.at += found
        return found

    def expect(self, word: str) -> None:
        if not self.take(word):
            raise self.fail(repr(word))

    def name(self) -> str:
        if self.tokens[self.at][0] != "name":
            raise self.fail("a name")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def at_type(self) -> bool:
        return self.word in (*SCALARS, *QUALIFIERS, "__shared__")

    def type(self) -> Type:
        while self.word in QUALIFIERS:
            self.at += 1
        name = self.name()
        if name not in SCALARS:
            self.at -= 1
            raise self.fail("a type of the lab")
        while self.word in QUALIFIERS:
            self.at += 1
        pointer = self.take("*")
        while self.word in QUALIFIERS:
            self.at += 1
        return Type(name, pointer)

    # ---- the file ----

    def file(self) -> Source:
        source = Source()
        while self.tokens[self.at][0] != "end":
            if self.word == "constexpr":
                source.constants.append(self.declaration())
                continue
            if self.take("extern"):
                self.at += 1  # "C"
            kernel = self.take("__global__")
            if not kernel:
                self.expect("__device__")
            function = self.function(kernel)
            source.functions[function.name] = function
        return source

    def function(self, kernel: bool) -> Function:
        returns, name, parameters = self.type(), self.name(), []
        self.expect("(")
        while not self.take(")"):
            kind = self.type()
            parameters.append((self.name(), kind))
            if self.word != ")":
                self.expect(",")
        return Function(name, returns, tuple(parameters), self.block(), kernel)

    # ---- statements ----

    def block(self) -> Node:
        line, statements = self.line, []
        self.expect("{")
        while not self.take("}"):
            statements.append(self.statement())
        return Node("block", tuple(statements), line)

    def statement(self) -> Node:
        line = self.line
        if self.word == "{":
            return self.block()
        if self.take("if"):
            self.expect("(")
            condition = self.expression()
            self.expect(")")
            then = self.statement()
            return Node("if", (condition, then, self.statement() if self.take("else") else None), line)
        if self.take("for"):
            self.expect("(")
            first = self.declaration()
            condition = self.expression()
            self.expect(";")
            step = self.expression()
            self.expect(")")
            return Node("for", (first, condition, step, self.statement()), line)
        if self.take("while"):
            self.expect("(")
            condition = self.expression()
            self.expect(")")
            return Node("for", (None, condition, None, self.statement()), line)
        if self.take("return"):
            value = None if self.word == ";" else self.expression()
            self.expect(";")
            return Node("return", (value,), line)
        if self.at_type():
            return self.declaration()
        value = self.expression()
        self.expect(";")
        return Node("evaluate", (value,), line)

    def declaration(self) -> Node:
        """``(shared, type, ((name, sizes, value), ...))``"""
        line, shared = self.line, self.take("__shared__")
        kind, items = self.type(), []
        while True:
            name, sizes = self.name(), []
            while self.take("["):
                sizes.append(self.expression())
                self.expect("]")
            items.append((name, tuple(sizes), self.first_value(bool(sizes)) if self.take("=") else None))
            if not self.take(","):
                break
        self.expect(";")
        return Node("declare", (shared, kind, tuple(items)), line)

    def first_value(self, array: bool) -> Node:
        """An expression; of an array {}, which is all zeros."""
        if not array:
            return self.expression()
        line = self.line
        self.expect("{")
        self.expect("}")
        return Node("number", (0,), line)

    # ---- expressions ----

    def expression(self) -> Node:
        line, left = self.line, self.conditional()
        if self.word in ASSIGNMENTS:
            operator = self.word
            self.at += 1
            return Node("assign", (operator, left, self.expression()), line)
        return left

    def conditional(self) -> Node:
        line, condition = self.line, self.binary(0)
        if not self.take("?"):
            return condition
        then = self.expression()
        self.expect(":")
        return Node("choose", (condition, then, self.conditional()), line)

    def binary(self, level: int) -> Node:
        left = self.unary()
        while PRECEDENCE.get(self.word, -1) >= level:
            operator, line = self.word, self.line
            self.at += 1
            left = Node("binary", (operator, left, self.binary(PRECEDENCE[operator] + 1)), line)
        return left

    def unary(self) -> Node:
        line = self.line
        for operator in ("-", "!", "~", "*", "&"):
            if self.take(operator):
                return Node("unary", (operator, self.unary()), line)
        for operator in ("++", "--"):
            if self.take(operator):
                return Node("assign", (operator[0] + "=", self.unary(), Node("number", (1,), line)), line)
        return self.postfix()

    def postfix(self) -> Node:
        value = self.primary()
        while True:
            line = self.line
            if self.take("["):
                value = Node("index", (value, self.expression()), line)
                self.expect("]")
            elif self.take("."):
                value = Node("member", (value, self.name()), line)
            else:
                return value

    def primary(self) -> Node:
        kind, word, line = self.tokens[self.at]
        if kind == "number":
            self.at += 1
            whole = re.fullmatch(r"(0x[0-9a-fA-F]+|\d+)u?", word)
            return Node("number", (int(whole[1], 0) if whole else float(word.rstrip("f")),), line)
        if self.take("("):
            value = self.expression()
            self.expect(")")
            return value
        if word in ("reinterpret_cast", "static_cast"):
            self.at += 1
            self.expect("<")
            target = self.type()
            self.expect(">")
            self.expect("(")
            value = self.expression()
            self.expect(")")
            return Node("cast", (target, value), line)
        name = self.name()
        if not self.take("("):
            return Node("name", (name,), line)
        arguments = []
        while not self.take(")"):
            arguments.append(self.expression())
            if self.word != ")":
                self.expect(",")
        return Node("call", (name, tuple(arguments)), line)
