#include "runtime/program.h"

#include "program_generated.h"

namespace flexpte {

Result<std::shared_ptr<const Program>> Program::load(FileBytes file, std::vector<std::shared_ptr<Delegate>> delegates,
                                                     std::shared_ptr<const ThreadPool> pool) {
  auto program = std::make_shared<Program>();
  program->pool_ = std::move(pool);
  program->delegates_ = std::move(delegates);
  FLEXPTE_ASSIGN(program->file_, PteFile::open(std::move(file)));
  const auto named = [&program](const Status& status) {
    return Status(status.code(), "'" + program->file_->name() + "': " + status.message());
  };
  const auto* plans = program->file_->program().execution_plan();
  if (plans == nullptr || plans->size() == 0) return named({Code::kInvalidProgram, "the file has no method"});
  for (const auto* plan : *plans) {
    auto method = Method::load(*program->file_, *plan, program->delegates_, *program->pool_);
    if (!method.is_ok()) return named(method.status());
    if (program->method_index((*method)->name()).is_ok()) {
      return named({Code::kInvalidProgram, "method '" + (*method)->name() + "' occurs twice"});
    }
    program->methods_.push_back(std::move(method).value());
  }
  return std::shared_ptr<const Program>(std::move(program));
}

std::vector<std::string_view> Program::method_names() const {
  std::vector<std::string_view> names;
  for (const auto& method : methods_) names.push_back(method->name());
  return names;
}

Result<size_t> Program::method_index(std::string_view name) const {
  std::string known;
  for (size_t i = 0; i < methods_.size(); ++i) {
    if (methods_[i]->name() == name) return i;
    known += (i ? ", '" : "'") + methods_[i]->name() + "'";
  }
  return Status(Code::kNotFound, "no method '" + std::string(name) + "'; the program has " + known);
}

}  // namespace flexpte
