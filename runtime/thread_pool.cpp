// A loop is open while its caller is in run(). Workers enter an open loop, take pieces from a shared
// counter and leave; nobody has to enter. The caller takes pieces too, closes the loop when none is
// left, and waits only for the workers that are inside. So a worker that the system does not schedule
// delays nothing, and a process made by fork(), which has no workers, runs its loops on the caller.
#include "runtime/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace flexpte {
namespace {

constexpr int kMaxThreads = 1024;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr size_t kCacheLineBytes = 64;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True as soon as `done()` is, false when it was not for about `kSpin`.
template <class Done>
bool spin_until(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

int64_t process_id() {
#if defined(__unix__) || defined(__APPLE__)
  return static_cast<int64_t>(getpid());
#else
  return 0;
#endif
}

// The loop that this thread is inside of, if any.
struct Position {
  const void* pool = nullptr;
  int thread = 0;
};
thread_local Position position;

#if defined(__linux__)
// CPUs granted by "quota period" of cgroup v2, or by a quota and a period; 0 when unlimited.
double cpus_of_quota(std::string_view quota, std::string_view period) {
  int64_t quota_us = 0, period_us = 0;
  if (std::from_chars(quota.data(), quota.data() + quota.size(), quota_us).ec != std::errc() ||
      std::from_chars(period.data(), period.data() + period.size(), period_us).ec != std::errc() || quota_us <= 0 ||
      period_us <= 0) {
    return 0;
  }
  return static_cast<double>(quota_us) / static_cast<double>(period_us);
}

// The smallest CPU quota of the process's control group and its parents (cgroup-v2.rst, cpu.max;
// sched-bwc.rst for version 1); 0 when there is none.
double cgroup_cpus() {
  double cpus = 0;
  const auto restrict_to = [&cpus](double quota) {
    if (quota > 0) cpus = cpus > 0 ? std::min(cpus, quota) : quota;
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_v2 = controllers.empty();
    // Version 1 mounts the controllers "cpu" and "cpuacct" as one: "cpu,cpuacct".
    if (!is_v2 && controllers != "cpu" && !controllers.starts_with("cpu,") && !controllers.ends_with(",cpu")) {
      continue;
    }
    std::string path = line.substr(second + 1);
    while (!path.empty() && path.back() == '/') path.pop_back();
    while (true) {
      std::string quota, period;
      if (is_v2) {
        std::ifstream("/sys/fs/cgroup" + path + "/cpu.max") >> quota >> period;
      } else {
        std::ifstream("/sys/fs/cgroup/cpu" + path + "/cpu.cfs_quota_us") >> quota;
        std::ifstream("/sys/fs/cgroup/cpu" + path + "/cpu.cfs_period_us") >> period;
      }
      restrict_to(cpus_of_quota(quota, period));
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
  return cpus;
}
#endif

int available_cpus() {
  int cpus = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  // Machines with more CPUs than a cpu_set_t holds keep the count above.
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
  const double quota = cgroup_cpus();
  if (quota > 0 && quota < cpus) cpus = static_cast<int>(quota + 0.5);
#elif defined(__APPLE__)
  // Efficiency cores would be the ones that the others wait for.
  int performance_cores = 0;
  size_t size = sizeof performance_cores;
  if (sysctlbyname("hw.perflevel0.logicalcpu", &performance_cores, &size, nullptr, 0) == 0 && performance_cores > 0) {
    cpus = performance_cores;
  }
#endif
  return std::clamp(cpus, 1, kMaxThreads);
}

}  // namespace

struct ThreadPool::Impl {
  // Held by the thread whose loop is open.
  std::mutex caller;

  // The loop: written while it is closed and nobody is inside, read by those inside.
  Piece piece = nullptr;
  const void* context = nullptr;
  int64_t n = 0;
  int64_t grain = 1;

  alignas(kCacheLineBytes) std::atomic<int64_t> next{0};
  // Counts loops; workers wait for it to change.
  alignas(kCacheLineBytes) std::atomic<uint32_t> epoch{0};
  std::atomic<bool> stopping{false};
  // A worker enters by `inside += 1`, then looks at `open`; the caller closes by `open = false`, then
  // looks at `inside`. In the single order of these four, one of the two sees the other.
  alignas(kCacheLineBytes) std::atomic<uint32_t> inside{0};
  std::atomic<bool> open{false};

  int num_threads = 1;
  int64_t process = 0;
  std::vector<std::thread> workers;

  void take_pieces() {
    while (true) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= n) return;
      piece(context, begin, std::min(n - begin, grain) + begin, position.thread);
    }
  }

  void work(int thread) {
    position = {this, thread};
    uint32_t seen = 0;
    while (true) {
      if (!spin_until([&] { return epoch.load(std::memory_order_acquire) != seen; })) {
        epoch.wait(seen, std::memory_order_acquire);
      }
      seen = epoch.load(std::memory_order_acquire);
      if (stopping.load(std::memory_order_acquire)) return;
      inside.fetch_add(1);
      if (open.load()) take_pieces();
      if (inside.fetch_sub(1) == 1) inside.notify_all();
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>()) {
  impl_->num_threads = std::clamp(num_threads, 1, kMaxThreads);
  impl_->process = process_id();
  impl_->workers.reserve(static_cast<size_t>(impl_->num_threads - 1));
  for (int thread = 1; thread < impl_->num_threads; ++thread) {
    impl_->workers.emplace_back([impl = impl_.get(), thread] { impl->work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  if (impl_->process != process_id()) {
    // The workers stayed behind in the parent process: there is nothing to join.
    for (std::thread& worker : impl_->workers) worker.detach();
    return;
  }
  impl_->stopping.store(true, std::memory_order_release);
  impl_->epoch.fetch_add(1, std::memory_order_release);
  impl_->epoch.notify_all();
  for (std::thread& worker : impl_->workers) worker.join();
}

int ThreadPool::num_threads() const {
  return impl_->num_threads;
}

void ThreadPool::run(int64_t n, int64_t grain, Piece piece, const void* context) const {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  Impl& impl = *impl_;
  if (position.pool != nullptr) {
    // Inside a loop. The thread number of the enclosing loop keeps scratch apart.
    piece(context, 0, n, position.pool == &impl ? position.thread : 0);
    return;
  }
  // When another thread's loop is open, the workers are busy: this one runs on its caller.
  std::unique_lock<std::mutex> lock(impl.caller, std::defer_lock);
  if (impl.num_threads == 1 || n <= grain || !lock.try_lock()) {
    position = {&impl, 0};
    piece(context, 0, n, 0);
    position = {};
    return;
  }
  impl.piece = piece;
  impl.context = context;
  impl.n = n;
  impl.grain = grain;
  impl.next.store(0, std::memory_order_relaxed);
  impl.open.store(true);
  impl.epoch.fetch_add(1, std::memory_order_release);
  impl.epoch.notify_all();

  position = {&impl, 0};
  impl.take_pieces();
  position = {};

  impl.open.store(false);
  if (!spin_until([&] { return impl.inside.load() == 0; })) {
    for (uint32_t inside = impl.inside.load(); inside != 0; inside = impl.inside.load()) {
      impl.inside.wait(inside);
    }
  }
}

int ThreadPool::default_num_threads() {
  if (const char* text = std::getenv("FLEXPTE_NUM_THREADS")) {
    int threads = 0;
    const char* end = text + std::strlen(text);
    const auto [rest, error] = std::from_chars(text, end, threads);
    if (error == std::errc() && rest == end && threads >= 1 && threads <= kMaxThreads) return threads;
  }
  return available_cpus();
}

}  // namespace flexpte
