#include "metal_delegate/msl_host/compiler.h"

#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "metal_delegate/msl_host/instrument.h"
#include "metal_delegate/msl_host/lint.h"
#include "metal_delegate/msl_host/process.h"
#include "metal_delegate/msl_host/rewrite.h"
#include "metal_delegate/msl_host/shim_files.h"
#include "metal_delegate/msl_host/tokens.h"

namespace flexpte::msl_host {
namespace {

namespace fs = std::filesystem;
using Command = std::vector<std::string>;

fs::path cache_folder() {
  if (const std::string folder = environment("XDG_CACHE_HOME"); !folder.empty()) {
    return fs::path(folder) / "flexpte" / "msl-host";
  }
  const std::string home = environment("HOME");
  return fs::path(home.empty() ? "/tmp" : home) / ".cache" / "flexpte" / "msl-host";
}

Result<std::string> find_compiler() {
  Command names = {environment("FLEXPTE_CLANG")};
#if defined(__APPLE__)
  if (names[0].empty()) names = {"clang++"};
#else
  if (names[0].empty()) names = {"clang++-19", "clang++-20", "clang++-21", "clang++"};
#endif
  for (const std::string& name : names) {
    if (std::string path = find_program(name); !path.empty()) return path;
  }
  return Status(Code::kUnsupported, "the device \"msl-host\" needs clang 19 or later, and " + names[0] +
                                        " was not found: install clang-19 or set FLEXPTE_CLANG to the path of clang++");
}

Command target_flags() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"-march=x86-64-v3"};
#endif
  return {};
}

// What tells one build of the compiler from another.
std::string identity_of(const std::string& compiler) {
  std::error_code error;
  const fs::path path = fs::canonical(compiler, error);
  const auto size = fs::file_size(path, error);
  const auto time = fs::last_write_time(path, error).time_since_epoch().count();
  std::string identity = path.string();
  for (const auto number : {static_cast<int64_t>(size), static_cast<int64_t>(time)}) {
    identity += '|';
    identity += std::to_string(number);
  }
  for (const std::string& flag : target_flags()) identity += flag;
  return identity;
}

Command with(Command command, const Command& more) {
  command.insert(command.end(), more.begin(), more.end());
  return command;
}

// The folder with the shim's headers and its compiled runtime.
Result<fs::path> shim_folder(const std::string& compiler, const fs::path& cache) {
  std::string all = identity_of(compiler);
  for (const ShimFile& file : shim_files()) all += file.text;
  const fs::path folder = cache / ("shim-" + hash_of({all}));
  if (fs::exists(folder / "checks.o")) return folder;
  FLEXPTE_ASSIGN(const Draft draft, Draft::create(folder));
  for (const ShimFile& file : shim_files()) FLEXPTE_TRY(write_text(draft.folder() / file.name, file.text));
  for (const std::string name : {"scheduler", "checks"}) {
    const Command command = {compiler,
                             "-std=c++17",
                             "-O2",
                             "-fPIC",
                             "-fno-exceptions",
                             "-fvisibility=hidden",
                             "-c",
                             (draft.folder() / (name + ".cpp")).string(),
                             "-o",
                             (draft.folder() / (name + ".o")).string()};
    if (run_program(with(command, target_flags()), draft.folder() / "log") != 0) {
      return Status(Code::kInternal, "the shim's runtime does not compile: " + read_text(draft.folder() / "log"));
    }
  }
  std::error_code error;
  fs::rename(draft.folder(), folder, error);  // fails where another process was faster
  if (!fs::exists(folder / "checks.o")) return Status(Code::kIo, "cannot write " + folder.string());
  return folder;
}

// The first error of clang's output: "line 12: ...", where the file is the kernel text.
std::string first_error(const std::string& log) {
  const size_t at = log.find("error:");
  if (at == std::string::npos) return log.substr(0, 400);
  const size_t begin = log.rfind('\n', at) == std::string::npos ? 0 : log.rfind('\n', at) + 1;
  std::string line = log.substr(begin, log.find('\n', at) - begin);
  const size_t name = line.find(kKernelFile);
  if (name != std::string::npos && name < at - begin) {
    return "line " + std::to_string(std::atoi(line.c_str() + name + kKernelFile.size() + 1)) + ": " +
           line.substr(line.find("error:"));
  }
  // In the shim's headers: the place in the kernel text that led there follows as a note.
  const size_t note = log.find(std::string(kKernelFile) + ":", at);
  if (note != std::string::npos) {
    return "line " + std::to_string(std::atoi(log.c_str() + note + kKernelFile.size() + 1)) + ": " +
           line.substr(line.find("error:"));
  }
  return line.substr(line.find("error:"));
}

Status compile_error(const fs::path& log) {
  return {Code::kInvalidProgram, "the Metal kernels do not compile: " + first_error(read_text(log))};
}

