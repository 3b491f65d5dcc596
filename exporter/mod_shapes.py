"""Handlers of ops of mods that move elements: what moves elements moves the numbers of their nodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from flexpte.exporter.builder import KINDS
from flexpte.exporter.mod_helpers import argument
from flexpte.exporter.translate import Free, Lanes, Translator, Value, View

aten = torch.ops.aten
prims = torch.ops.prims


def rearrange(t: Translator, node: Any) -> Value:
    """Any op that only moves elements of its tensor arguments."""
    dtypes = set()

    def nodes(argument: fx.Node) -> Any:
        lanes = t.lanes(argument)
        dtypes.add(lanes.dtype)
        return lanes.nodes

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), nodes)
    if len(dtypes) != 1:
        raise t.unsupported(f"a mod uses {node.target} on tensors of several dtypes", "Convert them first")
    dtype = dtypes.pop()
    result = node.target(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return Lanes(result, dtype)
    return tuple(Lanes(r, dtype) for r in result)


def getitem_(t: Translator, node: Any) -> Value:
    items = t.value(node.args[0])
    assert isinstance(items, tuple)
    if node.args[1] not in range(len(items)):
        raise t.unsupported(f"a mod uses {node.args[0]}", "Compute it in forward and capture the result")
    value: Value = items[node.args[1]]
    return value


def drop_dim(view: View, dim: int, replacement: Callable[[Free], int | Free], size: Any = None) -> View:
    """Fix a free dimension (size None) or replace its index; later dimensions move up when fixed."""
    index: list[int | Free] = []
    for i in view.index:
        if isinstance(i, Free) and i.dim == dim:
            index.append(replacement(i))
        elif isinstance(i, Free) and size is None and i.dim > dim:
            index.append(Free(i.dim - 1, i.start, i.step))
        else:
            index.append(i)
    shape = (*view.shape[:dim], *(() if size is None else (size,)), *view.shape[dim + 1 :])
    return View(view.capture, tuple(index), shape, view.dtype)


def select(t: Translator, node: Any) -> Value:
    value = t.value(node.args[0])
    if not isinstance(value, View):
        return rearrange(t, node)
    dim, at = node.args[1] % len(value.shape), node.args[2]
    if isinstance(at, torch.SymInt):
        return drop_dim(value, dim, lambda free: affine(t, free, t.number(at), value.shape[dim]))
    size = value.shape[dim]
    if at < 0:
        if isinstance(size, torch.SymInt):
            number = t.build.constant(at, "I64")
            return drop_dim(value, dim, lambda free: affine(t, free, number, size))
        at = at + size
    return drop_dim(value, dim, lambda free: t.build.constant(free.start + free.step * at, "I64"))


def _affine_of(t: Translator, number: int, size: Any, free: Free) -> int:
    return affine(t, free, number, size)


def affine(t: Translator, free: Free, number: int, size: Any) -> int:
    """Index into the captured tensor from an index (maybe negative) into its view."""
    if (free.start, free.step) == (0, 1):
        return number
    b = t.build
    number = b.cast(number, "I64")
    if isinstance(size, torch.SymInt):
        raise t.unsupported("a mod slices a captured tensor along a dynamic dimension", "Slice it in forward")
    wrapped = b.op(
        "Where",
        "I64",
        b.op("Lt", "Bool", number, b.constant(0, "I64")),
        b.op("Add", "I64", number, b.constant(size, "I64")),
        number,
    )
    scaled = b.op("Mul", "I64", wrapped, b.constant(free.step, "I64"))
    return b.op("Add", "I64", scaled, b.constant(free.start, "I64"))


def slice_(t: Translator, node: Any) -> Value:
    value = t.value(node.args[0])
    if not isinstance(value, View):
        return rearrange(t, node)
    dim = argument(node, 1, "dim", 0) % len(value.shape)
    start, stop, step = (argument(node, 2 + i, n) for i, n in enumerate(("start", "end", "step")))
    size = node.meta["val"].shape[dim]
    whole = value.shape[dim]
    if any(isinstance(s, torch.SymInt) for s in (start, stop, step, size, whole)):
        raise t.unsupported("a mod slices a captured tensor along a dynamic dimension", "Slice it in forward")
    first, _, step = slice(start, stop, step).indices(whole)
    return drop_dim(value, dim, lambda f: Free(dim, f.start + f.step * first, f.step * step), size)


def unsqueeze(t: Translator, node: Any) -> Value:
    value = t.value(node.args[0])
    if not isinstance(value, View):
        return rearrange(t, node)
    dim = node.args[1] % (len(value.shape) + 1)
    index = tuple(Free(i.dim + 1, i.start, i.step) if isinstance(i, Free) and i.dim >= dim else i for i in value.index)
    return View(value.capture, index, (*value.shape[:dim], 1, *value.shape[dim:]), value.dtype)


def permute(t: Translator, node: Any) -> Value:
    value = t.value(node.args[0])
    if not isinstance(value, View):
        return rearrange(t, node)
    rank = len(value.shape)
    if node.target == aten.permute.default:
        order = [d % rank for d in node.args[1]]
    elif node.target == aten.t.default:
        order = list(range(rank))[::-1]
    else:
        order = list(range(rank))
        a, b = (d % rank for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    index = tuple(Free(order.index(i.dim), i.start, i.step) if isinstance(i, Free) else i for i in value.index)
    return View(value.capture, index, tuple(value.shape[d] for d in order), value.dtype)


def index(t: Translator, node: Any) -> Value:
    source, indices = node.args
    assert isinstance(source, fx.Node)
    items: list[fx.Node | None] = list(indices)
    for item in items:
        if item is not None and not is_integer(item.meta["val"].dtype):
            raise t.unsupported(
                f"a mod indexes by a tensor of {item.meta['val'].dtype}",
                "Use integer indices, or torch.where",
            )
    numbers = [None if i is None else t.lanes(i) for i in items]
    view = t.as_view(source)
    if view is None:
        return index_lanes(t, node, t.lanes(source), numbers)
    if all(n is None or n.nodes.dim() == 0 for n in numbers):
        for dim in reversed(range(len(numbers))):
            lanes = numbers[dim]
            if lanes is not None:
                number, size = int(lanes.nodes), view.shape[dim]
                view = drop_dim(view, dim, partial(_affine_of, t, number, size))
        return view
    loaded = t.lanes(source) if isinstance(t.value(source), Lanes) else None
    if loaded is not None and all(n is None or constants(t, n) for n in numbers):
        return index_lanes(t, node, loaded, numbers)
    return index_many(t, node, view, numbers)


def constants(t: Translator, lanes: Lanes) -> bool:
    return all(t.build.constant_value(n) is not None for n in lanes.nodes.flatten().tolist())


def index_lanes(t: Translator, node: Any, source: Lanes, numbers: list[Lanes | None]) -> Lanes:
    """Indices into values computed by the mod: constant ones pick, others choose among all."""
    if all(n is None or constants(t, n) for n in numbers):
        indices = [
            None
            if n is None
            else torch.tensor(
                [t.build.constant_value(i) for i in n.nodes.flatten().tolist()], dtype=torch.int64
            ).reshape(n.nodes.shape)
            for n in numbers
        ]
        return Lanes(aten.index.Tensor(source.nodes, indices), source.dtype)
    if any(n is not None and n.nodes.dim() > 0 for n in numbers):
        raise t.unsupported(
            "a mod indexes values that it computed by a tensor of indices",
            "Index the captured tensor first, or choose with torch.where",
        )
    for dim in reversed(range(len(numbers))):
        lanes = numbers[dim]
        if lanes is not None:
            source = choose(t, source, dim, int(lanes.nodes))
    return source


def choose(t: Translator, source: Lanes, dim: int, index: int) -> Lanes:
    """source.select(dim, index), the index known only when the mod runs."""
    b, kind, type_ = t.build, KINDS[source.dtype], t.build.type_of(index)
    size = source.nodes.shape[dim]
    zero = b.constant(0, type_)
    negative = b.op("Lt", "Bool", index, zero)
    index = b.op("Where", type_, negative, b.op("Add", type_, index, b.constant(size, type_)), index)
    chosen = Lanes(source.nodes.select(dim, 0), source.dtype)
    for i in range(1, size):
        here = b.op("Eq", "Bool", index, b.constant(i, type_))
        candidate = Lanes(source.nodes.select(dim, i), source.dtype)
        chosen = t.each(lambda x, y, c=here: b.op("Where", kind, c, x, y), source.dtype, candidate, chosen)
    return chosen


def index_many(t: Translator, node: Any, view: View, numbers: list[Lanes | None]) -> Lanes:
    """Indices that are small tensors: each position of the result is loaded by itself."""
    shape = tuple(node.meta["val"].shape)
    if any(isinstance(s, torch.SymInt) for s in (*shape, *view.shape)) or math.prod(shape) > 256:
        raise t.unsupported(
            f"a mod gathers a tensor of shape {shape} for each score",
            "At most 256 elements; gather it in forward",
        )
    # ATen's own placement of dimensions, seen on tensors that hold positions in the view's dimensions.
    columns = []
    for dim, lanes in enumerate(numbers):
        if lanes is None:
            ranges = torch.arange(int(view.shape[dim])).view(-1, *[1] * (len(view.shape) - dim - 1))
            inner = [None if n is None else torch.zeros(n.nodes.shape, dtype=torch.int64) for n in numbers]
            columns.append(aten.index.Tensor(ranges.expand(view.shape), inner))
        else:
            columns.append(placed(lanes.nodes, numbers, len(shape)).expand(shape))
    for dim in range(len(numbers), len(view.shape)):
        ranges = torch.arange(int(view.shape[dim])).view(-1, *[1] * (len(view.shape) - dim - 1))
        inner = [None if n is None else torch.zeros(n.nodes.shape, dtype=torch.int64) for n in numbers]
        columns.append(aten.index.Tensor(ranges.expand(view.shape), inner))
    flat = [c.expand(shape).flatten().tolist() for c in columns]
    result = []
    for row in zip(*flat, strict=True):
        at = view
        for dim in reversed(range(len(row))):
            fixed = dim < len(numbers) and numbers[dim] is not None
            size = at.shape[dim]
            number = row[dim] if fixed else t.build.constant(row[dim], "I64")
            at = drop_dim(at, dim, partial(_affine_of, t, number, size))
        result.append(int(t.load(at).nodes))
    return Lanes(torch.tensor(result, dtype=torch.int64).reshape(shape), view.dtype)


def placed(nodes: torch.Tensor, numbers: list[Lanes | None], rank: int) -> torch.Tensor:
    """An index tensor with its dimensions where the result of indexing has them."""
    used = [d for d, n in enumerate(numbers) if n is not None]
    adjacent = used == list(range(used[0], used[-1] + 1))
    first = used[0] if adjacent else 0
    broadcast = torch.broadcast_shapes(*(n.nodes.shape for n in numbers if n is not None))
    return nodes.expand(broadcast).reshape(*broadcast, *[1] * (rank - first - len(broadcast)))


def is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def index_select(t: Translator, node: Any) -> Value:
    source, dim, index = node.args
    view = t.as_view(source)
    lanes = t.lanes(index)
    if view is None or lanes.nodes.numel() != 1:
        raise t.unsupported("a mod uses index_select", "Index with [...] instead")
    dim = dim % len(view.shape)
    fixed = drop_dim(view, dim, lambda f: affine(t, f, int(lanes.nodes.reshape(())), view.shape[dim]))
    index_ = tuple(Free(i.dim + 1, i.start, i.step) if isinstance(i, Free) and i.dim >= dim else i for i in fixed.index)
    return View(fixed.capture, index_, (*fixed.shape[:dim], 1, *fixed.shape[dim:]), fixed.dtype)
