"""Lowering: nodes of a decomposed ATen graph become instructions on strided values.

Lowering functions read metadata only, so the same functions decide what can be delegated (run on the
whole graph, refusals caught) and make the instructions of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from flexpte.exporter import views
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.expression import Expression
from flexpte.exporter.ir import (
    ITEM_SIZE_BYTES,
    Constant,
    Elementwise,
    Instruction,
    Op,
    Size,
    State,
    Storage,
    Value,
)
from flexpte.exporter.scalars import ExpressionBuilder, expression_type
from flexpte.exporter.symbols import Bounds, product, same, size_of, upper_bound

Result = int | tuple[int, ...]
LowerFunction = Callable[["Lowering", fx.Node], Result]

DTYPES = {
    torch.bool: "Bool", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
}  # fmt: skip
MAX_RANK = 8
FOLD_LIMIT_BYTES = 64 << 20


def dtype_of(dtype: torch.dtype) -> str:
    """The payload's name of a dtype."""
    if dtype not in DTYPES:
        raise Unsupported(
            f"dtype {dtype}".replace("torch.", ""), fix="Use float32, float16, bfloat16, bool or integers"
        )
    return DTYPES[dtype]


def source_line(node: fx.Node) -> str | None:
    """File and line of the model's code that made a node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in lines if line.startswith('File "')]
    if not places:
        return None
    own = [p for p in places if "/site-packages/torch/" not in p] or places
    path, line, *_ = own[-1].removeprefix("File ").split(", ")
    return f"{path.strip(chr(34))}:{line.removeprefix('line ')}"


@dataclass
class Lowering:
    """A region being lowered: what its nodes have become so far."""

    table: dict[Any, LowerFunction]
    bounds: Bounds
    constants_known: dict[fx.Node, tuple[str, torch.Tensor]] = field(default_factory=dict)
    states_owned: dict[fx.Node, tuple[str, torch.Tensor]] = field(default_factory=dict)

    env: dict[fx.Node, Result] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    order: dict[fx.Node, int] = field(default_factory=dict)
    state_values: dict[fx.Node, int] = field(default_factory=dict)
    _numbers: dict[Value, int] = field(default_factory=dict)
    _seen: dict[Any, Result] = field(default_factory=dict)

    # Values and storages.

    def number(self, value: Value) -> int:
        """The number of a view; equal views have one number."""
        if len(value.sizes) > MAX_RANK:
            raise Unsupported(f"a tensor of {len(value.sizes)} dimensions", fix=f"At most {MAX_RANK} are supported")
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]

    def new(self, sizes: Sequence[Size], dtype: str, kind: str = "Arena", index: int = 0) -> int:
        """A fresh contiguous value."""
        size_bytes = ITEM_SIZE_BYTES[dtype]
        for size in sizes:
            size_bytes *= upper_bound(size, self.bounds)
        self.storages.append(Storage(kind, index, size_bytes))
        return self.number(Value(len(self.storages) - 1, dtype, tuple(sizes), views.contiguous_strides(sizes)))

    def out(self, node: fx.Node, output: int | None = None) -> int:
        """A fresh contiguous value with the sizes and dtype of a node's result."""
        fake = node.meta["val"] if output is None else node.meta["val"][output]
        return self.new([size_of(s) for s in fake.shape], dtype_of(fake.dtype))

    def view(self, number: int) -> Value:
        """The view behind a value number."""
        return self.values[number]

    def state_of(self, number: int) -> bool:
        """Whether a value lies in a state."""
        return self.storages[self.values[number].storage].kind == "State"

    # Arguments.

    def arg(self, argument: Any) -> int:
        """The value number of a tensor argument."""
        if not isinstance(argument, fx.Node):
            raise Unsupported(f"argument {argument!r} where a tensor is expected")
        if argument not in self.env:
            self._bind(argument)
        result = self.env[argument]
        assert isinstance(result, int), f"{argument} has several results"
        return result

    def whole_state(self, buffer: fx.Node) -> int:
        """The value that is a whole state, whatever its placeholder stands for by now."""
        if buffer not in self.state_values:
            self._bind(buffer)
        return self.state_values[buffer]

    def size_arg(self, argument: Any) -> Size:
        """An integer argument, possibly symbolic."""
        if isinstance(argument, fx.Node):
            argument = argument.meta["val"]
        if isinstance(argument, (float, torch.SymFloat, torch.SymBool)):
            raise Unsupported(f"a scalar that is computed while running ({argument})")
        return size_of(argument)

    def bind_input(self, node: fx.Node, index: int) -> int:
        """Make a node's result an input of the region."""
        fake = node.meta["val"]
        number = self.new([size_of(s) for s in fake.shape], dtype_of(fake.dtype), "Input", index)
        self.env[node] = number
        return number

    def constant(self, name: str, tensor: torch.Tensor) -> int:
        """A tensor known at export as a value."""
        dtype = dtype_of(tensor.dtype)
        self.constants.append(Constant(name, tensor))
        return self.new(tuple(tensor.shape), dtype, "Constant", len(self.constants) - 1)

    def _bind(self, node: fx.Node) -> None:
        if node in self.states_owned:
            name, tensor = self.states_owned[node]
            self.states.append(State(name, dtype_of(tensor.dtype), tuple(tensor.shape)))
            number = self.new(tuple(tensor.shape), dtype_of(tensor.dtype), "State", len(self.states) - 1)
            self.env[node] = self.state_values[node] = number
        elif node in self.constants_known:
            self.env[node] = self.constant(*self.constants_known[node])
        else:
            if isinstance(node.meta.get("val"), torch.Tensor):
                dtype_of(node.meta["val"].dtype)
            raise Unsupported(f"{node.name} comes from a node that is not delegated")

    # Instructions.

    def emit(self, op: Op, node: fx.Node) -> None:
        """Append an instruction."""
        self.instructions.append(Instruction(op, node.name))

    def copy_into(self, source: int, target: int, node: fx.Node) -> None:
        """target = source, converting between dtypes as ATen's ``to``; sizes equal."""
        e = ExpressionBuilder()
        from_dtype, to_dtype = self.view(source).dtype, self.view(target).dtype
        result = e.cast(e.input(0, expression_type(from_dtype)), expression_type(to_dtype))
        self.emit(Elementwise(e.build(result), (source,), target), node)

    def materialised(self, number: int, node: fx.Node) -> int:
        """A contiguous copy of a value."""
        value = self.view(number)
        target = self.new(value.sizes, value.dtype)
        self.copy_into(number, target, node)
        return target

    def contiguous(self, number: int, node: fx.Node) -> int:
        """The value itself where it is contiguous, else a copy."""
        return number if views.is_contiguous(self.view(number)) else self.materialised(number, node)

    def rows(self, number: int, node: fx.Node) -> int:
        """The value itself where its rows are contiguous and evenly spaced, else a copy."""
        value = self.view(number)
        if not value.sizes:
            return number
        flat = views.reshape(
            replace(value, sizes=value.sizes[:-1], strides=value.strides[:-1]),
            [product(value.sizes[:-1])],
        )
        even = flat is not None and not any(
            same(stride, 0) and not same(size, 1) for size, stride in zip(value.sizes, value.strides, strict=True)
        )
        if even and (same(value.strides[-1], 1) or same(value.sizes[-1], 1)):
            return number
        return self.materialised(number, node)

    def reshaped(self, number: int, sizes: Sequence[Size], node: fx.Node) -> int:
        """The value with other sizes; a copy only where strides cannot express it."""
        view = views.reshape(self.view(number), sizes)
        if view is None:
            view = views.reshape(self.view(self.materialised(number, node)), sizes)
            assert view is not None, f"{node}: a contiguous value reshapes to {sizes}"
        return self.number(view)

    def broadcast(self, number: int, sizes: Sequence[Size]) -> int:
        """The value expanded to ``sizes``."""
        return self.number(views.expand(self.view(number), sizes))

    def elementwise(
        self, expression: Expression, inputs: Sequence[int], node: fx.Node, scalars: Sequence[Size] = ()
    ) -> int:
        """One Elementwise over broadcast inputs into a fresh value shaped like the node's result."""
        out = self.out(node)
        sizes = self.view(out).sizes
        broadcast = tuple(self.broadcast(i, sizes) for i in inputs)
        self.emit(Elementwise(expression, broadcast, out, tuple(scalars)), node)
        return out

    # Nodes.

    def lower(self, node: fx.Node) -> None:
        """Lower one call_function node; its result is in ``env`` afterwards.

        Raises Unsupported, with nothing appended, where it cannot be done.
        """
        if node.target not in self.table:
            raise Unsupported(f"operator {node.target}", source=source_line(node))
        key = self._key(node)
        if key is not None and key in self._seen:
            self.env[node] = self._seen[key]
            return
        parts = (self.storages, self.constants, self.states, self.instructions, self.values)
        marks = [len(part) for part in parts]
        try:
            self.env[node] = self.table[node.target](self, node)
        except Unsupported as error:
            for value in self.values[marks[-1] :]:
                del self._numbers[value]
            for part, mark in zip(parts, marks, strict=True):
                del part[mark:]  # type: ignore[attr-defined]
            self.env = {n: r for n, r in self.env.items() if not isinstance(r, int) or r < marks[-1]}
            if error.source:
                raise
            raise Unsupported(f"{node.target}: {error.what}", source=source_line(node), fix=error.fix) from error
        if key is not None:
            self._seen[key] = self.env[node]

    def _key(self, node: fx.Node) -> Any:
        """Equal keys, equal results; None where the node reads or writes a state."""
        stateful = False

        def part(x: Any) -> Any:
            nonlocal stateful
            if isinstance(x, fx.Node):
                val = x.meta.get("val")
                if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                    return ("sym", val.node.expr)
                result = self.env.get(x)
                if result is None and x in self.states_owned:
                    stateful = True
                if isinstance(result, int):
                    stateful = stateful or self.state_of(result)
                return ("value", result) if result is not None else ("node", x)
            if isinstance(x, torch.SymInt):
                return ("sym", x.node.expr)
            if isinstance(x, (list, tuple)):
                return tuple(map(part, x))
            return (type(x), x)

        key = (node.target, part(node.args), tuple((k, part(v)) for k, v in sorted(node.kwargs.items())))
        return None if stateful else key


