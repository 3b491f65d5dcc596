// FlexAttention: what prefill and decode share.
//
//   s = score(scale <q, k>), visible where the plan and mask say so;  out = sum_k softmax(s) v;  lse = log sum exp s
//
// Buffers: 1 query [B, Hq, Lq, DK], 2 key [Bk, Hkv, Lk, DK], 3 value [Bk, Hkv, Lk, DV], 4 out [B, Hq, Lq, DV],
// 5 lse [B, Hq, Lq]; the plan: 6 first query of each tile, then Lq, 7 first run of each (batch, head, tile), then
// their number, 8 runs, 9 first key and end of each (batch, head, query) for runs of kind 1; 10 and 11 partial
// results (out normalised, lse) [B, Hq, Lq, splits, DV] and [B, Hq, Lq, splits] where keys are split; 12 views of
// the captures, 13 scalars, 14 where bad indices into captures are reported, 15 and on the captures of the score,
// then of the mask.
//
// Grid: x tiles * splits, y heads / heads_at_once, z batches. Row r of a threadgroup is query r / heads_at_once of
// the tile, head r % heads_at_once of the heads at y: all of one KV group, so that keys and values are read once.
// The keys that a tile visits are split evenly, in units of 64, over threadgroups; flex_merge puts results
// together. Scores are held in units of log 2, so that exp2 is all that softmax needs.

#define FLEX_SPLIT_KEYS 64
#define FLEX_LOG2E 1.4426950408889634f
#define FLEX_LN2 0.6931471805599453f
// Arrays indexed in these loops stay in registers.
#define FLEX_UNROLL _Pragma("clang loop unroll(full)")

enum FlexRunKind { FLEX_FULL, FLEX_BOUNDS, FLEX_MASK };

struct FlexPlanView {
  constant int* tile_begin;
  constant int* first_run;
  constant KeyRun* runs;
  device const int2* row_bounds;
};

// Element `e` of 16 bytes.
template <typename T>
inline T flex_element(uint4 words, int e) {
  return as_type<T>(ushort(words[e / 2] >> uint(16 * (e % 2))));
}
template <>
inline float flex_element<float>(uint4 words, int e) {
  return as_type<float>(words[e]);
}

// By bits: whatever the compiler takes for granted of floats.
inline bool flex_is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }
inline bool flex_is_finite(half x) { return (as_type<ushort>(x) & 0x7c00) != 0x7c00; }
inline bool flex_is_finite(bfloat x) { return (as_type<ushort>(x) & 0x7f80) != 0x7f80; }
inline bool flex_is_nan(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }

// What a row is: which query, and the keys that it sees in runs of kind FLEX_BOUNDS.
struct FlexRow {
  int batch;
  int head;
  int q_idx;
  int row_begin;
  int row_end;
  bool is_valid;
};

inline int flex_entry(constant const FlexParams& params, int batch, int head) {
  return (params.plan_batches == 1 ? 0 : batch) * params.plan_heads + (params.plan_heads == 1 ? 0 : head);
}

inline FlexRow flex_row(constant const FlexParams& params, thread const FlexPlanView& plan, int batch, int head,
                        int q_idx, bool is_valid) {
  FlexRow row;
  row.batch = batch;
  row.head = head;
  row.q_idx = q_idx;
  row.is_valid = is_valid;
  row.row_begin = 0;
  row.row_end = 0;
  if (is_valid && params.has_row_bounds != 0) {
    const long at = long(flex_entry(params, batch, head)) * params.q_len + q_idx;
    const int2 bounds = plan.row_bounds[at];
    row.row_begin = bounds.x;
    row.row_end = bounds.y;
  }
  return row;
}

// The keys of [begin, end) that the row may see by the plan; in runs of kind FLEX_MASK the mask decides as well.
inline int2 flex_visible(thread const FlexRow& row, int kind, int begin, int end) {
  if (!row.is_valid) return int2(begin, begin);
  if (kind == FLEX_BOUNDS) return int2(max(begin, row.row_begin), min(end, row.row_end));
  return int2(begin, end);
}

// Whether the row sees a key that flex_visible lets through.
template <typename Mods>
inline bool flex_is_visible(thread const Mods& mods, thread const FlexRow& row, int kind, int kv_idx) {
  if (Mods::has_mask == 0 || kind != FLEX_MASK) return true;
  return mods.mask(row.batch, row.head, row.q_idx, kv_idx);
}

