// Gather, IndexCopy and Arange: gather.metal, index_copy.metal, arange.metal.
#include "metal_delegate/gpu/encode_common.h"
#include "metal_delegate/gpu/params.h"

namespace flexpte::gpu {
namespace {

namespace operand = bound::operand;

constexpr int64_t kThreads = 256;

// Indices that the host can read already are checked before anything is written.
Status check_indices(Encoder& encoder, const char* op, const TensorView& index, int64_t size, bool wraps) {
  if (!encoder.is_readable(index.data)) return Status::ok();
  Strided<1> shape;
  for (int32_t d = 0; d < index.rank; ++d) shape.append(index.size(d), {index.stride(d)});
  StridedIterator<1> it(shape, 0);
  const int64_t count = shape.num_elements();
  for (int64_t i = 0; i < count; ++i, it.advance()) {
    const int64_t value =
        index.dtype == DType::kI32 ? index.as<const int32_t>()[it.offset(0)] : index.as<const int64_t>()[it.offset(0)];
    if (value < size && value >= (wraps ? -size : 0)) continue;
    return {Code::kOutOfRange, std::string(op) + ": index " + std::to_string(value) + " (element " + std::to_string(i) +
                                   ") is outside a dimension of size " + std::to_string(size)};
  }
  return Status::ok();
}

}  // namespace

Status encode_gather(Encoder& encoder, const Call& call) {
  const TensorView& source = call.operands[operand::kGatherSource];
  const TensorView& index = call.operands[operand::kGatherIndex];
  const TensorView& out = call.operands[operand::kGatherOut];
  const int32_t dim = std::get<bound::GatherParams>(call.instruction.params).dim;
  FLEXPTE_TRY(check_indices(encoder, "gather", index, source.size(dim), /*wraps=*/true));
  Strided<3> shape;  // source, index, out
  for (int32_t d = 0; d < out.rank; ++d) {
    if (d < dim) {
      shape.append(out.size(d), {source.stride(d), 0, out.stride(d)});
    } else if (d < dim + index.rank) {
      shape.append(out.size(d), {0, index.stride(d - dim), out.stride(d)});
    } else {
      shape.append(out.size(d), {source.stride(d - index.rank + 1), 0, out.stride(d)});
    }
  }
  const auto [inner, inner_strides] = shape.pop_inner();
  params::GatherParams params{};
  params.inner = inner;
  FLEXPTE_ASSIGN(params.rows, narrow<uint32_t>("rows of a gather", shape.num_elements()));
  params.rank = shape.rank;
  params.instruction = static_cast<uint32_t>(call.number + 1);
  params.source_size = source.size(dim);
  params.source_stride = source.stride(dim);
  params.source_inner_stride = inner_strides[0];
  params.index_inner_stride = inner_strides[1];
  params.out_inner_stride = inner_strides[2];
  copy_sizes(shape, params.sizes);
  copy_strides(shape, 0, params.source_strides);
  copy_strides(shape, 1, params.index_strides);
  copy_strides(shape, 2, params.out_strides);
  const int64_t packed = kVectorBytes / element_size_bytes(source.dtype);
  params.is_vectorizable = inner % packed == 0 && inner_strides[0] == 1 && inner_strides[1] == 0 &&
                           inner_strides[2] == 1 && source.stride(dim) % packed == 0 &&
                           strides_divide(shape, 0, packed) && strides_divide(shape, 2, packed) &&
                           is_aligned(source.data, kVectorBytes) && is_aligned(out.data, kVectorBytes);
  if (params.is_vectorizable != 0) params.inner /= packed;
  FLEXPTE_ASSIGN(const std::span<std::byte> status, encoder.status());
  const std::array<BufferArgument, 4> buffers = {read(source, "source"), read(index, "index"), write(out, "out"),
                                                 write(status, "status")};
  return encoder.dispatch(
      *call.pipelines[0], params, buffers,
      grid_over(params.inner, params.rows, max_threads(call, 0, kThreads), enough_threadgroups(encoder)));
}

Status encode_index_copy(Encoder& encoder, const Call& call) {
  const TensorView& target = call.operands[operand::kTarget];
  const TensorView& index = call.operands[operand::kCopyIndex];
  const TensorView& source = call.operands[operand::kCopySource];
  const int32_t dim = std::get<bound::IndexCopyParams>(call.instruction.params).dim;
  FLEXPTE_TRY(check_indices(encoder, "index_copy", index, target.size(dim), /*wraps=*/false));
  if (source.num_elements() == 0) return Status::ok();
  Strided<2> shape;  // target, source
  for (int32_t d = 0; d < source.rank; ++d) {
    if (d != dim) shape.append(source.size(d), {target.stride(d), source.stride(d)});
  }
  const auto [inner, inner_strides] = shape.pop_inner();
  params::IndexCopyParams params{};
  params.count = index.size(0);
  params.inner = inner;
  FLEXPTE_ASSIGN(params.rows, narrow<uint32_t>("rows of an index_copy", shape.num_elements()));
  params.rank = shape.rank;
  params.instruction = static_cast<uint32_t>(call.number + 1);
  params.index_stride = index.stride(0);
  params.target_size = target.size(dim);
  params.target_stride = target.stride(dim);
  params.source_stride = source.stride(dim);
  params.target_inner_stride = inner_strides[0];
  params.source_inner_stride = inner_strides[1];
  copy_sizes(shape, params.sizes);
  copy_strides(shape, 0, params.target_strides);
  copy_strides(shape, 1, params.source_strides);
  const int64_t packed = kVectorBytes / element_size_bytes(source.dtype);
  params.is_vectorizable = inner % packed == 0 && inner_strides[0] == 1 && inner_strides[1] == 1 &&
                           params.target_stride % packed == 0 && params.source_stride % packed == 0 &&
                           strides_divide(shape, 0, packed) && strides_divide(shape, 1, packed) &&
                           is_aligned(target.data, kVectorBytes) && is_aligned(source.data, kVectorBytes);
  if (params.is_vectorizable != 0) params.inner /= packed;
  FLEXPTE_ASSIGN(const std::span<std::byte> status, encoder.status());
  const std::array<BufferArgument, 4> buffers = {write(target, "target"), read(index, "index"), read(source, "source"),
                                                 write(status, "status")};
  Grid grid = grid_over(params.inner, params.rows, max_threads(call, 0, kThreads), enough_threadgroups(encoder));
  // Whole simdgroups: they look for later copies to the same place together.
  while (grid.threads[0] * grid.threads[1] < kSimdWidth) grid.threads[0] *= 2;
  FLEXPTE_ASSIGN(grid.threadgroups[2], narrow<uint32_t>("indices of an index_copy", params.count));
  return encoder.dispatch(*call.pipelines[0], params, buffers, grid);
}

Status encode_arange(Encoder& encoder, const Call& call) {
  const TensorView& out = call.operands[operand::kArangeOut];
  params::ArangeParams params{};
  params.count = out.size(0);
  params.start = call.arange_start;
  params.step = call.arange_step;
  params.stride = out.stride(0);
  const std::array<BufferArgument, 1> buffers = {write(out, "out")};
  return encoder.dispatch(*call.pipelines[0], params, buffers,
                          grid_over(params.count, 1, max_threads(call, 0, kThreads), enough_threadgroups(encoder)));
}

}  // namespace flexpte::gpu
