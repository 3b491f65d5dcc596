// A test double of Metal: metal-cpp's calls end here when there is no Mac. Buffers are host memory, and command
// buffers run their kernels through the shim of device "msl-host". Everything that Metal would refuse or that
// would go wrong on a GPU is a violation: it is written to stderr, and the next command buffer fails with it.
//
// Not safe to control from several threads; calls that come through metal-cpp are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace flexpte::metal_double {

// What the system and the GPU do from now on.
struct Behaviour {
  bool has_device = true;
  std::string device_name = "Apple M1";
  bool has_simdgroup_matrix = true;  // whether it belongs to the family Apple7
  int64_t system_version = 15;       // macOS
  uint64_t simd_width = 32;
  uint64_t max_threads_per_threadgroup = 1024;
  uint64_t max_buffer_bytes = uint64_t{1} << 36;

  // Each is used up by what it makes fail.
  int num_buffers_refused = 0;
  int num_buffers_short = 0;  // of length 1
  int num_queues_refused = 0;
  int num_command_buffers_refused = 0;
  std::string library_error;                        // of the next library, where not empty
  std::string pipeline_error;                       // of the next pipeline, where not empty
  std::vector<int64_t> command_buffer_errors = {};  // of the next ones, by order; 0: none
};
Behaviour& behaviour();

// What has been asked for.
struct Record {
  size_t num_libraries = 0;
  size_t num_pipelines = 0;
  size_t num_queues = 0;
  size_t num_command_buffers = 0;  // committed
  size_t num_encoders = 0;
  size_t num_wrapped_buffers = 0;
  size_t num_set_buffers = 0, num_set_offsets = 0;
  uint64_t language_version = 0;  // of the last library
  bool is_fast_math = true;
  std::vector<std::string> kernels = {};  // that ran, in order
  std::vector<std::string> violations = {};
};
Record& record();

// Both as at the beginning.
void reset();

// Names of the classes of objects that have not been released, sorted.
std::vector<std::string> live_objects();

}  // namespace flexpte::metal_double
