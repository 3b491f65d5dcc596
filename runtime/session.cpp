#include "runtime/session.h"

#include <algorithm>
#include <cstring>

#include "runtime/kernels/kernels.h"
#include "runtime/method_values.h"
#include "runtime/ops/op.h"

namespace flexpte {
namespace {

void copy_bytes(std::span<const std::byte> from, std::byte* to) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

std::string sizes_and_dtype(const TensorView& view) {
  return std::string(dtype_name(view.dtype)) + " " + shape_string(view);
}

// A jump is taken where its condition is false.
Result<bool> condition(const Value& value) {
  if (value.kind == ValueKind::kBool) return value.integer != 0;
  if (value.tensor.num_elements() != 1) {
    return invalid("the condition of a jump has sizes " + shape_string(value.tensor) + ", expected one element");
  }
  return *value.tensor.as<uint8_t>() != 0;
}

}  // namespace

Result<std::span<std::byte>> SessionStates::state(std::string_view name, size_t size_bytes,
                                                  std::span<const std::byte> initial) {
  if (!initial.empty() && initial.size() != size_bytes) {
    return Status(Code::kInvalidProgram, "the state '" + std::string(name) + "' has " + std::to_string(size_bytes) +
                                             " bytes, its initial value " + std::to_string(initial.size()));
  }
  const auto found = states_.find(name);
  if (found != states_.end()) {
    if (found->second.pages.bytes().size() != size_bytes) {
      return Status(Code::kInvalidProgram, "the state '" + std::string(name) + "' is used with " +
                                               std::to_string(found->second.pages.bytes().size()) + " and with " +
                                               std::to_string(size_bytes) + " bytes");
    }
    return found->second.pages.bytes();
  }
  FLEXPTE_ASSIGN(ZeroPages pages, ZeroPages::allocate(size_bytes, "the state '" + std::string(name) + "'"));
  copy_bytes(initial, pages.bytes().data());
  const auto bytes = pages.bytes();
  states_.emplace(name, State{std::move(pages), initial});
  return bytes;
}

Status SessionStates::reset() {
  for (auto& [name, state] : states_) {
    FLEXPTE_TRY(state.pages.clear());
    copy_bytes(state.initial, state.pages.bytes().data());
  }
  return Status::ok();
}

size_t SessionStates::size_bytes() const {
  size_t total = 0;
  for (const auto& [name, state] : states_) total += state.pages.bytes().size();
  return total;
}

Result<std::unique_ptr<Session>> Session::create(std::shared_ptr<const Program> program) {
  auto session = std::make_unique<Session>();
  session->program_ = std::move(program);
  session->activations_.reserve(session->program_->methods().size());
  for (const auto& method : session->program_->methods()) {
    if (Status status = session->activate(*method); !status.is_ok()) {
      return Status(status.code(), "method '" + method->name() + "': " + status.message());
    }
  }
  return session;
}

Status Session::activate(const Method& method) {
  Activation& activation = activations_.emplace_back();
  activation.method = &method;
  for (const size_t size_bytes : method.arena_sizes_bytes()) {
    FLEXPTE_ASSIGN(auto pages, ZeroPages::allocate(size_bytes, "activations"));
    activation.arenas.push_back(std::move(pages));
  }
  FLEXPTE_ASSIGN(activation.workspace, ZeroPages::allocate(method.workspace_bytes(), "scratch"));
  std::vector<std::byte*> states;
  for (const PlannedState& state : method.states()) {
    FLEXPTE_ASSIGN(const auto bytes, states_.state(state.name, state.size_bytes, state.initial));
    states.push_back(bytes.data());
  }
  for (const ValueInfo& info : method.values()) {
    Value& value = activation.values.emplace_back(info.initial);
    if (info.storage != Storage::kArena && info.storage != Storage::kState) continue;
    const auto index = static_cast<size_t>(info.index);
    std::byte* base = info.storage == Storage::kArena ? activation.arenas[index].bytes().data() : states[index];
    value.tensor.data = base == nullptr ? nullptr : base + info.offset_bytes;
  }
  for (const int32_t id : method.moved()) activation.moved.push_back(activation.values[static_cast<size_t>(id)]);
  for (const MethodDelegate& delegate : method.delegates()) {
    FLEXPTE_ASSIGN(auto instance, delegate.loaded->instantiate(states_));
    activation.delegates.push_back(std::move(instance));
  }
  for (const Instruction& instruction : method.instructions()) {
    activation.delegate_args.emplace_back(instruction.args.size());
  }
  const auto is_delegate = [](const Instruction& instruction) {
    return instruction.kind == Instruction::Kind::kDelegate;
  };
  const auto instructions = method.instructions();
  const bool only_delegates = std::all_of(instructions.begin(), instructions.end(), is_delegate);
  const auto outputs = method.outputs();
  for (const int32_t id : method.inputs()) {
    const bool is_output = std::find(outputs.begin(), outputs.end(), id) != outputs.end();
    activation.borrows_input.push_back(only_delegates && !is_output);
  }
  return set_initial_values(activation);
}

Status Session::set_initial_values(Activation& activation) {
  const auto infos = activation.method->values();
  for (size_t i = 0; i < infos.size(); ++i) {
    if (infos[i].storage == Storage::kArena) {
      copy_bytes(infos[i].initial_data, activation.values[i].tensor.as<std::byte>());
    }
  }
  return Status::ok();
}

std::vector<std::string> Session::counters() const {
  std::vector<std::string> result;
  for (const Activation& activation : activations_) {
    for (const std::unique_ptr<DelegateInstance>& delegate : activation.delegates) {
      if (std::string counted = delegate->counters(); !counted.empty()) result.push_back(std::move(counted));
    }
  }
  return result;
}

Status Session::reset() {
  FLEXPTE_TRY(states_.reset());
  for (Activation& activation : activations_) {
    for (ZeroPages& arena : activation.arenas) FLEXPTE_TRY(arena.clear());
    FLEXPTE_TRY(set_initial_values(activation));
  }
  return Status::ok();
}

const Value& Session::output(size_t method, size_t index) const {
  const Activation& activation = activations_[method];
  return activation.values[static_cast<size_t>(activation.method->outputs()[index])];
}

Status Session::set_input(const Activation& activation, size_t number, const Value& input, const ThreadPool& pool) {
  const Method& method = *activation.method;
  const int32_t id = method.inputs()[number];
  const Value& declared = method.values()[static_cast<size_t>(id)].initial;
  const auto mismatch = [&](const std::string& expected, const std::string& came) {
    return invalid("input " + std::to_string(number) + " of '" + method.name() + "' is " + came + ", expected " +
                   expected);
  };
  Value& value = const_cast<Value&>(activation.values[static_cast<size_t>(id)]);
  if (declared.kind != ValueKind::kTensor) {
    if (input.kind != declared.kind) {
      return mismatch(std::string(kind_name(declared.kind)), std::string(kind_name(input.kind)));
    }
    value.integer = input.integer;
    value.real = input.real;
    return Status::ok();
  }
  const std::string expected_text = (declared.dynamic ? "at most " : "") + sizes_and_dtype(declared.tensor);
  if (input.kind != ValueKind::kTensor) return mismatch(expected_text, std::string(kind_name(input.kind)));
  const TensorView& from = input.tensor;
  bool fits = from.dtype == declared.tensor.dtype && from.rank == declared.tensor.rank;
  for (int32_t d = 0; fits && d < from.rank; ++d) {
    fits = declared.dynamic ? from.size(d) <= declared.tensor.size(d) : from.size(d) == declared.tensor.size(d);
  }
  if (!fits) return mismatch(expected_text, sizes_and_dtype(from));
  const Frame frame{const_cast<Activation&>(activation).values, {}, pool};
  FLEXPTE_TRY(frame.resize(id, sizes_of(from)));
  if (activation.borrows_input[number]) {
    value.tensor = from;
  } else if (from.num_elements() > 0) {
    copy(from, value.tensor, pool);
  }
  return Status::ok();
}

Status Session::run_delegate(Activation& activation, const Instruction& instruction,
                             std::vector<DelegateArgument>& args) {
  const auto number = static_cast<size_t>(instruction.index);
  const size_t num_inputs = activation.method->delegates()[number].loaded->num_inputs();
  for (size_t i = 0; i < args.size(); ++i) {
    const Value& value = activation.values[static_cast<size_t>(instruction.args[i])];
    const bool is_tensor = value.kind == ValueKind::kTensor;
    args[i].kind = is_tensor ? DelegateArgument::Kind::kTensor : DelegateArgument::Kind::kInt;
    args[i].tensor = value.tensor;
    args[i].integer = value.integer;
    args[i].capacity_bytes = value.capacity_bytes;
    if (i >= num_inputs && !value.writable) return {Code::kInvalidProgram, "an output is a constant"};
  }
  const std::span<DelegateArgument> all(args);
  FLEXPTE_TRY(activation.delegates[number]->execute(all.first(num_inputs), all.subspan(num_inputs)));
  for (size_t i = num_inputs; i < args.size(); ++i) {
    Value& value = activation.values[static_cast<size_t>(instruction.args[i])];
    const TensorView& out = args[i].tensor;
    const auto size_bytes = static_cast<size_t>(out.num_elements() * element_size_bytes(out.dtype));
    if (out.rank != value.tensor.rank || out.dtype != value.tensor.dtype || size_bytes > value.capacity_bytes ||
        !out.is_contiguous() || out.data != value.tensor.data) {
      return {Code::kInternal, "output " + std::to_string(i - num_inputs) + " came back as " + sizes_and_dtype(out) +
                                   ", planned as " + sizes_and_dtype(value.tensor)};
    }
    value.tensor = out;
  }
  return Status::ok();
}

Status Session::run(size_t method_index, std::span<const Value> inputs) {
  Activation& activation = activations_[method_index];
  const Method& method = *activation.method;
  if (inputs.size() != method.inputs().size()) {
    return invalid("'" + method.name() + "' takes " + std::to_string(method.inputs().size()) + " inputs, got " +
                   std::to_string(inputs.size()));
  }
  for (size_t i = 0; i < activation.moved.size(); ++i) {
    activation.values[static_cast<size_t>(method.moved()[i])] = activation.moved[i];
  }
  const ThreadPool& pool = program_->pool();
  for (size_t i = 0; i < inputs.size(); ++i) FLEXPTE_TRY(set_input(activation, i, inputs[i], pool));

  const Frame frame{activation.values, activation.workspace.bytes(), pool};
  const auto instructions = method.instructions();
  for (size_t pc = 0; pc < instructions.size();) {
    const Instruction& instruction = instructions[pc];
    size_t next = pc + 1;
    Status status;
    switch (instruction.kind) {
      case Instruction::Kind::kKernel:
        status = instruction.step(frame);
        break;
      case Instruction::Kind::kDelegate:
        status = run_delegate(activation, instruction, activation.delegate_args[pc]);
        break;
      case Instruction::Kind::kMove:
        frame[instruction.target] = frame[instruction.index];
        break;
      case Instruction::Kind::kJumpFalse: {
        const auto taken = condition(frame[instruction.index]);
        status = taken.status();
        if (taken.is_ok() && !*taken) next = static_cast<size_t>(instruction.target);
        break;
      }
      case Instruction::Kind::kNothing:
        break;
    }
    if (!status.is_ok()) {
      return {status.code(), "'" + method.name() + "', instruction " + std::to_string(pc) + " (" + instruction.name +
                                 "): " + status.message()};
    }
    pc = next;
  }
  return Status::ok();
}

}  // namespace flexpte
