// Shared by the kernels with one query tile per CTA, forward and dQ: its coordinates and the key tiles that it visits.
#pragma once
#include <cmath>

#include "check.cuh"
#include "sm80_launch.h"
#include "sm80_tile.cuh"
#include "tile_scheduler.cuh"

namespace mtraining::sm80 {

// The query tile of a CTA.
struct QueryCoord {
  Tile tile;
  int batch, head;
  int64_t token;  // first token of the slot in the local tensor
};

__device__ __forceinline__ QueryCoord query_coord(const AttentionParams& params, int x, int y) {
  QueryCoord coord;
  coord.tile = params.query_tiles[params.num_query_tiles - 1 - x];  // the tiles with the most keys first
  coord.batch = y / params.num_heads, coord.head = y % params.num_heads;
  coord.token = int64_t{coord.tile.slot} * kBlock;
  return coord;
}

// One row of a [batch, seq, heads, head_dim] tensor.
template <typename T>
__device__ __forceinline__ T* row_pointer(const Rows& rows, int64_t batch, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + batch * rows.stride_batch + token * rows.stride_seq + head * rows.stride_head;
}

__device__ __forceinline__ float* row_pointer(const RowScalars& rows, int64_t batch, int64_t token, int64_t head) {
  return rows.data + batch * rows.stride_batch + head * rows.stride_head + token;
}

// The keys and values that one query tile visits in a pass. Lives in shared memory.
template <typename T>
struct KeySource {
  const T* key;
  const T* value;
  SlashList slashes;
  BitmaskList bitmask;
  ChunkList<false> chunks;
  int first_token;  // of the document
};

// One tile of keys.
struct KeyStep {
  int index;     // key slot, or tile of packed columns
  int distance;  // slash: query block - key block; lists: the block's index in the list
};

// The mask of a step of a block list. In shared memory, where it costs no registers until the tile has arrived.
struct ListMask {
  uint64_t rows;  // of the query block that attend to the keys
  int distance;   // query block - key block
  int first;      // first column of the document in the key block
};

// Visits the tiles of a source in order.
template <int kHeadDim, typename T, Pass kPass>
class KeyTiles {
 public:
  static constexpr bool kVertical = kPass == Pass::kVertical;

  __device__ __forceinline__ KeyTiles(const AttentionParams& params, const KeySource<T>& source)
      : params_(params), source_(source) {}

  static __device__ __forceinline__ KeySource<T> source(const AttentionParams& params, const QueryCoord& coord) {
    const int64_t index_row = coord.tile.index_row + coord.batch;
    const int list = list_of(params, coord.head);
    KeySource<T> source;
    if constexpr (kVertical) {
      source.key = row_pointer<const T>(params.packed_key, index_row, 0, list);
      source.value = row_pointer<const T>(params.packed_value, index_row, 0, list);
      const int64_t first_tile = (int64_t{coord.batch} * params.num_lists + list) * params.num_query_tiles;
      const int64_t tile = first_tile + params.num_query_tiles - 1 - static_cast<int>(blockIdx.x);
      source.bitmask = {params.vertical_bitmask + tile * params.num_column_tiles, 1, 0, params.num_column_tiles};
    } else {
      const int kv_head = coord.head / (params.num_heads / params.num_kv_heads);
      source.key = row_pointer<const T>(params.key, coord.batch, 0, kv_head);
      source.value = row_pointer<const T>(params.value, coord.batch, 0, kv_head);
      const int first_block = coord.tile.first_token / kBlock;
      source.first_token = coord.tile.first_token;
      if constexpr (kPass == Pass::kLists)
        source.chunks = chunk_list<false>(params.query_lists, int64_t{coord.batch} * params.num_lists + list,
                                          coord.tile.slot, params.chunk_blocks, first_block, coord.tile.block);
      else
        source.slashes = {table_row(params.slash, index_row, list), *table_row(params.num_slash, index_row, list),
                          coord.tile.block, coord.tile.block - first_block};
    }
    return source;
  }

  __device__ __forceinline__ bool next_tile(KeyStep& step) {
    if constexpr (kVertical)
      return bitmask_.next_tile(source_.bitmask, step.index);
    else if constexpr (kPass == Pass::kLists)
      return chunks_.next_tile(source_.chunks, params_.key_slots, step.index, step.distance);
    else
      return slashes_.next_tile(source_.slashes, params_.key_slots, step.index, step.distance);
  }

