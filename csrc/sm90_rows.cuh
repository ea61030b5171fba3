// Shared by the row-major kernels (forward and dQ): work items and producer.
//
// An item is a pair of query tiles. Its key tiles are key blocks (slashes, or block lists), then packed columns
// (verticals).
#pragma once
#include "sm90_pipeline.cuh"

namespace mtraining::sm90 {

// The tiles of the two warpgroups of a CTA: neighbouring tiles of one head, or, where heads share a list, one tile of
// two heads of the list. In the second case both need every key tile, however isolated its distance is.
struct RowItem {
  int batch, head0, head1, tile0, tile1;  // tile1 is -1 where there is one tile; tile0 too where the item is empty

  __device__ __forceinline__ int head(int consumer) const { return consumer ? head1 : head0; }
  __device__ __forceinline__ int tile(int consumer) const { return consumer ? tile1 : tile0; }
};

// Number of items of one head, or of one pair of heads.
__host__ __device__ inline int row_items_per_head(const KernelArguments& args) {
  const AttentionParams& params = args.params;
  return args.pairs_heads ? params.num_query_tiles : (params.num_query_tiles + 1) / 2 * items_per_pair(params);
}
__host__ __device__ inline int num_row_items(const KernelArguments& args) {
  return args.params.batch * args.params.num_heads / (args.pairs_heads ? 2 : 1) * row_items_per_head(args);
}

// Head by head, the longest items first.
__device__ __forceinline__ RowItem locate_rows(int item, const KernelArguments& args) {
  const AttentionParams& params = args.params;
  const int per_head = row_items_per_head(args), at = per_head - 1 - item % per_head, heads = item / per_head;
  if (args.pairs_heads) {
    const int first = 2 * heads % params.num_heads;
    return {2 * heads / params.num_heads, first, first + 1, at, at};
  }
  const int head = heads % params.num_heads;
  const int2 tiles = item_tiles(params, params.query_tiles, params.num_query_tiles, at);
  return {heads / params.num_heads, head, head, tiles.x, tiles.y};
}

// Loads a stage with both tiles of the item, from `map`.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_rows(Pipeline& pipeline, const CUtensorMap* map, int index, const RowItem& item,
                                          int slot0, int slot1) {
  pipeline.producer_acquire();
  if (threadIdx.x % 32 == 0) {
    pipeline.write_info(kItem, index, 0, 0);
    constexpr int kTileBytes = Shape<kHeadDim>::kTileBytes;
    barrier_expect_bytes(pipeline.full_barrier(), (slot1 < 0 ? 1 : 2) * kTileBytes);
    load_tile<kHeadDim>(pipeline.tile(), map, pipeline.full_barrier(), slot0 * kBlock, item.head0, item.batch);
    if (slot1 >= 0)
      load_tile<kHeadDim>(pipeline.tile() + kTileBytes, map, pipeline.full_barrier(), slot1 * kBlock, item.head1,
                          item.batch);
  }
  pipeline.advance();
}

// Loads a stage with 64 rows of keys, then of values.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_keys(const Pipeline& pipeline, const CUtensorMap* key, const CUtensorMap* value,
                                          int row, int head, int batch) {
  const uint32_t barrier = pipeline.full_barrier();
  barrier_expect_bytes(barrier, Pipeline::kStageBytes);
  load_tile<kHeadDim>(pipeline.tile(), key, barrier, row, head, batch);
  load_tile<kHeadDim>(pipeline.tile() + Shape<kHeadDim>::kTileBytes, value, barrier, row, head, batch);
}

