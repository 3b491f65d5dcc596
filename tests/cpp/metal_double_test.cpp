// The device "metal", its real host code, on a test double of Metal that runs kernels through the shim.
#include "tests/cpp/metal_double/metal_double.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "metal_delegate/gpu/queue.h"
#include "metal_delegate/metal/gpu_cores.h"
#include "metal_delegate/metal/metal_library.h"
#include "runtime/memory.h"

namespace flexpte::metal {
namespace {

using gpu::Access;
using metal_double::behaviour;
using metal_double::live_objects;
using metal_double::record;
using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

constexpr const char* kText = R"(#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
struct Params { int count; float factor; };

// Digit by digit: the order of dispatches shows.
[[kernel]] void append(constant Params& params [[buffer(0)]], device float* number [[buffer(1)]]) {
  number[0] = number[0] * 10.0f + params.factor;
}
[[kernel]] void scale(constant Params& params [[buffer(0)]], device const float* in [[buffer(1)]],
                      device float* out [[buffer(2)]], device const float* bias [[buffer(3)]],
                      uint i [[thread_position_in_grid]]) {
  if (int(i) < params.count) out[i] = in[i] * params.factor;
}
)";

struct Params {
  int32_t count;
  float factor;
};

AssertionResult is_ok(const Status& status) {
  if (status.is_ok()) return AssertionSuccess();
  return AssertionFailure() << code_name(status.code()) << ": " << status.message();
}

AssertionResult is_error(const Status& status, Code code, std::string_view text) {
  if (status.code() == code && status.message().find(text) != std::string::npos) return AssertionSuccess();
  return AssertionFailure() << code_name(status.code()) << ": " << status.message();
}

// Pages of the test, as floats.
class Memory {
 public:
  explicit Memory(size_t num_pages) {
    auto pages = ZeroPages::allocate(num_pages * page_bytes(), "the test");
    if (pages.is_ok()) pages_ = std::move(*pages);
  }
  static size_t page_bytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }
  float* at(size_t byte) { return reinterpret_cast<float*>(pages_.bytes().data() + byte); }
  std::span<std::byte> bytes() { return pages_.bytes(); }
  ZeroPages& pages() { return pages_; }

 private:
  ZeroPages pages_;
};

ptrdiff_t num_live(std::string_view name) {
  const std::vector<std::string> names = live_objects();
  return std::count(names.begin(), names.end(), name);
}

const std::byte* bytes_of(const float* data) {
  return reinterpret_cast<const std::byte*>(data);
}

class MetalTest : public testing::Test {
 protected:
  void SetUp() override {
    metal_double::reset();
    ASSERT_EQ(live_objects(), std::vector<std::string>());
  }
  void TearDown() override {
    EXPECT_EQ(record().violations, std::vector<std::string>());
    queue_.reset();
    library_.reset();
    EXPECT_EQ(live_objects(), std::vector<std::string>());
    EXPECT_EQ(record().violations, std::vector<std::string>());
  }

  Status open(const Options& options = {}) {
    FLEXPTE_ASSIGN(library_, make_metal_library(kText, options));
    FLEXPTE_ASSIGN(queue_, library_->make_queue());
    return Status::ok();
  }

  Status map(const float* data, size_t size_bytes, Access access = Access::kReadWrite) {
    return queue_->map(bytes_of(data), size_bytes, access);
  }
  void unmap(const float* data) { queue_->unmap(bytes_of(data)); }

