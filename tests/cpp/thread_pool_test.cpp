#include "runtime/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace flexpte {
namespace {

TEST(ThreadPool, VisitsEveryItemOnce) {
  for (const int threads : {1, 2, 5}) {
    const ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int64_t n : {0, 1, 2, 7, 1000, 100000}) {
      for (const int64_t grain : {0, 1, 3, 64, 1000000}) {
        if (n > 1000 && grain < 3) continue;
        std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
        pool.parallel_for(n, grain, [&](int64_t begin, int64_t end, int thread) {
          ASSERT_GE(thread, 0);
          ASSERT_LT(thread, threads);
          ASSERT_LT(begin, end);
          for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        });
        for (const auto& count : visits) ASSERT_EQ(count.load(), 1);
      }
    }
  }
}

TEST(ThreadPool, ThreadNumbersKeepScratchApart) {
  const ThreadPool pool(4);
  std::vector<std::atomic<int>> users(4);
  for (int round = 0; round < 200; ++round) {
    pool.parallel_for(64, 1, [&](int64_t, int64_t, int thread) {
      auto& user = users[static_cast<size_t>(thread)];
      ASSERT_EQ(user.fetch_add(1), 0);
      // A nested loop runs here, with the same thread number.
      pool.parallel_for(3, 1, [&](int64_t begin, int64_t end, int nested) {
        ASSERT_EQ(nested, thread);
        ASSERT_EQ(end - begin, 3);
      });
      ASSERT_EQ(user.fetch_sub(1), 1);
    });
  }
}

TEST(ThreadPool, ManyShortLoopsInARow) {
  const ThreadPool pool(3);
  std::atomic<int64_t> sum{0};
  for (int round = 0; round < 20000; ++round) {
    int64_t local[8] = {};  // on this stack: a worker that came late would write into a dead frame
    pool.parallel_for(8, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) local[i] = i;
    });
    for (int64_t i = 0; i < 8; ++i) sum += local[i];
  }
  EXPECT_EQ(sum.load(), 20000 * 28);
}

TEST(ThreadPool, SleepsAndWakes) {
  const ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // workers are asleep by now
    std::atomic<int> count{0};
    pool.parallel_for(10, 1, [&](int64_t begin, int64_t end, int) { count += static_cast<int>(end - begin); });
    ASSERT_EQ(count.load(), 10);
  }
}

TEST(ThreadPool, SeveralCallersAtOnce) {
  const ThreadPool pool(2);
  std::vector<std::thread> callers;
  std::atomic<int64_t> total{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 500; ++round) {
        std::atomic<int64_t> sum{0};
        pool.parallel_for(100, 7, [&](int64_t begin, int64_t end, int) { sum += end - begin; });
        ASSERT_EQ(sum.load(), 100);
        total += sum;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(total.load(), 4 * 500 * 100);
}

TEST(ThreadPool, DefaultFollowsTheEnvironment) {
  unsetenv("FLEXPTE_NUM_THREADS");
  const int threads = ThreadPool::default_num_threads();
  EXPECT_GE(threads, 1);
  setenv("FLEXPTE_NUM_THREADS", "7", 1);
  EXPECT_EQ(ThreadPool::default_num_threads(), 7);
  for (const char* bad : {"", "0", "-2", "3x", " 3", "many", "99999999999999", "2000"}) {
    setenv("FLEXPTE_NUM_THREADS", bad, 1);
    EXPECT_EQ(ThreadPool::default_num_threads(), threads) << bad;
  }
  unsetenv("FLEXPTE_NUM_THREADS");
}

#if defined(__unix__) || defined(__APPLE__)
TEST(ThreadPool, AForkedProcessRunsItsLoopsAlone) {
  const auto pool = std::make_unique<ThreadPool>(3);
  pool->parallel_for(10, 1, [](int64_t, int64_t, int) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    std::atomic<int> count{0};
    pool->parallel_for(100, 1, [&](int64_t begin, int64_t end, int) { count += static_cast<int>(end - begin); });
    const_cast<std::unique_ptr<ThreadPool>&>(pool).reset();
    _exit(count.load() == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}
#endif

}  // namespace
}  // namespace flexpte
