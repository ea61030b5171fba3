// Backward, key-major: dK and dV of two tiles of keys per CTA, or of two tiles of packed columns.
//
//   S^T = K Q^T,  P^T = exp2(S^T scale log2(e) - lse log2(e)),  dP^T = V dO^T - delta,  dS^T = P^T dP^T
//   dV += P^T dO,  dK += scale dS^T Q
//
// Keys and values stay in shared memory; queries and grad_out stream by. A tile of keys meets the queries of every head
// of its group, one head after the other, so that one CTA sums a gradient in a fixed order. Packed columns are a
// staircase: a tile meets every query tile that may use one of its columns.
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
  const int slashes = p.batch * p.num_kv_heads * ((p.num_key_tiles + 1) / 2) * items_per_pair(p);
  return num_vertical_items(job) + (job.slash ? slashes : 0);
}

// The longest first: packed columns meet most queries, early keys meet more than late ones.
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
  const int lists = params.batch * params.num_kv_heads, batch = item % lists / params.num_kv_heads;
  const int2 tiles = item_tiles(params, params.key_tiles, params.num_key_tiles, item / lists);
  const int document = tiles.x >= 0 ? params.key_tiles[tiles.x].index_row : 0;
  return {false, batch, batch + document, item % params.num_kv_heads, tiles.x, tiles.y};
}

template <int kHeadDim>
struct GradKeyShape {
  static constexpr int kTileBytes = Shape<kHeadDim>::kTileBytes;
  static constexpr int kStages = kHeadDim > 64 ? 5 : 8;
  static constexpr int kStatisticsBytes = 2 * kBlock * 4;  // lse and delta of a slot's queries
  static constexpr int kResidentBytes = 4 * kTileBytes;    // keys and values of both tiles: K0 V0 K1 V1
  using Stream = Ring<kStages, 2 * kTileBytes>;
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

// The diagonal block, transposed: a key (row) may be used from its own position on; `row` is the first of the thread's
// two.
__device__ __forceinline__ void mask_before_row(float (&s)[32], int row, int quad) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (j * 8 + quad * 2 + i % 2 < row + (i / 2) * 8) s[4 * j + i] = -INFINITY;
}
// Writes a warpgroup's 64 rows of a gradient.
template <int kCount>
__device__ __forceinline__ void write_grad_rows(const Rows& grad, int batch, int head, int first_row, int begin,
                                                int end, const float (&x)[kCount], float factor, const Place& place) {
  float* out = static_cast<float*>(grad.data) + batch * grad.stride_batch + head * grad.stride_head +
               (first_row + place.first) * grad.stride_seq;
  if (place.first >= begin && place.first < end) store_row(out, x, 0, factor, place.quad);
  if (place.first + 8 >= begin && place.first + 8 < end) store_row(out + 8 * grad.stride_seq, x, 1, factor, place.quad);
}

template <int kCount>
__device__ __forceinline__ void write_grad_key(const Job& job, int index, const Place& place,
                                               const float (&dk)[kCount], const float (&dv)[kCount]) {
  const AttentionParams& params = job.params;
  const KeyItem item = locate_keys(index, job);
  const int tile_index = place.consumer ? item.tile1 : item.tile0;
  if (tile_index < 0) return;
  if (item.vertical) {
    const int first = tile_index * kBlock, end = params.max_vertical - first;
    write_grad_rows(params.grad_packed_key, item.index_row, item.head, first, 0, end, dk, params.softmax_scale, place);
    write_grad_rows(params.grad_packed_value, item.index_row, item.head, first, 0, end, dv, 1.f, place);
  } else {
    const Tile tile = params.key_tiles[tile_index];
    const int first = tile.slot * kBlock;
    const int begin = tile.row_begin, end = tile.row_end;
    write_grad_rows(params.grad_key, item.batch, item.head, first, begin, end, dk, params.softmax_scale, place);
    write_grad_rows(params.grad_value, item.batch, item.head, first, begin, end, dv, 1.f, place);
  }
}

