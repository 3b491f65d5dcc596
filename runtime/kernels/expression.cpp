// Running compiled expressions over tiles.
#include "runtime/kernels/expression.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "runtime/kernels/expression_program.h"

namespace flexpte {
namespace {

using Impl = TileProgram::Impl;

constexpr int64_t kAlignment = 64;
constexpr int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Steps of an operand with this extent whose values lie as Tile describes.
LaneOperand packed_operand(const void* data, Extent extent, int64_t row_stride) {
  switch (extent) {
    case Extent::kUniform:
      return {data, 0, 0};
    case Extent::kRows:
      return {data, 1, 0};
    case Extent::kCols:
      return {data, 0, 1};
    case Extent::kFull:
      break;
  }
  return {data, row_stride, 1};
}

const std::byte* byte_at(const void* data, int64_t elements, DType dtype) {
  return static_cast<const std::byte*>(data) + elements * element_size_bytes(dtype);
}

// One evaluation of a program over one tile.
class Run {
 public:
  Run(const Impl& program, const Impl::Frame& frame, std::span<std::byte> workspace)
      : program_(program), frame_(frame), stride_(Impl::row_stride(frame.cols)) {
    const int64_t num_steps = static_cast<int64_t>(program.steps.size());
    band_rows_ = program.uses_inputs ? frame.rows : Impl::band_rows(frame.rows, frame.cols);
    values_ = reinterpret_cast<Impl::Value*>(workspace.data());
    int64_t at = aligned(num_steps * static_cast<int64_t>(sizeof(Impl::Value)));
    slots_ = reinterpret_cast<std::byte**>(workspace.data() + at);
    at += aligned(static_cast<int64_t>(program.slots.size() * sizeof(std::byte*)));
    for (size_t s = 0; s < program.slots.size(); ++s) {
      slots_[s] = workspace.data() + at;
      at += program.slot_bytes(program.slots[s], frame.rows, frame.cols, false);
    }
    assert(at <= static_cast<int64_t>(workspace.size()));
  }

  Impl::Value run(bool* inside) {
    const size_t num_steps = program_.steps.size();
    for (size_t i = 0; i < num_steps; ++i) {
      if (program_.steps[i].extent != Extent::kFull) evaluate(i, 0, frame_.rows, inside);
    }
    if (program_.steps.back().extent == Extent::kFull) {
      for (int64_t r = 0; r < frame_.rows; r += band_rows_) {
        const int64_t rows = std::min(band_rows_, frame_.rows - r);
        for (size_t i = 0; i < num_steps; ++i) {
          if (program_.steps[i].extent == Extent::kFull) evaluate(i, r, rows, inside);
        }
      }
    }
    return values_[num_steps - 1];
  }

 private:
  // Rows [row_begin, row_begin + rows) of step i. Operands of kFull steps start at the band's first row.
  void evaluate(size_t i, int64_t row_begin, int64_t rows, bool* inside) {
    const Impl::Step& step = program_.steps[i];
    Impl::Value& value = values_[i];
    value.extent = step.extent;
    void* out = step.slot == Impl::kNoSlot ? nullptr : slots_[step.slot];
    switch (step.op) {
      case ExprOp::kConstant:
        value.operand = {step.literal.data(), 0, 0};
        return;
      case ExprOp::kScore:
        value.operand = {frame_.score + row_begin * frame_.score_stride, frame_.score_stride, 1};
        return;
      case ExprOp::kInput:
        input(step, value, out, rows);
        return;
      case ExprOp::kBatch:
        sequence(step, value, out, frame_.batch, 1);
        return;
      case ExprOp::kHead:
        sequence(step, value, out, frame_.head, 1);
        return;
      case ExprOp::kScalar:
        sequence(step, value, out, frame_.scalars[static_cast<size_t>(step.index)], 1);
        return;
      case ExprOp::kQIdx:
        sequence(step, value, out, frame_.q_begin, frame_.rows);
        return;
      case ExprOp::kKvIdx:
        sequence(step, value, out, frame_.kv_begin, frame_.cols);
        return;
      case ExprOp::kLoad:
        load(step, value, out, row_begin, rows, inside);
        return;
      default:
        operation(i, step, value, out, row_begin, rows);
        return;
    }
  }

  static void sequence(const Impl::Step& step, Impl::Value& value, void* out, int64_t begin, int64_t n) {
    if (step.type == DType::kI32) {
      int32_t* o = static_cast<int32_t*>(out);
      for (int64_t i = 0; i < n; ++i) o[i] = static_cast<int32_t>(begin + i);
    } else {
      int64_t* o = static_cast<int64_t*>(out);
      for (int64_t i = 0; i < n; ++i) o[i] = begin + i;
    }
    value.operand = packed_operand(out, step.extent, 0);
  }

