#include "metal_delegate/metal/gpu_cores.h"

#include <algorithm>
#include <array>

namespace flexpte::metal {
namespace {

struct Chip {
  std::string_view name;
  uint32_t num_cores;
};

constexpr std::array kChips = {
    Chip{"A14", 4},       Chip{"A15", 5},       Chip{"A16", 5},     Chip{"A17 Pro", 6}, Chip{"A18", 5},
    Chip{"A18 Pro", 6},   Chip{"A19", 5},       Chip{"A19 Pro", 6}, Chip{"M1", 8},      Chip{"M1 Pro", 16},
    Chip{"M1 Max", 32},   Chip{"M1 Ultra", 64}, Chip{"M2", 10},     Chip{"M2 Pro", 19}, Chip{"M2 Max", 38},
    Chip{"M2 Ultra", 76}, Chip{"M3", 10},       Chip{"M3 Pro", 18}, Chip{"M3 Max", 40}, Chip{"M3 Ultra", 80},
    Chip{"M4", 10},       Chip{"M4 Pro", 20},   Chip{"M4 Max", 40}, Chip{"M5", 10},
};
constexpr uint32_t kDefaultNumCores = 8;

}  // namespace

uint32_t num_gpu_cores(std::string_view device_name) {
  constexpr std::string_view kMaker = "Apple ";
  constexpr std::string_view kSuffix = " GPU";  // phones: "Apple A17 Pro GPU"
  if (device_name.starts_with(kMaker)) device_name.remove_prefix(kMaker.size());
  if (device_name.ends_with(kSuffix)) device_name.remove_suffix(kSuffix.size());
  const auto* chip = std::find_if(kChips.begin(), kChips.end(), [&](const Chip& c) { return c.name == device_name; });
  return chip == kChips.end() ? kDefaultNumCores : chip->num_cores;
}

}  // namespace flexpte::metal
