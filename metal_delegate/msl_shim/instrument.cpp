#include "metal_delegate/msl_shim/instrument.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <unordered_map>
#include <vector>

namespace flexpte::msl_host {
namespace {

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

std::optional<int> number_after(std::string_view text, std::string_view key) {
  const size_t at = text.find(key);
  if (at == std::string_view::npos) return std::nullopt;
  return std::atoi(std::string(text.substr(at + key.size(), 12)).c_str());
}

// Lines of the kernel text by debug location, inlined code at the innermost line of the kernel text.
class Lines {
 public:
  Lines(const std::vector<std::string_view>& lines, std::string_view file) {
    for (const std::string_view line : lines) {
      if (line.empty() || line[0] != '!') continue;
      const size_t equals = line.find(" = ");
      if (equals == std::string_view::npos) continue;
      const int number = std::atoi(std::string(line.substr(1, equals - 1)).c_str());
      Node node;
      node.is_file = line.find("!DIFile(") != std::string_view::npos;
      node.is_kernels = node.is_file && line.find(std::string(file) + "\"") != std::string_view::npos;
      node.line = number_after(line, "line: ").value_or(0);
      node.scope = number_after(line, "scope: !").value_or(-1);
      node.file = number_after(line, "file: !").value_or(-1);
      node.inlined_at = number_after(line, "inlinedAt: !").value_or(-1);
      nodes_[number] = node;
    }
  }

  int of(std::string_view instruction) const {
    int at = number_after(instruction, "!dbg !").value_or(-1);
    int last = 0;
    for (int hops = 0; at >= 0 && hops < 64; ++hops) {
      const auto found = nodes_.find(at);
      if (found == nodes_.end()) break;
      last = found->second.line;
      if (is_kernels(found->second.scope)) return last;
      at = found->second.inlined_at;
    }
    return last;
  }

 private:
  struct Node {
    int line = 0, scope = -1, file = -1, inlined_at = -1;
    bool is_file = false, is_kernels = false;
  };

  bool is_kernels(int scope) const {
    for (int hops = 0; scope >= 0 && hops < 64; ++hops) {
      const auto found = nodes_.find(scope);
      if (found == nodes_.end()) return false;
      if (found->second.is_file) return found->second.is_kernels;
      scope = found->second.file >= 0 ? found->second.file : found->second.scope;
    }
    return false;
  }

  std::unordered_map<int, Node> nodes_;
};

// Bytes of a type such as float, <4 x half>, i64; 0 for others.
unsigned size_bytes(std::string_view type) {
  if (starts_with(type, "<")) {
    const size_t x = type.find(" x ");
    if (x == std::string_view::npos) return 0;
    const auto count = static_cast<unsigned>(std::atoi(std::string(type.substr(1, x - 1)).c_str()));
    return count * size_bytes(type.substr(x + 3, type.find('>') - x - 3));
  }
  if (type == "float") return 4;
  if (type == "half" || type == "bfloat") return 2;
  if (type == "double" || type == "ptr") return 8;
  if (starts_with(type, "i")) {
    const int bits = std::atoi(std::string(type.substr(1)).c_str());
    return static_cast<unsigned>((bits + 7) / 8);
  }
  return 0;
}

unsigned elements_of(std::string_view instruction) {
  const size_t open = instruction.find('<');
  const size_t x = instruction.find(" x ", open == std::string_view::npos ? 0 : open);
  if (open == std::string_view::npos || x == std::string_view::npos) return 1;
  const int count = std::atoi(std::string(instruction.substr(open + 1, x - open - 1)).c_str());
  return count > 0 ? static_cast<unsigned>(count) : 1;
}

// Floating-point operations of one instruction: a fused multiply-add is two.
unsigned flops_of(std::string_view line) {
  const size_t equals = line.find(" = ");
  if (equals == std::string_view::npos) return 0;
  std::string_view op = line.substr(equals + 3);
  if (starts_with(op, "tail ")) op.remove_prefix(5);
  for (const std::string_view name : {"fadd ", "fsub ", "fmul ", "fdiv ", "frem "}) {
    if (starts_with(op, name)) return elements_of(op);
  }
  if (!starts_with(op, "call ")) return 0;
  if (op.find("@llvm.fma.") != std::string_view::npos || op.find("@llvm.fmuladd.") != std::string_view::npos) {
    return 2 * elements_of(op);
  }
  constexpr std::array<std::string_view, 14> kFunctions = {
      "@llvm.exp",    "@llvm.log", "@llvm.sqrt", "@llvm.pow", "@llvm.sin", "@llvm.cos", "@llvm.maxnum",
      "@llvm.minnum", "@llvm.tan", "@expf",      "@logf",     "@tanhf",    "@powf",     "@fmodf"};
  for (const std::string_view name : kFunctions) {
    if (op.find(name) != std::string_view::npos) return elements_of(op);
  }
  return 0;
}

class Instrumenter {
 public:
  Instrumenter(std::string_view ir, std::string_view file, bool is_checked)
      : lines_(split(ir)), locations_(lines_, file), is_checked_(is_checked) {
    result_.reserve(ir.size() * 2);
  }

