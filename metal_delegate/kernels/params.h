// Params structs of the Metal kernels: one text for the host (C++) and for the kernels (MSL). Sizes and strides
// are in elements; members are laid out so that both compilers agree without padding of their own.
//
// The host includes it by metal_delegate/gpu/params.h.

// Raised whenever a struct or the order of a kernel's buffers changes: a file carries the version of its kernels.
#define FLEXPTE_KERNELS_VERSION 2

#define FLEXPTE_MAX_RANK 8
// Inputs and captures of one elementwise kernel.
#define FLEXPTE_MAX_OPERANDS 26

// How a captured tensor of a mod or of an elementwise expression is indexed.
struct CaptureView {
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t strides[FLEXPTE_MAX_RANK];
};

// Elementwise: `rows` times `inner` elements. Behind the header come the strides of the output and of each input, the
// view of each capture and the scalars, as many as the kernel has.
struct ElementwiseHeader {
  int64_t inner;
  uint32_t rows;
  int32_t rank;          // of the rows
  uint32_t vectors;      // bit k: four neighbours of operand k (0: the output) can be read or written at once
  uint32_t instruction;  // what a bad index of a capture is reported as
  int64_t sizes[FLEXPTE_MAX_RANK];
};
struct ElementwiseStrides {
  int64_t inner;
  int64_t rows[FLEXPTE_MAX_RANK];
};

// x [m, k] of at most 4 rows, weight [n, k] contiguous, out [m, n].
struct GemvParams {
  int64_t n;
  int64_t k;
  int64_t x_row_stride;
  int64_t out_row_stride;
  int64_t bias_stride;
  int32_t m;
  int32_t has_bias;
  int32_t is_vectorizable;  // rows of the weight begin at multiples of 16 bytes and end there
  int32_t padding;
};

// A matrix [outer, k].
#define GEMM_VECTORS 0     // rows begin and end at multiples of 16 bytes
#define GEMM_DEPTH_NEAR 1  // neighbours along k are nearer in memory
#define GEMM_ROWS_NEAR 2   // neighbours along the other dimension are
struct GemmSide {
  int64_t stride;
  int64_t k_stride;
  int32_t access;
  int32_t padding;
};

// a [..., m, k], b [..., n, k], out [..., m, n].
struct GemmParams {
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t tile_rows;  // 64 or 32
  int32_t has_bias;
  int32_t batch_rank;
  GemmSide a;
  GemmSide b;
  int64_t out_row_stride;
  int64_t out_column_stride;
  int64_t bias_stride;
  int64_t batch_sizes[FLEXPTE_MAX_RANK];
  int64_t a_batch_strides[FLEXPTE_MAX_RANK];
  int64_t b_batch_strides[FLEXPTE_MAX_RANK];
  int64_t out_batch_strides[FLEXPTE_MAX_RANK];
};

// Norms and softmax: rows over the last dimension.
struct RowParams {
  int64_t columns;
  int64_t rows;
  int32_t rank;  // of the leading dimensions
  float eps;
  int32_t has_weight;
  int32_t has_bias;
  int32_t is_log;
  int32_t is_row_per_simdgroup;  // else a row per threadgroup
  int32_t is_vectorizable;       // four neighbours of every operand can be read at once
  int32_t padding;
  int64_t x_stride;  // of the last dimension
  int64_t out_stride;
  int64_t weight_stride;
  int64_t bias_stride;
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t x_strides[FLEXPTE_MAX_RANK];
  int64_t out_strides[FLEXPTE_MAX_RANK];
};

#define REDUCE_BY_SIMDGROUP 0
#define REDUCE_BY_THREADGROUP 1
#define REDUCE_BY_THREAD 2
struct ReduceParams {
  int64_t outer_count;
  int64_t inner_count;
  int32_t outer_rank;
  int32_t inner_rank;
  int32_t mode;
  int32_t padding;
  int64_t outer_sizes[FLEXPTE_MAX_RANK];
  int64_t x_outer_strides[FLEXPTE_MAX_RANK];
  int64_t out_strides[FLEXPTE_MAX_RANK];
  int64_t inner_sizes[FLEXPTE_MAX_RANK];
  int64_t inner_strides[FLEXPTE_MAX_RANK];
};

// By dimension of out: `rows` are those but the innermost. The strides of source are 0 in those of the index and the
// other way round.
struct GatherParams {
  int64_t inner;  // elements, or groups of 16 bytes
  uint32_t rows;
  int32_t rank;
  uint32_t instruction;  // what a bad index is reported as
  int32_t is_vectorizable;
  int64_t source_size;  // of the indexed dimension
  int64_t source_stride;
  int64_t source_inner_stride;
  int64_t index_inner_stride;
  int64_t out_inner_stride;
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t source_strides[FLEXPTE_MAX_RANK];
  int64_t index_strides[FLEXPTE_MAX_RANK];
  int64_t out_strides[FLEXPTE_MAX_RANK];
};

// By dimension of source but the indexed one: `rows` are those but the innermost.
struct IndexCopyParams {
  int64_t count;  // of indices
  int64_t inner;  // elements, or groups of 16 bytes
  uint32_t rows;
  int32_t rank;
  uint32_t instruction;
  int32_t is_vectorizable;
  int64_t index_stride;
  int64_t target_size;  // of the indexed dimension
  int64_t target_stride;
  int64_t source_stride;
  int64_t target_inner_stride;
  int64_t source_inner_stride;
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t target_strides[FLEXPTE_MAX_RANK];
  int64_t source_strides[FLEXPTE_MAX_RANK];
};

struct ArangeParams {
  int64_t count;
  int64_t start;
  int64_t step;
  int64_t stride;
};

// FlexAttention; see flex_common.metal for the buffers. Strides in the order of the dimensions.
struct FlexParams {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t q_len;
  int32_t num_tiles;      // of queries, by the plan
  int32_t heads_at_once;  // query heads of one KV group whose rows a threadgroup has
  int32_t plan_batches;   // 1: all batches share a plan
  int32_t plan_heads;     // 1: all heads share a plan
  int32_t num_splits;     // of the keys that a tile visits
  int32_t has_lse;
  int32_t is_vectorizable;  // rows of keys and values can be read 16 bytes at a time
  int32_t has_kv_batch;     // 0: one batch of keys serves all
  int32_t has_row_bounds;   // whether the plan has a run of kind 1
  float scale;
  uint32_t instruction;  // what a bad index of a capture is reported as
  int64_t query_strides[4];
  int64_t key_strides[4];
  int64_t value_strides[4];
  int64_t out_strides[4];
  int64_t lse_strides[3];
};

// Keys begin <= kv < end that a tile of queries visits.
struct KeyRun {
  int32_t begin;
  int32_t end;
  int32_t kind;  // 0: every row sees every key; 1: row q sees [row_bounds[q].x, row_bounds[q].y); 2: the mask decides
};
