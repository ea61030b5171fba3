// The key-major kernel's work items, its shared memory and its producer.
//
// A tile of keys meets the queries of every head of its group, one head after the other, so that one CTA sums a
// gradient in a fixed order. Packed columns are a staircase: a tile meets every query tile that may use one of them.
#pragma once
#include "sm90_stream.cuh"

namespace mtraining::sm90 {

// Flag beside kItem: the parity of resident_full that the item waits for.
constexpr uint32_t kOddItem = 32;

struct KeyItem {
  bool vertical;
  int batch, index_row;
  int head;  // query head of packed columns, or key/value head
  // Tiles of keys, or words of packed columns; the second is -1 where there is one, the first too where there is none.
  int tile0, tile1;
};

__host__ __device__ inline int num_vertical_items(const Job& job) {
  const AttentionParams& p = job.params;
  return job.vertical ? num_index_rows(p) * p.num_heads * ((p.num_words + 1) / 2) : 0;
}
__host__ __device__ inline int num_key_items(const Job& job) {
  const AttentionParams& p = job.params;
  return num_vertical_items(job) + (job.slash ? p.batch * p.num_kv_heads * job.key_items : 0);
}

// Packed columns first, as they meet most queries; then head by head, so that what runs together reads the queries of
// one group of heads, and early keys first, as they meet more than late ones.
__device__ __forceinline__ KeyItem locate_keys(int item, const Job& job) {
  const AttentionParams& params = job.params;
  const int verticals = num_vertical_items(job);
  if (item < verticals) {
    const int lists = num_index_rows(params) * params.num_heads, first = item / lists * 2;
    const int row = item % lists / params.num_heads;
    const int batch = params.num_documents > 1 ? 0 : row;
    return {true, batch, row, item % params.num_heads, first, first + 1 < params.num_words ? first + 1 : -1};
  }
  item -= verticals;
  const int list = item / job.key_items;
  const int batch = list / params.num_kv_heads;
  const int2 tiles = item_tiles(params, params.key_tiles, params.num_key_tiles, item % job.key_items);
  const int document = tiles.x >= 0 ? params.key_tiles[tiles.x].index_row : 0;
  return {false, batch, batch + document, list % params.num_kv_heads, tiles.x, tiles.y};
}

template <int kHeadDim>
struct GradKeyShape {
  static constexpr int kTileBytes = Shape<kHeadDim>::kTileBytes;
  static constexpr int kStages = kHeadDim == 64 ? 11 : kHeadDim == 96 ? 7 : 5;
  static constexpr int kStatisticsBytes = 2 * kBlock * 4;  // lse and delta of a slot's queries
  static constexpr int kResidentBytes = 4 * kTileBytes;    // keys and values of both tiles: K0 V0 K1 V1
  using Stream = Ring<kHeadDim, kStages>;
  static constexpr int kBytes = kResidentBytes + Stream::kBytes + kStages * kStatisticsBytes + 16;
};

// Addresses in shared memory.
template <int kHeadDim>
struct GradKeyMemory {
  using G = GradKeyShape<kHeadDim>;
  uint32_t ring, resident, statistics, resident_full, resident_empty;
  __device__ explicit GradKeyMemory(uint32_t base)
      : ring(base + G::kResidentBytes),
        resident(base),
        statistics(base + G::kResidentBytes + G::Stream::kBytes),
        resident_full(statistics + G::kStages * G::kStatisticsBytes),
        resident_empty(resident_full + 8) {}
};

// A slot with 64 queries, their grad_out, lse and delta.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_queries(const Stream& ring, const GradKeyMemory<kHeadDim>& memory,
                                             const TensorMaps& maps, const Job& job, int slot, int head, int batch) {
  using G = GradKeyShape<kHeadDim>;
  const uint32_t bar = ring.full_barrier();
  const int64_t num_slots = (job.params.seq_q + kBlock - 1) / kBlock;
  const int64_t at = (static_cast<int64_t>(batch) * job.params.num_heads + head) * num_slots + slot;
  barrier_expect_bytes(bar, Stream::kSlotBytes + G::kStatisticsBytes);
  load_tile<kHeadDim>(ring.tile(), &maps.query, bar, slot * kBlock, head, batch);
  load_tile<kHeadDim>(ring.tile() + G::kTileBytes, &maps.grad_out, bar, slot * kBlock, head, batch);
  bulk_load(memory.statistics + ring.slot * G::kStatisticsBytes, job.statistics + at * (2 * kBlock),
            G::kStatisticsBytes, bar);
}

