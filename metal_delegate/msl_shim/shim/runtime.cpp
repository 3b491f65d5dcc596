// Runs the threads of a threadgroup as fibers, one threadgroup after the other, checks every access of
// instrumented code and counts it. One dispatch at a time (the host holds a lock).
#include "runtime.h"

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <sys/mman.h>

int msl_line = 0;

namespace {

constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kThreadgroupBytes = 32 * 1024;
constexpr size_t kSlotBytes = 64;  // what a lane can publish
constexpr uint32_t kSeveral = 0xffffffffu;

// ---- Fibers: switches of the stack, callee-saved registers with it.
extern "C" void msl_switch(void** saved, void* next);
#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr size_t kSavedWords = 6;
#elif defined(__aarch64__)
#if defined(__APPLE__)
#define MSL_SYMBOL "_msl_switch"
#else
#define MSL_SYMBOL "msl_switch"
#endif
asm(".text\n.globl " MSL_SYMBOL "\n.p2align 2\n" MSL_SYMBOL R"(:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the Metal shim runs on x86-64 and arm64"
#endif

enum class Wait : uint8_t { kReady, kSimdgroup, kThreadgroup, kDone };

struct Fiber {
  MslThread thread;
  void* sp = nullptr;
  Wait wait = Wait::kDone;
  void* site = nullptr;
  int line = 0;
  size_t threadgroup_memory_used = 0;
  uint64_t instructions = 0;
  const MslMatrices* matrices = nullptr;
  uint32_t gathers = 0;
};

// What is known of one byte of threadgroup memory. Epochs end at threadgroup barriers, within a simdgroup at its
// barriers too.
struct Shadow {
  uint32_t write_epoch, write_simd_epoch, read_epoch, read_simd_epoch;
  uint32_t writer, reader;  // threads; kSeveral: of several simdgroups
  int write_line, read_line;
  bool is_written;
};

struct Simdgroup {
  alignas(16) unsigned char slots[2][kLanes][kSlotBytes];
  uint32_t epoch = 0;
  unsigned waiting = 0;  // lanes at a simdgroup operation
};

struct State {
  MslDispatch* dispatch = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  Fiber* current = nullptr;
  void* scheduler_sp = nullptr;
  unsigned char* stacks = nullptr;
  alignas(64) unsigned char threadgroup_memory[kThreadgroupBytes];
  std::vector<Shadow> shadow;
  size_t threadgroup_bytes_used = kThreadgroupBytes;  // by the last threadgroup: what has to be poisoned again
  size_t arguments_bytes = 0;  // of threadgroup memory, taken by [[threadgroup(n)]] arguments
  uint32_t epoch = 0;
  unsigned num_threads = 0;
  bool has_failed = false;
  int last_buffer = 0;
};
State g;

unsigned lanes_of(unsigned simdgroup) {
  const unsigned begin = simdgroup * kLanes;
  return g.num_threads - begin < kLanes ? g.num_threads - begin : kLanes;
}

void leave() { msl_switch(&g.current->sp, g.scheduler_sp); }

// The first fault ends the dispatch: its fiber never runs again.
void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void fail(const char* format, ...) {
  if (!g.has_failed) {
    g.has_failed = true;
    char what[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    const MslThread* t = g.current == nullptr ? nullptr : &g.current->thread;
    if (t == nullptr) {
      snprintf(g.dispatch->error, sizeof g.dispatch->error, "kernel %s: %s", g.dispatch->kernel->name, what);
    } else {
      snprintf(g.dispatch->error, sizeof g.dispatch->error,
               "kernel %s: %s (thread [%u, %u, %u] of threadgroup [%u, %u, %u])", g.dispatch->kernel->name, what,
               t->position[0], t->position[1], t->position[2], t->group[0], t->group[1],
               t->group[2]);
    }
  }
  if (g.current != nullptr) leave();
}

void run_fiber() {
  const MslKernel* kernel = g.dispatch->kernel;
  kernel->call(kernel->arguments);
  g.current->wait = Wait::kDone;
  leave();
  abort();
}

void prepare_fiber(Fiber& fiber, unsigned index) {
  unsigned char* top = g.stacks + (index + 1) * kStackBytes;
#if defined(__x86_64__)
  // On entry to a function the stack pointer is 8 bytes off a multiple of 16.
  auto* sp = reinterpret_cast<uintptr_t*>(top) - 1;
  *sp = 0;  // where run_fiber would return to
  *--sp = reinterpret_cast<uintptr_t>(&run_fiber);
  sp -= kSavedWords;
  memset(sp, 0, kSavedWords * sizeof *sp);
#else
  auto* sp = reinterpret_cast<uintptr_t*>(top - 160);
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<uintptr_t>(&run_fiber);
#endif
  fiber.sp = sp;
  fiber.wait = Wait::kReady;
  fiber.site = nullptr;
  fiber.threadgroup_memory_used = g.arguments_bytes;
  fiber.instructions = 0;
  fiber.gathers = 0;
}

void resume(Fiber& fiber) {
  g.current = &fiber;
  msl_line = fiber.line;
  msl_switch(&g.scheduler_sp, fiber.sp);
  g.current = nullptr;
}

void block(Wait wait, void* site) {
  Fiber& fiber = *g.current;
  fiber.wait = wait;
  fiber.site = site;
  fiber.line = msl_line;
  leave();
}

const char* where(const Fiber& fiber, char* text, size_t size) {
  switch (fiber.wait) {
    case Wait::kDone:
      return "has ended";
    case Wait::kSimdgroup:
      snprintf(text, size, "waits at a simdgroup operation in line %d", fiber.line);
      return text;
    case Wait::kThreadgroup:
      snprintf(text, size, "waits at a barrier in line %d", fiber.line);
      return text;
    default:
      return "runs";
  }
}

// Two threads that do not wait at the same place.
void fail_divergent(const Fiber& a, const Fiber& b) {
  char text_a[80], text_b[80];
  fail("barrier in divergent flow: thread %u %s, thread %u %s", a.thread.index, where(a, text_a, sizeof text_a),
       b.thread.index, where(b, text_b, sizeof text_b));
}

// Runs the lanes of a simdgroup until all wait for other simdgroups or have ended.
void run_simdgroup(unsigned simdgroup) {
  const unsigned begin = simdgroup * kLanes;
  const unsigned n = lanes_of(simdgroup);
  while (!g.has_failed) {
    for (unsigned i = 0; i < n && !g.has_failed; ++i) {
      if (g.fibers[begin + i].wait == Wait::kReady) resume(g.fibers[begin + i]);
    }
    if (g.has_failed) return;
    Fiber& first = g.fibers[begin];
    for (unsigned i = 1; i < n; ++i) {
      Fiber& other = g.fibers[begin + i];
      const bool either = first.wait == Wait::kSimdgroup || other.wait == Wait::kSimdgroup;
      if (either && (first.wait != other.wait || first.site != other.site)) return fail_divergent(first, other);
    }
    if (first.wait != Wait::kSimdgroup) return;
    g.simdgroups[simdgroup].waiting = 0;
    for (unsigned i = 0; i < n; ++i) g.fibers[begin + i].wait = Wait::kReady;
  }
}

void run_threadgroup(unsigned x, unsigned y, unsigned z) {
  MslDispatch& d = *g.dispatch;
  // A NaN in every float type, so that nothing unwritten looks like a result.
  memset(g.threadgroup_memory, 0xff, g.threadgroup_bytes_used);
  memset(static_cast<void*>(g.shadow.data()), 0, g.threadgroup_bytes_used * sizeof(Shadow));
  g.epoch = 1;
  const unsigned num_simdgroups = (g.num_threads + kLanes - 1) / kLanes;
  for (unsigned s = 0; s < num_simdgroups; ++s) g.simdgroups[s].epoch = 1, g.simdgroups[s].waiting = 0;
  for (unsigned i = 0; i < g.num_threads; ++i) {
    Fiber& fiber = g.fibers[i];
    MslThread& t = fiber.thread;
    t.index = i;
    t.lane = i % kLanes;
    t.simdgroup = i / kLanes;
    t.position[0] = i % d.threads[0];
    t.position[1] = i / d.threads[0] % d.threads[1];
    t.position[2] = i / d.threads[0] / d.threads[1];
    t.group[0] = x, t.group[1] = y, t.group[2] = z;
    for (int k = 0; k < 3; ++k) t.threads[k] = d.threads[k], t.threadgroups[k] = d.threadgroups[k];
    prepare_fiber(fiber, i);
  }
  while (!g.has_failed) {
    for (unsigned s = 0; s < num_simdgroups && !g.has_failed; ++s) run_simdgroup(s);
    if (g.has_failed) break;
    const Fiber& first = g.fibers[0];
    for (unsigned i = 1; i < g.num_threads; ++i) {
      const Fiber& other = g.fibers[i];
      if (other.wait != first.wait || (first.wait == Wait::kThreadgroup && other.site != first.site)) {
        return fail_divergent(first, other);
      }
    }
    if (first.wait == Wait::kDone) break;
    ++d.counters.barriers;
    ++g.epoch;
    for (unsigned s = 0; s < num_simdgroups; ++s) ++g.simdgroups[s].epoch;
    for (unsigned i = 0; i < g.num_threads; ++i) g.fibers[i].wait = Wait::kReady;
  }
  uint64_t sum = 0, most = 0;
  g.threadgroup_bytes_used = 0;
  for (unsigned i = 0; i < g.num_threads; ++i) {
    if (g.fibers[i].threadgroup_memory_used > g.threadgroup_bytes_used) {
      g.threadgroup_bytes_used = g.fibers[i].threadgroup_memory_used;
    }
    sum += g.fibers[i].instructions;
    if (g.fibers[i].instructions > most) most = g.fibers[i].instructions;
  }
  d.counters.instructions += sum;
  d.counters.instruction_slots += most * g.num_threads;
}

// ---- Checks
MslBufferArgument* buffer_of(const void* address, unsigned size_bytes) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  MslDispatch& d = *g.dispatch;
  const auto holds = [&](int i) {
    const auto begin = reinterpret_cast<uintptr_t>(d.buffers[i].data);
    return d.buffers[i].data != nullptr && at >= begin && at + size_bytes <= begin + d.buffers[i].size_bytes;
  };
  if (g.last_buffer < d.num_buffers && holds(g.last_buffer)) return &d.buffers[g.last_buffer];
  for (int i = 0; i < d.num_buffers; ++i) {
    if (!holds(i)) continue;
    g.last_buffer = i;
    return &d.buffers[i];
  }
  return nullptr;
}

void check_alignment(const void* address, unsigned align, int line) {
  if (align != 0 && reinterpret_cast<uintptr_t>(address) % align != 0) {
    fail("line %d: an access that needs an alignment of %u bytes is not aligned", line, align);
  }
}

void fail_outside(const char* what, const void* address, unsigned size_bytes, int line) {
  // The buffer that ends or begins nearest is the one that was meant.
  const auto at = reinterpret_cast<intptr_t>(address);
  long nearest = -1;
  int which = -1;
  MslDispatch& d = *g.dispatch;
  for (int i = 0; i < d.num_buffers; ++i) {
    if (d.buffers[i].data == nullptr) continue;
    const auto begin = reinterpret_cast<intptr_t>(d.buffers[i].data);
    const auto end = begin + static_cast<intptr_t>(d.buffers[i].size_bytes);
    const long distance = at < begin ? begin - at : at - end;
    if (which >= 0 && distance >= nearest) continue;
    nearest = distance;
    which = i;
  }
  if (which < 0) return fail("line %d: %s of %u bytes, but no buffer is bound", line, what, size_bytes);
  const auto begin = reinterpret_cast<intptr_t>(d.buffers[which].data);
  fail("line %d: %s of %u bytes out of bounds: at byte %ld of the nearest buffer(%d), which has %zu", line, what,
       size_bytes, static_cast<long>(at - begin), which, d.buffers[which].size_bytes);
}

size_t threadgroup_offset(const void* address, unsigned size_bytes, const char* what, int line) {
  const auto offset = reinterpret_cast<intptr_t>(address) - reinterpret_cast<intptr_t>(g.threadgroup_memory);
  const auto end = static_cast<intptr_t>(g.current->threadgroup_memory_used);
  if (offset < 0 || offset + static_cast<intptr_t>(size_bytes) > end) {
    fail("line %d: threadgroup %s of %u bytes out of bounds: at byte %ld of %ld", line, what, size_bytes,
         static_cast<long>(offset), static_cast<long>(end));
  }
  return static_cast<size_t>(offset);
}

// Whether another thread's access of this epoch is ordered with one of the current thread.
bool conflicts(uint32_t other, uint32_t epoch, uint32_t simd_epoch) {
  const MslThread& t = g.current->thread;
  if (epoch != g.epoch || other == t.index) return false;
  if (other == kSeveral || other / kLanes != t.simdgroup) return true;
  return simd_epoch == g.simdgroups[t.simdgroup].epoch;
}

void fail_race(const char* now, int line, const char* before, int other_line, uint32_t other) {
  char thread[40] = "several threads";
  if (other != kSeveral) snprintf(thread, sizeof thread, "thread %u", other);
  fail("line %d: race in threadgroup memory: %s what %s %s in line %d, without a barrier between", line, now, thread,
       before, other_line);
}

}  // namespace

// The compiler's conversion to bfloat16, which older libgcc lacks: to nearest even.
extern "C" __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const auto narrow = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  __bf16 result;
  memcpy(&result, &narrow, sizeof result);
  return result;
}

