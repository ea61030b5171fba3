// The three passes over the scores of probe rows: maximum, total and mass.
//
// A CTA keeps the probe rows of some heads of one key/value head in shared memory. Each of its 16 warps takes 32 keys
// at a time, straight from global memory into the fragments of the left operand, and multiplies them with all of the
// rows, 16 at a time. Warps meet where the document changes, and nowhere else.
//
// A score depends on its row and its key only: where a key lies in a fragment, and which keys lie beside it, does not
// enter. So equal keys get equal mass, and the mass of a key is the same on any number of ranks.
#pragma once
#include <algorithm>
#include <climits>

#include "check.cuh"
#include "probe_passes.h"
#include "probe_place.cuh"
#include "sm80_tile.cuh"

namespace mtraining::probe {

using sm80::launder;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kKeys = 32;        // of a warp, at a time
constexpr int kTileRows = 8;     // rows of a RowTile
constexpr int kFragments = 4;    // a thread holds keys lane / 4 + 8 * i of a warp's, i < 4

// Which lanes of which key/value head a CTA works on: a part of the head's group, cut to the launch's lanes.
struct LaneRange {
  int kv_head, batch, begin, end;
};

__device__ __forceinline__ LaneRange lane_range(const ProbeParams& params, int heads_per_cta) {
  const int group = params.num_heads / params.num_kv_heads;
  const int parts = (group + heads_per_cta - 1) / heads_per_cta;
  const int kv = params.first_lane / group + blockIdx.y / parts;  // over batch rows and key/value heads
  const int first = kv * group + blockIdx.y % parts * heads_per_cta;
  return {kv % params.num_kv_heads, kv / params.num_kv_heads, max(first, params.first_lane),
          min(min(first + heads_per_cta, (kv + 1) * group), params.end_lane)};
}

extern __shared__ __align__(16) unsigned char shared_memory[];

// Shared memory, for `tiles` row tiles of all heads and `num_row_tiles` of one. Nothing but two sizes in registers.
template <int kHeadDim>
struct Shared {
  static constexpr int kChunks = kHeadDim / 32;  // 16-byte chunks of a row that one thread multiplies
  static constexpr int kTileBytes = kChunks * 32 * 16 + kTileRows * 12;
  static constexpr int kRowTileBytes = sizeof(RowTile) + kTileRows * 4;

  int tiles, num_row_tiles;

