// The exclusion words of the vertical pass: which packed columns the rows of a tile may use.
#include "check.cuh"
#include "launch.h"
#include "walk.cuh"

namespace mtraining {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTilesPerCta = 16;  // tiles that share one bitmap of distances

// Marks the selected distances of one head as bits.
__device__ void fill_bitmap(uint32_t* bitmap, int num_ints, const int32_t* distances, int count) {
  for (int i = threadIdx.x; i < num_ints; i += kThreads) bitmap[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int distance = distances[i];
    if (distance < num_ints * 32) atomicOr(&bitmap[distance / 32], 1u << (distance % 32));
  }
  __syncthreads();
}

// A CTA serves kTilesPerCta tiles of one (batch row, head); a warp makes one word at a time.
__global__ void __launch_bounds__(kThreads) vertical_words_kernel(const __grid_constant__ AttentionParams params) {
  extern __shared__ uint32_t bitmap[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = blockIdx.y % params.num_heads, batch = blockIdx.y / params.num_heads;
  const int first = blockIdx.x * kTilesPerCta, last = min(first + kTilesPerCta, params.num_query_tiles);
  int bitmap_row = -1;
  for (int t = first; t < last; ++t) {
    const Tile tile = params.query_tiles[t];
    const int64_t row = tile.index_row + batch;
    if (row != bitmap_row) {
      __syncthreads();
      fill_bitmap(bitmap, (params.num_blocks + 31) / 32,
                  table_row(params.slash, row, head), *table_row(params.num_slash, row, head));
      bitmap_row = static_cast<int>(row);
    }
    const int32_t* positions = table_row(params.vertical, row, head);
    const int count = *table_row(params.num_vertical, row, head);
    uint64_t* words = params.vertical_words +
                      (static_cast<int64_t>(blockIdx.y) * params.num_query_tiles + t) * params.num_words;
    for (int word = warp; word < params.num_words; word += kWarps) {
      uint32_t half[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = word * kBlock + i * 32 + lane;
        bool usable = false;
        if (column < count) {
          const int position = positions[column], distance = tile.block - position / kBlock;
          usable = distance > 0 && position >= tile.first_token && !((bitmap[distance / 32] >> (distance % 32)) & 1);
        }
        half[i] = __ballot_sync(~0u, usable);
      }
      if (lane == 0) words[word] = static_cast<uint64_t>(half[1]) << 32 | half[0];
    }
  }
}

}  // namespace

const char* fill_vertical_words(const AttentionParams& params, void* stream) {
  if (const char* error = use_device(params.device)) return error;
  const dim3 grid((params.num_query_tiles + kTilesPerCta - 1) / kTilesPerCta, params.batch * params.num_heads);
  const int bitmap_bytes = (params.num_blocks + 31) / 32 * 4;
  if (grid.x == 0 || params.num_words == 0) return nullptr;
  if (bitmap_bytes > 48 * 1024) return "sequences of more than 25165824 tokens have no vertical pass";
  vertical_words_kernel<<<grid, kThreads, bitmap_bytes, static_cast<cudaStream_t>(stream)>>>(params);
  return launch_error();
}

}  // namespace mtraining
