// The mass that chosen columns have at each distance, for both families: what the distances lose to them.
//
// A CTA copies the keys of 64 chosen columns of a list beside each other, and multiplies the document's row tiles of a
// head with them. What the rows of a unit give to a column is summed in float32 in a fixed order and rounded once, so
// that it does not depend on which columns stand beside each other.
#pragma once
#include <climits>

#include "check.cuh"
#include "probe_scores.cuh"
#include "sm80_mma.cuh"

namespace mtraining::probe {

constexpr int kColumnThreads = 128;
constexpr int kNoColumn = INT_MAX / 4;  // block of a column that is none: after every row

// Starts the copy of 64 rows, source(row) each.
template <typename Product, typename Source>
__device__ __forceinline__ void copy_rows(uint32_t to, const Source& source) {
  constexpr int kChunks = Product::kSize / 8, kSideBySide = kChunks == 12 ? 4 : kChunks;
#pragma unroll
  for (int i = 0; i < kBlock * kSideBySide / kColumnThreads; ++i) {
    const int row = i * (kColumnThreads / kSideBySide) + threadIdx.x / kSideBySide;
    const typename Product::Value* const from = source(row);
#pragma unroll
    for (int c = 0; c < kChunks; c += kSideBySide) {
      const int chunk = c + threadIdx.x % kSideBySide;
      sm80::copy_async_16(to + Product::offset(row, chunk), from + chunk * 8, true);
    }
  }
}

// Adds the mass between the warp's units and 64 columns, whose blocks are `blocks`, to the list's runs of distances.
__device__ __forceinline__ void take_columns(const ProbeParams& params, const ProbeDocument& document, int list,
                                             const float (&s)[32], const ThreadRows& rows, const int (&blocks)[kBlock],
                                             float scale_log2) {
  const int lane = threadIdx.x % 32;
  float mass[32];  // of row r and the thread's i-th column at 16 * r + i
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 16; ++i)
      mass[16 * r + i] = exp2_approx(fmaf(s[4 * (i / 2) + 2 * r + i % 2], scale_log2, rows.shift[r])) * rows.weight[r];
  halve<32>(mass, 16);
  halve<16>(mass, 8);
  halve<8>(mass, 4);
  const int first = (lane & 8 ? 32 : 0) + (lane & 4 ? 16 : 0) + lane % 4 * 2;
  const int unit_block = lane & 16 ? rows.block[1] : rows.block[0];
  int run = -1;  // of which the thread has `sum`: columns of one block are often neighbours
  long long sum = 0;
  const auto add = [&] {
    if (sum > 0) add_to_distance(params, document, list, run, sum);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int between = unit_block - blocks[first + i / 2 * 8 + i % 2];
    if (between < params.local_blocks || !(mass[i] > 0.f)) continue;  // nor what is no number
    const int next = (between - params.local_blocks) / params.slash_run_length;
    if (next != run) {
      add();
      run = next, sum = 0;
    }
    sum += __float2ll_rn(mass[i] * kMassScale);
  }
  add();
}

// Product: the layout of 64 rows in shared memory, and multiply(s, rows, keys). Grid: CTAs for the columns of a list;
// heads of the launch; documents.
template <typename Product>
__global__ void __launch_bounds__(kColumnThreads, 4) columns_kernel(const __grid_constant__ ProbeParams params) {
  using T = typename Product::Value;
  extern __shared__ uint8_t shared[];
  __shared__ int blocks[kBlock];
  const int list = blockIdx.y / params.heads_per_list, head = params.first_head + blockIdx.y;
  const int64_t of_list = int64_t{list} * params.num_documents + blockIdx.z;
  const int count = __shfl_sync(~0u, params.num_chosen[of_list], 0);
  const int2* const chosen = reinterpret_cast<const int2*>(params.chosen) + of_list * params.chosen_width;
  const uint32_t keys = smem_address(shared) + (-smem_address(shared) & (Product::kAlignment - 1));
  const ProbeDocument& document = params.documents[blockIdx.z];
  const int batch = head / params.num_heads, of_batch = head % params.num_heads;
  const T* const key = static_cast<const T*>(params.key.data) + batch * params.key.stride_batch +
                       of_batch / (params.num_heads / params.num_kv_heads) * params.key.stride_head;
  const T* const probe = static_cast<const T*>(params.probe.data) + batch * params.probe.stride_batch +
                         of_batch * params.probe.stride_head;
  const int row = threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
  const float scale_log2 = params.softmax_scale * kLog2E;
  const int end = __shfl_sync(~0u, document.first_row_tile + document.num_row_tiles, 0);
#pragma unroll 1
  for (int from = blockIdx.x * kBlock; from < count; from += gridDim.x * kBlock) {
    const auto column = [&](int i) { return chosen[min(from + i, count - 1)]; };
    const auto copy_row_tile = [&](int tile, int stage) {
      copy_rows<Product>(keys + (1 + stage) * Product::kBytes,
                         [&](int i) { return probe + (int64_t{tile} * kTileRows + i) * params.probe.stride_seq; });
    };
    const int lane = threadIdx.x % 32;
    const int first_block = __reduce_min_sync(~0u, min(column(lane).y, column(lane + 32).y));
    // The first row tiles may have nothing to do with blocks that come late.
    int first = document.first_row_tile;
    while (first < end && last_key_block<kProbeColumns>(params, params.row_tiles[first]) < first_block) ++first;
    first = __shfl_sync(~0u, first, 0);
    if (first == end) continue;
    __syncthreads();  // the tiles before have been read
    copy_rows<Product>(keys, [&](int i) { return key + int64_t{column(i).x} * params.key.stride_seq; });
    copy_row_tile(first, 0);
    sm80::copy_async_commit();
    const int i = threadIdx.x;
    if (i < kBlock) blocks[i] = from + i < count ? column(i).y : kNoColumn;
#pragma unroll 1
    for (int tile = first, stage = 0; tile < end; ++tile, stage ^= 1) {
      const ThreadRows rows = thread_rows<kProbeColumns>(params, head, tile, row);
      sm80::copy_async_wait_all();
      Product::publish();
      __syncthreads();
      if (tile + 1 < end) copy_row_tile(tile + 1, stage ^ 1);
      sm80::copy_async_commit();
      float s[32];
      Product::multiply(s, keys + (1 + stage) * Product::kBytes, keys);
      if (warp_chooses(params, rows, first_block)) take_columns(params, document, list, s, rows, blocks, scale_log2);
    }
  }
}

// As many CTAs as fill the GPU several times, and no more than there may be tiles of columns.
template <typename Product>
const char* launch_columns(const ProbeParams& params, cudaStream_t stream) {
  if (params.chosen_width == 0) return nullptr;
  constexpr int kBytes = 3 * Product::kBytes + Product::kAlignment;
  constexpr int kCtasOfMultiprocessor = 16;
  const auto kernel = columns_kernel<Product>;
  if (const char* error = describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  int multiprocessors;
  if (const char* error =
          describe(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device)))
    return error;
  const auto divide = [](int a, int b) { return (a + b - 1) / b; };
  const int heads = params.end_head - params.first_head;
  const int wanted = divide(kCtasOfMultiprocessor * multiprocessors, heads * params.num_documents);
  const int tiles = divide(params.chosen_width, kBlock);
  kernel<<<dim3(tiles < wanted ? tiles : wanted, heads, params.num_documents), kColumnThreads, kBytes, stream>>>(
      params);
  return launch_error();
}

}  // namespace mtraining::probe