  // [tiles][kChunks][32]: what lane i multiplies: chunk 4 * c + i % 4 of row i / 4.
  __device__ __forceinline__ uint4* rows() const { return reinterpret_cast<uint4*>(shared_memory); }
  // [8 * tiles]: total: sums; mass: weights, as floats.
  __device__ __forceinline__ unsigned long long* wide() const {
    return reinterpret_cast<unsigned long long*>(rows() + tiles * kChunks * 32);
  }
  __device__ __forceinline__ float* weights() const { return reinterpret_cast<float*>(wide()); }
  // [num_row_tiles]
  __device__ __forceinline__ RowTile* row_tiles() const {
    return reinterpret_cast<RowTile*>(wide() + tiles * kTileRows);
  }
  // [8 * tiles]: total, mass: -maximum in log2 units; maximum: the maximum, `ordered`.
  __device__ __forceinline__ float* shift() const { return reinterpret_cast<float*>(row_tiles() + num_row_tiles); }
  __device__ __forceinline__ int* maxima() const { return reinterpret_cast<int*>(shift()); }
  // [8 * num_row_tiles]: global; -1 past the rows of a tile.
  __device__ __forceinline__ int* positions() const {
    return reinterpret_cast<int*>(shift() + tiles * kTileRows);
  }
};

// Floats in an order that integers keep.
__device__ __forceinline__ int ordered(float x) {
  const int bits = __float_as_int(x + 0.f);  // no -0
  return bits ^ ((bits >> 31) & INT_MAX);
}
__device__ __forceinline__ float from_ordered(int x) { return __int_as_float(x ^ ((x >> 31) & INT_MAX)); }

__device__ __forceinline__ void atomic_max(float* address, float value) {
  if (value >= 0.f)
    atomicMax(reinterpret_cast<int*>(address), __float_as_int(value));
  else
    atomicMin(reinterpret_cast<unsigned*>(address), __float_as_uint(value));
}

// Calls body(slot of the row in shared memory, probe row, lane) for every row of the CTA that exists.
template <typename Body>
__device__ __forceinline__ void for_each_row(const LaneRange& lanes, const ProbeDocument& document,
                                             const RowTile* row_tiles, const Body& body) {
  const int rows_of_lane = document.num_row_tiles * kTileRows;
  for (int i = threadIdx.x; i < (lanes.end - lanes.begin) * rows_of_lane; i += kThreads) {
    const RowTile& tile = row_tiles[i % rows_of_lane / kTileRows];
    if (i % kTileRows < tile.num_rows) body(i, tile.first_row + i % kTileRows, lanes.begin + i / rows_of_lane);
  }
}

// Brings a document's rows, and what each pass knows of them, into shared memory.
template <ProbePass kPass, typename T, int kHeadDim>
__device__ void load_rows(const ProbeParams& params, const LaneRange& lanes, const ProbeDocument& document,
                          const Shared<kHeadDim>& shared) {
  constexpr int kChunks = Shared<kHeadDim>::kChunks;
  for (int i = threadIdx.x; i < document.num_row_tiles; i += kThreads)
    shared.row_tiles()[i] = params.row_tiles[document.first_row_tile + i];
  __syncthreads();
  const int tiles = (lanes.end - lanes.begin) * document.num_row_tiles;
  for (int i = threadIdx.x; i < tiles * kChunks * 32; i += kThreads) {
    const int row = i % 32 / 4, chunk = i / 32 % kChunks * 4 + i % 4, tile = i / (32 * kChunks);
    const RowTile& from = shared.row_tiles()[tile % document.num_row_tiles];
    const int head = (lanes.begin + tile / document.num_row_tiles) % params.num_heads;
    const T* source = static_cast<const T*>(params.probe.data) + lanes.batch * params.probe.stride_batch +
                      int64_t{from.first_row + row} * params.probe.stride_seq + head * params.probe.stride_head;
    shared.rows()[i] = row < from.num_rows ? *reinterpret_cast<const uint4*>(source + chunk * 8) : uint4{0, 0, 0, 0};
  }
  for (int i = threadIdx.x; i < document.num_row_tiles * kTileRows; i += kThreads) {
    const RowTile& tile = shared.row_tiles()[i / kTileRows];
    shared.positions()[i] =
        i % kTileRows < tile.num_rows ? params.positions[tile.first_row + i % kTileRows] : -1;
  }
  for (int i = threadIdx.x; i < tiles * kTileRows; i += kThreads) {
    shared.maxima()[i] = kPass == kProbeMaximum ? ordered(-INFINITY) : 0;  // the bits of a shift of 0
    shared.wide()[i] = 0;
  }
  __syncthreads();
  if (kPass == kProbeMaximum) return;
  const float scale_log2 = params.softmax_scale * kLog2E;
  for_each_row(lanes, document, shared.row_tiles(), [&](int i, int row, int lane) {
    const int64_t at = int64_t{lane} * params.num_probe_rows + row;
    shared.shift()[i] = -params.maximum[at] * scale_log2;
    if (kPass == kProbeMass) {
      const double total = static_cast<double>(params.total[at]) * kTotalUnit;
      shared.weights()[i] = static_cast<float>(1. / (total * document.num_rows));
    }
  });
  __syncthreads();
}

// The keys of a warp, as the left operand, and where they are.
template <int kHeadDim>
struct Keys {
  static constexpr int kSteps = kHeadDim / 16;
  uint32_t fragments[2][kSteps][4];  // of keys 16 * m .. 16 * m + 15
  int first;                         // position of the first of the 32
  int begin, end;                    // positions begin .. end - 1 are keys of the tile

  template <typename T>
  __device__ __forceinline__ void load(const ProbeParams& params, const LaneRange& lanes, const KeyTile& tile,
                                       int half) {
    const int lane = threadIdx.x % 32;
    first = tile.block * kBlock + half * kKeys;
    begin = tile.block * kBlock + tile.begin;
    end = tile.block * kBlock + tile.end;
    const T* source = static_cast<const T*>(params.key.data) + lanes.batch * params.key.stride_batch +
                      lanes.kv_head * params.key.stride_head + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const int row = half * kKeys + lane / 4 + 8 * i;
      const bool inside = tile.begin <= row && row < tile.end;
      const T* key = source + (int64_t{tile.slot} * kBlock + (inside ? row : tile.begin)) * params.key.stride_seq;
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        // The select is what moves the words to where a fragment has them, once and not before each product.
        const uint4 chunk = __ldg(reinterpret_cast<const uint4*>(key + step * 16));
        fragments[i / 2][step][i % 2] = inside ? chunk.x : 0;
        fragments[i / 2][step][i % 2 + 2] = inside ? chunk.y : 0;
        fragments[i / 2][step + 1][i % 2] = inside ? chunk.z : 0;
        fragments[i / 2][step + 1][i % 2 + 2] = inside ? chunk.w : 0;
      }
    }
  }
};

