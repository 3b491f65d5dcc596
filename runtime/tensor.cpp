#include "runtime/tensor.h"

namespace flexpte {

std::string shape_string(const TensorView& view) {
  std::string text = "[";
  for (int32_t d = 0; d < view.rank; ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(view.size(d));
  }
  text += "]";
  return text;
}

}  // namespace flexpte