  std::string run() {
    bool is_function = false;
    for (const std::string_view line : lines_) {
      if (starts_with(line, "define ")) {
        is_function = true;
        is_ours_ = is_checked_ && line.find("msl_shim_") == std::string_view::npos;
        emit(line);
        begin_block();
        continue;
      }
      if (!is_function) {
        emit(line);
        continue;
      }
      if (line == "}") {
        is_function = false;
        emit(line);
        continue;
      }
      if (!line.empty() && line[0] != ' ') {  // a label
        emit(line);
        begin_block();
        continue;
      }
      instruction(line);
    }
    result_ += "@msl_line = external global i32\n";
    if (is_checked_) {
      for (const std::string_view name :
           {"device_load", "device_store", "constant_load", "threadgroup_load", "threadgroup_store"}) {
        result_ += "declare void @msl_" + std::string(name) + "(ptr, i32, i32, i32)\n";
      }
      result_ += "declare void @msl_block(i32, i32)\n";
    }
    return std::move(result_);
  }

 private:
  static std::vector<std::string_view> split(std::string_view text) {
    std::vector<std::string_view> lines;
    while (!text.empty()) {
      const size_t end = std::min(text.find('\n'), text.size());
      lines.push_back(text.substr(0, end));
      text.remove_prefix(std::min(end + 1, text.size()));
    }
    return lines;
  }

  void emit(std::string_view line) {
    result_ += line;
    result_ += '\n';
  }

  void begin_block() {
    flops_ = 0;
    instructions_ = 0;
    is_ended_ = false;
  }

  void instruction(std::string_view line) {
    if (is_ours_ && !is_ended_ && line.size() > 2 && line[2] != ' ' && line[2] != ';') {
      ++instructions_;
      flops_ += flops_of(line);
      const std::string_view body = line.substr(2);
      for (const std::string_view end : {"br ", "ret ", "switch ", "unreachable"}) {
        if (!starts_with(body, end)) continue;
        is_ended_ = true;
        result_ +=
            "  call void @msl_block(i32 " + std::to_string(flops_) + ", i32 " + std::to_string(instructions_) + ")\n";
        break;
      }
      if (!is_ended_) access(line);
    }
    if (line.find("@_Z") != std::string_view::npos && line.find("msl_shim_") != std::string_view::npos &&
        line.find("call ") != std::string_view::npos) {
      result_ += "  store i32 " + std::to_string(locations_.of(line)) + ", ptr @msl_line\n";
    }
    emit(line);
  }

  static std::string_view space_name(int space) {
    return space == 1 ? "device" : space == 2 ? "constant" : space == 3 ? "threadgroup" : "";
  }

