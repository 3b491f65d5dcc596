#include "metal_delegate/dataflow.h"

#include <map>
#include <string>
#include <vector>

namespace flexpte::bound {
namespace {

constexpr int64_t kNever = -1;

bool same_expression(const Expression& a, const Expression& b) {
  if (a.nodes.size() != b.nodes.size()) return false;
  for (size_t i = 0; i < a.nodes.size(); ++i) {
    const ExprNode& x = a.nodes[i];
    const ExprNode& y = b.nodes[i];
    if (x.op != y.op || x.type != y.type || x.args != y.args || x.index != y.index || x.round_to != y.round_to ||
        x.value_int != y.value_int || x.value_float != y.value_float) {
      return false;
    }
  }
  return true;
}

class Dataflow {
 public:
  explicit Dataflow(BoundProgram& program) : program_(program) {
    last_write_.assign(program.storages.size(), kNever);
    overwritten_by_.assign(program.storages.size(), kNever);
    for (size_t i = 0; i < program.storages.size(); ++i) {
      if (program.storages[i].kind == StorageKind::kArena) arena_.push_back(i);
    }
    for (size_t i = 0; i < program.expressions.size(); ++i) {
      size_t first = 0;
      while (!same_expression(program.expressions[first], program.expressions[i])) {
        if (++first == i) break;
      }
      first_equal_expression_.push_back(static_cast<int32_t>(first));
    }
  }

  Status run() {
    program_.first_state_write = program_.instructions.size();
    for (size_t i = 0; i < program_.instructions.size(); ++i) {
      const Instruction& instruction = program_.instructions[i];
      for (size_t k = 0; k < instruction.operands.size(); ++k) {
        if (instruction.operands[k] >= 0 && !instruction.writes(k)) FLEXPTE_TRY(read(i, instruction.operands[k]));
      }
      for (size_t k = 0; k < instruction.operands.size(); ++k) {
        if (instruction.operands[k] >= 0 && instruction.writes(k)) FLEXPTE_TRY(write(i, instruction.operands[k]));
      }
      if (instruction.kind == OpKind::kFlexAttention) number_plan(i);
    }
    for (size_t i = 0; i < program_.outputs.size(); ++i) {
      const auto storage = static_cast<size_t>(program_.values[static_cast<size_t>(program_.outputs[i])].storage);
      if (!is_defined(storage)) {
        return {Code::kInvalidProgram, "output " + std::to_string(i) + " " + reason(storage)};
      }
    }
    return Status::ok();
  }

 private:
  size_t storage_of(int32_t value) const {
    return static_cast<size_t>(program_.values[static_cast<size_t>(value)].storage);
  }

  bool is_defined(size_t storage) const {
    const StorageKind kind = program_.storages[storage].kind;
    return (kind != StorageKind::kArena && kind != StorageKind::kOutput) || last_write_[storage] != kNever;
  }

  std::string reason(size_t storage) const {
    if (overwritten_by_[storage] == kNever) return "is never written before it is read";
    return "was overwritten by " + describe_instruction(program_, static_cast<size_t>(overwritten_by_[storage]));
  }

  Status wrong(size_t instruction, const std::string& message) const {
    return {Code::kInvalidProgram, describe_instruction(program_, instruction) + ": " + message};
  }

  Status read(size_t instruction, int32_t value) const {
    if (is_defined(storage_of(value))) return Status::ok();
    return wrong(instruction, "value " + std::to_string(value) + " " + reason(storage_of(value)));
  }

  Status write(size_t number, int32_t value) {
    const size_t storage = storage_of(value);
    const Storage& target = program_.storages[storage];
    const Instruction& instruction = program_.instructions[number];
    switch (target.kind) {
      case StorageKind::kInput:
        return wrong(number, "writes input " + std::to_string(target.index));
      case StorageKind::kConstant:
        return wrong(number, "writes constant " + std::to_string(target.index));
      case StorageKind::kState:
        if (instruction.kind != OpKind::kIndexCopy && instruction.kind != OpKind::kElementwise) {
          return wrong(number, "writes a state, which IndexCopy and Elementwise may only");
        }
        program_.first_state_write = std::min(program_.first_state_write, number);
        break;
      case StorageKind::kOutput:
        break;
      case StorageKind::kArena:
        for (const size_t other : arena_) {
          if (other == storage || !overlaps(target, program_.storages[other])) continue;
          FLEXPTE_TRY(check_own_operands(number, value, other));
          last_write_[other] = kNever;
          overwritten_by_[other] = static_cast<int64_t>(number);
        }
        break;
    }
    last_write_[storage] = static_cast<int64_t>(number);
    return Status::ok();
  }

