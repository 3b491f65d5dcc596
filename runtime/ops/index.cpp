// Reading and writing by index tensors.
#include <cstring>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/scalar.h"
#include "runtime/ops/op.h"

namespace flexpte {
namespace {

int64_t read_index(const TensorView& index, int64_t offset) {
  return index.dtype == DType::kI64 ? index.as<int64_t>()[offset] : index.as<int32_t>()[offset];
}

Status out_of_range(int64_t index, int64_t size) {
  return {Code::kOutOfRange, "index " + std::to_string(index) + " of a dimension of size " + std::to_string(size)};
}

// Calls visit(position) for every position of `sizes`, in row-major order, until one gives an error.
template <class Visit>
Status for_each_position(Sizes sizes, const Visit& visit) {
  std::array<int64_t, kMaxRank> at{};
  for (const int64_t size : sizes) {
    if (size == 0) return Status::ok();
  }
  for (;;) {
    FLEXPTE_TRY(visit(at));
    size_t d = sizes.size();
    while (d > 0 && ++at[d - 1] == sizes[d - 1]) at[--d] = 0;
    if (d == 0) return Status::ok();
  }
}

int64_t offset_of(const TensorView& view, const std::array<int64_t, kMaxRank>& at) {
  int64_t offset = 0;
  for (int32_t d = 0; d < view.rank; ++d) offset += at[static_cast<size_t>(d)] * view.stride(d);
  return offset;
}

// An output that overlapped an index would change it after it was checked.
Status expect_apart(const TensorView& out, const TensorView& index) {
  const auto range = [](const TensorView& view) {
    int64_t last = 0;
    for (int32_t d = 0; d < view.rank; ++d) last += (view.size(d) - 1) * view.stride(d);
    const auto begin = reinterpret_cast<uintptr_t>(view.data);
    return std::pair(begin, begin + static_cast<uintptr_t>((last + 1) * element_size_bytes(view.dtype)));
  };
  if (out.num_elements() == 0 || index.num_elements() == 0) return Status::ok();
  const auto [out_begin, out_end] = range(out);
  const auto [index_begin, index_end] = range(index);
  if (out_end <= index_begin || index_end <= out_begin) return Status::ok();
  return {Code::kInvalidProgram, "the output shares memory with an index"};
}

Status copy_self(const Frame& frame, int32_t self, int32_t out) {
  const TensorView& from = frame.tensor(self);
  FLEXPTE_TRY(frame.resize(out, sizes_of(from)));
  const TensorView& to = frame.tensor(out);
  if (from.num_elements() > 0 && from.data != to.data) copy(from, to, frame.pool);
  return Status::ok();
}

Status run_gather(const Frame& frame, const TensorView& source, int32_t dim, const TensorView& index, int32_t out) {
  SizeList sizes;
  if (source.rank - 1 + index.rank > kMaxRank) return {Code::kUnsupported, "the result has too many dimensions"};
  for (int32_t d = 0; d < dim; ++d) sizes.push(source.size(d));
  for (int32_t d = 0; d < index.rank; ++d) sizes.push(index.size(d));
  for (int32_t d = dim + 1; d < source.rank; ++d) sizes.push(source.size(d));
  FLEXPTE_TRY(frame.resize(out, sizes));
  FLEXPTE_TRY(expect_apart(frame.tensor(out), index));
  return gather(source, dim, index, frame.tensor(out), frame.pool);
}

// aten::embedding.out(weight, indices, padding_idx, scale_grad_by_freq, sparse, out)
Result<Step> embedding(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t weight, binder.tensor(0));
  FLEXPTE_ASSIGN(const int32_t index, binder.tensor(1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(5));
  FLEXPTE_TRY(binder.expect_rank(weight, 2, "the weight"));
  FLEXPTE_TRY(binder.expect_index(index));
  FLEXPTE_TRY(binder.expect_same_dtype(weight, out));
  return Step([=](const Frame& frame) { return run_gather(frame, frame.tensor(weight), 0, frame.tensor(index), out); });
}

// aten::index_select.out(self, dim, index, out)
Result<Step> index_select(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t index, binder.tensor(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(3));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(self)));
  FLEXPTE_TRY(binder.expect_index(index));
  FLEXPTE_TRY(binder.expect_same_dtype(self, out));
  if (binder.rank(self) == 0) return Status(Code::kUnsupported, "indexes a tensor of rank 0");
  return Step([=](const Frame& frame) -> Status {
    const TensorView& in = frame.tensor(index);
    SizeList sizes;
    sizes.push(in.num_elements());
    FLEXPTE_ASSIGN(const TensorView flat, reshaped(in, sizes));
    return run_gather(frame, frame.tensor(self), dim, flat, out);
  });
}

