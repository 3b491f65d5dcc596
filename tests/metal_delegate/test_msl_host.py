"""The shim that runs Metal kernels on this machine: results, counters, and the faults that it must catch."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flexpte.runtime import _native
from flexpte.runtime.errors import FlexpteError

HEADER = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
"""
HEADER_LINES = HEADER.count("\n")


@cache
def library(text: str, **options: Any) -> Any:
    return _native.MslLibrary(HEADER + text, checked=True, **options)


def run(
    text: str,
    buffers: list[Any],
    *,
    params: bytes = b"",
    groups: int = 1,
    threads: int = 32,
    function: str = "f",
    constants: dict[int, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    compiled = _native.MslLibrary(HEADER + text, checked=True, constants=constants) if constants else library(text)
    counters: dict[str, Any] = compiled.dispatch(function, buffers, params, (groups, 1, 1), (threads, 1, 1), **options)
    return counters


def line_of(text: str, marker: str) -> int:
    """The line of ``marker`` in the kernel text as the shim counts it."""
    return HEADER_LINES + 1 + text[: text.index(marker)].count("\n")


def fails(text: str, buffers: list[Any], message: str, marker: str | None = None, **options: Any) -> None:
    with pytest.raises(FlexpteError, match=message) as caught:
        run(text, buffers, **options)
    said = str(caught.value)
    assert marker is None or f"line {line_of(text, marker)}:" in said, said


def floats(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


# ---- Results

ADD = """
struct Params { int count; int unused; };
template <typename T>
[[kernel]] void add(constant Params& params [[buffer(0)]], device const T* a [[buffer(1)]],
                    device const T* b [[buffer(2)]], device T* out [[buffer(3)]],
                    uint i [[thread_position_in_grid]]) {
  if (int(i) < params.count) out[i] = a[i] + b[i];
}
template [[host_name("add_f32")]] [[kernel]] decltype(add<float>) add<float>;
template [[host_name("add_f16")]] [[kernel]] decltype(add<half>) add<half>;
template [[host_name("add_bf16")]] kernel void add<bfloat>(
    constant Params& params [[buffer(0)]], device const bfloat* a [[buffer(1)]], device const bfloat* b [[buffer(2)]],
    device bfloat* out [[buffer(3)]], uint i [[thread_position_in_grid]]);
"""


@pytest.mark.parametrize(
    ("name", "dtype"), [("add_f32", np.float32), ("add_f16", np.float16), ("add_bf16", ml_dtypes.bfloat16)]
)
def test_addition_rounds_as_its_type(name: str, dtype: Any) -> None:
    a, b = floats(100).astype(dtype), floats(100, 1).astype(dtype)
    out = np.zeros(100, dtype)
    counters = run(ADD, [a, b, out], params=struct.pack("ii", 100, 0), groups=4, function=name)
    assert library(ADD).functions == ["add_f32", "add_f16", "add_bf16"]
    np.testing.assert_array_equal(out, a + b)
    size = np.dtype(dtype).itemsize
    assert counters["buffers"] == {
        "buffer1": {"read_bytes": 100 * size, "written_bytes": 0, "unique_bytes": 100 * size},
        "buffer2": {"read_bytes": 100 * size, "written_bytes": 0, "unique_bytes": 100 * size},
        "buffer3": {"read_bytes": 0, "written_bytes": 100 * size, "unique_bytes": 100 * size},
    }
    assert counters["flops"] == 100
    assert counters["constant_read_bytes"] == 128 * 4
    assert (counters["threads"], counters["threadgroups"]) == (128, 4)


REDUCTION = """
kernel void f(device const float* x [[buffer(1)]], device float* out [[buffer(2)]],
              uint i [[thread_index_in_threadgroup]], uint3 group [[threadgroup_position_in_grid]]) {
  threadgroup float sums[64];
  sums[i] = x[group.x * 64 + i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint step = 32; step > 0; step /= 2) {
    if (i < step) sums[i] += sums[i + step];
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (i == 0) out[group.x] = sums[0];
}
"""


@pytest.mark.parametrize("reverse", [False, True])
def test_threadgroup_reduction(reverse: bool) -> None:
    x, out = floats(192), np.zeros(3, np.float32)
    counters = library(REDUCTION, reversed=reverse).dispatch("f", [x, out], b"", (3, 1, 1), (64, 1, 1))
    np.testing.assert_allclose(out, x.reshape(3, 64).sum(1), rtol=1e-5)
    assert counters["barriers"] == 3 * 7
    assert counters["threadgroup_bytes"] == 256
    assert counters["threadgroup_written_bytes"] == 3 * (64 + 63) * 4
    assert counters["threadgroup_read_bytes"] == 3 * (2 * 63 + 1) * 4
    assert counters["flops"] == 3 * 63


SIMD = """
kernel void f(device const float* x [[buffer(1)]], device const uint* u [[buffer(2)]], device float* out [[buffer(3)]],
              device uint* bits [[buffer(4)]], ushort lane [[thread_index_in_simdgroup]],
              uint simdgroup [[simdgroup_index_in_threadgroup]], uint i [[thread_index_in_threadgroup]],
              uint simdgroups [[simdgroups_per_threadgroup]], uint width [[threads_per_simdgroup]]) {
  const float v = x[i];
  out[i] = simd_sum(v);
  out[64 + i] = simd_max(v);
  out[128 + i] = simd_min(v);
  out[192 + i] = simd_shuffle_xor(v, 5);
  out[256 + i] = simd_shuffle_down(v, 3);
  out[320 + i] = simd_shuffle_up(v, 3);
  out[384 + i] = simd_broadcast(v, 7);
  out[448 + i] = simd_shuffle(v, ushort(31 - lane));
  out[512 + i] = simd_prefix_inclusive_sum(v);
  out[576 + i] = simd_prefix_exclusive_sum(v);
  out[640 + i] = simd_broadcast_first(v) + float(simdgroup) + 10.0 * float(simdgroups * width);
  out[704 + i] = simd_sum(float2(v, 1.0f)).y;
  out[768 + i] = simd_shuffle_and_fill_up(v, -v, 2);
  out[832 + i] = quad_sum(v);
  bits[i] = simd_and(u[i]);
  bits[64 + i] = simd_or(u[i]);
  bits[128 + i] = simd_xor(u[i]);
  bits[192 + i] = uint(ulong(simd_ballot(v > 0.0f)));
  bits[256 + i] = uint(simd_any(lane == 3)) + 2 * uint(simd_all(lane < 32)) + 4 * uint(simd_all(v > 0.0f));
}
"""


def test_simdgroup_functions() -> None:
    x = floats(64)
    u = np.random.default_rng(1).integers(0, 2**32, 64, np.uint32)
    out, bits = np.zeros((14, 2, 32), np.float32), np.zeros((5, 2, 32), np.uint32)
    counters = run(SIMD, [x, u, out, bits], threads=64)
    v, lane = x.reshape(2, 32), np.arange(32)
    ones = np.ones((1, 32), np.float32)
    np.testing.assert_allclose(out[0], v.sum(1, keepdims=True) * ones, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[1], v.max(1, keepdims=True) * ones)
    np.testing.assert_array_equal(out[2], v.min(1, keepdims=True) * ones)
    np.testing.assert_array_equal(out[3], v[:, lane ^ 5])
    np.testing.assert_array_equal(out[4][:, :29], v[:, 3:])
    np.testing.assert_array_equal(out[5][:, 3:], v[:, :29])
    np.testing.assert_array_equal(out[6], v[:, [7] * 32])
    np.testing.assert_array_equal(out[7], v[:, ::-1])
    np.testing.assert_allclose(out[8], v.cumsum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[9], v.cumsum(1) - v, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[10], v[:, :1] + np.array([[0], [1]], np.float32) + 640 * ones, rtol=1e-6)
    np.testing.assert_array_equal(out[11], 32 * np.ones((2, 32)))
    np.testing.assert_array_equal(out[12], np.concatenate([-v[:, 30:], v[:, :30]], 1))
    np.testing.assert_allclose(out[13], np.repeat(v.reshape(2, 8, 4).sum(2), 4, 1), rtol=1e-5, atol=1e-6)
    w = u.reshape(2, 32)
    for row, reduce in enumerate((np.bitwise_and, np.bitwise_or, np.bitwise_xor)):
        np.testing.assert_array_equal(bits[row], np.repeat(reduce.reduce(w, 1), 32).reshape(2, 32))
    ballot = ((v > 0).astype(np.uint64) << lane.astype(np.uint64)).sum(1).astype(np.uint32)
    np.testing.assert_array_equal(bits[3], np.repeat(ballot, 32).reshape(2, 32))
    np.testing.assert_array_equal(bits[4], np.full((2, 32), 3))
    assert counters["barriers"] == 0


MATRIX = """
template <typename T>
[[kernel]] void product(device const T* a [[buffer(1)]], device const T* b [[buffer(2)]],
                        device float* out [[buffer(3)]], device T* copy [[buffer(4)]]) {
  threadgroup T staged[8][12];
  simdgroup_matrix<T, 8, 8> x, y;
  simdgroup_float8x8 z = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(x, a, 16, ulong2(8, 0));
  simdgroup_load(y, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(z, x, y, z);
  simdgroup_store(z, out, 8);
  simdgroup_store(x, &staged[0][0], 12);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(y, &staged[0][0], 12);
  simdgroup_store(y, copy, 8, ulong2(0, 0), true);
}
template [[host_name("product_f32")]] [[kernel]] decltype(product<float>) product<float>;
template [[host_name("product_f16")]] [[kernel]] decltype(product<half>) product<half>;
template [[host_name("product_bf16")]] [[kernel]] decltype(product<bfloat>) product<bfloat>;
"""


@pytest.mark.parametrize(
    ("name", "dtype"), [("product_f32", np.float32), ("product_f16", np.float16), ("product_bf16", ml_dtypes.bfloat16)]
)
def test_matrix_product(name: str, dtype: Any) -> None:
    a, b = floats(128).reshape(8, 16).astype(dtype), floats(64, 1).reshape(8, 8).astype(dtype)
    out, copy = np.zeros((8, 8), np.float32), np.zeros((8, 8), dtype)
    counters = run(MATRIX, [a, b, out, copy], function=name)
    x = a[:, 8:]
    np.testing.assert_allclose(out, x.astype(np.float64) @ b.astype(np.float64).T + 1, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(copy, x.T)
    size = np.dtype(dtype).itemsize
    assert counters["matrix_multiplies"] == 1
    assert counters["matrix_flops"] == 1024
    assert counters["flops"] == 0
    assert counters["simdgroup_barriers"] == 1
    assert counters["device_read_bytes"] == 2 * 64 * size
    assert counters["threadgroup_written_bytes"] == counters["threadgroup_read_bytes"] == 64 * size


def test_matrix_elements_lie_as_on_apple_gpus() -> None:
    text = """
kernel void f(device const float* a [[buffer(1)]], device float* out [[buffer(2)]],
              ushort lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 x;
  simdgroup_load(x, a, 8);
  const float2 mine = x.thread_elements();
  out[2 * lane] = mine[0];
  out[2 * lane + 1] = mine.y;
  thread auto& elements = x.thread_elements();
  elements[0] *= 2.0f;
  simdgroup_store(x, out + 64, 8);
}
"""
    a, out = np.arange(64, dtype=np.float32), np.zeros(128, np.float32)
    run(text, [a, out])
    lane = np.arange(32)
    row = (lane // 4 & 4) + lane // 2 % 4
    col = (lane // 4 & 2) * 2 + lane % 2 * 2
    np.testing.assert_array_equal(out[:64].reshape(32, 2), np.stack([row * 8 + col, row * 8 + col + 1], 1))
    np.testing.assert_array_equal(out[64:], np.where(np.arange(64) % 2 == 0, 2 * a, a))


CONSTANTS = """
constant bool is_negative [[function_constant(0)]];
constant int scale [[function_constant(1)]];
constant bool is_scaled = is_function_constant_defined(scale);
kernel void f(device float* out [[buffer(1)]], uint i [[thread_position_in_grid]]) {
  float x = float(i);
  if (is_negative) x = -x;
  if (is_scaled) x *= float(scale);
  out[i] = x;
}
"""


def test_function_constants() -> None:
    out = np.zeros(32, np.float32)
    run(CONSTANTS, [out], constants={0: True})
    np.testing.assert_array_equal(out, -np.arange(32))
    run(CONSTANTS, [out], constants={0: False, 1: 3})
    np.testing.assert_array_equal(out, 3 * np.arange(32))
    fails(CONSTANTS, [out], "no value or definition.*is_negative")


def test_atomics_and_threadgroup_arguments() -> None:
    text = """
kernel void f(device atomic_uint* counts [[buffer(1)]], device atomic_float* sum [[buffer(2)]],
              device atomic_int* most [[buffer(3)]], threadgroup atomic_int* own [[threadgroup(0)]],
              device int* out [[buffer(4)]], uint i [[thread_position_in_grid]],
              uint t [[thread_index_in_threadgroup]]) {
  atomic_fetch_add_explicit(&counts[i % 4], 1u, memory_order_relaxed);
  atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
  atomic_fetch_max_explicit(most, int(i), memory_order_relaxed);
  if (t == 0) atomic_store_explicit(own, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_or_explicit(own, 1 << (t % 31), memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) out[i / 64] = atomic_load_explicit(own, memory_order_relaxed);
}
"""
    counts, total, most, out = np.zeros(4, np.uint32), np.zeros(1, np.float32), np.zeros(1, np.int32), np.zeros(2, "i4")
    run(text, [counts, total, most, out], groups=2, threads=64, threadgroup_bytes=[4])
    assert counts.tolist() == [32] * 4
    assert total[0] == 64
    assert most[0] == 127
    assert out.tolist() == [2**31 - 1] * 2
    fails(text, [counts, total, most, out], r"\[\[threadgroup\(0\)\]\] was not set", groups=2, threads=64)


def test_functions_of_the_library() -> None:
    text = """
struct Pair { float a; int b; };
constant float table[4] = {1, 2, 3, 4};
constant constexpr int WIDTH = 4;
#define TWICE(x) ((x) + (x))
kernel void f(device const float* x [[buffer(1)]], device float* out [[buffer(2)]],
              device const Pair* pairs [[buffer(3)]], uint i [[thread_position_in_grid]]) {
  float4 v = float4(x[0], float2(x[1]), 3);
  thread float4* where = &v;
  half4 h = half4(*where);
  v = float4(h) + vec<float, 4>(1.0);
  const Pair pair = pairs[1];
  float values[] = {
      v.x, v.zy.x, dot(v, v), length(float3(2, 3, 6)), clamp(5.0f, 0.0f, 1.0f), mix(1.0f, 3.0f, 0.5f), rsqrt(4.0f),
      exp2(3.0f), precise::exp(0.0f), fast::log(1.0f), fma(2.0f, 3.0f, 1.0f), select(1.0f, 2.0f, true), rint(2.5f),
      float(popcount(7u)), float(clz(1u)), float(mulhi(1 << 30, 8)), as_type<float>(0x3f800000u), fmod(-5.0f, 3.0f),
      any(v > 100.0f) ? 1.0f : 0.0f, max(v, float4(2)).x, float(max(-1, 2)), pair.a, float(pair.b), table[i + 2],
      float(WIDTH), TWICE(1.5), float(half(1.0h) * half(3)), sign(-2.0f), float(abs(-3)), abs(-3.5f), 1e-3, INFINITY,
      float(extract_bits(0xf0u, 4, 4)), float(isnan(NAN)), float(rotate(1u, 31u) >> 31), float(reverse_bits(1u) >> 31),
  };
  for (int k = 0; k < 36; ++k) out[k] = values[k];
}
"""
    x = np.array([1, 2], np.float32)
    pairs = np.array([(1.0, 2), (7.0, -8)], dtype=[("a", "f4"), ("b", "i4")])
    out = np.zeros(36, np.float32)
    run(text, [x, out, pairs], threads=1)
    expected = [2, 3, 4 + 9 + 9 + 16, 7, 1, 2, 0.5, 8, 1, 0, 7, 2, 2, 3, 31, 2, 1, -2, 0, 2, 2, 7, -8, 3, 4, 3, 3, -1]
    expected += [3, 3.5, 1e-3, np.inf, 15, 1, 1, 1]
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_partial_simdgroups_have_the_lanes_that_exist() -> None:
    text = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_position_in_grid]]) { out[i] = simd_sum(1.0f); }
"""
    out = np.zeros(40, np.float32)
    run(text, [out], threads=40)
    np.testing.assert_array_equal(out, [32] * 32 + [8] * 8)


def test_idle_is_the_share_of_instructions_that_wait_for_the_busiest_thread() -> None:
    text = """
kernel void f(device float* out [[buffer(1)]], constant int& n [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float x = 0;
  if (i == 0) { for (int k = 0; k < n; ++k) x = fma(x, 0.5f, 1.0f); }
  out[i] = x;
}
"""
    out = np.zeros(32, np.float32)
    assert run(text, [out], params=struct.pack("i", 10000))["idle"] == pytest.approx(31 / 32, abs=0.01)
    assert run(text, [out], params=struct.pack("i", 0))["idle"] < 0.5
    assert run(text, [out], params=struct.pack("i", 100))["flops"] == 200


# ---- Faults while kernels run

SHIFT = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = float(i);
  BARRIER
  out[i] = shared[63 - i];  // here
}
"""


def test_missing_barrier_is_a_race() -> None:
    out = np.zeros(64, np.float32)
    run(SHIFT.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);"), [out], threads=64)
    np.testing.assert_array_equal(out, 63 - np.arange(64))
    # A barrier that does not order threadgroup memory is none.
    for barrier in ("threadgroup_barrier(mem_flags::mem_none);", "simdgroup_barrier(mem_flags::mem_threadgroup);"):
        text = SHIFT.replace("BARRIER", barrier)
        fails(text, [out], "kernel f.*(race in threadgroup memory|uninitialised)", "// here", threads=64)


def test_race_between_lanes_needs_a_simdgroup_barrier() -> None:
    text = SHIFT.replace("63 - i", "31 - i")
    out = np.zeros(32, np.float32)
    run(text.replace("BARRIER", "simdgroup_barrier(mem_flags::mem_threadgroup);"), [out])
    fails(text.replace("BARRIER", "float s = simd_sum(1.0f);"), [out], "race.*simdgroup barrier", "// here")


def test_write_after_read_is_a_race() -> None:
    text = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[64];
  shared[i] = 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float x = shared[63 - i];
  shared[i] = x + 1.0f;
  out[i] = x;
}
"""
    fails(
        text,
        [np.zeros(64, np.float32)],
        "race in threadgroup memory: (reads what.*wrote|writes what.*read)",
        threads=64,
    )


def test_threadgroup_overflow() -> None:
    text = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float first[8000];
  threadgroup float second[200];  // here
  first[i] = second[i] = 0.0f;
  out[i] = first[i] + second[i];
}
"""
    fails(text, [np.zeros(32, np.float32)], "kernel f.*threadgroup overflow: 32800 bytes", "// here")


def test_unguarded_tail_is_out_of_bounds() -> None:
    text = """
kernel void f(device const float* x [[buffer(1)]], device float* out [[buffer(2)]],
              uint i [[thread_position_in_grid]]) {
  out[i] = x[i];  // here
}
"""
    x, out = np.ones(60, np.float32), np.zeros(64, np.float32)
    message = r"kernel f.*load of 4 bytes out of bounds: at byte 240 of buffer\(1\) 'x', which has 240.*thread \[28, 0"
    fails(text, [x, out], message, "// here", groups=2, names=["x", "out"])
    # Also where another buffer follows in memory.
    both = np.ones(124, np.float32)
    fails(text, [both[:60], both[60:]], "out of bounds: at byte 240", "// here", groups=2)
    fails(text, [x, None], "null pointer", "// here")
    fails(text, [np.ones(64, np.float32), out], "store to buffer.*bound for reading", "// here", writable=[0])
    fails(text, [x], "null pointer", "// here")


def test_threadgroup_out_of_bounds() -> None:
    text = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float first[32], second[32];
  second[i] = 0.0f;
  first[i + 1] = second[i];  // here
  out[i] = 0.0f;
}
"""
    fails(text, [np.zeros(32, np.float32)], "threadgroup store of 4 bytes out of bounds: at byte 128", "// here")


def test_misaligned_vector_access() -> None:
    text = """
kernel void f(device const float* x [[buffer(1)]], device float4* out [[buffer(2)]]) {
  out[0] = *(device const float4*)(x + 1);  // here
}
"""
    memory = np.zeros(32, np.float32)
    start = (-memory.ctypes.data // 4) % 4
    x, out = memory[start : start + 8], memory[start + 8 : start + 12]
    fails(text, [x, out], "misaligned access.*16 bytes", "// here", threads=1)


def test_uninitialised_threadgroup_memory() -> None:
    text = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup float shared[32];
  if (i > 0) shared[i] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = shared[i];  // here
}
"""
    fails(text, [np.zeros(32, np.float32)], "kernel f.*uninitialised threadgroup memory", "// here")


DIVERGENT = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  if (i CONDITION) {
    OPERATION  // here
  }
  out[i] = 1.0f;
  threadgroup_barrier(mem_flags::mem_device);  // there
}
"""


@pytest.mark.parametrize("condition", ["< 7", "< 40", ">= 32"])
@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("threadgroup_barrier(mem_flags::mem_threadgroup);", "barrier in divergent flow"),
        ("out[i] = simd_sum(1.0f);", "simdgroup operation in divergent flow"),
    ],
)
def test_divergent_flow(condition: str, operation: str, message: str) -> None:
    text = DIVERGENT.replace("CONDITION", condition).replace("OPERATION", operation)
    out = np.zeros(64, np.float32)
    if condition == ">= 32" and "simd_sum" in operation:
        run(text, [out], threads=64)  # uniform in each simdgroup
        return
    with pytest.raises(FlexpteError, match=f"kernel f.*{message}") as caught:
        run(text, [out], threads=64)
    for marker in ("// here", "// there"):
        assert f"in line {line_of(text, marker)}" in str(caught.value)


def test_barrier_after_threads_have_ended() -> None:
    text = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
  if (i == 5) return;
  threadgroup_barrier(mem_flags::mem_device);  // here
  out[i] = 1.0f;
}
"""
    fails(text, [np.zeros(32, np.float32)], "barrier in divergent flow.*thread 5 has ended", "// here")


def test_race_between_threadgroups() -> None:
    text = """
kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]],
              uint group [[threadgroup_position_in_grid]]) {
  out[i] = float(group);  // here
}
"""
    out = np.zeros(32, np.float32)
    run(text, [out])
    fails(text, [out], "race between threadgroups: writes byte 0", "// here", groups=2)


def test_a_library_goes_on_after_a_fault() -> None:
    out = np.zeros(64, np.float32)
    text = SHIFT.replace("BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);")
    for _ in range(2):
        fails(text, [out[:60]], "out of bounds", threads=64)
        run(text, [out], threads=64)


# ---- What does not compile

KERNEL = "kernel void f(device float* out [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {{\n{}\n}}\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("threadgroup float t[4]; device float* p = t; out[i] = p[0];", "error: cannot initialize"),
        ("thread float* p = (thread float*)out; out[i] = p[1];", "a cast between address spaces"),
        ("out[i] = erf(1.0f);", "error: use of undeclared identifier 'erf'"),
        ("out[i] = exp(1);", "error: no matching function"),
        ("out[i] = std::exp(1.0f);", "std::"),
        ("float* p = out; out[i] = p[0];", "pointer or reference to float without an address space"),
        ("const float& x = out[0]; out[i] = x;", "without an address space"),
        ("auto& x = out[0]; out[i] = x;", "without an address space"),
        ("double x = 1; out[i] = x;", "double"),
        ("thread int* p = new int; out[i] = *p;", "new"),
        ("static int calls = 0; out[i] = calls;", "static"),
        ("auto g = [&](float x) { return x; }; out[i] = g(1.0f);", "lambdas"),
        ("goto end; end: out[i] = 0;", "goto"),
        ("try { out[i] = 0; } catch (...) {}", "try"),
    ],
)
def test_what_metal_does_not_have(body: str, message: str) -> None:
    with pytest.raises(FlexpteError, match=f"line {HEADER_LINES + 2}: .*{message}"):
        library(KERNEL.format(body))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("template <typename T> void g(T* x) {}\n", "to T without an address space"),
        ("typedef float (*function)(float);\n", "function pointers"),
        ("struct S { virtual void g(); };\n", "virtual"),
        ("#include <vector>\n", "file not found"),
        ("void g() { threadgroup float t[4]; t[0] = 0; }\n", "in kernel functions only"),
        ("kernel void g(device float* x [[buffer(0)]], uint i) {}\n", "'uint i' has no attribute"),
        (
            "kernel void g(uint2 a [[thread_position_in_grid]], uint b [[threads_per_grid]]) {}\n",
            "same number of components",
        ),
        ("kernel void g(constant float* x [[buffer(0)]]) { x[0] = 1; }\n", "store to constant memory"),
        ('template [[host_name("h")]] [[kernel]] decltype(g<half>) g<half>;\n', "which is no kernel"),
    ],
)
def test_what_metal_does_not_have_outside_of_functions(text: str, message: str) -> None:
    with pytest.raises(FlexpteError, match=f"line {HEADER_LINES + 1}: .*{message}"):
        library(text)


def test_buffers_in_the_wrong_address_space() -> None:
    with pytest.raises(FlexpteError, match="error:"):
        library("kernel void f(device float* x [[buffer(0)]], threadgroup float* y [[buffer(1)]]) {}\n")


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXPTE_CLANG", "/nowhere/clang++")
    with pytest.raises(FlexpteError, match=r"needs clang 19 or later.*/nowhere/clang"):
        _native.MslLibrary(HEADER + ADD)


def test_unchecked_kernels_run_alike() -> None:
    unchecked = _native.MslLibrary(HEADER + REDUCTION, checked=False)
    x, out = floats(192), np.zeros(3, np.float32)
    counters = unchecked.dispatch("f", [x, out], b"", (3, 1, 1), (64, 1, 1))
    np.testing.assert_allclose(out, x.reshape(3, 64).sum(1), rtol=1e-5)
    assert counters["barriers"] == 21
    assert counters["device_read_bytes"] == 0
