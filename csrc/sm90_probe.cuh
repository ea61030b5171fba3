// The selection's passes over scores on Hopper: WGMMA of 64 probe rows and 128 keys, TMA, one producer warp.
//
// Sums: a row tile of one head is resident in shared memory for each of three consumer warpgroups, and the keys stream
// by. Mass: two blocks of keys are, and the row tiles of one head after the other stream by, so that a column is summed
// over all rows in registers. While one warpgroup takes exponentials, the products of another run.
#pragma once
#include <climits>

#include "check.cuh"
#include "probe_columns.cuh"
#include "sm90_tensor_map.h"
#include "sm90_wgmma.cuh"

namespace mtraining::probe {

using namespace sm90;

constexpr int kConsumers = 3, kBlocks = 2;  // blocks of keys in a product
constexpr int kThreads = 128 * (1 + kConsumers);

// A thread's first row in the row tile of its warpgroup.
__device__ __forceinline__ int thread_row() { return threadIdx.x % 128 / 32 * kWarpRows + threadIdx.x % 32 / 4; }

struct ProbeMaps {
  CUtensorMap probe, key;
};

template <ProbePass kPass, int kHeadDim>
struct Memory {
  using S = Shape<kHeadDim>;
  static constexpr int kRowBytes = S::kTileBytes, kKeyBytes = kBlocks * S::kTileBytes;
  static constexpr int kResidentBytes = kRowsResident<kPass> ? kRowBytes : kKeyBytes;
  static constexpr int kStageBytes = kRowsResident<kPass> ? kKeyBytes : kRowBytes;
  static constexpr int kStages = kRowsResident<kPass> ? 4 : 6;
  static constexpr int kExchangeBytes = kRowsResident<kPass> ? 0 : 4 * kBlocks * kBlock * sizeof(float);
  static constexpr int kBytes = kConsumers * (kResidentBytes + kExchangeBytes) + kStages * kStageBytes + 1024;

  uint32_t start;  // a multiple of 1024: what is resident, then the ring, then the exchange

  __device__ __forceinline__ uint32_t resident(int consumer) const { return start + consumer * kResidentBytes; }
  __device__ __forceinline__ uint32_t stage(int index) const {
    return start + kConsumers * kResidentBytes + index * kStageBytes;
  }
  __device__ __forceinline__ uint32_t exchange_offset(int consumer) const {
    return kConsumers * kResidentBytes + kStages * kStageBytes + consumer * kExchangeBytes;
  }
};

struct Barriers {
  uint64_t full[8], empty[8], resident;
};

// The strips of two blocks are side by side: the second operand of a product over head_dim.
template <int kHeadDim>
__device__ __forceinline__ uint64_t keys_descriptor(uint32_t low, int step) {
  using S = Shape<kHeadDim>;
  constexpr int kStepsOfStrip = S::kRowBytes / 32;
  return S::descriptor(low, step / kStepsOfStrip * kBlocks * S::kStripBytes + step % kStepsOfStrip * 32);
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void multiply(float (&s)[64], uint32_t rows_low, uint32_t keys_low) {
  using S = Shape<kHeadDim>;
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step)
    wgmma<T, 0>(s, S::k_major(rows_low, step), keys_descriptor<kHeadDim>(keys_low, step), step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(s);
}

template <int kHeadDim>
__device__ __forceinline__ void load_rows(const ProbeMaps& maps, uint32_t to, uint32_t barrier, int row_tile, int head,
                                          int batch) {
  using S = Shape<kHeadDim>;
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip)
    tma_load(to + strip * S::kStripBytes, &maps.probe, barrier, strip * S::kStripColumns, row_tile * kTileRows, head,
             batch);
}

template <int kHeadDim>
__device__ __forceinline__ void load_keys(const ProbeMaps& maps, uint32_t to, uint32_t barrier,
                                          const KeyTile (&tiles)[kBlocks], const HeadRange& heads) {
  using S = Shape<kHeadDim>;
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip)
#pragma unroll
    for (int i = 0; i < kBlocks; ++i)
      tma_load(to + (strip * kBlocks + i) * S::kStripBytes, &maps.key, barrier, strip * S::kStripColumns,
               tiles[i].slot * kBlock, heads.kv_head, heads.batch);
}

