#include "runtime/kernels/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>

#include "tests/cpp/kernels_testing.h"

namespace flexpte {
namespace {

using testing::rounding;
using testing::Tensor;
using testing::Workspace;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16};

void expect_close(const Tensor& got, int64_t i, double want, double tolerance, const std::string& what) {
  const double value = got.get(i);
  if (std::isnan(want)) {
    ASSERT_TRUE(std::isnan(value)) << what << " element " << i << ": " << value;
  } else if (std::isinf(want)) {
    ASSERT_EQ(value, want) << what << " element " << i;
  } else {
    ASSERT_LE(std::abs(value - want), tolerance) << what << " element " << i << ": " << value << " not " << want;
  }
}

// A sum of k products is off by at most about k roundings of each product; the result is rounded once.
double product_tolerance(double sum_of_magnitudes, double value, int64_t k, DType out) {
  return sum_of_magnitudes * static_cast<double>(k + 2) * 0x1p-24 + std::abs(value) * rounding(out) * 1.01 + 1e-7;
}

void check_linear(int64_t m, int64_t n, int64_t k, DType x_dtype, DType w_dtype, DType out_dtype, bool has_bias,
                  const ThreadPool& pool) {
  const std::string what = "m " + std::to_string(m) + " n " + std::to_string(n) + " k " + std::to_string(k) + " " +
                           std::string(dtype_name(x_dtype)) + " " + std::string(dtype_name(w_dtype));
  // Rows of x and out lie apart; what is between them is NaN and must stay.
  Tensor x(x_dtype, {m, k}, {k + 5, 1});
  Tensor w(w_dtype, {n, k});
  Tensor bias(w_dtype, {n});
  Tensor out(out_dtype, {m, n}, {n + 3, 1});
  x.fill_random(1);
  w.fill_random(2);
  bias.fill_random(3);
  Workspace workspace(linear_workspace_bytes(m, n, k, w_dtype, pool.num_threads()));
  linear(x.view(), w.view(), has_bias ? &bias.view() : nullptr, out.view(), pool, workspace.span());
  EXPECT_TRUE(workspace.fences_are_whole()) << what;
  const auto xs = x.values(), ws = w.values(), biases = bias.values();
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = has_bias ? biases[static_cast<size_t>(j)] : 0, magnitude = std::abs(sum);
      for (int64_t c = 0; c < k; ++c) {
        const double product = xs[static_cast<size_t>(i * k + c)] * ws[static_cast<size_t>(j * k + c)];
        sum += product;
        magnitude += std::abs(product);
      }
      expect_close(out, i * n + j, sum, product_tolerance(magnitude, sum, k, out_dtype), what);
      if (::testing::Test::HasFatalFailure()) return;
    }
    const auto element = static_cast<size_t>(element_size_bytes(out_dtype));
    if (i + 1 < m && n > 0) {
      for (size_t b = static_cast<size_t>(i * (n + 3) + n) * element;
           b < static_cast<size_t>((i + 1) * (n + 3)) * element; ++b) {
        ASSERT_EQ(out.bytes()[b], std::byte{0xFF}) << what << ": wrote between rows";
      }
    }
  }
}

class Linear : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(Linear, MatchesFloat64) {
  const auto [m, k] = GetParam();
  const ThreadPool pool(2);
  for (const int64_t n : {1, 3, 67, 192}) {
    check_linear(m, n, k, DType::kF32, DType::kF32, DType::kF32, n == 3, pool);
    check_linear(m, n, k, DType::kBF16, DType::kBF16, DType::kBF16, n != 3, pool);
    if (n == 192) continue;
    check_linear(m, n, k, DType::kF16, DType::kF16, DType::kF16, true, pool);
    check_linear(m, n, k, DType::kF32, DType::kBF16, DType::kF16, false, pool);
    check_linear(m, n, k, DType::kBF16, DType::kF32, DType::kF32, true, pool);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Linear,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 7, 16, 17, 31, 32, 33, 64, 65),
                                            ::testing::Values(1, 15, 16, 17, 31, 33, 64, 576, 1536)));

