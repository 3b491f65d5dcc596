#include "metal_delegate/msl_shim/rewrite.h"

#include <array>
#include <cctype>
#include <map>
#include <utility>

#include "metal_delegate/msl_shim/lint.h"

namespace flexpte::msl_host {
namespace {

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}
bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// Whether a declaration is of variables themselves: no pointer, reference, function or initialiser outside of the
// sizes in its brackets.
bool is_plain_declaration(std::string_view declaration) {
  int depth = 0;
  for (const char c : declaration) {
    if (c == '[') ++depth;
    if (c == ']') --depth;
    if (depth == 0 && std::string_view("*&(={}").find(c) != std::string_view::npos) return false;
  }
  return true;
}

struct Attribute {
  std::string_view name;
  std::string_view enumerator;
};
constexpr std::array kAttributes = {
    Attribute{"buffer", "kMslBuffer"},
    Attribute{"threadgroup", "kMslThreadgroup"},
    Attribute{"thread_position_in_grid", "kMslThreadPositionInGrid"},
    Attribute{"threadgroup_position_in_grid", "kMslThreadgroupPositionInGrid"},
    Attribute{"thread_position_in_threadgroup", "kMslThreadPositionInThreadgroup"},
    Attribute{"thread_index_in_threadgroup", "kMslThreadIndexInThreadgroup"},
    Attribute{"thread_index_in_simdgroup", "kMslThreadIndexInSimdgroup"},
    Attribute{"simdgroup_index_in_threadgroup", "kMslSimdgroupIndexInThreadgroup"},
    Attribute{"simdgroups_per_threadgroup", "kMslSimdgroupsPerThreadgroup"},
    Attribute{"threads_per_threadgroup", "kMslThreadsPerThreadgroup"},
    Attribute{"threads_per_grid", "kMslThreadsPerGrid"},
    Attribute{"threadgroups_per_grid", "kMslThreadgroupsPerGrid"},
    Attribute{"threads_per_simdgroup", "kMslThreadsPerSimdgroup"},
};

struct Function {
  std::vector<std::string> arguments;  // "{kMslBuffer, 0}"
  bool is_template = false;
};

struct Entry {
  std::string name;        // what the host calls it
  std::string expression;  // the function in C++: "gemv<half>"
  std::string base;        // "gemv"
};

class Rewriter {
 public:
  explicit Rewriter(std::string_view source) : source_(source), code_(without_comments(source)), text_(code_) {}

  Result<RewrittenKernels> run() {
    FLEXPTE_TRY(lint_kernels(code_));
    FLEXPTE_TRY(instantiations());
    FLEXPTE_TRY(definitions());
    FLEXPTE_TRY(threadgroup_variables());
    return finish();
  }

 private:
  Status fault(size_t offset, const std::string& what) const {
    return {Code::kInvalidProgram, "kernel text, line " + std::to_string(line_at(code_, offset)) + ": " + what};
  }

  size_t find_word(std::string_view word, size_t from) const {
    for (size_t at = code_.find(word, from); at != std::string::npos; at = code_.find(word, at + 1)) {
      const bool begins = at == 0 || !is_word(code_[at - 1]);
      const size_t end = at + word.size();
      if (begins && (end == code_.size() || !is_word(code_[end]))) return at;
    }
    return std::string::npos;
  }

  size_t skip_space(size_t at) const {
    while (at < code_.size() && is_space(code_[at])) ++at;
    return at;
  }

  // The offset behind the bracket that closes the one at `open`.
  size_t behind_bracket(size_t open) const {
    const char opens = code_[open];
    const char closes = opens == '(' ? ')' : opens == '[' ? ']' : opens == '<' ? '>' : '}';
    int depth = 0;
    for (size_t at = open; at < code_.size(); ++at) {
      if (code_[at] == opens) ++depth;
      if (code_[at] == closes && --depth == 0) return at + 1;
    }
    return code_.size();
  }

  void blank(size_t begin, size_t end) {
    for (size_t i = begin; i < end && i < text_.size(); ++i) {
      if (text_[i] != '\n') text_[i] = ' ';
    }
  }

