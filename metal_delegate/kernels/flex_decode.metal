// FlexAttention for a few rows: all query heads of a KV group, so that keys and values are read once. A threadgroup
// has one split of the keys of one KV head, and at most ROWS rows: (query, head of the group).
//
// The lanes of a simdgroup are cut into teams of LANES, one key a team at a time: a lane reads a piece of a key's
// row and keeps the matching pieces of all queries in registers. A simdgroup takes BLOCK keys a team:
//   partial dot products of all rows and BLOCK keys; while they are summed over the team, each lane hands half of
//   what it has to its partner, until each has the full scores of one row (and of BLOCK * ROWS / LANES keys of it)
//   mods, mask and exp2 once a score; the maximum over the row's lanes of all teams; a rescale where it rises
//   weights go back to all lanes by shuffles, and values are read as keys are
// Simdgroups keep maximum, total and result of their own keys, and are put together through threadgroup memory at
// the end; splits by flex_merge.

#define FLEX_DECODE_SIMDGROUPS 4

// PIECE elements [at, at + PIECE) of a row as floats; zeros beyond DIM.
template <typename T, int DIM, int PIECE>
inline void flex_load_piece(device const T* row, int at, long stride, bool is_vectorizable, thread float* result) {
  enum { BYTES = PIECE * int(sizeof(T)) };
  if (is_vectorizable && DIM % PIECE == 0) {
    uint4 words = uint4(0);
    if (at < DIM) {
      if (BYTES == 16) {
        words = *(device const uint4*)(row + at);
      } else {
        words.xy = *(device const uint2*)(row + at);
      }
    }
    FLEX_UNROLL
    for (int i = 0; i < PIECE; ++i) result[i] = float(flex_element<T>(words, i));
  } else {
    FLEX_UNROLL
    for (int i = 0; i < PIECE; ++i) result[i] = at + i < DIM ? float(row[(at + i) * stride]) : 0.0f;
  }
}

// LANES: a power of two, at least ROWS; pieces of LANES lanes cover a row CHUNKS_K (CHUNKS_V) times. BLOCK: a power
// of two. `shared` has room for ROWS * DK floats, and for FLEX_DECODE_SIMDGROUPS * ROWS * (DV + 2).
template <typename TQ, typename T, typename TO, int DK, int DV, int ROWS, int LANES, int PIECE, int BLOCK,
          typename Mods>
