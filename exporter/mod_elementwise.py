"""Handlers of elementwise ops, casts and constants of mods."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from flexpte.exporter.builder import KINDS
from flexpte.exporter.mod_helpers import argument, as_floating, computed, finish, result_dtype
from flexpte.exporter.translate import Handler, Lanes, Translator, Value, View, type_of_number

aten = torch.ops.aten
prims = torch.ops.prims


def binary(op: str, *, floating: bool = False, on_bool: str | None = None) -> Handler:
    """Operands promoted, ``op`` computed; with ``floating`` integers become float32 first."""

    def handler(t: Translator, node: Any) -> Value:
        a, b = node.args[:2]
        dtype = t.promoted(a, b)
        if floating:
            dtype = as_floating(dtype)
        if dtype == torch.bool and on_bool:
            return t.each(lambda *n: t.build.op(on_bool, "Bool", *n), dtype, t.lanes(a), t.lanes(b))
        return finish(t, node, computed(t, dtype, op, t.converted(a, dtype), t.converted(b, dtype)))

    return handler


def add(op: str, *, reverse: bool = False) -> Handler:
    """a + alpha * b, and its relatives."""

    def handler(t: Translator, node: Any) -> Value:
        a, b = node.args[:2]
        alpha = argument(node, 2, "alpha", 1)
        dtype = t.promoted(a, b)
        if dtype == torch.bool:
            return t.each(lambda *n: t.build.op("LogicalOr", "Bool", *n), dtype, t.lanes(a), t.lanes(b))
        if reverse:
            a, b = b, a
        left, right = t.converted(a, dtype), t.converted(b, dtype)
        kind = KINDS[dtype]
        if alpha != 1:
            right = t.each(lambda x, y: t.build.op("Mul", kind, x, y), dtype, right, t.converted(alpha, dtype))
        return finish(t, node, computed(t, dtype, op, left, right))

    return handler


def divide(t: Translator, node: Any) -> Value:
    mode = node.kwargs.get("rounding_mode")
    op = {None: "Div", "floor": "FloorDiv", "trunc": "TruncDiv"}[mode]
    return binary(op, floating=mode is None)(t, node)


def compare(op: str) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        a, b = node.args[:2]
        dtype = t.promoted(a, b)
        if dtype == torch.bool:  # as integers: False < True
            dtype = torch.int32
        return t.each(lambda *n: t.build.op(op, "Bool", *n), torch.bool, t.converted(a, dtype), t.converted(b, dtype))

    return handler


def logical(op: str) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        lanes = [t.converted(a, torch.bool) for a in node.args[:2]]
        return t.each(lambda *n: t.build.op(op, "Bool", *n), torch.bool, *lanes)

    return handler


def bits(op: str, logical: str) -> Handler:
    return binary(op, on_bool=logical)


def bit_not(t: Translator, node: Any) -> Value:
    x = t.lanes(node.args[0])
    if x.dtype == torch.bool:
        return t.each(lambda n: t.build.op("LogicalNot", "Bool", n), torch.bool, x)
    return computed(t, x.dtype, "BitNot", x)


def logical_not(t: Translator, node: Any) -> Value:
    x = t.converted(node.args[0], torch.bool)
    return t.each(lambda n: t.build.op("LogicalNot", "Bool", n), torch.bool, x)


def function(op: str) -> Handler:
    """A function of a float; integers become float32."""

    def handler(t: Translator, node: Any) -> Value:
        dtype = as_floating(t.lanes(node.args[0]).dtype)
        return computed(t, dtype, op, t.converted(node.args[0], dtype))

    return handler


def unary(op: str, *, integers: str | None = None) -> Handler:
    """A function that keeps the dtype; ``integers``: what it is for integers ("" for nothing to do)."""

    def handler(t: Translator, node: Any) -> Value:
        x = t.lanes(node.args[0])
        if x.dtype.is_floating_point or integers is None:
            return computed(t, x.dtype, op, x)
        return x if not integers else computed(t, x.dtype, integers, x)

    return handler


def round_(t: Translator, node: Any) -> Value:
    decimals = node.kwargs.get("decimals", 0)
    x = t.lanes(node.args[0])
    if not x.dtype.is_floating_point:
        return x
    # ATen: nearbyint(x * 10^d) / 10^d, and the other way round for negative d.
    power = t.converted(float(10 ** abs(decimals)), x.dtype)
    before, after = ("Mul", "Div") if decimals >= 0 else ("Div", "Mul")

    def rounded(n: int, p: int) -> int:
        b = t.build
        if decimals == 0:
            return b.op("Round", "F32", n)
        return b.narrow(b.op(after, "F32", b.op("Round", "F32", b.op(before, "F32", n, p)), p), x.dtype)

    return t.each(rounded, x.dtype, x, power)


def relu(t: Translator, node: Any) -> Value:
    x = t.lanes(node.args[0])
    if x.dtype.is_floating_point:
        return computed(t, x.dtype, "Relu", x)
    return computed(t, x.dtype, "Max", x, t.converted(0, x.dtype))


def gelu(t: Translator, node: Any) -> Value:
    approximate = node.kwargs.get("approximate", "none")
    return function("GeluTanh" if approximate == "tanh" else "GeluErf")(t, node)


def classify(op: str) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        x = t.lanes(node.args[0])
        if not x.dtype.is_floating_point:
            return t.each(lambda _: t.build.constant(0, "Bool"), torch.bool, x)
        return t.each(lambda n: t.build.op(op, "Bool", n), torch.bool, x)

    return handler


def isfinite(t: Translator, node: Any) -> Value:
    x = t.converted(node.args[0], torch.float32)

    def finite(n: int) -> int:
        b = t.build
        return b.op(
            "LogicalNot",
            "Bool",
            b.op("LogicalOr", "Bool", b.op("IsInf", "Bool", n), b.op("IsNan", "Bool", n)),
        )

    return t.each(finite, torch.bool, x)


def infinite(sign: float) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        x = t.converted(node.args[0], torch.float32)
        infinity = t.build.constant(sign * math.inf, "F32")
        return t.each(lambda n: t.build.op("Eq", "Bool", n, infinity), torch.bool, x)

    return handler


def power(t: Translator, node: Any) -> Value:
    base, exponent = node.args[:2]
    dtype = t.promoted(base, exponent)
    x = t.converted(base, dtype)
    kind = KINDS[dtype]
    if isinstance(exponent, int | float):
        # The exponents that ATen computes without pow: aten/src/ATen/native/cpu/PowKernel.cpp.
        if exponent == 1:
            return finish(t, node, x)
        if exponent == 2:
            return finish(t, node, computed(t, dtype, "Square", x))
        if exponent == 0.5 and kind == "F32":
            return finish(t, node, computed(t, dtype, "Sqrt", x))
        if exponent == -0.5 and kind == "F32":
            return finish(t, node, computed(t, dtype, "Rsqrt", x))
        if exponent == -1 and kind == "F32":
            return finish(t, node, computed(t, dtype, "Reciprocal", x))
        if exponent == 3:
            b = t.build
            cube = t.each(lambda n: b.narrow(b.op("Mul", kind, b.op("Square", kind, n), n), dtype), dtype, x)
            return finish(t, node, cube)
    return finish(t, node, computed(t, dtype, "Pow", x, t.converted(exponent, dtype)))


def square(t: Translator, node: Any) -> Value:
    x = t.lanes(node.args[0])
    dtype = result_dtype(node)
    return (
        computed(t, dtype, "Square", t.converted(node.args[0], dtype))
        if dtype != x.dtype
        else computed(t, dtype, "Square", x)
    )


def where(t: Translator, node: Any) -> Value:
    condition, a, b = node.args
    dtype = result_dtype(node)
    kind = KINDS[dtype]
    return t.each(
        lambda *n: t.build.op("Where", kind, *n),
        dtype,
        t.converted(condition, torch.bool),
        t.converted(a, dtype),
        t.converted(b, dtype),
    )


def masked_fill(t: Translator, node: Any) -> Value:
    x, mask, value = node.args
    dtype = result_dtype(node)
    kind = KINDS[dtype]
    return t.each(
        lambda m, v, n: t.build.op("Where", kind, m, v, n),
        dtype,
        t.converted(mask, torch.bool),
        t.converted(value, dtype),
        t.converted(x, dtype),
    )


def clamp(low_name: str | None, high_name: str | None) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        rest = [n for n in (low_name, high_name) if n]
        bounds = {n: argument(node, 1 + i, n) for i, n in enumerate(rest)}
        dtype = result_dtype(node)
        x = t.converted(node.args[0], dtype)
        for name, op in ((low_name, "Max"), (high_name, "Min")):
            if name and bounds[name] is not None:
                x = computed(t, dtype, op, x, t.converted(bounds[name], dtype))
        return x

    return handler


def number_aware(op: str) -> Handler:
    """fmax, fmin: a NaN loses."""

    def handler(t: Translator, node: Any) -> Value:
        a, b = node.args[:2]
        dtype = t.promoted(a, b)
        kind = KINDS[dtype]

        def pick(x: int, y: int) -> int:
            both = t.build.op(op, kind, x, y)
            if kind != "F32":
                return both
            without_y = t.build.op("Where", kind, t.build.op("IsNan", "Bool", y), x, both)
            return t.build.op("Where", kind, t.build.op("IsNan", "Bool", x), y, without_y)

        return t.each(pick, dtype, t.converted(a, dtype), t.converted(b, dtype))

    return handler


def reciprocal(t: Translator, node: Any) -> Value:
    return function("Reciprocal")(t, node)


def cast(t: Translator, node: Any) -> Value:
    dtype = result_dtype(node)
    value = t.value(node.args[0])
    if isinstance(value, View) and value.dtype == dtype:
        return value
    return t.converted(node.args[0], dtype)


def same(t: Translator, node: Any) -> Value:
    return t.value(node.args[0])


def filled(value: Callable[[fx.Node], Any]) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        result = node.meta["val"]
        shape = tuple(int(s) for s in result.shape)
        filling = t.converted(value(node), result.dtype)
        return t.each(lambda n, _: n, result.dtype, filling, Lanes(torch.zeros(shape, dtype=torch.int64), result.dtype))

    return handler


def arange(t: Translator, node: Any) -> Value:
    result = node.meta["val"]
    start, step = (0, 1) if node.target == aten.arange.default else (node.args[0], 1)
    if node.target == aten.arange.start_step:
        start, step = node.args[0], argument(node, 2, "step", 1)
    if any(type_of_number(n) is not int or isinstance(n, torch.SymInt) for n in (start, step, *result.shape)):
        raise t.unsupported("a mod calls torch.arange with other than plain integers", "Compute it in forward")
    kind = KINDS[result.dtype]
    numbers = [t.build.constant(start + step * i, kind) for i in range(result.shape[0])]
    return Lanes(torch.tensor(numbers, dtype=torch.int64), result.dtype)


def literal_(t: Translator, node: Any) -> Value:
    dtype = node.kwargs["dtype"]
    values = torch.tensor(node.args[0], dtype=dtype)
    if dtype not in KINDS:
        raise t.unsupported(f"a mod makes a tensor of {dtype}", "Use a real number type")
    if values.numel() > 256:
        raise t.unsupported("a mod makes a tensor of more than 256 elements", "Capture it instead")
    numbers = [t.build.constant(v, KINDS[dtype]) for v in values.flatten().tolist()]
    return Lanes(torch.tensor(numbers, dtype=torch.int64).reshape(values.shape), dtype)