  void check(std::string_view what, std::string_view operand, int space, unsigned bytes, int align,
             std::string_view line) {
    if (space < 1 || space > 3 || bytes == 0) return;
    if (space == 2 && what == "store") return;
    const std::string pointer = "%msl.at." + std::to_string(num_checks_++);
    result_ += "  " + pointer + " = addrspacecast ptr addrspace(" + std::to_string(space) + ") " +
               std::string(operand) + " to ptr\n";
    result_ += "  call void @msl_" + std::string(space_name(space)) + "_" + std::string(what) + "(ptr " + pointer +
               ", i32 " + std::to_string(bytes) + ", i32 " + std::to_string(align) + ", i32 " +
               std::to_string(locations_.of(line)) + ")\n";
  }

  void access(std::string_view line) {
    constexpr std::string_view kPointer = "ptr addrspace(";
    const size_t load = line.find(" = load ");
    const bool is_store = starts_with(line, "  store ");
    if (load != std::string_view::npos || is_store) {
      std::string_view body = is_store ? line.substr(8) : line.substr(load + 8);
      for (const std::string_view skipped : {"atomic ", "volatile "}) {
        if (starts_with(body, skipped)) body.remove_prefix(skipped.size());
      }
      const size_t align_at = body.rfind(", align ");
      const std::string_view head = body.substr(0, std::min(align_at, body.size()));
      const std::string separator = ", " + std::string(kPointer);
      const size_t pointer = is_store ? head.rfind(separator) : head.find(separator);
      if (pointer == std::string_view::npos) return;
      const std::string_view type = is_store
                                        ? head.substr(0, starts_with(head, "<") ? head.find('>') + 1 : head.find(' '))
                                        : head.substr(0, pointer);
      const size_t number = pointer + separator.size();
      const int space = std::atoi(std::string(head.substr(number, 2)).c_str());
      const std::string_view operand = head.substr(head.find(") ", number) + 2);
      const int align =
          align_at == std::string_view::npos ? 1 : std::atoi(std::string(body.substr(align_at + 8, 6)).c_str());
      check(is_store ? "store" : "load", operand, space, size_bytes(type), align, line);
      return;
    }
    const bool is_copy =
        line.find("@llvm.memcpy.") != std::string_view::npos || line.find("@llvm.memmove.") != std::string_view::npos;
    if (!is_copy && line.find("@llvm.memset.") == std::string_view::npos) return;
    const size_t open = line.find('(', line.find("@llvm.mem"));
    std::string_view arguments = line.substr(open + 1);
    std::array<std::string_view, 3> parts{};
    for (std::string_view& part : parts) {
      int depth = 0;
      size_t end = 0;
      while (end < arguments.size() && (arguments[end] != ',' || depth > 0)) {
        if (arguments[end] == '(') ++depth;
        if (arguments[end] == ')') --depth;
        ++end;
      }
      part = arguments.substr(0, end);
      arguments.remove_prefix(std::min(end + 2, arguments.size()));
    }
    const auto bytes = static_cast<unsigned>(number_after(parts[2], "i64 ").value_or(0));
    for (size_t i = 0; i < (is_copy ? 2u : 1u); ++i) {
      const size_t at = parts[i].find(kPointer);
      if (at == std::string_view::npos) continue;
      const int space = std::atoi(std::string(parts[i].substr(at + kPointer.size(), 2)).c_str());
      const std::string_view operand = parts[i].substr(parts[i].rfind(' ') + 1);
      check(i == 0 ? "store" : "load", operand, space, bytes, number_after(parts[i], "align ").value_or(1), line);
    }
  }

  const std::vector<std::string_view> lines_;
  const Lines locations_;
  const bool is_checked_;
  std::string result_;
  bool is_ours_ = false;
  bool is_ended_ = false;
  unsigned flops_ = 0;
  unsigned instructions_ = 0;
  int num_checks_ = 0;
};

}  // namespace

std::string instrument_ir(std::string_view ir, std::string_view file, bool is_checked) {
  return Instrumenter(ir, file, is_checked).run();
}

}  // namespace flexpte::msl_host
