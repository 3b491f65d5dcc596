// What instrumented kernels call before each access: is it inside one buffer or threadgroup array, aligned, of
// initialised memory, and not in a race? The bytes are counted.
//
// A pointer of a checked kernel carries the number of its buffer (or declaration of threadgroup memory) in its
// upper bits, so that an access past the end of one buffer is found even where another one follows.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace msl_runtime {
namespace {

constexpr uintptr_t kAddressMask = (uintptr_t{1} << MSL_TAG_SHIFT) - 1;

const char* name_of(int buffer, char* text, size_t size) {
  const MslBufferArgument& b = g.dispatch->buffers[buffer];
  if (b.name_length > 0) {
    snprintf(text, size, "buffer(%d) '%.*s'", buffer, b.name_length, b.name);
  } else {
    snprintf(text, size, "buffer(%d)", buffer);
  }
  return text;
}

#define MSL_COLD __attribute__((noinline, cold))
#define MSL_HOT inline __attribute__((always_inline))

MSL_COLD void fail_alignment(int align, int line) {
  fail("line %d: misaligned access: it needs an alignment of %d bytes", line, align);
}

MSL_COLD void fail_null(uintptr_t tagged, const char* what, int line) {
  fail("line %d: %s through a null pointer (offset %lld): an absent buffer must not be touched", line, what,
       static_cast<long long>(tagged));
}

MSL_COLD void fail_outside(int index, uintptr_t address, size_t size_bytes, const char* what, int line) {
  const MslBufferArgument& b = g.dispatch->buffers[index];
  char name[80];
  fail("line %d: %s of %zu bytes out of bounds: at byte %lld of %s, which has %zu", line, what, size_bytes,
       static_cast<long long>(address - reinterpret_cast<uintptr_t>(b.data)), name_of(index, name, sizeof name),
       b.size_bytes);
}

MSL_COLD void fail_read_only(int index, int line) {
  char name[80];
  fail("line %d: store to %s, which is bound for reading", line, name_of(index, name, sizeof name));
}

MSL_HOT void check_alignment(uintptr_t address, int align, int line) {
  if (align > 1 && (address & (static_cast<uintptr_t>(align) - 1)) != 0) fail_alignment(align, line);
}

// The number of the buffer of a device or constant pointer; the access lies inside.
MSL_HOT int find_buffer(uintptr_t tagged, size_t size_bytes, const char* what, int line) {
  const int index = static_cast<int>(tagged >> MSL_TAG_SHIFT) - 1;
  const uintptr_t address = tagged & kAddressMask;
  if (index < 0 || index >= g.dispatch->num_buffers) fail_null(tagged, what, line);
  const MslBufferArgument& b = g.dispatch->buffers[index];
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(b.data);  // huge where it is negative
  if (offset > b.size_bytes || b.size_bytes - offset < size_bytes) fail_outside(index, address, size_bytes, what, line);
  return index;
}

// Counts the bytes that were not touched before.
MSL_COLD void touch_new(int index, size_t offset, size_t size_bytes) {
  BufferShadow& shadow = g.buffers[index];
  MslBufferArgument& b = g.dispatch->buffers[index];
  if (shadow.touched == nullptr) {
    shadow.touched = static_cast<uint64_t*>(calloc(b.size_bytes / 64 + 1, sizeof(uint64_t)));
    if (shadow.touched == nullptr) return;
  }
  while (size_bytes > 0) {
    const size_t bit = offset % 64;
    const size_t n = size_bytes < 64 - bit ? size_bytes : 64 - bit;
    const uint64_t mask = (n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1) << bit;
    uint64_t& word = shadow.touched[offset / 64];
    b.unique_bytes += static_cast<msl_count>(__builtin_popcountll(mask & ~word));
    word |= mask;
    offset += n;
    size_bytes -= n;
  }
}
MSL_HOT void touch(int index, size_t offset, size_t size_bytes) {
  const uint64_t* touched = g.buffers[index].touched;
  const size_t bit = offset % 64;
  if (touched != nullptr && bit + size_bytes < 64) {
    const uint64_t mask = ((uint64_t{1} << size_bytes) - 1) << bit;
    if ((touched[offset / 64] & mask) == mask) return;
  }
  touch_new(index, offset, size_bytes);
}

MSL_COLD void fail_other_threadgroup(int index, size_t offset, uint32_t writer, bool is_store, int line) {
  char name[80];
  fail("line %d: race between threadgroups: %s byte %zu of %s, which threadgroup number %u wrote in the same dispatch",
       line, is_store ? "writes" : "reads", offset, name_of(index, name, sizeof name), writer - 1);
}

// Threadgroups of one dispatch run in any order: what one writes the others neither read nor write.
MSL_HOT void check_other_threadgroups(int index, size_t offset, size_t size_bytes, bool is_store, int line) {
  BufferShadow& shadow = g.buffers[index];
  if (shadow.writers == nullptr) {
    if (!is_store) return;
    shadow.writers = static_cast<uint32_t*>(calloc(g.dispatch->buffers[index].size_bytes / 2 + 1, sizeof(uint32_t)));
    if (shadow.writers == nullptr) return;
  }
  // Of single bytes nothing is known: a neighbour may be another threadgroup's.
  for (size_t i = offset / 2; i < (offset + size_bytes) / 2 && size_bytes > 1; ++i) {
    uint32_t& writer = shadow.writers[i];
    if (writer != 0 && writer != g.threadgroup) fail_other_threadgroup(index, 2 * i, writer, is_store, line);
    if (is_store) writer = g.threadgroup;
  }
}

// The offset into threadgroup memory.
MSL_COLD void fail_threadgroup_pointer(const char* what, int line) {
  fail("line %d: threadgroup %s through an invalid pointer", line, what);
}
MSL_COLD void fail_threadgroup_outside(int id, uintptr_t offset, size_t size_bytes, const char* what, int line) {
  const Declaration& d = g.declarations[id];
  fail("line %d: threadgroup %s of %zu bytes out of bounds: at byte %lld of the %zu declared in line %d", line, what,
       size_bytes, static_cast<long long>(offset), d.size_bytes, d.line);
}
MSL_HOT size_t find_threadgroup(uintptr_t tagged, size_t size_bytes, const char* what, int line) {
  const int id = static_cast<int>(tagged >> MSL_TAG_SHIFT) - 1;
  if (id < 0 || id >= MSL_MAX_DECLARATIONS || !g.declarations[id].is_used) fail_threadgroup_pointer(what, line);
  const Declaration& d = g.declarations[id];
  const uintptr_t offset = (tagged & kAddressMask) - reinterpret_cast<uintptr_t>(g.memory) - d.offset;
  if (offset > d.size_bytes || d.size_bytes - offset < size_bytes) {
    fail_threadgroup_outside(id, offset, size_bytes, what, line);
  }
  return offset + d.offset;
}

// Whether an access by `other` in this epoch, before the barriers of its simdgroup, is not ordered with one of the
// current thread now.
MSL_HOT bool conflicts(unsigned other, uint16_t simd_epoch) {
  const MslThread& t = *msl_current;
  if (other == t.index) return false;
  if (other == kManyThreads) return true;
  const unsigned simdgroup = (other & kManyLanes) != 0 ? other & ~kManyLanes : other / MSL_LANES;
  if (simdgroup != t.simdgroup->index) return true;
  return simd_epoch == static_cast<uint16_t>(t.simdgroup->epoch);
}

MSL_COLD void fail_race(const char* now, int line, const char* before, int other_line, unsigned other) {
  char thread[40] = "several threads";
  if (other < kManyLanes) snprintf(thread, sizeof thread, "thread %u", other);
  const bool same = other != kManyThreads &&
                    (other < kManyLanes ? other / MSL_LANES : other & ~kManyLanes) == msl_current->simdgroup->index;
  fail("line %d: race in threadgroup memory: %s what %s %s in line %d, without a %s between", line, now, thread, before,
       other_line, same ? "simdgroup barrier" : "barrier");
}

MSL_COLD void fail_uninitialised(int line) {
  fail("line %d: read of uninitialised threadgroup memory", line);
}

}  // namespace
}  // namespace msl_runtime

