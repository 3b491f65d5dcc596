// Decode: the same attention as prefill for a few queries per head, bound by reading K and V.
//
// Rows are (query head of one KV head, query); vectors run along the head dimension, so K and V are
// read as they lie in memory, once for all rows. Where there are fewer KV heads than threads want,
// the keys are split and the parts are merged by their log-sum-exp.
//
//   for each unit (batch, KV head, part of the keys that the plan has), handed out to threads:
//     for each chunk of keys:
//       S := Q K^T, four keys at a time; the score expression; -inf where masked
//       m' := max(m, max_k S); P := exp(S - m'); l := l exp(m - m') + sum_k P
//       O := O exp(m - m') + P V
//     part := O / l, m + log(l)
//   out := sum over parts of exp(lse_part - lse) part
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "metal_delegate/flex_kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "metal_delegate/flex_decode.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "metal_delegate/flex_decode-inl.h"
#include "metal_delegate/flex_simd-inl.h"

#ifndef FLEXPTE_FLEX_DECODE_SHARED
#define FLEXPTE_FLEX_DECODE_SHARED
namespace flexpte {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896340736f;

// Units that each thread should get, and keys below which a part is not worth its merging.
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kMinPartKeys = 256;

int64_t round_up(int64_t n) {
  return (n + 15) / 16 * 16;
}

int64_t max_rows(const FlexShape& shape) {
  return std::max<int64_t>(1, shape.group()) * std::min(shape.num_queries, kFlexMaxDecodeQueries);
}

// Scratch of one thread.
struct DecodeScratch {
  float* queries;     // [rows, round_up(key_dim)], zeros after key_dim
  float* outputs;     // [rows, round_up(value_dim)]
  float* max;         // [rows]
  float* sum;         // [rows]
  float* correction;  // [rows]
  float* scores;      // [rows, kFlexKeyChunk]
  float* keys;        // [kFlexKeyChunk, key_dim]
  float* values;      // [kFlexKeyChunk, value_dim]
  uint8_t* visible;   // [rows, kFlexKeyChunk]
  std::span<std::byte> mods;

  DecodeScratch(WorkspaceCarver& carver, const FlexShape& shape, const FlexMods& call_mods) {
    const int64_t rows = max_rows(shape);
    queries = carver.take<float>(rows * round_up(shape.key_dim));
    outputs = carver.take<float>(rows * round_up(shape.value_dim));
    max = carver.take<float>(rows);
    sum = carver.take<float>(rows);
    correction = carver.take<float>(rows);
    scores = carver.take<float>(rows * kFlexKeyChunk);
    keys = carver.take<float>(kFlexKeyChunk * shape.key_dim);
    values = carver.take<float>(kFlexKeyChunk * shape.value_dim);
    visible = carver.take<uint8_t>(rows * kFlexKeyChunk);
    const int64_t mod_rows = std::min(shape.num_queries, kFlexMaxDecodeQueries);
    const size_t bytes = flex_mods_workspace_bytes(call_mods, mod_rows, kFlexKeyChunk);
    mods = {carver.take<std::byte>(static_cast<int64_t>(bytes)), bytes};
  }
};

size_t scratch_bytes(const FlexShape& shape, const FlexMods& mods) {
  WorkspaceCarver carver;
  const DecodeScratch scratch(carver, shape, mods);
  return carver.used_bytes();
}

// Parts per (batch, head set) before the number of keys limits them.
int64_t max_parts(int64_t sets, int num_threads) {
  const int64_t wanted = kUnitsPerThread * num_threads;
  return num_threads == 1 || sets <= 0 ? 1 : std::max<int64_t>(1, (wanted + sets - 1) / sets);
}

// Results of all parts, to be merged; unused when there is one.
struct DecodeParts {
  int64_t count = 1;
  float* outputs = nullptr;      // [batch, head, query, part, value_dim], divided by their sums
  float* log_sum_exp = nullptr;  // [batch, head, query, part], natural logarithm
};

}  // namespace
}  // namespace flexpte
#endif

