// Row-wise kernels around the attention kernels: packing of the vertical rows, unpacking of their gradients, and delta.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "check.cuh"
#include "launch.h"
#include "lists.cuh"

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
  const int list = blockIdx.y % params.num_lists, row = blockIdx.y / params.num_lists;
  uint4 key = {0, 0, 0, 0}, value = key;
  if (entry < *table_row(params.num_vertical, row, list)) {
    const int position = table_row(params.vertical, row, list)[entry];
    const int slot = position < params.num_blocks * kBlock ? params.key_slots[position / kBlock] : -1;
    const int64_t token = int64_t{slot} * kBlock + position % kBlock;
    if (slot >= 0 && token < params.seq_kv) {
      const int batch = params.num_documents > 1 ? 0 : row;
      const int kv_head = list / (params.num_lists / params.num_kv_heads);
      key = *reinterpret_cast<const uint4*>(element<const uint16_t>(params.key, batch, token, kv_head, column));
      value = *reinterpret_cast<const uint4*>(element<const uint16_t>(params.value, batch, token, kv_head, column));
    }
  }
  *reinterpret_cast<uint4*>(element<uint16_t>(params.packed_key, row, entry, list, column)) = key;
  *reinterpret_cast<uint4*>(element<uint16_t>(params.packed_value, row, entry, list, column)) = value;
}

// Index of the first entry of an ascending list that is not less than `position`.
__device__ __forceinline__ int lower_bound(const int32_t* list, int count, int position) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list[middle] < position)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ void add(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

template <typename T>
__device__ __forceinline__ uint2 four(const float4& x) {
  const T rounded[4] = {T(x.x), T(x.y), T(x.z), T(x.w)};
  return *reinterpret_cast<const uint2*>(rounded);
}

// A CTA processes the rows of one key tile and key/value head. It first finds, for each list of the group and each row,
// the packed column of the row, if any. Then a warp sums a row at a time, four columns per lane: the row's own gradient
// and those of its packed copies, in the order of lists, so the sum repeats bit for bit.
template <typename T>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ int32_t packed_of[];  // [group, 64]
  const Tile tile = params.key_tiles[blockIdx.x];
  const int batch = blockIdx.y / params.num_kv_heads, kv_head = blockIdx.y % params.num_kv_heads;
  const int group = params.num_lists / params.num_kv_heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t index_row = tile.index_row + batch;
  for (int i = threadIdx.x; i < group * kBlock; i += kThreads) packed_of[i] = -1;
  __syncthreads();
  const int first = tile.block * kBlock;
  for (int member = warp; member < group; member += kWarps) {
    const int list = kv_head * group + member;
    const int32_t* const positions = table_row(params.vertical, index_row, list);
    const int count = *table_row(params.num_vertical, index_row, list);
    for (int i = lower_bound(positions, count, first) + lane; i < count && positions[i] < first + kBlock; i += 32)
      packed_of[member * kBlock + positions[i] - first] = i;
  }
  __syncthreads();
  const int column = 4 * lane;
  if (column >= params.head_dim) return;
  const auto at = [&](const Rows& rows, int64_t token) {
    return reinterpret_cast<const float4*>(element<const float>(rows, batch, token, kv_head, column));
  };
  const auto packed_at = [&](const Rows& rows, int packed, int list) {
    return *reinterpret_cast<const float4*>(element<const float>(rows, index_row, packed, list, column));
  };
#pragma unroll 2
  for (int row = tile.row_begin + warp; row < tile.row_end; row += kWarps) {
    const int64_t token = int64_t{tile.slot} * kBlock + row;
    float4 key = *at(params.grad_key, token), value = *at(params.grad_value, token);
    for (int member = 0; member < group; ++member) {
      const int packed = packed_of[member * kBlock + row];
      if (packed < 0) continue;
      add(key, packed_at(params.grad_packed_key, packed, kv_head * group + member));
      add(value, packed_at(params.grad_packed_value, packed, kv_head * group + member));
    }
    *reinterpret_cast<uint2*>(element<T>(params.final_grad_key, batch, token, kv_head, column)) = four<T>(key);
    *reinterpret_cast<uint2*>(element<T>(params.final_grad_value, batch, token, kv_head, column)) = four<T>(value);
  }
}

