// The Python module megatron_mtraining.backends.cuda._C: the params structs, made from tensors and numbers by the names of
// their fields, and the launchers.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "field_bindings.h"
#include "launch.h"
#include "probe_bindings.h"

namespace py = pybind11;
using namespace mtraining;

namespace {

void raise_if(const char* error) {
  if (error) throw std::runtime_error(std::string("The CUDA kernels could not be launched: ") + error);
}

using WorkspaceBytes = int64_t(Operation, const AttentionParams&);
using Launch = const char*(Operation, const AttentionParams&, void*);

// <family>_workspace_bytes(operation, params) and <family>_launch(operation, params, stream).
template <WorkspaceBytes workspace_bytes, Launch launch>
void bind_family(py::module_& module, const std::string& family) {
  module.def((family + "_workspace_bytes").c_str(), workspace_bytes);
  module.def((family + "_launch").c_str(), [](Operation operation, const AttentionParams& params, uintptr_t stream) {
    raise_if(launch(operation, params, reinterpret_cast<void*>(stream)));
  });
}

void bind_params(py::module_& module) {
  using P = AttentionParams;
  field_bindings::Fields<P> fields;
  for (auto [name, field] : {std::pair<const char*, int32_t P::*>{"device", &P::device},
                             {"dtype", &P::dtype},
                             {"head_dim", &P::head_dim},
                             {"batch", &P::batch},
                             {"seq_q", &P::seq_q},
                             {"seq_kv", &P::seq_kv},
                             {"num_heads", &P::num_heads},
                             {"num_kv_heads", &P::num_kv_heads},
                             {"num_lists", &P::num_lists},
                             {"num_blocks", &P::num_blocks},
                             {"num_documents", &P::num_documents},
                             {"num_query_tiles", &P::num_query_tiles},
                             {"num_key_tiles", &P::num_key_tiles},
                             {"max_vertical", &P::max_vertical},
                             {"num_words", &P::num_words},
                             {"chunk_blocks", &P::chunk_blocks},
                             {"resume", &P::resume}})
    fields.number(name, field);
  fields.number("softmax_scale", &P::softmax_scale);
  for (auto [name, field] : {std::pair<const char*, Rows P::*>{"query", &P::query},
                             {"key", &P::key},
                             {"value", &P::value},
                             {"grad_out", &P::grad_out},
                             {"out", &P::out},
                             {"final_out", &P::final_out},
                             {"grad_query", &P::grad_query},
                             {"final_grad_query", &P::final_grad_query}})
    fields.rows(name, field);
  fields.rows_of_both("grad_keys", &P::grad_key, &P::grad_value);
  fields.rows_of_both("final_grad_keys", &P::final_grad_key, &P::final_grad_value);
  fields.packed_of_both("packed", &P::packed_key, &P::packed_value);
  fields.packed_of_both("grad_packed", &P::grad_packed_key, &P::grad_packed_value);
  fields.scalars("delta", &P::delta);
  fields.scalars("lse", &P::lse);
  for (auto [name, field] : {std::pair<const char*, Table P::*>{"vertical", &P::vertical},
                             {"num_vertical", &P::num_vertical},
                             {"slash", &P::slash},
                             {"num_slash", &P::num_slash}})
    fields.table(name, field);
  fields.lists("query_lists", &P::query_lists);
  fields.lists("key_lists", &P::key_lists);
  fields.pointer("query_tiles", &P::query_tiles);
  fields.pointer("key_tiles", &P::key_tiles);
  fields.pointer("query_slots", &P::query_slots);
  fields.pointer("key_slots", &P::key_slots);
  fields.pointer("document_tiles", &P::document_tiles);
  fields.pointer("vertical_words", &P::vertical_words);
  fields.pointer("workspace", &P::workspace);
  field_bindings::bind(module, "AttentionParams", fields);
}

void bind_delta_params(py::module_& module) {
  using P = DeltaParams;
  field_bindings::Fields<P> fields;
  for (auto [name, field] : {std::pair<const char*, int32_t P::*>{"device", &P::device},
                             {"dtype", &P::dtype},
                             {"batch", &P::batch},
                             {"seq", &P::seq},
                             {"num_heads", &P::num_heads},
                             {"head_dim", &P::head_dim}})
    fields.number(name, field);
  fields.rows("grad_out", &P::grad_out);
  fields.rows("out", &P::out);
  fields.scalars("grad_lse", &P::grad_lse);
  fields.scalars("delta", &P::delta);
  field_bindings::bind(module, "DeltaParams", fields);
}

// <name>(params, stream).
template <typename Params>
void bind_launch(py::module_& module, const char* name, const char* (*launch)(const Params&, void*)) {
  module.def(name, [launch](const Params& params, uintptr_t stream) {
    raise_if(launch(params, reinterpret_cast<void*>(stream)));
  });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "CUDA launchers of megatron_mtraining; see csrc/params.h.";
  module.attr("interface") = MTRAINING_INTERFACE;  // see megatron_mtraining/backends/cuda/interface.py
  module.attr("build") = MTRAINING_BUILD;  // what it was built with and for; see setup.py
  bind_params(module);
  bind_delta_params(module);
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
  bind_launch(module, "fill_vertical_words", fill_vertical_words);
  bind_family<sm80_workspace_bytes, sm80_launch>(module, "sm80");
#ifdef MTRAINING_SM90
  bind_family<sm90_workspace_bytes, sm90_launch>(module, "sm90");
#endif
}
