// What a thread does with scores of probe rows, for both families: sums, mass and distances.
//
// A warp holds 16 rows of a row tile, a thread rows row and row + 8 of them, each of another unit, and of every block
// of 64 keys the columns 8 * j + 2 * (lane % 4) and the next. s[32 * block + 4 * j + 2 * r + c] is the score of row r.
//
// A score depends on its row and its key only: where a key lies in a fragment, and which keys lie beside it, does not
// enter. So equal keys get equal mass, and the mass of a key is the same on any number of ranks.
#pragma once
#include "probe_mass.cuh"
#include "probe_passes.h"
#include "probe_sums.cuh"

namespace mtraining::probe {

constexpr int kWarpRows = 16;

template <ProbePass kPass>
constexpr bool kRowsResident = kPass == kProbeSums;

// Query heads of a key/value head that a CTA works on: a part of the group, cut to the launch's heads. They are counted
// over batch rows.
struct HeadRange {
  int kv_head, batch, begin, end;
};

__device__ __forceinline__ HeadRange head_range(const ProbeParams& params, int index, int parts) {
  const int group = params.num_heads / params.num_kv_heads, heads = (group + parts - 1) / parts;
  const int kv = params.first_head / group + index / parts;  // over batch rows and key/value heads
  const int first = kv * group + index % parts * heads;
  return {kv % params.num_kv_heads, kv / params.num_kv_heads, max(first, params.first_head),
          min(min(first + heads, (kv + 1) * group), params.end_head)};
}

// The two rows of a thread.
struct ThreadRows {
  int position[2];            // sums
  float shift[2], weight[2];  // mass and columns
  int block[2];               // of their units
};

template <ProbePass kPass>
__device__ __forceinline__ ThreadRows thread_rows(const ProbeParams& params, int head, int row_tile, int row) {
  ThreadRows rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = row_tile * kTileRows + row + kUnitRows * r;
    if (kPass == kProbeSums) {
      rows.position[r] = params.positions[at];
    } else {
      const auto* const weights = reinterpret_cast<const float2*>(params.weights);
      const float2 weight = __ldg(weights + int64_t{head} * params.num_probe_rows + at);
      rows.shift[r] = weight.x, rows.weight[r] = weight.y;
      rows.block[r] = __ldg(params.unit_blocks + at / kUnitRows);
    }
  }
  return rows;
}

// By value: an address would put both into local memory.
__device__ __forceinline__ KeyTile select(bool first, const KeyTile& a, const KeyTile& b) {
  return {first ? a.slot : b.slot, first ? a.block : b.block, first ? a.begin : b.begin, first ? a.end : b.end};
}

// Takes keys away that a row does not see, and those outside the tile.
template <int kBlockOfScores, int kSize>
__device__ __forceinline__ void mask_causal(float (&s)[kSize], const ThreadRows& rows, const KeyTile& tile) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int end = min(tile.end, rows.position[r] + 1 - tile.block * kBlock);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int key = 8 * (i / 2) + column + i % 2;
      float& x = s[32 * kBlockOfScores + 4 * (i / 2) + 2 * r + i % 2];
      if (key < tile.begin || key >= end) x = -INFINITY;
    }
  }
}

// Adds the exponentials of a thread's 16 keys of each of its rows. They refer to a power of two near the largest of the
// 16, so that what is added is fixed by these keys.
template <int kBlockOfScores, int kSize>
__device__ __forceinline__ void add_sums(SlotSums (&sums)[2], const float (&s)[kSize], float scale_log2) {
  constexpr float kToInteger = 12582912.f;  // 1.5 * 2^23: a float to which it is added becomes a whole number
  constexpr float kFarthest = 1048576.f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float top = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) top = fmaxf(top, s[32 * kBlockOfScores + 4 * (i / 2) + 2 * r + i % 2]);
    const float rounded = fminf(fmaxf(top * scale_log2, -kFarthest), kFarthest) + kToInteger;
    const float shift = kToInteger - rounded;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      sum += exp2_approx(fmaf(s[32 * kBlockOfScores + 4 * (i / 2) + 2 * r + i % 2], scale_log2, shift));
    sums[r].add(sum, __float_as_int(rounded) - __float_as_int(kToInteger));
  }
}

