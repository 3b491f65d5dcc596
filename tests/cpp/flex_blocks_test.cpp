// Block lists, isolation of masked keys, plans and errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/cpp/flex_attention_testing.h"
#include "tests/cpp/flex_masks_testing.h"

namespace flexpte::testing {
namespace {

int64_t blocks_of(int64_t length, int64_t block) {
  return (length + block - 1) / block;
}

// Random lists: each block of keys is absent, partial or full. Sets what the attention then means.
void list_blocks(Problem& p, int64_t q_block, int64_t kv_block, int64_t batch, int64_t heads) {
  const int64_t q_blocks = blocks_of(p.shape.num_queries, q_block);
  const int64_t kv_blocks = blocks_of(p.shape.num_keys, kv_block);
  const int64_t rows = batch * heads * q_blocks;
  const std::vector<int32_t> unused(static_cast<size_t>(rows * kv_blocks), 1 << 30);  // never to be read
  std::vector<int32_t> num[2] = {std::vector<int32_t>(static_cast<size_t>(rows)),
                                 std::vector<int32_t>(static_cast<size_t>(rows))};
  std::vector<int32_t> indices[2] = {unused, unused};
  std::vector<int> kinds(static_cast<size_t>(rows * kv_blocks), -1);  // 0 partial, 1 full
  std::mt19937 random(static_cast<unsigned>(q_block + kv_block));
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<int32_t> order(static_cast<size_t>(kv_blocks));
    for (int64_t i = 0; i < kv_blocks; ++i) order[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), random);
    for (const int32_t block : order) {
      const int kind = static_cast<int>(random() % 3) - 1;
      kinds[static_cast<size_t>(row * kv_blocks + block)] = kind;
      if (kind < 0) continue;
      int32_t& count = num[kind][static_cast<size_t>(row)];
      indices[kind][static_cast<size_t>(row * kv_blocks + count)] = block;
      ++count;
    }
  }
  p.lists = std::make_shared<BlockLists>();
  p.lists->q_block = q_block;
  p.lists->kv_block = kv_block;
  p.lists->num = {DType::kI32, {batch, heads, q_blocks}, num[0]};
  p.lists->indices = {DType::kI32, {batch, heads, q_blocks, kv_blocks}, indices[0]};
  p.lists->full_num = {DType::kI32, {batch, heads, q_blocks}, num[1]};
  p.lists->full_indices = {DType::kI32, {batch, heads, q_blocks, kv_blocks}, indices[1]};
  p.mask_fn = [=, mask = p.mask_fn](int64_t b, int64_t h, int64_t q, int64_t kv) {
    const int64_t row = ((batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h)) * q_blocks + q / q_block;
    const int kind = kinds[static_cast<size_t>(row * kv_blocks + kv / kv_block)];
    return kind == 1 || (kind == 0 && (!mask || mask(b, h, q, kv)));
  };
}

TEST(FlexBlocks, ListsDecideWithAndWithoutAMask) {
  const std::pair<int64_t, int64_t> blocks[] = {{128, 128}, {16, 16}, {1, 64},
                                                {64, 48},   {200, 5}, {int64_t{1} << 40, 32}};
  for (const auto& [q_block, kv_block] : blocks) {
    for (const NamedMask& mask : kMasks) {
      for (const int64_t queries : {1, 6, 130}) {
        Problem p;
        p.shape = {2, 4, 2, queries, 290, 16, 16, false};
        mask.configure(p);
        list_blocks(p, q_block, kv_block, queries == 6 ? 1 : 2, queries == 1 ? 4 : 1);
        check(p, std::string(mask.name) + " with blocks " + std::to_string(q_block) + ", " + std::to_string(kv_block) +
                     ", " + std::to_string(queries) + " queries");
      }
    }
  }
}

TEST(FlexBlocks, ABlockListedTwiceCountsOnceAndAsFull) {
  for (const int64_t queries : {4, 64}) {
    Problem p;
    p.shape.num_queries = queries;
    p.shape.num_keys = 64;
    causal(p);
    p.lists = std::make_shared<BlockLists>();
    p.lists->q_block = 64;
    p.lists->kv_block = 32;
    p.lists->num = {DType::kI32, {1, 1, 1}, {2}};
    p.lists->indices = {DType::kI32, {1, 1, 1, 2}, {1, 1}};
    p.lists->full_num = {DType::kI32, {1, 1, 1}, {1}};
    p.lists->full_indices = {DType::kI32, {1, 1, 1, 1}, {1}};
    p.mask_fn = [](int64_t, int64_t, int64_t, int64_t kv) { return kv >= 32; };
    check(p, "listed twice");
  }
}

