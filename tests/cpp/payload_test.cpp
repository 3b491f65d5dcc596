// Payloads: what a valid one computes, which invalid ones are refused with which message, and that no
// bytes whatever crash the reader.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "metal_delegate/program.h"
#include "payload_testing.h"

namespace flexpte::testing {
namespace {

constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();

struct Session {
  TestData data;
  SessionStates states;
  std::unique_ptr<Delegate> delegate = make_metal_delegate({});
  std::unique_ptr<LoadedDelegate> loaded;
  std::unique_ptr<DelegateInstance> instance;

  explicit Session(size_t misalignment = 0) : data(misalignment) { data.add("weight", decoder_weight()); }

  Status load(std::span<const std::byte> bytes) {
    FLEXPTE_ASSIGN(loaded, delegate->load(bytes, data));
    FLEXPTE_ASSIGN(instance, loaded->instantiate(states));
    return Status::ok();
  }
};

DelegateArgument tensor(void* data, DType dtype, std::vector<int64_t> sizes, size_t capacity_bytes = 0) {
  DelegateArgument argument;
  argument.tensor.data = data;
  argument.tensor.dtype = dtype;
  argument.tensor.rank = static_cast<int32_t>(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    argument.tensor.sizes[d] = sizes[d];
    argument.tensor.strides[d] = stride;
    stride *= sizes[d];
  }
  argument.capacity_bytes = capacity_bytes;
  return argument;
}

struct Call {
  std::vector<float> x;
  std::vector<int64_t> pos;
  std::vector<float> y = std::vector<float>(kCapacity * kOut, kPoison);
  std::vector<DelegateArgument> inputs;
  std::vector<DelegateArgument> outputs;

  Call(std::vector<float> rows, std::vector<int64_t> positions) : x(std::move(rows)), pos(std::move(positions)) {
    const auto length = static_cast<int64_t>(pos.size());
    inputs = {tensor(x.data(), DType::kF32, {length, kDim}), tensor(pos.data(), DType::kI64, {length})};
    outputs = {tensor(y.data(), DType::kF32, {}, y.size() * sizeof(float))};
  }
  Status run(Session& session) { return session.instance->execute(inputs, outputs); }
};

std::vector<float> rows_from(int64_t first, int64_t count) {
  std::vector<float> x;
  for (int64_t i = first * kDim; i < (first + count) * kDim; ++i) {
    x.push_back(std::sin(static_cast<float>(i * i + 1)));
  }
  return x;
}

// The decoder in float64, over all rows at once.
std::vector<double> expected_rows(int64_t count) {
  const std::vector<float> x = rows_from(0, count);
  const std::vector<float> weight = decoder_weight();
  const auto h = [&x](int64_t row, int64_t d) {
    return 2.0 * static_cast<double>(x[static_cast<size_t>(row * kDim + d)]);
  };
  std::vector<double> y;
  for (int64_t q = 0; q < count; ++q) {
    std::vector<double> attended(kDim);
    double sum = 0.0;
    for (int64_t kv = 0; kv <= q; ++kv) {
      double score = 0.0;
      for (int64_t d = 0; d < kDim; ++d) score += 0.5 * h(q, d) * h(kv, d);
      sum += std::exp(score);
      for (int64_t d = 0; d < kDim; ++d) attended[static_cast<size_t>(d)] += std::exp(score) * h(kv, d);
    }
    for (int64_t n = 0; n < kOut; ++n) {
      double dot = 0.0;
      for (int64_t d = 0; d < kDim; ++d) {
        dot += attended[static_cast<size_t>(d)] / sum * static_cast<double>(weight[static_cast<size_t>(n * kDim + d)]);
      }
      y.push_back(dot);
    }
  }
  return y;
}

void expect_rows(const Call& call, int64_t first, int64_t count) {
  EXPECT_EQ(call.outputs[0].tensor.rank, 2);
  EXPECT_EQ(call.outputs[0].tensor.size(0), count);
  EXPECT_EQ(call.outputs[0].tensor.size(1), kOut);
  const std::vector<double> expected = expected_rows(first + count);
  for (int64_t i = 0; i < count * kOut; ++i) {
    EXPECT_NEAR(static_cast<double>(call.y[static_cast<size_t>(i)]), expected[static_cast<size_t>(first * kOut + i)],
                1e-5)
        << i;
  }
  for (size_t i = static_cast<size_t>(count * kOut); i < call.y.size(); ++i) EXPECT_TRUE(std::isnan(call.y[i]));
}

TEST(Payload, ChunksOfAnyLengthGiveTheRowsOfOneCall) {
  for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{8}, {1, 1, 1, 1, 1, 1, 1, 1}, {5, 1, 2}, {1, 7}}) {
    Session session;
    ASSERT_TRUE(session.load(pack(small_decoder())).is_ok());
    int64_t first = 0;
    for (const int64_t count : chunks) {
      std::vector<int64_t> positions;
      for (int64_t i = 0; i < count; ++i) positions.push_back(first + i);
      Call call(rows_from(first, count), positions);
      const Status status = call.run(session);
      ASSERT_TRUE(status.is_ok()) << status.message();
      expect_rows(call, first, count);
      first += count;
    }
  }
}

