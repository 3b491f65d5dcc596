"""Expressions as Metal (MSL 3.0) text: ints stay ints, captures are bounds-safe.

The vocabulary is that of ``metal_delegate/payload.fbs``; functions that MSL lacks are in
``metal_delegate/kernels/expression.metal``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flexpte.exporter.expression import Expression, Node

MSL_TYPES = {
    "Bool": "bool",
    "U8": "uchar",
    "I8": "char",
    "I16": "short",
    "I32": "int",
    "I64": "long",
    "F16": "half",
    "BF16": "bfloat",
    "F32": "float",
}
"""Element types of tensors in MSL, by payload name. There is no double: F64 has no entry."""

_INFIX = {"Eq": "==", "Ne": "!=", "Lt": "<", "Le": "<=", "Gt": ">", "Ge": ">="}
_LOGIC = {"LogicalAnd": "&&", "LogicalOr": "||", "LogicalXor": "!="}
_BITS = {"BitAnd": "&", "BitOr": "|", "BitXor": "^"}
# What arithmetic on Bool means where ATen gives it a Bool result.
_BOOL = {"BitAnd": "&&", "Mul": "&&", "Min": "&&", "BitOr": "||", "Add": "||", "Max": "||", "BitXor": "!="}
_INT_CALLS = {
    "Add": "expr_add",
    "Sub": "expr_sub",
    "Mul": "expr_mul",
    "Neg": "expr_neg",
    "Abs": "expr_abs",
    "Sign": "expr_sign",
    "FloorDiv": "expr_floor_div",
    "Remainder": "expr_remainder",
    "Fmod": "expr_trunc_mod",
    "TruncDiv": "expr_trunc_div",
    "Pow": "expr_int_pow",
    "Min": "min",
    "Max": "max",
    "ShiftLeft": "expr_shift_left",
    "ShiftRight": "expr_shift_right",
}
_FLOAT_INFIX = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/"}
_FLOAT_CALLS = {
    "FloorDiv": "expr_floor_div",
    "Remainder": "expr_remainder",
    "Fmod": "fmod",
    "Pow": "expr_pow",
    "Min": "expr_min",
    "Max": "expr_max",
    "Abs": "fabs",
    "Sign": "expr_sign",
    "Relu": "expr_relu",
    "Exp": "precise::exp",
    "Exp2": "precise::exp2",
    "Expm1": "expr_expm1",
    "Log": "precise::log",
    "Log2": "precise::log2",
    "Log10": "precise::log10",
    "Log1p": "expr_log1p",
    "Sqrt": "precise::sqrt",
    "Rsqrt": "precise::rsqrt",
    "Sin": "precise::sin",
    "Cos": "precise::cos",
    "Tan": "precise::tan",
    "Asin": "precise::asin",
    "Acos": "precise::acos",
    "Atan": "precise::atan",
    "Atan2": "precise::atan2",
    "Sinh": "precise::sinh",
    "Cosh": "precise::cosh",
    "Tanh": "expr_tanh",
    "Asinh": "precise::asinh",
    "Acosh": "precise::acosh",
    "Atanh": "precise::atanh",
    "Sigmoid": "expr_sigmoid",
    "Erf": "expr_erf",
    "GeluErf": "expr_gelu_erf",
    "GeluTanh": "expr_gelu_tanh",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "rint",  # halves to even, as torch.round
    "Trunc": "trunc",
}
_LEAVES = {"Score": "score", "Batch": "b", "Head": "h", "QIdx": "q_idx", "KvIdx": "kv_idx"}


def converted(text: str, source: str, target: str) -> str:
    """MSL text that converts a value between two element types (payload names) as ATen casts.

    Floats round to nearest even, integers wrap, nonzero is true, floats truncate to integers.
    """
    if source == target:
        return text
    is_float = source in ("F32", "F16", "BF16")
    widened = f"float({text})" if source in ("F16", "BF16") else text
    if target == "Bool":
        return f"({text} != {MSL_TYPES[source]}(0))"
    if is_float and target in ("I64", "I32", "I16", "I8", "U8"):
        if target == "I32":
            return f"expr_to_int({widened})"
        long = f"expr_to_long({widened})"
        return long if target == "I64" else f"{MSL_TYPES[target]}({long})"
    if target in ("F16", "BF16"):
        return f"{MSL_TYPES[target]}({widened if is_float else f'float({text})'})"
    return f"{MSL_TYPES[target]}({text})"


def statements(
    expression: Expression,
    capture_types: Sequence[str],
    *,
    input_types: Sequence[str] = (),
    first_capture: int = 0,
    first_scalar: int = 0,
    indent: str = "  ",
) -> tuple[list[str], str]:
    """MSL statements that compute an expression, and the name of the result, of the expression's type.

    ``capture_types``, ``input_types``: payload names of the elements of captures and elementwise inputs.
    The text expects in scope: ``score, b, h, q_idx, kv_idx`` (mods) or ``input_0`` … (elementwise);
    ``capture_0`` … from number ``first_capture``, ``views`` with one entry a capture, and ``scalars`` from
    ``first_scalar``; where there are captures, ``status``, where ``instruction`` is left when an index is outside.
    """
    needed = _reachable(expression)
    lines: list[str] = []
    for number, node in enumerate(expression.nodes):
        if number not in needed:
            continue
        if node.op == "Load":
            lines += _load(number, node, expression, capture_types[node.index], first_capture, indent)
            continue
        text = _operation(node, expression, input_types, first_scalar)
        lines.append(f"{indent}const {MSL_TYPES[node.type]} v{number} = {text};")
    return lines, f"v{len(expression.nodes) - 1}"


def _reachable(expression: Expression) -> set[int]:
    result = {len(expression.nodes) - 1}
    for number in range(len(expression.nodes) - 1, -1, -1):
        if number in result:
            result.update(expression.nodes[number].args)
    return result


def _load(number: int, node: Node, expression: Expression, stored: str, first_capture: int, indent: str) -> list[str]:
    capture = first_capture + node.index
    terms = [f"expr_index(views[{capture}], {dim}, long(v{a}), inside_{number})" for dim, a in enumerate(node.args)]
    target = MSL_TYPES[node.type]
    value = converted(f"capture_{capture}[at_{number}]", stored, node.type)
    return [
        f"{indent}bool inside_{number} = true;",
        f"{indent}const long at_{number} = {' + '.join(terms) or '0L'};",
        f"{indent}{target} v{number} = {target}(0);",
        f"{indent}if (inside_{number}) v{number} = {value};",
        f"{indent}if (!inside_{number}) atomic_store_explicit(status, instruction, memory_order_relaxed);",
    ]


def _operation(node: Node, expression: Expression, input_types: Sequence[str], first_scalar: int) -> str:
    args = [f"v{a}" for a in node.args]
    op = node.op
    if op == "Constant":
        return _constant(node)
    if op == "Input":
        return converted(f"input_{node.index}", input_types[node.index], node.type)
    if op in _LEAVES:
        return _LEAVES[op] if node.type in ("F32", "I32") else f"long({_LEAVES[op]})"
    if op == "Scalar":
        return converted(f"scalars[{first_scalar + node.index}]", "I64", node.type)
    operand = expression.nodes[node.args[1 if op == "Where" else 0]].type
    if op == "Cast":
        return converted(args[0], operand, node.type)
    if op == "RoundTo":
        narrow = MSL_TYPES[node.round_to]
        return args[0] if node.round_to == node.type else f"{MSL_TYPES[node.type]}({narrow}({args[0]}))"
    if op == "Where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if op in _INFIX:
        return f"{args[0]} {_INFIX[op]} {args[1]}"
    if op in _LOGIC or op == "LogicalNot":
        zero = f"{MSL_TYPES[operand]}(0)"
        truths = args if operand == "Bool" else [f"({a} != {zero})" for a in args]
        return f"!{truths[0]}" if op == "LogicalNot" else f"{truths[0]} {_LOGIC[op]} {truths[1]}"
    if op == "IsNan":
        return f"isnan({args[0]})" if operand == "F32" else "false"
    if op == "IsInf":
        return f"isinf({args[0]})" if operand == "F32" else "false"
    if operand == "Bool":
        return f"!{args[0]}" if op == "BitNot" else f"{args[0]} {_BOOL[op]} {args[1]}"
    return _float(op, args) if operand == "F32" else _integer(op, args, MSL_TYPES[operand])


def _integer(op: str, args: list[str], name: str) -> str:
    if op in _INT_CALLS:
        return f"{_INT_CALLS[op]}({', '.join(args)})"
    if op in _BITS:
        return f"{args[0]} {_BITS[op]} {args[1]}"
    if op == "BitNot":
        return f"~{args[0]}"
    if op == "Square":
        return f"expr_mul({args[0]}, {args[0]})"
    if op == "Relu":
        return f"max({args[0]}, {name}(0))"
    if op in ("Floor", "Ceil", "Round", "Trunc"):
        return args[0]
    raise KeyError(f"no MSL for {op} of {name}")


def _float(op: str, args: list[str]) -> str:
    if op in _FLOAT_INFIX:
        return f"{args[0]} {_FLOAT_INFIX[op]} {args[1]}"
    if op in _FLOAT_CALLS:
        return f"{_FLOAT_CALLS[op]}({', '.join(args)})"
    if op == "Neg":
        return f"-{args[0]}"
    if op == "Square":
        return f"{args[0]} * {args[0]}"
    if op == "Reciprocal":
        return f"1.0f / {args[0]}"
    if op == "Silu":
        return f"{args[0]} / (1.0f + precise::exp(-{args[0]}))"
    if op == "TruncDiv":
        return f"trunc({args[0]} / {args[1]})"
    raise KeyError(f"no MSL for {op} of float")


def _constant(node: Node) -> str:
    if node.type == "Bool":
        return "true" if node.value_int else "false"
    if node.type == "I32":
        return str(node.value_int) if node.value_int > -(2**31) else "-2147483647 - 1"
    if node.type == "I64":
        return f"{node.value_int}L" if node.value_int > -(2**63) else "-9223372036854775807L - 1L"
    value = np.float32(node.value_float)
    if np.isnan(value):
        return "NAN"
    if np.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{float(np.format_float_scientific(value, unique=True))!r}f"
