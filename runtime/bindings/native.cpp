// flexpte.runtime._native: programs and sessions for runtime/program.py, which is their Python face. The only
// place where a Status becomes an exception.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "metal_delegate/delegate.h"
#include "runtime/bindings/errors.h"
#include "runtime/bindings/msl.h"
#include "runtime/bindings/ranges.h"
#include "runtime/kernels/kernels.h"
#include "runtime/program.h"
#include "runtime/session.h"

namespace nb = nanobind;

namespace {

using flexpte::Code;
using flexpte::DType;
using flexpte::Status;
using flexpte::Value;
using flexpte::ValueKind;
using flexpte::bindings::check;
using flexpte::bindings::StatusError;

// --- Errors

template <class T>
T value_of(flexpte::Result<T> result) {
  check(result.status());
  return std::move(result).value();
}

// Text of the file may be any bytes.
nb::object text(std::string_view bytes) {
  return nb::steal(PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const StatusError& error) {
    const nb::object type = nb::module_::import_("flexpte.runtime.errors").attr("FlexpteError");
    const std::string code(flexpte::code_name(error.status.code()));
    const nb::object exception = type(text(error.status.message()), code);
    PyErr_SetObject(type.ptr(), exception.ptr());
  }
}

// --- Tensors. bfloat16, which NumPy lacks, travels as its bits in int16.

struct OwnedBytes {
  explicit OwnedBytes(size_t size_bytes)
      : data(static_cast<std::byte*>(::operator new(std::max<size_t>(size_bytes, 1), kAlignment))) {}
  ~OwnedBytes() { ::operator delete(data, kAlignment); }
  OwnedBytes(const OwnedBytes&) = delete;
  OwnedBytes& operator=(const OwnedBytes&) = delete;

  static constexpr std::align_val_t kAlignment{64};
  std::byte* data;
};

nb::dlpack::dtype array_dtype(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * flexpte::element_size_bytes(dtype));
  nb::dlpack::dtype_code code = nb::dlpack::dtype_code::Int;
  if (dtype == DType::kBool) code = nb::dlpack::dtype_code::Bool;
  if (dtype == DType::kU8) code = nb::dlpack::dtype_code::UInt;
  if (flexpte::is_floating(dtype) && dtype != DType::kBF16) code = nb::dlpack::dtype_code::Float;
  return {static_cast<uint8_t>(code), bits, 1};
}

// The dtype of an array; `is_bfloat16` says that int16 bits are meant.
DType dtype_of(const nb::dlpack::dtype& dtype, bool is_bfloat16) {
  if (is_bfloat16) return DType::kBF16;
  for (int i = 0; i < flexpte::kNumDTypes; ++i) {
    const auto candidate = static_cast<DType>(i);
    if (candidate != DType::kBF16 && array_dtype(candidate) == dtype) return candidate;
  }
  throw StatusError({Code::kInvalidArgument,
                     "an input has a dtype that is not supported; supported are bool, uint8, "
                     "int8 to int64, float16, bfloat16, float32 and float64"});
}

using InputArray = nb::ndarray<nb::ro, nb::device::cpu>;

Value tensor_value(const InputArray& array, bool is_bfloat16) {
  if (array.ndim() > flexpte::kMaxRank) {
    throw StatusError({Code::kInvalidArgument, "an input has rank " + std::to_string(array.ndim()) + ", at most " +
                                                   std::to_string(flexpte::kMaxRank) + " is supported"});
  }
  Value value;
  value.kind = ValueKind::kTensor;
  value.tensor.data = const_cast<void*>(array.data());  // inputs are only read
  value.tensor.dtype = dtype_of(array.dtype(), is_bfloat16);
  value.tensor.rank = static_cast<int32_t>(array.ndim());
  for (size_t i = 0; i < array.ndim(); ++i) {
    value.tensor.sizes[i] = static_cast<int64_t>(array.shape(i));
    value.tensor.strides[i] = array.stride(i);
  }
  return value;
}

nb::object array_of(std::unique_ptr<OwnedBytes> bytes, const flexpte::TensorView& view) {
  std::vector<size_t> shape;
  for (int32_t d = 0; d < view.rank; ++d) shape.push_back(static_cast<size_t>(view.size(d)));
  std::byte* const data = bytes->data;
  const nb::capsule owner(bytes.release(), [](void* p) noexcept { delete static_cast<OwnedBytes*>(p); });
  return nb::cast(nb::ndarray<nb::numpy>(data, shape.size(), shape.data(), owner, nullptr, array_dtype(view.dtype)));
}

// --- Programs

nb::dict describe(const flexpte::ValueInfo& info) {
  nb::dict result;
  result["kind"] = std::string(flexpte::kind_name(info.initial.kind));
  if (info.initial.kind != ValueKind::kTensor) return result;
  const flexpte::TensorView& view = info.initial.tensor;
  result["dtype"] = std::string(flexpte::dtype_name(view.dtype));
  result["shape"] = std::vector<int64_t>(view.sizes.begin(), view.sizes.begin() + view.rank);
  result["dynamic"] = info.initial.dynamic;
  return result;
}