// The keys and values of an item into their places.
template <int kHeadDim>
__device__ __forceinline__ void load_resident(const GradKeyMemory<kHeadDim>& memory, const CUtensorMap* key,
                                              const CUtensorMap* value, int slot0, int slot1, int head, int batch) {
  constexpr int kTileBytes = Shape<kHeadDim>::kTileBytes;
  const uint32_t bar = memory.resident_full;
  barrier_expect_bytes(bar, (slot1 < 0 ? 2 : 4) * kTileBytes);
  load_tile<kHeadDim>(memory.resident, key, bar, slot0 * kBlock, head, batch);
  load_tile<kHeadDim>(memory.resident + kTileBytes, value, bar, slot0 * kBlock, head, batch);
  if (slot1 >= 0) {
    load_tile<kHeadDim>(memory.resident + 2 * kTileBytes, key, bar, slot1 * kBlock, head, batch);
    load_tile<kHeadDim>(memory.resident + 3 * kTileBytes, value, bar, slot1 * kBlock, head, batch);
  }
}

// The item's two words of packed columns that query tile `t` may use.
struct WordPair {
  uint64_t first, second;
  __device__ WordPair(const AttentionParams& params, const KeyItem& item, int t) {
    const int64_t list = static_cast<int64_t>(item.batch) * params.num_lists + list_of(params, item.head);
    const uint64_t* words =
        params.vertical_words + (list * params.num_query_tiles + t) * params.num_words + item.tile0;
    first = words[0], second = item.tile1 >= 0 ? words[1] : 0;
  }
};

// The queries of one head that meet an item's packed columns.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_staircase(Stream& ring, const GradKeyMemory<kHeadDim>& memory,
                                               const TensorMaps& maps, const Job& job, const KeyItem& item) {
  const AttentionParams& params = job.params;
  const bool documents = params.num_documents > 1;
  const int end = documents ? params.document_tiles[item.index_row + 1] : params.num_query_tiles;
  for (int first = documents ? params.document_tiles[item.index_row] : 0; first < end; first += 32) {
    const int t = first + threadIdx.x % 32;
    Candidate candidate = {t, 0, false};
    if (t < end) {
      const WordPair words(params, item, t);
      candidate.flags = (words.first ? kNeeded : 0) | (words.second ? kNeeded << 1 : 0);
      candidate.sent = candidate.flags != 0;
    }
    send_candidates(ring, candidate, [&](int t, uint32_t flags, int) {
      const WordPair words(params, item, t);  // read again rather than kept: the producer has few registers
      const Tile& tile = params.query_tiles[t];
      ring.describe(flags | (documents ? kPartial : 0), 0, words.first, words.second, tile.row_begin, tile.row_end);
      send_queries<kHeadDim>(ring, memory, maps, job, tile.slot, item.head, item.batch);
    });
  }
}

// The queries of one head that meet an item's keys; `row_end` bounds those of the document's last block.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_slash_queries(Stream& ring, const GradKeyMemory<kHeadDim>& memory,
                                                   const TensorMaps& maps, const Job& job, const KeyItem& item,
                                                   int head, const Origins& origins, int row_end) {
  const AttentionParams& params = job.params;
  const int list = list_of(params, head);
  for (int first = 0;; first += kDistancesPerChunk) {
    const int at = first + threadIdx.x % 32 / 2;
    const bool listed = at < *table_row(params.num_slash, item.index_row, list);
    const int distance = listed ? table_row(params.slash, item.index_row, list)[at] : kNoBlock;
    bool inside;
    const Candidate candidate =
        slash_candidate<1>(params, distance, origins, list_bits(job, item.index_row, list), params.query_slots, inside);
    if (!__any_sync(~0u, inside)) break;  // distances ascend: the rest are outside too
    send_candidates(ring, candidate, [&](int slot, uint32_t flags, int) {
      ring.describe(flags, 0, ~0ull, ~0ull, 0, row_end);
      send_queries<kHeadDim>(ring, memory, maps, job, slot, head, item.batch);
    });
  }
}