HWY_BEFORE_NAMESPACE();
namespace flexpte {
namespace HWY_NAMESPACE {
namespace {

static_assert(16 % kLanes == 0 && kFlexKeyChunk % kLanes == 0);

// A unit works on query heads [first_head, first_head + num_heads), which share one KV head and one
// list of runs.
template <class T>
class DecodeUnit {
 public:
  DecodeUnit(const FlexCall& call, const DecodeScratch& scratch, const DecodeParts& parts)
      : call_(call),
        shape_(call.shape),
        args_(call.args),
        scratch_(scratch),
        parts_(parts),
        mods_(call, scratch.mods),
        log2_scale_(call.mods.score == nullptr ? 1.0f : kLog2e),
        query_stride_(round_up(call.shape.key_dim)),
        output_stride_(round_up(call.shape.value_dim)) {}

  void run(int64_t batch, int64_t first_head, int64_t num_heads, int64_t part) {
    batch_ = batch;
    first_head_ = first_head;
    num_heads_ = num_heads;
    num_rows_ = num_heads * shape_.num_queries;
    entry_ = call_.plan.entry(batch, first_head);
    std::fill_n(scratch_.max, num_rows_, -kInfinity);
    std::fill_n(scratch_.sum, num_rows_, 0.0f);
    std::fill_n(scratch_.outputs, num_rows_ * output_stride_, 0.0f);
    load_queries();
    for (int64_t tile = 0; tile < call_.plan.num_tiles(); ++tile) visit_tile(tile, part);
    for (int64_t r = 0; r < num_rows_; ++r) write_row(r, part);
  }

 private:
  int64_t head_of(int64_t row) const { return first_head_ + row / shape_.num_queries; }
  int64_t query_of(int64_t row) const { return row % shape_.num_queries; }

  void load_queries() {
    const TensorView& query = args_.query;
    const float scale = call_.mods.score == nullptr ? call_.scale * kLog2e : call_.scale;
    for (int64_t r = 0; r < num_rows_; ++r) {
      const T* source =
          query.as<const T>() + batch_ * query.stride(0) + head_of(r) * query.stride(1) + query_of(r) * query.stride(2);
      float* row = scratch_.queries + r * query_stride_;
      for (int64_t i = 0; i < shape_.key_dim; ++i)
        row[i] = scale * static_cast<float>(widen(source[i * query.stride(3)]));
      std::fill(row + shape_.key_dim, row + query_stride_, 0.0f);
    }
  }

  // The share of `part` in all keys that the tile visits, counted along its runs.
  void visit_tile(int64_t tile, int64_t part) {
    tile_begin_ = call_.plan.tile_begin[static_cast<size_t>(tile)];
    tile_end_ = call_.plan.tile_begin[static_cast<size_t>(tile) + 1];
    const auto runs = call_.plan.tile_runs(entry_, tile);
    int64_t total = 0;
    for (const KeyRun& run : runs) total += run.end - run.begin;
    const int64_t share = (total + parts_.count - 1) / parts_.count;
    const int64_t first = part * share;
    const int64_t last = std::min(total, first + share);
    int64_t offset = 0;
    for (const KeyRun& run : runs) {
      const int64_t begin = std::max<int64_t>(run.begin, run.begin + first - offset);
      const int64_t end = std::min<int64_t>(run.end, run.begin + last - offset);
      for (int64_t k = begin; k < end; k += kFlexKeyChunk) visit(run.kind, k, std::min(end, k + kFlexKeyChunk));
      offset += run.end - run.begin;
    }
  }

  template <class F>
  void for_each_head(const F& f) {
    for (int64_t h = 0; h < num_heads_; ++h) f(h, h * shape_.num_queries + tile_begin_);
  }

