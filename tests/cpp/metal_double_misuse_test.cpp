// The double of Metal notices what Metal would refuse, and what would go wrong on a GPU without a word.
#include <gtest/gtest.h>
#include <objc/message.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/cpp/metal_double/metal_double.h"

extern "C" void* MTLCreateSystemDefaultDevice();

namespace flexpte::metal_double {
namespace {

struct Size {
  uint64_t width, height, depth;
};

// As metal-cpp sends messages.
template <class R = void*, class... Args>
R send(void* object, const char* selector, Args... args) {
  using Send = R (*)(void*, SEL, Args...);
  return reinterpret_cast<Send>(&objc_msgSend)(object, sel_registerName(selector), args...);
}

void* class_named(const char* name) {
  return objc_lookUpClass(name);
}

class MetalDoubleMisuse : public testing::Test {
 protected:
  void SetUp() override {
    reset();
    pool_ = send(send(class_named("NSAutoreleasePool"), "alloc"), "init");
    device_ = MTLCreateSystemDefaultDevice();
    queue_ = send(device_, "newCommandQueue");
    commands_ = send(queue_, "commandBuffer");
    encoder_ = send(commands_, "computeCommandEncoderWithDispatchType:", uint64_t{0});
  }
  void TearDown() override {
    if (encoder_ != nullptr) end();
    send<void>(queue_, "release");
    send<void>(device_, "release");
    if (pool_ != nullptr) send<void>(pool_, "release");
    EXPECT_EQ(live_objects(), std::vector<std::string>());
    EXPECT_EQ(record().violations.size(), expected_.size());
    for (size_t i = 0; i < expected_.size() && i < record().violations.size(); ++i) {
      EXPECT_NE(record().violations[i].find(expected_[i]), std::string::npos) << record().violations[i];
    }
    reset();
  }
  void end() {
    send<void>(encoder_, "endEncoding");
    encoder_ = nullptr;
  }

  void* pool_ = nullptr;
  void* device_ = nullptr;
  void* queue_ = nullptr;
  void* commands_ = nullptr;
  void* encoder_ = nullptr;
  std::vector<std::string> expected_;
};

TEST_F(MetalDoubleMisuse, MessagesToNothingGiveNothing) {
  EXPECT_EQ(send<uint64_t>(nullptr, "length"), 0U);
  EXPECT_EQ(send<double>(nullptr, "GPUStartTime"), 0.0);
}

TEST_F(MetalDoubleMisuse, ObjectsKnowWhatTheyAnswer) {
  EXPECT_TRUE(send<bool>(device_, "respondsToSelector:", sel_registerName("supportsFamily:")));
  EXPECT_FALSE(send<bool>(device_, "respondsToSelector:", sel_registerName("flyToTheMoon")));
  EXPECT_EQ(class_named("MTLFlyingMachine"), nullptr);
}

TEST_F(MetalDoubleMisuse, ReleasedTooOften) {
  void* buffer = send(device_, "newBufferWithLength:options:", uint64_t{64}, uint64_t{0});
  send<void>(buffer, "release");
  send<void>(buffer, "release");
  expected_ = {"message release to an object of class MTLBuffer that was released"};
}

TEST_F(MetalDoubleMisuse, Leaked) {
  void* buffer = send(device_, "newBufferWithLength:options:", uint64_t{64}, uint64_t{0});
  EXPECT_EQ(send<uint64_t>(buffer, "retainCount"), 1U);
  const std::vector<std::string> names = live_objects();
  EXPECT_NE(std::find(names.begin(), names.end(), "MTLBuffer"), names.end());
  send<void>(buffer, "release");
}

TEST_F(MetalDoubleMisuse, AutoreleasedWithoutAPool) {
  end();
  send<void>(pool_, "release");
  pool_ = nullptr;
  void* name = send(device_, "name");
  send<void>(name, "release");
  expected_ = {"without a pool"};
}

TEST_F(MetalDoubleMisuse, PoolsOutOfOrder) {
  void* inner = send(send(class_named("NSAutoreleasePool"), "alloc"), "init");
  send<void>(encoder_, "endEncoding");
  encoder_ = nullptr;
  send<void>(pool_, "release");
  pool_ = nullptr;
  send<void>(inner, "release");
  expected_ = {"not the innermost"};
}

TEST_F(MetalDoubleMisuse, EncodersThatDoNotEnd) {
  send<void>(commands_, "commit");
  EXPECT_EQ(send<uint64_t>(commands_, "status"), 2U);
  send<void>(commands_, "waitUntilCompleted");
  expected_ = {"has not ended"};
  EXPECT_EQ(send<uint64_t>(commands_, "status"), 5U);  // failed: the violation shows in the step
}

TEST_F(MetalDoubleMisuse, EncodersUsedAfterTheyEnd) {
  void* encoder = encoder_;
  end();
  send<void>(encoder, "dispatchThreadgroups:threadsPerThreadgroup:", Size{1, 1, 1}, Size{1, 1, 1});
  send<void>(encoder, "endEncoding");
  expected_ = {"used after it ended", "ended twice"};
}

TEST_F(MetalDoubleMisuse, CommandBuffersOutOfTurn) {
  end();
  send<void>(commands_, "waitUntilCompleted");
  send<void>(commands_, "commit");
  send<void>(commands_, "commit");
  send<void>(commands_, "waitUntilCompleted");
  send(commands_, "computeCommandEncoderWithDispatchType:", uint64_t{0});
  expected_ = {"never committed", "committed twice", "encoded after it was committed", "released before it ended",
               "encoder that has not ended"};
}

TEST_F(MetalDoubleMisuse, ArgumentsThatMetalRefuses) {
  void* buffer = send(device_, "newBufferWithLength:options:", uint64_t{64}, uint64_t{0});
  const std::array<std::byte, 5000> bytes = {};
  const auto bind = [&](void* object, uint64_t offset, uint64_t index) {
    send<void>(encoder_, "setBuffer:offset:atIndex:", object, offset, index);
  };
  bind(buffer, 64, 1);
  bind(buffer, 0, 31);
  bind(nullptr, 0, 1);
  send<void>(encoder_, "setBufferOffset:atIndex:", uint64_t{0}, uint64_t{7});
  send<void>(encoder_, "setBytes:length:atIndex:", static_cast<const void*>(bytes.data()), uint64_t{5000}, uint64_t{0});
  send<void>(encoder_, "dispatchThreadgroups:threadsPerThreadgroup:", Size{1, 1, 1}, Size{32, 1, 1});
  send<void>(buffer, "release");
  expected_ = {"past its end", "past 30", "null buffer", "not bound", "4096", "without a pipeline"};
}

TEST_F(MetalDoubleMisuse, MemoryThatIsNotWholePages) {
  alignas(64) std::array<std::byte, 64> bytes = {};
  EXPECT_EQ(send(device_, "newBufferWithBytesNoCopy:length:options:deallocator:", static_cast<void*>(bytes.data()),
                 uint64_t{64}, uint64_t{0}, static_cast<const void*>(nullptr)),
            nullptr);
  expected_ = {"not whole pages"};
}

}  // namespace
}  // namespace flexpte::metal_double
