#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "expression_reference.h"
#include "runtime/thread_pool.h"

namespace flexpte {
namespace {

using reference::Builder;
using reference::Environment;
using reference::Tensor;
using reference::Value;

struct Workspace {
  explicit Workspace(size_t size) : memory(size + 64) {
    void* start = memory.data();
    size_t space = memory.size();
    std::align(64, size, start, space);
    span = {static_cast<std::byte*>(start), size};
  }
  std::vector<std::byte> memory;
  std::span<std::byte> span;
};

int64_t offset_of(const TensorView& view, int64_t flat) {
  int64_t offset = 0;
  for (int32_t d = view.rank; d-- > 0;) {
    offset += flat % view.size(d) * view.stride(d);
    flat /= view.size(d);
  }
  return offset;
}

Status run(const Expression& expression, const std::vector<TensorView>& inputs, const TensorView& out,
           const ThreadPool& pool, std::vector<int64_t> scalars = {}, std::vector<TensorView> captures = {}) {
  std::vector<int> ranks;
  for (const TensorView& view : captures) ranks.push_back(view.rank);
  const auto program =
      TileProgram::compile(expression, static_cast<int>(inputs.size()), static_cast<int>(scalars.size()), ranks);
  if (!program.is_ok()) return program.status();
  Workspace workspace(elementwise_workspace_bytes(*program, pool.num_threads()));
  return elementwise(*program, inputs, scalars, captures, out, pool, workspace.span);
}

// A view of the given sizes over its own memory: some dimensions broadcast, permuted, or with gaps.
Tensor layout(DType dtype, const std::vector<int64_t>& sizes, std::mt19937& random, bool may_broadcast) {
  const auto chance = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random) == 0; };
  std::vector<size_t> order(sizes.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  if (chance(3)) std::shuffle(order.begin(), order.end(), random);
  std::vector<int64_t> strides(sizes.size(), 0);
  int64_t total = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const size_t d = order[i];
    if (may_broadcast && chance(3)) continue;
    strides[d] = total;
    total *= sizes[d];
    if (chance(4)) total += 3;
  }
  Tensor t(dtype, {total});
  t.view.rank = static_cast<int32_t>(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) t.view.sizes[d] = sizes[d], t.view.strides[d] = strides[d];
  for (int64_t i = 0; i < total; ++i) {
    const int64_t v = std::uniform_int_distribution<int64_t>(-20, 20)(random);
    TensorView flat = t.view;
    reference::write(flat, i,
                     is_floating(dtype) ? reference::Element{true, 0, static_cast<double>(v) * 0.125}
                                        : reference::Element{false, v, 0});
  }
  return t;
}

