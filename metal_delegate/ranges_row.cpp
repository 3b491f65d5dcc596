// For one query, integers of a mask are mostly constant, affine or monotone in the key, comparisons of
// such are intervals whose ends a binary search finds, and logic combines intervals.
#include "metal_delegate/ranges_row.h"

#include <algorithm>

namespace flexpte::ranges {
namespace {

struct Form {
  enum class Kind : uint8_t { kUnknown, kInteger, kSet };
  Kind kind = Kind::kUnknown;
  // kInteger: 1 never decreases from key to key, -1 never increases, 0 constant.
  int direction = 0;
  bool affine = false;
  int64_t coefficient = 0, offset = 0;  // affine: coefficient * kv + offset
  KeySet set;                           // kSet: where a Bool is true
};

bool append(KeySet& set, int64_t begin, int64_t end) {
  if (begin >= end) return true;
  if (set.count > 0 && set.end[static_cast<size_t>(set.count - 1)] >= begin) {
    int64_t& last = set.end[static_cast<size_t>(set.count - 1)];
    last = std::max(last, end);
    return true;
  }
  if (set.count == KeySet::kMaxIntervals) return false;
  set.begin[static_cast<size_t>(set.count)] = begin;
  set.end[static_cast<size_t>(set.count)] = end;
  ++set.count;
  return true;
}

class Row {
 public:
  Row(const Context& context, const Box& box) : context_(context), box_(box) {}

  bool solve(KeySet* result) {
    const size_t n = context_.nodes.size();
    evaluate_box(context_, box_, n, ranges_);
    for (size_t i = 0; i < n; ++i) {
      forms_[i] = Form();
      if (context_.nodes[i].type == DType::kBool) {
        bool_form(i);
      } else if (context_.nodes[i].type != DType::kF32) {
        integer_form(i);
      }
    }
    if (forms_[n - 1].kind != Form::Kind::kSet) return false;
    *result = forms_[n - 1].set;
    return true;
  }

 private:
  const Range& range(int32_t i) const { return ranges_[static_cast<size_t>(i)]; }
  const Form& form(int32_t i) const { return forms_[static_cast<size_t>(i)]; }

  void set_constant(size_t i, bool value) {
    forms_[i].kind = Form::Kind::kSet;
    forms_[i].set = KeySet();
    if (value) append(forms_[i].set, box_.kv_begin, box_.kv_end);
  }

  void integer_form(size_t i) {
    const Node& node = context_.nodes[i];
    const Range& r = ranges_[i];
    Form& f = forms_[i];
    if (r.affine || r.is_point()) {
      f.kind = Form::Kind::kInteger;
      f.affine = true;
      f.coefficient = r.affine ? r.kv_coefficient : 0;
      // The query is one: its part is constant, and no product overflows, as the range did not.
      f.offset = r.affine
                     ? r.min - (f.coefficient >= 0 ? f.coefficient * box_.kv_begin : f.coefficient * (box_.kv_end - 1))
                     : r.min;
      f.direction = f.coefficient > 0 ? 1 : f.coefficient < 0 ? -1 : 0;
      return;
    }
    if (r.wraps) return;
    int direction = 0;
    if (!monotone(node, &direction)) return;
    f.kind = Form::Kind::kInteger;
    f.direction = direction;
  }

  bool integer(int32_t i, int* direction) const {
    if (form(i).kind != Form::Kind::kInteger) return false;
    *direction = form(i).direction;
    return true;
  }

  static bool agree(int a, int b, int* direction) {
    *direction = a != 0 ? a : b;
    return a == 0 || b == 0 || a == b;
  }

  // How an integer that does not overflow changes from key to key.
  bool monotone(const Node& node, int* direction) const {
    int a = 0, b = 0;
    switch (node.op) {
      case ExprOp::kLoad:
        return load_direction(node, direction);
      case ExprOp::kCast:
        return bool_or_integer(node.arg(0), direction);
      case ExprOp::kNeg:
        if (!integer(node.arg(0), &a)) return false;
        *direction = -a;
        return true;
      case ExprOp::kAdd:
      case ExprOp::kMin:
      case ExprOp::kMax:
        return integer(node.arg(0), &a) && integer(node.arg(1), &b) && agree(a, b, direction);
      case ExprOp::kSub:
        return integer(node.arg(0), &a) && integer(node.arg(1), &b) && agree(a, -b, direction);
      case ExprOp::kMul:
        if (!integer(node.arg(0), &a) || !integer(node.arg(1), &b)) return false;
        if (range(node.arg(1)).is_point()) return by_constant(a, range(node.arg(1)).min, direction);
        if (range(node.arg(0)).is_point()) return by_constant(b, range(node.arg(0)).min, direction);
        return false;
      case ExprOp::kFloorDiv:
      case ExprOp::kTruncDiv:
        if (!integer(node.arg(0), &a) || !range(node.arg(1)).is_point() || range(node.arg(1)).min == 0) return false;
        return by_constant(a, range(node.arg(1)).min, direction);
      case ExprOp::kShiftRight:
        return range(node.arg(1)).is_point() && integer(node.arg(0), direction);
      case ExprOp::kRelu:
      case ExprOp::kSign:
      case ExprOp::kFloor:
      case ExprOp::kCeil:
      case ExprOp::kRound:
      case ExprOp::kTrunc:
        return integer(node.arg(0), direction);
      default:
        return false;
    }
  }

