#include "metal_delegate/msl_host/rewrite.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "metal_delegate/msl_host/lint.h"
#include "metal_delegate/msl_host/tokens.h"

namespace flexpte::msl_host {
namespace {

struct InputAttribute {
  std::string_view name;
  std::string_view enumerator;
};
constexpr std::array kInputAttributes = {
    InputAttribute{"buffer", "kMslBuffer"},
    InputAttribute{"threadgroup", "kMslThreadgroup"},
    InputAttribute{"thread_position_in_grid", "kMslThreadPositionInGrid"},
    InputAttribute{"threadgroup_position_in_grid", "kMslThreadgroupPositionInGrid"},
    InputAttribute{"thread_position_in_threadgroup", "kMslThreadPositionInThreadgroup"},
    InputAttribute{"thread_index_in_threadgroup", "kMslThreadIndexInThreadgroup"},
    InputAttribute{"thread_index_in_simdgroup", "kMslThreadIndexInSimdgroup"},
    InputAttribute{"simdgroup_index_in_threadgroup", "kMslSimdgroupIndexInThreadgroup"},
    InputAttribute{"simdgroups_per_threadgroup", "kMslSimdgroupsPerThreadgroup"},
    InputAttribute{"dispatch_simdgroups_per_threadgroup", "kMslSimdgroupsPerThreadgroup"},
    InputAttribute{"threads_per_threadgroup", "kMslThreadsPerThreadgroup"},
    InputAttribute{"dispatch_threads_per_threadgroup", "kMslThreadsPerThreadgroup"},
    InputAttribute{"threads_per_grid", "kMslThreadsPerGrid"},
    InputAttribute{"threadgroups_per_grid", "kMslThreadgroupsPerGrid"},
    InputAttribute{"threads_per_simdgroup", "kMslThreadsPerSimdgroup"},
    InputAttribute{"thread_execution_width", "kMslThreadsPerSimdgroup"},
};

struct Attribute {
  std::string name;
  std::string argument;  // of name(argument)
};
using Attributes = std::vector<Attribute>;

struct Function {
  std::string arguments;  // "msl_shim::attribute<kMslBuffer, 0>, ..."
  std::string max_threads = "0";
};
struct Entry {
  std::string name;        // what the host calls it
  std::string expression;  // the function in C++: "gemv<half>"
  std::string base;        // "gemv"
  int line = 0;
};

std::string unquoted(const std::string& text) {
  return text.size() >= 2 && text.front() == '"' ? text.substr(1, text.size() - 2) : text;
}

std::string joined(const Tokens& tokens, size_t begin, size_t end) {
  std::string text;
  for (size_t i = begin; i < end; ++i) {
    if (i > begin && tokens[i].has_space) text += ' ';
    text += tokens[i].text;
  }
  return text;
}

class Rewriter {
 public:
  Rewriter(std::string_view text, const std::map<uint32_t, std::string>& constants) : constants_(constants) {
    strip_attributes(tokenize(text));
  }

  Result<std::string> run() {
    FLEXPTE_TRY(lint_tokens(tokens_));
    types_ = declared_types(tokens_);
    find_vector_aliases();
    FLEXPTE_TRY(declarations());
    FLEXPTE_TRY(statements());
    return finish();
  }

 private:
  const Attribute* find(size_t i, std::string_view name) const {
    const auto found = attributes_.find(i);
    if (found == attributes_.end()) return nullptr;
    for (const Attribute& attribute : found->second) {
      if (attribute.name == name) return &attribute;
    }
    return nullptr;
  }
  // Behind the end there is a token without text.
  const Token& peek(size_t i) const {
    static const Token kNone;
    return i < tokens_.size() ? tokens_[i] : kNone;
  }
  bool at(size_t i, std::string_view text) const { return peek(i).is(text); }

