#include "runtime/kernels/expression.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "expression_reference.h"

namespace flexpte {
namespace {

using reference::Builder;
using reference::Environment;
using reference::Tensor;
using reference::Value;

// 64-byte aligned workspace of exactly the size asked for, filled with noise.
struct Workspace {
  explicit Workspace(size_t size) : bytes(new (std::align_val_t{64}) std::byte[std::max<size_t>(size, 1)]), size(size) {
    std::memset(bytes, 0xa5, size);
  }
  ~Workspace() { ::operator delete[](bytes, std::align_val_t{64}); }
  std::span<std::byte> span() { return {bytes, size}; }
  std::byte* bytes;
  size_t size;
};

bool same(float a, float b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

Value lane(const TileProgram::Tile& tile, int64_t r, int64_t c) {
  int64_t at = 0;
  if (tile.extent == Extent::kRows) at = r;
  if (tile.extent == Extent::kCols) at = c;
  if (tile.extent == Extent::kFull) at = r * tile.stride + c;
  TensorView view;
  view.data = const_cast<void*>(tile.data);
  view.dtype = tile.type;
  const reference::Element e = reference::read(view, at);
  return {e.i, static_cast<float>(e.f)};
}

// Runs a program over a tile and compares every lane with the interpreter.
void expect_tile(const Expression& expression, const Environment& base, int64_t rows, int64_t cols) {
  std::vector<int> ranks;
  for (const TensorView& view : base.captures) ranks.push_back(view.rank);
  auto program = TileProgram::compile(expression, 0, static_cast<int>(base.scalars.size()), ranks);
  ASSERT_TRUE(program.is_ok()) << program.status().message();
  const int64_t score_stride = cols + 3;
  std::vector<float> score(static_cast<size_t>((rows - 1) * score_stride + cols));
  for (size_t i = 0; i < score.size(); ++i) score[i] = static_cast<float>(i % 37) * 0.25f - 4.0f;
  Workspace workspace(program->workspace_bytes(rows, cols));
  TileInputs in;
  in.batch = base.batch;
  in.head = base.head;
  in.q_begin = base.q;
  in.kv_begin = base.kv;
  in.score = score.data();
  in.score_stride = score_stride;
  in.captures = base.captures;
  in.scalars = base.scalars;
  bool outside = false;
  const TileProgram::Tile tile = program->run(in, rows, cols, workspace.span(), nullptr, 0, &outside);
  EXPECT_EQ(tile.extent, program->result_extent());
  bool expect_outside = false;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      Environment env = base;
      env.q += r;
      env.kv += c;
      env.score = score[static_cast<size_t>(r * score_stride + c)];
      const Value expected = reference::evaluate(expression, env, &expect_outside);
      const Value got = lane(tile, r, c);
      if (tile.type == DType::kF32 ? !same(got.f, expected.f) : got.i != expected.i) {
        FAIL() << "lane (" << r << ", " << c << "): got " << got.i << " / " << got.f << ", expected " << expected.i
               << " / " << expected.f;
      }
    }
  }
  // Loads that the result does not depend on are not run: only a result that needs them may tell.
  EXPECT_TRUE(!outside || expect_outside);
}

// Random programs over everything that has one exact answer.
class Generator {
 public:
  explicit Generator(uint32_t seed) : random_(seed) {}

  int64_t pick(int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random_); }

  int32_t any(DType type) {
    std::vector<int32_t> found;
    for (size_t i = 0; i < b.expression.nodes.size(); ++i) {
      if (b.expression.nodes[i].type == type) found.push_back(static_cast<int32_t>(i));
    }
    if (found.empty()) return leaf(type);
    return found[static_cast<size_t>(pick(static_cast<int64_t>(found.size())))];
  }

  int32_t leaf(DType type) {
    if (type == DType::kF32) {
      if (pick(2) == 0) return b.add(ExprOp::kScore, type);
      using Limits = std::numeric_limits<double>;
      constexpr double values[] = {0.0, -0.0, 1.5, -2.25, 1e30, 3.0e9, Limits::infinity(), Limits::quiet_NaN(), 0.1};
      return b.constant(values[pick(9)]);
    }
    if (type == DType::kBool) return b.constant(type, pick(2));
    switch (pick(6)) {
      case 0:
        return b.q(type);
      case 1:
        return b.kv(type);
      case 2:
        return b.add(ExprOp::kHead, type);
      case 3:
        return b.add(ExprOp::kScalar, type, {}, static_cast<int32_t>(pick(2)));
      default: {
        constexpr int64_t values[] = {0, 1, -1, 2, 7, 16, -3, 31, 64, 2147483647, -2147483647 - 1, 40000};
        return b.constant(type, values[pick(12)]);
      }
    }
  }

