#include "metal_delegate/ranges.h"

#include <algorithm>
#include <string>
#include <vector>

#include "metal_delegate/ranges_box.h"
#include "metal_delegate/ranges_row.h"
#include "runtime/kernels/expression_program.h"

namespace flexpte {

using ranges::Box;
using ranges::Node;

struct MaskRanges::Impl {
  std::vector<Node> nodes;
  int num_captures = 0;
  bool analysable = true;
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
  std::vector<int64_t> scalars;
  int64_t num_queries = 0;
  int64_t num_keys = 0;

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
