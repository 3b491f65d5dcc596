// Normalisations and softmax.
#include <cmath>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/ops/op.h"

namespace flexpte {
namespace {

Result<TensorView> as_rows(const TensorView& x, int64_t num_rows, int64_t columns) {
  SizeList sizes;
  sizes.push(num_rows);
  sizes.push(columns);
  return reshaped(x, sizes);
}

Result<TensorView> as_row(const TensorView& x, int64_t columns) {
  SizeList sizes;
  sizes.push(columns);
  return reshaped(x, sizes);
}

// mean and 1 / sqrt(var + eps) of each row of x [rows, columns].
void row_statistics(const TensorView& x, double eps, const TensorView& mean, const TensorView& rstd) {
  with_float_type(x.dtype, [&](auto x_tag) {
    with_float_type(mean.dtype, [&](auto out_tag) {
      using In = decltype(x_tag);
      using Out = decltype(out_tag);
      const int64_t columns = x.size(1);
      for (int64_t row = 0; row < x.size(0); ++row) {
        const In* values = x.as<In>() + row * columns;
        double sum = 0.0;
        for (int64_t i = 0; i < columns; ++i) sum += static_cast<double>(widen(values[i]));
        const double average = sum / static_cast<double>(columns);
        double squares = 0.0;
        for (int64_t i = 0; i < columns; ++i) {
          const double d = static_cast<double>(widen(values[i])) - average;
          squares += d * d;
        }
        const double scale = 1.0 / std::sqrt(squares / static_cast<double>(columns) + eps);
        mean.as<Out>()[row] = convert<Out>(static_cast<float>(average));
        rstd.as<Out>()[row] = convert<Out>(static_cast<float>(scale));
      }
    });
  });
}

// aten::native_layer_norm.out(input, normalized_shape, weight?, bias?, eps, out, mean, rstd)
Result<Step> native_layer_norm(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int64_t> shape, binder.fixed_integers(1));
  FLEXPTE_ASSIGN(const int32_t weight, binder.optional_tensor(2));
  FLEXPTE_ASSIGN(const int32_t bias, binder.optional_tensor(3));
  FLEXPTE_ASSIGN(const double eps, binder.fixed_real(4));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(5));
  FLEXPTE_ASSIGN(const int32_t mean, binder.out(6));
  FLEXPTE_ASSIGN(const int32_t rstd, binder.out(7));
  FLEXPTE_TRY(binder.expect_floating(x, "the input"));
  FLEXPTE_TRY(binder.expect_same_dtype(x, out));
  FLEXPTE_TRY(binder.expect_floating(mean, "the mean"));
  FLEXPTE_TRY(binder.expect_same_dtype(mean, rstd));
  for (const int32_t id : {weight, bias}) {
    if (id >= 0) FLEXPTE_TRY(binder.expect_floating(id, "the weight"));
  }
  const auto num_dims = static_cast<int32_t>(shape.size());
  if (num_dims < 1 || num_dims > binder.rank(x)) {
    return Status(Code::kInvalidProgram, "normalises " + std::to_string(num_dims) + " dimensions of a tensor of rank " +
                                             std::to_string(binder.rank(x)));
  }
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    SizeList statistics;
    int64_t num_rows = 1;
    int64_t columns = 1;
    for (int32_t d = 0; d < in.rank; ++d) {
      const bool is_normalised = d >= in.rank - num_dims;
      statistics.push(is_normalised ? 1 : in.size(d));
      if (is_normalised && in.size(d) != shape[static_cast<size_t>(d - (in.rank - num_dims))]) {
        return invalid("sizes " + shape_string(in) + " do not end with " + sizes_string(shape));
      }
      (is_normalised ? columns : num_rows) *= in.size(d);
    }
    FLEXPTE_TRY(frame.resize(out, sizes_of(in)));
    FLEXPTE_TRY(frame.resize(mean, statistics));
    FLEXPTE_TRY(frame.resize(rstd, statistics));
    FLEXPTE_ASSIGN(const TensorView rows, as_rows(in, num_rows, columns));
    FLEXPTE_ASSIGN(const TensorView out_rows, as_rows(frame.tensor(out), num_rows, columns));
    TensorView scale;
    TensorView shift;
    if (weight >= 0) {
      FLEXPTE_ASSIGN(scale, as_row(frame.tensor(weight), columns));
    }
    if (bias >= 0) {
      FLEXPTE_ASSIGN(shift, as_row(frame.tensor(bias), columns));
    }
    row_statistics(rows, eps, frame.tensor(mean), frame.tensor(rstd));
    layer_norm(rows, weight >= 0 ? &scale : nullptr, bias >= 0 ? &shift : nullptr, static_cast<float>(eps), out_rows,
               frame.pool);
    return Status::ok();
  });
}

