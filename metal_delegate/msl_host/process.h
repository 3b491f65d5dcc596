// Programs, environment variables and files, as the compiler's driver needs them.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/status.h"

namespace flexpte::msl_host {

// Of 128 bits, as hexadecimal digits.
std::string hash_of(std::initializer_list<std::string_view> parts);

// Empty where it is not set.
std::string environment(const char* name);

// The path of an executable; empty where there is none.
std::string find_program(const std::string& name);

// Runs a program; its standard error goes to `log`. The exit status, or -1 where it did not start.
int run_program(const std::vector<std::string>& command, const std::filesystem::path& log);

std::string read_text(const std::filesystem::path& path);
Status write_text(const std::filesystem::path& path, std::string_view text);

// A new folder beside `path`, gone with the object unless it was renamed.
class Draft {
 public:
  static Result<Draft> create(const std::filesystem::path& path);
  Draft(Draft&& other) noexcept;
  ~Draft();
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;
  Draft& operator=(Draft&&) = delete;

  const std::filesystem::path& folder() const { return folder_; }

 private:
  explicit Draft(std::filesystem::path folder) : folder_(std::move(folder)) {}
  std::filesystem::path folder_;
};

}  // namespace flexpte::msl_host