  void operation(int num_captures, const std::vector<TensorView>& captures) {
    constexpr DType types[] = {DType::kBool, DType::kI32, DType::kI64, DType::kF32};
    const DType type = types[pick(4)];
    const auto op_of = [&](const std::vector<ExprOp>& ops) {
      return ops[static_cast<size_t>(pick(static_cast<int64_t>(ops.size())))];
    };
    switch (pick(8)) {
      case 0:
        b.add(ExprOp::kCast, types[pick(4)], {any(type)});
        return;
      case 1:
        b.add(ExprOp::kWhere, type, {any(DType::kBool), any(type), any(type)});
        return;
      case 2:
        b.add(op_of({ExprOp::kEq, ExprOp::kNe, ExprOp::kLt, ExprOp::kLe, ExprOp::kGt, ExprOp::kGe, ExprOp::kLogicalAnd,
                     ExprOp::kLogicalOr, ExprOp::kLogicalXor}),
              DType::kBool, {any(type), any(type)});
        return;
      case 3: {
        const int32_t n = static_cast<int32_t>(pick(num_captures));
        const DType index = pick(2) == 0 ? DType::kI32 : DType::kI64;
        std::vector<int32_t> args;
        for (int32_t d = 0; d < captures[static_cast<size_t>(n)].rank; ++d) args.push_back(any(index));
        b.add(ExprOp::kLoad, type, args, n);
        return;
      }
      case 4:
        if (type == DType::kF32) {
          b.round_to(any(type), pick(2) == 0 ? DType::kF16 : DType::kBF16);
        } else if (type != DType::kBool) {
          constexpr DType narrow[] = {DType::kU8, DType::kI8, DType::kI16};
          b.round_to(any(type), narrow[pick(3)]);
        }
        return;
      default:
        break;
    }
    if (type == DType::kBool) {
      if (pick(3) == 0) {
        b.add(op_of({ExprOp::kLogicalNot, ExprOp::kBitNot}), type, {any(type)});
      } else {
        b.add(op_of({ExprOp::kBitAnd, ExprOp::kBitOr, ExprOp::kBitXor, ExprOp::kMin, ExprOp::kMax}), type,
              {any(type), any(type)});
      }
    } else if (type == DType::kF32) {
      if (pick(2) == 0) {
        b.add(op_of({ExprOp::kNeg, ExprOp::kAbs, ExprOp::kSign, ExprOp::kReciprocal, ExprOp::kSquare, ExprOp::kRelu,
                     ExprOp::kSqrt, ExprOp::kFloor, ExprOp::kCeil, ExprOp::kRound, ExprOp::kTrunc}),
              type, {any(type)});
      } else {
        b.add(op_of({ExprOp::kAdd, ExprOp::kSub, ExprOp::kMul, ExprOp::kDiv, ExprOp::kMin, ExprOp::kMax, ExprOp::kFmod,
                     ExprOp::kRemainder, ExprOp::kTruncDiv}),
              type, {any(type), any(type)});
      }
    } else if (pick(4) == 0) {
      b.add(op_of({ExprOp::kNeg, ExprOp::kAbs, ExprOp::kSign, ExprOp::kSquare, ExprOp::kRelu, ExprOp::kBitNot,
                   ExprOp::kRound}),
            type, {any(type)});
    } else {
      b.add(op_of({ExprOp::kAdd, ExprOp::kSub, ExprOp::kMul, ExprOp::kFloorDiv, ExprOp::kRemainder, ExprOp::kFmod,
                   ExprOp::kTruncDiv, ExprOp::kMin, ExprOp::kMax, ExprOp::kBitAnd, ExprOp::kBitOr, ExprOp::kBitXor,
                   ExprOp::kShiftLeft, ExprOp::kShiftRight}),
            type, {any(type), any(type)});
    }
  }

  Builder b;

 private:
  std::mt19937 random_;
};

Tensor random_tensor(DType dtype, std::vector<int64_t> sizes, uint32_t seed) {
  Tensor t(dtype, std::move(sizes));
  std::mt19937 random(seed);
  std::uniform_int_distribution<int64_t> value(-5, 60);
  for (int64_t i = 0; i < t.view.num_elements(); ++i) {
    const int64_t v = value(random);
    reference::write(t.view, i,
                     is_floating(dtype) ? reference::Element{true, 0, static_cast<double>(v) * 0.25}
                                        : reference::Element{false, v, 0});
  }
  return t;
}

struct TileSize {
  int64_t rows, cols;
};

