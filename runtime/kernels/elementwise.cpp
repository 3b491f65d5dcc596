// Expressions over strided tensors: dimensions that can be walked as one are merged, the last two that
// are left make tiles of rows x cols lanes, and an input that does not vary along one of them is
// evaluated (and everything that depends on it alone) only where it does.
#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstdlib>
#include <cstring>

#include "runtime/kernels/expression_program.h"

namespace flexpte {
namespace {

using Impl = TileProgram::Impl;

// Lanes of a tile: enough to make the cost per step small, few enough for the first cache.
constexpr int64_t kTileLanes = 1024;
// Lanes that are worth waking another thread for.
constexpr int64_t kGrainLanes = 32768;
constexpr int64_t kGrainLanesCostly = 4096;

// The dimensions that are left, outermost first; strides of the output and of each input.
struct Loops {
  int rank = 0;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<int64_t, kMaxRank> out_strides{};
  std::array<std::array<int64_t, kMaxRank>, Impl::kMaxInputs> in_strides;

  int64_t size(int d) const { return sizes[static_cast<size_t>(d)]; }
};

Loops merge_dimensions(std::span<const TensorView> inputs, const TensorView& out) {
  // Outermost first by the output's strides, so that it is written along memory.
  std::array<int32_t, kMaxRank> order{};
  int32_t rank = 0;
  for (int32_t d = 0; d < out.rank; ++d) {
    if (out.size(d) == 1) continue;
    int32_t at = rank++;
    for (; at > 0 && std::abs(out.stride(order[static_cast<size_t>(at - 1)])) < std::abs(out.stride(d)); --at) {
      order[static_cast<size_t>(at)] = order[static_cast<size_t>(at - 1)];
    }
    order[static_cast<size_t>(at)] = d;
  }
  Loops loops;
  for (int32_t i = 0; i < rank; ++i) {
    const int32_t d = order[static_cast<size_t>(i)];
    bool merges = loops.rank > 0;
    const size_t last = static_cast<size_t>(loops.rank - 1);
    if (merges) {
      merges = loops.out_strides[last] == out.stride(d) * out.size(d);
      for (size_t n = 0; n < inputs.size() && merges; ++n) {
        merges = loops.in_strides[n][last] == inputs[n].stride(d) * inputs[n].size(d);
      }
    }
    const size_t to = merges ? last : static_cast<size_t>(loops.rank++);
    loops.sizes[to] = merges ? loops.sizes[to] * out.size(d) : out.size(d);
    loops.out_strides[to] = out.stride(d);
    for (size_t n = 0; n < inputs.size(); ++n) loops.in_strides[n][to] = inputs[n].stride(d);
  }
  return loops;
}

// Stores a result that no loop has written to its place.
void store(const Impl::Value& value, DType type, std::byte* out, DType out_type, int64_t out_row_stride,
           int64_t out_col_stride, int64_t rows, int64_t cols) {
  const int64_t size = element_size_bytes(type);
  const int64_t out_size = element_size_bytes(out_type);
  const LaneOperand& from = value.operand;
  if (from.col_step == 1 && out_col_stride == 1 && from.row_step == cols && out_row_stride == cols) {
    convert_lanes(from.data, type, 1, out, out_type, 1, rows * cols);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    convert_lanes(static_cast<const std::byte*>(from.data) + r * from.row_step * size, type, from.col_step,
                  out + r * out_row_stride * out_size, out_type, out_col_stride, cols);
  }
}

class Elementwise {
 public:
  Elementwise(const Impl& program, std::span<const TensorView> inputs, std::span<const int64_t> scalars,
              std::span<const TensorView> captures, const TensorView& out)
      : program_(program),
        inputs_(inputs),
        scalars_(scalars),
        captures_(captures),
        out_(out),
        loops_(merge_dimensions(inputs, out)) {
    const int inner = loops_.rank - 1;
    if (inner >= 0) cols_ = loops_.size(inner);
    tile_cols_ = std::min(cols_, kTileLanes);
    col_tiles_ = (cols_ + tile_cols_ - 1) / tile_cols_;
    if (inner >= 1) rows_ = loops_.size(inner - 1);
    tile_rows_ = std::clamp<int64_t>(kTileLanes / Impl::row_stride(tile_cols_), 1, rows_);
    row_tiles_ = (rows_ + tile_rows_ - 1) / tile_rows_;
    num_tiles_ = row_tiles_ * col_tiles_;
    for (int d = 0; d < inner - 1; ++d) num_tiles_ *= loops_.size(d);
    const DType type = program.steps.back().type;
    direct_ = out.dtype == type && col_stride(loops_.out_strides) == 1;
  }

  int64_t num_tiles() const { return num_tiles_; }
  int64_t grain() const {
    const int64_t lanes = program_.is_costly ? kGrainLanesCostly : kGrainLanes;
    return std::max<int64_t>(1, lanes / (tile_rows_ * tile_cols_));
  }

