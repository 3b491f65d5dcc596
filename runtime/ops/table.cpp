#include "runtime/ops/op.h"

namespace flexpte {

BindOp find_op(std::string_view name) {
  for (const auto ops : {elementwise_ops, elementwise_math_ops, linear_ops, norm_ops, reduce_ops, shape_ops, join_ops,
                         index_ops, create_ops, scalar_ops}) {
    for (const OpEntry& entry : ops()) {
      if (entry.name == name) return entry.bind;
    }
  }
  return nullptr;
}

}  // namespace flexpte
