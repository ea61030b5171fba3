// What the row-major kernels (forward and dQ) share: their work items and their producer.
//
// An item is a pair of query tiles of one head. It meets key blocks (slashes), then packed columns (verticals).
#pragma once
#include "sm90_stream.cuh"

namespace mtraining::sm90 {

// What the two warpgroups of a CTA work on, a tile each: neighbours of one head, or, where heads share a list, one tile
// for two heads of it. Then every tile of keys serves both, however isolated its distance is.
struct RowItem {
  int batch, head0, head1, tile0, tile1;  // tile1 is -1 where there is one tile; tile0 too where there is nothing to do

  __device__ __forceinline__ int head(int consumer) const { return consumer ? head1 : head0; }
  __device__ __forceinline__ int tile(int consumer) const { return consumer ? tile1 : tile0; }
};

// Items of one head, or of one pair of heads.
__host__ __device__ inline int row_items_per_head(const Job& job) {
  const AttentionParams& params = job.params;
  return job.pairs_heads ? params.num_query_tiles : (params.num_query_tiles + 1) / 2 * items_per_pair(params);
}
__host__ __device__ inline int num_row_items(const Job& job) {
  return job.params.batch * job.params.num_heads / (job.pairs_heads ? 2 : 1) * row_items_per_head(job);
}

// Head by head, the longest first.
__device__ __forceinline__ RowItem locate_rows(int item, const Job& job) {
  const AttentionParams& params = job.params;
  const int per_head = row_items_per_head(job), at = per_head - 1 - item % per_head, heads = item / per_head;
  if (job.pairs_heads) {
    const int first = 2 * heads % params.num_heads;
    return {2 * heads / params.num_heads, first, first + 1, at, at};
  }
  const int head = heads % params.num_heads;
  const int2 tiles = item_tiles(params, params.query_tiles, params.num_query_tiles, at);
  return {heads / params.num_heads, head, head, tiles.x, tiles.y};
}

// A slot with both tiles of the item, of `map`.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_rows(Stream& ring, const CUtensorMap* map, int index, const RowItem& item,
                                          int slot0, int slot1) {
  ring.acquire();
  if (threadIdx.x % 32 == 0) {
    ring.describe(kItem, index, 0, 0);
    constexpr int kTileBytes = Shape<kHeadDim>::kTileBytes;
    barrier_expect_bytes(ring.full_barrier(), (slot1 < 0 ? 1 : 2) * kTileBytes);
    load_tile<kHeadDim>(ring.tile(), map, ring.full_barrier(), slot0 * kBlock, item.head0, item.batch);
    if (slot1 >= 0)
      load_tile<kHeadDim>(ring.tile() + kTileBytes, map, ring.full_barrier(), slot1 * kBlock, item.head1, item.batch);
  }
  ring.step();
}

// A slot with 64 rows of keys, then of values.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_keys(const Stream& ring, const CUtensorMap* key, const CUtensorMap* value, int row,
                                          int head, int batch) {
  const uint32_t bar = ring.full_barrier();
  barrier_expect_bytes(bar, Stream::kSlotBytes);
  load_tile<kHeadDim>(ring.tile(), key, bar, row, head, batch);
  load_tile<kHeadDim>(ring.tile() + Shape<kHeadDim>::kTileBytes, value, bar, row, head, batch);
}

template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_slashes(Stream& ring, const TensorMaps& maps, const Job& job, const RowItem& item,
                                             int index_row, const Origins& origins, uint64_t first_word) {
  const AttentionParams& params = job.params;
  const int lane = threadIdx.x % 32, kv_head = item.head0 / (params.num_heads / params.num_kv_heads);
  const int list = list_of(params, item.head0);
  const int32_t* distances = table_row(params.slash, index_row, list) + lane / 2;
  const uint32_t* bits = list_bits(job, index_row, list);
  const int count = *table_row(params.num_slash, index_row, list) - lane / 2;
  int ahead = count > 0 ? *distances : kNoBlock;
  for (int first = 0;; first += kDistancesPerChunk) {
    const int distance = ahead, next = first + kDistancesPerChunk;
    ahead = next < count ? distances[next] : kNoBlock;
    bool inside;
    const Candidate candidate = slash_candidate<-1>(params, distance, origins, bits, params.key_slots, inside);
    if (!__any_sync(~0u, inside)) break;  // distances ascend: the rest are outside too
    send_candidates(ring, candidate, [&](int slot, uint32_t flags, int) {
      const uint64_t word = flags & kPartial ? first_word : ~0ull;
      ring.describe(flags, 0, word, word);
      send_keys<kHeadDim>(ring, &maps.key, &maps.value, slot * kBlock, kv_head, item.batch);
    });
  }
}

