#include "metal_delegate/ranges.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "metal_delegate/ranges_box.h"
#include "metal_delegate/ranges_row.h"
#include "runtime/kernels/expression_program.h"

namespace flexpte {

using ranges::Box;
using ranges::Node;

namespace {

// How large the constants of an expression may be for is_shift_invariant(), all together, and the lengths
// and scalars of a call for relative_interval(): sums of them cannot overflow 32 bits.
constexpr int64_t kMaxOffset = int64_t{1} << 28;
constexpr int64_t kMaxScalar = int64_t{1} << 24;

// Whether mask(q + 1, kv + 1) = mask(q, kv): every node is followed by how much it grows when both indices
// grow by one. Indices grow by one, what is computed of things that do not grow does not, and a comparison
// or difference of two that grow alike does not either.
bool is_shift_invariant(std::span<const Node> nodes) {
  std::vector<int64_t> growth(nodes.size(), 0);
  std::vector<int64_t> offset(nodes.size(), 0);  // bound of what was added to the indices
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = nodes[i];
    const auto arg = [&](size_t k) { return static_cast<size_t>(node.arg(k)); };
    const bool is_integer = node.type == DType::kI32 || node.type == DType::kI64;
    bool grows = false;
    for (size_t k = 0; k < static_cast<size_t>(node.num_args); ++k) grows = grows || growth[arg(k)] != 0;
    switch (node.op) {
      case ExprOp::kQIdx:
      case ExprOp::kKvIdx:
        growth[i] = 1;
        break;
      case ExprOp::kConstant:
        offset[i] = is_integer ? std::clamp(node.value_int, -kMaxOffset, kMaxOffset) : kMaxOffset;
        offset[i] = offset[i] < 0 ? -offset[i] : offset[i];
        break;
      case ExprOp::kScalar:
        offset[i] = kMaxScalar;
        break;
      case ExprOp::kCast:
        if (grows && !is_integer) return false;
        growth[i] = growth[arg(0)];
        offset[i] = is_integer ? offset[arg(0)] : kMaxOffset;
        break;
      case ExprOp::kAdd:
      case ExprOp::kSub:
        growth[i] = growth[arg(0)] + (node.op == ExprOp::kAdd ? growth[arg(1)] : -growth[arg(1)]);
        if (growth[i] < -1 || growth[i] > 1) return false;
        offset[i] = std::min(kMaxOffset, offset[arg(0)] + offset[arg(1)]);
        if (grows && (!is_integer || offset[i] >= kMaxOffset)) return false;
        break;
      case ExprOp::kEq:
      case ExprOp::kNe:
      case ExprOp::kLt:
      case ExprOp::kLe:
      case ExprOp::kGt:
      case ExprOp::kGe:
        if (growth[arg(0)] != growth[arg(1)]) return false;
        break;
      default:
        if (grows) return false;
        offset[i] = kMaxOffset;
        break;
    }
  }
  return growth.back() == 0;
}

}  // namespace

struct MaskRanges::Impl {
  std::vector<Node> nodes;
  int num_captures = 0;
  std::optional<TileProgram> program;  // for what cannot be proved
  bool analysable = true;
  bool shift_invariant = false;
  bool depends_on_batch = false;
  bool depends_on_head = false;
};