  // [[a, b(1)]] goes into attributes_ of the token that follows, the word kernel as well.
  void strip_attributes(const Tokens& tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      const Token& token = tokens[i];
      if (token.is_word() && token.is("kernel")) {
        attributes_[tokens_.size()].push_back({"kernel", ""});
        continue;
      }
      if (!token.is("[") || i + 1 >= tokens.size() || !tokens[i + 1].is("[")) {
        tokens_.push_back(token);
        continue;
      }
      const size_t end = closing(tokens, i);
      Attributes& attributes = attributes_[tokens_.size()];
      for (size_t k = i + 2; k + 1 < end; ++k) {
        if (!tokens[k].is_word()) continue;
        Attribute attribute{tokens[k].text, ""};
        if (tokens[k + 1].is("(")) {
          const size_t close = closing(tokens, k + 1);
          attribute.argument = joined(tokens, k + 2, close);
          k = close;
        }
        attributes.push_back(std::move(attribute));
      }
      i = end;
    }
  }

  // using T4 = vec<T, 4>;
  void find_vector_aliases() {
    for (size_t i = 0; i + 3 < tokens_.size(); ++i) {
      if (!peek(i).is("using") || !at(i + 2, "=")) continue;
      for (size_t k = i + 3; k < tokens_.size() && !peek(k).is(";"); ++k) {
        if ((peek(k).is("vec") && at(k + 1, "<")) || is_vector_type(peek(k).text)) {
          vector_aliases_.insert(peek(i + 1).text);
        }
      }
    }
  }

  // ---- Kernels, their instantiations, function constants
  Status declarations() {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (peek(i).is("template") && !at(i + 1, "<")) {
        FLEXPTE_ASSIGN(i, instantiation(i));
      } else if (find(i, "kernel") != nullptr) {
        FLEXPTE_TRY(kernel(i));
      } else if (const Attribute* constant = find(i, "function_constant"); constant != nullptr && peek(i).is(";")) {
        FLEXPTE_TRY(function_constant(i, *constant));
      }
    }
    return Status::ok();
  }

  // template [[host_name("n")]] [[kernel]] decltype(f<half>) f<half>;
  // template [[host_name("n")]] [[kernel]] void f<half>(device half* x [[buffer(0)]], ...);
  Result<size_t> instantiation(size_t begin) {
    size_t end = begin;
    const Attribute* host_name = nullptr;
    while (end < tokens_.size() && !peek(end).is(";")) {
      if (host_name == nullptr) host_name = find(end, "host_name");
      ++end;
    }
    if (host_name == nullptr) return end;
    Entry entry;
    entry.name = unquoted(host_name->argument);
    entry.line = peek(begin).line;
    size_t name = begin + 1;
    size_t until = end;
    if (at(name, "decltype")) {
      until = closing(tokens_, name + 1);
      name += 2;
    } else {
      while (name < end && !peek(name).is("void")) ++name;
      ++name;
      until = name + 1;
      if (at(until, "<")) until = closing(tokens_, until) + 1;
    }
    if (at(name, "&")) ++name;
    if (name >= end || until > end) {
      return kernel_text_error(entry.line, "an explicit instantiation that the shim does not understand");
    }
    entry.expression = joined(tokens_, name, until);
    size_t base = name;
    for (size_t i = name; i < until && !peek(i).is("<"); ++i) base = i;
    entry.base = peek(base).text;
    entries_.push_back(std::move(entry));
    for (size_t i = begin; i <= end && i < tokens_.size(); ++i) removed_.insert(i);
    return end;
  }

  Status kernel(size_t begin) {
    size_t name = begin;
    while (name < tokens_.size() && !peek(name).is("(")) ++name;
    if (name == begin || name == tokens_.size() || !peek(name - 1).is_word()) {
      return kernel_text_error(peek(begin).line, "a kernel without a name");
    }
    const size_t open = name;
    const Token& function_name = peek(open - 1);
    const size_t close = closing(tokens_, open);
    if (!at(close + 1, "{")) return Status::ok();  // a declaration
    Function function;
    FLEXPTE_TRY(parameters(open, close, function_name.text, function));
    std::string host_name = function_name.text;
    for (size_t i = begin; i <= open; ++i) {
      if (const Attribute* attribute = find(i, "host_name")) host_name = unquoted(attribute->argument);
      if (const Attribute* most = find(i, "max_total_threads_per_threadgroup")) function.max_threads = most->argument;
    }
    const bool is_template = begin > 0 && peek(begin - 1).is(">");
    if (!is_template) entries_.push_back({host_name, function_name.text, function_name.text, function_name.line});
    functions_[function_name.text] = std::move(function);
    before_[begin] += "static ";
    bodies_.emplace_back(close + 1, closing(tokens_, close + 1));
    return Status::ok();
  }

