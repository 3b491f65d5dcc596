#include "runtime/method.h"

#include <algorithm>
#include <set>
#include <utility>

#include "program_generated.h"
#include "runtime/method_values.h"

namespace flexpte {

namespace et = executorch_flatbuffer;

// Reads one execution plan. Each part relies on what the parts before it have verified.
class MethodLoader {
 public:
  MethodLoader(const PteFile& file, const et::ExecutionPlan& plan, std::span<const std::shared_ptr<Delegate>> delegates,
               const ThreadPool& pool, Method& method)
      : file_(file), plan_(plan), delegates_(delegates), pool_(pool), method_(method) {}

  Status load() {
    FLEXPTE_TRY(read_ids(plan_.inputs(), "inputs", method_.inputs_));
    FLEXPTE_TRY(read_ids(plan_.outputs(), "outputs", method_.outputs_));
    FLEXPTE_TRY(check_operators());
    FLEXPTE_TRY(load_delegates());
    FLEXPTE_TRY(check_chains());
    FLEXPTE_TRY(mark_written());
    mark_multiplied();
    FLEXPTE_TRY(place_states(method_.values_, method_.inputs_, method_.states_));
    FLEXPTE_TRY(give_room(method_.values_, method_.arenas_));
    return read_instructions();
  }

 private:
  Status bad(const std::string& what) const { return {Code::kInvalidProgram, what}; }

  bool is_value(int64_t id) const { return id >= 0 && static_cast<size_t>(id) < method_.values_.size(); }

  template <class List>
  Status read_ids(const List* list, std::string_view what, std::vector<int32_t>& ids) const {
    if (list == nullptr) return Status::ok();
    for (const auto id : *list) {
      if (!is_value(id)) {
        return bad("the " + std::string(what) + " name value " + std::to_string(id) + " of " +
                   std::to_string(method_.values_.size()));
      }
      ids.push_back(static_cast<int32_t>(id));
    }
    return Status::ok();
  }

  // All operators that are missing, in one error.
  Status check_operators() {
    std::set<std::string> missing;
    if (plan_.operators() != nullptr) {
      for (const et::Operator* op : *plan_.operators()) {
        if (op->name() == nullptr) return bad("an operator has no name");
        std::string name = op->name()->str();
        if (op->overload() != nullptr && op->overload()->size() > 0) name += "." + op->overload()->str();
        BindOp bind = find_op(name);
        if (bind == nullptr) missing.insert(name);
        operators_.emplace_back(std::move(name), bind);
      }
    }
    if (missing.empty()) return Status::ok();
    std::string list;
    for (const std::string& name : missing) list += (list.empty() ? "" : ", ") + name;
    return {Code::kUnsupported,
            "uses operators that this runtime lacks: " + list + ". Delegate them, or export the model without them"};
  }

  Status load_delegates() {
    if (plan_.delegates() == nullptr) return Status::ok();
    for (const et::BackendDelegate* entry : *plan_.delegates()) {
      if (entry->id() == nullptr) return bad("a delegate has no id");
      MethodDelegate delegate;
      delegate.id = entry->id()->str();
      const auto found = std::find_if(delegates_.begin(), delegates_.end(),
                                      [&](const auto& known) { return known->name() == delegate.id; });
      if (found == delegates_.end()) {
        std::string available;
        for (const auto& known : delegates_) {
          available += (available.empty() ? "" : ", ") + std::string(known->name());
        }
        return {Code::kNotFound, "needs the delegate '" + delegate.id +
                                     "'; available here: " + (available.empty() ? "none" : available)};
      }
      FLEXPTE_ASSIGN(const auto blob, file_.delegate_blob(entry->processed()));
      delegate.blob_size_bytes = blob.size();
      auto loaded = (*found)->load(blob, file_);
      if (!loaded.is_ok()) {
        return {loaded.status().code(), "delegate '" + delegate.id + "': " + loaded.status().message()};
      }
      delegate.loaded = std::move(loaded).value();
      method_.delegates_.push_back(std::move(delegate));
    }
    return Status::ok();
  }

  Status check_chains() {
    if (plan_.chains() == nullptr) return Status::ok();
    for (const et::Chain* chain : *plan_.chains()) {
      if (chain->instructions() == nullptr) return bad("a chain has no instructions");
      for (const et::Instruction* instruction : *chain->instructions()) {
        if (instruction->instr_args() == nullptr) return bad("an instruction is empty");
      }
    }
    return Status::ok();
  }

  template <class Visit>
  Status for_each_instruction(const Visit& visit) {
    if (plan_.chains() == nullptr) return Status::ok();
    int64_t number = 0;
    for (const et::Chain* chain : *plan_.chains()) {
      const int64_t first = number;
      for (const et::Instruction* instruction : *chain->instructions()) {
        if (Status status = visit(*instruction, first, static_cast<int64_t>(chain->instructions()->size()));
            !status.is_ok()) {
          return {status.code(), "instruction " + std::to_string(number) + ": " + status.message()};
        }
        ++number;
      }
    }
    return Status::ok();
  }

