#include "metal_delegate/gpu/encode_ops.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "metal_delegate/gpu/params.h"
#include "runtime/kernels/strided.h"

namespace flexpte::gpu {
namespace {

using bound::OpKind;
namespace operand = bound::operand;

constexpr uint32_t kThreads = 256;

Status too_large(const char* what, int64_t count) {
  return {Code::kUnsupported,
          std::string(what) + " has " + std::to_string(count) + " elements; a Metal grid has at most 4294967295"};
}

Result<uint32_t> grid_count(const char* what, int64_t count) {
  if (count > std::numeric_limits<uint32_t>::max() - kThreads) return too_large(what, count);
  return static_cast<uint32_t>(count);
}

uint32_t divide_up(int64_t a, int64_t b) {
  return static_cast<uint32_t>((a + b - 1) / b);
}

Grid one_thread_an_element(uint32_t count) {
  return {{divide_up(count, kThreads), 1, 1}, {kThreads, 1, 1}};
}

// Dimensions of several tensors at once, those that lie at one stride in all of them as one; sizes and strides
// go to arrays of kernels' params.
template <size_t N>
int32_t coalesce(const std::array<const TensorView*, N>& views, int32_t begin, int32_t end, std::span<int64_t> sizes,
                 const std::array<std::span<int64_t>, N>& strides) {
  int32_t rank = 0;
  for (int32_t d = begin; d < end; ++d) {
    const int64_t size = views[0]->size(d);
    if (size == 1) continue;
    bool joins = rank > 0;
    for (size_t k = 0; k < N && joins; ++k) {
      joins = strides[k][static_cast<size_t>(rank - 1)] == size * views[k]->stride(d);
    }
    if (joins) {
      --rank;
      sizes[static_cast<size_t>(rank)] *= size;
    } else {
      sizes[static_cast<size_t>(rank)] = size;
    }
    for (size_t k = 0; k < N; ++k) strides[k][static_cast<size_t>(rank)] = views[k]->stride(d);
    ++rank;
  }
  return rank;
}

bool is_aligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

Status encode_linear(Encoder& encoder, const Call& call) {
  const TensorView& x = call.operands[operand::kX];
  const TensorView& weight = call.operands[operand::kWeight];
  const TensorView& bias = call.operands[operand::kBias];
  const TensorView& out = call.operands[operand::kOut];
  const bool has_bias = call.instruction.operands[operand::kBias] >= 0;
  // The leading dimensions lie at one stride.
  const auto row_stride = [](const TensorView& view) {
    for (int32_t d = view.rank - 1; d-- > 0;) {
      if (view.size(d) != 1) return view.stride(d);
    }
    return int64_t{0};
  };
  int64_t rows = 1;
  for (int32_t d = 0; d + 1 < x.rank; ++d) rows *= x.size(d);
  const int64_t columns = weight.size(0);
  const int64_t inner = weight.size(1);
  const std::array<BufferArgument, 4> buffers = {read(x, "x"), read(weight, "weight"), read(bias, "bias"),
                                                 write(out, "out")};
  constexpr int64_t kMaxGemvRows = 8;
  if (rows <= kMaxGemvRows) {
    const int64_t rows_at_once = rows == 1 ? 1 : 4;
    params::GemvParams params{};
    params.m = static_cast<int32_t>(rows);
    params.n = static_cast<int32_t>(columns);
    params.k = static_cast<int32_t>(inner);
    params.has_bias = has_bias;
    params.x_row_stride = row_stride(x);
    params.out_row_stride = row_stride(out);
    const auto vector_bytes = static_cast<size_t>(4 * element_size_bytes(weight.dtype));
    params.is_vectorizable = inner % 4 == 0 && is_aligned(weight.data, vector_bytes);
    return encoder.dispatch(*call.pipelines[rows_at_once == 1 ? 0 : 1], params, buffers,
                            {{divide_up(columns, 32), divide_up(rows, rows_at_once), 1}, {kThreads, 1, 1}});
  }
  params::GemmParams params{};
  params.m = static_cast<int32_t>(rows);
  params.n = static_cast<int32_t>(columns);
  params.k = static_cast<int32_t>(inner);
  params.has_bias = has_bias;
  params.a_row_stride = row_stride(x);
  params.a_column_stride = 1;
  params.b_row_stride = 1;
  params.b_column_stride = inner;
  params.out_row_stride = row_stride(out);
  params.out_column_stride = 1;
  return encoder.dispatch(*call.pipelines[2], params, buffers,
                          {{divide_up(columns, 64), divide_up(rows, 64), 1}, {128, 1, 1}});
}

Status encode_matmul(Encoder& encoder, const Call& call) {
  const TensorView& a = call.operands[operand::kMatMulA];
  const TensorView& b = call.operands[operand::kMatMulB];
  const TensorView& out = call.operands[operand::kMatMulOut];
  const int32_t rank = out.rank;
  params::GemmParams params{};
  params.m = static_cast<int32_t>(out.size(rank - 2));
  params.n = static_cast<int32_t>(out.size(rank - 1));
  params.k = static_cast<int32_t>(a.size(rank - 1));
  params.a_row_stride = a.stride(rank - 2);
  params.a_column_stride = a.stride(rank - 1);
  params.b_row_stride = b.stride(rank - 2);
  params.b_column_stride = b.stride(rank - 1);
  params.out_row_stride = out.stride(rank - 2);
  params.out_column_stride = out.stride(rank - 1);
  params.batch_rank = coalesce<3>(
      {&out, &a, &b}, 0, rank - 2, params.batch_sizes,
      {std::span(params.out_batch_strides), std::span(params.a_batch_strides), std::span(params.b_batch_strides)});
  int64_t batches = 1;
  for (int32_t d = 0; d + 2 < rank; ++d) batches *= out.size(d);
  FLEXPTE_ASSIGN(const uint32_t depth, grid_count("the batch of a matrix product", batches));
  const std::array<BufferArgument, 3> buffers = {read(a, "a"), read(b, "b"), write(out, "out")};
  return encoder.dispatch(*call.pipelines[0], params, buffers,
                          {{divide_up(params.n, 64), divide_up(params.m, 64), depth}, {128, 1, 1}});
}

Status encode_rows(Encoder& encoder, const Call& call) {
  const bool is_softmax = call.instruction.kind == OpKind::kSoftmax;
  const TensorView& x = call.operands[0];
  const TensorView& out = call.operands[is_softmax ? operand::kUnaryOut : operand::kOut];
  params::RowParams params{};
  params.columns = static_cast<int32_t>(x.size(x.rank - 1));
  params.rank = coalesce<2>({&x, &out}, 0, x.rank - 1, params.sizes,
                            {std::span(params.x_strides), std::span(params.out_strides)});
  int64_t rows = 1;
  for (int32_t d = 0; d + 1 < x.rank; ++d) rows *= x.size(d);
  FLEXPTE_ASSIGN(const uint32_t num_rows, grid_count("the rows of a norm or softmax", rows));
  // As many threads as have something to do, in whole simdgroups.
  const uint32_t threads = std::min(kThreads, divide_up(params.columns, 32) * 32);
  std::vector<BufferArgument> buffers = {read(x, "x")};
  if (is_softmax) {
    params.is_log = std::get<bound::SoftmaxParams>(call.instruction.params).log;
    buffers.push_back(write(out, "out"));
  } else {
    params.eps = std::get<bound::NormParams>(call.instruction.params).eps;
    params.has_weight = call.instruction.operands[operand::kWeight] >= 0;
    params.has_bias = call.instruction.operands[operand::kBias] >= 0;
    buffers.push_back(read(call.operands[operand::kWeight], "weight"));
    buffers.push_back(read(call.operands[operand::kBias], "bias"));
    buffers.push_back(write(out, "out"));
  }
  return encoder.dispatch(*call.pipelines[0], params, buffers, {{num_rows, 1, 1}, {threads, 1, 1}});
}

Status encode_reduce(Encoder& encoder, const Call& call) {
  const TensorView& x = call.operands[operand::kUnaryX];
  const TensorView& out = call.operands[operand::kUnaryOut];
  params::ReduceParams params{};
  params.outer_rank =
      coalesce<2>({&x, &out}, 0, out.rank, params.sizes, {std::span(params.x_strides), std::span(params.out_strides)});
  params.inner_rank = coalesce<1>({&x}, out.rank, x.rank, params.inner_sizes, {std::span(params.inner_strides)});
  int64_t inner = 1;
  for (int32_t d = out.rank; d < x.rank; ++d) inner *= x.size(d);
  FLEXPTE_ASSIGN(params.outer_count, grid_count("the output of a reduction", out.num_elements()));
  FLEXPTE_ASSIGN(params.inner_count, grid_count("what a reduction reduces", inner));
  const std::array<BufferArgument, 2> buffers = {read(x, "x"), write(out, "out")};
  return encoder.dispatch(*call.pipelines[0], params, buffers, {{divide_up(params.outer_count, 4), 1, 1}, {128, 1, 1}});
}

// Indices that the host can read already are checked before anything is written.
Status check_indices(const char* op, const TensorView& index, int64_t size, bool wraps) {
  Strided<1> shape;
  for (int32_t d = 0; d < index.rank; ++d) shape.append(index.size(d), {index.stride(d)});
  StridedIterator<1> it(shape, 0);
  const int64_t count = index.num_elements();
  for (int64_t i = 0; i < count; ++i, it.advance()) {
    const int64_t value =
        index.dtype == DType::kI32 ? index.as<const int32_t>()[it.offset(0)] : index.as<const int64_t>()[it.offset(0)];
    if (value < size && value >= (wraps ? -size : 0)) continue;
    return {Code::kOutOfRange, std::string(op) + ": index " + std::to_string(value) + " (element " + std::to_string(i) +
                                   ") is outside a dimension of size " + std::to_string(size)};
  }
  return Status::ok();
}

Status encode_gather(Encoder& encoder, const Call& call) {
  const TensorView& source = call.operands[operand::kGatherSource];
  const TensorView& index = call.operands[operand::kGatherIndex];
  const TensorView& out = call.operands[operand::kGatherOut];
  const int32_t dim = std::get<bound::GatherParams>(call.instruction.params).dim;
  if (encoder.is_readable(index.data)) {
    FLEXPTE_TRY(check_indices("gather", index, source.size(dim), /*wraps=*/true));
  }
  params::GatherParams params{};
  FLEXPTE_ASSIGN(params.count, grid_count("the output of a gather", out.num_elements()));
  params.rank = out.rank;
  params.instruction = static_cast<uint32_t>(call.number + 1);
  params.source_size = source.size(dim);
  params.source_stride = source.stride(dim);
  for (int32_t d = 0; d < out.rank; ++d) {
    const auto at = static_cast<size_t>(d);
    params.sizes[at] = out.size(d);
    params.out_strides[at] = out.stride(d);
    if (d < dim) params.source_strides[at] = source.stride(d);
    if (d >= dim && d < dim + index.rank) params.index_strides[at] = index.stride(d - dim);
    if (d >= dim + index.rank) params.source_strides[at] = source.stride(d - index.rank + 1);
  }
  FLEXPTE_ASSIGN(const std::span<std::byte> status, encoder.status());
  const std::array<BufferArgument, 4> buffers = {read(source, "source"), read(index, "index"), write(out, "out"),
                                                 write(status, "status")};
  return encoder.dispatch(*call.pipelines[0], params, buffers, one_thread_an_element(params.count));
}

Status encode_index_copy(Encoder& encoder, const Call& call) {
  const TensorView& target = call.operands[operand::kTarget];
  const TensorView& index = call.operands[operand::kCopyIndex];
  const TensorView& source = call.operands[operand::kCopySource];
  params::IndexCopyParams params{};
  params.dim = std::get<bound::IndexCopyParams>(call.instruction.params).dim;
  if (encoder.is_readable(index.data)) {
    FLEXPTE_TRY(check_indices("index_copy", index, target.size(params.dim), /*wraps=*/false));
  }
  if (source.num_elements() == 0) return Status::ok();
  FLEXPTE_ASSIGN(params.count, grid_count("the source of an index_copy", source.num_elements()));
  params.rank = source.rank;
  params.instruction = static_cast<uint32_t>(call.number + 1);
  params.target_size = target.size(params.dim);
  params.index_stride = index.stride(0);
  for (int32_t d = 0; d < source.rank; ++d) {
    params.sizes[static_cast<size_t>(d)] = source.size(d);
    params.source_strides[static_cast<size_t>(d)] = source.stride(d);
    params.target_strides[static_cast<size_t>(d)] = target.stride(d);
  }
  FLEXPTE_ASSIGN(const std::span<std::byte> status, encoder.status());
  const std::array<BufferArgument, 4> buffers = {write(target, "target"), read(index, "index"), read(source, "source"),
                                                 write(status, "status")};
  return encoder.dispatch(*call.pipelines[0], params, buffers, one_thread_an_element(params.count));
}

Status encode_arange(Encoder& encoder, const Call& call) {
  const TensorView& out = call.operands[operand::kArangeOut];
  params::ArangeParams params{};
  FLEXPTE_ASSIGN(params.count, grid_count("an arange", out.num_elements()));
  params.start = call.arange_start;
  params.step = call.arange_step;
  params.stride = out.stride(0);
  const std::array<BufferArgument, 1> buffers = {write(out, "out")};
  return encoder.dispatch(*call.pipelines[0], params, buffers, one_thread_an_element(params.count));
}

Status encode_elementwise(Encoder& encoder, const Call& call) {
  const auto num_inputs = static_cast<size_t>(std::get<bound::ElementwiseParams>(call.instruction.params).num_inputs);
  const TensorView& out = call.operands[operand::kElementwiseOut];
  const auto inputs = call.operands.subspan(operand::kFirstInput, num_inputs);
  const auto captures = call.operands.subspan(operand::kFirstInput + num_inputs);
  if (1 + call.operands.size() > FLEXPTE_MAX_OPERANDS) {
    return {Code::kUnsupported, "an elementwise kernel of " + std::to_string(call.operands.size()) + " operands"};
  }
  params::ElementwiseParams params{};
  FLEXPTE_ASSIGN(params.count, grid_count("the output of an elementwise kernel", out.num_elements()));
  std::vector<const TensorView*> views = {&out};
  for (const TensorView& input : inputs) views.push_back(&input);
  int32_t rank = 0;
  for (int32_t d = 0; d < out.rank; ++d) {
    if (out.size(d) == 1) continue;
    bool joins = rank > 0;
    for (size_t k = 0; k < views.size() && joins; ++k) {
      joins = params.strides[k][rank - 1] == out.size(d) * views[k]->stride(d);
    }
    if (joins) {
      --rank;
      params.sizes[rank] *= out.size(d);
    } else {
      params.sizes[rank] = out.size(d);
    }
    for (size_t k = 0; k < views.size(); ++k) params.strides[k][rank] = views[k]->stride(d);
    ++rank;
  }
  if (rank == 0) {
    params.sizes[0] = 1;
    rank = 1;
  }
  params.rank = rank;
  std::vector<BufferArgument> buffers = {write(out, "out")};
  for (const TensorView& input : inputs) buffers.push_back(read(input, "input"));
  for (const TensorView& capture : captures) buffers.push_back(read(capture, "capture"));
  FLEXPTE_ASSIGN(const BufferArgument capture_views, encode_views(encoder, captures));
  FLEXPTE_ASSIGN(const BufferArgument scalars, encode_scalars(encoder, call.scalars));
  buffers.push_back(capture_views);
  buffers.push_back(scalars);
  return encoder.dispatch(*call.pipelines[0], params, buffers, one_thread_an_element(params.count));
}

using Encode = Status (*)(Encoder&, const Call&);
// By OpKind; FlexAttention has its own.
constexpr std::array<Encode, bound::kNumOpKinds> kEncode = {
    encode_linear, encode_gather,     encode_rows,   encode_rows, encode_elementwise, encode_reduce, encode_rows,
    encode_matmul, encode_index_copy, encode_arange, nullptr,
};

}  // namespace

Status encode_instruction(Encoder& encoder, const Call& call) {
  return kEncode[static_cast<size_t>(call.instruction.kind)](encoder, call);
}

Result<BufferArgument> encode_views(Encoder& encoder, std::span<const TensorView> captures) {
  if (captures.empty()) return BufferArgument{};
  FLEXPTE_ASSIGN(const std::span<std::byte> bytes, encoder.scratch(captures.size() * sizeof(params::CaptureView)));
  auto* views = reinterpret_cast<params::CaptureView*>(bytes.data());
  for (size_t i = 0; i < captures.size(); ++i) {
    views[i] = {};
    for (size_t d = 0; d < static_cast<size_t>(captures[i].rank); ++d) {
      views[i].sizes[d] = captures[i].sizes[d];
      views[i].strides[d] = captures[i].strides[d];
    }
  }
  return read(std::span<const std::byte>(bytes), "views");
}

Result<BufferArgument> encode_scalars(Encoder& encoder, std::span<const int64_t> scalars) {
  if (scalars.empty()) return BufferArgument{};
  FLEXPTE_ASSIGN(const std::span<std::byte> bytes, encoder.scratch(scalars.size_bytes()));
  std::copy(scalars.begin(), scalars.end(), reinterpret_cast<int64_t*>(bytes.data()));
  return read(std::span<const std::byte>(bytes), "scalars");
}

}  // namespace flexpte::gpu
