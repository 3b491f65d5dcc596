"""What an export did: attentions, caches, what was delegated and what not, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexpte.exporter.explain import MaskExplanation
from flexpte.exporter.expression import Expression, Node
from flexpte.exporter.ir import FlexAttention, Region, Size
from flexpte.exporter.partition import Lowered, Refusal

_INFIX = {
    "Add": "+",
    "Sub": "-",
    "Mul": "*",
    "Div": "/",
    "FloorDiv": "//",
    "Remainder": "%",
    "Eq": "==",
    "Ne": "!=",
    "Lt": "<",
    "Le": "<=",
    "Gt": ">",
    "Ge": ">=",
    "LogicalAnd": "&",
    "LogicalOr": "|",
    "LogicalXor": "^",
    "BitAnd": "&",
    "BitOr": "|",
    "BitXor": "^",
    "ShiftLeft": "<<",
    "ShiftRight": ">>",
    "Pow": "**",
}
_LEAVES = {"Score": "score", "Batch": "b", "Head": "h", "QIdx": "q_idx", "KvIdx": "kv_idx"}


def readable(expression: Expression | None) -> str | None:
    """An expression as a line of Python; captured tensors are c0, c1, …, scalars s0, s1, …"""
    if expression is None:
        return None
    text: list[str] = []
    for node in expression.nodes:
        text.append(_readable_node(node, [text[a] for a in node.args]))
    result = text[-1]
    return result[1:-1] if expression.nodes[-1].op in _INFIX else result


def _readable_node(node: Node, args: list[str]) -> str:
    if node.op in _LEAVES:
        return _LEAVES[node.op]
    if node.op == "Constant":
        if node.type == "F32":
            return repr(node.value_float)
        return str(bool(node.value_int)) if node.type == "Bool" else str(node.value_int)
    if node.op in ("Scalar", "Input"):
        return f"{'s' if node.op == 'Scalar' else 'x'}{node.index}"
    if node.op == "Load":
        return f"c{node.index}[{', '.join(args)}]"
    if node.op == "Cast" and node.type in ("I32", "I64"):
        return args[0]
    if node.op in _INFIX:
        return f"({args[0]} {_INFIX[node.op]} {args[1]})"
    name = node.type.lower() if node.op == "Cast" else node.op.lower()
    return f"{name}({', '.join(args)})"


@dataclass(frozen=True)
class AttentionReport:
    """One attention; shapes in symbols where they depend on the inputs."""

    name: str
    query_shape: tuple[str, ...]
    key_shape: tuple[str, ...]
    score_mod: str | None
    mask_mod: str | None
    num_captures: int
    has_block_lists: bool
    mask: MaskExplanation | None = None


@dataclass(frozen=True)
class CacheReport:
    """One buffer that the delegate owns."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    size_bytes: int
    window_tokens: int | None = None


@dataclass(frozen=True)
class ExportReport:
    """Everything about an export; ``str`` of it is for people."""

    mode: str
    attentions: tuple[AttentionReport, ...]
    caches: tuple[CacheReport, ...]
    refusals: tuple[Refusal, ...]
    num_regions: int
    num_nodes_delegated: int
    num_instructions: int
    arena_size_bytes: int
    weights_size_bytes: int
    program_size_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        mib = 1 << 20
        plural = "s" if self.num_regions != 1 else ""
        lines = [
            f'delegate="{self.mode}": {self.num_nodes_delegated} operators in '
            f"{self.num_regions} delegate call{plural}, "
            f"{self.num_instructions} instructions, arena {self.arena_size_bytes / mib:.1f} MiB, "
            f"weights {self.weights_size_bytes / mib:.1f} MiB, file {self.program_size_bytes / mib:.1f} MiB"
        ]
        groups: dict[tuple[object, ...], list[AttentionReport]] = {}
        for a in self.attentions:
            key = (a.query_shape, a.key_shape, a.score_mod, a.mask_mod, a.has_block_lists)
            groups.setdefault(key, []).append(a)
        for same in groups.values():
            a = same[0]
            names = a.name if len(same) == 1 else f"{a.name} and {len(same) - 1} more"
            lines.append(f"attention {names}: query [{', '.join(a.query_shape)}], key [{', '.join(a.key_shape)}]")
            lines.append(f"  mask_mod: {a.mask_mod or 'none'}; score_mod: {a.score_mod or 'none'}")
            if a.mask is not None:
                lines.append(f"  {a.mask}")
        if self.caches:
            total = sum(c.size_bytes for c in self.caches)
            lines.append(
                f"{len(self.caches)} caches, {total / mib:.1f} MiB: "
                + ", ".join(c.name for c in self.caches[:2])
                + (", …" if len(self.caches) > 2 else "")
            )
        if self.refusals:
            lines.append(f"{len(self.refusals)} operators not delegated:")
            lines += [f"  {r}" for r in self.refusals[:20]]
            if len(self.refusals) > 20:
                lines.append(f"  … and {len(self.refusals) - 20} more (report.refusals)")
        if self.seconds:
            lines.append("seconds: " + ", ".join(f"{stage} {s:.1f}" for stage, s in self.seconds.items()))
        return "\n".join(lines)


def attentions_of(lowered: Lowered, masks: Mapping[str, MaskExplanation]) -> list[AttentionReport]:
    """The attentions of a region."""
    region = lowered.region
    result = []
    for instruction in region.instructions:
        op = instruction.op
        if isinstance(op, FlexAttention):
            result.append(
                AttentionReport(
                    instruction.name,
                    _shape(region.values[op.query].sizes),
                    _shape(region.values[op.key].sizes),
                    readable(op.score),
                    readable(op.mask),
                    len(op.score_captures) + len(op.mask_captures),
                    op.kv_num_blocks >= 0,
                    masks.get(instruction.name),
                )
            )
    return result


def caches_of(region: Region, masks: Mapping[str, MaskExplanation]) -> list[CacheReport]:
    """The states of a region, with the window that the masks of all attentions reading one leave it."""
    sizes = {s.index: s.size_bytes for s in region.storages if s.kind == "State"}
    windows: dict[int, list[int | None]] = {}
    for instruction in region.instructions:
        if isinstance(instruction.op, FlexAttention):
            mask = masks.get(instruction.name)
            for number in (instruction.op.key, instruction.op.value):
                storage = region.storages[region.values[number].storage]
                if storage.kind == "State":
                    windows.setdefault(storage.index, []).append(mask.window_tokens if mask else None)
    return [
        CacheReport(state.name, state.sizes, state.dtype, "contiguous", sizes[i], _widest(windows.get(i, [None])))
        for i, state in enumerate(region.states)
        if i in sizes
    ]


def _widest(windows: list[int | None]) -> int | None:
    known = [w for w in windows if w is not None]
    return max(known) if len(known) == len(windows) else None


def _shape(sizes: tuple[Size, ...]) -> tuple[str, ...]:
    return tuple(map(str, sizes))
