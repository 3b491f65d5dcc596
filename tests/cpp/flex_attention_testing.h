// Attention on the host against dense attention in float64 that is written here and evaluates the
// mods as plain functions.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "metal_delegate/flex_attention.h"
#include "runtime/kernels/scalar.h"
#include "runtime/thread_pool.h"

namespace flexpte::testing {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

using MaskFn = std::function<bool(int64_t b, int64_t h, int64_t q, int64_t kv)>;
using ScoreFn = std::function<double(double s, int64_t b, int64_t h, int64_t q, int64_t kv)>;

// ------------------------------------------------------------------ expressions

struct Builder {
  Expression expression;

  int add(ExprOp op, DType type, std::vector<int32_t> args = {}, int32_t index = 0) {
    ExprNode node;
    node.op = op;
    node.type = type;
    node.args = std::move(args);
    node.index = index;
    expression.nodes.push_back(node);
    return static_cast<int>(expression.nodes.size()) - 1;
  }
  int score() { return add(ExprOp::kScore, DType::kF32); }
  int b() { return add(ExprOp::kBatch, DType::kI32); }
  int h() { return add(ExprOp::kHead, DType::kI32); }
  int q() { return add(ExprOp::kQIdx, DType::kI32); }
  int kv() { return add(ExprOp::kKvIdx, DType::kI32); }
  int integer(int64_t value) {
    const int node = add(ExprOp::kConstant, DType::kI32);
    expression.nodes.back().value_int = value;
    return node;
  }
  int number(double value) {
    const int node = add(ExprOp::kConstant, DType::kF32);
    expression.nodes.back().value_float = value;
    return node;
  }
  int load(int capture, DType type, std::vector<int32_t> index) {
    return add(ExprOp::kLoad, type, std::move(index), capture);
  }
  int to_float(int x) { return add(ExprOp::kCast, DType::kF32, {x}); }
  int both(int x, int y) { return add(ExprOp::kLogicalAnd, DType::kBool, {x, y}); }
  int either(int x, int y) { return add(ExprOp::kLogicalOr, DType::kBool, {x, y}); }
  int ge(int x, int y) { return add(ExprOp::kGe, DType::kBool, {x, y}); }
  int lt(int x, int y) { return add(ExprOp::kLt, DType::kBool, {x, y}); }
  int eq(int x, int y) { return add(ExprOp::kEq, DType::kBool, {x, y}); }
  int sub(int x, int y, DType type = DType::kI32) { return add(ExprOp::kSub, type, {x, y}); }
  int plus(int x, int y, DType type = DType::kF32) { return add(ExprOp::kAdd, type, {x, y}); }
  int times(int x, int y) { return add(ExprOp::kMul, DType::kF32, {x, y}); }
  int causal() { return ge(q(), kv()); }
  int within(int64_t window) { return both(causal(), lt(sub(q(), kv()), integer(window))); }
};

// A tensor that owns its numbers.
template <class T>
struct Tensor {
  std::vector<T> data;
  TensorView view;

  Tensor() = default;
  Tensor(DType dtype, std::vector<int64_t> sizes, std::vector<T> values) : data(std::move(values)) {
    view.dtype = dtype;
    view.rank = static_cast<int32_t>(sizes.size());
    int64_t stride = 1;
    for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) {
      view.sizes[d] = sizes[d];
      view.strides[d] = stride;
    }
  }
  TensorView get() {
    TensorView result = view;
    result.data = data.data();
    return result;
  }
};
using Ints = Tensor<int64_t>;

struct Mod {
  Expression expression;
  std::vector<std::shared_ptr<void>> owners;
  std::vector<TensorView> captures;

  bool present() const { return !expression.nodes.empty(); }
  template <class T>
  void capture(DType dtype, std::vector<int64_t> sizes, std::vector<T> values) {
    auto tensor = std::make_shared<Tensor<T>>(dtype, std::move(sizes), std::move(values));
    captures.push_back(tensor->get());
    owners.push_back(tensor);
  }
  std::vector<int> ranks() const {
    std::vector<int> result;
    for (const TensorView& view : captures) result.push_back(view.rank);
    return result;
  }
};

// ------------------------------------------------------------------ one attention

struct Shape {
  int64_t batch = 1, num_heads = 2, num_kv_heads = 2, num_queries = 64, num_keys = 64, key_dim = 16, value_dim = 16;
  bool broadcast_kv_batch = false;
};

struct BlockLists {
  int64_t q_block = 0, kv_block = 0;
  Tensor<int32_t> num, indices, full_num, full_indices;
};

