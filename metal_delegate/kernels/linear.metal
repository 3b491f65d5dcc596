// out[m, n] = sum_k x[m, k] weight[n, k] (+ bias[n]), accumulated in float.
//
// linear_gemv, for a few rows: a threadgroup of 8 simdgroups makes 32 columns of ROWS rows. It stages a
// chunk of the rows of x in threadgroup memory, which all its simdgroups read; each simdgroup streams 4 rows of
// the weight, its lanes side by side along k, and sums over its lanes at the end. The weight is read once.
//
// matrix_product, for the rest (and for batched products): a threadgroup of 4 simdgroups makes a 64 x 64 tile of
// out. Per step it stages 64 x 32 of a and 32 x 64 of b in threadgroup memory, zeros beyond the edges; each
// simdgroup multiplies its 32 x 32 quarter as 4 x 4 matrices of 8 x 8. The finished tile goes through
// threadgroup memory, so that edges, bias and narrowing are handled element by element.

#define GEMV_CHUNK 512
#define GEMV_COLUMNS 4

template <typename TX, typename TW, typename TB, typename TO, int ROWS>
[[kernel]] void linear_gemv(constant GemvParams& params [[buffer(0)]], device const TX* x [[buffer(1)]],
                            device const TW* weight [[buffer(2)]], device const TB* bias [[buffer(3)]],
                            device TO* out [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float staged[ROWS * GEMV_CHUNK];
  const int first_row = int(group.y) * ROWS;
  const int num_rows = min(ROWS, params.m - first_row);
  const int first_column = (int(group.x) * 8 + int(simdgroup)) * GEMV_COLUMNS;
  float sums[ROWS][GEMV_COLUMNS];
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < GEMV_COLUMNS; ++c) sums[r][c] = 0.0f;
  }
  for (int begin = 0; begin < params.k; begin += GEMV_CHUNK) {
    const int length = min(GEMV_CHUNK, params.k - begin);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = 0; r < num_rows; ++r) {
      device const TX* row = x + long(first_row + r) * params.x_row_stride + begin;
      for (int i = int(thread_index); i < length; i += 256) staged[r * GEMV_CHUNK + i] = float(row[i]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < GEMV_COLUMNS; ++c) {
      if (first_column + c >= params.n) break;
      device const TW* row = weight + long(first_column + c) * params.k + begin;
      if (params.is_vectorizable != 0) {
        device const vec<TW, 4>* row4 = (device const vec<TW, 4>*)row;
        for (int i = int(lane); i < length / 4; i += 32) {
          const float4 w = float4(row4[i]);
          for (int r = 0; r < num_rows; ++r) {
            threadgroup const float4* x4 = (threadgroup const float4*)(staged + r * GEMV_CHUNK);
            sums[r][c] += dot(w, x4[i]);
          }
        }
      } else {
        for (int i = int(lane); i < length; i += 32) {
          const float w = float(row[i]);
          for (int r = 0; r < num_rows; ++r) sums[r][c] += w * staged[r * GEMV_CHUNK + i];
        }
      }
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    for (int c = 0; c < GEMV_COLUMNS; ++c) {
      const float sum = simd_sum(sums[r][c]);
      const int column = first_column + c;
      if (int(lane) == c && column < params.n) {
        const float shifted = params.has_bias != 0 ? sum + float(bias[column]) : sum;
        out[long(first_row + r) * params.out_row_stride + column] = TO(shifted);
      }
    }
  }
}

#define GEMM_TILE 64
#define GEMM_STEP 32

