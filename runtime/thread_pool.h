// A small thread pool for data-parallel loops. Workers spin briefly, then sleep.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace flexpte {

class ThreadPool {
 public:
  // The calling thread takes part: `num_threads` = 1 starts no worker.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Runs body(begin, end, thread) over [0, n), in pieces of about `grain`; pieces are handed out
  // dynamically. `thread` in [0, num_threads) tells which scratch to use. Allocates nothing.
  // Loops do not nest: a loop started inside a body runs on the calling thread, which keeps its
  // `thread` (or is 0 if the enclosing loop is another pool's). Several threads may call at once;
  // while the workers serve one of them, the loops of the others run on their callers. In a process
  // made by fork() there are no workers: its loops run on the caller.
  template <class Body>
  void parallel_for(int64_t n, int64_t grain, const Body& body) const {
    run(
        n, grain,
        [](const void* context, int64_t begin, int64_t end, int thread) {
          (*static_cast<const Body*>(context))(begin, end, thread);
        },
        &body);
  }

  // As many threads as this process may use; the environment variable FLEXPTE_NUM_THREADS
  // overrides it.
  static int default_num_threads();

 private:
  using Piece = void (*)(const void* context, int64_t begin, int64_t end, int thread);
  void run(int64_t n, int64_t grain, Piece piece, const void* context) const;

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flexpte