  // Numbers that inputs, operators, delegates and moves may change are no constants for operators.
  Status mark_written() {
    for (const int32_t id : method_.inputs_) method_.values_[static_cast<size_t>(id)].written = true;
    return for_each_instruction([&](const et::Instruction& instruction, int64_t, int64_t) -> Status {
      std::vector<int32_t> ids;
      if (const auto* kernel = instruction.instr_args_as_KernelCall()) {
        FLEXPTE_TRY(read_ids(kernel->args(), "arguments", ids));
        if (!ids.empty()) ids = {ids.back()};
      } else if (const auto* call = instruction.instr_args_as_DelegateCall()) {
        FLEXPTE_TRY(read_ids(call->args(), "arguments", ids));
      } else if (const auto* move = instruction.instr_args_as_MoveCall()) {
        if (!is_value(move->move_to())) return bad("a move to value " + std::to_string(move->move_to()));
        ids = {move->move_to()};
      }
      for (const int32_t id : ids) method_.values_[static_cast<size_t>(id)].written = true;
      return Status::ok();
    });
  }

  // Transposed weights that only matrix products read need no transposed copy.
  void mark_multiplied() {
    std::vector<ValueInfo>& values = method_.values_;
    for (ValueInfo& value : values) value.only_multiplied = value.initial.kind == ValueKind::kTensor;
    const auto used = [&values](int64_t id) { values[static_cast<size_t>(id)].only_multiplied = false; };
    for (const int32_t id : method_.outputs_) used(id);
    for (const ValueInfo& value : values) {
      const bool is_list =
          value.initial.kind == ValueKind::kTensorList || value.initial.kind == ValueKind::kOptionalTensorList;
      for (const int32_t item : value.items) {
        if (is_list && item >= 0) used(item);
      }
    }
    // The instructions' arguments are in range: mark_written has read them.
    const Status status = for_each_instruction([&](const et::Instruction& instruction, int64_t, int64_t) -> Status {
      const flatbuffers::Vector<int32_t>* args = nullptr;
      if (const auto* kernel = instruction.instr_args_as_KernelCall()) {
        args = kernel->args();
        const int32_t op = kernel->op_index();
        const bool known = op >= 0 && static_cast<size_t>(op) < operators_.size();
        const std::string_view name = known ? std::string_view(operators_[static_cast<size_t>(op)].first) : "";
        const bool multiplies = name == "aten::mm.out" || name == "aten::addmm.out";
        const bool transposes =
            name == "aten::permute_copy.out" || name == "aten::t_copy.out" || name == "aten::transpose_copy.int_out";
        if (multiplies) return Status::ok();
        if (transposes && args != nullptr && args->size() > 0) {
          used(args->Get(0));
          return Status::ok();
        }
      } else if (const auto* call = instruction.instr_args_as_DelegateCall()) {
        args = call->args();
      } else if (const auto* move = instruction.instr_args_as_MoveCall()) {
        used(move->move_to());
        if (is_value(move->move_from())) used(move->move_from());
      }
      if (args == nullptr) return Status::ok();
      for (const int32_t id : *args) used(id);
      return Status::ok();
    });
    (void)status;
  }

  Status read_instructions() {
    return for_each_instruction([&](const et::Instruction& source, int64_t first, int64_t count) -> Status {
      Instruction instruction;
      switch (source.instr_args_type()) {
        case et::InstructionArguments::KernelCall:
          FLEXPTE_TRY(read_kernel(*source.instr_args_as_KernelCall(), instruction));
          break;
        case et::InstructionArguments::DelegateCall:
          FLEXPTE_TRY(read_delegate(*source.instr_args_as_DelegateCall(), instruction));
          break;
        case et::InstructionArguments::MoveCall:
          FLEXPTE_TRY(read_move(*source.instr_args_as_MoveCall(), instruction));
          break;
        case et::InstructionArguments::JumpFalseCall:
          FLEXPTE_TRY(read_jump(*source.instr_args_as_JumpFalseCall(), first, count, instruction));
          break;
        case et::InstructionArguments::FreeCall:
          // Memory is planned; there is nothing to free.
          if (!is_value(source.instr_args_as_FreeCall()->value_index())) return bad("frees an unknown value");
          instruction.name = "free";
          break;
        default:
          return bad("has the unknown kind " + std::to_string(static_cast<int>(source.instr_args_type())));
      }
      method_.instructions_.push_back(std::move(instruction));
      return Status::ok();
    });
  }

  Status read_kernel(const et::KernelCall& call, Instruction& instruction) {
    const int32_t op = call.op_index();
    if (op < 0 || static_cast<size_t>(op) >= operators_.size()) {
      return bad("calls operator " + std::to_string(op) + " of " + std::to_string(operators_.size()));
    }
    const auto& [name, bind] = operators_[static_cast<size_t>(op)];
    std::vector<int32_t> args;
    FLEXPTE_TRY(read_ids(call.args(), "arguments", args));
    instruction.name = name;
    auto step = bind(Binder(method_.values_, args, pool_, method_.workspace_bytes_));
    if (!step.is_ok()) return {step.status().code(), name + ": " + step.status().message()};
    if (step.value()) {
      instruction.kind = Instruction::Kind::kKernel;
      instruction.step = std::move(step).value();
    }
    return Status::ok();
  }

