// RmsNorm, LayerNorm, Softmax and Reduce: rows.metal, norm.metal, softmax.metal, reduce.metal.
#include "metal_delegate/gpu/encode_common.h"
#include "metal_delegate/gpu/params.h"

namespace flexpte::gpu {
namespace {

namespace operand = bound::operand;

constexpr int64_t kValuesPerThread = 8;  // ROW_VALUES in rows.metal

struct Rows {
  params::RowParams params{};
  Grid grid;
};

bool has_vectors(const TensorView& view, int64_t stride) {
  return stride == 1 && is_aligned(view.data, 4 * element_size_bytes(view.dtype));
}

Result<Rows> rows_of(const Call& call, const TensorView& x, const TensorView& out) {
  Rows result;
  params::RowParams& params = result.params;
  const int32_t last = x.rank - 1;
  Strided<2> rows;
  for (int32_t d = 0; d < last; ++d) rows.append(x.size(d), {x.stride(d), out.stride(d)});
  params.columns = x.size(last);
  params.rows = rows.num_elements();
  params.rank = rows.rank;
  params.x_stride = x.stride(last);
  params.out_stride = out.stride(last);
  copy_sizes(rows, params.sizes);
  copy_strides(rows, 0, params.x_strides);
  copy_strides(rows, 1, params.out_strides);
  params.is_vectorizable = params.columns % 4 == 0 && has_vectors(x, params.x_stride) &&
                           has_vectors(out, params.out_stride) && strides_divide(rows, 0, 4) &&
                           strides_divide(rows, 1, 4);
  params.is_row_per_simdgroup = params.columns <= kValuesPerThread * kSimdWidth;
  int64_t threads = 0;
  int64_t threadgroups = params.rows;
  if (params.is_row_per_simdgroup != 0) {
    const int64_t simdgroups = std::min(max_threads(call, 0, 8 * kSimdWidth) / kSimdWidth, params.rows);
    threads = simdgroups * kSimdWidth;
    threadgroups = divide_up(params.rows, simdgroups);
  } else {
    threads = max_threads(call, 0, divide_up(params.columns, kValuesPerThread * kSimdWidth) * kSimdWidth);
  }
  FLEXPTE_ASSIGN(const auto width, narrow<uint32_t>("rows of a norm or softmax", threadgroups));
  result.grid = {{width, 1, 1}, {static_cast<uint32_t>(threads), 1, 1}};
  return result;
}

}  // namespace

Status encode_norm(Encoder& encoder, const Call& call) {
  const TensorView& x = call.operands[operand::kX];
  const TensorView& weight = call.operands[operand::kWeight];
  const TensorView& bias = call.operands[operand::kBias];
  const TensorView& out = call.operands[operand::kOut];
  FLEXPTE_ASSIGN(Rows rows, rows_of(call, x, out));
  params::RowParams& params = rows.params;
  params.eps = std::get<bound::NormParams>(call.instruction.params).eps;
  if (call.instruction.operands[operand::kWeight] >= 0) {
    params.has_weight = 1;
    params.weight_stride = weight.stride(0);
    params.is_vectorizable = params.is_vectorizable != 0 && has_vectors(weight, params.weight_stride);
  }
  if (call.instruction.operands[operand::kBias] >= 0) {
    params.has_bias = 1;
    params.bias_stride = bias.stride(0);
    params.is_vectorizable = params.is_vectorizable != 0 && has_vectors(bias, params.bias_stride);
  }
  const std::array<BufferArgument, 4> buffers = {read(x, "x"), read(weight, "weight"), read(bias, "bias"),
                                                 write(out, "out")};
  return encoder.dispatch(*call.pipelines[0], params, buffers, rows.grid);
}

Status encode_softmax(Encoder& encoder, const Call& call) {
  const TensorView& x = call.operands[operand::kUnaryX];
  const TensorView& out = call.operands[operand::kUnaryOut];
  FLEXPTE_ASSIGN(Rows rows, rows_of(call, x, out));
  rows.params.is_log = std::get<bound::SoftmaxParams>(call.instruction.params).log;
  const std::array<BufferArgument, 2> buffers = {read(x, "x"), write(out, "out")};
  return encoder.dispatch(*call.pipelines[0], rows.params, buffers, rows.grid);
}

Status encode_reduce(Encoder& encoder, const Call& call) {
  const TensorView& x = call.operands[operand::kUnaryX];
  const TensorView& out = call.operands[operand::kUnaryOut];
  Strided<2> outer;
  Strided<1> inner;
  for (int32_t d = 0; d < x.rank; ++d) {
    if (d < out.rank) {
      outer.append(x.size(d), {x.stride(d), out.stride(d)});
    } else {
      inner.append(x.size(d), {x.stride(d)});
    }
  }
  params::ReduceParams params{};
  params.outer_count = outer.num_elements();
  params.inner_count = inner.num_elements();
  params.outer_rank = outer.rank;
  params.inner_rank = inner.rank;
  copy_sizes(outer, params.outer_sizes);
  copy_strides(outer, 0, params.x_outer_strides);
  copy_strides(outer, 1, params.out_strides);
  copy_sizes(inner, params.inner_sizes);
  copy_strides(inner, 0, params.inner_strides);
  // What neighbouring threads read should be neighbours in memory.
  constexpr int64_t kFew = 8, kMany = 2048;
  const bool is_side_by_side = outer.rank > 0 && inner.rank > 0 && params.outer_count >= kSimdWidth &&
                               params.x_outer_strides[outer.rank - 1] < params.inner_strides[inner.rank - 1];
  int64_t threads = 0;
  int64_t outputs = 1;  // of a threadgroup
  if (is_side_by_side || params.inner_count <= kFew) {
    params.mode = REDUCE_BY_THREAD;
    outputs = threads = max_threads(call, 0, 2 * kSimdWidth);
  } else if (params.inner_count < kMany) {
    params.mode = REDUCE_BY_SIMDGROUP;
    outputs = std::min(max_threads(call, 0, 4 * kSimdWidth) / kSimdWidth, params.outer_count);
    threads = outputs * kSimdWidth;
  } else {
    params.mode = REDUCE_BY_THREADGROUP;
    const int64_t wanted = divide_up(params.inner_count, kValuesPerThread * kSimdWidth) * kSimdWidth;
    threads = max_threads(call, 0, std::min<int64_t>(wanted, 1024));
  }
  FLEXPTE_ASSIGN(const auto width, narrow<uint32_t>("results of a reduction", divide_up(params.outer_count, outputs)));
  const std::array<BufferArgument, 2> buffers = {read(x, "x"), write(out, "out")};
  return encoder.dispatch(*call.pipelines[0], params, buffers, {{width, 1, 1}, {static_cast<uint32_t>(threads), 1, 1}});
}

}  // namespace flexpte::gpu