// Hands on what the threads of a row hold.
__device__ __forceinline__ void publish_sums(const ProbeParams& params, SlotSums (&sums)[2], int split, int head,
                                             int row_tile, int row) {
  const int64_t rows = int64_t{params.batch} * params.num_heads * params.num_probe_rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums[r].add_from(1);
    sums[r].add_from(2);
    const int64_t at =
        split * rows + int64_t{head} * params.num_probe_rows + row_tile * kTileRows + row + kUnitRows * r;
    const int own = threadIdx.x % 4;  // the slot that this thread writes
    static_assert(kSlots == 4);
    const long long low = own & 1 ? sums[r].slots[1] : sums[r].slots[0];
    const long long high = own & 1 ? sums[r].slots[3] : sums[r].slots[2];
    params.part_sums[own * params.num_splits * rows + at] = own & 2 ? high : low;
    if (own == 0) params.part_exponents[at] = sums[r].exponent;
  }
}

// Whether a unit's rows choose among the keys of a block: not among local blocks, nor among what comes later.
__device__ __forceinline__ bool chooses(const ProbeParams& params, int unit_block, const KeyTile& tile) {
  return unit_block - tile.block >= params.local_blocks;
}

// Takes away the columns of a block that are not in `mask`.
template <int kBlockOfScores, int kSize>
__device__ __forceinline__ void mask_columns(float (&s)[kSize], uint64_t mask) {
  mask >>= threadIdx.x % 4 * 2;
  const uint32_t halves[2] = {static_cast<uint32_t>(mask), static_cast<uint32_t>(mask >> 32)};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const bool is_in = halves[i / 8] >> (8 * (i / 2 % 4) + i % 2) & 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& x = s[32 * kBlockOfScores + 4 * (i / 2) + 2 * r + i % 2];
      x = is_in ? x : -INFINITY;
    }
  }
}

// Adds a row tile to the mass of a thread's 16 columns of a block. A row's share of the mass between its unit and the
// block comes to totals[r].
template <int kBlockOfScores, int kSize>
__device__ __forceinline__ void add_mass(const ProbeParams& params, float (&mass)[kSize / 2], float* totals,
                                         const float (&s)[kSize], const ThreadRows& rows, const KeyTile& tile,
                                         float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float shift = chooses(params, rows.block[r], tile) ? rows.shift[r] : -INFINITY;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& sum = mass[16 * kBlockOfScores + i];
      const float x = s[32 * kBlockOfScores + 4 * (i / 2) + 2 * r + i % 2];
      const float p = exp2_approx(fmaf(x, scale_log2, shift));
      sum = fmaf(p, rows.weight[r], sum);
      total += p;
    }
    totals[r] = total * rows.weight[r];
  }
}

// Keeps one half of values, that of the other threads added: the upper half where `upper`.
template <int kCount, int kSize>
__device__ __forceinline__ void halve(float (&values)[kSize], int lane_mask) {
  const bool upper = threadIdx.x & lane_mask;
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    const float received = __shfl_xor_sync(~0u, upper ? values[i] : values[i + kCount / 2], lane_mask);
    values[i] = (upper ? values[i + kCount / 2] : values[i]) + received;
  }
}

// The columns of a tile that are neither sinks nor of another document, as bits.
__device__ __forceinline__ uint64_t columns_of(const ProbeParams& params, const ProbeDocument& document,
                                               const KeyTile& tile) {
  const int64_t sinks = int64_t{document.start} + params.sink_tokens - int64_t{tile.block} * kBlock;
  const int begin = static_cast<int>(max(int64_t{tile.begin}, min(sinks, int64_t{kBlock})));
  return begin < tile.end ? (~0ull >> (kBlock - (tile.end - begin))) << begin : 0;
}

