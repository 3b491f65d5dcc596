// The delegate's ranges evaluator (metal_delegate/ranges.h) for reports: what is proved of a mask, by tile and by row.
#include "runtime/bindings/ranges.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "metal_delegate/ranges.h"
#include "runtime/bindings/errors.h"

namespace nb = nanobind;

namespace flexpte::bindings {
namespace {

// op, type, args, index, round_to, value_int, value_float: a node as payload.fbs numbers it.
using Node = std::tuple<int, int, std::vector<int32_t>, int32_t, int, int64_t, double>;
// An array and the number of its dtype in payload.fbs.
using Capture = std::pair<nb::ndarray<nb::c_contig, nb::device::cpu, nb::ro>, int>;

DType dtype_of(int number) {
  if (number < 0 || number >= kNumDTypes) throw nb::value_error("no such dtype");
  return static_cast<DType>(number);
}

// A mask with the captures and scalars of one call, ready to be asked.
class Mask {
 public:
  Mask(const std::vector<Node>& nodes, std::vector<Capture> captures, const std::vector<int64_t>& scalars,
       int64_t num_queries, int64_t num_keys)
      : captures_(std::move(captures)), num_queries_(num_queries), num_keys_(num_keys) {
    Expression expression;
    for (const auto& [op, type, args, index, round_to, value_int, value_float] : nodes) {
      if (op < 0 || op >= kNumExprOps) throw nb::value_error("no such operation");
      expression.nodes.push_back({.op = static_cast<ExprOp>(op),
                                  .type = dtype_of(type),
                                  .args = args,
                                  .index = index,
                                  .round_to = dtype_of(round_to),
                                  .value_int = value_int,
                                  .value_float = value_float});
    }
    std::vector<TensorView> views;
    std::vector<int> ranks;
    for (const auto& [array, dtype] : captures_) {
      if (array.ndim() > kMaxRank) throw nb::value_error("too many dimensions");
      TensorView& view = views.emplace_back();
      view.data = const_cast<void*>(array.data());
      view.dtype = dtype_of(dtype);
      view.rank = static_cast<int32_t>(array.ndim());
      for (size_t d = 0; d < array.ndim(); ++d) {
        view.sizes[d] = static_cast<int64_t>(array.shape(d));
        view.strides[d] = array.stride(d);
      }
      ranks.push_back(view.rank);
    }
    auto ranges = MaskRanges::compile(expression, static_cast<int>(scalars.size()), ranks);
    check(ranges.status());
    ranges_ = std::make_unique<MaskRanges>(std::move(ranges).value());
    bound_.bind(*ranges_, views, scalars, num_queries, num_keys);
  }

  // Verdicts [q tiles, kv tiles], as plans have them (what is not proved is tried): 0 none, 1 all, 2 mixed.
  nb::object tiles(int64_t batch, int64_t head, int64_t q_tile, int64_t kv_tile) {
    if (q_tile < 1 || kv_tile < 1) throw nb::value_error("tiles have at least one row and one column");
    const int64_t rows = (num_queries_ + q_tile - 1) / q_tile;
    const int64_t cols = (num_keys_ + kv_tile - 1) / kv_tile;
    auto* verdicts = new std::vector<uint8_t>(static_cast<size_t>(rows * cols));
    nb::capsule owner(verdicts, [](void* p) noexcept { delete static_cast<std::vector<uint8_t>*>(p); });
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        const Verdict verdict = bound_.examine(batch, head, i * q_tile, std::min(num_queries_, (i + 1) * q_tile),
                                               j * kv_tile, std::min(num_keys_, (j + 1) * kv_tile));
        (*verdicts)[static_cast<size_t>(i * cols + j)] = static_cast<uint8_t>(verdict);
      }
    }
    return nb::cast(nb::ndarray<nb::numpy, uint8_t>(verdicts->data(),
                                                    {static_cast<size_t>(rows), static_cast<size_t>(cols)}, owner));
  }

  // The keys that a row sees as (begin, end), or None where one interval is not proved.
  nb::object row(int64_t batch, int64_t head, int64_t q) const {
    if (q < 0 || q >= num_queries_) throw nb::index_error("no such row");
    KeyRange keys;
    if (!bound_.row_interval(batch, head, q, 0, num_keys_, &keys)) return nb::none();
    return nb::make_tuple(keys.begin, keys.end);
  }

 private:
  std::vector<Capture> captures_;
  int64_t num_queries_;
  int64_t num_keys_;
  std::unique_ptr<MaskRanges> ranges_;
  BoundMask bound_;
};

}  // namespace

void bind_ranges(nb::module_& module) {
  nb::class_<Mask>(module, "Mask")
      .def(nb::init<const std::vector<Node>&, std::vector<Capture>, const std::vector<int64_t>&, int64_t, int64_t>(),
           nb::arg("nodes"), nb::arg("captures"), nb::arg("scalars"), nb::arg("num_queries"), nb::arg("num_keys"))
      .def("tiles", &Mask::tiles, nb::arg("batch"), nb::arg("head"), nb::arg("q_tile"), nb::arg("kv_tile"))
      .def("row", &Mask::row, nb::arg("batch"), nb::arg("head"), nb::arg("q"));
}

}  // namespace flexpte::bindings
