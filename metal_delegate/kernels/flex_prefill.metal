// FlexAttention with 8 x 8 matrices. A threadgroup has 8 * ROW_BLOCKS * ROW_GROUPS rows: queries of one tile, of one
// head or of several heads of a KV group. Each simdgroup has 8 * ROW_BLOCKS of the rows; where head dims are large,
// DIM_GROUPS simdgroups share these rows, each with its part of DK and of DV, so that queries and results fit in
// registers.
//
// For each run of keys that the plan names, KEYS at a time:
//   stage the keys in threadgroup memory, once for all rows; S = Q K^T; with several DIM_GROUPS: exchange and add
//   scores, mask and online softmax in registers: a lane has two neighbours of one row in each matrix, and the
//   lanes that share the row differ in bits 0 and 3
//   stage the values in the same memory; O = O * rescale + P V
// Tiles that no row sees are not in the plan; full runs evaluate no mask; matrices of 8 keys that no row of a
// simdgroup sees by the plan's bounds are skipped. Rows of keys beyond the end are staged as zeros and their scores
// masked, so that nothing beyond a cache's length is read; and what a masked value is does not matter, infinities
// and NaN included.

// KEYS rows of WIDTH elements of a row-major tensor, DIM of each row, into threadgroup memory; zeros elsewhere. True
// when all are finite (looked at only where `is_watched`).
template <typename T, typename TS, int DIM, int WIDTH, int PITCH, int KEYS, int THREADS>
inline bool flex_stage(device const T* source, long stride, long column_stride, int num_rows, bool is_vectorizable,
                       bool is_watched, threadgroup TS* staged, uint thread_index) {
  enum { PIECE = 16 / int(sizeof(T)) };
  bool is_finite = true;
  if (is_vectorizable && DIM % PIECE == 0) {
    for (int i = int(thread_index); i < KEYS * (WIDTH / PIECE); i += THREADS) {
      const int row = i / (WIDTH / PIECE);
      const int column = i % (WIDTH / PIECE) * PIECE;
      uint4 words = uint4(0);
      if (row < num_rows && column < DIM) words = *(device const uint4*)(source + long(row) * stride + column);
      threadgroup TS* target = staged + row * PITCH + column;
      if (is_same_v<T, TS>) *(threadgroup uint4*)target = words;
      if (is_same_v<T, TS> && !is_watched) continue;
      FLEX_UNROLL
      for (int e = 0; e < PIECE; ++e) {
        const T element = flex_element<T>(words, e);
        if (!is_same_v<T, TS>) target[e] = TS(element);
        is_finite = is_finite && flex_is_finite(element);
      }
    }
  } else {
    for (int i = int(thread_index); i < KEYS * WIDTH; i += THREADS) {
      const int row = i / WIDTH;
      const int column = i % WIDTH;
      T element = T(0.0f);
      if (row < num_rows && column < DIM) element = source[long(row) * stride + long(column) * column_stride];
      staged[row * PITCH + column] = TS(element);
      if (is_watched) is_finite = is_finite && flex_is_finite(element);
    }
  }
  return is_finite;
}

// What is not finite in values: one number for 8 x 8 of them and the rows that see them, which a product of
// matrices adds up: NaN counts 1, infinities 2^6, negative ones 2^12, each times 2^18 where the weight is zero.
#define FLEX_ZERO_WEIGHT 262144.0f
inline float flex_not_finite(float x) {
  if (flex_is_finite(x)) return 0.0f;
  if (flex_is_nan(x)) return 1.0f;
  return x > 0.0f ? 64.0f : 4096.0f;
}
inline float flex_from_not_finite(float count) {
  if (count == 0.0f) return 0.0f;
  if (count >= FLEX_ZERO_WEIGHT) return NAN;
  const int counts = int(count);
  if ((counts & 63) != 0) return NAN;
  if ((counts >> 6) == 0) return 0.0f;
  if (((counts >> 6) & 63) != 0) return (counts >> 12) != 0 ? NAN : INFINITY;
  return -INFINITY;
}

