// The key-major kernel (dK and dV): work items, shared memory and producer.
//
// A tile of keys visits the queries of every head of its group, head by head, so that one CTA sums a gradient in a
// fixed order. A tile of packed columns visits every query tile that attends to one of its columns, a staircase.
#pragma once
#include "sm90_pipeline.cuh"

namespace mtraining::sm90 {

// Flag beside kItem: the phase of resident_full that the item waits for.
constexpr uint32_t kOddPhase = 32;

struct KeyItem {
  bool vertical;
  int batch, index_row;
  int head;  // query head of packed columns, or key/value head
  // Tiles of keys or of packed columns. The second is -1 where there is one tile; the first too where the item is
  // empty.
  int tile0, tile1;
};

__host__ __device__ inline int num_vertical_items(const KernelArguments& args) {
  const AttentionParams& p = args.params;
  return args.vertical ? num_index_rows(p) * p.num_heads * ((p.num_column_tiles + 1) / 2) : 0;
}
__host__ __device__ inline int num_key_items(const KernelArguments& args) {
  const AttentionParams& p = args.params;
  return num_vertical_items(args) + (args.slash ? p.batch * p.num_kv_heads * args.key_items : 0);
}

// Packed columns first: they have the most queries. Then head by head, so that CTAs that run together read the queries
// of one group of heads, and early keys first, which have more queries than late ones.
__device__ __forceinline__ KeyItem locate_keys(int item, const KernelArguments& args) {
  const AttentionParams& params = args.params;
  const int verticals = num_vertical_items(args);
  if (item < verticals) {
    const int lists = num_index_rows(params) * params.num_heads, first = item / lists * 2;
    const int row = item % lists / params.num_heads;
    const int batch = params.num_documents > 1 ? 0 : row;
    return {true, batch, row, item % params.num_heads, first, first + 1 < params.num_column_tiles ? first + 1 : -1};
  }
  item -= verticals;
  const int list = item / args.key_items;
  const int batch = list / params.num_kv_heads;
  const int2 tiles = item_tiles(params, params.key_tiles, params.num_key_tiles, item % args.key_items);
  const int document = tiles.x >= 0 ? params.key_tiles[tiles.x].index_row : 0;
  return {false, batch, batch + document, list % params.num_kv_heads, tiles.x, tiles.y};
}

template <int kHeadDim>
struct GradKeyShape {
  static constexpr int kTileBytes = Shape<kHeadDim>::kTileBytes;
  static constexpr int kStages = kHeadDim == 64 ? 11 : kHeadDim == 96 ? 7 : 5;
  static constexpr int kStatisticsBytes = 2 * kBlock * 4;  // lse and delta of a stage's queries
  static constexpr int kResidentBytes = 4 * kTileBytes;    // keys and values of both tiles: K0 V0 K1 V1
  using Pipeline = TilePipeline<kHeadDim, kStages>;
  static constexpr int kBytes = kResidentBytes + Pipeline::kBytes + kStages * kStatisticsBytes + 16;
};

// Addresses in shared memory.
template <int kHeadDim>
struct GradKeyMemory {
  using G = GradKeyShape<kHeadDim>;
  uint32_t pipeline, resident, statistics, resident_full, resident_empty;
  __device__ explicit GradKeyMemory(uint32_t base)
      : pipeline(base + G::kResidentBytes),
        resident(base),
        statistics(base + G::kResidentBytes + G::Pipeline::kBytes),
        resident_full(statistics + G::kStages * G::kStatisticsBytes),
        resident_empty(resident_full + 8) {}
};

// Loads a stage with 64 queries, their grad_out, lse and delta.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_queries(const Pipeline& pipeline, const GradKeyMemory<kHeadDim>& memory,
                                             const TensorMaps& maps, const KernelArguments& args, int slot, int head,
                                             int batch) {
  using G = GradKeyShape<kHeadDim>;
  const uint32_t barrier = pipeline.full_barrier();
  const int64_t num_slots = (args.params.seq_q + kBlock - 1) / kBlock;
  const int64_t at = (static_cast<int64_t>(batch) * args.params.num_heads + head) * num_slots + slot;
  barrier_expect_bytes(barrier, Pipeline::kStageBytes + G::kStatisticsBytes);
  load_tile<kHeadDim>(pipeline.tile(), &maps.query, barrier, slot * kBlock, head, batch);
  load_tile<kHeadDim>(pipeline.tile() + G::kTileBytes, &maps.grad_out, barrier, slot * kBlock, head, batch);
  bulk_load(memory.statistics + pipeline.stage * G::kStatisticsBytes, args.statistics + at * (2 * kBlock),
            G::kStatisticsBytes, barrier);
}

