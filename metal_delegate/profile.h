// Where the time of an instance went, by kind of instruction and by instruction.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "metal_delegate/program.h"

namespace flexpte::bound {

class Profile {
 public:
  // Whether the environment variable FLEXPTE_PROFILE asks for one.
  static bool is_wanted();

  explicit Profile(const BoundProgram& program);
  // Prints the table to stderr.
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  void start() { begun_ = Clock::now(); }
  // The time since the last start() or add() went to this instruction.
  void add(size_t instruction) {
    const Clock::time_point now = Clock::now();
    spent_[instruction] += now - begun_;
    begun_ = now;
  }
  // The time since the last start() or add() went to planning of an attention, apart from its instruction.
  void add_planning() {
    const Clock::time_point now = Clock::now();
    planning_ += now - begun_;
    begun_ = now;
  }
  void count_call() { ++num_calls_; }

 private:
  using Clock = std::chrono::steady_clock;
  const BoundProgram& program_;
  std::vector<Clock::duration> spent_;
  Clock::duration planning_{};
  Clock::time_point begun_;
  int64_t num_calls_ = 0;
};

}  // namespace flexpte::bound
