#pragma once
#include <nanobind/nanobind.h>

namespace dynaexq {

void bind_kernels(nanobind::module_& m);

}  // namespace dynaexq
