// A loaded .pte: weights, methods and delegates. Immutable, shared by any number of sessions.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/delegate.h"
#include "runtime/method.h"
#include "runtime/pte_file.h"
#include "runtime/status.h"
#include "runtime/thread_pool.h"

namespace flexpte {

class Program {
 public:
  // Verifies the whole file; everything that later runs rely on is checked here. `delegates` are those
  // that the file may ask for, by their names.
  static Result<std::shared_ptr<const Program>> load(FileBytes file, std::vector<std::shared_ptr<Delegate>> delegates,
                                                     std::shared_ptr<const ThreadPool> pool);

  std::vector<std::string_view> method_names() const;
  std::span<const std::unique_ptr<Method>> methods() const { return methods_; }
  // NotFound names the methods that there are.
  Result<size_t> method_index(std::string_view name) const;

  const PteFile& file() const { return *file_; }
  const ThreadPool& pool() const { return *pool_; }

 private:
  // In the order of their lifetimes: methods hold views of the file and what the delegates loaded.
  std::shared_ptr<const ThreadPool> pool_;
  std::vector<std::shared_ptr<Delegate>> delegates_;
  std::unique_ptr<PteFile> file_;
  std::vector<std::unique_ptr<Method>> methods_;
};

}  // namespace flexpte
