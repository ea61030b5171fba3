// The stream of tiles from the producer warp to the two consumer warpgroups of a CTA.
//
// A CTA works on a pair: two adjacent tiles of queries (forward, dQ) or of keys (dK, dV), one for each warpgroup. The
// producer brings the tiles that either of them meets, once each, through a ring in shared memory, and says beside each
// slot who needs it and under which mask. A slot can also carry the start of a work item.
//
// Barriers: full[slot] (one arrival and the TMA bytes), empty[slot] (one arrival of every consumer warp).
#pragma once
#include "sm90_wgmma.cuh"

namespace mtraining::sm90 {

constexpr int kThreads = 384;  // a producer warpgroup, of which one warp works, and two consumer warpgroups
constexpr int kConsumerWarps = 8;
// Where a kernel without static shared memory finds its dynamic shared memory: behind the kilobyte that the system
// keeps. A constant costs no register and no arithmetic; check_shared_base() stops a kernel for which it does not hold.
constexpr uint32_t kSharedBase = 1024;
__device__ __forceinline__ void check_shared_base() {
  extern __shared__ __align__(1024) uint8_t shared[];  // the swizzle pattern repeats every 1024 bytes
  if (smem_address(shared) != kSharedBase) __trap();
}
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// A CTA's life: thread 0 makes the barriers (`init`), then one warp produces and two warpgroups consume, with the
// registers of each thread as given.
template <int kForProducer, int kForConsumer, typename Init, typename Produce, typename Consume>
__device__ __forceinline__ void divide_threads(int warpgroup, Init init, Produce produce, Consume consume) {
  if (threadIdx.x == 0) {
    init();
    barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<kForProducer>();
    if (threadIdx.x < 32) produce();
  } else {
    take_registers<kForConsumer>();
    consume();
  }
}

// Flags of a slot. kNeeded, kDiagonal and kQueryMask are per warpgroup: shift by its number.
enum : uint32_t { kNeeded = 1, kDiagonal = 4, kItem = 16, kPartial = 64, kQueryMask = 128 };

// Beside each slot: flags; the item that begins; a word of 64 mask bits for each warpgroup, of keys or with kQueryMask of
// queries; with kPartial (dK, dV, and with kQueryMask) the first and one past the last of the slot's rows that count.
constexpr int kInfoBytes = 32;

constexpr int kNoSlot = -1;

// A slot is two tiles.
template <int kHeadDim, int kStagesOfRing>
struct Ring {
  static constexpr int kStages = kStagesOfRing, kSlotBytes = 2 * Shape<kHeadDim>::kTileBytes;
  static constexpr int kBytes = kStages * (kSlotBytes + kInfoBytes + 16);

  uint32_t data, info, full;  // shared-memory addresses; the empty barriers follow the full ones
  int slot = 0;
  uint32_t parity;
  uint32_t low = 0;  // consumer: the descriptor's low word of the slot received last