  void visit(RunKind kind, int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    const int64_t queries = tile_end_ - tile_begin_;
    const bool masked = kind != RunKind::kFull && mark_visible(kind, begin, end);
    const int64_t b = args_.key.size(0) == 1 ? 0 : batch_;
    const int64_t kv_head = first_head_ / shape_.group();
    const T* keys =
        args_.key.as<const T>() + b * args_.key.stride(0) + kv_head * args_.key.stride(1) + begin * args_.key.stride(2);
    const T* values = args_.value.as<const T>() + b * args_.value.stride(0) + kv_head * args_.value.stride(1) +
                      begin * args_.value.stride(2);
    // Widened once where many rows, or elements that are apart, would have to be widened again.
    const bool many = num_heads_ * queries > kDecodeRows && !std::is_same_v<T, float>;
    if (many || args_.key.stride(3) != 1) {
      widen_rows(keys, args_.key.stride(2), args_.key.stride(3), count, shape_.key_dim, scratch_.keys, shape_.key_dim);
      score_keys(scratch_.keys, shape_.key_dim, count);
    } else {
      score_keys(keys, args_.key.stride(2), count);
    }
    if (call_.mods.score != nullptr) {
      for_each_head([&](int64_t h, int64_t row) {
        mods_.score({batch_, first_head_ + h, tile_begin_, begin, queries, count}, scores_of(row), kFlexKeyChunk,
                    masked ? visible_of(row) : nullptr, kFlexKeyChunk);
      });
    }
    for_each_head([&](int64_t, int64_t row) {
      for (int64_t r = row; r < row + queries; ++r) soften(r, count, masked);
    });
    if (many || args_.value.stride(3) != 1) {
      widen_rows(values, args_.value.stride(2), args_.value.stride(3), count, shape_.value_dim, scratch_.values,
                 shape_.value_dim);
      add_values(scratch_.values, shape_.value_dim, count, masked);
    } else {
      add_values(values, args_.value.stride(2), count, masked);
    }
  }

  float* scores_of(int64_t row) const { return scratch_.scores + row * kFlexKeyChunk; }
  uint8_t* visible_of(int64_t row) const { return scratch_.visible + row * kFlexKeyChunk; }

  // Which rows see which keys of the chunk; false when all see all.
  bool mark_visible(RunKind kind, int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    const int64_t queries = tile_end_ - tile_begin_;
    bool masked = true;
    if (kind == RunKind::kMask) {
      mods_.mask({batch_, first_head_, tile_begin_, begin, queries, count}, visible_of(tile_begin_), kFlexKeyChunk);
    } else {
      masked = false;
      const int64_t row0 = entry_ * call_.plan.num_queries;
      for (int64_t q = tile_begin_; q < tile_end_; ++q) {
        const int64_t row_begin = call_.plan.row_begin[static_cast<size_t>(row0 + q)] - begin;
        const int64_t row_end = call_.plan.row_end[static_cast<size_t>(row0 + q)] - begin;
        const int64_t first = std::clamp<int64_t>(row_begin, 0, count);
        const int64_t last = std::clamp<int64_t>(row_end, first, count);
        masked = masked || first != 0 || last != count;
        uint8_t* visible = visible_of(q);
        std::fill(visible, visible + first, uint8_t{0});
        std::fill(visible + first, visible + last, uint8_t{1});
        std::fill(visible + last, visible + count, uint8_t{0});
      }
    }
    if (!masked) return false;
    // The first head's rows hold for all: heads that differ are units of their own.
    for (int64_t h = 1; h < num_heads_; ++h) {
      for (int64_t q = tile_begin_; q < tile_end_; ++q) {
        std::memcpy(visible_of(h * shape_.num_queries + q), visible_of(q), static_cast<size_t>(count));
      }
    }
    return true;
  }

  template <class U>
  void score_keys(const U* keys, int64_t stride, int64_t count) {
    for_each_row_block([&](auto rows, int64_t row) {
      multiply_decode_keys<decltype(rows)::value>(keys, stride, shape_.key_dim, count,
                                                  scratch_.queries + row * query_stride_, query_stride_, scores_of(row),
                                                  kFlexKeyChunk);
    });
  }

