#include "metal_delegate/msl_host/instrument.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
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
      node.is_kernels =
          node.is_file && line.find(std::string("filename: \"") + std::string(file)) != std::string_view::npos;
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

// The length of the type at the beginning of `text`: float, <4 x half>, [4 x { i32, ptr }], ptr addrspace(1).
size_t type_length(std::string_view text) {
  constexpr std::string_view kSpace = "ptr addrspace(";
  if (starts_with(text, kSpace)) return text.find(')') + 1;
  int depth = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '<' || c == '[' || c == '{' || c == '(') ++depth;
    if (c == '>' || c == ']' || c == '}' || c == ')') --depth;
    if (depth == 0 && (c == ' ' || c == ',')) return i;
    if (depth == 0 && (c == '>' || c == ']' || c == '}')) return i + 1;
  }
  return text.size();
}

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
  if (type == "double" || starts_with(type, "ptr")) return 8;
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

constexpr std::string_view kPointer = "ptr addrspace(";

std::string_view space_name(int space) {
  return space == 1 ? "device" : space == 2 ? "constant" : "threadgroup";
}

class Instrumenter {
 public:
  Instrumenter(std::string_view ir, std::string_view file, bool is_checked)
      : lines_(split(ir)), locations_(lines_, file), is_checked_(is_checked) {
    result_.reserve(ir.size() * 2);
  }

