#include "metal_delegate/msl_host/process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

extern char** environ;

namespace flexpte::msl_host {

namespace fs = std::filesystem;

std::string hash_of(std::initializer_list<std::string_view> parts) {
  // FNV-1a with two offsets; the second one sees every byte turned.
  std::array<uint64_t, 2> hashes = {0xcbf29ce484222325u, 0x84222325cbf29ce4u};
  const auto mix = [&hashes](uint64_t byte) {
    hashes[0] = (hashes[0] ^ byte) * 0x100000001b3u;
    hashes[1] = (hashes[1] ^ (byte * 0x9e3779b97f4a7c15u)) * 0x100000001b3u;
  };
  for (const std::string_view part : parts) {
    for (const char c : part) mix(static_cast<unsigned char>(c));
    mix(0x1ff);
  }
  std::array<char, 40> text{};
  std::snprintf(text.data(), text.size(), "%016llx%016llx", static_cast<unsigned long long>(hashes[0]),
                static_cast<unsigned long long>(hashes[1]));
  return text.data();
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return ::access(name.c_str(), X_OK) == 0 ? name : std::string();
  std::istringstream path(environment("PATH"));
  for (std::string folder; std::getline(path, folder, ':');) {
    std::string candidate = folder;
    candidate += '/';
    candidate += name;
    if (!folder.empty() && ::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return {};
}

int run_program(const std::vector<std::string>& command, const fs::path& log) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t pid = 0;
  const int failed = posix_spawnp(&pid, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) return -1;
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return -1;
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Status write_text(const fs::path& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), static_cast<std::streamsize>(text.size()));
  file.close();
  if (file.fail()) return {Code::kIo, "cannot write " + path.string() + ": set XDG_CACHE_HOME to a writable folder"};
  return Status::ok();
}

Result<Draft> Draft::create(const fs::path& path) {
  static std::atomic<int> count = 0;
  fs::path folder = path.string() + "." + std::to_string(::getpid()) + "." + std::to_string(count++);
  std::error_code error;
  fs::remove_all(folder, error);  // of a process that had this number before
  fs::create_directories(folder, error);
  if (error) {
    return Status(Code::kIo, "cannot create " + folder.string() + ": set XDG_CACHE_HOME to a writable folder");
  }
  return Draft(std::move(folder));
}

Draft::Draft(Draft&& other) noexcept : folder_(std::exchange(other.folder_, fs::path())) {}

Draft::~Draft() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

}  // namespace flexpte::msl_host
