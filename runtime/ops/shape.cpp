// Operators that only move elements of one tensor: views, copies, slices.
#include "runtime/kernels/kernels.h"
#include "runtime/ops/op.h"

namespace flexpte {
namespace {

// Same memory, same layout: the memory planner made one of the two.
bool is_same(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank && a.sizes == b.sizes && a.strides == b.strides;
}

// Makes `out` a copy of a view of equal rank.
Status copy_to(const Frame& frame, const TensorView& view, int32_t out) {
  FLEXPTE_TRY(frame.resize(out, sizes_of(view)));
  const TensorView& result = frame.tensor(out);
  if (view.num_elements() > 0 && !is_same(view, result)) copy(view, result, frame.pool);
  return Status::ok();
}

template <size_t kOutArg>
Result<Step> clone(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(kOutArg));
  return Step([=](const Frame& frame) { return copy_to(frame, frame.tensor(x), out); });
}

// aten::copy.out(self, src, non_blocking, out); aten::copy_(self, src, non_blocking), where out is self
template <size_t kOutArg>
Result<Step> copy_op(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t source, binder.tensor(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(kOutArg));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_ASSIGN(const TensorView view, expand(frame.tensor(source), sizes_of(frame.tensor(self))));
    return copy_to(frame, view, out);
  });
}

// A transposed constant becomes a strided view of it, at no cost, where only matrix products read it.
bool may_alias(const Binder& binder, int32_t x, int32_t out) {
  return binder.info(x).storage == Storage::kConstant && binder.dtype(x) == binder.dtype(out) && binder.rank(x) == 2 &&
         binder.info(out).only_multiplied;
}

Result<Step> permute(const Binder& binder, int32_t x, std::vector<int32_t> dims, int32_t out) {
  std::array<bool, kMaxRank> seen{};
  for (const int32_t dim : dims) {
    if (seen[static_cast<size_t>(dim)]) return Status(Code::kInvalidProgram, "the dimensions are no permutation");
    seen[static_cast<size_t>(dim)] = true;
  }
  if (dims.size() != static_cast<size_t>(binder.rank(x))) {
    return Status(Code::kInvalidProgram, "the dimensions are no permutation");
  }
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(x), "the output"));
  if (may_alias(binder, x, out)) {
    const TensorView view = permuted(binder.upper(x), dims);
    if (std::ranges::equal(sizes_of(view), sizes_of(binder.upper(out)))) {
      ValueInfo& info = binder.mutable_info(out);
      info.storage = Storage::kConstant;
      info.initial.tensor = view;
      info.initial.writable = false;
      info.initial.dynamic = false;
      return Step();
    }
  }
  return Step([=](const Frame& frame) { return copy_to(frame, permuted(frame.tensor(x), dims), out); });
}

// aten::permute_copy.out(self, dims, out)
Result<Step> permute_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int64_t> args, binder.fixed_integers(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  std::vector<int32_t> dims;
  for (const int64_t arg : args) {
    FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(arg, binder.rank(x)));
    dims.push_back(dim);
  }
  return permute(binder, x, std::move(dims), out);
}

Result<Step> swap_dims(const Binder& binder, int32_t x, int64_t a_arg, int64_t b_arg, int32_t out) {
  FLEXPTE_ASSIGN(const int32_t a, binder.wrap_dim(a_arg, binder.rank(x)));
  FLEXPTE_ASSIGN(const int32_t b, binder.wrap_dim(b_arg, binder.rank(x)));
  std::vector<int32_t> dims;
  for (int32_t d = 0; d < binder.rank(x); ++d) dims.push_back(d == a ? b : d == b ? a : d);
  return permute(binder, x, std::move(dims), out);
}

// aten::transpose_copy.int_out(self, dim0, dim1, out)
Result<Step> transpose_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t a, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int64_t b, binder.fixed_integer(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  return swap_dims(binder, x, a, b, out);
}

// aten::t_copy.out(self, out)
Result<Step> t_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(1));
  if (binder.rank(x) > 2) return Status(Code::kInvalidProgram, "needs a tensor of rank 2 or less");
  return swap_dims(binder, x, 0, -1, out);
}

