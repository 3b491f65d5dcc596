"""Elementwise ATen operators as expressions, with ATen's type promotion.

Floating types of any width are computed in F32, 8- and 16-bit integers in I32 and wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from flexpte.exporter.errors import Unsupported
from flexpte.exporter.expression import Node
from flexpte.exporter.ir import Size
from flexpte.exporter.lower import LowerFunction, Lowering, dtype_of
from flexpte.exporter.scalars import ExpressionBuilder, expression_type

aten = torch.ops.aten

# Functions of floats: integer inputs are converted, the result is floating.
_FLOAT_UNARY = {
    aten.exp.default: "Exp",
    aten.exp2.default: "Exp2",
    aten.expm1.default: "Expm1",
    aten.log.default: "Log",
    aten.log2.default: "Log2",
    aten.log10.default: "Log10",
    aten.log1p.default: "Log1p",
    aten.sqrt.default: "Sqrt",
    aten.rsqrt.default: "Rsqrt",
    aten.sin.default: "Sin",
    aten.cos.default: "Cos",
    aten.tan.default: "Tan",
    aten.asin.default: "Asin",
    aten.acos.default: "Acos",
    aten.atan.default: "Atan",
    aten.sinh.default: "Sinh",
    aten.cosh.default: "Cosh",
    aten.tanh.default: "Tanh",
    aten.asinh.default: "Asinh",
    aten.acosh.default: "Acosh",
    aten.atanh.default: "Atanh",
    aten.sigmoid.default: "Sigmoid",
    aten.silu.default: "Silu",
    aten.erf.default: "Erf",
    aten.reciprocal.default: "Reciprocal",
}
# Functions that keep the type; floor and its like leave integers as they are.
_SAME_UNARY = {
    aten.neg.default: "Neg",
    aten.abs.default: "Abs",
    aten.sign.default: "Sign",
    aten.relu.default: "Relu",
    aten.square.default: "Square",
    aten.bitwise_not.default: "BitNot",
}
_ROUNDING = {
    aten.floor.default: "Floor",
    aten.ceil.default: "Ceil",
    aten.round.default: "Round",
    aten.trunc.default: "Trunc",
}
_ARITHMETIC = {
    aten.mul.Tensor: "Mul",
    aten.mul.Scalar: "Mul",
    aten.maximum.default: "Max",
    aten.minimum.default: "Min",
    aten.remainder.Tensor: "Remainder",
    aten.remainder.Scalar: "Remainder",
    aten.fmod.Tensor: "Fmod",
    aten.fmod.Scalar: "Fmod",
    aten.pow.Tensor_Tensor: "Pow",
    aten.pow.Scalar: "Pow",
    aten.atan2.default: "Atan2",
    aten.bitwise_and.Tensor: "BitAnd",
    aten.bitwise_and.Scalar: "BitAnd",
    aten.bitwise_or.Tensor: "BitOr",
    aten.bitwise_or.Scalar: "BitOr",
    aten.bitwise_xor.Tensor: "BitXor",
    aten.bitwise_xor.Scalar: "BitXor",
    aten.bitwise_left_shift.Tensor: "ShiftLeft",
    aten.bitwise_left_shift.Tensor_Scalar: "ShiftLeft",
    aten.bitwise_right_shift.Tensor: "ShiftRight",
    aten.bitwise_right_shift.Tensor_Scalar: "ShiftRight",
    aten.__lshift__.Scalar: "ShiftLeft",
    aten.__lshift__.Tensor: "ShiftLeft",
    aten.__rshift__.Scalar: "ShiftRight",
    aten.__rshift__.Tensor: "ShiftRight",
}
_COMPARISON = {
    aten.eq.Tensor: "Eq",
    aten.eq.Scalar: "Eq",
    aten.ne.Tensor: "Ne",
    aten.ne.Scalar: "Ne",
    aten.lt.Tensor: "Lt",
    aten.lt.Scalar: "Lt",
    aten.le.Tensor: "Le",
    aten.le.Scalar: "Le",
    aten.gt.Tensor: "Gt",
    aten.gt.Scalar: "Gt",
    aten.ge.Tensor: "Ge",
    aten.ge.Scalar: "Ge",
}
_LOGICAL = {
    aten.logical_and.default: "LogicalAnd",
    aten.logical_or.default: "LogicalOr",
    aten.logical_xor.default: "LogicalXor",
}
# What arithmetic on booleans means (ATen adds, multiplies and compares them as 0 and 1).
_ON_BOOL = {
    "Mul": "LogicalAnd",
    "Add": "LogicalOr",
    "Max": "LogicalOr",
    "Min": "LogicalAnd",
    "BitAnd": "LogicalAnd",
    "BitOr": "LogicalOr",
    "BitXor": "LogicalXor",
    "BitNot": "LogicalNot",
}


_POWERS = {0.5: "Sqrt", -0.5: "Rsqrt", -1.0: "Reciprocal"}


class _Operands:
    """Operands of one Elementwise under construction: tensors become inputs, SymInts scalars."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering, self.e = lowering, ExpressionBuilder()
        self.inputs: list[int] = []
        self.scalars: list[Size] = []

    def leaf(self, argument: Any, type: str) -> int:
        """The argument, converted to ``type``."""
        if isinstance(argument, fx.Node) and isinstance(argument.meta["val"], torch.Tensor):
            number = self.lowering.arg(argument)
            if number not in self.inputs:
                self.inputs.append(number)
            own = expression_type(self.lowering.view(number).dtype)
            return self.e.cast(self.e.input(self.inputs.index(number), own), type)
        if isinstance(argument, (bool, int, float)):
            return self.e.const(argument, type)
        size = self.lowering.size_arg(argument)
        if isinstance(size, int):
            return self.e.const(size, type)
        if size not in self.scalars:
            self.scalars.append(size)
        return self.e.scalar(self.scalars.index(size), type)

    def emit(self, result: int, node: fx.Node) -> int:
        """The instruction; its result is converted to the node's dtype."""
        dtype = dtype_of(node.meta["val"].dtype)
        result = self.e.narrowed(self.e.cast(result, expression_type(dtype)), dtype)
        return self.lowering.elementwise(self.e.build(result), self.inputs, node, self.scalars)