  static bool by_constant(int direction, int64_t factor, int* result) {
    *result = factor > 0 ? direction : factor < 0 ? -direction : 0;
    return true;
  }

  bool bool_or_integer(int32_t i, int* direction) const {
    return context_.nodes[static_cast<size_t>(i)].type != DType::kBool && integer(i, direction);
  }

  // A load along a sorted row of a capture, without wrapping.
  bool load_direction(const Node& node, int* direction) const {
    const CaptureSummary& capture = context_.captures[static_cast<size_t>(node.index)];
    const TensorView& view = capture.view();
    if (view.rank == 0 || is_floating(view.dtype)) return false;
    if (node.type == DType::kBool && view.dtype != DType::kBool) return false;
    int64_t row = 0, offset = 0;
    for (int32_t d = 0; d < view.rank; ++d) {
      const Range& index = range(node.arg(static_cast<size_t>(d)));
      const WrappedIndex at = wrap_index(index, view.size(d));
      if (at.outside || at.straddles || at.begin >= at.end) return false;
      if (d + 1 == view.rank) break;
      if (!index.is_point()) return false;
      row = row * view.size(d) + at.begin;
      offset += at.begin * view.stride(d);
    }
    int index_direction = 0;
    if (!integer(node.arg(static_cast<size_t>(view.rank - 1)), &index_direction)) return false;
    const int values = capture.direction(row, offset);
    if (values == 0) return false;
    *direction = values == 2 ? 0 : values * index_direction;
    return true;
  }

  void bool_form(size_t i) {
    const Node& node = context_.nodes[i];
    if (ranges_[i].is_point()) return set_constant(i, ranges_[i].min != 0);
    Form& f = forms_[i];
    switch (node.op) {
      case ExprOp::kEq:
      case ExprOp::kNe:
      case ExprOp::kLt:
      case ExprOp::kLe:
      case ExprOp::kGt:
      case ExprOp::kGe:
        compare(node, f);
        return;
      case ExprOp::kLoad: {
        int direction = 0;
        if (!load_direction(node, &direction)) return;
        f.kind = Form::Kind::kSet;
        const int64_t change =
            search([&](int64_t kv) { return (value_at(static_cast<int32_t>(i), kv) != 0) == (direction > 0); });
        append(f.set, direction > 0 ? change : box_.kv_begin, direction > 0 ? box_.kv_end : change);
        return;
      }
      case ExprOp::kLogicalNot:
      case ExprOp::kBitNot: {
        if (form(node.arg(0)).kind != Form::Kind::kSet) return;
        if (complement(form(node.arg(0)).set, &f.set)) f.kind = Form::Kind::kSet;
        return;
      }
      case ExprOp::kWhere: {
        KeySet otherwise, first, second;
        if (!is_set(node.arg(0)) || !is_set(node.arg(1)) || !is_set(node.arg(2))) return;
        const KeySet& condition = form(node.arg(0)).set;
        if (complement(condition, &otherwise) && intersect(condition, form(node.arg(1)).set, &first) &&
            intersect(otherwise, form(node.arg(2)).set, &second) && unite(first, second, &f.set)) {
          f.kind = Form::Kind::kSet;
        }
        return;
      }
      case ExprOp::kLogicalAnd:
      case ExprOp::kBitAnd:
      case ExprOp::kMul:
      case ExprOp::kMin:
        if (is_set(node.arg(0)) && is_set(node.arg(1)) &&
            intersect(form(node.arg(0)).set, form(node.arg(1)).set, &f.set)) {
          f.kind = Form::Kind::kSet;
        }
        return;
      case ExprOp::kLogicalOr:
      case ExprOp::kBitOr:
      case ExprOp::kAdd:
      case ExprOp::kMax:
        if (is_set(node.arg(0)) && is_set(node.arg(1)) && unite(form(node.arg(0)).set, form(node.arg(1)).set, &f.set)) {
          f.kind = Form::Kind::kSet;
        }
        return;
      default:
        return;
    }
  }