// Leaves out #include <metal_...>; `has_directives`: others than #pragma are left.
std::string without_includes(std::string_view source, bool& has_directives) {
  std::string text;
  has_directives = false;
  while (!source.empty()) {
    const size_t end = std::min(source.find('\n'), source.size());
    const std::string_view line = source.substr(0, end);
    source.remove_prefix(std::min(end + 1, source.size()));
    const size_t hash = line.find_first_not_of(" \t");
    const bool is_directive = hash != std::string_view::npos && line[hash] == '#';
    const bool is_metal = is_directive && line.find("include") != std::string_view::npos &&
                          line.find("<metal_") != std::string_view::npos;
    has_directives = has_directives || (is_directive && !is_metal && line.find("pragma") == std::string_view::npos);
    if (!is_metal) text += line;
    text += '\n';
  }
  return text;
}

Result<std::string> preprocess(std::string_view source, const std::string& compiler, const fs::path& folder) {
  bool has_directives = false;
  const std::string text = without_includes(source, has_directives);
  if (!has_directives) return text;
  const fs::path input = folder / kKernelFile;
  const fs::path output = folder / "kernels.ii";
  FLEXPTE_TRY(write_text(input, text));
  const Command command = {compiler,
                           "-E",
                           "-x",
                           "c++",
                           "-std=c++17",
                           "-nostdinc",
                           "-D__METAL__=1",
                           "-D__METAL_VERSION__=310",
                           "-Wno-everything",
                           input.string(),
                           "-o",
                           output.string()};
  if (run_program(command, folder / "log") != 0) {
    const Status error = compile_error(folder / "log");
    if (error.message().find("file not found") == std::string::npos) return error;
    return Status(error.code(), error.message() + "; kernels include <metal_stdlib> and the like only");
  }
  return read_text(output);
}

}  // namespace

Result<std::string> build_library(std::string_view source, const Options& options) {
  FLEXPTE_ASSIGN(const std::string compiler, find_compiler());
  const fs::path cache = cache_folder();
  FLEXPTE_ASSIGN(const fs::path shim, shim_folder(compiler, cache));
  std::string settings = options.is_checked ? "checked" : "fast";
  for (const auto& [number, value] : options.constants) {
    settings += '|';
    settings += std::to_string(number);
    settings += '=';
    settings += value;
  }
  const std::string key = hash_of({source, shim.string(), settings});
  const fs::path library = cache / (key + ".so");
  if (fs::exists(library)) return library.string();

  FLEXPTE_ASSIGN(const Draft draft, Draft::create(cache / key));
  const fs::path log = draft.folder() / "log";
  const fs::path text = draft.folder() / kKernelFile;
  const fs::path ir = draft.folder() / "kernels.ll";
  const fs::path built = draft.folder() / "kernels.so";
  FLEXPTE_ASSIGN(const std::string preprocessed, preprocess(source, compiler, draft.folder()));
  FLEXPTE_ASSIGN(const std::string rewritten, rewrite_kernels(preprocessed, options.constants));
  FLEXPTE_TRY(write_text(text, rewritten));
  const Command compile = {compiler, "-x", "c++", "-std=c++17", "-O2", "-nostdinc", "-fPIC", "-fno-exceptions",
                           "-fno-rtti", "-fvisibility=hidden", "-fno-vectorize", "-fno-slp-vectorize",
                           "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fno-strict-aliasing",
                           "-fno-optimize-sibling-calls", "-mllvm", "-disable-loop-idiom-all",
                           // Calls stay under the control flow that the kernel text has: threads meet at them.
                           "-fconvergent-functions",
                           // Arithmetic of half and bfloat rounds after each operation.
                           "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
                           "-gline-tables-only", "-Wno-everything", "-Werror=return-type", "-isystem", shim.string(),
                           "-S", "-emit-llvm", text.string(), "-o", ir.string()};
  if (run_program(with(compile, target_flags()), log) != 0) return compile_error(log);
  FLEXPTE_ASSIGN(const std::string instrumented, instrument_ir(read_text(ir), kKernelFile, options.is_checked));
  FLEXPTE_TRY(write_text(ir, instrumented));
  Command link = {compiler,
                  "-shared",
                  "-fPIC",
                  options.is_checked ? "-O1" : "-O2",
                  "-Wno-override-module",
                  ir.string(),
                  (shim / "scheduler.o").string(),
                  (shim / "checks.o").string(),
                  "-o",
                  built.string(),
                  "-lm"};
#if !defined(__APPLE__)
  link.emplace_back("-Wl,-z,defs");
#endif
  if (run_program(with(link, target_flags()), log) != 0) {
    const std::string output = read_text(log);
    if (const size_t at = output.find("undefined reference to "); at != std::string::npos) {
      return Status(Code::kInvalidProgram, "the Metal kernels use what has no value or definition: " +
                                               output.substr(at, output.find('\n', at) - at));
    }
    return Status(Code::kInternal, "the instrumented kernels do not link: " + output.substr(0, 2000));
  }
  std::error_code error;
  fs::rename(built, library, error);
  if (error) return Status(Code::kIo, "cannot write " + library.string() + ": " + error.message());
  return library.string();
}

}  // namespace flexpte::msl_host
