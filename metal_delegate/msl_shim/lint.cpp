#include "metal_delegate/msl_shim/lint.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace flexpte::msl_host {
namespace {

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

Status fault(std::string_view code, size_t offset, const std::string& what) {
  return {Code::kInvalidProgram, "kernel text, line " + std::to_string(line_at(code, offset)) + ": " + what};
}

struct Forbidden {
  std::string_view word;
  std::string_view why;
};
constexpr std::array kForbidden = {
    Forbidden{"double", "Metal has no double"},
    Forbidden{"new", "kernels cannot allocate"},
    Forbidden{"delete", "kernels cannot allocate"},
    Forbidden{"goto", "Metal has no goto"},
    Forbidden{"virtual", "Metal has no virtual functions"},
    Forbidden{"throw", "Metal has no exceptions"},
    Forbidden{"try", "Metal has no exceptions"},
    Forbidden{"catch", "Metal has no exceptions"},
    Forbidden{"dynamic_cast", "Metal has no run-time types"},
    Forbidden{"typeid", "Metal has no run-time types"},
    Forbidden{"thread_local", "Metal has no thread_local"},
    Forbidden{"std", "only the Metal standard library exists in kernels"},
    Forbidden{"asm", "Metal has no inline assembly"},
};

constexpr std::array<std::string_view, 26> kTypes = {"float",    "half",
                                                     "bfloat",   "int",
                                                     "uint",     "short",
                                                     "ushort",   "char",
                                                     "uchar",    "long",
                                                     "ulong",    "bool",
                                                     "size_t",   "int8_t",
                                                     "uint8_t",  "int16_t",
                                                     "uint16_t", "int32_t",
                                                     "void",     "int64_t",
                                                     "uint64_t", "uint32_t",
                                                     "unsigned", "T",
                                                     "U",        "simdgroup_float8x8"};

bool is_type(std::string_view word) {
  if (!word.empty() && word.back() >= '2' && word.back() <= '4') {
    const std::string_view scalar = word.substr(0, word.size() - 1);
    if (std::find(kTypes.begin(), kTypes.end(), scalar) != kTypes.end()) return true;
  }
  return std::find(kTypes.begin(), kTypes.end(), word) != kTypes.end();
}

bool has_word(std::string_view text, std::string_view word) {
  for (size_t at = text.find(word); at != std::string_view::npos; at = text.find(word, at + 1)) {
    const bool begins = at == 0 || !is_word(text[at - 1]);
    const bool ends = at + word.size() == text.size() || !is_word(text[at + word.size()]);
    if (begins && ends) return true;
  }
  return false;
}

// `at` is a * or & behind a type: whether the declaration up to it says where the object lies.
bool has_address_space(std::string_view code, size_t at) {
  size_t begin = at;
  int depth = 0;
  while (begin > 0) {
    const char c = code[begin - 1];
    if (c == '>') ++depth;
    if (c == '<') --depth;
    if (depth < 0) break;
    if (depth == 0 && (c == '(' || c == ',' || c == ';' || c == '{' || c == '}')) break;
    --begin;
  }
  const std::string_view declaration = code.substr(begin, at - begin);
  for (const std::string_view space : {"device", "constant", "threadgroup", "thread"}) {
    if (has_word(declaration, space)) return true;
  }
  return false;
}

Status check_pointers(std::string_view code) {
  for (size_t at = 0; at < code.size(); ++at) {
    if (code[at] != '*' && code[at] != '&') continue;
    if (at + 1 < code.size() && (code[at + 1] == '&' || code[at + 1] == '=')) {
      ++at;
      continue;
    }
    size_t end = at;
    while (end > 0 && std::isspace(static_cast<unsigned char>(code[end - 1])) != 0) --end;
    if (end == 0) continue;
    size_t begin = end;
    while (begin > 0 && is_word(code[begin - 1])) --begin;
    std::string_view word = code.substr(begin, end - begin);
    if (word == "const") {  // float const*
      size_t before = begin;
      while (before > 0 && std::isspace(static_cast<unsigned char>(code[before - 1])) != 0) --before;
      end = before;
      while (before > 0 && is_word(code[before - 1])) --before;
      word = code.substr(before, end - before);
    }
    if (!is_type(word)) continue;
    if (has_address_space(code, at)) continue;
    return fault(code, at,
                 "a pointer or reference to " + std::string(word) +
                     " without an address space: write device, constant, threadgroup or thread");
  }
  return Status::ok();
}

Status check_includes(std::string_view code) {
  for (size_t at = code.find('#'); at != std::string_view::npos; at = code.find('#', at + 1)) {
    size_t word = at + 1;
    while (word < code.size() && code[word] == ' ') ++word;
    if (code.substr(word, 7) != "include") continue;
    const std::string_view line = code.substr(at, code.find('\n', at) - at);
    if (line.find("<metal_") == std::string_view::npos) {
      return fault(code, at, "kernels include the Metal standard library only: <metal_stdlib>");
    }
  }
  return Status::ok();
}

}  // namespace

int line_at(std::string_view text, size_t offset) {
  const auto end = text.begin() + static_cast<std::ptrdiff_t>(std::min(offset, text.size()));
  return 1 + static_cast<int>(std::count(text.begin(), end, '\n'));
}

std::string without_comments(std::string_view source) {
  std::string code(source);
  enum class In { kCode, kLine, kBlock, kString } in = In::kCode;
  for (size_t i = 0; i < code.size(); ++i) {
    const char c = source[i];
    const char next = i + 1 < source.size() ? source[i + 1] : '\0';
    switch (in) {
      case In::kCode:
        if (c == '/' && next == '/') in = In::kLine;
        if (c == '/' && next == '*') in = In::kBlock;
        if (c == '"') {
          in = In::kString;
          continue;
        }
        if (in != In::kCode) code[i] = ' ';
        break;
      case In::kLine:
        if (c == '\n') {
          in = In::kCode;
        } else {
          code[i] = ' ';
        }
        break;
      case In::kBlock:
        if (c == '*' && next == '/') {
          code[i] = code[i + 1] = ' ';
          ++i;
          in = In::kCode;
        } else if (c != '\n') {
          code[i] = ' ';
        }
        break;
      case In::kString:
        if (c == '\\') {
          code[i] = ' ';
          if (i + 1 < code.size()) code[++i] = ' ';
        } else if (c == '"') {
          in = In::kCode;
        } else {
          code[i] = ' ';
        }
        break;
    }
  }
  return code;
}

Status lint_kernels(std::string_view code) {
  for (size_t at = 0; at < code.size();) {
    if (!is_word(code[at])) {
      ++at;
      continue;
    }
    size_t end = at;
    while (end < code.size() && is_word(code[end])) ++end;
    const std::string_view word = code.substr(at, end - at);
    for (const Forbidden& forbidden : kForbidden) {
      if (word == forbidden.word) {
        std::string what(word);
        what += ": ";
        what += forbidden.why;
        return fault(code, at, what);
      }
    }
    at = end;
  }
  FLEXPTE_TRY(check_includes(code));
  return check_pointers(code);
}

}  // namespace flexpte::msl_host
