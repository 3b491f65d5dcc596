// Operators that join tensors, or take them apart into several.
#include "runtime/kernels/kernels.h"
#include "runtime/ops/op.h"

namespace flexpte {
namespace {

void copy_part(const Frame& frame, const TensorView& from, const TensorView& to) {
  if (to.num_elements() > 0) copy(from, to, frame.pool);
}

// aten::cat.out(tensors, dim, out). Tensors [0] are skipped, as ATen does.
Result<Step> cat(const Binder& binder) {
  FLEXPTE_ASSIGN(const std::vector<int32_t> parts, binder.tensors(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(out)));
  if (binder.rank(out) == 0) return Status(Code::kInvalidProgram, "joins tensors of rank 0");
  return Step([=](const Frame& frame) -> Status {
    const int32_t rank = frame.tensor(out).rank;
    const auto is_skipped = [&](const TensorView& part) { return part.rank == 1 && part.size(0) == 0 && rank != 1; };
    SizeList sizes;
    for (const int32_t id : parts) {
      const TensorView& part = frame.tensor(id);
      if (is_skipped(part)) continue;
      bool fits = part.rank == rank;
      if (fits && sizes.rank == 0) {
        for (int32_t d = 0; d < rank; ++d) sizes.push(d == dim ? 0 : part.size(d));
      }
      for (int32_t d = 0; fits && d < rank; ++d) fits = d == dim || part.size(d) == sizes[d];
      if (!fits) return invalid("a tensor of sizes " + shape_string(part) + " does not join " + sizes_string(sizes));
      sizes[dim] += part.size(dim);
    }
    if (sizes.rank == 0) {
      for (int32_t d = 0; d < rank; ++d) sizes.push(0);
    }
    FLEXPTE_TRY(frame.resize(out, sizes));
    int64_t start = 0;
    for (const int32_t id : parts) {
      const TensorView& part = frame.tensor(id);
      if (is_skipped(part)) continue;
      copy_part(frame, part, narrowed(frame.tensor(out), dim, start, part.size(dim)));
      start += part.size(dim);
    }
    return Status::ok();
  });
}

// aten::stack.out(tensors, dim, out)
Result<Step> stack(const Binder& binder) {
  FLEXPTE_ASSIGN(const std::vector<int32_t> parts, binder.tensors(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(out)));
  if (binder.rank(out) == 0) return Status(Code::kInvalidProgram, "stacks into a tensor of rank 0");
  return Step([=](const Frame& frame) -> Status {
    const TensorView& first = frame.tensor(parts[0]);
    for (const int32_t id : parts) {
      if (!std::ranges::equal(sizes_of(frame.tensor(id)), sizes_of(first)) || first.rank == kMaxRank) {
        return invalid("tensors of sizes " + shape_string(first) + " and " + shape_string(frame.tensor(id)) +
                       " do not stack");
      }
    }
    SizeList sizes;
    for (int32_t d = 0; d <= first.rank; ++d) {
      sizes.push(d == dim ? static_cast<int64_t>(parts.size()) : first.size(d < dim ? d : d - 1));
    }
    FLEXPTE_TRY(frame.resize(out, sizes));
    for (size_t i = 0; i < parts.size(); ++i) {
      copy_part(frame, frame.tensor(parts[i]), select(frame.tensor(out), dim, static_cast<int64_t>(i)));
    }
    return Status::ok();
  });
}

// The outputs get consecutive pieces of `dim`; the length of piece i is length(frame, i).
template <class Length>
Status split(const Frame& frame, int32_t x, int32_t dim, std::span<const int32_t> outs, const Length& length) {
  const TensorView& in = frame.tensor(x);
  int64_t start = 0;
  for (size_t i = 0; i < outs.size(); ++i) {
    const int64_t size = length(i, in.size(dim) - start);
    if (size < 0 || size > in.size(dim) - start) {
      return invalid("a piece of " + std::to_string(size) + " elements at " + std::to_string(start) +
                     " of a dimension of size " + std::to_string(in.size(dim)));
    }
    const TensorView piece = narrowed(in, dim, start, size);
    FLEXPTE_TRY(frame.resize(outs[i], sizes_of(piece)));
    copy_part(frame, piece, frame.tensor(outs[i]));
    start += size;
  }
  if (start == in.size(dim)) return Status::ok();
  return invalid("the pieces have " + std::to_string(start) + " elements, the dimension " +
                 std::to_string(in.size(dim)));
}

Result<std::vector<int32_t>> outputs(const Binder& binder, size_t arg) {
  FLEXPTE_ASSIGN(std::vector<int32_t> outs, binder.tensors(arg));
  for (const int32_t id : outs) {
    if (binder.info(id).storage == Storage::kConstant) {
      return Status(Code::kInvalidProgram, "an output is a constant of the file");
    }
  }
  return outs;
}

// aten::split_with_sizes_copy.out(self, split_sizes, dim, out[])
Result<Step> split_with_sizes(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const std::vector<int32_t> lengths, binder.integers(1));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(2));
  FLEXPTE_ASSIGN(const std::vector<int32_t> outs, outputs(binder, 3));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(x)));
  if (binder.rank(x) == 0 || lengths.size() != outs.size()) {
    return Status(Code::kInvalidProgram, "splits into " + std::to_string(lengths.size()) + " pieces for " +
                                             std::to_string(outs.size()) + " outputs");
  }
  return Step([=](const Frame& frame) {
    return split(frame, x, dim, outs, [&](size_t i, int64_t) { return frame.integer(lengths[i]); });
  });
}