// Writes the mass of a warpgroup's columns over all rows of a head, or over either half of them: of four warps, in
// their order, of which two have the rows of one half. Where heads share a list, it is added to that of the heads
// before, which the same threads wrote. `shared` holds 4 * 64 * kBlocks floats; `synchronize` makes the four warps wait
// for each other.
template <int kSize, typename Synchronize>
__device__ __forceinline__ void write_mass(const ProbeParams& params, const ProbeDocument& document,
                                           const KeyTile (&tiles)[kSize / 16], int head, float (&mass)[kSize],
                                           float* shared, const Synchronize& synchronize) {
  constexpr int kBlocks = kSize / 16;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  halve<kSize>(mass, 16);
  halve<kSize / 2>(mass, 8);
  halve<kSize / 4>(mass, 4);
  const int first = (lane & 16 ? kSize / 2 : 0) + (lane & 8 ? kSize / 4 : 0) + (lane & 4 ? kSize / 8 : 0);
  synchronize();  // what was written before has been read
#pragma unroll
  for (int i = 0; i < kSize / 8; ++i) {
    const int of_thread = first + i;
    shared[thread / 32 * kBlocks * kBlock + of_thread / 2 * 8 + lane % 4 * 2 + of_thread % 2] = mass[i];
  }
  synchronize();
  const int index = head - params.first_head;
  const int list = index / params.heads_per_list, member = index % params.heads_per_list;
  if (thread < kBlocks * kBlock) {
    const KeyTile tile = select(thread >= kBlock, tiles[kBlocks - 1], tiles[0]);
    const auto of_warp = [&](int warp) { return shared[warp * kBlocks * kBlock + thread]; };
    const float first_half = of_warp(0) + of_warp(1), all = first_half + of_warp(2) + of_warp(3);
    const bool is_halved = params.num_halves > document.num_halves;
    const int key = thread % kBlock;
    if (tile.end > 0) {
      float* const to = mass_of_slot(params, document, list / params.lists_per_rank, list % params.lists_per_rank,
                                     tile.slot - document.first_slot) +
                        key;
      const bool is_in = columns_of(params, document, tile) >> key & 1;
      const auto write = [&](float* at, float sum) { *at = is_in ? (member > 0 ? *at : 0.f) + sum : 0.f; };
      write(to, is_halved ? 0.5f * all : params.num_halves == 1 ? all : first_half);
      if (params.num_halves == 2) write(to + half_stride(params), is_halved ? 0.5f * all : of_warp(2) + of_warp(3));
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) mass[i] = 0.f;
}

// Adds to the mass of a list's run of distances.
__device__ __forceinline__ void add_to_distance(const ProbeParams& params, const ProbeDocument& document, int list,
                                                int run, long long mass) {
  auto* const sums =
      reinterpret_cast<unsigned long long*>(params.distance_sums) + first_block_of(params, document, list);
  atomicAdd(sums + run, static_cast<unsigned long long>(mass));
}

// Adds the mass between the warp's units and kBlocks blocks to the list's runs of distances.
template <int kBlocks>
__device__ __forceinline__ void add_distances(const ProbeParams& params, const ProbeDocument& document, int head,
                                              float (&totals)[2 * kBlocks], const ThreadRows& rows,
                                              const KeyTile (&tiles)[kBlocks]) {
  const int lane = threadIdx.x % 32;
  if (kBlocks == 2) halve<4>(totals, 16);
  halve<2>(totals, 8);
  float sum = totals[0];
  if (kBlocks == 1) sum += __shfl_xor_sync(~0u, sum, 16);
#pragma unroll
  for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane % 8 || (kBlocks == 1 && lane >= 16)) return;
  const KeyTile tile = select(lane >= 16, tiles[kBlocks - 1], tiles[0]);
  const int block = lane & 8 ? rows.block[1] : rows.block[0];
  if (!(sum > 0.f) || !chooses(params, block, tile) || tile.end == 0) return;  // nor what is no number
  const int run = (block - tile.block - params.local_blocks) / params.slash_run_length;
  const int list = (head - params.first_head) / params.heads_per_list;
  add_to_distance(params, document, list, run, __float2ll_rn(sum * kMassScale));
}