nb::list describe(const flexpte::Method& method, std::span<const int32_t> ids) {
  nb::list result;
  for (const int32_t id : ids) result.append(describe(method.values()[static_cast<size_t>(id)]));
  return result;
}

nb::dict describe(const flexpte::MethodDelegate& delegate) {
  nb::dict result;
  result["id"] = text(delegate.id);
  result["blob_size_bytes"] = delegate.blob_size_bytes;
  result["description"] = text(delegate.loaded->describe());
  nb::list states;
  for (const flexpte::StateInfo& state : delegate.loaded->states()) {
    nb::dict entry;
    entry["name"] = text(state.name);
    entry["layout"] = text(state.layout);
    entry["dtype"] = std::string(flexpte::dtype_name(state.dtype));
    entry["shape"] = std::vector<int64_t>(state.shape.sizes.begin(), state.shape.sizes.begin() + state.shape.rank);
    entry["size_bytes"] = state.size_bytes;
    states.append(entry);
  }
  result["states"] = states;
  return result;
}

nb::dict describe(const flexpte::Method& method) {
  nb::dict result;
  result["name"] = text(method.name());
  result["inputs"] = describe(method, method.inputs());
  result["outputs"] = describe(method, method.outputs());
  nb::list delegates;
  for (const flexpte::MethodDelegate& delegate : method.delegates()) delegates.append(describe(delegate));
  result["delegates"] = delegates;
  nb::list instructions;
  for (const flexpte::Instruction& instruction : method.instructions()) {
    const bool is_delegate = instruction.kind == flexpte::Instruction::Kind::kDelegate;
    instructions.append(nb::make_tuple(text(instruction.name), is_delegate));
  }
  result["instructions"] = instructions;
  nb::list states;
  for (const flexpte::PlannedState& state : method.states()) {
    states.append(nb::make_tuple(text(state.name), state.size_bytes));
  }
  result["states"] = states;
  size_t arena_size_bytes = 0;
  for (const size_t size_bytes : method.arena_sizes_bytes()) arena_size_bytes += size_bytes;
  result["arena_size_bytes"] = arena_size_bytes;
  return result;
}

class Program {
 public:
  explicit Program(std::shared_ptr<const flexpte::Program> program) : program_(std::move(program)) {}

  static Program load(flexpte::FileBytes file, const std::string& device, int num_threads) {
    const nb::gil_scoped_release release;
    const auto pool = std::make_shared<const flexpte::ThreadPool>(
        num_threads > 0 ? num_threads : flexpte::ThreadPool::default_num_threads());
    flexpte::DelegateOptions options;
    options.device = device;
    options.pool = pool;
    std::vector<std::shared_ptr<flexpte::Delegate>> delegates;
    delegates.push_back(flexpte::make_metal_delegate(std::move(options)));
    return Program(value_of(flexpte::Program::load(std::move(file), std::move(delegates), pool)));
  }
  static Program load_path(const std::string& path, const std::string& device, int num_threads) {
    return load(value_of(flexpte::FileBytes::map(path)), device, num_threads);
  }
  static Program load_bytes(const nb::bytes& bytes, const std::string& device, int num_threads) {
    const std::span<const std::byte> view(reinterpret_cast<const std::byte*>(bytes.c_str()), bytes.size());
    return load(value_of(flexpte::FileBytes::copy(view)), device, num_threads);
  }

  nb::list methods() const {
    nb::list result;
    for (const auto& method : program_->methods()) result.append(describe(*method));
    return result;
  }

  nb::object named_data(const std::string& key) const {
    const auto bytes = program_->file().find(key);
    if (!bytes.is_ok()) return nb::none();
    return nb::bytes(reinterpret_cast<const char*>(bytes->data()), bytes->size());
  }

  nb::dict file() const {
    const flexpte::PteFile& file = program_->file();
    nb::dict result;
    result["name"] = text(file.name());
    result["file_size_bytes"] = file.file_size_bytes();
    result["program_size_bytes"] = file.program_size_bytes();
    std::vector<size_t> segments;
    for (const auto segment : file.segments()) segments.push_back(segment.size());
    result["segment_sizes_bytes"] = segments;
    nb::dict named;
    for (const auto& [key, bytes] : file.named_data()) named[text(key)] = bytes.size();
    result["named_data_sizes_bytes"] = named;
    return result;
  }

  const std::shared_ptr<const flexpte::Program>& shared() const { return program_; }

 private:
  std::shared_ptr<const flexpte::Program> program_;
};

// --- Sessions. Threads that share one take turns.