extern "C" {

const MslThread* msl_thread() { return &g.current->thread; }

void* msl_buffer(int index) {
  return index < g.dispatch->num_buffers ? const_cast<void*>(g.dispatch->buffers[index].data) : nullptr;
}

void* msl_threadgroup_argument(int index) {
  size_t offset = 0;
  for (int i = 0; i < index && i < g.dispatch->num_threadgroup_arguments; ++i) {
    offset += (g.dispatch->threadgroup_arguments[i] + 15) / 16 * 16;
  }
  return g.threadgroup_memory + offset;
}

void* msl_threadgroup_memory(msl_size size_bytes, int line) {
  Fiber& fiber = *g.current;
  void* memory = g.threadgroup_memory + fiber.threadgroup_memory_used;
  fiber.threadgroup_memory_used += (size_bytes + 15) / 16 * 16;
  if (fiber.threadgroup_memory_used > kThreadgroupBytes) {
    fail("line %d: threadgroup overflow: %zu bytes of threadgroup memory, and Apple GPUs have %zu", line,
         fiber.threadgroup_memory_used, kThreadgroupBytes);
  }
  return memory;
}

int msl_gather(const void* mine, msl_size size_bytes, const void** all, void* site) {
  Fiber& fiber = *g.current;
  Simdgroup& simdgroup = g.simdgroups[fiber.thread.simdgroup];
  auto& slots = simdgroup.slots[fiber.gathers++ % 2];
  memcpy(slots[fiber.thread.lane], mine, size_bytes < kSlotBytes ? size_bytes : kSlotBytes);
  if (simdgroup.waiting++ == 0) ++g.dispatch->counters.simdgroup_operations;
  block(Wait::kSimdgroup, site);
  for (unsigned i = 0; i < kLanes; ++i) all[i] = slots[i];
  return static_cast<int>(lanes_of(fiber.thread.simdgroup));
}

void msl_simdgroup_barrier(void* site) {
  Simdgroup& simdgroup = g.simdgroups[g.current->thread.simdgroup];
  // The first lane that goes on begins the new epoch.
  const uint32_t before = simdgroup.epoch;
  block(Wait::kSimdgroup, site);
  if (simdgroup.epoch == before) ++simdgroup.epoch;
}

void msl_threadgroup_barrier(void* site) { block(Wait::kThreadgroup, site); }

}  // extern "C"

