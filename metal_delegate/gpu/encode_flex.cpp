#include "metal_delegate/gpu/encode_flex.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "metal_delegate/gpu/params.h"

namespace flexpte::gpu {
namespace {

namespace operand = bound::operand;

// Kernels, in the order of Instruction::kernels.
enum Kind : size_t { kPrefill = 0, kMerge = 1, kChunk = 2, kDecode = 3 };

// Instructions whose masks are one expression and read captures of equal ranks share one.
struct Compiled {
  int32_t expression;
  size_t num_scalars;
  std::vector<int> ranks;
  std::shared_ptr<const MaskRanges> mask;
};

FlexAttentionArgs arguments_of(const bound::FlexParams& params, const Call& call) {
  FlexAttentionArgs args;
  args.query = call.operands[operand::kQuery];
  args.key = call.operands[operand::kKey];
  args.value = call.operands[operand::kValue];
  args.out = call.operands[operand::kFlexOut];
  args.lse = call.operands[operand::kLse];
  args.kv_num_blocks = call.operands[operand::kKvNumBlocks];
  args.kv_indices = call.operands[operand::kKvIndices];
  args.full_kv_num_blocks = call.operands[operand::kFullKvNumBlocks];
  args.full_kv_indices = call.operands[operand::kFullKvIndices];
  const auto captures = call.operands.subspan(operand::kFirstCapture);
  args.score_captures = captures.first(static_cast<size_t>(params.num_score_captures));
  args.mask_captures = captures.subspan(static_cast<size_t>(params.num_score_captures));
  args.score_scalars = call.scalars.first(static_cast<size_t>(params.num_score_scalars));
  args.mask_scalars = call.scalars.subspan(static_cast<size_t>(params.num_score_scalars));
  return args;
}

template <class T>
Result<BufferArgument> copied(Encoder& encoder, std::span<const T> values, std::string_view name) {
  if (values.empty()) return BufferArgument{};
  FLEXPTE_ASSIGN(const std::span<std::byte> bytes, encoder.scratch(values.size_bytes()));
  std::copy(values.begin(), values.end(), reinterpret_cast<T*>(bytes.data()));
  return read(std::span<const std::byte>(bytes), name);
}

template <size_t N>
void copy_strides(const TensorView& view, int64_t (&strides)[N]) {
  for (size_t d = 0; d < N; ++d) strides[d] = view.strides[d];
}

bool reads_16_bytes(const TensorView& view) {
  const int64_t size = element_size_bytes(view.dtype);
  bool fits = view.size(3) * size % 16 == 0 && view.stride(3) == 1 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int32_t d = 0; d < 3; ++d) fits = fits && (view.size(d) == 1 || view.stride(d) * size % 16 == 0);
  return fits;
}

// How many heads of a group share a threadgroup with `rows` rows, a divisor of `group`. The more, the fewer queries
// and so the fewer keys beside a window that are read in vain; but each tile of queries is one to plan.
int64_t heads_at_once(int64_t group, int64_t q_len, int64_t rows) {
  constexpr int64_t kManyHeads = 8;
  for (int64_t heads = std::min({group, rows, std::max(kManyHeads, rows / q_len)}); heads > 1; --heads) {
    if (group % heads == 0) return heads;
  }
  return 1;
}

// How many threadgroups share the keys of one tile. As many as give every core threads enough to hide the latency
// of memory: 1024 where rows are few and memory decides, 512 where matrix products do. More only adds to the merge,
// and a split should have about 256 keys to be worth its start; but where even that leaves cores without work, as
// for a model with one KV head, 64 will do.
int64_t choose_splits(int64_t num_threadgroups, int64_t threads, bool is_decode, int64_t most_keys,
                      uint32_t num_cores) {
  constexpr int64_t kKeysPerSplit = 256;
  constexpr int64_t kLeastKeysPerSplit = 64;
  constexpr int64_t kMaxSplits = 256;
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t wanted = divide_up((is_decode ? 1024 : 512) * int64_t{num_cores}, threads * num_threadgroups);
  int64_t worthwhile = divide_up(most_keys, kKeysPerSplit);
  if (num_threadgroups * worthwhile < num_cores) {
    worthwhile = std::min(divide_up(num_cores, num_threadgroups), divide_up(most_keys, kLeastKeysPerSplit));
  }
  return std::clamp<int64_t>(std::min(wanted, worthwhile), 1, kMaxSplits);
}

}  // namespace

