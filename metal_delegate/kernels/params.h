// Params structs of the Metal kernels: one text for the host (C++) and for the kernels (MSL). Sizes and strides
// are in elements; members are laid out so that both compilers agree without padding of their own.
//
// The host includes it by metal_delegate/gpu/params.h.

#define FLEXPTE_MAX_RANK 8
// Tensors of one elementwise kernel: its output, inputs and captures leave room for views, scalars and params.
#define FLEXPTE_MAX_OPERANDS 28

// How a captured tensor of a mod or of an elementwise expression is indexed.
struct CaptureView {
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t strides[FLEXPTE_MAX_RANK];
};

// Operand 0 is the output.
struct ElementwiseParams {
  uint32_t count;
  int32_t rank;
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t strides[FLEXPTE_MAX_OPERANDS][FLEXPTE_MAX_RANK];
};

// x [m, k], weight [n, k] contiguous, out [m, n].
struct GemvParams {
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t has_bias;
  int32_t is_vectorizable;  // rows of x and weight can be read four elements at a time
  int32_t padding;
  int64_t x_row_stride;
  int64_t out_row_stride;
};

// a [..., m, k], b [..., k, n], out [..., m, n].
struct GemmParams {
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t has_bias;
  int64_t a_row_stride;
  int64_t a_column_stride;
  int64_t b_row_stride;
  int64_t b_column_stride;
  int64_t out_row_stride;
  int64_t out_column_stride;
  int32_t batch_rank;
  int32_t padding;
  int64_t batch_sizes[FLEXPTE_MAX_RANK];
  int64_t a_batch_strides[FLEXPTE_MAX_RANK];
  int64_t b_batch_strides[FLEXPTE_MAX_RANK];
  int64_t out_batch_strides[FLEXPTE_MAX_RANK];
};

// Norms and softmax: rows over the last dimension, which is contiguous in x and out.
struct RowParams {
  int32_t columns;
  int32_t rank;  // of the leading dimensions
  float eps;
  int32_t has_weight;
  int32_t has_bias;
  int32_t is_log;
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t x_strides[FLEXPTE_MAX_RANK];
  int64_t out_strides[FLEXPTE_MAX_RANK];
};

struct ReduceParams {
  int32_t outer_rank;
  int32_t inner_rank;
  uint32_t inner_count;
  uint32_t outer_count;
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t x_strides[FLEXPTE_MAX_RANK];
  int64_t out_strides[FLEXPTE_MAX_RANK];
  int64_t inner_sizes[FLEXPTE_MAX_RANK];
  int64_t inner_strides[FLEXPTE_MAX_RANK];
};

// By dimension of out; the strides of source are 0 in those of the index and the other way round.
struct GatherParams {
  uint32_t count;
  int32_t rank;
  uint32_t instruction;  // what a bad index is reported as
  uint32_t padding;
  int64_t source_size;  // of the indexed dimension
  int64_t source_stride;
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t out_strides[FLEXPTE_MAX_RANK];
  int64_t source_strides[FLEXPTE_MAX_RANK];
  int64_t index_strides[FLEXPTE_MAX_RANK];
};

// By dimension of source.
struct IndexCopyParams {
  uint32_t count;
  int32_t rank;
  int32_t dim;
  uint32_t instruction;
  int64_t target_size;  // of the indexed dimension
  int64_t index_stride;
  int64_t sizes[FLEXPTE_MAX_RANK];
  int64_t source_strides[FLEXPTE_MAX_RANK];
  int64_t target_strides[FLEXPTE_MAX_RANK];
};

struct ArangeParams {
  uint32_t count;
  uint32_t padding;
  int64_t start;
  int64_t step;
  int64_t stride;
};

// FlexAttention; see flex_common.metal for the buffers. Strides of the last dimension are 1.
struct FlexParams {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t q_len;
  int32_t num_tiles;        // of queries, by the plan
  int32_t heads_at_once;    // query heads of one KV group whose rows a threadgroup has
  int32_t plan_batches;     // 1: all batches share a plan
  int32_t plan_heads;       // 1: all heads share a plan
  int32_t num_splits;       // of the keys that a tile visits
  int32_t has_lse;
  int32_t is_vectorizable;  // rows of keys and values can be read 16 bytes at a time
  int32_t has_kv_batch;     // 0: one batch of keys serves all
  float scale;
  int64_t query_strides[3];
  int64_t key_strides[3];
  int64_t value_strides[3];
  int64_t out_strides[3];
  int64_t lse_strides[3];
};

// Keys begin <= kv < end that a tile of queries visits.
struct KeyRun {
  int32_t begin;
  int32_t end;
  int32_t kind;  // 0: every row sees every key; 1: row q sees [row_begin[q], row_end[q]); 2: the mask decides
};
