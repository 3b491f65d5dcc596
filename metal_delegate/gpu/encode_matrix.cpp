// Linear and MatMul: linear.metal, gemm.metal, matmul.metal.
#include "metal_delegate/gpu/encode_common.h"
#include "metal_delegate/gpu/params.h"

namespace flexpte::gpu {
namespace {

namespace operand = bound::operand;

constexpr int64_t kGemvRows = 4;
constexpr int64_t kGemvColumns = 4;  // of a simdgroup
constexpr int64_t kGemmColumns = 64;
constexpr uint32_t kGemmThreads = 128;
constexpr int64_t kManyRows = 64, kFewRows = 32;  // of a tile

// The leading dimensions lie at one stride.
int64_t row_stride(const TensorView& view) {
  for (int32_t d = view.rank - 1; d-- > 0;) {
    if (view.size(d) != 1) return view.stride(d);
  }
  return 0;
}

bool has_vector_rows(const TensorView& view, int64_t count, int64_t stride, int64_t k) {
  const int64_t packed = kVectorBytes / element_size_bytes(view.dtype);
  return k % packed == 0 && (count <= 1 || stride % packed == 0) && is_aligned(view.data, kVectorBytes);
}

// A matrix [count, k].
params::GemmSide gemm_side(const TensorView& view, int64_t count, int64_t stride, int64_t k, int64_t k_stride,
                           bool is_batch_aligned) {
  params::GemmSide side{};
  side.stride = stride;
  side.k_stride = k_stride;
  if (k_stride == 1 && is_batch_aligned && has_vector_rows(view, count, stride, k)) {
    side.access = GEMM_VECTORS;
  } else {
    side.access = k_stride <= stride ? GEMM_DEPTH_NEAR : GEMM_ROWS_NEAR;
  }
  return side;
}

Status dispatch_gemm(Encoder& encoder, const Pipeline& pipeline, params::GemmParams& params, int64_t batches,
                     std::span<const BufferArgument> buffers) {
  const int64_t tile_rows = params.m <= kFewRows ? kFewRows : kManyRows;
  params.tile_rows = static_cast<int32_t>(tile_rows);
  FLEXPTE_ASSIGN(const auto depth, narrow<uint32_t>("batches of a matrix product", batches));
  const Grid grid = {{static_cast<uint32_t>(divide_up(params.n, kGemmColumns)),
                      static_cast<uint32_t>(divide_up(params.m, tile_rows)), depth},
                     {kGemmThreads, 1, 1}};
  return encoder.dispatch(pipeline, params, buffers, grid);
}

}  // namespace

Status encode_linear(Encoder& encoder, const Call& call) {
  const TensorView& x = call.operands[operand::kX];
  const TensorView& weight = call.operands[operand::kWeight];
  const TensorView& bias = call.operands[operand::kBias];
  const TensorView& out = call.operands[operand::kOut];
  const bool has_bias = call.instruction.operands[operand::kBias] >= 0;
  int64_t rows = 1;
  for (int32_t d = 0; d + 1 < x.rank; ++d) rows *= x.size(d);
  const int64_t columns = weight.size(0);
  const int64_t k = weight.size(1);
  const std::array<BufferArgument, 4> buffers = {read(x, "x"), read(weight, "weight"), read(bias, "bias"),
                                                 write(out, "out")};
  if (rows <= kGemvRows) {
    params::GemvParams params{};
    params.n = columns;
    params.k = k;
    params.x_row_stride = row_stride(x);
    params.out_row_stride = row_stride(out);
    params.bias_stride = has_bias ? bias.stride(0) : 0;
    params.m = static_cast<int32_t>(rows);
    params.has_bias = has_bias;
    params.is_vectorizable = has_vector_rows(weight, columns, k, k);
    // Smaller threadgroups where there are few columns, so that every core has some.
    int64_t simdgroups = max_threads(call, 0, 8 * kSimdWidth) / kSimdWidth;
    const int64_t wanted = 4 * int64_t{encoder.queue().num_cores()};
    while (simdgroups > 2 && divide_up(columns, kGemvColumns * simdgroups) < wanted) simdgroups /= 2;
    const int64_t threadgroups = divide_up(columns, kGemvColumns * simdgroups);
    return encoder.dispatch(
        *call.pipelines[0], params, buffers,
        {{static_cast<uint32_t>(threadgroups), 1, 1}, {static_cast<uint32_t>(simdgroups * kSimdWidth), 1, 1}});
  }
  params::GemmParams params{};
  FLEXPTE_ASSIGN(params.m, narrow<int32_t>("rows of a linear layer", rows));
  FLEXPTE_ASSIGN(params.n, narrow<int32_t>("columns of a linear layer", columns));
  FLEXPTE_ASSIGN(params.k, narrow<int32_t>("inputs of a linear layer", k));
  params.has_bias = has_bias;
  params.bias_stride = has_bias ? bias.stride(0) : 0;
  params.a = gemm_side(x, rows, row_stride(x), k, 1, true);
  params.b = gemm_side(weight, columns, k, k, 1, true);
  params.out_row_stride = row_stride(out);
  params.out_column_stride = 1;
  return dispatch_gemm(encoder, *call.pipelines[1], params, 1, buffers);
}

Status encode_matmul(Encoder& encoder, const Call& call) {
  const TensorView& a = call.operands[operand::kMatMulA];
  const TensorView& b = call.operands[operand::kMatMulB];
  const TensorView& out = call.operands[operand::kMatMulOut];
  const int32_t row = out.rank - 2, column = out.rank - 1;
  params::GemmParams params{};
  FLEXPTE_ASSIGN(params.m, narrow<int32_t>("rows of a matrix product", out.size(row)));
  FLEXPTE_ASSIGN(params.n, narrow<int32_t>("columns of a matrix product", out.size(column)));
  FLEXPTE_ASSIGN(params.k, narrow<int32_t>("terms of a matrix product", a.size(column)));
  Strided<3> batches;
  for (int32_t d = 0; d < row; ++d) batches.append(out.size(d), {a.stride(d), b.stride(d), out.stride(d)});
  params.batch_rank = batches.rank;
  copy_sizes(batches, params.batch_sizes);
  copy_strides(batches, 0, params.a_batch_strides);
  copy_strides(batches, 1, params.b_batch_strides);
  copy_strides(batches, 2, params.out_batch_strides);
  const auto is_aligned_in_batches = [&](size_t view, const TensorView& of) {
    return strides_divide(batches, view, kVectorBytes / element_size_bytes(of.dtype));
  };
  params.a = gemm_side(a, params.m, a.stride(row), params.k, a.stride(column), is_aligned_in_batches(0, a));
  params.b = gemm_side(b, params.n, b.stride(column), params.k, b.stride(row), is_aligned_in_batches(1, b));
  params.out_row_stride = out.stride(row);
  params.out_column_stride = out.stride(column);
  const std::array<BufferArgument, 3> buffers = {read(a, "a"), read(b, "b"), write(out, "out")};
  return dispatch_gemm(encoder, *call.pipelines[0], params, batches.num_elements(), buffers);
}

}  // namespace flexpte::gpu