Result<FlexPlanners> FlexPlanners::create(const bound::BoundProgram& program) {
  FlexPlanners planners;
  planners.masks_.resize(program.instructions.size());
  std::vector<Compiled> compiled;
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const bound::Instruction& instruction = program.instructions[i];
    if (instruction.kind != bound::OpKind::kFlexAttention) continue;
    const auto& params = std::get<bound::FlexParams>(instruction.params);
    const size_t num_kernels = params.decode_rows > 0 ? 4 : 3;
    if (instruction.kernels.size() != num_kernels || params.prefill_rows == 0 || params.prefill_threads == 0 ||
        params.chunk_rows == 0 || params.chunk_threads == 0) {
      return Status(Code::kInvalidProgram,
                    bound::describe_instruction(program, i) + " has " + std::to_string(instruction.kernels.size()) +
                        " Metal kernels, expected " + std::to_string(num_kernels) + " with rows and threads");
    }
    if (params.mask < 0) continue;
    std::vector<int> ranks;
    const size_t first = operand::kFirstCapture + static_cast<size_t>(params.num_score_captures);
    for (size_t k = first; k < instruction.operands.size(); ++k) {
      ranks.push_back(program.values[static_cast<size_t>(instruction.operands[k])].view.rank);
    }
    const auto num_scalars = static_cast<size_t>(params.num_mask_scalars);
    const auto same = std::find_if(compiled.begin(), compiled.end(), [&](const Compiled& c) {
      return c.expression == params.mask && c.num_scalars == num_scalars && c.ranks == ranks;
    });
    if (same != compiled.end()) {
      planners.masks_[i] = same->mask;
      continue;
    }
    FLEXPTE_ASSIGN(MaskRanges mask, MaskRanges::compile(program.expressions[static_cast<size_t>(params.mask)],
                                                        params.num_mask_scalars, ranks));
    planners.masks_[i] = std::make_shared<const MaskRanges>(std::move(mask));
    compiled.push_back({params.mask, num_scalars, std::move(ranks), planners.masks_[i]});
  }
  return planners;
}

Result<const DevicePlan*> FlexPlans::plan(Encoder& encoder, size_t instruction, int32_t plan_number, int64_t q_tile,
                                          int64_t heads, const FlexAttentionSpec& spec, const FlexAttentionArgs& args) {
  const std::tuple key{plan_number, q_tile, heads};
  const auto found = plans_.find(key);
  if (found != plans_.end()) return static_cast<const DevicePlan*>(&found->second);
  FLEXPTE_TRY(build_plan(spec, args, planners_.mask(instruction), data_, q_tile));
  if (data_.num_heads > 1) put_heads_together(data_, heads);
  DevicePlan plan;
  plan.num_tiles = static_cast<int32_t>(data_.num_tiles());
  plan.num_batches = static_cast<int32_t>(data_.num_batches);
  plan.num_heads = static_cast<int32_t>(data_.num_heads);
  std::vector<params::KeyRun> runs;
  runs.reserve(data_.runs.size());
  bool has_bounds = false;
  for (const KeyRun& run : data_.runs) {
    runs.push_back({run.begin, run.end, static_cast<int32_t>(run.kind)});
    has_bounds = has_bounds || run.kind == RunKind::kBounds;
  }
  std::vector<int32_t> first_run(data_.first_run.begin(), data_.first_run.end());
  for (size_t tile = 0; tile + 1 < first_run.size(); ++tile) {
    int64_t keys = 0;
    for (int32_t r = first_run[tile]; r < first_run[tile + 1]; ++r) {
      keys += runs[static_cast<size_t>(r)].end - runs[static_cast<size_t>(r)].begin;
    }
    plan.most_keys = std::max(plan.most_keys, keys);
  }
  FLEXPTE_ASSIGN(plan.tile_begin, copied<int32_t>(encoder, data_.tile_begin, "plan"));
  FLEXPTE_ASSIGN(plan.first_run, copied<int32_t>(encoder, first_run, "plan"));
  FLEXPTE_ASSIGN(plan.runs, copied<params::KeyRun>(encoder, runs, "plan"));
  if (has_bounds) {
    std::vector<int32_t> bounds;
    bounds.reserve(2 * data_.row_begin.size());
    for (size_t row = 0; row < data_.row_begin.size(); ++row) {
      bounds.insert(bounds.end(), {data_.row_begin[row], data_.row_end[row]});
    }
    FLEXPTE_ASSIGN(plan.row_bounds, copied<int32_t>(encoder, bounds, "plan"));
  }
  return static_cast<const DevicePlan*>(&plans_.emplace(key, plan).first->second);
}