TEST(LinearEdges, ManyRowsAndDeepProducts) {
  for (const int threads : {1, 2, 3}) {
    const ThreadPool pool(threads);
    check_linear(300, 70, 40, DType::kF32, DType::kF32, DType::kF32, true, pool);
    check_linear(600, 3, 17, DType::kBF16, DType::kF16, DType::kF32, true, pool);
    check_linear(33, 65, 2001, DType::kF32, DType::kBF16, DType::kF32, true, pool);
    check_linear(600, 70, 2001, DType::kBF16, DType::kBF16, DType::kF32, true, pool);
    check_linear(257, 33, 768, DType::kBF16, DType::kBF16, DType::kBF16, false, pool);
    check_linear(1, 33, 5000, DType::kF32, DType::kF32, DType::kF32, true, pool);
  }
}

TEST(LinearEdges, NothingToSumGivesTheBias) {
  const ThreadPool pool(2);
  for (const int64_t m : {0, 1, 20}) {
    check_linear(m, 5, 0, DType::kF32, DType::kF32, DType::kF32, true, pool);
    check_linear(m, 5, 0, DType::kF32, DType::kF32, DType::kF32, false, pool);
    check_linear(m, 0, 5, DType::kF32, DType::kF32, DType::kF32, true, pool);
  }
}

TEST(LinearEdges, LeadingDimensionsCollapse) {
  const ThreadPool pool(2);
  Tensor x(DType::kF32, {2, 3, 1, 4}, {30, 10, 7, 1});
  Tensor w(DType::kF32, {2, 4});
  Tensor out(DType::kF32, {2, 3, 1, 2});
  x.fill_random(1);
  w.fill_random(2);
  Workspace workspace(linear_workspace_bytes(6, 2, 4, DType::kF32, 2));
  linear(x.view(), w.view(), nullptr, out.view(), pool, workspace.span());
  for (int64_t i = 0; i < 6; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < 4; ++c) sum += x.get(i * 4 + c) * w.get(j * 4 + c);
      expect_close(out, i * 2 + j, sum, 1e-6, "linear");
    }
  }
}

// Workspace of the largest row count serves every smaller one.
TEST(LinearEdges, WorkspaceGrowsWithRows) {
  for (const int64_t k : {1, 576, 100000}) {
    size_t before = 0;
    for (int64_t m = 0; m < 600; ++m) {
      const size_t bytes = linear_workspace_bytes(m, 7, k, DType::kF32, 2);
      ASSERT_GE(bytes, before) << m;
      before = bytes;
    }
    ASSERT_LE(before, size_t{8} << 20);
  }
}

TEST(LinearEdges, NanAndInfinityPropagateOnlyToTheirRow) {
  const ThreadPool pool(2);
  for (const int64_t m : {3, 40}) {
    Tensor x(DType::kF32, {m, 17}), w(DType::kF32, {5, 17}), out(DType::kF32, {m, 5});
    x.fill_random(1);
    w.fill_random(2);
    x.set(1 * 17 + 16, kNan);
    x.set(2 * 17 + 3, kInf);
    Workspace workspace(linear_workspace_bytes(m, 5, 17, DType::kF32, 2));
    linear(x.view(), w.view(), nullptr, out.view(), pool, workspace.span());
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < 5; ++j) {
        const double value = out.get(i * 5 + j);
        if (i == 1) {
          EXPECT_TRUE(std::isnan(value));
        } else if (i == 2) {
          EXPECT_TRUE(std::isinf(value));
        } else {
          EXPECT_TRUE(std::isfinite(value));
        }
      }
    }
  }
}

TEST(LinearEdges, ARowDoesNotDependOnTheNumberOfRows) {
  const ThreadPool pool(2);
  Tensor x(DType::kF32, {64, 576}), w(DType::kF32, {192, 576}), many(DType::kF32, {64, 192});
  x.fill_random(1);
  w.fill_random(2, 0.05);
  Workspace workspace(linear_workspace_bytes(64, 192, 576, DType::kF32, 2));
  linear(x.view(), w.view(), nullptr, many.view(), pool, workspace.span());
  for (int64_t row = 0; row < 64; row += 9) {
    Tensor out(DType::kF32, {1, 192});
    TensorView one = x.view();
    one.sizes[0] = 1;
    one.data = x.view().as<float>() + row * 576;
    linear(one, w.view(), nullptr, out.view(), pool, workspace.span());
    for (int64_t j = 0; j < 192; ++j) expect_close(out, j, many.get(row * 192 + j), 1e-5, "row");
  }
}

