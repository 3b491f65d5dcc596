// FlexAttention for a few rows: all query heads of a KV group, so that keys and values are read once. A threadgroup
// has one split of the keys of one KV head; rows are (query, head of the group), at most ROWS.
//
// The lanes of a simdgroup are cut into teams, one key a team: a lane reads 16 bytes of a key's row at a time and
// keeps the matching part of all queries in registers. Each team takes BLOCK keys at a time: partial dot products,
// summed over the team by shuffles, then one maximum, one rescale and one exp2 a key and row for all of them; the
// values are read the same way. Teams keep maximum, total and result of their own keys, and are put together at
// the end: over the simdgroup by shuffles, over the threadgroup through its memory, over splits by flex_merge.

#define FLEX_DECODE_SIMDGROUPS 4

// 16 bytes of a row as floats: elements [at, at + 16 / sizeof(T)) of DIM; zeros beyond.
template <int DIM>
inline void flex_load16(device const float* row, int at, bool is_vectorizable, thread float* result) {
  if (is_vectorizable) {
    const float4 x = at < DIM ? *(device const float4*)(row + at) : float4(0.0f);
    for (int i = 0; i < 4; ++i) result[i] = x[i];
  } else {
    for (int i = 0; i < 4; ++i) result[i] = at + i < DIM ? row[at + i] : 0.0f;
  }
}
template <int DIM>
inline void flex_load16(device const half* row, int at, bool is_vectorizable, thread float* result) {
  if (is_vectorizable) {
    const uint4 x = at < DIM ? *(device const uint4*)(row + at) : uint4(0);
    for (int i = 0; i < 4; ++i) {
      const half2 pair = as_type<half2>(x[i]);
      result[2 * i] = float(pair.x);
      result[2 * i + 1] = float(pair.y);
    }
  } else {
    for (int i = 0; i < 8; ++i) result[i] = at + i < DIM ? float(row[at + i]) : 0.0f;
  }
}
template <int DIM>
inline void flex_load16(device const bfloat* row, int at, bool is_vectorizable, thread float* result) {
  if (is_vectorizable) {
    const uint4 x = at < DIM ? *(device const uint4*)(row + at) : uint4(0);
    for (int i = 0; i < 4; ++i) {
      result[2 * i] = as_type<float>(x[i] << 16);
      result[2 * i + 1] = as_type<float>(x[i] & 0xffff0000u);
    }
  } else {
    for (int i = 0; i < 8; ++i) result[i] = at + i < DIM ? float(row[at + i]) : 0.0f;
  }
}