// out has the elements of x in row-major order, with sizes that `make_sizes` gives.
template <class MakeSizes>
Status reshape_to(const Frame& frame, int32_t x, int32_t out, const MakeSizes& make_sizes) {
  const TensorView& in = frame.tensor(x);
  SizeList sizes;
  FLEXPTE_TRY(make_sizes(in, sizes));
  FLEXPTE_TRY(infer_size(sizes, in.num_elements()));
  FLEXPTE_TRY(frame.resize(out, sizes));
  if (in.num_elements() == 0) return Status::ok();
  FLEXPTE_ASSIGN(const TensorView target, reshaped(frame.tensor(out), sizes_of(in)));
  if (!is_same(in, target)) copy(in, target, frame.pool);
  return Status::ok();
}

Status read_sizes(const Frame& frame, std::span<const int32_t> ids, SizeList& sizes) {
  for (const int32_t id : ids) sizes.push(frame.integer(id));
  return Status::ok();
}

// aten::view_copy.out(self, size, out)
Result<Step> view_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int32_t> ids, binder.integers(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  return Step([=](const Frame& frame) {
    return reshape_to(frame, x, out, [&](const TensorView&, SizeList& sizes) { return read_sizes(frame, ids, sizes); });
  });
}

// executorch_prim::et_view.default(self, size, out): out shares the memory of self
Result<Step> et_view(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int32_t> ids, binder.integers(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.tensor(2));
  FLEXPTE_TRY(binder.expect_same_dtype(x, out));
  FLEXPTE_TRY(binder.expect_rank(out, static_cast<int32_t>(ids.size()), "the output"));
  return Step([=](const Frame& frame) -> Status {
    const Value& source = frame[x];
    Value& view = frame[out];
    SizeList sizes;
    FLEXPTE_TRY(read_sizes(frame, ids, sizes));
    FLEXPTE_TRY(infer_size(sizes, source.tensor.num_elements()));
    FLEXPTE_ASSIGN(view.tensor, reshaped(source.tensor, sizes));
    view.capacity_bytes = source.capacity_bytes;
    view.writable = source.writable;
    return Status::ok();
  });
}

// aten::unsqueeze_copy.out(self, dim, out)
Result<Step> unsqueeze_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(x) + 1, "the output"));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(x) + 1));
  return Step([=](const Frame& frame) {
    return reshape_to(frame, x, out, [&](const TensorView& in, SizeList& sizes) {
      for (int32_t d = 0; d <= in.rank; ++d) sizes.push(d == dim ? 1 : in.size(d < dim ? d : d - 1));
      return Status::ok();
    });
  });
}

Result<Step> squeeze(const Binder& binder, int32_t x, std::span<const int64_t> args, int32_t out) {
  std::array<bool, kMaxRank> drop{};
  for (const int64_t arg : args) {
    FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(arg, binder.rank(x)));
    drop[static_cast<size_t>(dim)] = true;
  }
  return Step([=](const Frame& frame) {
    return reshape_to(frame, x, out, [&](const TensorView& in, SizeList& sizes) {
      for (int32_t d = 0; d < in.rank; ++d) {
        if (in.size(d) != 1 || !drop[static_cast<size_t>(d)]) sizes.push(in.size(d));
      }
      return Status::ok();
    });
  });
}

// aten::squeeze_copy.dim_out(self, dim, out)
Result<Step> squeeze_dim(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  return squeeze(binder, x, {&dim, 1}, out);
}

// aten::squeeze_copy.dims_out(self, dims, out)
Result<Step> squeeze_dims(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int64_t> dims, binder.fixed_integers(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  return squeeze(binder, x, dims, out);
}

// aten::expand_copy.out(self, size, implicit, out)
Result<Step> expand_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int32_t> ids, binder.integers(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    SizeList sizes;
    FLEXPTE_TRY(read_sizes(frame, ids, sizes));
    for (int32_t d = 0; d < sizes.rank; ++d) {
      const int32_t own = d - (sizes.rank - in.rank);
      if (sizes[d] == -1 && own >= 0) sizes[d] = in.size(own);
    }
    FLEXPTE_ASSIGN(const TensorView view, expand(in, sizes));
    return copy_to(frame, view, out);
  });
}