TEST(Payload, StridedAndMisalignedInputsAreReadAsTheyAre) {
  Session session;
  ASSERT_TRUE(session.load(pack(small_decoder())).is_ok());
  Call call(rows_from(0, 5), {0, 1, 2, 3, 4});
  std::vector<float> transposed(5 * kDim);
  for (size_t row = 0; row < 5; ++row) {
    for (size_t d = 0; d < kDim; ++d) transposed[d * 5 + row] = call.x[row * kDim + d];
  }
  call.inputs[0].tensor.data = transposed.data();
  call.inputs[0].tensor.strides = {1, 5};
  std::vector<std::byte> shifted(5 * sizeof(int64_t) + 1);
  std::memcpy(shifted.data() + 1, call.pos.data(), 5 * sizeof(int64_t));
  call.inputs[1].tensor.data = shifted.data() + 1;
  const Status status = call.run(session);
  ASSERT_TRUE(status.is_ok()) << status.message();
  expect_rows(call, 0, 5);
}

TEST(Payload, MisalignedConstantsAreCopied) {
  for (const size_t misalignment : {size_t{1}, size_t{4}, size_t{16}}) {
    Session session(misalignment);
    ASSERT_TRUE(session.load(pack(small_decoder())).is_ok());
    Call call(rows_from(0, 2), {0, 1});
    ASSERT_TRUE(call.run(session).is_ok());
    expect_rows(call, 0, 2);
  }
}

TEST(Payload, PositionsPastTheCapacityLeaveTheCacheAsItWas) {
  Session session;
  ASSERT_TRUE(session.load(pack(small_decoder())).is_ok());
  Call prefill(rows_from(0, 7), {0, 1, 2, 3, 4, 5, 6});
  ASSERT_TRUE(prefill.run(session).is_ok());
  Call beyond(rows_from(20, 2), {6, 8});
  const Status status = beyond.run(session);
  EXPECT_EQ(status.code(), Code::kOutOfRange);
  EXPECT_EQ(status.message(), "position 8 is past the capacity 8 of cache k_cache: context full");
  Call before(rows_from(20, 1), {-1});
  EXPECT_EQ(before.run(session).message(), "position -1 is before the start of cache k_cache");
  Call last(rows_from(7, 1), {7});
  ASSERT_TRUE(last.run(session).is_ok());
  expect_rows(last, 7, 1);
}