constexpr int kDeltaTokens = 16;  // tokens of one head per warp

// kLanes neighbouring threads process a row of up to 8 * kLanes elements, 16 bytes of each input per thread.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ DeltaParams params) {
  constexpr int kRowsAtOnce = 32 / kLanes;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;  // over batch, 16 tokens, and head
  const int64_t shares = (params.seq + kDeltaTokens - 1) / kDeltaTokens;
  const int head = static_cast<int>(warp % params.num_heads);
  const int64_t share = warp / params.num_heads % shares, batch = warp / params.num_heads / shares;
  if (batch >= params.batch) return;
  const int lane = threadIdx.x % kLanes, row = threadIdx.x % 32 / kLanes;
  const int64_t first = share * kDeltaTokens + row;
  float delta = 0.f;  // of token first + lane * kRowsAtOnce
#pragma unroll 4
  for (int i = 0; i < kDeltaTokens / kRowsAtOnce; ++i) {
    const int64_t token = first + i * kRowsAtOnce;
    float sum = 0.f;
    if (token < params.seq && 8 * lane < params.head_dim) {
      const uint4 out = *reinterpret_cast<const uint4*>(element<const T>(params.out, batch, token, head, 8 * lane));
      const uint4 grad =
          *reinterpret_cast<const uint4*>(element<const T>(params.grad_out, batch, token, head, 8 * lane));
#pragma unroll
      for (int j = 0; j < 8; ++j)
        sum = fmaf(to_float(reinterpret_cast<const T*>(&out)[j]), to_float(reinterpret_cast<const T*>(&grad)[j]), sum);
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == i) delta = sum;
  }
  const int64_t token = first + lane * kRowsAtOnce;
  if (lane >= kDeltaTokens / kRowsAtOnce || token >= params.seq) return;
  const RowScalars& grad_lse = params.grad_lse;
  if (grad_lse.data) delta -= grad_lse.data[batch * grad_lse.stride_batch + head * grad_lse.stride_head + token];
  params.delta.data[batch * params.delta.stride_batch + head * params.delta.stride_head + token] = delta;
}

template <typename T>
void launch_delta(const DeltaParams& params, cudaStream_t stream) {
  const int64_t warps = int64_t{params.batch} * params.num_heads * ((params.seq + kDeltaTokens - 1) / kDeltaTokens);
  const auto kernel = params.head_dim <= 64 ? delta_kernel<T, 8> : delta_kernel<T, 16>;
  kernel<<<static_cast<unsigned>((warps + kWarps - 1) / kWarps), kThreads, 0, stream>>>(params);
}

unsigned ctas(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }

}  // namespace

const char* pack_vertical(const AttentionParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  const dim3 grid(ctas(int64_t{params.max_vertical} * (params.head_dim / 8)),
                  num_index_rows(params) * params.num_lists);
  pack_kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return launch_error();
}

const char* unpack_vertical_grad(const AttentionParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  const int table_bytes = params.num_lists / params.num_kv_heads * kBlock * static_cast<int>(sizeof(int32_t));
  if (table_bytes > 48 * 1024) return "more than 192 lists cannot share a key/value head";
  const dim3 grid(params.num_key_tiles, params.batch * params.num_kv_heads);
  const auto kernel = params.dtype == kBFloat16 ? unpack_kernel<__nv_bfloat16> : unpack_kernel<__half>;
  kernel<<<grid, kThreads, table_bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return launch_error();
}

const char* softmax_delta(const DeltaParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  if (params.dtype == kBFloat16)
    launch_delta<__nv_bfloat16>(params, static_cast<cudaStream_t>(stream));
  else
    launch_delta<__half>(params, static_cast<cudaStream_t>(stream));
  return launch_error();
}

}  // namespace mtraining
