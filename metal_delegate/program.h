// A bound program: the verified, device-neutral form of a payload (payload.fbs). Devices read it;
// nothing in it changes after load. In a namespace of its own: the executor of .pte files has values,
// scalars and instructions too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/delegate.h"
#include "runtime/kernels/expression.h"
#include "runtime/kernels/kernels.h"
#include "runtime/status.h"
#include "runtime/tensor.h"

namespace flexpte::bound {

// An integer that may depend on the inputs' shapes: n >= 0 is itself, n < 0 is scalar -1 - n.
using Sym = int64_t;
constexpr bool is_symbolic(Sym sym) {
  return sym < 0;
}
constexpr size_t scalar_of(Sym sym) {
  return static_cast<size_t>(-1 - sym);
}

enum class ScalarOp : uint8_t {
  kConstant = 0,
  kInputSize,
  kInputValue,
  kAdd,
  kSub,
  kMul,
  kFloorDiv,
  kMod,
  kMin,
  kMax,
};

struct Scalar {
  ScalarOp op = ScalarOp::kConstant;
  int32_t a = 0;
  int32_t b = 0;
  int64_t value = 0;
  int64_t upper_bound = 0;
  bool is_extent = false;  // some size, stride or offset is this scalar
};

// In order; each reads earlier scalars and the inputs only. Fails on overflow, on division by zero, and
// on an extent that is negative or above its bound. The inputs' kinds and ranks are checked before.
Status evaluate_scalars(std::span<const Scalar> scalars, std::span<const DelegateArgument> inputs,
                        std::span<int64_t> values);

enum class StorageKind : uint8_t { kInput = 0, kOutput, kConstant, kState, kArena };

struct Storage {
  StorageKind kind = StorageKind::kArena;
  int32_t index = 0;
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;
};

// sizes and strides hold Syms; data is null.
struct Value {
  int32_t storage = 0;
  TensorView view;
  Sym offset = 0;
};

struct ConstantData {
  std::string key;
  std::span<const std::byte> bytes;
  std::shared_ptr<std::byte[]> copy;  // set when the named data is misaligned
};

struct State {
  std::string name;
  DType dtype = DType::kF32;
  TensorView shape;
  size_t size_bytes = 0;
  int32_t initial = -1;
};

// One to one with payload::Op, without its NONE.
enum class OpKind : uint8_t {
  kLinear = 0,
  kGather,
  kRmsNorm,
  kLayerNorm,
  kElementwise,
  kReduce,
  kSoftmax,
  kMatMul,
  kIndexCopy,
  kArange,
  kFlexAttention,
};
inline constexpr int kNumOpKinds = 11;
std::string_view op_kind_name(OpKind kind);

struct NoParams {};
struct GatherParams {
  int32_t dim = 0;
};
struct NormParams {
  float eps = 0.0f;
};
struct ElementwiseParams {
  std::shared_ptr<const TileProgram> program;
  int32_t num_inputs = 0;
};
struct ReduceParams {
  ReduceOp op = ReduceOp::kSum;
  int32_t num_dims = 0;
};
struct SoftmaxParams {
  bool log = false;
};
struct IndexCopyParams {
  int32_t dim = 0;
};
struct ArangeParams {
  Sym start = 0;
  Sym step = 1;
};
struct FlexParams {
  float scale = 1.0f;
  int32_t score = -1;  // expression numbers
  int32_t mask = -1;
  int32_t num_score_captures = 0;
  int32_t num_mask_captures = 0;
  int32_t num_score_scalars = 0;
  int32_t num_mask_scalars = 0;
  int64_t q_block_size = 0;
  int64_t kv_block_size = 0;
  int32_t prefill_rows = 0;  // of a threadgroup of the Metal kernels
  int32_t prefill_threads = 0;
  int32_t chunk_rows = 0;
  int32_t chunk_threads = 0;
  int32_t decode_rows = 0;  // 0: there is no decode kernel
  int32_t plan = 0;         // attentions with equal numbers have one plan per execute
};

// Operand positions, by kind. An operand is a value number, or -1 where an optional one is absent.
namespace operand {
// Linear
inline constexpr size_t kX = 0, kWeight = 1, kBias = 2, kOut = 3;  // RmsNorm (no bias) and LayerNorm too
inline constexpr size_t kGatherSource = 0, kGatherIndex = 1, kGatherOut = 2;
inline constexpr size_t kUnaryX = 0, kUnaryOut = 1;  // Reduce, Softmax
inline constexpr size_t kMatMulA = 0, kMatMulB = 1, kMatMulOut = 2;
inline constexpr size_t kTarget = 0, kCopyIndex = 1, kCopySource = 2;  // IndexCopy
inline constexpr size_t kArangeOut = 0;
inline constexpr size_t kElementwiseOut = 0, kFirstInput = 1;  // then the inputs, then the captures
// FlexAttention: then the captures of the score, then those of the mask
inline constexpr size_t kQuery = 0, kKey = 1, kValue = 2, kFlexOut = 3, kLse = 4, kKvNumBlocks = 5, kKvIndices = 6,
                        kFullKvNumBlocks = 7, kFullKvIndices = 8, kFirstCapture = 9;
}  // namespace operand

struct Instruction {
  OpKind kind = OpKind::kLinear;
  std::string name;
  std::vector<std::string> kernels;  // functions of BoundProgram::metal_library
  std::vector<int32_t> operands;
  std::vector<int32_t> scalars;  // Elementwise; FlexAttention: of the score, then of the mask
  std::variant<NoParams, GatherParams, NormParams, ElementwiseParams, ReduceParams, SoftmaxParams, IndexCopyParams,
               ArangeParams, FlexParams>
      params;

  bool writes(size_t operand_number) const;
};

struct BoundProgram {
  uint32_t version = 0;
  std::string exporter;
  std::vector<Scalar> scalars;
  std::vector<Storage> storages;
  std::vector<Value> values;
  std::vector<ConstantData> constants;
  std::vector<State> states;
  std::vector<Expression> expressions;
  std::vector<Instruction> instructions;
  std::vector<int32_t> inputs;  // value, or -1 for an integer input
  std::vector<int32_t> outputs;
  uint64_t arena_size_bytes = 0;
  std::string metal_library;  // empty: this payload has no Metal kernels
  uint32_t kernels_version = 0;
  int32_t num_plans = 0;

  // Number of the first instruction that writes a state, or of instructions.
  size_t first_state_write = 0;

  StorageKind storage_kind(int32_t value) const {
    return storages[static_cast<size_t>(values[static_cast<size_t>(value)].storage)].kind;
  }
  // The view of a value with every size and stride at its upper bound; data is null.
  TensorView upper_bound(int32_t value) const;
};

// "instruction 12 (Linear, aten_linear_3)"
std::string describe_instruction(const BoundProgram& program, size_t number);

}  // namespace flexpte::bound
