// Reductions, cumulative sums and selection of the largest.
#include <cmath>
#include <limits>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/ops/op.h"

namespace flexpte {
namespace {

// A tensor with the reduced dimensions last.
struct Reduction {
  std::array<int32_t, kMaxRank> order{};  // kept dimensions, then reduced ones
  int32_t num_kept = 0;
  int32_t rank = 0;
  bool keepdim = false;

  std::span<const int32_t> dims() const { return std::span(order).first(static_cast<size_t>(rank)); }
  bool is_kept(int32_t dim) const {
    for (int32_t i = 0; i < num_kept; ++i) {
      if (order[static_cast<size_t>(i)] == dim) return true;
    }
    return false;
  }
};

// Reduces `dims`, or all dimensions where there is none.
Result<Reduction> reduction(const Binder& binder, int32_t x, std::span<const int64_t> dims, bool keepdim) {
  Reduction plan;
  plan.rank = binder.rank(x);
  plan.keepdim = keepdim;
  std::array<bool, kMaxRank> reduced{};
  for (const int64_t arg : dims) {
    FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(arg, plan.rank));
    reduced[static_cast<size_t>(dim)] = true;
  }
  for (int32_t d = 0; d < plan.rank; ++d) {
    if (!dims.empty() && !reduced[static_cast<size_t>(d)]) plan.order[static_cast<size_t>(plan.num_kept++)] = d;
  }
  int32_t count = plan.num_kept;
  for (int32_t d = 0; d < plan.rank; ++d) {
    if (dims.empty() || reduced[static_cast<size_t>(d)]) plan.order[static_cast<size_t>(count++)] = d;
  }
  return plan;
}

// Gives `out` its sizes and returns the view of it that the kernel fills: the kept dimensions alone.
Result<TensorView> resize_reduced(const Frame& frame, const TensorView& in, const Reduction& plan, int32_t out) {
  SizeList kept;
  SizeList sizes;
  for (int32_t d = 0; d < in.rank; ++d) {
    const bool is_kept = plan.is_kept(d);
    if (is_kept) kept.push(in.size(d));
    if (is_kept || plan.keepdim) sizes.push(is_kept ? in.size(d) : 1);
  }
  FLEXPTE_TRY(frame.resize(out, sizes));
  TensorView view = frame.tensor(out);
  if (!plan.keepdim) return view;
  view.rank = kept.rank;
  view.sizes = kept.values;
  for (int32_t i = 0; i < kept.rank; ++i) {
    view.strides[static_cast<size_t>(i)] = frame.tensor(out).stride(plan.order[static_cast<size_t>(i)]);
  }
  return view;
}

bool needs_elements(ReduceOp op) {
  return op == ReduceOp::kMax || op == ReduceOp::kMin || op == ReduceOp::kArgMax || op == ReduceOp::kArgMin;
}

Status run_reduce(const Frame& frame, ReduceOp op, const Reduction& plan, int32_t x, int32_t out) {
  const TensorView& in = frame.tensor(x);
  FLEXPTE_ASSIGN(const TensorView target, resize_reduced(frame, in, plan, out));
  if (in.num_elements() == 0 && target.num_elements() > 0 && needs_elements(op)) {
    return invalid("a tensor of sizes " + shape_string(in) + " has no largest or smallest element");
  }
  reduce(op, permuted(in, plan.dims()), in.rank - plan.num_kept, target, frame.pool);
  return Status::ok();
}

Result<Step> reduce_step(const Binder& binder, ReduceOp op, int32_t x, std::span<const int64_t> dims, bool keepdim,
                         int32_t out) {
  FLEXPTE_ASSIGN(const Reduction plan, reduction(binder, x, dims, keepdim));
  if (op == ReduceOp::kMean && !is_floating(binder.dtype(x))) {
    return Status(Code::kInvalidProgram, "is the mean of " + std::string(dtype_name(binder.dtype(x))));
  }
  if (op == ReduceOp::kArgMax || op == ReduceOp::kArgMin)
    FLEXPTE_TRY(binder.expect_dtype(out, DType::kI64, "the index"));
  return Step([=](const Frame& frame) { return run_reduce(frame, op, plan, x, out); });
}

// aten::<op>.out(self, dims, keepdim, [dtype,] out)
template <ReduceOp kOp, size_t kOutArg>
Result<Step> over_dims(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int64_t> dims, binder.fixed_integers(1));
  FLEXPTE_ASSIGN(const bool keepdim, binder.fixed_bool(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(kOutArg));
  return reduce_step(binder, kOp, x, dims, keepdim, out);
}

// aten::<op>.out(self, dim?, keepdim, [dtype,] out)
template <ReduceOp kOp, size_t kOutArg>
Result<Step> over_dim(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  std::vector<int64_t> dims;
  if (!binder.is_none(1)) {
    FLEXPTE_ASSIGN(const int64_t dim, binder.fixed_integer(1));
    dims.push_back(dim);
  }
  FLEXPTE_ASSIGN(const bool keepdim, binder.fixed_bool(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(kOutArg));
  return reduce_step(binder, kOp, x, dims, keepdim, out);
}

// aten::<op>.out(self, [dtype,] out)
template <ReduceOp kOp, size_t kOutArg>
Result<Step> over_all(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(kOutArg));
  return reduce_step(binder, kOp, x, {}, false, out);
}

// aten::max.dim_max(self, dim, keepdim, values, indices), aten::min.dim_min
template <ReduceOp kValues, ReduceOp kIndices>
Result<Step> with_index(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const bool keepdim, binder.fixed_bool(2));
  FLEXPTE_ASSIGN(const int32_t values, binder.out(3));
  FLEXPTE_ASSIGN(const int32_t indices, binder.out(4));
  FLEXPTE_ASSIGN(const Step first, reduce_step(binder, kValues, x, {&dim, 1}, keepdim, values));
  FLEXPTE_ASSIGN(const Step second, reduce_step(binder, kIndices, x, {&dim, 1}, keepdim, indices));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_TRY(first(frame));
    return second(frame);
  });
}

