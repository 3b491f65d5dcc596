"""ATen ops of mods to expression nodes: one literal table, op -> handler(translator, node) -> value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from flexpte.exporter.builder import KINDS
from flexpte.exporter.mod_graph import getitem, literal
from flexpte.exporter.translate import Free, Handler, Lanes, Translator, Value, View, type_of_number

aten = torch.ops.aten
prims = torch.ops.prims


def _result_dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _finish(t: Translator, node: fx.Node, lanes: Lanes) -> Lanes:
    """A result in the dtype that ATen gives it."""
    dtype = _result_dtype(node)
    return t.each(lambda n: t.build.convert(n, lanes.dtype, dtype), dtype, lanes)


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _computed(t: Translator, dtype: torch.dtype, op: str, *arguments: Lanes) -> Lanes:
    """An arithmetic op on operands of one dtype, rounded to it."""
    kind = KINDS[dtype]
    return t.each(lambda *n: t.build.narrow(t.build.op(op, kind, *n), dtype), dtype, *arguments)


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float32


# -- elementwise


def _binary(op: str, *, floating: bool = False, on_bool: str | None = None) -> Handler:
    """Operands promoted, ``op`` computed; with ``floating`` integers become float32 first."""

    def handler(t: Translator, node: fx.Node) -> Value:
        a, b = node.args[:2]
        dtype = t.promoted(a, b)
        if floating:
            dtype = _floating(dtype)
        if dtype == torch.bool and on_bool:
            return t.each(lambda *n: t.build.op(on_bool, "Bool", *n), dtype, t.lanes(a), t.lanes(b))
        return _finish(t, node, _computed(t, dtype, op, t.converted(a, dtype), t.converted(b, dtype)))

    return handler


def _add(op: str, *, reverse: bool = False) -> Handler:
    """a + alpha * b, and its relatives."""

    def handler(t: Translator, node: fx.Node) -> Value:
        a, b = node.args[:2]
        alpha = _argument(node, 2, "alpha", 1)
        dtype = t.promoted(a, b)
        if dtype == torch.bool:
            return t.each(lambda *n: t.build.op("LogicalOr", "Bool", *n), dtype, t.lanes(a), t.lanes(b))
        if reverse:
            a, b = b, a
        left, right = t.converted(a, dtype), t.converted(b, dtype)
        kind = KINDS[dtype]
        if alpha != 1:
            right = t.each(lambda x, y: t.build.op("Mul", kind, x, y), dtype, right, t.converted(alpha, dtype))
        return _finish(t, node, _computed(t, dtype, op, left, right))

    return handler


def _divide(t: Translator, node: fx.Node) -> Value:
    mode = node.kwargs.get("rounding_mode")
    op = {None: "Div", "floor": "FloorDiv", "trunc": "TruncDiv"}[mode]
    return _binary(op, floating=mode is None)(t, node)


def _compare(op: str) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        a, b = node.args[:2]
        dtype = t.promoted(a, b)
        if dtype == torch.bool:  # as integers: False < True
            dtype = torch.int32
        return t.each(
            lambda *n: t.build.op(op, "Bool", *n), torch.bool, t.converted(a, dtype), t.converted(b, dtype)
        )

    return handler


def _logical(op: str) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        lanes = [t.converted(a, torch.bool) for a in node.args[:2]]
        return t.each(lambda *n: t.build.op(op, "Bool", *n), torch.bool, *lanes)

    return handler


def _bits(op: str, logical: str) -> Handler:
    return _binary(op, on_bool=logical)


def _not(t: Translator, node: fx.Node) -> Value:
    x = t.lanes(node.args[0])
    if x.dtype == torch.bool:
        return t.each(lambda n: t.build.op("LogicalNot", "Bool", n), torch.bool, x)
    return _computed(t, x.dtype, "BitNot", x)


def _logical_not(t: Translator, node: fx.Node) -> Value:
    x = t.converted(node.args[0], torch.bool)
    return t.each(lambda n: t.build.op("LogicalNot", "Bool", n), torch.bool, x)


def _function(op: str) -> Handler:
    """A function of a float; integers become float32."""

    def handler(t: Translator, node: fx.Node) -> Value:
        dtype = _floating(t.lanes(node.args[0]).dtype)
        return _computed(t, dtype, op, t.converted(node.args[0], dtype))

    return handler


def _unary(op: str, *, integers: str | None = None) -> Handler:
    """A function that keeps the dtype; ``integers``: what it is for integers ("" for nothing to do)."""

    def handler(t: Translator, node: fx.Node) -> Value:
        x = t.lanes(node.args[0])
        if x.dtype.is_floating_point or integers is None:
            return _computed(t, x.dtype, op, x)
        return x if not integers else _computed(t, x.dtype, integers, x)

    return handler


def _round(t: Translator, node: fx.Node) -> Value:
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


def _relu(t: Translator, node: fx.Node) -> Value:
    x = t.lanes(node.args[0])
    if x.dtype.is_floating_point:
        return _computed(t, x.dtype, "Relu", x)
    return _computed(t, x.dtype, "Max", x, t.converted(0, x.dtype))


def _gelu(t: Translator, node: fx.Node) -> Value:
    approximate = node.kwargs.get("approximate", "none")
    return _function("GeluTanh" if approximate == "tanh" else "GeluErf")(t, node)


def _classify(op: str) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        x = t.lanes(node.args[0])
        if not x.dtype.is_floating_point:
            return t.each(lambda _: t.build.constant(0, "Bool"), torch.bool, x)
        return t.each(lambda n: t.build.op(op, "Bool", n), torch.bool, x)

    return handler


def _isfinite(t: Translator, node: fx.Node) -> Value:
    x = t.converted(node.args[0], torch.float32)

    def finite(n: int) -> int:
        b = t.build
        return b.op("LogicalNot", "Bool", b.op("LogicalOr", "Bool", b.op("IsInf", "Bool", n), b.op("IsNan", "Bool", n)))

    return t.each(finite, torch.bool, x)


def _infinite(sign: float) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        x = t.converted(node.args[0], torch.float32)
        infinity = t.build.constant(sign * math.inf, "F32")
        return t.each(lambda n: t.build.op("Eq", "Bool", n, infinity), torch.bool, x)

    return handler


def _power(t: Translator, node: fx.Node) -> Value:
    base, exponent = node.args[:2]
    dtype = t.promoted(base, exponent)
    x = t.converted(base, dtype)
    kind = KINDS[dtype]
    if isinstance(exponent, int | float):
        # The exponents that ATen computes without pow: aten/src/ATen/native/cpu/PowKernel.cpp.
        if exponent == 1:
            return _finish(t, node, x)
        if exponent == 2:
            return _finish(t, node, _computed(t, dtype, "Square", x))
        if exponent == 0.5 and kind == "F32":
            return _finish(t, node, _computed(t, dtype, "Sqrt", x))
        if exponent == -0.5 and kind == "F32":
            return _finish(t, node, _computed(t, dtype, "Rsqrt", x))
        if exponent == -1 and kind == "F32":
            return _finish(t, node, _computed(t, dtype, "Reciprocal", x))
        if exponent == 3:
            b = t.build
            cube = t.each(
                lambda n: b.narrow(b.op("Mul", kind, b.op("Square", kind, n), n), dtype), dtype, x
            )
            return _finish(t, node, cube)
    return _finish(t, node, _computed(t, dtype, "Pow", x, t.converted(exponent, dtype)))


def _square(t: Translator, node: fx.Node) -> Value:
    x = t.lanes(node.args[0])
    dtype = _result_dtype(node)
    return _computed(t, dtype, "Square", t.converted(node.args[0], dtype)) if dtype != x.dtype else _computed(
        t, dtype, "Square", x
    )


def _where(t: Translator, node: fx.Node) -> Value:
    condition, a, b = node.args
    dtype = _result_dtype(node)
    kind = KINDS[dtype]
    return t.each(
        lambda *n: t.build.op("Where", kind, *n),
        dtype,
        t.converted(condition, torch.bool),
        t.converted(a, dtype),
        t.converted(b, dtype),
    )


def _masked_fill(t: Translator, node: fx.Node) -> Value:
    x, mask, value = node.args
    dtype = _result_dtype(node)
    kind = KINDS[dtype]
    return t.each(
        lambda m, v, n: t.build.op("Where", kind, m, v, n),
        dtype,
        t.converted(mask, torch.bool),
        t.converted(value, dtype),
        t.converted(x, dtype),
    )


def _clamp(low_name: str | None, high_name: str | None) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        rest = [n for n in (low_name, high_name) if n]
        bounds = {n: _argument(node, 1 + i, n) for i, n in enumerate(rest)}
        dtype = _result_dtype(node)
        x = t.converted(node.args[0], dtype)
        for name, op in ((low_name, "Max"), (high_name, "Min")):
            if name and bounds[name] is not None:
                x = _computed(t, dtype, op, x, t.converted(bounds[name], dtype))
        return x

    return handler


def _number_aware(op: str) -> Handler:
    """fmax, fmin: a NaN loses."""

    def handler(t: Translator, node: fx.Node) -> Value:
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


def _reciprocal(t: Translator, node: fx.Node) -> Value:
    return _function("Reciprocal")(t, node)


# -- casts and copies


def _cast(t: Translator, node: fx.Node) -> Value:
    dtype = _result_dtype(node)
    value = t.value(node.args[0])
    if isinstance(value, View) and value.dtype == dtype:
        return value
    return t.converted(node.args[0], dtype)


def _same(t: Translator, node: fx.Node) -> Value:
    return t.value(node.args[0])


# -- constants


def _filled(value: Callable[[fx.Node], Any]) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        result = node.meta["val"]
        shape = tuple(int(s) for s in result.shape)
        filling = t.converted(value(node), result.dtype)
        return t.each(lambda n, _: n, result.dtype, filling, Lanes(torch.zeros(shape, dtype=torch.int64), result.dtype))

    return handler


def _arange(t: Translator, node: fx.Node) -> Value:
    result = node.meta["val"]
    start, step = (0, 1) if node.target == aten.arange.default else (node.args[0], 1)
    if node.target == aten.arange.start_step:
        start, step = node.args[0], _argument(node, 2, "step", 1)
    if any(type_of_number(n) is not int or isinstance(n, torch.SymInt) for n in (start, step, *result.shape)):
        raise t.unsupported("a mod calls torch.arange with other than plain integers", "Compute it in forward")
    kind = KINDS[result.dtype]
    numbers = [t.build.constant(start + step * i, kind) for i in range(result.shape[0])]
    return Lanes(torch.tensor(numbers, dtype=torch.int64), result.dtype)


def _literal(t: Translator, node: fx.Node) -> Value:
    dtype = node.kwargs["dtype"]
    values = torch.tensor(node.args[0], dtype=dtype)
    if dtype not in KINDS:
        raise t.unsupported(f"a mod makes a tensor of {dtype}", "Use a real number type")
    if values.numel() > 256:
        raise t.unsupported("a mod makes a tensor of more than 256 elements", "Capture it instead")
    numbers = [t.build.constant(v, KINDS[dtype]) for v in values.flatten().tolist()]
    return Lanes(torch.tensor(numbers, dtype=torch.int64).reshape(values.shape), dtype)


# -- shapes: what moves elements moves the numbers of their nodes


def _rearrange(t: Translator, node: fx.Node) -> Value:
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
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    if isinstance(result, torch.Tensor):
        return Lanes(result, dtype)
    return tuple(Lanes(r, dtype) for r in result)


def _getitem(t: Translator, node: fx.Node) -> Value:
    items = t.value(node.args[0])
    assert isinstance(items, tuple)
    if node.args[1] not in range(len(items)):
        raise t.unsupported(f"a mod uses {node.args[0]}", "Compute it in forward and capture the result")
    value: Value = items[node.args[1]]  # type: ignore[index]
    return value


def _drop_dim(view: View, dim: int, replacement: Callable[[Free], int | Free], size: Any = None) -> View:
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


def _select(t: Translator, node: fx.Node) -> Value:
    value = t.value(node.args[0])
    if not isinstance(value, View):
        return _rearrange(t, node)
    dim, at = node.args[1] % len(value.shape), node.args[2]  # type: ignore[operator]
    if isinstance(at, torch.SymInt):
        return _drop_dim(value, dim, lambda free: _affine(t, free, t.number(at), value.shape[dim]))
    size = value.shape[dim]
    if at < 0:  # type: ignore[operator]
        if isinstance(size, torch.SymInt):
            number = t.build.constant(at, "I64")  # type: ignore[arg-type]
            return _drop_dim(value, dim, lambda free: _affine(t, free, number, size))
        at = at + size  # type: ignore[operator]
    return _drop_dim(value, dim, lambda free: t.build.constant(free.start + free.step * at, "I64"))  # type: ignore[operator]


def _affine(t: Translator, free: Free, number: int, size: Any) -> int:
    """Index into the captured tensor from an index (maybe negative) into its view."""
    if (free.start, free.step) == (0, 1):
        return number
    b = t.build
    number = b.cast(number, "I64")
    if isinstance(size, torch.SymInt):
        raise t.unsupported("a mod slices a captured tensor along a dynamic dimension", "Slice it in forward")
    wrapped = b.op("Where", "I64", b.op("Lt", "Bool", number, b.constant(0, "I64")),
                   b.op("Add", "I64", number, b.constant(size, "I64")), number)
    scaled = b.op("Mul", "I64", wrapped, b.constant(free.step, "I64"))
    return b.op("Add", "I64", scaled, b.constant(free.start, "I64"))


def _slice(t: Translator, node: fx.Node) -> Value:
    value = t.value(node.args[0])
    if not isinstance(value, View):
        return _rearrange(t, node)
    dim = _argument(node, 1, "dim", 0) % len(value.shape)
    start, stop, step = (_argument(node, 2 + i, n) for i, n in enumerate(("start", "end", "step")))
    size = node.meta["val"].shape[dim]
    whole = value.shape[dim]
    if any(isinstance(s, torch.SymInt) for s in (start, stop, step, size, whole)):
        raise t.unsupported("a mod slices a captured tensor along a dynamic dimension", "Slice it in forward")
    first, _, step = slice(start, stop, step).indices(whole)
    return _drop_dim(value, dim, lambda f: Free(dim, f.start + f.step * first, f.step * step), size)


def _unsqueeze(t: Translator, node: fx.Node) -> Value:
    value = t.value(node.args[0])
    if not isinstance(value, View):
        return _rearrange(t, node)
    dim = node.args[1] % (len(value.shape) + 1)  # type: ignore[operator]
    index = tuple(
        Free(i.dim + 1, i.start, i.step) if isinstance(i, Free) and i.dim >= dim else i for i in value.index
    )
    return View(value.capture, index, (*value.shape[:dim], 1, *value.shape[dim:]), value.dtype)


def _permute(t: Translator, node: fx.Node) -> Value:
    value = t.value(node.args[0])
    if not isinstance(value, View):
        return _rearrange(t, node)
    rank = len(value.shape)
    if node.target == aten.permute.default:
        order = [d % rank for d in node.args[1]]  # type: ignore[union-attr,operator]
    elif node.target == aten.t.default:
        order = list(range(rank))[::-1]
    else:
        order = list(range(rank))
        a, b = (d % rank for d in node.args[1:3])  # type: ignore[operator]
        order[a], order[b] = order[b], order[a]
    index = tuple(
        Free(order.index(i.dim), i.start, i.step) if isinstance(i, Free) else i for i in value.index
    )
    return View(value.capture, index, tuple(value.shape[d] for d in order), value.dtype)


def _index(t: Translator, node: fx.Node) -> Value:
    source, indices = node.args
    assert isinstance(source, fx.Node)
    items: list[fx.Node | None] = list(indices)  # type: ignore[arg-type]
    for item in items:
        if item is not None and not _is_integer(item.meta["val"].dtype):
            raise t.unsupported(
                f"a mod indexes by a tensor of {item.meta['val'].dtype}", "Use integer indices, or torch.where"
            )
    numbers = [None if i is None else t.lanes(i) for i in items]
    view = t.as_view(source)
    if view is None:
        return _index_lanes(t, node, t.lanes(source), numbers)
    if all(n is None or n.nodes.dim() == 0 for n in numbers):
        for dim in reversed(range(len(numbers))):
            lanes = numbers[dim]
            if lanes is not None:
                number, size = int(lanes.nodes), view.shape[dim]
                view = _drop_dim(view, dim, lambda f, n=number, s=size: _affine(t, f, n, s))  # type: ignore[misc]
        return view
    loaded = t.lanes(source) if isinstance(t.value(source), Lanes) else None
    if loaded is not None and all(n is None or _constants(t, n) for n in numbers):
        return _index_lanes(t, node, loaded, numbers)
    return _index_many(t, node, view, numbers)


def _constants(t: Translator, lanes: Lanes) -> bool:
    return all(t.build.constant_value(n) is not None for n in lanes.nodes.flatten().tolist())


def _index_lanes(t: Translator, node: fx.Node, source: Lanes, numbers: list[Lanes | None]) -> Lanes:
    """Indices into values computed by the mod: constant ones pick, others choose among all."""
    if all(n is None or _constants(t, n) for n in numbers):
        indices = [
            None
            if n is None
            else torch.tensor([t.build.constant_value(i) for i in n.nodes.flatten().tolist()], dtype=torch.int64)
            .reshape(n.nodes.shape)
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
            source = _choose(t, source, dim, int(lanes.nodes))
    return source


def _choose(t: Translator, source: Lanes, dim: int, index: int) -> Lanes:
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


def _index_many(t: Translator, node: fx.Node, view: View, numbers: list[Lanes | None]) -> Lanes:
    """Indices that are small tensors: each position of the result is loaded by itself."""
    shape = tuple(node.meta["val"].shape)
    if any(isinstance(s, torch.SymInt) for s in (*shape, *view.shape)) or math.prod(shape) > 256:
        raise t.unsupported(
            f"a mod gathers a tensor of shape {shape} for each score", "At most 256 elements; gather it in forward"
        )
    # ATen's own placement of dimensions, seen on tensors that hold positions in the view's dimensions.
    columns = []
    for dim, lanes in enumerate(numbers):
        if lanes is None:
            ranges = torch.arange(view.shape[dim]).view(-1, *[1] * (len(view.shape) - dim - 1))
            inner = [None if n is None else torch.zeros(n.nodes.shape, dtype=torch.int64) for n in numbers]
            columns.append(aten.index.Tensor(ranges.expand(view.shape), inner))
        else:
            columns.append(_placed(lanes.nodes, numbers, len(shape)).expand(shape))
    for dim in range(len(numbers), len(view.shape)):
        ranges = torch.arange(view.shape[dim]).view(-1, *[1] * (len(view.shape) - dim - 1))
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
            at = _drop_dim(at, dim, lambda f, n=number, s=size: _affine(t, f, n, s))  # type: ignore[misc]
        result.append(int(t.load(at).nodes))
    return Lanes(torch.tensor(result, dtype=torch.int64).reshape(shape), view.dtype)


def _placed(nodes: torch.Tensor, numbers: list[Lanes | None], rank: int) -> torch.Tensor:
    """An index tensor with its dimensions where the result of indexing has them."""
    used = [d for d, n in enumerate(numbers) if n is not None]
    adjacent = used == list(range(used[0], used[-1] + 1))
    first = used[0] if adjacent else 0
    broadcast = torch.broadcast_shapes(*(n.nodes.shape for n in numbers if n is not None))
    return nodes.expand(broadcast).reshape(*broadcast, *[1] * (rank - first - len(broadcast)))


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _index_select(t: Translator, node: fx.Node) -> Value:
    source, dim, index = node.args
    view = t.as_view(source)  # type: ignore[arg-type]
    lanes = t.lanes(index)
    if view is None or lanes.nodes.numel() != 1:
        raise t.unsupported("a mod uses index_select", "Index with [...] instead")
    dim = dim % len(view.shape)  # type: ignore[operator]
    fixed = _drop_dim(view, dim, lambda f: _affine(t, f, int(lanes.nodes.reshape(())), view.shape[dim]))
    index_ = tuple(Free(i.dim + 1, i.start, i.step) if isinstance(i, Free) and i.dim >= dim else i for i in fixed.index)
    return View(fixed.capture, index_, (*fixed.shape[:dim], 1, *fixed.shape[dim:]), fixed.dtype)


# -- reductions of small tensors, unrolled


def _dims(node: fx.Node, rank: int) -> tuple[list[int], bool]:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keep = bool(_argument(node, 2, "keepdim", False))
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        dims = list(range(rank))
    return sorted(d % rank for d in dims) if rank else [], keep


def _reduced(t: Translator, lanes: Lanes, dims: list[int], keep: bool, combine: Callable[[int, int], int],
             empty: int | None) -> Lanes:
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


def _sum(op: str, start: float, *, mean: bool = False) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        result = _result_dtype(node)
        wide = torch.float32 if result.is_floating_point else result  # accumulated in float32, rounded once
        x = t.converted(node.args[0], wide)
        kind = KINDS[wide]
        dims, keep = _dims(node, x.nodes.dim())
        total = _reduced(t, x, dims, keep, lambda a, b: t.build.op(op, kind, a, b), t.build.constant(start, kind))
        if mean:
            count = math.prod(x.nodes.shape[d] for d in dims)
            total = t.each(lambda a, b: t.build.op("Div", kind, a, b), wide, total, t.converted(count, wide))
        return _finish(t, node, total)

    return handler


def _extreme(op: str, *, pair: bool = False) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        x = t.lanes(node.args[0])
        kind = KINDS[x.dtype]
        dims, keep = _dims(node, x.nodes.dim())
        best = _reduced(t, x, dims, keep, lambda a, b: t.build.op(op, kind, a, b), None)
        return (best,) if pair else best

    return handler


def _quantified(op: str, start: int) -> Handler:
    def handler(t: Translator, node: fx.Node) -> Value:
        x = t.converted(node.args[0], torch.bool)
        dims, keep = _dims(node, x.nodes.dim())
        return _reduced(t, x, dims, keep, lambda a, b: t.build.op(op, "Bool", a, b), t.build.constant(start, "Bool"))

    return handler


def _product(t: Translator, node: fx.Node) -> Value:
    """dot, mv, mm: accumulated in float32 (or the integer type), rounded once."""
    dtype = _result_dtype(node)
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
    return _finish(t, node, Lanes(torch.tensor(numbers, dtype=torch.int64).reshape(shape), wide))


HANDLERS: dict[Any, Handler] = {
    aten.add.Tensor: _add("Add"),
    aten.add.Scalar: _add("Add"),
    aten.sub.Tensor: _add("Sub"),
    aten.sub.Scalar: _add("Sub"),
    aten.rsub.Tensor: _add("Sub", reverse=True),
    aten.rsub.Scalar: _add("Sub", reverse=True),
    aten.mul.Tensor: _binary("Mul", on_bool="LogicalAnd"),
    aten.mul.Scalar: _binary("Mul", on_bool="LogicalAnd"),
    aten.div.Tensor: _divide,
    aten.div.Scalar: _divide,
    aten.div.Tensor_mode: _divide,
    aten.div.Scalar_mode: _divide,
    aten.floor_divide.default: _binary("FloorDiv"),
    aten.floor_divide.Scalar: _binary("FloorDiv"),
    aten.remainder.Tensor: _binary("Remainder"),
    aten.remainder.Scalar: _binary("Remainder"),
    aten.remainder.Scalar_Tensor: _binary("Remainder"),
    aten.fmod.Tensor: _binary("Fmod"),
    aten.fmod.Scalar: _binary("Fmod"),
    aten.maximum.default: _binary("Max", on_bool="LogicalOr"),
    aten.minimum.default: _binary("Min", on_bool="LogicalAnd"),
    aten.fmax.default: _number_aware("Max"),
    aten.fmin.default: _number_aware("Min"),
    aten.atan2.default: _binary("Atan2", floating=True),
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.pow.Scalar: _power,
    aten.square.default: _square,
    aten.eq.Tensor: _compare("Eq"),
    aten.eq.Scalar: _compare("Eq"),
    aten.ne.Tensor: _compare("Ne"),
    aten.ne.Scalar: _compare("Ne"),
    aten.lt.Tensor: _compare("Lt"),
    aten.lt.Scalar: _compare("Lt"),
    aten.le.Tensor: _compare("Le"),
    aten.le.Scalar: _compare("Le"),
    aten.gt.Tensor: _compare("Gt"),
    aten.gt.Scalar: _compare("Gt"),
    aten.ge.Tensor: _compare("Ge"),
    aten.ge.Scalar: _compare("Ge"),
    aten.logical_and.default: _logical("LogicalAnd"),
    aten.logical_or.default: _logical("LogicalOr"),
    aten.logical_xor.default: _logical("LogicalXor"),
    aten.logical_not.default: _logical_not,
    aten.bitwise_and.Tensor: _bits("BitAnd", "LogicalAnd"),
    aten.bitwise_and.Scalar: _bits("BitAnd", "LogicalAnd"),
    aten.bitwise_and.Scalar_Tensor: _bits("BitAnd", "LogicalAnd"),
    aten.bitwise_or.Tensor: _bits("BitOr", "LogicalOr"),
    aten.bitwise_or.Scalar: _bits("BitOr", "LogicalOr"),
    aten.bitwise_or.Scalar_Tensor: _bits("BitOr", "LogicalOr"),
    aten.bitwise_xor.Tensor: _bits("BitXor", "LogicalXor"),
    aten.bitwise_xor.Scalar: _bits("BitXor", "LogicalXor"),
    aten.bitwise_xor.Scalar_Tensor: _bits("BitXor", "LogicalXor"),
    aten.bitwise_not.default: _not,
    aten.bitwise_left_shift.Tensor: _binary("ShiftLeft"),
    aten.bitwise_left_shift.Tensor_Scalar: _binary("ShiftLeft"),
    aten.bitwise_left_shift.Scalar_Tensor: _binary("ShiftLeft"),
    aten.bitwise_right_shift.Tensor: _binary("ShiftRight"),
    aten.bitwise_right_shift.Tensor_Scalar: _binary("ShiftRight"),
    aten.bitwise_right_shift.Scalar_Tensor: _binary("ShiftRight"),
    aten.__lshift__.Scalar: _binary("ShiftLeft"),
    aten.__lshift__.Tensor: _binary("ShiftLeft"),
    aten.__rshift__.Scalar: _binary("ShiftRight"),
    aten.__rshift__.Tensor: _binary("ShiftRight"),
    aten.where.self: _where,
    aten.where.ScalarSelf: _where,
    aten.where.ScalarOther: _where,
    aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.clamp.default: _clamp("min", "max"),
    aten.clamp.Tensor: _clamp("min", "max"),
    aten.clamp_min.default: _clamp("min", None),
    aten.clamp_min.Tensor: _clamp("min", None),
    aten.clamp_max.default: _clamp(None, "max"),
    aten.clamp_max.Tensor: _clamp(None, "max"),
    aten.neg.default: _unary("Neg"),
    aten.abs.default: _unary("Abs"),
    aten.sign.default: _unary("Sign"),
    aten.sgn.default: _unary("Sign"),
    aten.floor.default: _unary("Floor", integers=""),
    aten.ceil.default: _unary("Ceil", integers=""),
    aten.trunc.default: _unary("Trunc", integers=""),
    aten.round.default: _round,
    aten.round.decimals: _round,
    aten.relu.default: _relu,
    aten.reciprocal.default: _reciprocal,
    aten.exp.default: _function("Exp"),
    aten.exp2.default: _function("Exp2"),
    aten.expm1.default: _function("Expm1"),
    aten.log.default: _function("Log"),
    aten.log2.default: _function("Log2"),
    aten.log10.default: _function("Log10"),
    aten.log1p.default: _function("Log1p"),
    aten.sqrt.default: _function("Sqrt"),
    aten.rsqrt.default: _function("Rsqrt"),
    aten.sin.default: _function("Sin"),
    aten.cos.default: _function("Cos"),
    aten.tan.default: _function("Tan"),
    aten.asin.default: _function("Asin"),
    aten.acos.default: _function("Acos"),
    aten.atan.default: _function("Atan"),
    aten.sinh.default: _function("Sinh"),
    aten.cosh.default: _function("Cosh"),
    aten.tanh.default: _function("Tanh"),
    aten.asinh.default: _function("Asinh"),
    aten.acosh.default: _function("Acosh"),
    aten.atanh.default: _function("Atanh"),
    aten.sigmoid.default: _function("Sigmoid"),
    aten.silu.default: _function("Silu"),
    aten.erf.default: _function("Erf"),
    aten.gelu.default: _gelu,
    aten.isinf.default: _classify("IsInf"),
    aten.isnan.default: _classify("IsNan"),
    aten.isfinite.default: _isfinite,
    aten.isposinf.default: _infinite(1.0),
    aten.isneginf.default: _infinite(-1.0),
    aten._to_copy.default: _cast,
    prims.convert_element_type.default: _cast,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.full.default: _filled(lambda n: n.args[1]),
    aten.full_like.default: _filled(lambda n: n.args[1]),
    aten.new_full.default: _filled(lambda n: n.args[2]),
    aten.scalar_tensor.default: _filled(lambda n: n.args[0]),
    aten.zeros.default: _filled(lambda n: 0),
    aten.zeros_like.default: _filled(lambda n: 0),
    aten.new_zeros.default: _filled(lambda n: 0),
    aten.ones.default: _filled(lambda n: 1),
    aten.ones_like.default: _filled(lambda n: 1),
    aten.new_ones.default: _filled(lambda n: 1),
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    literal: _literal,
    getitem: _getitem,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.view.default: _rearrange,
    aten._unsafe_view.default: _rearrange,
    aten.expand.default: _rearrange,
    aten.squeeze.default: _rearrange,
    aten.squeeze.dim: _rearrange,
    aten.squeeze.dims: _rearrange,
    aten.cat.default: _rearrange,
    aten.stack.default: _rearrange,
    aten.unbind.int: _rearrange,
    aten.split.Tensor: _rearrange,
    aten.split_with_sizes.default: _rearrange,
    aten.flip.default: _rearrange,
    aten.repeat.default: _rearrange,
    aten.sum.default: _sum("Add", 0),
    aten.sum.dim_IntList: _sum("Add", 0),
    aten.mean.default: _sum("Add", 0, mean=True),
    aten.mean.dim: _sum("Add", 0, mean=True),
    aten.prod.default: _sum("Mul", 1),
    aten.prod.dim_int: _sum("Mul", 1),
    aten.amax.default: _extreme("Max"),
    aten.amin.default: _extreme("Min"),
    aten.max.default: _extreme("Max"),
    aten.min.default: _extreme("Min"),
    aten.max.dim: _extreme("Max", pair=True),
    aten.min.dim: _extreme("Min", pair=True),
    aten.any.default: _quantified("LogicalOr", 0),
    aten.any.dim: _quantified("LogicalOr", 0),
    aten.any.dims: _quantified("LogicalOr", 0),
    aten.all.default: _quantified("LogicalAnd", 1),
    aten.all.dim: _quantified("LogicalAnd", 1),
    aten.all.dims: _quantified("LogicalAnd", 1),
    aten.dot.default: _product,
    aten.mv.default: _product,
    aten.mm.default: _product,
}
"""ATen op -> what it is in an expression."""

VIEWS = frozenset(
    {
        aten.select.int,
        aten.slice.Tensor,
        aten.unsqueeze.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.index.Tensor,
        aten.index_select.default,
    }
)
"""Ops that only say where in a captured tensor to read."""

REDUCTIONS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.prod.default,
        aten.prod.dim_int,
        aten.amax.default,
        aten.amin.default,
        aten.max.default,
        aten.min.default,
        aten.max.dim,
        aten.min.dim,
        aten.any.default,
        aten.any.dim,
        aten.any.dims,
        aten.all.default,
        aten.all.dim,
        aten.all.dims,
        aten.dot.default,
        aten.mv.default,
        aten.mm.default,
    }
)
"""Computed outside of the attention where their operands are captured tensors only."""