struct BadList {
  const char* name;
  void (*spoil)(BlockLists&);
  Code code;
};

TEST(FlexBlocks, BadListsAreErrors) {
  const BadList bad[] = {
      {"index", [](BlockLists& l) { l.indices.data[0] = 3; }, Code::kOutOfRange},
      {"negative index", [](BlockLists& l) { l.indices.data[0] = -1; }, Code::kOutOfRange},
      {"count", [](BlockLists& l) { l.num.data[0] = 4; }, Code::kOutOfRange},
      {"negative count", [](BlockLists& l) { l.num.data[0] = -1; }, Code::kOutOfRange},
      {"few query blocks", [](BlockLists& l) { l.q_block = 20; }, Code::kInvalidArgument},
      {"heads", [](BlockLists& l) { l.num.view.sizes[1] = 3; }, Code::kInvalidArgument},
      {"rank", [](BlockLists& l) { l.indices.view.rank = 3; }, Code::kInvalidArgument},
      {"dtype", [](BlockLists& l) { l.num.view.dtype = DType::kF32; }, Code::kInvalidArgument},
      {"block size", [](BlockLists& l) { l.kv_block = 0; }, Code::kInvalidProgram},
  };
  for (const BadList& entry : bad) {
    Problem p;
    p.shape.num_queries = p.shape.num_keys = 40;
    p.lists = std::make_shared<BlockLists>();
    p.lists->q_block = 40;
    p.lists->kv_block = 16;
    p.lists->num = {DType::kI32, {1, 1, 1}, {3}};
    p.lists->indices = {DType::kI32, {1, 1, 1, 3}, {0, 1, 2}};
    EXPECT_TRUE(Attention::make(p).run().is_ok());
    entry.spoil(*p.lists);
    EXPECT_EQ(Attention::make(p).run().code(), entry.code) << entry.name;
  }
}

// Keys that some rows see and others do not: NaN and infinities reach the former only.
TEST(FlexBlocks, MaskedKeysReachNoRow) {
  for (const Configure mask : {causal, sliding, table, documents<false>}) {
    for (const int64_t queries : {7, 100}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        Problem p;
        p.dtype = dtype;
        p.shape.num_queries = queries;
        p.shape.num_keys = 100;
        p.num_threads = 1;
        mask(p);
        Attention clean = Attention::make(p);
        Attention dirty = Attention::make(p);
        const int64_t bad = 5;
        // Tile registers round weights to bfloat16; sums that must leave keys out are of floats.
        const double tolerance = dtype == DType::kBF16 ? 0x1p-7 : 1e-6;
        for (int64_t h = 0; h < 2; ++h) {
          dirty.v.set(0, h, bad, 0, kNaN);
          dirty.v.set(0, h, bad, 1, kInf);
          dirty.k.set(0, h, bad, 0, kNaN);
        }
        ASSERT_TRUE(clean.run().is_ok());
        ASSERT_TRUE(dirty.run().is_ok());
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t q = 0; q < queries; ++q) {
            for (int64_t d = 0; d < p.shape.value_dim; ++d) {
              const double got = dirty.out.get(0, h, q, d);
              if (dirty.sees(0, h, q, bad)) {
                EXPECT_TRUE(std::isnan(got)) << "query " << q;
              } else {
                EXPECT_NEAR(got, clean.out.get(0, h, q, d), tolerance) << "query " << q;
              }
            }
          }
        }
      }
    }
  }
}

TEST(FlexPlan, VisitsOnlyWhatTheMaskLeaves) {
  Problem p;
  p.shape.num_queries = p.shape.num_keys = 1024;
  p.shape.key_dim = p.shape.value_dim = 8;
  causal(p);
  Attention attention = Attention::make(p);
  ASSERT_TRUE(attention.run().is_ok());
  const FlexPlan::Counts counts = attention.plan.counts();
  const int64_t tiles = 1024 / counts.q_tile;
  ASSERT_EQ(counts.q_tile, counts.kv_tile);
  EXPECT_EQ(counts.tiles_partial, tiles);
  EXPECT_EQ(counts.tiles_full, tiles * (tiles - 1) / 2);
  EXPECT_EQ(counts.tiles_empty, tiles * (tiles - 1) / 2);
}