  // The first wait of a producer on a fresh barrier has to pass: it starts on the other parity.
  __device__ Ring(uint32_t base, uint32_t first_parity)
      : data(base), info(base + kStages * kSlotBytes), full(info + kStages * kInfoBytes), parity(first_parity) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(full + 8 * (kStages + i), kConsumerWarps);
    }
  }
  __device__ __forceinline__ uint32_t tile() const { return data + slot * kSlotBytes; }
  __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * slot; }
  __device__ __forceinline__ void step() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
  // Producer: waits until every consumer has left the slot.
  __device__ __forceinline__ void acquire() const { barrier_wait(full + 8 * (kStages + slot), parity); }
  // Producer, one lane: describes the slot; its bytes are announced afterwards.
  __device__ __forceinline__ void describe(uint32_t flags, int item, uint64_t word0, uint64_t word1, int row_begin = 0,
                                           int row_end = kBlock) const {
    const uint32_t at = info + slot * kInfoBytes;
    store_shared(at, flags, item, static_cast<uint32_t>(word0), static_cast<uint32_t>(word0 >> 32));
    store_shared(at + 16, static_cast<uint32_t>(word1), static_cast<uint32_t>(word1 >> 32), row_begin, row_end);
  }
  // Consumer: waits for the slot; returns its flags and item.
  __device__ __forceinline__ uint2 receive() {
    low = Shape<kHeadDim>::descriptor_low(tile());
    barrier_wait(full_barrier(), parity);
    return load_shared_pair(info + slot * kInfoBytes);
  }
  __device__ __forceinline__ uint2 word(int consumer) const { return word(consumer, slot); }
  __device__ __forceinline__ uint2 word(int consumer, int of) const {
    return load_shared_pair(info + of * kInfoBytes + 8 + 8 * consumer);
  }
  // Bit 0: row `row` of the word is set; bit 8: row + 8 is.
  __device__ __forceinline__ uint32_t row_bits(int consumer, int row, int of) const {
    return load_shared(info + of * kInfoBytes + 8 + 8 * consumer + row / 32 * 4) >> (row % 32);
  }
  __device__ __forceinline__ uint2 row_range(int of) const { return load_shared_pair(info + of * kInfoBytes + 24); }
  // Consumer: from the slot in hand on receives up to one that has any of `wanted`, leaves those before it, and returns
  // that one's flags.
  __device__ __forceinline__ uint32_t seek(uint32_t wanted) {
    for (;;) {
      const uint32_t flags = receive().x;
      if (__any_sync(~0u, flags & wanted)) return flags;
      release(slot), step();
    }
  }
  // Consumer: the same from the next slot on. In front of slot `held`, which this warp has not left, it gives up and
  // returns no flags: nothing can arrive there.
  __device__ __forceinline__ uint32_t seek_next(uint32_t wanted, int held) {
    for (;;) {
      step();
      if (slot == held) return 0;
      const uint32_t flags = receive().x;
      if (__any_sync(~0u, flags & wanted)) return flags;
      release(slot);
    }
  }
  // Consumer: the item that the slot in hand begins.
  __device__ __forceinline__ int item() const { return __shfl_sync(~0u, load_shared(info + slot * kInfoBytes + 4), 0); }
  // Consumer: both in one, from the slot in hand on, in front of slot `held` (or kNoSlot) nothing; flags and item. For dQ
  // alone: there ptxas makes faster code of it than of the two (docs/kernels.md), elsewhere slower.
  __device__ __forceinline__ uint2 seek_entry(uint32_t wanted, int held) {
    while (slot != held) {
      const uint2 entry = receive();
      if (__any_sync(~0u, entry.x & wanted)) return entry;
      release(slot), step();
    }
    return {0, 0};
  }
  // Consumer warp: leaves a slot. What it read there by ordinary loads has to be in use by now, or behind a
  // proxy_fence(): TMA does not wait for loads in flight when it writes the slot again.
  __device__ __forceinline__ void release(int which) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(full + 8 * (kStages + which));
  }
};

// 64 rows of one tensor into a tile.
template <int kHeadDim>
__device__ __forceinline__ void load_tile(uint32_t dst, const CUtensorMap* map, uint32_t bar, int row, int head,
                                          int batch) {
  using S = Shape<kHeadDim>;
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip)
    tma_load(dst + strip * S::kStripBytes, map, bar, strip * S::kStripColumns, row, head, batch);
}

constexpr int kNoBlock = 1 << 29;  // an origin from which no distance leads inside the sequence

// A value that is the same on every lane, made known as such.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A lane's part of a chunk of tiles that may be sent.
struct Candidate {
  int slot;        // of the local tensor
  uint32_t flags;  // who needs it
  bool sent;
};

// Calls send(slot, flags, lane it came from), on lane 0 and with the ring's slot acquired, for every candidate that is
// sent. Lane 0 because values that the compiler knows to be the same on all lanes reach TMA without a loop over the
// lanes.
template <typename Stream, typename Send>
__device__ __forceinline__ void send_candidates(Stream& ring, const Candidate& candidate, Send send) {
  for (unsigned left = __ballot_sync(~0u, candidate.sent); left; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int slot = __shfl_sync(~0u, candidate.slot, from);
    const uint32_t flags = __shfl_sync(~0u, candidate.flags, from);
    ring.acquire();
    if (threadIdx.x % 32 == 0) send(slot, flags, from);
    __syncwarp();
    ring.step();
  }
}

// Distances that a warp looks at together: 16, each from two origins. Lanes take turns between the origins, so that
// neither warpgroup waits long for the other.
constexpr int kDistancesPerChunk = 16;

// Where distances lead from, and the blocks that they may lead to: the sequence's, or those of a document, whose last
// one in the walking direction is partial.
struct Origins {
  int block0, block1;  // block1 is kNoBlock, in the walking direction, where an item has one tile
  int low, high;
  bool partial;
};

