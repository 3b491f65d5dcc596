// The values of a method: what ExecuTorch calls EValues.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/tensor.h"

namespace flexpte {

enum class ValueKind : uint8_t {
  kNone = 0,
  kInt,
  kBool,
  kDouble,
  kTensor,
  kString,
  kIntList,
  kDoubleList,
  kBoolList,
  kTensorList,
  kOptionalTensorList,
};

constexpr std::string_view kind_name(ValueKind kind) {
  constexpr std::array<std::string_view, 11> names = {"none",
                                                      "int",
                                                      "bool",
                                                      "float",
                                                      "tensor",
                                                      "string",
                                                      "int list",
                                                      "float list",
                                                      "bool list",
                                                      "tensor list",
                                                      "optional tensor list"};
  return names[static_cast<size_t>(kind)];
}

using DimOrder = std::array<uint8_t, kMaxRank>;

// A value as a session holds it while a method runs.
struct Value {
  ValueKind kind = ValueKind::kNone;
  bool writable = false;  // tensors: constants and the caller's memory are not
  bool dynamic = false;   // tensors: sizes may shrink below those of the file
  int64_t integer = 0;    // kInt; kBool: 0 or 1
  double real = 0.0;      // kDouble
  TensorView tensor;
  DimOrder dim_order{};       // outermost dimension first; strides follow from it
  size_t capacity_bytes = 0;  // room at tensor.data
};

// Strides of a dense tensor whose dimensions lie in memory in `dim_order`.
void set_dense_strides(TensorView& view, const DimOrder& dim_order);
// Whether the strides are those.
bool is_dense(const TensorView& view, const DimOrder& dim_order);

enum class Storage : uint8_t {
  kNone,  // not a tensor; or a view that an instruction makes; or an input that the caller's memory backs
  kConstant,
  kArena,
  kState,  // a named buffer, shared by the methods of a session
};

// A value as the file describes it.
struct ValueInfo {
  Value initial;  // planned tensors have no data yet; sizes are upper bounds
  Storage storage = Storage::kNone;
  int32_t index = 0;                        // of the arena or the state
  size_t offset_bytes = 0;                  // inside of it
  std::span<const std::byte> initial_data;  // of a mutable buffer; empty: zeros
  std::string_view name;                    // fully qualified name of the tensor, or empty
  std::vector<int32_t> items;               // int, tensor and optional tensor lists: values, -1 for none
  std::vector<double> reals;                // float lists
  std::string_view text;                    // strings
  bool written = false;                     // a number that an instruction changes
  bool only_multiplied = false;             // a tensor that is read by matrix products only
};

}  // namespace flexpte