// ---- sums: resident rows --------------------------------------------------------------------------------------------

// The rows of one warpgroup: row tiles of a document, the heads of each beside each other.
struct RowItem {
  int head, row_tile;
  bool exists;
};

__device__ __forceinline__ RowItem row_item(const HeadRange& heads, const ProbeDocument& document, int consumer) {
  const int num_heads = heads.end - heads.begin, item = blockIdx.x * kConsumers + consumer;
  const bool exists = item < document.num_row_tiles * num_heads;
  return {heads.begin + item % num_heads, document.first_row_tile + (exists ? item / num_heads : 0), exists};
}

// Keys of a CTA: its part of the document's, as far as any of its rows has to do with them.
struct KeyRange {
  int first, end, last_block;
};

__device__ __forceinline__ KeyRange key_range(const ProbeParams& params, const HeadRange& heads,
                                              const ProbeDocument& document, int split) {
  const int pairs = (document.end_key_tile - document.first_key_tile + kBlocks - 1) / kBlocks;
  const auto first = [&](int part) {
    return document.first_key_tile + kBlocks * static_cast<int>(int64_t{pairs} * part / params.num_splits);
  };
  KeyRange range = {first(split), min(first(split + 1), document.end_key_tile), -1};
#pragma unroll
  for (int i = 0; i < kConsumers; ++i) {
    const RowItem item = row_item(heads, document, i);
    if (item.exists)
      range.last_block = max(range.last_block, last_key_block<kProbeSums>(params, params.row_tiles[item.row_tile]));
  }
  return range;
}

