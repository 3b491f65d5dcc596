// out[m, n] = sum_k x[m, k] weight[n, k] (+ bias[n]), and batched matrix products, accumulated in float.
//
// linear_gemv, for at most 4 rows: a threadgroup stages a chunk of the rows of x in threadgroup memory, widened,
// for all its simdgroups; each simdgroup streams 4 rows of the weight, 16 bytes a lane and row, and multiplies them
// with every row of x; it sums over its lanes at the end. The weight is read once.
//
//   for each chunk of k:   stage x[0..m, chunk]
//     for each step of the simdgroup: w = weight[4 rows, 16 bytes a lane]; sums[m][4] += x * w
//   out[m, 4 columns] = simd_sum(sums) + bias
//
// linear_gemm and matmul: tiles of simdgroup matrices. A threadgroup of 4 simdgroups makes 64 columns of 64 rows of out
// (each simdgroup a quarter of 4 x 4 matrices of 8 x 8), or of 32 rows where there are no more (each simdgroup 16
// columns, 4 x 2 matrices). Matrices that lie outside out altogether are not multiplied, so that few rows cost little.
//
//   for each 32 of k:  stage a[rows, 32] and b[columns, 32] in threadgroup memory, zeros outside
//     for each 8 of these: load fragments, multiply, accumulate
//   sums -> threadgroup memory -> out, element by element: bias, narrowing, edges, any strides

// Floats of x that are staged at a time, all rows together.
constant constexpr int GEMV_STAGED = 2048;
constant constexpr int GEMV_COLUMNS = 4;
constant constexpr int GEMV_ROWS = 4;

template <typename X, typename W, typename B, typename O, int ROWS>
inline void gemv_rows(constant const GemvParams& params, device const X* x, device const W* weight,
                      device const B* bias, device O* out, threadgroup float* staged, uint group, uint thread_index,
                      uint num_threads, uint lane, uint simd_index) {
  const int chunk = GEMV_STAGED / ROWS;
  const int packed = packed_count<W>();
  const long first = (long(group) * long(num_threads / 32) + long(simd_index)) * GEMV_COLUMNS;
  const int num_columns = int(clamp(params.n - first, 0L, long(GEMV_COLUMNS)));
  // Columns past the last one repeat it: their sums are not stored.
  device const W* rows[GEMV_COLUMNS];
  for (int c = 0; c < GEMV_COLUMNS; ++c) rows[c] = weight + min(first + c, params.n - 1) * params.k;
  float sums[ROWS][GEMV_COLUMNS];
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < GEMV_COLUMNS; ++c) sums[r][c] = 0.0f;
  }
  for (long begin = 0; begin < params.k; begin += chunk) {
    const int length = int(min(long(chunk), params.k - begin));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = 0; r < ROWS; ++r) {
      device const X* row = x + long(r) * params.x_row_stride + begin;
      for (int i = int(thread_index); i < length; i += int(num_threads)) {
        staged[r * chunk + i] = r < params.m ? float(row[i]) : 0.0f;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (num_columns == 0) continue;
    if (params.is_vectorizable != 0) {
      for (int i = int(lane) * packed; i < length; i += 32 * packed) {
        uint4 bits[GEMV_COLUMNS];
        for (int c = 0; c < GEMV_COLUMNS; ++c) bits[c] = *(device const uint4*)(rows[c] + begin + i);
        for (int c = 0; c < GEMV_COLUMNS; ++c) {
          float w[packed_count<W>()];
          unpack<W>(bits[c], w);
          for (int r = 0; r < ROWS; ++r) {
            threadgroup const float4* x4 = (threadgroup const float4*)(staged + r * chunk + i);
            for (int j = 0; j < packed / 4; ++j) {
              sums[r][c] += dot(x4[j], float4(w[4 * j], w[4 * j + 1], w[4 * j + 2], w[4 * j + 3]));
            }
          }
        }
      }
    } else {
      for (int i = int(lane); i < length; i += 32) {
        for (int c = 0; c < GEMV_COLUMNS; ++c) {
          const float w = float(rows[c][begin + i]);
          for (int r = 0; r < ROWS; ++r) sums[r][c] += staged[r * chunk + i] * w;
        }
      }
    }
  }
  // Lane r * GEMV_COLUMNS + c stores sums[r][c].
  float mine = 0.0f;
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < GEMV_COLUMNS; ++c) {
      const float sum = simd_sum(sums[r][c]);
      if (int(lane) == r * GEMV_COLUMNS + c) mine = sum;
    }
  }
  const int row = int(lane) / GEMV_COLUMNS;
  const int column = int(lane) % GEMV_COLUMNS;
  if (row >= min(ROWS, params.m) || column >= num_columns) return;
  if (params.has_bias != 0) mine += float(bias[(first + column) * params.bias_stride]);
  out[long(row) * params.out_row_stride + first + column] = O(mine);
}

