// Loads from captures.
#include <algorithm>
#include <array>

#include "runtime/kernels/expression_kernels.h"
#include "runtime/kernels/scalar.h"

namespace flexpte {

bool ActiveLanes::any(Extent extent, int64_t r, int64_t c) const {
  if (data == nullptr) return true;
  int64_t row_begin = 0, row_end = rows, col_begin = 0, col_end = cols;
  // Values per row are laid out along the columns of a single row.
  if (extent == Extent::kRows) row_begin = c, row_end = c + 1;
  if (extent == Extent::kCols || extent == Extent::kFull) col_begin = c, col_end = c + 1;
  if (extent == Extent::kFull) row_begin = r, row_end = r + 1;
  for (int64_t i = row_begin; i < row_end; ++i) {
    for (int64_t j = col_begin; j < col_end; ++j) {
      if (data[i * stride + j] != 0) return true;
    }
  }
  return false;
}

namespace {

int64_t index_at(const LaneOperand& index, DType type, int64_t r, int64_t c) {
  const int64_t at = r * index.row_step + c * index.col_step;
  return type == DType::kI32 ? static_cast<const int32_t*>(index.data)[at]
                             : static_cast<const int64_t*>(index.data)[at];
}

// Adds the offset in elements of an index into a dimension; false when it is outside.
bool add_offset(int64_t index, int64_t size, int64_t stride, int64_t* offset) {
  const int64_t wrapped = index < 0 ? index + size : index;
  if (wrapped < 0 || wrapped >= size) return false;
  *offset += wrapped * stride;
  return true;
}

const std::byte* element_at(const TensorView& capture, int64_t offset) {
  return static_cast<const std::byte*>(capture.data) + offset * element_size_bytes(capture.dtype);
}

// A row whose last index steps by one, wholly inside the capture, is one strided run.
bool load_run(const LaneLoad& load, int64_t r, int64_t cols, void* out) {
  const TensorView& capture = *load.capture;
  const int32_t last = capture.rank - 1;
  int64_t offset = 0;
  for (int32_t d = 0; d < last; ++d) {
    if (!add_offset(index_at(load.indices[d], load.index_types[d], r, 0), capture.size(d), capture.stride(d),
                    &offset)) {
      return false;
    }
  }
  const LaneOperand& index = load.indices[last];
  int64_t begin = index_at(index, load.index_types[last], r, 0);
  int64_t end = index_at(index, load.index_types[last], r, cols - 1);
  const int64_t size = capture.size(last);
  if ((begin < 0) != (end < 0) || std::min(begin, end) < -size || std::max(begin, end) >= size) return false;
  if (end - begin != load.step * (cols - 1)) return false;
  if (begin < 0) begin += size;
  const int64_t stride = capture.stride(last);
  convert_lanes(element_at(capture, offset + begin * stride), capture.dtype, load.step * stride, out, load.type, 1,
                cols);
  return true;
}

constexpr int64_t kGatherLanes = 64;

template <class From, class To>
void gather(const From* data, const int64_t* offsets, const bool* inside, To* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = inside[i] ? convert<To>(data[offsets[i]]) : To{};
}

template <class To>
void gather_any(const TensorView& capture, const int64_t* offsets, const bool* inside, void* out, int64_t n) {
  with_storage_type(capture.dtype, [&](auto tag) {
    gather(static_cast<const decltype(tag)*>(capture.data), offsets, inside, static_cast<To*>(out), n);
  });
}

// Lanes [c, c + n) of row r, n <= kGatherLanes, each by its own indices.
bool load_gather(const LaneLoad& load, int64_t r, int64_t c, int64_t n, void* out, Extent extent,
                 const ActiveLanes& active) {
  const TensorView& capture = *load.capture;
  std::array<int64_t, kGatherLanes> offsets{};
  std::array<bool, kGatherLanes> inside;
  inside.fill(true);
  bool all_inside = true;
  for (int32_t d = 0; d < capture.rank; ++d) {
    const int64_t size = capture.size(d);
    const int64_t stride = capture.stride(d);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t index = index_at(load.indices[d], load.index_types[d], r, c + i);
      const bool ok = add_offset(index, size, stride, &offsets[static_cast<size_t>(i)]);
      inside[static_cast<size_t>(i)] &= ok;
      all_inside &= ok;
    }
  }
  switch (load.type) {
    case DType::kBool:
      gather_any<Bool>(capture, offsets.data(), inside.data(), out, n);
      break;
    case DType::kI32:
      gather_any<int32_t>(capture, offsets.data(), inside.data(), out, n);
      break;
    case DType::kI64:
      gather_any<int64_t>(capture, offsets.data(), inside.data(), out, n);
      break;
    default:
      gather_any<float>(capture, offsets.data(), inside.data(), out, n);
      break;
  }
  if (all_inside) return true;
  for (int64_t i = 0; i < n; ++i) {
    if (!inside[static_cast<size_t>(i)] && active.any(extent, r, c + i)) return false;
  }
  return true;
}

}  // namespace

bool load_lanes(const LaneLoad& load, void* out, int64_t out_row_step, Extent extent, int64_t rows, int64_t cols,
                const ActiveLanes& active) {
  const int64_t element_size = element_size_bytes(load.type);
  bool inside = true;
  for (int64_t r = 0; r < rows; ++r) {
    std::byte* row = static_cast<std::byte*>(out) + r * out_row_step * element_size;
    if (load.step != 0 && load_run(load, r, cols, row)) continue;
    for (int64_t c = 0; c < cols; c += kGatherLanes) {
      const int64_t n = std::min(kGatherLanes, cols - c);
      inside &= load_gather(load, r, c, n, row + c * element_size, extent, active);
    }
  }
  return inside;
}

}  // namespace flexpte
