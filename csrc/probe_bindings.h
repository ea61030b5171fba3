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

inline void bind_params(py::module_& module) {
  field_bindings::Fields<P> fields;
  for (auto [name, field] : {std::pair<const char*, int32_t P::*>{"device", &P::device},
                             {"dtype", &P::dtype},
                             {"head_dim", &P::head_dim},
                             {"batch", &P::batch},
                             {"num_heads", &P::num_heads},
                             {"num_kv_heads", &P::num_kv_heads},
                             {"num_probe_rows", &P::num_probe_rows},
                             {"num_keys", &P::num_keys},
                             {"num_documents", &P::num_documents},
                             {"num_key_tiles", &P::num_key_tiles},
                             {"most_row_tiles", &P::most_row_tiles},
                             {"most_key_tiles", &P::most_key_tiles},
                             {"most_blocks", &P::most_blocks},
                             {"num_splits", &P::num_splits},
                             {"mass_blocks", &P::mass_blocks},
                             {"num_halves", &P::num_halves},
                             {"order_blocks", &P::order_blocks},
                             {"first_head", &P::first_head},
                             {"end_head", &P::end_head},
                             {"heads_per_list", &P::heads_per_list},
                             {"num_ranks", &P::num_ranks},
                             {"lists_per_rank", &P::lists_per_rank},
                             {"num_ranked", &P::num_ranked},
                             {"sink_tokens", &P::sink_tokens},
                             {"local_blocks", &P::local_blocks},
                             {"budget", &P::budget},
                             {"max_vertical", &P::max_vertical},
                             {"max_slash", &P::max_slash},
                             {"slash_run_length", &P::slash_run_length},
                             {"seq_len", &P::seq_len},
                             {"num_blocks", &P::num_blocks},
                             {"vertical_width", &P::vertical_width},
                             {"slash_width", &P::slash_width}})
    fields.number(name, field);
  fields.number("softmax_scale", &P::softmax_scale);
  fields.number("vertical_top_p", &P::vertical_top_p);
  fields.number("slash_top_p", &P::slash_top_p);
  fields.number("give_up", &P::give_up);
  fields.number("dense_above", &P::dense_above);
  fields.number("list_stride_document", &P::list_stride_document);
  fields.number("list_stride", &P::list_stride);
  fields.number("rate_stride_document", &P::rate_stride_document);
  fields.number("rate_stride", &P::rate_stride);
  fields.number("pair_stride_document", &P::pair_stride_document);
  fields.rows("probe", &P::probe);
  fields.rows("key", &P::key);
  fields.pointer("part_exponents", &P::part_exponents);
  fields.pointer("part_sums", &P::part_sums);
  fields.pointer("exponents", &P::exponents);
  fields.pointer("sums", &P::sums);
  fields.pointer("weights", &P::weights);
  fields.pointer("mass", &P::mass);
  fields.pointer("column_choices", &P::column_choices);
  fields.pointer("verticals", &P::verticals);
  fields.pointer("thresholds", &P::thresholds);
  fields.pointer("remaining", &P::remaining);
  fields.pointer("distance_sums", &P::distance_sums);
  fields.pointer("lists", &P::lists);
  fields.pointer("rates", &P::rates);
  fields.pointer("pairs", &P::pairs);
  fields.pointer("documents", &P::documents);
  fields.pointer("row_tiles", &P::row_tiles);
  fields.pointer("key_tiles", &P::key_tiles);
  fields.pointer("positions", &P::positions);
  fields.pointer("unit_blocks", &P::unit_blocks);
  fields.pointer("block_order", &P::block_order);
  fields.pointer("visible_rows", &P::visible_rows);
  field_bindings::bind(module, "ProbeParams", fields);
}

inline void bind_launch(py::module_& module, const char* name, const char* (*launch)(ProbePass, const P&, void*)) {
  module.def(name, [launch](ProbePass pass, const P& params, uintptr_t stream) {
    if (const char* error = launch(pass, params, reinterpret_cast<void*>(stream)))
      throw std::runtime_error(std::string("The CUDA kernels could not be launched: ") + error);
  });
}

// Adds ProbeParams, ProbePass, and for each launcher of probe_launch.h its name(pass, params, stream).
inline void bind(py::module_& module) {
  bind_params(module);
  py::enum_<ProbePass>(module, "ProbePass")
      .value("sums", kProbeSums)
      .value("merge", kProbeMerge)
      .value("weights", kProbeWeights)
      .value("mass", kProbeMass)
      .value("mass_and_distances", kProbeMassAndDistances)
      .value("verticals", kProbeVerticals)
      .value("remaining", kProbeRemaining)
      .value("distances", kProbeDistances)
      .value("slashes", kProbeSlashes);
  bind_launch(module, "probe_launch", probe_launch);
  bind_launch(module, "sm80_probe_launch", sm80_probe_launch);
#ifdef MTRAINING_SM90
  bind_launch(module, "sm90_probe_launch", sm90_probe_launch);
#endif
}

}  // namespace mtraining::probe_bindings
