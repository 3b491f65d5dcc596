// A session of a program: all memory that changes. Sessions are independent of each other; one is used by
// one thread at a time.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/delegate.h"
#include "runtime/memory.h"
#include "runtime/program.h"
#include "runtime/status.h"
#include "runtime/value.h"

namespace flexpte {

class SessionStates final : public StateStore {
 public:
  Result<std::span<std::byte>> state(std::string_view name, size_t size_bytes,
                                     std::span<const std::byte> initial) override;
  // All states get their initial values again.
  Status reset();
  size_t size_bytes() const;

 private:
  struct State {
    ZeroPages pages;
    std::span<const std::byte> initial;
  };
  std::map<std::string, State, std::less<>> states_;
};

class Session {
 public:
  // Reserves the memory of all methods; pages cost memory from their first use on.
  static Result<std::unique_ptr<Session>> create(std::shared_ptr<const Program> program);

  const Program& program() const { return *program_; }

  // Runs a method. Inputs by kind: kTensor (any strides; not kept), kInt, kBool, kDouble or kNone, checked
  // against the method's. On an error the outputs are unspecified.
  Status run(size_t method, std::span<const Value> inputs);
  // An output of the last run of `method`; tensors are views that the next run overwrites.
  const Value& output(size_t method, size_t index) const;

  // Mutable buffers and states get their initial values again.
  Status reset();
  size_t states_size_bytes() const { return states_.size_bytes(); }
  // What the kernels of each delegated region did since the session began, where the device counts: JSON objects.
  std::vector<std::string> counters() const;

 private:
  // The memory of one method.
  struct Activation {
    const Method* method = nullptr;
    std::vector<Value> values;
    std::vector<ZeroPages> arenas;
    ZeroPages workspace;
    std::vector<std::unique_ptr<DelegateInstance>> delegates;
    std::vector<std::vector<DelegateArgument>> delegate_args;  // by instruction
    std::vector<Value> moved;                                  // what moves overwrite, as it was at first
    // Inputs that only delegates read are used where the caller has them; kernels want theirs in the plan.
    std::vector<bool> borrows_input;
  };

  Status activate(const Method& method);
  static Status set_initial_values(Activation& activation);
  static Status set_input(const Activation& activation, size_t number, const Value& input, const ThreadPool& pool);
  static Status run_delegate(Activation& activation, const Instruction& instruction,
                             std::vector<DelegateArgument>& args);

  std::shared_ptr<const Program> program_;
  SessionStates states_;  // outlives the delegates' instances, which point into it
  std::vector<Activation> activations_;
};

}  // namespace flexpte