TEST(Payload, WrongArgumentsAreNamed) {
  struct Case {
    std::function<void(Call&)> spoil;
    const char* message;
  };
  const std::vector<Case> cases = {
      {[](Call& c) { c.inputs.pop_back(); }, "1 inputs, expected 2"},
      {[](Call& c) { c.outputs.clear(); }, "0 outputs, expected 1"},
      {[](Call& c) { c.inputs[1].tensor.dtype = DType::kI32; }, "input 1 is int32, expected int64"},
      {[](Call& c) { c.inputs[0].tensor.rank = 1; }, "input 0 has the shape [2], expected 2 dimensions"},
      {[](Call& c) { c.inputs[0].tensor.sizes[1] = 3; }, "input 0 has the shape [2, 3]: dimension 1 is 3, expected 4"},
      {[](Call& c) { c.inputs[0].tensor.sizes[0] = 9; }, "dimension 0 is 9, expected at most 8"},
      {[](Call& c) { c.inputs[0].tensor.sizes[0] = -1; }, "dimension 0 is -1"},
      {[](Call& c) { c.inputs[1].tensor.sizes[0] = 1; },
       "input 1 has the shape [1]: dimension 0 is 1, and the other inputs give 2"},
      {[](Call& c) { c.inputs[0].kind = DelegateArgument::Kind::kInt; }, "input 0 is an integer, expected a tensor"},
      {[](Call& c) { c.inputs[0].tensor.data = nullptr; }, "input 0 has no data"},
      {[](Call& c) { c.outputs[0].capacity_bytes = 23; }, "output 0 has room for 23 bytes and needs 24"},
      {[](Call& c) { c.outputs[0].tensor.dtype = DType::kF16; }, "output 0 is not a tensor of float32"},
  };
  Session session;
  ASSERT_TRUE(session.load(pack(small_decoder())).is_ok());
  for (const Case& wrong : cases) {
    Call call(rows_from(0, 2), {0, 1});
    wrong.spoil(call);
    const Status status = call.run(session);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_PRED_FORMAT2(::testing::IsSubstring, std::string(wrong.message), status.message());
  }
  Call right(rows_from(0, 2), {0, 1});
  EXPECT_TRUE(right.run(session).is_ok());
  expect_rows(right, 0, 2);
}

TEST(Scalars, FloorAndReportWhatCannotBe) {
  using bound::Scalar;
  using bound::ScalarOp;
  const auto evaluate = [](ScalarOp op, int64_t a, int64_t b, int64_t& result) {
    std::vector<Scalar> scalars(3);
    scalars[0].value = a;
    scalars[1].value = b;
    scalars[2].op = op;
    scalars[2].b = 1;
    std::vector<int64_t> values(3);
    const Status status = bound::evaluate_scalars(scalars, {}, values);
    result = values[2];
    return status;
  };
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  struct Case {
    ScalarOp op;
    int64_t a, b, expected;
  };
  for (const Case& c :
       {Case{ScalarOp::kFloorDiv, -7, 2, -4}, Case{ScalarOp::kFloorDiv, 7, -2, -4}, Case{ScalarOp::kFloorDiv, 6, 2, 3},
        Case{ScalarOp::kFloorDiv, 7, -1, -7}, Case{ScalarOp::kMod, -7, 3, 2}, Case{ScalarOp::kMod, 7, -3, -2},
        Case{ScalarOp::kMod, kLeast, -1, 0}, Case{ScalarOp::kMin, -3, 2, -3}, Case{ScalarOp::kMax, -3, 2, 2},
        Case{ScalarOp::kSub, 2, 5, -3}}) {
    int64_t result = 0;
    EXPECT_TRUE(evaluate(c.op, c.a, c.b, result).is_ok());
    EXPECT_EQ(result, c.expected);
  }
  for (const Case& c :
       {Case{ScalarOp::kFloorDiv, 1, 0, 0}, Case{ScalarOp::kMod, 1, 0, 0}, Case{ScalarOp::kFloorDiv, kLeast, -1, 0},
        Case{ScalarOp::kAdd, kLeast, -1, 0}, Case{ScalarOp::kMul, kLeast, 2, 0}, Case{ScalarOp::kSub, kLeast, 1, 0}}) {
    int64_t result = 0;
    EXPECT_EQ(evaluate(c.op, c.a, c.b, result).code(), Code::kInvalidArgument);
  }
}

TEST(Payload, EmptyInputsGiveEmptyOutputs) {
  Session session;
  ASSERT_TRUE(session.load(pack(small_decoder())).is_ok());
  Call call({}, {});
  const Status status = call.run(session);
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(call.outputs[0].tensor.size(0), 0);
}

