// One method of a program: values, memory plan and instructions, verified and bound to operators.
// Immutable once loaded; sessions run it, each with its own values.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/delegate.h"
#include "runtime/ops/op.h"
#include "runtime/pte_file.h"
#include "runtime/status.h"
#include "runtime/thread_pool.h"
#include "runtime/value.h"

namespace executorch_flatbuffer {
struct ExecutionPlan;
}

namespace flexpte {

struct Instruction {
  enum class Kind : uint8_t { kKernel, kDelegate, kMove, kJumpFalse, kNothing };
  Kind kind = Kind::kNothing;
  Step step;                  // kKernel
  std::string name;           // operator or delegate, for errors and reports
  int32_t index = 0;          // kDelegate: number of the delegate; kMove: from; kJumpFalse: condition
  int32_t target = 0;         // kMove: to; kJumpFalse: instruction to go on with
  std::vector<int32_t> args;  // kDelegate: inputs then outputs
};

struct MethodDelegate {
  std::string id;
  size_t blob_size_bytes = 0;
  std::unique_ptr<LoadedDelegate> loaded;
};

// A buffer of the plan that lives in the session's state store, under the name of the module's buffer.
struct PlannedState {
  std::string_view name;
  size_t size_bytes = 0;
  std::span<const std::byte> initial;
};

class Method {
 public:
  // `file` and `delegates` outlive the method.
  static Result<std::unique_ptr<Method>> load(const PteFile& file, const executorch_flatbuffer::ExecutionPlan& plan,
                                              std::span<const std::shared_ptr<Delegate>> delegates,
                                              const ThreadPool& pool);

  const std::string& name() const { return name_; }
  std::span<const ValueInfo> values() const { return values_; }
  std::span<const int32_t> inputs() const { return inputs_; }
  std::span<const int32_t> outputs() const { return outputs_; }
  std::span<const Instruction> instructions() const { return instructions_; }
  std::span<const MethodDelegate> delegates() const { return delegates_; }
  std::span<const PlannedState> states() const { return states_; }
  std::span<const size_t> arena_sizes_bytes() const { return arenas_; }
  std::span<const int32_t> moved() const { return moved_; }  // values that moves overwrite
  size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  friend class MethodLoader;

  std::string name_;
  std::vector<ValueInfo> values_;
  std::vector<int32_t> inputs_, outputs_;
  std::vector<Instruction> instructions_;
  std::vector<MethodDelegate> delegates_;
  std::vector<PlannedState> states_;
  std::vector<size_t> arenas_;
  std::vector<int32_t> moved_;
  size_t workspace_bytes_ = 0;
};

}  // namespace flexpte