// The blocks of keys in the lists of either tile.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_listed(Stream& ring, const TensorMaps& maps, const Job& job, const RowItem& item,
                                            int slot0, int slot1, const Origins& origins, int first_column) {
  const AttentionParams& params = job.params;
  const int kv_head = item.head0 / (params.num_heads / params.num_kv_heads);
  const BlockLists& lists = params.query_lists;
  const int64_t list = static_cast<int64_t>(item.batch) * params.num_lists + list_of(params, item.head0);
  const auto pair = pair_lists<false>(lists, list, slot0, slot1);
  for (int first = 0;; first += kDistancesPerChunk) {
    bool inside;
    const Candidate candidate = list_candidate<-1>(params, lists, pair, first + threadIdx.x % 32 / 2, origins,
                                                   params.key_slots, inside);
    if (!__any_sync(~0u, inside)) break;
    send_candidates(ring, candidate, [&](int slot, uint32_t flags, int from) {
      const QueryWords words(params, lists, pair, first + from / 2, from % 2, flags);
      const int begin = flags & kPartial ? first_column : 0;
      const uint64_t columns = ~0ull << begin;  // for a warpgroup whose queries all see the keys
      ring.describe(flags | words.flags(), 0, words.word0 == ~0ull ? columns : words.word0,
                    words.word1 == ~0ull ? columns : words.word1, begin);
      send_keys<kHeadDim>(ring, &maps.key, &maps.value, slot * kBlock, kv_head, item.batch);
    });
  }
}

template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_verticals(Stream& ring, const TensorMaps& maps, const AttentionParams& params,
                                               const RowItem& item, int index_row) {
  const int lane = threadIdx.x % 32;
  const int list = list_of(params, item.head0);
  const int64_t first_tile = static_cast<int64_t>(item.batch * params.num_lists + list) * params.num_query_tiles;
  const uint64_t* words0 = params.vertical_words + (first_tile + item.tile0) * params.num_words;
  const uint64_t* words1 = params.vertical_words + (first_tile + item.tile1) * params.num_words;
  for (int first = 0; first < params.num_words; first += 32) {
    const int w = first + lane;
    const bool first_needs = w < params.num_words && words0[w] != 0;
    const bool second_needs = w < params.num_words && item.tile1 >= 0 && words1[w] != 0;
    const Candidate candidate = {w, (first_needs ? kNeeded : 0) | (second_needs ? kNeeded << 1 : 0),
                                 first_needs || second_needs};
    send_candidates(ring, candidate, [&](int word, uint32_t flags, int) {
      ring.describe(flags, 0, words0[word], item.tile1 >= 0 ? words1[word] : 0);
      send_keys<kHeadDim>(ring, &maps.packed_key, &maps.packed_value, word * kBlock, list, index_row);
    });
  }
}