  Result<std::string> run() {
    bool is_function = false;
    for (const std::string_view line : lines_) {
      if (starts_with(line, "define ")) {
        is_function = true;
        is_ours_ = is_checked_ && line.find("msl_shim_") == std::string_view::npos;
        emit(line);
        begin_block();
      } else if (!is_function) {
        if (starts_with(line, "@")) program_constant(line);
        emit(line);
      } else if (line == "}") {
        is_function = false;
        emit(line);
      } else if (!line.empty() && line[0] != ' ') {  // a label
        emit(line);
        begin_block();
      } else {
        FLEXPTE_TRY(instruction(line));
      }
    }
    epilogue();
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

  // @table = internal addrspace(2) constant [16 x float] [...]
  void program_constant(std::string_view line) {
    const size_t space = line.find(" addrspace(2) ");
    const size_t equals = line.find(" = ");
    if (space == std::string_view::npos || equals > space) return;
    if (line.substr(0, space).find("external") != std::string_view::npos) return;
    std::string_view rest = line.substr(space + 14);
    for (const std::string_view word : {"constant ", "global "}) {
      if (starts_with(rest, word)) rest.remove_prefix(word.size());
    }
    const std::string name(line.substr(0, equals));
    const std::string type(rest.substr(0, type_length(rest)));
    constants_ += "{ ptr addrspace(2), ptr addrspace(2) } { ptr addrspace(2) " + name +
                  ", ptr addrspace(2) getelementptr (" + type + ", ptr addrspace(2) " + name + ", i64 1) }, ";
    ++num_constants_;
  }

  void epilogue() {
    result_ += "@msl_site = external hidden global i32\n";
    result_ += std::string("@msl_is_checked = hidden constant i32 ") + (is_checked_ ? "1" : "0") + "\n";
    result_ += "@msl_constants = hidden constant [" + std::to_string(num_constants_ + 1) +
               " x { ptr addrspace(2), ptr addrspace(2) }] [" + constants_ +
               "{ ptr addrspace(2), ptr addrspace(2) } zeroinitializer]\n";
    if (!is_checked_) return;
    result_ += "@msl_flops = external hidden global i64\n@msl_instructions = external hidden global i64\n";
    for (int space = 1; space <= 3; ++space) {
      for (const std::string_view what : {"load", "store"}) {
        if (space == 2 && what == "store") continue;
        const std::string pointer = std::string(kPointer) + std::to_string(space) + ")";
        result_ += "declare hidden " + pointer + " @msl_" + std::string(space_name(space)) + "_" + std::string(what) +
                   "(" + pointer + ", i64, i32, i32, i32)\n";
      }
    }
  }

  void add_to(std::string_view counter, unsigned n) {
    if (n == 0) return;
    const std::string name = "%msl.n" + std::to_string(num_names_++);
    const std::string global(counter);
    result_ += "  " + name + " = load i64, ptr " + global + "\n";
    result_ += "  " + name + ".new = add i64 " + name + ", " + std::to_string(n) + "\n";
    result_ += "  store i64 " + name + ".new, ptr " + global + "\n";
  }

  Status instruction(std::string_view line) {
    std::string text(line);
    constexpr std::string_view kCast = " = addrspacecast ptr addrspace(";
    if (line.find(kCast) != std::string_view::npos && line.find(" to ptr,") != std::string_view::npos) {
      return {Code::kInvalidProgram,
              "kernel text, line " + std::to_string(locations_.of(line)) + ": a cast between address spaces"};
    }
    if (is_ours_ && !is_ended_ && line.size() > 2 && line[2] != ' ' && line[2] != ';') {
      const std::string_view body = line.substr(2);
      for (const std::string_view end : {"br ", "ret ", "switch ", "unreachable"}) is_ended_ |= starts_with(body, end);
      if (line.find(" = phi ") == std::string_view::npos && line.find("@llvm.lifetime") == std::string_view::npos) {
        ++instructions_;
      }
      if (is_ended_) {
        add_to("@msl_flops", flops_);
        add_to("@msl_instructions", instructions_);
      } else {
        flops_ += flops_of(line);
        FLEXPTE_TRY(access(text));
      }
    }
    if (line.find("msl_shim_") != std::string_view::npos && line.find("call ") != std::string_view::npos) {
      result_ +=
          "  store i32 " + std::to_string((++num_sites_ << 16) | (locations_.of(line) & 0xffff)) + ", ptr @msl_site\n";
    }
    emit(text);
    return Status::ok();
  }

  // Puts a check before the instruction and its result in place of the pointer, whose operand is
  // text.substr(begin, length). `size` is a number or a value.
  Status check(std::string& text, std::string_view what, int space, size_t begin, size_t length,
               const std::string& size, int align) {
    const int line = locations_.of(text);
    if (space == 2 && what == "store") {
      return {Code::kInvalidProgram, "kernel text, line " + std::to_string(line) + ": a store to constant memory"};
    }
    const std::string operand = text.substr(begin, length);
    if (space == 2 && (operand[0] == '@' || starts_with(operand, "getelementptr"))) return Status::ok();
    const bool is_atomic = text.find(" atomic ") != std::string::npos || text.find("atomicrmw ") != std::string::npos ||
                           text.find("cmpxchg ") != std::string::npos;
    const std::string pointer = "%msl.p" + std::to_string(num_names_++);
    const std::string type = std::string(kPointer) + std::to_string(space) + ")";
    result_ += "  " + pointer + " = call " + type + " @msl_" + std::string(space_name(space)) + "_" +
               std::string(what) + "(" + type + " " + operand + ", i64 " + size + ", i32 " + std::to_string(align) +
               ", i32 " + std::to_string(line) + ", i32 " + (is_atomic ? "1" : "0") + ")\n";
    text.replace(begin, length, pointer);
    return Status::ok();
  }

  static size_t operand_length(std::string_view text, size_t begin) {
    int depth = 0;
    for (size_t i = begin; i < text.size(); ++i) {
      if (text[i] == '(') ++depth;
      if (text[i] == ')') --depth;
      if (depth < 0 || (depth == 0 && text[i] == ',')) return i - begin;
      if (depth == 0 && text[i] == ' ' && text.substr(begin, 13) != "getelementptr") return i - begin;
    }
    return text.size() - begin;
  }

  Status access(std::string& text) {
    const std::string_view line = text;
    if (line.find(kPointer) == std::string_view::npos) return Status::ok();
    if (line.find("@llvm.mem") != std::string_view::npos) return bulk_access(text);
    const size_t load = line.find(" = load ");
    const bool is_store = starts_with(line, "  store ");
    const bool is_atomic_update =
        line.find(" = atomicrmw ") != std::string_view::npos || line.find(" = cmpxchg ") != std::string_view::npos;
    if (load == std::string_view::npos && !is_store && !is_atomic_update) return Status::ok();
    const size_t align_at = line.rfind(", align ");
    const int align =
        align_at == std::string_view::npos ? 1 : number_after(line.substr(align_at), "align ").value_or(1);
    size_t body = is_store ? 8 : load != std::string_view::npos ? load + 8 : line.find(" = ") + 3;
    for (const std::string_view word : {"atomic ", "volatile "}) {
      if (starts_with(line.substr(body), word)) body += word.size();
    }
    size_t pointer = 0;
    std::string_view type;
    if (is_atomic_update) {
      pointer = line.find(kPointer);
    } else if (is_store) {
      type = line.substr(body, type_length(line.substr(body)));
      pointer = line.substr(0, align_at).rfind(", ptr");
      if (pointer == std::string_view::npos) return Status::ok();
      pointer += 2;
    } else {
      type = line.substr(body, type_length(line.substr(body)));
      pointer = body + type.size() + 2;
    }
    if (pointer == std::string_view::npos || !starts_with(line.substr(pointer), kPointer)) return Status::ok();
    const int space = std::atoi(std::string(line.substr(pointer + kPointer.size(), 2)).c_str());
    const size_t begin = line.find(") ", pointer) + 2;
    const size_t length = operand_length(line, begin);
    if (is_atomic_update) {
      const std::string_view rest = line.substr(begin + length + 2);
      type = rest.substr(0, type_length(rest));
    }
    const unsigned bytes = size_bytes(type);
    if (space < 1 || space > 3 || bytes == 0) return Status::ok();
    if (is_atomic_update) {
      std::string unchanged = text;  // both checks see the pointer
      FLEXPTE_TRY(check(unchanged, "load", space, begin, length, std::to_string(bytes), align));
    }
    const std::string_view what = is_store || is_atomic_update ? "store" : "load";
    return check(text, what, space, begin, length, std::to_string(bytes), align);
  }

  // @llvm.memcpy, memmove, memset
  Status bulk_access(std::string& text) {
    const bool is_set = text.find("@llvm.memset") != std::string::npos;
    struct Argument {
      size_t begin = 0, end = 0;
    };
    std::array<Argument, 3> arguments;
    size_t at = text.find('(', text.find("@llvm.mem")) + 1;
    for (Argument& argument : arguments) {
      argument.begin = at;
      int depth = 0;
      while (at < text.size() && (text[at] != ',' || depth > 0)) {
        if (text[at] == '(') ++depth;
        if (text[at] == ')') --depth;
        ++at;
      }
      argument.end = at;
      at += 2;
    }
    const auto last_word = [&text](const Argument& argument) { return text.rfind(' ', argument.end - 1) + 1; };
    const size_t size_at = last_word(arguments[2]);
    const std::string size = text.substr(size_at, arguments[2].end - size_at);
    for (size_t i = is_set ? 1 : 2; i-- > 0;) {  // the last first: positions before it stay
      const std::string argument = text.substr(arguments[i].begin, arguments[i].end - arguments[i].begin);
      const size_t pointer = argument.find(kPointer);
      if (pointer != 0) continue;
      const int space = std::atoi(argument.substr(kPointer.size(), 2).c_str());
      const size_t begin = last_word(arguments[i]);
      FLEXPTE_TRY(check(text, i == 0 ? "store" : "load", space, begin, arguments[i].end - begin, size,
                        number_after(argument, "align ").value_or(1)));
    }
    return Status::ok();
  }

  const std::vector<std::string_view> lines_;
  const Lines locations_;
  const bool is_checked_;
  std::string result_;
  std::string constants_;
  int num_constants_ = 0;
  bool is_ours_ = false;
  bool is_ended_ = false;
  unsigned flops_ = 0;
  unsigned instructions_ = 0;
  int num_names_ = 0;
  int num_sites_ = 0;
};

}  // namespace

Result<std::string> instrument_ir(std::string_view ir, std::string_view file, bool is_checked) {
  return Instrumenter(ir, file, is_checked).run();
}

}  // namespace flexpte::msl_host