  // Calls f with the number of rows (a constant) and the first row of each block of rows.
  template <class F>
  void for_each_row_block(const F& f) {
    const auto blocks = [&](int64_t begin, int64_t end) {
      int64_t r = begin;
      for (; r + kDecodeRows <= end; r += kDecodeRows) f(std::integral_constant<int, kDecodeRows>(), r);
      switch (end - r) {
        case 3:
          f(std::integral_constant<int, 3>(), r);
          break;
        case 2:
          f(std::integral_constant<int, 2>(), r);
          break;
        case 1:
          f(std::integral_constant<int, 1>(), r);
          break;
        default:
          break;
      }
    };
    const int64_t queries = tile_end_ - tile_begin_;
    if (queries == shape_.num_queries) {
      blocks(0, num_rows_);
    } else {
      for_each_head([&](int64_t, int64_t row) { blocks(row, row + queries); });
    }
  }

  // Scores of one row to weights exp(score - maximum); its maximum, sum and correction follow.
  void soften(int64_t row, int64_t count, bool masked) {
    const DF d;
    float* scores = scores_of(row);
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    if (masked) {
      const uint8_t* visible = visible_of(row);
      for (int64_t k = 0; k < count; ++k) scores[k] = visible[k] != 0 ? scores[k] : -kInfinity;
    }
    std::fill(scores + count, scores + padded, -kInfinity);
    VF max = hn::Set(d, scratch_.max[row]);
    for (int64_t k = 0; k < padded; k += kLanes) max = hn::Max(max, hn::LoadU(d, scores + k));
    max = hn::MaxOfLanes(d, max);
    const VF scale = hn::Set(d, log2_scale_);
    // While nothing is visible the maximum is -inf, and -inf - -inf would be NaN.
    const VF safe_max = hn::IfThenZeroElse(hn::Eq(max, hn::Set(d, -kInfinity)), max);
    const VF old_max = hn::Set(d, scratch_.max[row]);
    const VF correction = exp2_nonpositive(d, hn::Mul(hn::Sub(old_max, safe_max), scale));
    VF sum = hn::Zero(d);
    for (int64_t k = 0; k < padded; k += kLanes) {
      const VF p = exp2_nonpositive(d, hn::Mul(hn::Sub(hn::LoadU(d, scores + k), safe_max), scale));
      sum = hn::Add(sum, p);
      hn::StoreU(p, d, scores + k);
    }
    scratch_.max[row] = hn::GetLane(max);
    scratch_.correction[row] = hn::GetLane(correction);
    scratch_.sum[row] = scratch_.sum[row] * hn::GetLane(correction) + sum_of_lanes(d, sum);
  }

  template <class U>
  void add_values(const U* values, int64_t stride, int64_t count, bool masked) {
    if (masked && !all_finite(values, stride, count, shape_.value_dim)) {
      add_visible_values(values, stride, count);
      return;
    }
    for_each_row_block([&](auto rows, int64_t row) {
      multiply_decode_values<decltype(rows)::value>(values, stride, shape_.value_dim, count, scores_of(row),
                                                    kFlexKeyChunk, scratch_.correction + row,
                                                    scratch_.outputs + row * output_stride_, output_stride_);
    });
  }

  // Where a key is masked, its weight 0 must not meet an infinity or NaN.
  template <class U>
  void add_visible_values(const U* values, int64_t stride, int64_t count) {
    const int64_t queries = tile_end_ - tile_begin_;
    const DecodeLayout layout(shape_.value_dim);
    for_each_head([&](int64_t, int64_t first_row) {
      for (int64_t r = first_row; r < first_row + queries; ++r) {
        float* outputs = scratch_.outputs + r * output_stride_;
        for (int64_t i = 0; i < output_stride_; ++i) outputs[i] *= scratch_.correction[r];
        for (int64_t k = 0; k < count; ++k) {
          if (visible_of(r)[k] == 0) continue;
          const float p = scores_of(r)[k];
          for (int64_t i = 0; i < shape_.value_dim; ++i) {
            outputs[layout.position(i)] += p * static_cast<float>(widen(values[k * stride + i]));
          }
        }
      }
    });
  }

