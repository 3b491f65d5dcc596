#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <string>

#include "runtime/kernels/kernels.h"
#include "runtime/kernels/strided.h"

namespace flexpte {
namespace {

int64_t load_index(const TensorView& index, int64_t offset) {
  return index.dtype == DType::kI32 ? int64_t{index.as<const int32_t>()[offset]} : index.as<const int64_t>()[offset];
}

Strided<1> shape_of(const TensorView& view) {
  Strided<1> shape;
  for (int32_t d = 0; d < view.rank; ++d) shape.append(view.size(d), {view.stride(d)});
  return shape;
}

// Every index is in [-size, size), or in [0, size) where indices do not wrap.
Status check_indices(const char* op, const TensorView& index, bool wraps, int dim, int64_t size) {
  assert(index.dtype == DType::kI32 || index.dtype == DType::kI64);
  const Strided<1> shape = shape_of(index);
  const int64_t count = shape.num_elements();
  StridedIterator<1> it(shape, 0);
  for (int64_t i = 0; i < count; ++i, it.advance()) {
    const int64_t value = load_index(index, it.offset(0));
    if (value < size && value >= (wraps ? -size : 0)) continue;
    return Status(Code::kOutOfRange, std::string(op) + ": index " + std::to_string(value) + " (element " +
                                         std::to_string(i) + ") is outside dimension " + std::to_string(dim) +
                                         " of size " + std::to_string(size));
  }
  return Status::ok();
}

// The dimensions behind the indexed one: one copy of it per index.
class Block {
 public:
  // `from` and `to` are the first such dimensions of the two views; as many follow in both.
  Block(const TensorView& source, int32_t from, const TensorView& target, int32_t to)
      : element_bytes_(static_cast<size_t>(element_size_bytes(source.dtype))) {
    for (; from < source.rank; ++from, ++to) {
      assert(source.size(from) == target.size(to));
      shape_.append(source.size(from), {source.stride(from), target.stride(to)});
    }
    num_elements_ = shape_.num_elements();
    const auto [count, strides] = shape_.pop_inner();
    count_ = count;
    source_stride_ = strides[0];
    target_stride_ = strides[1];
    rows_ = shape_.num_elements();
    if (count_ == 1 || (source_stride_ == 1 && target_stride_ == 1)) {
      row_bytes_ = static_cast<size_t>(count_) * element_bytes_;
    }
  }

  int64_t num_elements() const { return num_elements_; }

  // Offsets in elements.
  void copy(const std::byte* source, int64_t source_offset, std::byte* target, int64_t target_offset) const {
    StridedIterator<2> it(shape_, 0);
    for (int64_t row = 0; row < rows_; ++row, it.advance()) {
      const std::byte* from = source + static_cast<size_t>(source_offset + it.offset(0)) * element_bytes_;
      std::byte* to = target + static_cast<size_t>(target_offset + it.offset(1)) * element_bytes_;
      if (row_bytes_ > 0) {
        std::memcpy(to, from, row_bytes_);
        continue;
      }
      const int64_t source_step = source_stride_ * static_cast<int64_t>(element_bytes_);
      const int64_t target_step = target_stride_ * static_cast<int64_t>(element_bytes_);
      for (int64_t i = 0; i < count_; ++i) std::memcpy(to + i * target_step, from + i * source_step, element_bytes_);
    }
  }

 private:
  Strided<2> shape_;  // without the innermost dimension
  size_t element_bytes_;
  int64_t num_elements_ = 0;
  int64_t count_ = 1;
  int64_t source_stride_ = 0;
  int64_t target_stride_ = 0;
  int64_t rows_ = 1;
  size_t row_bytes_ = 0;  // 0 where the innermost dimension is not contiguous in both
};

// The dimensions before the indexed one.
Strided<2> leading(const TensorView& source, const TensorView& target, int32_t dim) {
  Strided<2> shape;
  for (int32_t d = 0; d < dim; ++d) {
    assert(source.size(d) == target.size(d));
    shape.append(source.size(d), {source.stride(d), target.stride(d)});
  }
  return shape;
}

}  // namespace

Status gather(const TensorView& source, int dim, const TensorView& index, const TensorView& out,
              const ThreadPool& pool) {
  assert(dim >= 0 && dim < source.rank && out.rank == source.rank - 1 + index.rank);
  assert(source.dtype == out.dtype);
  const int64_t size = source.size(dim);
  FLEXPTE_TRY(check_indices("gather", index, /*wraps=*/true, dim, size));
  const Strided<2> before = leading(source, out, dim);
  // The index and, in step with it, its dimensions of out.
  Strided<2> indices;
  for (int32_t d = 0; d < index.rank; ++d) {
    assert(index.size(d) == out.size(dim + d));
    indices.append(index.size(d), {index.stride(d), out.stride(dim + d)});
  }
  const Block block(source, dim + 1, out, dim + index.rank);
  const int64_t count = indices.num_elements();
  const int64_t items = before.num_elements() * count;
  if (items == 0 || block.num_elements() == 0) return Status::ok();
  pool.parallel_for(items, rows_per_piece(block.num_elements()), [&](int64_t begin, int64_t end, int) {
    StridedIterator<2> outer(before, begin / count);
    for (int64_t item = begin; item < end; outer.advance()) {
      const int64_t first = item % count;
      const int64_t last = first + std::min(count - first, end - item);
      StridedIterator<2> it(indices, first);
      for (int64_t i = first; i < last; ++i, it.advance()) {
        int64_t row = load_index(index, it.offset(0));
        if (row < 0) row += size;
        block.copy(source.as<const std::byte>(), outer.offset(0) + row * source.stride(dim), out.as<std::byte>(),
                   outer.offset(1) + it.offset(1));
      }
      item += last - first;
    }
  });
  return Status::ok();
}

Status index_copy(const TensorView& target, int dim, const TensorView& index, const TensorView& source,
                  const ThreadPool& pool) {
  assert(dim >= 0 && dim < target.rank && source.rank == target.rank && index.rank == 1);
  assert(source.dtype == target.dtype && source.size(dim) == index.size(0));
  FLEXPTE_TRY(check_indices("index_copy", index, /*wraps=*/false, dim, target.size(dim)));
  const Strided<2> before = leading(source, target, dim);
  const Block block(source, dim + 1, target, dim + 1);
  const int64_t count = index.size(0);
  const int64_t outer_count = before.num_elements();
  if (outer_count == 0 || count == 0 || block.num_elements() == 0) return Status::ok();
  // One thread writes all that one leading index has, in order: of equal indices the last one stays.
  pool.parallel_for(outer_count, rows_per_piece(count * block.num_elements()), [&](int64_t begin, int64_t end, int) {
    StridedIterator<2> outer(before, begin);
    for (int64_t o = begin; o < end; ++o, outer.advance()) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = load_index(index, i * index.stride(0));
        block.copy(source.as<const std::byte>(), outer.offset(0) + i * source.stride(dim), target.as<std::byte>(),
                   outer.offset(1) + row * target.stride(dim));
      }
    }
  });
  return Status::ok();
}

}  // namespace flexpte