// The block to which `distance` leads from the lane's origin: origin - distance (kDirection -1) or origin + distance
// (+1). It is sent if `slots` holds it; if both origins meet it, by the first one's lane. `inside` tells whether it
// exists.
template <int kDirection>
__device__ __forceinline__ Candidate slash_candidate(const AttentionParams& params, int distance,
                                                     const Origins& origins, const uint32_t* bits, const int32_t* slots,
                                                     bool& inside) {
  const int side = threadIdx.x % 2;
  const int block = (side ? origins.block1 : origins.block0) + kDirection * distance;
  Candidate candidate = {-1, kNeeded << side | (distance == 0 ? kDiagonal << side : 0), false};
  inside = block >= origins.low && block <= origins.high;
  if (inside) {
    candidate.slot = slots[block];
    const int other =
        kDirection * (block - (side ? origins.block0 : origins.block1));  // its distance from the other origin
    const bool shared = other >= 0 && other < params.num_blocks && (bits[other / 32] >> (other % 32) & 1);
    if (shared) candidate.flags |= kNeeded << (1 - side) | (other == 0 ? kDiagonal << (1 - side) : 0);
    if (origins.partial && block == (kDirection < 0 ? origins.low : origins.high)) candidate.flags |= kPartial;
    candidate.sent = candidate.slot >= 0 && !(shared && side == 1);
  }
  return candidate;
}

// The block lists of a pair of tiles, as entries of all lists; those of the second are none where an item has one tile.
// kSingle: chunks are of one block.
template <bool kSingle>
struct PairLists {
  int begin0, end0, begin1, end1;

  static __device__ __forceinline__ int unit(const AttentionParams& params) { return kSingle ? 1 : params.chunk_blocks; }
  __device__ __forceinline__ int begin(int side) const { return side ? begin1 : begin0; }
  __device__ __forceinline__ int end(int side) const { return side ? end1 : end0; }
  // The entry of the side's list that names the chunk, or -1: chunks ascend.
  __device__ __forceinline__ int find(const BlockLists& lists, int side, int chunk) const {
    int low = begin(side), high = end(side);
    while (low < high) {
      const int middle = (low + high) / 2;
      if (lists.entries[middle] < chunk)
        low = middle + 1;
      else
        high = middle;
    }
    return low < end(side) && lists.entries[low] == chunk ? low : -1;
  }
};

// The block at `place` of the lane's list, blocks numbered through from chunk to chunk; sent as slash_candidate does.
template <int kDirection, bool kSingle>
__device__ __forceinline__ Candidate list_candidate(const AttentionParams& params, const BlockLists& lists,
                                                    const PairLists<kSingle>& pair, int place, const Origins& origins,
                                                    const int32_t* slots, bool& inside) {
  const int side = threadIdx.x % 2, unit = pair.unit(params), entry = pair.begin(side) + place / unit;
  Candidate candidate = {-1, kNeeded << side, false};
  inside = entry < pair.end(side);
  if (inside) {
    const int chunk = lists.entries[entry], block = chunk * unit + place % unit;
    const int own = side ? origins.block1 : origins.block0, other = side ? origins.block0 : origins.block1;
    if (block >= origins.low && block <= origins.high && kDirection * (block - own) >= 0) candidate.slot = slots[block];
    if (candidate.slot >= 0) {
      const bool shared = kDirection * (block - other) >= 0 && pair.find(lists, 1 - side, chunk) >= 0;
      if (block == own) candidate.flags |= kDiagonal << side;
      if (shared) candidate.flags |= kNeeded << (1 - side) | (block == other ? kDiagonal << (1 - side) : 0);
      if (origins.partial && block == (kDirection < 0 ? origins.low : origins.high)) candidate.flags |= kPartial;
      candidate.sent = !(shared && side == 1);
    }
  }
  return candidate;
}

// Which queries see the keys, for each warpgroup; of a candidate that came from the lane `side` at `place`.
struct QueryWords {
  uint64_t word0 = ~0ull, word1 = ~0ull;

  template <bool kSingle>
  __device__ __forceinline__ QueryWords(const AttentionParams& params, const BlockLists& lists,
                                        const PairLists<kSingle>& pair, int place, int side, uint32_t flags) {
    if (!lists.row_masks) return;
    const int entry = pair.begin(side) + place / pair.unit(params);
    const uint64_t own = lists.row_masks[entry];
    uint64_t other = ~0ull;
    if (flags & kNeeded << (1 - side)) other = lists.row_masks[pair.find(lists, 1 - side, lists.entries[entry])];
    word0 = side ? other : own, word1 = side ? own : other;
  }
  // The flags of the warpgroups whose queries do not all see the keys.
  __device__ __forceinline__ uint32_t flags() const {
    return (word0 == ~0ull ? 0 : kQueryMask) | (word1 == ~0ull ? 0 : kQueryMask << 1);
  }
};

