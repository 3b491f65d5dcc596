"""Integers of 64 bits that provably fit 32 are computed in 32: vectors hold twice as many, GPUs have no others.

In eager PyTorch the indices that a mod is given are int64. They are small, and so is most of what mods compute
from them; what might not be, such as a hash, keeps its 64 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flexpte.exporter.builder import Builder
from flexpte.exporter.expression import Expression, Node

Interval = tuple[int, int]
"""Smallest and largest value, both possible."""

Size = int | torch.SymInt

_INT32: Interval = (-(2**31), 2**31 - 1)
_INT64: Interval = (-(2**63), 2**63 - 1)
_INDICES = ("Batch", "Head", "QIdx", "KvIdx")


def narrow_integers(
    expression: Expression, sizes: Sequence[Size] | None = None, scalars: Sequence[Size] = ()
) -> tuple[Expression, list[int], list[int]]:
    """The same values with fewer bits, and which of its captures and scalars the result still reads, by number.

    ``sizes``: batch, query heads, queries, keys; those that are symbolic count by their upper bounds. ``scalars``:
    those of the expression.
    """
    return _Narrowing(expression, sizes, scalars).run()


def _largest(size: Size) -> int:
    """Upper bound of a size; 2^31 - 1, the most that the runtime takes, where none is known."""
    if isinstance(size, int):
        return size
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(upper) if upper.is_Integer and upper <= _INT32[1] else _INT32[1]


def _of_scalar(value: Size) -> Interval:
    if isinstance(value, int):
        return value, value
    bounds = value.node.shape_env.bound_sympy(value.node.expr)
    if bounds.lower.is_Integer and bounds.upper.is_Integer:
        return int(bounds.lower), int(bounds.upper)
    return _INT64


def _fits(interval: Interval) -> bool:
    return _INT32[0] <= interval[0] and interval[1] <= _INT32[1]


class _Narrowing:
    def __init__(self, expression: Expression, sizes: Sequence[Size] | None, scalars: Sequence[Size]) -> None:
        self.expression, self.scalars = expression, scalars
        largest = [_INT32[1]] * 4 if sizes is None else [_largest(size) for size in sizes]
        self.indices = {op: (0, max(n - 1, 0)) for op, n in zip(_INDICES, largest, strict=True)}
        self.build = Builder()
        self.numbers: list[int] = []  # of the new nodes, by old number
        self.intervals: list[Interval] = []

    def run(self) -> tuple[Expression, list[int], list[int]]:
        for node in self.expression.nodes:
            interval = self.interval(node)
            self.numbers.append(self.add(node, interval))
            self.intervals.append(interval)
        return self.build.finish(self.numbers[-1])

    def add(self, node: Node, interval: Interval) -> int:
        old = self.expression.nodes
        if node.type == "I64" and node.op in (*_INDICES, "Constant", "Scalar") and _fits(interval):
            return self.build.add(replace(node, type="I32"))
        if node.op == "Cast" and node.type == "I64" and _fits(interval):
            return self.build.cast(self.numbers[node.args[0]], "I32")
        wide = [a for a in node.args if old[a].type == "I64"]
        stays = node.op != "Load" and any(self.build.type_of(self.numbers[a]) == "I64" for a in wide)
        if node.type == "I64" and node.op != "Load":
            stays = stays or not wide or not _fits(interval)
        args = [
            self.build.cast(self.numbers[a], "I64") if stays and old[a].type == "I64" else self.numbers[a]
            for a in node.args
        ]
        if node.op == "Cast":
            return self.build.cast(args[0], node.type)
        type_ = "I32" if node.type == "I64" and node.op != "Load" and not stays else node.type
        if not node.args:
            return self.build.add(replace(node, type=type_))
        return self.build.op(
            node.op,
            type_,
            *args,
            index=node.index,
            round_to=node.round_to,
            value_int=node.value_int,
            value_float=node.value_float,
        )

    def interval(self, node: Node) -> Interval:
        """Of the value as if integers were unbounded, and no smaller than what the operation can give."""
        if node.type == "Bool":
            return 0, 1
        if node.type == "F32":
            return _INT64
        if node.op in _INDICES:
            return self.indices[node.op]
        if node.op == "Constant":
            return node.value_int, node.value_int
        if node.op == "Scalar":
            return _of_scalar(self.scalars[node.index]) if node.index < len(self.scalars) else _INT64
        whole = _INT32 if node.type == "I32" else _INT64
        args = [self.intervals[a] for a in node.args]
        found = _INTERVALS[node.op](*args) if node.op in _INTERVALS else None
        if found is None or found[0] < whole[0] or found[1] > whole[1]:
            return whole
        return found


def _product(a: Interval, b: Interval) -> Interval:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _quotient(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0 <= b[1]:
        return None
    corners = [x // y for x in a for y in b]
    # Rounded down or towards zero.
    return min(corners), max(corners) + 1


def _remainder(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0 <= b[1]:
        return None
    largest = max(abs(b[0]), abs(b[1])) - 1
    return (0, largest) if a[0] >= 0 and b[0] > 0 else (-largest, largest)


def _bits(a: Interval, b: Interval) -> Interval:
    lowest, highest = min(a[0], b[0]), max(a[1], b[1])
    size = max(highest, -lowest - 1).bit_length()
    return (0 if lowest >= 0 else -(2**size)), 2**size - 1


def _shift_left(a: Interval, b: Interval) -> Interval | None:
    return _product(a, (2 ** b[0], 2 ** b[1])) if b[0] >= 0 and b[1] <= 31 else None


def _shift_right(a: Interval, b: Interval) -> Interval | None:
    return (min(a[0], 0), max(a[1], 0)) if b[0] >= 0 and b[1] <= 31 else None


_INTERVALS: dict[str, Callable[..., Interval | None]] = {
    "Add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "Sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "Mul": _product,
    "Neg": lambda a: (-a[1], -a[0]),
    "Abs": lambda a: (0, max(abs(a[0]), abs(a[1]))),
    "Sign": lambda a: (-1, 1),
    "Square": lambda a: (0, max(a[0] ** 2, a[1] ** 2)),
    "Relu": lambda a: (max(a[0], 0), max(a[1], 0)),
    "Min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "Max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "FloorDiv": _quotient,
    "TruncDiv": _quotient,
    "Remainder": _remainder,
    "Fmod": _remainder,
    "BitAnd": _bits,
    "BitOr": _bits,
    "BitXor": _bits,
    "BitNot": lambda a: (-a[1] - 1, -a[0] - 1),
    "ShiftLeft": _shift_left,
    "ShiftRight": _shift_right,
    "Where": lambda condition, a, b: (min(a[0], b[0]), max(a[1], b[1])),
    "Cast": lambda a: a,
}
