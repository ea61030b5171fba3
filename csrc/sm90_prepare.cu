// Inputs of the Hopper kernels beside the caller's tensors: bitmaps of distances, and row statistics of a backward.
#include <cmath>

#include "sm90_prepare.h"

namespace mtraining::sm90 {
namespace {

constexpr int kPrepareThreads = 256;

// One CTA per (index row, list).
__global__ void __launch_bounds__(kPrepareThreads)
    distance_bits_kernel(const __grid_constant__ AttentionParams params, uint32_t* bits, int distance_bits_stride) {
  const int row = blockIdx.x / params.num_lists, list = blockIdx.x % params.num_lists;
  const int32_t* distances = table_row(params.slash, row, list);
  const int count = *table_row(params.num_slash, row, list);
  bits += static_cast<int64_t>(blockIdx.x) * distance_bits_stride;
  for (int i = threadIdx.x; i < distance_bits_stride; i += kPrepareThreads) bits[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kPrepareThreads)
    if (distances[i] < params.num_blocks) atomicOr(&bits[distances[i] / 32], 1u << (distances[i] % 32));
}

// One thread per row of a slot, including rows past the end: their lse of +inf makes P zero.
__global__ void __launch_bounds__(kPrepareThreads)
    statistics_kernel(const __grid_constant__ AttentionParams params, float* statistics, int64_t num_rows) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPrepareThreads + threadIdx.x;
  if (i >= num_rows) return;
  const int padded = (params.seq_q + kBlock - 1) / kBlock * kBlock, token = i % padded;
  const int64_t list = i / padded, batch = list / params.num_heads, head = list % params.num_heads;
  float lse = INFINITY, delta = 0.f;
  if (token < params.seq_q) {
    const float x = params.lse.data[batch * params.lse.stride_batch + head * params.lse.stride_head + token];
    if (x != -INFINITY) {
      lse = x * 1.4426950408889634f;
      delta = params.delta.data[batch * params.delta.stride_batch + head * params.delta.stride_head + token];
    }
  }
  float* slot = statistics + i / kBlock * (2 * kBlock) + i % kBlock;
  slot[0] = lse, slot[kBlock] = delta;
}

int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }
int64_t distance_bytes(const AttentionParams& params) {
  return align(static_cast<int64_t>(num_index_rows(params)) * params.num_lists * ((params.num_blocks + 31) / 32) * 4);
}
int64_t padded_rows(const AttentionParams& params) {
  return static_cast<int64_t>(params.batch) * params.num_heads * ((params.seq_q + kBlock - 1) / kBlock) * kBlock;
}

}  // namespace

int64_t workspace_bytes(const AttentionParams& params, bool backward) {
  return 256 + distance_bytes(params) + (backward ? align(padded_rows(params) * 8) : 0);
}

void partition_workspace(KernelArguments& args) {
  auto* base = static_cast<uint8_t*>(args.params.workspace);
  args.counter = reinterpret_cast<int*>(base);
  args.distance_bits_stride = (args.params.num_blocks + 31) / 32;
  args.distance_bits = reinterpret_cast<uint32_t*>(base + 256);
  args.statistics = reinterpret_cast<float*>(base + 256 + distance_bytes(args.params));
}

void fill_distance_bits(const KernelArguments& args, cudaStream_t stream) {
  const int lists = num_index_rows(args.params) * args.params.num_lists;
  distance_bits_kernel<<<lists, kPrepareThreads, 0, stream>>>(args.params, const_cast<uint32_t*>(args.distance_bits),
                                                              args.distance_bits_stride);
}

void fill_statistics(const KernelArguments& args, cudaStream_t stream) {
  const int64_t rows = padded_rows(args.params);
  statistics_kernel<<<(rows + kPrepareThreads - 1) / kPrepareThreads, kPrepareThreads, 0, stream>>>(
      args.params, const_cast<float*>(args.statistics), rows);
}

}  // namespace mtraining::sm90
