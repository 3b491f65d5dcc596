// The runtime's state, shared by scheduler.cpp and checks.cpp.
#ifndef FLEXPTE_MSL_STATE_H
#define FLEXPTE_MSL_STATE_H

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime.h"

namespace msl_runtime {

constexpr size_t kThreadgroupBytes = 32 * 1024;
// Readers of a byte beside the numbers of threads.
constexpr unsigned kManyLanes = 0x8000;    // | simdgroup: several of its threads
constexpr unsigned kManyThreads = 0xffff;  // of several simdgroups

// What is known of one byte of threadgroup memory.
struct Shadow {
  uint32_t write_epoch, read_epoch;            // State::epoch at that time
  uint16_t write_simd_epoch, read_simd_epoch;  // barriers of the simdgroup
  uint16_t writer, reader;
  uint16_t write_line, read_line;
  bool is_atomic;  // the write
};

struct Declaration {
  size_t offset = 0;
  size_t size_bytes = 0;
  int line = 0;
  bool is_used = false;
};

// What is known of a device buffer in the dispatch that runs; null until the first access.
struct BufferShadow {
  uint64_t* touched = nullptr;  // a bit per byte
  uint32_t* writers = nullptr;  // per two bytes: 1 + the threadgroup that wrote
};

struct State {
  ~State();  // when the library is unloaded

  MslDispatch* dispatch = nullptr;
  MslThread threads[MSL_MAX_THREADS];
  MslSimdgroup simdgroups[MSL_MAX_THREADS / MSL_LANES];
  unsigned num_threads = 0;
  unsigned num_ended = 0;
  unsigned at_barrier = 0;
  MslThread* first_at_barrier = nullptr;
  void* main_sp = nullptr;
  bool has_failed = false;
  // Every barrier that orders threadgroup memory begins an epoch, every threadgroup as well.
  uint32_t epoch = 0;
  uint32_t first_epoch = 0;  // of the threadgroup that runs: what was accessed before was never accessed
  uint32_t threadgroup = 0;  // number of the threadgroup that runs, from 1
  msl_count sum_instructions = 0, max_instructions = 0;

  unsigned char* stacks = nullptr;
  std::vector<int> free_stacks;

  unsigned char* memory = nullptr;  // kThreadgroupBytes
  size_t memory_used = 0;
  Declaration declarations[MSL_MAX_DECLARATIONS];
  Shadow shadow[kThreadgroupBytes];
  BufferShadow buffers[MSL_MAX_BUFFERS];
};
extern State g;

// The first fault ends the dispatch. Does not return when a thread runs.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

inline int line_of(int site) {
  return site & 0xffff;
}

}  // namespace msl_runtime

#endif
