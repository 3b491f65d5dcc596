"""The arena plan: storages that live at the same time never overlap, others share memory."""

from __future__ import annotations

import random

import pytest

from flexpte.exporter.ir import Elementwise, Instruction, Storage, Value
from flexpte.exporter.plan import ALIGNMENT_BYTES, lifetimes, plan
from flexpte.exporter.scalars import ExpressionBuilder


def program(seed: int, count: int) -> tuple[list[Value], list[Storage], list[Instruction]]:
    """A random chain: each instruction reads up to three earlier results."""
    generator = random.Random(seed)
    e = ExpressionBuilder()
    expression = e.build(e.input(0, "F32"))
    storages = [Storage("Arena", 0, generator.choice([0, 1, 63, 64, 65, 4096, 100_000])) for _ in range(count)]
    values = [Value(i, "F32", (1,), (1,)) for i in range(count)]
    instructions = []
    for i in range(count):
        reads = tuple(generator.sample(range(max(0, i - 8), i), min(3, i)))
        instructions.append(Instruction(Elementwise(expression, reads, i), f"n{i}"))
    return values, storages, instructions


@pytest.mark.parametrize("seed", range(20))
def test_live_storages_do_not_overlap(seed: int) -> None:
    values, storages, instructions = program(seed, 60)
    spans = lifetimes(values, storages, instructions)
    planned, arena_size_bytes = plan(values, storages, instructions)
    for a, (first, last) in spans.items():
        assert planned[a].offset_bytes % ALIGNMENT_BYTES == 0
        assert planned[a].size_bytes == storages[a].size_bytes
        assert planned[a].offset_bytes + planned[a].size_bytes <= arena_size_bytes
        for b, (begin, end) in spans.items():
            if a < b and first <= end and begin <= last:
                x, y = planned[a], planned[b]
                assert (
                    x.offset_bytes + x.size_bytes <= y.offset_bytes or y.offset_bytes + y.size_bytes <= x.offset_bytes
                )


def test_a_chain_needs_two_storages() -> None:
    e = ExpressionBuilder()
    expression = e.build(e.input(0, "F32"))
    storages = [Storage("Arena", 0, 1000) for _ in range(10)]
    values = [Value(i, "F32", (250,), (1,)) for i in range(10)]
    instructions = [Instruction(Elementwise(expression, (i - 1,) if i else (), i), f"n{i}") for i in range(10)]
    assert plan(values, storages, instructions)[1] == 2 * 1024


def test_only_the_arena_is_planned() -> None:
    e = ExpressionBuilder()
    storages = [Storage("Input", 0, 8), Storage("Output", 0, 8)]
    values = [Value(0, "F32", (2,), (1,)), Value(1, "F32", (2,), (1,))]
    planned, size = plan(values, storages, [Instruction(Elementwise(e.build(e.input(0, "F32")), (0,), 1), "n")])
    assert (list(planned), size) == (storages, 0)
