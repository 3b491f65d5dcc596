"""Tidying a captured program: what only served to build masks goes, and the signature with it."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec

aten = torch.ops.aten
LN2 = math.log(2.0)

# Which elements of a block list these give depends on nothing but the list's own contents.
_SAME_LIST = {
    aten.slice.Tensor,
    aten.select.int,
    aten.index.Tensor,
    aten.index_select.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.view.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.to.dtype,
    aten.to.device,
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
    aten.repeat.default,
}


def canonicalise(program: ExportedProgram) -> ExportedProgram:
    """Drop the mask's own block lists, undo the change of base of lse, remove what is then dead.

    Changes ``program`` and returns it.
    """
    graph = program.graph
    for node in graph.nodes:
        if node.target is torch.ops.flexpte.flex_attention.default:
            _drop_own_lists(node)
            _natural_lse(node)
        elif node.target is torch.sym_sum:
            _spell_out(node)
    _remove_dead_code(graph)
    _remove_unused_constants(program)
    program.graph_module.recompile()
    return program


def reads_block_lists(program: ExportedProgram) -> bool:
    """Whether the program computes with block lists that were not computed."""
    return any(n.target is torch.ops.flexpte.block_list.default for n in program.graph.nodes)


def _drop_own_lists(node: fx.Node) -> None:
    source = node.args[8]
    while isinstance(source, fx.Node) and source.target in _SAME_LIST:
        source = source.args[0]
    if isinstance(source, fx.Node) and source.target is torch.ops.flexpte.block_list.default:
        node.args = (*node.args[:7], None, None, None, None, *node.args[11:])


def _natural_lse(node: fx.Node) -> None:
    """lse / ln 2 * ln 2, as the higher-order op and its caller do, is lse."""
    for lse in node.users:
        for base2 in list(lse.users):
            if base2.target is not aten.div.Tensor or base2.args[1] != LN2:
                continue
            for natural in list(base2.users):
                if natural.target is aten.mul.Tensor and natural.args[1] == LN2:
                    natural.replace_all_uses_with(lse)


def _spell_out(node: fx.Node) -> None:
    """torch.sym_sum([a, b, c]) as a + b + c: one form of scalar arithmetic for what follows."""
    terms = node.args[0] if isinstance(node.args[0], list | tuple) else node.args
    total, *rest = terms
    value = _value(total)
    with node.graph.inserting_before(node):
        for term in rest:
            value = value + _value(term)
            total = node.graph.call_function(operator.add, (total, term))
            total.meta["val"] = value
    node.replace_all_uses_with(total)  # type: ignore[arg-type]


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _remove_dead_code(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if not node.users and not _keep(node):
            graph.erase_node(node)


def _keep(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return node.op == "call_function" and node.is_impure()


def _remove_unused_constants(program: ExportedProgram) -> None:
    """Constants lifted for masks are no inputs any more."""
    signature = program.graph_signature
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    kept: list[InputSpec] = []
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.CONSTANT_TENSOR and not node.users:
            program.graph.erase_node(node)
            program._constants.pop(spec.target, None)
        else:
            kept.append(spec)
    program._graph_signature = ExportGraphSignature(kept, signature.output_specs)
