"""Core ATen operators that no instruction does whole, written with ones that instructions do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten


def variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """Sum of squared differences to the mean over (n - correction), as ``torch.var``; correction 1 by default."""
    return variance_and_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """As ``torch.var_mean``."""
    dims = list(dim) if dim else list(range(x.dim()))
    count = math.prod(x.shape[d] for d in dims)
    mean = x.mean(dims, keepdim=True)
    divisor = count - (1 if correction is None else correction)
    var = (x - mean).square().sum(dims, keepdim=keepdim) / divisor
    return var, mean if keepdim else x.mean(dims)


def decomposition_table(kept: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """What ``run_decompositions`` takes: torch's own table and ours, without the operators in ``kept``."""
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())
    table.update(get_decompositions([aten.linalg_vector_norm]))
    table[aten.var.correction] = variance
    table[aten.var_mean.correction] = variance_and_mean
    for target in kept:
        table.pop(target, None)
    return table
