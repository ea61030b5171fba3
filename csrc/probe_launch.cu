// The selection's entry: which kernel a pass takes, for which instantiation.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.cuh"
#include "probe_passes.h"

namespace mtraining {
namespace probe {
namespace {

const char* read_limits(int device, DeviceLimits& limits) {
  if (const char* error =
          describe(cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device)))
    return error;
  return describe(cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

template <typename T>
const char* scores(ProbePass pass, const ProbeParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  switch (params.head_dim) {
    case 64: return launch_scores<T, 64>(pass, params, limits, stream);
    case 96: return launch_scores<T, 96>(pass, params, limits, stream);
    case 128: return launch_scores<T, 128>(pass, params, limits, stream);
  }
  return "head_dim must be 64, 96 or 128";
}

}  // namespace
}  // namespace probe

const char* probe_launch(ProbePass pass, const ProbeParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (pass >= kProbeColumns) return probe::launch_choice(pass, params, cuda_stream);
  if (params.num_key_tiles == 0) return nullptr;
  probe::DeviceLimits limits;
  if (const char* error = probe::read_limits(params.device, limits)) return error;
  limits.shared_bytes -= 256;  // the kernels' static part
  return params.dtype == kBFloat16 ? probe::scores<__nv_bfloat16>(pass, params, limits, cuda_stream)
                                   : probe::scores<__half>(pass, params, limits, cuda_stream);
}

}  // namespace mtraining