// Entries of list i of a batch row and a head's list, and of list j.
template <bool kSingle>
__device__ __forceinline__ PairLists<kSingle> pair_lists(const BlockLists& lists, int64_t list, int i, int j) {
  const int32_t* starts = lists.starts + list * lists.stride;
  return {starts[i], starts[i + 1], j < 0 ? 0 : starts[j], j < 0 ? 0 : starts[j + 1]};
}

__device__ __forceinline__ const uint32_t* list_bits(const Job& job, int index_row, int list) {
  return job.distance_bits + (static_cast<int64_t>(index_row) * job.params.num_lists + list) * job.bit_words;
}

// The tiles of one item of a head or list.
__device__ __forceinline__ int2 item_tiles(const AttentionParams& params, const Tile* tiles, int num_tiles, int item) {
  if (params.num_documents == 1) return {2 * item, 2 * item + 1 < num_tiles ? 2 * item + 1 : -1};
  const int first = item & ~1, second = first + 1 < num_tiles ? first + 1 : -1;
  const bool together = second >= 0 && tiles[first].index_row == tiles[second].index_row;
  if (item % 2 == 0) return {first, together ? second : -1};
  return {together ? -1 : second, -1};
}

// Takes the number of the next work item. The result is valid on lane 0.
__device__ __forceinline__ int take_item(const Job& job) {
  return threadIdx.x % 32 == 0 ? gridDim.x + atomicAdd(job.counter, 1) : 0;
}

// Ends the stream: an item that does not exist.
template <typename Stream>
__device__ __forceinline__ void send_end(Stream& ring) {
  ring.acquire();
  if (threadIdx.x % 32 == 0) {
    ring.describe(kItem, -1, 0, 0);
    barrier_arrive(ring.full_barrier());
  }
}

// Whether a warp's flags, the same on every lane, hold any of `mask`. The vote tells the compiler that they are the
// same: it serialises every wgmma under a branch that looks divergent (its note C7520).
__device__ __forceinline__ bool any_flag(uint32_t flags, uint32_t mask) { return __any_sync(~0u, flags & mask); }

// ---- consumer side -------------------------------------------------------------------------------------------------
// The rows of a 64 x N accumulator that a thread holds: `first` and first + 8; columns 8 j + 2 quad and the next.
struct Place {
  int consumer, quad, first;
  __device__ Place()
      : consumer(threadIdx.x / 128 - 1),
        quad(threadIdx.x % 4),
        first((threadIdx.x % 128) / 32 * 16 + (threadIdx.x % 32) / 4) {}
};

// A tile's 64 rows as A fragments. 16-byte chunk c of row r of a strip lies at c ^ (r % 8) where the strip is 128 bytes
// wide, at c ^ (r / 2 % 4) where it is 64.
template <int kSteps>
__device__ __forceinline__ void load_fragments(uint32_t (&a)[kSteps][4], uint32_t tile) {
  using S = Shape<16 * kSteps>;
  constexpr int kStepsOfStrip = S::kRowBytes / 32;
  const int lane = threadIdx.x % 32, row = (threadIdx.x % 128) / 32 * 16 + lane % 16;
  const int swizzle = S::kRowBytes == 128 ? row % 8 : row / 2 % 4;
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    load_matrices(a[k], tile + k / kStepsOfStrip * S::kStripBytes + row * S::kRowBytes +
                            (((2 * (k % kStepsOfStrip) + lane / 16) ^ swizzle) << 4));
}

// The rows that an item's slot brings to this warpgroup; leaves the slot.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void take_rows(uint32_t (&a)[Shape<kHeadDim>::kSteps][4], Stream& ring, int consumer) {
  load_fragments(a, ring.tile() + consumer * Shape<kHeadDim>::kTileBytes);
  proxy_fence();
  ring.release(ring.slot), ring.step();
}

// Tiles in shared memory are given as the low word of their descriptor.
template <int kHeadDim>
constexpr uint32_t kNextTile = Shape<kHeadDim>::kTileBytes >> 4;