// The score of a visible key, in units of log 2. `score` is <q, k>.
template <typename Mods>
inline float flex_score(constant const FlexParams& params, thread const Mods& mods, thread const FlexRow& row,
                        int kv_idx, float score) {
  if (Mods::has_score == 0) return score * (params.scale * FLEX_LOG2E);
  return mods.score(score * params.scale, row.batch, row.head, row.q_idx, kv_idx) * FLEX_LOG2E;
}

// The larger one; NaN of `b` is left to exp2, which makes the whole row NaN.
inline float flex_max(float a, float b) { return b > a ? b : a; }
// What is subtracted before exp2: a row that has seen nothing must not give -INFINITY - -INFINITY.
inline float flex_shift(float most) { return most == -INFINITY ? 0.0f : most; }

// The keys [begin, end) of the visited ones that are a split's, counted along the runs.
inline int2 flex_split(constant KeyRun* runs, int first, int last, int split, int num_splits) {
  if (num_splits == 1) return int2(0, 0x7fffffff);
  int visited = 0;
  for (int i = first; i < last; ++i) visited += runs[i].end - runs[i].begin;
  const int units = (visited + FLEX_SPLIT_KEYS - 1) / FLEX_SPLIT_KEYS;
  const int begin = int(long(units) * split / num_splits) * FLEX_SPLIT_KEYS;
  const int end = int(long(units) * (split + 1) / num_splits) * FLEX_SPLIT_KEYS;
  return int2(min(begin, visited), min(end, visited));
}

// The part of a run, `visited` keys behind the first visited one, that is a split's.
inline int2 flex_part(constant const KeyRun& run, int2 mine, int visited) {
  const int size = run.end - run.begin;
  return int2(run.begin + clamp(mine.x - visited, 0, size), run.begin + clamp(mine.y - visited, 0, size));
}

// Of a row's element in the partial results.
inline long flex_partial(constant const FlexParams& params, thread const FlexRow& row, int split) {
  return ((long(row.batch) * params.num_heads + row.head) * params.q_len + row.q_idx) * params.num_splits + split;
}

inline long flex_offset(constant const long* strides, thread const FlexRow& row) {
  return long(row.batch) * strides[0] + long(row.head) * strides[1] + long(row.q_idx) * strides[2];
}

// Puts the splits of one row together: one simdgroup a row, its lanes along the splits, then along DV.
template <typename TO, int DV>
inline void flex_merge(constant const FlexParams& params, device const float* partial_out,
                       device const float* partial_lse, device TO* out, device float* lse, uint3 group, uint lane) {
  FlexRow row;
  row.q_idx = int(group.x);
  row.head = int(group.y);
  row.batch = int(group.z);
  partial_out += flex_partial(params, row, 0) * DV;
  partial_lse += flex_partial(params, row, 0);
  const int num_splits = params.num_splits;
  float most = -INFINITY;
  for (int s = int(lane); s < num_splits; s += 32) most = flex_max(most, partial_lse[s]);
  most = flex_max(most, simd_max(most));
  const float shift = flex_shift(most);
  float sums[(DV + 31) / 32];
  FLEX_UNROLL
  for (int d = 0; d < (DV + 31) / 32; ++d) sums[d] = 0.0f;
  float total = 0.0f;
  for (int begin = 0; begin < num_splits; begin += 32) {
    float weight = 0.0f;
    if (begin + int(lane) < num_splits) weight = precise::exp(partial_lse[begin + int(lane)] - shift);
    total += weight;
    for (int s = 0; s < min(32, num_splits - begin); ++s) {
      const float factor = simd_shuffle(weight, ushort(s));
      FLEX_UNROLL
      for (int d = 0; d < (DV + 31) / 32; ++d) {
        const int column = 32 * d + int(lane);
        if (column < DV) sums[d] = fma(factor, partial_out[long(begin + s) * DV + column], sums[d]);
      }
    }
  }
  total = simd_sum(total);
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  out += flex_offset(params.out_strides, row);
  FLEX_UNROLL
  for (int d = 0; d < (DV + 31) / 32; ++d) {
    const int column = 32 * d + int(lane);
    if (column < DV) out[column * params.out_strides[3]] = TO(sums[d] * factor);
  }
  if (params.has_lse != 0 && lane == 0) {
    lse[flex_offset(params.lse_strides, row)] = total == 0.0f ? -INFINITY : shift + precise::log(total);
  }
}