// s[row tile][16 keys][4] = keys * rows of two row tiles. Element e of s[t][m] is key lane / 4 + 16 * m + 8 * (e / 2)
// and row 2 * (lane % 4) + e % 2 of tile t. Both operands take the dimensions in the order that 16-byte loads give.
template <typename T, int kHeadDim>
__device__ __forceinline__ void score(float (&s)[2][2][4], const Keys<kHeadDim>& keys, const uint4* rows) {
  constexpr int kChunks = kHeadDim / 32;
#pragma unroll
  for (int t = 0; t < 2; ++t) sm80::clear(s[t]);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const uint4 row[2] = {rows[c * 32 + threadIdx.x % 32], rows[(kChunks + c) * 32 + threadIdx.x % 32]};
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int t = 0; t < 2; ++t) sm80::multiply<T>(s[t][m], keys.fragments[m][2 * c], row[t].x, row[t].y);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int t = 0; t < 2; ++t) sm80::multiply<T>(s[t][m], keys.fragments[m][2 * c + 1], row[t].z, row[t].w);
  }
}

// Takes the scores of what a row does not see away: keys after its position, and keys outside the tile.
template <int kHeadDim>
__device__ __forceinline__ void mask(float (&s)[2][2][4], const Keys<kHeadDim>& keys, const int* positions) {
  const unsigned lane = launder(threadIdx.x % 32);
#pragma unroll
  for (int t = 0; t < 2; ++t)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int position = keys.first + static_cast<int>(lane / 4) + 8 * (e / 2);
      const int end = min(keys.end, positions[t * kTileRows + 2 * (lane % 4) + e % 2] + 1);
      if (position < keys.begin || end <= position) s[t][e / 4][e % 4] = -INFINITY;
    }
}

// Of values[t][c], over the eight threads that hold keys of the same rows, the one of row tile lane / 16, row
// 2 * (lane % 4) + lane / 8 % 2; always combined in the same order.
template <typename Combine>
__device__ __forceinline__ float combine_over_keys(const float (&values)[2][2], const Combine& combine) {
  const bool upper_tile = threadIdx.x & 16, upper_row = threadIdx.x & 8;
  float kept[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float received = __shfl_xor_sync(~0u, upper_tile ? values[0][c] : values[1][c], 16);
    kept[c] = combine(upper_tile ? values[1][c] : values[0][c], received);
  }
  const float received = __shfl_xor_sync(~0u, upper_row ? kept[0] : kept[1], 8);
  const float one = combine(upper_row ? kept[1] : kept[0], received);
  return combine(one, __shfl_xor_sync(~0u, one, 4));
}

// Adds two row tiles of one head to the maxima or totals in shared memory. `row` is their first row there.
template <ProbePass kPass, int kHeadDim>
__device__ __forceinline__ void reduce_rows(const Shared<kHeadDim>& shared, const float (&s)[2][2][4], int row,
                                            float scale_log2) {
  const unsigned lane = launder(threadIdx.x % 32);
  float values[2][2];
#pragma unroll
  for (int t = 0; t < 2; ++t)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (kPass == kProbeTotal) {
        const float shift = shared.shift()[row + t * kTileRows + 2 * (lane % 4) + c];
        values[t][c] = 0.f;
#pragma unroll
        for (int i = 0; i < kFragments; ++i)
          values[t][c] += exp2_approx(fmaf(s[t][i / 2][i % 2 * 2 + c], scale_log2, shift));
      } else {
        values[t][c] = fmaxf(fmaxf(s[t][0][c], s[t][0][2 + c]), fmaxf(s[t][1][c], s[t][1][2 + c]));
      }
    }
  const unsigned own = row + lane / 16 * kTileRows + 2 * (lane % 4) + lane / 8 % 2;
  if (kPass == kProbeTotal) {
    const float sum = combine_over_keys(values, [](float a, float b) { return a + b; });
    if (lane % 8 < 4) atomicAdd(shared.wide() + own, __float2ull_rn(sum * kTotalScale));
  } else {
    const float top = combine_over_keys(values, [](float a, float b) { return fmaxf(a, b); });
    if (lane % 8 < 4) atomicMax(shared.maxima() + own, ordered(top));
  }
}