// Indexing by several tensors, as NumPy: the indexed dimensions are replaced by the broadcast sizes of the
// indices, where the first of them was when they are neighbours, in front otherwise.
struct Indexing {
  std::array<int32_t, kMaxRank> index{};  // by dimension of the source; -1 for none
  int32_t rank = 0;
  int32_t first = 0;  // dimension of the result where the indices' dimensions begin
  int32_t num_indices = 0;
  bool is_single = false;  // one index: plain kernels do it
};

Result<Indexing> bind_indexing(const Binder& binder, int32_t self, size_t arg) {
  FLEXPTE_ASSIGN(const std::vector<int32_t> ids, binder.optional_tensors(arg));
  Indexing indexing;
  indexing.rank = binder.rank(self);
  indexing.index.fill(-1);
  if (ids.size() > static_cast<size_t>(indexing.rank)) {
    return Status(Code::kInvalidProgram,
                  std::to_string(ids.size()) + " indices for a tensor of rank " + std::to_string(indexing.rank));
  }
  int32_t last = -1;
  bool adjacent = true;
  for (size_t d = 0; d < ids.size(); ++d) {
    if (ids[d] < 0) continue;
    FLEXPTE_TRY(binder.expect_index(ids[d]));
    const auto dim = static_cast<int32_t>(d);
    if (indexing.num_indices == 0) indexing.first = dim;
    adjacent = adjacent && (indexing.num_indices == 0 || last == dim - 1);
    last = dim;
    indexing.index[d] = ids[d];
    ++indexing.num_indices;
  }
  if (indexing.num_indices == 0) return Status(Code::kInvalidProgram, "indexes by nothing");
  if (!adjacent) indexing.first = 0;
  indexing.is_single = indexing.num_indices == 1;
  return indexing;
}

// The indices of one call: views broadcast to common sizes, and the result's sizes.
struct IndexingCall {
  std::array<TensorView, kMaxRank> indices;
  SizeList broadcast_sizes;
  SizeList result_sizes;
};

Status prepare(const Frame& frame, const Indexing& indexing, const TensorView& source, IndexingCall& call) {
  for (int32_t d = 0; d < indexing.rank; ++d) {
    const int32_t id = indexing.index[static_cast<size_t>(d)];
    if (id >= 0 && !broadcast(call.broadcast_sizes, sizes_of(frame.tensor(id)))) {
      return invalid("the indices do not broadcast: " + shape_string(frame.tensor(id)) + " with " +
                     sizes_string(call.broadcast_sizes));
    }
  }
  if (indexing.rank - indexing.num_indices + call.broadcast_sizes.rank > kMaxRank) {
    return {Code::kUnsupported, "the result has too many dimensions"};
  }
  for (int32_t d = 0; d < indexing.rank; ++d) {
    const int32_t id = indexing.index[static_cast<size_t>(d)];
    if (id < 0) continue;
    FLEXPTE_ASSIGN(call.indices[static_cast<size_t>(d)], expand(frame.tensor(id), call.broadcast_sizes));
  }
  int32_t kept = 0;
  for (int32_t d = 0; d < indexing.rank; ++d) {
    if (indexing.index[static_cast<size_t>(d)] >= 0) continue;
    if (kept == indexing.first) break;
    call.result_sizes.push(source.size(d));
    ++kept;
  }
  for (int32_t d = 0; d < call.broadcast_sizes.rank; ++d) call.result_sizes.push(call.broadcast_sizes[d]);
  int32_t skip = kept;
  for (int32_t d = 0; d < indexing.rank; ++d) {
    if (indexing.index[static_cast<size_t>(d)] >= 0 || skip-- > 0) continue;
    call.result_sizes.push(source.size(d));
  }
  return Status::ok();
}

