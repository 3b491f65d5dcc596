// FlexAttention for many rows. A threadgroup has 8 * BLOCKS * SIMDGROUPS rows: queries of one tile, of one head or
// of several heads of a KV group. Each simdgroup has BLOCKS times 8 of the rows; their queries stay in registers as
// 8 x 8 matrices, and so do their results.
//
// For each run of keys that the plan names, KEYS at a time:
//   stage the keys in threadgroup memory, once for all rows; S = Q K^T, 8 x 8 matrices
//   scores, mask and online softmax in registers: a lane has two neighbours of one row in each matrix, and the
//   lanes that share the row differ in bits 0 and 3
//   stage the values in the same memory; O = O * rescale + P V
// Tiles that no row sees are not in the plan; full runs evaluate no mask. Rows of keys beyond the end are
// staged as zeros, and their scores are masked, so that nothing beyond a cache's length is read.

// rows x WIDTH elements of a row-major tensor, DIM of each row, into threadgroup memory; zeros elsewhere.
template <typename T, typename TS, int DIM, int WIDTH, int KEYS, int THREADS>
inline void flex_stage(device const T* source, long stride, int num_rows, bool is_vectorizable,
                       threadgroup TS* staged, uint thread_index) {
  if (is_vectorizable && DIM % 4 == 0) {
    for (int i = int(thread_index); i < KEYS * (WIDTH / 4); i += THREADS) {
      const int row = i / (WIDTH / 4);
      const int column = i % (WIDTH / 4) * 4;
      vec<T, 4> values = vec<T, 4>(T(0.0f));
      if (row < num_rows && column < DIM) values = *(device const vec<T, 4>*)(source + long(row) * stride + column);
      for (int e = 0; e < 4; ++e) staged[row * WIDTH + column + e] = TS(values[e]);
    }
  } else {
    for (int i = int(thread_index); i < KEYS * WIDTH; i += THREADS) {
      const int row = i / WIDTH;
      const int column = i % WIDTH;
      TS value = TS(0.0f);
      if (row < num_rows && column < DIM) value = TS(source[long(row) * stride + column]);
      staged[i] = value;
    }
  }
}

// TS: what keys and values are staged as, and queries converted to. KEYS is a multiple of 8.
template <typename TQ, typename T, typename TO, typename TS, int DK, int DV, int SIMDGROUPS, int BLOCKS, int KEYS,
          typename Mods>