namespace {

float read_element(const void* elements, int type, int i) {
  if (type == kMslFloat) return static_cast<const float*>(elements)[i];
  if (type == kMslHalf) return static_cast<float>(static_cast<const _Float16*>(elements)[i]);
  uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(elements)[i]) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void write_element(void* elements, int type, int i, float value) {
  if (type == kMslFloat) {
    static_cast<float*>(elements)[i] = value;
  } else if (type == kMslHalf) {
    static_cast<_Float16*>(elements)[i] = static_cast<_Float16>(value);
  } else {
    const __bf16 narrow = static_cast<__bf16>(value);
    memcpy(static_cast<uint16_t*>(elements) + i, &narrow, sizeof narrow);
  }
}

int matrix_row(unsigned lane) { return static_cast<int>((lane / 4 & 4) + lane / 2 % 4); }
int matrix_col(unsigned lane) { return static_cast<int>((lane / 4 & 2) * 2 + lane % 2 * 2); }

}  // namespace

extern "C" {

void msl_matrix_multiply(const MslMatrices* mine, int type_a, int type_b, int type_c, int type_d, void* site) {
  Fiber& fiber = *g.current;
  const unsigned begin = fiber.thread.simdgroup * kLanes;
  const unsigned n = lanes_of(fiber.thread.simdgroup);
  fiber.matrices = mine;
  Simdgroup& simdgroup = g.simdgroups[fiber.thread.simdgroup];
  if (++simdgroup.waiting == n) {
    // All others wait: their matrices stay where they are.
    for (unsigned i = 0; i < n; ++i) {
      const Fiber& other = g.fibers[begin + i];
      if (&other != &fiber && (other.wait != Wait::kSimdgroup || other.site != site)) {
        fiber.line = msl_line;
        return fail_divergent(fiber, other);
      }
    }
    if (n != kLanes) return fail("line %d: a matrix operation in a simdgroup of %u threads", msl_line, n);
    alignas(64) float a[8][8], b[8][8], d[8][8];
    for (unsigned i = 0; i < kLanes; ++i) {
      const MslMatrices& m = *g.fibers[begin + i].matrices;
      const int row = matrix_row(i), col = matrix_col(i);
      for (int e = 0; e < 2; ++e) {
        a[row][col + e] = read_element(m.a, type_a, e);
        b[row][col + e] = read_element(m.b, type_b, e);
        d[row][col + e] = m.c == nullptr ? 0.0f : read_element(m.c, type_c, e);
      }
    }
    for (int i = 0; i < 8; ++i) {
      for (int k = 0; k < 8; ++k) {
        for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
      }
    }
    for (unsigned i = 0; i < kLanes; ++i) {
      const MslMatrices& m = *g.fibers[begin + i].matrices;
      for (int e = 0; e < 2; ++e) write_element(m.d, type_d, e, d[matrix_row(i)][matrix_col(i) + e]);
    }
    ++g.dispatch->counters.matrix_multiplies;
  }
  block(Wait::kSimdgroup, site);
}

void msl_device_load(const void* address, unsigned size_bytes, unsigned align, int line) {
  MslBufferArgument* buffer = buffer_of(address, size_bytes);
  if (buffer == nullptr) return fail_outside("load", address, size_bytes, line);
  check_alignment(address, align, line);
  buffer->read_bytes += size_bytes;
}

void msl_device_store(const void* address, unsigned size_bytes, unsigned align, int line) {
  MslBufferArgument* buffer = buffer_of(address, size_bytes);
  if (buffer == nullptr) return fail_outside("store", address, size_bytes, line);
  if (!buffer->is_writable) {
    return fail("line %d: store to buffer(%d), which is bound for reading", line,
                static_cast<int>(buffer - g.dispatch->buffers));
  }
  check_alignment(address, align, line);
  buffer->written_bytes += size_bytes;
}

void msl_constant_load(const void* address, unsigned size_bytes, unsigned align, int line) {
  // Program-scope constants lie in the library itself: only those in buffers can be checked.
  if (buffer_of(address, size_bytes) != nullptr) {
    check_alignment(address, align, line);
    g.dispatch->counters.constant_read_bytes += size_bytes;
  }
}

void msl_threadgroup_load(const void* address, unsigned size_bytes, unsigned align, int line) {
  const size_t offset = threadgroup_offset(address, size_bytes, "load", line);
  check_alignment(address, align, line);
  const MslThread& t = g.current->thread;
  const uint32_t simd_epoch = g.simdgroups[t.simdgroup].epoch;
  for (size_t i = offset; i < offset + size_bytes; ++i) {
    Shadow& s = g.shadow[i];
    if (!s.is_written) return fail("line %d: read of uninitialised threadgroup memory at byte %zu", line, i);
    if (conflicts(s.writer, s.write_epoch, s.write_simd_epoch)) {
      return fail_race("reads", line, "wrote", s.write_line, s.writer);
    }
    if (s.read_epoch != g.epoch) {
      s.reader = t.index;
    } else if (s.reader != kSeveral && s.reader / kLanes != t.simdgroup) {
      s.reader = kSeveral;
    } else if (s.reader != kSeveral && s.read_simd_epoch != simd_epoch) {
      s.reader = t.index;
    }
    s.read_epoch = g.epoch;
    s.read_simd_epoch = simd_epoch;
    s.read_line = line;
  }
  g.dispatch->counters.threadgroup_read_bytes += size_bytes;
}

void msl_threadgroup_store(const void* address, unsigned size_bytes, unsigned align, int line) {
  const size_t offset = threadgroup_offset(address, size_bytes, "store", line);
  check_alignment(address, align, line);
  const MslThread& t = g.current->thread;
  for (size_t i = offset; i < offset + size_bytes; ++i) {
    Shadow& s = g.shadow[i];
    if (s.is_written && conflicts(s.writer, s.write_epoch, s.write_simd_epoch)) {
      return fail_race("writes", line, "wrote", s.write_line, s.writer);
    }
    if (conflicts(s.reader, s.read_epoch, s.read_simd_epoch)) {
      return fail_race("writes", line, "read", s.read_line, s.reader);
    }
    s.is_written = true;
    s.writer = t.index;
    s.write_epoch = g.epoch;
    s.write_simd_epoch = g.simdgroups[t.simdgroup].epoch;
    s.write_line = line;
  }
  g.dispatch->counters.threadgroup_written_bytes += size_bytes;
}

void msl_block(unsigned flops, unsigned instructions) {
  g.dispatch->counters.flops += flops;
  g.current->instructions += instructions;
}

void msl_dispatch(MslDispatch* dispatch) {
  g.dispatch = dispatch;
  g.has_failed = false;
  g.current = nullptr;
  g.last_buffer = 0;
  dispatch->error[0] = 0;
  g.threadgroup_bytes_used = kThreadgroupBytes;
  g.num_threads = dispatch->threads[0] * dispatch->threads[1] * dispatch->threads[2];
  if (g.num_threads == 0 || g.num_threads > kMaxThreads) {
    return fail("%u threads in a threadgroup; 1 to %u are possible", g.num_threads, kMaxThreads);
  }
  g.arguments_bytes = 0;
  for (int i = 0; i < dispatch->num_threadgroup_arguments; ++i) {
    g.arguments_bytes += (dispatch->threadgroup_arguments[i] + 15) / 16 * 16;
  }
  if (g.arguments_bytes > kThreadgroupBytes) {
    return fail("threadgroup overflow: arguments of %zu bytes, and Apple GPUs have %zu", g.arguments_bytes,
                kThreadgroupBytes);
  }
  if (g.stacks == nullptr) {
    void* memory = mmap(nullptr, kStackBytes * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED) return fail("no memory for the stacks of %u threads", kMaxThreads);
    g.stacks = static_cast<unsigned char*>(memory);
    g.shadow.resize(kThreadgroupBytes);
    g.fibers.resize(kMaxThreads);
    g.simdgroups.resize(kMaxThreads / kLanes);
  }
  const unsigned total = dispatch->threadgroups[0] * dispatch->threadgroups[1] * dispatch->threadgroups[2];
  for (unsigned i = 0; i < total && !g.has_failed; ++i) {
    const unsigned at = dispatch->is_reversed ? total - 1 - i : i;
    const unsigned x = at % dispatch->threadgroups[0];
    const unsigned y = at / dispatch->threadgroups[0] % dispatch->threadgroups[1];
    run_threadgroup(x, y, at / dispatch->threadgroups[0] / dispatch->threadgroups[1]);
    dispatch->counters.threadgroups += 1;
    dispatch->counters.threads += g.num_threads;
  }
}

}  // extern "C"
