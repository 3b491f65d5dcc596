#include "metal_delegate/profile.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string_view>

namespace flexpte::bound {
namespace {

double milliseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

}  // namespace

bool Profile::is_wanted() {
  const char* wanted = std::getenv("FLEXPTE_PROFILE");
  return wanted != nullptr && std::string_view(wanted) == "1";
}

Profile::Profile(const BoundProgram& program) : program_(program), spent_(program.instructions.size()) {}

Profile::~Profile() {
  if (num_calls_ == 0) return;
  std::array<Clock::duration, kNumOpKinds> by_kind{};
  std::array<int64_t, kNumOpKinds> counts{};
  Clock::duration total = planning_;
  for (size_t i = 0; i < spent_.size(); ++i) {
    const auto kind = static_cast<size_t>(program_.instructions[i].kind);
    by_kind[kind] += spent_[i];
    ++counts[kind];
    total += spent_[i];
  }
  const double share = total.count() > 0 ? 100.0 / milliseconds(total) : 0.0;
  std::fprintf(stderr, "flexpte profile: %lld calls, %.3f ms each\n", static_cast<long long>(num_calls_),
               milliseconds(total) / static_cast<double>(num_calls_));
  for (size_t kind = 0; kind < by_kind.size(); ++kind) {
    if (counts[kind] == 0) continue;
    std::fprintf(stderr, "  %-14s x %5lld  %10.3f ms  %5.1f %%\n",
                 std::string(op_kind_name(static_cast<OpKind>(kind))).c_str(), static_cast<long long>(counts[kind]),
                 milliseconds(by_kind[kind]) / static_cast<double>(num_calls_), milliseconds(by_kind[kind]) * share);
  }
  if (planning_.count() > 0) {
    std::fprintf(stderr, "  %-14s          %10.3f ms  %5.1f %%\n", "planning",
                 milliseconds(planning_) / static_cast<double>(num_calls_), milliseconds(planning_) * share);
  }
  std::vector<size_t> order(spent_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [this](size_t a, size_t b) { return spent_[a] > spent_[b]; });
  constexpr size_t kShown = 20;
  for (size_t i = 0; i < std::min(kShown, order.size()); ++i) {
    std::fprintf(stderr, "  %10.3f ms  %s\n", milliseconds(spent_[order[i]]) / static_cast<double>(num_calls_),
                 describe_instruction(program_, order[i]).c_str());
  }
}

}  // namespace flexpte::bound
