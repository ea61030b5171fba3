// What csrc/instantiations/sm80_* compile and sm80_launch.cu calls.
#pragma once
#include <cuda_runtime.h>

#include "params.h"

namespace mtraining::sm80 {

// Where a vertical backward that is split over query tiles leaves its parts: float32 [splits, 2, R * Hq, V, D], keys
// first.
struct VerticalParts {
  float* data;
  int splits;  // 1: no parts, the sums go to the gradients directly
};

// Forward of one pass, over all query tiles of the call.
template <int kHeadDim, typename T>
const char* launch_forward(bool vertical, const AttentionParams& params, cudaStream_t stream);

// grad_query of one pass. lse_log2 [B, Hq, Sq]: lse in log2 units, +inf in rows without keys.
template <int kHeadDim, typename T>
const char* launch_backward_query(bool vertical, const AttentionParams& params, const float* lse_log2,
                                  cudaStream_t stream);

// grad_key and grad_value, or grad_packed_key and grad_packed_value, of one pass.
template <int kHeadDim, typename T>
const char* launch_backward_key(bool vertical, const AttentionParams& params, const float* lse_log2,
                                const VerticalParts& parts, cudaStream_t stream);

}  // namespace mtraining::sm80