TEST(MatMul, MatchesFloat64ForAnyStrides) {
  const ThreadPool pool(2);
  for (const DType dtype : kFloats) {
    for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1},
                                  {1, 70, 33},
                                  {5, 3, 17},
                                  {65, 33, 20},
                                  {13, 64, 900},
                                  {4, 4, 0}}) {
      for (int layout = 0; layout < 8; ++layout) {
        // Two batch dimensions; a's second one broadcasts.
        const int64_t a_row = layout & 1 ? 1 : k + 2, a_col = layout & 1 ? m + 1 : 1;
        const int64_t b_row = layout & 2 ? 1 : 2 * n, b_col = layout & 2 ? k + 1 : 2;
        const int64_t out_row = layout & 4 ? 1 : n, out_col = layout & 4 ? m : 1;
        Tensor a(dtype, {2, 3, m, k}, {(m + 1) * (k + 2), 0, a_row, a_col});
        Tensor b(dtype, {2, 3, k, n}, {6 * (k + 1) * (n + 1), 2 * (k + 1) * (n + 1), b_row, b_col});
        Tensor out(DType::kF32, {2, 3, m, n}, {3 * m * n, m * n, out_row, out_col});
        a.fill_random(1);
        b.fill_random(2);
        Workspace workspace(matmul_workspace_bytes(a.view(), b.view(), 2));
        matmul(a.view(), b.view(), out.view(), pool, workspace.span());
        EXPECT_TRUE(workspace.fences_are_whole());
        for (int64_t i = 0; i < out.num_elements(); ++i) {
          const int64_t batch = i / (m * n), row = i / n % m, col = i % n;
          double sum = 0, magnitude = 0;
          for (int64_t c = 0; c < k; ++c) {
            const double product = a.get((batch * m + row) * k + c) * b.get((batch * k + c) * n + col);
            sum += product;
            magnitude += std::abs(product);
          }
          expect_close(out, i, sum, product_tolerance(magnitude, sum, k, DType::kF32),
                       "layout " + std::to_string(layout));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Norm, MatchesFloat64) {
  const ThreadPool pool(2);
  for (const DType dtype : kFloats) {
    for (const int64_t size : {1, 3, 4, 15, 16, 17, 33, 576, 4099}) {
      for (const bool centered : {false, true}) {
        for (const bool with_parameters : {false, true}) {
          const int64_t rows = 5;
          Tensor x(dtype, {rows, 2, size}, {2 * size + 9, size + 1, 1});
          Tensor out(dtype, {rows, 2, size}, {3 * size, size, 1});
          Tensor weight(DType::kF32, {size}, {2}), bias(dtype, {size});
          x.fill_random(1, 2.0);
          weight.fill_random(2);
          bias.fill_random(3);
          const TensorView* const w = with_parameters ? &weight.view() : nullptr;
          const TensorView* const b = with_parameters && centered ? &bias.view() : nullptr;
          const float eps = 1e-5f;
          if (centered) {
            layer_norm(x.view(), w, b, eps, out.view(), pool);
          } else {
            rms_norm(x.view(), w, eps, out.view(), pool);
          }
          for (int64_t row = 0; row < rows * 2; ++row) {
            double mean = 0, variance = 0;
            for (int64_t i = 0; i < size; ++i) mean += x.get(row * size + i) / static_cast<double>(size);
            if (!centered) mean = 0;
            for (int64_t i = 0; i < size; ++i)
              variance += std::pow(x.get(row * size + i) - mean, 2) / static_cast<double>(size);
            for (int64_t i = 0; i < size; ++i) {
              const double unit = (x.get(row * size + i) - mean) / std::sqrt(variance + static_cast<double>(eps));
              const double scaled = unit * (w ? weight.get(i) : 1);
              const double want = scaled + (b ? bias.get(i) : 0);
              // The mean of one element cancels exactly, of more to about a rounding of x.
              expect_close(out, row * size + i, want, 1e-5 * (std::abs(scaled) + 1) + std::abs(want) * rounding(dtype),
                           "norm");
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(Norm, NanStaysInItsRow) {
  const ThreadPool pool(1);
  Tensor x(DType::kF32, {2, 20}), out(DType::kF32, {2, 20});
  x.fill_random(1);
  x.set(19, kNan);
  rms_norm(x.view(), nullptr, 1e-6f, out.view(), pool);
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(out.get(i)), i < 20);
}

TEST(Softmax, MatchesFloat64) {
  const ThreadPool pool(2);
  for (const DType dtype : kFloats) {
    for (const int64_t size : {1, 3, 15, 16, 17, 100, 1000}) {
      for (const int64_t stride : {1, 3}) {
        for (const bool log : {false, true}) {
          Tensor x(dtype, {4, size}, {size * stride + 2, stride});
          Tensor out(dtype, {4, size}, {size * stride, stride});
          x.fill_random(1, 10.0);
          x.set(size, -kInf);                                             // one key masked
          for (int64_t i = 0; i < size; ++i) x.set(2 * size + i, -kInf);  // all masked
          x.set(3 * size + size / 2, kNan);
          softmax(x.view(), log, out.view(), pool);
          for (int64_t row = 0; row < 4; ++row) {
            double max = -kInf, sum = 0;
            for (int64_t i = 0; i < size; ++i) max = std::max(max, x.get(row * size + i));
            for (int64_t i = 0; i < size; ++i) sum += std::exp(x.get(row * size + i) - max);
            for (int64_t i = 0; i < size; ++i) {
              const double shifted = x.get(row * size + i) - max;
              const double want = log ? shifted - std::log(sum) : std::exp(shifted) / sum;
              expect_close(out, row * size + i, want,
                           3e-6 * (1 + std::abs(want)) + std::abs(want) * rounding(dtype) + 0x1p-25, "softmax");
              if (HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(Softmax, PlusInfinityGivesNanAndEmptyRowsAreFine) {
  const ThreadPool pool(1);
  Tensor x(DType::kF32, {3}), out(DType::kF32, {3});
  x.fill({0, kInf, 1});
  softmax(x.view(), false, out.view(), pool);  // torch gives [nan, nan, nan] too
  for (int64_t i = 0; i < 3; ++i) EXPECT_TRUE(std::isnan(out.get(i)));
  Tensor none(DType::kF32, {2, 0}), nothing(DType::kF32, {2, 0});
  softmax(none.view(), true, nothing.view(), pool);
}

// Reductions over the last `num_dims` of [2, 3, 4, 5], against sums written out.
double reduce_plainly(ReduceOp op, const std::vector<double>& v) {
  double result = 0;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      for (double x : v) result += x;
      return op == ReduceOp::kSum ? result : result / static_cast<double>(v.size());
    case ReduceOp::kProd:
      result = 1;
      for (double x : v) result *= x;
      return result;
    case ReduceOp::kAny:
      for (double x : v) result = result != 0 || x != 0;
      return result;
    case ReduceOp::kAll:
      result = 1;
      for (double x : v) result = result != 0 && x != 0;
      return result;
    default:
      break;
  }
  const bool is_max = op == ReduceOp::kMax || op == ReduceOp::kArgMax;
  size_t best = 0;
  for (size_t i = 1; i < v.size(); ++i) {
    if (std::isnan(v[best])) break;
    if (std::isnan(v[i]) || (is_max ? v[i] > v[best] : v[i] < v[best])) best = i;
  }
  return op == ReduceOp::kMax || op == ReduceOp::kMin ? v[best] : static_cast<double>(best);
}

TEST(Reduce, MatchesPlainLoopsForEveryOpDtypeAndStride) {
  const ThreadPool pool(2);
  for (int o = 0; o <= static_cast<int>(ReduceOp::kArgMin); ++o) {
    const auto op = static_cast<ReduceOp>(o);
    const bool is_index = op == ReduceOp::kArgMax || op == ReduceOp::kArgMin;
    const bool is_truth = op == ReduceOp::kAny || op == ReduceOp::kAll;
    for (int t = 0; t < kNumDTypes; ++t) {
      const auto dtype = static_cast<DType>(t);
      for (int num_dims = 0; num_dims <= 4; ++num_dims) {
        for (const bool permuted : {false, true}) {
          const std::vector<int64_t> strides =
              permuted ? std::vector<int64_t>{1, 2, 6, 30} : std::vector<int64_t>{60, 20, 5, 1};
          Tensor x(dtype, {2, 3, 4, 5}, strides);
          x.fill_random(7, is_floating(dtype) ? 1.0 : 1.5);
          if (is_floating(dtype) && op != ReduceOp::kMean) x.set(61, kNan);
          std::vector<int64_t> sizes{2, 3, 4, 5};
          sizes.resize(static_cast<size_t>(4 - num_dims));
          DType out_dtype = is_index ? DType::kI64 : is_truth ? DType::kBool : dtype;
          if ((op == ReduceOp::kSum || op == ReduceOp::kProd) && !is_floating(dtype)) out_dtype = DType::kI64;
          if (op == ReduceOp::kMean && !is_floating(dtype)) out_dtype = DType::kF32;
          Tensor out(out_dtype, sizes);
          reduce(op, x.view(), num_dims, out.view(), pool);
          const int64_t count = x.num_elements() / out.num_elements();
          for (int64_t i = 0; i < out.num_elements(); ++i) {
            std::vector<double> values;
            for (int64_t j = 0; j < count; ++j) values.push_back(x.get(i * count + j));
            double want = reduce_plainly(op, values);
            // A product of 120 small integers is 0 or wraps: compared modulo 2^64 by its zero only.
            if (op == ReduceOp::kProd && std::abs(want) > 1e15) continue;
            expect_close(
                out, i, want, 1e-6 + std::abs(want) * (1e-6 + rounding(out_dtype)),
                "op " + std::to_string(o) + " " + std::string(dtype_name(dtype)) + " dims " + std::to_string(num_dims));
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Reduce, IntegersAreExactAndWrap) {
  const ThreadPool pool(1);
  Tensor x(DType::kI64, {3}), out(DType::kI64, {});
  int64_t* const data = x.view().as<int64_t>();
  data[0] = (int64_t{1} << 53) + 1;
  data[1] = -1;
  data[2] = (int64_t{1} << 53);
  reduce(ReduceOp::kSum, x.view(), 1, out.view(), pool);
  EXPECT_EQ(out.get_int(0), int64_t{1} << 54);
  reduce(ReduceOp::kArgMax, x.view(), 1, out.view(), pool);
  EXPECT_EQ(out.get_int(0), 0);
  data[0] = std::numeric_limits<int64_t>::max();
  data[1] = 1;
  data[2] = 0;
  reduce(ReduceOp::kSum, x.view(), 1, out.view(), pool);
  EXPECT_EQ(out.get_int(0), std::numeric_limits<int64_t>::min());
}

TEST(Reduce, NothingReducedGivesTheIdentity) {
  const ThreadPool pool(1);
  Tensor x(DType::kF32, {2, 0});
  for (const auto& [op, want] : {std::pair{ReduceOp::kSum, 0.0},
                                 {ReduceOp::kProd, 1.0},
                                 {ReduceOp::kAny, 0.0},
                                 {ReduceOp::kAll, 1.0},
                                 {ReduceOp::kMax, -kInf},
                                 {ReduceOp::kMin, kInf},
                                 {ReduceOp::kMean, kNan}}) {
    Tensor out(DType::kF32, {2});
    reduce(op, x.view(), 1, out.view(), pool);
    for (int64_t i = 0; i < 2; ++i) expect_close(out, i, want, 0, "identity");
  }
}

TEST(Reduce, LongSumsKeepTheirPrecision) {
  const ThreadPool pool(2);
  Tensor x(DType::kF32, {1000000}), out(DType::kF32, {});
  for (int64_t i = 0; i < x.num_elements(); ++i) x.set(i, 0.1);
  reduce(ReduceOp::kSum, x.view(), 1, out.view(), pool);
  expect_close(out, 0, 1e6 * static_cast<double>(0.1f), 0.01, "sum");
}

}  // namespace
}  // namespace flexpte
