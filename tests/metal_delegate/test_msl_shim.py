"""The shim that runs Metal kernels on this machine: results, planted faults, counters."""

from __future__ import annotations

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from flexpte.runtime import _native
from flexpte.runtime.errors import FlexpteError

HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
COUNT = struct.Struct("ii")
PARAMS = "struct Params { int count; int padding; };\n"


def library(text, **options):
    return _native.MslLibrary(HEAD + PARAMS + text, **options)


def run(text, function, buffers, *, count=0, threadgroups=1, threads=32, **options):
    """Runs one kernel; buffers are buffer(1) and on, the params struct is buffer(0)."""
    return library(text).dispatch(
        function, buffers, COUNT.pack(count, 0), (threadgroups, 1, 1), (threads, 1, 1), **options
    )


ADD = """
template <typename T>
[[kernel]] void add(constant Params& params [[buffer(0)]], device const T* a [[buffer(1)]],
                    device const T* b [[buffer(2)]], device T* out [[buffer(3)]],
                    uint i [[thread_position_in_grid]]) {
  if (int(i) < params.count) out[i] = a[i] + b[i];
}
template [[host_name("add_f32")]] [[kernel]] decltype(add<float>) add<float>;
template [[host_name("add_f16")]] [[kernel]] decltype(add<half>) add<half>;
template [[host_name("add_bf16")]] [[kernel]] decltype(add<bfloat>) add<bfloat>;
template [[host_name("add_i64")]] [[kernel]] decltype(add<long>) add<long>;
"""


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16), ("i64", np.int64)],
)
def test_elements_of_every_type(name, dtype, count):
    rng = np.random.default_rng(0)
    a, b = ((rng.standard_normal(count) * 100).astype(dtype) for _ in range(2))
    out = np.zeros(count, dtype)
    run(ADD, f"add_{name}", [a, b, out], count=count, threadgroups=4)
    np.testing.assert_array_equal(out, a + b)


LANES = """
kernel void lanes(device const float* x [[buffer(1)]], device float* out [[buffer(2)]],
                  uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  const float v = x[i];
  out[0 * 64 + i] = simd_sum(v);
  out[1 * 64 + i] = simd_max(v);
  out[2 * 64 + i] = simd_min(v);
  out[3 * 64 + i] = simd_shuffle_xor(v, 5);
  out[4 * 64 + i] = simd_broadcast(v, 7);
  out[5 * 64 + i] = simd_prefix_exclusive_sum(v);
  out[6 * 64 + i] = simd_shuffle_up(v, 3);
  out[7 * 64 + i] = float(simd_any(v > 1.5f)) + 2.0f * float(simd_all(v > -9.0f));
  out[8 * 64 + i] = float(simd_or(1u << (lane % 8)));
  out[9 * 64 + i] = simd_product(lane < 3 ? v : 1.0f);
}
"""


def test_lanes_of_a_simdgroup_see_each_other():
    x = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    out = np.zeros((10, 64), np.float32)
    run(LANES, "lanes", [x, out], threads=64)
    for begin in (0, 32):
        v, o = x[begin : begin + 32], out[:, begin : begin + 32]
        lanes = np.arange(32)
        np.testing.assert_allclose(o[0], v.sum(), rtol=1e-5)
        np.testing.assert_array_equal(o[1], v.max())
        np.testing.assert_array_equal(o[2], v.min())
        np.testing.assert_array_equal(o[3], v[lanes ^ 5])
        np.testing.assert_array_equal(o[4], v[7])
        np.testing.assert_allclose(o[5], np.cumsum(v) - v, atol=1e-5)
        np.testing.assert_array_equal(o[6], np.where(lanes < 3, v, v[lanes - 3]))
        np.testing.assert_array_equal(o[7], float((v > 1.5).any()) + 2)
        np.testing.assert_array_equal(o[8], 255)
        np.testing.assert_allclose(o[9], v[0] * v[1] * v[2], rtol=1e-6)


