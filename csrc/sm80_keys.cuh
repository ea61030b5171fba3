// What the query-side kernels, forward and backward, share: where a CTA's queries are, and the keys that they meet.
#pragma once
#include <cmath>

#include "check.cuh"
#include "sm80_launch.h"
#include "sm80_tile.cuh"
#include "walk.cuh"

namespace mtraining::sm80 {

// Where one CTA's query tile is.
struct QueryPlace {
  Tile tile;
  int batch, head;
  int64_t token;  // first token of the slot in the local tensor
};

__device__ __forceinline__ QueryPlace query_place(const AttentionParams& params, int x, int y) {
  QueryPlace place;
  place.tile = params.query_tiles[params.num_query_tiles - 1 - x];  // the longest first
  place.batch = y / params.num_heads, place.head = y % params.num_heads;
  place.token = int64_t{place.tile.slot} * kBlock;
  return place;
}

// One row of a [batch, seq, heads, head_dim] tensor.
template <typename T>
__device__ __forceinline__ T* row_pointer(const Rows& rows, int64_t batch, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + batch * rows.stride_batch + token * rows.stride_seq + head * rows.stride_head;
}

__device__ __forceinline__ float* row_pointer(const RowScalars& rows, int64_t batch, int64_t token, int64_t head) {
  return rows.data + batch * rows.stride_batch + head * rows.stride_head + token;
}

// Where the key and value tiles come from that one query tile meets in a pass. Lives in shared memory.
template <typename T>
struct KeySource {
  const T* key;
  const T* value;
  SlashList slashes;
  WordList words;
  ChunkList<false> chunks;
  int first_token;  // of the document
};

// One tile of keys.
struct KeyStep {
  int place;     // key slot, or word of packed columns
  int distance;  // slash: query block - key block; lists: the block's place in the list
};

// What a block list says of a step. In shared memory, where it costs no registers until the tile has arrived.
struct ListMask {
  uint64_t rows;  // of the query block that see the keys
  int distance;   // query block - key block
  int first;      // the document's first column in the block of keys
};

// Visits a source's tiles in order.
template <int kHeadDim, typename T, Pass kPass>
class KeyTiles {
 public:
  static constexpr bool kVertical = kPass == Pass::kVertical;

  __device__ __forceinline__ KeyTiles(const AttentionParams& params, const KeySource<T>& source)
      : params_(params), source_(source) {}

  static __device__ __forceinline__ KeySource<T> source(const AttentionParams& params, const QueryPlace& place) {
    const int64_t index_row = place.tile.index_row + place.batch;
    const int list = list_of(params, place.head);
    KeySource<T> source;
    if constexpr (kVertical) {
      source.key = row_pointer<const T>(params.packed_key, index_row, 0, list);
      source.value = row_pointer<const T>(params.packed_value, index_row, 0, list);
      const int64_t first_tile = (int64_t{place.batch} * params.num_lists + list) * params.num_query_tiles;
      const int64_t tile = first_tile + params.num_query_tiles - 1 - static_cast<int>(blockIdx.x);
      source.words = {params.vertical_words + tile * params.num_words, 1, 0, params.num_words};
    } else {
      const int kv_head = place.head / (params.num_heads / params.num_kv_heads);
      source.key = row_pointer<const T>(params.key, place.batch, 0, kv_head);
      source.value = row_pointer<const T>(params.value, place.batch, 0, kv_head);
      const int first_block = place.tile.first_token / kBlock;
      source.first_token = place.tile.first_token;
      if constexpr (kPass == Pass::kLists)
        source.chunks = chunk_list<false>(params.query_lists, int64_t{place.batch} * params.num_lists + list,
                                          place.tile.slot, params.chunk_blocks, first_block, place.tile.block);
      else
        source.slashes = {table_row(params.slash, index_row, list), *table_row(params.num_slash, index_row, list),
                          place.tile.block, place.tile.block - first_block};
    }
    return source;
  }

  __device__ __forceinline__ bool next(KeyStep& step) {
    if constexpr (kVertical)
      return words_.next(source_.words, step.place);
    else if constexpr (kPass == Pass::kLists)
      return chunks_.next(source_.chunks, params_.key_slots, step.place, step.distance);
    else
      return slashes_.next(source_.slashes, params_.key_slots, step.place, step.distance);
  }

  // Starts the copy of a step's key rows to `stage` and of its value rows behind them; with lists, writes their mask.
  __device__ __forceinline__ void load(const KeyStep& step, uint32_t stage, ListMask& mask) const {
    if constexpr (kPass == Pass::kLists) {
      const ChunkList<false>& list = source_.chunks;
      const int block = list.block(step.distance);
      if (threadIdx.x == 0)
        mask = {list.rows(step.distance), list.last_block - block, source_.first_token - block * kBlock};
    }
    const int64_t row = int64_t{step.place} * kBlock;
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
  SlashWalker<-1> slashes_;
  WordWalker words_;
  ChunkWalker<false> chunks_;
};

// Hides (-inf) the scores of keys that a query may not see. `document_column` is where the document begins, counted
// from the diagonal block's first column.
template <Pass kPass, typename T>
__device__ __forceinline__ void mask_scores(float (&s)[8][4], const KeySource<T>& source, const KeyStep& step,
                                            const ListMask& mask, int document_column, int row, int quad) {
  if constexpr (kPass == Pass::kVertical) {
    const uint64_t word = source.words.words[step.place];
    if (word == ~uint64_t{0}) return;
    const uint32_t low = static_cast<uint32_t>(word) >> (2 * quad);
    const uint32_t high = static_cast<uint32_t>(word >> 32) >> (2 * quad);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t bits = j < 4 ? low >> (8 * j) : high >> (8 * (j - 4));
      if (!(bits & 1)) s[j][0] = -INFINITY, s[j][2] = -INFINITY;
      if (!(bits & 2)) s[j][1] = -INFINITY, s[j][3] = -INFINITY;
    }
  } else {
    const int distance = kPass == Pass::kLists ? mask.distance : step.distance;
    // The document's first column in this block.
    const int first = kPass == Pass::kLists ? mask.first : document_column + distance * kBlock;
    if (distance > 0 && first <= 0 && (kPass == Pass::kSlash || mask.rows == ~uint64_t{0})) return;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * j + 2 * quad + i % 2;
        const bool causal = distance > 0 || column <= row + 8 * (i / 2);
        const bool sees = kPass == Pass::kSlash || (mask.rows >> (row + 8 * (i / 2))) & 1;
        if (!causal || !sees || column < first) s[j][i] = -INFINITY;
      }
  }
}

__device__ __forceinline__ void copy(uint32_t (&to)[4], const uint32_t (&from)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// Whether row `row` of the slot is the tile's own.
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