  Status read_delegate(const et::DelegateCall& call, Instruction& instruction) {
    const int32_t index = call.delegate_index();
    if (index < 0 || static_cast<size_t>(index) >= method_.delegates_.size()) {
      return bad("calls delegate " + std::to_string(index) + " of " + std::to_string(method_.delegates_.size()));
    }
    const MethodDelegate& delegate = method_.delegates_[static_cast<size_t>(index)];
    instruction.kind = Instruction::Kind::kDelegate;
    instruction.name = delegate.id;
    instruction.index = index;
    FLEXPTE_TRY(read_ids(call.args(), "arguments", instruction.args));
    const size_t num_inputs = delegate.loaded->num_inputs();
    const size_t num_outputs = delegate.loaded->num_outputs();
    if (instruction.args.size() != num_inputs + num_outputs) {
      return bad("calls delegate '" + delegate.id + "' with " + std::to_string(instruction.args.size()) +
                 " arguments, it has " + std::to_string(num_inputs) + " inputs and " + std::to_string(num_outputs) +
                 " outputs");
    }
    for (size_t i = 0; i < instruction.args.size(); ++i) {
      const ValueInfo& value = method_.values_[static_cast<size_t>(instruction.args[i])];
      const ValueKind kind = value.initial.kind;
      const bool is_output = i >= num_inputs;
      const bool is_number = kind == ValueKind::kInt || kind == ValueKind::kBool;
      if (kind != ValueKind::kTensor && (is_output || !is_number)) {
        return bad("argument " + std::to_string(i) + " of delegate '" + delegate.id + "' is of kind " +
                   std::string(kind_name(kind)) + ", expected a tensor" + (is_output ? "" : " or an int"));
      }
      if (is_output && !is_dense(value.initial.tensor, identity_dim_order())) {
        return {Code::kUnsupported, "output " + std::to_string(i - num_inputs) + " of delegate '" + delegate.id +
                                        "' is planned with permuted dimensions; delegates write contiguous ones"};
      }
    }
    return Status::ok();
  }

  Status read_move(const et::MoveCall& move, Instruction& instruction) {
    if (!is_value(move.move_from())) return bad("a move from value " + std::to_string(move.move_from()));
    instruction.kind = Instruction::Kind::kMove;
    instruction.name = "move";
    instruction.index = move.move_from();
    instruction.target = move.move_to();
    const Value& from = method_.values_[static_cast<size_t>(move.move_from())].initial;
    const Value& to = method_.values_[static_cast<size_t>(move.move_to())].initial;
    const bool same =
        from.kind == to.kind && (from.kind != ValueKind::kTensor ||
                                 (from.tensor.dtype == to.tensor.dtype && from.tensor.rank == to.tensor.rank));
    const bool movable = from.kind <= ValueKind::kTensor;
    if (!same || !movable) return bad("a move between values of different or unmovable kinds");
    method_.moved_.push_back(move.move_to());
    return Status::ok();
  }

  Status read_jump(const et::JumpFalseCall& jump, int64_t first, int64_t count, Instruction& instruction) {
    const int32_t condition = jump.cond_value_index();
    if (!is_value(condition)) return bad("a jump on value " + std::to_string(condition));
    const Value& value = method_.values_[static_cast<size_t>(condition)].initial;
    const bool is_bool_tensor = value.kind == ValueKind::kTensor && value.tensor.dtype == DType::kBool;
    if (value.kind != ValueKind::kBool && !is_bool_tensor) {
      return bad("a jump on a value that is neither a bool nor a bool tensor");
    }
    if (jump.destination_instruction() < 0 || jump.destination_instruction() > count) {
      return bad("a jump to instruction " + std::to_string(jump.destination_instruction()) + " of " +
                 std::to_string(count));
    }
    instruction.kind = Instruction::Kind::kJumpFalse;
    instruction.name = "jump";
    instruction.index = condition;
    instruction.target = static_cast<int32_t>(first + jump.destination_instruction());
    return Status::ok();
  }

  const PteFile& file_;
  const et::ExecutionPlan& plan_;
  std::span<const std::shared_ptr<Delegate>> delegates_;
  const ThreadPool& pool_;
  Method& method_;
  std::vector<std::pair<std::string, BindOp>> operators_;
};

Result<std::unique_ptr<Method>> Method::load(const PteFile& file, const et::ExecutionPlan& plan,
                                             std::span<const std::shared_ptr<Delegate>> delegates,
                                             const ThreadPool& pool) {
  auto method = std::make_unique<Method>();
  if (plan.name() == nullptr) return Status(Code::kInvalidProgram, "a method has no name");
  method->name_ = plan.name()->str();
  Status status = read_values(file, plan, method->values_, method->arenas_);
  if (status.is_ok()) status = MethodLoader(file, plan, delegates, pool, *method).load();
  if (!status.is_ok()) return Status(status.code(), "method '" + method->name_ + "': " + status.message());
  return method;
}

}  // namespace flexpte
