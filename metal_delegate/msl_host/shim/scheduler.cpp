// Runs the threads of a threadgroup as fibers, one threadgroup after the other. One dispatch at a time (the host
// holds a lock). A fiber goes on until it waits; then the next lane of its simdgroup runs, so that in uniform
// control flow one switch per lane brings a simdgroup to its next operation.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

MslGrid msl_grid;
MslThread* msl_current = nullptr;
void* msl_buffers[MSL_MAX_BUFFERS];
int msl_site = 0;
msl_count msl_flops = 0;
msl_count msl_instructions = 0;

// Saves the callee-saved registers and the stack pointer to *saved, and goes on where `next` was saved.
extern "C" void msl_switch(void** saved, void* next);
#if defined(__APPLE__)
#define MSL_SYMBOL "_msl_switch"
#define MSL_HIDDEN ".private_extern "
#else
#define MSL_SYMBOL "msl_switch"
#define MSL_HIDDEN ".hidden "
#endif
#if defined(__x86_64__)
asm(".text\n.globl " MSL_SYMBOL "\n" MSL_HIDDEN MSL_SYMBOL "\n" MSL_SYMBOL R"(:
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
#elif defined(__aarch64__)
asm(".text\n.globl " MSL_SYMBOL "\n" MSL_HIDDEN MSL_SYMBOL "\n.p2align 2\n" MSL_SYMBOL R"(:
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

namespace msl_runtime {

State g;

namespace {

// A stride that is no power of two: stacks of neighbours must not compete for the same sets of the cache.
constexpr size_t kStackBytes = 128 * 1024 + 17 * 64;
constexpr size_t kMemoryBytes = kThreadgroupBytes + kStackBytes * MSL_MAX_THREADS;

void begin_fiber();

void prepare(MslThread& thread) {
  thread.stack = g.free_stacks.back();
  g.free_stacks.pop_back();
  unsigned char* top = g.stacks + static_cast<size_t>(thread.stack + 1) * kStackBytes;
#if defined(__x86_64__)
  // On entry to a function the stack pointer is 8 bytes off a multiple of 16; below lie its address and six
  // registers.
  auto* sp = reinterpret_cast<uintptr_t*>(top) - 8;
  memset(sp, 0, 8 * sizeof *sp);
  sp[6] = reinterpret_cast<uintptr_t>(&begin_fiber);
#else
  auto* sp = reinterpret_cast<uintptr_t*>(top - 160);
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<uintptr_t>(&begin_fiber);
#endif
  thread.sp = sp;
}

void begin_thread(MslThread& thread) {
  const unsigned* size = msl_grid.threads;
  thread.position[0] = thread.index % size[0];
  thread.position[1] = thread.index / size[0] % size[1];
  thread.position[2] = thread.index / size[0] / size[1];
}

void make_current(MslThread* next) {
  if (msl_current != nullptr) msl_current->instructions = msl_instructions;
  msl_current = next;
  msl_instructions = next->instructions;
}

void leave_to_main() {
  void* unused;
  msl_switch(&unused, g.main_sp);
}

const char* state_of(const MslThread& thread, char* text, size_t size) {
  if (thread.wait == kMslEnded) return "has ended";
  snprintf(text, size, "waits at the %s in line %d",
           thread.wait == kMslAtSimdgroup ? "simdgroup operation" : "threadgroup barrier", line_of(thread.site));
  return text;
}

void fail_divergent(const MslThread& a, const MslThread& b) {
  char text_a[80], text_b[80];
  const bool is_simdgroup = a.wait == kMslAtSimdgroup || b.wait == kMslAtSimdgroup;
  fail("line %d: %s in divergent flow: thread %u %s, thread %u %s", line_of(a.wait == kMslEnded ? b.site : a.site),
       is_simdgroup ? "simdgroup operation" : "barrier", a.index, state_of(a, text_a, sizeof text_a), b.index,
       state_of(b, text_b, sizeof text_b));
}

// No thread can run, although not all have arrived where the first one waits.
void fail_stuck() {
  for (unsigned s = 0; s < msl_grid.num_simdgroups; ++s) {
    const MslSimdgroup& simdgroup = g.simdgroups[s];
    if (simdgroup.arrived == 0) continue;
    const unsigned begin = s * MSL_LANES;
    for (unsigned i = 0; i < simdgroup.num_lanes; ++i) {
      if (g.threads[begin + i].wait != kMslAtSimdgroup) return fail_divergent(*simdgroup.first, g.threads[begin + i]);
    }
  }
  for (unsigned i = 0; i < g.num_threads; ++i) {
    if (g.threads[i].wait != kMslAtThreadgroup) return fail_divergent(*g.first_at_barrier, g.threads[i]);
  }
}

// The thread to run next: lanes of the same simdgroup first. Null: none can.
MslThread* next_thread() {
  MslSimdgroup& own = *msl_current->simdgroup;
  if (own.ready != 0) {
    const unsigned above = own.ready & (0xfffffffeu << msl_current->lane);
    const unsigned lane = static_cast<unsigned>(__builtin_ctz(above != 0 ? above : own.ready));
    return &g.threads[own.index * MSL_LANES + lane];
  }
  if (own.arrived != 0) return nullptr;  // some of its lanes wait where the others never come
  for (unsigned i = 1; i < msl_grid.num_simdgroups; ++i) {
    unsigned s = own.index + i;
    if (s >= msl_grid.num_simdgroups) s -= msl_grid.num_simdgroups;
    const unsigned ready = g.simdgroups[s].ready;
    if (ready != 0) return &g.threads[s * MSL_LANES + static_cast<unsigned>(__builtin_ctz(ready))];
  }
  return nullptr;
}

void block(MslWait wait) {
  MslThread* self = msl_current;
  self->wait = wait;
  self->site = msl_site;
  self->simdgroup->ready &= ~(1u << self->lane);
  MslThread* next = next_thread();
  if (next == nullptr) return fail_stuck();
  if (next->sp == nullptr) {
    begin_thread(*next);
    prepare(*next);
  }
  make_current(next);
  msl_switch(&self->sp, next->sp);
  msl_site = self->site;
}

// A stack runs one thread after the other as long as nobody else can go on.
void begin_fiber() {
  for (;;) {
    g.dispatch->kernel->call();
    MslThread* self = msl_current;
    self->wait = kMslEnded;
    self->simdgroup->ready &= ~(1u << self->lane);
    g.sum_instructions += msl_instructions;
    if (msl_instructions > g.max_instructions) g.max_instructions = msl_instructions;
    if (++g.num_ended == g.num_threads) {
      g.free_stacks.push_back(self->stack);
      leave_to_main();
    }
    MslThread* next = next_thread();
    if (next == nullptr) fail_stuck();
    make_current(next);
    if (next->sp == nullptr) {
      next->stack = self->stack;
      next->sp = self;  // has begun
      begin_thread(*next);
      continue;
    }
    g.free_stacks.push_back(self->stack);
    void* unused;
    msl_switch(&unused, next->sp);
  }
}

void run_threadgroup() {
  MslDispatch& d = *g.dispatch;
  // A NaN in every float type, so that nothing unwritten looks like a result.
  memset(g.memory, 0xff, g.memory_used);
  g.first_epoch = ++g.epoch;
  g.num_ended = 0;
  g.at_barrier = 0;
  g.sum_instructions = 0;
  g.max_instructions = 0;
  for (unsigned s = 0; s < msl_grid.num_simdgroups; ++s) {
    MslSimdgroup& simdgroup = g.simdgroups[s];
    const unsigned rest = g.num_threads - s * MSL_LANES;
    simdgroup.index = s;
    simdgroup.num_lanes = rest < MSL_LANES ? rest : MSL_LANES;
    simdgroup.all_lanes = rest < MSL_LANES ? (1u << rest) - 1 : 0xffffffffu;
    simdgroup.ready = simdgroup.all_lanes;
    simdgroup.arrived = 0;
    simdgroup.epoch = 1;
  }
  for (unsigned i = 0; i < g.num_threads; ++i) {
    MslThread& thread = g.threads[i];
    thread.index = i;
    thread.lane = i % MSL_LANES;
    thread.simdgroup = &g.simdgroups[i / MSL_LANES];
    thread.wait = kMslReady;
    thread.site = 0;
    thread.sp = nullptr;
    thread.instructions = 0;
  }
  MslThread& first = g.threads[0];
  begin_thread(first);
  prepare(first);
  msl_current = nullptr;
  make_current(&first);
  msl_switch(&g.main_sp, first.sp);
  msl_current = nullptr;
  d.counters.threadgroups += 1;
  d.counters.threads += g.num_threads;
  d.counters.instructions += g.sum_instructions;
  d.counters.instruction_slots += g.max_instructions * g.num_threads;
}

bool prepare_dispatch(MslDispatch& d) {
  g.has_failed = false;
  g.num_threads = d.threads[0] * d.threads[1] * d.threads[2];
  unsigned most = d.kernel->max_threads == 0 ? MSL_MAX_THREADS : d.kernel->max_threads;
  if (g.num_threads == 0 || g.num_threads > most || most > MSL_MAX_THREADS) {
    fail("%u threads in a threadgroup; 1 to %u are possible", g.num_threads, most);
    return false;
  }
  if (g.stacks == nullptr) {
    void* memory = mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED) {
      fail("no memory for the stacks of %u threads", MSL_MAX_THREADS);
      return false;
    }
    g.memory = static_cast<unsigned char*>(memory);
    g.stacks = g.memory + kThreadgroupBytes;
  }
  g.free_stacks.clear();
  for (int i = MSL_MAX_THREADS; i-- > 0;) g.free_stacks.push_back(i);
  for (int i = 0; i < 3; ++i) {
    msl_grid.threads[i] = d.threads[i];
    msl_grid.threadgroups[i] = d.threadgroups[i];
  }
  msl_grid.num_simdgroups = (g.num_threads + MSL_LANES - 1) / MSL_LANES;
  for (int i = 0; i < MSL_MAX_BUFFERS; ++i) {
    auto address = i < d.num_buffers ? reinterpret_cast<uintptr_t>(d.buffers[i].data) : 0;
    if (msl_is_checked && address != 0) address |= static_cast<uintptr_t>(i + 1) << MSL_TAG_SHIFT;
    msl_buffers[i] = reinterpret_cast<void*>(address);
  }
  g.memory_used = 0;
  for (Declaration& declaration : g.declarations) declaration = Declaration();
  msl_flops = 0;
  if (g.epoch > 0x80000000u) {
    memset(static_cast<void*>(g.shadow), 0, sizeof g.shadow);
    g.epoch = 0;
  }
  return true;
}

}  // namespace

State::~State() {
  if (memory != nullptr) munmap(memory, kMemoryBytes);
}

void fail(const char* format, ...) {
  if (!g.has_failed) {
    g.has_failed = true;
    char what[700];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    MslDispatch& d = *g.dispatch;
    const MslThread* t = msl_current;
    if (t == nullptr) {
      snprintf(d.error, sizeof d.error, "kernel %s: %s", d.kernel->name, what);
    } else {
      const unsigned* group = msl_grid.group;
      snprintf(d.error, sizeof d.error, "kernel %s, %s (thread [%u, %u, %u] of threadgroup [%u, %u, %u])",
               d.kernel->name, what, t->position[0], t->position[1], t->position[2], group[0], group[1], group[2]);
    }
  }
  if (msl_current != nullptr) leave_to_main();
}

}  // namespace msl_runtime

using namespace msl_runtime;

extern "C" {

int msl_arrive(void) {
  MslThread* self = msl_current;
  MslSimdgroup& simdgroup = *self->simdgroup;
  if (simdgroup.arrived == 0) {
    simdgroup.first = self;
  } else if (simdgroup.first->site != msl_site) {
    self->wait = kMslAtSimdgroup;
    self->site = msl_site;
    fail_divergent(*simdgroup.first, *self);
  }
  self->site = msl_site;
  if (++simdgroup.arrived == simdgroup.num_lanes) {
    ++g.dispatch->counters.simdgroup_operations;
    return 1;
  }
  block(kMslAtSimdgroup);
  return 0;
}

void msl_release(void) {
  MslSimdgroup& simdgroup = *msl_current->simdgroup;
  simdgroup.arrived = 0;
  simdgroup.ready = simdgroup.all_lanes;
  simdgroup.parity ^= 1;
}

void msl_simdgroup_barrier(int flags) {
  if (!msl_arrive()) return;
  --g.dispatch->counters.simdgroup_operations;
  ++g.dispatch->counters.simdgroup_barriers;
  if ((flags & 2) != 0) ++msl_current->simdgroup->epoch;
  msl_release();
}

void msl_threadgroup_barrier(int flags) {
  MslThread* self = msl_current;
  self->site = msl_site;
  if (g.at_barrier == 0) {
    g.first_at_barrier = self;
  } else if (g.first_at_barrier->site != msl_site) {
    self->wait = kMslAtThreadgroup;
    fail_divergent(*g.first_at_barrier, *self);
  }
  if (++g.at_barrier < g.num_threads) return block(kMslAtThreadgroup);
  g.at_barrier = 0;
  ++g.dispatch->counters.barriers;
  if ((flags & 2) != 0) ++g.epoch;
  for (unsigned s = 0; s < msl_grid.num_simdgroups; ++s) g.simdgroups[s].ready = g.simdgroups[s].all_lanes;
}

void* msl_threadgroup_memory(int id, msl_size size_bytes, int line) {
  if (id >= MSL_MAX_DECLARATIONS) fail("line %d: too many declarations of threadgroup memory for the shim", line);
  Declaration& declaration = g.declarations[id];
  if (!declaration.is_used) {
    declaration.is_used = true;
    declaration.offset = (g.memory_used + 15) / 16 * 16;
    declaration.size_bytes = size_bytes;
    declaration.line = line;
    const size_t end = declaration.offset + size_bytes;
    if (end > kThreadgroupBytes) {
      fail("line %d: threadgroup overflow: %zu bytes of threadgroup memory, Metal has %zu", line, end,
           kThreadgroupBytes);
    }
    memset(g.memory + declaration.offset, 0xff, size_bytes);  // as later threadgroups find it
    g.memory_used = end;
  }
  auto address = reinterpret_cast<uintptr_t>(g.memory + declaration.offset);
  if (msl_is_checked) address |= static_cast<uintptr_t>(id + 1) << MSL_TAG_SHIFT;
  return reinterpret_cast<void*>(address);
}

void* msl_threadgroup_argument(int index) {
  MslDispatch& d = *g.dispatch;
  if (index >= d.num_threadgroup_arguments || d.threadgroup_arguments[index] == 0) {
    fail("the size of the argument [[threadgroup(%d)]] was not set", index);
  }
  // Arguments are the last declarations.
  return msl_threadgroup_memory(MSL_MAX_DECLARATIONS - 1 - index, d.threadgroup_arguments[index], 0);
}

void msl_dispatch(MslDispatch* dispatch) {
  g.dispatch = dispatch;
  msl_current = nullptr;
  dispatch->error[0] = 0;
  if (!prepare_dispatch(*dispatch)) return;
  const msl_count total =
      static_cast<msl_count>(dispatch->threadgroups[0]) * dispatch->threadgroups[1] * dispatch->threadgroups[2];
  for (msl_count i = 0; i < total && !g.has_failed; ++i) {
    const msl_count at = dispatch->is_reversed ? total - 1 - i : i;
    g.threadgroup = static_cast<uint32_t>(at + 1);
    msl_grid.group[0] = static_cast<unsigned>(at % dispatch->threadgroups[0]);
    msl_grid.group[1] = static_cast<unsigned>(at / dispatch->threadgroups[0] % dispatch->threadgroups[1]);
    msl_grid.group[2] = static_cast<unsigned>(at / dispatch->threadgroups[0] / dispatch->threadgroups[1]);
    run_threadgroup();
  }
  dispatch->counters.flops = msl_flops;
  dispatch->threadgroup_bytes = g.memory_used;
  for (BufferShadow& buffer : g.buffers) {
    free(buffer.touched);
    free(buffer.writers);
    buffer = BufferShadow();
  }
}

}  // extern "C"