  // Whether all loads of the tile were inside their captures.
  bool run_tile(int64_t tile, std::span<std::byte> workspace) const {
    const int64_t col_begin = tile % col_tiles_ * tile_cols_;
    tile /= col_tiles_;
    const int64_t row_begin = tile % row_tiles_ * tile_rows_;
    tile /= row_tiles_;
    std::array<int64_t, kMaxRank> at{};
    if (loops_.rank >= 1) at[static_cast<size_t>(loops_.rank - 1)] = col_begin;
    if (loops_.rank >= 2) at[static_cast<size_t>(loops_.rank - 2)] = row_begin;
    for (int d = loops_.rank - 3; d >= 0; --d) {
      at[static_cast<size_t>(d)] = tile % loops_.size(d);
      tile /= loops_.size(d);
    }

    std::array<Impl::Input, Impl::kMaxInputs> inputs;
    for (size_t n = 0; n < inputs_.size(); ++n) {
      inputs[n] = {element(inputs_[n], loops_.in_strides[n], at), inputs_[n].dtype, row_stride(loops_.in_strides[n]),
                   col_stride(loops_.in_strides[n])};
    }
    std::byte* out = element(out_, loops_.out_strides, at);
    Impl::Frame frame;
    frame.inputs = {inputs.data(), inputs_.size()};
    frame.captures = captures_;
    frame.scalars = scalars_;
    frame.rows = std::min(tile_rows_, rows_ - row_begin);
    frame.cols = std::min(tile_cols_, cols_ - col_begin);
    frame.destination = direct_ ? out : nullptr;
    frame.destination_row_step = row_stride(loops_.out_strides);
    bool inside = true;
    const Impl::Value value = program_.run(frame, workspace, &inside);
    if (value.operand.data != out) {
      store(value, program_.steps.back().type, out, out_.dtype, row_stride(loops_.out_strides),
            col_stride(loops_.out_strides), frame.rows, frame.cols);
    }
    return inside;
  }

 private:
  int64_t col_stride(const std::array<int64_t, kMaxRank>& strides) const {
    return loops_.rank >= 1 ? strides[static_cast<size_t>(loops_.rank - 1)] : 1;
  }
  int64_t row_stride(const std::array<int64_t, kMaxRank>& strides) const {
    return loops_.rank >= 2 ? strides[static_cast<size_t>(loops_.rank - 2)] : 0;
  }

  std::byte* element(const TensorView& view, const std::array<int64_t, kMaxRank>& strides,
                     const std::array<int64_t, kMaxRank>& at) const {
    int64_t offset = 0;
    for (int d = 0; d < loops_.rank; ++d) offset += at[static_cast<size_t>(d)] * strides[static_cast<size_t>(d)];
    return static_cast<std::byte*>(view.data) + offset * element_size_bytes(view.dtype);
  }

  const Impl& program_;
  const std::span<const TensorView> inputs_;
  const std::span<const int64_t> scalars_;
  const std::span<const TensorView> captures_;
  const TensorView& out_;
  const Loops loops_;
  int64_t rows_ = 1, cols_ = 1;
  int64_t tile_rows_ = 1, tile_cols_ = 1;
  int64_t row_tiles_ = 1, col_tiles_ = 1;
  int64_t num_tiles_ = 1;
  bool direct_ = false;
};

size_t workspace_per_thread(const Impl& program) {
  // Any tile has at most kTileLanes lanes, rows padded; what is kept per row or per column is no more.
  size_t bytes = program.workspace_bytes(1, kTileLanes);
  for (const Impl::Slot& slot : program.slots) {
    if (slot.extent == Extent::kRows) bytes += static_cast<size_t>(kTileLanes * slot.element_size);
  }
  return (bytes + 63) / 64 * 64;
}

}  // namespace

size_t elementwise_workspace_bytes(const TileProgram& program, int num_threads) {
  return workspace_per_thread(*program.impl_) * static_cast<size_t>(num_threads);
}

Status elementwise(const TileProgram& program, std::span<const TensorView> inputs, std::span<const int64_t> scalars,
                   std::span<const TensorView> captures, const TensorView& out, const ThreadPool& pool,
                   std::span<std::byte> workspace) {
  const Impl& impl = *program.impl_;
  assert(inputs.size() <= static_cast<size_t>(Impl::kMaxInputs));
  if (impl.uses_score || impl.uses_indices) {
    return {Code::kInvalidProgram,
            "elementwise: the expression reads the score or an index of an attention, which elementwise kernels "
            "do not have"};
  }
  if (out.num_elements() == 0) return Status::ok();
  const Elementwise loops(impl, inputs, scalars, captures, out);
  const size_t per_thread = workspace_per_thread(impl);
  assert(workspace.size() >= per_thread);
  std::atomic<bool> inside{true};
  const auto body = [&](int64_t begin, int64_t end, int thread) {
    const std::span<std::byte> scratch = workspace.subspan(per_thread * static_cast<size_t>(thread), per_thread);
    bool all_inside = true;
    for (int64_t tile = begin; tile < end; ++tile) all_inside &= loops.run_tile(tile, scratch);
    if (!all_inside) inside.store(false, std::memory_order_relaxed);
  };
  if (loops.num_tiles() <= loops.grain()) {
    body(0, loops.num_tiles(), 0);
  } else {
    pool.parallel_for(loops.num_tiles(), loops.grain(), body);
  }
  if (inside.load()) return Status::ok();
  return {Code::kOutOfRange, "elementwise: an index is outside the tensor that it indexes"};
}

}  // namespace flexpte