TEST(TileProgram, RandomProgramsAgreeWithTheInterpreter) {
  constexpr TileSize sizes[] = {{1, 1}, {1, 17}, {3, 16}, {7, 5}, {64, 33}, {5, 1000}, {130, 64}};
  constexpr DType dtypes[] = {DType::kBool, DType::kU8,  DType::kI8,   DType::kI16, DType::kI32,
                              DType::kI64,  DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
  for (uint32_t seed = 0; seed < 700; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Generator g(seed);
    const DType dtype = dtypes[seed % 10];
    std::vector<Tensor> tensors;
    tensors.push_back(random_tensor(dtype, {}, seed));
    tensors.push_back(random_tensor(dtype, {50}, seed + 1));
    tensors.push_back(random_tensor(dtype, {3, 40}, seed + 2));
    Environment env;
    for (const Tensor& t : tensors) env.captures.push_back(t.view);
    std::swap(env.captures[2].sizes[0], env.captures[2].sizes[1]);  // transposed
    std::swap(env.captures[2].strides[0], env.captures[2].strides[1]);
    env.batch = 1;
    env.head = g.pick(4);
    env.q = g.pick(40);
    env.kv = g.pick(40);
    env.scalars = {g.pick(100) - 50, int64_t{1} << 40};
    const int64_t nodes = 3 + g.pick(14);
    while (static_cast<int64_t>(g.b.expression.nodes.size()) < nodes) g.operation(3, env.captures);
    const TileSize size = sizes[seed % std::size(sizes)];
    expect_tile(g.b.expression, env, size.rows, size.cols);
    if (HasFatalFailure()) return;
  }
}

TEST(TileProgram, ValuesPerRowPerColumnAndUniformHaveSmallExtents) {
  Builder b;
  b.add(ExprOp::kGe, DType::kBool, {b.q(), b.constant(DType::kI32, 3)});
  EXPECT_EQ(TileProgram::compile(b.expression, 0, 0, {})->result_extent(), Extent::kRows);
  Builder c;
  c.add(ExprOp::kAdd, DType::kI32, {c.kv(), c.add(ExprOp::kHead, DType::kI32)});
  EXPECT_EQ(TileProgram::compile(c.expression, 0, 0, {})->result_extent(), Extent::kCols);
  Builder d;
  d.add(ExprOp::kMul, DType::kF32, {d.constant(2.0), d.constant(3.0)});
  const auto constant = TileProgram::compile(d.expression, 0, 0, {});
  EXPECT_EQ(constant->result_extent(), Extent::kUniform);
  Workspace workspace(constant->workspace_bytes(4, 4));
  EXPECT_EQ(*static_cast<const float*>(constant->run({}, 4, 4, workspace.span()).data), 6.0f);
}

TEST(TileProgram, TheScoreItselfIsReturnedInPlace) {
  Builder b;
  b.add(ExprOp::kScore, DType::kF32);
  const auto program = TileProgram::compile(b.expression, 0, 0, {});
  ASSERT_TRUE(program.is_ok());
  EXPECT_TRUE(program->uses_score());
  std::vector<float> score(300 * 40, 1.0f);
  Workspace workspace(program->workspace_bytes(300, 40));
  TileInputs in;
  in.score = score.data();
  in.score_stride = 40;
  const auto tile = program->run(in, 300, 40, workspace.span());
  EXPECT_EQ(tile.data, score.data());
  EXPECT_EQ(tile.stride, 40);
}

TEST(TileProgram, Int64IsExactAboveTwoToThe24) {
  Builder b;
  const int32_t big = b.constant(DType::kI64, (int64_t{1} << 53) + 1);
  b.add(ExprOp::kSub, DType::kI64, {b.add(ExprOp::kAdd, DType::kI64, {big, b.kv(DType::kI64)}), b.q(DType::kI64)});
  expect_tile(b.expression, {}, 9, 70);
}

// bias[b, h, q, kv], table[q - kv + 40] and table[q - kv] (which wraps): rows are runs of memory.
TEST(TileProgram, LoadsAlongRowsEqualGathers) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kI64, DType::kBool}) {
    const Tensor bias = random_tensor(dtype, {2, 3, 50, 130}, 1);
    const Tensor table = random_tensor(dtype, {200}, 2);
    Environment env;
    env.captures = {bias.view, table.view};
    env.batch = 1;
    env.head = 2;
    env.q = 3;
    env.kv = 5;
    Builder b;
    const DType type = is_floating(dtype) ? DType::kF32 : DType::kI64;
    const int32_t all = b.add(ExprOp::kLoad, type,
                              {b.add(ExprOp::kBatch, DType::kI32), b.add(ExprOp::kHead, DType::kI32), b.q(),
                               b.add(ExprOp::kCast, DType::kI64, {b.kv()})},
                              0);
    const int32_t distance = b.add(ExprOp::kSub, DType::kI32, {b.q(), b.kv()});
    const int32_t wrapped = b.add(ExprOp::kLoad, type, {distance}, 1);
    const int32_t moved =
        b.add(ExprOp::kLoad, type, {b.add(ExprOp::kAdd, DType::kI32, {distance, b.constant(DType::kI32, 90)})}, 1);
    b.add(ExprOp::kAdd, type, {b.add(ExprOp::kAdd, type, {all, wrapped}), moved});
    expect_tile(b.expression, env, 40, 77);
  }
}