  Status dispatch(std::string_view kernel, Params params, std::span<const gpu::BufferArgument> buffers,
                  const gpu::Grid& grid = {}) {
    FLEXPTE_ASSIGN(const gpu::Pipeline* pipeline, queue_->pipeline(kernel));
    return queue_->dispatch(*pipeline, std::as_bytes(std::span(&params, 1)), buffers, grid);
  }
  Status append(float* number, float digit) {
    const std::array buffers = {gpu::BufferArgument{bytes_of(number), sizeof(float), Access::kReadWrite, "number"}};
    return dispatch("append", {1, digit}, buffers);
  }
  Status scale(const float* in, float* out, int32_t count, float factor) {
    const size_t size_bytes = static_cast<size_t>(count) * sizeof(float);
    const std::array buffers = {gpu::BufferArgument{bytes_of(in), size_bytes, Access::kRead, "in"},
                                gpu::BufferArgument{bytes_of(out), size_bytes, Access::kReadWrite, "out"},
                                gpu::BufferArgument{nullptr, 0, Access::kRead, "bias"}};
    return dispatch("scale", {count, factor}, buffers, {{static_cast<uint32_t>(count + 31) / 32, 1, 1}, {32, 1, 1}});
  }

  std::shared_ptr<gpu::Library> library_;
  std::unique_ptr<gpu::Queue> queue_;
};

TEST(GpuCores, ComeFromTheNameOfTheChip) {
  EXPECT_EQ(num_gpu_cores("Apple M1"), 8U);
  EXPECT_EQ(num_gpu_cores("Apple M3 Max"), 40U);
  EXPECT_EQ(num_gpu_cores("Apple A17 Pro GPU"), 6U);
  EXPECT_EQ(num_gpu_cores("Apple M99 Ultra"), 8U);
  EXPECT_EQ(num_gpu_cores(""), 8U);
}

TEST_F(MetalTest, OneCommandBufferAStepInOrder) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(1);
  float* number = memory.at(64);
  ASSERT_TRUE(is_ok(map(number, sizeof(float))));
  for (int step = 1; step <= 3; ++step) {
    *number = 0;
    for (const float digit : {1.0F, 2.0F, 3.0F}) ASSERT_TRUE(is_ok(append(number, digit)));
    EXPECT_EQ(*number, 0.0F);  // nothing runs before the end of the step
    ASSERT_TRUE(is_ok(queue_->finish()));
    EXPECT_EQ(*number, 123.0F);
    EXPECT_EQ(record().num_command_buffers, static_cast<size_t>(step));
    EXPECT_EQ(record().num_encoders, static_cast<size_t>(step));
  }
  // What is bound already is not bound again.
  EXPECT_EQ(record().num_set_buffers, 3U);
  EXPECT_EQ(record().num_queues, 1U);
  // A step of nothing costs nothing.
  ASSERT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(record().num_command_buffers, 3U);
}

TEST_F(MetalTest, KernelsWorkOnTheHostsMemory) {
  ASSERT_TRUE(is_ok(open()));
  Memory input(1), output(2);
  for (size_t i = 0; i < 100; ++i) input.at(256)[i] = static_cast<float>(i);
  ASSERT_TRUE(is_ok(map(input.at(256), 400, Access::kRead)));
  ASSERT_TRUE(is_ok(map(output.at(4), 5000)));  // two pages, neither whole
  ASSERT_TRUE(is_ok(scale(input.at(256), output.at(4096), 100, 2.0F)));
  input.at(256)[99] = -1.0F;  // seen: the GPU reads what the host has written by the end of the step
  ASSERT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(output.at(4096)[98], 196.0F);
  EXPECT_EQ(output.at(4096)[99], -2.0F);
  EXPECT_EQ(output.at(4096)[100], 0.0F);
  EXPECT_EQ(output.at(4092)[0], 0.0F);
  EXPECT_EQ(record().num_wrapped_buffers, 2U);
}

TEST_F(MetalTest, InfinitiesStayInfinite) {
  ASSERT_TRUE(is_ok(open()));
  EXPECT_FALSE(record().is_fast_math);
  EXPECT_EQ(record().language_version, 0x30001U);
}

TEST_F(MetalTest, SystemsWithoutBfloatAreRefused) {
  behaviour().system_version = 13;
  const Status status = make_metal_library(kText).status();
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_NE(status.message().find("macOS 14"), std::string::npos);
}

