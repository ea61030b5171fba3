// The selection's part of the Python module, for bindings.cpp alone.
#pragma once
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "probe_launch.h"

namespace mtraining::probe_bindings {

namespace py = pybind11;
using P = ProbeParams;

// Set with (address, stride_batch, stride_seq, stride_head).
inline void rows(py::class_<P>& cls, const char* name, Rows P::*field) {
  cls.def_property(name, nullptr, [field](P& params, std::tuple<uintptr_t, int64_t, int64_t, int64_t> v) {
    params.*field = {reinterpret_cast<void*>(std::get<0>(v)), std::get<1>(v), std::get<2>(v), std::get<3>(v)};
  });
}

// Set with an address.
template <typename Pointer>
void pointer(py::class_<P>& cls, const char* name, Pointer P::*field) {
  cls.def_property(name, nullptr,
                   [field](P& params, uintptr_t address) { params.*field = reinterpret_cast<Pointer>(address); });
}

inline void bind_params(py::module_& module) {
  py::class_<P> cls(module, "ProbeParams");
  cls.def(py::init<>());
  for (auto [name, field] : {std::pair<const char*, int32_t P::*>{"device", &P::device},
                             {"dtype", &P::dtype},
                             {"head_dim", &P::head_dim},
                             {"num_heads", &P::num_heads},
                             {"num_kv_heads", &P::num_kv_heads},
                             {"num_probe_rows", &P::num_probe_rows},
                             {"num_documents", &P::num_documents},
                             {"num_key_tiles", &P::num_key_tiles},
                             {"most_row_tiles", &P::most_row_tiles},
                             {"most_blocks", &P::most_blocks},
                             {"mass_blocks", &P::mass_blocks},
                             {"order_blocks", &P::order_blocks},
                             {"first_lane", &P::first_lane},
                             {"end_lane", &P::end_lane},
                             {"heads_per_list", &P::heads_per_list},
                             {"num_ranks", &P::num_ranks},
                             {"lists_per_rank", &P::lists_per_rank},
                             {"num_ranked", &P::num_ranked},
                             {"sink_tokens", &P::sink_tokens},
                             {"local_blocks", &P::local_blocks},
                             {"max_vertical", &P::max_vertical},
                             {"max_slash", &P::max_slash},
                             {"slash_run_length", &P::slash_run_length},
                             {"seq_len", &P::seq_len},
                             {"num_blocks", &P::num_blocks},
                             {"vertical_width", &P::vertical_width},
                             {"slash_width", &P::slash_width}})
    cls.def_readwrite(name, field);
  cls.def_readwrite("softmax_scale", &P::softmax_scale);
  cls.def_readwrite("vertical_top_p", &P::vertical_top_p);
  cls.def_readwrite("slash_top_p", &P::slash_top_p);
  cls.def_readwrite("list_stride_document", &P::list_stride_document);
  cls.def_readwrite("list_stride_lane", &P::list_stride_lane);
  rows(cls, "probe", &P::probe);
  rows(cls, "key", &P::key);
  pointer(cls, "maximum", &P::maximum);
  pointer(cls, "total", &P::total);
  pointer(cls, "mass", &P::mass);
  pointer(cls, "columns", &P::columns);
  pointer(cls, "distances", &P::distances);
  pointer(cls, "verticals", &P::verticals);
  pointer(cls, "lists", &P::lists);
  pointer(cls, "documents", &P::documents);
  pointer(cls, "row_tiles", &P::row_tiles);
  pointer(cls, "key_tiles", &P::key_tiles);
  pointer(cls, "positions", &P::positions);
  pointer(cls, "group_blocks", &P::group_blocks);
  pointer(cls, "block_order", &P::block_order);
}

// Adds ProbeParams, ProbePass and probe_launch(pass, params, stream).
inline void bind(py::module_& module) {
  bind_params(module);
  py::enum_<ProbePass>(module, "ProbePass")
      .value("maximum", kProbeMaximum)
      .value("total", kProbeTotal)
      .value("mass", kProbeMass)
      .value("columns", kProbeColumns)
      .value("verticals", kProbeVerticals)
      .value("distances", kProbeDistances)
      .value("slashes", kProbeSlashes);
  module.def("probe_launch", [](ProbePass pass, const P& params, uintptr_t stream) {
    if (const char* error = probe_launch(pass, params, reinterpret_cast<void*>(stream)))
      throw std::runtime_error(std::string("The CUDA kernels could not be launched: ") + error);
  });
}

}  // namespace mtraining::probe_bindings
