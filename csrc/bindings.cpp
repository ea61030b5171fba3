// The Python module megatron_mtraining.kernels._C: the params structs as objects with one property for each field,
// and the launchers. Addresses are Python integers; the caller keeps the tensors alive and checks their shapes.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "launch.h"
#include "probe_bindings.h"

namespace py = pybind11;
using namespace mtraining;

namespace {

template <typename Pointer>
Pointer as_pointer(uintptr_t address) {
  return reinterpret_cast<Pointer>(address);
}

// Set with (address, stride_batch, stride_seq, stride_head).
template <typename Params>
void rows(py::class_<Params>& cls, const char* name, Rows Params::*field) {
  cls.def_property(name, nullptr, [field](Params& params, std::tuple<uintptr_t, int64_t, int64_t, int64_t> v) {
    params.*field = {as_pointer<void*>(std::get<0>(v)), std::get<1>(v), std::get<2>(v), std::get<3>(v)};
  });
}

// Set with (address, stride_batch, stride_head).
template <typename Params>
void scalars(py::class_<Params>& cls, const char* name, RowScalars Params::*field) {
  cls.def_property(name, nullptr, [field](Params& params, std::tuple<uintptr_t, int64_t, int64_t> v) {
    params.*field = {as_pointer<float*>(std::get<0>(v)), std::get<1>(v), std::get<2>(v)};
  });
}

// Set with (address, stride_row, stride_list).
void table(py::class_<AttentionParams>& cls, const char* name, Table AttentionParams::*field) {
  cls.def_property(name, nullptr, [field](AttentionParams& params, std::tuple<uintptr_t, int64_t, int64_t> v) {
    params.*field = {as_pointer<const int32_t*>(std::get<0>(v)), std::get<1>(v), std::get<2>(v)};
  });
}

// Set with (starts, entries, row masks or 0, stride).
void lists(py::class_<AttentionParams>& cls, const char* name, BlockLists AttentionParams::*field) {
  using Value = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t>;
  cls.def_property(name, nullptr, [field](AttentionParams& params, Value v) {
    params.*field = {as_pointer<const int32_t*>(std::get<0>(v)), as_pointer<const int32_t*>(std::get<1>(v)),
                     as_pointer<const uint64_t*>(std::get<2>(v)), std::get<3>(v)};
  });
}

// Set with an address.
template <typename Pointer>
void pointer(py::class_<AttentionParams>& cls, const char* name, Pointer AttentionParams::*field) {
  cls.def_property(name, nullptr, [field](AttentionParams& params, uintptr_t address) {
    params.*field = as_pointer<Pointer>(address);
  });
}

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
    raise_if(launch(operation, params, as_pointer<void*>(stream)));
  });
}

void bind_params(py::module_& module) {
  using P = AttentionParams;
  py::class_<P> cls(module, "AttentionParams");
  cls.def(py::init<>());
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
    cls.def_readwrite(name, field);
  cls.def_readwrite("softmax_scale", &P::softmax_scale);
  for (auto [name, field] : {std::pair<const char*, Rows P::*>{"query", &P::query},
                             {"key", &P::key},
                             {"value", &P::value},
                             {"packed_key", &P::packed_key},
                             {"packed_value", &P::packed_value},
                             {"grad_out", &P::grad_out},
                             {"out", &P::out},
                             {"final_out", &P::final_out},
                             {"grad_query", &P::grad_query},
                             {"final_grad_query", &P::final_grad_query},
                             {"grad_key", &P::grad_key},
                             {"grad_value", &P::grad_value},
                             {"final_grad_key", &P::final_grad_key},
                             {"final_grad_value", &P::final_grad_value},
                             {"grad_packed_key", &P::grad_packed_key},
                             {"grad_packed_value", &P::grad_packed_value}})
    rows(cls, name, field);
  scalars(cls, "delta", &P::delta);
  scalars(cls, "lse", &P::lse);
  for (auto [name, field] : {std::pair<const char*, Table P::*>{"vertical", &P::vertical},
                             {"num_vertical", &P::num_vertical},
                             {"slash", &P::slash},
                             {"num_slash", &P::num_slash}})
    table(cls, name, field);
  lists(cls, "query_lists", &P::query_lists);
  lists(cls, "key_lists", &P::key_lists);
  pointer(cls, "query_tiles", &P::query_tiles);
  pointer(cls, "key_tiles", &P::key_tiles);
  pointer(cls, "query_slots", &P::query_slots);
  pointer(cls, "key_slots", &P::key_slots);
  pointer(cls, "document_tiles", &P::document_tiles);
  pointer(cls, "vertical_words", &P::vertical_words);
  pointer(cls, "workspace", &P::workspace);
}

void bind_delta_params(py::module_& module) {
  using P = DeltaParams;
  py::class_<P> cls(module, "DeltaParams");
  cls.def(py::init<>());
  for (auto [name, field] : {std::pair<const char*, int32_t P::*>{"device", &P::device},
                             {"dtype", &P::dtype},
                             {"batch", &P::batch},
                             {"seq", &P::seq},
                             {"num_heads", &P::num_heads},
                             {"head_dim", &P::head_dim}})
    cls.def_readwrite(name, field);
  rows(cls, "grad_out", &P::grad_out);
  rows(cls, "out", &P::out);
  scalars(cls, "grad_lse", &P::grad_lse);
  scalars(cls, "delta", &P::delta);
}

// <name>(params, stream).
template <typename Params>
void bind_launch(py::module_& module, const char* name, const char* (*launch)(const Params&, void*)) {
  module.def(name, [launch](const Params& params, uintptr_t stream) {
    raise_if(launch(params, as_pointer<void*>(stream)));
  });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "CUDA launchers of megatron_mtraining; see csrc/params.h.";
  module.attr("interface") = MTRAINING_INTERFACE;  // see megatron_mtraining/kernels/interface.py
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