TEST_F(MetalTest, PipelinesAreCompiledOnceForAllQueues) {
  ASSERT_TRUE(is_ok(open()));
  const auto first = queue_->pipeline("append");
  ASSERT_TRUE(is_ok(first.status()));
  EXPECT_EQ((*first)->name(), "append");
  EXPECT_EQ((*first)->max_threads_per_threadgroup(), 1024U);
  std::array<const gpu::Pipeline*, 8> found = {};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < found.size(); ++t) {
    threads.emplace_back([this, t, &found] {
      const auto queue = library_->make_queue();
      if (!queue.is_ok()) return;
      const auto pipeline = (*queue)->pipeline(t % 2 == 0 ? "append" : "scale");
      if (pipeline.is_ok()) found[t] = *pipeline;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t t = 0; t < found.size(); ++t) EXPECT_EQ(found[t], t % 2 == 0 ? *first : found[1]);
  EXPECT_NE(found[1], nullptr);
  EXPECT_EQ(record().num_pipelines, 2U);
  EXPECT_EQ(record().num_libraries, 1U);
}

TEST_F(MetalTest, RegionsThatShareAPageShareABuffer) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(4);
  const size_t page = Memory::page_bytes();
  // [0, page) and [2 page, 3 page) first, then one that touches both.
  ASSERT_TRUE(is_ok(map(memory.at(0), 64)));
  ASSERT_TRUE(is_ok(map(memory.at(2 * page + 128), 64)));
  EXPECT_EQ(record().num_wrapped_buffers, 2U);
  ASSERT_TRUE(is_ok(map(memory.at(64), 2 * page)));
  EXPECT_EQ(record().num_wrapped_buffers, 3U);
  EXPECT_EQ(num_live("MTLBuffer"), 2);                     // one more for absent operands
  ASSERT_TRUE(is_ok(map(memory.at(page * 2 + 256), 64)));  // on pages that are wrapped already
  EXPECT_EQ(record().num_wrapped_buffers, 3U);

  // All of it in one step: the double refuses two buffers over the same memory.
  *memory.at(0) = 5.0F;
  ASSERT_TRUE(is_ok(scale(memory.at(0), memory.at(64), 1, 2.0F)));
  ASSERT_TRUE(is_ok(scale(memory.at(64), memory.at(2 * page + 128), 1, 2.0F)));
  ASSERT_TRUE(is_ok(scale(memory.at(2 * page + 128), memory.at(2 * page + 256), 1, 2.0F)));
  ASSERT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(*memory.at(2 * page + 256), 40.0F);

  // Without the region in the middle, its pages are let go.
  unmap(memory.at(64));
  EXPECT_EQ(num_live("MTLBuffer"), 3);
  ASSERT_TRUE(is_ok(scale(memory.at(0), memory.at(2 * page + 256), 1, 3.0F)));
  ASSERT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(*memory.at(2 * page + 256), 15.0F);
  for (const size_t offset : {size_t{0}, 2 * page + 128, 2 * page + 256}) unmap(memory.at(offset));
  EXPECT_EQ(num_live("MTLBuffer"), 1);
  unmap(memory.at(0));  // unknown: nothing happens
}

TEST_F(MetalTest, MemoryMayBeMappedAndUnmappedWithinAStep) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(1), scratch(1);
  *memory.at(0) = 1.0F;
  ASSERT_TRUE(is_ok(map(memory.at(0), 64)));
  ASSERT_TRUE(is_ok(append(memory.at(0), 2.0F)));
  ASSERT_TRUE(is_ok(map(scratch.at(0), 64)));
  ASSERT_TRUE(is_ok(scale(memory.at(0), scratch.at(0), 1, 2.0F)));
  ASSERT_TRUE(is_ok(map(memory.at(64), 64)));  // on the first page: its buffer stays
  ASSERT_TRUE(is_ok(scale(scratch.at(0), memory.at(64), 1, 2.0F)));
  unmap(scratch.at(0));  // the command buffer still holds it
  ASSERT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(*memory.at(64), 48.0F);
  EXPECT_EQ(record().num_command_buffers, 1U);
}