inline void flex_decode(constant const FlexParams& params, device const TQ* query, device const T* key,
                        device const T* value, device TO* out, device float* lse, thread const FlexPlanView& plan,
                        device float* partial_out, device float* partial_lse, thread const Mods& mods,
                        threadgroup float* shared, uint3 group, uint thread_index, uint lane, uint simdgroup) {
  enum {
    CHUNKS_K = (DK + LANES * PIECE - 1) / (LANES * PIECE),
    CHUNKS_V = (DV + LANES * PIECE - 1) / (LANES * PIECE),
    PART_K = CHUNKS_K * PIECE,
    PART_V = CHUNKS_V * PIECE,
    TEAMS = 32 / LANES,
    KEY_LANES = LANES / ROWS,                                      // that share a row
    SCORES = BLOCK > KEY_LANES ? BLOCK / int(KEY_LANES) : 1,       // of a lane
    COPIES = BLOCK > KEY_LANES ? 1 : int(KEY_LANES) / BLOCK,       // lanes with equal scores
    SIMDGROUPS = FLEX_DECODE_SIMDGROUPS,
    THREADS = 32 * SIMDGROUPS
  };
  const int split = int(group.x);
  const int heads = params.heads_at_once;
  const int first_head = int(group.y) * heads;
  const int batch = int(group.z);
  const int kv_head = first_head / (params.num_heads / params.num_kv_heads);
  const int kv_batch = params.has_kv_batch != 0 ? batch : 0;
  const int num_rows = heads * params.q_len;
  const int team = int(lane) / LANES;
  const int part = int(lane) % LANES;
  const bool is_vectorizable = params.is_vectorizable != 0;

  // Queries through threadgroup memory: read once.
  for (int i = int(thread_index); i < ROWS * DK; i += THREADS) {
    const int r = i / DK;
    float element = 0.0f;
    if (r < num_rows) {
      device const TQ* row = query + long(batch) * params.query_strides[0] +
                             long(first_head + r % heads) * params.query_strides[1] +
                             long(r / heads) * params.query_strides[2];
      element = float(row[(i % DK) * params.query_strides[3]]);
    }
    shared[i] = element;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float queries[ROWS][PART_K];
  float sums[ROWS][PART_V];
  FLEX_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    FLEX_UNROLL
    for (int i = 0; i < PART_K; ++i) {
      const int at = (i / PIECE * LANES + part) * PIECE + i % PIECE;
      queries[r][i] = at < DK ? shared[r * DK + at] : 0.0f;
    }
    FLEX_UNROLL
    for (int i = 0; i < PART_V; ++i) sums[r][i] = 0.0f;
  }
  // Of this lane's scores.
  const int my_row = part / KEY_LANES;
  const int my_key = part % KEY_LANES / COPIES * SCORES;
  const FlexRow row =
      flex_row(params, plan, batch, first_head + my_row % heads, my_row / heads, my_row < num_rows);
  float most = -INFINITY;
  float total = 0.0f;

  key += long(kv_batch) * params.key_strides[0] + long(kv_head) * params.key_strides[1];
  value += long(kv_batch) * params.value_strides[0] + long(kv_head) * params.value_strides[1];
  const int entry = flex_entry(params, batch, first_head);
  const int first_run = plan.first_run[entry];
  const int last_run = plan.first_run[entry + 1];
  const int2 mine = flex_split(plan.runs, first_run, last_run, split, params.num_splits);
  int visited = 0;
  for (int run = first_run; run < last_run; ++run) {
    const int kind = plan.runs[run].kind;
    const int2 keys_of_run = flex_part(plan.runs[run], mine, visited);
    visited += plan.runs[run].end - plan.runs[run].begin;
    const int2 visible = flex_visible(row, kind, keys_of_run.x, keys_of_run.y);
    for (int begin = keys_of_run.x + int(simdgroup) * TEAMS * BLOCK; begin < keys_of_run.y;
         begin += SIMDGROUPS * TEAMS * BLOCK) {
      // Key k of the team is begin + k * TEAMS + team: what a simdgroup reads at a time lies together. A team past
      // the end reads no memory.
      const int num_keys = (keys_of_run.y - begin - team + TEAMS - 1) / TEAMS;
      float scores[ROWS * BLOCK];
      FLEX_UNROLL
      for (int k = 0; k < BLOCK; ++k) {
        float keys[PART_K];
        FLEX_UNROLL
        for (int i = 0; i < PART_K; ++i) keys[i] = 0.0f;
        if (k < num_keys) {
          device const T* key_row = key + long(begin + k * TEAMS + team) * params.key_strides[2];
          FLEX_UNROLL
          for (int c = 0; c < CHUNKS_K; ++c) {
            flex_load_piece<T, DK, PIECE>(key_row, (c * LANES + part) * PIECE, params.key_strides[3], is_vectorizable,
                                          keys + c * PIECE);
          }
        }
        FLEX_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          float sum = queries[r][0] * keys[0];
          FLEX_UNROLL
          for (int i = 1; i < PART_K; ++i) sum = fma(queries[r][i], keys[i], sum);
          scores[r * BLOCK + k] = sum;
        }
      }
      // The upper half of the scores goes with the upper half of the lanes, and so on.
      int count = ROWS * BLOCK;
      FLEX_UNROLL
      for (int step = LANES / 2; step > 0; step /= 2) {
        const bool is_upper = (part & step) != 0;
        if (count > 1) {
          count /= 2;
          FLEX_UNROLL
          for (int i = 0; i < count; ++i) {
            // Both are loaded: a choice between the elements themselves would choose an address.
            const float lower = scores[i];
            const float upper = scores[count + i];
            const float kept = is_upper ? upper : lower;
            const float given = is_upper ? lower : upper;
            scores[i] = kept + simd_shuffle_xor(given, ushort(step));
          }
        } else {
          scores[0] += simd_shuffle_xor(scores[0], ushort(step));
        }
      }

      float new_most = most;
      bool is_seen[SCORES];
      FLEX_UNROLL
      for (int i = 0; i < SCORES; ++i) {
        const int kv_idx = begin + (my_key + i) * TEAMS + team;
        is_seen[i] = kv_idx >= visible.x && kv_idx < visible.y && flex_is_visible(mods, row, kind, kv_idx);
        if (is_seen[i]) {
          scores[i] = flex_score(params, mods, row, kv_idx, scores[i]);
          new_most = flex_max(new_most, scores[i]);
        }
      }
      FLEX_UNROLL
      for (int step = COPIES; step < KEY_LANES; step *= 2) {
        new_most = flex_max(new_most, simd_shuffle_xor(new_most, ushort(step)));
      }
      FLEX_UNROLL
      for (int step = LANES; step < 32; step *= 2) {
        new_most = flex_max(new_most, simd_shuffle_xor(new_most, ushort(step)));
      }
      if (simd_any(new_most != most)) {
        const float rescale = precise::exp2(most - flex_shift(new_most));
        most = new_most;
        total *= rescale;
        FLEX_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          const float factor = simd_shuffle(rescale, ushort(r * KEY_LANES));
          FLEX_UNROLL
          for (int i = 0; i < PART_V; ++i) sums[r][i] *= factor;
        }
      }
      const float shift = flex_shift(most);
      FLEX_UNROLL
      for (int i = 0; i < SCORES; ++i) {
        // A masked key has weight -1 for now: its value, which may be NaN, does not enter.
        scores[i] = is_seen[i] ? precise::exp2(scores[i] - shift) : -1.0f;
        if (is_seen[i]) total += scores[i];
      }
      FLEX_UNROLL
      for (int k = 0; k < BLOCK; ++k) {
        float values[PART_V];
        FLEX_UNROLL
        for (int i = 0; i < PART_V; ++i) values[i] = 0.0f;
        if (k < num_keys) {
          device const T* value_row = value + long(begin + k * TEAMS + team) * params.value_strides[2];
          FLEX_UNROLL
          for (int c = 0; c < CHUNKS_V; ++c) {
            flex_load_piece<T, DV, PIECE>(value_row, (c * LANES + part) * PIECE, params.value_strides[3],
                                          is_vectorizable, values + c * PIECE);
          }
        }
        FLEX_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          const ushort source = ushort(team * LANES + r * KEY_LANES + k / SCORES * COPIES);
          const float weight = simd_shuffle(scores[k % SCORES], source);
          if (weight < 0.0f) continue;
          FLEX_UNROLL
          for (int i = 0; i < PART_V; ++i) sums[r][i] = fma(weight, values[i], sums[r][i]);
        }
      }
    }
  }

  // Teams of the simdgroup have one maximum: only sums are to be added.
  FLEX_UNROLL
  for (int step = COPIES; step < KEY_LANES; step *= 2) total += simd_shuffle_xor(total, ushort(step));
  FLEX_UNROLL
  for (int step = LANES; step < 32; step *= 2) {
    total += simd_shuffle_xor(total, ushort(step));
    FLEX_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      FLEX_UNROLL
      for (int i = 0; i < PART_V; ++i) sums[r][i] += simd_shuffle_xor(sums[r][i], ushort(step));
    }
  }
  // Simdgroups of the threadgroup.
  threadgroup float* shared_most = shared + ROWS * DV * SIMDGROUPS;
  threadgroup float* shared_totals = shared_most + ROWS * SIMDGROUPS;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (team == 0) {
    if (part % KEY_LANES == 0) {
      shared_most[my_row * SIMDGROUPS + int(simdgroup)] = most;
      shared_totals[my_row * SIMDGROUPS + int(simdgroup)] = total;
    }
    FLEX_UNROLL
    for (int r = 0; r < ROWS; ++r) {
      FLEX_UNROLL
      for (int i = 0; i < PART_V; ++i) {
        const int at = (i / PIECE * LANES + part) * PIECE + i % PIECE;
        if (at < DV) shared[(int(simdgroup) * ROWS + r) * DV + at] = sums[r][i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(thread_index); i < num_rows * DV; i += THREADS) {
    const int r = i / DV;
    const int d = i % DV;
    float together = -INFINITY;
    FLEX_UNROLL
    for (int s = 0; s < SIMDGROUPS; ++s) together = flex_max(together, shared_most[r * SIMDGROUPS + s]);
    const float shift = flex_shift(together);
    float all = 0.0f;
    float sum = 0.0f;
    FLEX_UNROLL
    for (int s = 0; s < SIMDGROUPS; ++s) {
      const float rescale = precise::exp2(shared_most[r * SIMDGROUPS + s] - shift);
      all = fma(shared_totals[r * SIMDGROUPS + s], rescale, all);
      sum = fma(shared[(s * ROWS + r) * DV + d], rescale, sum);
    }
    const float result = all == 0.0f ? 0.0f : sum / all;
    const float row_lse = all == 0.0f ? -INFINITY : shift * FLEX_LN2 + precise::log(all);
    FlexRow target;
    target.batch = batch;
    target.head = first_head + r % heads;
    target.q_idx = r / heads;
    if (params.num_splits > 1) {
      const long at = flex_partial(params, target, split);
      partial_out[at * DV + d] = result;
      if (d == 0) partial_lse[at] = row_lse;
    } else {
      out[flex_offset(params.out_strides, target) + d * params.out_strides[3]] = TO(result);
      if (params.has_lse != 0 && d == 0) lse[flex_offset(params.lse_strides, target)] = row_lse;
    }
  }
}