TEST(Elementwise, AnyLayoutsAndTypesAgreeWithTheInterpreter) {
  constexpr DType dtypes[] = {DType::kBool, DType::kU8,  DType::kI8,   DType::kI16, DType::kI32,
                              DType::kI64,  DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
  const ThreadPool pool(2);
  for (uint32_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const auto pick = [&](int64_t n) { return std::uniform_int_distribution<int64_t>(0, n - 1)(random); };
    std::vector<int64_t> sizes;
    constexpr int64_t kSizes[] = {1, 2, 3, 5, 16, 17, 33};
    for (int64_t d = pick(5); d > 0; --d) sizes.push_back(kSizes[pick(7)]);
    if (seed % 10 == 0) sizes = {3, 1100 + pick(100)};
    if (seed % 10 == 1) sizes = {90, 2, 40};
    std::vector<Tensor> tensors;
    std::vector<TensorView> views;
    for (int n = 0; n < 3; ++n) {
      tensors.push_back(layout(dtypes[pick(10)], sizes, random, true));
      views.push_back(tensors.back().view);
    }
    const Tensor out = layout(dtypes[pick(10)], sizes, random, false);
    Builder b;
    const int32_t x = b.add(ExprOp::kInput, DType::kF32, {}, 0), y = b.add(ExprOp::kInput, DType::kF32, {}, 1);
    const int32_t i = b.add(ExprOp::kInput, DType::kI64, {}, 2);
    const int32_t scaled = b.add(ExprOp::kMul, DType::kF32, {y, b.constant(0.5)});
    switch (seed % 5) {
      case 0:
        b.add(ExprOp::kAdd, DType::kF32, {x, y});
        break;
      case 1:
        b.add(ExprOp::kSub, DType::kF32, {b.add(ExprOp::kMul, DType::kF32, {x, y}), scaled});
        break;
      case 2:
        b.add(ExprOp::kWhere, DType::kF32, {b.add(ExprOp::kLt, DType::kBool, {x, scaled}), x, y});
        break;
      case 3:
        b.add(ExprOp::kFloorDiv, DType::kI64, {i, b.constant(DType::kI64, 3)});
        break;
      default:
        b.add(ExprOp::kInput, DType::kF32, {}, 0);
        break;
    }
    const Status status = run(b.expression, views, out.view, pool);
    ASSERT_TRUE(status.is_ok()) << status.message();
    const DType type = b.expression.nodes.back().type;
    Tensor expected(out.view.dtype, {1});
    for (int64_t n = 0; n < out.view.num_elements(); ++n) {
      Environment env;
      const DType types[] = {DType::kF32, DType::kF32, DType::kI64};
      for (size_t k = 0; k < 3; ++k) {
        env.inputs.push_back(reference::as_type(reference::read(views[k], offset_of(views[k], n)), types[k]));
      }
      const Value v = reference::evaluate(b.expression, env);
      reference::write(expected.view, 0,
                       type == DType::kF32 ? reference::Element{true, 0, v.f} : reference::Element{false, v.i, 0});
      const auto want = reference::read(expected.view, 0), got = reference::read(out.view, offset_of(out.view, n));
      ASSERT_TRUE(want.i == got.i && want.f == got.f)
          << "element " << n << ": got " << got.i << " / " << got.f << ", expected " << want.i << " / " << want.f;
    }
  }
}

TEST(Elementwise, OutMayBeAnInput) {
  const ThreadPool pool(2);
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kI64}) {
    const DType type = is_floating(dtype) ? DType::kF32 : dtype;
    for (const int64_t n : {1, 15, 16, 17, 1023, 1025, 70001}) {
      Tensor x(dtype, {n});
      for (int64_t i = 0; i < n; ++i)
        reference::write(x.view, i, {is_floating(dtype), i % 60, static_cast<double>(i % 60)});
      Builder b;
      const int32_t a = b.add(ExprOp::kInput, type, {}, 0);
      b.add(ExprOp::kAdd, type, {b.add(ExprOp::kMul, type, {a, a}), b.add(ExprOp::kInput, type, {}, 1)});
      ASSERT_TRUE(run(b.expression, {x.view, x.view}, x.view, pool).is_ok());
      for (int64_t i = 0; i < n; ++i) {
        const auto e = reference::read(x.view, i);
        ASSERT_EQ(e.is_float ? static_cast<int64_t>(e.f) : e.i, (i % 60) * (i % 60) + i % 60) << i;
      }
    }
  }
}

TEST(Elementwise, ScalarsAndCapturesAreRead) {
  const ThreadPool pool(1);
  const Tensor index = [] {
    Tensor t(DType::kI64, {40});
    for (int64_t i = 0; i < 40; ++i) reference::write(t.view, i, {false, i - 20, 0});
    return t;
  }();
  Tensor table(DType::kF16, {20});
  for (int64_t i = 0; i < 20; ++i) reference::write(table.view, i, {true, 0, static_cast<double>(i)});
  const Tensor out(DType::kF32, {40});
  Builder b;
  const int32_t loaded = b.add(ExprOp::kLoad, DType::kF32, {b.add(ExprOp::kInput, DType::kI64, {}, 0)}, 0);
  b.add(ExprOp::kAdd, DType::kF32,
        {loaded, b.add(ExprOp::kCast, DType::kF32, {b.add(ExprOp::kScalar, DType::kI64, {}, 0)})});
  ASSERT_TRUE(run(b.expression, {index.view}, out.view, pool, {100}, {table.view}).is_ok());
  for (int64_t i = 0; i < 40; ++i) EXPECT_EQ(reference::read(out.view, i).f, 100.0 + static_cast<double>(i % 20));
  reference::write(index.view, 7, {false, 20, 0});
  EXPECT_EQ(run(b.expression, {index.view}, out.view, pool, {100}, {table.view}).code(), Code::kOutOfRange);
}

TEST(Elementwise, EmptyTensorsAndAttentionIndices) {
  const ThreadPool pool(1);
  const Tensor x(DType::kF32, {0, 5});
  Builder b;
  b.add(ExprOp::kNeg, DType::kF32, {b.add(ExprOp::kInput, DType::kF32, {}, 0)});
  EXPECT_TRUE(run(b.expression, {x.view}, x.view, pool).is_ok());
  Builder q;
  q.q();
  const Tensor y(DType::kI32, {4});
  EXPECT_EQ(run(q.expression, {y.view}, y.view, pool).code(), Code::kInvalidProgram);
}

TEST(Elementwise, AConstantFillsTheOutput) {
  const ThreadPool pool(2);
  const Tensor out(DType::kBF16, {300, 9});
  Builder b;
  b.constant(2.5);
  ASSERT_TRUE(run(b.expression, {}, out.view, pool).is_ok());
  for (int64_t i = 0; i < 2700; ++i) ASSERT_EQ(reference::read(out.view, i).f, 2.5);
}

}  // namespace
}  // namespace flexpte