struct Problem {
  Shape shape;
  DType dtype = DType::kF32;
  float scale = 0.25f;
  Mod mask, score;
  MaskFn mask_fn;  // what decides, block lists included
  ScoreFn score_fn;
  std::shared_ptr<BlockLists> lists;
  bool poison_unseen = true;  // NaN in rows of K and V that no query sees
  int64_t row_padding = 0;    // extra elements between rows of q, k, v
  int64_t element_stride = 1;
  int num_threads = 2;
};

// [B, H, L, D] in the dtype of a problem, with its padding.
struct Operand {
  std::vector<std::byte> bytes;
  TensorView view;

  Operand(const Problem& p, int64_t b, int64_t h, int64_t l, int64_t d, int64_t padding, int64_t element_stride) {
    view.dtype = p.dtype;
    view.rank = 4;
    view.sizes = {b, h, l, d};
    const int64_t row = d * element_stride + padding;
    view.strides = {h * l * row, l * row, row, element_stride};
    bytes.resize(static_cast<size_t>(b * h * l * row * element_size_bytes(p.dtype)) + 1);
    view.data = bytes.data();
  }
  int64_t at(int64_t b, int64_t h, int64_t l, int64_t d) const {
    return b * view.stride(0) + h * view.stride(1) + l * view.stride(2) + d * view.stride(3);
  }
  void set(int64_t b, int64_t h, int64_t l, int64_t d, float value) {
    with_float_type(view.dtype,
                    [&](auto type) { view.as<decltype(type)>()[at(b, h, l, d)] = convert<decltype(type)>(value); });
  }
  double get(int64_t b, int64_t h, int64_t l, int64_t d) const {
    return with_float_type(
        view.dtype, [&](auto type) { return static_cast<double>(widen(view.as<decltype(type)>()[at(b, h, l, d)])); });
  }
  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t b = 0; b < view.size(0); ++b)
      for (int64_t h = 0; h < view.size(1); ++h)
        for (int64_t l = 0; l < view.size(2); ++l)
          for (int64_t d = 0; d < view.size(3); ++d) set(b, h, l, d, normal(random));
  }
};

struct Attention {
  Problem p;
  Operand q, k, v, out;
  Tensor<float> lse;
  FlexPlan plan;

  static Attention make(Problem problem, unsigned seed = 1) {
    const Shape& s = problem.shape;
    const int64_t kv_batch = s.broadcast_kv_batch ? 1 : s.batch;
    const int64_t pad = problem.row_padding;
    const int64_t step = problem.element_stride;
    Attention a{problem,
                Operand(problem, s.batch, s.num_heads, s.num_queries, s.key_dim, pad, step),
                Operand(problem, kv_batch, s.num_kv_heads, s.num_keys, s.key_dim, pad, step),
                Operand(problem, kv_batch, s.num_kv_heads, s.num_keys, s.value_dim, pad, step),
                Operand(problem, s.batch, s.num_heads, s.num_queries, s.value_dim, pad, 1),
                Tensor<float>(DType::kF32, {s.batch, s.num_heads, s.num_queries},
                              std::vector<float>(static_cast<size_t>(s.batch * s.num_heads * s.num_queries), kNaN)),
                FlexPlan()};
    std::mt19937 random(seed);
    a.q.fill(random);
    a.k.fill(random);
    a.v.fill(random);
    std::fill(a.out.bytes.begin(), a.out.bytes.end(), std::byte{0xFF});
    if (problem.poison_unseen) a.poison();
    return a;
  }

  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const { return !p.mask_fn || p.mask_fn(b, h, i, j); }

  void poison() {
    const Shape& s = p.shape;
    const int64_t group = s.num_heads / s.num_kv_heads;
    for (int64_t kb = 0; kb < k.view.size(0); ++kb)
      for (int64_t kh = 0; kh < s.num_kv_heads; ++kh)
        for (int64_t j = 0; j < s.num_keys; ++j) {
          bool seen = false;
          for (int64_t b = 0; b < s.batch && !seen; ++b) {
            if (!s.broadcast_kv_batch && b != kb) continue;
            for (int64_t h = kh * group; h < (kh + 1) * group && !seen; ++h)
              for (int64_t i = 0; i < s.num_queries && !seen; ++i) seen = sees(b, h, i, j);
          }
          if (seen) continue;
          for (int64_t d = 0; d < s.key_dim; ++d) k.set(kb, kh, j, d, d % 2 ? kNaN : kInf);
          for (int64_t d = 0; d < s.value_dim; ++d) v.set(kb, kh, j, d, d % 2 ? kInf : kNaN);
        }
  }

