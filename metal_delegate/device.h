// What a device of the delegate is: something that makes a bound program executable.
#pragma once

#include <memory>
#include <string_view>

#include "metal_delegate/program.h"
#include "runtime/delegate.h"
#include "runtime/status.h"

namespace flexpte::bound {

// A bound program made ready for one device. Immutable; shared by sessions.
class Executable {
 public:
  virtual ~Executable() = default;
  virtual Result<std::unique_ptr<DelegateInstance>> instantiate(StateStore& states) const = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string_view name() const = 0;
  // `program` outlives the result.
  virtual Result<std::unique_ptr<Executable>> prepare(const BoundProgram& program) const = 0;
};

}  // namespace flexpte::bound
