// Runs the method "forward" of a .pte whose inputs are float tensors of one shape. docs/embedding.md shows this file.
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "metal_delegate/delegate.h"
#include "runtime/program.h"
#include "runtime/session.h"

namespace {

flexpte::Status run(const char* path) {
  auto pool = std::make_shared<const flexpte::ThreadPool>(2);
  FLEXPTE_ASSIGN(flexpte::FileBytes file, flexpte::FileBytes::map(path));  // read-only, shared with the page cache
  std::vector<std::shared_ptr<flexpte::Delegate>> delegates;
  delegates.push_back(flexpte::make_metal_delegate({.device = "host", .pool = pool}));
  FLEXPTE_ASSIGN(const auto program, flexpte::Program::load(std::move(file), std::move(delegates), pool));
  FLEXPTE_ASSIGN(const auto session, flexpte::Session::create(program));  // caches live here
  FLEXPTE_ASSIGN(const size_t forward, program->method_index("forward"));

  // Three inputs [1, 2, 16, 8]; any strides will do.
  std::vector<float> memory(1 * 2 * 16 * 8, 0.5f);
  flexpte::Value input;
  input.kind = flexpte::ValueKind::kTensor;
  input.tensor = {memory.data(), flexpte::DType::kF32, 4, {1, 2, 16, 8}, {256, 128, 8, 1}};
  const std::vector<flexpte::Value> inputs(3, input);
  FLEXPTE_TRY(session->run(forward, inputs));

  // A view that the next run overwrites.
  const flexpte::TensorView& out = session->output(forward, 0).tensor;
  std::printf("%s of %s, first element %g\n", shape_string(out).c_str(), std::string(dtype_name(out.dtype)).c_str(),
              static_cast<double>(out.as<const float>()[0]));
  return flexpte::Status::ok();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s model.pte\n", argv[0]);
    return 2;
  }
  const flexpte::Status status = run(argv[1]);
  if (!status.is_ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.is_ok() ? 0 : 1;
}
