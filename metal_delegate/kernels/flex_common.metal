// FlexAttention: what prefill and decode share.
//
//   s = score(scale <q, k>), visible where the plan and mask say so;  out = sum_k softmax(s) v;  lse = log sum exp s
//
// Buffers: 1 query [B, Hq, Lq, DK], 2 key [Bk, Hkv, Lk, DK], 3 value [Bk, Hkv, Lk, DV], 4 out [B, Hq, Lq, DV],
// 5 lse [B, Hq, Lq]; the plan: 6 first query of each tile, then Lq, 7 first run of each (batch, head, tile), then
// their number, 8 runs, 9 and 10 first and last key of each (batch, head, query) for runs of kind 1; 11 and 12
// partial results (out normalised, lse) [B, Hq, Lq, splits, DV] and [B, Hq, Lq, splits] where keys are split;
// 13 views of the captures, 14 scalars, 15 and on the captures of the score, then of the mask.
//
// The keys that a tile visits are split evenly, in units of 64, over threadgroups; flex_merge puts results
// together. Scores are held in units of log 2, so that exp2 is all that softmax needs.

#define FLEX_SPLIT_KEYS 64
#define FLEX_LOG2E 1.4426950408889634f
#define FLEX_LN2 0.6931471805599453f

enum FlexRunKind { FLEX_FULL, FLEX_BOUNDS, FLEX_MASK };

struct FlexPlanView {
  constant const int* tile_begin;
  constant const int* first_run;
  constant const KeyRun* runs;
  device const int* row_begin;
  device const int* row_end;
};

// Where a row's mask and score are looked up, and what of it is known.
struct FlexRow {
  int batch;
  int head;
  int q_idx;
  int row_begin;  // for runs of kind FLEX_BOUNDS
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
  if (is_valid && plan.row_begin != nullptr) {
    const long at = long(flex_entry(params, batch, head)) * params.q_len + q_idx;
    row.row_begin = plan.row_begin[at];
    row.row_end = plan.row_end[at];
  }
  return row;
}

// The score in units of log 2, -INFINITY where it is masked. `score` is <q, k>.
template <typename Mods>
inline float flex_score(constant const FlexParams& params, thread const Mods& mods, thread const FlexRow& row,
                        int kind, int kv_idx, int kv_end, float score) {
  bool is_visible = row.is_valid && kv_idx < kv_end;
  if (kind == FLEX_BOUNDS) is_visible = is_visible && kv_idx >= row.row_begin && kv_idx < row.row_end;
  if (Mods::has_mask != 0 && kind == FLEX_MASK && is_visible) {
    is_visible = mods.mask(row.batch, row.head, row.q_idx, kv_idx);
  }
  if (!is_visible) return -INFINITY;
  float scaled = score * params.scale;
  if (Mods::has_score != 0) scaled = mods.score(scaled, row.batch, row.head, row.q_idx, kv_idx);
  return scaled * FLEX_LOG2E;
}

// The larger one; NaN of `b` is left to exp2, which makes the whole row NaN.
inline float flex_max(float a, float b) { return b > a ? b : a; }
// What is subtracted before exp2: a row that has seen nothing must not give -INFINITY - -INFINITY.
inline float flex_shift(float most) { return most == -INFINITY ? 0.0f : most; }

// The keys [begin, end) of the visited ones that are a split's, counted along the runs.
inline int2 flex_split(constant const KeyRun* runs, int first, int last, int split, int num_splits) {
  int visited = 0;
  for (int i = first; i < last; ++i) visited += runs[i].end - runs[i].begin;
  if (num_splits == 1) return int2(0, visited);
  const int units = (visited + FLEX_SPLIT_KEYS - 1) / FLEX_SPLIT_KEYS;
  const int begin = int(long(units) * split / num_splits) * FLEX_SPLIT_KEYS;
  const int end = int(long(units) * (split + 1) / num_splits) * FLEX_SPLIT_KEYS;
  return int2(min(begin, visited), min(end, visited));
}

// Puts the splits of one row together: one simdgroup a row, its lanes along DV.
template <typename TO, int DV>
inline void flex_merge(constant const FlexParams& params, device const float* partial_out,
                       device const float* partial_lse, device TO* out, device float* lse, uint3 group, uint lane) {
  const int q_idx = int(group.x);
  const int head = int(group.y);
  const int batch = int(group.z);
  const long row = (long(batch) * params.num_heads + head) * params.q_len + q_idx;
  partial_out += row * params.num_splits * DV;
  partial_lse += row * params.num_splits;
  float most = -INFINITY;
  for (int s = 0; s < params.num_splits; ++s) most = flex_max(most, partial_lse[s]);
  const float shift = flex_shift(most);
  float total = 0.0f;
  for (int s = 0; s < params.num_splits; ++s) total += precise::exp(partial_lse[s] - shift);
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;
  out += long(batch) * params.out_strides[0] + long(head) * params.out_strides[1] + long(q_idx) * params.out_strides[2];
  for (int d = int(lane); d < DV; d += 32) {
    float sum = 0.0f;
    for (int s = 0; s < params.num_splits; ++s) {
      sum += precise::exp(partial_lse[s] - shift) * partial_out[long(s) * DV + d];
    }
    out[d] = TO(sum * factor);
  }
  if (params.has_lse != 0 && lane == 0) {
    lse[long(batch) * params.lse_strides[0] + long(head) * params.lse_strides[1] +
        long(q_idx) * params.lse_strides[2]] = total == 0.0f ? -INFINITY : shift + precise::log(total);
  }
}
