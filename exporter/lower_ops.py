"""Operators that are neither elementwise nor views: products, norms, gathers, states, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from flexpte.exporter import ir, views
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.expression import from_json
from flexpte.exporter.flex_op import flex_attention_op
from flexpte.exporter.ir import Size, Value
from flexpte.exporter.lower import LowerFunction, Lowering, dtype_of
from flexpte.exporter.lower_elementwise import elementwise_table
from flexpte.exporter.lower_views import slice_of, view_table
from flexpte.exporter.scalars import ExpressionBuilder
from flexpte.exporter.symbols import product, same, size_of

aten = torch.ops.aten


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _floating(b: Lowering, *numbers: int) -> None:
    for number in numbers:
        if number >= 0 and b.view(number).dtype not in ir.FLOATING:
            raise Unsupported(f"a {b.view(number).dtype} operand", fix="Convert it to a floating dtype first")


# Products.


def _weight(b: Lowering, number: int, node: fx.Node) -> int:
    return b.contiguous(number, node)


def _linear_into(b: Lowering, node: fx.Node, x: int, weight: int, bias: int = -1) -> int:
    _floating(b, x, weight, bias)
    out = b.out(node)
    if bias >= 0:
        bias = b.contiguous(bias, node)
    b.emit(ir.Linear(b.rows(x, node), _weight(b, weight, node), out, bias), node)
    return out


def _linear(b: Lowering, node: fx.Node) -> int:
    x, weight = b.arg(node.args[0]), b.arg(node.args[1])
    if len(b.view(weight).sizes) != 2 or not b.view(x).sizes:
        raise Unsupported("a weight that is not a matrix")
    bias = _argument(node, 2, "bias")
    return _linear_into(b, node, x, weight, -1 if bias is None else b.arg(bias))


def _is_linear(b: Lowering, right: int) -> bool:
    """Whether the right operand is a transposed constant [N, K], which Linear reads as it lies."""
    value = b.view(right)
    return (
        len(value.sizes) == 2
        and b.storages[value.storage].kind == "Constant"
        and views.is_contiguous(views.permute(value, (1, 0)))
    )


def _matmul(b: Lowering, node: fx.Node) -> int:
    left, right = b.arg(node.args[0]), b.arg(node.args[1])
    _floating(b, left, right)
    if _is_linear(b, right):
        return _linear_into(b, node, left, b.number(views.permute(b.view(right), (1, 0))))
    return _product(b, node, left, right)


def _product(b: Lowering, node: fx.Node, left: int, right: int) -> int:
    """torch.matmul: vectors become matrices of one row or column, leading dimensions broadcast."""
    x, y = b.view(left), b.view(right)
    out = b.out(node)
    target = b.view(out)
    if len(x.sizes) == 1:
        x, target = views.unsqueeze(x, 0), views.unsqueeze(target, len(target.sizes) - (len(y.sizes) > 1))
    if len(y.sizes) == 1:
        y, target = views.unsqueeze(y, 1), views.unsqueeze(target, len(target.sizes))
    lead = target.sizes[:-2]
    x, y = views.expand(x, (*lead, *x.sizes[-2:])), views.expand(y, (*lead, *y.sizes[-2:]))
    b.emit(ir.MatMul(b.number(x), b.number(y), b.number(target)), node)
    return out


def _addmm(b: Lowering, node: fx.Node) -> int:
    bias, left, right = (b.arg(a) for a in node.args[:3])
    kwargs: dict[str, Any] = dict(node.kwargs)
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    _floating(b, bias, left, right)
    if beta == alpha == 1 and len(b.view(bias).sizes) == 1 and _is_linear(b, right):
        return _linear_into(b, node, left, b.number(views.permute(b.view(right), (1, 0))), bias)
    result = _product(b, node, left, right)
    e = ExpressionBuilder()
    scaled = e.op("Mul", "F32", e.input(1, "F32"), e.const(alpha, "F32")) if alpha != 1 else e.input(1, "F32")
    addend = e.op("Mul", "F32", e.input(0, "F32"), e.const(beta, "F32")) if beta != 1 else e.input(0, "F32")
    return b.elementwise(e.build(e.op("Add", "F32", addend, scaled)), (bias, result), node)


# Norms and softmax.


def _last_only(b: Lowering, x: int, shape: Any) -> None:
    if len(shape) != 1 or not b.view(x).sizes:
        raise Unsupported(f"a norm over the {len(shape)} last dimensions", fix="Normalise the last dimension only")


def _rms_norm(b: Lowering, node: fx.Node) -> int:
    x, weight = b.arg(node.args[0]), _argument(node, 2, "weight")
    _floating(b, x)
    _last_only(b, x, node.args[1])
    eps = _argument(node, 3, "eps")
    if eps is None:
        eps = torch.finfo(node.args[0].meta["val"].dtype).eps  # type: ignore[union-attr]
    out = b.out(node)
    number = -1 if weight is None else b.contiguous(b.arg(weight), node)
    b.emit(ir.RmsNorm(b.rows(x, node), out, float(eps), number), node)
    return out


def _layer_norm(b: Lowering, node: fx.Node) -> int:
    x = b.arg(node.args[0])
    _floating(b, x)
    _last_only(b, x, node.args[1])
    weight, bias = (_argument(node, i, name) for i, name in ((2, "weight"), (3, "bias")))
    out = b.out(node)
    numbers = [-1 if w is None else b.contiguous(b.arg(w), node) for w in (weight, bias)]
    eps = float(_argument(node, 4, "eps", 1e-5))
    b.emit(ir.LayerNorm(b.rows(x, node), out, eps, *numbers), node)
    return out


def _native_layer_norm(b: Lowering, node: fx.Node) -> tuple[int, ...]:
    x, shape, weight, bias, eps = node.args
    number = b.arg(x)
    _floating(b, number)
    _last_only(b, number, shape)
    out = b.out(node, 0)
    numbers = [-1 if w is None else b.contiguous(b.arg(w), node) for w in (weight, bias)]
    b.emit(ir.LayerNorm(b.rows(number, node), out, float(eps), *numbers), node)  # type: ignore[arg-type]
    return out, -1, -1


def _softmax(log: bool) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        number = b.arg(node.args[0])
        _floating(b, number)
        value = b.view(number)
        rank = len(value.sizes)
        if rank == 0:
            raise Unsupported("softmax of a 0-dimensional tensor")
        dim = int(node.args[1]) % rank  # type: ignore[arg-type]
        order = views.split_first(value, [dim])
        moved = b.rows(b.number(views.permute(value, order)), node)
        out = b.new(b.view(moved).sizes, dtype_of(node.meta["val"].dtype))
        b.emit(ir.Softmax(moved, out, log), node)
        return b.number(views.permute(b.view(out), [order.index(d) for d in range(rank)]))

    return lower


# Reductions.


def _reduce(op: str) -> LowerFunction:
    def lower(b: Lowering, node: fx.Node) -> int:
        return _reduced(b, node, op, _argument(node, 1, "dim"), node.meta["val"])

    return lower


def _reduced(b: Lowering, node: fx.Node, op: str, dims: Any, fake: torch.Tensor) -> int:
    number = b.arg(node.args[0])
    value = b.view(number)
    rank = len(value.sizes)
    if value.dtype == "Bool" and op in ("Sum", "Prod", "Mean"):
        number = b.new(value.sizes, "I64")
        b.copy_into(b.number(value), number, node)
        value = b.view(number)
    chosen = range(rank) if dims is None or dims == [] else ([dims] if isinstance(dims, int) else dims)
    last = sorted(d % rank for d in chosen) if rank else []
    moved = b.number(views.permute(value, views.split_first(value, last)))
    kept = b.view(moved).sizes[: rank - len(last)]
    out = b.new(kept, dtype_of(fake.dtype))
    b.emit(ir.Reduce(op, moved, out, len(last)), node)
    return b.reshaped(out, [size_of(s) for s in fake.shape], node)


def _reduce_all(op: str) -> LowerFunction:
    return lambda b, node: _reduced(b, node, op, None, node.meta["val"])


def _extremum(op: str) -> LowerFunction:
    """max.dim and min.dim: values and indices."""

    def lower(b: Lowering, node: fx.Node) -> tuple[int, ...]:
        values, indices = node.meta["val"]
        return _reduced(b, node, op, node.args[1], values), _reduced(b, node, f"Arg{op}", node.args[1], indices)

    return lower


# Gathers.


def _gather(b: Lowering, node: fx.Node, source: int, dim: int, index: int) -> int:
    if b.view(index).dtype not in ("I32", "I64"):
        raise Unsupported(f"an index of dtype {b.view(index).dtype}", fix="Index with int32 or int64")
    out = b.out(node)
    b.emit(ir.Gather(source, dim, index, out), node)
    return out


def _embedding(b: Lowering, node: fx.Node) -> int:
    return _gather(b, node, b.arg(node.args[0]), 0, b.arg(node.args[1]))


def _index_select(b: Lowering, node: fx.Node) -> int:
    source, dim, index = node.args
    number = b.arg(source)
    return _gather(b, node, number, int(dim) % len(b.view(number).sizes), b.arg(index))  # type: ignore[arg-type]


def _one_index(indices: Any) -> tuple[int, fx.Node]:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        raise Unsupported(f"indexing by {len(given)} tensors at once", fix="Index one dimension at a time")
    return given[0]


def _index(b: Lowering, node: fx.Node) -> int:
    dim, index = _one_index(node.args[1])
    return _gather(b, node, b.arg(node.args[0]), dim, b.arg(index))


def _arange(b: Lowering, node: fx.Node) -> int:
    arguments = [a for a in node.args if not isinstance(a, torch.dtype)]
    start: Any = 0
    step: Any = 1
    if node.target is not aten.arange.default:
        start = arguments[0]
    if node.target is aten.arange.start_step and len(arguments) > 2:
        step = arguments[2]
    if any(isinstance(x, float) for x in (start, step)):
        raise Unsupported("arange of floats", fix="Use an integer arange and compute with it")
    out = b.out(node)
    b.emit(ir.Arange(out, b.size_arg(start), b.size_arg(step)), node)
    return out


# States.


def _state_target(b: Lowering, node: fx.Node) -> int:
    """The state that a functional update may write in place.

    Readers of the old value that come later are given a copy of it first.
    """
    source = node.args[0]
    target = b.arg(source)
    if not b.state_of(target):
        raise Unsupported(
            "an update of a tensor that is not a buffer of the module",
            fix="Register it as a buffer and update it in place (index_copy_)",
        )
    saved: dict[int, int] = {}
    storage = b.view(target).storage
    for other, result in list(b.env.items()):
        numbers = result if isinstance(result, tuple) else (result,)
        if not any(n >= 0 and b.view(n).storage == storage for n in numbers):
            continue
        if any(u is not node and b.order.get(u, -1) > b.order.get(node, -1) for u in other.users):
            for n in numbers:
                saved.setdefault(n, b.materialised(n, node) if n >= 0 else n)
            kept = tuple(saved[n] for n in numbers)
            b.env[other] = kept if isinstance(result, tuple) else kept[0]
    return target


def _index_write(b: Lowering, node: fx.Node, dim: int, index: int, source: int) -> int:
    target = b.view(b.arg(node.args[0]))
    where = b.view(index)
    if where.dtype not in ("I32", "I64"):
        raise Unsupported(f"an index of dtype {where.dtype}", fix="Index with int32 or int64")
    if len(where.sizes) == 0:
        where = views.unsqueeze(where, 0)
    if len(where.sizes) != 1:
        raise Unsupported(f"an index of {len(where.sizes)} dimensions", fix="Use positions of one dimension")
    if b.view(source).dtype != target.dtype:
        raise Unsupported(f"a {b.view(source).dtype} source for a {target.dtype} buffer", fix="Convert it first")
    number = _state_target(b, node)
    sizes = (*target.sizes[:dim], where.sizes[0], *target.sizes[dim + 1 :])
    b.emit(ir.IndexCopy(number, dim, b.number(where), b.broadcast(source, sizes)), node)
    return number


def _index_copy(b: Lowering, node: fx.Node) -> int:
    _, dim, index, source = node.args
    rank = len(b.view(b.arg(node.args[0])).sizes)
    return _index_write(b, node, int(dim) % rank, b.arg(index), b.arg(source))  # type: ignore[arg-type]


def _index_put(b: Lowering, node: fx.Node) -> int:
    _, indices, source, *accumulate = node.args
    if any(accumulate) or node.kwargs.get("accumulate"):
        raise Unsupported("index_put that accumulates")
    dim, index = _one_index(indices)
    number, target = b.arg(index), b.view(b.arg(node.args[0]))
    values = b.arg(source)
    if len(b.view(number).sizes) == 0:  # the dimension is gone from the source
        sizes = (*target.sizes[:dim], *target.sizes[dim + 1 :])
        values = b.number(views.unsqueeze(views.expand(b.view(values), sizes), dim))
    return _index_write(b, node, dim, number, values)


def _write_view(b: Lowering, node: fx.Node, source: int, where: Value) -> None:
    if b.view(source).storage == where.storage:
        source = b.materialised(source, node)
    b.copy_into(b.broadcast(source, where.sizes), b.number(where), node)


def _slice_scatter(b: Lowering, node: fx.Node) -> int:
    source = b.arg(node.args[1])
    dim, start, _, step = slice_of(b, node, 2)
    length = b.view(source).sizes[dim]
    target = _state_target(b, node)
    _write_view(b, node, source, views.narrow(b.view(target), dim, start, length, step))
    return target


def _select_scatter(b: Lowering, node: fx.Node) -> int:
    source, dim, index = b.arg(node.args[1]), node.args[2], b.size_arg(node.args[3])
    value = b.view(b.arg(node.args[0]))
    axis = int(dim) % len(value.sizes)  # type: ignore[arg-type]
    size = value.sizes[axis]
    if isinstance(index, int) and index < 0 and isinstance(size, int):
        index += size
    target = _state_target(b, node)
    _write_view(b, node, source, views.select(b.view(target), axis, index))
    return target


def _copy(b: Lowering, node: fx.Node) -> int:
    """Functional copy_: the source in the shape and dtype of the first argument."""
    source = b.arg(node.args[1])
    out = b.out(node)
    b.copy_into(b.broadcast(source, b.view(out).sizes), out, node)
    return out


# Attention.


def _attention(b: Lowering, node: fx.Node) -> tuple[int, ...]:
    (query, key, value, score_captures, mask_captures, score_scalars, mask_scalars,
     *lists, block_size, score, mask, scale) = node.args  # fmt: skip
    q, k, v = (_last_contiguous(b, b.arg(x), node) for x in (query, key, value))
    _floating(b, q, k, v)
    if len({b.view(x).dtype for x in (q, k, v)}) != 1:
        raise Unsupported("query, key and value of different dtypes", fix="Convert them to one")
    out_fake, lse_fake = node.meta["val"]
    out = _strided_like(b, out_fake)
    lse = -1
    if any(u.args[1] == 1 and u.users for u in node.users):
        lse = b.new([size_of(s) for s in lse_fake.shape], "F32")
    blocks: Any = block_size
    q_block, kv_block = (int(s) for s in blocks)
    numbers = [-1 if x is None else b.arg(x) for x in lists]
    b.emit(
        ir.FlexAttention(
            q, k, v, out, float(scale), q_block, kv_block, lse,  # type: ignore[arg-type]
            from_json(score) if score else None,  # type: ignore[arg-type]
            from_json(mask) if mask else None,  # type: ignore[arg-type]
            tuple(b.arg(c) for c in score_captures),  # type: ignore[union-attr]
            tuple(b.arg(c) for c in mask_captures),  # type: ignore[union-attr]
            tuple(b.size_arg(s) for s in score_scalars),  # type: ignore[union-attr]
            tuple(b.size_arg(s) for s in mask_scalars),  # type: ignore[union-attr]
            *numbers,
        ),
        node,
    )  # fmt: skip
    return out, lse


def _last_contiguous(b: Lowering, number: int, node: fx.Node) -> int:
    value = b.view(number)
    if len(value.sizes) != 4:
        raise Unsupported(f"an attention operand of {len(value.sizes)} dimensions", fix="Expected [B, H, L, D]")
    return number if same(value.strides[-1], 1) or same(value.sizes[-1], 1) else b.materialised(number, node)


def _strided_like(b: Lowering, fake: torch.Tensor) -> int:
    """A fresh dense value whose dimensions lie in the order of a fake tensor's strides."""
    sizes: list[Size] = [size_of(s) for s in fake.shape]
    strides = [size_of(s) for s in fake.stride()]
    order = _by_stride(sizes, strides)
    dense = b.view(b.new([sizes[d] for d in order], dtype_of(fake.dtype)))
    return b.number(views.permute(dense, [order.index(d) for d in range(len(sizes))]))