TEST(Payload, DescribesItself) {
  Session session;
  ASSERT_TRUE(session.load(pack(small_decoder())).is_ok());
  EXPECT_EQ(session.loaded->describe(),
            "{\"version\": 1, \"exporter\": \"payload_test\", \"device\": \"host\", \"instructions\": {\"Linear\": "
            "1, "
            "\"Elementwise\": 1, \"IndexCopy\": 1, \"FlexAttention\": 1}, \"constants_bytes\": 48, "
            "\"arena_bytes\": 256, "
            "\"states\": [{\"name\": \"k_cache\", \"dtype\": \"float32\", \"shape\": [8, 4], \"layout\": "
            "\"contiguous\", "
            "\"size_bytes\": 128}], \"attentions\": [{\"name\": \"attend\", \"dtype\": \"float32\", \"query\": [1, "
            "1, 8, 4], "
            "\"key\": [1, 1, 8, 4], \"value\": [1, 1, 8, 4], \"scale\": 0.5, \"score\": false, \"mask\": true, "
            "\"block_lists\": false, \"plan\": 0}]}");
  ASSERT_EQ(session.loaded->states().size(), 1u);
  EXPECT_EQ(session.loaded->states()[0].name, "k_cache");
}

TEST(Payload, UnknownDeviceIsNamed) {
  const std::unique_ptr<Delegate> delegate = make_metal_delegate({"quantum", nullptr});
  const Status status = delegate->load(pack(small_decoder()), TestData()).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_EQ(status.message().rfind("no device 'quantum' in this build; available: host, msl-host", 0), 0u)
      << status.message();
}

TEST(Payload, NewerVersionIsUnsupportedEvenWhenTheRestIsUnreadable) {
  payload::PayloadT p = small_decoder();
  p.version = 99;
  Session session;
  const Status status = session.load(pack(p));
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, "format version 99, this build reads up to 1", status.message());
}

struct Spoiled {
  const char* name;
  std::function<void(payload::PayloadT&)> spoil;
  const char* message;
};

payload::LinearT& linear_of(payload::PayloadT& p) {
  return *p.instructions[instruction::kProject]->op.AsLinear();
}
payload::FlexAttentionT& flex_of(payload::PayloadT& p) {
  return *p.instructions[instruction::kAttend]->op.AsFlexAttention();
}
payload::ElementwiseT& double_of(payload::PayloadT& p) {
  return *p.instructions[instruction::kDouble]->op.AsElementwise();
}
payload::IndexCopyT& append_of(payload::PayloadT& p) {
  return *p.instructions[instruction::kAppend]->op.AsIndexCopy();
}

