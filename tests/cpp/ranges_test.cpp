#include "metal_delegate/ranges.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "expression_reference.h"

namespace flexpte {
namespace {

using reference::Builder;
using reference::Environment;
using reference::Tensor;

Tensor integers(DType dtype, const std::vector<int64_t>& values, std::vector<int64_t> sizes) {
  Tensor t(dtype, std::move(sizes));
  for (size_t i = 0; i < values.size(); ++i) reference::write(t.view, static_cast<int64_t>(i), {false, values[i], 0});
  return t;
}

// The mask of one batch and head, element by element, as the interpreter sees it.
struct Dense {
  int64_t num_queries, num_keys;
  std::vector<uint8_t> bits;

  Dense(const Expression& mask, Environment env, int64_t num_queries, int64_t num_keys)
      : num_queries(num_queries), num_keys(num_keys) {
    for (env.q = 0; env.q < num_queries; ++env.q) {
      for (env.kv = 0; env.kv < num_keys; ++env.kv) {
        bits.push_back(static_cast<uint8_t>(reference::evaluate(mask, env).i));
      }
    }
  }
  bool at(int64_t q, int64_t kv) const { return bits[static_cast<size_t>(q * num_keys + kv)] != 0; }
  Verdict classify(int64_t q0, int64_t q1, int64_t k0, int64_t k1) const {
    int64_t seen = 0;
    for (int64_t q = q0; q < q1; ++q) {
      for (int64_t kv = k0; kv < k1; ++kv) seen += at(q, kv);
    }
    return seen == 0 ? Verdict::kNone : seen == (q1 - q0) * (k1 - k0) ? Verdict::kAll : Verdict::kMixed;
  }
};

struct Case {
  Builder b;
  Environment env;
  std::vector<Tensor> tensors;
  int64_t num_queries = 100, num_keys = 150;

