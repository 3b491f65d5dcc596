"""Handlers of reductions of small tensors in mods, unrolled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flexpte.exporter.builder import KINDS
from flexpte.exporter.mod_helpers import argument, finish, result_dtype
from flexpte.exporter.translate import Handler, Lanes, Translator, Value

aten = torch.ops.aten
prims = torch.ops.prims


def reduced_dims(node: Any, rank: int) -> tuple[list[int], bool]:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keep = bool(argument(node, 2, "keepdim", False))
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        dims = list(range(rank))
    return sorted(d % rank for d in dims) if rank else [], keep


def reduced(
    t: Translator,
    lanes: Lanes,
    dims: list[int],
    keep: bool,
    combine: Callable[[int, int], int],
    empty: Any,
) -> Lanes:
    rank = lanes.nodes.dim()
    kept = [d for d in range(rank) if d not in dims]
    rows = lanes.nodes.permute(*kept, *dims).reshape(*(lanes.nodes.shape[d] for d in kept), -1)
    out = []
    for row in rows.reshape(-1, rows.shape[-1]).tolist():
        if not row and empty is None:
            raise t.unsupported("a mod takes the maximum or minimum of nothing", "Reduce at least one element")
        total = row[0] if row else empty
        for number in row[1:]:
            total = combine(total, number)
        out.append(total)
    shape = [1 if d in dims else lanes.nodes.shape[d] for d in range(rank)] if keep else list(rows.shape[:-1])
    return Lanes(torch.tensor(out, dtype=torch.int64).reshape(shape), lanes.dtype)


def total(op: str, start: float, *, mean: bool = False) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        result = result_dtype(node)
        wide = torch.float32 if result.is_floating_point else result  # accumulated in float32, rounded once
        x = t.converted(node.args[0], wide)
        kind = KINDS[wide]
        dims, keep = reduced_dims(node, x.nodes.dim())
        total = reduced(t, x, dims, keep, lambda a, b: t.build.op(op, kind, a, b), t.build.constant(start, kind))
        if mean:
            count = math.prod(x.nodes.shape[d] for d in dims)
            total = t.each(lambda a, b: t.build.op("Div", kind, a, b), wide, total, t.converted(count, wide))
        return finish(t, node, total)

    return handler


def extreme(op: str, *, pair: bool = False) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        x = t.lanes(node.args[0])
        kind = KINDS[x.dtype]
        dims, keep = reduced_dims(node, x.nodes.dim())
        best = reduced(t, x, dims, keep, lambda a, b: t.build.op(op, kind, a, b), None)
        return (best,) if pair else best

    return handler


def quantified(op: str, start: int) -> Handler:
    def handler(t: Translator, node: Any) -> Value:
        x = t.converted(node.args[0], torch.bool)
        dims, keep = reduced_dims(node, x.nodes.dim())
        return reduced(t, x, dims, keep, lambda a, b: t.build.op(op, "Bool", a, b), t.build.constant(start, "Bool"))

    return handler


def product(t: Translator, node: Any) -> Value:
    """dot, mv, mm: accumulated in float32 (or the integer type), rounded once."""
    dtype = result_dtype(node)
    wide = torch.float32 if dtype.is_floating_point else dtype
    a, b = (t.converted(x, wide).nodes for x in node.args[:2])
    kind = KINDS[wide]
    left = a.reshape(1, -1) if a.dim() == 1 else a
    right = b.reshape(-1, 1) if b.dim() == 1 else b
    if left.shape[0] * left.shape[1] * right.shape[1] > 256:
        raise t.unsupported(f"a mod multiplies matrices ({node.target})", "Compute the product in forward")
    numbers = []
    for row in left.tolist():
        for column in right.t().tolist():
            total = t.build.constant(0, kind)
            for i, (x, y) in enumerate(zip(row, column, strict=True)):
                term = t.build.op("Mul", kind, x, y)
                total = term if i == 0 else t.build.op("Add", kind, total, term)
            numbers.append(total)
    shape = tuple(int(s) for s in node.meta["val"].shape)
    return finish(t, node, Lanes(torch.tensor(numbers, dtype=torch.int64).reshape(shape), wide))
