#include "runtime/value.h"

namespace flexpte {

void set_dense_strides(TensorView& view, const DimOrder& dim_order) {
  int64_t stride = 1;
  for (int32_t i = view.rank; i-- > 0;) {
    const size_t dim = dim_order[static_cast<size_t>(i)];
    view.strides[dim] = stride;
    stride *= view.sizes[dim] == 0 ? 1 : view.sizes[dim];
  }
}

bool is_dense(const TensorView& view, const DimOrder& dim_order) {
  int64_t stride = 1;
  for (int32_t i = view.rank; i-- > 0;) {
    const size_t dim = dim_order[static_cast<size_t>(i)];
    if (view.sizes[dim] != 1 && view.strides[dim] != stride) return false;
    stride *= view.sizes[dim] == 0 ? 1 : view.sizes[dim];
  }
  return true;
}

}  // namespace flexpte
