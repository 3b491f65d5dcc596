#include "metal_delegate/msl_shim/compiler.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <vector>

#include "metal_delegate/msl_shim/instrument.h"
#include "metal_delegate/msl_shim/rewrite.h"
#include "metal_delegate/msl_shim/shim_files.h"

extern char** environ;

namespace flexpte::msl_host {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSourceName = "kernels.metal";

std::string hash_of(std::initializer_list<std::string_view> parts) {
  // FNV-1a, twice with different offsets.
  std::array<uint64_t, 2> hashes = {0xcbf29ce484222325u, 0x84222325cbf29ce4u};
  for (const std::string_view part : parts) {
    for (const char c : part) {
      for (uint64_t& hash : hashes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    }
    for (uint64_t& hash : hashes) hash = (hash ^ 0x1ffu) * 0x100000001b3u;
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

fs::path cache_folder() {
  if (const std::string folder = environment("FLEXPTE_CACHE_DIR"); !folder.empty())
    return fs::path(folder) / "msl-host";
  if (const std::string folder = environment("XDG_CACHE_HOME"); !folder.empty()) {
    return fs::path(folder) / "flexpte" / "msl-host";
  }
  const std::string home = environment("HOME");
  return fs::path(home.empty() ? "/tmp" : home) / ".cache" / "flexpte" / "msl-host";
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
  if (file.fail()) return {Code::kIo, "cannot write " + path.string() + ": set FLEXPTE_CACHE_DIR to a writable folder"};
  return Status::ok();
}

// Runs a program; its standard error goes to `log`. The exit status, or -1 where it did not start.
int run(const std::vector<std::string>& command, const fs::path& log) {
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
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return ::access(name.c_str(), X_OK) == 0 ? name : std::string();
  std::istringstream path(environment("PATH"));
  for (std::string folder; std::getline(path, folder, ':');) {
    const std::string candidate = folder + "/" + name;
    if (!folder.empty() && ::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return {};
}

Result<std::string> find_compiler() {
  std::vector<std::string> names = {environment("FLEXPTE_CLANG")};
  if (names[0].empty()) names = {"clang++-19", "clang++-20", "clang++-21", "clang++"};
  for (const std::string& name : names) {
    if (std::string path = find_program(name); !path.empty()) return path;
  }
  return Status(Code::kUnsupported, "device \"msl-host\" needs clang 19 or later (" + names[0] +
                                        " was not found): apt install clang-19, or set FLEXPTE_CLANG to its path");
}

std::vector<std::string> target_flags() {
#if defined(__x86_64__)
  return {"-march=x86-64-v3"};
#else
  return {};
#endif
}

// The folder with the shim's headers and its compiled runtime.
Result<fs::path> shim_folder(const std::string& compiler, const fs::path& cache) {
  std::string all = compiler;
  for (const ShimFile& file : shim_files()) all += file.text;
  const fs::path folder = cache / ("shim-" + hash_of({all}));
  if (fs::exists(folder / "runtime.o")) return folder;
  const fs::path draft = folder.string() + "." + std::to_string(::getpid());
  std::error_code error;
  fs::create_directories(draft, error);
  if (error)
    return Status(Code::kIo, "cannot create " + draft.string() + ": set FLEXPTE_CACHE_DIR to a writable folder");
  for (const ShimFile& file : shim_files()) FLEXPTE_TRY(write_text(draft / file.name, file.text));
  std::vector<std::string> command = {compiler, "-std=c++17", "-O2", "-fPIC", "-fvisibility=default"};
  for (const std::string& flag : target_flags()) command.push_back(flag);
  for (const std::string& word :
       {std::string("-c"), (draft / "runtime.cpp").string(), std::string("-o"), (draft / "runtime.o").string()}) {
    command.push_back(word);
  }
  if (run(command, draft / "log") != 0) {
    return Status(Code::kInternal, "the shim's runtime does not compile: " + read_text(draft / "log"));
  }
  fs::rename(draft, folder, error);
  if (error) fs::remove_all(draft, error);  // another process was faster
  return folder;
}

// The first error of clang's output, with the file's name shortened.
std::string first_error(const std::string& log) {
  const size_t at = log.find("error:");
  if (at == std::string::npos) return log.substr(0, 400);
  size_t begin = log.rfind('\n', at);
  begin = begin == std::string::npos ? 0 : begin + 1;
  std::string line = log.substr(begin, log.find('\n', at) - begin);
  if (const size_t name = line.find(kSourceName); name != std::string::npos) {
    line = line.substr(name + kSourceName.size());
    if (!line.empty() && line[0] == ':') line = "line " + line.substr(1);
  }
  return line;
}

}  // namespace

Result<std::string> build_library(std::string_view source, bool is_checked) {
  FLEXPTE_ASSIGN(const std::string compiler, find_compiler());
  const fs::path cache = cache_folder();
  FLEXPTE_ASSIGN(const fs::path shim, shim_folder(compiler, cache));
  const std::string key = hash_of({source, shim.string(), is_checked ? "checked" : "fast"});
  const fs::path library = cache / (key + ".so");
  if (fs::exists(library)) return library.string();
  FLEXPTE_ASSIGN(const RewrittenKernels rewritten, rewrite_kernels(source));
  const fs::path draft = cache / (key + "." + std::to_string(::getpid()));
  std::error_code error;
  fs::create_directories(draft, error);
  if (error)
    return Status(Code::kIo, "cannot create " + draft.string() + ": set FLEXPTE_CACHE_DIR to a writable folder");
  struct Cleanup {
    const fs::path& folder;
    ~Cleanup() {
      std::error_code ignored;
      fs::remove_all(folder, ignored);
    }
  } cleanup{draft};
  const fs::path text = draft / kSourceName;
  const fs::path ir = draft / "kernels.ll";
  const fs::path log = draft / "log";
  FLEXPTE_TRY(write_text(text, rewritten.text));
  std::vector<std::string> command = {
      compiler, "-x", "c++", "-std=c++17", "-O2", "-nostdinc", "-fPIC", "-fno-exceptions", "-fno-rtti",
      "-fno-vectorize", "-fno-slp-vectorize", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
      "-fno-strict-aliasing",
      // Arithmetic of half and bfloat rounds after each operation.
      "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none", "-gline-tables-only",
      "-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Werror=return-type", "-Werror=undefined-inline",
      "-isystem", shim.string(), "-S", "-emit-llvm", text.string(), "-o", ir.string()};
  for (const std::string& flag : target_flags()) command.push_back(flag);
  if (run(command, log) != 0) {
    return Status(Code::kInvalidProgram, "the Metal kernels do not compile: " + first_error(read_text(log)));
  }
  FLEXPTE_TRY(write_text(ir, instrument_ir(read_text(ir), kSourceName, is_checked)));
  const fs::path built = draft / "kernels.so";
  command = {compiler,
             "-shared",
             "-fPIC",
             "-O1",
             "-Wno-override-module",
             ir.string(),
             (shim / "runtime.o").string(),
             "-o",
             built.string(),
             "-lm",
             "-Wl,-z,defs"};
#if defined(__APPLE__)
  command.pop_back();
#endif
  for (const std::string& flag : target_flags()) command.push_back(flag);
  if (run(command, log) != 0) {
    return Status(Code::kInternal, "the instrumented kernels do not link: " + read_text(log).substr(0, 2000));
  }
  fs::rename(built, library, error);
  if (error) return Status(Code::kIo, "cannot write " + library.string() + ": " + error.message());
  return library.string();
}

}  // namespace flexpte::msl_host