// aten::repeat.out(self, repeats, out)
Result<Step> repeat(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int32_t> ids, binder.integers(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  if (ids.size() < static_cast<size_t>(binder.rank(x)) || ids.size() > kMaxRank / 2) {
    return Status(Code::kUnsupported, "repeats " + std::to_string(ids.size()) + " dimensions");
  }
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    const auto rank = static_cast<int32_t>(ids.size());
    // Each dimension as (repeats, own size), of which the first has stride 0 in the source.
    SizeList sizes;
    SizeList split;
    for (int32_t d = 0; d < rank; ++d) {
      const int32_t own = d - (rank - in.rank);
      const int64_t size = own < 0 ? 1 : in.size(own);
      const int64_t times = frame.integer(ids[static_cast<size_t>(d)]);
      int64_t total = 0;
      if (times < 0 || __builtin_mul_overflow(times, size, &total)) {
        return invalid("cannot repeat " + std::to_string(times) + " times");
      }
      sizes.push(total);
      split.push(times);
      split.push(size);
    }
    FLEXPTE_TRY(frame.resize(out, sizes));
    if (frame.tensor(out).num_elements() == 0) return Status::ok();
    TensorView source = in;
    source.rank = split.rank;
    source.sizes = split.values;
    for (int32_t d = 0; d < rank; ++d) {
      const int32_t own = d - (rank - in.rank);
      source.strides[static_cast<size_t>(2 * d)] = 0;
      source.strides[static_cast<size_t>(2 * d + 1)] = own < 0 ? 0 : in.stride(own);
    }
    FLEXPTE_ASSIGN(const TensorView target, reshaped(frame.tensor(out), split));
    copy(source, target, frame.pool);
    return Status::ok();
  });
}

struct Slice {
  int32_t dim = 0;
  int32_t start = -1, end = -1, step = -1;  // values; -1 for none
};

// The arguments (dim, start?, end?, step) from `first` on.
Result<Slice> bind_slice(const Binder& binder, int32_t x, size_t first) {
  Slice slice;
  FLEXPTE_ASSIGN(const int64_t dim, binder.fixed_integer(first));
  FLEXPTE_ASSIGN(slice.dim, binder.wrap_dim(dim, binder.rank(x)));
  FLEXPTE_ASSIGN(slice.start, binder.optional_integer(first + 1));
  FLEXPTE_ASSIGN(slice.end, binder.optional_integer(first + 2));
  FLEXPTE_ASSIGN(slice.step, binder.integer(first + 3));
  if (binder.rank(x) == 0) return Status(Code::kInvalidProgram, "slices a tensor of rank 0");
  return slice;
}

// As in Python: negative positions count from the end, and both are clamped.
Result<TensorView> sliced(const Frame& frame, const TensorView& x, const Slice& slice) {
  const int64_t size = x.size(slice.dim);
  const auto position = [&](int32_t id, int64_t otherwise) {
    int64_t at = id < 0 ? otherwise : frame.integer(id);
    if (at < 0) at = at < -size ? 0 : at + size;
    return std::min(at, size);
  };
  const int64_t start = position(slice.start, 0);
  const int64_t end = std::max(position(slice.end, size), start);
  const int64_t step = frame.integer(slice.step);
  if (step <= 0) return invalid("the step " + std::to_string(step) + " of a slice is not positive");
  const int64_t length = (end - start) / step + ((end - start) % step != 0 ? 1 : 0);
  // A step beyond the end is never taken, and must not overflow the strides.
  return narrowed(x, slice.dim, start, length, length > 1 ? step : 1);
}

// aten::slice_copy.Tensor_out(self, dim, start?, end?, step, out)
Result<Step> slice_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const Slice slice, bind_slice(binder, x, 1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(5));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_ASSIGN(const TensorView view, sliced(frame, frame.tensor(x), slice));
    return copy_to(frame, view, out);
  });
}

// Copies `source` into a part of `out`, which is `self` otherwise.
template <class Part>
Status scatter_to(const Frame& frame, int32_t self, int32_t source, int32_t out, const Part& part) {
  FLEXPTE_TRY(copy_to(frame, frame.tensor(self), out));
  FLEXPTE_ASSIGN(const TensorView target, part(frame.tensor(out)));
  FLEXPTE_ASSIGN(const TensorView view, expand(frame.tensor(source), sizes_of(target)));
  if (target.num_elements() > 0) copy(view, target, frame.pool);
  return Status::ok();
}

