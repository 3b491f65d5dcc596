"""The Metal kernels of all instructions but attention, one at a time, against numpy in float64."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from flexpte.exporter import ir
from tests.metal_delegate.metal_kernels import (
    FLOATS,
    INTEGERS,
    NUMPY,
    Kernels,
    check,
    constants,
    dispatch,
    kernels_of,
    pack,
    padded,
    random,
    strides,
    structs,
    wide,
)

# --- Linear


def gemv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, out: np.ndarray, types: tuple[str, ...]) -> None:
    (m, k), n = x.shape, weight.shape[0]
    kernels = kernels_of(
        ir.Linear, x=types[0], weight=types[1], bias=types[2] if bias is not None else -1, out=types[3]
    )
    packed = 16 // weight.itemsize
    params = pack(
        "GemvParams",
        n=n,
        k=k,
        m=m,
        x_row_stride=strides(x)[0],
        out_row_stride=strides(out)[0],
        bias_stride=0 if bias is None else strides(bias)[0],
        has_bias=int(bias is not None),
        is_vectorizable=int(k % packed == 0 and weight.ctypes.data % 16 == 0),
    )
    simdgroups = 2
    groups = -(-n // (4 * simdgroups))
    counters = dispatch(kernels, kernels.names[0], params, [x, weight, bias, out], [groups], [32 * simdgroups], [3])
    # The weight is read once; a simdgroup whose columns do not all exist repeats the last one.
    buffers = counters["buffers"]
    extra = (-n) % 4 * k * weight.itemsize
    assert sum(b["read_bytes"] for b in buffers.values()) <= weight.nbytes + extra + (m * k * x.itemsize + 64) * (
        groups + 1
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 7, 64), (1, 9, 2056), (2, 8, 513), (3, 5, 520), (4, 13, 96), (4, 4, 1030), (1, 3, 0)],
)
def test_linear_of_few_rows(dtype: str, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(n * 1000 + k)
    x, weight = padded(rng, (m, k), dtype), random(rng, (n, k), dtype)
    bias = random(rng, (n,), dtype) if n % 2 else None
    out = padded(rng, (m, n), dtype)
    gemv(x, weight, bias, out, (dtype,) * 4)
    expected = wide(x) @ wide(weight).T + (0 if bias is None else wide(bias))
    check(out, expected, dtype, np.abs(wide(x)) @ np.abs(wide(weight)).T + 1, k)


def test_linear_of_mixed_types_keeps_nan_and_infinity_in_their_rows() -> None:
    rng = np.random.default_rng(5)
    types = ("F16", "BF16", "F32", "F32")
    x, weight, bias = random(rng, (3, 40), "F16"), random(rng, (6, 40), "BF16"), random(rng, (6,), "F32")
    x[1, 3], weight[2, 5] = np.nan, np.inf
    out = random(rng, (3, 6), "F32")
    gemv(x, weight, bias, out, types)
    expected = wide(x) @ wide(weight).T + wide(bias)
    check(out, expected, "F32", np.nan_to_num(np.abs(wide(x)), posinf=0) @ np.ones((40, 6)) * 4, 40)


def gemm(
    name: str,
    kernels: Kernels,
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    buffers: list[np.ndarray | None],
    tile_rows: int,
    access: tuple[str, str],
    batch: dict[str, Any] | None = None,
    bias: np.ndarray | None = None,
) -> None:
    """``a`` [m, k], ``b`` [n, k], ``out`` [m, n] of the first batch."""
    m, k = a.shape
    n = b.shape[0]
    sides = [
        {"stride": strides(x)[0], "k_stride": strides(x)[1], "access": constants()[how]}
        for x, how in ((a, access[0]), (b, access[1]))
    ]
    params = pack(
        "GemmParams",
        m=m,
        n=n,
        k=k,
        tile_rows=tile_rows,
        has_bias=int(bias is not None),
        bias_stride=0 if bias is None else strides(bias)[0],
        a=sides[0],
        b=sides[1],
        out_row_stride=strides(out)[0],
        out_column_stride=strides(out)[1],
        **(batch or {}),
    )
    batches = int(np.prod((batch or {}).get("batch_sizes", [1])))
    grid = [-(-n // 64), -(-m // tile_rows), batches]
    dispatch(kernels, name, params, buffers, grid, [128], [len(buffers) - 1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tile_rows", [32, 64])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(63, 65, 33), (64, 64, 32), (65, 63, 40), (5, 70, 31), (9, 1, 1), (33, 8, 104)]
)
def test_linear_of_many_rows(dtype: str, tile_rows: int, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m * 100 + k)
    kernels = kernels_of(ir.Linear, x=dtype, weight=dtype, bias=dtype, out=dtype)
    x, weight = padded(rng, (m, k), dtype), random(rng, (n, k), dtype)
    if k % 8 == 0:
        x = padded(rng, (m, k), dtype, 8)
    how = "GEMM_VECTORS" if k % 8 == 0 else "GEMM_DEPTH_NEAR"
    bias, out = random(rng, (n,), dtype), padded(rng, (m, n), dtype)
    gemm(kernels.names[1], kernels, x, weight, out, [x, weight, bias, out], tile_rows, (how, how), bias=bias)
    expected = wide(x) @ wide(weight).T + wide(bias)
    check(out, expected, dtype, np.abs(wide(x)) @ np.abs(wide(weight)).T + np.abs(wide(bias)), k)


def test_linear_of_many_rows_and_mixed_types() -> None:
    rng = np.random.default_rng(6)
    kernels = kernels_of(ir.Linear, x="F32", weight="BF16", out="F16")
    x, weight = random(rng, (20, 48), "F32"), random(rng, (24, 48), "BF16")
    x[3, 1] = np.nan
    out = random(rng, (20, 24), "F16")
    gemm(kernels.names[1], kernels, x, weight, out, [x, weight, None, out], 32, ("GEMM_VECTORS",) * 2)
    scale = np.nan_to_num(np.abs(wide(x))) @ np.abs(wide(weight)).T
    check(out, wide(x) @ wide(weight).T, "F16", scale, 48)


@pytest.mark.parametrize(
    "types", [("F32", "F32", "F32"), ("F16", "F16", "F32"), ("BF16", "BF16", "BF16"), ("F32", "F16", "F16")]
)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 66, 9), (34, 3, 64), (65, 64, 16)])
def test_matmul_of_strided_and_broadcast_batches(types: tuple[str, str, str], m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m + n + k)
    kernels = kernels_of(ir.MatMul, a=types[0], b=types[1], out=types[2])
    # a [2, 3, m, k] lies as [2, m, 3, k]; b [2, 1, k, n] is broadcast and column-major; out is padded.
    a = padded(rng, (2, m, 3, k), types[0], 8 - k % 8).transpose(0, 2, 1, 3)
    b = padded(rng, (2, 1, n, k), types[1], 5).swapaxes(-1, -2)
    out = padded(rng, (2, 3, m, n), types[2])
    batch = {
        "batch_rank": 2,
        "batch_sizes": [2, 3],
        "a_batch_strides": strides(a)[:2],
        "b_batch_strides": [strides(b)[0], 0],
        "out_batch_strides": strides(out)[:2],
    }
    for how in ("GEMM_DEPTH_NEAR", "GEMM_ROWS_NEAR"):
        out[...] = 0
        right = b[0, 0].T
        gemm(kernels.names[0], kernels, a[0, 0], right, out[0, 0], [a, b, out], 64 if m > 32 else 32, (how, how), batch)
        check(out, wide(a) @ wide(b), types[2], np.abs(wide(a)) @ np.abs(wide(b)), k)


# --- Norms, softmax


def row_params(x: np.ndarray, out: np.ndarray, per_simdgroup: bool, vectors: bool, **more: Any) -> bytes:
    return pack(
        "RowParams",
        columns=x.shape[-1],
        rows=int(np.prod(x.shape[:-1])),
        rank=x.ndim - 1,
        x_stride=strides(x)[-1],
        out_stride=strides(out)[-1],
        sizes=list(x.shape[:-1]),
        x_strides=strides(x)[:-1],
        out_strides=strides(out)[:-1],
        is_row_per_simdgroup=int(per_simdgroup),
        is_vectorizable=int(vectors),
        **more,
    )


def rows_grid(x: np.ndarray, per_simdgroup: bool, threads: int) -> tuple[list[int], list[int]]:
    rows = int(np.prod(x.shape[:-1]))
    return ([-(-rows // (threads // 32))] if per_simdgroup else [rows]), [threads]


ROWS = [
    (1, True, False),
    (31, True, False),
    (64, True, True),
    (256, True, False),
    (300, False, False),
    (520, False, True),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("columns", "per_simdgroup", "vectors"), ROWS)
@pytest.mark.parametrize("kind", ["RmsNorm", "LayerNorm"])
def test_norms(kind: str, dtype: str, columns: int, per_simdgroup: bool, vectors: bool) -> None:
    rng = np.random.default_rng(columns)
    x = padded(rng, (3, 2, columns), dtype, 4).transpose(1, 0, 2) + np.array(3).astype(NUMPY[dtype])
    x = np.lib.stride_tricks.as_strided(x, x.shape, x.strides)
    out = padded(rng, (2, 3, columns), dtype, 4)
    weight, bias = random(rng, (columns,), dtype), random(rng, (columns,), dtype)
    centered = kind == "LayerNorm"
    operands = dict.fromkeys(["x", "weight", "out"] + ["bias"] * centered, dtype)
    kernels = kernels_of(ir.LayerNorm if centered else ir.RmsNorm, **operands, eps=1e-5)
    params = row_params(
        x, out, per_simdgroup, vectors, eps=1e-5, has_weight=1, has_bias=int(centered), weight_stride=1, bias_stride=1
    )
    # Fewer threads than the row has eighths of elements: the rest of the row is read again.
    for threads in (64, 96) if not per_simdgroup else (128,):
        grid = rows_grid(x, per_simdgroup, threads)
        buffers = [x, weight, bias if centered else None, out]
        counters = dispatch(kernels, kernels.names[0], params, buffers, *grid, written=[3])
        if columns <= 8 * (32 if per_simdgroup else threads):  # a row is read once, the parameters once a row
            parameters = (1 + centered) * columns * x.shape[0] * x.shape[1]
            assert counters["device_read_bytes"] == (x.size + parameters) * x.itemsize
        values = wide(x) - (wide(x).mean(-1, keepdims=True) if centered else 0)
        normal = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5)
        expected = normal * wide(weight) + (wide(bias) if centered else 0)
        shift = np.abs(wide(x)).mean() / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5)
        check(out, expected, dtype, (np.abs(normal) + shift + 1) * np.abs(wide(weight)) * 4 + np.abs(wide(bias)), 16)


def test_norms_without_parameters_keep_nan_in_its_row() -> None:
    rng = np.random.default_rng(0)
    x, out = random(rng, (5, 40), "F32"), random(rng, (5, 40), "F32")
    x[2, 7] = np.nan
    kernels = kernels_of(ir.RmsNorm, x="F32", out="F32", eps=0.0)
    params = row_params(x, out, True, True, eps=0.0)
    dispatch(kernels, kernels.names[0], params, [x, None, None, out], [2], [96], [3])
    check(out, wide(x) / np.sqrt((wide(x) ** 2).mean(-1, keepdims=True)), "F32", np.abs(wide(np.nan_to_num(x))) * 4)


@pytest.mark.parametrize("types", [("F32", "F32"), ("F16", "F32"), ("BF16", "BF16"), ("F32", "F16")])
@pytest.mark.parametrize(("columns", "per_simdgroup", "vectors"), ROWS)
@pytest.mark.parametrize("log", [0, 1])
def test_softmax(types: tuple[str, str], columns: int, per_simdgroup: bool, vectors: bool, log: int) -> None:
    rng = np.random.default_rng(columns)
    x, out = padded(rng, (7, columns), types[0], 4), padded(rng, (7, columns), types[1], 4)
    x[...] = x * np.array(8).astype(x.dtype)
    x[1, 0], x[2, :], x[3, -1], x[4, : columns // 2] = np.nan, -np.inf, np.inf, -np.inf
    kernels = kernels_of(ir.Softmax, x=types[0], out=types[1])
    params = row_params(x, out, per_simdgroup, vectors, is_log=log)
    with np.errstate(all="ignore"):
        shifted = wide(x) - wide(x).max(-1, keepdims=True)
        total = np.exp(shifted).sum(-1, keepdims=True)
        expected = shifted - np.log(total) if log else np.exp(shifted) / total
        scale = np.nan_to_num(np.abs(wide(x)) + 40, posinf=0) * (1 if log else np.nan_to_num(expected))
    for threads in (64, 96) if not per_simdgroup else (128,):
        grid = rows_grid(x, per_simdgroup, threads)
        dispatch(kernels, kernels.names[0], params, [x, out], *grid, written=[1])
        check(out, expected, types[1], scale, 9)


# --- Reduce

MODES = ("REDUCE_BY_SIMDGROUP", "REDUCE_BY_THREADGROUP", "REDUCE_BY_THREAD")


def reduce(op: str, x: np.ndarray, num_dims: int, out: np.ndarray, types: tuple[str, str], mode: str) -> None:
    kernels = kernels_of(ir.Reduce, op=op, x=types[0], out=types[1], num_dims=1)
    count = int(np.prod(out.shape))
    params = pack(
        "ReduceParams",
        outer_count=count,
        inner_count=int(np.prod(x.shape[x.ndim - num_dims :])),
        outer_rank=out.ndim,
        inner_rank=num_dims,
        mode=constants()[mode],
        outer_sizes=list(out.shape),
        x_outer_strides=strides(x)[: out.ndim],
        out_strides=strides(out),
        inner_sizes=list(x.shape[out.ndim :]),
        inner_strides=strides(x)[out.ndim :],
    )
    threads = {"REDUCE_BY_SIMDGROUP": 64, "REDUCE_BY_THREADGROUP": 96, "REDUCE_BY_THREAD": 32}[mode]
    outputs = {"REDUCE_BY_SIMDGROUP": 2, "REDUCE_BY_THREADGROUP": 1, "REDUCE_BY_THREAD": 32}[mode]
    dispatch(kernels, kernels.names[0], params, [x, out], [-(-count // outputs)], [threads], [1])


def reduced(op: str, x: np.ndarray, num_dims: int) -> np.ndarray:
    flat = x.reshape(*x.shape[: x.ndim - num_dims], -1)
    if op in ("ArgMax", "ArgMin"):
        return (np.argmax if op == "ArgMax" else np.argmin)(flat, -1)
    if op in ("Any", "All"):
        return (np.any if op == "Any" else np.all)(flat != 0, -1)
    exact = flat.astype(np.int64) if flat.dtype.kind in "iub" else flat.astype(np.float64)
    name = {"Sum": np.sum, "Mean": np.mean, "Max": np.max, "Min": np.min, "Prod": np.prod}[op]
    return np.asarray(name(exact, -1))


def result_type(op: str, dtype: str) -> str:
    if op in ("ArgMax", "ArgMin"):
        return "I64"
    if op in ("Any", "All"):
        return "Bool"
    return dtype if op in ("Max", "Min") or dtype in FLOATS else "I64"


REDUCTIONS = [
    (op, dtype)
    for op in ("Sum", "Mean", "Prod", "Max", "Min", "ArgMax", "ArgMin", "Any", "All")
    for dtype in (FLOATS if op == "Mean" else (*FLOATS, *INTEGERS, "Bool"))
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_reductions(op: str, dtype: str, mode: str) -> None:
    rng = np.random.default_rng(3)
    out_type = result_type(op, dtype)
    for shape, num_dims in (((2, 3, 37), 1), ((3, 5, 7, 4), 2), ((33, 1), 1), ((130,), 1)):
        x = padded(rng, shape, dtype, 2)
        if op == "Prod":
            x[...] = np.where(rng.random(shape) < 0.9, np.array(1).astype(x.dtype), x)
        if op in ("Any", "All"):
            x[...] = np.where(rng.random(shape) < 0.97, np.array(op == "All").astype(x.dtype), x)
        x = np.lib.stride_tricks.as_strided(x, x.shape, x.strides)
        out = random(rng, shape[: x.ndim - num_dims], out_type)
        reduce(op, x, num_dims, out, (dtype, out_type), mode)
        expected = reduced(op, x, num_dims)
        if out_type in FLOATS and op in ("Sum", "Mean", "Prod"):
            flat = np.abs(wide(x)).reshape(*out.shape, -1)
            scale = {"Sum": flat.sum(-1), "Mean": flat.mean(-1), "Prod": np.abs(expected) * flat.shape[-1]}[op]
            check(out, expected, out_type, scale)
        else:
            np.testing.assert_array_equal(wide(out), wide(expected))


@pytest.mark.parametrize("mode", MODES)
def test_reductions_find_the_first_nan_and_the_first_of_equals(mode: str) -> None:
    x = np.zeros((4, 100), np.float32)
    x[0, [40, 70]] = np.nan
    x[1, [33, 65]] = 5
    x[2, [2, 99]] = -5
    x[3] = np.inf
    for op in ("Max", "Min", "ArgMax", "ArgMin", "Sum", "Mean", "Any"):
        out_type = result_type(op, "F32")
        out = np.zeros(4, NUMPY[out_type])
        reduce(op, x, 1, out, ("F32", out_type), mode)
        np.testing.assert_array_equal(out, reduced(op, x, 1).astype(out.dtype), err_msg=op)


def test_sums_are_compensated_and_integers_wrap() -> None:
    x = np.full((1, 20000), 0.1, np.float32)
    out = np.zeros(1, np.float32)
    reduce("Sum", x, 1, out, ("F32", "F32"), "REDUCE_BY_THREAD")
    assert out[0] == np.float32(x.astype(np.float64).sum())
    big = np.full((1, 3), 2**62, np.int64)
    total = np.zeros(1, np.int64)
    reduce("Sum", big, 1, total, ("I64", "I64"), "REDUCE_BY_SIMDGROUP")
    assert total[0] == 3 * 2**62 - 2**64
    for op, expected in (("Sum", 0.0), ("Prod", 1.0), ("Mean", np.nan), ("Max", -np.inf)):
        nothing = np.zeros((1, 0), np.float32)
        reduce(op, nothing, 1, out, ("F32", "F32"), "REDUCE_BY_SIMDGROUP")
        np.testing.assert_array_equal(out, [np.float32(expected)])


# --- Gather, IndexCopy, Arange


def copy_grid(inner: int, rows: int) -> tuple[list[int], list[int]]:
    # Less than there is to do: kernels go on behind the grid.
    return [max(1, inner // 20), max(1, rows // 9)], [16, 4]


@pytest.mark.parametrize("dtype", ["Bool", "F16", "F32", "I64"])
@pytest.mark.parametrize("index_type", ["I32", "I64"])
@pytest.mark.parametrize("vectors", [False, True])
def test_gather_of_rows(dtype: str, index_type: str, vectors: bool) -> None:
    rng = np.random.default_rng(8)
    kernels = kernels_of(ir.Gather, source=dtype, dim=1, index=index_type, out=dtype)
    width = 48 if vectors else 37
    source = padded(rng, (2, 9, width), dtype, 16 if vectors else 3)
    index = rng.integers(-9, 9, (3, 5)).astype(NUMPY[index_type])
    out = padded(rng, (2, 3, 5, width), dtype, 16)
    packed = 16 // source.itemsize if vectors else 1
    status = np.zeros(1, np.uint32)

    def run() -> None:
        params = pack(
            "GatherParams",
            inner=width // packed,
            rows=30,
            rank=3,
            instruction=7,
            is_vectorizable=int(vectors),
            source_size=9,
            source_stride=strides(source)[1],
            source_inner_stride=1,
            out_inner_stride=1,
            sizes=[2, 3, 5],
            source_strides=[strides(source)[0], 0, 0],
            index_strides=[0, *strides(index)],
            out_strides=strides(out)[:3],
        )
        buffers = [source, index, out, status]
        dispatch(kernels, kernels.names[0], params, buffers, *copy_grid(width, 30), written=[2, 3])

    run()
    np.testing.assert_array_equal(out, source[:, index])
    assert status[0] == 0
    index[1, 1] = 9
    run()
    assert status[0] == 7


def test_gather_of_elements_along_the_last_dimension() -> None:
    rng = np.random.default_rng(9)
    kernels = kernels_of(ir.Gather, source="I16", dim=1, index="I64", out="I16")
    source, index = random(rng, (6, 11), "I16"), rng.integers(-11, 11, 70)
    out = random(rng, (6, 70), "I16")
    params = pack(
        "GatherParams",
        inner=70,
        rows=6,
        rank=1,
        source_size=11,
        source_stride=1,
        index_inner_stride=1,
        out_inner_stride=1,
        sizes=[6],
        source_strides=[11],
        out_strides=[70],
    )
    buffers = [source, index, out, np.zeros(1, np.uint32)]
    dispatch(kernels, kernels.names[0], params, buffers, [3, 2], [32, 2], [2, 3])
    np.testing.assert_array_equal(out, source[:, index])


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "I64"])
@pytest.mark.parametrize("index_type", ["I32", "I64"])
@pytest.mark.parametrize("vectors", [False, True])
def test_index_copy_keeps_the_last_of_equal_indices(dtype: str, index_type: str, vectors: bool) -> None:
    rng = np.random.default_rng(10)
    kernels = kernels_of(ir.IndexCopy, target=dtype, dim=2, index=index_type, source=dtype)
    width = 48 if vectors else 21
    target = padded(rng, (2, 3, 12, width), dtype, 16 if vectors else 1)
    # [2, n, 3, width] in memory, as projections give it.
    count = 70
    source = random(rng, (2, count, 3, width), dtype).transpose(0, 2, 1, 3)
    index = rng.integers(0, 12, count).astype(NUMPY[index_type])
    index[40] = 11
    before = target.copy()
    status = np.zeros(1, np.uint32)
    packed = 16 // target.itemsize if vectors else 1

    def run() -> None:
        params = pack(
            "IndexCopyParams",
            count=count,
            inner=width // packed,
            rows=6,
            rank=2,
            instruction=3,
            is_vectorizable=int(vectors),
            index_stride=1,
            target_size=12,
            target_stride=strides(target)[2],
            source_stride=strides(source)[2],
            target_inner_stride=1,
            source_inner_stride=1,
            sizes=[2, 3],
            target_strides=strides(target)[:2],
            source_strides=strides(source)[:2],
        )
        grid, threads = copy_grid(width, 6)
        buffers = [target, index, source, status]
        dispatch(kernels, kernels.names[0], params, buffers, [*grid, count], threads, [0, 3])

    run()
    expected = before
    for i in range(count):
        expected[:, :, index[i]] = source[:, :, i]
    np.testing.assert_array_equal(target, expected)
    assert status[0] == 0
    index[69] = -1
    run()
    assert status[0] == 3


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, "Bool"])
def test_arange(dtype: str) -> None:
    kernels = kernels_of(ir.Arange, out=dtype, start=0, step=1)
    out = np.zeros(2 * 75, NUMPY[dtype])[::2]
    params = pack("ArangeParams", count=75, start=-7, step=3, stride=2)
    dispatch(kernels, kernels.names[0], params, [out], [1], [32], [0])
    np.testing.assert_array_equal(out, np.arange(-7, 3 * 75 - 7, 3).astype(NUMPY[dtype]))


def test_params_have_no_padding_of_the_compilers() -> None:
    for name, kind in structs().items():
        size = sum(ctypes.sizeof(member[1]) for member in kind._fields_)
        assert size == ctypes.sizeof(kind), name
        if name != "KeyRun":
            assert size % 8 == 0, name
