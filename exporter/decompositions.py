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


def convolution_of_patches(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """A convolution whose patches do not overlap (stride = kernel, as patch embeddings are), as a linear map.

    x [B, C, *S], weight [N, C, *K] -> [B, N, *(S // K)]. NotImplemented for other convolutions.
    """
    kernel = list(weight.shape[2:])
    if transposed or groups != 1 or list(stride) != kernel or any(padding) or any(d != 1 for d in dilation):
        return NotImplemented
    num_dims = len(kernel)
    counts = [x.shape[2 + d] // k for d, k in enumerate(kernel)]
    for d, k in enumerate(kernel):
        x = x.narrow(2 + d, 0, counts[d] * k)
    x = x.reshape(*x.shape[:2], *(size for pair in zip(counts, kernel, strict=True) for size in pair))
    positions, offsets = range(2, 2 + 2 * num_dims, 2), range(3, 3 + 2 * num_dims, 2)
    x = x.permute(0, *positions, 1, *offsets).flatten(1 + num_dims)
    return torch.nn.functional.linear(x, weight.flatten(1), bias).movedim(-1, 1)


def decomposition_table(kept: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """What ``run_decompositions`` takes: torch's own table and ours, without the operators in ``kept``."""
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())
    table.update(get_decompositions([aten.linalg_vector_norm]))
    table[aten.var.correction] = variance
    table[aten.var_mean.correction] = variance_and_mean
    table[aten.convolution.default] = convolution_of_patches
    for target in kept:
        table.pop(target, None)
    return table
