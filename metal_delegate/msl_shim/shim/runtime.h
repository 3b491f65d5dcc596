// What the shim's metal_stdlib calls and what runtime.cpp provides: lanes of simdgroups that wait for each
// other, threadgroup memory, and the callbacks of instrumented code.
#ifndef FLEXPTE_MSL_RUNTIME_H
#define FLEXPTE_MSL_RUNTIME_H

typedef __SIZE_TYPE__ msl_size;

extern "C" {

// What a kernel argument is; `index` of kBuffer is n of [[buffer(n)]], of kThreadgroup n of [[threadgroup(n)]].
enum MslAttribute {
  kMslBuffer,
  kMslThreadgroup,
  kMslThreadPositionInGrid,
  kMslThreadgroupPositionInGrid,
  kMslThreadPositionInThreadgroup,
  kMslThreadIndexInThreadgroup,
  kMslThreadIndexInSimdgroup,
  kMslSimdgroupIndexInThreadgroup,
  kMslSimdgroupsPerThreadgroup,
  kMslThreadsPerThreadgroup,
  kMslThreadsPerGrid,
  kMslThreadgroupsPerGrid,
  kMslThreadsPerSimdgroup,
};
struct MslArgument {
  int attribute;
  int index;
};

// The thread that runs.
struct MslThread {
  unsigned position[3];          // in the threadgroup
  unsigned group[3];             // of the grid
  unsigned threads[3];           // of a threadgroup
  unsigned threadgroups[3];      // of the grid
  unsigned index;                // in the threadgroup
  unsigned lane;
  unsigned simdgroup;
};

struct MslKernel {
  const char* name;
  int num_arguments;
  const MslArgument* arguments;
  void (*call)(const MslArgument* arguments);
};

// Written by the code generated behind the kernels; the last entry has no name.
extern const MslKernel msl_kernels[];

const MslThread* msl_thread();
void* msl_buffer(int index);
void* msl_threadgroup_argument(int index);
// Memory of a declaration; the same address for all threads of a threadgroup.
void* msl_threadgroup_memory(msl_size size_bytes, int line);

// Blocks until all lanes of the simdgroup are here; afterwards *all points to what each lane published.
// `site` tells calls at different places apart.
int msl_gather(const void* mine, msl_size size_bytes, const void** all, void* site);
void msl_simdgroup_barrier(void* site);
void msl_threadgroup_barrier(void* site);

// D = A B + C by the lanes of a simdgroup, whose elements lie at the addresses that each lane publishes.
struct MslMatrices {
  const void* a;
  const void* b;
  const void* c;
  void* d;
};
void msl_matrix_multiply(const MslMatrices* mine, int type_a, int type_b, int type_c, int type_d, void* site);
enum MslType { kMslFloat, kMslHalf, kMslBfloat };

// Set before each call into the shim: the line of the kernel text that runs.
extern int msl_line;

// Callbacks of instrumented code; `line` is that of the kernel text.
void msl_device_load(const void* address, unsigned size_bytes, unsigned align, int line);
void msl_device_store(const void* address, unsigned size_bytes, unsigned align, int line);
void msl_constant_load(const void* address, unsigned size_bytes, unsigned align, int line);
void msl_threadgroup_load(const void* address, unsigned size_bytes, unsigned align, int line);
void msl_threadgroup_store(const void* address, unsigned size_bytes, unsigned align, int line);
void msl_block(unsigned flops, unsigned instructions);

// The host's side. All structs are plain: the host and the library are compiled apart.
struct MslBufferArgument {
  const void* data;
  msl_size size_bytes;
  int is_writable;
  unsigned long long read_bytes, written_bytes;  // out
};
struct MslCounters {
  unsigned long long threads, threadgroups, constant_read_bytes, threadgroup_read_bytes, threadgroup_written_bytes,
      barriers, simdgroup_operations, matrix_multiplies, flops, instructions, instruction_slots;
};
struct MslDispatch {
  const MslKernel* kernel;
  MslBufferArgument* buffers;
  int num_buffers;
  const msl_size* threadgroup_arguments;  // sizes of [[threadgroup(n)]] arguments
  int num_threadgroup_arguments;
  unsigned threadgroups[3];
  unsigned threads[3];
  int is_reversed;  // threadgroups run last to first
  MslCounters counters;      // out
  char error[1024];          // out; empty: none
};
void msl_dispatch(MslDispatch* dispatch);
}

#endif