// The queries of one head in the lists of either tile of keys; `row_end` as above.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void send_listed_queries(Stream& ring, const GradKeyMemory<kHeadDim>& memory,
                                                    const TensorMaps& maps, const Job& job, const KeyItem& item,
                                                    int head, const Origins& origins, int row_end) {
  const AttentionParams& params = job.params;
  const BlockLists& lists = params.key_lists;
  const int64_t list = static_cast<int64_t>(item.batch) * params.num_lists + list_of(params, head);
  const auto pair = pair_lists<true>(lists, list, origins.block0 / params.chunk_blocks,
                                     item.tile1 < 0 ? -1 : origins.block1 / params.chunk_blocks);
  for (int first = 0;; first += kDistancesPerChunk) {
    bool inside;
    const Candidate candidate = list_candidate<1>(params, lists, pair, first + threadIdx.x % 32 / 2, origins,
                                                  params.query_slots, inside);
    if (!__any_sync(~0u, inside)) break;
    send_candidates(ring, candidate, [&](int slot, uint32_t flags, int from) {
      const QueryWords words(params, lists, pair, first + from / 2, from % 2, flags);
      ring.describe(flags | words.flags(), 0, words.word0, words.word1, 0, row_end);
      send_queries<kHeadDim>(ring, memory, maps, job, slot, head, item.batch);
    });
  }
}

// Announces an item, and brings its keys and values once both warpgroups have left those of the one before.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void begin_item(Stream& ring, const GradKeyMemory<kHeadDim>& memory, const TensorMaps& maps,
                                           const Job& job, const KeyItem& item, int index, uint32_t resident_parity,
                                           int slot0, int slot1) {
  ring.acquire();
  if (threadIdx.x % 32 == 0) {
    ring.describe(kItem | (resident_parity ? 0 : kOddItem), index, 0, 0);
    barrier_arrive(ring.full_barrier());
  }
  ring.step();
  barrier_wait(memory.resident_empty, resident_parity);
  if (threadIdx.x % 32 == 0)
    load_resident<kHeadDim>(memory, item.vertical ? &maps.packed_key : &maps.key,
                            item.vertical ? &maps.packed_value : &maps.value, slot0, slot1,
                            item.vertical ? list_of(job.params, item.head) : item.head,
                            item.vertical ? item.index_row : item.batch);
  __syncwarp();
}

template <int kHeadDim, typename Stream>
__device__ __forceinline__ void produce_keys(Stream ring, const GradKeyMemory<kHeadDim>& memory, const TensorMaps& maps,
                                             const Job& job) {
  const AttentionParams& params = job.params;
  uint32_t resident_parity = 1;  // the first wait on a fresh barrier passes
  for (int index = blockIdx.x; index < num_key_items(job); index = uniform(take_item(job))) {
    const KeyItem item = locate_keys(index, job);
    if (item.tile0 < 0) continue;
    if (item.vertical) {
      begin_item<kHeadDim>(ring, memory, maps, job, item, index, resident_parity, item.tile0, item.tile1);
      send_staircase<kHeadDim>(ring, memory, maps, job, item);
    } else {
      const Tile &tile0 = params.key_tiles[item.tile0], &tile1 = params.key_tiles[max(item.tile1, 0)];
      begin_item<kHeadDim>(ring, memory, maps, job, item, index, resident_parity, uniform(tile0.slot),
                           item.tile1 < 0 ? -1 : uniform(tile1.slot));
      const int last = tile0.end_token - 1, group = params.num_heads / params.num_kv_heads;
      const Origins origins = {tile0.block, item.tile1 < 0 ? kNoBlock : tile1.block, 0, last / kBlock,
                               params.num_documents > 1};
      for (int head = item.head * group; head < (item.head + 1) * group; ++head) {
        if (job.lists)
          send_listed_queries<kHeadDim>(ring, memory, maps, job, item, head, origins, last % kBlock + 1);
        else
          send_slash_queries<kHeadDim>(ring, memory, maps, job, item, head, origins, last % kBlock + 1);
      }
    }
    resident_parity ^= 1;
  }
  send_end(ring);
}

}  // namespace mtraining::sm90
