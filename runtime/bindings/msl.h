#pragma once

#include <nanobind/nanobind.h>

namespace flexpte::bindings {

void bind_msl(nanobind::module_& module);

}  // namespace flexpte::bindings