// Calls visit(source offset, position in the result); all indices are checked before the first call.
template <class Visit>
Status for_each_indexed(const Indexing& indexing, const TensorView& source, const IndexingCall& call,
                        const Visit& visit) {
  for (int32_t d = 0; d < indexing.rank; ++d) {
    if (indexing.index[static_cast<size_t>(d)] < 0) continue;
    const TensorView& index = call.indices[static_cast<size_t>(d)];
    const int64_t size = source.size(d);
    FLEXPTE_TRY(for_each_position(call.broadcast_sizes, [&](const auto& at) -> Status {
      const int64_t i = read_index(index, offset_of(index, at));
      return i < -size || i >= size ? out_of_range(i, size) : Status::ok();
    }));
  }
  return for_each_position(call.result_sizes, [&](const auto& at) -> Status {
    std::array<int64_t, kMaxRank> index_at{};
    for (int32_t d = 0; d < call.broadcast_sizes.rank; ++d) {
      index_at[static_cast<size_t>(d)] = at[static_cast<size_t>(indexing.first + d)];
    }
    int64_t offset = 0;
    int32_t kept = 0;
    for (int32_t d = 0; d < indexing.rank; ++d) {
      const auto i = static_cast<size_t>(d);
      int64_t position = 0;
      if (indexing.index[i] >= 0) {
        position = read_index(call.indices[i], offset_of(call.indices[i], index_at));
        if (position < 0) position += source.size(d);
      } else {
        position = at[static_cast<size_t>(kept < indexing.first ? kept : kept + call.broadcast_sizes.rank)];
        ++kept;
      }
      offset += position * source.stride(d);
    }
    visit(offset, at);
    return Status::ok();
  });
}

Status expect_apart_from_all(const TensorView& out, const Indexing& indexing, const IndexingCall& call) {
  for (int32_t d = 0; d < indexing.rank; ++d) {
    const auto i = static_cast<size_t>(d);
    if (indexing.index[i] >= 0) FLEXPTE_TRY(expect_apart(out, call.indices[i]));
  }
  return Status::ok();
}

int32_t single_dim(const Indexing& indexing) {
  return indexing.first;
}

// aten::index.Tensor_out(self, indices, out)
Result<Step> index_op(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const Indexing indexing, bind_indexing(binder, self, 1));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(2));
  FLEXPTE_TRY(binder.expect_same_dtype(self, out));
  return Step([=](const Frame& frame) -> Status {
    const TensorView& source = frame.tensor(self);
    if (indexing.is_single) {
      const int32_t dim = single_dim(indexing);
      return run_gather(frame, source, dim, frame.tensor(indexing.index[static_cast<size_t>(dim)]), out);
    }
    IndexingCall call;
    FLEXPTE_TRY(prepare(frame, indexing, source, call));
    FLEXPTE_TRY(frame.resize(out, call.result_sizes));
    const TensorView& result = frame.tensor(out);
    FLEXPTE_TRY(expect_apart_from_all(result, indexing, call));
    const auto bytes = static_cast<size_t>(element_size_bytes(source.dtype));
    return for_each_indexed(indexing, source, call, [&](int64_t offset, const auto& at) {
      std::memcpy(element_at(result, offset_of(result, at)), element_at(source, offset), bytes);
    });
  });
}

// Adds in the storage type; narrow floats are rounded after each addition.
void add_element(const TensorView& to, int64_t to_offset, const TensorView& from, int64_t from_offset) {
  with_storage_type(to.dtype, [&](auto tag) {
    using T = decltype(tag);
    T& target = to.as<T>()[to_offset];
    if constexpr (std::is_same_v<decltype(widen(target)), int64_t>) {  // wraps around
      target = convert<T>(static_cast<int64_t>(static_cast<uint64_t>(widen(target)) +
                                               static_cast<uint64_t>(widen(from.as<T>()[from_offset]))));
    } else {
      target = convert<T>(widen(target) + widen(from.as<T>()[from_offset]));
    }
  });
}