// d = a b^T over head_dim: a is 64 rows in registers, b a tile.
template <typename T, int kSteps>
__device__ __forceinline__ void multiply_rows(float (&d)[32], const uint32_t (&a)[kSteps][4], uint32_t low) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma<T, 0>(d, a[k], Shape<16 * kSteps>::k_major(low, k), k > 0);
}
// The same with a in shared memory, or d += a b^T.
template <typename T, bool kAdd, int kSteps>
__device__ __forceinline__ void multiply_tiles(float (&d)[32], uint32_t a_low, uint32_t low) {
  using S = Shape<16 * kSteps>;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma<T, 0>(d, S::k_major(a_low, k), S::k_major(low, k), kAdd || k > 0);
}
// d += a b: a is 64 x 64 in registers, b a tile whose 64 rows are summed over.
template <typename T, int kCount>
__device__ __forceinline__ void accumulate_tile(float (&d)[kCount], const uint32_t (&a)[4][4], uint32_t low) {
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<T, 1>(d, a[k], Shape<2 * kCount>::mn_major(low, k), 1);
}

// A 64 x 64 accumulator as A fragments of the next product.
template <typename T>
__device__ __forceinline__ void pack_tile(const float (&s)[32], uint32_t (&a)[4][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    a[j / 2][(j % 2) * 2] = pack_pair<T>(s[4 * j], s[4 * j + 1]);
    a[j / 2][(j % 2) * 2 + 1] = pack_pair<T>(s[4 * j + 2], s[4 * j + 3]);
  }
}

// Scores, or weights, that do not count become `masked`. Column c counts where bit c of the word is set.
__device__ __forceinline__ void mask_columns(float (&s)[32], uint2 word, int quad, float masked = -INFINITY) {
  const unsigned low = word.x >> (2 * quad), high = word.y >> (2 * quad);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const unsigned bits = j < 4 ? low >> (8 * j) : high >> (8 * (j - 4));
    if (!(bits & 1)) s[4 * j] = masked, s[4 * j + 2] = masked;
    if (!(bits & 2)) s[4 * j + 1] = masked, s[4 * j + 3] = masked;
  }
}

// The thread's first row counts where bit 0 is set, its second where bit 8 is.
__device__ __forceinline__ void mask_rows(float (&s)[32], uint32_t bits, float masked = -INFINITY) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (!(bits & 1)) s[4 * j] = masked, s[4 * j + 1] = masked;
    if (!(bits & 256)) s[4 * j + 2] = masked, s[4 * j + 3] = masked;
  }
}

// The columns from range.x to range.y - 1 count.
__device__ __forceinline__ void mask_range(float (&s)[32], uint2 range, int quad, float masked = -INFINITY) {
  const int begin = static_cast<int>(range.x) - 2 * quad, end = static_cast<int>(range.y) - 2 * quad;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (8 * j + i % 2 < begin || 8 * j + i % 2 >= end) s[4 * j + i] = masked;
}

// Writes `factor` times an accumulator to a float32 row, one of the thread's two (`which`).
template <int kCount>
__device__ __forceinline__ void store_row(float* row, const float (&x)[kCount], int which, float factor, int quad) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j)
    *reinterpret_cast<float2*>(row + 8 * j + 2 * quad) =
        make_float2(x[4 * j + 2 * which] * factor, x[4 * j + 2 * which + 1] * factor);
}

// Word i of thread q of a quad becomes word q of thread i.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4], int quad) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(~0u, quad & 1 ? word[i] : word[i + 1], 1);
    word[i] = quad & 1 ? received : word[i], word[i + 1] = quad & 1 ? word[i + 1] : received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(~0u, quad & 2 ? word[i] : word[i + 2], 2);
    word[i] = quad & 2 ? received : word[i], word[i + 2] = quad & 2 ? word[i + 2] : received;
  }
}

// The same to a row of T, for the whole warp: the threads of a quad trade words, so that each writes 16 bytes at once.
template <typename T, int kCount>
__device__ __forceinline__ void store_final_row(T* row, bool valid, const float (&x)[kCount], int which, float factor,
                                                int quad) {
#pragma unroll
  for (int first = 0; first < kCount / 4; first += 4) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = x + 4 * (first + i) + 2 * which;
      word[i] = pack_pair<T>(pair[0] * factor, pair[1] * factor);
    }
    transpose_quad(word, quad);
    if (valid)
      *reinterpret_cast<uint4*>(row + 8 * (first + quad)) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace mtraining::sm90
