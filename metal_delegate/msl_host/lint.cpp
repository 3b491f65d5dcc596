#include "metal_delegate/msl_host/lint.h"

#include <array>
#include <vector>

namespace flexpte::msl_host {
namespace {

using Types = std::set<std::string, std::less<>>;

struct Forbidden {
  std::string_view word;
  std::string_view why;
};
constexpr std::array kForbidden = {
    Forbidden{"double", "Metal has no double"},
    Forbidden{"new", "kernels cannot allocate"},
    Forbidden{"goto", "Metal has no goto"},
    Forbidden{"virtual", "Metal has no virtual functions"},
    Forbidden{"throw", "Metal has no exceptions"},
    Forbidden{"try", "Metal has no exceptions"},
    Forbidden{"catch", "Metal has no exceptions"},
    Forbidden{"dynamic_cast", "Metal has no run-time types"},
    Forbidden{"typeid", "Metal has no run-time types"},
    Forbidden{"thread_local", "Metal has no thread_local"},
    Forbidden{"asm", "Metal has no inline assembly"},
    Forbidden{"__asm__", "Metal has no inline assembly"},
};

constexpr std::array<std::string_view, 4> kSpaces = {"device", "constant", "threadgroup", "thread"};

bool is_space(const Token& token) {
  for (const std::string_view space : kSpaces) {
    if (token.is(space)) return true;
  }
  return false;
}

class Linter {
 public:
  explicit Linter(const Tokens& tokens) : tokens_(tokens), types_(declared_types(tokens)) {}

  Status run() {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const Token& token = peek(i);
      if (token.is("{")) scopes_.push_back(is_function_scope(i));
      if (token.is("}") && !scopes_.empty()) scopes_.pop_back();
      if (token.is_word()) FLEXPTE_TRY(check_word(i));
      if (token.is("*") || token.is("&")) FLEXPTE_TRY(check_pointer(i));
      if (token.is("[")) FLEXPTE_TRY(check_lambda(i));
    }
    return Status::ok();
  }

 private:
  // Behind the end there is a token without text.
  const Token& peek(size_t i) const {
    static const Token kNone;
    return i < tokens_.size() ? tokens_[i] : kNone;
  }
  bool at(size_t i, std::string_view text) const { return peek(i).is(text); }

  Status check_word(size_t i) const {
    const Token& token = peek(i);
    for (const Forbidden& forbidden : kForbidden) {
      if (!token.is(forbidden.word)) continue;
      std::string what = token.text;
      what += ": ";
      what += forbidden.why;
      return kernel_text_error(token.line, what);
    }
    if (token.is("std") && at(i + 1, ":") && at(i + 2, ":")) {
      return kernel_text_error(token.line, "std::: only the Metal standard library exists in kernels");
    }
    if (token.is("delete") && !(i > 0 && at(i - 1, "="))) {
      return kernel_text_error(token.line, "delete: kernels cannot allocate");
    }
    if (token.is("static") && !scopes_.empty() && scopes_.back()) {
      return kernel_text_error(token.line, "static: Metal has no static variables in functions");
    }
    return Status::ok();
  }

  // Whether the brace at `open` begins code; of structs, namespaces and enumerations it does not.
  bool is_function_scope(size_t open) const {
    for (size_t i = open; i-- > 0;) {
      const Token& token = peek(i);
      if (token.is(";") || token.is("}") || token.is("{") || token.is(")")) break;
      for (const std::string_view word : {"struct", "class", "union", "enum", "namespace"}) {
        if (token.is(word)) return false;
      }
      if (token.is(">")) {  // of template <class T> struct
        const size_t angle = opening_angle(tokens_, i);
        if (angle != std::string::npos) i = angle;
      }
    }
    return true;
  }

  Status check_lambda(size_t i) const {
    if (i == 0) return Status::ok();
    const Token& before = peek(i - 1);
    const bool is_expression = before.is("=") || before.is("(") || before.is(",") || before.is("return");
    const bool is_capture = at(i + 1, "]") || at(i + 1, "&") || at(i + 1, "=");
    if (is_expression && is_capture) return kernel_text_error(peek(i).line, "Metal has no lambdas");
    return Status::ok();
  }