  Status parameters(size_t open, size_t close, const std::string& kernel, Function& function) {
    size_t from = open + 1;
    std::optional<std::pair<std::string, int>> size;  // of positions: all are scalars or vectors of one size
    for (size_t i = open + 1; i <= close; ++i) {
      if (peek(i).is("(") || peek(i).is("[") || peek(i).is("{")) i = closing(tokens_, i);
      if (peek(i).is("<")) {
        if (const size_t angle = closing(tokens_, i); angle < close) i = angle;
      }
      if (!peek(i).is(",") && i != close) continue;
      if (from == i) break;  // no parameters
      FLEXPTE_ASSIGN(const std::string argument, input_of(from, i, kernel));
      function.arguments += ", " + argument;
      const std::string& type = peek(i - 2).text;
      const bool is_position = argument.find("PositionIn") != std::string::npos ||
                               argument.find("ThreadsPerThreadgroup") != std::string::npos ||
                               argument.find("PerGrid") != std::string::npos;
      if (is_position) {
        const int components = is_vector_type(type) ? type.back() - '0' : 1;
        if (size && size->second != components) {
          return kernel_text_error(peek(i - 1).line, "kernel " + kernel + ": " + peek(i - 1).text + " and " +
                                                         size->first + " must have the same number of components");
        }
        size = {peek(i - 1).text, components};
      }
      from = i + 1;
    }
    return Status::ok();
  }

  // The attribute of the parameter in [begin, end): "msl_shim::attribute<kMslBuffer, 0>".
  Result<std::string> input_of(size_t begin, size_t end, const std::string& kernel) const {
    for (size_t i = begin; i <= end; ++i) {
      const auto found = attributes_.find(i);
      if (found == attributes_.end()) continue;
      for (const Attribute& attribute : found->second) {
        for (const InputAttribute& known : kInputAttributes) {
          if (attribute.name != known.name) continue;
          const std::string index = attribute.argument.empty() ? "0" : attribute.argument;
          return "msl_shim::attribute<" + std::string(known.enumerator) + ", " + index + ">";
        }
      }
    }
    return kernel_text_error(peek(begin).line, "kernel " + kernel + ": parameter '" + joined(tokens_, begin, end) +
                                                   "' has no attribute that the shim knows, such as [[buffer(0)]]");
  }

  // constant bool has_mask [[function_constant(0)]];
  Status function_constant(size_t end, const Attribute& attribute) {
    size_t begin = end;
    while (begin > 0 && !peek(begin - 1).is(";") && !peek(begin - 1).is("}")) --begin;
    while (begin < end && peek(begin).kind == Token::Kind::kPragma) ++begin;
    const std::string& name = peek(end - 1).text;
    std::string type;
    for (size_t i = begin; i + 1 < end; ++i) {
      if (!at(i, "constant") && !at(i, "const")) type += peek(i).text + " ";
    }
    const auto value = constants_.find(static_cast<uint32_t>(std::strtoul(attribute.argument.c_str(), nullptr, 0)));
    const bool is_defined = value != constants_.end();
    std::string text = "static constexpr bool msl_is_defined_" + name + " = " + (is_defined ? "true" : "false") + "; ";
    text += is_defined ? "constant constexpr " + type + name + " = " + type + "(" + value->second + ");"
                       : "extern constant " + type + "const " + name + ";";
    for (size_t i = begin; i <= end; ++i) removed_.insert(i);
    before_[begin] += text;
    return Status::ok();
  }

  // ---- Inside functions
  Status statements() {
    int depth = 0;
    int namespaces = 0;  // of these braces
    for (size_t i = 0; i < tokens_.size(); ++i) {
      Token& token = tokens_[i];
      if (removed_.count(i) != 0) continue;
      if (token.is("{")) {
        ++depth;
        const bool is_namespace = (i > 0 && at(i - 1, "namespace")) || (i > 1 && at(i - 2, "namespace"));
        if (is_namespace && namespaces == depth - 1) ++namespaces;
      }
      if (token.is("}")) namespaces = std::min(namespaces, --depth);
      if (token.kind == Token::Kind::kNumber) literal(token);
      if (!token.is_word()) continue;
      const bool begins =
          i == 0 || at(i - 1, ";") || at(i - 1, "{") || at(i - 1, "}") || peek(i - 1).kind == Token::Kind::kPragma;
      if (begins && token.is("threadgroup")) FLEXPTE_TRY(threadgroup_variable(i));
      if (begins && depth > namespaces) struct_copy(i);
      if (begins && depth == namespaces && token.is("constant")) after_[i] += " const";
      if (token.is("is_function_constant_defined") && at(i + 1, "(") && i + 2 < tokens_.size()) {
        token.text = "(msl_is_defined_" + peek(i + 2).text + ")";
        removed_.insert({i + 1, i + 2, i + 3});
      }
      constructor(i);
    }
    return Status::ok();
  }

