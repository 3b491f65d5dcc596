// Walking over strided views.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "runtime/tensor.h"

namespace flexpte {

// N views of equal sizes, reduced to the fewest dimensions: those of size 1 dropped, neighbours that
// are one dimension in every view merged.
template <int N>
struct Strided {
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> sizes{};
  std::array<std::array<int64_t, kMaxRank>, N> strides{};

  // Adds a dimension inside those added before.
  void append(int64_t size, const std::array<int64_t, N>& stride) {
    if (size == 1) return;
    if (rank > 0) {
      const size_t last = static_cast<size_t>(rank - 1);
      bool merges = true;
      for (size_t i = 0; i < N; ++i) merges = merges && strides[i][last] == size * stride[i];
      if (merges) {
        sizes[last] *= size;
        for (size_t i = 0; i < N; ++i) strides[i][last] = stride[i];
        return;
      }
    }
    const size_t d = static_cast<size_t>(rank++);
    sizes[d] = size;
    for (size_t i = 0; i < N; ++i) strides[i][d] = stride[i];
  }

  int64_t num_elements() const {
    int64_t n = 1;
    for (int32_t d = 0; d < rank; ++d) n *= sizes[static_cast<size_t>(d)];
    return n;
  }

  // Takes off the innermost dimension: its size (1 when there is none) and strides.
  std::pair<int64_t, std::array<int64_t, N>> pop_inner() {
    std::pair<int64_t, std::array<int64_t, N>> inner{1, {}};
    if (rank == 0) return inner;
    const size_t last = static_cast<size_t>(--rank);
    inner.first = sizes[last];
    for (size_t i = 0; i < N; ++i) inner.second[i] = strides[i][last];
    return inner;
  }
};

// The offsets of element `position` (in row-major order), then of those after it.
template <int N>
class StridedIterator {
 public:
  StridedIterator(const Strided<N>& shape, int64_t position) : shape_(shape) {
    for (int32_t d = shape.rank; d-- > 0;) {
      const size_t dim = static_cast<size_t>(d);
      if (shape.sizes[dim] == 0) continue;
      index_[dim] = position % shape.sizes[dim];
      position /= shape.sizes[dim];
      for (size_t i = 0; i < N; ++i) offsets_[i] += index_[dim] * shape.strides[i][dim];
    }
  }

  int64_t offset(size_t view) const { return offsets_[view]; }

  void advance() {
    for (int32_t d = shape_.rank; d-- > 0;) {
      const size_t dim = static_cast<size_t>(d);
      for (size_t i = 0; i < N; ++i) offsets_[i] += shape_.strides[i][dim];
      if (++index_[dim] < shape_.sizes[dim]) return;
      index_[dim] = 0;
      for (size_t i = 0; i < N; ++i) offsets_[i] -= shape_.sizes[dim] * shape_.strides[i][dim];
    }
  }

 private:
  const Strided<N>& shape_;
  std::array<int64_t, kMaxRank> index_{};
  std::array<int64_t, N> offsets_{};
};

// Elements per piece of a parallel loop, so that a piece is worth handing to another thread.
inline int64_t rows_per_piece(int64_t elements_per_row) {
  constexpr int64_t kElementsPerPiece = 16 * 1024;
  return elements_per_row <= 0 ? kElementsPerPiece : (kElementsPerPiece + elements_per_row - 1) / elements_per_row;
}

}  // namespace flexpte
