// Tensors made from numbers.
#include <cmath>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/ops/op.h"

namespace flexpte {
namespace {

// Every element of `out` becomes the number.
void fill(const Frame& frame, const Scalar& number, const TensorView& out) {
  int64_t integer = number.is_floating ? 0 : number.read_integer(frame);
  double real = number.is_floating ? number.read_real(frame) : 0.0;
  TensorView source = out;
  source.data = number.is_floating ? static_cast<void*>(&real) : &integer;
  source.dtype = number.is_floating ? DType::kF64 : DType::kI64;
  source.strides.fill(0);
  if (out.num_elements() > 0) copy(source, out, frame.pool);
}

Result<SizeList> read_sizes(const Frame& frame, std::span<const int32_t> ids) {
  SizeList sizes;
  for (const int32_t id : ids) {
    const int64_t size = frame.integer(id);
    if (size < 0) return invalid("the size " + std::to_string(size) + " is negative");
    sizes.push(size);
  }
  return sizes;
}

Scalar fixed(int64_t number) {
  return {.integer = number, .real = static_cast<double>(number)};
}

Result<Step> filled(std::vector<int32_t> ids, Scalar number, int32_t out) {
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_ASSIGN(const SizeList sizes, read_sizes(frame, ids));
    FLEXPTE_TRY(frame.resize(out, sizes));
    fill(frame, number, frame.tensor(out));
    return Status::ok();
  });
}

// aten::full.out(size, fill_value, out)
Result<Step> full(const Binder& binder) {
  FLEXPTE_ASSIGN(std::vector<int32_t> ids, binder.integers(0));
  FLEXPTE_ASSIGN(const Scalar number, binder.scalar(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  return filled(std::move(ids), number, out);
}

// aten::zeros.out(size, out), aten::ones.out
template <int64_t kNumber>
Result<Step> constant(const Binder& binder) {
  FLEXPTE_ASSIGN(std::vector<int32_t> ids, binder.integers(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(1));
  return filled(std::move(ids), fixed(kNumber), out);
}

// aten::empty.out(size, memory_format?, out)
Result<Step> empty(const Binder& binder) {
  FLEXPTE_ASSIGN(std::vector<int32_t> ids, binder.integers(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  return filled(std::move(ids), fixed(0), out);
}

// aten::full_like.out(self, fill_value, memory_format?, out), aten::fill.Scalar_out(self, value, out)
template <size_t kOutArg>
Result<Step> full_like(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const Scalar number, binder.scalar(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(kOutArg));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_TRY(frame.resize(out, sizes_of(frame.tensor(x))));
    fill(frame, number, frame.tensor(out));
    return Status::ok();
  });
}

// aten::fill.Tensor_out(self, value, out)
Result<Step> fill_tensor(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t number, binder.tensor(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_TRY(frame.resize(out, sizes_of(frame.tensor(x))));
    FLEXPTE_ASSIGN(const TensorView source, expand(frame.tensor(number), sizes_of(frame.tensor(out))));
    copy(source, frame.tensor(out), frame.pool);
    return Status::ok();
  });
}

// aten::scalar_tensor.out(s, out)
Result<Step> scalar_tensor(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar number, binder.scalar(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(1));
  return filled({}, number, out);
}

Result<Step> range(Scalar start, Scalar end, Scalar step, const Binder& binder, int32_t out) {
  FLEXPTE_TRY(binder.expect_rank(out, 1, "the output"));
  const bool floating = start.is_floating || end.is_floating || step.is_floating;
  return Step([=](const Frame& frame) -> Status {
    const double first = start.read_real(frame);
    const double by = step.read_real(frame);
    double count = by == 0.0 ? -1.0 : std::ceil((end.read_real(frame) - first) / by);
    if (!floating && by != 0.0) {  // exact beyond 2^53
      const int64_t length = end.read_integer(frame) - start.read_integer(frame);
      const int64_t stride = step.read_integer(frame);
      count = static_cast<double>(length / stride + (length % stride != 0 && (length < 0) == (stride < 0) ? 1 : 0));
    }
    if (!(count >= 0.0 && count < 0x1p62)) return invalid("the range is empty, endless or runs backwards");
    const auto size = static_cast<int64_t>(count);
    FLEXPTE_TRY(frame.resize(out, Sizes(&size, 1)));
    const TensorView& view = frame.tensor(out);
    if (!floating) {
      arange(view, start.read_integer(frame), step.read_integer(frame));
      return Status::ok();
    }
    with_storage_type(view.dtype, [&](auto tag) {
      using Out = decltype(tag);
      for (int64_t i = 0; i < size; ++i) {
        view.as<Out>()[i * view.stride(0)] = convert<Out>(first + static_cast<double>(i) * by);
      }
    });
    return Status::ok();
  });
}

// aten::arange.out(end, out)
Result<Step> arange_end(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar end, binder.scalar(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(1));
  return range(fixed(0), end, fixed(1), binder, out);
}

// aten::arange.start_out(start, end, step, out)
Result<Step> arange_start(const Binder& binder) {
  FLEXPTE_ASSIGN(const Scalar start, binder.scalar(0));
  FLEXPTE_ASSIGN(const Scalar end, binder.scalar(1));
  FLEXPTE_ASSIGN(const Scalar step, binder.scalar(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  return range(start, end, step, binder, out);
}

// aten::tril.out(self, diagonal, out), aten::triu.out: elements on the other side of the diagonal are zero
template <bool kLower>
Result<Step> triangle(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t diagonal, binder.integer(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  FLEXPTE_TRY(binder.expect_same_dtype(x, out));
  if (binder.rank(x) < 2) return Status(Code::kInvalidProgram, "needs a tensor of rank 2 or more");
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    FLEXPTE_TRY(frame.resize(out, sizes_of(in)));
    const TensorView& result = frame.tensor(out);
    if (in.num_elements() == 0) return Status::ok();
    copy(in, result, frame.pool);
    const int64_t num_rows = in.size(in.rank - 2);
    const int64_t columns = in.size(in.rank - 1);
    // Beyond the matrix every diagonal is the same.
    const int64_t offset = std::clamp(frame.integer(diagonal), -num_rows, columns);
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t keep_begin = kLower ? 0 : std::clamp<int64_t>(row + offset, 0, columns);
      const int64_t keep_end = kLower ? std::clamp<int64_t>(row + offset + 1, 0, columns) : columns;
      const TensorView line = select(result, in.rank - 2, row);
      fill(frame, fixed(0), narrowed(line, line.rank - 1, 0, keep_begin));
      fill(frame, fixed(0), narrowed(line, line.rank - 1, keep_end, columns - keep_end));
    }
    return Status::ok();
  });
}

constexpr OpEntry kOps[] = {
    {"aten::full.out", full},
    {"aten::zeros.out", constant<0>},
    {"aten::ones.out", constant<1>},
    {"aten::empty.out", empty},
    {"aten::full_like.out", full_like<3>},
    {"aten::fill.Scalar_out", full_like<2>},
    {"aten::fill.Tensor_out", fill_tensor},
    {"aten::scalar_tensor.out", scalar_tensor},
    {"aten::arange.out", arange_end},
    {"aten::arange.start_out", arange_start},
    {"aten::tril.out", triangle<true>},
    {"aten::triu.out", triangle<false>},
};

}  // namespace

std::span<const OpEntry> create_ops() {
  return kOps;
}

}  // namespace flexpte