// Calls visit(x offset, out offset) for each row of a reduction over one or more trailing dimensions.
template <class Visit>
void for_each_row(const TensorView& x, const TensorView& out, const Visit& visit) {
  std::array<int64_t, kMaxRank> at{};
  const int64_t num_rows = out.num_elements();
  int64_t x_offset = 0;
  int64_t out_offset = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    visit(x_offset, out_offset);
    for (int32_t d = out.rank; d-- > 0;) {
      const auto i = static_cast<size_t>(d);
      x_offset += x.strides[i];
      out_offset += out.strides[i];
      if (++at[i] < out.sizes[i]) break;
      x_offset -= out.sizes[i] * x.strides[i];
      out_offset -= out.sizes[i] * out.strides[i];
      at[i] = 0;
    }
  }
}

Result<Step> variance_step(const Binder& binder, int32_t x, std::span<const int64_t> dims, double correction,
                           bool keepdim, int32_t out) {
  FLEXPTE_TRY(binder.expect_floating(x, "the input"));
  FLEXPTE_TRY(binder.expect_floating(out, "the output"));
  FLEXPTE_ASSIGN(const Reduction plan, reduction(binder, x, dims, keepdim));
  return Step([=](const Frame& frame) -> Status {
    const TensorView in = permuted(frame.tensor(x), plan.dims());
    FLEXPTE_ASSIGN(const TensorView target, resize_reduced(frame, frame.tensor(x), plan, out));
    TensorView inner = in;
    inner.rank = in.rank - plan.num_kept;
    for (int32_t d = 0; d < inner.rank; ++d) {
      inner.sizes[static_cast<size_t>(d)] = in.size(plan.num_kept + d);
      inner.strides[static_cast<size_t>(d)] = in.stride(plan.num_kept + d);
    }
    const auto count = static_cast<double>(inner.num_elements());
    with_float_type(in.dtype, [&](auto in_tag) {
      with_float_type(target.dtype, [&](auto out_tag) {
        using In = decltype(in_tag);
        using Out = decltype(out_tag);
        for_each_row(in, target, [&](int64_t begin, int64_t to) {
          double mean = 0.0;
          double squares = 0.0;
          for_each_row(inner, inner,
                       [&](int64_t at, int64_t) { mean += static_cast<double>(widen(in.as<In>()[begin + at])); });
          mean /= count;
          for_each_row(inner, inner, [&](int64_t at, int64_t) {
            const double d = static_cast<double>(widen(in.as<In>()[begin + at])) - mean;
            squares += d * d;
          });
          // As ATen: too few elements give infinity, or NaN when there is nothing to divide.
          const double divisor = std::max(count - correction, 0.0);
          target.as<Out>()[to] = convert<Out>(static_cast<float>(squares / divisor));
        });
      });
    });
    return Status::ok();
  });
}

