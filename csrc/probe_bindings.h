// The selection's part of the Python module, for bindings.cpp alone.
#pragma once
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "field_bindings.h"
#include "probe_launch.h"

namespace mtraining::probe_bindings {

namespace py = pybind11;
using P = ProbeParams;

inline void bind_launch(py::module_& module, const char* name, const char* (*launch)(ProbePass, const P&, void*)) {
  module.def(name, [launch](ProbePass pass, const field_bindings::Held<P>& params, uintptr_t stream) {
    if (const char* error = launch(pass, params, reinterpret_cast<void*>(stream)))
      throw std::runtime_error(std::string("The CUDA kernels could not be launched: ") + error);
  });
}

// Adds ProbeParams, ProbePass, and for each launcher of probe_launch.h its name(pass, params, stream).
inline void bind(py::module_& module) {
  field_bindings::bind<ProbeParams>(module, "ProbeParams");
  py::enum_<ProbePass>(module, "ProbePass")
      .value("sums", kProbeSums)
      .value("merge", kProbeMerge)
      .value("weights", kProbeWeights)
      .value("mass", kProbeMass)
      .value("verticals", kProbeVerticals)
      .value("chosen", kProbeChosen)
      .value("columns", kProbeColumns)
      .value("slashes", kProbeSlashes);
  bind_launch(module, "probe_launch", probe_launch);
  bind_launch(module, "sm80_probe_launch", sm80_probe_launch);
#ifdef MTRAINING_SM90
  bind_launch(module, "sm90_probe_launch", sm90_probe_launch);
#endif
}

}  // namespace mtraining::probe_bindings
