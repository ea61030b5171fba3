// The mass that chosen columns have at each distance, for both families: what the distances lose to them.
//
// A CTA has some neighbouring blocks of keys and one head. It finds the columns that the head's list has among them,
// copies their keys beside each other, 64 at a time, and multiplies the document's row tiles with them. What the rows
// of a unit give to a column is summed in float32 in a fixed order and rounded once, so that it does not depend on
// which columns stand beside each other.
#pragma once
#include <climits>

#include "check.cuh"
#include "probe_scores.cuh"
#include "sm80_mma.cuh"

namespace mtraining::probe {

constexpr int kColumnThreads = 128;
constexpr int kColumnBlocks = 32;       // of keys, of a CTA
constexpr int kNoColumn = INT_MAX / 4;  // block of a column that is none: after every row

// The chosen columns of a CTA.
struct Columns {
  int count;
  int slots[kColumnBlocks], blocks[kColumnBlocks];
  uint32_t halves[kColumnBlocks][2];         // of each block, as bits
  uint16_t entries[kColumnBlocks * kBlock];  // the first `count`: key + 64 * number of the block, ascending
};

__device__ __forceinline__ void find_columns(const ProbeParams& params, const ProbeDocument& document, int list,
                                             int first_tile, int num_tiles, Columns& columns) {
  constexpr int kWarps = kColumnThreads / 32;
  static_assert(kColumnBlocks == 32);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = list / params.lists_per_rank, of_rank = list % params.lists_per_rank;
  const int64_t of_documents = int64_t{rank} * params.num_documents + blockIdx.z;
  const Threshold threshold = params.thresholds[of_documents * params.lists_per_rank + of_rank];
#pragma unroll 4
  for (int i = warp; i < kColumnBlocks; i += kWarps) {
    uint32_t halves[2] = {};
    if (i < num_tiles) {
      const KeyTile tile = params.key_tiles[first_tile + i];
      const int block = tile.block - document.first_block;
      const float* const mass = mass_of_slot(params, document, rank, of_rank, tile.slot - document.first_slot);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = half * 32 + lane;
        const float competing = column_mass(params, mass + key).competing;
        const uint32_t bits = bits_of(column_rate(params, document, competing, block));
        halves[half] = __ballot_sync(~0u, bits > 0 && is_chosen(threshold, bits, block * kBlock + key));
      }
      if (lane == 0) columns.slots[i] = tile.slot, columns.blocks[i] = tile.block;
    }
    if (lane < 2) columns.halves[i][lane] = lane ? halves[1] : halves[0];
  }
  __syncthreads();
  const int count = __popc(columns.halves[lane][0]) + __popc(columns.halves[lane][1]);
  int up_to = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, up_to, step);
    if (lane >= step) up_to += other;
  }
  if (threadIdx.x == 31) columns.count = up_to;
#pragma unroll 1
  for (int i = warp; i < num_tiles; i += kWarps) {
    int to = __shfl_sync(~0u, up_to - count, i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t mask = columns.halves[i][half];
      if (mask >> lane & 1)
        columns.entries[to + __popc(mask & ((1u << lane) - 1))] = static_cast<uint16_t>(i * kBlock + half * 32 + lane);
      to += __popc(mask);
    }
  }
  __syncthreads();
}

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

// Product: the layout of 64 rows in shared memory, and multiply(s, rows, keys). Grid: parts of a document's blocks;
// heads of the launch; documents.
template <typename Product>
__global__ void __launch_bounds__(kColumnThreads, 4) columns_kernel(const __grid_constant__ ProbeParams params) {
  using T = typename Product::Value;
  extern __shared__ uint8_t shared[];
  __shared__ Columns columns;
  __shared__ int blocks[kBlock];
  const uint32_t keys = smem_address(shared) + (-smem_address(shared) & (Product::kAlignment - 1));
  const ProbeDocument& document = params.documents[blockIdx.z];
  const int first_tile = document.first_key_tile + static_cast<int>(blockIdx.x) * kColumnBlocks;
  const int num_tiles = min(kColumnBlocks, document.end_key_tile - first_tile);
  if (num_tiles <= 0) return;
  const int list = blockIdx.y / params.heads_per_list, head = params.first_head + blockIdx.y;
  const int batch = head / params.num_heads, of_batch = head % params.num_heads;
  const T* const key = static_cast<const T*>(params.key.data) + batch * params.key.stride_batch +
                       of_batch / (params.num_heads / params.num_kv_heads) * params.key.stride_head;
  const T* const probe = static_cast<const T*>(params.probe.data) + batch * params.probe.stride_batch +
                         of_batch * params.probe.stride_head;
  find_columns(params, document, list, first_tile, num_tiles, columns);
  const int row = threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
  const float scale_log2 = params.softmax_scale * kLog2E;
  const int count = __shfl_sync(~0u, columns.count, 0);
  const int end = __shfl_sync(~0u, document.first_row_tile + document.num_row_tiles, 0);
  int row_tile = __shfl_sync(~0u, document.first_row_tile, 0);
#pragma unroll 1
  for (int from = 0; from < count; from += kBlock) {
    // The first row tiles may have nothing to do with a block that comes late.
    const int first_block = __shfl_sync(~0u, columns.blocks[columns.entries[from] / kBlock], 0);
    while (row_tile < end && last_key_block<kProbeColumns>(params, params.row_tiles[row_tile]) < first_block)
      ++row_tile;
    row_tile = __shfl_sync(~0u, row_tile, 0);
    if (row_tile == end) return;
    const auto copy_row_tile = [&](int tile, int stage) {
      copy_rows<Product>(keys + (1 + stage) * Product::kBytes,
                         [&](int i) { return probe + (int64_t{tile} * kTileRows + i) * params.probe.stride_seq; });
    };
    __syncthreads();  // the tiles before have been read
    copy_rows<Product>(keys, [&](int i) {
      const int entry = columns.entries[min(from + i, count - 1)];
      return key + (int64_t{columns.slots[entry / kBlock]} * kBlock + entry % kBlock) * params.key.stride_seq;
    });
    copy_row_tile(row_tile, 0);
    sm80::copy_async_commit();
    if (threadIdx.x < kBlock) {
      const int i = from + static_cast<int>(threadIdx.x);
      blocks[threadIdx.x] = i < count ? columns.blocks[columns.entries[i] / kBlock] : kNoColumn;
    }
#pragma unroll 1
    for (int tile = row_tile, stage = 0; tile < end; ++tile, stage ^= 1) {
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

template <typename Product>
const char* launch_columns(const ProbeParams& params, cudaStream_t stream) {
  if (params.most_key_tiles == 0) return nullptr;
  constexpr int kBytes = 3 * Product::kBytes + Product::kAlignment;
  const auto kernel = columns_kernel<Product>;
  if (const char* error = describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  const dim3 grid((params.most_key_tiles + kColumnBlocks - 1) / kColumnBlocks, params.end_head - params.first_head,
                  params.num_documents);
  kernel<<<grid, kColumnThreads, kBytes, stream>>>(params);
  return launch_error();
}

}  // namespace mtraining::probe
