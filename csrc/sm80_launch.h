// The launchers that csrc/instantiations/sm80_* instantiate and sm80_launch.cu calls.
#pragma once
#include <cuda_runtime.h>

#include "params.h"

namespace mtraining::sm80 {

// The pairs that a launch computes: slash or vertical pairs of a vertical-slash index, or the pairs of block lists.
enum class Pass { kSlash, kVertical, kLists };

// Forward of one pass, over all query tiles of the call.
template <int kHeadDim, typename T>
const char* launch_forward(Pass pass, const AttentionParams& params, cudaStream_t stream);

// grad_query of one pass. lse_log2 [B, Hq, Sq]: lse in log2 units, +inf in rows without keys.
template <int kHeadDim, typename T>
const char* launch_backward_query(Pass pass, const AttentionParams& params, const float* lse_log2, cudaStream_t stream);

// grad_key and grad_value, or grad_packed_key and grad_packed_value of each query head, of one pass. The vertical pass
// splits the queries of a packed row into `splits` shares, whose results are split_stride floats apart.
template <int kHeadDim, typename T>
const char* launch_backward_key(Pass pass, const AttentionParams& params, const float* lse_log2, int splits,
                                int64_t split_stride, cudaStream_t stream);

}  // namespace mtraining::sm80
