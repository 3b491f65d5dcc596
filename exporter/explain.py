"""What is proved of each mask: which tiles are empty, full or partial, and the window that it keeps.

The answers are those of the delegate (``metal_delegate/ranges.h``, asked through the runtime's bindings): a
report says what will run, not what another implementation would do. Tiles that cannot be proved are tried
element by element, there as in plans, so tiles are exact; windows are proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

import flexpte.metal_delegate.payload_generated as schema
from flexpte.exporter.expression import Expression, Node, from_json
from flexpte.exporter.flex_op import flex_attention_op
from flexpte.runtime import _native

TILE = 64
"""Rows and columns of the tiles in reports."""

EMPTY, FULL, PARTIAL = 0, 1, 2
"""Values of :attr:`MaskExplanation.tiles`."""

_DTYPES = {
    torch.bool: "Bool",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
# A mask that depends on these is computed by the model itself: not evaluated for a report.
_HEAVY = ("linear", "mm", "matmul", "bmm", "addmm", "convolution", "flex_attention")
_CACHE_UPDATES = ("index_copy", "index_copy_", "index_put", "index_put_")


@dataclass(frozen=True, eq=False)
class MaskExplanation:
    """One mask at the lengths of the example inputs, for batch 0 and one head.

    ``tiles`` [ceil(num_queries / TILE), ceil(num_keys / TILE)] holds EMPTY, FULL or PARTIAL.
    ``window_tokens`` = W: proved for every row that only the last W keys up to its own position, itself
    included, can be seen; None where no such W below the number of keys is proved.
    """

    num_queries: int
    num_keys: int
    tiles: NDArray[np.uint8]
    window_tokens: int | None

    def count(self, verdict: int) -> int:
        """How many tiles are EMPTY, FULL or PARTIAL."""
        return int((self.tiles == verdict).sum())

    def __str__(self) -> str:
        visited = self.tiles.size - self.count(EMPTY)
        window = "no window proved" if self.window_tokens is None else f"window of {self.window_tokens} tokens proved"
        return (
            f"{self.num_queries} queries x {self.num_keys} keys in tiles of {TILE}: {self.count(EMPTY)} empty, "
            f"{self.count(FULL)} full, {self.count(PARTIAL)} partial, {100 * visited / max(self.tiles.size, 1):.0f}% "
            f"visited; {window}"
        )


def explain_masks(program: ExportedProgram, *, head: int = 0) -> dict[str, MaskExplanation]:
    """By the name of each masked attention of a captured program, what is proved at its example inputs.

    Attentions without a mask, and those whose mask the model computes, are left out.
    """
    values, symbols = _example_values(program)
    result: dict[str, MaskExplanation] = {}
    seen: dict[Any, MaskExplanation] = {}
    for node in program.graph.nodes:
        if node.target is not flex_attention_op():
            continue
        arguments = _arguments(node)
        if not arguments["mask"] or not _evaluate(program.graph_module, node, arguments, values):
            continue
        captures, scalars = arguments["mask_captures"], arguments["mask_scalars"]
        lengths = tuple(_concrete(arguments[name].meta["val"].shape[2], symbols) for name in ("query", "key"))
        key = (arguments["mask"], tuple(captures), tuple(scalars), lengths)
        if key not in seen:
            seen[key] = _explain(
                from_json(arguments["mask"]),
                [values[c] for c in captures],
                [int(values[s]) if isinstance(s, fx.Node) else int(s) for s in scalars],
                lengths,
                [_is_position(c) for c in captures],
                head,
            )
        result[node.name] = seen[key]
    return result


def _explain(
    mask: Expression,
    captures: list[torch.Tensor],
    scalars: list[int],
    lengths: tuple[int, ...],
    are_positions: list[bool],
    head: int,
) -> MaskExplanation:
    num_queries, num_keys = lengths
    bound = _bind(mask, captures, scalars, num_queries, num_keys)
    tiles = bound.tiles(0, head, TILE, TILE)
    by_position = _rows_are_positions(mask, are_positions)
    window = None
    if by_position is not None:
        # Row p of this mask is what the token at position p sees, whichever row of a call it is in.
        num_rows = num_keys if any(are_positions) else num_queries
        window = _window(_bind(by_position, captures, scalars, num_rows, num_keys), num_rows, num_keys)
    return MaskExplanation(num_queries, num_keys, tiles, window)


def _bind(
    mask: Expression, captures: Sequence[torch.Tensor], scalars: list[int], num_queries: int, num_keys: int
) -> _native.Mask:
    arrays = []
    for capture in captures:
        tensor = capture.detach().contiguous()
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        arrays.append((bits.numpy(), getattr(schema.DType, _DTYPES[capture.dtype])))
    nodes = [
        (
            getattr(schema.ExprOp, n.op),
            getattr(schema.DType, n.type),
            list(n.args),
            n.index,
            getattr(schema.DType, n.round_to),
            n.value_int,
            n.value_float,
        )
        for n in mask.nodes
    ]
    return _native.Mask(nodes, arrays, scalars, num_queries, num_keys)


def _rows_are_positions(mask: Expression, are_positions: list[bool]) -> Expression | None:
    """The mask with ``positions[q_idx]`` replaced by ``q_idx``; None where it differs by batch or head, or uses
    its positions otherwise."""
    nodes = list(mask.nodes)
    for i, node in enumerate(nodes):
        if node.op in ("Batch", "Head"):
            return None
        if node.op == "Load" and are_positions[node.index]:
            if len(node.args) != 1 or not _is_q_idx(mask, node.args[0]):
                return None
            nodes[i] = Node("Cast", node.type, node.args) if node.type != "I32" else replace(mask.nodes[node.args[0]])
    return Expression(tuple(nodes))


def _is_q_idx(mask: Expression, number: int) -> bool:
    node = mask.nodes[number]
    return node.op == "QIdx" or (node.op == "Cast" and _is_q_idx(mask, node.args[0]))


def _window(mask: _native.Mask, num_rows: int, num_keys: int) -> int | None:
    """The smallest W such that every row sees only keys above its own position less W."""
    window = 0
    for q in range(num_rows):
        keys = mask.row(0, 0, q)
        if keys is None:
            return None
        begin, end = keys
        if end > begin:
            window = max(window, q + 1 - begin)
    return window if 0 < window < min(num_rows, num_keys) else None


def _is_position(capture: fx.Node) -> bool:
    """Whether a captured tensor is what a cache is updated at."""
    updates = [u for u in capture.users if getattr(u.target, "__name__", "").split(".")[0] in _CACHE_UPDATES]
    return any(capture in _positions_of(update) for update in updates)


def _positions_of(update: fx.Node) -> list[Any]:
    where: Any = update.args[2] if "copy" in str(update.target) else update.args[1]
    return list(where) if isinstance(where, (list, tuple)) else [where]


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = [a.name for a in flex_attention_op()._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _example_values(program: ExportedProgram) -> tuple[dict[fx.Node, Any], dict[Any, int]]:
    """Values of the placeholders, and of the symbols in their shapes."""
    values: dict[fx.Node, Any] = {}
    symbols: dict[Any, int] = {}
    example = list(torch.utils._pytree.tree_leaves(program.example_inputs or ()))
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            stored = program.state_dict if spec.target in program.state_dict else program.constants
            values[node] = stored.get(spec.target)
        elif example:
            values[node] = value = example.pop(0)
            fake = node.meta.get("val")
            if isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor):
                for size, actual in zip(fake.shape, value.shape, strict=True):
                    if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                        symbols[size.node.expr] = actual
    return values, symbols


def _concrete(size: Any, symbols: dict[Any, int]) -> int:
    return int(size.node.expr.xreplace(symbols)) if isinstance(size, torch.SymInt) else int(size)


def _evaluate(module: fx.GraphModule, node: fx.Node, arguments: dict[str, Any], values: dict[fx.Node, Any]) -> bool:
    """Compute what the mask of ``node`` captures; False where that means to run the model."""
    wanted = [a for a in (*arguments["mask_captures"], *arguments["mask_scalars"]) if isinstance(a, fx.Node)]
    needed: set[fx.Node] = set()
    stack = [n for n in wanted if n not in values]
    while stack:
        current = stack.pop()
        name = getattr(current.target, "__name__", str(current.target)).split(".")[0]
        if name in _HEAVY or current.op == "placeholder":
            return False
        needed.add(current)
        stack += [n for n in current.all_input_nodes if n not in values and n not in needed]
    for current in module.graph.nodes:
        if current in needed:
            if current.op == "get_attr":
                values[current] = getattr(module, str(current.target))
            else:
                args = fx.map_arg(current.args, values.__getitem__)
                values[current] = current.target(*args, **fx.map_arg(current.kwargs, values.__getitem__))
    return all(isinstance(values[n], (torch.Tensor, int)) for n in wanted)