  // Literals without a suffix are float, 1.0h is half.
  static void literal(Token& token) {
    std::string& text = token.text;
    const bool is_hex = text.size() > 1 && text[0] == '0' && (text[1] == 'x' || text[1] == 'X');
    const bool is_float =
        text.find('.') != std::string::npos || text.find_first_of(is_hex ? "pP" : "eE") != std::string::npos;
    if (!is_hex && (text.back() == 'h' || text.back() == 'H')) {
      const bool is_whole = !is_float;
      text.pop_back();
      text = "half(" + text + (is_whole ? ".0f)" : "f)");
    } else if (is_float && text.back() != 'f' && text.back() != 'F') {
      text += 'f';
    } else if (!is_hex && !is_float && text.back() == 'f') {
      text.insert(text.size() - 1, ".0");  // 1f
    }
  }

  // float4(...), vec<T, 4>(...)
  void constructor(size_t i) {
    const Token& token = peek(i);
    size_t end = i;
    if (token.is("vec") && at(i + 1, "<")) {
      end = closing(tokens_, i + 1);
    } else if (!is_vector_type(token.text) && vector_aliases_.count(token.text) == 0) {
      return;
    }
    if (!at(end + 1, "(")) return;
    if (at(end + 2, "&") || at(end + 2, "*")) {  // float4 (&tile)[2], (device float4 (*)[2]): declarators
      if (at(end + 3, ")") || (at(end + 4, ")") && at(end + 5, "["))) return;
    }
    if (i > 0 && (at(i - 1, "operator") || at(i - 1, "."))) return;
    size_t begin = i;
    if (i > 2 && at(i - 1, ":") && at(i - 2, ":") && peek(i - 3).is_word()) begin = i - 3;
    before_[begin] += "msl_shim::make<";
    after_[end] += ">";
  }

  // S x = p[i];  of a struct in device memory.
  void struct_copy(size_t begin) {
    size_t i = begin;
    while (at(i, "const") || at(i, "thread")) ++i;
    if (i >= tokens_.size() || types_.count(peek(i).text) == 0) return;
    size_t name = i + 1;
    if (at(name, "<")) name = closing(tokens_, name) + 1;
    if (name >= tokens_.size() || !peek(name).is_word() || !at(name + 1, "=") || at(name + 2, "{")) return;
    size_t end = name + 2;
    for (; end < tokens_.size() && !peek(end).is(";"); ++end) {
      if (peek(end).is("(") || peek(end).is("[") || peek(end).is("{")) end = closing(tokens_, end);
      if (at(end, ",")) return;
    }
    if (end >= tokens_.size()) return;
    before_[name + 2] += "msl_shim::copy(";
    before_[end] += ")";
  }

