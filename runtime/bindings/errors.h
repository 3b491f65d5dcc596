// A Status as the exception that the bindings translate to FlexpteError.
#pragma once

#include <exception>
#include <utility>

#include "runtime/status.h"

namespace flexpte::bindings {

struct StatusError : std::exception {
  explicit StatusError(Status s) : status(std::move(s)) {}
  const char* what() const noexcept override { return status.message().c_str(); }
  Status status;
};

inline void check(const Status& status) {
  if (!status.is_ok()) throw StatusError(status);
}

}  // namespace flexpte::bindings
