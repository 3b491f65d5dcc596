"""Building expressions node by node, with ATen's types."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flexpte.exporter.expression import Expression, Node
from flexpte.exporter.ir import FLOATING

COMPARISONS = frozenset(
    {
        "Eq",
        "Ne",
        "Lt",
        "Le",
        "Gt",
        "Ge",
        "LogicalAnd",
        "LogicalOr",
        "LogicalXor",
        "LogicalNot",
        "IsInf",
        "IsNan",
    }
)


def expression_type(dtype: str) -> str:
    """The type in which values of a dtype are computed."""
    if dtype in FLOATING:
        return "F32"
    return dtype if dtype in ("Bool", "I64") else "I32"


@dataclass
class ExpressionBuilder:
    """Appends nodes, sharing equal ones; numbers returned are node numbers."""

    nodes: list[Node] = field(default_factory=list)
    _numbers: dict[Node, int] = field(default_factory=dict)

    def add(self, node: Node) -> int:
        """The number of a node, appended if it is new."""
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]

    def input(self, index: int, type: str) -> int:
        """Operand ``index`` of the instruction."""
        return self.add(Node("Input", type, index=index))

    def scalar(self, index: int, type: str = "I64") -> int:
        """Scalar ``index`` of the instruction."""
        return self.cast(self.add(Node("Scalar", "I64", index=index)), type)

    def const(self, value: bool | int | float, type: str) -> int:
        """A constant of a type, converted as Python and ATen convert scalars."""
        if type == "F32":
            return self.add(Node("Constant", type, value_float=float(value)))
        return self.add(Node("Constant", type, value_int=int(bool(value)) if type == "Bool" else int(value)))

    def op(self, op: str, type: str, *args: int) -> int:
        """One operation; ``type`` is that of its result."""
        return self.add(Node(op, type, args))

    def type(self, number: int) -> str:
        """Type of a node."""
        return self.nodes[number].type

    def cast(self, number: int, type: str) -> int:
        """The node converted to a type; comparison with zero gives Bool."""
        if self.type(number) == type:
            return number
        if type == "Bool":
            return self.op("Ne", "Bool", number, self.const(0, self.type(number)))
        return self.op("Cast", type, number)

    def narrowed(self, number: int, dtype: str) -> int:
        """Wrapped to an 8- or 16-bit integer where ``dtype`` is one."""
        if dtype not in ("U8", "I8", "I16"):
            return number
        return self.add(Node("RoundTo", self.type(number), (number,), round_to=dtype))

    def inline(
        self, expression: Expression, inputs: dict[int, int], first_scalar: int, captures: dict[int, int]
    ) -> int:
        """Append another expression, its inputs replaced by nodes; returns its result."""
        numbers: list[int] = []
        for node in expression.nodes:
            if node.op == "Input":
                numbers.append(inputs[node.index])
                continue
            if node.op == "Scalar":
                node = replace(node, index=node.index + first_scalar)
            elif node.op == "Load":
                node = replace(node, index=captures[node.index])
            numbers.append(self.add(replace(node, args=tuple(numbers[a] for a in node.args))))
        return numbers[-1]

    def build(self, result: int) -> Expression:
        """The expression of a node: what it needs, itself last."""
        needed = {result}
        for number in range(result, -1, -1):
            if number in needed:
                needed.update(self.nodes[number].args)
        order = sorted(needed)
        renumber = {old: new for new, old in enumerate(order)}
        return Expression(
            tuple(replace(self.nodes[n], args=tuple(renumber[a] for a in self.nodes[n].args)) for n in order)
        )
