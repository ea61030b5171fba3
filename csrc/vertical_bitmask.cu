// The bitmask of the vertical pass: the packed columns that each query tile attends to.
#include <climits>

#include "check.cuh"
#include "launch.h"
#include "lists.cuh"

namespace mtraining {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTilesPerCta = 16;  // tiles that share one bitmap of distances

// Marks the selected distances of one list as bits.
__device__ void fill_bitmap(uint32_t* bitmap, int num_ints, const int32_t* distances, int count) {
  for (int i = threadIdx.x; i < num_ints; i += kThreads) bitmap[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int distance = distances[i];
    if (distance < num_ints * 32) atomicOr(&bitmap[distance / 32], 1u << (distance % 32));
  }
  __syncthreads();
}

// The bitmask of tiles first..last - 1 of one document. A warp fills one column tile (64 columns) for all of them.
__device__ void fill_bitmask(const AttentionParams& params, const uint32_t* bitmap, int64_t row, int list, int first,
                             int last) {
  const int lane = threadIdx.x % 32;
  const int32_t* const positions = table_row(params.vertical, row, list);
  const int count = *table_row(params.num_vertical, row, list);
  for (int column_tile = threadIdx.x / 32; column_tile < params.num_column_tiles; column_tile += kWarps) {
    int position[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = column_tile * kBlock + i * 32 + lane;
      position[i] = column < count ? positions[column] : INT_MAX;
    }
    uint64_t* to = params.vertical_bitmask +
                   (static_cast<int64_t>(blockIdx.y) * params.num_query_tiles + first) * params.num_column_tiles +
                   column_tile;
#pragma unroll 4
    for (int t = first; t < last; ++t, to += params.num_column_tiles) {
      const int block = __ldg(&params.query_tiles[t].block), start = __ldg(&params.query_tiles[t].first_token);
      uint32_t half[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int distance = block - position[i] / kBlock;
        const bool usable = distance > 0 && position[i] >= start && !((bitmap[distance / 32] >> (distance % 32)) & 1);
        half[i] = __ballot_sync(~0u, usable);
      }
      if (lane == 0) *to = static_cast<uint64_t>(half[1]) << 32 | half[0];
    }
  }
}

// A CTA processes kTilesPerCta tiles of one (batch row, list), document by document.
__global__ void __launch_bounds__(kThreads) vertical_bitmask_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ uint32_t bitmap[];
  const int list = blockIdx.y % params.num_lists, batch = blockIdx.y / params.num_lists;
  const int end = min((static_cast<int>(blockIdx.x) + 1) * kTilesPerCta, params.num_query_tiles);
  for (int first = blockIdx.x * kTilesPerCta, last; first < end; first = last) {
    const int document = params.query_tiles[first].index_row;
    for (last = first + 1; last < end && params.query_tiles[last].index_row == document; ++last) {
    }
    __syncthreads();  // every warp has finished with the previous document's bitmap
    fill_bitmap(bitmap, (params.num_blocks + 31) / 32, table_row(params.slash, document + batch, list),
                *table_row(params.num_slash, document + batch, list));
    fill_bitmask(params, bitmap, document + batch, list, first, last);
  }
}

}  // namespace

const char* fill_vertical_bitmask(const AttentionParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  const dim3 grid((params.num_query_tiles + kTilesPerCta - 1) / kTilesPerCta, params.batch * params.num_lists);
  const int bitmap_bytes = (params.num_blocks + 31) / 32 * 4;
  if (grid.x == 0 || params.num_column_tiles == 0) return nullptr;
  if (bitmap_bytes > 48 * 1024) return "sequences of more than 25165824 tokens have no vertical pass";
  vertical_bitmask_kernel<<<grid, kThreads, bitmap_bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return launch_error();
}

}  // namespace mtraining
