// Arithmetic on numbers: symbolic sizes, loop counters and conditions.
#include "runtime/kernels/scalar.h"

#include <cmath>

#include "runtime/ops/op.h"

namespace flexpte {
namespace {

// Writes a number into an int, bool or float value, converted as Python would.
void store(Value& value, double number) {
  if (value.kind == ValueKind::kDouble) {
    value.real = number;
  } else {
    value.integer = value.kind == ValueKind::kBool ? (number != 0.0) : float_to_int<int64_t>(number);
  }
}

void store(Value& value, int64_t number) {
  if (value.kind == ValueKind::kDouble) {
    value.real = static_cast<double>(number);
  } else {
    value.integer = value.kind == ValueKind::kBool ? (number != 0) : number;
  }
}

// Wraps around instead of overflowing.
int64_t wrapping(uint64_t value) {
  return static_cast<int64_t>(value);
}

struct Add {
  static int64_t of(int64_t a, int64_t b) { return wrapping(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }
  static double of(double a, double b) { return a + b; }
};
struct Sub {
  static int64_t of(int64_t a, int64_t b) { return wrapping(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)); }
  static double of(double a, double b) { return a - b; }
};
struct Mul {
  static int64_t of(int64_t a, int64_t b) { return wrapping(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); }
  static double of(double a, double b) { return a * b; }
};
struct Min {
  template <class T>
  static T of(T a, T b) {
    return std::min(a, b);
  }
};
struct Max {
  template <class T>
  static T of(T a, T b) {
    return std::max(a, b);
  }
};
template <class Compare>
struct Comparison {
  template <class T>
  static int64_t of(T a, T b) {
    return Compare()(a, b) ? 1 : 0;
  }
};

// executorch_prim::<op>.Scalar(a, b, out)
template <class Op>
Result<Step> binary(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar a, binder.scalar(0));
  FLEXPTE_ASSIGN(const Scalar b, binder.scalar(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.scalar_out(2));
  if (a.is_floating || b.is_floating) {
    return Step([=](const Frame& frame) {
      store(frame[out], Op::of(a.read_real(frame), b.read_real(frame)));
      return Status::ok();
    });
  }
  return Step([=](const Frame& frame) {
    store(frame[out], Op::of(a.read_integer(frame), b.read_integer(frame)));
    return Status::ok();
  });
}

enum class Division { kFloor, kRemainder, kTrue };

// Floor division and its remainder, as Python; true division.
template <Division kDivision>
Result<Step> division(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar a, binder.scalar(0));
  FLEXPTE_ASSIGN(const Scalar b, binder.scalar(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.scalar_out(2));
  const bool floating = kDivision == Division::kTrue || a.is_floating || b.is_floating;
  return Step([=](const Frame& frame) -> Status {
    if (b.read_real(frame) == 0.0) return invalid("a division by zero");
    if (floating) {
      const double quotient = a.read_real(frame) / b.read_real(frame);
      const double floored = std::floor(quotient);
      store(frame[out], kDivision == Division::kTrue    ? quotient
                        : kDivision == Division::kFloor ? floored
                                                        : a.read_real(frame) - floored * b.read_real(frame));
      return Status::ok();
    }
    const int64_t numerator = a.read_integer(frame);
    const int64_t denominator = b.read_integer(frame);
    if (denominator == -1) {  // the one quotient that may not fit
      store(frame[out], kDivision == Division::kFloor ? Sub::of(int64_t{0}, numerator) : int64_t{0});
      return Status::ok();
    }
    const int64_t remainder = numerator % denominator;
    const bool adjust = remainder != 0 && ((remainder < 0) != (denominator < 0));
    const int64_t result = kDivision == Division::kFloor ? numerator / denominator - (adjust ? 1 : 0)
                                                         : remainder + (adjust ? denominator : 0);
    store(frame[out], result);
    return Status::ok();
  });
}

double identity(double x) {
  return x;
}
double negate(double x) {
  return -x;
}
double round_even(double x) {
  return std::nearbyint(x);
}

// executorch_prim::<op>.Scalar(a, out)
template <double (*kFunction)(double)>
Result<Step> unary(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar a, binder.scalar(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.scalar_out(1));
  return Step([=](const Frame& frame) {
    if (a.is_floating) {
      store(frame[out], kFunction(a.read_real(frame)));
    } else if (kFunction == negate) {
      store(frame[out], Sub::of(int64_t{0}, a.read_integer(frame)));
    } else {
      store(frame[out], a.read_integer(frame));
    }
    return Status::ok();
  });
}

Result<Step> logical_not(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar a, binder.scalar(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.scalar_out(1));
  return Step([=](const Frame& frame) {
    store(frame[out], int64_t{a.read_real(frame) == 0.0});
    return Status::ok();
  });
}

// executorch_prim::sym_ite.Scalar(condition, then, else, out)
Result<Step> if_then_else(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar condition, binder.scalar(0));
  FLEXPTE_ASSIGN(const Scalar a, binder.scalar(1));
  FLEXPTE_ASSIGN(const Scalar b, binder.scalar(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.scalar_out(3));
  return Step([=](const Frame& frame) {
    const Scalar& chosen = condition.read_real(frame) != 0.0 ? a : b;
    if (chosen.is_floating) {
      store(frame[out], chosen.read_real(frame));
    } else {
      store(frame[out], chosen.read_integer(frame));
    }
    return Status::ok();
  });
}

// aten::sym_size.int(self, dim, out)
Result<Step> sym_size(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.scalar_out(2));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(x)));
  if (binder.rank(x) == 0) return Status(Code::kInvalidProgram, "asks for a size of a tensor of rank 0");
  return Step([=](const Frame& frame) {
    store(frame[out], frame.tensor(x).size(dim));
    return Status::ok();
  });
}