inline void flex_prefill(constant const FlexParams& params, device const TQ* query, device const T* key,
                         device const T* value, device TO* out, device float* lse, thread const FlexPlanView& plan,
                         device float* partial_out, device float* partial_lse, thread const Mods& mods,
                         threadgroup TS* staged, uint3 group, uint thread_index, uint lane, uint simdgroup) {
  enum { WIDTH_K = (DK + 7) / 8 * 8, WIDTH_V = (DV + 7) / 8 * 8, THREADS = 32 * SIMDGROUPS, NUM_KEYS = KEYS / 8 };
  const int tile = int(group.x) / params.num_splits;
  const int split = int(group.x) % params.num_splits;
  const int first_head = int(group.y) * params.heads_at_once;
  const int batch = int(group.z);
  const int kv_head = first_head / (params.num_heads / params.num_kv_heads);
  const int kv_batch = params.has_kv_batch != 0 ? batch : 0;
  const int q_begin = plan.tile_begin[tile];
  const int q_end = plan.tile_begin[tile + 1];

  const int matrix_row = int((lane / 4) & 4) + int(lane / 2) % 4;
  const int matrix_column = int((lane / 4) & 2) * 2 + int(lane % 2) * 2;
  FlexRow rows[BLOCKS];
  simdgroup_matrix<TS, 8, 8> queries[BLOCKS][WIDTH_K / 8];
  simdgroup_matrix<float, 8, 8> sums[BLOCKS][WIDTH_V / 8];
  float most[BLOCKS];
  float totals[BLOCKS];
  for (int b = 0; b < BLOCKS; ++b) {
    const int row_number = (int(simdgroup) * BLOCKS + b) * 8 + matrix_row;
    const int q_idx = q_begin + row_number / params.heads_at_once;
    const int head = first_head + row_number % params.heads_at_once;
    rows[b] = flex_row(params, plan, batch, head, q_idx, q_idx < q_end);
    device const TQ* query_row = query + long(batch) * params.query_strides[0] +
                                 long(head) * params.query_strides[1] + long(q_idx) * params.query_strides[2];
    for (int d = 0; d < WIDTH_K / 8; ++d) {
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * d + matrix_column + e;
        TS element = TS(0.0f);
        if (rows[b].is_valid && at < DK) element = TS(query_row[at]);
        queries[b][d].thread_elements()[e] = element;
      }
    }
    for (int d = 0; d < WIDTH_V / 8; ++d) sums[b][d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    most[b] = -INFINITY;
    totals[b] = 0.0f;
  }

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
    const int run_begin = max(plan.runs[r].begin, plan.runs[r].begin + mine.x - visited);
    const int run_end = min(plan.runs[r].end, plan.runs[r].begin + mine.y - visited);
    visited += plan.runs[r].end - plan.runs[r].begin;
    for (int begin = run_begin; begin < run_end; begin += KEYS) {
      const int num_keys = min(int(KEYS), run_end - begin);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      flex_stage<T, TS, DK, WIDTH_K, KEYS, THREADS>(key + long(begin) * params.key_strides[2], params.key_strides[2],
                                                    num_keys, is_vectorizable, staged, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_matrix<float, 8, 8> scores[BLOCKS][NUM_KEYS];
      for (int j = 0; j < NUM_KEYS; ++j) {
        for (int b = 0; b < BLOCKS; ++b) scores[b][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (int d = 0; d < WIDTH_K / 8; ++d) {
          simdgroup_matrix<TS, 8, 8> keys;
          simdgroup_load(keys, staged + 8 * j * WIDTH_K + 8 * d, WIDTH_K, ulong2(0, 0), true);
          for (int b = 0; b < BLOCKS; ++b) simdgroup_multiply_accumulate(scores[b][j], queries[b][d], keys, scores[b][j]);
        }
      }
      for (int b = 0; b < BLOCKS; ++b) {
        float new_most = most[b];
        for (int j = 0; j < NUM_KEYS; ++j) {
          for (int e = 0; e < 2; ++e) {
            const int kv_idx = begin + 8 * j + matrix_column + e;
            const float score =
                flex_score(params, mods, rows[b], kind, kv_idx, run_end, scores[b][j].thread_elements()[e]);
            scores[b][j].thread_elements()[e] = score;
            new_most = flex_max(new_most, score);
          }
        }
        new_most = flex_max(new_most, simd_shuffle_xor(new_most, 1));
        new_most = flex_max(new_most, simd_shuffle_xor(new_most, 8));
        if (simd_any(new_most != most[b])) {
          const float rescale = exp2(most[b] - flex_shift(new_most));
          totals[b] *= rescale;
          for (int d = 0; d < WIDTH_V / 8; ++d) {
            sums[b][d].thread_elements()[0] *= rescale;
            sums[b][d].thread_elements()[1] *= rescale;
          }
          most[b] = new_most;
        }
        const float shift = flex_shift(most[b]);
        for (int j = 0; j < NUM_KEYS; ++j) {
          for (int e = 0; e < 2; ++e) {
            const float weight = exp2(scores[b][j].thread_elements()[e] - shift);
            scores[b][j].thread_elements()[e] = weight;
            totals[b] += weight;
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      flex_stage<T, TS, DV, WIDTH_V, KEYS, THREADS>(value + long(begin) * params.value_strides[2],
                                                    params.value_strides[2], num_keys, is_vectorizable, staged,
                                                    thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int d = 0; d < WIDTH_V / 8; ++d) {
        for (int j = 0; j < NUM_KEYS; ++j) {
          simdgroup_matrix<TS, 8, 8> narrow;
          simdgroup_load(narrow, staged + 8 * j * WIDTH_V + 8 * d, WIDTH_V);
          // In float, as the weights are: rounding those to half would cost accuracy.
          simdgroup_matrix<float, 8, 8> values;
          values.thread_elements()[0] = float(narrow.thread_elements()[0]);
          values.thread_elements()[1] = float(narrow.thread_elements()[1]);
          for (int b = 0; b < BLOCKS; ++b) simdgroup_multiply_accumulate(sums[b][d], scores[b][j], values, sums[b][d]);
        }
      }
    }
  }

  // One lane in four writes what a row has once.
  const bool is_first_of_row = lane % 2 == 0 && (lane & 8) == 0;
  for (int b = 0; b < BLOCKS; ++b) {
    totals[b] += simd_shuffle_xor(totals[b], 1);
    totals[b] += simd_shuffle_xor(totals[b], 8);
  }
  for (int b = 0; b < BLOCKS; ++b) {
    if (!rows[b].is_valid) continue;
    const int head = rows[b].head;
    const int q_idx = rows[b].q_idx;
    const float factor = totals[b] == 0.0f ? 0.0f : 1.0f / totals[b];
    const float row_lse =
        totals[b] == 0.0f ? -INFINITY : flex_shift(most[b]) * FLEX_LN2 + precise::log(totals[b]);
    if (params.num_splits > 1) {
      const long at = ((long(batch) * params.num_heads + head) * params.q_len + q_idx) * params.num_splits + split;
      if (is_first_of_row) partial_lse[at] = row_lse;
      for (int d = 0; d < WIDTH_V / 8; ++d) {
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * d + matrix_column + e;
          if (column < DV) partial_out[at * DV + column] = sums[b][d].thread_elements()[e] * factor;
        }
      }
      continue;
    }
    device TO* target = out + long(batch) * params.out_strides[0] + long(head) * params.out_strides[1] +
                        long(q_idx) * params.out_strides[2];
    for (int d = 0; d < WIDTH_V / 8; ++d) {
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * d + matrix_column + e;
        if (column < DV) target[column] = TO(sums[b][d].thread_elements()[e] * factor);
      }
    }
    if (params.has_lse != 0 && is_first_of_row) {
      lse[long(batch) * params.lse_strides[0] + long(head) * params.lse_strides[1] +
          long(q_idx) * params.lse_strides[2]] = row_lse;
    }
  }
}
