// Masks, lengths, dtypes, head dimensions and strides.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/flex_attention_testing.h"
#include "tests/cpp/flex_masks_testing.h"

namespace flexpte::testing {
namespace {

TEST(FlexAttention, MasksAtLengthsAroundTheTiles) {
  for (const NamedMask& mask : kMasks) {
    for (const int64_t length : {1, 2, 8, 9, 31, 33, 63, 64, 65, 127, 128, 129, 200}) {
      Problem p;
      p.shape.batch = 2;
      p.shape.num_queries = p.shape.num_keys = length;
      mask.configure(p);
      check(p, std::string(mask.name) + " at length " + std::to_string(length));
    }
  }
}

TEST(FlexAttention, MasksWithFewQueriesAndManyKeys) {
  for (const NamedMask& mask : kMasks) {
    for (const auto& [queries, keys] :
         {std::pair<int64_t, int64_t>{1, 1000}, {3, 777}, {8, 130}, {40, 1000}, {150, 20}}) {
      Problem p;
      p.shape.batch = 2;
      p.shape.num_heads = 6;
      p.shape.num_queries = queries;
      p.shape.num_keys = keys;
      mask.configure(p);
      check(p, std::string(mask.name) + " of " + std::to_string(queries) + " x " + std::to_string(keys));
    }
  }
}

TEST(FlexAttention, EveryDtype) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    for (const NamedMask& mask : kMasks) {
      for (const int64_t queries : {1, 70}) {
        Problem p;
        p.dtype = dtype;
        p.shape = {2, 6, 2, queries, 300, 40, 24, false};
        mask.configure(p);
        check(p, std::string(mask.name) + " in " + std::string(dtype_name(dtype)));
      }
    }
  }
}

TEST(FlexAttention, HeadDimsGroupsAndStrides) {
  const std::pair<int64_t, int64_t> dims[] = {{1, 1},   {3, 5},    {8, 17},   {31, 8},
                                              {64, 64}, {94, 121}, {128, 32}, {600, 520}};
  for (const auto& [key_dim, value_dim] : dims) {
    for (const int64_t group : {1, 3, 6}) {
      for (const int64_t queries : {1, 5, 70}) {
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          Problem p;
          p.dtype = dtype;
          p.scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
          p.shape = {2, 2 * group, 2, queries, 75, key_dim, value_dim, group == 3};
          p.row_padding = group == 1 ? 0 : 5;
          p.element_stride = group == 6 ? 2 : 1;
          causal(p);
          check(p, "dims " + std::to_string(key_dim) + ", " + std::to_string(value_dim) + ", group " +
                       std::to_string(group) + ", queries " + std::to_string(queries));
        }
      }
    }
  }
}

TEST(FlexAttention, NoKeysGiveZerosAndNoQueriesNothing) {
  for (const int64_t queries : {0, 1, 40}) {
    for (const int64_t keys : {0, 3}) {
      Problem p;
      p.shape.num_queries = queries;
      p.shape.num_keys = keys;
      causal(p);
      check(p, std::to_string(queries) + " x " + std::to_string(keys));
    }
  }
}

}  // namespace
}  // namespace flexpte::testing
