// Masks as expressions and as the plain functions that they mean.
#pragma once

#include <vector>

#include "tests/cpp/flex_attention_testing.h"

namespace flexpte::testing {

using Configure = void (*)(Problem&);

inline void no_mask(Problem&) {}
inline void causal(Problem& p) {
  Builder e;
  e.causal();
  p.mask.expression = e.expression;
  p.mask_fn = [](int64_t, int64_t, int64_t q, int64_t kv) { return q >= kv; };
}
inline void sliding(Problem& p) {
  Builder e;
  e.within(37);
  p.mask.expression = e.expression;
  p.mask_fn = [](int64_t, int64_t, int64_t q, int64_t kv) { return q >= kv && q - kv < 37; };
}
inline void prefix(Problem& p) {
  Builder e;
  e.either(e.lt(e.kv(), e.integer(50)), e.causal());
  p.mask.expression = e.expression;
  p.mask_fn = [](int64_t, int64_t, int64_t q, int64_t kv) { return kv < 50 || q >= kv; };
}
inline std::vector<int64_t> document_ids(int64_t length, bool sorted) {
  std::vector<int64_t> ids(static_cast<size_t>(length));
  for (int64_t i = 0; i < length; ++i) ids[static_cast<size_t>(i)] = (1 << 24) + (sorted ? i / 53 : i * 7 % 4);
  return ids;
}
template <bool sorted>
void documents(Problem& p) {
  const auto ids = document_ids(std::max(p.shape.num_queries, p.shape.num_keys), sorted);
  Builder e;
  e.eq(e.load(0, DType::kI64, {e.q()}), e.load(0, DType::kI64, {e.kv()}));
  p.mask.expression = e.expression;
  p.mask.capture(DType::kI64, {static_cast<int64_t>(ids.size())}, ids);
  p.mask_fn = [ids](int64_t, int64_t, int64_t q, int64_t kv) {
    return ids[static_cast<size_t>(q)] == ids[static_cast<size_t>(kv)];
  };
}
inline void head_windows(Problem& p) {
  std::vector<int32_t> windows;
  for (int64_t h = 0; h < p.shape.num_heads; ++h) windows.push_back(static_cast<int32_t>(5 + 40 * h));
  Builder e;
  e.both(e.causal(), e.lt(e.sub(e.q(), e.kv()), e.load(0, DType::kI32, {e.h()})));
  p.mask.expression = e.expression;
  p.mask.capture(DType::kI32, {p.shape.num_heads}, windows);
  p.mask_fn = [windows](int64_t, int64_t h, int64_t q, int64_t kv) {
    return q >= kv && q - kv < windows[static_cast<size_t>(h)];
  };
}
inline void padding(Problem& p) {
  std::vector<int64_t> lengths;
  for (int64_t b = 0; b < p.shape.batch; ++b) lengths.push_back(std::max<int64_t>(0, p.shape.num_keys - 61 * b));
  Builder e;
  e.lt(e.add(ExprOp::kCast, DType::kI64, {e.kv()}), e.load(0, DType::kI64, {e.b()}));
  p.mask.expression = e.expression;
  p.mask.capture(DType::kI64, {p.shape.batch}, lengths);
  p.mask_fn = [lengths](int64_t b, int64_t, int64_t, int64_t kv) { return kv < lengths[static_cast<size_t>(b)]; };
}
inline void table(Problem& p) {
  const int64_t num_keys = p.shape.num_keys;
  std::vector<uint8_t> bits(static_cast<size_t>(p.shape.num_queries * num_keys));
  std::mt19937 random(7);
  for (uint8_t& bit : bits) bit = random() % 3 == 0;
  Builder e;
  e.load(0, DType::kBool, {e.q(), e.kv()});
  p.mask.expression = e.expression;
  p.mask.capture(DType::kBool, {p.shape.num_queries, num_keys}, bits);
  p.mask_fn = [bits, num_keys](int64_t, int64_t, int64_t q, int64_t kv) {
    return bits[static_cast<size_t>(q * num_keys + kv)] != 0;
  };
}
inline void empty_rows(Problem& p) {
  Builder e;
  e.both(e.ge(e.q(), e.integer(3)), e.both(e.causal(), e.ge(e.kv(), e.integer(40))));
  p.mask.expression = e.expression;
  p.mask_fn = [](int64_t, int64_t, int64_t q, int64_t kv) { return q >= 3 && q >= kv && kv >= 40; };
}
inline void nothing(Problem& p) {
  Builder e;
  e.lt(e.kv(), e.integer(0));
  p.mask.expression = e.expression;
  p.mask_fn = [](int64_t, int64_t, int64_t, int64_t) { return false; };
}

struct NamedMask {
  const char* name;
  Configure configure;
};
inline const NamedMask kMasks[] = {{"none", no_mask},
                                   {"causal", causal},
                                   {"sliding", sliding},
                                   {"prefix", prefix},
                                   {"sorted documents", documents<true>},
                                   {"mixed documents", documents<false>},
                                   {"head windows", head_windows},
                                   {"padding", padding},
                                   {"table", table},
                                   {"empty rows", empty_rows},
                                   {"nothing", nothing}};

}  // namespace flexpte::testing
