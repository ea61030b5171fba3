// Entry point of the mma.sync family: the kernels of an operation, in order, and dispatch to an instantiation.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "check.cuh"
#include "launch.h"
#include "lists.cuh"
#include "packed_parts.h"
#include "sm80_launch.h"
#include "sm80_mma.cuh"

namespace mtraining {
namespace sm80 {
namespace {

constexpr int kThreadsOfCopies = 256;

// CTAs of a vertical backward that fill a GPU and leave a short tail. The same on every GPU, so that the sums are too.
constexpr int64_t kWantedCtas = 1536;
constexpr int64_t kMostSplits = 8;

// Size of the lse of all queries, rounded up so that what follows is aligned.
int64_t lse_floats(const AttentionParams& params) {
  return (int64_t{params.batch} * params.num_heads * params.seq_q + 63) / 64 * 64;
}

int vertical_splits(const AttentionParams& params) {
  const int64_t ctas =
      std::max<int64_t>(1, int64_t{num_index_rows(params)} * params.num_heads * params.num_column_tiles);
  return static_cast<int>(std::clamp<int64_t>(kWantedCtas / ctas, 1, kMostSplits));
}

// lse in log2 units; +inf where it is -inf, so that P is zero in a row without keys.
__global__ void __launch_bounds__(kThreadsOfCopies)
    prepare_lse(const __grid_constant__ AttentionParams params, float* lse_log2) {
  const int token = blockIdx.x * kThreadsOfCopies + threadIdx.x;
  if (token >= params.seq_q) return;
  const int batch = blockIdx.y / params.num_heads, head = blockIdx.y % params.num_heads;
  const float lse = params.lse.data[batch * params.lse.stride_batch + head * params.lse.stride_head + token];
  lse_log2[int64_t{blockIdx.y} * params.seq_q + token] = lse == -INFINITY ? INFINITY : lse * kLog2E;
}

template <int kHeadDim, typename T>
const char* backward(Pass pass, const AttentionParams& params, cudaStream_t stream) {
  float* const lse_log2 = static_cast<float*>(params.workspace);
  const dim3 grid((params.seq_q + kThreadsOfCopies - 1) / kThreadsOfCopies, params.batch * params.num_heads);
  prepare_lse<<<grid, kThreadsOfCopies, 0, stream>>>(params, lse_log2);
  if (const char* error = launch_error()) return error;
  if (wants_grad_query(params))
    if (const char* error = launch_backward_query<kHeadDim, T>(pass, params, lse_log2, stream)) return error;
  if (!wants_grad_key(params)) return nullptr;
  const int splits = pass == Pass::kVertical ? vertical_splits(params) : 1;
  if (pass != Pass::kVertical || !needs_parts(params, splits))
    return launch_backward_key<kHeadDim, T>(pass, params, lse_log2, 1, 0, stream);
  const PackedParts parts = {lse_log2 + lse_floats(params), splits};
  if (const char* error = launch_backward_key<kHeadDim, T>(pass, into_parts(params, parts), lse_log2, splits,
                                                           2 * part_floats(params), stream))
    return error;
  return sum_packed_parts(params, parts, stream);
}

template <int kHeadDim, typename T>
const char* run(Operation operation, const AttentionParams& params, cudaStream_t stream) {
  switch (operation) {
    case kSlashForward: return launch_forward<kHeadDim, T>(Pass::kSlash, params, stream);
    case kVerticalForward: return launch_forward<kHeadDim, T>(Pass::kVertical, params, stream);
    case kListForward: return launch_forward<kHeadDim, T>(Pass::kLists, params, stream);
    case kSlashBackward: return backward<kHeadDim, T>(Pass::kSlash, params, stream);
    case kVerticalBackward: return backward<kHeadDim, T>(Pass::kVertical, params, stream);
    case kListBackward: return backward<kHeadDim, T>(Pass::kLists, params, stream);
    default: return "the mma.sync family makes the slash and the vertical pass one at a time";
  }
}

template <typename T>
const char* run(Operation operation, const AttentionParams& params, cudaStream_t stream) {
  switch (params.head_dim) {
    case 64: return run<64, T>(operation, params, stream);
    case 96: return run<96, T>(operation, params, stream);
    case 128: return run<128, T>(operation, params, stream);
  }
  return "head_dim must be 64, 96 or 128";
}

}  // namespace
}  // namespace sm80

int64_t sm80_workspace_bytes(Operation operation, const AttentionParams& params) {
  int64_t floats = 0;
  if (operation == kSlashBackward || operation == kVerticalBackward || operation == kListBackward)
    floats += sm80::lse_floats(params);
  if (operation == kVerticalBackward && wants_grad_key(params) && needs_parts(params, sm80::vertical_splits(params)))
    floats += 2 * sm80::vertical_splits(params) * part_floats(params);
  return floats * static_cast<int64_t>(sizeof(float));
}

const char* sm80_launch(Operation operation, const AttentionParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  if (params.num_query_tiles == 0) return nullptr;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return params.dtype == kBFloat16 ? sm80::run<__nv_bfloat16>(operation, params, cuda_stream)
                                   : sm80::run<__half>(operation, params, cuda_stream);
}

}  // namespace mtraining