// The producer warp's whole life. With kGradOut a second slot, with the rows of grad_out, follows the one with the
// queries.
template <int kHeadDim, bool kGradOut, typename Stream>
__device__ __forceinline__ void produce_rows(Stream ring, const TensorMaps& maps, const Job& job) {
  const AttentionParams& params = job.params;
  const int num_items = num_row_items(job);
  for (int index = blockIdx.x; index < num_items;) {
    const int next = take_item(job);
    const RowItem item = locate_rows(index, job);
    if (item.tile0 >= 0) {
      const Tile &tile0 = params.query_tiles[item.tile0], &tile1 = params.query_tiles[max(item.tile1, 0)];
      const int slot0 = uniform(tile0.slot), slot1 = item.tile1 < 0 ? -1 : uniform(tile1.slot);
      const int index_row = tile0.index_row + item.batch, start = tile0.first_token;
      const Origins origins = {tile0.block, item.tile1 < 0 ? -kNoBlock : tile1.block, start / kBlock,
                               params.num_blocks - 1, start % kBlock != 0};
      send_rows<kHeadDim>(ring, &maps.query, index, item, slot0, slot1);
      if (kGradOut) send_rows<kHeadDim>(ring, &maps.grad_out, index, item, slot0, slot1);
      if (job.lists)
        send_listed<kHeadDim>(ring, maps, job, item, slot0, slot1, origins, start % kBlock);
      else if (job.slash)
        send_slashes<kHeadDim>(ring, maps, job, item, index_row, origins, ~0ull << (start % kBlock));
      if (job.vertical) send_verticals<kHeadDim>(ring, maps, params, item, index_row);
    }
    index = __shfl_sync(~0u, next, 0);
  }
  send_end(ring);
}

// Where a thread's two rows of an item are in the tensors of queries, and whether they are the tile's own.
struct ItemRows {
  int batch, head, first;
  bool valid0, valid1;

  __device__ ItemRows(const Job& job, int index, const Place& place) {
    const RowItem item = locate_rows(index, job);
    const int tile_index = item.tile(place.consumer);
    const Tile tile = job.params.query_tiles[max(tile_index, 0)];
    batch = item.batch, head = item.head(place.consumer), first = tile.slot * kBlock + place.first;
    valid0 = tile_index >= 0 && place.first >= tile.row_begin && place.first < tile.row_end;
    valid1 = tile_index >= 0 && place.first + 8 >= tile.row_begin && place.first + 8 < tile.row_end;
  }
  template <typename T>
  __device__ __forceinline__ T* row(const Rows& rows, int which) const {
    return static_cast<T*>(rows.data) + batch * rows.stride_batch + head * rows.stride_head +
           (first + 8 * which) * rows.stride_seq;
  }
  __device__ __forceinline__ float* scalar(const RowScalars& scalars, int which) const {
    return scalars.data + batch * scalars.stride_batch + head * scalars.stride_head + first + 8 * which;
  }
};

// Writes both rows, times a factor each: to `final`, in T, where that is a tensor, else to `partial`, in float32.
template <typename T, int kCount>
__device__ __forceinline__ void store_rows(const ItemRows& at, const Rows& partial, const Rows& final,
                                           const float (&x)[kCount], float factor0, float factor1, int quad) {
  if (final.data) {
    store_final_row(at.row<T>(final, 0), at.valid0, x, 0, factor0, quad);
    store_final_row(at.row<T>(final, 1), at.valid1, x, 1, factor1, quad);
  } else {
    if (at.valid0) store_row(at.row<float>(partial, 0), x, 0, factor0, quad);
    if (at.valid1) store_row(at.row<float>(partial, 1), x, 1, factor1, quad);
  }
}

// The diagonal block: column <= row, both counted inside the block; `row` is the first of the thread's two.
__device__ __forceinline__ void mask_after_row(float (&s)[32], int row, int quad, float masked) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (j * 8 + quad * 2 + i % 2 > row + (i / 2) * 8) s[4 * j + i] = masked;
}

// What a slot says of a tile of scores, or of weights: those that do not count become `masked`. `diagonal` and `word`
// are the warpgroup's: its flag, and which columns count, or which rows of which columns.
template <typename Stream>
__device__ __forceinline__ void mask_tile(float (&s)[32], const Stream& ring, int slot, uint32_t flags,
                                          uint32_t diagonal, uint2 word, const Place& place,
                                          float masked = -INFINITY) {
  if (any_flag(flags, diagonal)) mask_after_row(s, place.first, place.quad, masked);
  if ((word.x & word.y) == ~0u) return;
  if (!any_flag(flags, kQueryMask << place.consumer)) return mask_columns(s, word, place.quad, masked);
  mask_rows(s, (place.first < 32 ? word.x : word.y) >> (place.first % 32), masked);
  if (any_flag(flags, kPartial)) mask_range(s, ring.row_range(slot), place.quad, masked);
}

}  // namespace mtraining::sm90
