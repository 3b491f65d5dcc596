"""A region as payload bytes (``metal_delegate/payload.fbs``), and its weights as named data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import flatbuffers
import sympy
import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

import flexpte.metal_delegate.payload_generated as schema
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.expression import Expression, Node
from flexpte.exporter.ir import Instruction, Region, Size
from flexpte.exporter.msl_library import kernels_version, metal_library
from flexpte.exporter.symbols import upper_bound

VERSION = 1
IDENTIFIER = b"FXPL"


@dataclass
class _Scalars:
    """The scalar program: every symbolic size is one entry, shared where equal."""

    region: Region
    entries: list[Any] = field(default_factory=list)
    _numbers: dict[sympy.Expr, int] = field(default_factory=dict)

    def number(self, size: Size) -> int:
        """The entry that computes a size."""
        expr = sympy.sympify(size)
        if expr not in self._numbers:
            self._numbers[expr] = self._compute(expr)
        return self._numbers[expr]

    def sym(self, size: Size) -> int:
        """A size as the schema's (sym): itself, or -1 - entry."""
        return size if isinstance(size, int) and size >= 0 else -1 - self.number(size)

    def _append(self, expr: Size, op: str, a: int = 0, b: int = 0, value: int = 0) -> int:
        entry = schema.ScalarT()
        entry.op = getattr(schema.ScalarOp, op)
        entry.a, entry.b, entry.value = a, b, value
        entry.upperBound = upper_bound(expr, self.region.upper_bounds)
        self.entries.append(entry)
        return len(self.entries) - 1

    def _chain(self, op: str, parts: Iterable[sympy.Expr]) -> int:
        first, *rest = parts
        total, number = first, self.number(_int(first))
        for part in rest:
            operand = self.number(_int(part))
            total = {
                "Add": total + part,
                "Mul": total * part,
                "Max": Max(total, part),
                "Min": Min(total, part),
            }[op]
            number = self._append(_int(total), op, number, operand)
        return number

    def _compute(self, expr: sympy.Expr) -> int:
        if expr.is_Integer:
            return self._append(int(expr), "Constant", value=int(expr))
        if expr.is_Symbol:
            return self._symbol(expr)
        if expr.is_Add:
            return self._chain("Add", expr.args)
        if expr.is_Mul and all(not a.is_Rational or a.is_Integer for a in expr.args):
            return self._chain("Mul", expr.args)
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
            return self._chain("Mul", [expr.base] * int(expr.exp))
        if isinstance(expr, (Max, sympy.Max)):
            return self._chain("Max", expr.args)
        if isinstance(expr, (Min, sympy.Min)):
            return self._chain("Min", expr.args)
        if isinstance(expr, (FloorDiv, CleanDiv, Mod, PythonMod)):
            left, right = (self.number(_int(a)) for a in expr.args[:2])
            return self._append(expr, "Mod" if isinstance(expr, (Mod, PythonMod)) else "FloorDiv", left, right)
        raise Unsupported(f"a size computed as {expr}", fix="Use sums, products, floor division, modulo, min and max")

    def _symbol(self, symbol: sympy.Symbol) -> int:
        source = self.region.symbols.get(symbol)
        if source is None:
            raise Unsupported(f"size {symbol} is the size of no input", fix="Pass a tensor of that size to forward")
        size = source.factor * symbol + source.addend
        op, dim = ("InputValue", 0) if source.dim < 0 else ("InputSize", source.dim)
        number = self._append(_int(size), op, source.input, dim)
        if source.addend:
            number = self._append(_int(source.factor * symbol), "Add", number, self.number(-source.addend))
        if source.factor != 1:
            number = self._append(symbol, "FloorDiv", number, self.number(source.factor))
        return number


def _int(expr: Size) -> Size:
    return expr if isinstance(expr, int) else (int(expr) if expr.is_Integer else expr)