  void write_row(int64_t row, int64_t part) const {
    const float sum = scratch_.sum[row];
    const bool empty = sum == 0.0f;
    const float max = scratch_.max[row] * (call_.mods.score == nullptr ? 1.0f / kLog2e : 1.0f);
    const float lse = empty ? -kInfinity : max + std::log(sum);
    float* outputs = scratch_.outputs + row * output_stride_;
    for (int64_t i = 0; i < output_stride_; ++i) outputs[i] = empty ? 0.0f : outputs[i] / sum;
    const int64_t dim = shape_.value_dim;
    const int64_t h = head_of(row);
    const int64_t q = query_of(row);
    const DecodeLayout layout(dim);
    if (parts_.count > 1) {
      const int64_t at = ((batch_ * shape_.num_heads + h) * shape_.num_queries + q) * parts_.count + part;
      parts_.log_sum_exp[at] = lse;
      for (int64_t i = 0; i < dim; ++i) parts_.outputs[at * dim + i] = outputs[layout.position(i)];
      return;
    }
    const TensorView& out = args_.out;
    T* target = out.as<T>() + batch_ * out.stride(0) + h * out.stride(1) + q * out.stride(2);
    for (int64_t i = 0; i < dim; ++i) target[i] = convert<T>(outputs[layout.position(i)]);
    if (args_.lse.data != nullptr) {
      const TensorView& view = args_.lse;
      view.as<float>()[batch_ * view.stride(0) + h * view.stride(1) + q * view.stride(2)] = lse;
    }
  }