Status encode_flex_attention(Encoder& encoder, FlexPlans& plans, const Call& call) {
  const auto& instruction = std::get<bound::FlexParams>(call.instruction.params);
  const FlexAttentionArgs args = arguments_of(instruction, call);
  FlexAttentionSpec spec;
  spec.has_block_lists = call.instruction.operands[operand::kKvNumBlocks] >= 0;
  spec.q_block_size = instruction.q_block_size;
  spec.kv_block_size = instruction.kv_block_size;
  const int64_t batch = args.query.size(0);
  const int64_t num_heads = args.query.size(1);
  const int64_t q_len = args.query.size(2);
  const int64_t value_dim = args.value.size(3);
  const int64_t num_kv_heads = args.key.size(1);
  const int64_t group = num_heads / num_kv_heads;
  const MaskRanges* mask = plans.planners().mask(call.number);

  // Rows are (query, head of the group), so that keys are read once for the group. Where heads visit different keys,
  // memory decides while rows are few, and the group visits what any of its heads does; else matrix products do, and
  // a head visits its own. Block lists that differ decide alone: no row could tell which keys are its own.
  const int64_t few_heads = lists_depend_on_head(spec, args) ? 1 : group;
  Kind kind = q_len * few_heads <= instruction.decode_rows  ? kDecode
              : q_len * few_heads <= instruction.chunk_rows ? kChunk
                                                            : kPrefill;
  const int64_t many_heads = plan_depends_on_head(spec, args, mask) ? 1 : group;
  const int64_t rows = kind == kPrefill ? instruction.prefill_rows : instruction.chunk_rows;
  const int64_t heads = kind == kPrefill ? heads_at_once(many_heads, q_len, rows) : few_heads;
  const int64_t q_tile = kind == kPrefill ? rows / heads : q_len;
  FLEXPTE_ASSIGN(const DevicePlan* plan, plans.plan(encoder, call.number, instruction.plan, q_tile, heads, spec, args));
  // Block lists may cut even a few queries into several tiles.
  if (kind == kDecode && plan->num_tiles != 1) kind = kChunk;

  params::FlexParams params{};
  params.num_heads = static_cast<int32_t>(num_heads);
  params.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  params.q_len = static_cast<int32_t>(q_len);
  params.num_tiles = plan->num_tiles;
  params.heads_at_once = static_cast<int32_t>(heads);
  params.plan_batches = plan->num_batches;
  params.plan_heads = plan->num_heads;
  params.has_lse = args.lse.data != nullptr;
  params.is_vectorizable = reads_16_bytes(args.key) && reads_16_bytes(args.value);
  params.has_row_bounds = plan->row_bounds.data != nullptr;
  params.has_kv_batch = args.key.size(0) != 1 || batch == 1;
  params.scale = instruction.scale;
  params.instruction = static_cast<uint32_t>(call.number + 1);
  copy_strides(args.query, params.query_strides);
  copy_strides(args.key, params.key_strides);
  copy_strides(args.value, params.value_strides);
  copy_strides(args.out, params.out_strides);
  copy_strides(args.lse, params.lse_strides);

  constexpr int64_t kDecodeThreads = 128;
  const int64_t threads = kind == kDecode  ? kDecodeThreads
                          : kind == kChunk ? instruction.chunk_threads
                                           : instruction.prefill_threads;
  const int64_t head_groups = num_heads / heads;
  const int64_t splits = choose_splits(plan->num_tiles * head_groups * batch, threads, kind == kDecode, plan->most_keys,
                                       encoder.queue().num_cores());
  params.num_splits = static_cast<int32_t>(splits);
  BufferArgument partial_out;
  BufferArgument partial_lse;
  if (splits > 1) {
    const auto rows = static_cast<size_t>(batch * num_heads * q_len * splits);
    FLEXPTE_ASSIGN(const std::span<std::byte> outs,
                   encoder.scratch(rows * static_cast<size_t>(value_dim) * sizeof(float)));
    FLEXPTE_ASSIGN(const std::span<std::byte> lses, encoder.scratch(rows * sizeof(float)));
    partial_out = write(outs, "partial");
    partial_lse = write(lses, "partial");
  }
  FLEXPTE_ASSIGN(const BufferArgument views, encode_views(encoder, call.operands.subspan(operand::kFirstCapture)));
  FLEXPTE_ASSIGN(const BufferArgument scalars, encode_scalars(encoder, call.scalars));
  BufferArgument status;
  if (call.operands.size() > operand::kFirstCapture) {
    FLEXPTE_ASSIGN(const std::span<std::byte> word, encoder.status());
    status = write(word, "status");
  }
  std::vector<BufferArgument> buffers = {read(args.query, "query"),
                                         read(args.key, "key"),
                                         read(args.value, "value"),
                                         write(args.out, "out"),
                                         write(args.lse, "lse"),
                                         plan->tile_begin,
                                         plan->first_run,
                                         plan->runs,
                                         plan->row_bounds,
                                         partial_out,
                                         partial_lse,
                                         views,
                                         scalars,
                                         status};
  for (const TensorView& capture : call.operands.subspan(operand::kFirstCapture)) {
    buffers.push_back(read(capture, "capture"));
  }
  FLEXPTE_TRY(encoder.dispatch(*call.pipelines[kind], params, buffers,
                               {{static_cast<uint32_t>(plan->num_tiles * splits), static_cast<uint32_t>(head_groups),
                                 static_cast<uint32_t>(batch)},
                                {static_cast<uint32_t>(threads), 1, 1}}));
  if (splits == 1) return Status::ok();
  const std::array<BufferArgument, 4> merged = {partial_out, partial_lse, write(args.out, "out"),
                                                write(args.lse, "lse")};
  return encoder.dispatch(
      *call.pipelines[kMerge], params, merged,
      {{static_cast<uint32_t>(q_len), static_cast<uint32_t>(num_heads), static_cast<uint32_t>(batch)}, {32, 1, 1}});
}

}  // namespace flexpte::gpu
