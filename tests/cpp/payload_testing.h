// Small payloads, built with the generated object API, and what it takes to run them.
#pragma once

#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "metal_delegate/delegate.h"
#include "payload_generated.h"
#include "runtime/session.h"

namespace flexpte::testing {

// Named data whose bytes lie at `misalignment` bytes past a multiple of 64.
class TestData final : public NamedData {
 public:
  explicit TestData(size_t misalignment = 0) : misalignment_(misalignment) {}

  void add(const std::string& key, const std::vector<float>& values) {
    const size_t size = values.size() * sizeof(float);
    Entry entry{std::make_unique<Block[]>((size + misalignment_) / sizeof(Block) + 1), size};
    std::memcpy(entry.bytes(misalignment_), values.data(), size);
    entries_[key] = std::move(entry);
  }
  Result<std::span<const std::byte>> find(std::string_view key) const override {
    const auto found = entries_.find(std::string(key));
    if (found == entries_.end()) return Status(Code::kNotFound, "no named data " + std::string(key));
    return std::span<const std::byte>(found->second.bytes(misalignment_), found->second.size);
  }

 private:
  struct alignas(64) Block {
    std::byte bytes[64];
  };
  struct Entry {
    std::unique_ptr<Block[]> blocks;
    size_t size = 0;
    std::byte* bytes(size_t at) const { return blocks[0].bytes + at; }
  };
  size_t misalignment_;
  std::map<std::string, Entry> entries_;
};

template <class T>
using Tables = std::vector<std::unique_ptr<T>>;

inline void add_scalar(payload::PayloadT& p, payload::ScalarOp op, int a, int b, int64_t value, int64_t upper_bound) {
  auto scalar = std::make_unique<payload::ScalarT>();
  scalar->op = op;
  scalar->a = a;
  scalar->b = b;
  scalar->value = value;
  scalar->upper_bound = upper_bound;
  p.scalars.push_back(std::move(scalar));
}

inline int add_value(payload::PayloadT& p, payload::StorageKind kind, int index, uint64_t offset_bytes,
                     uint64_t size_bytes, payload::DType dtype, std::vector<int64_t> sizes,
                     std::vector<int64_t> strides) {
  auto storage = std::make_unique<payload::StorageT>();
  storage->kind = kind;
  storage->index = index;
  storage->offset_bytes = offset_bytes;
  storage->size_bytes = size_bytes;
  p.storages.push_back(std::move(storage));
  auto value = std::make_unique<payload::ValueT>();
  value->storage = static_cast<int>(p.storages.size()) - 1;
  value->dtype = dtype;
  value->sizes = std::move(sizes);
  value->strides = std::move(strides);
  p.values.push_back(std::move(value));
  return static_cast<int>(p.values.size()) - 1;
}

inline void add_node(payload::ExpressionT& e, payload::ExprOp op, payload::DType type, std::vector<int> args = {},
                     int index = 0, double value = 0.0) {
  auto node = std::make_unique<payload::ExprNodeT>();
  node->op = op;
  node->type = type;
  node->args = std::move(args);
  node->index = index;
  node->value_float = value;
  e.nodes.push_back(std::move(node));
}

template <class Op>
void add_instruction(payload::PayloadT& p, const std::string& name, Op op) {
  auto instruction = std::make_unique<payload::InstructionT>();
  instruction->name = name;
  instruction->op.Set(std::move(op));
  p.instructions.push_back(std::move(instruction));
}

inline std::vector<std::byte> pack(const payload::PayloadT& p) {
  flatbuffers::FlatBufferBuilder builder;
  builder.Finish(payload::Payload::Pack(builder, &p), payload::PayloadIdentifier());
  const auto* data = reinterpret_cast<const std::byte*>(builder.GetBufferPointer());
  return {data, data + builder.GetSize()};
}

// h = 2 x; k_cache[input_pos] = h; attention of h over the cache (causal by position); y = a weight^T.
// x [T, 4], input_pos [T] -> y [T, 3]; T up to 8, cache [8, 4], one head.
inline constexpr int64_t kCapacity = 8, kDim = 4, kOut = 3, kT = -1;
namespace value {
enum { kX = 0, kPos, kWeight, kCache, kH, kQuery, kKeys, kAttended, kAttendedRows, kY };
}
namespace instruction {
enum { kDouble = 0, kAppend, kAttend, kProject };
}

inline payload::PayloadT small_decoder() {
  using payload::DType;
  using payload::ExprOp;
  using payload::StorageKind;
  payload::PayloadT p;
  p.version = static_cast<uint32_t>(payload::FormatVersion::Current);
  p.exporter = "payload_test";
  p.arena_size_bytes = 256;
  add_scalar(p, payload::ScalarOp::InputSize, 0, 0, 0, kCapacity);
  auto constant = std::make_unique<payload::ConstantT>();
  constant->key = "weight";
  constant->size_bytes = kOut * kDim * 4;
  p.constants.push_back(std::move(constant));
  auto state = std::make_unique<payload::StateT>();
  state->name = "k_cache";
  state->dtype = DType::F32;
  state->sizes = {kCapacity, kDim};
  p.states.push_back(std::move(state));
  add_value(p, StorageKind::Input, 0, 0, 128, DType::F32, {kT, kDim}, {kDim, 1});
  add_value(p, StorageKind::Input, 1, 0, 64, DType::I64, {kT}, {1});
  add_value(p, StorageKind::Constant, 0, 0, 48, DType::F32, {kOut, kDim}, {kDim, 1});
  add_value(p, StorageKind::State, 0, 0, 128, DType::F32, {kCapacity, kDim}, {kDim, 1});
  add_value(p, StorageKind::Arena, 0, 0, 128, DType::F32, {kT, kDim}, {kDim, 1});
  const auto alias = [&p](int of, std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    auto view = std::make_unique<payload::ValueT>(*p.values[static_cast<size_t>(of)]);
    view->sizes = std::move(sizes);
    view->strides = std::move(strides);
    p.values.push_back(std::move(view));
  };
  alias(value::kH, {1, 1, kT, kDim}, {0, 0, kDim, 1});
  alias(value::kCache, {1, 1, kCapacity, kDim}, {0, 0, kDim, 1});
  add_value(p, StorageKind::Arena, 0, 128, 128, DType::F32, {1, 1, kT, kDim}, {32, 32, kDim, 1});
  alias(value::kAttended, {kT, kDim}, {kDim, 1});
  add_value(p, StorageKind::Output, 0, 0, 96, DType::F32, {kT, kOut}, {kOut, 1});
  p.inputs = {value::kX, value::kPos};
  p.outputs = {value::kY};

  auto twice = std::make_unique<payload::ExpressionT>();
  add_node(*twice, ExprOp::Input, DType::F32);
  add_node(*twice, ExprOp::Constant, DType::F32, {}, 0, 2.0);
  add_node(*twice, ExprOp::Mul, DType::F32, {0, 1});
  p.expressions.push_back(std::move(twice));
  auto causal = std::make_unique<payload::ExpressionT>();
  add_node(*causal, ExprOp::QIdx, DType::I32);
  add_node(*causal, ExprOp::Load, DType::I64, {0});
  add_node(*causal, ExprOp::KvIdx, DType::I32);
  add_node(*causal, ExprOp::Cast, DType::I64, {2});
  add_node(*causal, ExprOp::Le, DType::Bool, {3, 1});
  p.expressions.push_back(std::move(causal));

  payload::ElementwiseT elementwise;
  elementwise.expression = 0;
  elementwise.inputs = {value::kX};
  elementwise.out = value::kH;
  add_instruction(p, "double", std::move(elementwise));
  payload::IndexCopyT append;
  append.target = value::kCache;
  append.index = value::kPos;
  append.source = value::kH;
  add_instruction(p, "append", append);
  payload::FlexAttentionT attend;
  attend.query = value::kQuery;
  attend.key = value::kKeys;
  attend.value = value::kKeys;
  attend.out = value::kAttended;
  attend.scale = 0.5f;
  attend.mask = 1;
  attend.mask_captures = {value::kPos};
  add_instruction(p, "attend", std::move(attend));
  payload::LinearT project;
  project.x = value::kAttendedRows;
  project.weight = value::kWeight;
  project.out = value::kY;
  add_instruction(p, "project", project);
  return p;
}

inline std::vector<float> decoder_weight() {
  std::vector<float> weight;
  for (int i = 0; i < kOut * kDim; ++i) weight.push_back(0.25f * static_cast<float>(i % 5) - 0.5f);
  return weight;
}

}  // namespace flexpte::testing
