#include "metal_delegate/metal/metal_error.h"

namespace flexpte::metal {
namespace {

struct Cause {
  Code code;
  std::string_view text;
};

// Of kernels that keep a display waiting; MTLCommandBufferError does not name it.
constexpr NS::UInteger kImpactingInteractivity = 14;

Cause cause_of(NS::Integer error_code) {
  switch (static_cast<NS::UInteger>(error_code)) {
    case MTL::CommandBufferErrorOutOfMemory:
      return {Code::kOutOfMemory,
              "the GPU is out of memory: use a smaller model or context, or free memory and run the step again"};
    case MTL::CommandBufferErrorNotPermitted:
      return {Code::kUnavailable,
              "the system does not let this process use the GPU now, as when an app is in the background: run the "
              "step again once the app is in the foreground"};
    case MTL::CommandBufferErrorTimeout:
      return {Code::kUnavailable,
              "the GPU took too long and the system stopped it: run the step again, with fewer tokens at a time"};
    case kImpactingInteractivity:
      return {Code::kUnavailable,
              "the system stopped the GPU because it kept the display waiting: run the step again, with fewer tokens "
              "at a time"};
    case MTL::CommandBufferErrorAccessRevoked:
      return {Code::kUnavailable, "the system took the GPU away after earlier errors: run the step again"};
    case MTL::CommandBufferErrorDeviceRemoved:
      return {Code::kUnavailable, "the GPU was removed: load the program again"};
    case MTL::CommandBufferErrorPageFault:
      return {Code::kInternal, "a kernel touched memory that is not mapped for the GPU"};
    case MTL::CommandBufferErrorInvalidResource:
      return {Code::kInternal, "a kernel was given a buffer that is gone"};
    case MTL::CommandBufferErrorStackOverflow:
      return {Code::kInternal, "a kernel ran out of stack"};
    default:
      return {Code::kInternal, "the GPU failed"};
  }
}

}  // namespace

std::string text_of(const NS::String* string) {
  const char* text = string == nullptr ? nullptr : string->utf8String();
  return text == nullptr ? std::string() : std::string(text);
}

std::string describe(const NS::Error* error, std::string_view otherwise) {
  const std::string text = error == nullptr ? std::string() : text_of(error->localizedDescription());
  return text.empty() ? std::string(otherwise) : text;
}

Status command_buffer_status(const MTL::CommandBuffer& command_buffer, size_t num_dispatches) {
  if (command_buffer.status() == MTL::CommandBufferStatusCompleted) return Status::ok();
  const NS::Error* error = command_buffer.error();
  const NS::Integer code = error == nullptr ? 0 : error->code();
  const Cause cause = cause_of(code);
  return {cause.code, "Metal: " + std::string(cause.text) + " (command buffer of " + std::to_string(num_dispatches) +
                          (num_dispatches == 1 ? " dispatch" : " dispatches") + ", error " + std::to_string(code) +
                          ": " + describe(error, "no description") + ")"};
}

}  // namespace flexpte::metal
