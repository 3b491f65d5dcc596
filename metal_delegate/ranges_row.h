// Which keys one query sees, as a few intervals; private to ranges.
#pragma once

#include "metal_delegate/ranges_box.h"

namespace flexpte::ranges {

// Sorted, disjoint, not touching.
struct KeySet {
  static constexpr int kMaxIntervals = 4;
  int count = 0;
  std::array<int64_t, kMaxIntervals> begin{}, end{};
};

// The keys in the box for which the mask is true, exactly. The box has one query. False: not found.
bool visible_set(const Context& context, const Box& box, KeySet* result);

}  // namespace flexpte::ranges
