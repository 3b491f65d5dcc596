#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "runtime/kernels/kernels.h"
#include "tests/cpp/kernels_testing.h"

namespace flexpte {
namespace {

using testing::Tensor;

constexpr double kInf = std::numeric_limits<double>::infinity();

// The nearest value of a float format with `mantissa_bits` and least exponent `min_exponent`, ties to even.
double nearest(double value, int mantissa_bits, int min_exponent, double overflow) {
  if (!std::isfinite(value) || value == 0) return value;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(value), min_exponent) - mantissa_bits);
  const double rounded = std::nearbyint(value / unit) * unit;
  return std::abs(rounded) >= overflow ? std::copysign(kInf, value) : rounded;
}

TEST(Convert, EveryFloat16ReadsBackAsItself) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const int exponent = static_cast<int>((bits >> 10) & 31), mantissa = static_cast<int>(bits & 1023);
    double want = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) want = mantissa == 0 ? kInf : std::nan("");
    if (bits & 0x8000) want = -want;
    const double got = to_float(half);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(got));
      ASSERT_TRUE(std::isnan(to_float(to_float16(to_float(half)))));
    } else {
      ASSERT_EQ(got, want) << bits;
      ASSERT_EQ(to_float16(to_float(half)).bits, bits);
    }
  }
}

// Scalars (odd counts end in them) and vectors alike.
TEST(Convert, NarrowFloatsRoundToNearestEven) {
  const ThreadPool pool(1);
  std::vector<float> values;
  for (uint32_t bits = 0; bits < 0xFFF00000u; bits += 70001) values.push_back(std::bit_cast<float>(bits));
  for (uint32_t half = 0; half < 0x7C00; half += 3) {
    // Half way between neighbours, and just beside it.
    const float low = to_float(Float16{static_cast<uint16_t>(half)}),
                high = to_float(Float16{static_cast<uint16_t>(half + 1)});
    const float middle = std::isinf(high) ? 65520.0f : (low + high) / 2;
    for (float v : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) values.push_back(-v);
  }
  const int64_t n = static_cast<int64_t>(values.size());
  Tensor x(DType::kF32, {n});
  std::memcpy(x.view().data, values.data(), values.size() * sizeof(float));
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const int64_t stride : {1, 2}) {
      Tensor out(dtype, {n}, {stride}), back(DType::kF32, {n});
      copy(x.view(), out.view(), pool);
      copy(out.view(), back.view(), pool);
      for (int64_t i = 0; i < n; ++i) {
        const double value = static_cast<double>(values[static_cast<size_t>(i)]);
        const double want = dtype == DType::kF16 ? nearest(value, 10, -14, 65536) : nearest(value, 7, -126, 0x1p128);
        if (std::isnan(want)) {
          ASSERT_TRUE(std::isnan(out.get(i)));
          ASSERT_TRUE(std::isnan(back.get(i)));
        } else {
          ASSERT_EQ(out.get(i), want) << value;
          ASSERT_EQ(back.get(i), want) << value;
        }
      }
    }
  }
}