// aten::sym_numel(self, out)
Result<Step> sym_numel(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.scalar_out(1));
  return Step([=](const Frame& frame) {
    store(frame[out], frame.tensor(x).num_elements());
    return Status::ok();
  });
}

// aten::_local_scalar_dense(self, out): the only element
Result<Step> local_scalar(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.scalar_out(1));
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    if (in.num_elements() != 1) return invalid("a tensor of sizes " + shape_string(in) + " is not one number");
    with_storage_type(in.dtype, [&](auto tag) {
      const auto number = widen(*in.as<decltype(tag)>());
      if constexpr (std::is_floating_point_v<std::remove_const_t<decltype(number)>>) {
        store(frame[out], static_cast<double>(number));
      } else {
        store(frame[out], static_cast<int64_t>(number));
      }
    });
    return Status::ok();
  });
}

constexpr OpEntry kOps[] = {
    {"executorch_prim::add.Scalar", binary<Add>},
    {"executorch_prim::sub.Scalar", binary<Sub>},
    {"executorch_prim::mul.Scalar", binary<Mul>},
    {"executorch_prim::sym_max.Scalar", binary<Max>},
    {"executorch_prim::sym_min.Scalar", binary<Min>},
    {"executorch_prim::eq.Scalar", binary<Comparison<std::equal_to<>>>},
    {"executorch_prim::ne.Scalar", binary<Comparison<std::not_equal_to<>>>},
    {"executorch_prim::lt.Scalar", binary<Comparison<std::less<>>>},
    {"executorch_prim::le.Scalar", binary<Comparison<std::less_equal<>>>},
    {"executorch_prim::gt.Scalar", binary<Comparison<std::greater<>>>},
    {"executorch_prim::ge.Scalar", binary<Comparison<std::greater_equal<>>>},
    {"executorch_prim::floordiv.Scalar", division<Division::kFloor>},
    {"executorch_prim::floordiv.int", division<Division::kFloor>},
    {"executorch_prim::mod.Scalar", division<Division::kRemainder>},
    {"executorch_prim::mod.int", division<Division::kRemainder>},
    {"executorch_prim::truediv.Scalar", division<Division::kTrue>},
    {"executorch_prim::neg.Scalar", unary<negate>},
    {"executorch_prim::sym_float.Scalar", unary<identity>},
    {"executorch_prim::sym_int.Scalar", unary<std::trunc>},
    {"executorch_prim::trunc.Scalar", unary<std::trunc>},
    {"executorch_prim::ceil.Scalar", unary<std::ceil>},
    {"executorch_prim::round.Scalar", unary<round_even>},
    {"executorch_prim::sym_not.Scalar", logical_not},
    {"executorch_prim::sym_ite.Scalar", if_then_else},
    {"aten::sym_size.int", sym_size},
    {"aten::sym_numel", sym_numel},
    {"aten::_local_scalar_dense", local_scalar},
};

}  // namespace

std::span<const OpEntry> scalar_ops() {
  return kOps;
}

}  // namespace flexpte
