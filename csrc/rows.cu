// Row-wise work around the attention kernels: packing the vertical rows, bringing their gradients home, and delta.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.cuh"
#include "launch.h"
#include "walk.cuh"

namespace mtraining {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

// An element of the row of one (batch or index row, token, head).
template <typename T>
__device__ __forceinline__ T* element(const Rows& rows, int64_t batch, int64_t token, int64_t head, int column) {
  return static_cast<T*>(rows.data) + batch * rows.stride_batch + token * rows.stride_seq + head * rows.stride_head +
         column;
}

// A thread copies 16 bytes of a key row and of a value row.
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ AttentionParams params) {
  const int chunks = params.head_dim / 8;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int entry = static_cast<int>(at / chunks), column = static_cast<int>(at % chunks) * 8;
  if (entry >= params.max_vertical) return;
  const int head = blockIdx.y % params.num_heads, row = blockIdx.y / params.num_heads;
  uint4 key = {0, 0, 0, 0}, value = key;
  if (entry < *table_row(params.num_vertical, row, head)) {
    const int position = table_row(params.vertical, row, head)[entry];
    const int slot = position < params.num_blocks * kBlock ? params.key_slots[position / kBlock] : -1;
    const int64_t token = int64_t{slot} * kBlock + position % kBlock;
    if (slot >= 0 && token < params.seq_kv) {
      const int batch = params.num_documents > 1 ? 0 : row;
      const int kv_head = head / (params.num_heads / params.num_kv_heads);
      key = *reinterpret_cast<const uint4*>(element<const uint16_t>(params.key, batch, token, kv_head, column));
      value = *reinterpret_cast<const uint4*>(element<const uint16_t>(params.value, batch, token, kv_head, column));
    }
  }
  *reinterpret_cast<uint4*>(element<uint16_t>(params.packed_key, row, entry, head, column)) = key;
  *reinterpret_cast<uint4*>(element<uint16_t>(params.packed_value, row, entry, head, column)) = value;
}

// The place of `position` in an ascending list, or -1.
__device__ __forceinline__ int find(const int32_t* list, int count, int position) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list[middle] < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low < count && list[low] == position ? low : -1;
}

// Adds one row of a packed gradient to the row that it was packed from; a warp does it together.
__device__ __forceinline__ void add_row(float* to, const float* from, int head_dim) {
  for (int column = threadIdx.x % 32; column < head_dim; column += 32) to[column] += from[column];
}

// A CTA takes the rows of one key tile and key/value head. For each row, lane i looks it up among the verticals of the
// group's query head i; those that have it add their gradients in the order of heads, so the sum repeats bit for bit.
__global__ void __launch_bounds__(kThreads, 4) unpack_kernel(const __grid_constant__ AttentionParams params) {
  const Tile tile = params.key_tiles[blockIdx.x];
  const int batch = blockIdx.y / params.num_kv_heads, kv_head = blockIdx.y % params.num_kv_heads;
  const int group = params.num_heads / params.num_kv_heads, lane = threadIdx.x % 32;
  const int64_t index_row = tile.index_row + batch;
#pragma unroll 1
  for (int row = tile.row_begin + threadIdx.x / 32; row < tile.row_end; row += kWarps) {
    const int64_t token = int64_t{tile.slot} * kBlock + row;
    float* const key = element<float>(params.grad_key, batch, token, kv_head, 0);
    float* const value = element<float>(params.grad_value, batch, token, kv_head, 0);
#pragma unroll 1
    for (int first = kv_head * group; first < (kv_head + 1) * group; first += 32) {
      const int head = first + lane;
      int entry = -1;
      if (head < (kv_head + 1) * group)
        entry = find(table_row(params.vertical, index_row, head), *table_row(params.num_vertical, index_row, head),
                     tile.block * kBlock + row);
#pragma unroll 1
      for (unsigned found = __ballot_sync(~0u, entry >= 0); found; found &= found - 1) {
        const int member = __ffs(found) - 1, packed = __shfl_sync(~0u, entry, member);
        add_row(key, element<const float>(params.grad_packed_key, index_row, packed, first + member, 0),
                params.head_dim);
        add_row(value, element<const float>(params.grad_packed_value, index_row, packed, first + member, 0),
                params.head_dim);
      }
    }
  }
}

// A row of 8 * lanes elements or fewer goes to `lanes` neighbouring threads, 16 bytes of each input to a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaParams params, int lanes) {
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;  // over batch, token and head
  const bool exists = row < int64_t{params.batch} * params.seq * params.num_heads;
  const int lane = threadIdx.x % lanes, head = static_cast<int>(row % params.num_heads);
  const int64_t token = row / params.num_heads % params.seq, batch = row / params.num_heads / params.seq;
  float sum = 0.f;
  if (exists && 8 * lane < params.head_dim) {
    const uint4 out = *reinterpret_cast<const uint4*>(element<const T>(params.out, batch, token, head, 8 * lane));
    const uint4 grad = *reinterpret_cast<const uint4*>(element<const T>(params.grad_out, batch, token, head, 8 * lane));
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sum = fmaf(to_float(reinterpret_cast<const T*>(&out)[i]), to_float(reinterpret_cast<const T*>(&grad)[i]), sum);
  }
  for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (!exists || lane > 0) return;
  const RowScalars& grad_lse = params.grad_lse;
  if (grad_lse.data) sum -= grad_lse.data[batch * grad_lse.stride_batch + head * grad_lse.stride_head + token];
  params.delta.data[batch * params.delta.stride_batch + head * params.delta.stride_head + token] = sum;
}

unsigned ctas(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

}  // namespace

const char* pack_vertical(const AttentionParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  const int rows = params.num_documents > 1 ? params.num_documents : params.batch;
  const dim3 grid(ctas(int64_t{params.max_vertical} * (params.head_dim / 8)), rows * params.num_heads);
  pack_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return launch_error();
}

const char* unpack_vertical_grad(const AttentionParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  const dim3 grid(params.num_key_tiles, params.batch * params.num_kv_heads);
  unpack_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return launch_error();
}

const char* softmax_delta(const DeltaParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  const int lanes = params.head_dim <= 64 ? 8 : 16;
  const unsigned grid = ctas(int64_t{params.batch} * params.seq * params.num_heads * lanes);
  const auto kernel = params.dtype == kBFloat16 ? delta_kernel<__nv_bfloat16> : delta_kernel<__half>;
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params, lanes);
  return launch_error();
}

}  // namespace mtraining