  // template [[host_name("n")]] [[kernel]] decltype(f<half>) f<half>;
  // template [[host_name("n")]] kernel void f<half>(...);
  Status instantiations() {
    for (size_t at = find_word("template", 0); at != std::string::npos; at = find_word("template", at + 1)) {
      if (code_[skip_space(at + 8)] == '<') continue;
      const size_t end = code_.find(';', at);
      if (end == std::string::npos) return fault(at, "an explicit instantiation without an end");
      const std::string_view statement = std::string_view(code_).substr(at, end - at);
      const size_t named = statement.find("host_name");
      if (named == std::string_view::npos) continue;
      const size_t open = source_.find('"', at + named);
      const size_t close = source_.find('"', open + 1);
      Entry entry;
      entry.name = std::string(source_.substr(open + 1, close - open - 1));
      const size_t declared = statement.find("decltype");
      if (declared != std::string_view::npos) {
        const size_t begin = code_.find('(', at + declared);
        entry.expression = std::string(trimmed(code_.substr(begin + 1, behind_bracket(begin) - begin - 2)));
      } else {
        const size_t returns = statement.find("void");
        const size_t begin = skip_space(at + returns + 4);
        const size_t angle = code_.find('<', begin);
        const size_t until = angle == std::string::npos || angle > end ? code_.find('(', begin) : behind_bracket(angle);
        entry.expression = std::string(trimmed(code_.substr(begin, until - begin)));
      }
      entry.base = entry.expression.substr(0, entry.expression.find('<'));
      entries_.push_back(std::move(entry));
      blank(at, end + 1);
      for (size_t i = at; i <= end; ++i) {
        if (code_[i] != '\n') code_[i] = ' ';
      }
    }
    return Status::ok();
  }

  Status definitions() {
    for (size_t at = find_word("kernel", 0); at != std::string::npos; at = find_word("kernel", at + 1)) {
      size_t next = at + 6;
      while (next < code_.size() && (is_space(code_[next]) || code_[next] == ']')) ++next;
      if (code_.compare(next, 2, "[[") == 0) {  // attributes behind the word
        next = skip_space(behind_bracket(next));
      }
      if (code_.compare(next, 4, "void") != 0 || is_word(code_[next + 4])) continue;
      const size_t begin = skip_space(next + 4);
      size_t end = begin;
      while (end < code_.size() && is_word(code_[end])) ++end;
      const std::string name = code_.substr(begin, end - begin);
      const size_t open = skip_space(end);
      if (name.empty() || open >= code_.size() || code_[open] != '(') return fault(at, "a kernel without a name");
      Function function;
      size_t before = at;
      while (before > 0 && (is_space(code_[before - 1]) || code_[before - 1] == '[')) --before;
      function.is_template = before > 0 && code_[before - 1] == '>';
      const size_t close = behind_bracket(open);
      FLEXPTE_TRY(parameters(open + 1, close - 1, name, function));
      if (!function.is_template) entries_.push_back({name, name, name});
      functions_[name] = std::move(function);
    }
    return Status::ok();
  }

  Status parameters(size_t begin, size_t end, const std::string& name, Function& function) {
    int depth = 0;
    size_t from = begin;
    for (size_t at = begin; at <= end; ++at) {
      const char c = at < end ? code_[at] : ',';
      if (c == '(' || c == '[' || c == '<' || c == '{') ++depth;
      if (c == ')' || c == ']' || c == '>' || c == '}') --depth;
      if (c != ',' || depth != 0) continue;
      const std::string_view parameter = trimmed(std::string_view(code_).substr(from, at - from));
      if (!parameter.empty()) {
        FLEXPTE_ASSIGN(std::string argument, attribute_of(parameter, from, name));
        function.arguments.push_back(std::move(argument));
      }
      from = at + 1;
    }
    return Status::ok();
  }

  Result<std::string> attribute_of(std::string_view parameter, size_t offset, const std::string& kernel) {
    const size_t open = parameter.find("[[");
    const size_t close = parameter.find("]]");
    if (open == std::string_view::npos || close == std::string_view::npos) {
      return fault(offset, "kernel " + kernel + ": parameter '" + std::string(parameter) +
                               "' has no attribute such as [[buffer(0)]] or [[thread_position_in_grid]]");
    }
    const std::string_view attribute = trimmed(parameter.substr(open + 2, close - open - 2));
    const std::string_view word = trimmed(attribute.substr(0, attribute.find('(')));
    for (const Attribute& known : kAttributes) {
      if (word != known.name) continue;
      std::string index = "0";
      if (const size_t paren = attribute.find('('); paren != std::string_view::npos) {
        index = std::string(trimmed(attribute.substr(paren + 1, attribute.find(')') - paren - 1)));
      }
      return "{" + std::string(known.enumerator) + ", " + index + "}";
    }
    return fault(offset, "kernel " + kernel + ": the attribute [[" + std::string(attribute) + "]] is not supported");
  }