  static bool overlaps(const Storage& a, const Storage& b) {
    return a.size_bytes > 0 && b.size_bytes > 0 && a.offset_bytes < b.offset_bytes + b.size_bytes &&
           b.offset_bytes < a.offset_bytes + a.size_bytes;
  }

  // An instruction may write over an operand of its own only elementwise, each element onto itself.
  Status check_own_operands(size_t number, int32_t out, size_t overwritten) const {
    const Instruction& instruction = program_.instructions[number];
    const Value& target = program_.values[static_cast<size_t>(out)];
    const size_t num_inputs = instruction.kind == OpKind::kElementwise
                                  ? static_cast<size_t>(std::get<ElementwiseParams>(instruction.params).num_inputs)
                                  : 0;
    for (size_t k = 0; k < instruction.operands.size(); ++k) {
      const int32_t operand = instruction.operands[k];
      if (operand < 0 || operand == out || storage_of(operand) != overwritten) continue;
      const Value& source = program_.values[static_cast<size_t>(operand)];
      const bool onto_itself =
          k >= operand::kFirstInput && k < operand::kFirstInput + num_inputs &&
          program_.storages[overwritten].offset_bytes == program_.storages[storage_of(out)].offset_bytes &&
          source.offset == target.offset && source.view.sizes == target.view.sizes &&
          source.view.strides == target.view.strides &&
          element_size_bytes(source.view.dtype) == element_size_bytes(target.view.dtype);
      if (!onto_itself) return wrong(number, "writes over its own operand, value " + std::to_string(operand));
    }
    return Status::ok();
  }

  // What decides which keys each query tile visits.
  using PlanKey = std::vector<int64_t>;

  void add_view(PlanKey& key, int32_t value) const {
    if (value < 0) {
      key.push_back(kNever);
      return;
    }
    const Value& v = program_.values[static_cast<size_t>(value)];
    key.insert(key.end(), {v.storage, last_write_[storage_of(value)], static_cast<int64_t>(v.view.dtype), v.offset});
    add_shape(key, value);
    key.insert(key.end(), v.view.strides.begin(), v.view.strides.end());
  }

  void add_shape(PlanKey& key, int32_t value) const {
    const TensorView& view = program_.values[static_cast<size_t>(value)].view;
    key.push_back(view.rank);
    key.insert(key.end(), view.sizes.begin(), view.sizes.end());
  }

  void number_plan(size_t number) {
    Instruction& instruction = program_.instructions[number];
    auto& params = std::get<FlexParams>(instruction.params);
    PlanKey key = {params.mask < 0 ? kNever : first_equal_expression_[static_cast<size_t>(params.mask)],
                   params.q_block_size, params.kv_block_size};
    for (const size_t operand : {operand::kQuery, operand::kKey, operand::kValue}) {
      add_shape(key, instruction.operands[operand]);
      key.push_back(
          static_cast<int64_t>(program_.values[static_cast<size_t>(instruction.operands[operand])].view.dtype));
    }
    for (size_t k = operand::kKvNumBlocks; k <= operand::kFullKvIndices; ++k) add_view(key, instruction.operands[k]);
    const size_t first_mask_capture = operand::kFirstCapture + static_cast<size_t>(params.num_score_captures);
    for (size_t k = first_mask_capture; k < instruction.operands.size(); ++k) add_view(key, instruction.operands[k]);
    key.push_back(kNever);
    key.insert(key.end(), instruction.scalars.begin() + params.num_score_scalars, instruction.scalars.end());
    params.plan = plans_.try_emplace(std::move(key), program_.num_plans).first->second;
    if (params.plan == program_.num_plans) ++program_.num_plans;
  }

  BoundProgram& program_;
  std::vector<int64_t> last_write_;      // by storage: instruction, or kNever
  std::vector<int64_t> overwritten_by_;  // by storage: instruction that took its bytes, or kNever
  std::vector<size_t> arena_;
  std::vector<int32_t> first_equal_expression_;
  std::map<PlanKey, int32_t> plans_;
};

}  // namespace

Status check_dataflow(BoundProgram& program) {
  return Dataflow(program).run();
}

}  // namespace flexpte::bound