  // Read in place where the type is right, else converted; only as often as it varies.
  void input(const Impl::Step& step, Impl::Value& value, void* out, int64_t rows) {
    const Impl::Input& in = frame_.inputs[static_cast<size_t>(step.index)];
    const bool by_col = in.col_step != 0 && frame_.cols > 1;
    const bool by_row = in.row_step != 0 && rows > 1;
    // A single row counts as the whole tile, so that results can go straight to their destination.
    value.extent =
        by_col ? (by_row || rows == 1 ? Extent::kFull : Extent::kCols) : (by_row ? Extent::kRows : Extent::kUniform);
    if (in.dtype == step.type && (!by_col || in.col_step == 1)) {
      value.operand = {in.data, by_row ? in.row_step : 0, by_col ? 1 : 0};
      return;
    }
    const int64_t distinct_rows = by_row ? rows : 1;
    const int64_t distinct_cols = by_col ? frame_.cols : 1;
    const int64_t size = element_size_bytes(step.type);
    if (!by_col) {
      convert_lanes(in.data, in.dtype, in.row_step, out, step.type, 1, distinct_rows);
    } else if (in.col_step == 1 && in.row_step == stride_ && by_row) {
      convert_lanes(in.data, in.dtype, 1, out, step.type, 1, (rows - 1) * stride_ + frame_.cols);
    } else {
      for (int64_t r = 0; r < distinct_rows; ++r) {
        convert_lanes(byte_at(in.data, r * in.row_step, in.dtype), in.dtype, in.col_step,
                      static_cast<std::byte*>(out) + r * stride_ * size, step.type, 1, distinct_cols);
      }
    }
    value.operand = packed_operand(out, value.extent, stride_);
  }

  // An argument as seen from row `row_begin` of the tile: only values of whole columns of rows move.
  LaneOperand argument(int32_t number, int64_t row_begin) const {
    LaneOperand operand = values_[number].operand;
    const Impl::Step& step = program_.steps[static_cast<size_t>(number)];
    if (step.extent == Extent::kRows) {
      operand.data = byte_at(operand.data, row_begin * operand.row_step, step.type);
    }
    return operand;
  }

  // The tile that a step of this extent covers: values per row are one row of `rows` lanes.
  void shape(Extent extent, int64_t rows, int64_t* out_rows, int64_t* out_cols) const {
    *out_rows = extent == Extent::kFull ? rows : 1;
    *out_cols = extent == Extent::kUniform ? 1 : extent == Extent::kRows ? rows : frame_.cols;
  }

  void load(const Impl::Step& step, Impl::Value& value, void* out, int64_t row_begin, int64_t rows, bool* inside) {
    std::array<LaneOperand, kMaxRank> indices;
    std::array<DType, kMaxRank> types{};
    Extent extent = Extent::kUniform;
    for (int32_t d = 0; d < step.capture_rank; ++d) {
      extent = join(extent, values_[program_.index_args[static_cast<size_t>(step.first_index + d)]].extent);
    }
    for (int32_t d = 0; d < step.capture_rank; ++d) {
      const int32_t number = program_.index_args[static_cast<size_t>(step.first_index + d)];
      LaneOperand& operand = indices[static_cast<size_t>(d)];
      operand = argument(number, row_begin);
      types[static_cast<size_t>(d)] = program_.steps[static_cast<size_t>(number)].type;
      if (extent == Extent::kRows) operand = {operand.data, 0, operand.row_step};
    }
    value.extent = extent;
    const LaneLoad lane_load{&frame_.captures[static_cast<size_t>(step.index)], indices.data(), types.data(), step.type,
                             extent == Extent::kFull || extent == Extent::kCols ? step.column_step : 0};
    ActiveLanes active = frame_.active;
    if (active.data != nullptr && extent == Extent::kFull) active.data += row_begin * active.stride;
    int64_t tile_rows = 0, tile_cols = 0;
    shape(extent, rows, &tile_rows, &tile_cols);
    std::byte* to = place(step, out, extent, row_begin);
    if (!load_lanes(lane_load, to, stride_, extent, tile_rows, tile_cols, active)) *inside = false;
    value.operand = packed_operand(place_of_value(step, out, extent, to), extent, stride_);
  }

  void operation(size_t i, const Impl::Step& step, Impl::Value& value, void* out, int64_t row_begin, int64_t rows) {
    std::array<LaneOperand, 3> operands;
    Extent extent = Extent::kUniform;
    for (int32_t a = 0; a < step.num_args; ++a) {
      extent = join(extent, values_[step.args[static_cast<size_t>(a)]].extent);
    }
    for (int32_t a = 0; a < step.num_args; ++a) {
      operands[static_cast<size_t>(a)] = argument(step.args[static_cast<size_t>(a)], row_begin);
    }
    value.extent = extent;
    const bool direct = i + 1 == program_.steps.size() && frame_.destination != nullptr && extent == Extent::kFull;
    const int64_t out_step = direct ? frame_.destination_row_step : stride_;
    std::byte* to = direct ? static_cast<std::byte*>(frame_.destination) : place(step, out, extent, row_begin);
    int64_t tile_rows = 0, tile_cols = 0;
    shape(extent, rows, &tile_rows, &tile_cols);
    bool one_run = extent == Extent::kFull && tile_rows > 1;
    for (int32_t a = 0; a < step.num_args; ++a) {
      LaneOperand& operand = operands[static_cast<size_t>(a)];
      if (extent == Extent::kRows) operand = {operand.data, 0, operand.row_step};
      const bool uniform = operand.row_step == 0 && operand.col_step == 0;
      one_run &= uniform || (operand.row_step == out_step && operand.col_step == 1);
    }
    // Rows that follow each other alike in all operands are one: what lies between them is scratch.
    if (one_run && (!direct || out_step == tile_cols)) {
      tile_cols = (tile_rows - 1) * out_step + tile_cols;
      tile_rows = 1;
    }
    step.kernel(operands.data(), to, out_step, tile_rows, tile_cols);
    value.operand =
        packed_operand(direct ? frame_.destination : place_of_value(step, out, extent, to), extent, out_step);
  }