def _val(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _promoted(arguments: Sequence[Any]) -> str:
    """The type in which ATen computes with these operands (c10/core/ScalarType promotion rules)."""
    operands = [_val(a) for a in arguments]
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    result = tensors[0].dtype
    if len(operands) == 2:
        a, b = (o if isinstance(o, torch.Tensor) else _plain(o) for o in operands)
        result = torch.result_type(a, b)
    return expression_type(dtype_of(result))


def _plain(scalar: Any) -> bool | int | float:
    """A Python number of the same kind as a scalar, for type promotion only."""
    if isinstance(scalar, (bool, torch.SymBool)):
        return True
    return 1 if isinstance(scalar, (int, torch.SymInt)) else 1.0


def _type_of(node: fx.Node) -> str:
    return expression_type(dtype_of(node.meta["val"].dtype))


def _float_unary(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        operands = _Operands(b)
        return operands.emit(operands.e.op(op, "F32", operands.leaf(node.args[0], "F32")), node)

    return lower


def _same_unary(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        operands, type = _Operands(b), _type_of(node)
        name = _ON_BOOL.get(op, op) if type == "Bool" else op
        x = operands.leaf(node.args[0], type)
        return operands.emit(operands.e.op(name, type, x), node)

    return lower


def _rounding(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        operands, type = _Operands(b), _type_of(node)
        if node.kwargs.get("decimals"):
            raise Unsupported("rounding to decimals")
        x = operands.leaf(node.args[0], type)
        return operands.emit(operands.e.op(op, type, x) if type == "F32" else x, node)

    return lower


def _arithmetic(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        operands, type = _Operands(b), _type_of(node)
        name = _ON_BOOL.get(op, op) if type == "Bool" else op
        x, y = (operands.leaf(a, type) for a in node.args[:2])
        return operands.emit(operands.e.op(name, type, x, y), node)

    return lower


def _add(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        operands, type = _Operands(b), _type_of(node)
        x, y = (operands.leaf(a, type) for a in node.args[:2])
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if alpha != 1:
            y = operands.e.op("Mul", type, operands.leaf(alpha, type), y)
        return operands.emit(operands.e.op(_ON_BOOL.get(op, op) if type == "Bool" else op, type, x, y), node)

    return lower


def _rsub(b: Lowering, node: fx.Node) -> int:
    operands, type = _Operands(b), _type_of(node)
    x, y = (operands.leaf(a, type) for a in node.args[:2])
    if len(node.args) > 2 and node.args[2] != 1:
        x = operands.e.op("Mul", type, operands.leaf(node.args[2], type), x)
    return operands.emit(operands.e.op("Sub", type, y, x), node)


def _div(b: Lowering, node: fx.Node) -> int:
    operands, type = _Operands(b), _type_of(node)
    mode = node.kwargs.get("rounding_mode")
    if node.target is aten.floor_divide.default:
        mode = "floor"
    x, y = (operands.leaf(a, type) for a in node.args[:2])
    if mode is None:
        return operands.emit(operands.e.op("Div", "F32", x, y), node)
    return operands.emit(operands.e.op("FloorDiv" if mode == "floor" else "TruncDiv", type, x, y), node)


def _pow_scalar(b: Lowering, node: fx.Node) -> int:
    operands, type = _Operands(b), _type_of(node)
    x, exponent = operands.leaf(node.args[0], type), node.args[1]
    if exponent == 1:
        return operands.emit(x, node)
    if exponent == 2:
        return operands.emit(operands.e.op("Square", type, x), node)
    if type == "F32" and isinstance(exponent, (int, float)) and float(exponent) in _POWERS:
        return operands.emit(operands.e.op(_POWERS[float(exponent)], type, x), node)
    return operands.emit(operands.e.op("Pow", type, x, operands.leaf(exponent, type)), node)


def _comparison(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        operands, type = _Operands(b), _promoted(node.args[:2])
        x, y = (operands.leaf(a, type) for a in node.args[:2])
        return operands.emit(operands.e.op(op, "Bool", x, y), node)

    return lower


def _logical(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        operands = _Operands(b)
        leaves = [operands.leaf(a, "Bool") for a in node.args]
        return operands.emit(operands.e.op(op, "Bool", *leaves), node)

    return lower


def _is(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        operands = _Operands(b)
        return operands.emit(operands.e.op(op, "Bool", operands.leaf(node.args[0], "F32")), node)

    return lower


def _gelu(b: Lowering, node: fx.Node) -> int:
    operands = _Operands(b)
    op = "GeluTanh" if node.kwargs.get("approximate", "none") == "tanh" else "GeluErf"
    return operands.emit(operands.e.op(op, "F32", operands.leaf(node.args[0], "F32")), node)


def _clamp(b: Lowering, node: fx.Node) -> int:
    operands, type = _Operands(b), _type_of(node)
    low, high = (*node.args[1:], None, None)[:2]
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    x = operands.leaf(node.args[0], type)
    if low is not None:
        x = operands.e.op("Max", type, x, operands.leaf(low, type))
    if high is not None:
        x = operands.e.op("Min", type, x, operands.leaf(high, type))
    return operands.emit(x, node)


def _where(b: Lowering, node: fx.Node) -> int:
    operands, type = _Operands(b), _type_of(node)
    condition = operands.leaf(node.args[0], "Bool")
    x, y = (operands.leaf(a, type) for a in node.args[1:3])
    return operands.emit(operands.e.op("Where", type, condition, x, y), node)


def _masked_fill(b: Lowering, node: fx.Node) -> int:
    operands, type = _Operands(b), _type_of(node)
    x, mask, value = node.args
    condition = operands.leaf(mask, "Bool")
    return operands.emit(
        operands.e.op("Where", type, condition, operands.leaf(value, type), operands.leaf(x, type)), node
    )


def _leaky_relu(b: Lowering, node: fx.Node) -> int:
    operands = _Operands(b)
    e, x = operands.e, operands.leaf(node.args[0], "F32")
    slope = node.args[1] if len(node.args) > 1 else 0.01
    positive = e.op("Gt", "Bool", x, e.const(0.0, "F32"))
    return operands.emit(e.op("Where", "F32", positive, x, e.op("Mul", "F32", x, operands.leaf(slope, "F32"))), node)


def _elu(b: Lowering, node: fx.Node) -> int:
    operands = _Operands(b)
    e, x = operands.e, operands.leaf(node.args[0], "F32")
    alpha, scale, input_scale = (*node.args[1:], *(1.0,) * 3)[:3]
    inner = e.op("Expm1", "F32", e.op("Mul", "F32", x, operands.leaf(input_scale, "F32")))
    negative = e.op("Mul", "F32", operands.leaf(alpha, "F32"), inner)
    chosen = e.op("Where", "F32", e.op("Gt", "Bool", x, e.const(0.0, "F32")), x, negative)
    return operands.emit(e.op("Mul", "F32", chosen, operands.leaf(scale, "F32")), node)


def _full(b: Lowering, node: fx.Node, value: Any) -> int:
    operands, type = _Operands(b), _type_of(node)
    return operands.emit(operands.leaf(value, type), node)


def _constant_of(value: Callable[[fx.Node], Any]) -> LowerFunction:
    return lambda b, node: _full(b, node, value(node))


def lower_cast(b: Lowering, node: fx.Node) -> int:
    """``_to_copy`` and its like: an alias where the dtype stays."""
    number = b.arg(node.args[0])
    dtype = dtype_of(node.meta["val"].dtype)
    if b.view(number).dtype == dtype and not b.state_of(number):
        return number
    operands = _Operands(b)
    result = operands.leaf(node.args[0], expression_type(dtype))
    if dtype in ("F16", "BF16"):
        # Fused with what follows, an explicit cast still rounds.
        result = operands.e.add(Node("RoundTo", "F32", (result,), round_to=dtype))
    return operands.emit(result, node)


def elementwise_table() -> dict[Any, LowerFunction]:
    """Operator to lowering function."""
    return {
        **{target: _float_unary(op) for target, op in _FLOAT_UNARY.items()},
        **{target: _same_unary(op) for target, op in _SAME_UNARY.items()},
        **{target: _rounding(op) for target, op in _ROUNDING.items()},
        **{target: _arithmetic(op) for target, op in _ARITHMETIC.items()},
        **{target: _comparison(op) for target, op in _COMPARISON.items()},
        **{target: _logical(op) for target, op in _LOGICAL.items()},
        aten.logical_not.default: _logical("LogicalNot"),
        aten.isinf.default: _is("IsInf"),
        aten.isnan.default: _is("IsNan"),
        aten.add.Tensor: _add("Add"),
        aten.add.Scalar: _add("Add"),
        aten.sub.Tensor: _add("Sub"),
        aten.sub.Scalar: _add("Sub"),
        aten.rsub.Scalar: _rsub,
        aten.rsub.Tensor: _rsub,
        aten.div.Tensor: _div,
        aten.div.Scalar: _div,
        aten.div.Tensor_mode: _div,
        aten.div.Scalar_mode: _div,
        aten.floor_divide.default: _div,
        aten.pow.Tensor_Scalar: _pow_scalar,
        aten.gelu.default: _gelu,
        aten.clamp.default: _clamp,
        aten.clamp.Tensor: _clamp,
        aten.where.self: _where,
        aten.where.ScalarOther: _where,
        aten.where.ScalarSelf: _where,
        aten.masked_fill.Scalar: _masked_fill,
        aten.masked_fill.Tensor: _masked_fill,
        aten.leaky_relu.default: _leaky_relu,
        aten.elu.default: _elu,
        aten.full.default: _constant_of(lambda node: node.args[1]),
        aten.full_like.default: _constant_of(lambda node: node.args[1]),
        aten.scalar_tensor.default: _constant_of(lambda node: node.args[0]),
        aten.zeros.default: _constant_of(lambda node: 0),
        aten.zeros_like.default: _constant_of(lambda node: 0),
        aten.ones.default: _constant_of(lambda node: 1),
        aten.ones_like.default: _constant_of(lambda node: 1),
        aten.new_zeros.default: _constant_of(lambda node: 0),
        aten.new_ones.default: _constant_of(lambda node: 1),
        aten.new_full.default: _constant_of(lambda node: node.args[2]),
        aten._to_copy.default: lower_cast,
        aten.to.dtype: lower_cast,
    }