// aten::index_put.out(self, indices, values, accumulate, out); aten::index_put_, where out is self
template <size_t kOutArg>
Result<Step> index_put(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const Indexing indexing, bind_indexing(binder, self, 1));
  FLEXPTE_ASSIGN(const int32_t values, binder.tensor(2));
  FLEXPTE_ASSIGN(const bool accumulate, binder.fixed_bool(3));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(kOutArg));
  FLEXPTE_TRY(binder.expect_same_dtype(self, out));
  FLEXPTE_TRY(binder.expect_same_dtype(self, values));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(self), "the output"));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_TRY(copy_self(frame, self, out));
    const TensorView& target = frame.tensor(out);
    IndexingCall call;
    FLEXPTE_TRY(prepare(frame, indexing, target, call));
    FLEXPTE_TRY(expect_apart_from_all(target, indexing, call));
    FLEXPTE_ASSIGN(const TensorView source, expand(frame.tensor(values), call.result_sizes));
    if (indexing.is_single && !accumulate && call.broadcast_sizes.rank == 1) {
      const int32_t dim = single_dim(indexing);
      return index_copy(target, dim, call.indices[static_cast<size_t>(dim)], source, frame.pool);
    }
    const auto bytes = static_cast<size_t>(element_size_bytes(target.dtype));
    return for_each_indexed(indexing, target, call, [&](int64_t offset, const auto& at) {
      const int64_t from = offset_of(source, at);
      if (accumulate) {
        add_element(target, offset, source, from);
      } else {
        std::memcpy(element_at(target, offset), element_at(source, from), bytes);
      }
    });
  });
}

// aten::index_copy.out(self, dim, index, source, out)
Result<Step> index_copy_op(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t index, binder.tensor(2));
  FLEXPTE_ASSIGN(const int32_t source, binder.tensor(3));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(4));
  FLEXPTE_ASSIGN(const int32_t dim, binder.wrap_dim(dim_arg, binder.rank(self)));
  FLEXPTE_TRY(binder.expect_index(index));
  FLEXPTE_TRY(binder.expect_rank(index, 1, "the index"));
  FLEXPTE_TRY(binder.expect_same_dtype(self, out));
  FLEXPTE_TRY(binder.expect_same_dtype(self, source));
  FLEXPTE_TRY(binder.expect_rank(source, binder.rank(self), "the source"));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(self), "the output"));
  if (binder.rank(self) == 0) return Status(Code::kUnsupported, "indexes a tensor of rank 0");
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_TRY(copy_self(frame, self, out));
    const TensorView& target = frame.tensor(out);
    const TensorView& from = frame.tensor(source);
    for (int32_t d = 0; d < target.rank; ++d) {
      const int64_t expected = d == dim ? frame.tensor(index).size(0) : target.size(d);
      if (from.size(d) != expected) {
        return invalid("a source of sizes " + shape_string(from) + " for a tensor of sizes " + shape_string(target) +
                       " and " + std::to_string(frame.tensor(index).size(0)) + " indices");
      }
    }
    FLEXPTE_TRY(expect_apart(target, frame.tensor(index)));
    return index_copy(target, dim, frame.tensor(index), from, frame.pool);
  });
}

// The dimension of gather and scatter, whose tensors all have one rank.
Result<int32_t> along_dim(const Binder& binder, int32_t self, int32_t index, int64_t dim) {
  FLEXPTE_TRY(binder.expect_index(index));
  FLEXPTE_TRY(binder.expect_rank(index, binder.rank(self), "the index"));
  return binder.wrap_dim(dim, binder.rank(self));
}

// Calls visit(offset in `target` with the index in place of `dim`, position) for each position of the index.
template <class Visit>
Status for_each_along(const TensorView& target, int32_t dim, const TensorView& index, const Visit& visit) {
  for (int32_t d = 0; d < index.rank; ++d) {
    if (d != dim && index.size(d) > target.size(d)) {
      return invalid("an index of sizes " + shape_string(index) + " for a tensor of sizes " + shape_string(target));
    }
  }
  const int64_t size = target.rank == 0 ? 1 : target.size(dim);
  const auto wrapped = [&](const auto& at) {
    const int64_t i = read_index(index, offset_of(index, at));
    return i < 0 ? i + size : i;
  };
  FLEXPTE_TRY(for_each_position(sizes_of(index), [&](const auto& at) -> Status {
    const int64_t i = wrapped(at);
    return i < 0 || i >= size ? out_of_range(read_index(index, offset_of(index, at)), size) : Status::ok();
  }));
  return for_each_position(sizes_of(index), [&](const auto& at) -> Status {
    int64_t offset = offset_of(target, at);
    if (target.rank > 0) offset += (wrapped(at) - at[static_cast<size_t>(dim)]) * target.stride(dim);
    visit(offset, at);
    return Status::ok();
  });
}