template <typename T, int kHeadDim, typename Stream>
__device__ __forceinline__ void consume_grad_key(Stream ring, const GradKeyMemory<kHeadDim>& memory, const Job& job) {
  using S = Shape<kHeadDim>;
  const Place place;
  const int lane = threadIdx.x % 32;
  const float scale_log2 = job.params.softmax_scale * kLog2E;
  const uint32_t needed = kNeeded << place.consumer, diagonal = kDiagonal << place.consumer;
  const uint32_t key_low = descriptor_low(memory.resident + 2 * place.consumer * S::kTileBytes);
  uint2 entry = ring.receive();
  for (int index = __shfl_sync(~0u, entry.y, 0); index >= 0;) {
    ring.release(ring.slot), ring.step();
    barrier_wait(memory.resident_full, (entry.x & kOddItem) != 0);
    float dk[S::kAccumulators], dv[S::kAccumulators], s[32], dp[32];
    uint32_t p[4][4], ds[4][4];
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) dk[i] = dv[i] = 0.f;
    auto issue_scores = [&] {
      const uint32_t delta_at =
          memory.statistics + ring.slot * GradKeyShape<kHeadDim>::kStatisticsBytes + 4 * kBlock + 8 * place.quad;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 delta = load_shared_floats(delta_at + 32 * j);
        dp[4 * j] = dp[4 * j + 2] = -delta.x, dp[4 * j + 1] = dp[4 * j + 3] = -delta.y;
      }
      pin_registers(dp), pin_registers(s);
      wgmma_fence();
      multiply_tiles<T, false, S::kSteps>(s, key_low, ring.low);
      wgmma_commit();
    };
    auto next_tile = [&] {
      uint2 entry = ring.receive();
      while (!any_flag(entry.x, kItem | needed)) {
        ring.release(ring.slot), ring.step();
        entry = ring.receive();
      }
      return entry;
    };
    entry = next_tile();
    const bool started = any_flag(entry.x, needed);
    if (started) {
      issue_scores();
      // The scores of this tile are on their way.
      for (;;) {
        const int slot = ring.slot;
        const uint32_t queries = ring.low, grad_out = queries + kNextTile<kHeadDim>;
        const uint32_t statistics = memory.statistics + slot * GradKeyShape<kHeadDim>::kStatisticsBytes + 8 * place.quad;
        wgmma_fence();
        multiply_tiles<T, true, S::kSteps>(dp, key_low + kNextTile<kHeadDim>, grad_out);
        wgmma_commit();
        const uint32_t bits = ring.row_bits(place.consumer, place.first);
        wgmma_wait<1>();
        pin_registers(s);
        if (any_flag(entry.x, kPartial)) mask_range(s, ring.row_range(), place.quad);
        if (any_flag(entry.x, diagonal)) mask_before_row(s, place.first, place.quad);
        if (any_flag(entry.x, kQueryMask << place.consumer))
          mask_columns(s, ring.word(place.consumer), place.quad);
        else if (__any_sync(~0u, (bits & 257) != 257))
          mask_rows(s, bits);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 lse = load_shared_floats(statistics + 32 * j);
          s[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, -lse.x));
          s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, -lse.y));
          s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, -lse.x));
          s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, -lse.y));
        }
        pack_tile<T>(s, p);
        pin_registers(dv);
        wgmma_fence();
        accumulate_tile<T>(dv, p, grad_out);
        wgmma_commit();
        wgmma_wait<1>();
        pin_registers(dp);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          s[4 * j] *= dp[4 * j], s[4 * j + 1] *= dp[4 * j + 1];
          s[4 * j + 2] *= dp[4 * j + 2], s[4 * j + 3] *= dp[4 * j + 3];
        }
        pack_tile<T>(s, ds);
        pin_registers(dk);
        wgmma_fence();
        accumulate_tile<T>(dk, ds, queries);
        wgmma_commit();
        ring.step();
        // The next tile's scores follow this tile's last product at once.
        entry = ring.seek(kItem | needed, slot);
        if (any_flag(entry.x, needed)) {
          wgmma_wait<1>();
          pin_registers(dv);
          issue_scores();
          wgmma_wait<1>();
          pin_registers(dk);
          ring.release(slot);
          continue;
        }
        wgmma_wait<0>();
        pin_registers(dv), pin_registers(dk);
        ring.release(slot);
        if (any_flag(entry.x, kItem)) break;
        entry = next_tile();
        if (any_flag(entry.x, kItem)) break;
        issue_scores();
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.resident_empty);
    write_grad_key(job, index, place, dk, dv);
    index = __shfl_sync(~0u, entry.y, 0);
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    grad_key_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Job job) {
  using Stream = typename GradKeyShape<kHeadDim>::Stream;
  check_shared_base();
  const int warpgroup = threadIdx.x / 128;
  const GradKeyMemory<kHeadDim> memory(kSharedBase);
  const Stream ring(memory.ring, warpgroup == 0);
  if (threadIdx.x == 0) {
    ring.init();
    barrier_init(memory.resident_full, 1);
    barrier_init(memory.resident_empty, kConsumerWarps);
    barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x < 32) produce_keys<kHeadDim>(ring, memory, maps, job);
  } else {
    take_registers<kConsumerRegisters>();
    consume_grad_key<T, kHeadDim>(ring, memory, job);
  }
}

template <typename T, int kHeadDim>
const char* launch_grad_key(const TensorMaps& maps, const Job& job, cudaStream_t stream) {
  static_assert(GradKeyShape<kHeadDim>::kBytes <= 227 * 1024, "shared memory of a CTA");
  return launch_persistent(grad_key_kernel<T, kHeadDim>, kThreads, GradKeyShape<kHeadDim>::kBytes, num_key_items(job),
                           maps, job, stream);
}

}  // namespace mtraining::sm90
