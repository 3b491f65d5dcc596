"""Integers keep their values, and 64 bits only where they may need them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexpte.exporter.evaluate import evaluate
from flexpte.exporter.expression import Expression, Node
from flexpte.exporter.mods import mask_program, score_program
from flexpte.exporter.narrow_integers import _INTERVALS

LIKE = torch.zeros(1)
CAPTURED = torch.arange(200, dtype=torch.int64)


def types(mod, sizes=(2, 4, 200, 200)):
    expression = mask_program(mod, LIKE, sizes).expression
    assert expression is not None
    return {n.type for n in expression.nodes}


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, kv: (q >= kv) & (q - kv < 128),
        lambda b, h, q, kv: (q // 14 - kv // 14).abs() + (q % 14 - kv % 14).abs() < 5,
        lambda b, h, q, kv: ((q ^ kv) & (h + 1)) << 3 > 4,
        lambda b, h, q, kv: torch.where(q > kv, q + kv, (b * 4 + h) * 1000) > 7,
    ],
)
def test_small_values_have_32_bits(mod):
    assert types(mod) == {"I32", "Bool"}


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, kv: (q * 2654435761 + kv) % 7 < 3,
        lambda b, h, q, kv: (q << 30) > kv,
        lambda b, h, q, kv: CAPTURED[q] >= kv,
        lambda b, h, q, kv: q * q * q * q * q > kv,
    ],
)
def test_what_may_be_large_keeps_64(mod):
    assert "I64" in types(mod)


def test_unknown_sizes_count_as_the_largest():
    assert "I64" in types(lambda b, h, q, kv: q + kv > 5, sizes=None)
    assert types(lambda b, h, q, kv: q - kv > 5, sizes=None) == {"I32", "Bool"}


UNARY = ("Cast", "Neg", "Abs", "Sign", "Square", "Relu", "BitNot")
BINARY = [name for name in _INTERVALS if name not in (*UNARY, "Where")]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(BINARY),
    st.tuples(st.integers(-40, 40), st.integers(0, 6)),
    st.tuples(st.integers(-40, 40), st.integers(0, 6)),
)
def test_intervals_hold_every_result(op, first, second):
    a, b = ((low, low + length) for low, length in (first, second))
    interval = _INTERVALS[op](a, b)
    if interval is None:
        return
    for x, y in itertools.product(range(a[0], a[1] + 1), range(b[0], b[1] + 1)):
        expression = Expression((Node("QIdx", "I64"), Node("KvIdx", "I64"), Node(op, "I64", (0, 1))))
        got = int(evaluate(expression, {"QIdx": torch.tensor(x), "KvIdx": torch.tensor(y)}, (), ()))
        assert interval[0] <= got <= interval[1], (op, x, y, got, interval)


def test_what_is_not_read_any_more_is_not_captured():
    table = torch.arange(10.0)
    program = score_program(lambda s, b, h, q, kv: s + torch.where(q < 0, table[kv], table[kv]) * table[q], LIKE)
    assert program.expression is not None
    loads = {n.index for n in program.expression.nodes if n.op == "Load"}
    assert loads == set(range(len(program.captures)))