// aten::slice_scatter.out(self, src, dim, start?, end?, step, out)
Result<Step> slice_scatter(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t source, binder.tensor(1));
  FLEXPTE_ASSIGN(const Slice slice, bind_slice(binder, self, 2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(6));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(self), "the output"));
  return Step([=](const Frame& frame) {
    return scatter_to(frame, self, source, out, [&](const TensorView& view) { return sliced(frame, view, slice); });
  });
}

Result<TensorView> selected(const Frame& frame, const TensorView& x, int32_t dim, int32_t index_id) {
  const int64_t size = x.size(dim);
  const int64_t index = frame.integer(index_id);
  if (index < -size || index >= size) {
    return Status(Code::kOutOfRange,
                  "index " + std::to_string(index) + " of a dimension of size " + std::to_string(size));
  }
  return select(x, dim, index < 0 ? index + size : index);
}

// aten::select_copy.int_out(self, dim, index, out)
Result<Step> select_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t index, binder.integer(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(x)));
  if (binder.rank(x) == 0) return Status(Code::kInvalidProgram, "selects from a tensor of rank 0");
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_ASSIGN(const TensorView view, selected(frame, frame.tensor(x), dim, index));
    return copy_to(frame, view, out);
  });
}

// aten::select_scatter.out(self, src, dim, index, out)
Result<Step> select_scatter(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t source, binder.tensor(1));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(2));
  FLEXPTE_ASSIGN(const int32_t index, binder.integer(3));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(4));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(self)));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(self), "the output"));
  if (binder.rank(self) == 0) return Status(Code::kInvalidProgram, "selects from a tensor of rank 0");
  return Step([=](const Frame& frame) {
    return scatter_to(frame, self, source, out,
                      [&](const TensorView& view) { return selected(frame, view, dim, index); });
  });
}

// aten::flip.out(self, dims, out)
Result<Step> flip(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int64_t> args, binder.fixed_integers(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  std::array<bool, kMaxRank> flipped{};
  for (const int64_t arg : args) {
    FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(arg, binder.rank(x)));
    flipped[static_cast<size_t>(dim)] = binder.rank(x) > 0;
  }
  return Step([=](const Frame& frame) -> Status {
    TensorView view = frame.tensor(x);
    for (int32_t d = 0; d < view.rank; ++d) {
      if (!flipped[static_cast<size_t>(d)] || view.size(d) == 0) continue;
      view.data = element_at(view, (view.size(d) - 1) * view.stride(d));
      view.strides[static_cast<size_t>(d)] = -view.stride(d);
    }
    return copy_to(frame, view, out);
  });
}

constexpr OpEntry kOps[] = {
    {"aten::permute_copy.out", permute_copy},
    {"aten::transpose_copy.int_out", transpose_copy},
    {"aten::t_copy.out", t_copy},
    {"aten::view_copy.out", view_copy},
    {"executorch_prim::et_view.default", et_view},
    {"aten::unsqueeze_copy.out", unsqueeze_copy},
    {"aten::squeeze_copy.dim_out", squeeze_dim},
    {"aten::squeeze_copy.dims_out", squeeze_dims},
    {"aten::expand_copy.out", expand_copy},
    {"aten::repeat.out", repeat},
    {"aten::slice_copy.Tensor_out", slice_copy},
    {"aten::slice_scatter.out", slice_scatter},
    {"aten::select_copy.int_out", select_copy},
    {"aten::select_scatter.out", select_scatter},
    {"aten::flip.out", flip},
    {"aten::alias_copy.out", clone<1>},
    {"aten::detach_copy.out", clone<1>},
    {"aten::lift_fresh_copy.out", clone<1>},
    {"aten::clone.out", clone<2>},
    {"aten::_to_copy.out", clone<3>},
    {"dim_order_ops::_clone_dim_order.out", clone<3>},
    {"dim_order_ops::_to_dim_order_copy.out", clone<3>},
    {"aten::copy.out", copy_op<3>},
    {"aten::copy_", copy_op<0>},
};

}  // namespace

std::span<const OpEntry> shape_ops() {
  return kOps;
}

}  // namespace flexpte
