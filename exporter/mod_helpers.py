"""What the handlers of mods' ops share."""

from __future__ import annotations

from typing import Any

import torch

from flexpte.exporter.builder import KINDS
from flexpte.exporter.translate import Lanes, Translator

aten = torch.ops.aten
prims = torch.ops.prims


def result_dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def finish(t: Translator, node: Any, lanes: Lanes) -> Lanes:
    """A result in the dtype that ATen gives it."""
    dtype = result_dtype(node)
    return t.each(lambda n: t.build.convert(n, lanes.dtype, dtype), dtype, lanes)


def argument(node: Any, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def computed(t: Translator, dtype: torch.dtype, op: str, *arguments: Lanes) -> Lanes:
    """An arithmetic op on operands of one dtype, rounded to it."""
    kind = KINDS[dtype]
    return t.each(lambda *n: t.build.narrow(t.build.op(op, kind, *n), dtype), dtype, *arguments)


def as_floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float32