// Loads the keys and values of an item, which stay resident.
template <int kHeadDim>
__device__ __forceinline__ void load_resident(const GradKeyMemory<kHeadDim>& memory, const CUtensorMap* key,
                                              const CUtensorMap* value, int slot0, int slot1, int head, int batch) {
  constexpr int kTileBytes = Shape<kHeadDim>::kTileBytes;
  const uint32_t barrier = memory.resident_full;
  barrier_expect_bytes(barrier, (slot1 < 0 ? 2 : 4) * kTileBytes);
  load_tile<kHeadDim>(memory.resident, key, barrier, slot0 * kBlock, head, batch);
  load_tile<kHeadDim>(memory.resident + kTileBytes, value, barrier, slot0 * kBlock, head, batch);
  if (slot1 >= 0) {
    load_tile<kHeadDim>(memory.resident + 2 * kTileBytes, key, barrier, slot1 * kBlock, head, batch);
    load_tile<kHeadDim>(memory.resident + 3 * kTileBytes, value, barrier, slot1 * kBlock, head, batch);
  }
}

// The masks of query tile `t` over the item's two tiles of packed columns.
struct BitmaskPair {
  uint64_t first, second;
  __device__ BitmaskPair(const AttentionParams& params, const KeyItem& item, int t) {
    const int64_t list = static_cast<int64_t>(item.batch) * params.num_lists + list_of(params, item.head);
    const uint64_t* bitmask =
        params.vertical_bitmask + (list * params.num_query_tiles + t) * params.num_column_tiles + item.tile0;
    first = bitmask[0], second = item.tile1 >= 0 ? bitmask[1] : 0;
  }
};

// Sends the queries of one head that attend to an item's packed columns.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_vertical_queries(Pipeline& pipeline, const GradKeyMemory<kHeadDim>& memory,
                                                      const TensorMaps& maps, const KernelArguments& args,
                                                      const KeyItem& item) {
  const AttentionParams& params = args.params;
  const bool documents = params.num_documents > 1;
  const int end = documents ? params.document_tiles[item.index_row + 1] : params.num_query_tiles;
  for (int first = documents ? params.document_tiles[item.index_row] : 0; first < end; first += 32) {
    const int t = first + threadIdx.x % 32;
    Candidate candidate = {t, 0, false};
    if (t < end) {
      const BitmaskPair masks(params, item, t);
      candidate.flags = (masks.first ? kNeeded : 0) | (masks.second ? kNeeded << 1 : 0);
      candidate.sent = candidate.flags != 0;
    }
    send_candidates(pipeline, candidate, [&](int t, uint32_t flags, int) {
      const BitmaskPair masks(params, item, t);  // loaded again: the producer has few registers
      const Tile& tile = params.query_tiles[t];
      pipeline.write_info(flags | (documents ? kPartial : 0), 0, masks.first, masks.second, tile.row_begin,
                          tile.row_end);
      send_queries<kHeadDim>(pipeline, memory, maps, args, tile.slot, item.head, item.batch);
    });
  }
}

// Sends the queries of one head that attend to an item's keys; `row_end` bounds the rows of the document's last block.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_slash_queries(Pipeline& pipeline, const GradKeyMemory<kHeadDim>& memory,
                                                   const TensorMaps& maps, const KernelArguments& args,
                                                   const KeyItem& item, int head, const Origins& origins, int row_end) {
  const AttentionParams& params = args.params;
  const int list = list_of(params, head);
  for (int first = 0;; first += kDistancesPerChunk) {
    const int at = first + threadIdx.x % 32 / 2;
    const bool listed = at < *table_row(params.num_slash, item.index_row, list);
    const int distance = listed ? table_row(params.slash, item.index_row, list)[at] : kNoBlock;
    bool inside;
    const Candidate candidate = slash_candidate<1>(params, distance, origins, list_bits(args, item.index_row, list),
                                                   params.query_slots, inside);
    if (!__any_sync(~0u, inside)) break;  // distances ascend: all later ones are outside
    send_candidates(pipeline, candidate, [&](int slot, uint32_t flags, int) {
      pipeline.write_info(flags, 0, ~0ull, ~0ull, 0, row_end);
      send_queries<kHeadDim>(pipeline, memory, maps, args, slot, head, item.batch);
    });
  }
}