using namespace msl_runtime;

extern "C" {

void* msl_device_load(void* pointer, msl_size size_bytes, int align, int line, int is_atomic) {
  const auto tagged = reinterpret_cast<uintptr_t>(pointer);
  const int index = find_buffer(tagged, size_bytes, "load", line);
  MslBufferArgument& b = g.dispatch->buffers[index];
  const uintptr_t address = tagged & kAddressMask;
  check_alignment(address, align, line);
  const size_t offset = address - reinterpret_cast<uintptr_t>(b.data);
  b.read_bytes += size_bytes;
  touch(index, offset, size_bytes);
  if (is_atomic == 0 && b.is_writable) check_other_threadgroups(index, offset, size_bytes, false, line);
  return reinterpret_cast<void*>(address);
}

void* msl_device_store(void* pointer, msl_size size_bytes, int align, int line, int is_atomic) {
  const auto tagged = reinterpret_cast<uintptr_t>(pointer);
  const int index = find_buffer(tagged, size_bytes, "store", line);
  MslBufferArgument& b = g.dispatch->buffers[index];
  if (!b.is_writable) fail_read_only(index, line);
  const uintptr_t address = tagged & kAddressMask;
  check_alignment(address, align, line);
  const size_t offset = address - reinterpret_cast<uintptr_t>(b.data);
  b.written_bytes += size_bytes;
  touch(index, offset, size_bytes);
  if (is_atomic == 0) check_other_threadgroups(index, offset, size_bytes, true, line);
  return reinterpret_cast<void*>(address);
}

void* msl_constant_load(void* pointer, msl_size size_bytes, int align, int line, int) {
  const auto tagged = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t address = tagged & kAddressMask;
  check_alignment(address, align, line);
  if (address == tagged) {
    for (const MslRange* r = msl_constants; r->begin != nullptr; ++r) {
      const char* at = static_cast<const char*>(pointer);
      if (at >= r->begin && at + size_bytes <= r->end) return pointer;
    }
  }
  const int index = find_buffer(tagged, size_bytes, "load from constant memory", line);
  touch(index, address - reinterpret_cast<uintptr_t>(g.dispatch->buffers[index].data), size_bytes);
  g.dispatch->counters.constant_read_bytes += size_bytes;
  return reinterpret_cast<void*>(address);
}

void* msl_threadgroup_load(void* pointer, msl_size size_bytes, int align, int line, int is_atomic) {
  const auto tagged = reinterpret_cast<uintptr_t>(pointer);
  const size_t offset = find_threadgroup(tagged, size_bytes, "load", line);
  check_alignment(tagged & kAddressMask, align, line);
  const MslThread& t = *msl_current;
  const auto simd_epoch = static_cast<uint16_t>(t.simdgroup->epoch);
  const unsigned many = kManyLanes | t.simdgroup->index;
  for (size_t i = offset; i < offset + size_bytes; ++i) {
    Shadow& s = g.shadow[i];
    if (s.write_epoch < g.first_epoch) {
      fail_uninitialised(line);
    }
    if (s.write_epoch == g.epoch && !(is_atomic && s.is_atomic) && conflicts(s.writer, s.write_simd_epoch)) {
      fail_race("reads", line, "wrote", s.write_line, s.writer);
    }
    if (is_atomic) continue;
    if (s.read_epoch != g.epoch) {
      s.reader = static_cast<uint16_t>(t.index);
    } else if (s.reader != t.index && s.reader != many) {
      const unsigned simdgroup = s.reader < kManyLanes ? s.reader / MSL_LANES : s.reader & ~kManyLanes;
      if (s.reader == kManyThreads || simdgroup != t.simdgroup->index) {
        s.reader = kManyThreads;
      } else {
        s.reader = static_cast<uint16_t>(s.read_simd_epoch == simd_epoch ? many : t.index);
      }
    } else if (s.reader == many && s.read_simd_epoch != simd_epoch) {
      s.reader = static_cast<uint16_t>(t.index);
    }
    s.read_epoch = g.epoch;
    s.read_simd_epoch = simd_epoch;
    s.read_line = static_cast<uint16_t>(line);
  }
  g.dispatch->counters.threadgroup_read_bytes += size_bytes;
  return g.memory + offset;
}

void* msl_threadgroup_store(void* pointer, msl_size size_bytes, int align, int line, int is_atomic) {
  const auto tagged = reinterpret_cast<uintptr_t>(pointer);
  const size_t offset = find_threadgroup(tagged, size_bytes, "store", line);
  check_alignment(tagged & kAddressMask, align, line);
  const MslThread& t = *msl_current;
  for (size_t i = offset; i < offset + size_bytes; ++i) {
    Shadow& s = g.shadow[i];
    if (s.write_epoch == g.epoch && !(is_atomic && s.is_atomic) && conflicts(s.writer, s.write_simd_epoch)) {
      fail_race("writes", line, "wrote", s.write_line, s.writer);
    }
    if (s.read_epoch == g.epoch && conflicts(s.reader, s.read_simd_epoch)) {
      fail_race("writes", line, "read", s.read_line, s.reader);
    }
    s.writer = static_cast<uint16_t>(t.index);
    s.write_epoch = g.epoch;
    s.write_simd_epoch = static_cast<uint16_t>(t.simdgroup->epoch);
    s.write_line = static_cast<uint16_t>(line);
    s.is_atomic = is_atomic != 0;
  }
  g.dispatch->counters.threadgroup_written_bytes += size_bytes;
  return g.memory + offset;
}

void msl_matrix_multiply(void) {
  MslSimdgroup& s = *msl_current->simdgroup;
  if (s.num_lanes != MSL_LANES) {
    fail("line %d: a matrix operation in a simdgroup of %u threads", line_of(msl_site), s.num_lanes);
  }
  for (int i = 0; i < 8; ++i) {
    float row[8];
    for (int j = 0; j < 8; ++j) row[j] = s.c[i][j];
    for (int k = 0; k < 8; ++k) {
      for (int j = 0; j < 8; ++j) row[j] += s.a[i][k] * s.b[k][j];
    }
    for (int j = 0; j < 8; ++j) s.d[i][j] = row[j];
  }
  --g.dispatch->counters.simdgroup_operations;
  ++g.dispatch->counters.matrix_multiplies;
}

// The compiler's conversions to bfloat16, which older libraries of compilers lack: to nearest even.
__bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const auto narrow =
      static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  __bf16 result;
  memcpy(&result, &narrow, sizeof result);
  return result;
}
}  // extern "C"