  // threadgroup float tile[32][36];  ->  a reference into the threadgroup's memory.
  Status threadgroup_variables() {
    std::string result;
    size_t copied = 0;
    int braces = 0;
    int parens = 0;
    int brackets = 0;
    for (size_t at = 0; at < text_.size(); ++at) {
      const char c = text_[at];
      if (c == '{') ++braces;
      if (c == '}') --braces;
      if (c == '(') ++parens;
      if (c == ')') --parens;
      if (c == '[') ++brackets;
      if (c == ']') --brackets;
      constexpr std::string_view kWord = "threadgroup";
      if (text_.compare(at, kWord.size(), kWord) != 0 || (at > 0 && is_word(text_[at - 1])) ||
          is_word(text_[at + kWord.size()])) {
        continue;
      }
      if (brackets > 0) {  // the attribute: not the address space
        result += text_.substr(copied, at - copied) + "msl_threadgroup";
        copied = at + kWord.size();
        at = copied - 1;
        continue;
      }
      const size_t end = text_.find(';', at);
      if (braces == 0 || parens > 0 || end == std::string::npos) continue;
      const std::string declaration = text_.substr(at + kWord.size(), end - at - kWord.size());
      if (!is_plain_declaration(declaration)) continue;
      FLEXPTE_ASSIGN(const std::string reference, threadgroup_reference(declaration, at));
      result += text_.substr(copied, at - copied) + reference;
      copied = end + 1;
      at = end;
    }
    text_ = result + text_.substr(copied);
    return Status::ok();
  }

  Result<std::string> threadgroup_reference(std::string_view declaration, size_t offset) const {
    std::string type;
    std::string result;
    size_t from = 0;
    int depth = 0;
    for (size_t at = 0; at <= declaration.size(); ++at) {
      const char c = at < declaration.size() ? declaration[at] : ',';
      if (c == '<' || c == '[') ++depth;
      if (c == '>' || c == ']') --depth;
      if (c != ',' || depth != 0) continue;
      std::string_view declarator = trimmed(declaration.substr(from, at - from));
      from = at + 1;
      std::string dims;
      // The brackets at the end, not those of a template argument.
      size_t angle = 0;
      size_t bracket = std::string_view::npos;
      for (size_t i = 0; i < declarator.size(); ++i) {
        if (declarator[i] == '<') ++angle;
        if (declarator[i] == '>') --angle;
        if (declarator[i] == '[' && angle == 0) {
          bracket = i;
          break;
        }
      }
      if (bracket != std::string_view::npos) {
        dims = std::string(declarator.substr(bracket));
        declarator = trimmed(declarator.substr(0, bracket));
      }
      size_t name = declarator.size();
      while (name > 0 && is_word(declarator[name - 1])) --name;
      if (type.empty()) type = std::string(trimmed(declarator.substr(0, name)));
      const std::string variable(declarator.substr(name));
      if (type.empty() || variable.empty()) {
        return fault(offset, "a threadgroup variable that the shim does not understand");
      }
      const std::string line = std::to_string(line_at(code_, offset));
      result += "threadgroup " + type + " (&" + variable + ")" + dims + " = *(threadgroup " + type + " (*)" + dims +
                ")msl_threadgroup_memory(sizeof(" + type + dims + "), " + line + ");";
    }
    // Declarations may span lines.
    for (const char c : declaration) {
      if (c == '\n') result += '\n';
    }
    return result;
  }

  Result<RewrittenKernels> finish() {
    RewrittenKernels rewritten;
    std::string& text = rewritten.text;
    text = std::move(text_);
    text += "\n#include \"kernels.h\"\n";
    std::string table = "extern \"C\" {\nextern const MslKernel msl_kernels[] = {\n";
    for (size_t i = 0; i < entries_.size(); ++i) {
      const Entry& entry = entries_[i];
      const auto function = functions_.find(entry.base);
      if (function == functions_.end()) {
        return Status(Code::kInvalidProgram,
                      "kernel text: " + entry.name + " instantiates " + entry.base + ", which is no kernel");
      }
      const std::string arguments = "msl_arguments_" + std::to_string(i);
      text += "static const MslArgument " + arguments + "[] = {";
      for (const std::string& argument : function->second.arguments) text += argument + ", ";
      text += "{kMslThreadsPerSimdgroup, 0}};\n";
      table += "  {\"" + entry.name + "\", " + std::to_string(function->second.arguments.size()) + ", " + arguments +
               ", MSL_THUNK(" + entry.expression + ")::call},\n";
      rewritten.functions.push_back(entry.name);
    }
    text += table + "  {nullptr, 0, nullptr, nullptr}};\n}\n";
    return rewritten;
  }

  const std::string_view source_;
  std::string code_;  // without comments
  std::string text_;  // the result
  std::vector<Entry> entries_;
  std::map<std::string, Function> functions_;
};

}  // namespace

Result<RewrittenKernels> rewrite_kernels(std::string_view source) {
  return Rewriter(source).run();
}

}  // namespace flexpte::msl_host
