"""The Metal kernels of elementwise expressions against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from flexpte.exporter import ir
from flexpte.exporter.expression import Expression, Node
from tests.metal_delegate.metal_kernels import (
    FLOATS,
    INTEGERS,
    NUMPY,
    check,
    dispatch,
    empty,
    kernels_of,
    pack,
    padded,
    random,
    strides,
    wide,
)


def elementwise_params(
    views: list[np.ndarray], sizes: list[int], vectors: int, captures: list[np.ndarray], scalars: list[int]
) -> bytes:
    """``views``: the output and the inputs, of equal sizes, the innermost dimension last."""
    header = pack(
        "ElementwiseHeader",
        inner=sizes[-1],
        rows=int(np.prod(sizes[:-1])),
        rank=len(sizes) - 1,
        sizes=sizes[:-1],
        vectors=vectors,
        instruction=7,
    )
    parts = [header]
    parts += [pack("ElementwiseStrides", inner=strides(v)[-1], rows=strides(v)[:-1]) for v in views]
    parts += [pack("CaptureView", sizes=list(c.shape), strides=strides(c)) for c in captures]
    return b"".join(parts) + np.array(scalars, np.int64).tobytes()


INPUTS = ("F32", "I16", "Bool", "BF16")
# input_0 + (input_2 ? input_1 : 0) + input_3 * scalars[0] + capture_0[input_1, scalars[1]]; the row input_1 lies
# outside the capture where it is not 0 or 1 or, from the end, -1 or -2.
SUM = Expression(
    (
        Node("Input", "F32", index=0),
        Node("Input", "I32", index=1),
        Node("Input", "Bool", index=2),
        Node("Input", "F32", index=3),
        Node("Scalar", "I64", index=0),
        Node("Scalar", "I64", index=1),
        Node("Cast", "F32", (4,)),
        Node("Mul", "F32", (3, 6)),
        Node("Cast", "F32", (1,)),
        Node("Constant", "F32", value_float=0.0),
        Node("Where", "F32", (2, 8, 9)),
        Node("Add", "F32", (0, 10)),
        Node("Add", "F32", (11, 7)),
        Node("Load", "F32", (1, 5), index=0),
        Node("Add", "F32", (12, 13)),
    )
)


@pytest.mark.parametrize("out_type", [*FLOATS, *INTEGERS, "Bool"])
@pytest.mark.parametrize(
    ("shape", "vectors"), [((1,), 0), ((3,), 0), ((67,), 0b111), ((5, 8), 0b10111), ((2, 3, 4, 5), 0)]
)
def test_elementwise(out_type: str, shape: tuple[int, ...], vectors: int) -> None:
    rng = np.random.default_rng(11)
    scalars: tuple[int, int] = (2, 1)
    kernels = kernels_of(
        ir.Elementwise, expression=SUM, inputs=INPUTS, out=out_type, scalars=scalars, captures=("I32",)
    )
    capture = np.array([[10, 20, 30], [40, 50, 60]], np.int32)
    # Inputs: contiguous, contiguous, broadcast along the last dimension, broadcast along the others.
    x, y = empty(shape, "F32"), empty(shape, "I16")
    x[...] = np.rint(random(rng, shape, "F32") * 8)
    y[...] = rng.integers(-3, 3, shape)
    flags = np.broadcast_to(random(rng, (*shape[:-1], 1), "Bool"), shape)
    row = random(rng, shape[-1:], "BF16")
    row[...] = np.rint(row.astype(np.float32) * 4)
    z = np.broadcast_to(row, shape)
    out = padded(rng, shape, out_type, 4) if len(shape) > 1 or not vectors else random(rng, shape, out_type)
    params = elementwise_params([out, x, y, flags, z], list(shape), vectors, [capture], list(scalars))
    status = np.zeros(1, np.uint32)
    dispatch(kernels, kernels.names[0], params, [out, x, y, flags, z, capture, status], [1, 2], [4, 8], [0, 6])
    is_inside = (y >= -2) & (y < 2)
    assert status[0] == (0 if is_inside.all() else 7)
    loaded = np.where(is_inside, capture[np.where(is_inside, y, 0), 1], 0)
    expected = wide(x) + np.where(flags, wide(y), 0) + 2 * wide(z) + loaded
    if out_type in FLOATS:
        check(out, expected, out_type)
    else:
        np.testing.assert_array_equal(out, expected.astype(np.int32).astype(NUMPY[out_type]))


def test_elementwise_without_inputs() -> None:
    expression = Expression((Node("Scalar", "I64", index=0),))
    kernels = kernels_of(ir.Elementwise, expression=expression, inputs=(), out="I64", scalars=(-9,))
    out = np.zeros(24, np.int64)
    params = elementwise_params([out], [24], 0, [], [-9])
    dispatch(kernels, kernels.names[0], params, [out], [1], [8], [0])
    assert (out == -9).all()


def test_elementwise_in_place() -> None:
    expression = Expression((Node("Input", "F32", index=0), Node("Neg", "F32", (0,))))
    kernels = kernels_of(ir.Elementwise, expression=expression, inputs=("F16",), out="F16")
    x = random(np.random.default_rng(1), (50,), "F16")
    before = x.copy()
    dispatch(kernels, kernels.names[0], elementwise_params([x, x], [50], 0b11, [], []), [x, x], [1], [8], [0, 1])
    np.testing.assert_array_equal(x, -before)