TEST_F(MetalTest, ArgumentsOutsideMappedMemoryAreRefused) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(2);
  ASSERT_TRUE(is_ok(map(memory.at(64), 64, Access::kRead)));
  ASSERT_TRUE(is_ok(map(memory.at(256), 64)));
  EXPECT_TRUE(is_error(scale(memory.at(0), memory.at(256), 1, 1.0F), Code::kInternal,
                       "kernel scale: buffer 1 (in) of 4 bytes is not in memory mapped"));
  EXPECT_TRUE(is_error(scale(memory.at(64), memory.at(320), 1, 1.0F), Code::kInternal, "buffer 2 (out)"));
  EXPECT_TRUE(is_error(scale(memory.at(64), memory.at(256), 17, 1.0F), Code::kInternal, "reaches past"));
  EXPECT_TRUE(is_error(scale(memory.at(64), memory.at(68), 1, 1.0F), Code::kInternal, "mapped read-only"));
  EXPECT_TRUE(is_error(map(memory.at(100), 4), Code::kInvalidArgument, "mapped already"));
  EXPECT_TRUE(is_error(map(memory.at(0), 65), Code::kInvalidArgument, "mapped already"));
  EXPECT_TRUE(is_error(map(nullptr, 4), Code::kInvalidArgument, "null"));
  EXPECT_TRUE(is_ok(map(memory.at(0), 64)));
  EXPECT_TRUE(is_ok(map(nullptr, 0)));
  // Nothing was encoded.
  EXPECT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(record().num_command_buffers, 0U);
}

TEST_F(MetalTest, DispatchesThatMetalCannotTakeAreRefused) {
  behaviour().max_threads_per_threadgroup = 256;
  ASSERT_TRUE(is_ok(open()));
  EXPECT_TRUE(is_error(dispatch("append", {}, {}, {{1, 1, 1}, {16, 16, 2}}), Code::kUnsupported,
                       "kernel append is run with threadgroups of 512 threads; on this GPU it can have 256"));
  const std::vector<gpu::BufferArgument> buffers(gpu::kMaxBuffers);
  EXPECT_TRUE(is_error(dispatch("append", {}, buffers), Code::kUnsupported, "32 buffers"));
  const auto pipeline = queue_->pipeline("append");
  ASSERT_TRUE(is_ok(pipeline.status()));
  const std::vector<std::byte> params(gpu::kMaxParamsBytes + 1);
  EXPECT_TRUE(is_error(queue_->dispatch(**pipeline, params, {}, {}), Code::kUnsupported, "4097 bytes of params"));
  // No threads: nothing to do.
  EXPECT_TRUE(is_ok(dispatch("append", {}, {}, {{0, 1, 1}, {32, 1, 1}})));
  EXPECT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(record().num_command_buffers, 0U);
}

struct GpuError {
  int64_t metal_code;
  Code code;
  const char* text;
};

class MetalGpuErrors : public MetalTest, public testing::WithParamInterface<GpuError> {};

TEST_P(MetalGpuErrors, AreTypedAndTheQueueGoesOn) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(1);
  ASSERT_TRUE(is_ok(map(memory.at(0), 64)));
  behaviour().command_buffer_errors = {GetParam().metal_code};
  ASSERT_TRUE(is_ok(append(memory.at(0), 1.0F)));
  ASSERT_TRUE(is_ok(append(memory.at(0), 2.0F)));
  const Status status = queue_->finish();
  EXPECT_TRUE(is_error(status, GetParam().code, GetParam().text));
  EXPECT_TRUE(is_error(status, GetParam().code, "2 dispatches"));
  EXPECT_EQ(*memory.at(0), 0.0F);
  EXPECT_TRUE(is_ok(queue_->finish()));  // said once
  ASSERT_TRUE(is_ok(append(memory.at(0), 3.0F)));
  ASSERT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(*memory.at(0), 3.0F);
}