// The sum over the four threads that hold the rows of a key: of key lane / 4 + 8 * (lane % 4).
__device__ __forceinline__ float sum_of_own_key(const float (&mass)[kFragments]) {
  const int mine = threadIdx.x % 4;
  float result = 0.f;
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    float sum = mass[i] + __shfl_xor_sync(~0u, mass[i], 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (mine == i) result = sum;
  }
  return result;
}

// Adds one row tile to the mass of a thread's keys.
template <int kHeadDim>
__device__ __forceinline__ void add_mass(float (&mass)[kFragments], const Shared<kHeadDim>& shared,
                                         const float (&s)[2][4], int row, float scale_log2) {
  const int column = row + 2 * (threadIdx.x % 4);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float shift = shared.shift()[column + c], weight = shared.weights()[column + c];
#pragma unroll
    for (int i = 0; i < kFragments; ++i)
      mass[i] = fmaf(exp2_approx(fmaf(s[i / 2][i % 2 * 2 + c], scale_log2, shift)), weight, mass[i]);
  }
}

// Writes the mass of a warp's keys in one row group, 0 where there is nothing to choose, and starts the next group.
__device__ __forceinline__ void write_mass(const ProbeParams& params, const ProbeDocument& document,
                                           const KeyTile& tile, int half, int query_lane, int group,
                                           float (&mass)[kFragments]) {
  const float sum = sum_of_own_key(mass);
  const unsigned thread = launder(threadIdx.x % 32);
  const int row = half * kKeys + thread / 4 + thread % 4 * 8;
  const int first = max(tile.begin, document.start + params.sink_tokens - tile.block * kBlock);
  const bool counts = first <= row && row < tile.end;
  const int lane = query_lane - params.first_lane;
  const int list = lane / params.heads_per_list, member = lane % params.heads_per_list;
  const int part = member * params.num_ranks + list / params.lists_per_rank;
  mass_of_slot(params, document, part, list % params.lists_per_rank, group, tile.slot - document.first_slot)[row] =
      counts ? sum : 0.f;
#pragma unroll
  for (int i = 0; i < kFragments; ++i) mass[i] = 0.f;
}

// One warp's 32 keys against all rows of the CTA.
template <ProbePass kPass, typename T, int kHeadDim>
__device__ __forceinline__ void visit_keys(const ProbeParams& params, const LaneRange& lanes,
                                           const ProbeDocument& document, const Shared<kHeadDim>& shared,
                                           const KeyTile& tile, int half) {
  const float scale_log2 = params.softmax_scale * kLog2E;
  const int tiles = (lanes.end - lanes.begin) * document.num_row_tiles;
  Keys<kHeadDim> keys;
  keys.template load<T>(params, lanes, tile, half);
  float mass[kFragments] = {};
#pragma unroll 1
  for (int at = 0, t = 0; at < tiles; at += 2, t = t + 2 == document.num_row_tiles ? 0 : t + 2) {
    const RowTile* const pair = shared.row_tiles() + t;
    const uint4* const rows = shared.rows() + at * Shared<kHeadDim>::kChunks * 32;
    float s[2][2][4];
    if (kPass != kProbeMass) {
      if (keys.first > max(pair[0].last_position, pair[1].last_position)) continue;
      score<T>(s, keys, rows);
      if (keys.first < keys.begin || keys.first + kKeys > min(keys.end, pair[0].first_position + 1))
        mask(s, keys, shared.positions() + t * kTileRows);
      reduce_rows<kPass>(shared, s, at * kTileRows, scale_log2);
    } else {
      const bool kept[2] = {pair[0].query_block - tile.block >= params.local_blocks,
                            pair[1].query_block - tile.block >= params.local_blocks};
      if (kept[0] || kept[1]) score<T>(s, keys, rows);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (kept[i]) add_mass(mass, shared, s[i], (at + i) * kTileRows, scale_log2);
        if (pair[i].ends_group)
          write_mass(params, document, tile, half, lanes.begin + at / document.num_row_tiles, pair[i].group, mass);
      }
    }
  }
}