  // threadgroup float tile[32][36];  becomes a reference into the threadgroup's memory.
  Status threadgroup_variable(size_t begin) {
    size_t end = begin;
    int depth = 0;
    for (; end < tokens_.size(); ++end) {
      if (peek(end).is("[")) ++depth;
      if (peek(end).is("]")) --depth;
      if (depth > 0) continue;
      if (peek(end).is(";")) break;
      if (peek(end).is("*") || peek(end).is("&") || peek(end).is("=") || peek(end).is("(")) {
        return Status::ok();
      }
    }
    const int line = peek(begin).line;
    const bool is_in_kernel = std::any_of(bodies_.begin(), bodies_.end(), [begin](const std::pair<size_t, size_t>& b) {
      return begin > b.first && begin < b.second;
    });
    if (!is_in_kernel) {
      return kernel_text_error(line, "threadgroup variables are declared in kernel functions only");
    }
    std::string type;
    std::string text;
    size_t from = begin + 1;
    for (size_t i = begin + 1; i <= end; ++i) {
      if (peek(i).is("[")) i = closing(tokens_, i);
      if (peek(i).is("<")) i = closing(tokens_, i);
      if (!peek(i).is(",") && i != end) continue;
      size_t name = from;
      while (name + 1 < i && !at(name + 1, "[")) {
        ++name;
        if (peek(name).is("<")) name = closing(tokens_, name);
      }
      if (type.empty()) type = joined(tokens_, from, name);
      if (type.empty() || name >= i || !peek(name).is_word()) {
        return kernel_text_error(line, "a threadgroup variable that the shim does not understand");
      }
      const std::string dims = joined(tokens_, name + 1, i);
      text += "threadgroup " + type + " (&" + peek(name).text + ")" + dims + " = *(threadgroup " + type + " (*)" +
              dims + ")msl_threadgroup_memory(" + std::to_string(num_threadgroup_variables_++) + ", sizeof(" + type +
              dims + "), " + std::to_string(line) + ");";
      from = i + 1;
    }
    for (size_t i = begin; i <= end; ++i) removed_.insert(i);
    before_[begin] += text;
    return Status::ok();
  }

  // ---- Output
  static void go_to_line(std::string& text, int& line, int target) {
    if (target == line) return;
    if (target > line && target < line + 8) {
      text.append(static_cast<size_t>(target - line), '\n');
    } else {
      text += "\n# " + std::to_string(target) + " \"" + std::string(kKernelFile) + "\"\n";
    }
    line = target;
  }

  Result<std::string> finish() {
    std::string text = "#include <metal_stdlib>\n# 1 \"" + std::string(kKernelFile) + "\"\n";
    int line = 1;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const Token& token = peek(i);
      go_to_line(text, line, token.line);
      if (const auto before = before_.find(i); before != before_.end()) text += " " + before->second;
      if (removed_.count(i) != 0) continue;
      if (token.kind == Token::Kind::kPragma) {
        // Unrolled loops of matrix operations compile slowly and run no faster here.
        if (token.text.find("unroll") != std::string::npos) continue;
        text += "\n" + token.text + "\n# " + std::to_string(++line) + " \"" + std::string(kKernelFile) + "\"\n";
        continue;
      }
      if (token.has_space) text += ' ';
      text += token.text;
      if (const auto after = after_.find(i); after != after_.end()) text += after->second;
    }
    text += "\n#include <kernels.h>\n";
    std::string table = "extern \"C\" {\nextern const MslKernel msl_kernels[] = {\n";
    std::set<std::string> names;
    for (const Entry& entry : entries_) {
      const auto function = functions_.find(entry.base);
      if (function == functions_.end()) {
        return kernel_text_error(entry.line, entry.name + " instantiates " + entry.base + ", which is no kernel");
      }
      if (!names.insert(entry.name).second) {
        return kernel_text_error(entry.line, "two kernels are named " + entry.name);
      }
      table += "# " + std::to_string(entry.line) + " \"" + std::string(kKernelFile) + "\"\n";
      table += "  {\"" + entry.name + "\", " + function->second.max_threads + ", msl_shim::thunk<decltype(&" +
               entry.expression + "), &" + entry.expression + function->second.arguments + ">::call},\n";
    }
    return text + table + "  {nullptr, 0, nullptr}};\n}\n";
  }

  const std::map<uint32_t, std::string>& constants_;
  Tokens tokens_;                            // without attributes
  std::map<size_t, Attributes> attributes_;  // by the token that follows
  std::set<std::string, std::less<>> types_;
  std::set<std::string> vector_aliases_;
  std::vector<Entry> entries_;
  std::map<std::string, Function> functions_;
  std::vector<std::pair<size_t, size_t>> bodies_;  // braces of kernels
  std::set<size_t> removed_;
  std::map<size_t, std::string> before_, after_;  // text put around tokens
  int num_threadgroup_variables_ = 0;
};

}  // namespace

Result<std::string> rewrite_kernels(std::string_view text, const std::map<uint32_t, std::string>& constants) {
  return Rewriter(text, constants).run();
}

}  // namespace flexpte::msl_host
