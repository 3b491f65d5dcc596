"""A mod's graph to an expression, op by op.

A value of the graph is either `Lanes`, a small tensor of expression nodes (one node for a 0-d value), or a
`View` of a captured tensor, of which nothing has been loaded yet. What depends on captured tensors only and
is no expression (a reduction of a table, say) is computed outside of the attention and captured instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from flexpte.exporter.builder import KINDS, Builder
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.expression import Expression, Node
from flexpte.exporter.mod_graph import ModGraph

MAX_LANES = 256
_ARGUMENTS = {"score": "Score", "batch": "Batch", "head": "Head", "q_idx": "QIdx", "kv_idx": "KvIdx"}


@dataclass(frozen=True)
class Lanes:
    """Node numbers in an int64 tensor of the value's shape."""

    nodes: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Free:
    """A dimension of a captured tensor that a view keeps: index = start + step * (index of view dim)."""

    dim: int
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class View:
    """A captured tensor (or a value computed outside) whose dimensions are fixed to a node or free."""

    capture: fx.Node
    index: tuple[int | Free, ...]
    shape: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype


Value = Lanes | View | tuple[Any, ...]
Handler = Callable[["Translator", fx.Node], Value]


class Translator:
    """One walk over a mod's graph."""

    def __init__(
        self, graph: ModGraph, handlers: dict[Any, Handler], outside: frozenset[Any], views: frozenset[Any]
    ) -> None:
        """``handlers``: op -> function; ops in ``outside`` are computed outside where they can be,
        those in ``views`` load nothing, so that the dtype does not matter."""
        self._handlers, self._outside, self._of_any_dtype = handlers, outside, views
        self.build = Builder()
        self.node: fx.Node = next(iter(graph.graph.nodes))  # being translated
        self._graph = graph
        self._values: dict[fx.Node, Value] = {}
        self._invariant: set[fx.Node] = set()
        self._captures: dict[fx.Node, int] = {}
        self._scalars: dict[Any, tuple[int, int | torch.SymInt]] = {}

    def translate(self, type_: str) -> tuple[Expression, list[fx.Node], list[int | torch.SymInt]]:
        """The expression of the graph's result as ``type_``, the nodes to load from, the scalars."""
        for node in self._graph.graph.nodes:
            self.node = node
            if node.op == "output":
                break
            self._values[node] = self._translate(node)
        result: Any = self.node.args[0]
        self.node = result
        lanes = self.lanes(result)
        if type_ == "Bool" and lanes.dtype != torch.bool:
            raise self.unsupported(
                f"a mask_mod returns {lanes.dtype}", "It must return torch.bool; compare, or use .bool()"
            )
        expression, captures, scalars = self.build.finish(self.build.cast(int(lanes.nodes), type_))
        nodes, sizes = list(self._captures), [s for _, s in self._scalars.values()]
        return expression, [nodes[c] for c in captures], [sizes[s] for s in scalars]

    def _translate(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            if node in self._graph.captures:
                self._invariant.add(node)
                return self._whole(node)
            kind = _ARGUMENTS[node.name]
            number = self.build.add(Node(kind, "F32" if kind == "Score" else "I64"))
            return Lanes(torch.tensor(number), node.meta["val"].dtype)
        invariant = all(n in self._invariant for n in node.all_input_nodes)
        if invariant:
            self._invariant.add(node)
        handler = self._handlers.get(node.target)
        dtype = getattr(node.meta["val"], "dtype", torch.float32)
        try:
            if dtype not in KINDS and node.target not in self._of_any_dtype:
                raise self.unsupported(
                    f"a mod computes in {dtype} ({node.target})", "Use bool, int32, int64 or float32"
                )
            if handler is None or (invariant and node.all_input_nodes and node.target in self._outside):
                raise self.unsupported(
                    f"a mod uses {node.target}, which has no expression",
                    "Compute it in forward and capture the result, or write it with elementwise operations",
                )
            return handler(self, node)
        except Unsupported:
            if not invariant:
                raise
            if not isinstance(node.meta["val"], Tensor):
                return ()  # its parts are computed outside
            return self._whole(node)

    def _whole(self, node: fx.Node) -> View:
        value = node.meta["val"]
        return View(node, tuple(Free(d) for d in range(value.dim())), tuple(value.shape), value.dtype)

    # -- what handlers use

    def unsupported(self, what: str, fix: str) -> Unsupported:
        """The error for the node being translated."""
        return Unsupported(what, source=self.node.meta.get("source"), fix=fix)

    def value(self, argument: Any) -> Value:
        """Value of a node's argument that is a node."""
        return self._values[argument]

    def as_view(self, node: fx.Node) -> View | None:
        """A value as something to load from: a view, or a small constant table computed outside."""
        value = self._values[node]
        if isinstance(value, View):
            return value
        return self._whole(node) if node in self._invariant else None

    def lanes(self, argument: Any) -> Lanes:
        """Value of an argument (node or Python number) as nodes; a view is loaded."""
        if isinstance(argument, fx.Node):
            value = self._values[argument]
            if isinstance(value, Lanes):
                return value
            assert isinstance(value, View)
            return self.load(value)
        return Lanes(torch.tensor(self.number(argument)), _python_dtype(argument))

    def number(self, value: Any) -> int:
        """Node of a Python number or a symbolic size."""
        if isinstance(value, torch.SymInt):
            key = value.node.expr
            if key not in self._scalars:
                self._scalars[key] = (len(self._scalars), value)
            return self.build.add(Node("Scalar", "I64", index=self._scalars[key][0]))
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise self.unsupported(
                f"a mod uses the {type(value).__name__} {value}, computed from a dynamic size",
                "Only integer sizes may be dynamic here; divide tensors, or use //",
            )
        return self.build.constant(value, KINDS[_python_dtype(value)])

    def load(self, view: View) -> Lanes:
        """A view element by element; raises Unsupported where that is too many."""
        if view.dtype not in KINDS:
            raise self.unsupported(
                f"a mod captures a tensor of {view.dtype}",
                f"Convert it to one of {', '.join(str(d).removeprefix('torch.') for d in KINDS)}",
            )
        if any(isinstance(s, torch.SymInt) for s in view.shape) or _numel(view.shape) > MAX_LANES:
            raise self.unsupported(
                f"a mod uses {tuple(view.shape)} elements of a captured tensor at once",
                f"Index every dimension with b, h, q_idx or kv_idx; at most {MAX_LANES} can be reduced",
            )
        capture = self._captures.setdefault(view.capture, len(self._captures))
        kind = KINDS[view.dtype]
        numbers = []
        for at in _positions(view.shape):
            args = [
                self.build.constant(i.start + i.step * at[i.dim], "I64") if isinstance(i, Free) else i
                for i in view.index
            ]
            numbers.append(self.build.op("Load", kind, *args, index=capture))
        return Lanes(torch.tensor(numbers, dtype=torch.int64).reshape(view.shape), view.dtype)

    def each(self, function: Callable[..., int], dtype: torch.dtype, *arguments: Lanes) -> Lanes:
        """Broadcast, and give each lane to ``function`` (node numbers -> node number)."""
        tensors = torch.broadcast_tensors(*(a.nodes for a in arguments))
        if tensors[0].numel() > MAX_LANES:
            raise self.unsupported(
                f"a mod computes a tensor of shape {tuple(tensors[0].shape)} for each score",
                f"At most {MAX_LANES} elements; compute it in forward and capture the result",
            )
        columns = [t.flatten().tolist() for t in tensors]
        numbers = [function(*row) for row in zip(*columns, strict=True)]
        return Lanes(torch.tensor(numbers, dtype=torch.int64).reshape(tensors[0].shape), dtype)

    def converted(self, argument: Any, dtype: torch.dtype) -> Lanes:
        """An argument in ``dtype``; Python numbers are taken at the precision of the computation."""
        if isinstance(argument, int | float):
            return Lanes(torch.tensor(self.build.constant(argument, KINDS[dtype])), dtype)
        lanes = self.lanes(argument)
        return self.each(lambda n: self.build.convert(n, lanes.dtype, dtype), dtype, lanes)

    def promoted(self, *arguments: Any) -> torch.dtype:
        """ATen's common dtype of the operands of an elementwise op."""
        return functools.reduce(
            torch.promote_types if len(arguments) > 2 else _second,
            [common_dtype(arguments[0], a) for a in arguments[1:]] or [self.lanes(arguments[0]).dtype],
        )


def _second(_: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    return dtype


def common_dtype(a: Any, b: Any) -> torch.dtype:
    """Result dtype of a binary op; arguments are graph nodes or Python numbers."""
    return _common_dtype(*_operand(a), *_operand(b))


def _operand(argument: Any) -> tuple[Any, bool]:
    if isinstance(argument, fx.Node):
        value = argument.meta["val"]
        return value.dtype, value.dim() > 0
    return type_of_number(argument), False


def type_of_number(value: Any) -> type:
    """bool, int or float; a symbolic size is an int."""
    return int if isinstance(value, torch.SymInt) else type(value)


@functools.cache
def _common_dtype(a: Any, a_has_dims: bool, b: Any, b_has_dims: bool) -> torch.dtype:
    def example(kind: Any, has_dims: bool) -> Any:
        return kind(1) if isinstance(kind, type) else torch.ones((1,) if has_dims else (), dtype=kind)

    return torch.result_type(example(a, a_has_dims), example(b, b_has_dims))


def _python_dtype(value: Any) -> torch.dtype:
    kind = type_of_number(value)
    return {bool: torch.bool, int: torch.int64, float: torch.float32}[kind]


def _numel(shape: Sequence[Any]) -> int:
    total = 1
    for size in shape:
        total *= int(size)
    return total


def _positions(shape: Sequence[Any]) -> list[tuple[int, ...]]:
    positions: list[tuple[int, ...]] = [()]
    for size in shape:
        positions = [(*p, i) for p in positions for i in range(int(size))]
    return positions