MaskRanges::~MaskRanges() = default;
MaskRanges::MaskRanges(MaskRanges&&) noexcept = default;
MaskRanges& MaskRanges::operator=(MaskRanges&&) noexcept = default;
MaskRanges::MaskRanges(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Result<MaskRanges> MaskRanges::compile(const Expression& mask, int num_scalars, std::span<const int> capture_ranks) {
  FLEXPTE_TRY(verify_expression(mask, 0, num_scalars, capture_ranks));
  if (mask.nodes.back().type != DType::kBool) {
    return Status(Code::kInvalidProgram,
                  "mask expression: gives " + std::string(dtype_name(mask.nodes.back().type)) + "; expected bool");
  }
  auto impl = std::make_unique<Impl>();
  impl->num_captures = static_cast<int>(capture_ranks.size());
  FLEXPTE_ASSIGN(impl->program, TileProgram::compile(mask, 0, num_scalars, capture_ranks));
  const std::vector<bool> reachable = reachable_nodes(mask);
  std::vector<int32_t> number(mask.nodes.size(), -1);
  for (size_t i = 0; i < mask.nodes.size(); ++i) {
    if (!reachable[i]) continue;
    const ExprNode& from = mask.nodes[i];
    if (from.op == ExprOp::kScore) {
      return Status(Code::kInvalidProgram, "mask expression: node " + std::to_string(i) +
                                               " reads the score; a mask depends on indices and captures only");
    }
    Node node;
    node.op = from.op;
    node.type = from.type;
    node.num_args = static_cast<int32_t>(from.args.size());
    for (size_t a = 0; a < from.args.size(); ++a) node.args[a] = number[static_cast<size_t>(from.args[a])];
    node.index = from.index;
    node.round_to = from.round_to;
    node.value_int = from.value_int;
    node.value_float = from.value_float;
    impl->depends_on_batch |= node.op == ExprOp::kBatch;
    impl->depends_on_head |= node.op == ExprOp::kHead;
    number[i] = static_cast<int32_t>(impl->nodes.size());
    impl->nodes.push_back(node);
  }
  impl->analysable = impl->nodes.size() <= ranges::kMaxNodes;
  impl->shift_invariant = impl->analysable && is_shift_invariant(impl->nodes);
  return MaskRanges(std::move(impl));
}

bool MaskRanges::depends_on_batch() const {
  return impl_->depends_on_batch;
}
bool MaskRanges::depends_on_head() const {
  return impl_->depends_on_head;
}

struct BoundMask::Impl {
  const MaskRanges::Impl* mask = nullptr;
  std::vector<CaptureSummary> captures;
  std::vector<TensorView> capture_views;
  std::vector<int64_t> scalars;
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  std::vector<std::byte> workspace;  // of examine()

  ranges::Context context() const { return {mask->nodes, captures, scalars}; }
};

BoundMask::BoundMask() : impl_(std::make_unique<Impl>()) {}
BoundMask::~BoundMask() = default;
BoundMask::BoundMask(BoundMask&&) noexcept = default;
BoundMask& BoundMask::operator=(BoundMask&&) noexcept = default;

void BoundMask::bind(const MaskRanges& mask, std::span<const TensorView> captures, std::span<const int64_t> scalars,
                     int64_t num_queries, int64_t num_keys) {
  impl_->mask = mask.impl_.get();
  if (impl_->captures.size() < captures.size()) impl_->captures.resize(captures.size());
  for (size_t i = 0; i < captures.size(); ++i) impl_->captures[i].bind(captures[i]);
  impl_->capture_views.assign(captures.begin(), captures.end());
  impl_->scalars.assign(scalars.begin(), scalars.end());
  impl_->num_queries = num_queries;
  impl_->num_keys = num_keys;
}

Verdict BoundMask::classify(int64_t batch, int64_t head, int64_t q_begin, int64_t q_end, int64_t kv_begin,
                            int64_t kv_end) const {
  if (!impl_->mask->analysable) return Verdict::kMixed;
  ranges::RangeArray values;
  const size_t n = impl_->mask->nodes.size();
  ranges::evaluate_box(impl_->context(), {batch, head, q_begin, q_end, kv_begin, kv_end}, n, values);
  const ranges::Range& result = values[n - 1];
  if (!result.is_point()) return Verdict::kMixed;
  return result.min != 0 ? Verdict::kAll : Verdict::kNone;
}

Verdict BoundMask::examine(int64_t batch, int64_t head, int64_t q_begin, int64_t q_end, int64_t kv_begin,
                           int64_t kv_end) {
  const Verdict proved = classify(batch, head, q_begin, q_end, kv_begin, kv_end);
  if (proved != Verdict::kMixed) return proved;
  constexpr int64_t kRows = 64;
  constexpr int64_t kCols = 64;
  const TileProgram& program = *impl_->mask->program;
  constexpr size_t kAlignmentBytes = 64;
  const size_t needed = program.workspace_bytes(kRows, kCols) + kAlignmentBytes;
  if (impl_->workspace.size() < needed) impl_->workspace.resize(needed);
  void* aligned = impl_->workspace.data();
  size_t room = impl_->workspace.size();
  std::align(kAlignmentBytes, needed - kAlignmentBytes, aligned, room);
  const std::span<std::byte> workspace(static_cast<std::byte*>(aligned), room);
  bool any = false;
  bool all = true;
  for (int64_t q = q_begin; q < q_end; q += kRows) {
    for (int64_t kv = kv_begin; kv < kv_end; kv += kCols) {
      const int64_t rows = std::min(kRows, q_end - q);
      const int64_t cols = std::min(kCols, kv_end - kv);
      TileInputs in;
      in.batch = batch;
      in.head = head;
      in.q_begin = q;
      in.kv_begin = kv;
      in.captures = impl_->capture_views;
      in.scalars = impl_->scalars;
      bool is_outside = false;
      const TileProgram::Tile tile = program.run(in, rows, cols, workspace, nullptr, 0, &is_outside);
      if (is_outside) return Verdict::kMixed;
      const bool by_row = tile.extent == Extent::kRows || tile.extent == Extent::kFull;
      const bool by_col = tile.extent == Extent::kCols || tile.extent == Extent::kFull;
      // One value per row lies along a single row.
      const int64_t lines = by_row && by_col ? rows : 1;
      const int64_t length = by_col ? cols : (by_row ? rows : 1);
      const auto* data = static_cast<const uint8_t*>(tile.data);
      for (int64_t line = 0; line < lines; ++line) {
        const uint8_t* visible = data + line * tile.stride;
        const auto seen = std::count_if(visible, visible + length, [](uint8_t v) { return v != 0; });
        any = any || seen != 0;
        all = all && seen == length;
      }
      if (any && !all) return Verdict::kMixed;
    }
  }
  return any ? Verdict::kAll : Verdict::kNone;
}

bool BoundMask::row_interval(int64_t batch, int64_t head, int64_t q, int64_t kv_begin, int64_t kv_end,
                             KeyRange* visible) const {
  *visible = {kv_begin, kv_begin};
  if (kv_begin >= kv_end) return true;
  if (!impl_->mask->analysable) return false;
  const ranges::Context context = impl_->context();
  const Box box{batch, head, q, q + 1, kv_begin, kv_end};
  ranges::KeySet set;
  if (!ranges::visible_set(context, box, &set) || set.count > 1) return false;
  if (set.count == 1) *visible = {set.begin[0], set.end[0]};
  return true;
}

bool BoundMask::relative_interval(int64_t batch, int64_t head, KeyRange* visible) const {
  if (!impl_->mask->shift_invariant || impl_->num_queries >= kMaxOffset || impl_->num_keys >= kMaxOffset) return false;
  for (const int64_t scalar : impl_->scalars) {
    if (scalar < -kMaxScalar || scalar > kMaxScalar) return false;
  }
  return row_interval(batch, head, 0, -impl_->num_queries, impl_->num_keys, visible);
}

KeyRange BoundMask::visible_keys(int64_t batch, int64_t head, int64_t q_begin, int64_t q_end) const {
  KeyRange visible{0, impl_->num_keys};
  if (q_begin >= q_end || visible.empty()) return {};
  if (!impl_->mask->analysable) return visible;
  if (q_end - q_begin == 1) {
    ranges::KeySet set;
    if (ranges::visible_set(impl_->context(), {batch, head, q_begin, q_end, 0, impl_->num_keys}, &set)) {
      if (set.count == 0) return {};
      return {set.begin[0], set.end[static_cast<size_t>(set.count - 1)]};
    }
  }
  // From either end: halves that are all false are cut off, the others looked into, outermost first.
  constexpr int kMaxDepth = 40;
  constexpr int kMaxLooks = 96;
  for (const bool from_start : {true, false}) {
    std::array<KeyRange, kMaxDepth> pending;
    int depth = 0;
    pending[0] = visible;
    int64_t found = from_start ? visible.end : visible.begin;
    for (int looks = 0; depth >= 0; ++looks) {
      const KeyRange keys = pending[static_cast<size_t>(depth--)];
      const bool sees =
          looks >= kMaxLooks || classify(batch, head, q_begin, q_end, keys.begin, keys.end) != Verdict::kNone;
      if (!sees) continue;
      if (keys.end - keys.begin == 1 || looks >= kMaxLooks || depth + 2 >= kMaxDepth) {
        found = from_start ? keys.begin : keys.end;
        break;
      }
      const int64_t middle = keys.begin + (keys.end - keys.begin) / 2;
      const KeyRange low{keys.begin, middle}, high{middle, keys.end};
      pending[static_cast<size_t>(++depth)] = from_start ? high : low;
      pending[static_cast<size_t>(++depth)] = from_start ? low : high;
    }
    (from_start ? visible.begin : visible.end) = found;
    if (visible.empty()) return {};
  }
  return visible;
}

}  // namespace flexpte