  // Starts the copy of a step's key rows to `stage`, followed by its value rows; with lists, writes the mask.
  __device__ __forceinline__ void load(const KeyStep& step, uint32_t stage, ListMask& mask) const {
    if constexpr (kPass == Pass::kLists) {
      const ChunkList<false>& list = source_.chunks;
      const int block = list.block(step.distance);
      if (threadIdx.x == 0)
        mask = {list.rows(step.distance), list.last_block - block, source_.first_token - block * kBlock};
    }
    const int64_t row = int64_t{step.index} * kBlock;
    const int64_t key_stride = kVertical ? params_.packed_key.stride_seq : params_.key.stride_seq;
    const int64_t value_stride = kVertical ? params_.packed_value.stride_seq : params_.value.stride_seq;
    const int valid_rows = (kVertical ? params_.max_vertical : params_.seq_kv) - static_cast<int>(row);
    load_tile<kHeadDim>(stage, source_.key + row * key_stride, key_stride, valid_rows);
    load_tile<kHeadDim>(stage + TileLayout<kHeadDim>::kBytes, source_.value + row * value_stride, value_stride,
                        valid_rows);
    copy_async_commit();
  }

 private:
  const AttentionParams& params_;
  const KeySource<T>& source_;
  SlashTileScheduler<-1> slashes_;
  BitmaskTileScheduler bitmask_;
  ChunkTileScheduler<false> chunks_;
};

// The source of a CTA's query tile, filled by its first thread.
template <typename Keys, typename T>
__device__ __forceinline__ const KeySource<T>& shared_source(const AttentionParams& params, const QueryCoord& coord) {
  __shared__ KeySource<T> source;
  if (threadIdx.x == 0) source = Keys::source(params, coord);
  __syncthreads();
  return source;
}

// Sets excluded elements of S to -inf. `document_column` is the document's first column, relative to the diagonal
// block's first column.
template <Pass kPass, typename T>
__device__ __forceinline__ void mask_scores(float (&s)[8][4], const KeySource<T>& source, const KeyStep& step,
                                            const ListMask& mask, int document_column, int row, int quad) {
  if constexpr (kPass == Pass::kVertical) {
    const uint64_t mask_bits = source.bitmask.masks[step.index];
    if (mask_bits == ~uint64_t{0}) return;
    const uint32_t low = static_cast<uint32_t>(mask_bits) >> (2 * quad);
    const uint32_t high = static_cast<uint32_t>(mask_bits >> 32) >> (2 * quad);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t bits = j < 4 ? low >> (8 * j) : high >> (8 * (j - 4));
      if (!(bits & 1)) s[j][0] = -INFINITY, s[j][2] = -INFINITY;
      if (!(bits & 2)) s[j][1] = -INFINITY, s[j][3] = -INFINITY;
    }
  } else {
    const int distance = kPass == Pass::kLists ? mask.distance : step.distance;
    // First column of the document in this block.
    const int first = kPass == Pass::kLists ? mask.first : document_column + distance * kBlock;
    if (distance > 0 && first <= 0 && (kPass == Pass::kSlash || mask.rows == ~uint64_t{0})) return;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * j + 2 * quad + i % 2;
        const bool causal = distance > 0 || column <= row + 8 * (i / 2);
        const bool attends = kPass == Pass::kSlash || (mask.rows >> (row + 8 * (i / 2))) & 1;
        if (!causal || !attends || column < first) s[j][i] = -INFINITY;
      }
  }
}

__device__ __forceinline__ void copy(uint32_t (&to)[4], const uint32_t (&from)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// Whether row `row` of the slot belongs to the tile.
__device__ __forceinline__ bool owns(const Tile& tile, int row) { return row >= tile.row_begin && row < tile.row_end; }

__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
template <typename T>
__device__ __forceinline__ void store_pair(T* to, float x, float y) {
  *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(x, y);
}

// Writes row r (of the thread's two) of an accumulator, times `scale`, to a row of float32 or of the inputs' dtype.
template <int kHeadDim, typename To>
__device__ __forceinline__ void store_row(To* to, int quad, const float (&acc)[kHeadDim / 8][4], int r, float scale) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j)
    store_pair(to + 8 * j + 2 * quad, acc[j][2 * r] * scale, acc[j][2 * r + 1] * scale);
}

}  // namespace mtraining::sm80
