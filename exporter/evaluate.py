"""Expressions evaluated by torch over whole index tensors: the meaning of every operation, in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexpte.exporter.expression import Expression, Node

TORCH_TYPES = {"Bool": torch.bool, "I32": torch.int32, "I64": torch.int64, "F32": torch.float32}
NARROW_TYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def _divide(rounding: str) -> Callable[[Tensor, Tensor], Tensor]:
    def divide(a: Tensor, b: Tensor) -> Tensor:
        if a.is_floating_point():
            return torch.div(a, b, rounding_mode=rounding)
        zero = b == 0
        quotient = torch.div(a, torch.where(zero, 1, b), rounding_mode=rounding)
        return torch.where(zero, 0, quotient)

    return divide


def _modulo(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def modulo(a: Tensor, b: Tensor) -> Tensor:
        if a.is_floating_point():
            return function(a, b)
        zero = b == 0
        return torch.where(zero, 0, function(a, torch.where(zero, 1, b)))

    return modulo


def _pow(a: Tensor, b: Tensor) -> Tensor:
    if a.is_floating_point():
        return torch.pow(a, b)
    # ATen: a negative integer power is 0 unless the base is 1 or -1.
    power = torch.pow(a, b.clamp_min(0))
    inverse = torch.where(a == 1, 1, torch.where(a == -1, 1 - 2 * torch.remainder(b, 2), 0))
    return torch.where(b < 0, inverse.to(a.dtype), power)


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "FloorDiv": _divide("floor"),
    "TruncDiv": _divide("trunc"),
    "Remainder": _modulo(torch.remainder),
    "Fmod": _modulo(torch.fmod),
    "Pow": _pow,
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Sign": torch.sign,
    "Min": torch.minimum,
    "Max": torch.maximum,
    "Reciprocal": torch.reciprocal,
    "Square": torch.square,
    "Eq": torch.eq,
    "Ne": torch.ne,
    "Lt": torch.lt,
    "Le": torch.le,
    "Gt": torch.gt,
    "Ge": torch.ge,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "LogicalXor": torch.logical_xor,
    "LogicalNot": torch.logical_not,
    "BitAnd": torch.bitwise_and,
    "BitOr": torch.bitwise_or,
    "BitXor": torch.bitwise_xor,
    "BitNot": torch.bitwise_not,
    "ShiftLeft": torch.bitwise_left_shift,
    "ShiftRight": torch.bitwise_right_shift,
    "Where": torch.where,
    "Exp": torch.exp,
    "Exp2": torch.exp2,
    "Expm1": torch.expm1,
    "Log": torch.log,
    "Log2": torch.log2,
    "Log10": torch.log10,
    "Log1p": torch.log1p,
    "Sqrt": torch.sqrt,
    "Rsqrt": torch.rsqrt,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Tan": torch.tan,
    "Asin": torch.asin,
    "Acos": torch.acos,
    "Atan": torch.atan,
    "Atan2": torch.atan2,
    "Sinh": torch.sinh,
    "Cosh": torch.cosh,
    "Tanh": torch.tanh,
    "Asinh": torch.asinh,
    "Acosh": torch.acosh,
    "Atanh": torch.atanh,
    "Sigmoid": torch.sigmoid,
    "Silu": torch.nn.functional.silu,
    "Erf": torch.erf,
    "GeluErf": torch.nn.functional.gelu,
    "GeluTanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "Relu": torch.relu,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Trunc": torch.trunc,
    "IsInf": torch.isinf,
    "IsNan": torch.isnan,
}
"""Operation name -> torch function of its arguments, for everything but leaves and casts."""


def constant(node: Node) -> Tensor:
    """Value of a Constant node, 0-d."""
    value = node.value_float if node.type == "F32" else node.value_int
    return torch.tensor(value, dtype=TORCH_TYPES[node.type])


def apply(node: Node, args: Sequence[Tensor]) -> Tensor:
    """Value of a node that is no leaf, from its arguments' values (they broadcast)."""
    if node.op == "Cast":
        return args[0].to(TORCH_TYPES[node.type])
    if node.op == "RoundTo":
        return args[0].to(NARROW_TYPES[node.round_to]).to(TORCH_TYPES[node.type])
    return OPERATIONS[node.op](*args)


def load(capture: Tensor, index: Sequence[Tensor], active: Tensor | None = None) -> Tensor:
    """capture[index], negative indices wrapped; 0 where an index is outside the tensor.

    Raises IndexError if that happens where ``active`` (broadcastable, bool) holds.
    """
    if not index:
        return capture
    wrapped, inside = [], torch.ones((), dtype=torch.bool)
    for position, size in zip(index, capture.shape, strict=True):
        position = position.to(torch.int64)
        position = torch.where(position < 0, position + size, position)
        inside = inside & (position >= 0) & (position < size)
        wrapped.append(position.clamp(0, max(size - 1, 0)))
    if active is not None and bool((active & ~inside).any()):
        raise IndexError(f"a mod reads outside a captured tensor of shape {tuple(capture.shape)}")
    if capture.numel() == 0:
        return torch.zeros(inside.shape, dtype=capture.dtype)
    return torch.where(inside, capture[tuple(wrapped)], torch.zeros((), dtype=capture.dtype))


def evaluate(
    expression: Expression,
    leaves: dict[str, Tensor],
    captures: Sequence[Tensor],
    scalars: Sequence[Any],
    active: Tensor | None = None,
) -> Tensor:
    """Value of an expression over broadcasting index tensors.

    ``leaves``: tensors for Score, Batch, Head, QIdx, KvIdx. Only loads where ``active`` holds must be
    inside their captures. Raises IndexError otherwise.
    """
    values: list[Tensor] = []
    for node in expression.nodes:
        dtype = TORCH_TYPES[node.type]
        args = [values[a] for a in node.args]
        if node.op == "Constant":
            values.append(constant(node))
        elif node.op == "Load":
            values.append(load(captures[node.index], args, active).to(dtype))
        elif node.op == "Scalar":
            values.append(torch.full((), scalars[node.index], dtype=dtype))
        elif node.op in leaves:
            values.append(leaves[node.op].to(dtype))
        else:
            values.append(apply(node, args))
    return values[-1]


def fold(node: Node, args: Sequence[Node]) -> Node:
    """The Constant node that a node of Constant arguments amounts to."""
    value = apply(node, [constant(a) for a in args]).to(TORCH_TYPES[node.type]).item()
    if node.type == "F32":
        return Node("Constant", "F32", value_float=float(value))
    return Node("Constant", node.type, value_int=int(value))