class Session {
 public:
  explicit Session(const Program& program) {
    const nb::gil_scoped_release release;
    session_ = value_of(flexpte::Session::create(program.shared()));
  }

  // `inputs`: None, bool, int, float, or (array, is bfloat16). Gives (array, dtype) or a number for each output.
  nb::list run(const std::string& method_name, const nb::list& inputs) {
    const size_t method = value_of(session_->program().method_index(method_name));
    std::vector<InputArray> arrays;
    std::vector<Value> values;
    for (const nb::handle input : inputs) values.push_back(input_value(input, arrays));
    const auto outputs = session_->program().methods()[method]->outputs();
    std::vector<Value> results;
    std::vector<std::unique_ptr<OwnedBytes>> buffers(outputs.size());
    {
      const nb::gil_scoped_release release;
      const std::lock_guard lock(mutex_);
      check(session_->run(method, values));
      for (size_t i = 0; i < outputs.size(); ++i) {
        results.push_back(session_->output(method, i));
        if (results[i].kind == ValueKind::kTensor) buffers[i] = copy_of(results[i].tensor);
      }
    }
    nb::list list;
    for (size_t i = 0; i < outputs.size(); ++i) list.append(output_object(results[i], std::move(buffers[i])));
    return list;
  }

  void reset() {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    check(session_->reset());
  }

  size_t states_size_bytes() const { return session_->states_size_bytes(); }
  std::vector<std::string> counters() {
    const std::lock_guard lock(mutex_);
    return session_->counters();
  }

 private:
  static Value input_value(nb::handle input, std::vector<InputArray>& arrays) {
    Value value;
    if (input.is_none()) return value;
    if (nb::isinstance<nb::bool_>(input)) {
      value.kind = ValueKind::kBool;
      value.integer = nb::cast<bool>(input) ? 1 : 0;
    } else if (nb::isinstance<nb::int_>(input)) {
      value.kind = ValueKind::kInt;
      if (!nb::try_cast(input, value.integer)) {
        throw StatusError({Code::kInvalidArgument, "an integer input does not fit 64 bits"});
      }
    } else if (nb::isinstance<nb::float_>(input)) {
      value.kind = ValueKind::kDouble;
      value.real = nb::cast<double>(input);
    } else {
      const auto pair = nb::cast<nb::tuple>(input);
      arrays.push_back(nb::cast<InputArray>(pair[0]));
      value = tensor_value(arrays.back(), nb::cast<bool>(pair[1]));
    }
    return value;
  }

  // A contiguous copy; `view` becomes its shape.
  std::unique_ptr<OwnedBytes> copy_of(flexpte::TensorView& view) const {
    const auto size_bytes = static_cast<size_t>(view.num_elements() * flexpte::element_size_bytes(view.dtype));
    auto bytes = std::make_unique<OwnedBytes>(size_bytes);
    if (size_bytes == 0) return bytes;
    flexpte::TensorView target = view;
    target.data = bytes->data;
    int64_t stride = 1;
    for (int32_t d = view.rank; d-- > 0;) {
      target.strides[static_cast<size_t>(d)] = stride;
      stride *= view.size(d);
    }
    flexpte::copy(view, target, session_->program().pool());
    return bytes;
  }

  static nb::object output_object(const Value& value, std::unique_ptr<OwnedBytes> bytes) {
    switch (value.kind) {
      case ValueKind::kTensor:
        return nb::make_tuple(array_of(std::move(bytes), value.tensor),
                              std::string(flexpte::dtype_name(value.tensor.dtype)));
      case ValueKind::kInt:
        return nb::int_(value.integer);
      case ValueKind::kBool:
        return nb::bool_(value.integer != 0);
      case ValueKind::kDouble:
        return nb::float_(value.real);
      default:
        return nb::none();
    }
  }

  std::mutex mutex_;
  std::unique_ptr<flexpte::Session> session_;
};

}  // namespace

NB_MODULE(_native, module) {
  nb::register_exception_translator(translate);
  nb::class_<Program>(module, "Program")
      .def_static("load_path", &Program::load_path, nb::arg("path"), nb::arg("device"), nb::arg("num_threads"))
      .def_static("load_bytes", &Program::load_bytes, nb::arg("bytes"), nb::arg("device"), nb::arg("num_threads"))
      .def("methods", &Program::methods)
      .def("named_data", &Program::named_data, nb::arg("key"))
      .def("file", &Program::file);
  nb::class_<Session>(module, "Session")
      .def(nb::init<const Program&>(), nb::arg("program"))
      .def("run", &Session::run, nb::arg("method"), nb::arg("inputs"))
      .def("reset", &Session::reset)
      .def("counters", &Session::counters)
      .def("states_size_bytes", &Session::states_size_bytes);
  module.def("available_devices", &flexpte::available_devices);
  flexpte::bindings::bind_ranges(module);
  flexpte::bindings::bind_msl(module);
}