  Status run() {
    FlexAttentionSpec spec;
    spec.scale = p.scale;
    spec.score = p.score.present() ? &p.score.expression : nullptr;
    spec.mask = p.mask.present() ? &p.mask.expression : nullptr;
    spec.num_score_captures = static_cast<int>(p.score.captures.size());
    spec.num_mask_captures = static_cast<int>(p.mask.captures.size());
    FlexAttentionArgs args;
    args.query = q.view;
    args.key = k.view;
    args.value = v.view;
    args.out = out.view;
    args.lse = lse.get();
    args.score_captures = p.score.captures;
    args.mask_captures = p.mask.captures;
    if (p.lists) {
      spec.has_block_lists = true;
      spec.q_block_size = p.lists->q_block;
      spec.kv_block_size = p.lists->kv_block;
      args.kv_num_blocks = p.lists->num.get();
      args.kv_indices = p.lists->indices.get();
      if (!p.lists->full_num.data.empty()) {
        args.full_kv_num_blocks = p.lists->full_num.get();
        args.full_kv_indices = p.lists->full_indices.get();
      }
    }
    FLEXPTE_ASSIGN(auto flex, FlexAttention::create(spec, p.score.ranks(), p.mask.ranks()));
    const ThreadPool pool(p.num_threads);
    FLEXPTE_TRY(flex->plan(args, plan, pool));
    std::vector<std::byte> workspace(flex->workspace_bytes(args, p.num_threads), std::byte{0xFF});
    return flex->run(args, plan, pool, workspace);
  }

  // Dense attention in float64; where a row sees no key, 0 and -inf.
  void expect_right(const std::string& what) {
    const Shape& s = p.shape;
    const double tolerance = p.dtype == DType::kF32 ? 2e-6 : p.dtype == DType::kF16 ? 1e-3 : 8e-3;
    const int64_t group = s.num_heads / s.num_kv_heads;
    std::vector<double> scores(static_cast<size_t>(s.num_keys));
    std::vector<double> row(static_cast<size_t>(s.value_dim));
    int failures = 0;
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.num_heads; ++h)
        for (int64_t i = 0; i < s.num_queries; ++i) {
          const int64_t kb = s.broadcast_kv_batch ? 0 : b;
          double max = -std::numeric_limits<double>::infinity();
          for (int64_t j = 0; j < s.num_keys; ++j) {
            double& score = scores[static_cast<size_t>(j)];
            score = -std::numeric_limits<double>::infinity();
            if (!sees(b, h, i, j)) continue;
            double dot = 0;
            for (int64_t d = 0; d < s.key_dim; ++d) dot += q.get(b, h, i, d) * k.get(kb, h / group, j, d);
            score = dot * static_cast<double>(p.scale);
            if (p.score_fn) score = p.score_fn(score, b, h, i, j);
            max = std::max(max, score);
          }
          double sum = 0;
          double magnitude = 0;
          std::fill(row.begin(), row.end(), 0.0);
          for (int64_t j = 0; j < s.num_keys && std::isfinite(max); ++j) {
            if (!sees(b, h, i, j)) continue;
            const double weight = std::exp(scores[static_cast<size_t>(j)] - max);
            sum += weight;
            for (int64_t d = 0; d < s.value_dim; ++d) {
              const double value = v.get(kb, h / group, j, d);
              row[static_cast<size_t>(d)] += weight * value;
              magnitude = std::max(magnitude, std::abs(value));
            }
          }
          const double log_sum_exp = sum == 0 ? -std::numeric_limits<double>::infinity() : max + std::log(sum);
          const auto got_lse =
              static_cast<double>(lse.data[static_cast<size_t>((b * s.num_heads + h) * s.num_queries + i)]);
          const double score_ulp = std::isfinite(max) ? std::abs(max) * 1.2e-7 : 0;
          const double bound = tolerance * (1 + magnitude) + 4 * score_ulp * magnitude;
          bool ok = sum == 0 ? got_lse == log_sum_exp : std::abs(got_lse - log_sum_exp) <= 4e-6 * (1 + std::abs(max));
          for (int64_t d = 0; d < s.value_dim; ++d) {
            const double expected = sum == 0 ? 0 : row[static_cast<size_t>(d)] / sum;
            const double got = out.get(b, h, i, d);
            ok = ok && (sum == 0 ? got == 0.0 : std::abs(got - expected) <= bound);
          }
          if (!ok && failures++ < 3) {
            ADD_FAILURE() << what << ": batch " << b << ", head " << h << ", query " << i << ": got "
                          << out.get(b, h, i, 0) << ", lse " << got_lse << "; expected "
                          << (sum == 0 ? 0 : row[0] / sum) << ", lse " << log_sum_exp;
          }
        }
  }
};

inline void check(const Problem& problem, const std::string& what) {
  Attention attention = Attention::make(problem);
  const Status status = attention.run();
  ASSERT_TRUE(status.is_ok()) << what << ": " << status.message();
  attention.expect_right(what);
}

}  // namespace flexpte::testing
