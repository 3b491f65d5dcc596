"""ATen's view operators as strided aliases; cat and stack as copies into slices of their result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from flexpte.exporter import views
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.ir import Size
from flexpte.exporter.lower import LowerFunction, Lowering
from flexpte.exporter.symbols import plus, same, size_of

aten = torch.ops.aten


def _sizes(node: fx.Node) -> tuple[Size, ...]:
    return tuple(size_of(s) for s in node.meta["val"].shape)


def _dim(node: fx.Node, position: int, default: int | None, rank: int) -> int:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    assert isinstance(dim, int)
    return dim + rank if dim < 0 else dim


def _reshape(b: Lowering, node: fx.Node) -> int:
    return b.reshaped(b.arg(node.args[0]), _sizes(node), node)


def _permute(b: Lowering, node: fx.Node) -> int:
    value = b.view(b.arg(node.args[0]))
    dims: Any = node.args[1]
    return b.number(views.permute(value, [d % len(value.sizes) for d in dims]))


def _transpose(b: Lowering, node: fx.Node) -> int:
    value = b.view(b.arg(node.args[0]))
    rank = len(value.sizes)
    dims = list(range(rank))
    if rank > 1:
        i, j = (0, 1) if node.target is aten.t.default else (_dim(node, 1, None, rank), _dim(node, 2, None, rank))
        dims[i], dims[j] = dims[j], dims[i]
    return b.number(views.permute(value, dims))


def _expand(b: Lowering, node: fx.Node) -> int:
    return b.broadcast(b.arg(node.args[0]), _sizes(node))


def _unsqueeze(b: Lowering, node: fx.Node) -> int:
    value = b.view(b.arg(node.args[0]))
    return b.number(views.unsqueeze(value, _dim(node, 1, None, len(value.sizes) + 1)))


def _squeeze(b: Lowering, node: fx.Node) -> int:
    value = b.view(b.arg(node.args[0]))
    rank = len(value.sizes)
    dims: Any = node.args[1] if len(node.args) > 1 else range(rank)
    for dim in sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims)}, reverse=True):
        if same(value.sizes[dim], 1):
            value = views.squeeze(value, dim)
    return b.number(value)


def _start(b: Lowering, argument: Any, size: Size, what: str) -> Size:
    """A position in a dimension, counted from its front."""
    start = b.size_arg(argument)
    if not isinstance(start, int):
        if start.is_nonnegative is False:
            raise Unsupported(f"a {what} that depends on sizes and may be negative ({start})")
        return start
    if start >= 0:
        return start
    if isinstance(size, int):
        return max(0, size + start)
    return plus(size, start)


def slice_of(b: Lowering, node: fx.Node, position: int) -> tuple[int, Size, Size, int]:
    """Dimension, start, length and step of a slice whose arguments begin at ``position``."""
    value = b.view(b.arg(node.args[0]))
    arguments: list[Any] = [*node.args[position:], *(None,) * 4]
    dim, start, end, step = arguments[:4]
    dim = (dim or 0) % len(value.sizes)
    step = 1 if step is None else step
    if not isinstance(step, int):
        raise Unsupported("a slice whose step is computed while running")
    size = value.sizes[dim]
    first = 0 if start is None else _start(b, start, size, "slice start")
    return dim, first, (0 if end is None else b.size_arg(end)), step


def _slice(b: Lowering, node: fx.Node) -> int:
    value = b.view(b.arg(node.args[0]))
    dim, start, _, step = slice_of(b, node, 1)
    length = _sizes(node)[dim]
    if same(length, value.sizes[dim]):
        return b.arg(node.args[0])
    if isinstance(start, int) and isinstance(value.sizes[dim], int):
        start = min(start, value.sizes[dim])
    return b.number(views.narrow(value, dim, start, length, step))


def _narrow(b: Lowering, node: fx.Node) -> int:
    value = b.view(b.arg(node.args[0]))
    dim = _dim(node, 1, None, len(value.sizes))
    start = _start(b, node.args[2], value.sizes[dim], "start of a narrow")
    return b.number(views.narrow(value, dim, start, b.size_arg(node.args[3])))


def _select(b: Lowering, node: fx.Node) -> int:
    value = b.view(b.arg(node.args[0]))
    dim = _dim(node, 1, None, len(value.sizes))
    return b.number(views.select(value, dim, _start(b, node.args[2], value.sizes[dim], "select index")))


def _split(b: Lowering, node: fx.Node) -> tuple[int, ...]:
    value = b.view(b.arg(node.args[0]))
    vals = node.meta["val"]
    dim = _dim(node, 1 if node.target is aten.unbind.int else 2, 0, len(value.sizes))
    parts, start = [], 0
    for val in vals:
        if node.target is aten.unbind.int:
            parts.append(b.number(views.select(value, dim, start)))
            start = plus(start, 1)
        else:
            length = size_of(val.shape[dim])
            parts.append(b.number(views.narrow(value, dim, start, length)))
            start = plus(start, length)
    return tuple(parts)


def _getitem(b: Lowering, node: fx.Node) -> int:
    source, index = node.args
    results = b.env.get(source)  # type: ignore[arg-type]
    if not isinstance(results, tuple) or not isinstance(index, int):
        raise Unsupported(f"{source} comes from a node that is not delegated")
    if results[index] < 0:
        raise Unsupported(f"result {index} of {source}")
    return results[index]


def _alias(b: Lowering, node: fx.Node) -> int:
    return b.arg(node.args[0])


def _clone(b: Lowering, node: fx.Node) -> int:
    number = b.arg(node.args[0])
    return b.materialised(number, node) if b.state_of(number) else number


def _cat(b: Lowering, node: fx.Node) -> int:
    out = b.out(node)
    whole = b.view(out)
    dim = _dim(node, 1, 0, len(whole.sizes))
    start: Size = 0
    for tensor in node.args[0]:  # type: ignore[union-attr]
        number = b.arg(tensor)
        length = b.view(number).sizes
        if len(length) != len(whole.sizes):
            continue  # ATen: an empty tensor of rank 1 is skipped
        b.copy_into(number, b.number(views.narrow(whole, dim, start, length[dim])), node)
        start = plus(start, length[dim])
    return out


def _stack(b: Lowering, node: fx.Node) -> int:
    out = b.out(node)
    whole = b.view(out)
    dim = _dim(node, 1, 0, len(whole.sizes))
    for position, tensor in enumerate(node.args[0]):  # type: ignore[arg-type]
        b.copy_into(b.arg(tensor), b.number(views.select(whole, dim, position)), node)
    return out


def _repeat(b: Lowering, node: fx.Node) -> int:
    value = b.view(b.arg(node.args[0]))
    repeats = [b.size_arg(r) for r in node.args[1]]  # type: ignore[union-attr]
    sizes = (*(1,) * (len(repeats) - len(value.sizes)), *value.sizes)
    value = views.expand(value, sizes)
    out = b.out(node)
    tiled, split = [], []  # [r0, s0, r1, s1, ...]: each dimension repeats a stride-0 one
    source_strides: list[Size] = []
    for repeat, size, stride in zip(repeats, sizes, value.strides, strict=True):
        if same(repeat, 1):
            tiled.append(size)
            source_strides.append(stride)
        else:
            tiled += [repeat, size]
            source_strides += [0, stride]
        split.append(size)
    source = replace(value, sizes=tuple(tiled), strides=tuple(source_strides))
    target = views.reshape(b.view(out), tiled)
    assert target is not None
    b.copy_into(b.number(source), b.number(target), node)
    return out


def view_table() -> dict[Any, LowerFunction]:
    """Operator to lowering function."""
    import operator

    return {
        operator.getitem: _getitem,
        aten.view.default: _reshape,
        aten._unsafe_view.default: _reshape,
        aten.reshape.default: _reshape,
        aten.unflatten.int: _reshape,
        aten.flatten.using_ints: _reshape,
        aten.permute.default: _permute,
        aten.transpose.int: _transpose,
        aten.t.default: _transpose,
        aten.expand.default: _expand,
        aten.unsqueeze.default: _unsqueeze,
        aten.squeeze.default: _squeeze,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.slice.Tensor: _slice,
        aten.narrow.default: _narrow,
        aten.select.int: _select,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
        aten.chunk.default: _split,
        aten.unbind.int: _split,
        aten.alias.default: _alias,
        aten.detach.default: _alias,
        aten.detach_.default: _alias,
        aten.lift_fresh_copy.default: _clone,
        aten.clone.default: _clone,
        aten.contiguous.default: _clone,
        aten.cat.default: _cat,
        aten.stack.default: _stack,
        aten.repeat.default: _repeat,
    }