TEST(Convert, FloatsBecomeIntegersByTruncation) {
  EXPECT_EQ(convert<int32_t>(-2.9f), -2);
  EXPECT_EQ(convert<int32_t>(3e9f), std::numeric_limits<int32_t>::max());
  EXPECT_EQ(convert<int32_t>(-3e9f), std::numeric_limits<int32_t>::min());
  EXPECT_EQ(convert<int64_t>(1e30), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(convert<int64_t>(-std::numeric_limits<double>::infinity()), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(convert<int64_t>(std::nanf("")), 0);
  EXPECT_EQ(convert<uint8_t>(-1.5f), 255);  // as in ATen, by way of int64
  EXPECT_EQ(convert<int8_t>(int64_t{200}), -56);
  EXPECT_EQ(convert<int16_t>(int32_t{70000}), 4464);
  EXPECT_EQ(convert<Bool>(std::nanf("")).byte, 1);
  EXPECT_EQ(convert<Bool>(0.25f).byte, 1);
  EXPECT_EQ(convert<Bool>(-0.0f).byte, 0);
  EXPECT_EQ(convert<int32_t>(Bool{7}), 1);
  EXPECT_EQ(convert<int64_t>((int64_t{1} << 53) + 1), (int64_t{1} << 53) + 1);
}

TEST(Copy, EveryPairOfTypesAndAnyStrides) {
  const ThreadPool pool(2);
  for (int s = 0; s < kNumDTypes; ++s) {
    for (int t = 0; t < kNumDTypes; ++t) {
      for (const bool permuted : {false, true}) {
        Tensor x(static_cast<DType>(s), {3, 5, 7}, permuted ? std::vector<int64_t>{1, 3, 15} : std::vector<int64_t>{});
        Tensor out(static_cast<DType>(t), {3, 5, 7}, {100, 10, 1});
        for (int64_t i = 0; i < x.num_elements(); ++i) x.set(i, static_cast<double>(i % 100));
        copy(x.view(), out.view(), pool);
        for (int64_t i = 0; i < x.num_elements(); ++i) {
          const double want = out.view().dtype == DType::kBool ? x.get(i) != 0 : x.get(i);
          ASSERT_EQ(out.get(i), want) << s << " " << t << " element " << i;
        }
      }
    }
  }
}

TEST(Copy, BroadcastsScalarsAndEmpties) {
  const ThreadPool pool(2);
  Tensor one(DType::kF32, {}), out(DType::kF32, {2, 3});
  one.set(0, 4.5);
  TensorView wide = one.view();
  wide.rank = 2;
  wide.sizes = {2, 3};
  wide.strides = {0, 0};
  copy(wide, out.view(), pool);
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(out.get(i), 4.5);
  Tensor scalar(DType::kI64, {});
  copy(one.view(), scalar.view(), pool);
  EXPECT_EQ(scalar.get_int(0), 4);
  Tensor none(DType::kF32, {2, 0, 3}), nothing(DType::kF16, {2, 0, 3});
  copy(none.view(), nothing.view(), pool);
}

TEST(Copy, LargeContiguousIsExactBitForBit) {
  const ThreadPool pool(3);
  Tensor x(DType::kF32, {100003}), out(DType::kF32, {100003});
  for (int64_t i = 0; i < x.num_elements(); ++i) x.view().as<uint32_t>()[i] = static_cast<uint32_t>(i * 42949);
  copy(x.view(), out.view(), pool);
  EXPECT_EQ(x.bytes(), out.bytes());
}

TEST(Arange, EveryType) {
  for (int t = 0; t < kNumDTypes; ++t) {
    Tensor out(static_cast<DType>(t), {5}, {3});
    arange(out.view(), 2, 7);
    for (int64_t i = 0; i < 5; ++i) {
      const double want = static_cast<double>(2 + 7 * i);
      EXPECT_EQ(out.get(i), out.view().dtype == DType::kBool ? 1.0 : want) << t;
    }
  }
  Tensor far(DType::kI64, {2});
  arange(far.view(), std::numeric_limits<int64_t>::max() - 1, 1);
  EXPECT_EQ(far.get_int(1), std::numeric_limits<int64_t>::max());
  Tensor none(DType::kI64, {0});
  arange(none.view(), 0, 1);
}

TEST(Gather, AnyDimensionIndexShapeAndStride) {
  const ThreadPool pool(2);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI64, DType::kBool}) {
    for (const DType index_dtype : {DType::kI32, DType::kI64}) {
      for (int dim = 0; dim < 3; ++dim) {
        for (const bool permuted : {false, true}) {
          Tensor source(dtype, {4, 5, 6}, permuted ? std::vector<int64_t>{1, 4, 20} : std::vector<int64_t>{});
          for (int64_t i = 0; i < source.num_elements(); ++i) source.set(i, static_cast<double>(i));
          Tensor index(index_dtype, {2, 3}, {7, 2});
          index.fill({0, 3, -1, 2, -4, 3});
          std::vector<int64_t> sizes;
          for (int d = 0; d < 3; ++d) {
            if (d != dim) {
              sizes.push_back(source.view().size(d));
            } else {
              sizes.insert(sizes.end(), {2, 3});
            }
          }
          Tensor out(dtype, sizes);
          ASSERT_TRUE(gather(source.view(), dim, index.view(), out.view(), pool).is_ok());
          const int64_t size = source.view().size(dim);
          int64_t after = 1;
          for (int d = dim + 1; d < 3; ++d) after *= source.view().size(d);
          for (int64_t i = 0; i < out.num_elements(); ++i) {
            const int64_t row = (index.get_int(i / after % 6) + size) % size;
            const int64_t from = (i / after / 6 * size + row) * after + i % after;
            ASSERT_EQ(out.get(i), source.get(from)) << "dim " << dim << " element " << i;
          }
        }
      }
    }
  }
}