template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_slashes(Pipeline& pipeline, const TensorMaps& maps, const KernelArguments& args,
                                             const RowItem& item, int index_row, const Origins& origins,
                                             uint64_t first_mask) {
  const AttentionParams& params = args.params;
  const int lane = threadIdx.x % 32, kv_head = item.head0 / (params.num_heads / params.num_kv_heads);
  const int list = list_of(params, item.head0);
  const int32_t* distances = table_row(params.slash, index_row, list) + lane / 2;
  const uint32_t* bits = list_bits(args, index_row, list);
  const int count = *table_row(params.num_slash, index_row, list) - lane / 2;
  int ahead = count > 0 ? *distances : kNoBlock;
  for (int first = 0;; first += kDistancesPerChunk) {
    const int distance = ahead, next = first + kDistancesPerChunk;
    ahead = next < count ? distances[next] : kNoBlock;
    bool inside;
    const Candidate candidate = slash_candidate<-1>(params, distance, origins, bits, params.key_slots, inside);
    if (!__any_sync(~0u, inside)) break;  // distances ascend: all later ones are outside
    send_candidates(pipeline, candidate, [&](int slot, uint32_t flags, int) {
      const uint64_t mask = flags & kPartial ? first_mask : ~0ull;
      pipeline.write_info(flags, 0, mask, mask);
      send_keys<kHeadDim>(pipeline, &maps.key, &maps.value, slot * kBlock, kv_head, item.batch);
    });
  }
}

// Sends the key blocks in the block list of either tile.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_listed(Pipeline& pipeline, const TensorMaps& maps, const KernelArguments& args,
                                            const RowItem& item, int slot0, int slot1, const Origins& origins,
                                            int first_column) {
  const AttentionParams& params = args.params;
  const int kv_head = item.head0 / (params.num_heads / params.num_kv_heads);
  const BlockLists& lists = params.query_lists;
  const int64_t list = static_cast<int64_t>(item.batch) * params.num_lists + list_of(params, item.head0);
  const auto pair = pair_lists<false>(lists, list, slot0, slot1);
  for (int first = 0;; first += kDistancesPerChunk) {
    bool inside;
    const Candidate candidate =
        list_candidate<-1>(params, lists, pair, first + threadIdx.x % 32 / 2, origins, params.key_slots, inside);
    if (!__any_sync(~0u, inside)) break;
    send_candidates(pipeline, candidate, [&](int slot, uint32_t flags, int from) {
      const QueryMasks masks(params, lists, pair, first + from / 2, from % 2, flags);
      const int begin = flags & kPartial ? first_column : 0;
      const uint64_t columns = ~0ull << begin;  // for a warpgroup of which every query attends to the keys
      pipeline.write_info(flags | masks.flags(), 0, masks.mask0 == ~0ull ? columns : masks.mask0,
                          masks.mask1 == ~0ull ? columns : masks.mask1, begin);
      send_keys<kHeadDim>(pipeline, &maps.key, &maps.value, slot * kBlock, kv_head, item.batch);
    });
  }
}

template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_verticals(Pipeline& pipeline, const TensorMaps& maps,
                                               const AttentionParams& params, const RowItem& item, int index_row) {
  const int lane = threadIdx.x % 32;
  const int list = list_of(params, item.head0);
  const int64_t first_tile = static_cast<int64_t>(item.batch * params.num_lists + list) * params.num_query_tiles;
  const uint64_t* bitmask0 = params.vertical_bitmask + (first_tile + item.tile0) * params.num_column_tiles;
  const uint64_t* bitmask1 = params.vertical_bitmask + (first_tile + item.tile1) * params.num_column_tiles;
  for (int first = 0; first < params.num_column_tiles; first += 32) {
    const int w = first + lane;
    const bool first_needs = w < params.num_column_tiles && bitmask0[w] != 0;
    const bool second_needs = w < params.num_column_tiles && item.tile1 >= 0 && bitmask1[w] != 0;
    const Candidate candidate = {w, (first_needs ? kNeeded : 0) | (second_needs ? kNeeded << 1 : 0),
                                 first_needs || second_needs};
    send_candidates(pipeline, candidate, [&](int tile, uint32_t flags, int) {
      pipeline.write_info(flags, 0, bitmask0[tile], item.tile1 >= 0 ? bitmask1[tile] : 0);
      send_keys<kHeadDim>(pipeline, &maps.packed_key, &maps.packed_value, tile * kBlock, list, index_row);
    });
  }
}

