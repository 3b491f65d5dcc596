// Apple's metal-cpp: Metal's classes as C++. Nothing else includes it.
#pragma once

// Each library that carries metal-cpp keeps its own tables of classes and selectors.
#define METALCPP_SYMBOL_VISIBILITY_HIDDEN

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>

namespace flexpte::metal {

// Objects that Metal hands out without ownership die with the pool that is current.
class ScopedPool {
 public:
  ScopedPool() : pool_(NS::TransferPtr(NS::AutoreleasePool::alloc()->init())) {}
  ScopedPool(const ScopedPool&) = delete;
  ScopedPool& operator=(const ScopedPool&) = delete;

 private:
  NS::SharedPtr<NS::AutoreleasePool> pool_;
};

}  // namespace flexpte::metal
