"""Fusion: how views compose, and how many instructions are left."""

from __future__ import annotations

import sympy
import torch
from torch import nn
from torch.nn import functional as F

from flexpte.exporter import ir, views
from flexpte.exporter.fuse import composed, mapping
from flexpte.exporter.ir import Value
from tests.exporter.lowering_helpers import check

N = sympy.Symbol("n", integer=True, positive=True)


def value(*sizes: ir.Size) -> Value:
    return Value(0, "F32", sizes, views.contiguous_strides(sizes))


def test_a_permuted_view_maps_to_dimensions() -> None:
    base = value(2, N, 4)
    over = mapping(base, views.permute(base, (2, 0, 1)))
    assert over is not None
    assert over.dims == (2, 0, 1)
    assert over.whole
    operand = Value(1, "F32", base.sizes, (0, 1, 7))
    assert composed(operand, over, (4, 2, N)).strides == (7, 0, 1)


def test_a_narrowed_view_starts_later_in_the_operand() -> None:
    base = value(N, 8)
    over = mapping(base, views.narrow(base, 1, 3, 4))
    assert over is not None
    assert not over.whole
    assert composed(Value(1, "F32", (N, 8), (16, 2), 5), over, (N, 4)).offset == 5 + 3 * 2


def test_a_repeating_view_is_known_as_such() -> None:
    base = value(N, 8)
    over = mapping(base, views.expand(views.unsqueeze(base, 0), (3, N, 8)))
    assert over is not None
    assert over.repeats


def test_a_view_that_crosses_dimensions_has_no_mapping() -> None:
    base = value(4, 6)
    reshaped = views.reshape(base, (6, 4))
    assert reshaped is not None
    assert mapping(base, reshaped) is None


def test_a_strided_view_has_no_mapping() -> None:
    base = value(4, 6)
    assert mapping(base, views.narrow(base, 1, 0, 3, 2)) is None


class Swiglu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def kinds(parts: object) -> list[str]:
    return [type(i.op).__name__ for i in parts.regions[0].region.instructions]  # type: ignore[attr-defined]


def test_swiglu_is_one_expression_between_products() -> None:
    assert kinds(check(Swiglu(), (torch.randn(2, 3, 8),))) == [
        "Linear",
        "Linear",
        "Elementwise",
        "Linear",
        "Elementwise",
    ]


class RotateHalf(nn.Module):
    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


def test_rotate_half_is_two_expressions() -> None:
    x, angles = torch.randn(2, 4, 3, 8), torch.randn(3, 8)
    assert kinds(check(RotateHalf(), (x, angles.cos(), angles.sin()))) == ["Elementwise"] * 2


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x), self.b(x)], -1)


def test_products_are_written_straight_into_their_concatenation() -> None:
    assert kinds(check(Products(), (torch.randn(2, 3, 8),))) == ["Linear"] * 2


class ManyReaders(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y.sin(), y + 1


def test_what_is_read_twice_is_computed_once() -> None:
    parts = check(ManyReaders(), (torch.randn(2, 3),))
    instructions = parts.regions[0].region.instructions
    assert sum("'Exp'" in str(i.op) for i in instructions) == 1
