#pragma once

#include <nanobind/nanobind.h>

namespace flexpte::bindings {

void bind_ranges(nanobind::module_& module);

}  // namespace flexpte::bindings
