// What csrc/instantiations/*_probe_* and probe_choice.cu compile and the entries call.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "probe_launch.h"

namespace mtraining::probe {

// Mass is added up in integers, 2^54 for a probability of 1: sums over 2^8 heads fit.
constexpr float kMassScale = 18014398509481984.f;
constexpr double kMassUnit = 1. / 18014398509481984.;

// One of the passes over scores. `multiprocessors`: of the device.
template <typename T, int kHeadDim>
const char* launch_sm80_scores(ProbePass pass, const ProbeParams& params, cudaStream_t stream);
template <typename T, int kHeadDim>
const char* launch_sm90_scores(ProbePass pass, const ProbeParams& params, int multiprocessors, cudaStream_t stream);

// One of the passes beside them.
const char* launch_choice(ProbePass pass, const ProbeParams& params, cudaStream_t stream);

// Calls `launch` of the instantiation that the parameters ask for: launch(T(), integral_constant<int, head_dim>).
template <typename Launch>
const char* choose_instantiation(const ProbeParams& params, const Launch& launch) {
  const auto of_type = [&](auto type) -> const char* {
    switch (params.head_dim) {
      case 64: return launch(type, std::integral_constant<int, 64>());
      case 96: return launch(type, std::integral_constant<int, 96>());
      case 128: return launch(type, std::integral_constant<int, 128>());
    }
    return "head_dim must be 64, 96 or 128";
  };
  return params.dtype == kBFloat16 ? of_type(__nv_bfloat16()) : of_type(__half());
}

}  // namespace mtraining::probe
