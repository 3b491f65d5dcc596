"""Where intermediate results live: offsets in one arena, planned for the upper bounds of all sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexpte.exporter.ir import Instruction, Storage, Value

ALIGNMENT_BYTES = 64


def lifetimes(
    values: Sequence[Value], storages: Sequence[Storage], instructions: Sequence[Instruction]
) -> dict[int, tuple[int, int]]:
    """First and last instruction that touches each arena storage."""
    spans: dict[int, tuple[int, int]] = {}
    for position, instruction in enumerate(instructions):
        for number in (*instruction.op.reads(), *instruction.op.writes()):
            storage = values[number].storage
            if storages[storage].kind == "Arena":
                spans[storage] = (spans.get(storage, (position, position))[0], position)
    return spans


def plan(
    values: Sequence[Value], storages: Sequence[Storage], instructions: Sequence[Instruction]
) -> tuple[tuple[Storage, ...], int]:
    """Storages with offsets, and the arena's size.

    Best fit, largest first: each storage takes the tightest gap between those already placed that
    live at the same time. Storages that nothing touches keep offset 0 and size 0.
    """
    spans = lifetimes(values, storages, instructions)
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first, last)
    result = [replace(s, size_bytes=0) if s.kind == "Arena" else s for s in storages]
    arena_size_bytes = 0
    for number in sorted(spans, key=lambda s: (-storages[s].size_bytes, spans[s])):
        first, last = spans[number]
        size = -(-max(storages[number].size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        taken = sorted((o, e) for o, e, f, t in placed if f <= last and first <= t)
        best: tuple[int, int] | None = None  # (gap, offset)
        end = 0
        for begin, stop in taken:
            gap = begin - end
            if gap >= size and (best is None or gap < best[0]):
                best = (gap, end)
            end = max(end, stop)
        offset = end if best is None else best[1]
        placed.append((offset, offset + size, first, last))
        arena_size_bytes = max(arena_size_bytes, offset + size)
        result[number] = replace(storages[number], offset_bytes=offset)
    return tuple(result), arena_size_bytes
