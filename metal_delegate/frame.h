// One session's memory of one bound program, and what every device does before and after a call: check
// the arguments, evaluate the scalars, resolve the views of all operands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "metal_delegate/program.h"
#include "runtime/delegate.h"
#include "runtime/memory.h"
#include "runtime/status.h"

namespace flexpte::bound {

class Frame {
 public:
  // `program` and the states outlive the frame.
  static Result<std::unique_ptr<Frame>> create(const BoundProgram& program, StateStore& states);

  // Afterwards operands() and scalars() are those of this call. An error leaves the states as they were.
  // Everything is resolved once per shape: a call with the shapes of the last one only moves pointers.
  Status begin(std::span<DelegateArgument> inputs, std::span<DelegateArgument> outputs);

  // Positions of IndexCopy that are known before the first state is written: to be called right before
  // that instruction runs, so that a position past a capacity changes no state.
  Status check_positions() const;

  // Sets the outputs' sizes, and copies those that do not lie in the caller's memory.
  void finish(std::span<DelegateArgument> outputs) const;

  // Whether check_positions() reads what an instruction computes.
  bool has_computed_positions() const;

  // The memory of all arena storages together, and of one storage in this call (empty: none).
  std::span<std::byte> arena() const { return arena_.bytes(); }
  std::span<std::byte> storage(size_t number) const;

  // Of one instruction, in the order of Instruction::operands; an absent one has no data.
  std::span<const TensorView> operands(size_t instruction) const {
    return {slots_.data() + first_slot_[instruction], program_.instructions[instruction].operands.size()};
  }
  std::span<const int64_t> scalars() const { return scalars_; }
  int64_t evaluate(Sym sym) const { return is_symbolic(sym) ? scalars_[scalar_of(sym)] : sym; }

 private:
  explicit Frame(const BoundProgram& program);
  Status bind_memory(StateStore& states);
  void collect_positions();

  Status check_inputs(std::span<const DelegateArgument> inputs) const;
  Status check_input_sizes(std::span<const DelegateArgument> inputs) const;
  Status resolve();
  void resolve_value(size_t number);
  Status bind_inputs(std::span<const DelegateArgument> inputs);
  Status bind_outputs(std::span<DelegateArgument> outputs);
  void move_pointers();

  // One check of positions: several IndexCopy with one index and one capacity need it once.
  struct Positions {
    int32_t index = 0;  // value
    Sym capacity = 0;
    size_t instruction = 0;
    std::string cache;
  };

  const BoundProgram& program_;
  ZeroPages arena_;
  std::vector<ZeroPages> input_copies_;   // by input; used when the caller's strides are others
  std::vector<std::byte*> storage_data_;  // by storage
  std::vector<uint64_t> storage_bytes_;   // by storage; of inputs and outputs: of this call
  std::vector<int64_t> scalars_;
  std::vector<int64_t> next_scalars_;
  std::vector<TensorView> values_;      // by value
  std::vector<int64_t> offsets_bytes_;  // by value
  std::vector<size_t> first_slot_;      // by instruction
  std::vector<TensorView> slots_;
  std::vector<int32_t> slot_values_;
  std::vector<std::byte*> call_inputs_;  // memory of this call, by input and output
  std::vector<std::byte*> call_outputs_;
  std::vector<size_t> moving_slots_;  // those in inputs and outputs
  std::vector<size_t> moving_values_;
  std::vector<Positions> positions_;
  bool is_resolved_ = false;
};

}  // namespace flexpte::bound