// Hands the maxima or totals of a CTA on.
template <ProbePass kPass, int kHeadDim>
__device__ __forceinline__ void publish_rows(const ProbeParams& params, const LaneRange& lanes,
                                             const ProbeDocument& document, const Shared<kHeadDim>& shared) {
  for_each_row(lanes, document, shared.row_tiles(), [&](int i, int row, int lane) {
    const int64_t at = int64_t{lane} * params.num_probe_rows + row;
    if (kPass == kProbeTotal)
      atomicAdd(reinterpret_cast<unsigned long long*>(params.total + at), shared.wide()[i]);
    else
      atomic_max(params.maximum + at, from_ordered(shared.maxima()[i]));
  });
}

// CTA x takes an equal part of the key tiles, from this one on.
__device__ __forceinline__ int first_key_tile(const ProbeParams& params, int cta) {
  return static_cast<int>(int64_t{params.num_key_tiles} * cta / gridDim.x);
}

// Walks the document of its key tiles one after the other.
template <ProbePass kPass, typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    scores_kernel(const __grid_constant__ ProbeParams params, int heads_per_cta) {
  __shared__ LaneRange lanes;  // where they cost no registers
  __shared__ ProbeDocument document;
  if (threadIdx.x == 0) lanes = lane_range(params, heads_per_cta);
  __syncthreads();
  if (lanes.begin >= lanes.end) return;
  const Shared<kHeadDim> shared{heads_per_cta * params.most_row_tiles, params.most_row_tiles};
#pragma unroll 1
  for (int d = 0; d < params.num_documents; ++d) {
    const int from = max(first_key_tile(params, blockIdx.x), params.documents[d].first_key_tile);
    const int to = min(first_key_tile(params, blockIdx.x + 1), params.documents[d].end_key_tile);
    if (from >= to) continue;
    if (threadIdx.x == 0) document = params.documents[d];
    __syncthreads();
    load_rows<kPass, T>(params, lanes, document, shared);
#pragma unroll 1
    for (int half = 2 * from + threadIdx.x / 32; half < 2 * to; half += kWarps)
      visit_keys<kPass, T>(params, lanes, document, shared, params.key_tiles[half / 2], half % 2);
    __syncthreads();
    if (kPass != kProbeMass) publish_rows<kPass>(params, lanes, document, shared);
    __syncthreads();
  }
}

// CTAs side by side: as many as fill the GPU, in several rounds where a round cannot be filled exactly.
inline int num_splits(int multiprocessors, int ctas_of_a_split, int num_key_tiles) {
  const int rounds = 8 * ctas_of_a_split <= multiprocessors ? 1 : 3;
  const int most = (2 * num_key_tiles + kWarps - 1) / kWarps;  // so that every warp has keys
  return std::max(1, std::min(most, rounds * multiprocessors / ctas_of_a_split));
}

template <ProbePass kPass, typename T, int kHeadDim>
const char* launch_pass(const ProbeParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  using Memory = Shared<kHeadDim>;
  const int group = params.num_heads / params.num_kv_heads;
  const int fixed = params.most_row_tiles * Memory::kRowTileBytes;
  const int of_head = params.most_row_tiles * Memory::kTileBytes;
  const int fitting = (limits.shared_bytes - fixed) / of_head;
  if (fitting < 1) return "the probe rows of one head do not fit into shared memory";
  const int parts = (group + fitting - 1) / fitting, heads_per_cta = (group + parts - 1) / parts;
  const int kv_heads = (params.end_lane - 1) / group - params.first_lane / group + 1;
  const int bytes = fixed + heads_per_cta * of_head;
  const auto kernel = scores_kernel<kPass, T, kHeadDim>;
  if (const char* error =
          describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)))
    return error;
  const dim3 grid(num_splits(limits.multiprocessors, kv_heads * parts, params.num_key_tiles), kv_heads * parts);
  kernel<<<grid, kThreads, bytes, stream>>>(params, heads_per_cta);
  return launch_error();
}

template <typename T, int kHeadDim>
const char* launch_scores(ProbePass pass, const ProbeParams& params, const DeviceLimits& limits,
                          cudaStream_t stream) {
  switch (pass) {
    case kProbeMaximum: return launch_pass<kProbeMaximum, T, kHeadDim>(params, limits, stream);
    case kProbeTotal: return launch_pass<kProbeTotal, T, kHeadDim>(params, limits, stream);
    default: return launch_pass<kProbeMass, T, kHeadDim>(params, limits, stream);
  }
}

}  // namespace mtraining::probe