INSTANTIATE_TEST_SUITE_P(
    Codes, MetalGpuErrors,
    testing::Values(GpuError{1, Code::kInternal, "the GPU failed"}, GpuError{2, Code::kUnavailable, "took too long"},
                    GpuError{14, Code::kUnavailable, "display waiting"}, GpuError{3, Code::kInternal, "not mapped"},
                    GpuError{4, Code::kUnavailable, "took the GPU away"},
                    GpuError{7, Code::kUnavailable, "in the foreground"},
                    GpuError{8, Code::kOutOfMemory, "out of memory"},
                    GpuError{9, Code::kInternal, "a buffer that is gone"}, GpuError{11, Code::kUnavailable, "removed"},
                    GpuError{12, Code::kInternal, "stack"},
                    GpuError{99, Code::kInternal, "error 99: as the test wants"}));

TEST_F(MetalTest, MissingCommandBuffersAndQueuesAreErrors) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(1);
  ASSERT_TRUE(is_ok(map(memory.at(0), 64)));
  behaviour().num_command_buffers_refused = 1;
  EXPECT_TRUE(is_error(append(memory.at(0), 1.0F), Code::kUnavailable, "command buffer"));
  // An error whose queue cannot be replaced at once; the next step tries again.
  behaviour().command_buffer_errors = {7};
  ASSERT_TRUE(is_ok(append(memory.at(0), 1.0F)));
  behaviour().num_queues_refused = 2;
  EXPECT_TRUE(is_error(queue_->finish(), Code::kUnavailable, "foreground"));
  EXPECT_TRUE(is_error(append(memory.at(0), 1.0F), Code::kUnavailable, "command queue"));
  ASSERT_TRUE(is_ok(append(memory.at(0), 1.0F)));
  ASSERT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(*memory.at(0), 1.0F);
  behaviour().num_queues_refused = 1;
  EXPECT_TRUE(is_error(library_->make_queue().status(), Code::kUnavailable, "command queue"));
  behaviour().num_buffers_refused = 1;
  EXPECT_TRUE(is_error(library_->make_queue().status(), Code::kOutOfMemory, "buffer"));
}

TEST_F(MetalTest, MemoryThatMetalCannotMapIsAnError) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(3);
  const size_t page = Memory::page_bytes();
  behaviour().num_buffers_refused = 1;
  EXPECT_TRUE(is_error(map(memory.at(0), 64), Code::kOutOfMemory, "cannot map"));
  behaviour().num_buffers_short = 1;
  EXPECT_TRUE(is_error(map(memory.at(0), 64), Code::kOutOfMemory, "it gave 1"));
  behaviour().max_buffer_bytes = page;
  EXPECT_TRUE(is_error(map(memory.at(page - 4), 8), Code::kOutOfMemory, "at most " + std::to_string(page)));
  behaviour().max_buffer_bytes = 2 * page;
  ASSERT_TRUE(is_ok(map(memory.at(page - 4), 8)));
  ASSERT_TRUE(is_ok(map(memory.at(0), 64)));
  // When what stays cannot be wrapped anew, the old buffer serves.
  behaviour().num_buffers_refused = 1;
  unmap(memory.at(page - 4));
  ASSERT_TRUE(is_ok(append(memory.at(0), 4.0F)));
  ASSERT_TRUE(is_ok(queue_->finish()));
  EXPECT_EQ(*memory.at(0), 4.0F);
}

TEST_F(MetalTest, LibrariesThatDoNotCompileAreErrors) {
  EXPECT_TRUE(
      is_error(make_metal_library("#include <metal_stdlib>\n[[kernel]] void f(device unknown* x) {}\n").status(),
               Code::kInvalidProgram, "unknown"));
  EXPECT_TRUE(is_error(make_metal_library("\xC3(").status(), Code::kInvalidProgram, "UTF-8"));
  behaviour().library_error = "program_source:3:1: error: no";
  EXPECT_TRUE(is_error(open(), Code::kInvalidProgram, "program_source:3:1"));
  ASSERT_TRUE(is_ok(open()));
}

