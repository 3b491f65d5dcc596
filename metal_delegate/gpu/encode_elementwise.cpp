// Elementwise: elementwise.metal and the kernels that exporter/msl_elementwise.py generates.
#include <cstring>

#include "metal_delegate/gpu/encode_common.h"
#include "metal_delegate/gpu/params.h"

namespace flexpte::gpu {
namespace {

namespace operand = bound::operand;

constexpr int64_t kThreads = 256;
constexpr int64_t kElementsPerThread = 4;
constexpr size_t kMaxViews = 1 + FLEXPTE_MAX_OPERANDS;

// The index space of the output and the inputs: dimensions that lie at one stride in all of them are one. Outermost
// first by the output's strides, so that it is written along memory.
struct Space {
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<std::array<int64_t, kMaxRank>, kMaxViews> strides{};
};

Space merge_dimensions(std::span<const TensorView> views) {
  const TensorView& out = views[0];
  std::array<int32_t, kMaxRank> order{};
  int32_t rank = 0;
  for (int32_t d = 0; d < out.rank; ++d) {
    if (out.size(d) == 1) continue;
    int32_t at = rank++;
    for (; at > 0 && out.stride(order[static_cast<size_t>(at - 1)]) < out.stride(d); --at) {
      order[static_cast<size_t>(at)] = order[static_cast<size_t>(at - 1)];
    }
    order[static_cast<size_t>(at)] = d;
  }
  Space space;
  for (int32_t i = 0; i < rank; ++i) {
    const int32_t d = order[static_cast<size_t>(i)];
    bool merges = space.rank > 0;
    const auto last = static_cast<size_t>(space.rank - 1);
    for (size_t k = 0; k < views.size() && merges; ++k) {
      merges = space.strides[k][last] == views[k].stride(d) * out.size(d);
    }
    const size_t to = merges ? last : static_cast<size_t>(space.rank++);
    space.sizes[to] = merges ? space.sizes[to] * out.size(d) : out.size(d);
    for (size_t k = 0; k < views.size(); ++k) space.strides[k][to] = views[k].stride(d);
  }
  return space;
}

// Whether four neighbours of the innermost dimension can be moved at once.
bool has_vectors(const TensorView& view, const params::ElementwiseStrides& strides, int32_t rank) {
  bool result = strides.inner == 1 && is_aligned(view.data, 4 * element_size_bytes(view.dtype));
  for (int32_t d = 0; d < rank; ++d) result = result && strides.rows[d] % 4 == 0;
  return result;
}

}  // namespace

Status encode_elementwise(Encoder& encoder, const Call& call) {
  using params::CaptureView;
  using params::ElementwiseHeader;
  using params::ElementwiseStrides;
  const auto num_inputs = static_cast<size_t>(std::get<bound::ElementwiseParams>(call.instruction.params).num_inputs);
  // The output, then the inputs: that is the order of the operands.
  const std::span<const TensorView> views = call.operands.first(operand::kFirstInput + num_inputs);
  const std::span<const TensorView> captures = call.operands.subspan(operand::kFirstInput + num_inputs);
  alignas(8) std::array<std::byte, kMaxParamsBytes> params{};
  const size_t views_at = sizeof(ElementwiseHeader) + views.size() * sizeof(ElementwiseStrides);
  const size_t scalars_at = views_at + captures.size() * sizeof(CaptureView);
  const size_t size_bytes = scalars_at + call.scalars.size_bytes();
  if (call.operands.size() > kMaxViews || size_bytes > params.size()) {
    return {Code::kUnsupported, "an elementwise kernel of " + std::to_string(call.operands.size()) + " operands and " +
                                    std::to_string(call.scalars.size()) + " scalars"};
  }

  const Space space = merge_dimensions(views);
  const int32_t rank = std::max(space.rank - 1, 0);
  int64_t rows = 1;
  for (int32_t d = 0; d < rank; ++d) rows *= space.sizes[static_cast<size_t>(d)];
  ElementwiseHeader header{};
  header.inner = space.rank > 0 ? space.sizes[static_cast<size_t>(rank)] : 1;
  FLEXPTE_ASSIGN(header.rows, narrow<uint32_t>("rows of an elementwise kernel", rows));
  header.rank = rank;
  header.instruction = static_cast<uint32_t>(call.number + 1);
  std::copy_n(space.sizes.begin(), rank, header.sizes);
  std::array<BufferArgument, kMaxViews + 1> buffers;
  for (size_t k = 0; k < views.size(); ++k) {
    ElementwiseStrides strides{};
    strides.inner = space.rank > 0 ? space.strides[k][static_cast<size_t>(rank)] : 0;
    std::copy_n(space.strides[k].begin(), rank, strides.rows);
    if (has_vectors(views[k], strides, rank)) header.vectors |= 1u << k;
    std::memcpy(params.data() + sizeof header + k * sizeof strides, &strides, sizeof strides);
    buffers[k] = k == 0 ? write(views[k], "out") : read(views[k], "input");
  }
  for (size_t k = 0; k < captures.size(); ++k) buffers[views.size() + k] = read(captures[k], "capture");
  if (!captures.empty()) {
    FLEXPTE_ASSIGN(const std::span<std::byte> status, encoder.status());
    buffers[call.operands.size()] = write(status, "status");
  }
  std::memcpy(params.data(), &header, sizeof header);
  fill_views(captures, reinterpret_cast<CaptureView*>(params.data() + views_at));
  if (!call.scalars.empty()) {
    std::memcpy(params.data() + scalars_at, call.scalars.data(), call.scalars.size_bytes());
  }
  const int64_t groups = divide_up(header.inner, kElementsPerThread);
  return encoder.queue().dispatch(
      *call.pipelines[0], std::span<const std::byte>(params).first(size_bytes),
      std::span(buffers).first(call.operands.size() + (captures.empty() ? 0 : 1)),
      grid_over(groups, rows, max_threads(call, 0, kThreads), enough_threadgroups(encoder)));
}

}  // namespace flexpte::gpu