  bool is_set(int32_t i) const { return form(i).kind == Form::Kind::kSet; }

  // The sign of left - right is monotone: three intervals where it is negative, zero and positive.
  void compare(const Node& node, Form& f) {
    const int32_t left = node.arg(0), right = node.arg(1);
    int a = 0, b = 0, direction = 0;
    if (!integer(left, &a) || !integer(right, &b)) return;
    if (form(left).affine && form(right).affine) {
      direction = form(left).coefficient >= form(right).coefficient ? 1 : -1;
    } else if (!agree(a, -b, &direction)) {
      return;
    }
    const bool rises = direction >= 0;
    const auto sign = [&](int64_t kv) {
      const int64_t x = value_at(left, kv), y = value_at(right, kv);
      return rises ? (x > y) - (x < y) : (y > x) - (y < x);
    };
    const int64_t zero = search([&](int64_t kv) { return sign(kv) >= 0; });
    const int64_t positive = search([&](int64_t kv) { return sign(kv) > 0; });
    ExprOp op = node.op;
    if (!rises) {
      switch (op) {
        case ExprOp::kLt:
          op = ExprOp::kGt;
          break;
        case ExprOp::kLe:
          op = ExprOp::kGe;
          break;
        case ExprOp::kGt:
          op = ExprOp::kLt;
          break;
        case ExprOp::kGe:
          op = ExprOp::kLe;
          break;
        default:
          break;
      }
    }
    const int64_t begin = box_.kv_begin, end = box_.kv_end;
    f.kind = Form::Kind::kSet;
    switch (op) {
      case ExprOp::kLt:
        append(f.set, begin, zero);
        break;
      case ExprOp::kLe:
        append(f.set, begin, positive);
        break;
      case ExprOp::kGt:
        append(f.set, positive, end);
        break;
      case ExprOp::kGe:
        append(f.set, zero, end);
        break;
      case ExprOp::kEq:
        append(f.set, zero, positive);
        break;
      default:
        append(f.set, begin, zero);
        append(f.set, positive, end);
        break;
    }
  }

  // The first key for which a condition that stays true once true is true; kv_end if none.
  template <class F>
  int64_t search(const F& condition) const {
    int64_t low = box_.kv_begin, high = box_.kv_end;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (condition(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  int64_t value_at(int32_t i, int64_t kv) {
    const Form& f = form(i);
    if (f.kind == Form::Kind::kInteger && f.affine) return f.coefficient * kv + f.offset;
    if (ranges_[static_cast<size_t>(i)].is_point()) return ranges_[static_cast<size_t>(i)].min;
    Box key = box_;
    key.kv_begin = kv;
    key.kv_end = kv + 1;
    evaluate_box(context_, key, static_cast<size_t>(i) + 1, at_key_);
    return at_key_[static_cast<size_t>(i)].min;
  }

  bool complement(const KeySet& set, KeySet* result) const {
    *result = KeySet();
    int64_t begin = box_.kv_begin;
    for (size_t i = 0; i < static_cast<size_t>(set.count); ++i) {
      if (!append(*result, begin, set.begin[i])) return false;
      begin = set.end[i];
    }
    return append(*result, begin, box_.kv_end);
  }

  static bool intersect(const KeySet& a, const KeySet& b, KeySet* result) {
    *result = KeySet();
    for (size_t i = 0, j = 0; i < static_cast<size_t>(a.count) && j < static_cast<size_t>(b.count);) {
      if (!append(*result, std::max(a.begin[i], b.begin[j]), std::min(a.end[i], b.end[j]))) return false;
      a.end[i] < b.end[j] ? ++i : ++j;
    }
    return true;
  }

  static bool unite(const KeySet& a, const KeySet& b, KeySet* result) {
    *result = KeySet();
    size_t i = 0, j = 0;
    while (i < static_cast<size_t>(a.count) || j < static_cast<size_t>(b.count)) {
      const bool from_a =
          j == static_cast<size_t>(b.count) || (i < static_cast<size_t>(a.count) && a.begin[i] <= b.begin[j]);
      const KeySet& set = from_a ? a : b;
      size_t& at = from_a ? i : j;
      if (!append(*result, set.begin[at], set.end[at])) return false;
      ++at;
    }
    return true;
  }

  const Context& context_;
  const Box& box_;
  RangeArray ranges_;
  RangeArray at_key_;
  NodeArray<Form> forms_;
};

}  // namespace

bool visible_set(const Context& context, const Box& box, KeySet* result) {
  return Row(context, box).solve(result);
}

}  // namespace flexpte::ranges
