"""A score_mod or mask_mod as a program: what the attention op carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from flexpte.exporter.expression import Expression
from flexpte.exporter.mod_graph import MASK_ARGUMENTS, SCORE_ARGUMENTS, ModGraph, record, without_modes
from flexpte.exporter.mod_ops import HANDLERS, REDUCTIONS, VIEWS
from flexpte.exporter.narrow_integers import Size, narrow_integers
from flexpte.exporter.translate import Translator


@dataclass(frozen=True)
class Mod:
    """A mod as a program: ``expression`` (None: it does nothing), the tensors and sizes that it reads."""

    expression: Expression | None
    captures: tuple[Tensor, ...] = ()
    scalars: tuple[int | torch.SymInt, ...] = ()


def score_program(score_mod: Callable[..., Tensor], like: Tensor, sizes: Sequence[Size] | None = None) -> Mod:
    """Program of a score_mod; its result as float32.

    ``like``: a tensor of the program, whose fake mode is used. ``sizes``: batch, query heads, queries, keys, where
    they are known. Raises Unsupported.
    """
    return _program(record(score_mod, SCORE_ARGUMENTS, like, frozenset(HANDLERS)), "F32", sizes)


def mask_program(mask_mod: Callable[..., Tensor], like: Tensor, sizes: Sequence[Size] | None = None) -> Mod:
    """Program of a mask_mod, which must give bool; otherwise as :func:`score_program`."""
    return _program(record(mask_mod, MASK_ARGUMENTS, like, frozenset(HANDLERS)), "Bool", sizes)


def _program(graph: ModGraph, type_: str, sizes: Sequence[Size] | None) -> Mod:
    with without_modes(), torch.no_grad():
        translator = Translator(graph, HANDLERS, REDUCTIONS, VIEWS)
        expression, captures, scalars = translator.translate(type_)
    expression, kept_captures, kept_scalars = narrow_integers(expression, sizes, scalars)
    captures, scalars = [captures[c] for c in kept_captures], [scalars[s] for s in kept_scalars]
    last = expression.nodes[-1]
    if len(expression.nodes) == 1 and (last.op == "Score" or (last.type, last.value_int) == ("Bool", 1)):
        return Mod(None)
    return Mod(expression, outside(graph, captures), tuple(scalars))


def outside(graph: ModGraph, nodes: Sequence[fx.Node]) -> tuple[Tensor, ...]:
    """Values of nodes that depend on captured tensors only, computed by the surrounding program."""
    known: dict[fx.Node, Any] = dict(graph.captures)

    def value(node: fx.Node) -> Any:
        if node not in known:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]

    return tuple(value(node) for node in nodes)
