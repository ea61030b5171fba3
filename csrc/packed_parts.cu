#include "check.cuh"
#include "lists.cuh"
#include "packed_parts.h"

namespace mtraining {
namespace {

constexpr int kThreads = 256;

// A thread sums four columns of one packed row, of key (blockIdx.y = 0) or of value.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ AttentionParams params, const PackedParts parts, int64_t floats) {
  const int chunks = params.head_dim / 4, heads = heads_per_list(params);
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x, entry = at / chunks;
  const int64_t packed = entry % params.max_vertical, list = entry / params.max_vertical;  // over rows and lists
  if (list >= int64_t{num_index_rows(params)} * params.num_lists) return;
  const int column = static_cast<int>(at % chunks) * 4;
  float4 sum = {0.f, 0.f, 0.f, 0.f};
  for (int head = 0; head < heads; ++head)
    for (int split = 0; split < parts.splits; ++split) {
      const int64_t row = (list * heads + head) * params.max_vertical + packed;
      const float4 part = *reinterpret_cast<const float4*>(parts.data + (2 * split + blockIdx.y) * floats +
                                                           row * params.head_dim + column);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
  const Rows& grad = blockIdx.y == 0 ? params.grad_packed_key : params.grad_packed_value;
  float* to = static_cast<float*>(grad.data) + list / params.num_lists * grad.stride_batch +
              list % params.num_lists * grad.stride_head + packed * grad.stride_seq + column;
  *reinterpret_cast<float4*>(to) = sum;
}

}  // namespace

int64_t part_floats(const AttentionParams& params) {
  return int64_t{num_index_rows(params)} * params.num_heads * params.max_vertical * params.head_dim;
}

bool needs_parts(const AttentionParams& params, int splits) { return splits > 1 || heads_per_list(params) > 1; }

AttentionParams into_parts(const AttentionParams& params, const PackedParts& parts) {
  AttentionParams changed = params;
  const int64_t head = int64_t{params.max_vertical} * params.head_dim;
  changed.grad_packed_key = {parts.data, params.num_heads * head, params.head_dim, head};
  changed.grad_packed_value = changed.grad_packed_key;
  changed.grad_packed_value.data = parts.data + part_floats(params);
  return changed;
}

const char* sum_packed_parts(const AttentionParams& params, const PackedParts& parts, cudaStream_t stream) {
  const int64_t threads =
      int64_t{num_index_rows(params)} * params.num_lists * params.max_vertical * (params.head_dim / 4);
  const dim3 grid(static_cast<unsigned>((threads + kThreads - 1) / kThreads), 2);
  if (grid.x == 0) return nullptr;
  sum_kernel<<<grid, kThreads, 0, stream>>>(params, parts, part_floats(params));
  return launch_error();
}

}  // namespace mtraining