def fold_constants(
    nodes: Iterable[fx.Node], constants: dict[fx.Node, tuple[str, torch.Tensor]], keep: set[Any]
) -> None:
    """Compute nodes that depend on constants only (frequencies, 1 + weight), adding them to ``constants``.

    Views of weights, and targets in ``keep``, are left to the lowering; so is what would be large.
    """
    known: dict[fx.Node, Any] = {}
    for node in nodes:
        if node.op != "call_function" or node.target in keep or not isinstance(node.target, torch._ops.OpOverload):
            continue
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or not all(isinstance(s, int) for s in val.shape):
            continue
        inputs = node.all_input_nodes
        if not inputs or not all(n in constants for n in inputs):
            continue
        aliases = any(ret.alias_info is not None for ret in node.target._schema.returns)
        if not aliases and val.numel() * val.element_size() > FOLD_LIMIT_BYTES:
            continue
        for n in inputs:
            known[n] = constants[n][1]
        with torch.no_grad():
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: known[n])
            result = node.target(*args, **kwargs)
        constants[node] = (constants[inputs[0]][0], result.detach())


def used_symbols(values: Iterable[Value], instructions: Iterable[Instruction]) -> set[sympy.Symbol]:
    """Every symbol that a region's sizes, offsets and scalars mention."""
    sizes: list[Size] = []
    for value in values:
        sizes += [*value.sizes, *value.strides, value.offset]
    for instruction in instructions:
        for name in ("scalars", "score_scalars", "mask_scalars"):
            sizes += getattr(instruction.op, name, ())
        sizes += [getattr(instruction.op, name, 0) for name in ("start", "step")]
    return {symbol for size in sizes if not isinstance(size, int) for symbol in size.free_symbols}
