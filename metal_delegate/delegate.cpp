#include "metal_delegate/delegate.h"

#include <utility>

#include "metal_delegate/describe.h"
#include "metal_delegate/device.h"
#include "metal_delegate/gpu/gpu_device.h"
#include "metal_delegate/host_device.h"
#ifdef FLEXPTE_HAS_METAL
#include "metal_delegate/metal/metal_library.h"
#endif
#include "metal_delegate/msl_host/msl_library.h"
#include "metal_delegate/payload.h"

namespace flexpte {
namespace {

class LoadedPayload final : public LoadedDelegate {
 public:
  LoadedPayload(std::unique_ptr<bound::BoundProgram> program, std::unique_ptr<bound::Executable> executable,
                std::string device)
      : program_(std::move(program)), executable_(std::move(executable)), device_(std::move(device)) {
    for (const bound::State& state : program_->states) {
      states_.push_back({state.name, "contiguous", state.dtype, state.shape, state.size_bytes});
    }
  }

  Result<std::unique_ptr<DelegateInstance>> instantiate(StateStore& states) const override {
    return executable_->instantiate(states);
  }
  size_t num_inputs() const override { return program_->inputs.size(); }
  size_t num_outputs() const override { return program_->outputs.size(); }
  std::span<const StateInfo> states() const override { return states_; }
  std::string describe() const override { return bound::describe_program(*program_, device_); }

 private:
  std::unique_ptr<const bound::BoundProgram> program_;
  std::unique_ptr<const bound::Executable> executable_;
  std::string device_;
  std::vector<StateInfo> states_;
};

Result<std::shared_ptr<gpu::Library>> make_msl_host_library(std::string_view metal_text) {
  FLEXPTE_ASSIGN(std::shared_ptr<msl_host::Library> library,
                 msl_host::compile_library(metal_text, msl_host::Options::from_environment()));
  return std::shared_ptr<gpu::Library>(std::move(library));
}

std::vector<std::unique_ptr<bound::Device>> make_devices(std::shared_ptr<const ThreadPool> pool) {
  std::vector<std::unique_ptr<bound::Device>> devices;
  devices.push_back(bound::make_host_device(std::move(pool)));
  devices.push_back(bound::make_gpu_device("msl-host", make_msl_host_library));
#ifdef FLEXPTE_HAS_METAL
  devices.push_back(
      bound::make_gpu_device("metal", [](std::string_view text) { return metal::make_metal_library(text); }));
#endif
  return devices;
}

class MetalDelegate final : public Delegate {
 public:
  explicit MetalDelegate(DelegateOptions options) : wanted_(std::move(options.device)) {
    if (options.pool == nullptr) options.pool = std::make_shared<ThreadPool>(ThreadPool::default_num_threads());
    devices_ = make_devices(std::move(options.pool));
  }

  std::string_view name() const override { return "FlexpteBackend"; }

  Result<std::unique_ptr<LoadedDelegate>> load(std::span<const std::byte> blob, const NamedData& data) const override {
    std::string available;
    for (const std::unique_ptr<bound::Device>& device : devices_) {
      if (device->name() != wanted_) {
        available += (available.empty() ? "" : ", ") + std::string(device->name());
        continue;
      }
      FLEXPTE_ASSIGN(std::unique_ptr<bound::BoundProgram> program, bound::decode_payload(blob, data));
      FLEXPTE_ASSIGN(std::unique_ptr<bound::Executable> executable, device->prepare(*program));
      return std::unique_ptr<LoadedDelegate>(
          std::make_unique<LoadedPayload>(std::move(program), std::move(executable), wanted_));
    }
    return Status(Code::kUnsupported, "no device '" + wanted_ + "' in this build; available: " + available);
  }

 private:
  std::string wanted_;
  std::vector<std::unique_ptr<bound::Device>> devices_;
};

}  // namespace

std::vector<std::string> available_devices() {
  std::vector<std::string> names;
  for (const std::unique_ptr<bound::Device>& device : make_devices(std::make_shared<ThreadPool>(1))) {
    names.emplace_back(device->name());
  }
  return names;
}

std::unique_ptr<Delegate> make_metal_delegate(DelegateOptions options) {
  return std::make_unique<MetalDelegate>(std::move(options));
}

}  // namespace flexpte