const std::vector<Spoiled>& spoiled() {
  using payload::DType;
  using payload::PayloadT;
  static const std::vector<Spoiled> cases = {
      {"NoVersion", [](PayloadT& p) { p.version = 0; }, "no format version"},
      {"ConstantMissing", [](PayloadT& p) { p.constants[0]->key = "other"; }, "other"},
      {"ConstantTooShort", [](PayloadT& p) { p.constants[0]->size_bytes = 4096; },
       "constant 0 (weight) needs 4096 bytes"},
      {"StateTwice", [](PayloadT& p) { p.states.push_back(std::make_unique<payload::StateT>(*p.states[0])); },
       "state 1 (k_cache) has the name of an earlier one"},
      {"StateDynamic", [](PayloadT& p) { p.states[0]->sizes[0] = -1; }, "expected a static one"},
      {"StateTooLarge",
       [](PayloadT& p) {
         p.states[0]->sizes = {int64_t{1} << 40, int64_t{1} << 40};
       },
       "too large"},
      {"StateInitial", [](PayloadT& p) { p.states[0]->initial = 0; }, "has 128 bytes and its initial value 48"},
      {"StateInitialIndex", [](PayloadT& p) { p.states[0]->initial = 7; }, "names constant 7 of 1"},
      {"StorageKind", [](PayloadT& p) { p.storages[0]->kind = static_cast<payload::StorageKind>(77); },
       "storage 0 has an unknown kind"},
      {"StorageIndex", [](PayloadT& p) { p.storages[0]->index = -1; }, "storage 0 names input -1 of 2"},
      {"StorageTooLarge", [](PayloadT& p) { p.storages[2]->size_bytes = 49; },
       "storage 2 has 49 bytes where there are 48"},
      {"ArenaOverflow", [](PayloadT& p) { p.storages[4]->offset_bytes = ~uint64_t{0}; }, "of an arena of 256"},
      {"ArenaTooSmall", [](PayloadT& p) { p.arena_size_bytes = 255; }, "where there are 127"},
      {"ScalarOp", [](PayloadT& p) { p.scalars[0]->op = static_cast<payload::ScalarOp>(50); },
       "scalar 0 has an unknown operation"},
      {"ScalarForward", [](PayloadT& p) { add_scalar(p, payload::ScalarOp::Add, 0, 1, 0, 0); },
       "scalar 1 names earlier scalar 1 of 1"},
      {"ScalarDimension", [](PayloadT& p) { p.scalars[0]->b = 2; }, "scalar 0 names dimension 2 of 2"},
      {"ScalarOfTensor", [](PayloadT& p) { p.scalars[0]->op = payload::ScalarOp::InputValue; },
       "value of a tensor input"},
      {"ScalarUpperBound", [](PayloadT& p) { p.scalars[0]->upper_bound = -1; }, "upper bound is negative"},
      {"ScalarUpperBoundTooLarge", [](PayloadT& p) { p.scalars[0]->upper_bound = 9; },
       "value 0 reaches byte 144 of storage 0"},
      {"ValueStorage", [](PayloadT& p) { p.values[0]->storage = 99; }, "value 0 names storage 99 of"},
      {"ValueDType", [](PayloadT& p) { p.values[0]->dtype = static_cast<DType>(10); }, "value 0 has an unknown dtype"},
      {"ValueRank", [](PayloadT& p) { p.values[0]->sizes.assign(9, 1); }, "value 0 has 9 dimensions, at most 8"},
      {"ValueStrides", [](PayloadT& p) { p.values[0]->strides.pop_back(); }, "value 0 has 2 sizes and 1 strides"},
      {"ValueScalar", [](PayloadT& p) { p.values[0]->sizes[0] = -5; }, "value 0 names scalar 4 of 1"},
      {"ValueOverflow", [](PayloadT& p) { p.values[0]->sizes[1] = int64_t{1} << 62; }, "value 0 is too large"},
      {"ValueStrideOverflow", [](PayloadT& p) { p.values[0]->strides[0] = int64_t{1} << 62; }, "value 0 is too large"},
      {"ValueOffset", [](PayloadT& p) { p.values[value::kH]->offset = 1; }, "value 4 reaches byte 132 of storage 4"},
      {"ArenaAlignment",
       [](PayloadT& p) {
         p.storages[4]->offset_bytes = 2;
         p.arena_size_bytes = 512;
       },
       "not aligned for float32"},
      {"InputIndex", [](PayloadT& p) { p.inputs[0] = 99; }, "input 0 names value 99"},
      {"InputElsewhere", [](PayloadT& p) { p.inputs[1] = value::kX; }, "input 1 is value 0"},
      {"OutputIndex", [](PayloadT& p) { p.outputs[0] = -1; }, "output 0 names value -1"},
      {"ExpressionEmpty", [](PayloadT& p) { p.expressions[0]->nodes.clear(); }, "expression 0 has no nodes"},
      {"ExpressionOp", [](PayloadT& p) { p.expressions[0]->nodes[2]->op = static_cast<payload::ExprOp>(200); },
       "expression 0 node 2 has the unknown operation 200"},
      {"ExpressionForward", [](PayloadT& p) { p.expressions[0]->nodes[2]->args[1] = 2; }, "expected an earlier one"},
      {"ExpressionInput", [](PayloadT& p) { p.expressions[0]->nodes[0]->index = 1; },
       "instruction 0 (Elementwise, double)"},
      {"ExpressionIndex", [](PayloadT& p) { double_of(p).expression = 2; }, "names expression 2 of 2"},
      {"ElementwiseShape",
       [](PayloadT& p) {
         double_of(p).inputs[0] = value::kCache;
         p.values[value::kCache]->sizes[1] = 2;
       },
       "operand 0 is float32 [8, 2] and the output is float32 [?, 4]"},
      {"OperandIndex", [](PayloadT& p) { linear_of(p).weight = 1000; },
       "instruction 3 (Linear, project): its weight names value 1000"},
      {"OperandAbsent", [](PayloadT& p) { linear_of(p).weight = -1; }, "its weight names value -1"},
      {"LinearShape", [](PayloadT& p) { linear_of(p).weight = value::kCache; }, "instruction 3 (Linear, project)"},
      {"LinearDType", [](PayloadT& p) { p.values[value::kWeight]->dtype = DType::I32; },
       "the weight is int32 [3, 4], expected float32"},
      {"LinearBias", [](PayloadT& p) { linear_of(p).bias = value::kWeight; },
       "the bias is float32 [3, 4], expected 1 dimensions"},
      {"CopyDim", [](PayloadT& p) { append_of(p).dim = 2; }, "dimension 2 of a target"},
      {"CopyTarget", [](PayloadT& p) { append_of(p).target = value::kH; }, "its target is no state"},
      {"CopyIndex", [](PayloadT& p) { append_of(p).index = value::kX; }, "the index is float32"},
      {"FlexMask", [](PayloadT& p) { flex_of(p).mask = 5; }, "its mask names expression 5 of 2"},
      {"FlexMaskType", [](PayloadT& p) { p.expressions[1]->nodes.pop_back(); }, "its mask gives int64, expected bool"},
      {"FlexCapture", [](PayloadT& p) { flex_of(p).mask_captures.clear(); }, "instruction 2 (FlexAttention, attend)"},
      {"FlexScale", [](PayloadT& p) { flex_of(p).scale = NAN; }, "its scale is not finite"},
      {"FlexHalfBlockList", [](PayloadT& p) { flex_of(p).kv_indices = value::kPos; }, "counts or its indices only"},
      {"FlexRank", [](PayloadT& p) { flex_of(p).query = value::kH; },
       "the query is float32 [?, 4], expected 4 dimensions"},
      {"WritesInput", [](PayloadT& p) { double_of(p).out = value::kX; },
       "instruction 0 (Elementwise, double): writes input 0"},
      {"WritesConstant",
       [](PayloadT& p) {
         double_of(p).inputs[0] = value::kWeight;
         double_of(p).out = value::kWeight;
       },
       "writes constant 0"},
      {"ReadBeforeWrite", [](PayloadT& p) { p.instructions.erase(p.instructions.begin()); },
       "value 4 is never written before it is read"},
      {"Overwritten", [](PayloadT& p) { p.storages[p.values[value::kAttended]->storage]->offset_bytes = 0; },
       "instruction 2 (FlexAttention, attend): writes over its own operand"},
      {"OutputNeverWritten", [](PayloadT& p) { p.instructions.pop_back(); }, "output 0 is never written"},
  };
  return cases;
}

