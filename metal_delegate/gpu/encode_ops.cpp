#include "metal_delegate/gpu/encode_ops.h"

#include <algorithm>
#include <array>

#include "metal_delegate/gpu/encode_common.h"
#include "metal_delegate/gpu/params.h"

namespace flexpte::gpu {
namespace {

using Encode = Status (*)(Encoder&, const Call&);
// By OpKind; FlexAttention has its own.
constexpr std::array<Encode, bound::kNumOpKinds> kEncode = {
    encode_linear, encode_gather,     encode_norm,   encode_norm, encode_elementwise, encode_reduce, encode_softmax,
    encode_matmul, encode_index_copy, encode_arange, nullptr,
};

}  // namespace

Status encode_instruction(Encoder& encoder, const Call& call) {
  return kEncode[static_cast<size_t>(call.instruction.kind)](encoder, call);
}

void fill_views(std::span<const TensorView> captures, params::CaptureView* views) {
  for (size_t i = 0; i < captures.size(); ++i) {
    views[i] = {};
    for (size_t d = 0; d < static_cast<size_t>(captures[i].rank); ++d) {
      views[i].sizes[d] = captures[i].sizes[d];
      views[i].strides[d] = captures[i].strides[d];
    }
  }
}

Result<BufferArgument> encode_views(Encoder& encoder, std::span<const TensorView> captures) {
  if (captures.empty()) return BufferArgument{};
  FLEXPTE_ASSIGN(const std::span<std::byte> bytes, encoder.scratch(captures.size() * sizeof(params::CaptureView)));
  fill_views(captures, reinterpret_cast<params::CaptureView*>(bytes.data()));
  return read(std::span<const std::byte>(bytes), "views");
}

Result<BufferArgument> encode_scalars(Encoder& encoder, std::span<const int64_t> scalars) {
  if (scalars.empty()) return BufferArgument{};
  FLEXPTE_ASSIGN(const std::span<std::byte> bytes, encoder.scratch(scalars.size_bytes()));
  std::copy(scalars.begin(), scalars.end(), reinterpret_cast<int64_t*>(bytes.data()));
  return read(std::span<const std::byte>(bytes), "scalars");
}

}  // namespace flexpte::gpu
