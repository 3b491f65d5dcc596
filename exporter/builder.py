"""Building expressions: equal nodes are one node, what is constant is computed, what is dead is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flexpte.exporter.evaluate import fold
from flexpte.exporter.expression import Expression, Node

KINDS = {
    torch.bool: "Bool",
    torch.uint8: "I32",
    torch.int8: "I32",
    torch.int16: "I32",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F32",
    torch.bfloat16: "F32",
    torch.float32: "F32",
    torch.float64: "F32",
}
"""The type in which values of an ATen dtype are computed."""

NARROW = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Dtypes narrower than their type of computation: results are rounded (integers wrap)."""

# (from, to): conversions between narrow dtypes that lose nothing.
_EXACT = {(torch.uint8, torch.int16), (torch.int8, torch.int16)}

LEAVES = {"Constant", "Input", "Score", "Batch", "Head", "QIdx", "KvIdx", "Scalar", "Load"}


class Builder:
    """Nodes of one expression in the making; a node is known by its number."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[Any, int] = {}

    def add(self, node: Node) -> int:
        """Number of a node equal to ``node``."""
        key = (node, repr(node.value_float))  # 0.0 and -0.0 are equal, but two constants
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[key]

    def constant(self, value: float, type_: str) -> int:
        """A constant of the given type; a number of another type is converted."""
        if type_ == "F32":
            return self.add(Node("Constant", "F32", value_float=float(value)))
        return self.add(Node("Constant", type_, value_int=int(bool(value) if type_ == "Bool" else value)))

    def constant_value(self, number: int) -> float | None:
        """Value of a Constant node, None for another node."""
        node = self.nodes[number]
        if node.op != "Constant":
            return None
        return node.value_float if node.type == "F32" else node.value_int

    def type_of(self, number: int) -> str:
        """Type of a node."""
        return self.nodes[number].type

    def op(self, op: str, type_: str, *args: int, **fields: Any) -> int:
        """Number of an operation on earlier nodes, simplified where that is exact."""
        simple = self._simplify(op, args)
        if simple is not None:
            return simple
        node = Node(op, type_, tuple(args), **fields)
        if op not in LEAVES and args and all(self.nodes[a].op == "Constant" for a in args):
            return self.add(fold(node, [self.nodes[a] for a in args]))
        return self.add(node)

    def _simplify(self, op: str, args: tuple[int, ...]) -> int | None:
        if op in ("LogicalAnd", "LogicalOr"):
            a, b = args
            neutral = 1 if op == "LogicalAnd" else 0
            for constant, other in ((a, b), (b, a)):
                value = self.constant_value(constant)
                if value is not None:
                    return other if value == neutral else constant
            return a if a == b else None
        if op == "LogicalNot" and self.nodes[args[0]].op == "LogicalNot":
            return self.nodes[args[0]].args[0]
        if op == "Where":
            condition, a, b = args
            value = self.constant_value(condition)
            return a if value or a == b else b if value is not None else None
        if op in ("Add", "Sub", "Mul", "Div") and self.type_of(args[1]) != "Bool":
            # x * 1, x / 1; x + 0 and x - 0 for integers (a float -0.0 + 0.0 is 0.0).
            value = self.constant_value(args[1])
            if value == 1 and op in ("Mul", "Div"):
                return args[0]
            if value == 0 and op in ("Add", "Sub") and self.type_of(args[0]) != "F32":
                return args[0]
        return None

    def cast(self, number: int, type_: str) -> int:
        """A node of another type; to Bool means: differs from 0."""
        source = self.type_of(number)
        if source == type_:
            return number
        if type_ == "Bool":
            return self.op("Ne", "Bool", number, self.constant(0, source))
        return self.op("Cast", type_, number)

    def convert(self, number: int, source: torch.dtype, target: torch.dtype) -> int:
        """ATen's conversion of a value from one dtype to another."""
        if source == target:
            return number
        number = self.cast(number, KINDS[target])
        if source == torch.bool or (source, target) in _EXACT:
            return number
        return self.narrow(number, target)

    def narrow(self, number: int, dtype: torch.dtype) -> int:
        """Round the result of a computation to ``dtype`` if it is narrower than its type."""
        if dtype not in NARROW or (self.nodes[number].op == "RoundTo" and self.nodes[number].round_to == NARROW[dtype]):
            return number
        return self.op("RoundTo", KINDS[dtype], number, round_to=NARROW[dtype])

    def finish(self, root: int) -> tuple[Expression, list[int], list[int]]:
        """The expression of ``root`` and what it loads: capture and scalar numbers in its order."""
        live = {root}
        for number in range(root, -1, -1):
            if number in live:
                live.update(self.nodes[number].args)
        renumbered: dict[int, int] = {}
        captures: dict[int, int] = {}
        scalars: dict[int, int] = {}
        nodes: list[Node] = []
        for number in sorted(live):
            node = self.nodes[number]
            if node.op == "Load":
                node = replace(node, index=captures.setdefault(node.index, len(captures)))
            elif node.op == "Scalar":
                node = replace(node, index=scalars.setdefault(node.index, len(scalars)))
            renumbered[number] = len(nodes)
            nodes.append(replace(node, args=tuple(renumbered[a] for a in node.args)))
        return Expression(tuple(nodes)), list(captures), list(scalars)