// aten::gather.out(self, dim, index, sparse_grad, out): out[i][j] = self[index[i][j]][j] for dim 0
Result<Step> gather_op(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t index, binder.tensor(2));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(4));
  FLEXPTE_TRY(binder.expect_same_dtype(self, out));
  FLEXPTE_ASSIGN(const int32_t dim, along_dim(binder, self, index, dim_arg));
  return Step([=](const Frame& frame) -> Status {
    const TensorView& source = frame.tensor(self);
    FLEXPTE_TRY(frame.resize(out, sizes_of(frame.tensor(index))));
    const TensorView& result = frame.tensor(out);
    FLEXPTE_TRY(expect_apart(result, frame.tensor(index)));
    const auto bytes = static_cast<size_t>(element_size_bytes(source.dtype));
    return for_each_along(source, dim, frame.tensor(index), [&](int64_t offset, const auto& at) {
      std::memcpy(element_at(result, offset_of(result, at)), element_at(source, offset), bytes);
    });
  });
}

// aten::scatter.src_out(self, dim, index, src, out): out[index[i][j]][j] = src[i][j] for dim 0; scatter_add
template <bool kAdd>
Result<Step> scatter(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t index, binder.tensor(2));
  FLEXPTE_ASSIGN(const int32_t source, binder.tensor(3));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(4));
  FLEXPTE_TRY(binder.expect_same_dtype(self, out));
  FLEXPTE_TRY(binder.expect_same_dtype(self, source));
  FLEXPTE_TRY(binder.expect_rank(source, binder.rank(self), "the source"));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(self), "the output"));
  FLEXPTE_ASSIGN(const int32_t dim, along_dim(binder, self, index, dim_arg));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_TRY(copy_self(frame, self, out));
    const TensorView& target = frame.tensor(out);
    const TensorView& from = frame.tensor(source);
    const TensorView& at_index = frame.tensor(index);
    for (int32_t d = 0; d < from.rank; ++d) {
      if (at_index.size(d) > from.size(d)) {
        return invalid("an index of sizes " + shape_string(at_index) + " for a source of sizes " + shape_string(from));
      }
    }
    FLEXPTE_TRY(expect_apart(target, at_index));
    const auto bytes = static_cast<size_t>(element_size_bytes(target.dtype));
    return for_each_along(target, dim, at_index, [&](int64_t offset, const auto& at) {
      if (kAdd) {
        add_element(target, offset, from, offset_of(from, at));
      } else {
        std::memcpy(element_at(target, offset), element_at(from, offset_of(from, at)), bytes);
      }
    });
  });
}

// aten::scatter.value_out(self, dim, index, value, out)
Result<Step> scatter_value(const Binder& binder) {
  FLEXPTE_ASSIGN(const int32_t self, binder.tensor(0));
  FLEXPTE_ASSIGN(const int64_t dim_arg, binder.fixed_integer(1));
  FLEXPTE_ASSIGN(const int32_t index, binder.tensor(2));
  FLEXPTE_ASSIGN(const Scalar value, binder.scalar(3));
  FLEXPTE_ASSIGN(const int32_t out, binder.out(4));
  FLEXPTE_TRY(binder.expect_same_dtype(self, out));
  FLEXPTE_TRY(binder.expect_rank(out, binder.rank(self), "the output"));
  FLEXPTE_ASSIGN(const int32_t dim, along_dim(binder, self, index, dim_arg));
  return Step([=](const Frame& frame) -> Status {
    FLEXPTE_TRY(copy_self(frame, self, out));
    const TensorView& target = frame.tensor(out);
    const double real = value.read_real(frame);
    FLEXPTE_TRY(expect_apart(target, frame.tensor(index)));
    return for_each_along(target, dim, frame.tensor(index), [&](int64_t offset, const auto&) {
      with_storage_type(target.dtype, [&](auto tag) {
        using T = decltype(tag);
        target.as<T>()[offset] = value.is_floating ? convert<T>(real) : convert<T>(value.read_integer(frame));
      });
    });
  });
}

constexpr OpEntry kOps[] = {
    {"aten::embedding.out", embedding},       {"aten::index_select.out", index_select},
    {"aten::index.Tensor_out", index_op},     {"aten::index_put.out", index_put<4>},
    {"aten::index_put_", index_put<0>},       {"aten::index_copy.out", index_copy_op},
    {"aten::gather.out", gather_op},          {"aten::scatter.src_out", scatter<false>},
    {"aten::scatter_add.out", scatter<true>}, {"aten::scatter.value_out", scatter_value},
};

}  // namespace

std::span<const OpEntry> index_ops() {
  return kOps;
}

}  // namespace flexpte
