// The Python module megatron_mtraining.backends.cuda._C: the params structs, made from tensors and numbers by the names
// of their fields, and the launchers.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "field_bindings.h"
#include "launch.h"
#include "probe_bindings.h"

namespace py = pybind11;
using namespace mtraining;
using field_bindings::Held;

namespace {

void raise_if(const char* error) {
  if (error) throw std::runtime_error(std::string("The CUDA kernels could not be launched: ") + error);
}

using WorkspaceBytes = int64_t(Operation, const AttentionParams&);
using Launch = const char*(Operation, const AttentionParams&, void*);

// <family>_workspace_bytes(operation, params) and <family>_launch(operation, params, stream).
template <WorkspaceBytes workspace_bytes, Launch launch>
void bind_family(py::module_& module, const std::string& family) {
  module.def((family + "_workspace_bytes").c_str(), [](Operation operation, const Held<AttentionParams>& params) {
    return workspace_bytes(operation, params);
  });
  module.def((family + "_launch").c_str(),
             [](Operation operation, const Held<AttentionParams>& params, uintptr_t stream) {
               raise_if(launch(operation, params, reinterpret_cast<void*>(stream)));
             });
}

// <name>(params, stream).
template <typename Params>
void bind_launch(py::module_& module, const char* name, const char* (*launch)(const Params&, void*)) {
  module.def(name, [launch](const Held<Params>& params, uintptr_t stream) {
    raise_if(launch(params, reinterpret_cast<void*>(stream)));
  });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "CUDA launchers of megatron_mtraining; see csrc/params.h.";
  module.attr("interface") = MTRAINING_INTERFACE;  // see megatron_mtraining/backends/cuda/interface.py
  module.attr("build") = MTRAINING_BUILD;          // compiler and targets; see setup.py
  field_bindings::bind<AttentionParams>(module, "AttentionParams");
  field_bindings::bind<DeltaParams>(module, "DeltaParams");
  probe_bindings::bind(module);
  py::enum_<Operation>(module, "Operation")
      .value("slash_forward", kSlashForward)
      .value("vertical_forward", kVerticalForward)
      .value("slash_backward", kSlashBackward)
      .value("vertical_backward", kVerticalBackward)
      .value("forward", kForward)
      .value("backward", kBackward)
      .value("list_forward", kListForward)
      .value("list_backward", kListBackward);
  bind_launch(module, "pack_vertical", pack_vertical);
  bind_launch(module, "unpack_vertical_grad", unpack_vertical_grad);
  bind_launch(module, "softmax_delta", softmax_delta);
  bind_launch(module, "fill_vertical_bitmask", fill_vertical_bitmask);
  bind_family<sm80_workspace_bytes, sm80_launch>(module, "sm80");
#ifdef MTRAINING_SM90
  bind_family<sm90_workspace_bytes, sm90_launch>(module, "sm90");
#endif
}