template <typename TA, typename TB, typename TBias, typename TO, typename TS>
inline void matrix_product(constant const GemmParams& params, device const TA* a, device const TB* b,
                           device const TBias* bias, device TO* out, threadgroup float* shared, uint3 group,
                           uint thread_index, uint simdgroup) {
  uint batch = group.z;
  a += strided_offset(batch, params.batch_rank, params.batch_sizes, params.a_batch_strides);
  b += strided_offset(batch, params.batch_rank, params.batch_sizes, params.b_batch_strides);
  out += strided_offset(batch, params.batch_rank, params.batch_sizes, params.out_batch_strides);
  threadgroup TS* staged_a = (threadgroup TS*)shared;
  threadgroup TS* staged_b = staged_a + GEMM_TILE * GEMM_STEP;
  const int first_row = int(group.y) * GEMM_TILE;
  const int first_column = int(group.x) * GEMM_TILE;
  const int quarter_row = int(simdgroup / 2) * 32;
  const int quarter_column = int(simdgroup % 2) * 32;
  simdgroup_matrix<float, 8, 8> sums[4][4];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int begin = 0; begin < params.k; begin += GEMM_STEP) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = int(thread_index); i < GEMM_TILE * GEMM_STEP; i += 128) {
      const int row = i / GEMM_STEP;
      const int column = i % GEMM_STEP;
      const bool is_inside = first_row + row < params.m && begin + column < params.k;
      TS value = TS(0.0f);
      if (is_inside) {
        value = TS(a[long(first_row + row) * params.a_row_stride + long(begin + column) * params.a_column_stride]);
      }
      staged_a[i] = value;
    }
    // Threads lie along the dimension of b that is nearer in memory: k of a weight, n of a plain matrix.
    for (int i = int(thread_index); i < GEMM_TILE * GEMM_STEP; i += 128) {
      const bool by_rows = params.b_row_stride == 1;
      const int row = by_rows ? i % GEMM_STEP : i / GEMM_TILE;
      const int column = by_rows ? i / GEMM_STEP : i % GEMM_TILE;
      const bool is_inside = begin + row < params.k && first_column + column < params.n;
      TS value = TS(0.0f);
      if (is_inside) {
        value = TS(b[long(begin + row) * params.b_row_stride + long(first_column + column) * params.b_column_stride]);
      }
      staged_b[row * GEMM_TILE + column] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = 0; k < GEMM_STEP; k += 8) {
      simdgroup_matrix<TS, 8, 8> left[4];
      simdgroup_matrix<TS, 8, 8> right[4];
      for (int i = 0; i < 4; ++i) {
        simdgroup_load(left[i], staged_a + (quarter_row + 8 * i) * GEMM_STEP + k, GEMM_STEP);
        simdgroup_load(right[i], staged_b + k * GEMM_TILE + quarter_column + 8 * i, GEMM_TILE);
      }
      for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 4; ++j) simdgroup_multiply_accumulate(sums[i][j], left[i], right[j], sums[i][j]);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      simdgroup_store(sums[i][j], shared + (quarter_row + 8 * i) * GEMM_TILE + quarter_column + 8 * j, GEMM_TILE);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = int(thread_index); i < GEMM_TILE * GEMM_TILE; i += 128) {
    const int row = first_row + i / GEMM_TILE;
    const int column = first_column + i % GEMM_TILE;
    if (row >= params.m || column >= params.n) continue;
    const float value = params.has_bias != 0 ? shared[i] + float(bias[column]) : shared[i];
    out[long(row) * params.out_row_stride + long(column) * params.out_column_stride] = TO(value);
  }
}

// TS is what tiles are staged as: the type of both where they agree, else float.
template <typename TX, typename TW, typename TB, typename TO, typename TS>
[[kernel]] void linear_gemm(constant GemmParams& params [[buffer(0)]], device const TX* x [[buffer(1)]],
                            device const TW* weight [[buffer(2)]], device const TB* bias [[buffer(3)]],
                            device TO* out [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float shared[GEMM_TILE * GEMM_TILE];
  matrix_product<TX, TW, TB, TO, TS>(params, x, weight, bias, out, shared, group, thread_index, simdgroup);
}

template <typename TA, typename TB, typename TO, typename TS>
[[kernel]] void matmul(constant GemmParams& params [[buffer(0)]], device const TA* a [[buffer(1)]],
                       device const TB* b [[buffer(2)]], device TO* out [[buffer(3)]],
                       uint3 group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float shared[GEMM_TILE * GEMM_TILE];
  matrix_product<TA, TB, TO, TO, TS>(params, a, b, out, out, shared, group, thread_index, simdgroup);
}
