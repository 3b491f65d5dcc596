"""Typed SSA expression programs: the two mods of an attention, and fused elementwise kernels.

The vocabulary (operations, types, meaning) is that of ``metal_delegate/payload.fbs``; names here are
the enumerator names there. An expression is a value: frozen, hashable, comparable, so that equal
mods of different layers are one program.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

TYPES = ("Bool", "I32", "I64", "F32")
"""Types of nodes; floating inputs of any width are computed in F32."""


@dataclass(frozen=True)
class Node:
    """One operation; ``args`` are numbers of earlier nodes of the same expression."""

    op: str
    type: str
    args: tuple[int, ...] = ()
    index: int = 0
    round_to: str = "F32"
    value_int: int = 0
    value_float: float = 0.0


@dataclass(frozen=True)
class Expression:
    """Nodes in topological order; the last one is the result."""

    nodes: tuple[Node, ...]

    @property
    def type(self) -> str:
        """Type of the result."""
        return self.nodes[-1].type


def to_json(expression: Expression) -> str:
    """Serialise an expression; fields that have their default value are left out."""
    defaults = {f.name: f.default for f in fields(Node)}
    return json.dumps(
        [
            {k: v for k, v in asdict(n).items() if k in ("op", "type") or repr(v) != repr(defaults[k])}
            for n in expression.nodes
        ]
    )


def from_json(text: str) -> Expression:
    """Inverse of :func:`to_json`."""
    nodes: list[dict[str, Any]] = json.loads(text)
    return Expression(tuple(Node(**{**n, "args": tuple(n.get("args", ()))}) for n in nodes))
