#include "metal_delegate/flex_attention.h"

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "metal_delegate/flex_kernels.h"
#include "metal_delegate/flex_plan.h"
#include "metal_delegate/ranges.h"

namespace flexpte {
namespace {

Status invalid(std::string what) {
  return Status(Code::kInvalidArgument, "flex_attention: " + std::move(what));
}

// The expression with the roles of rows and columns exchanged: the prefill kernel's rows are keys.
Expression transposed(const Expression& expression) {
  Expression result = expression;
  for (ExprNode& node : result.nodes) {
    if (node.op == ExprOp::kQIdx) {
      node.op = ExprOp::kKvIdx;
    } else if (node.op == ExprOp::kKvIdx) {
      node.op = ExprOp::kQIdx;
    }
  }
  return result;
}

bool loads_captures(const Expression& expression) {
  return std::any_of(expression.nodes.begin(), expression.nodes.end(),
                     [](const ExprNode& node) { return node.op == ExprOp::kLoad; });
}

Status check_rank(const char* name, const TensorView& view, int32_t rank) {
  if (view.rank == rank) return Status::ok();
  return invalid(std::string(name) + " has shape " + shape_string(view) + ", expected " + std::to_string(rank) +
                 " dimensions");
}

Status check_sizes(const char* name, const TensorView& view, std::initializer_list<int64_t> sizes) {
  FLEXPTE_TRY(check_rank(name, view, static_cast<int32_t>(sizes.size())));
  if (std::equal(sizes.begin(), sizes.end(), view.sizes.begin())) return Status::ok();
  TensorView expected = view;
  std::copy(sizes.begin(), sizes.end(), expected.sizes.begin());
  return invalid(std::string(name) + " has shape " + shape_string(view) + ", expected " + shape_string(expected));
}

// What planning needs to be right: shapes, but not what lies in memory.
Status check_shapes(const FlexAttentionArgs& args) {
  FLEXPTE_TRY(check_rank("query", args.query, 4));
  FLEXPTE_TRY(check_rank("key", args.key, 4));
  FLEXPTE_TRY(check_rank("value", args.value, 4));
  const int64_t batch = args.query.size(0);
  const int64_t num_heads = args.query.size(1);
  const int64_t kv_batch = args.key.size(0);
  const int64_t num_kv_heads = args.key.size(1);
  const int64_t num_keys = args.key.size(2);
  if (args.key.size(3) != args.query.size(3) || (kv_batch != batch && kv_batch != 1)) {
    return invalid("key has shape " + shape_string(args.key) + ", which does not fit query " +
                   shape_string(args.query) + ": the head dimensions must be equal, and the batch equal or 1");
  }
  if (num_kv_heads == 0 ? num_heads != 0 : num_heads % num_kv_heads != 0) {
    return invalid(std::to_string(num_heads) + " query heads are not a multiple of " + std::to_string(num_kv_heads) +
                   " key heads");
  }
  FLEXPTE_TRY(check_sizes("value", args.value, {kv_batch, num_kv_heads, num_keys, args.value.size(3)}));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kFlexKeyChunk;
  if (args.query.size(2) > kMost || num_keys > kMost) {
    return Status(Code::kUnsupported, "flex_attention: query " + shape_string(args.query) + " and key " +
                                          shape_string(args.key) + ": at most " + std::to_string(kMost) +
                                          " queries and keys are supported");
  }
  return Status::ok();
}

Status check_list(const FlexAttentionSpec& spec, const FlexAttentionArgs& args, const char* name,
                  const TensorView& num_blocks, const TensorView& indices) {
  const std::string list = std::string(name) + "_num_blocks";
  FLEXPTE_TRY(check_rank(list.c_str(), num_blocks, 3));
  FLEXPTE_TRY(check_rank((std::string(name) + "_indices").c_str(), indices, 4));
  const int64_t num_queries = args.query.size(2);
  const int64_t q_blocks = num_queries / spec.q_block_size + (num_queries % spec.q_block_size != 0 ? 1 : 0);
  for (const TensorView* view : {&num_blocks, &indices}) {
    if (view->dtype != DType::kI32 && view->dtype != DType::kI64) {
      return invalid(std::string(name) + " block lists have dtype " + std::string(dtype_name(view->dtype)) +
                     ", expected int32 or int64");
    }
    const bool fits = (view->size(0) == 1 || view->size(0) == args.query.size(0)) &&
                      (view->size(1) == 1 || view->size(1) == args.query.size(1)) && view->size(2) >= q_blocks;
    if (!fits) {
      return invalid(std::string(name) + " block lists have shape " + shape_string(*view) + ", expected [1 or " +
                     std::to_string(args.query.size(0)) + ", 1 or " + std::to_string(args.query.size(1)) + ", " +
                     std::to_string(q_blocks) + " or more blocks of " + std::to_string(spec.q_block_size) +
                     " queries, ...] for query " + shape_string(args.query));
    }
  }
  return Status::ok();
}

Status check_block_lists(const FlexAttentionSpec& spec, const FlexAttentionArgs& args) {
  if (!spec.has_block_lists) return Status::ok();
  if (args.kv_num_blocks.data == nullptr || args.kv_indices.data == nullptr) {
    return invalid("kv_num_blocks and kv_indices are missing");
  }
  FLEXPTE_TRY(check_list(spec, args, "kv", args.kv_num_blocks, args.kv_indices));
  if ((args.full_kv_num_blocks.data == nullptr) != (args.full_kv_indices.data == nullptr)) {
    return invalid("full_kv_num_blocks and full_kv_indices must be given together");
  }
  if (args.full_kv_num_blocks.data == nullptr) return Status::ok();
  return check_list(spec, args, "full_kv", args.full_kv_num_blocks, args.full_kv_indices);
}

Status check_mods(const FlexAttentionSpec& spec, const FlexAttentionArgs& args) {
  const auto check = [](const char* name, size_t given, int expected) {
    if (given == static_cast<size_t>(expected)) return Status::ok();
    return invalid(std::to_string(given) + " " + name + " given, expected " + std::to_string(expected));
  };
  FLEXPTE_TRY(check("score captures", args.score_captures.size(), spec.num_score_captures));
  FLEXPTE_TRY(check("mask captures", args.mask_captures.size(), spec.num_mask_captures));
  FLEXPTE_TRY(check("score scalars", args.score_scalars.size(), spec.num_score_scalars));
  return check("mask scalars", args.mask_scalars.size(), spec.num_mask_scalars);
}

Status check_tensors(const FlexAttentionArgs& args) {
  const DType dtype = args.query.dtype;
  if (dtype != DType::kF32 && dtype != DType::kF16 && dtype != DType::kBF16) {
    return invalid("query has dtype " + std::string(dtype_name(dtype)) + ", expected float32, float16 or bfloat16");
  }
  for (const auto& [name, view] : {std::pair("key", &args.key), {"value", &args.value}, {"out", &args.out}}) {
    if (view->dtype == dtype) continue;
    return invalid(std::string(name) + " has dtype " + std::string(dtype_name(view->dtype)) + ", query has " +
                   std::string(dtype_name(dtype)) + ": they must be equal");
  }
  const int64_t batch = args.query.size(0);
  const int64_t num_heads = args.query.size(1);
  const int64_t num_queries = args.query.size(2);
  const int64_t value_dim = args.value.size(3);
  FLEXPTE_TRY(check_sizes("out", args.out, {batch, num_heads, num_queries, value_dim}));
  if (value_dim > 1 && args.out.stride(3) != 1) return invalid("the last stride of out must be 1");
  if (args.lse.data == nullptr) return Status::ok();
  if (args.lse.dtype != DType::kF32) return invalid("lse must be float32");
  return check_sizes("lse", args.lse, {batch, num_heads, num_queries});
}

std::span<std::byte> aligned(std::span<std::byte> workspace) {
  const size_t offset = (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
  return workspace.subspan(std::min(offset, workspace.size()));
}

}  // namespace

struct FlexPlan::Impl {
  PlanData data;
};

FlexPlan::FlexPlan() : impl_(std::make_unique<Impl>()) {}
FlexPlan::~FlexPlan() = default;
FlexPlan::FlexPlan(FlexPlan&&) noexcept = default;
FlexPlan& FlexPlan::operator=(FlexPlan&&) noexcept = default;
FlexPlan::Counts FlexPlan::counts() const {
  return impl_->data.counts;
}

struct FlexAttention::Impl {
  FlexAttentionSpec spec;
  std::optional<MaskRanges> ranges;
  // Rows are queries (decode), or keys (prefill, transposed).
  std::optional<TileProgram> score, mask, score_transposed, mask_transposed;