TEST(Gather, ScalarIndexAndEmptyIndex) {
  const ThreadPool pool(1);
  Tensor source(DType::kF32, {3, 2}), index(DType::kI64, {}), out(DType::kF32, {2});
  source.fill({0, 1, 2, 3, 4, 5});
  index.set(0, -1);
  ASSERT_TRUE(gather(source.view(), 0, index.view(), out.view(), pool).is_ok());
  EXPECT_EQ(out.values(), (std::vector<double>{4, 5}));
  Tensor none(DType::kI64, {0}), nothing(DType::kF32, {0, 2});
  EXPECT_TRUE(gather(source.view(), 0, none.view(), nothing.view(), pool).is_ok());
}

TEST(Gather, OutOfRangeIsFoundBeforeAnythingIsWritten) {
  const ThreadPool pool(2);
  Tensor source(DType::kF32, {3, 2}), out(DType::kF32, {2, 2});
  source.fill_random(1);
  for (const double bad : {3.0, -4.0, 1e15}) {
    Tensor index(DType::kI64, {2});
    index.fill({0, bad});
    const Status status = gather(source.view(), 0, index.view(), out.view(), pool);
    EXPECT_EQ(status.code(), Code::kOutOfRange);
    EXPECT_NE(status.message().find(std::to_string(static_cast<int64_t>(bad))), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("size 3"), std::string::npos) << status.message();
    for (const std::byte b : out.bytes()) ASSERT_EQ(b, std::byte{0xFF});
  }
}

TEST(IndexCopy, WritesOnlyTheNamedRowsAlongAnyDimension) {
  const ThreadPool pool(2);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kI8}) {
    for (int dim = 0; dim < 3; ++dim) {
      for (const bool permuted : {false, true}) {
        Tensor target(dtype, {4, 5, 6}, permuted ? std::vector<int64_t>{1, 4, 20} : std::vector<int64_t>{});
        for (int64_t i = 0; i < target.num_elements(); ++i) target.set(i, -1);
        std::vector<int64_t> sizes{4, 5, 6};
        sizes[static_cast<size_t>(dim)] = 3;
        Tensor source(dtype, sizes, {100, 15, 2});
        for (int64_t i = 0; i < source.num_elements(); ++i) source.set(i, static_cast<double>(i));
        Tensor index(DType::kI64, {3}, {2});
        index.fill({3, 0, 3});  // the last one of equals stays
        ASSERT_TRUE(index_copy(target.view(), dim, index.view(), source.view(), pool).is_ok());
        const int64_t size = target.view().size(dim);
        int64_t after = 1;
        for (int d = dim + 1; d < 3; ++d) after *= target.view().size(d);
        for (int64_t i = 0; i < target.num_elements(); ++i) {
          const int64_t row = i / after % size;
          const int64_t from = row == 3 ? 2 : row == 0 ? 1 : -1;
          const double want = from < 0 ? -1 : source.get((i / after / size * 3 + from) * after + i % after);
          ASSERT_EQ(target.get(i), want) << "dim " << dim << " element " << i;
        }
      }
    }
  }
}

TEST(IndexCopy, OutOfRangeIsFoundBeforeAnythingIsWritten) {
  const ThreadPool pool(2);
  Tensor target(DType::kF32, {1, 4, 2}), source(DType::kF32, {1, 2, 2});
  source.fill_random(1);
  for (const double bad : {4.0, -1.0}) {
    Tensor index(DType::kI32, {2});
    index.fill({0, bad});
    const Status status = index_copy(target.view(), 1, index.view(), source.view(), pool);
    EXPECT_EQ(status.code(), Code::kOutOfRange);
    EXPECT_NE(status.message().find("dimension 1 of size 4"), std::string::npos) << status.message();
    for (const std::byte b : target.bytes()) ASSERT_EQ(b, std::byte{0xFF});
  }
}

TEST(TensorView, ShapeString) {
  EXPECT_EQ(shape_string(Tensor(DType::kF32, {2, 3, 4}).view()), "[2, 3, 4]");
  EXPECT_EQ(shape_string(Tensor(DType::kF32, {}).view()), "[]");
}

}  // namespace
}  // namespace flexpte