MATRICES = """
template <typename T>
[[kernel]] void product(device const T* a [[buffer(1)]], device const T* b [[buffer(2)]],
                        device float* out [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  // Lane i has two neighbours of one row.
  const int row = int((lane / 4) & 4) + int(lane / 2) % 4;
  sum.thread_elements()[0] *= float(row);
  sum.thread_elements()[1] *= float(row);
  simdgroup_store(sum, out, 8);
}
template [[host_name("product_f32")]] [[kernel]] decltype(product<float>) product<float>;
template [[host_name("product_f16")]] [[kernel]] decltype(product<half>) product<half>;
template [[host_name("product_bf16")]] [[kernel]] decltype(product<bfloat>) product<bfloat>;
"""


@pytest.mark.parametrize(("name", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_matrices_and_the_elements_that_lanes_hold(name, dtype):
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((8, 8)).astype(dtype) for _ in range(2))
    out = np.zeros((8, 8), np.float32)
    run(MATRICES, f"product_{name}", [a, b, out])
    want = (a.astype(np.float64) @ b.astype(np.float64).T + 1) * np.arange(8)[:, None]
    np.testing.assert_allclose(out, want, atol=1e-4)


def test_atomics_vectors_and_bits():
    text = """
    kernel void count(device atomic_uint* total [[buffer(1)]], device float4* out [[buffer(2)]],
                      uint i [[thread_position_in_grid]]) {
      atomic_fetch_add_explicit(total, i, memory_order_relaxed);
      const half2 pair = as_type<half2>(0x3c004000u);
      out[i] = float4(float2(pair), 3.0f, float(popcount(i))).wzyx;
    }
    """
    total, out = np.zeros(1, np.uint32), np.zeros((64, 4), np.float32)
    run(text, "count", [total, out], threadgroups=2)
    assert total[0] == 63 * 64 // 2
    np.testing.assert_array_equal(out[5], [2, 3, 1, 2])


# Each fault: the kernel, its buffers, what the report must name.
SHARED = """
kernel void faulty(constant Params& params [[buffer(0)]], device const float* x [[buffer(1)]],
                   device float* out [[buffer(2)]], uint i [[thread_index_in_threadgroup]],
                   uint group [[threadgroup_position_in_grid]]) {
  threadgroup float tile[SIZE];
  BODY
}
"""


def faulty(body, size="128"):
    return SHARED.replace("SIZE", size).replace("BODY", body)


CLEARED = "tile[i] = 0.0f; threadgroup_barrier(mem_flags::mem_threadgroup); "
FAULTS = {
    "missing_barrier": (
        faulty(CLEARED + "tile[i] = x[i]; out[i] = tile[127 - i];"),
        ["race", "line 10", "without a barrier"],
    ),
    "race_within_a_simdgroup": (faulty(CLEARED + "tile[i] = x[i]; out[i] = tile[i ^ 1];"), ["race", "line 10"]),
    "two_writers": (faulty("tile[0] = x[i]; out[i] = 0.0f;"), ["race", "writes"]),
    "threadgroup_overflow": (faulty("tile[i] = x[i]; out[i] = tile[i];", "8193"), ["threadgroup overflow", "32768"]),
    "unguarded_tail": (
        faulty("tile[i] = x[i + 1]; out[i] = tile[i];"),
        ["out of bounds", "load", "line 10", "buffer(1)"],
    ),
    "store_behind_the_end": (faulty("tile[i] = x[i]; out[i + 1] = tile[i];"), ["out of bounds", "store", "buffer(2)"]),
    "threadgroup_index": (faulty("tile[i + 1] = x[i]; out[i] = 0.0f;"), ["threadgroup store", "out of bounds"]),
    "uninitialised": (
        faulty("if (i != 5) tile[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[i];"),
        ["uninitialised threadgroup memory"],
    ),
    "divergent_barrier": (
        faulty("if (i < 64) threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = x[i];"),
        ["divergent", "barrier in line 10"],
    ),
    "early_return": (
        faulty("if (i > 100) return; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = x[i];"),
        ["divergent", "has ended"],
    ),
    "divergent_sum": (faulty("if (i % 2 == 0) out[i] = simd_sum(x[i]);"), ["divergent", "simdgroup operation"]),
    "misaligned": (
        faulty("out[i] = 0.0f; if (i == 0) out[0] = (*(device const float4*)(x + 1)).x;"),
        ["alignment of 16", "line 10"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_named_with_kernel_and_line(name):
    text, words = FAULTS[name]
    x, out = np.ones(128, np.float32), np.zeros(128, np.float32)
    with pytest.raises(FlexpteError) as error:
        run(text, "faulty", [x, out], threads=128)
    for word in ("kernel faulty", *words):
        assert word in str(error.value), str(error.value)


def test_the_same_kernel_without_the_fault_runs():
    body = "tile[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = tile[127 - i];"
    x, out = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
    run(faulty(body), "faulty", [x, out], threads=128)
    np.testing.assert_array_equal(out, x[::-1])


def test_a_buffer_bound_for_reading_is_not_written():
    x, out = np.ones(128, np.float32), np.zeros(128, np.float32)
    out.flags.writeable = False
    with pytest.raises(FlexpteError, match=r"buffer\(2\), which is bound for reading"):
        run(faulty("out[i] = x[i];"), "faulty", [x, out], threads=128)


INVALID = {
    "address_spaces_mixed": ("threadgroup float* p = x; out[i] = p[0];", "threadgroup"),
    "unknown_function": ("out[i] = erf(x[i]);", "erf"),
    "standard_library": ("out[i] = std::sqrt(x[i]);", "std"),
    "double": ("out[i] = float(double(x[i]));", "double"),
    "pointer_without_space": ("const float* p = nullptr; out[i] = x[i];", "address space"),
    "allocation": ("out[i] = *(new float(1.0f));", "new"),
    "goto": ("goto end; end: out[i] = x[i];", "goto"),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_metal_does_not_compile(name):
    body, word = INVALID[name]
    with pytest.raises(FlexpteError) as error:
        library(faulty(body))
    assert word in str(error.value), str(error.value)
    assert "line" in str(error.value)


def test_includes_of_the_host_are_refused():
    with pytest.raises(FlexpteError, match=r"line 1.*metal_stdlib"):
        _native.MslLibrary("#include <cmath>\n")


def test_parameters_without_an_attribute_are_named():
    with pytest.raises(FlexpteError, match="kernel f: parameter 'device float"):
        library("kernel void f(device float* out) { out[0] = 1.0f; }")


def test_an_unknown_kernel_is_named():
    with pytest.raises(FlexpteError, match="nothing"):
        run(ADD, "nothing", [])


def test_counters_are_exact():
    body = """
      tile[i] = x[i] * 2.0f + 1.0f;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      const float sum = simd_sum(tile[i]);
      out[group * 128 + i] = sum - x[i];
    """
    x, out = np.ones(128, np.float32), np.zeros(384, np.float32)
    lib = library(faulty(body))
    lib.dispatch("faulty", [x, out], COUNT.pack(0, 0), (3, 1, 1), (128, 1, 1))
    counters = json.loads(json.dumps(lib.dispatch("faulty", [x, out], COUNT.pack(0, 0), (3, 1, 1), (128, 1, 1))))
    assert counters["dispatches"] == 1
    assert counters["threadgroups"] == 3
    assert counters["threads"] == 3 * 128
    assert counters["barriers"] == 3
    assert counters["simdgroup_operations"] == 3 * 4
    assert counters["flops"] == 3 * 128 * 3
    assert counters["threadgroup_read_bytes"] == counters["threadgroup_written_bytes"] == 3 * 128 * 4
    assert counters["buffers"]["buffer1"]["read_bytes"] in (3 * 128 * 4, 2 * 3 * 128 * 4)
    assert counters["buffers"]["buffer2"]["written_bytes"] == 3 * 128 * 4
    assert counters["idle"] == 0


def test_idle_threads_are_counted():
    body = "float s = x[i]; if (i < 64) { for (int k = 0; k < 1000; ++k) s = s * 0.5f + x[k % 128]; } out[i] = s;"
    x, out = np.ones(128, np.float32), np.zeros(128, np.float32)
    counters = run(faulty(body), "faulty", [x, out], threads=128)
    assert 0.45 < counters["idle"] < 0.5


def test_the_order_of_threadgroups_can_be_reversed():
    text = """
    kernel void last(device uint* out [[buffer(1)]], uint i [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]]) { if (lane == 0) out[0] = i; }
    """
    for is_reversed, want in ((False, 9), (True, 0)):
        out = np.zeros(1, np.uint32)
        library(text, reversed=is_reversed).dispatch("last", [out], b"", (10, 1, 1), (32, 1, 1))
        assert out[0] == want
