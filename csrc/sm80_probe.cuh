// The selection's passes over scores by mma.sync, for every GPU: 64 probe rows and 64 keys, four warps.
//
// Sums: a row tile of one head is resident in a CTA, and the keys stream by. Mass: a block of keys is, and the row
// tiles of one head after the other stream by. The tile that comes next is copied while this one is multiplied.
#pragma once
#include <climits>

#include "check.cuh"
#include "probe_columns.cuh"
#include "sm80_tile.cuh"

namespace mtraining::probe {

using sm80::TileLayout;

constexpr int kThreads = sm80::kThreads;

// CTAs on a multiprocessor.
template <int kHeadDim>
constexpr int kCtas = kHeadDim == 128 ? 3 : 4;

template <int kHeadDim, typename T>
__device__ __forceinline__ void load_rows(const ProbeParams& params, uint32_t to, int row_tile, int head, int batch) {
  const T* const rows = static_cast<const T*>(params.probe.data) + batch * params.probe.stride_batch +
                        int64_t{row_tile} * kTileRows * params.probe.stride_seq + head * params.probe.stride_head;
  sm80::load_tile<kHeadDim>(to, rows, params.probe.stride_seq, kTileRows);
}

template <int kHeadDim, typename T>
__device__ __forceinline__ void load_keys(const ProbeParams& params, uint32_t to, const KeyTile& tile,
                                          const HeadRange& heads) {
  const int64_t token = int64_t{tile.slot} * kBlock;
  const T* const keys = static_cast<const T*>(params.key.data) + heads.batch * params.key.stride_batch +
                        token * params.key.stride_seq + heads.kv_head * params.key.stride_head;
  sm80::load_tile<kHeadDim>(to, keys, params.key.stride_seq, params.num_keys - static_cast<int>(token));
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void multiply_tiles(float (&s)[32], uint32_t rows, uint32_t keys) {
  const int first_row = threadIdx.x / 32 * kWarpRows;
  const auto left = [=](int step, uint32_t (&fragment)[4]) {
    sm80::load_left<kHeadDim>(fragment, rows, first_row, step);
  };
  sm80::score<kHeadDim, T, 8>(reinterpret_cast<float (&)[8][4]>(s), left, keys);
}

// Waits for the tile that was copied last and for every thread, and starts the copy of the next.
template <typename Load>
__device__ __forceinline__ void next_tile(bool more, const Load& load) {
  sm80::copy_async_wait_all();
  __syncthreads();
  if (more) load();
  sm80::copy_async_commit();
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void process_keys(const ProbeParams& params, const HeadRange& heads,
                                             const ProbeDocument& document, int split, uint32_t tiles_in_shared) {
  constexpr int kBytes = TileLayout<kHeadDim>::kBytes;
  const int num_heads = heads.end - heads.begin, item = blockIdx.x;
  if (item >= document.num_row_tiles * num_heads) return;
  const int head = heads.begin + item % num_heads, row_tile = document.first_row_tile + item / num_heads;
  const int row = threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
  const float scale_log2 = params.softmax_scale * kLog2E;
  const RowTile tile_of_rows = params.row_tiles[row_tile];
  const ThreadRows rows = thread_rows<kProbeSums>(params, head, row_tile, row);
  const int last_block = last_key_block<kProbeSums>(params, tile_of_rows);
  const int count = document.end_key_tile - document.first_key_tile;
  const auto first = [&](int part) {
    return document.first_key_tile + static_cast<int>(int64_t{count} * part / params.num_splits);
  };
  const int end = first(split + 1);
  const auto exists = [&](int at) { return at < end && params.key_tiles[at].block <= last_block; };
  SlotSums sums[2];
  int at = first(split);
  bool more = exists(at);
  if (more) {
    load_rows<kHeadDim, T>(params, tiles_in_shared, row_tile, head % params.num_heads, heads.batch);
    load_keys<kHeadDim, T>(params, tiles_in_shared + kBytes, params.key_tiles[at], heads);
    sm80::copy_async_commit();
  }
#pragma unroll 1
  for (int stage = 0; more; stage ^= 1, ++at) {
    const KeyTile tiles[1] = {params.key_tiles[at]};
    more = exists(at + 1);
    next_tile(more, [&] {
      load_keys<kHeadDim, T>(params, tiles_in_shared + (2 - stage) * kBytes, params.key_tiles[at + 1], heads);
    });
    float s[32];
    multiply_tiles<T, kHeadDim>(s, tiles_in_shared, tiles_in_shared + (1 + stage) * kBytes);
    take_sums<1>(s, rows, tile_of_rows, tiles, sums, scale_log2);
  }
  publish_sums(params, sums, split, head, row_tile, row);
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void process_rows(const ProbeParams& params, const HeadRange& heads,
                                             const ProbeDocument& document, uint32_t tiles_in_shared, float* exchange) {
  constexpr int kBytes = TileLayout<kHeadDim>::kBytes;
  const int key_tile = document.first_key_tile + blockIdx.x;
  if (key_tile >= document.end_key_tile) return;
  const KeyTile tiles[1] = {params.key_tiles[key_tile]};
  const int row = threadIdx.x / 32 * kWarpRows + threadIdx.x % 32 / 4;
  const float scale_log2 = params.softmax_scale * kLog2E;
  const int end_tile = document.first_row_tile + document.num_row_tiles;
  // The first row tiles may have nothing to do with a block that comes late.
  int first_tile = document.first_row_tile;
  while (first_tile < end_tile && last_key_block<kProbeMass>(params, params.row_tiles[first_tile]) < tiles[0].block)
    ++first_tile;
  const bool any = first_tile < end_tile;
  if (any) {
    load_keys<kHeadDim, T>(params, tiles_in_shared, tiles[0], heads);
    load_rows<kHeadDim, T>(params, tiles_in_shared + kBytes, first_tile, heads.begin % params.num_heads, heads.batch);
    sm80::copy_async_commit();
  }
  const uint64_t columns[1] = {columns_of(params, document, tiles[0])};
  float mass[16] = {};
  int stage = 0;
#pragma unroll 1
  for (int head = heads.begin; head < heads.end; ++head) {
#pragma unroll 1
    for (int row_tile = first_tile; row_tile < end_tile; ++row_tile, stage ^= 1) {
      const bool last = row_tile + 1 == end_tile;
      const ThreadRows rows = thread_rows<kProbeMass>(params, head, row_tile, row);
      next_tile(!last || head + 1 < heads.end, [&] {
        load_rows<kHeadDim, T>(params, tiles_in_shared + (2 - stage) * kBytes, last ? first_tile : row_tile + 1,
                               (last ? head + 1 : head) % params.num_heads, heads.batch);
      });
      float s[32];
      multiply_tiles<T, kHeadDim>(s, tiles_in_shared + (1 + stage) * kBytes, tiles_in_shared);
      take_mass<1>(params, document, head, mass, s, rows, tiles, columns, scale_log2);
    }
    write_mass(params, document, tiles, head, mass, exchange, [] { __syncthreads(); });
  }
}

// Grid, resident rows: row tiles of each head; batch rows and key/value heads; documents, and the parts of each one's
// keys. Resident keys: blocks of keys; batch rows and key/value heads; documents.
template <ProbePass kPass, typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, kCtas<kHeadDim>) probe_kernel(const __grid_constant__ ProbeParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int splits = kRowsResident<kPass> ? params.num_splits : 1;
  const HeadRange heads = head_range(params, blockIdx.y, 1);
  const ProbeDocument& document = params.documents[blockIdx.z / splits];
  if constexpr (kRowsResident<kPass>)
    process_keys<T, kHeadDim>(params, heads, document, blockIdx.z % splits, smem_address(shared));
  else
    process_rows<T, kHeadDim>(params, heads, document, smem_address(shared),
                              reinterpret_cast<float*>(shared + 3 * TileLayout<kHeadDim>::kBytes));
}

template <ProbePass kPass, typename T, int kHeadDim>
const char* launch_sm80_pass(const ProbeParams& params, cudaStream_t stream) {
  if (params.most_key_tiles == 0 && kPass != kProbeSums) return nullptr;
  constexpr int kBytes = 3 * TileLayout<kHeadDim>::kBytes + 4 * kBlock * sizeof(float);
  const int group = params.num_heads / params.num_kv_heads;
  const int kv_heads = (params.end_head - 1) / group - params.first_head / group + 1;
  const auto kernel = probe_kernel<kPass, T, kHeadDim>;
  if (const char* error = describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  const dim3 grid = !kRowsResident<kPass>
                        ? dim3(params.most_key_tiles, kv_heads, params.num_documents)
                        : dim3(params.most_row_tiles * group, kv_heads, params.num_documents * params.num_splits);
  kernel<<<grid, kThreads, kBytes, stream>>>(params);
  return launch_error();
}

// What the pass over columns takes: tiles as above.
template <typename T, int kHeadDim>
struct Sm80Product : TileLayout<kHeadDim> {
  using Value = T;
  static constexpr int kSize = kHeadDim, kAlignment = 128;

  static __device__ __forceinline__ void publish() {}
  static __device__ __forceinline__ void multiply(float (&s)[32], uint32_t rows, uint32_t keys) {
    multiply_tiles<T, kHeadDim>(s, rows, keys);
  }
};

template <typename T, int kHeadDim>
const char* launch_sm80_scores(ProbePass pass, const ProbeParams& params, cudaStream_t stream) {
  switch (pass) {
    case kProbeSums: return launch_sm80_pass<kProbeSums, T, kHeadDim>(params, stream);
    case kProbeMass: return launch_sm80_pass<kProbeMass, T, kHeadDim>(params, stream);
    default: return launch_columns<Sm80Product<T, kHeadDim>>(params, stream);
  }
}

}  // namespace mtraining::probe