// TS: what keys and values are staged as, and queries converted to. KEYS is a multiple of 8. `staged` has room for
// KEYS rows of the wider of DK and DV, rounded up to 8 * DIM_GROUPS, and 16 bytes each; `shared` for a float for each
// simdgroup and, with several DIM_GROUPS, 8 * ROW_BLOCKS * KEYS more.
template <typename TQ, typename T, typename TO, typename TS, int DK, int DV, int ROW_GROUPS, int ROW_BLOCKS,
          int DIM_GROUPS, int KEYS, typename Mods>
inline void flex_prefill(constant const FlexParams& params, device const TQ* query, device const T* key,
                         device const T* value, device TO* out, device float* lse, thread const FlexPlanView& plan,
                         device float* partial_out, device float* partial_lse, thread const Mods& mods,
                         threadgroup TS* staged, threadgroup float* shared, uint3 group, uint thread_index, uint lane,
                         uint simdgroup) {
  enum {
    STEP = 8 * DIM_GROUPS,
    K_BLOCKS = (DK + STEP - 1) / STEP,  // matrices along the part of DK, of DV
    V_BLOCKS = (DV + STEP - 1) / STEP,
    WIDTH_K = K_BLOCKS * STEP,
    WIDTH_V = V_BLOCKS * STEP,
    PITCH = (WIDTH_K > WIDTH_V ? WIDTH_K : WIDTH_V) + 16 / int(sizeof(TS)),  // spreads rows over memory banks
    SIMDGROUPS = ROW_GROUPS * DIM_GROUPS,
    THREADS = 32 * SIMDGROUPS,
    NUM_KEYS = KEYS / 8
  };
  // The last tiles of a causal mask are the longest: they start first.
  const int tile = params.num_tiles - 1 - int(group.x) / params.num_splits;
  const int split = int(group.x) % params.num_splits;
  const int first_head = int(group.y) * params.heads_at_once;
  const int batch = int(group.z);
  const int kv_head = first_head / (params.num_heads / params.num_kv_heads);
  const int kv_batch = params.has_kv_batch != 0 ? batch : 0;
  const int q_begin = plan.tile_begin[tile];
  const int q_end = plan.tile_begin[tile + 1];

  const int matrix_row = int((lane / 4) & 4) + int(lane / 2) % 4;
  const int matrix_column = int((lane / 4) & 2) * 2 + int(lane % 2) * 2;
  const int row_group = int(simdgroup) / DIM_GROUPS;
  const int dim_group = int(simdgroup) % DIM_GROUPS;
  const int first_k = dim_group * K_BLOCKS * 8;
  const int first_v = dim_group * V_BLOCKS * 8;

  FlexRow rows[ROW_BLOCKS];
  simdgroup_matrix<TS, 8, 8> queries[ROW_BLOCKS][K_BLOCKS];
  simdgroup_matrix<float, 8, 8> sums[ROW_BLOCKS][V_BLOCKS];
  float most[ROW_BLOCKS];
  float total[ROW_BLOCKS];
  int lowest = 0x7fffffff;  // keys that rows of this simdgroup see in runs of kind FLEX_BOUNDS
  int highest = 0;
  bool has_rows = false;
  FLEX_UNROLL
  for (int r = 0; r < ROW_BLOCKS; ++r) {
    const int row_number = (row_group * ROW_BLOCKS + r) * 8 + matrix_row;
    const int q_idx = q_begin + row_number / params.heads_at_once;
    rows[r] = flex_row(params, plan, batch, first_head + row_number % params.heads_at_once, q_idx, q_idx < q_end);
    has_rows = has_rows || rows[r].is_valid;
    if (rows[r].row_begin < rows[r].row_end) {
      lowest = min(lowest, rows[r].row_begin);
      highest = max(highest, rows[r].row_end);
    }
    most[r] = -INFINITY;
    total[r] = 0.0f;
    device const TQ* query_row = query + flex_offset(params.query_strides, rows[r]);
    FLEX_UNROLL
    for (int d = 0; d < K_BLOCKS; ++d) {
      FLEX_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int at = first_k + 8 * d + matrix_column + e;
        TS element = TS(0.0f);
        if (rows[r].is_valid && at < DK) element = TS(query_row[at * params.query_strides[3]]);
        queries[r][d].thread_elements()[e] = element;
      }
    }
    FLEX_UNROLL
    for (int d = 0; d < V_BLOCKS; ++d) sums[r][d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  lowest = simd_min(lowest);
  highest = simd_max(highest);
  has_rows = simd_any(has_rows);

  key += long(kv_batch) * params.key_strides[0] + long(kv_head) * params.key_strides[1];
  value += long(kv_batch) * params.value_strides[0] + long(kv_head) * params.value_strides[1];
  const bool is_vectorizable = params.is_vectorizable != 0;
  const int entry = flex_entry(params, batch, first_head) * params.num_tiles + tile;
  const int first_run = plan.first_run[entry];
  const int last_run = plan.first_run[entry + 1];
  const int2 mine = flex_split(plan.runs, first_run, last_run, split, params.num_splits);
  int visited = 0;
  for (int r = first_run; r < last_run; ++r) {
    const int kind = plan.runs[r].kind;
    const int2 part = flex_part(plan.runs[r], mine, visited);
    visited += plan.runs[r].end - plan.runs[r].begin;
    for (int begin = part.x; begin < part.y; begin += KEYS) {
      const int end = min(begin + KEYS, part.y);
      const int num_keys = end - begin;
      // Matrices of keys first_key <= j < last_key are this simdgroup's to see.
      int first_key = 0;
      int last_key = has_rows ? (num_keys + 7) / 8 : 0;
      if (kind == FLEX_BOUNDS) {
        first_key = clamp(lowest - begin, 0, int(KEYS)) / 8;
        last_key = min(last_key, (clamp(highest - begin, 0, int(KEYS)) + 7) / 8);
      }
      const bool is_idle = first_key >= last_key;

      threadgroup_barrier(mem_flags::mem_threadgroup);
      flex_stage<T, TS, DK, WIDTH_K, PITCH, KEYS, THREADS>(key + long(begin) * params.key_strides[2],
                                                           params.key_strides[2], params.key_strides[3], num_keys,
                                                           is_vectorizable, false, staged, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_matrix<float, 8, 8> scores[ROW_BLOCKS][NUM_KEYS];
      FLEX_UNROLL
      for (int j = 0; j < NUM_KEYS; ++j) {
        FLEX_UNROLL
        for (int b = 0; b < ROW_BLOCKS; ++b) scores[b][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        if (j >= first_key && j < last_key) {
          FLEX_UNROLL
          for (int d = 0; d < K_BLOCKS; ++d) {
            simdgroup_matrix<TS, 8, 8> keys;
            simdgroup_load(keys, staged + 8 * j * PITCH + first_k + 8 * d, PITCH, ulong2(0, 0), true);
            FLEX_UNROLL
            for (int b = 0; b < ROW_BLOCKS; ++b) {
              simdgroup_multiply_accumulate(scores[b][j], queries[b][d], keys, scores[b][j]);
            }
          }
        }
      }
      if (DIM_GROUPS > 1) {
        // All DIM_GROUPS add in one order, and so agree to the bit.
        threadgroup float2* parts = (threadgroup float2*)(shared + (SIMDGROUPS + 1) / 2 * 2);
        FLEX_UNROLL
        for (int j = 0; j < NUM_KEYS; ++j) {
          FLEX_UNROLL
          for (int b = 0; b < ROW_BLOCKS; ++b) {
            if (j >= first_key && j < last_key) {
              parts[((int(simdgroup) * ROW_BLOCKS + b) * NUM_KEYS + j) * 32 + int(lane)] =
                  float2(scores[b][j].thread_elements()[0], scores[b][j].thread_elements()[1]);
            }
          }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        FLEX_UNROLL
        for (int j = 0; j < NUM_KEYS; ++j) {
          FLEX_UNROLL
          for (int b = 0; b < ROW_BLOCKS; ++b) {
            if (j >= first_key && j < last_key) {
              float2 sum = float2(0.0f);
              for (int g = 0; g < DIM_GROUPS; ++g) {
                sum += parts[(((row_group * DIM_GROUPS + g) * ROW_BLOCKS + b) * NUM_KEYS + j) * 32 + int(lane)];
              }
              scores[b][j].thread_elements()[0] = sum.x;
              scores[b][j].thread_elements()[1] = sum.y;
            }
          }
        }
      }

      uint seen[ROW_BLOCKS];  // bit 2 * j + e: that score's key is visible
      if (!is_idle) {
        FLEX_UNROLL
        for (int b = 0; b < ROW_BLOCKS; ++b) {
          const int2 visible = flex_visible(rows[b], kind, begin, end);
          seen[b] = 0;
          float new_most = most[b];
          FLEX_UNROLL
          for (int j = 0; j < NUM_KEYS; ++j) {
            if (j < first_key || j >= last_key) continue;
            FLEX_UNROLL
            for (int e = 0; e < 2; ++e) {
              const int kv_idx = begin + 8 * j + matrix_column + e;
              float score = -INFINITY;
              if (kv_idx >= visible.x && kv_idx < visible.y && flex_is_visible(mods, rows[b], kind, kv_idx)) {
                score = flex_score(params, mods, rows[b], kv_idx, scores[b][j].thread_elements()[e]);
                seen[b] |= 1u << uint(2 * j + e);
              }
              scores[b][j].thread_elements()[e] = score;
              new_most = flex_max(new_most, score);
            }
          }
          new_most = flex_max(new_most, simd_shuffle_xor(new_most, 1));
          new_most = flex_max(new_most, simd_shuffle_xor(new_most, 8));
          if (simd_any(new_most != most[b])) {
            const float rescale = precise::exp2(most[b] - flex_shift(new_most));
            total[b] *= rescale;
            FLEX_UNROLL
            for (int d = 0; d < V_BLOCKS; ++d) {
              sums[b][d].thread_elements()[0] *= rescale;
              sums[b][d].thread_elements()[1] *= rescale;
            }
            most[b] = new_most;
          }
          const float shift = flex_shift(new_most);
          FLEX_UNROLL
          for (int j = 0; j < NUM_KEYS; ++j) {
            if (j >= first_key && j < last_key) {
              FLEX_UNROLL
              for (int e = 0; e < 2; ++e) {
                const float weight = precise::exp2(scores[b][j].thread_elements()[e] - shift);
                scores[b][j].thread_elements()[e] = weight;
                total[b] += weight;
              }
            }
          }
        }
      }

      if (DIM_GROUPS == 1) threadgroup_barrier(mem_flags::mem_threadgroup);
      const bool is_watched = kind != FLEX_FULL;
      bool is_finite = flex_stage<T, TS, DV, WIDTH_V, PITCH, KEYS, THREADS>(
          value + long(begin) * params.value_strides[2], params.value_strides[2], params.value_strides[3], num_keys,
          is_vectorizable, is_watched, staged, thread_index);
      if (is_watched) {
        is_finite = simd_all(is_finite);
        if (lane == 0) shared[simdgroup] = is_finite ? 0.0f : 1.0f;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (is_watched) {
        is_finite = true;
        for (int g = 0; g < SIMDGROUPS; ++g) is_finite = is_finite && shared[g] == 0.0f;
      }
      if (is_finite) {
        FLEX_UNROLL
        for (int j = 0; j < NUM_KEYS; ++j) {
          if (j >= first_key && j < last_key) {
            FLEX_UNROLL
            for (int d = 0; d < V_BLOCKS; ++d) {
              // Weights stay float: rounding them to half would cost accuracy.
              simdgroup_matrix<TS, 8, 8> values;
              simdgroup_load(values, staged + 8 * j * PITCH + first_v + 8 * d, PITCH);
              FLEX_UNROLL
              for (int b = 0; b < ROW_BLOCKS; ++b) {
                simdgroup_multiply_accumulate(sums[b][d], scores[b][j], values, sums[b][d]);
              }
            }
          }
        }
      } else {
        // A product of matrices would let 0 * NaN of a masked value through: what is not finite goes apart.
        FLEX_UNROLL
        for (int j = 0; j < NUM_KEYS; ++j) {
          if (j >= first_key && j < last_key) {
            FLEX_UNROLL
            for (int d = 0; d < V_BLOCKS; ++d) {
              simdgroup_matrix<TS, 8, 8> loaded;
              simdgroup_load(loaded, staged + 8 * j * PITCH + first_v + 8 * d, PITCH);
              simdgroup_matrix<float, 8, 8> values;
              simdgroup_matrix<float, 8, 8> others;
              FLEX_UNROLL
              for (int e = 0; e < 2; ++e) {
                const float element = float(loaded.thread_elements()[e]);
                others.thread_elements()[e] = flex_not_finite(element);
                values.thread_elements()[e] = flex_is_finite(element) ? element : 0.0f;
              }
              FLEX_UNROLL
              for (int b = 0; b < ROW_BLOCKS; ++b) {
                simdgroup_multiply_accumulate(sums[b][d], scores[b][j], values, sums[b][d]);
                simdgroup_matrix<float, 8, 8> sees;
                FLEX_UNROLL
                for (int e = 0; e < 2; ++e) {
                  const bool is_seen = (seen[b] >> uint(2 * j + e) & 1u) != 0;
                  sees.thread_elements()[e] =
                      !is_seen ? 0.0f : scores[b][j].thread_elements()[e] == 0.0f ? FLEX_ZERO_WEIGHT : 1.0f;
                }
                simdgroup_matrix<float, 8, 8> counts = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                simdgroup_multiply_accumulate(counts, sees, others, counts);
                FLEX_UNROLL
                for (int e = 0; e < 2; ++e) {
                  sums[b][d].thread_elements()[e] += flex_from_not_finite(counts.thread_elements()[e]);
                }
              }
            }
          }
        }
      }
    }
  }

  FLEX_UNROLL
  for (int b = 0; b < ROW_BLOCKS; ++b) {
    total[b] += simd_shuffle_xor(total[b], 1);
    total[b] += simd_shuffle_xor(total[b], 8);
  }
  FLEX_UNROLL
  for (int b = 0; b < ROW_BLOCKS; ++b) {
    if (!rows[b].is_valid) continue;
    const float factor = total[b] == 0.0f ? 0.0f : 1.0f / total[b];
    const float row_lse = total[b] == 0.0f ? -INFINITY : flex_shift(most[b]) * FLEX_LN2 + precise::log(total[b]);
    const bool is_first = matrix_column == 0 && dim_group == 0;
    if (params.num_splits > 1) {
      const long at = flex_partial(params, rows[b], split);
      if (is_first) partial_lse[at] = row_lse;
      FLEX_UNROLL
      for (int d = 0; d < V_BLOCKS; ++d) {
        FLEX_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int column = first_v + 8 * d + matrix_column + e;
          if (column < DV) partial_out[at * DV + column] = sums[b][d].thread_elements()[e] * factor;
        }
      }
      continue;
    }
    device TO* out_row = out + flex_offset(params.out_strides, rows[b]);
    FLEX_UNROLL
    for (int d = 0; d < V_BLOCKS; ++d) {
      FLEX_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int column = first_v + 8 * d + matrix_column + e;
        if (column < DV) out_row[column * params.out_strides[3]] = TO(sums[b][d].thread_elements()[e] * factor);
      }
    }
    if (params.has_lse != 0 && is_first) lse[flex_offset(params.lse_strides, rows[b])] = row_lse;
  }
}
