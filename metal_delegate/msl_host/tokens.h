// The tokens of kernel text, with the lines they come from.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace flexpte::msl_host {

// The name that kernel text has for the compiler.
inline constexpr std::string_view kKernelFile = "kernels.metal";

struct Token {
  enum class Kind { kWord, kNumber, kString, kPunctuation, kPragma };
  Kind kind = Kind::kPunctuation;  // one character each
  std::string text;
  int line = 0;
  bool has_space = false;  // before it

  bool is(std::string_view other) const { return text == other; }
  bool is_word() const { return kind == Kind::kWord; }
};
using Tokens = std::vector<Token>;

// Text as it is or preprocessed: comments are dropped, line markers (# 12 "file") are followed, text of other files
// is left out. Directives other than #pragma are dropped.
Tokens tokenize(std::string_view text);

// The index of the bracket that closes the one at `open`, or tokens.size().
size_t closing(const Tokens& tokens, size_t open);

// The index of the < that begins the template arguments that end at `close`, or npos.
size_t opening_angle(const Tokens& tokens, size_t close);

bool is_scalar_type(std::string_view word);
bool is_vector_type(std::string_view word);  // float4, not packed_float4

}  // namespace flexpte::msl_host