def weight_key(tensor: torch.Tensor) -> str:
    """The named-data key of a weight: a prefix of the SHA-256 of its bytes."""
    return "w." + hashlib.sha256(tensor_bytes(tensor)).hexdigest()[:32]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major, little-endian; no copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array).cast("B") if flat.numel() else memoryview(b"")


def pack(region: Region, keys: dict[int, str], exporter: str) -> bytes:
    """The payload; ``keys`` names the weight of each constant number."""
    scalars = _Scalars(region)
    payload = schema.PayloadT()
    payload.version, payload.exporter = VERSION, exporter
    payload.storages = [_storage(s) for s in region.storages]
    payload.values = [_value(v, scalars) for v in region.values]
    payload.constants = [_constant(c.tensor, keys[i]) for i, c in enumerate(region.constants)]
    payload.states = [_state(s) for s in region.states]
    expressions: dict[Expression, int] = {}
    library = metal_library(region)
    payload.instructions = [
        _instruction(i, kernels, expressions, scalars)
        for i, kernels in zip(library.instructions, library.kernels, strict=True)
    ]
    payload.metalLibrary, payload.kernelsVersion = library.source, kernels_version()
    payload.expressions = [_expression(e) for e in expressions]
    payload.inputs, payload.outputs = list(region.inputs), list(region.outputs)
    payload.arenaSizeBytes = region.arena_size_bytes
    payload.scalars = scalars.entries
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(payload.Pack(builder), IDENTIFIER)
    return bytes(builder.Output())


def _dtype(name: str) -> int:
    return int(getattr(schema.DType, name if name != "None" else "None_"))


def _storage(storage: Any) -> Any:
    t = schema.StorageT()
    t.kind = getattr(schema.StorageKind, storage.kind)
    t.index, t.offsetBytes, t.sizeBytes = storage.index, storage.offset_bytes, storage.size_bytes
    return t


def _value(value: Any, scalars: _Scalars) -> Any:
    t = schema.ValueT()
    t.storage, t.dtype = value.storage, _dtype(value.dtype)
    t.sizes = [scalars.sym(s) for s in value.sizes]
    t.strides = [scalars.sym(s) for s in value.strides]
    t.offset = scalars.sym(value.offset)
    return t


def _constant(tensor: torch.Tensor, key: str) -> Any:
    t = schema.ConstantT()
    t.key, t.sizeBytes = key, tensor.numel() * tensor.element_size()
    return t


def _state(state: Any) -> Any:
    t = schema.StateT()
    t.name, t.dtype, t.sizes, t.initial = state.name, _dtype(state.dtype), list(state.sizes), state.initial
    return t


def _expression(expression: Expression) -> Any:
    t = schema.ExpressionT()
    t.nodes = [_node(n) for n in expression.nodes]
    return t


def _node(node: Node) -> Any:
    t = schema.ExprNodeT()
    t.op, t.type = getattr(schema.ExprOp, node.op), _dtype(node.type)
    t.args, t.index, t.roundTo = list(node.args), node.index, _dtype(node.round_to)
    t.valueInt, t.valueFloat = node.value_int, node.value_float
    return t


def _instruction(
    instruction: Instruction, kernels: tuple[str, ...], expressions: dict[Expression, int], scalars: _Scalars
) -> Any:
    op = instruction.op
    kind = type(op).__name__
    body = getattr(schema, f"{kind}T")()
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, Expression):
            value = expressions.setdefault(value, len(expressions))
        elif value is None:
            value = -1
        elif f.name in ("scalars", "score_scalars", "mask_scalars"):
            value = [scalars.number(s) for s in value]
        elif f.name in ("start", "step"):
            value = scalars.sym(value)
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, str):
            value = getattr(schema.ReduceOp, value)
        attribute = _camel(f.name)
        assert hasattr(body, attribute), f"{kind}.{attribute} is not in the schema"
        setattr(body, attribute, value)
    t = schema.InstructionT()
    t.opType, t.op, t.name, t.kernels = getattr(schema.Op, kind), body, instruction.name, list(kernels)
    return t


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)
