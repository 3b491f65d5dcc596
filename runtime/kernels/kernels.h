// CPU kernels as plain functions on tensor views, used by the executor's op table and by the host
// device of the delegate alike. Shapes and dtypes are checked by the callers when they bind; a
// kernel only asserts. Floating inputs and outputs may be F32, F16 or BF16; accumulation is F32.
// Kernels allocate nothing: scratch comes from the caller, sized by the *_workspace_bytes function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/status.h"
#include "runtime/tensor.h"
#include "runtime/thread_pool.h"

namespace flexpte {

// out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n]. x [..., K] and out [..., N] have contiguous
// rows (last stride 1) and leading dimensions that collapse to one M with one row stride; weight
// [N, K] contiguous, read once per call for small M. bias [N] or null.
size_t linear_workspace_bytes(int64_t m, int64_t n, int64_t k, DType weight, int num_threads);
void linear(const TensorView& x, const TensorView& weight, const TensorView* bias, const TensorView& out,
            const ThreadPool& pool, std::span<std::byte> workspace);

// out[b..., m, n] = sum_k a[b..., m, k] * b[b..., k, n]; any strides.
size_t matmul_workspace_bytes(const TensorView& a, const TensorView& b, int num_threads);
void matmul(const TensorView& a, const TensorView& b, const TensorView& out, const ThreadPool& pool,
            std::span<std::byte> workspace);

// out[before..., i..., after...] = source[before..., index[i...], after...], along `dim`; index I32 or
// I64, negative indices wrap; one outside is OutOfRange, found before anything is written.
Status gather(const TensorView& source, int dim, const TensorView& index, const TensorView& out,
              const ThreadPool& pool);

// target[..., index[i], ...] = source[..., i, ...] along `dim`, index [n] I32 or I64, dtypes equal.
// Negative indices do not wrap; of equal indices the last one stays.
// OutOfRange, found before anything is written, names the index and the dimension's size.
Status index_copy(const TensorView& target, int dim, const TensorView& index, const TensorView& source,
                  const ThreadPool& pool);

// out = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019). weight
// may be null. Rows contiguous.
void rms_norm(const TensorView& x, const TensorView* weight, float eps, const TensorView& out, const ThreadPool& pool);

// out = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension (Ba et al. 2016).
void layer_norm(const TensorView& x, const TensorView* weight, const TensorView* bias, float eps, const TensorView& out,
                const ThreadPool& pool);

// Softmax or its logarithm over the last dimension, as ATen (a row of -inf gives NaN).
void softmax(const TensorView& x, bool log, const TensorView& out, const ThreadPool& pool);

enum class ReduceOp : uint8_t { kSum = 0, kMean, kMax, kMin, kProd, kAny, kAll, kArgMax, kArgMin };

// Reduces the last num_dims dimensions of x; out has the leading ones. Any strides. Integer sums
// are exact in I64; kArgMax/kArgMin give the first such index (flattened over the reduced
// dimensions) as I64; NaN wins max, min, argmax and argmin, as in ATen. Nothing to reduce gives the
// identity (mean: NaN; max: -inf or the least integer; argmax: 0).
void reduce(ReduceOp op, const TensorView& x, int num_dims, const TensorView& out, const ThreadPool& pool);

// out[i] = start + i * step, out [n] of any dtype.
void arange(const TensorView& out, int64_t start, int64_t step);

// Copies with conversion (widened, rounded to nearest even, integers truncated); equal sizes, any strides.
// A float that does not fit an integer saturates, NaN gives 0; see convert() in scalar.h.
void copy(const TensorView& source, const TensorView& out, const ThreadPool& pool);

}  // namespace flexpte