// Sends the queries of one head in the block list of either tile of keys; `row_end` as above.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void send_listed_queries(Pipeline& pipeline, const GradKeyMemory<kHeadDim>& memory,
                                                    const TensorMaps& maps, const KernelArguments& args,
                                                    const KeyItem& item, int head, const Origins& origins,
                                                    int row_end) {
  const AttentionParams& params = args.params;
  const BlockLists& lists = params.key_lists;
  const int64_t list = static_cast<int64_t>(item.batch) * params.num_lists + list_of(params, head);
  const auto pair = pair_lists<true>(lists, list, origins.block0 / params.chunk_blocks,
                                     item.tile1 < 0 ? -1 : origins.block1 / params.chunk_blocks);
  for (int first = 0;; first += kDistancesPerChunk) {
    bool inside;
    const Candidate candidate =
        list_candidate<1>(params, lists, pair, first + threadIdx.x % 32 / 2, origins, params.query_slots, inside);
    if (!__any_sync(~0u, inside)) break;
    send_candidates(pipeline, candidate, [&](int slot, uint32_t flags, int from) {
      const QueryMasks masks(params, lists, pair, first + from / 2, from % 2, flags);
      pipeline.write_info(flags | masks.flags(), 0, masks.mask0, masks.mask1, 0, row_end);
      send_queries<kHeadDim>(pipeline, memory, maps, args, slot, head, item.batch);
    });
  }
}

// Starts an item, and loads its keys and values once both warpgroups have released those of the previous item.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void begin_item(Pipeline& pipeline, const GradKeyMemory<kHeadDim>& memory,
                                           const TensorMaps& maps, const KernelArguments& args, const KeyItem& item,
                                           int index, uint32_t resident_phase, int slot0, int slot1) {
  pipeline.producer_acquire();
  if (threadIdx.x % 32 == 0) {
    pipeline.write_info(kItem | (resident_phase ? 0 : kOddPhase), index, 0, 0);
    barrier_arrive(pipeline.full_barrier());
  }
  pipeline.advance();
  barrier_wait(memory.resident_empty, resident_phase);
  if (threadIdx.x % 32 == 0)
    load_resident<kHeadDim>(memory, item.vertical ? &maps.packed_key : &maps.key,
                            item.vertical ? &maps.packed_value : &maps.value, slot0, slot1,
                            item.vertical ? list_of(args.params, item.head) : item.head,
                            item.vertical ? item.index_row : item.batch);
  __syncwarp();
}

template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void produce_keys(Pipeline pipeline, const GradKeyMemory<kHeadDim>& memory,
                                             const TensorMaps& maps, const KernelArguments& args) {
  const AttentionParams& params = args.params;
  uint32_t resident_phase = 1;  // the first wait on a fresh barrier passes
  for (int index = blockIdx.x; index < num_key_items(args); index = uniform(next_work_item(args))) {
    const KeyItem item = locate_keys(index, args);
    if (item.tile0 < 0) continue;
    if (item.vertical) {
      begin_item<kHeadDim>(pipeline, memory, maps, args, item, index, resident_phase, item.tile0, item.tile1);
      send_vertical_queries<kHeadDim>(pipeline, memory, maps, args, item);
    } else {
      const Tile &tile0 = params.key_tiles[item.tile0], &tile1 = params.key_tiles[max(item.tile1, 0)];
      begin_item<kHeadDim>(pipeline, memory, maps, args, item, index, resident_phase, uniform(tile0.slot),
                           item.tile1 < 0 ? -1 : uniform(tile1.slot));
      const int last = tile0.end_token - 1, group = params.num_heads / params.num_kv_heads;
      const Origins origins = {tile0.block, item.tile1 < 0 ? kNoBlock : tile1.block, 0, last / kBlock,
                               params.num_documents > 1};
      for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
        if (args.lists)
          send_listed_queries<kHeadDim>(pipeline, memory, maps, args, item, head, origins, last % kBlock + 1);
        else
          send_slash_queries<kHeadDim>(pipeline, memory, maps, args, item, head, origins, last % kBlock + 1);
      }
    }
    resident_phase ^= 1;
  }
  send_end(pipeline);
}

}  // namespace mtraining::sm90