// aten::rms_norm.out(input, normalized_shape, weight?, eps?, out); eps defaults to the dtype's epsilon
Result<Step> rms_norm_op(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int64_t> shape, binder.fixed_integers(1));
  FLEXPTE_ASSIGN(const int32_t weight, binder.optional_tensor(2));
  double eps = binder.dtype(x) == DType::kF32 ? 0x1p-23 : binder.dtype(x) == DType::kF16 ? 0x1p-10 : 0x1p-7;
  if (!binder.is_none(3)) {
    FLEXPTE_ASSIGN(eps, binder.fixed_real(3));
  }
  FLEXPTE_ASSIGN(const int32_t out, binder.out(4));
  FLEXPTE_TRY(binder.expect_floating(x, "the input"));
  FLEXPTE_TRY(binder.expect_same_dtype(x, out));
  if (weight >= 0) FLEXPTE_TRY(binder.expect_floating(weight, "the weight"));
  if (shape.size() != 1 || binder.rank(x) < 1) {
    return Status(Code::kUnsupported, "normalises more than the last dimension");
  }
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    const int64_t columns = in.size(in.rank - 1);
    if (columns != shape[0]) return invalid("sizes " + shape_string(in) + " do not end with " + sizes_string(shape));
    const int64_t num_rows = columns == 0 ? 0 : in.num_elements() / columns;
    FLEXPTE_TRY(frame.resize(out, sizes_of(in)));
    FLEXPTE_ASSIGN(const TensorView rows, as_rows(in, num_rows, columns));
    FLEXPTE_ASSIGN(const TensorView out_rows, as_rows(frame.tensor(out), num_rows, columns));
    TensorView scale;
    if (weight >= 0) {
      FLEXPTE_ASSIGN(scale, as_row(frame.tensor(weight), columns));
    }
    rms_norm(rows, weight >= 0 ? &scale : nullptr, static_cast<float>(eps), out_rows, frame.pool);
    return Status::ok();
  });
}

// aten::_softmax.out(self, dim, half_to_float, out), aten::_log_softmax.out
template <bool kLog>
Result<Step> softmax_op(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(x)));
  FLEXPTE_TRY(binder.expect_floating(x, "the input"));
  FLEXPTE_TRY(binder.expect_floating(out, "the output"));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(x), "the output"));
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    FLEXPTE_TRY(frame.resize(out, sizes_of(in)));
    std::array<int32_t, kMaxRank> order{};
    int32_t count = 0;
    for (int32_t d = 0; d < in.rank; ++d) {
      if (d != dim) order[static_cast<size_t>(count++)] = d;
    }
    if (in.rank > 0) order[static_cast<size_t>(count++)] = dim;
    const auto dims = std::span(order).first(static_cast<size_t>(count));
    softmax(permuted(in, dims), kLog, permuted(frame.tensor(out), dims), frame.pool);
    return Status::ok();
  });
}

constexpr OpEntry kOps[] = {
    {"aten::native_layer_norm.out", native_layer_norm},
    {"aten::rms_norm.out", rms_norm_op},
    {"aten::_softmax.out", softmax_op<false>},
    {"aten::_log_softmax.out", softmax_op<true>},
};

}  // namespace

std::span<const OpEntry> norm_ops() {
  return kOps;
}

}  // namespace flexpte
