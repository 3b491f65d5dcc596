// Abstract evaluation of a mask expression: what is known of the mask over a whole tile of queries
// and keys without evaluating it element by element, and which keys a row sees.
//
// Answers are always sound: kNone and kAll hold for every element of the tile, an interval is exactly
// the set of visible keys. What cannot be proved is kMixed (or no interval), never a guess.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/kernels/expression.h"
#include "runtime/status.h"
#include "runtime/tensor.h"

namespace flexpte {

enum class Verdict : uint8_t {
  kNone,   // the mask is false everywhere in the tile
  kAll,    // the mask is true everywhere in the tile
  kMixed,  // neither is proved
};

// Keys begin <= kv < end; empty when end <= begin.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool empty() const { return end <= begin; }
};

// A mask expression made ready for analysis. Immutable; shared by threads and sessions.
class MaskRanges {
 public:
  // `mask` must give a Bool and may use no score and no elementwise input. InvalidProgram otherwise.
  static Result<MaskRanges> compile(const Expression& mask, int num_scalars, std::span<const int> capture_ranks);
  ~MaskRanges();
  MaskRanges(MaskRanges&&) noexcept;
  MaskRanges& operator=(MaskRanges&&) noexcept;

  // Whether the mask can differ between batches or heads (it reads the index at all).
  bool depends_on_batch() const;
  bool depends_on_head() const;

 private:
  friend class BoundMask;
  struct Impl;
  explicit MaskRanges(std::unique_ptr<const Impl> impl);
  std::unique_ptr<const Impl> impl_;
};

// A mask together with the captures, scalars and lengths of one call. bind() is cheap (captures are
// read later, where asked for, and summarised by blocks); it allocates only when sizes grow. The
// const queries may be called from several threads at once and never allocate.
class BoundMask {
 public:
  BoundMask();
  ~BoundMask();
  BoundMask(BoundMask&&) noexcept;
  BoundMask& operator=(BoundMask&&) noexcept;

  // `mask`, and the memory of `captures`, must outlive the queries; captures must not change
  // between bind() and the last query. The spans themselves are copied.
  void bind(const MaskRanges& mask, std::span<const TensorView> captures, std::span<const int64_t> scalars,
            int64_t num_queries, int64_t num_keys);

  // The mask over queries [q_begin, q_end) and keys [kv_begin, kv_end), not empty.
  Verdict classify(int64_t batch, int64_t head, int64_t q_begin, int64_t q_end, int64_t kv_begin, int64_t kv_end) const;

  // As classify, but what cannot be proved of a tile is tried: the mask is evaluated for every element, so
  // the answer is exact (kMixed: true somewhere and false somewhere, or a capture is read out of bounds).
  // For single tiles; not for several threads at once.
  Verdict examine(int64_t batch, int64_t head, int64_t q_begin, int64_t q_end, int64_t kv_begin, int64_t kv_end);

  // True when the keys in [kv_begin, kv_end) that row `q` sees are proved to be one interval, which
  // is then stored in *visible, exactly (empty: {kv_begin, kv_begin}). False: evaluate the mask.
  bool row_interval(int64_t batch, int64_t head, int64_t q, int64_t kv_begin, int64_t kv_end, KeyRange* visible) const;

  // For masks that depend on q - kv only (and the batch and head): true when row 0, its keys counted from
  // -num_queries on, sees one interval, which is stored; row q then sees that interval plus q, cut to
  // [0, num_keys), exactly.
  bool relative_interval(int64_t batch, int64_t head, KeyRange* visible) const;

  // The smallest range found that holds all keys in [0, num_keys) that any of the rows
  // [q_begin, q_end) sees.
  KeyRange visible_keys(int64_t batch, int64_t head, int64_t q_begin, int64_t q_end) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flexpte
