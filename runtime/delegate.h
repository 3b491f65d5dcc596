// What a delegate implements and what a program gives it. The runtime knows delegates by this
// interface only; a table of them is passed in when a program is loaded.
//
// Lifetimes: Delegate > LoadedDelegate (one per delegated region of a program, immutable, shared
// by all sessions) > DelegateInstance (one per region and session: arena, bound states).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "runtime/status.h"
#include "runtime/tensor.h"

namespace flexpte {

// Named data of the program; the bytes are mapped read-only and live as long as the program.
class NamedData {
 public:
  virtual ~NamedData() = default;
  virtual Result<std::span<const std::byte>> find(std::string_view key) const = 0;
};

// Buffers that outlive a call, owned by a session, keyed by name, shared by its methods.
class StateStore {
 public:
  virtual ~StateStore() = default;
  // The buffer `name`, created on first use: a copy of `initial`, or zeros when that is empty.
  // 64-byte aligned; stays where it is until the session ends. A second use with another size is
  // an error. Pages of a zero buffer that are never touched cost no memory.
  virtual Result<std::span<std::byte>> state(std::string_view name, size_t size_bytes,
                                             std::span<const std::byte> initial) = 0;
};

// One argument of a delegate call. Tensor inputs may be strided; outputs are contiguous with room
// for `capacity_bytes`, and execute() sets their sizes and strides.
struct DelegateArgument {
  enum class Kind : int8_t { kTensor, kInt };
  Kind kind = Kind::kTensor;
  TensorView tensor;
  size_t capacity_bytes = 0;  // outputs
  int64_t integer = 0;
};

class DelegateInstance {
 public:
  virtual ~DelegateInstance() = default;
  // Runs the region: inputs then outputs, in the order of the delegate call. Checks shapes and
  // positions before it writes anything, so that a failed call leaves the states unchanged.
  virtual Status execute(std::span<DelegateArgument> inputs, std::span<DelegateArgument> outputs) = 0;
  // What its kernels did since it was made, where the device counts: one JSON object, else empty.
  virtual std::string counters() const { return {}; }
};

// One cache or other state of a delegated region, for inspection.
struct StateInfo {
  std::string name;
  std::string layout;  // "contiguous"
  DType dtype = DType::kF32;
  TensorView shape;  // data is null
  size_t size_bytes = 0;
};

class LoadedDelegate {
 public:
  virtual ~LoadedDelegate() = default;
  // How the arguments of a delegate call divide: the file lists them without saying which is which.
  virtual size_t num_inputs() const = 0;
  virtual size_t num_outputs() const = 0;
  virtual Result<std::unique_ptr<DelegateInstance>> instantiate(StateStore& states) const = 0;
  virtual std::span<const StateInfo> states() const = 0;
  // Human-readable description of the region, for `flexpte inspect`: one JSON object.
  virtual std::string describe() const = 0;
};

class Delegate {
 public:
  virtual ~Delegate() = default;
  // The backend id in the .pte, e.g. "FlexpteBackend".
  virtual std::string_view name() const = 0;
  // `blob` and `data` outlive the result. Verifies everything that later steps rely on.
  virtual Result<std::unique_ptr<LoadedDelegate>> load(std::span<const std::byte> blob,
                                                       const NamedData& data) const = 0;
};

}  // namespace flexpte