  const FlexCall& call_;
  const FlexShape& shape_;
  const FlexAttentionArgs& args_;
  const DecodeScratch& scratch_;
  const DecodeParts& parts_;
  const FlexTileMods mods_;
  const float log2_scale_;
  const int64_t query_stride_, output_stride_;
  int64_t batch_ = 0, first_head_ = 0, num_heads_ = 0, num_rows_ = 0, entry_ = 0, tile_begin_ = 0, tile_end_ = 0;
};

// out = sum_part w_part part / sum_part w_part, w_part = exp(lse_part - max lse).
template <class T>
void merge_row(const FlexCall& call, const DecodeParts& parts, int64_t row) {
  const FlexShape& shape = call.shape;
  const int64_t dim = shape.value_dim;
  const int64_t q = row % shape.num_queries;
  const int64_t h = row / shape.num_queries % shape.num_heads;
  const int64_t b = row / shape.num_queries / shape.num_heads;
  const float* lse = parts.log_sum_exp + row * parts.count;
  float* merged = parts.outputs + row * parts.count * dim;  // part 0 becomes the result
  const float max = *std::max_element(lse, lse + parts.count);
  float sum = 0.0f;
  for (int64_t part = 0; part < parts.count; ++part) {
    const float* output = merged + part * dim;
    // A part that sees nothing has weight 0 even where no part sees anything; NaN stays.
    const float weight = lse[part] == -kInfinity ? 0.0f : std::exp(lse[part] - max);
    sum += weight;
    for (int64_t i = 0; i < dim; ++i) merged[i] = (part == 0 ? 0.0f : merged[i]) + weight * output[i];
  }
  const bool empty = sum == 0.0f;
  const TensorView& out = call.args.out;
  T* target = out.as<T>() + b * out.stride(0) + h * out.stride(1) + q * out.stride(2);
  for (int64_t i = 0; i < dim; ++i) target[i] = convert<T>(empty ? 0.0f : merged[i] / sum);
  if (call.args.lse.data != nullptr) {
    const TensorView& view = call.args.lse;
    view.as<float>()[b * view.stride(0) + h * view.stride(1) + q * view.stride(2)] =
        empty ? -kInfinity : max + std::log(sum);
  }
}

template <class T>
void decode(const FlexCall& call, int64_t heads_per_set, DecodeParts parts, std::span<std::byte> scratch_memory) {
  const FlexShape& shape = call.shape;
  const size_t thread_bytes = scratch_bytes(shape, call.mods);
  const int64_t sets = shape.num_heads / heads_per_set;
  call.pool.parallel_for(shape.batch * sets * parts.count, 1, [&](int64_t begin, int64_t end, int thread) {
    WorkspaceCarver carver(scratch_memory.subspan(static_cast<size_t>(thread) * thread_bytes, thread_bytes));
    const DecodeScratch scratch(carver, shape, call.mods);
    DecodeUnit<T> unit(call, scratch, parts);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t set = i / parts.count % sets;
      unit.run(i / parts.count / sets, set * heads_per_set, heads_per_set, i % parts.count);
    }
  });
  if (parts.count == 1) return;
  const int64_t rows = shape.batch * shape.num_heads * shape.num_queries;
  for (int64_t row = 0; row < rows; ++row) merge_row<T>(call, parts, row);
}

void decode_any(const FlexCall& call, int64_t heads_per_set, const DecodeParts& parts,
                std::span<std::byte> scratch_memory) {
  with_float_type(call.args.query.dtype,
                  [&](auto type) { decode<decltype(type)>(call, heads_per_set, parts, scratch_memory); });
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace flexpte
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flexpte {
HWY_EXPORT(decode_any);

namespace {

DecodeParts take_parts(WorkspaceCarver& carver, const FlexShape& shape, int64_t rows, int64_t count) {
  DecodeParts parts;
  parts.count = count;
  if (count == 1) return parts;
  parts.outputs = carver.take<float>(rows * count * shape.value_dim);
  parts.log_sum_exp = carver.take<float>(rows * count);
  return parts;
}

}  // namespace

size_t flex_decode_workspace_bytes(const FlexShape& shape, const FlexMods& mods, int num_threads) {
  size_t parts_bytes = 0;
  if (num_threads > 1) {
    // There are parts only while sets < wanted, so that sets * max_parts(sets) < 2 wanted, whatever
    // part of the batch is used; a set has at most max_rows.
    WorkspaceCarver carver;
    take_parts(carver, shape, max_rows(shape), 2 * kUnitsPerThread * num_threads);
    parts_bytes = carver.used_bytes();
  }
  return parts_bytes + scratch_bytes(shape, mods) * static_cast<size_t>(num_threads);
}

void flex_decode(const FlexCall& call) {
  const FlexShape& shape = call.shape;
  const int64_t heads_per_set = call.plan.num_heads > 1 ? 1 : shape.group();
  const int64_t sets = shape.batch * shape.num_heads / heads_per_set;
  int64_t most_keys = 0;
  for (int64_t entry = 0; entry < call.plan.num_batches * call.plan.num_heads; ++entry) {
    int64_t keys = 0;
    for (int64_t tile = 0; tile < call.plan.num_tiles(); ++tile) {
      for (const KeyRun& run : call.plan.tile_runs(entry, tile)) keys += run.end - run.begin;
    }
    most_keys = std::max(most_keys, keys);
  }
  const int64_t count = std::clamp<int64_t>(most_keys / kMinPartKeys, 1, max_parts(sets, call.pool.num_threads()));
  WorkspaceCarver carver(call.workspace);
  const DecodeParts parts = take_parts(carver, shape, shape.batch * shape.num_heads * shape.num_queries, count);
  HWY_DYNAMIC_DISPATCH(decode_any)(call, heads_per_set, parts, call.workspace.subspan(carver.used_bytes()));
}

}  // namespace flexpte
#endif  // HWY_ONCE