// The producer warp's loop over work items. With kGradOut the stage with the queries is followed by one with the rows
// of grad_out.
template <int kHeadDim, bool kGradOut, typename Pipeline>
__device__ __forceinline__ void produce_rows(Pipeline pipeline, const TensorMaps& maps, const KernelArguments& args) {
  const AttentionParams& params = args.params;
  const int num_items = num_row_items(args);
  for (int index = blockIdx.x; index < num_items;) {
    const int next = next_work_item(args);
    const RowItem item = locate_rows(index, args);
    if (item.tile0 >= 0) {
      const Tile &tile0 = params.query_tiles[item.tile0], &tile1 = params.query_tiles[max(item.tile1, 0)];
      const int slot0 = uniform(tile0.slot), slot1 = item.tile1 < 0 ? -1 : uniform(tile1.slot);
      const int index_row = tile0.index_row + item.batch, start = tile0.first_token;
      const Origins origins = {tile0.block, item.tile1 < 0 ? -kNoBlock : tile1.block, start / kBlock,
                               params.num_blocks - 1, start % kBlock != 0};
      send_rows<kHeadDim>(pipeline, &maps.query, index, item, slot0, slot1);
      if (kGradOut) send_rows<kHeadDim>(pipeline, &maps.grad_out, index, item, slot0, slot1);
      if (args.lists)
        send_listed<kHeadDim>(pipeline, maps, args, item, slot0, slot1, origins, start % kBlock);
      else if (args.slash)
        send_slashes<kHeadDim>(pipeline, maps, args, item, index_row, origins, ~0ull << (start % kBlock));
      if (args.vertical) send_verticals<kHeadDim>(pipeline, maps, params, item, index_row);
    }
    index = __shfl_sync(~0u, next, 0);
  }
  send_end(pipeline);
}

// Addresses of a thread's two rows of an item in tensors of queries, and whether the rows belong to the tile.
struct ItemRows {
  int batch, head, first;
  bool valid0, valid1;

  __device__ ItemRows(const KernelArguments& args, int index, const ThreadPosition& thread) {
    const RowItem item = locate_rows(index, args);
    const int tile_index = item.tile(thread.consumer);
    const Tile tile = args.params.query_tiles[max(tile_index, 0)];
    batch = item.batch, head = item.head(thread.consumer), first = tile.slot * kBlock + thread.row;
    valid0 = tile_index >= 0 && thread.row >= tile.row_begin && thread.row < tile.row_end;
    valid1 = tile_index >= 0 && thread.row + 8 >= tile.row_begin && thread.row + 8 < tile.row_end;
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

// Writes both rows, each times its factor: to `final` in T where `final` is a tensor, else to `partial` in float32.
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

// The diagonal block: column <= row, both relative to the block; `row` is the first of the thread's two.
__device__ __forceinline__ void mask_after_row(float (&s)[32], int row, int quad, float masked) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (j * 8 + quad * 2 + i % 2 > row + (i / 2) * 8) s[4 * j + i] = masked;
}

// Applies a stage's mask to a tile of S, or of P: sets excluded elements to `masked`. `diagonal` and `mask` are the
// warpgroup's: its flag, and its mask over columns or, with kQueryMask, over rows.
template <typename Pipeline>
__device__ __forceinline__ void mask_tile(float (&s)[32], const Pipeline& pipeline, int stage, uint32_t flags,
                                          uint32_t diagonal, uint2 mask, const ThreadPosition& thread,
                                          float masked = -INFINITY) {
  if (any_flag(flags, diagonal)) mask_after_row(s, thread.row, thread.quad, masked);
  if ((mask.x & mask.y) == ~0u) return;
  if (!any_flag(flags, kQueryMask << thread.consumer)) return mask_columns(s, mask, thread.quad, masked);
  mask_rows(s, (thread.row < 32 ? mask.x : mask.y) >> (thread.row % 32), masked);
  if (any_flag(flags, kPartial)) mask_range(s, pipeline.row_range(stage), thread.quad, masked);
}

}  // namespace mtraining::sm90