  // Where the rows of this band go: a band's scratch, or their place in the result's whole tile.
  std::byte* place(const Impl::Step& step, void* out, Extent extent, int64_t row_begin) const {
    std::byte* to = static_cast<std::byte*>(out);
    const bool whole = program_.slots[static_cast<size_t>(step.slot)].whole_tile;
    return whole && extent == Extent::kFull ? to + row_begin * stride_ * element_size_bytes(step.type) : to;
  }

  // What a reader of the value starts from. Nothing but the caller reads the result.
  const void* place_of_value(const Impl::Step& step, const void* out, Extent extent, const std::byte* to) const {
    const bool whole = program_.slots[static_cast<size_t>(step.slot)].whole_tile;
    return whole && extent == Extent::kFull ? out : to;
  }

  const Impl& program_;
  const Impl::Frame& frame_;
  const int64_t stride_;
  int64_t band_rows_ = 0;
  Impl::Value* values_ = nullptr;
  std::byte** slots_ = nullptr;
};

}  // namespace

int64_t Impl::band_rows(int64_t rows, int64_t cols) {
  return std::clamp<int64_t>(kBandLanes / row_stride(cols), 1, std::max<int64_t>(rows, 1));
}

// `upper_bound`: for all tiles of at most this size.
int64_t Impl::slot_bytes(const Slot& slot, int64_t rows, int64_t cols, bool upper_bound) const {
  const int64_t stride = row_stride(cols);
  int64_t lanes = 1;
  switch (slot.extent) {
    case Extent::kUniform:
      break;
    case Extent::kRows:
      lanes = rows;
      break;
    case Extent::kCols:
      lanes = cols;
      break;
    case Extent::kFull:
      lanes = rows * stride;
      if (!slot.whole_tile && !uses_inputs) {
        lanes = upper_bound ? std::min(lanes, std::max(kBandLanes, stride)) : band_rows(rows, cols) * stride;
      }
      break;
  }
  // Whole pages apart, a loop's loads would seem to the processor to depend on its stores.
  constexpr int64_t kStagger = 17 * kAlignment;
  return aligned(lanes * slot.element_size) + (slot.extent == Extent::kFull ? kStagger : 0);
}

size_t Impl::workspace_bytes(int64_t max_rows, int64_t max_cols) const {
  int64_t bytes = aligned(static_cast<int64_t>(steps.size() * sizeof(Value))) +
                  aligned(static_cast<int64_t>(slots.size() * sizeof(std::byte*)));
  for (const Slot& slot : slots) bytes += slot_bytes(slot, max_rows, max_cols, true);
  return static_cast<size_t>(bytes);
}

Impl::Value Impl::run(const Frame& frame, std::span<std::byte> workspace, bool* inside) const {
  return Run(*this, frame, workspace).run(inside);
}

size_t TileProgram::workspace_bytes(int64_t max_rows, int64_t max_cols) const {
  return impl_->workspace_bytes(max_rows, max_cols);
}

TileProgram::Tile TileProgram::run(const TileInputs& in, int64_t rows, int64_t cols, std::span<std::byte> workspace,
                                   const uint8_t* active, int64_t active_stride, bool* out_of_bounds) const {
  std::array<Impl::Input, Impl::kMaxInputs> inputs;
  assert(in.inputs.size() <= inputs.size());
  for (size_t i = 0; i < in.inputs.size(); ++i) {
    const TensorView& view = in.inputs[i];
    inputs[i] = {view.data, view.dtype, view.rank == 2 ? view.stride(0) : 0, view.stride(view.rank - 1)};
  }
  Impl::Frame frame;
  frame.batch = in.batch;
  frame.head = in.head;
  frame.q_begin = in.q_begin;
  frame.kv_begin = in.kv_begin;
  frame.score = in.score;
  frame.score_stride = in.score_stride;
  frame.inputs = {inputs.data(), in.inputs.size()};
  frame.captures = in.captures;
  frame.scalars = in.scalars;
  frame.rows = rows;
  frame.cols = cols;
  frame.active = {active, active_stride, rows, cols};
  bool inside = true;
  const Impl::Value value = impl_->run(frame, workspace, &inside);
  if (!inside && out_of_bounds != nullptr) *out_of_bounds = true;
  const DType type = impl_->steps.back().type;
  const void* data = impl_->steps.back().op == ExprOp::kScore ? in.score : value.operand.data;
  return {data, type, value.extent, value.operand.row_step};
}

}  // namespace flexpte
