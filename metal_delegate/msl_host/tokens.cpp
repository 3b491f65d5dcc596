#include "metal_delegate/msl_host/tokens.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>

namespace flexpte::msl_host {
namespace {

bool is_word_char(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}
bool is_digit(char c) {
  return std::isdigit(static_cast<unsigned char>(c)) != 0;
}

class Tokenizer {
 public:
  explicit Tokenizer(std::string_view text) : text_(text) {}

  Tokens run() {
    while (at_ < text_.size()) step();
    return std::move(tokens_);
  }

 private:
  char peek(size_t ahead) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }

  void step() {
    const char c = text_[at_];
    if (c == '\n') {
      ++line_;
      ++at_;
      begins_line_ = has_space_ = true;
    } else if (std::isspace(static_cast<unsigned char>(c)) != 0 || (c == '\\' && peek(1) == '\n')) {
      has_space_ = true;
      ++at_;
    } else if (c == '/' && (peek(1) == '/' || peek(1) == '*')) {
      comment();
    } else if (c == '#' && begins_line_) {
      directive();
    } else if (c == '"' || c == '\'') {
      string(c);
    } else if (is_digit(c) || (c == '.' && is_digit(peek(1)))) {
      number();
    } else if (is_word_char(c)) {
      size_t end = at_;
      while (end < text_.size() && is_word_char(text_[end])) ++end;
      add(Token::Kind::kWord, end);
    } else {
      add(Token::Kind::kPunctuation, at_ + 1);
    }
  }

  void add(Token::Kind kind, size_t end) {
    if (is_ours_) tokens_.push_back({kind, std::string(text_.substr(at_, end - at_)), line_, has_space_});
    at_ = end;
    has_space_ = begins_line_ = false;
  }

  void comment() {
    const bool is_line = peek(1) == '/';
    size_t end = text_.find(is_line ? "\n" : "*/", at_ + 2);
    end = end == std::string_view::npos ? text_.size() : end + (is_line ? 0 : 2);
    for (; at_ < end; ++at_) line_ += text_[at_] == '\n' ? 1 : 0;
    has_space_ = true;
  }

  void string(char quote) {
    size_t end = at_ + 1;
    while (end < text_.size() && text_[end] != quote && text_[end] != '\n') end += text_[end] == '\\' ? 2 : 1;
    add(Token::Kind::kString, std::min(end + 1, text_.size()));
  }

  void number() {
    size_t end = at_;
    const bool is_hex = peek(0) == '0' && (peek(1) == 'x' || peek(1) == 'X');
    while (end < text_.size()) {
      const char c = text_[end];
      const bool is_exponent = is_hex ? c == 'p' || c == 'P' : c == 'e' || c == 'E';
      if (is_exponent && end + 1 < text_.size() && (text_[end + 1] == '+' || text_[end + 1] == '-')) {
        end += 2;
      } else if (is_word_char(c) || c == '.') {
        ++end;
      } else {
        break;
      }
    }
    add(Token::Kind::kNumber, end);
  }

  // # 12 "file" 2, #line 12 "file", #pragma ...
  void directive() {
    size_t end = at_;
    while (end < text_.size() && text_[end] != '\n') end += text_[end] == '\\' && end + 1 < text_.size() ? 2 : 1;
    std::string_view line = text_.substr(at_ + 1, end - at_ - 1);
    while (!line.empty() && line.front() == ' ') line.remove_prefix(1);
    if (line.substr(0, 4) == "line") line.remove_prefix(4);
    while (!line.empty() && line.front() == ' ') line.remove_prefix(1);
    if (!line.empty() && is_digit(line.front())) {
      const size_t quote = line.find('"');
      if (quote != std::string_view::npos) {
        const std::string_view file = line.substr(quote + 1, line.rfind('"') - quote - 1);
        is_ours_ = file.size() >= kKernelFile.size() && file.substr(file.size() - kKernelFile.size()) == kKernelFile;
      }
      line_ = std::atoi(std::string(line).c_str()) - 1;  // of the line that follows
      at_ = end;
      return;
    }
    if (line.substr(0, 6) == "pragma") {
      const int begin = line_;
      line_ += static_cast<int>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_),
                                           text_.begin() + static_cast<std::ptrdiff_t>(end), '\n'));
      if (is_ours_) tokens_.push_back({Token::Kind::kPragma, "#" + std::string(line), begin, true});
    } else {
      line_ += static_cast<int>(std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_),
                                           text_.begin() + static_cast<std::ptrdiff_t>(end), '\n'));
    }
    at_ = end;
  }

  const std::string_view text_;
  size_t at_ = 0;
  int line_ = 1;
  bool is_ours_ = true;
  bool begins_line_ = true;
  bool has_space_ = false;
  Tokens tokens_;
};

constexpr std::array<std::string_view, 12> kScalars = {"bool", "char", "uchar", "short", "ushort", "int",
                                                       "uint", "long", "ulong", "half",  "bfloat", "float"};
constexpr std::array<std::string_view, 12> kMoreScalars = {"int8_t",   "uint8_t",   "int16_t", "uint16_t",
                                                           "int32_t",  "uint32_t",  "int64_t", "uint64_t",
                                                           "unsigned", "ptrdiff_t", "size_t",  "void"};

}  // namespace

Tokens tokenize(std::string_view text) {
  return Tokenizer(text).run();
}

size_t closing(const Tokens& tokens, size_t open) {
  if (open >= tokens.size()) return tokens.size();
  const std::string_view opens = tokens[open].text;
  const std::string_view closes = opens == "(" ? ")" : opens == "[" ? "]" : opens == "<" ? ">" : "}";
  int depth = 0;
  for (size_t i = open; i < tokens.size(); ++i) {
    if (tokens[i].is(opens)) ++depth;
    if (tokens[i].is(closes) && --depth == 0) return i;
    if (opens == "<") {  // a comparison, no template
      if (tokens[i].is(";") || tokens[i].is("{")) return tokens.size();
      if (tokens[i].is("(") || tokens[i].is("[")) i = closing(tokens, i);
    }
  }
  return tokens.size();
}

size_t opening_angle(const Tokens& tokens, size_t close) {
  int depth = 0;
  int parens = 0;
  if (close >= tokens.size()) return std::string::npos;
  for (size_t i = close + 1; i-- > 0;) {
    const Token& token = tokens[i];
    if (token.is(")")) ++parens;
    if (token.is("(") && --parens < 0) return std::string::npos;
    if (token.is(";") || token.is("{") || token.is("}")) return std::string::npos;
    if (parens > 0) continue;
    if (token.is(">")) ++depth;
    if (token.is("<") && --depth == 0) return i;
  }
  return std::string::npos;
}

bool is_scalar_type(std::string_view word) {
  return std::find(kScalars.begin(), kScalars.end(), word) != kScalars.end() ||
         std::find(kMoreScalars.begin(), kMoreScalars.end(), word) != kMoreScalars.end();
}

bool is_vector_type(std::string_view word) {
  if (word.empty() || word.back() < '2' || word.back() > '4') return false;
  return std::find(kScalars.begin(), kScalars.end(), word.substr(0, word.size() - 1)) != kScalars.end();
}

}  // namespace flexpte::msl_host
