// Errors as values: every fallible function returns Status or Result<T>. No exceptions inside.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace flexpte {

enum class Code : int8_t {
  kOk = 0,
  kInvalidArgument,  // the caller passed something that the method does not take
  kInvalidProgram,   // the file is malformed or inconsistent
  kUnsupported,      // well-formed, but this build or version cannot do it
  kNotFound,         // no method, delegate, op or named data of that name
  kOutOfRange,       // an index, or a position past a cache's capacity ("context full")
  kOutOfMemory,
  kIo,
  kUnavailable,  // not now, but later perhaps: a GPU that the system keeps from apps in the background
  kInternal,
};

// The name that users see, e.g. "InvalidArgument".
constexpr std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "Ok";
    case Code::kInvalidArgument:
      return "InvalidArgument";
    case Code::kInvalidProgram:
      return "InvalidProgram";
    case Code::kUnsupported:
      return "Unsupported";
    case Code::kNotFound:
      return "NotFound";
    case Code::kOutOfRange:
      return "OutOfRange";
    case Code::kOutOfMemory:
      return "OutOfMemory";
    case Code::kIo:
      return "Io";
    case Code::kUnavailable:
      return "Unavailable";
    case Code::kInternal:
      return "Internal";
  }
  return "Unknown";
}

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status ok() { return {}; }
  bool is_ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {}  // NOLINT(google-explicit-constructor)

  bool is_ok() const { return state_.index() == 0; }
  // Ok when there is a value.
  Status status() const { return is_ok() ? Status() : std::get<1>(state_); }
  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace flexpte

#define FLEXPTE_CONCAT_INNER(a, b) a##b
#define FLEXPTE_CONCAT(a, b) FLEXPTE_CONCAT_INNER(a, b)

// Return the status of `expr` from the enclosing function unless it is ok.
#define FLEXPTE_TRY(expr)                                                     \
  do {                                                                        \
    if (::flexpte::Status status_ = (expr); !status_.is_ok()) return status_; \
  } while (false)

// `FLEXPTE_ASSIGN(auto x, f());` binds the value of a Result, or returns its status.
#define FLEXPTE_ASSIGN(lhs, expr) FLEXPTE_ASSIGN_INNER(FLEXPTE_CONCAT(result_, __LINE__), lhs, expr)
#define FLEXPTE_ASSIGN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                         \
  if (!tmp.is_ok()) return tmp.status();     \
  lhs = std::move(tmp).value()