TEST(TileProgram, LoadsOutsideAtInactiveLanesAreNoError) {
  const Tensor table = random_tensor(DType::kF32, {10}, 3);
  const TensorView captures[] = {table.view};
  const int ranks[] = {1};
  Builder b;
  b.add(ExprOp::kLoad, DType::kF32, {b.add(ExprOp::kAdd, DType::kI32, {b.q(), b.kv()})}, 0);
  const auto program = TileProgram::compile(b.expression, 0, 0, ranks);
  ASSERT_TRUE(program.is_ok());
  Workspace workspace(program->workspace_bytes(8, 8));
  TileInputs in;
  in.captures = captures;
  std::vector<uint8_t> active(64);
  for (size_t i = 0; i < 64; ++i) active[i] = i / 8 + i % 8 < 10;
  bool outside = false;
  program->run(in, 8, 8, workspace.span(), active.data(), 8, &outside);
  EXPECT_FALSE(outside);
  active[63] = 1;
  const auto tile = program->run(in, 8, 8, workspace.span(), active.data(), 8, &outside);
  EXPECT_TRUE(outside);
  EXPECT_EQ(lane(tile, 7, 7).f, 0.0f);
}

TEST(TileProgram, EmptyCapturesReadAsZero) {
  const Tensor table(DType::kI64, {0});
  Environment env;
  env.captures = {table.view};
  Builder b;
  b.add(ExprOp::kLoad, DType::kI64, {b.kv()}, 0);
  expect_tile(b.expression, env, 2, 20);
}

TEST(TileProgram, MalformedExpressionsAreRefusedWithTheirNode) {
  const auto message = [](const std::function<void(Builder&)>& build, std::vector<int> ranks = {}) {
    Builder b;
    build(b);
    const auto program = TileProgram::compile(b.expression, 1, 1, ranks);
    EXPECT_FALSE(program.is_ok());
    EXPECT_EQ(program.status().code(), Code::kInvalidProgram);
    return program.status().message();
  };
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(message([](Builder&) {}), "no nodes");
  has(message([](Builder& b) { b.add(ExprOp::kNeg, DType::kI32, {0}); }), "node 0 (Neg) has argument 0");
  has(message([](Builder& b) { b.add(ExprOp::kAdd, DType::kI32, {b.q()}); }), "has 1 arguments; expected 2");
  has(message([](Builder& b) { b.add(ExprOp::kAdd, DType::kI32, {b.q(), b.q(DType::kI64)}); }), "int32 and int64");
  has(message([](Builder& b) { b.add(ExprOp::kExp, DType::kI32, {b.q()}); }), "not defined for int32");
  has(message([](Builder& b) { b.add(ExprOp::kEq, DType::kI32, {b.q(), b.q()}); }), "expected bool");
  has(message([](Builder& b) { b.add(ExprOp::kWhere, DType::kI32, {b.q(), b.q(), b.q()}); }), "condition");
  has(message([](Builder& b) { b.add(ExprOp::kInput, DType::kF32, {}, 1); }), "input 1; there are 1");
  has(message([](Builder& b) { b.add(ExprOp::kScalar, DType::kI64, {}, -1); }), "scalar -1");
  has(message([](Builder& b) { b.add(ExprOp::kScalar, DType::kF32); }), "int32 or int64");
  has(message([](Builder& b) { b.add(ExprOp::kLoad, DType::kF32, {}, 0); }), "capture 0; there are 0");
  has(message([](Builder& b) { b.add(ExprOp::kLoad, DType::kF32, {b.q()}, 0); }, {2}), "expected 2");
  has(message([](Builder& b) { b.add(ExprOp::kLoad, DType::kF32, {b.constant(1.0)}, 0); }, {1}),
      "index of type float32");
  has(message([](Builder& b) { b.add(ExprOp::kConstant, DType::kF16); }), "float16");
  has(message([](Builder& b) { b.add(ExprOp::kConstant, static_cast<DType>(77)); }), "type 77");
  has(message([](Builder& b) { b.add(static_cast<ExprOp>(200), DType::kF32); }), "node 0 (200)");
  has(message([](Builder& b) { b.round_to(b.constant(1.0), DType::kI8); }), "RoundTo");
}

}  // namespace
}  // namespace flexpte
