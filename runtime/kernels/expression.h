// Expression programs (payload.fbs: Expression) evaluated over tiles of lanes: each node runs as
// one loop over a whole tile, so interpreting costs nothing per element.
//
// A tile has rows x cols lanes. Every node has an extent, found once at compile time: a node that
// depends only on the row (q_idx, doc[q_idx]) is computed per row, one that depends only on the
// column per column, and only what depends on both is computed rows x cols times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "runtime/status.h"
#include "runtime/tensor.h"
#include "runtime/thread_pool.h"

namespace flexpte {

// One to one with payload::ExprOp, in the same order (static-asserted where payloads are bound).
enum class ExprOp : uint8_t {
  kConstant = 0,
  kInput,
  kScore,
  kBatch,
  kHead,
  kQIdx,
  kKvIdx,
  kScalar,
  kLoad,
  kCast,
  kRoundTo,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kFloorDiv,
  kRemainder,
  kFmod,
  kTruncDiv,
  kPow,
  kNeg,
  kAbs,
  kSign,
  kMin,
  kMax,
  kReciprocal,
  kSquare,
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kLogicalAnd,
  kLogicalOr,
  kLogicalXor,
  kLogicalNot,
  kBitAnd,
  kBitOr,
  kBitXor,
  kBitNot,
  kShiftLeft,
  kShiftRight,
  kWhere,
  kExp,
  kExp2,
  kExpm1,
  kLog,
  kLog2,
  kLog10,
  kLog1p,
  kSqrt,
  kRsqrt,
  kSin,
  kCos,
  kTan,
  kAsin,
  kAcos,
  kAtan,
  kAtan2,
  kSinh,
  kCosh,
  kTanh,
  kAsinh,
  kAcosh,
  kAtanh,
  kSigmoid,
  kSilu,
  kErf,
  kGeluErf,
  kGeluTanh,
  kRelu,
  kFloor,
  kCeil,
  kRound,
  kTrunc,
  kIsInf,
  kIsNan,
};
inline constexpr int kNumExprOps = static_cast<int>(ExprOp::kIsNan) + 1;

struct ExprNode {
  ExprOp op = ExprOp::kConstant;
  DType type = DType::kF32;      // kBool, kI32, kI64 or kF32
  std::vector<int32_t> args;     // earlier nodes
  int32_t index = 0;             // kInput, kScalar, kLoad
  DType round_to = DType::kF32;  // kRoundTo
  int64_t value_int = 0;         // kConstant
  double value_float = 0.0;      // kConstant
};

// The last node is the result.
struct Expression {
  std::vector<ExprNode> nodes;
};

enum class Extent : uint8_t { kUniform, kRows, kCols, kFull };

// Values of the leaves of one tile. Indices are those of the tile's first row and column.
struct TileInputs {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t q_begin = 0;
  int64_t kv_begin = 0;
  float* score = nullptr;  // rows x cols, row stride `score_stride`
  int64_t score_stride = 0;
  std::span<const TensorView> inputs;    // kInput: [cols] or [rows, cols], any strides
  std::span<const TensorView> captures;  // kLoad
  std::span<const int64_t> scalars;      // kScalar
};

// An expression made ready to run. Immutable; shared by threads, each with its own workspace.
class TileProgram {
 public:
  // Verifies types, argument counts and indices (num_*: how many leaves of each kind there are;
  // capture_ranks: dimensions of each capture). Folds what is constant.
  static Result<TileProgram> compile(const Expression& expression, int num_inputs, int num_scalars,
                                     std::span<const int> capture_ranks);

  DType result_type() const;
  Extent result_extent() const;
  bool uses_score() const;

  // Bytes of workspace for tiles of at most rows x cols lanes, to be given 64-byte aligned.
  size_t workspace_bytes(int64_t max_rows, int64_t max_cols) const;

  // A result: for extent kUniform one element, kRows one per row, kCols one per column, kFull
  // rows x cols with row stride `stride` (elements). Bool results are bytes 0 or 1.
  struct Tile {
    const void* data = nullptr;
    DType type = DType::kF32;
    Extent extent = Extent::kFull;
    int64_t stride = 0;
  };
  // The result lies in the workspace (or is the score tile itself when the expression is that).
  // `active` (rows x cols bytes, row stride `active_stride`, may be null): where it is 0, captures
  // are not loaded and the result is unspecified. Loads whose index is outside the capture after
  // wrapping, at an active lane, give zero and set *out_of_bounds.
  Tile run(const TileInputs& in, int64_t rows, int64_t cols, std::span<std::byte> workspace,
           const uint8_t* active = nullptr, int64_t active_stride = 0, bool* out_of_bounds = nullptr) const;

  // Defined in expression_program.h; for the kernels of this folder only.
  struct Impl;

 private:
  explicit TileProgram(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;

  friend Status elementwise(const TileProgram& program, std::span<const TensorView> inputs,
                            std::span<const int64_t> scalars, std::span<const TensorView> captures,
                            const TensorView& out, const ThreadPool& pool, std::span<std::byte> workspace);
  friend size_t elementwise_workspace_bytes(const TileProgram& program, int num_threads);
};

// out = expression(inputs...) elementwise; inputs and out have equal sizes, any strides. Inputs of
// any dtype are widened to the type of their kInput node, the result narrowed (rounded to nearest
// even; integers truncated) to out's dtype. `workspace` holds elementwise_workspace_bytes() bytes.
size_t elementwise_workspace_bytes(const TileProgram& program, int num_threads);
Status elementwise(const TileProgram& program, std::span<const TensorView> inputs, std::span<const int64_t> scalars,
                   std::span<const TensorView> captures, const TensorView& out, const ThreadPool& pool,
                   std::span<std::byte> workspace);

}  // namespace flexpte