  // The index of the type's first token where one ends at `end`, or npos.
  size_t type_ending_at(size_t end) const {
    size_t i = end;
    while (i > 0 && (peek(i).is("const") || peek(i).is("volatile"))) --i;
    if (is_space(peek(i))) return i;
    if (peek(i).is(">")) {
      const size_t angle = opening_angle(tokens_, i);
      if (angle == std::string::npos || angle == 0) return std::string::npos;
      i = angle - 1;
    }
    const Token& token = peek(i);
    if (!token.is_word()) return std::string::npos;
    // A member of a type: typename T::element, T::element.
    if (i > 3 && at(i - 1, ":") && at(i - 2, ":")) {
      for (size_t back = i - 3; back > 0; --back) {
        if (at(back, "typename")) return back;
        if (!peek(back).is_word() && !at(back, ":") && !at(back, "<") && !at(back, ">") && !at(back, ",")) break;
      }
    }
    const bool is_type = is_scalar_type(token.text) || is_vector_type(token.text) || token.is("auto") ||
                         token.is("vec") || token.is("simdgroup_matrix") || types_.count(token.text) != 0 ||
                         token.text.rfind("simdgroup_", 0) == 0 || token.text.rfind("packed_", 0) == 0;
    return is_type ? i : std::string::npos;
  }

  Status check_pointer(size_t i) const {
    if (i == 0 || i + 1 >= tokens_.size()) return Status::ok();
    size_t before = i - 1;
    if (peek(i).is("&") && at(i - 1, "&")) return Status::ok();  // the second one of &&
    if (peek(before).is("(")) {                                  // float (*f)(int), float (&tile)[32]
      const bool is_declarator = before > 0 && peek(i + 1).is_word() && at(i + 2, ")");
      if (!is_declarator || (before > 0 && type_ending_at(before - 1) == std::string::npos)) return Status::ok();
      if (at(i + 3, "(")) return kernel_text_error(peek(i).line, "Metal has no function pointers");
      if (!at(i + 3, "[")) return Status::ok();
      --before;
    }
    const size_t type = type_ending_at(before);
    if (type == std::string::npos) return Status::ok();
    for (size_t k = before + 1; k-- > 0;) {
      const Token& token = peek(k);
      if (is_space(token)) return Status::ok();
      if (token.is(">")) {
        const size_t angle = opening_angle(tokens_, k);
        if (angle == std::string::npos) break;
        k = angle;
        continue;
      }
      if (!token.is_word() && !token.is(":") && !token.is("*") && !token.is("&")) break;
    }
    return kernel_text_error(peek(i).line, "a pointer or reference to " + peek(type).text +
                                               " without an address space: write device, constant, threadgroup "
                                               "or thread");
  }

  const Tokens& tokens_;
  const Types types_;
  std::vector<bool> scopes_;  // of the braces that are open: code?
};

}  // namespace

Status kernel_text_error(int line, const std::string& what) {
  return {Code::kInvalidProgram, "kernel text, line " + std::to_string(line) + ": " + what};
}

Types declared_types(const Tokens& tokens) {
  Types types;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    const Token& next = tokens[i + 1];
    for (const std::string_view word : {"struct", "class", "union", "enum", "typename"}) {
      if (tokens[i].is(word) && next.is_word()) types.insert(next.text);
    }
    if (tokens[i].is("using") && next.is_word() && i + 2 < tokens.size() && tokens[i + 2].is("=")) {
      types.insert(next.text);
    }
    if (tokens[i].is("typedef")) {
      size_t end = i;
      while (end + 1 < tokens.size() && !tokens[end + 1].is(";")) ++end;
      if (tokens[end].is_word()) types.insert(tokens[end].text);
    }
  }
  return types;
}

Status lint_tokens(const Tokens& tokens) {
  return Linter(tokens).run();
}

Status lint_kernel_text(std::string_view source) {
  return lint_tokens(tokenize(source));
}

}  // namespace flexpte::msl_host
