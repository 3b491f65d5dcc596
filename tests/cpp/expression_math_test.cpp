// Accuracy of the functions of F32, against the C library in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "expression_reference.h"

namespace flexpte {
namespace {

using reference::Builder;

std::vector<float> apply(ExprOp op, std::vector<float> x) {
  Builder b;
  b.add(op, DType::kF32, {b.add(ExprOp::kScore, DType::kF32)});
  const auto program = TileProgram::compile(b.expression, 0, 0, {});
  EXPECT_TRUE(program.is_ok());
  const int64_t n = static_cast<int64_t>(x.size());
  std::vector<std::byte> memory(program->workspace_bytes(1, n) + 64);
  void* start = memory.data();
  size_t space = memory.size();
  std::align(64, 1, start, space);
  TileInputs in;
  in.score = x.data();
  in.score_stride = n;
  const auto tile = program->run(in, 1, n, {static_cast<std::byte*>(start), space});
  std::vector<float> out(x.size());
  std::memcpy(out.data(), tile.data, x.size() * sizeof(float));
  return out;
}

// In units of the last place of the exact result's float; subnormal results in the smallest unit.
double error_ulp(float got, double exact) {
  if (std::isnan(exact) || std::isnan(got)) return std::isnan(exact) && std::isnan(got) ? 0.0 : 1e30;
  const float nearest = static_cast<float>(exact);
  if (std::isinf(nearest) || std::isinf(got)) return nearest == got ? 0.0 : 1e30;
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::abs(got - exact) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

struct Function {
  const char* name;
  ExprOp op;
  std::function<double(double)> exact;
  double low, high, limit_ulp;
};

class Accuracy : public testing::TestWithParam<Function> {};

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

TEST_P(Accuracy, IsWithinItsLimit) {
  const Function& f = GetParam();
  std::mt19937 random(1);
  std::vector<float> x;
  std::uniform_real_distribution<double> uniform(f.low, f.high), exponent(-30.0, 1.0);
  for (int i = 0; i < 200000; ++i) x.push_back(static_cast<float>(uniform(random)));
  // All magnitudes, where small arguments give small results.
  for (int i = 0; i < 50000; ++i) {
    const double value = std::exp2(exponent(random));
    x.push_back(static_cast<float>(f.low < 0 && i % 2 != 0 ? -value : value));
  }
  std::erase_if(x, [&](float v) { return v < f.low || v > f.high; });
  const std::vector<float> y = apply(f.op, x);
  double worst = 0.0;
  float at = 0.0f;
  for (size_t i = 0; i < x.size(); ++i) {
    const double error = error_ulp(y[i], f.exact(x[i]));
    if (error > worst) worst = error, at = x[i];
  }
  RecordProperty("worst_ulp_times_100", static_cast<int>(std::min(worst * 100, 1e9)));
  EXPECT_LE(worst, f.limit_ulp) << "at " << at;
}

const Function kFunctions[] = {
    {"Exp", ExprOp::kExp, [](double x) { return std::exp(x); }, -104, 89, 2},
    {"Exp2", ExprOp::kExp2, [](double x) { return std::exp2(x); }, -150, 129, 2},
    {"Expm1", ExprOp::kExpm1, [](double x) { return std::expm1(x); }, -20, 89, 1},
    {"Log", ExprOp::kLog, [](double x) { return std::log(x); }, 0, 3e38, 1},
    {"LogNearOne", ExprOp::kLog, [](double x) { return std::log(x); }, 0.5, 2, 1},
    {"Log2", ExprOp::kLog2, [](double x) { return std::log2(x); }, 0, 1e4, 1},
    {"Log10", ExprOp::kLog10, [](double x) { return std::log10(x); }, 0, 1e4, 1},
    {"Log1p", ExprOp::kLog1p, [](double x) { return std::log1p(x); }, -1, 1e4, 1},
    {"Log1pNearZero", ExprOp::kLog1p, [](double x) { return std::log1p(x); }, -0.5, 0.5, 1},
    {"Sin", ExprOp::kSin, [](double x) { return std::sin(x); }, -10, 10, 1},
    {"SinOfPositions", ExprOp::kSin, [](double x) { return std::sin(x); }, 0, 131072, 1},
    {"SinFar", ExprOp::kSin, [](double x) { return std::sin(x); }, -1e9, 1e9, 1},
    {"Cos", ExprOp::kCos, [](double x) { return std::cos(x); }, -10, 10, 1},
    {"CosOfPositions", ExprOp::kCos, [](double x) { return std::cos(x); }, 0, 131072, 1},
    {"Tanh", ExprOp::kTanh, [](double x) { return std::tanh(x); }, -12, 12, 2},
    {"Sigmoid", ExprOp::kSigmoid, sigmoid, -80, 80, 3},
    {"Silu", ExprOp::kSilu, [](double x) { return x * sigmoid(x); }, -80, 80, 3},
    {"Erf", ExprOp::kErf, [](double x) { return std::erf(x); }, -5, 5, 2},
    {"Rsqrt", ExprOp::kRsqrt, [](double x) { return 1 / std::sqrt(x); }, 1e-30, 1e4, 1.5},
    {"Tan", ExprOp::kTan, [](double x) { return std::tan(x); }, -10, 10, 2},
    {"Atan", ExprOp::kAtan, [](double x) { return std::atan(x); }, -10, 10, 2},
    {"Asinh", ExprOp::kAsinh, [](double x) { return std::asinh(x); }, -10, 10, 3},
    {"Cosh", ExprOp::kCosh, [](double x) { return std::cosh(x); }, -80, 80, 2},
};
INSTANTIATE_TEST_SUITE_P(All, Accuracy, testing::ValuesIn(kFunctions),
                         [](const auto& info) { return std::string(info.param.name); });

// GELU's factor 1 + erf cancels for negative arguments, in eager too: the bound is absolute.
TEST(ExpressionMath, GeluIsAccurate) {
  std::vector<float> x;
  for (int i = -6000; i <= 6000; ++i) x.push_back(static_cast<float>(i) * 1e-3f);
  const std::vector<float> exact = apply(ExprOp::kGeluErf, x), approximate = apply(ExprOp::kGeluTanh, x);
  for (size_t i = 0; i < x.size(); ++i) {
    const double v = x[i];
    EXPECT_NEAR(exact[i], 0.5 * v * (1 + std::erf(v / std::sqrt(2.0))), 4e-7 * std::max(1.0, std::abs(v)));
    const double inner = std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v);
    EXPECT_NEAR(approximate[i], 0.5 * v * (1 + std::tanh(inner)), 4e-7 * std::max(1.0, std::abs(v)));
  }
}

TEST(ExpressionMath, SpecialValuesAreThoseOfTheLibrary) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> x = {0.0f, -0.0f, inf,   -inf,   nan,    1e-45f, -1e-45f,
                                1.0f, -1.0f, 3e38f, -3e38f, 200.0f, -200.0f};
  for (const Function& f : kFunctions) {
    if (f.op == ExprOp::kSilu) continue;  // x * sigmoid(x) differs from x / (1 + e^-x) at -inf by definition
    const std::vector<float> y = apply(f.op, x);
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = f.exact(x[i]);
      EXPECT_LE(error_ulp(y[i], exact), 3.0) << f.name << " of " << x[i] << ": " << y[i] << ", expected " << exact;
      if (exact == 0.0 && f.op != ExprOp::kSigmoid) {
        EXPECT_EQ(std::signbit(y[i]), std::signbit(exact)) << f.name << " of " << x[i];
      }
    }
  }
  EXPECT_TRUE(std::isnan(apply(ExprOp::kSilu, {-inf})[0]));  // as ATen
  EXPECT_EQ(apply(ExprOp::kRound, {2.5f})[0], 2.0f);
  EXPECT_EQ(apply(ExprOp::kSign, {nan})[0], 0.0f);
}

}  // namespace
}  // namespace flexpte