// aten::var.correction_out(self, dims?, correction?, keepdim, out)
Result<Step> var_correction(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int64_t> dims, binder.fixed_integers(1));
  double correction = 1.0;
  if (!binder.is_none(2)) {
    FLEXPTE_ASSIGN(correction, binder.fixed_real(2));
  }
  FLEXPTE_ASSIGN(const bool keepdim, binder.fixed_bool(3));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(4));
  return variance_step(binder, x, dims, correction, keepdim, out);
}

// aten::var.out(self, dims?, unbiased, keepdim, out)
Result<Step> var(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int64_t> dims, binder.fixed_integers(1));
  FLEXPTE_ASSIGN(const bool unbiased, binder.fixed_bool(2));
  FLEXPTE_ASSIGN(const bool keepdim, binder.fixed_bool(3));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(4));
  return variance_step(binder, x, dims, unbiased ? 1.0 : 0.0, keepdim, out);
}

// aten::cumsum.out(self, dim, dtype?, out)
Result<Step> cumsum(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  FLEXPTE_ASSIGN(const Reduction plan, reduction(binder, x, {&dim_arg, 1}, false));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(x), "the output"));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_TRY(frame.resize(out, sizes_of(frame.tensor(x))));
    const TensorView in = permuted(frame.tensor(x), plan.dims());
    TensorView target = permuted(frame.tensor(out), plan.dims());
    const bool has_dim = in.rank > 0;
    const int64_t length = has_dim ? in.size(in.rank - 1) : 1;
    const int64_t in_stride = has_dim ? in.stride(in.rank - 1) : 0;
    const int64_t out_stride = has_dim ? target.stride(target.rank - 1) : 0;
    if (in.num_elements() == 0) return Status::ok();
    target.rank = plan.num_kept;
    with_storage_type(in.dtype, [&](auto in_tag) {
      with_storage_type(target.dtype, [&](auto out_tag) {
        using In = decltype(in_tag);
        using Out = decltype(out_tag);
        for_each_row(in, target, [&](int64_t from, int64_t to) {
          // Integers wrap around, as in ATen.
          using Sum = std::conditional_t<std::is_floating_point_v<decltype(widen(In()))>, double, uint64_t>;
          Sum sum = 0;
          for (int64_t i = 0; i < length; ++i) {
            sum += static_cast<Sum>(widen(in.as<In>()[from + i * in_stride]));
            using Signed = std::conditional_t<std::is_same_v<Sum, double>, double, int64_t>;
            target.as<Out>()[to + i * out_stride] = convert<Out>(static_cast<Signed>(sum));
          }
        });
      });
    });
    return Status::ok();
  });
}