template <int kHeadDim>
__device__ __forceinline__ void produce_keys(const ProbeMaps& maps, const ProbeParams& params, const HeadRange& heads,
                                             const ProbeDocument& document, const KeyRange& range,
                                             const Memory<kProbeSums, kHeadDim>& memory, Barriers& barriers) {
  using M = Memory<kProbeSums, kHeadDim>;
  int rows = 0;
  for (int i = 0; i < kConsumers; ++i) rows += row_item(heads, document, i).exists;
  const uint32_t resident = smem_address(&barriers.resident);
  barrier_expect_bytes(resident, rows * M::kRowBytes);
  for (int i = 0; i < rows; ++i) {
    const RowItem item = row_item(heads, document, i);
    load_rows<kHeadDim>(maps, memory.resident(i), resident, item.row_tile, item.head % params.num_heads, heads.batch);
  }
  PipelineState<M::kStages> state;
  for (int at = range.first; at < range.end; at += kBlocks) {
    KeyTile tiles[kBlocks];
    key_tiles_at(params, tiles, at, range.end);
    if (tiles[0].block > range.last_block) break;
    const uint32_t full = smem_address(&barriers.full[state.stage]);
    barrier_wait(smem_address(&barriers.empty[state.stage]), state.phase ^ 1);
    barrier_expect_bytes(full, M::kKeyBytes);
    load_keys<kHeadDim>(maps, memory.stage(state.stage), full, tiles, heads);
    state.advance();
  }
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void consume_keys(const ProbeParams& params, const HeadRange& heads,
                                             const ProbeDocument& document, const KeyRange& range, int split,
                                             const Memory<kProbeSums, kHeadDim>& memory, Barriers& barriers,
                                             int consumer) {
  using M = Memory<kProbeSums, kHeadDim>;
  using S = Shape<kHeadDim>;
  const RowItem item = row_item(heads, document, consumer);
  const int row = thread_row();
  const float scale_log2 = params.softmax_scale * kLog2E;
  const RowTile row_tile = params.row_tiles[item.row_tile];
  const ThreadRows rows = thread_rows<kProbeSums>(params, item.head, item.row_tile, row);
  const int last_block = __shfl_sync(~0u, item.exists ? last_key_block<kProbeSums>(params, row_tile) : -1, 0);
  const uint32_t rows_low = S::descriptor_low(memory.resident(consumer));
  SlotSums sums[2];
  barrier_wait(smem_address(&barriers.resident), 0);
  PipelineState<M::kStages> state;
#pragma unroll 1
  for (int at = range.first; at < range.end; at += kBlocks) {
    KeyTile tiles[kBlocks];
    key_tiles_at(params, tiles, at, range.end);
    const int block = __shfl_sync(~0u, tiles[0].block, 0);
    if (block > range.last_block) break;
    barrier_wait(smem_address(&barriers.full[state.stage]), state.phase);
    float s[64];
    const bool multiplied = block <= last_block;
    if (multiplied) multiply<T, kHeadDim>(s, rows_low, S::descriptor_low(memory.stage(state.stage)));
    if (threadIdx.x % 32 == 0) barrier_arrive(smem_address(&barriers.empty[state.stage]));
    state.advance();
    if (multiplied) take_sums<kBlocks>(s, rows, row_tile, tiles, sums, scale_log2);
  }
  if (item.exists) publish_sums(params, sums, split, item.head, item.row_tile, row);
}

// The sums of a part without keys.
__device__ __forceinline__ void publish_nothing(const ProbeParams& params, const HeadRange& heads,
                                                const ProbeDocument& document, int split, int consumer) {
  const RowItem item = row_item(heads, document, consumer);
  SlotSums sums[2];
  if (item.exists) publish_sums(params, sums, split, item.head, item.row_tile, thread_row());
}

// ---- mass: resident keys --------------------------------------------------------------------------------------------

// The two blocks of a warpgroup, without keys where there are none.
__device__ __forceinline__ void resident_keys(const ProbeParams& params, const ProbeDocument& document, int consumer,
                                              KeyTile (&tiles)[kBlocks]) {
  const int at = document.first_key_tile + (blockIdx.x * kConsumers + consumer) * kBlocks;
  if (at < document.end_key_tile)
    key_tiles_at(params, tiles, at, document.end_key_tile);
  else
    tiles[0] = tiles[1] = KeyTile{0, INT_MAX, 0, 0};
}

template <int kHeadDim>
__device__ __forceinline__ void produce_rows(const ProbeMaps& maps, const ProbeParams& params, const HeadRange& heads,
                                             const ProbeDocument& document, const Memory<kProbeMass, kHeadDim>& memory,
                                             Barriers& barriers) {
  using M = Memory<kProbeMass, kHeadDim>;
  const uint32_t resident = smem_address(&barriers.resident);
  barrier_expect_bytes(resident, kConsumers * M::kKeyBytes);
  int first_block = INT_MAX;
  for (int i = 0; i < kConsumers; ++i) {
    KeyTile tiles[kBlocks];
    resident_keys(params, document, i, tiles);
    first_block = min(first_block, tiles[0].block);
    load_keys<kHeadDim>(maps, memory.resident(i), resident, tiles, heads);
  }
  PipelineState<M::kStages> state;
  for (int head = heads.begin; head < heads.end; ++head)
    for (int t = 0; t < document.num_row_tiles; ++t) {
      const int row_tile = document.first_row_tile + t;
      if (last_key_block<kProbeMass>(params, params.row_tiles[row_tile]) < first_block) continue;
      const uint32_t full = smem_address(&barriers.full[state.stage]);
      barrier_wait(smem_address(&barriers.empty[state.stage]), state.phase ^ 1);
      barrier_expect_bytes(full, M::kRowBytes);
      load_rows<kHeadDim>(maps, memory.stage(state.stage), full, row_tile, head % params.num_heads, heads.batch);
      state.advance();
    }
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void consume_rows(const ProbeParams& params, const HeadRange& heads,
                                             const ProbeDocument& document, const Memory<kProbeMass, kHeadDim>& memory,
                                             Barriers& barriers, float* exchange, int consumer) {
  using M = Memory<kProbeMass, kHeadDim>;
  using S = Shape<kHeadDim>;
  const int row = thread_row();
  const float scale_log2 = params.softmax_scale * kLog2E;
  KeyTile first[kBlocks], tiles[kBlocks];
  resident_keys(params, document, 0, first);
  resident_keys(params, document, consumer, tiles);
  const int first_block = first[0].block, own_block = __shfl_sync(~0u, tiles[0].block, 0);
  const uint32_t keys_low = S::descriptor_low(memory.resident(consumer));
  const auto synchronize = [=] { asm volatile("bar.sync %0, 128;" ::"r"(consumer + 1) : "memory"); };
  const uint64_t columns[kBlocks] = {columns_of(params, document, tiles[0]), columns_of(params, document, tiles[1])};
  float mass[32] = {};
  barrier_wait(smem_address(&barriers.resident), 0);
  PipelineState<M::kStages> state;
#pragma unroll 1
  for (int head = heads.begin; head < heads.end; ++head) {
#pragma unroll 1
    for (int t = 0; t < document.num_row_tiles; ++t) {
      const int row_tile = document.first_row_tile + t;
      const int last_block = __shfl_sync(~0u, last_key_block<kProbeMass>(params, params.row_tiles[row_tile]), 0);
      if (last_block < first_block) continue;
      const ThreadRows rows = thread_rows<kProbeMass>(params, head, row_tile, row);
      barrier_wait(smem_address(&barriers.full[state.stage]), state.phase);
      float s[64];
      const bool multiplied = own_block <= last_block;
      if (multiplied) multiply<T, kHeadDim>(s, S::descriptor_low(memory.stage(state.stage)), keys_low);
      if (threadIdx.x % 32 == 0) barrier_arrive(smem_address(&barriers.empty[state.stage]));
      state.advance();
      if (multiplied) take_mass<kBlocks>(params, document, head, mass, s, rows, tiles, columns, scale_log2);
    }
    write_mass(params, document, tiles, head, mass, exchange, synchronize);
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// Grid, resident rows: warpgroups' rows by threes; batch rows and key/value heads; documents, and the parts of each
// one's keys. Resident keys: warpgroups' keys by threes; batch rows, key/value heads and `head_parts` of each;
// documents.
template <ProbePass kPass, typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    probe_kernel(const __grid_constant__ ProbeMaps maps, const __grid_constant__ ProbeParams params, int head_parts) {
  extern __shared__ uint8_t shared[];
  __shared__ Barriers barriers;
  using M = Memory<kPass, kHeadDim>;
  const uint32_t skipped = -smem_address(shared) & 1023;
  const M memory{smem_address(shared) + skipped};
  const HeadRange heads = head_range(params, blockIdx.y, head_parts);
  const int splits = kRowsResident<kPass> ? params.num_splits : 1, split = blockIdx.z % splits;
  const ProbeDocument& document = params.documents[blockIdx.z / splits];
  if (heads.begin >= heads.end) return;
  if (kRowsResident<kPass>
          ? !row_item(heads, document, 0).exists
          : document.first_key_tile + static_cast<int>(blockIdx.x) * kConsumers * kBlocks >= document.end_key_tile)
    return;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  KeyRange range = {};
  if constexpr (kRowsResident<kPass>) {
    range = key_range(params, heads, document, split);
    if (range.first >= range.end || params.key_tiles[range.first].block > range.last_block) {  // keys that no row sees
      if (warpgroup > 0) publish_nothing(params, heads, document, split, warpgroup - 1);
      return;
    }
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < M::kStages; ++i) {
      barrier_init(smem_address(&barriers.full[i]), 1);
      barrier_init(smem_address(&barriers.empty[i]), 4 * kConsumers);
    }
    barrier_init(smem_address(&barriers.resident), 1);
    barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<32>();
    if (threadIdx.x == 0) {
      if constexpr (kRowsResident<kPass>)
        produce_keys<kHeadDim>(maps, params, heads, document, range, memory, barriers);
      else
        produce_rows<kHeadDim>(maps, params, heads, document, memory, barriers);
    }
  } else {
    warpgroup_reg_alloc<160>();
    if constexpr (kRowsResident<kPass>)
      consume_keys<T>(params, heads, document, range, split, memory, barriers, warpgroup - 1);
    else
      consume_rows<T>(params, heads, document, memory, barriers,
                      reinterpret_cast<float*>(shared + skipped + memory.exchange_offset(warpgroup - 1)),
                      warpgroup - 1);
  }
}

template <ProbePass kPass, typename T, int kHeadDim>
const char* launch_sm90_pass(const ProbeMaps& maps, const ProbeParams& params, int multiprocessors,
                             cudaStream_t stream) {
  if (params.most_key_tiles == 0 && kPass != kProbeSums) return nullptr;
  const int group = params.num_heads / params.num_kv_heads;
  const int kv_heads = (params.end_head - 1) / group - params.first_head / group + 1;
  const auto divide = [](int a, int b) { return (a + b - 1) / b; };
  const auto kernel = probe_kernel<kPass, T, kHeadDim>;
  constexpr int kBytes = Memory<kPass, kHeadDim>::kBytes;
  if (const char* error = describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  dim3 grid;
  int head_parts = 1;
  if (kRowsResident<kPass>) {
    grid = dim3(divide(params.most_row_tiles * group, kConsumers), kv_heads, params.num_documents * params.num_splits);
  } else {
    const int key_items = divide(params.most_key_tiles, kConsumers * kBlocks);
    // Fewer heads a CTA where there are few CTAs: a multiprocessor that waits for others at the end waits less. Heads
    // that share a list stay together, and these are all of the group.
    const int wanted = divide(4 * multiprocessors, key_items * kv_heads * params.num_documents);
    head_parts = params.heads_per_list > 1 ? 1 : wanted < group ? wanted : group;
    grid = dim3(key_items, kv_heads * head_parts, params.num_documents);
  }
  kernel<<<grid, kThreads, kBytes, stream>>>(maps, params, head_parts);
  return launch_error();
}

// What the pass over columns takes: tiles as above, copied without TMA; scores of the same bits as those of a pair of
// blocks.
template <typename T, int kHeadDim>
struct Sm90Product {
  using Value = T;
  using S = Shape<kHeadDim>;
  static constexpr int kSize = kHeadDim, kBytes = S::kTileBytes, kAlignment = 1024;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    constexpr int kChunks = S::kRowBytes / 16;  // of a strip
    const int swizzle = kChunks == 8 ? row & 7 : row >> 1 & 3;
    return chunk / kChunks * S::kStripBytes + row * S::kRowBytes + (chunk % kChunks ^ swizzle) * 16;
  }
  static __device__ __forceinline__ void publish() { proxy_fence(); }
  static __device__ __forceinline__ void multiply(float (&s)[32], uint32_t rows, uint32_t keys) {
    const uint32_t rows_low = S::descriptor_low(rows), keys_low = S::descriptor_low(keys);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step)
      wgmma<T, 0>(s, S::k_major(rows_low, step), S::k_major(keys_low, step), step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(s);
  }
};

template <typename T, int kHeadDim>
const char* launch_sm90_scores(ProbePass pass, const ProbeParams& params, int multiprocessors, cudaStream_t stream) {
  ProbeMaps maps;
  if (!encode_rows(maps.probe, params, params.probe, params.num_probe_rows, params.num_heads, params.batch) ||
      !encode_rows(maps.key, params, params.key, params.num_keys, params.num_kv_heads, params.batch))
    return "the tensor maps of probe rows and keys could not be encoded";
  switch (pass) {
    case kProbeSums: return launch_sm90_pass<kProbeSums, T, kHeadDim>(maps, params, multiprocessors, stream);
    case kProbeMass: return launch_sm90_pass<kProbeMass, T, kHeadDim>(maps, params, multiprocessors, stream);
    default: return launch_columns<Sm90Product<T, kHeadDim>>(params, stream);
  }
}

}  // namespace mtraining::probe