template <typename X, typename W, typename B, typename O>
[[kernel, max_total_threads_per_threadgroup(256)]] void linear_gemv(constant GemvParams& params [[buffer(0)]], device const X* x [[buffer(1)]],
                            device const W* weight [[buffer(2)]], device const B* bias [[buffer(3)]],
                            device O* out [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint num_threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                            uint simd_index [[simdgroup_index_in_threadgroup]]) {
  threadgroup vec<float, 4> staged[GEMV_STAGED / 4];
  threadgroup float* x_staged = (threadgroup float*)staged;
  if (params.m == 1) {
    gemv_rows<X, W, B, O, 1>(params, x, weight, bias, out, x_staged, group, thread_index, num_threads, lane,
                             simd_index);
  } else {
    gemv_rows<X, W, B, O, GEMV_ROWS>(params, x, weight, bias, out, x_staged, group, thread_index, num_threads, lane,
                                     simd_index);
  }
}

constant constexpr int GEMM_THREADS = 128;
constant constexpr int GEMM_COLUMNS = 64;
constant constexpr int GEMM_ROWS = 64;
constant constexpr int GEMM_DEPTH = 32;

// S is what is staged. PITCH: elements from one staged row to the next, 16 bytes more than it has, so that rows begin
// in different banks. FLOAT4S of threadgroup memory: two staged tiles, later the tile of sums.
template <typename S>
struct GemmTile {
  enum {
    PITCH = GEMM_DEPTH + 16 / int(sizeof(S)),
    STAGED = (GEMM_ROWS + GEMM_COLUMNS) * PITCH * int(sizeof(S)) / 16,
    SUMS = GEMM_ROWS * GEMM_COLUMNS / 4,
    FLOAT4S = int(STAGED) > int(SUMS) ? int(STAGED) : int(SUMS)
  };
};

// tile[i, j] = side[first + i, first_k + j], zero outside; `count` rows and `k` columns exist.
template <typename T, typename S>
inline void gemm_stage(threadgroup S* tile, int rows, device const T* from, constant const GemmSide& side, int first,
                       int count, int first_k, int k, uint thread_index) {
  const int pitch = GemmTile<S>::PITCH;
  if (side.access == GEMM_VECTORS) {
    const int packed = packed_count<T>();
    const int vectors = GEMM_DEPTH / packed;  // of a row
    for (int i = int(thread_index); i < rows * vectors; i += GEMM_THREADS) {
      const int row = i / vectors;
      const int column = i % vectors * packed;
      uint4 bits = uint4(0);
      if (first + row < count && first_k + column < k) {
        bits = *(device const uint4*)(from + long(first + row) * side.stride + first_k + column);
      }
      threadgroup S* to = tile + row * pitch + column;
      if (is_same<T, S>::value) {
        *(threadgroup uint4*)to = bits;
      } else {
        float values[packed_count<T>()];
        unpack<T>(bits, values);
        for (int j = 0; j < packed; ++j) to[j] = S(values[j]);
      }
    }
    return;
  }
  // Neighbouring threads lie along the dimension that is nearer in memory.
  const bool by_rows = side.access == GEMM_ROWS_NEAR;
  for (int i = int(thread_index); i < rows * GEMM_DEPTH; i += GEMM_THREADS) {
    const int row = by_rows ? i % rows : i / GEMM_DEPTH;
    const int column = by_rows ? i / rows : i % GEMM_DEPTH;
    S value = S(0.0f);
    if (first + row < count && first_k + column < k) {
      value = S(from[long(first + row) * side.stride + long(first_k + column) * side.k_stride]);
    }
    tile[row * pitch + column] = value;
  }
}

// Each of the 4 simdgroups makes TILES_M x TILES_N matrices; SIMD_COLUMNS of them lie side by side.
template <typename A, typename B, typename Bias, typename O, typename S, int TILES_M, int TILES_N, int SIMD_COLUMNS>
inline void gemm_tile(constant const GemmParams& params, device const A* a, device const B* b, device const Bias* bias,
                      device O* out, threadgroup float* memory, uint3 group, uint thread_index, uint simd_index) {
  const int rows = 4 / SIMD_COLUMNS * TILES_M * 8;
  const int pitch = GemmTile<S>::PITCH;
  threadgroup S* a_tile = (threadgroup S*)memory;
  threadgroup S* b_tile = a_tile + rows * pitch;
  const int first_row = int(group.y) * rows;
  const int first_column = int(group.x) * GEMM_COLUMNS;
  const int my_row = int(simd_index) / SIMD_COLUMNS * TILES_M * 8;
  const int my_column = int(simd_index) % SIMD_COLUMNS * TILES_N * 8;
  // Matrices with something inside out.
  const int tiles_m = clamp((params.m - first_row - my_row + 7) / 8, 0, TILES_M);
  const int tiles_n = clamp((params.n - first_column - my_column + 7) / 8, 0, TILES_N);
  simdgroup_matrix<float, 8, 8> sums[TILES_M][TILES_N];
  for (int i = 0; i < TILES_M; ++i) {
    for (int j = 0; j < TILES_N; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int begin = 0; begin < params.k; begin += GEMM_DEPTH) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    gemm_stage<A, S>(a_tile, rows, a, params.a, first_row, params.m, begin, params.k, thread_index);
    gemm_stage<B, S>(b_tile, GEMM_COLUMNS, b, params.b, first_column, params.n, begin, params.k, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tiles_m == 0 || tiles_n == 0) continue;
    for (int k = 0; k < GEMM_DEPTH && begin + k < params.k; k += 8) {
      simdgroup_matrix<S, 8, 8> right[TILES_N];
      for (int j = 0; j < TILES_N; ++j) {
        if (j < tiles_n) {
          simdgroup_load(right[j], b_tile + (my_column + 8 * j) * pitch + k, ulong(pitch), ulong2(0, 0), true);
        }
      }
      for (int i = 0; i < TILES_M; ++i) {
        if (i < tiles_m) {
          simdgroup_matrix<S, 8, 8> left;
          simdgroup_load(left, a_tile + (my_row + 8 * i) * pitch + k, ulong(pitch));
          for (int j = 0; j < TILES_N; ++j) {
            if (j < tiles_n) simdgroup_multiply_accumulate(sums[i][j], left, right[j], sums[i][j]);
          }
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < TILES_M; ++i) {
    for (int j = 0; j < TILES_N; ++j) {
      if (i < tiles_m && j < tiles_n) {
        simdgroup_store(sums[i][j], memory + (my_row + 8 * i) * GEMM_COLUMNS + my_column + 8 * j,
                        ulong(GEMM_COLUMNS));
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(thread_index); i < rows * GEMM_COLUMNS; i += GEMM_THREADS) {
    const int row = first_row + i / GEMM_COLUMNS;
    const int column = first_column + i % GEMM_COLUMNS;
    if (row >= params.m) break;
    if (column >= params.n) continue;
    float value = memory[i];
    if (params.has_bias != 0) value += float(bias[long(column) * params.bias_stride]);
    out[long(row) * params.out_row_stride + long(column) * params.out_column_stride] = O(value);
  }
}

template <typename A, typename B, typename Bias, typename O, typename S>
inline void gemm(constant const GemmParams& params, device const A* a, device const B* b, device const Bias* bias,
                 device O* out, threadgroup float* memory, uint3 group, uint thread_index, uint simd_index) {
  if (params.tile_rows == GEMM_ROWS) {
    gemm_tile<A, B, Bias, O, S, 4, 4, 2>(params, a, b, bias, out, memory, group, thread_index, simd_index);
  } else {
    gemm_tile<A, B, Bias, O, S, 4, 2, 4>(params, a, b, bias, out, memory, group, thread_index, simd_index);
  }
}

// S is what tiles are staged as: the type of x and weight where they agree, else float.
template <typename X, typename W, typename B, typename O, typename S>
[[kernel, max_total_threads_per_threadgroup(GEMM_THREADS)]] void linear_gemm(constant GemmParams& params [[buffer(0)]], device const X* x [[buffer(1)]],
                            device const W* weight [[buffer(2)]], device const B* bias [[buffer(3)]],
                            device O* out [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint simd_index [[simdgroup_index_in_threadgroup]]) {
  threadgroup vec<float, 4> memory[GemmTile<S>::FLOAT4S];
  gemm<X, W, B, O, S>(params, x, weight, bias, out, (threadgroup float*)memory, group, thread_index, simd_index);
}

// Any strides; 0 broadcasts.
template <typename A, typename B, typename O, typename S>
[[kernel, max_total_threads_per_threadgroup(GEMM_THREADS)]] void matmul(constant GemmParams& params [[buffer(0)]], device const A* a [[buffer(1)]],
                       device const B* b [[buffer(2)]], device O* out [[buffer(3)]],
                       uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                       uint simd_index [[simdgroup_index_in_threadgroup]]) {
  threadgroup vec<float, 4> memory[GemmTile<S>::FLOAT4S];
  a += strided_offset(group.z, params.batch_rank, params.batch_sizes, params.a_batch_strides);
  b += strided_offset(group.z, params.batch_rank, params.batch_sizes, params.b_batch_strides);
  out += strided_offset(group.z, params.batch_rank, params.batch_sizes, params.out_batch_strides);
  gemm<A, B, O, O, S>(params, a, b, out, out, (threadgroup float*)memory, group, thread_index, simd_index);
}
