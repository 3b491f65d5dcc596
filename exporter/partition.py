"""What the delegate takes: nodes are claimed by lowering them, and grouped into regions.

A region is one delegate call. Buffers that a region updates belong to the delegate if nothing else
touches them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from flexpte.exporter import views
from flexpte.exporter.errors import Unsupported
from flexpte.exporter.flex_op import flex_attention_op
from flexpte.exporter.fuse import fuse
from flexpte.exporter.ir import Instruction, Region, State, SymbolSource, Value
from flexpte.exporter.lower import Lowering, dtype_of, fold_constants, source_line, used_symbols
from flexpte.exporter.lower_ops import lowering_table
from flexpte.exporter.plan import plan
from flexpte.exporter.symbols import as_size, bounds_of, find_symbols, size_of, upper_bound

aten = torch.ops.aten
MODES = ("full", "attention", "none")
_STATE_UPDATES = (
    aten.index_copy.default,
    aten.index_put.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
)


@dataclass(frozen=True)
class Refusal:
    """Why a node was not delegated."""

    node: str
    operator: str
    reason: str
    source: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        place = f" at {self.source}" if self.source else ""
        return f"{self.node} ({self.operator}){place}: {self.reason}" + (f". {self.fix}" if self.fix else "")


@dataclass(frozen=True)
class Placeholders:
    """What the placeholders of a program are."""

    constants: dict[fx.Node, tuple[str, torch.Tensor]]
    mutated: dict[fx.Node, tuple[str, torch.Tensor]]
    new_values: dict[fx.Node, Any]  # mutated buffer -> node of its new value
    user: list[fx.Node]


@dataclass
class Claim:
    """One region before lowering: its nodes, in order, and its level among the others."""

    level: int
    nodes: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Lowered:
    """A lowered region: what goes in (nodes, or symbols as integers), what comes out."""

    level: int
    nodes: tuple[fx.Node, ...]
    region: Region
    inputs: tuple[Any, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Partition:
    """Regions in order, why other nodes stay, and the level of every node (even: delegated)."""

    regions: tuple[Lowered, ...]
    refusals: tuple[Refusal, ...]
    levels: dict[fx.Node, int]
    owned: dict[fx.Node, tuple[str, torch.Tensor]]
    placeholders: Placeholders


def read_placeholders(program: ExportedProgram) -> Placeholders:
    """Sort a program's placeholders by what they hold.

    Raises Unsupported where forward writes into its own inputs.
    """
    signature = program.graph_signature
    nodes = {n.name: n for n in program.graph.nodes}
    mutated_names = {}
    for spec in signature.output_specs:
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            raise Unsupported(
                f"forward writes into its input {spec.target}",
                fix="Return the new value, or make it a buffer",
            )
        if spec.kind is OutputKind.BUFFER_MUTATION:
            mutated_names[spec.target] = nodes[spec.arg.name]
    constants, mutated, new_values, user = {}, {}, {}, []
    for spec in signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            user.append(node)
            continue
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise Unsupported(f"an input of kind {spec.kind.name} ({spec.target})")
        assert spec.target is not None
        stored = program.state_dict if spec.target in program.state_dict else program.constants
        entry = (spec.target, stored[spec.target])
        if spec.target in mutated_names:
            mutated[node], new_values[node] = entry, mutated_names[spec.target]
        else:
            constants[node] = entry
    return Placeholders(constants, mutated, new_values, user)


def _without_assertions(graph: fx.Graph) -> None:
    """Drop run-time assertions: the runtime checks the shapes of its inputs itself."""
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.split(".")[0] in (
            "_assert_tensor_metadata",
            "_assert_scalar",
            "sym_constrain_range",
            "sym_constrain_range_for_size",
            "_assert_async",
        ) or (node.op == "call_function" and not node.users and is_symbolic(node)):
            graph.erase_node(node)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node computes a number rather than a tensor."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def partition(program: ExportedProgram, mode: str) -> Partition:
    """Claim and lower what ``mode`` ("full", "attention" or "none") says.

    ``program`` is decomposed (functional, core ATen plus KEPT_OPERATORS). Raises Unsupported where an
    attention cannot be delegated, for nothing else could run it.
    """
    _without_assertions(program.graph)
    placeholders = read_placeholders(program)
    table = lowering_table()
    folded = dict(placeholders.constants)
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    fold_constants(nodes, folded, {flex_attention_op()})
    owned = dict(placeholders.mutated)
    refused: dict[fx.Node, Refusal] = {}
    while True:
        dry = _lowering(program, table, folded, owned)
        claimed, refusals = _claim(dry, nodes, placeholders, folded, mode, refused)
        levels = _levels(nodes, claimed, folded, dry, owned)
        lost = _not_ours(dry, placeholders, owned, claimed, levels)
        if not lost:
            break
        for node in lost:
            del owned[node]
    for node in nodes:
        if node.target is flex_attention_op() and node not in claimed:
            reason = refusals.get(node)
            raise Unsupported(
                f"flex_attention {node.name} cannot be delegated: "
                + (reason.reason if reason else f'delegate="{mode}" delegates nothing'),
                source=source_line(node),
                fix=(reason.fix if reason else None) or 'Nothing else can run it: export with delegate="full"',
            )
    claims: dict[int, Claim] = {}
    for node in nodes:
        if node in claimed:
            claims.setdefault(levels[node], Claim(levels[node])).nodes.append(node)
    lowered = []
    for level in sorted(claims):
        one = _lower_region(program, claims[level], table, folded, owned, placeholders, levels)
        if one is not None:
            lowered.append(one)
        else:
            for node in claims[level].nodes:
                levels[node] += 1
    return Partition(tuple(lowered), tuple(refusals.values()), levels, owned, placeholders)


def _lowering(program: ExportedProgram, table: Any, constants: Any, owned: Any) -> Lowering:
    order = {node: position for position, node in enumerate(program.graph.nodes)}
    return Lowering(table, bounds_of(program.range_constraints), constants, owned, order=order)


def _wanted(nodes: list[fx.Node], mode: str) -> set[fx.Node]:
    if mode == "full":
        return set(nodes)
    wanted: set[fx.Node] = set()
    if mode == "attention":
        for node in nodes:
            if node.target is flex_attention_op():
                caches = {n for n in node.args[1:3] if isinstance(n, fx.Node) and n.target in _STATE_UPDATES}
                wanted |= {node, *node.users, *caches}
    return wanted


def _claim(
    dry: Lowering,
    nodes: list[fx.Node],
    placeholders: Placeholders,
    constants: dict[fx.Node, Any],
    mode: str,
    refused: dict[fx.Node, Refusal],
) -> tuple[set[fx.Node], dict[fx.Node, Refusal]]:
    for node in placeholders.user:
        if isinstance(node.meta["val"], torch.Tensor):
            for size in node.meta["val"].shape:
                upper_bound(size_of(size), dry.bounds)
        _bind(dry, node)
    for node in placeholders.mutated:
        if node not in dry.states_owned:
            _bind(dry, node)
    wanted = _wanted(nodes, mode)
    claimed: set[fx.Node] = set()
    refusals = dict(refused)
    for node in nodes:
        if is_symbolic(node) or node in constants:
            continue
        part_of_refused = node.target is operator.getitem and node.args[0] not in claimed
        if node in wanted and node not in refused and not part_of_refused:
            try:
                dry.lower(node)
                claimed.add(node)
                continue
            except Unsupported as error:
                refusals[node] = Refusal(node.name, str(node.target), error.what, error.source, error.fix)
        elif node not in refusals and not part_of_refused and mode != "full":
            reason = f'delegate="{mode}" leaves it to the runtime\'s own operators'
            refusals[node] = Refusal(node.name, str(node.target), reason, source_line(node))
        _bind(dry, node)
    return claimed, refusals


def _bind(dry: Lowering, node: fx.Node) -> None:
    """Give a node that is not delegated its result, as an input would have."""
    val = node.meta.get("val")
    try:
        if isinstance(val, torch.Tensor):
            dry.bind_input(node, 0)
        elif isinstance(val, (list, tuple)):
            dry.env[node] = tuple(_input(dry, v) for v in val)
    except Unsupported:
        dry.env.pop(node, None)


def _input(dry: Lowering, fake: Any) -> int:
    return dry.new([size_of(s) for s in fake.shape], dtype_of(fake.dtype), "Input")


def _levels(
    nodes: list[fx.Node],
    claimed: set[fx.Node],
    constants: dict[fx.Node, Any],
    dry: Lowering,
    owned: dict[fx.Node, Any],
) -> dict[fx.Node, int]:
    """Delegated nodes get even levels, others odd ones, never below those they depend on.

    So the nodes of one even level form a region that no path leaves and enters again.
    """
    levels: dict[fx.Node, int] = {}
    for node in nodes:
        if node in constants:
            levels[node] = 0
            continue
        sources = [n for n in node.all_input_nodes if not (node in claimed and is_symbolic(n))]
        level = max((levels.get(n, 0) for n in sources), default=0)
        levels[node] = level + (level % 2 if node in claimed else 1 - level % 2)
    # A state update goes with its readers, so that one region holds both.
    for node in reversed(nodes):
        result = dry.env.get(node)
        if node in claimed and isinstance(result, int) and dry.state_of(result):
            later = [levels[u] for u in node.users if u.op != "output" and u in claimed]
            if later:
                levels[node] = max(levels[node], min(later))
    return levels


def _not_ours(
    dry: Lowering,
    placeholders: Placeholders,
    owned: dict[fx.Node, Any],
    claimed: set[fx.Node],
    levels: dict[fx.Node, int],
) -> list[fx.Node]:
    """Buffers that something outside of one region touches."""
    lost = []
    for buffer in owned:
        new_value = placeholders.new_values[buffer]
        result = dry.env.get(buffer)
        if not isinstance(result, int):
            lost.append(buffer)
            continue
        storage = dry.view(result).storage
        views = [n for n, r in dry.env.items() if isinstance(r, int) and dry.view(r).storage == storage]
        users = {u for n in views for u in n.users if u.op != "output"} | ({new_value} - {buffer})
        if not users <= claimed or len({levels[u] for u in users}) != 1:
            lost.append(buffer)
    return lost


def _lower_region(
    program: ExportedProgram,
    claim: Claim,
    table: Any,
    constants: dict[fx.Node, tuple[str, torch.Tensor]],
    owned: dict[fx.Node, tuple[str, torch.Tensor]],
    placeholders: Placeholders,
    levels: dict[fx.Node, int],
) -> Lowered | None:
    members = set(claim.nodes)
    b = _lowering(program, table, constants, owned)
    inputs: list[Any] = []
    for node in claim.nodes:
        for source in node.all_input_nodes:
            outside = source not in members and source not in constants and source not in owned
            if outside and not is_symbolic(source) and source not in b.env:
                b.bind_input(source, len(inputs))
                inputs.append(source)
    for node in claim.nodes:
        b.lower(node)
    if not b.instructions:
        return None
    user_outputs = _user_outputs(program)
    outputs = []
    for node in claim.nodes:
        used = any(u not in members and u.op != "output" and not is_symbolic(u) for u in node.users)
        if used or node in user_outputs:
            if not isinstance(b.env[node], int):
                continue  # its getitems are the outputs
            outputs.append(node)
    numbers = []
    for index, node in enumerate(outputs):
        value = b.view(b.arg(node))
        out = b.new(value.sizes, value.dtype, "Output", index)
        b.copy_into(b.arg(node), out, node)
        numbers.append(out)
    _write_back(b, placeholders, owned, members)
    fuse(b)
    for source in _sized_inputs(b, placeholders, inputs):
        b.bind_input(source, len(inputs))
        inputs.append(source)
    states = _initial_values(b, owned)
    return Lowered(claim.level, tuple(claim.nodes), *_finish(b, states, inputs, numbers), tuple(outputs))


def _write_back(b: Lowering, placeholders: Placeholders, owned: Iterable[fx.Node], members: set[fx.Node]) -> None:
    """States whose new value was computed elsewhere get it at the end."""
    pending = []
    for buffer in owned:
        node = placeholders.new_values[buffer]
        if node not in members:
            continue
        source, whole = b.env[node], b.whole_state(buffer)
        assert isinstance(source, int)
        if source != whole:
            pending.append((b.materialised(source, node) if b.state_of(source) else source, whole, node))
    for source, whole, node in pending:
        b.copy_into(source, whole, node)


def _user_outputs(program: ExportedProgram) -> set[fx.Node]:
    names = set(program.graph_signature.user_outputs)
    return {n for n in program.graph.nodes if n.name in names}


def _initial_values(b: Lowering, owned: dict[fx.Node, tuple[str, torch.Tensor]]) -> list[State]:
    tensors = dict(owned.values())
    states = []
    for state in b.states:
        tensor = tensors[state.name]
        initial = -1
        if torch.count_nonzero(tensor):
            b.constant(f"initial value of {state.name}", tensor.detach().clone())
            initial = len(b.constants) - 1
        states.append(State(state.name, state.dtype, state.sizes, initial))
    return states


def _sized_inputs(b: Lowering, placeholders: Placeholders, inputs: list[fx.Node]) -> list[fx.Node]:
    """Inputs of the program that a region takes for their sizes only."""
    values: list[Value] = []
    for instruction in b.instructions:
        values += [b.view(n) for n in (*instruction.op.reads(), *instruction.op.writes())]
    bound = [b.view(b.arg(n)).sizes for n in inputs]
    missing = used_symbols(values, b.instructions) - find_symbols(bound).keys()
    extra = []
    for node in placeholders.user:
        val = node.meta["val"]
        found = missing & {size_of(s) for s in val.shape} if isinstance(val, torch.Tensor) else set()
        if found and node not in inputs:
            missing -= found
            extra.append(node)
    return extra


def _finish(b: Lowering, states: list[State], inputs: list[Any], outputs: list[int]) -> tuple[Region, tuple[Any, ...]]:
    """Number afresh what the instructions use, plan the arena, find the symbols."""
    kept_values: dict[int, int] = {}
    for instruction in b.instructions:
        for n in (*instruction.op.reads(), *instruction.op.writes()):
            kept_values.setdefault(n, len(kept_values))
    bound = [b.env[node] for node in inputs]
    for number in (*bound, *outputs):
        assert isinstance(number, int)
        kept_values.setdefault(number, len(kept_values))
    storages: dict[int, int] = {}
    for n in kept_values:
        storages.setdefault(b.values[n].storage, len(storages))
    constants: dict[int, int] = {}
    for s in storages:
        if b.storages[s].kind == "Constant":
            constants.setdefault(b.storages[s].index, len(constants))
    for state in states:
        if state.initial >= 0:
            constants.setdefault(state.initial, len(constants))
    new_storages = [
        replace(b.storages[s], index=constants[b.storages[s].index])
        if b.storages[s].kind == "Constant"
        else b.storages[s]
        for s in storages
    ]
    values = tuple(views.normalised(replace(b.values[n], storage=storages[b.values[n].storage])) for n in kept_values)
    instructions = tuple(Instruction(_renumbered(i.op, kept_values), i.name) for i in b.instructions)
    planned, arena_size_bytes = plan(values, new_storages, instructions)
    symbols = find_symbols([b.view(n).sizes for n in bound])  # type: ignore[arg-type]
    extra = sorted(used_symbols(values, instructions) - symbols.keys(), key=str)
    numbers = [kept_values[n] for n in bound]  # type: ignore[index]
    for symbol in extra:
        symbols[symbol] = SymbolSource(len(numbers), -1)
        numbers.append(-1)
    region = Region(
        values,
        planned,
        tuple(b.constants[c] for c in constants),
        tuple(replace(s, initial=constants[s.initial]) if s.initial >= 0 else s for s in states),
        instructions,
        tuple(numbers),
        tuple(kept_values[n] for n in outputs),
        symbols,
        b.bounds,
        arena_size_bytes,
    )
    return region, (*inputs, *(as_size(s) for s in extra))


def _renumbered(op: Any, numbers: dict[int, int]) -> Any:
    changes: dict[str, Any] = {}
    for name in (*op.READS, *op.WRITES):
        value = getattr(op, name)
        if isinstance(value, tuple):
            changes[name] = tuple(numbers[v] for v in value)
        else:
            changes[name] = numbers[value] if value >= 0 else value
    return replace(op, **changes)
