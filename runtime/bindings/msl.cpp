// Metal kernels through the shim (metal_delegate/msl_host), one dispatch at a time: for tests and benchmarks.
#include "runtime/bindings/msl.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "metal_delegate/msl_host/msl_library.h"
#include "runtime/bindings/errors.h"

namespace nb = nanobind;

namespace flexpte::bindings {
namespace {

nb::dict dict_of(const msl_host::KernelCounters& c) {
  nb::dict dict;
  dict["dispatches"] = c.dispatches;
  dict["threadgroups"] = c.threadgroups;
  dict["threads"] = c.threads;
  dict["constant_read_bytes"] = c.constant_read_bytes;
  dict["threadgroup_read_bytes"] = c.threadgroup_read_bytes;
  dict["threadgroup_written_bytes"] = c.threadgroup_written_bytes;
  dict["threadgroup_bytes"] = c.threadgroup_bytes;
  dict["barriers"] = c.barriers;
  dict["simdgroup_barriers"] = c.simdgroup_barriers;
  dict["simdgroup_operations"] = c.simdgroup_operations;
  dict["matrix_multiplies"] = c.matrix_multiplies;
  dict["matrix_flops"] = c.matrix_multiplies * 1024;
  dict["flops"] = c.flops;
  dict["instructions"] = c.instructions;
  dict["idle"] = c.idle();
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
  nb::dict buffers;
  for (const auto& [name, bytes] : c.buffers) {
    nb::dict buffer;
    buffer["read_bytes"] = bytes.read_bytes;
    buffer["written_bytes"] = bytes.written_bytes;
    buffer["unique_bytes"] = bytes.unique_bytes;
    buffers[name.c_str()] = buffer;
    read_bytes += bytes.read_bytes;
    written_bytes += bytes.written_bytes;
  }
  dict["device_read_bytes"] = read_bytes;
  dict["device_written_bytes"] = written_bytes;
  dict["buffers"] = buffers;
  return dict;
}

// A numpy array of any dtype, ml_dtypes' too.
gpu::BufferArgument argument_of(const nb::object& array, size_t number) {
  gpu::BufferArgument argument;
  argument.access = gpu::Access::kReadWrite;
  if (array.is_none()) return argument;
  if (!nb::cast<bool>(array.attr("flags").attr("c_contiguous"))) {
    throw nb::value_error(("buffer(" + std::to_string(number) + ") is not contiguous").c_str());
  }
  argument.data = reinterpret_cast<const std::byte*>(nb::cast<uintptr_t>(array.attr("ctypes").attr("data")));
  argument.size_bytes = nb::cast<size_t>(array.attr("nbytes"));
  if (!nb::cast<bool>(array.attr("flags").attr("writeable"))) argument.access = gpu::Access::kRead;
  if (argument.size_bytes == 0) argument.data = nullptr;
  return argument;
}

class MslLibrary {
 public:
  MslLibrary(const std::string& source, std::optional<bool> is_checked, bool is_reversed,
             const std::map<uint32_t, nb::object>& constants) {
    msl_host::Options options = msl_host::Options::from_environment();
    options.is_checked = is_checked.value_or(options.is_checked);
    options.is_reversed = is_reversed;
    for (const auto& [number, value] : constants) {
      std::string text = nb::cast<std::string>(nb::str(value));
      if (text == "True") text = "true";
      if (text == "False") text = "false";
      options.constants[number] = text;
    }
    auto library = msl_host::compile_library(source, options);
    check(library.status());
    library_ = std::move(library).value();
    queue_ = library_->make_msl_queue();
  }

  const std::vector<std::string>& functions() const { return library_->functions(); }

  nb::dict dispatch(const std::string& function, const std::vector<nb::object>& buffers, const nb::bytes& params,
                    std::array<uint32_t, 3> threadgroups, std::array<uint32_t, 3> threads,
                    const std::optional<std::vector<size_t>>& writable,
                    const std::optional<std::vector<size_t>>& threadgroup_bytes,
                    const std::optional<std::vector<std::string>>& names) {
    auto pipeline = queue_->pipeline(function);
    check(pipeline.status());
    std::vector<gpu::BufferArgument> arguments;
    for (size_t i = 0; i < buffers.size(); ++i) {
      gpu::BufferArgument& argument = arguments.emplace_back(argument_of(buffers[i], i + 1));
      if (writable && std::find(writable->begin(), writable->end(), i) == writable->end()) {
        argument.access = gpu::Access::kRead;
      }
      if (names && i < names->size()) argument.name = (*names)[i];
    }
    queue_->set_threadgroup_arguments(threadgroup_bytes.value_or(std::vector<size_t>()));
    queue_->reset_counters();
    const auto* bytes = reinterpret_cast<const std::byte*>(params.c_str());
    const Status status =
        queue_->dispatch(**pipeline, std::span(bytes, params.size()), arguments, {threadgroups, threads});
    const Status finished = queue_->finish();
    check(status);
    check(finished);
    return dict_of(queue_->kernel_counters().begin()->second);
  }

 private:
  std::shared_ptr<msl_host::Library> library_;
  std::unique_ptr<msl_host::Queue> queue_;
};

}  // namespace

void bind_msl(nb::module_& module) {
  nb::class_<MslLibrary>(module, "MslLibrary")
      .def(nb::init<const std::string&, std::optional<bool>, bool, const std::map<uint32_t, nb::object>&>(),
           nb::arg("source"), nb::kw_only(), nb::arg("checked") = nb::none(), nb::arg("reversed") = false,
           nb::arg("constants") = std::map<uint32_t, nb::object>())
      .def_prop_ro("functions", &MslLibrary::functions)
      .def("dispatch", &MslLibrary::dispatch, nb::arg("function"), nb::arg("buffers"), nb::arg("params"),
           nb::arg("threadgroups"), nb::arg("threads"), nb::kw_only(), nb::arg("writable") = nb::none(),
           nb::arg("threadgroup_bytes") = nb::none(), nb::arg("names") = nb::none());
}

}  // namespace flexpte::bindings