TEST_F(MetalTest, KernelsThatAreMissingOrDoNotSuitAreErrors) {
  ASSERT_TRUE(is_ok(open()));
  EXPECT_TRUE(
      is_error(queue_->pipeline("append2").status(), Code::kInvalidProgram, "no kernel named append2; it has: "));
  EXPECT_TRUE(is_error(queue_->pipeline("append2").status(), Code::kInvalidProgram, "append"));
  behaviour().pipeline_error = "too many registers";
  EXPECT_TRUE(is_error(queue_->pipeline("append").status(), Code::kUnsupported, "(Apple M1): too many registers"));
  behaviour().simd_width = 64;
  EXPECT_TRUE(is_error(queue_->pipeline("append").status(), Code::kUnsupported, "simdgroups of 32"));
  behaviour().simd_width = 32;
  EXPECT_TRUE(is_ok(queue_->pipeline("append").status()));
}

TEST_F(MetalTest, MachinesWithoutASuitableGpuAreErrors) {
  behaviour().has_device = false;
  EXPECT_TRUE(is_error(open(), Code::kUnsupported, "no Metal GPU"));
  behaviour().has_device = true;
  behaviour().has_simdgroup_matrix = false;
  EXPECT_TRUE(is_error(open(), Code::kUnsupported, "(Apple M1) is older"));
  behaviour().has_simdgroup_matrix = true;
  behaviour().device_name = "Apple M4 Max";
  ASSERT_TRUE(is_ok(open()));
  EXPECT_EQ(queue_->num_cores(), 40U);
}

TEST_F(MetalTest, LibrariesCompiledAheadOfTimeAreLoaded) {
  const std::string path = testing::TempDir() + "metal_double_test.metallib";
  std::ofstream(path) << kText;
  ASSERT_TRUE(is_ok(open({.metallib_path = path})));
  EXPECT_TRUE(is_ok(queue_->pipeline("scale").status()));
  EXPECT_TRUE(is_error(open({.metallib_path = path + ".missing"}), Code::kIo, ".missing: no such file"));
  ::unlink(path.c_str());
}

TEST_F(MetalTest, AStepThatIsAbandonedLeavesNothingBehind) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(1);
  ASSERT_TRUE(is_ok(map(memory.at(0), 64)));
  ASSERT_TRUE(is_ok(append(memory.at(0), 1.0F)));
  queue_.reset();
  EXPECT_EQ(record().num_command_buffers, 0U);
}

TEST_F(MetalTest, KernelFaultsAreErrors) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(1);
  ASSERT_TRUE(is_ok(map(memory.at(0), Memory::page_bytes())));
  const auto past =
      std::array{gpu::BufferArgument{bytes_of(memory.at(Memory::page_bytes() - 4)), 4, Access::kRead, "in"},
                 gpu::BufferArgument{bytes_of(memory.at(0)), 4, Access::kReadWrite, "out"}};
  ASSERT_TRUE(is_ok(dispatch("scale", {32, 1.0F}, past, {{1, 1, 1}, {32, 1, 1}})));
  EXPECT_TRUE(is_error(queue_->finish(), Code::kInternal, "out of bounds"));
  ASSERT_TRUE(is_ok(append(memory.at(0), 1.0F)));
  EXPECT_TRUE(is_ok(queue_->finish()));
}

// Pages that come back to a mapped address are not those that the GPU knows: whoever clears or frees memory has to
// unmap it.
TEST_F(MetalTest, MemoryReplacedUnderABufferIsNoticed) {
  ASSERT_TRUE(is_ok(open()));
  Memory memory(1);
  float* number = memory.at(0);
  ASSERT_TRUE(is_ok(map(number, 64)));
  void* replaced = ::mmap(memory.bytes().data(), memory.bytes().size(), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  ASSERT_EQ(replaced, static_cast<void*>(memory.bytes().data()));
  ASSERT_TRUE(is_ok(append(number, 1.0F)));
  EXPECT_TRUE(is_error(queue_->finish(), Code::kInternal, "replaced while a buffer wrapped it"));
  unmap(number);
  ASSERT_TRUE(is_ok(map(number, 64)));
  ASSERT_TRUE(is_ok(append(number, 1.0F)));
  EXPECT_TRUE(is_ok(queue_->finish()));
}

}  // namespace
}  // namespace flexpte::metal
