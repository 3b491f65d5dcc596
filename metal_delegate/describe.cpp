#include "metal_delegate/describe.h"

#include <cstdio>

namespace flexpte::bound {
namespace {

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      result += escape;
    } else {
      result += c;
    }
  }
  return result + "\"";
}

std::string field(std::string_view name, const std::string& json) {
  return quoted(name) + ": " + json;
}

const char* boolean(bool value) {
  return value ? "true" : "false";
}

std::string decimal(float value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(value));
  return text;
}

std::string attention(const BoundProgram& program, const Instruction& instruction) {
  const auto& params = std::get<FlexParams>(instruction.params);
  const auto shape = [&](size_t which) { return shape_string(program.upper_bound(instruction.operands[which])); };
  const TensorView query = program.upper_bound(instruction.operands[operand::kQuery]);
  return std::string("{") + field("name", quoted(instruction.name)) + ", " +
         field("dtype", quoted(dtype_name(query.dtype))) + ", " + field("query", shape(operand::kQuery)) + ", " +
         field("key", shape(operand::kKey)) + ", " + field("value", shape(operand::kValue)) + ", " +
         field("scale", decimal(params.scale)) + ", " + field("score", boolean(params.score >= 0)) + ", " +
         field("mask", boolean(params.mask >= 0)) + ", " +
         field("block_lists", boolean(instruction.operands[operand::kKvNumBlocks] >= 0)) + ", " +
         field("plan", std::to_string(params.plan)) + "}";
}

}  // namespace

std::string describe_program(const BoundProgram& program, std::string_view device) {
  std::array<int64_t, kNumOpKinds> counts{};
  std::string attentions;
  for (const Instruction& instruction : program.instructions) {
    ++counts[static_cast<size_t>(instruction.kind)];
    if (instruction.kind != OpKind::kFlexAttention) continue;
    attentions += (attentions.empty() ? "" : ", ") + attention(program, instruction);
  }
  std::string instructions;
  for (size_t kind = 0; kind < counts.size(); ++kind) {
    if (counts[kind] == 0) continue;
    instructions += (instructions.empty() ? "" : ", ") +
                    field(op_kind_name(static_cast<OpKind>(kind)), std::to_string(counts[kind]));
  }
  size_t constants_bytes = 0;
  for (const ConstantData& constant : program.constants) constants_bytes += constant.bytes.size();
  std::string states;
  for (const State& state : program.states) {
    states += (states.empty() ? "" : ", ");
    states += std::string("{") + field("name", quoted(state.name)) + ", " +
              field("dtype", quoted(dtype_name(state.dtype))) + ", " + field("shape", shape_string(state.shape)) +
              ", " + field("layout", quoted("contiguous")) + ", " +
              field("size_bytes", std::to_string(state.size_bytes)) + "}";
  }
  return std::string("{") + field("version", std::to_string(program.version)) + ", " +
         field("exporter", quoted(program.exporter)) + ", " + field("device", quoted(device)) + ", " +
         field("instructions", std::string("{") + instructions + "}") + ", " +
         field("constants_bytes", std::to_string(constants_bytes)) + ", " +
         field("arena_bytes", std::to_string(program.arena_size_bytes)) + ", " +
         field("states", std::string("[") + states + "]") + ", " +
         field("attentions", std::string("[") + attentions + "]") + "}";
}

}  // namespace flexpte::bound