// aten::split_copy.Tensor_out(self, split_size, dim, out[])
Result<Step> split_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t length, binder.integer(1));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(2));
  FLEXPTE_ASSIGN(const std::vector<int32_t> outs, outputs(binder, 3));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(x)));
  if (binder.rank(x) == 0) return Status(Code::kInvalidProgram, "splits a tensor of rank 0");
  return Step([=](const Frame& frame) {
    return split(frame, x, dim, outs, [&](size_t, int64_t left) { return std::min(frame.integer(length), left); });
  });
}

// aten::unbind_copy.int_out(self, dim, out[])
Result<Step> unbind_copy(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const std::vector<int32_t> outs, outputs(binder, 2));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(x)));
  if (binder.rank(x) == 0) return Status(Code::kInvalidProgram, "takes apart a tensor of rank 0");
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(x);
    if (in.size(dim) != static_cast<int64_t>(outs.size())) {
      return invalid("a dimension of size " + std::to_string(in.size(dim)) + " for " + std::to_string(outs.size()) +
                     " outputs");
    }
    for (size_t i = 0; i < outs.size(); ++i) {
      const TensorView piece = select(in, dim, static_cast<int64_t>(i));
      FLEXPTE_TRY(frame.resize(outs[i], sizes_of(piece)));
      copy_part(frame, piece, frame.tensor(outs[i]));
    }
    return Status::ok();
  });
}

// aten::constant_pad_nd.out(self, pad, value, out): pad lists (before, after) from the last dimension on;
// negative numbers cut off
Result<Step> constant_pad(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t x, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  FLEXPTE_ASSIGN(const double number, binder.fixed_real(2));
  FLEXPTE_ASSIGN(const std::vector<int32_t> pad, binder.integers(1));
  if (pad.size() % 2 != 0 || pad.size() / 2 > static_cast<size_t>(binder.rank(x))) {
    return Status(Code::kInvalidProgram, "pads " + std::to_string(pad.size() / 2) + " dimensions of a tensor of rank " +
                                             std::to_string(binder.rank(x)));
  }
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(x), "the output"));
  return Step([=](const Frame& frame) -> Status {
    TensorView source = frame.tensor(x);
    std::array<int64_t, kMaxRank> before{};
    SizeList sizes;
    for (int32_t d = 0; d < source.rank; ++d) {
      const auto from_last = static_cast<size_t>(source.rank - 1 - d);
      const bool padded = from_last < pad.size() / 2;
      const int64_t left = padded ? frame.integer(pad[2 * from_last]) : 0;
      const int64_t right = padded ? frame.integer(pad[2 * from_last + 1]) : 0;
      int64_t size = 0;
      if (__builtin_add_overflow(source.size(d), left, &size) || __builtin_add_overflow(size, right, &size) ||
          size < 0 || left < -source.size(d) || right < -source.size(d)) {
        return invalid("cannot pad a dimension of size " + std::to_string(source.size(d)) + " by " +
                       std::to_string(left) + " and " + std::to_string(right));
      }
      sizes.push(size);
      before[static_cast<size_t>(d)] = left;
    }
    FLEXPTE_TRY(frame.resize(out, sizes));
    double value = number;
    TensorView target = frame.tensor(out);
    TensorView fill = target;
    fill.data = &value;
    fill.dtype = DType::kF64;
    fill.strides.fill(0);
    copy_part(frame, fill, target);
    for (int32_t d = 0; d < source.rank; ++d) {
      const int64_t left = before[static_cast<size_t>(d)];
      const int64_t begin = std::max<int64_t>(left, 0);  // in out
      const int64_t end = std::min(left + source.size(d), target.size(d));
      const int64_t length = std::max<int64_t>(end - begin, 0);
      source = narrowed(source, d, begin - left, length);
      target = narrowed(target, d, begin, length);
    }
    copy_part(frame, source, target);
    return Status::ok();
  });
}

// executorch_prim::et_copy_index.tensor(to, from, index): to[index] = from, where `to` grows with the index
Result<Step> copy_index(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t to, binder.out(0));
  FLEXPTE_ASSIGN(const int32_t from, binder.tensor(1));
  FLEXPTE_ASSIGN(const int32_t index, binder.integer(2));
  FLEXPTE_TRY(binder.expect_same_dtype(to, from));
  FLEXPTE_TRY(binder.expect_rank(to, binder.rank(from) + 1, "the target"));
  return Step([=](const Frame& frame) -> Status {
    const TensorView& source = frame.tensor(from);
    const int64_t at = frame.integer(index);
    if (at < 0 || at == INT64_MAX) return invalid("the index " + std::to_string(at) + " is out of range");
    SizeList sizes;
    sizes.push(frame[to].dynamic ? at + 1 : frame.tensor(to).size(0));
    for (int32_t d = 0; d < source.rank; ++d) sizes.push(source.size(d));
    FLEXPTE_TRY(frame.resize(to, sizes));
    if (at >= sizes[0]) return invalid("the index " + std::to_string(at) + " is out of range");
    copy_part(frame, source, select(frame.tensor(to), 0, at));
    return Status::ok();
  });
}

constexpr OpEntry kOps[] = {
    {"aten::cat.out", cat},
    {"aten::stack.out", stack},
    {"aten::split_with_sizes_copy.out", split_with_sizes},
    {"aten::split_copy.Tensor_out", split_copy},
    {"aten::unbind_copy.int_out", unbind_copy},
    {"aten::constant_pad_nd.out", constant_pad},
    {"executorch_prim::et_copy_index.tensor", copy_index},
};

}  // namespace

std::span<const OpEntry> join_ops() {
  return kOps;
}

}  // namespace flexpte