  void capture(Tensor t) {
    env.captures.push_back(t.view);
    tensors.push_back(std::move(t));
  }
  Result<MaskRanges> compile() const {
    std::vector<int> ranks;
    for (const TensorView& view : env.captures) ranks.push_back(view.rank);
    return MaskRanges::compile(b.expression, static_cast<int>(env.scalars.size()), ranks);
  }
};

// How much of what the dense mask says was found: for soundness everything that is claimed must hold.
struct Found {
  int64_t tiles = 0, wrong_tiles = 0, exact_tiles = 0;
  int64_t rows = 0, wrong_rows = 0, interval_rows = 0, solved_rows = 0;
  bool hull_holds = true, hull_exact = true;
  bool is_relative = false, relative_holds = true;
  int64_t wrong_looks = 0, undecided_looks = 0;
};

Found check(const Case& c, int64_t q_tile, int64_t kv_tile) {
  Found found;
  const auto mask = c.compile();
  EXPECT_TRUE(mask.is_ok()) << mask.status().message();
  BoundMask bound;
  bound.bind(*mask, c.env.captures, c.env.scalars, c.num_queries, c.num_keys);
  const Dense dense(c.b.expression, c.env, c.num_queries, c.num_keys);
  const int64_t b = c.env.batch, h = c.env.head;
  for (int64_t q = 0; q < c.num_queries; q += q_tile) {
    const int64_t q_end = std::min(q + q_tile, c.num_queries);
    for (int64_t kv = 0; kv < c.num_keys; kv += kv_tile) {
      const int64_t kv_end = std::min(kv + kv_tile, c.num_keys);
      const Verdict verdict = bound.classify(b, h, q, q_end, kv, kv_end);
      const Verdict truth = dense.classify(q, q_end, kv, kv_end);
      ++found.tiles;
      found.wrong_tiles += verdict != Verdict::kMixed && verdict != truth;
      found.exact_tiles += verdict == truth;
      const Verdict look = bound.examine(b, h, q, q_end, kv, kv_end);
      found.wrong_looks += look != Verdict::kMixed && look != truth;
      found.undecided_looks += look != truth;
    }
    const KeyRange keys = bound.visible_keys(b, h, q, q_end);
    int64_t first = c.num_keys, last = -1;
    for (int64_t row = q; row < q_end; ++row) {
      for (int64_t kv = 0; kv < c.num_keys; ++kv) {
        if (!dense.at(row, kv)) continue;
        first = std::min(first, kv);
        last = std::max(last, kv);
      }
    }
    if (last >= 0) {
      found.hull_holds &= keys.begin <= first && last < keys.end;
      found.hull_exact &= keys.begin == first && keys.end == last + 1;
    } else {
      found.hull_exact &= keys.empty();
    }
  }
  KeyRange relative;
  found.is_relative = bound.relative_interval(b, h, &relative);
  for (int64_t q = 0; q < c.num_queries && found.is_relative; ++q) {
    for (int64_t kv = 0; kv < c.num_keys; ++kv) {
      found.relative_holds &= dense.at(q, kv) == (relative.begin + q <= kv && kv < relative.end + q);
    }
  }
  for (int64_t q = 0; q < c.num_queries; ++q) {
    const int64_t k0 = q % 7, k1 = c.num_keys - q % 5;
    int64_t changes = 0, seen = 0;
    for (int64_t kv = k0; kv < k1; ++kv) {
      seen += dense.at(q, kv);
      changes += dense.at(q, kv) && (kv == k0 || !dense.at(q, kv - 1));
    }
    KeyRange keys;
    ++found.rows;
    found.interval_rows += changes <= 1;
    if (!bound.row_interval(b, h, q, k0, k1, &keys)) continue;
    ++found.solved_rows;
    bool right =
        changes <= 1 && keys.begin >= k0 && keys.end <= k1 && std::max<int64_t>(keys.end - keys.begin, 0) == seen;
    for (int64_t kv = keys.begin; kv < keys.end && right; ++kv) right = dense.at(q, kv);
    found.wrong_rows += !right;
  }
  return found;
}

void expect_sound(const Found& found) {
  EXPECT_EQ(found.wrong_tiles, 0);
  EXPECT_EQ(found.wrong_rows, 0);
  EXPECT_EQ(found.wrong_looks, 0);
  EXPECT_TRUE(found.hull_holds);
  EXPECT_TRUE(found.relative_holds);
}

// Nothing that the dense mask shows at this granularity may be missed.
void expect_exact(const Case& c, bool rows_too = true) {
  for (const auto& [q_tile, kv_tile] : {std::pair<int64_t, int64_t>{16, 16}, {15, 17}, {1, 64}, {64, 1}, {33, 150}}) {
    SCOPED_TRACE("tile " + std::to_string(q_tile) + " x " + std::to_string(kv_tile));
    const Found found = check(c, q_tile, kv_tile);
    expect_sound(found);
    EXPECT_EQ(found.exact_tiles, found.tiles);
    EXPECT_EQ(found.undecided_looks, 0);
    EXPECT_TRUE(found.hull_exact);
    EXPECT_TRUE(!rows_too || found.solved_rows == found.rows);
  }
}

constexpr DType kBool = DType::kBool, kI32 = DType::kI32, kI64 = DType::kI64;

int32_t causal(Builder& b) {
  return b.add(ExprOp::kGe, kBool, {b.q(), b.kv()});
}
int32_t within(Builder& b, int64_t window_tokens) {
  return b.add(ExprOp::kLt, kBool, {b.add(ExprOp::kSub, kI32, {b.q(), b.kv()}), b.constant(kI32, window_tokens)});
}
int32_t load(Builder& b, int32_t capture, std::vector<int32_t> indices, DType type = kI64) {
  return b.add(ExprOp::kLoad, type, std::move(indices), capture);
}
int32_t wide(Builder& b, int32_t n) {
  return b.add(ExprOp::kCast, kI64, {n});
}
int32_t both(Builder& b, int32_t x, int32_t y) {
  return b.add(ExprOp::kBitAnd, kBool, {x, y});
}
int32_t either(Builder& b, int32_t x, int32_t y) {
  return b.add(ExprOp::kLogicalOr, kBool, {x, y});
}

TEST(Ranges, Causal) {
  Case c;
  causal(c.b);
  expect_exact(c);
}

TEST(Ranges, CausalWithAnOffsetScalar) {
  Case c;
  c.env.scalars = {37};
  const int32_t q = c.b.add(ExprOp::kAdd, kI64, {wide(c.b, c.b.q()), c.b.add(ExprOp::kScalar, kI64)});
  c.b.add(ExprOp::kGe, kBool, {q, wide(c.b, c.b.kv())});
  expect_exact(c);
}

TEST(Ranges, SlidingWindows) {
  for (const int64_t window_tokens : {1, 15, 16, 17, 40, 1000}) {
    SCOPED_TRACE(window_tokens);
    Case c;
    both(c.b, causal(c.b), within(c.b, window_tokens));
    expect_exact(c);
    Case d;
    const int32_t distance = d.b.add(ExprOp::kAbs, kI32, {d.b.add(ExprOp::kSub, kI32, {d.b.q(), d.b.kv()})});
    d.b.add(ExprOp::kLt, kBool, {distance, d.b.constant(kI32, window_tokens)});
    expect_exact(d, false);
  }
}

TEST(Ranges, PrefixAndSinkKeys) {
  Case c;  // a prefix seen by all: one interval per row
  either(c.b, causal(c.b), c.b.add(ExprOp::kLt, kBool, {c.b.kv(), c.b.constant(kI32, 23)}));
  expect_exact(c);
  Case d;  // sinks and a window: two intervals in late rows
  const int32_t sink = d.b.add(ExprOp::kLt, kBool, {d.b.kv(), d.b.constant(kI32, 4)});
  both(d.b, causal(d.b), either(d.b, within(d.b, 20), sink));
  expect_exact(d, false);
}

// kv <= pos[q] & kv > pos[q] - W, positions captured.
TEST(Ranges, CapturedPositions) {
  for (const DType dtype : {kI32, kI64}) {
    Case c;
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < 100; ++i) positions.push_back(i + 45);
    c.capture(integers(dtype, positions, {100}));
    const int32_t pos = load(c.b, 0, {c.b.q()});
    const int32_t kv = wide(c.b, c.b.kv());
    const int32_t seen = c.b.add(ExprOp::kLe, kBool, {kv, pos});
    const int32_t start = c.b.add(ExprOp::kSub, kI64, {pos, c.b.constant(kI64, 30)});
    both(c.b, seen, c.b.add(ExprOp::kGt, kBool, {kv, start}));
    expect_exact(c);
  }
}

TEST(Ranges, SortedDocuments) {
  Case c;
  c.num_queries = c.num_keys = 130;
  std::vector<int64_t> documents;
  for (int64_t i = 0; i < 130; ++i) documents.push_back(i < 20 ? 0 : i < 21 ? 1 : i < 64 ? 2 : i < 110 ? 5 : 6);
  c.capture(integers(DType::kI32, documents, {130}));
  c.b.add(ExprOp::kEq, kBool, {load(c.b, 0, {c.b.q()}), load(c.b, 0, {c.b.kv()})});
  Case d;
  d.num_queries = d.num_keys = 130;
  d.capture(integers(DType::kI64, documents, {130}));
  expect_exact(c);
  both(d.b, d.b.add(ExprOp::kEq, kBool, {load(d.b, 0, {d.b.q()}), load(d.b, 0, {d.b.kv()})}), causal(d.b));
  expect_exact(d);
}

TEST(Ranges, LengthsAndPaddingPerBatch) {
  Case c;
  c.env.batch = 1;
  c.capture(integers(DType::kI32, {150, 77, 0}, {3}));
  c.b.add(ExprOp::kLt, kBool, {wide(c.b, c.b.kv()), load(c.b, 0, {c.b.add(ExprOp::kBatch, kI32)})});
  expect_exact(c);
  c.env.batch = 2;
  expect_exact(c);
  Case d;  // keep[b, kv], left padding
  d.env.batch = 1;
  std::vector<int64_t> keep(300, 1);
  for (size_t i = 0; i < 61; ++i) keep[150 + i] = 0;
  d.capture(integers(kBool, keep, {2, 150}));
  const int32_t kept = load(d.b, 0, {d.b.add(ExprOp::kBatch, kI32), d.b.kv()}, kBool);
  expect_exact(d);
  // Rows of the padding see nothing; in tiles both halves of the mask are mixed there.
  both(d.b, kept, causal(d.b));
  const Found found = check(d, 16, 16);
  expect_sound(found);
  EXPECT_EQ(found.solved_rows, found.rows);
  EXPECT_GE(found.exact_tiles, found.tiles - 4);
}

TEST(Ranges, BlockDiagonal) {
  Case c;
  const auto block = [&](int32_t i) { return c.b.add(ExprOp::kFloorDiv, kI32, {i, c.b.constant(kI32, 16)}); };
  c.b.add(ExprOp::kEq, kBool, {block(c.b.q()), block(c.b.kv())});
  expect_exact(c);
  Case d;
  const auto shifted = [&](int32_t i) { return d.b.add(ExprOp::kShiftRight, kI32, {i, d.b.constant(kI32, 4)}); };
  const int32_t distance = d.b.add(ExprOp::kSub, kI32, {shifted(d.b.q()), shifted(d.b.kv())});
  both(d.b, d.b.add(ExprOp::kLt, kBool, {distance, d.b.constant(kI32, 2)}), causal(d.b));
  expect_exact(d);
}

TEST(Ranges, HeadsAndBatchesAreSeen) {
  Case c;
  c.b.add(ExprOp::kLt, kBool, {c.b.add(ExprOp::kHead, kI32), c.b.kv()});
  EXPECT_TRUE(c.compile()->depends_on_head());
  EXPECT_FALSE(c.compile()->depends_on_batch());
}

TEST(Ranges, WrappingIsNeverTrusted) {
  Case c;  // q * 2^26 overflows from q = 32 on
  const int32_t big = c.b.add(ExprOp::kMul, kI32, {c.b.q(), c.b.constant(kI32, 1 << 26)});
  c.b.add(ExprOp::kGe, kBool, {big, c.b.constant(kI32, 0)});
  for (const int64_t tile : {1, 16, 64}) expect_sound(check(c, tile, tile));
  Case d;  // positions read with negative indices wrap
  std::vector<int64_t> values;
  for (int64_t i = 0; i < 150; ++i) values.push_back(i * 7 % 150);
  d.capture(integers(kI64, values, {150}));
  const int32_t distance = d.b.add(ExprOp::kSub, kI32, {d.b.q(), d.b.kv()});
  d.b.add(ExprOp::kLt, kBool, {load(d.b, 0, {distance}), d.b.constant(kI64, 60)});
  for (const int64_t tile : {1, 16, 64}) expect_sound(check(d, tile, tile));
}

TEST(Ranges, BlocksOfLongCapturesAreReadOnceAndForgottenByBind) {
  Case c;
  c.num_queries = 3;
  c.num_keys = 20000;
  std::vector<int64_t> values(20000, 1);
  values[12345] = 0;
  c.capture(integers(kBool, values, {20000}));
  load(c.b, 0, {c.b.kv()}, kBool);
  const auto mask = c.compile();
  ASSERT_TRUE(mask.is_ok());
  BoundMask bound;
  for (int round = 0; round < 2; ++round) {
    bound.bind(*mask, c.env.captures, {}, 3, 20000);
    EXPECT_EQ(bound.classify(0, 0, 0, 3, 0, 12345), Verdict::kAll);
    EXPECT_EQ(bound.classify(0, 0, 0, 3, 12345, 12346), Verdict::kNone);
    EXPECT_EQ(bound.classify(0, 0, 0, 3, 100, 20000), Verdict::kMixed);
  }
  reference::write(c.env.captures[0], 12345, {false, 1, 0});
  bound.bind(*mask, c.env.captures, {}, 3, 20000);
  EXPECT_EQ(bound.classify(0, 0, 0, 3, 0, 20000), Verdict::kAll);
}

TEST(Ranges, MasksThatAreNoMasksAreRefused) {
  Builder b;
  b.q();
  EXPECT_EQ(MaskRanges::compile(b.expression, 0, {}).status().code(), Code::kInvalidProgram);
  Builder s;
  s.add(ExprOp::kGt, kBool, {s.add(ExprOp::kScore, DType::kF32), s.constant(0.0)});
  EXPECT_NE(MaskRanges::compile(s.expression, 0, {}).status().message().find("score"), std::string::npos);
}

TEST(Ranges, LongExpressionsAreMixed) {
  Builder b;
  int32_t n = causal(b);
  for (int i = 0; i < 300; ++i) n = b.add(ExprOp::kLogicalNot, kBool, {n});
  const auto mask = MaskRanges::compile(b.expression, 0, {});
  ASSERT_TRUE(mask.is_ok());
  BoundMask bound;
  bound.bind(*mask, {}, {}, 10, 10);
  EXPECT_EQ(bound.classify(0, 0, 0, 1, 5, 6), Verdict::kMixed);
  EXPECT_EQ(bound.visible_keys(0, 0, 0, 5).end, 10);
}

// Random masks over every operation: whatever is claimed holds.
TEST(Ranges, RandomMasksAreSound) {
  std::mt19937 random(7);
  const auto pick = [&](int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random); };
  constexpr DType types[] = {kBool, kI32, kI64, DType::kF32};
  int64_t decided = 0, tiles = 0, solved = 0, relative = 0;
  for (int round = 0; round < 4000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Case c;
    c.num_queries = 13;
    c.num_keys = 19;
    c.env.batch = pick(2);
    c.env.head = pick(3);
    c.env.scalars = {pick(30) - 5};
    std::vector<int64_t> sorted, shuffled, grid;
    for (int64_t i = 0; i < 24; ++i) sorted.push_back(i / 3), shuffled.push_back(pick(30) - 8), grid.push_back(pick(3));
    c.capture(integers(kI32, sorted, {24}));
    c.capture(integers(kI64, shuffled, {24}));
    c.capture(integers(pick(2) == 0 ? kBool : DType::kI8, grid, {2, 12}));
    Tensor reals(DType::kF32, {24});
    for (int64_t i = 0; i < 24; ++i) {
      reference::write(reals.view, i, {true, 0, i == 20 ? std::nan("") : static_cast<double>(pick(20)) * 0.5 - 3});
    }
    c.capture(std::move(reals));
    Builder& b = c.b;
    const auto any = [&](DType type) -> int32_t {
      std::vector<int32_t> known;
      for (size_t i = 0; i < b.expression.nodes.size(); ++i) {
        if (b.expression.nodes[i].type == type) known.push_back(static_cast<int32_t>(i));
      }
      if (!known.empty() && pick(3) != 0) return known[static_cast<size_t>(pick(static_cast<int64_t>(known.size())))];
      if (type == kBool) return causal(b);
      if (type == DType::kF32) return b.constant(static_cast<double>(pick(9)) * 0.5 - 1);
      const int64_t kind = pick(6);
      if (kind == 0) return b.add(ExprOp::kScalar, type, {}, 0);
      if (kind == 1) return b.add(pick(2) == 0 ? ExprOp::kHead : ExprOp::kBatch, type);
      if (kind == 2) return b.constant(type, pick(20) == 0 ? std::numeric_limits<int32_t>::max() : pick(24) - 6);
      return kind == 3 ? b.q(type) : b.kv(type);
    };
    const auto one_of = [&](std::initializer_list<ExprOp> ops) {
      return ops.begin()[pick(static_cast<int64_t>(ops.size()))];
    };
    const int64_t steps = 2 + pick(9);
    for (int64_t s = 0; s < steps; ++s) {
      const DType type = types[pick(4)];
      const int64_t kind = pick(9);
      if (kind == 0) {
        const DType from = types[pick(4)];
        b.add(ExprOp::kCast, type, {any(from)});
      } else if (kind == 1) {
        b.add(ExprOp::kWhere, type, {any(kBool), any(type), any(type)});
      } else if (kind == 2) {
        const int64_t n = pick(4);
        if (n == 2) {
          load(b, 2, {any(kI32), any(kI64)}, type);
        } else {
          load(b, static_cast<int32_t>(n), {any(pick(2) == 0 ? kI32 : kI64)}, type);
        }
      } else if (kind <= 4) {
        b.add(one_of({ExprOp::kEq, ExprOp::kNe, ExprOp::kLt, ExprOp::kLe, ExprOp::kGt, ExprOp::kGe, ExprOp::kLogicalAnd,
                      ExprOp::kLogicalOr, ExprOp::kLogicalXor}),
              kBool, {any(type), any(type)});
      } else if (type == kBool) {
        b.add(one_of({ExprOp::kBitAnd, ExprOp::kBitOr, ExprOp::kBitXor, ExprOp::kMin, ExprOp::kMax, ExprOp::kMul}),
              type, {any(type), any(type)});
      } else if (type == DType::kF32) {
        if (pick(2) == 0) {
          b.add(one_of({ExprOp::kNeg, ExprOp::kAbs, ExprOp::kFloor, ExprOp::kRound, ExprOp::kRelu, ExprOp::kSqrt}),
                type, {any(type)});
        } else {
          b.add(one_of({ExprOp::kAdd, ExprOp::kSub, ExprOp::kMul, ExprOp::kDiv, ExprOp::kMin, ExprOp::kMax}), type,
                {any(type), any(type)});
        }
      } else if (pick(4) == 0) {
        if (pick(4) == 0) {
          b.round_to(any(type), pick(2) == 0 ? DType::kI8 : DType::kU8);
        } else {
          b.add(one_of({ExprOp::kNeg, ExprOp::kAbs, ExprOp::kSign, ExprOp::kSquare, ExprOp::kRelu, ExprOp::kBitNot}),
                type, {any(type)});
        }
      } else {
        b.add(one_of({ExprOp::kAdd, ExprOp::kSub, ExprOp::kSub, ExprOp::kMul, ExprOp::kFloorDiv, ExprOp::kRemainder,
                      ExprOp::kFmod, ExprOp::kTruncDiv, ExprOp::kPow, ExprOp::kMin, ExprOp::kMax, ExprOp::kBitAnd,
                      ExprOp::kBitOr, ExprOp::kBitXor, ExprOp::kShiftLeft, ExprOp::kShiftRight}),
              type, {any(type), any(type)});
      }
    }
    const DType last = b.type(static_cast<int32_t>(b.expression.nodes.size()) - 1);
    if (last != kBool) {
      const int32_t value = static_cast<int32_t>(b.expression.nodes.size()) - 1;
      b.add(one_of({ExprOp::kLt, ExprOp::kGe, ExprOp::kEq, ExprOp::kNe}), kBool, {value, any(last)});
    }
    const Found found = check(c, 4, 5);
    expect_sound(found);
    decided += found.exact_tiles;
    tiles += found.tiles;
    solved += found.solved_rows;
    relative += found.is_relative;
    if (HasFailure()) return;
  }
  EXPECT_GT(relative, 200);
  EXPECT_GT(decided, tiles / 2);
  EXPECT_GT(solved, 10000);
}

}  // namespace
}  // namespace flexpte
