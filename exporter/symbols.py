"""Symbolic sizes: from torch's SymInts to sympy expressions, their bounds, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from flexpte.exporter.errors import Unsupported
from flexpte.exporter.ir import Size, SymbolSource

Bounds = dict[sympy.Symbol, tuple[int, int]]
INT64_MAX = 2**63 - 1


def size_of(x: Any) -> Size:
    """An int, or the expression of a SymInt (an int where it is constant)."""
    if isinstance(x, torch.SymInt):
        return as_size(x.node.expr)
    if isinstance(x, sympy.Expr):
        return as_size(x)
    return int(x)


def as_size(expr: sympy.Expr) -> Size:
    """A constant expression as int, others unchanged."""
    return int(expr) if expr.is_Integer else expr


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all values of their symbols (False where that is not seen)."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b or sympy.expand(a - b) == 0)


def product(sizes: Iterable[Size]) -> Size:
    """The product, as int where it is constant."""
    result: Any = 1
    for s in sizes:
        result = result * s
    return as_size(sympy.sympify(result))


def times(a: Size, b: Size) -> Size:
    """a * b"""
    return a * b if isinstance(a, int) and isinstance(b, int) else as_size(sympy.sympify(a * b))


def plus(a: Size, b: Size) -> Size:
    """a + b"""
    return a + b if isinstance(a, int) and isinstance(b, int) else as_size(sympy.sympify(a + b))


def bounds_of(ranges: Mapping[sympy.Symbol, Any]) -> Bounds:
    """Smallest and largest value of every symbol; -1 as largest stands for unbounded."""
    result = {}
    for symbol, r in ranges.items():
        upper = -1 if r.upper in (int_oo, sympy.oo) or r.upper >= INT64_MAX else int(r.upper)
        result[symbol] = (max(0, int(r.lower)) if r.lower not in (-int_oo, -sympy.oo) else 0, upper)
    return result


def upper_bound(size: Size, bounds: Bounds) -> int:
    """The largest value that a size takes.

    Raises Unsupported where an input's dimension has no upper bound.
    """
    if isinstance(size, int):
        return size
    ranges = {}
    for symbol in size.free_symbols:
        lower, upper = bounds.get(symbol, (0, -1))
        if upper < 0:
            raise Unsupported(
                f"dimension {symbol} has no upper bound, and memory is planned before running",
                fix='Give it one in dynamic_shapes: torch.export.Dim("name", max=...)',
            )
        ranges[symbol] = ValueRanges(lower, upper)
    bound = bound_sympy(size, ranges).upper
    if bound in (int_oo, sympy.oo):
        raise Unsupported(f"size {size} has no upper bound", fix="Bound the dimensions it depends on with Dim(max=...)")
    return int(bound)


def find_symbols(inputs: Iterable[tuple[Size, ...] | Size | None]) -> dict[sympy.Symbol, SymbolSource]:
    """Where each symbol can be read: a plain dimension if there is one, else a linear one.

    ``inputs`` holds the sizes of each tensor input, or the expression of an integer input.
    """
    found: dict[sympy.Symbol, SymbolSource] = {}
    for number, sizes in enumerate(inputs):
        if sizes is None:
            continue
        dims = enumerate(sizes) if isinstance(sizes, tuple) else [(-1, sizes)]
        for dim, size in dims:
            source = _linear(size, number, dim)
            if source is not None and (source[0] not in found or source[1].factor == 1 < found[source[0]].factor):
                found[source[0]] = source[1]
    return found


def _linear(size: Size, number: int, dim: int) -> tuple[sympy.Symbol, SymbolSource] | None:
    if isinstance(size, int) or len(size.free_symbols) != 1:
        return None
    (symbol,) = size.free_symbols
    if size == symbol:
        return symbol, SymbolSource(number, dim)
    if not size.is_polynomial(symbol) or sympy.degree(size, symbol) != 1:
        return None
    factor, addend = size.coeff(symbol, 1), size.coeff(symbol, 0)
    if not (factor.is_Integer and factor > 0 and addend.is_Integer):
        return None
    return symbol, SymbolSource(number, dim, int(factor), int(addend))