class SpoiledPayload : public ::testing::TestWithParam<Spoiled> {};

TEST_P(SpoiledPayload, IsRefusedWithItsReason) {
  payload::PayloadT p = small_decoder();
  GetParam().spoil(p);
  Session session;
  const Status status = session.load(pack(p));
  ASSERT_FALSE(status.is_ok());
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, std::string(GetParam().message), status.message());
}

INSTANTIATE_TEST_SUITE_P(Each, SpoiledPayload, ::testing::ValuesIn(spoiled()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Payload, TruncatedAtAnyLengthIsRefused) {
  const std::vector<std::byte> bytes = pack(small_decoder());
  constexpr size_t kPadding = 3;  // at most, behind the last field
  for (size_t length = 0; length < bytes.size() - kPadding; ++length) {
    // A block of its own, so that a sanitizer sees reads past the end.
    const std::vector<std::byte> part(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length));
    Session session;
    EXPECT_FALSE(session.load(part).is_ok()) << length;
  }
}

TEST(Payload, NoMutationCrashes) {
  const std::vector<std::byte> bytes = pack(small_decoder());
  std::mt19937 random(20240607);
  const auto below = [&random](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
  int loaded = 0;
  int ran = 0;
  constexpr int kMutations = 20000;
  for (int i = 0; i < kMutations; ++i) {
    std::vector<std::byte> mutated = bytes;
    for (size_t k = below(3) + 1; k-- > 0;) {
      const size_t at = below(mutated.size());
      constexpr int interesting[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
      mutated[at] = below(2) == 0 ? static_cast<std::byte>(below(256)) : static_cast<std::byte>(interesting[below(5)]);
    }
    Session session;
    if (!session.load(mutated).is_ok()) continue;
    ++loaded;
    for (const int64_t length : {3, 1}) {
      Call call(rows_from(0, length), {4, 2, 0});
      call.inputs[1].tensor.sizes[0] = length;
      ran += call.run(session).is_ok() ? 1 : 0;
    }
  }
  EXPECT_GT(loaded, kMutations / 100);
  EXPECT_GT(ran, kMutations / 100);
  EXPECT_LT(loaded, kMutations);
}

}  // namespace
}  // namespace flexpte::testing
