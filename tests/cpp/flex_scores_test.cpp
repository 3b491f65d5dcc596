// Score expressions, and what they load.
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

void check_scores(const std::string& what, const std::function<void(Problem&)>& configure) {
  for (const int64_t queries : {1, 7, 70, 129}) {
    for (const Configure mask : {no_mask, causal, sliding, table}) {
      Problem p;
      p.shape = {2, 4, 2, queries, 150, 24, 16, false};
      mask(p);
      configure(p);
      check(p, what + ", " + std::to_string(queries) + " queries");
    }
  }
}

TEST(FlexAttention, SoftCap) {
  check_scores("soft cap", [](Problem& p) {
    Builder e;
    const int ratio = e.add(ExprOp::kDiv, DType::kF32, {e.score(), e.number(2)});
    e.times(e.add(ExprOp::kTanh, DType::kF32, {ratio}), e.number(2));
    p.score.expression = e.expression;
    p.score_fn = [](double s, int64_t, int64_t, int64_t, int64_t) { return 2 * std::tanh(s / 2); };
  });
}

TEST(FlexAttention, CapturedSlopes) {
  check_scores("alibi", [](Problem& p) {
    Builder e;
    const int slope = e.load(0, DType::kF32, {e.h()});
    e.plus(e.score(), e.times(slope, e.to_float(e.sub(e.kv(), e.q()))));
    p.score.expression = e.expression;
    p.score.capture<float>(DType::kF32, {4}, {0.5f, 0.25f, 0.125f, 0.0625f});
    p.score_fn = [](double s, int64_t, int64_t h, int64_t q, int64_t kv) {
      return s + std::ldexp(1.0, -1 - static_cast<int>(h)) * static_cast<double>(kv - q);
    };
  });
}

TEST(FlexAttention, RelativeBiasWithNegativeIndices) {
  check_scores("relative bias", [](Problem& p) {
    std::vector<float> bias(600);
    for (size_t i = 0; i < bias.size(); ++i) bias[i] = std::sin(static_cast<float>(i));
    Builder e;
    e.plus(e.score(), e.load(0, DType::kF32, {e.sub(e.q(), e.kv())}));
    p.score.expression = e.expression;
    p.score.capture(DType::kF32, {600}, bias);
    p.score_fn = [bias](double s, int64_t, int64_t, int64_t q, int64_t kv) {
      return s + static_cast<double>(bias[static_cast<size_t>(q >= kv ? q - kv : 600 + q - kv)]);
    };
  });
}

TEST(FlexAttention, ScoresOfMinusInfinityHide) {
  check_scores("-inf by score", [](Problem& p) {
    Builder e;
    const int seen = e.ge(e.q(), e.plus(e.kv(), e.integer(5), DType::kI32));
    e.add(ExprOp::kWhere, DType::kF32, {seen, e.score(), e.number(-std::numeric_limits<double>::infinity())});
    p.score.expression = e.expression;
    p.score_fn = [](double s, int64_t, int64_t, int64_t q, int64_t kv) {
      return q >= kv + 5 ? s : -std::numeric_limits<double>::infinity();
    };
  });
}

TEST(FlexAttention, ScoresFarBelowZeroCount) {
  check_scores("far below", [](Problem& p) {
    Builder e;
    e.sub(e.score(), e.number(60000), DType::kF32);
    p.score.expression = e.expression;
    p.score_fn = [](double s, int64_t, int64_t, int64_t, int64_t) { return s - 60000; };
  });
}

TEST(FlexAttention, MaskedPositionsLoadNothing) {
  for (const int64_t queries : {1, 70}) {
    for (const Configure mask : {causal, table}) {
      Problem p;
      p.shape.num_queries = queries;
      p.shape.num_keys = 100;
      mask(p);
      if (mask == table) {  // true on and below the diagonal only, but not provably
        for (int64_t q = 0; q < queries; ++q) {
          for (int64_t kv = 0; kv < 100; ++kv) {
            static_cast<uint8_t*>(p.mask.captures[0].data)[q * 100 + kv] = q >= kv;
          }
        }
        p.mask_fn = [](int64_t, int64_t, int64_t q, int64_t kv) { return q >= kv; };
      }
      Builder e;  // kv stays below num_queries where kv <= q
      e.plus(e.score(), e.load(0, DType::kF32, {e.kv()}));
      p.score.expression = e.expression;
      p.score.capture(DType::kF32, {queries}, std::vector<float>(static_cast<size_t>(queries), 0.5f));
      p.score_fn = [](double s, int64_t, int64_t, int64_t, int64_t) { return s + 0.5; };
      check(p, "loads where visible");
    }
  }
}

TEST(FlexAttention, LoadsOutsideACaptureAreAnError) {
  for (const int64_t queries : {1, 70}) {
    Problem p;
    p.shape.num_queries = queries;
    p.shape.num_keys = 100;
    Builder e;
    e.plus(e.score(), e.load(0, DType::kF32, {e.kv()}));
    p.score.expression = e.expression;
    p.score.capture(DType::kF32, {99}, std::vector<float>(99, 0.5f));
    const Status status = Attention::make(p).run();
    EXPECT_EQ(status.code(), Code::kOutOfRange);
    EXPECT_NE(status.message().find("score expression"), std::string::npos) << status.message();
  }
  Problem p;
  p.shape.num_queries = p.shape.num_keys = 100;
  table(p);
  p.mask.captures[0].sizes[1] = 99;
  p.poison_unseen = false;
  const Status status = Attention::make(p).run();
  EXPECT_EQ(status.code(), Code::kOutOfRange);
  EXPECT_NE(status.message().find("mask expression"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace flexpte::testing