  FlexMods decode_mods() const { return mods(score, mask); }
  FlexMods prefill_mods() const { return mods(score_transposed, mask_transposed); }
  // A mask that is the same for all positions, batches and heads included, still is evaluated: it may
  // read scalars.
  FlexMods mods(const std::optional<TileProgram>& score_program, const std::optional<TileProgram>& mask_program) const {
    FlexMods result;
    if (score_program) result.score = &*score_program;
    if (mask_program) result.mask = &*mask_program;
    result.score_loads = score_program && loads_captures(*spec.score);
    return result;
  }
  bool decodes(int64_t num_queries) const { return num_queries <= kFlexMaxDecodeQueries; }
};

FlexAttention::FlexAttention() : impl_(std::make_unique<Impl>()) {}
FlexAttention::~FlexAttention() = default;

Result<std::unique_ptr<FlexAttention>> FlexAttention::create(const FlexAttentionSpec& spec,
                                                             std::span<const int> score_capture_ranks,
                                                             std::span<const int> mask_capture_ranks) {
  const auto malformed = [](const std::string& what) {
    return Status(Code::kInvalidProgram, "flex_attention: " + what);
  };
  if (score_capture_ranks.size() != static_cast<size_t>(spec.num_score_captures) ||
      mask_capture_ranks.size() != static_cast<size_t>(spec.num_mask_captures)) {
    return malformed("the numbers of captures and of their ranks differ");
  }
  if (spec.has_block_lists && (spec.q_block_size <= 0 || spec.kv_block_size <= 0)) {
    return malformed("block size (" + std::to_string(spec.q_block_size) + ", " + std::to_string(spec.kv_block_size) +
                     ") must be positive");
  }
  std::unique_ptr<FlexAttention> attention(new FlexAttention());
  Impl& impl = *attention->impl_;
  impl.spec = spec;
  if (spec.score != nullptr) {
    FLEXPTE_ASSIGN(impl.score, TileProgram::compile(*spec.score, 0, spec.num_score_scalars, score_capture_ranks));
    FLEXPTE_ASSIGN(impl.score_transposed,
                   TileProgram::compile(transposed(*spec.score), 0, spec.num_score_scalars, score_capture_ranks));
    if (impl.score->result_type() != DType::kF32) {
      return malformed("the score expression gives " + std::string(dtype_name(impl.score->result_type())) +
                       ", expected float32");
    }
  }
  if (spec.mask != nullptr) {
    FLEXPTE_ASSIGN(impl.ranges, MaskRanges::compile(*spec.mask, spec.num_mask_scalars, mask_capture_ranks));
    FLEXPTE_ASSIGN(impl.mask, TileProgram::compile(*spec.mask, 0, spec.num_mask_scalars, mask_capture_ranks));
    FLEXPTE_ASSIGN(impl.mask_transposed,
                   TileProgram::compile(transposed(*spec.mask), 0, spec.num_mask_scalars, mask_capture_ranks));
    if (impl.mask->result_type() != DType::kBool || impl.mask->uses_score()) {
      return malformed("the mask expression must give bool and read no score");
    }
  }
  return attention;
}

Status FlexAttention::plan(const FlexAttentionArgs& args, FlexPlan& plan, const ThreadPool&) const {
  FLEXPTE_TRY(check_shapes(args));
  FLEXPTE_TRY(check_block_lists(impl_->spec, args));
  FLEXPTE_TRY(check_mods(impl_->spec, args));
  return build_plan(impl_->spec, args, impl_->ranges ? &*impl_->ranges : nullptr, plan.impl_->data);
}

size_t FlexAttention::workspace_bytes(const FlexAttentionArgs& upper_bounds, int num_threads) const {
  const FlexShape shape(upper_bounds);
  size_t bytes = flex_decode_workspace_bytes(shape, impl_->decode_mods(), num_threads);
  if (!impl_->decodes(shape.num_queries)) {
    bytes = std::max(bytes, flex_prefill_workspace_bytes(shape, impl_->prefill_mods(), num_threads));
  }
  return bytes + 63;  // the workspace is aligned inside
}

Status FlexAttention::run(const FlexAttentionArgs& args, const FlexPlan& plan, const ThreadPool& pool,
                          std::span<std::byte> workspace) const {
  FLEXPTE_TRY(check_shapes(args));
  FLEXPTE_TRY(check_mods(impl_->spec, args));
  FLEXPTE_TRY(check_tensors(args));
  const FlexShape shape(args);
  const PlanData& data = plan.impl_->data;
  if (data.num_queries != shape.num_queries || data.num_keys != shape.num_keys ||
      (data.num_batches != 1 && data.num_batches != shape.batch) ||
      (data.num_heads != 1 && data.num_heads != shape.num_heads)) {
    return invalid("the plan is for " + std::to_string(data.num_queries) + " queries and " +
                   std::to_string(data.num_keys) + " keys, not for query " + shape_string(args.query) + " and key " +
                   shape_string(args.key));
  }
  if (shape.batch == 0 || shape.num_heads == 0 || shape.num_queries == 0) return Status::ok();
  const size_t needed = workspace_bytes(args, pool.num_threads());
  if (workspace.size() < needed) {
    return Status(Code::kInternal, "flex_attention: workspace of " + std::to_string(workspace.size()) +
                                       " bytes, expected " + std::to_string(needed));
  }
  std::atomic<bool> score_out_of_bounds = false;
  std::atomic<bool> mask_out_of_bounds = false;
  const bool decode = impl_->decodes(shape.num_queries);
  const FlexCall call{shape,
                      impl_->spec.scale,
                      args,
                      data,
                      decode ? impl_->decode_mods() : impl_->prefill_mods(),
                      pool,
                      aligned(workspace),
                      &score_out_of_bounds,
                      &mask_out_of_bounds};
  if (decode) {
    flex_decode(call);
  } else {
    flex_prefill(call);
  }
  for (const auto& [name, failed] : {std::pair("score", &score_out_of_bounds), {"mask", &mask_out_of_bounds}}) {
    if (!failed->load()) continue;
    return Status(Code::kOutOfRange,
                  std::string("flex_attention: the ") + name +
                      " expression indexes a captured tensor outside its bounds; the tensor is too small for query " +
                      shape_string(args.query) + " and key " + shape_string(args.key));
  }
  return Status::ok();
}

}  // namespace flexpte