// aten::topk.values(self, k, dim, largest, sorted, values, indices), by insertion: k is small in practice. NaN
// counts as largest; equal elements keep their order.
Result<Step> topk(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t k_id, binder.integer(1));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(2));
  FLEXPTE_ASSIGN(const bool largest, binder.fixed_bool(3));
  FLEXPTE_ASSIGN(const int32_t values, binder.out(5));
  FLEXPTE_ASSIGN(const int32_t indices, binder.out(6));
  FLEXPTE_ASSIGN(const Reduction plan, reduction(binder, x, {&dim_arg, 1}, false));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(x)));
  FLEXPTE_TRY(binder.expect_same_dtype(x, values));
  FLEXPTE_TRY(binder.expect_dtype(indices, DType::kI64, "the index"));
  if (binder.rank(x) == 0) return Status(Code::kUnsupported, "a tensor of rank 0");
  return Step([=](const Frame& frame) -> Status {
    const TensorView in = permuted(frame.tensor(x), plan.dims());
    const int64_t length = in.size(in.rank - 1);
    const int64_t k = frame.integer(k_id);
    if (k < 0 || k > length) {
      return invalid("the largest " + std::to_string(k) + " of " + std::to_string(length) + " elements");
    }
    SizeList sizes;
    for (int32_t d = 0; d < in.rank; ++d) sizes.push(d == dim ? k : frame.tensor(x).size(d));
    FLEXPTE_TRY(frame.resize(values, sizes));
    FLEXPTE_TRY(frame.resize(indices, sizes));
    if (frame.tensor(values).num_elements() == 0) return Status::ok();
    TensorView best = permuted(frame.tensor(values), plan.dims());
    TensorView where = permuted(frame.tensor(indices), plan.dims());
    if (best.strides != where.strides) return Status(Code::kUnsupported, "outputs with different strides");
    best.rank = plan.num_kept;
    const int64_t stride = best.strides[static_cast<size_t>(plan.num_kept)];
    const int64_t in_stride = in.stride(in.rank - 1);
    with_storage_type(in.dtype, [&](auto tag) {
      using T = decltype(tag);
      const auto before = [&](T a, T b) {  // whether a comes before b
        const auto va = widen(a);
        const auto vb = widen(b);
        const bool a_nan = va != va;
        const bool b_nan = vb != vb;
        if (a_nan || b_nan) return largest ? a_nan && !b_nan : b_nan && !a_nan;
        return largest ? va > vb : va < vb;
      };
      for_each_row(in, best, [&](int64_t from, int64_t to) {
        int64_t count = 0;
        T* const kept = best.as<T>() + to;
        int64_t* const kept_at = where.as<int64_t>() + to;
        for (int64_t i = 0; i < length; ++i) {
          const T value = in.as<T>()[from + i * in_stride];
          if (count == k && !before(value, kept[(k - 1) * stride])) continue;
          int64_t slot = count < k ? count++ : k - 1;
          for (; slot > 0 && before(value, kept[(slot - 1) * stride]); --slot) {
            kept[slot * stride] = kept[(slot - 1) * stride];
            kept_at[slot * stride] = kept_at[(slot - 1) * stride];
          }
          kept[slot * stride] = value;
          kept_at[slot * stride] = i;
        }
      });
    });
    return Status::ok();
  });
}

constexpr OpEntry kOps[] = {
    {"aten::sum.IntList_out", over_dims<ReduceOp::kSum, 4>},
    {"aten::mean.out", over_dims<ReduceOp::kMean, 4>},
    {"aten::mean.dtype_out", over_all<ReduceOp::kMean, 2>},
    {"aten::amax.out", over_dims<ReduceOp::kMax, 3>},
    {"aten::amin.out", over_dims<ReduceOp::kMin, 3>},
    {"aten::max.unary_out", over_all<ReduceOp::kMax, 1>},
    {"aten::min.unary_out", over_all<ReduceOp::kMin, 1>},
    {"aten::max.dim_max", with_index<ReduceOp::kMax, ReduceOp::kArgMax>},
    {"aten::min.dim_min", with_index<ReduceOp::kMin, ReduceOp::kArgMin>},
    {"aten::prod.int_out", over_dim<ReduceOp::kProd, 4>},
    {"aten::prod.out", over_all<ReduceOp::kProd, 2>},
    {"aten::any.out", over_dim<ReduceOp::kAny, 3>},
    {"aten::any.all_out", over_all<ReduceOp::kAny, 1>},
    {"aten::any.dims_out", over_dims<ReduceOp::kAny, 3>},
    {"aten::all.out", over_dim<ReduceOp::kAll, 3>},
    {"aten::argmax.out", over_dim<ReduceOp::kArgMax, 3>},
    {"aten::argmin.out", over_dim<ReduceOp::kArgMin, 3>},
    {"aten::var.correction_out", var_correction},
    {"aten::var.out", var},
    {"aten::cumsum.out", cumsum},
    {"aten::topk.values", topk},
};

}  // namespace

std::span<const OpEntry> reduce_ops() {
  return kOps;
}

}  // namespace flexpte
