#include "metal_delegate/metal/metal_library.h"

#include <TargetConditionals.h>

#include <utility>

#include "metal_delegate/metal/metal_cpp.h"
#include "metal_delegate/metal/metal_error.h"
#include "metal_delegate/metal/metal_kernels.h"
#include "metal_delegate/metal/metal_queue.h"

namespace flexpte::metal {
namespace {

// The first systems with Metal 3.1, which brought bfloat.
#if defined(TARGET_OS_IPHONE) && TARGET_OS_IPHONE
constexpr NS::OperatingSystemVersion kMetal31System = {17, 0, 0};
#else
constexpr NS::OperatingSystemVersion kMetal31System = {14, 0, 0};
#endif

class MetalLibrary final : public gpu::Library {
 public:
  explicit MetalLibrary(std::shared_ptr<MetalKernels> kernels) : kernels_(std::move(kernels)) {}
  Result<std::unique_ptr<gpu::Queue>> make_queue() const override {
    FLEXPTE_ASSIGN(std::unique_ptr<MetalQueue> queue, MetalQueue::create(kernels_));
    return std::unique_ptr<gpu::Queue>(std::move(queue));
  }

 private:
  std::shared_ptr<MetalKernels> kernels_;
};

Result<NS::SharedPtr<MTL::Device>> default_device() {
  auto device = NS::TransferPtr(MTL::CreateSystemDefaultDevice());
  if (!device) return Status(Code::kUnsupported, "this machine has no Metal GPU: use device \"host\"");
  // Apple7 (M1, A14) is the first with simdgroup_matrix.
  if (!device->supportsFamily(MTL::GPUFamilyApple7)) {
    return Status(Code::kUnsupported, "the GPU of this machine (" + text_of(device->name()) +
                                          ") is older than M1 and A14: use device \"host\"");
  }
  return device;
}

Result<NS::SharedPtr<MTL::Library>> load(MTL::Device& device, const std::string& path) {
  const NS::String* string = NS::String::string(path.c_str(), NS::UTF8StringEncoding);
  const NS::URL* url = string == nullptr ? nullptr : NS::URL::fileURLWithPath(string);
  NS::Error* error = nullptr;
  auto library = NS::TransferPtr(url == nullptr ? nullptr : device.newLibrary(url, &error));
  if (!library) {
    return Status(Code::kIo,
                  "cannot load the Metal library " + path + ": " + describe(error, "Metal does not say why"));
  }
  return library;
}

Result<NS::SharedPtr<MTL::Library>> compile(MTL::Device& device, std::string_view source, bool is_fast_math) {
  const std::string terminated(source);
  const NS::String* text = NS::String::string(terminated.c_str(), NS::UTF8StringEncoding);
  if (text == nullptr) return Status(Code::kInvalidProgram, "the Metal text of this program is not UTF-8");
  const auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  if (!NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion(kMetal31System)) {
    return Status(Code::kUnsupported,
                  "the Metal kernels of this program need macOS 14 or iOS 17, which brought bfloat16: use device "
                  "\"host\"");
  }
  options->setLanguageVersion(MTL::LanguageVersion3_1);
  options->setFastMathEnabled(is_fast_math);
  NS::Error* error = nullptr;
  auto library = NS::TransferPtr(device.newLibrary(text, options.get(), &error));
  if (!library) {
    return Status(Code::kInvalidProgram,
                  "the Metal kernels of this program do not compile: " + describe(error, "Metal does not say why"));
  }
  return library;
}

}  // namespace

Result<std::shared_ptr<gpu::Library>> make_metal_library(std::string_view source, const Options& options) {
  const ScopedPool pool;
  FLEXPTE_ASSIGN(NS::SharedPtr<MTL::Device> device, default_device());
  FLEXPTE_ASSIGN(NS::SharedPtr<MTL::Library> library, options.metallib_path.empty()
                                                          ? compile(*device.get(), source, options.is_fast_math)
                                                          : load(*device.get(), options.metallib_path));
  auto kernels = std::make_shared<MetalKernels>(std::move(device), std::move(library));
  return std::shared_ptr<gpu::Library>(std::make_shared<MetalLibrary>(std::move(kernels)));
}

}  // namespace flexpte::metal