TEST(FlexPlan, CountsAgreeWithTheDenseMask) {
  for (const NamedMask& mask : kMasks) {
    Problem p;
    p.shape = {2, 2, 2, 300, 410, 8, 8, false};
    mask.configure(p);
    Attention attention = Attention::make(p);
    ASSERT_TRUE(attention.run().is_ok());
    const FlexPlan::Counts counts = attention.plan.counts();
    const std::string name = mask.name;
    const int64_t batches = name == "padding" ? 2 : 1;
    const int64_t heads = name == "head windows" ? 2 : 1;
    FlexPlan::Counts expected;
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t q0 = 0; q0 < 300; q0 += counts.q_tile)
          for (int64_t k0 = 0; k0 < 410; k0 += counts.kv_tile) {
            int64_t seen = 0;
            int64_t all = 0;
            for (int64_t q = q0; q < std::min<int64_t>(300, q0 + counts.q_tile); ++q)
              for (int64_t kv = k0; kv < std::min<int64_t>(410, k0 + counts.kv_tile); ++kv) {
                ++all;
                seen += attention.sees(b, h, q, kv);
              }
            ++(seen == 0 ? expected.tiles_empty : seen == all ? expected.tiles_full : expected.tiles_partial);
          }
    EXPECT_EQ(counts.tiles_empty, expected.tiles_empty) << name;
    EXPECT_EQ(counts.tiles_full, expected.tiles_full) << name;
    EXPECT_EQ(counts.tiles_partial, expected.tiles_partial) << name;
  }
}

TEST(FlexPlan, IsRefusedForOtherLengthsAndReusedForOtherInputs) {
  Problem p;
  p.shape.num_queries = p.shape.num_keys = 100;
  causal(p);
  Attention attention = Attention::make(p);
  Attention other = Attention::make(p, 2);
  FlexAttentionSpec spec;
  spec.scale = p.scale;
  spec.mask = &p.mask.expression;
  auto flex = FlexAttention::create(spec, {}, {});
  ASSERT_TRUE(flex.is_ok());
  const ThreadPool pool(1);
  FlexAttentionArgs args;
  args.query = attention.q.view;
  args.key = attention.k.view;
  args.value = attention.v.view;
  args.out = attention.out.view;
  std::vector<std::byte> workspace(flex.value()->workspace_bytes(args, 1));
  FlexPlan plan;
  EXPECT_EQ(flex.value()->run(args, plan, pool, workspace).code(), Code::kInvalidArgument);
  ASSERT_TRUE(flex.value()->plan(args, plan, pool).is_ok());
  args.query = other.q.view;
  args.key = other.k.view;
  args.value = other.v.view;
  args.out = other.out.view;
  args.lse = other.lse.get();
  ASSERT_TRUE(flex.value()->run(args, plan, pool, workspace).is_ok());
  other.expect_right("a plan made for other inputs");
  // Fewer queries fit in the same workspace: it is sized for upper bounds.
  args.query.sizes[2] = args.out.sizes[2] = args.lse.sizes[2] = 3;
  EXPECT_EQ(flex.value()->run(args, plan, pool, workspace).code(), Code::kInvalidArgument);
  ASSERT_TRUE(flex.value()->plan(args, plan, pool).is_ok());
  EXPECT_TRUE(flex.value()->run(args, plan, pool, workspace).is_ok());
  EXPECT_EQ(flex.value()->run(args, plan, pool, std::span(workspace).first(64)).code(), Code::kInternal);
}

TEST(FlexAttentionErrors, WrongShapesAndDtypesAreNamed) {
  struct Bad {
    const char* name;
    void (*spoil)(Attention&);
  };
  const Bad bad[] = {
      {"key", [](Attention& a) { a.k.view.sizes[3] = 15; }},
      {"key", [](Attention& a) { a.k.view.sizes[0] = 3; }},
      {"value", [](Attention& a) { a.v.view.sizes[2] = 39; }},
      {"multiple", [](Attention& a) { a.k.view.sizes[1] = a.v.view.sizes[1] = 4; }},
      {"query", [](Attention& a) { a.q.view.rank = 3; }},
      {"out", [](Attention& a) { a.out.view.sizes[3] = 8; }},
      {"value has dtype", [](Attention& a) { a.v.view.dtype = DType::kF16; }},
      {"query has dtype", [](Attention& a) { a.q.view.dtype = DType::kI32; }},
      {"lse", [](Attention& a) { a.lse.view.sizes[1] = 1; }},
  };
  for (const Bad& entry : bad) {
    Problem p;
    p.shape = {2, 2, 2, 40, 40, 16, 16, false};
    Attention attention = Attention::make(p);
    entry.spoil(attention);
    const Status status = attention.run();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << entry.name;
    EXPECT_NE(status.message().find(entry.name), std::string::npos) << entry.name << ": " << status.message();
  }
}

}  // namespace
}  // namespace flexpte::testing