// LANES: of a team, a power of two; CHUNKS: how often 16 bytes a lane reads of a row of the wider of DK and DV.
// `shared` has room for ROWS * DK and for ROWS * DV + 2 * ROWS * FLEX_DECODE_SIMDGROUPS floats.
template <typename TQ, typename T, typename TO, int DK, int DV, int ROWS, int LANES, int CHUNKS, typename Mods>
inline void flex_decode(constant const FlexParams& params, device const TQ* query, device const T* key,
                        device const T* value, device TO* out, device float* lse, thread const FlexPlanView& plan,
                        device float* partial_out, device float* partial_lse, thread const Mods& mods,
                        threadgroup float* shared, uint3 group, uint thread_index, uint lane, uint simdgroup) {
  enum { PIECE = 16 / sizeof(T), TEAMS = 32 / LANES, BLOCK = 4, PART = CHUNKS * PIECE };
  const int split = int(group.x);
  const int kv_head = int(group.y);
  const int batch = int(group.z);
  const int heads = params.num_heads / params.num_kv_heads;
  const int first_head = kv_head * heads;
  const int kv_batch = params.has_kv_batch != 0 ? batch : 0;
  const int num_rows = heads * params.q_len;
  const int team = int(lane) / LANES;
  const int part = int(lane) % LANES;
  const bool is_vectorizable = params.is_vectorizable != 0;

  // Queries pass through threadgroup memory: each is read once.
  for (int r = 0; r < ROWS; ++r) {
    device const TQ* row = query + long(batch) * params.query_strides[0] +
                           long(first_head + r % heads) * params.query_strides[1] +
                           long(r / heads) * params.query_strides[2];
    for (int d = int(thread_index); d < DK; d += 32 * FLEX_DECODE_SIMDGROUPS) {
      float element = 0.0f;
      if (r < num_rows) element = float(row[d]);
      shared[r * DK + d] = element;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float queries[ROWS][PART];
  float sums[ROWS][PART];
  float most[ROWS];
  float totals[ROWS];
  FlexRow rows[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    const int q_idx = r / heads;
    const int head = first_head + r % heads;
    rows[r] = flex_row(params, plan, batch, head, q_idx, r < num_rows);
    most[r] = -INFINITY;
    totals[r] = 0.0f;
    for (int c = 0; c < CHUNKS; ++c) {
      for (int i = 0; i < PIECE; ++i) {
        const int at = (c * LANES + part) * PIECE + i;
        queries[r][c * PIECE + i] = at < DK ? shared[r * DK + at] : 0.0f;
        sums[r][c * PIECE + i] = 0.0f;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  key += long(kv_batch) * params.key_strides[0] + long(kv_head) * params.key_strides[1];
  value += long(kv_batch) * params.value_strides[0] + long(kv_head) * params.value_strides[1];
  const int entry = flex_entry(params, batch, first_head);
  const int first_run = plan.first_run[entry];
  const int last_run = plan.first_run[entry + 1];
  const int2 mine = flex_split(plan.runs, first_run, last_run, split, params.num_splits);
  int visited = 0;
  for (int r = first_run; r < last_run; ++r) {
    const int kind = plan.runs[r].kind;
    const int run_begin = max(plan.runs[r].begin, plan.runs[r].begin + mine.x - visited);
    const int run_end = min(plan.runs[r].end, plan.runs[r].begin + mine.y - visited);
    visited += plan.runs[r].end - plan.runs[r].begin;
    const int stride = FLEX_DECODE_SIMDGROUPS * TEAMS * BLOCK;
    for (int block = run_begin; block < run_end; block += stride) {
      const int begin = block + (int(simdgroup) * TEAMS + team) * BLOCK;
      float scores[ROWS][BLOCK];
      for (int k = 0; k < BLOCK; ++k) {
        // A team past the end repeats nothing: it reads no memory, and its scores are masked.
        float keys[PART];
        for (int c = 0; c < CHUNKS; ++c) {
          if (begin + k < run_end) {
            flex_load16<DK>(key + long(begin + k) * params.key_strides[2], (c * LANES + part) * PIECE,
                            is_vectorizable, keys + c * PIECE);
          } else {
            for (int i = 0; i < PIECE; ++i) keys[c * PIECE + i] = 0.0f;
          }
        }
        for (int q = 0; q < ROWS; ++q) {
          float sum = 0.0f;
          for (int i = 0; i < PART; ++i) sum = fma(queries[q][i], keys[i], sum);
          scores[q][k] = sum;
        }
      }
      for (ushort step = LANES / 2; step > 0; step /= 2) {
        for (int q = 0; q < ROWS; ++q) {
          for (int k = 0; k < BLOCK; ++k) scores[q][k] += simd_shuffle_xor(scores[q][k], step);
        }
      }
      for (int q = 0; q < ROWS; ++q) {
        float new_most = most[q];
        for (int k = 0; k < BLOCK; ++k) {
          scores[q][k] = flex_score(params, mods, rows[q], kind, begin + k, run_end, scores[q][k]);
          new_most = flex_max(new_most, scores[q][k]);
        }
        const float shift = flex_shift(new_most);
        const float rescale = exp2(most[q] - shift);
        most[q] = new_most;
        totals[q] *= rescale;
        for (int i = 0; i < PART; ++i) sums[q][i] *= rescale;
        for (int k = 0; k < BLOCK; ++k) {
          scores[q][k] = exp2(scores[q][k] - shift);
          totals[q] += scores[q][k];
        }
      }
      for (int k = 0; k < BLOCK; ++k) {
        if (begin + k >= run_end) break;
        float values[PART];
        for (int c = 0; c < CHUNKS; ++c) {
          flex_load16<DV>(value + long(begin + k) * params.value_strides[2], (c * LANES + part) * PIECE,
                          is_vectorizable, values + c * PIECE);
        }
        for (int q = 0; q < ROWS; ++q) {
          for (int i = 0; i < PART; ++i) sums[q][i] = fma(scores[q][k], values[i], sums[q][i]);
        }
      }
    }
  }

  // Teams of the simdgroup.
  for (ushort step = LANES; step < 32; step *= 2) {
    for (int q = 0; q < ROWS; ++q) {
      const float together = flex_max(most[q], simd_shuffle_xor(most[q], step));
      const float rescale = exp2(most[q] - flex_shift(together));
      most[q] = together;
      totals[q] *= rescale;
      totals[q] += simd_shuffle_xor(totals[q], step);
      for (int i = 0; i < PART; ++i) {
        sums[q][i] *= rescale;
        sums[q][i] += simd_shuffle_xor(sums[q][i], step);
      }
    }
  }
  // Simdgroups of the threadgroup.
  threadgroup float* shared_most = shared + ROWS * DV;
  threadgroup float* shared_totals = shared_most + ROWS * FLEX_DECODE_SIMDGROUPS;
  for (int q = 0; q < ROWS; ++q) {
    if (lane != 0) continue;
    shared_most[q * FLEX_DECODE_SIMDGROUPS + int(simdgroup)] = most[q];
    shared_totals[q * FLEX_DECODE_SIMDGROUPS + int(simdgroup)] = totals[q];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int q = 0; q < ROWS; ++q) {
    float together = -INFINITY;
    for (int s = 0; s < FLEX_DECODE_SIMDGROUPS; ++s) {
      together = flex_max(together, shared_most[q * FLEX_DECODE_SIMDGROUPS + s]);
    }
    const float shift = flex_shift(together);
    const float rescale = exp2(most[q] - shift);
    totals[q] = 0.0f;
    for (int s = 0; s < FLEX_DECODE_SIMDGROUPS; ++s) {
      totals[q] += shared_totals[q * FLEX_DECODE_SIMDGROUPS + s] *
                   exp2(shared_most[q * FLEX_DECODE_SIMDGROUPS + s] - shift);
    }
    most[q] = shift;
    for (int i = 0; i < PART; ++i) sums[q][i] *= rescale;
  }
  for (int s = 0; s < FLEX_DECODE_SIMDGROUPS; ++s) {
    if (int(simdgroup) == s && team == 0) {
      for (int q = 0; q < ROWS; ++q) {
        for (int c = 0; c < CHUNKS; ++c) {
          for (int i = 0; i < PIECE; ++i) {
            const int at = (c * LANES + part) * PIECE + i;
            if (at >= DV) continue;
            const float before = s == 0 ? 0.0f : shared[q * DV + at];
            shared[q * DV + at] = before + sums[q][c * PIECE + i];
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int q = 0; q < ROWS; ++q) {
    if (q >= num_rows) break;
    const int q_idx = q / heads;
    const int head = first_head + q % heads;
    const float factor = totals[q] == 0.0f ? 0.0f : 1.0f / totals[q];
    const float row_lse = totals[q] == 0.0f ? -INFINITY : most[q] * FLEX_LN2 + precise::log(totals[q]);
    if (params.num_splits > 1) {
      const long at = ((long(batch) * params.num_heads + head) * params.q_len + q_idx) * params.num_splits + split;
      if (thread_index == 0) partial_lse[at] = row_lse;
      for (int d = int(thread_index); d < DV; d += 32 * FLEX_DECODE_SIMDGROUPS) {
        partial_out[at * DV + d] = shared[q * DV + d] * factor;
      }
      continue;
    }
    device TO* target = out + long(batch) * params.out_strides[0] + long(head) * params.out_strides[1] +
                        long(q_idx) * params.out_strides[2];
    for (int d = int(thread_index); d < DV; d += 32 * FLEX_DECODE_SIMDGROUPS) {
      target[d] = TO(shared[q * DV + d] * factor);
    }
    if (params.has_lse != 0 && thread_index == 0) {
      lse[long(batch) * params.lse_strides[0] + long(head) * params.lse_strides[1] +
          long(q_idx) * params.lse_strides[2]] = row_lse;
    }
  }
}
