// The selection's passes over scores of the Hopper family: the choice of the instantiation.
#include "check.cuh"
#include "probe_passes.h"

namespace mtraining {

const char* sm90_probe_launch(ProbePass pass, const ProbeParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  int multiprocessors;
  if (const char* error =
          describe(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device)))
    return error;
  return probe::choose_instantiation(params, [&](auto type, auto head_dim) {
    return probe::launch_sm90_scores<decltype(type), head_dim.value>(pass, params, multiprocessors,
                                                                     static_cast<cudaStream_t>(stream));
  });
}

}  // namespace mtraining