// Whether rows of the warp see keys of the tile.
__device__ __forceinline__ bool warp_sees(const ThreadRows& rows, const KeyTile& tile) {
  return __any_sync(~0u, max(rows.position[0], rows.position[1]) >= tile.block * kBlock);
}

// Whether rows of the warp choose among the keys of a block.
__device__ __forceinline__ bool warp_chooses(const ProbeParams& params, const ThreadRows& rows, int block) {
  return __any_sync(~0u, max(rows.block[0], rows.block[1]) - block >= params.local_blocks);
}

// Adds the exponentials of the warp's rows and kBlocks blocks of keys to the rows' sums.
template <int kBlocks>
__device__ __forceinline__ void take_sums(float (&s)[32 * kBlocks], const ThreadRows& rows, const RowTile& row_tile,
                                          const KeyTile (&tiles)[kBlocks], SlotSums (&sums)[2], float scale_log2) {
  if (!warp_sees(rows, tiles[0])) return;  // nor those of the second block, which comes later
  const auto is_whole = [&](const KeyTile& tile) {
    return tile.begin == 0 && tile.end == kBlock && tile.block * kBlock + kBlock <= row_tile.first_position + 1;
  };
  if (!is_whole(tiles[0])) mask_causal<0>(s, rows, tiles[0]);
  add_sums<0>(sums, s, scale_log2);
  if constexpr (kBlocks == 2) {
    if (!is_whole(tiles[1])) mask_causal<1>(s, rows, tiles[1]);
    add_sums<1>(sums, s, scale_log2);
  }
}

// Adds them to the mass of columns and to that of distances. `columns`: columns_of the tiles.
template <int kBlocks>
__device__ __forceinline__ void take_mass(const ProbeParams& params, const ProbeDocument& document, int head,
                                          float (&mass)[16 * kBlocks], float (&s)[32 * kBlocks], const ThreadRows& rows,
                                          const KeyTile (&tiles)[kBlocks], const uint64_t (&columns)[kBlocks],
                                          float scale_log2) {
  if (!warp_chooses(params, rows, tiles[0].block)) return;
  float totals[2 * kBlocks];
  if (~columns[0]) mask_columns<0>(s, columns[0]);
  add_mass<0>(params, mass, totals, s, rows, tiles[0], scale_log2);
  if constexpr (kBlocks == 2) {
    if (~columns[1]) mask_columns<1>(s, columns[1]);
    add_mass<1>(params, mass, totals + 2, s, rows, tiles[1], scale_log2);
  }
  add_distances<kBlocks>(params, document, head, totals, rows, tiles);
}

// The last block that a row tile has to do with, and whether keys from a block on have none.
template <ProbePass kPass>
__device__ __forceinline__ int last_key_block(const ProbeParams& params, const RowTile& tile) {
  return kPass == kProbeSums ? tile.last_position >> 6 : tile.last_block - params.local_blocks;
}

// The tiles of keys from `first` on that are multiplied together; what is missing repeats the first, without keys.
template <int kBlocks>
__device__ __forceinline__ void key_tiles_at(const ProbeParams& params, KeyTile (&tiles)[kBlocks], int first, int end) {
  tiles[0] = params.key_tiles[first];
  if constexpr (kBlocks == 2)
    tiles[1] = first + 1 < end ? params.key_tiles[first + 1] : KeyTile{tiles[0].slot, tiles[0].block, 0, 0};
}

}  // namespace mtraining::probe
