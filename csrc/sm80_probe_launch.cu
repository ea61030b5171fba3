// The selection's entry, and the passes over scores of the mma.sync family.
#include "check.cuh"
#include "probe_passes.h"

namespace mtraining {

const char* probe_launch(ProbePass pass, const ProbeParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  return probe::launch_choice(pass, params, static_cast<cudaStream_t>(stream));
}

const char* sm80_probe_launch(ProbePass pass, const ProbeParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  return probe::choose_instantiation(params, [&](auto type, auto head_dim) {
    return probe::launch_sm80_scores<decltype(type), head_dim.value>(pass, params, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace mtraining
