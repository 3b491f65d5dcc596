"""Strided views with symbolic sizes: what view, permute, slice and friends do to sizes and strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexpte.exporter.ir import Size, Value
from flexpte.exporter.symbols import plus, product, same, times


def contiguous_strides(sizes: Sequence[Size]) -> tuple[Size, ...]:
    """Row-major strides."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(sizes):
        strides.append(step)
        step = times(step, size)
    return tuple(reversed(strides))


def is_contiguous(value: Value) -> bool:
    """Whether the strides are row-major (dimensions of size 1 do not count)."""
    expected = contiguous_strides(value.sizes)
    return all(
        same(size, 1) or same(stride, want)
        for size, stride, want in zip(value.sizes, value.strides, expected, strict=True)
    )


def normalised(value: Value) -> Value:
    """The same view, dimensions of size 1 with the stride they have in a contiguous tensor."""
    strides = list(value.strides)
    step: Size = 1
    for dim in range(len(strides) - 1, -1, -1):
        if same(value.sizes[dim], 1):
            strides[dim] = step
        step = times(strides[dim], value.sizes[dim]) if not same(strides[dim], 0) else step
    return replace(value, strides=tuple(strides))


def reshape(value: Value, sizes: Sequence[Size]) -> Value | None:
    """The same elements with other sizes, or None where strides cannot say that.

    As at::detail::computeStride (aten/src/ATen/TensorUtils.cpp), on symbolic sizes: runs of dimensions
    that step evenly are matched with runs of new dimensions of the same number of elements.
    """
    runs: list[tuple[Size, Size]] = []  # (number of elements, innermost stride), innermost run first
    for size, stride in zip(reversed(value.sizes), reversed(value.strides), strict=True):
        if same(size, 1):
            continue
        if runs and same(stride, times(runs[-1][0], runs[-1][1])):
            runs[-1] = (times(runs[-1][0], size), runs[-1][1])
        else:
            runs.append((size, stride))
    strides: list[Size] = []
    run = 0
    filled: Size = 1
    for size in reversed(sizes):
        if same(size, 1):
            strides.append(times(filled, runs[run][1]) if run < len(runs) else 1)
            continue
        if run == len(runs):
            return None
        strides.append(times(filled, runs[run][1]))
        filled = times(filled, size)
        if same(filled, runs[run][0]):
            run, filled = run + 1, 1
        elif isinstance(filled, int) and isinstance(runs[run][0], int) and runs[run][0] % filled:
            return None
    if run != len(runs):
        return None
    return replace(value, sizes=tuple(sizes), strides=tuple(reversed(strides)))


def permute(value: Value, dims: Sequence[int]) -> Value:
    """Dimensions in another order."""
    return replace(value, sizes=tuple(value.sizes[d] for d in dims), strides=tuple(value.strides[d] for d in dims))


def narrow(value: Value, dim: int, start: Size, length: Size, step: int = 1) -> Value:
    """``length`` elements of a dimension, from ``start``, every ``step``-th."""
    sizes, strides = list(value.sizes), list(value.strides)
    offset = plus(value.offset, times(start, strides[dim]))
    sizes[dim], strides[dim] = length, times(strides[dim], step)
    return replace(value, sizes=tuple(sizes), strides=tuple(strides), offset=offset)


def select(value: Value, dim: int, index: Size) -> Value:
    """One element of a dimension, which goes away."""
    one = narrow(value, dim, index, 1)
    return squeeze(one, dim)


def squeeze(value: Value, dim: int) -> Value:
    """Without one dimension of size 1."""
    return replace(
        value,
        sizes=value.sizes[:dim] + value.sizes[dim + 1 :],
        strides=value.strides[:dim] + value.strides[dim + 1 :],
    )


def unsqueeze(value: Value, dim: int) -> Value:
    """With a new dimension of size 1 before ``dim``."""
    step: Size = times(value.sizes[dim], value.strides[dim]) if dim < len(value.sizes) else 1
    return replace(
        value,
        sizes=(*value.sizes[:dim], 1, *value.sizes[dim:]),
        strides=(*value.strides[:dim], step, *value.strides[dim:]),
    )


def expand(value: Value, sizes: Sequence[Size]) -> Value:
    """Broadcast: new leading dimensions, and those of size 1, repeat with stride 0."""
    missing = len(sizes) - len(value.sizes)
    strides: list[Size] = [0] * missing
    for old, stride, new in zip(value.sizes, value.strides, sizes[missing:], strict=True):
        strides.append(stride if same(old, new) else 0)
    return replace(value, sizes=tuple(sizes), strides=tuple(strides))


def split_first(value: Value, dims: Sequence[int]) -> tuple[int, ...]:
    """All dimensions, those of ``dims`` last, both in order."""
    return (*(d for d in range(len(value.sizes)) if d not in dims), *dims)


def num_elements(value: Value) -> Size:
    """The product of the sizes."""
    return product(value.sizes)