def _by_stride(sizes: list[Size], strides: list[Size]) -> list[int]:
    """Dimensions from outermost to innermost: strides are products of the sizes inside them."""
    left = list(range(len(sizes)))
    inner: list[int] = []
    step: Size = 1
    while left:
        fitting = [d for d in reversed(left) if same(strides[d], step)]
        # A dimension of size 1 may have the stride of its neighbour: it goes first, moving nothing.
        fitting.sort(key=lambda d: not same(sizes[d], 1))
        if not fitting:
            return list(range(len(sizes)))
        inner.append(fitting[0])
        left.remove(fitting[0])
        step = product([step, sizes[fitting[0]]])
    return inner[::-1]


def lowering_table() -> dict[Any, LowerFunction]:
    """Operator to lowering function: all that the delegate can run."""
    return {
        **elementwise_table(),
        **view_table(),
        aten.linear.default: _linear,
        aten.mm.default: _matmul,
        aten.bmm.default: _matmul,
        aten.matmul.default: _matmul,
        aten.addmm.default: _addmm,
        aten.rms_norm.default: _rms_norm,
        aten.layer_norm.default: _layer_norm,
        aten.native_layer_norm.default: _native_layer_norm,
        aten._softmax.default: _softmax(log=False),
        aten._log_softmax.default: _softmax(log=True),
        aten.softmax.int: _softmax(log=False),
        aten.log_softmax.int: _softmax(log=True),
        aten.sum.dim_IntList: _reduce("Sum"),
        aten.sum.default: _reduce_all("Sum"),
        aten.mean.dim: _reduce("Mean"),
        aten.mean.default: _reduce_all("Mean"),
        aten.amax.default: _reduce("Max"),
        aten.amin.default: _reduce("Min"),
        aten.max.default: _reduce_all("Max"),
        aten.min.default: _reduce_all("Min"),
        aten.max.dim: _extremum("Max"),
        aten.min.dim: _extremum("Min"),
        aten.prod.dim_int: _reduce("Prod"),
        aten.prod.default: _reduce_all("Prod"),
        aten.any.dim: _reduce("Any"),
        aten.any.dims: _reduce("Any"),
        aten.any.default: _reduce_all("Any"),
        aten.all.dim: _reduce("All"),
        aten.all.default: _reduce_all("All"),
        aten.argmax.default: _reduce("ArgMax"),
        aten.argmin.default: _reduce("ArgMin"),
        aten.embedding.default: _embedding,
        aten.index_select.default: _index_select,
        aten.index.Tensor: _index,
        aten.arange.default: _arange,
        aten.arange.start: _arange,
        aten.arange.start_step: _arange,
        aten.index_copy.default: _index_copy,
        aten.index_put.default: _index_put,
        aten.slice_scatter.default: _slice_scatter,
        aten.select_scatter.default: _select_scatter,
        aten.copy.default: _copy,
        flex_attention_op(): _attention,
    }


KEPT_OPERATORS = (
    aten.linear.default,
    aten.matmul.default,
    aten.rms_norm.default,
    aten.layer_norm.default,
    aten.silu.default,
)
"""Operators that decomposition leaves whole, because an instruction does them at once."""
