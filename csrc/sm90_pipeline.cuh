// The pipeline of tiles from the producer warp to the two consumer warpgroups of a CTA.
//
// A CTA processes two tiles: of queries (forward, dQ) or of keys (dK, dV), one per consumer warpgroup. The producer
// loads each tile of the other operand that either warpgroup needs, once, into a circular buffer in shared memory.
// Beside each stage it writes which warpgroups need the tile and under which mask. A stage can also start a work item.
//
// Barriers: full[stage] (one arrival and the TMA bytes), empty[stage] (one arrival from every consumer warp).
#pragma once
#include "sm90_wgmma.cuh"

namespace mtraining::sm90 {

constexpr int kThreads = 384;  // a producer warpgroup, of which one warp works, and two consumer warpgroups
constexpr int kConsumerWarps = 8;
// Offset of the dynamic shared memory in a kernel without static shared memory: the system reserves the first kilobyte.
// A constant costs no register and no arithmetic; check_shared_base() traps in a kernel where the offset differs.
constexpr uint32_t kSharedBase = 1024;
__device__ __forceinline__ void check_shared_base() {
  extern __shared__ __align__(1024) uint8_t shared[];  // the swizzle pattern repeats every 1024 bytes
  if (smem_address(shared) != kSharedBase) __trap();
}
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Warp specialization of a CTA: thread 0 initializes the barriers (`init`), then one warp runs `produce` and two
// warpgroups run `consume`, with the given number of registers per thread.
template <int kForProducer, int kForConsumer, typename Init, typename Produce, typename Consume>
__device__ __forceinline__ void warp_specialize(int warpgroup, Init init, Produce produce, Consume consume) {
  if (threadIdx.x == 0) {
    init();
    barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<kForProducer>();
    if (threadIdx.x < 32) produce();
  } else {
    warpgroup_reg_alloc<kForConsumer>();
    consume();
  }
}

// Flags of a stage. kNeeded, kDiagonal and kQueryMask are per warpgroup: shift them by its number.
enum : uint32_t { kNeeded = 1, kDiagonal = 4, kItem = 16, kPartial = 64, kQueryMask = 128 };

// Beside each stage: flags; the item that starts; a 64-bit mask for each warpgroup, over keys or, with kQueryMask, over
// queries; with kPartial (dK, dV, and with kQueryMask) the range of the stage's rows that are valid.
constexpr int kInfoBytes = 32;

constexpr int kNoStage = -1;

// A stage holds two tiles.
template <int kHeadDim, int kNumStages>
struct TilePipeline : PipelineState<kNumStages> {
  using State = PipelineState<kNumStages>;
  using State::advance;
  using State::phase;
  using State::stage;
  static constexpr int kStages = kNumStages, kStageBytes = 2 * Shape<kHeadDim>::kTileBytes;
  static constexpr int kBytes = kStages * (kStageBytes + kInfoBytes + 16);

  uint32_t data, info, full;  // shared-memory addresses; the empty barriers follow the full ones
  uint32_t low = 0;           // consumer: low half of the descriptor of the stage waited for last

  // A producer starts on the other phase, so that its first wait on a fresh barrier passes.
  __device__ TilePipeline(uint32_t base, uint32_t first_phase)
      : State{0, first_phase}, data(base), info(base + kStages * kStageBytes), full(info + kStages * kInfoBytes) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(full + 8 * (kStages + i), kConsumerWarps);
    }
  }
  __device__ __forceinline__ uint32_t tile() const { return data + stage * kStageBytes; }
  __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
  // Producer: waits until every consumer warp has released the stage.
  __device__ __forceinline__ void producer_acquire() const { barrier_wait(full + 8 * (kStages + stage), phase); }
  // Producer, one lane: writes the stage's info; the expected bytes are set afterwards.
  __device__ __forceinline__ void write_info(uint32_t flags, int item, uint64_t mask0, uint64_t mask1,
                                             int row_begin = 0, int row_end = kBlock) const {
    const uint32_t at = info + stage * kInfoBytes;
    store_shared(at, flags, item, static_cast<uint32_t>(mask0), static_cast<uint32_t>(mask0 >> 32));
    store_shared(at + 16, static_cast<uint32_t>(mask1), static_cast<uint32_t>(mask1 >> 32), row_begin, row_end);
  }
  // Consumer: waits for the stage; returns its flags and item.
  __device__ __forceinline__ uint2 consumer_wait() {
    low = Shape<kHeadDim>::descriptor_low(tile());
    barrier_wait(full_barrier(), phase);
    return load_shared_pair(info + stage * kInfoBytes);
  }
  __device__ __forceinline__ uint2 mask(int consumer) const { return mask(consumer, stage); }
  __device__ __forceinline__ uint2 mask(int consumer, int of) const {
    return load_shared_pair(info + of * kInfoBytes + 8 + 8 * consumer);
  }
  // Bit 0: bit `row` of the mask; bit 8: bit row + 8.
  __device__ __forceinline__ uint32_t row_bits(int consumer, int row, int of) const {
    return load_shared(info + of * kInfoBytes + 8 + 8 * consumer + row / 32 * 4) >> (row % 32);
  }
  __device__ __forceinline__ uint2 row_range(int of) const { return load_shared_pair(info + of * kInfoBytes + 24); }
  // Consumer: the first stage, from the current one on, that has any of the flags `wanted`; releases the stages before
  // it and returns its flags.
  __device__ __forceinline__ uint32_t next_tile(uint32_t wanted) {
    for (;;) {
      const uint32_t flags = consumer_wait().x;
      if (__any_sync(~0u, flags & wanted)) return flags;
      consumer_release(stage), advance();
    }
  }
  // Consumer: the same from the following stage on. Stops before stage `held`, which this warp has not released, and
  // returns no flags: the producer cannot fill that stage, so a wait would not end.
  __device__ __forceinline__ uint32_t try_next_tile(uint32_t wanted, int held) {
    for (;;) {
      advance();
      if (stage == held) return 0;
      const uint32_t flags = consumer_wait().x;
      if (__any_sync(~0u, flags & wanted)) return flags;
      consumer_release(stage);
    }
  }
  // Consumer: the item that the current stage starts.
  __device__ __forceinline__ int item() const {
    return __shfl_sync(~0u, load_shared(info + stage * kInfoBytes + 4), 0);
  }
  // Consumer: both in one, from the current stage on, stopping before stage `held` (or kNoStage); flags and item. For
  // dQ alone: ptxas generates faster code from this form there, and slower code elsewhere (docs/kernels.md).
  __device__ __forceinline__ uint2 next_entry(uint32_t wanted, int held) {
    while (stage != held) {
      const uint2 entry = consumer_wait();
      if (__any_sync(~0u, entry.x & wanted)) return entry;
      consumer_release(stage), advance();
    }
    return {0, 0};
  }
  // Consumer warp: releases a stage. Values that ordinary loads read from the stage must have arrived by now, or be
  // ordered by a proxy_fence(): TMA does not wait for loads in flight when it overwrites the stage.
  __device__ __forceinline__ void consumer_release(int which) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(full + 8 * (kStages + which));
  }
};

// Loads 64 rows of one tensor into a tile.
template <int kHeadDim>
__device__ __forceinline__ void load_tile(uint32_t dst, const CUtensorMap* map, uint32_t barrier, int row, int head,
                                          int batch) {
  using S = Shape<kHeadDim>;
#pragma unroll
  for (int strip = 0; strip < S::kStrips; ++strip)
    tma_load(dst + strip * S::kStripBytes, map, barrier, strip * S::kStripColumns, row, head, batch);
}

constexpr int kNoBlock = 1 << 29;  // an origin from which every distance leads outside the sequence

// A value that is equal on every lane, in a form that the compiler knows to be uniform.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// A lane's candidate for the next tiles to load.
struct Candidate {
  int slot;        // of the local tensor
  uint32_t flags;  // the warpgroups that need the tile
  bool sent;
};

// Calls send(slot, flags, source lane) for every candidate to send, on lane 0 and with a stage acquired. Lane 0 because
// values that the compiler knows to be uniform reach TMA without a loop over the lanes.
template <typename Pipeline, typename Send>
__device__ __forceinline__ void send_candidates(Pipeline& pipeline, const Candidate& candidate, Send send) {
  for (unsigned left = __ballot_sync(~0u, candidate.sent); left; left &= left - 1) {
    const int from = __ffs(left) - 1;
    const int slot = __shfl_sync(~0u, candidate.slot, from);
    const uint32_t flags = __shfl_sync(~0u, candidate.flags, from);
    pipeline.producer_acquire();
    if (threadIdx.x % 32 == 0) send(slot, flags, from);
    __syncwarp();
    pipeline.advance();
  }
}

// Distances that a warp examines together: 16, each from two origins. Even lanes have the first origin, odd lanes the
// second, so that neither warpgroup waits long for the other.
constexpr int kDistancesPerChunk = 16;

// The blocks that distances are counted from, and the range of blocks that are valid: the sequence's or a document's.
// The outermost block of a document in the direction of iteration is partial.
struct Origins {
  int block0, block1;  // block1 is kNoBlock, in the direction of iteration, where an item has one tile
  int low, high;
  bool partial;
};

// The block at `distance` from the lane's origin: origin - distance (kDirection -1) or origin + distance (+1). It is
// sent if it has a slot in `slots`; if both origins need it, by the lane of the first. `inside`: the block is in range.
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
    // Its distance from the other origin.
    const int other = kDirection * (block - (side ? origins.block0 : origins.block1));
    const bool shared = other >= 0 && other < params.num_blocks && (bits[other / 32] >> (other % 32) & 1);
    if (shared) candidate.flags |= kNeeded << (1 - side) | (other == 0 ? kDiagonal << (1 - side) : 0);
    if (origins.partial && block == (kDirection < 0 ? origins.low : origins.high)) candidate.flags |= kPartial;
    candidate.sent = candidate.slot >= 0 && !(shared && side == 1);
  }
  return candidate;
}

// The block lists of a pair of tiles, as ranges of entries; the second is empty where an item has one tile. kSingle:
// chunks of one block.
template <bool kSingle>
struct PairLists {
  int begin0, end0, begin1, end1;

  static __device__ __forceinline__ int unit(const AttentionParams& params) {
    return kSingle ? 1 : params.chunk_blocks;
  }
  __device__ __forceinline__ int begin(int side) const { return side ? begin1 : begin0; }
  __device__ __forceinline__ int end(int side) const { return side ? end1 : end0; }
  // The entry of the side's list for the chunk, or -1. Chunks ascend.
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

// Block `index` of the lane's list, with the blocks of all chunks numbered consecutively; sent as by slash_candidate.
template <int kDirection, bool kSingle>
__device__ __forceinline__ Candidate list_candidate(const AttentionParams& params, const BlockLists& lists,
                                                    const PairLists<kSingle>& pair, int index, const Origins& origins,
                                                    const int32_t* slots, bool& inside) {
  const int side = threadIdx.x % 2, unit = pair.unit(params), entry = pair.begin(side) + index / unit;
  Candidate candidate = {-1, kNeeded << side, false};
  inside = entry < pair.end(side);
  if (inside) {
    const int chunk = lists.entries[entry], block = chunk * unit + index % unit;
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

// The queries that attend to the keys, for each warpgroup; of candidate `index` of a lane of `side`.
struct QueryMasks {
  uint64_t mask0 = ~0ull, mask1 = ~0ull;

  template <bool kSingle>
  __device__ __forceinline__ QueryMasks(const AttentionParams& params, const BlockLists& lists,
                                        const PairLists<kSingle>& pair, int index, int side, uint32_t flags) {
    if (!lists.row_masks) return;
    const int entry = pair.begin(side) + index / pair.unit(params);
    const uint64_t own = lists.row_masks[entry];
    uint64_t other = ~0ull;
    if (flags & kNeeded << (1 - side)) other = lists.row_masks[pair.find(lists, 1 - side, lists.entries[entry])];
    mask0 = side ? other : own, mask1 = side ? own : other;
  }
  // The flags of the warpgroups of which some queries do not attend to the keys.
  __device__ __forceinline__ uint32_t flags() const {
    return (mask0 == ~0ull ? 0 : kQueryMask) | (mask1 == ~0ull ? 0 : kQueryMask << 1);
  }
};

// The entries of lists i and j of one (batch row, list of heads).
template <bool kSingle>
__device__ __forceinline__ PairLists<kSingle> pair_lists(const BlockLists& lists, int64_t list, int i, int j) {
  const int32_t* starts = lists.starts + list * lists.stride;
  return {starts[i], starts[i + 1], j < 0 ? 0 : starts[j], j < 0 ? 0 : starts[j + 1]};
}

__device__ __forceinline__ const uint32_t* list_bits(const KernelArguments& args, int index_row, int list) {
  return args.distance_bits +
         (static_cast<int64_t>(index_row) * args.params.num_lists + list) * args.distance_bits_stride;
}

// The tiles of one item of a head or list.
__device__ __forceinline__ int2 item_tiles(const AttentionParams& params, const Tile* tiles, int num_tiles, int item) {
  if (params.num_documents == 1) return {2 * item, 2 * item + 1 < num_tiles ? 2 * item + 1 : -1};
  const int first = item & ~1, second = first + 1 < num_tiles ? first + 1 : -1;
  const bool together = second >= 0 && tiles[first].index_row == tiles[second].index_row;
  if (item % 2 == 0) return {first, together ? second : -1};
  return {together ? -1 : second, -1};
}

// Number of the next work item, valid on lane 0.
__device__ __forceinline__ int next_work_item(const KernelArguments& args) {
  return threadIdx.x % 32 == 0 ? gridDim.x + atomicAdd(args.counter, 1) : 0;
}

// Ends the pipeline: an item that does not exist.
template <typename Pipeline>
__device__ __forceinline__ void send_end(Pipeline& pipeline) {
  pipeline.producer_acquire();
  if (threadIdx.x % 32 == 0) {
    pipeline.write_info(kItem, -1, 0, 0);
    barrier_arrive(pipeline.full_barrier());
  }
}

// Whether a warp's flags, equal on every lane, have any of `mask`. The vote makes the result uniform for the compiler,
// which serializes every wgmma under a branch that looks divergent (its note C7520).
__device__ __forceinline__ bool any_flag(uint32_t flags, uint32_t mask) { return __any_sync(~0u, flags & mask); }

// ---- consumer side -------------------------------------------------------------------------------------------------
// The elements of a 64 x N accumulator that a thread holds: rows `row` and row + 8, columns 8 j + 2 quad and the next.
struct ThreadPosition {
  int consumer, quad, row;
  __device__ ThreadPosition()
      : consumer(threadIdx.x / 128 - 1),
        quad(threadIdx.x % 4),
        row((threadIdx.x % 128) / 32 * 16 + (threadIdx.x % 32) / 4) {}
};

// Loads a tile's 64 rows as A fragments. 16-byte chunk c of row r of a strip is at c ^ (r % 8) where the strip is 128
// bytes wide, at c ^ (r / 2 % 4) where it is 64.
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

// Copies this warpgroup's rows from an item's stage to registers and releases the stage.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void receive_fragments(uint32_t (&a)[Shape<kHeadDim>::kSteps][4], Pipeline& pipeline,
                                                  int consumer) {
  load_fragments(a, pipeline.tile() + consumer * Shape<kHeadDim>::kTileBytes);
  proxy_fence();
  pipeline.consumer_release(pipeline.stage), pipeline.advance();
}

// Tiles in shared memory are passed as the low half of their descriptor.
template <int kHeadDim>
constexpr uint32_t kNextTile = Shape<kHeadDim>::kTileBytes >> 4;

// d = a b^T over head_dim, a from registers (64 rows), b from shared memory (a tile).
template <typename T, int kSteps>
__device__ __forceinline__ void gemm_rs(float (&d)[32], const uint32_t (&a)[kSteps][4], uint32_t low) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma<T, 0>(d, a[k], Shape<16 * kSteps>::k_major(low, k), k > 0);
}
// The same with both from shared memory; kAdd: d += a b^T.
template <typename T, bool kAdd, int kSteps>
__device__ __forceinline__ void gemm_ss(float (&d)[32], uint32_t a_low, uint32_t low) {
  using S = Shape<16 * kSteps>;
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma<T, 0>(d, S::k_major(a_low, k), S::k_major(low, k), kAdd || k > 0);
}
// d += a b over the tile's 64 rows, a from registers (64 x 64), b from shared memory.
template <typename T, int kCount>
__device__ __forceinline__ void gemm_rs_accumulate(float (&d)[kCount], const uint32_t (&a)[4][4], uint32_t low) {
#pragma unroll
  for (int k = 0; k < 4; ++k) wgmma<T, 1>(d, a[k], Shape<2 * kCount>::mn_major(low, k), 1);
}

// Rounds a 64 x 64 accumulator to the A fragments of the next product.
template <typename T>
__device__ __forceinline__ void pack_tile(const float (&s)[32], uint32_t (&a)[4][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    a[j / 2][(j % 2) * 2] = pack_pair<T>(s[4 * j], s[4 * j + 1]);
    a[j / 2][(j % 2) * 2 + 1] = pack_pair<T>(s[4 * j + 2], s[4 * j + 3]);
  }
}

// The order of a consumer's products, of which the kernels choose one for each head_dim. kTileByTile: a tile is
// finished before S of the next one is issued; the products of other warpgroups overlap with the exponentials.
// kPrefetchScores: S of the next tile is issued before P of the current one is computed, into one of two buffers, so
// that products are in flight during all arithmetic of a warpgroup. After an item's last tile, S is issued for the last
// tile once more and dropped, so that no product depends on a branch.
enum class Schedule { kTileByTile, kPrefetchScores };

// Sets the elements of S, or of P, outside the mask to `masked`. Column c is valid where bit c is set.
__device__ __forceinline__ void mask_columns(float (&s)[32], uint2 mask, int quad, float masked = -INFINITY) {
  const unsigned low = mask.x >> (2 * quad), high = mask.y >> (2 * quad);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const unsigned bits = j < 4 ? low >> (8 * j) : high >> (8 * (j - 4));
    if (!(bits & 1)) s[4 * j] = masked, s[4 * j + 2] = masked;
    if (!(bits & 2)) s[4 * j + 1] = masked, s[4 * j + 3] = masked;
  }
}

// The same by rows: the thread's first is valid where bit 0 is set, its second where bit 8 is.
__device__ __forceinline__ void mask_rows(float (&s)[32], uint32_t bits, float masked = -INFINITY) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (!(bits & 1)) s[4 * j] = masked, s[4 * j + 1] = masked;
    if (!(bits & 256)) s[4 * j + 2] = masked, s[4 * j + 3] = masked;
  }
}

// The same for columns range.x..range.y - 1.
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

// Value i of thread q of a quad becomes value q of thread i.
__device__ __forceinline__ void transpose_quad(uint32_t (&value)[4], int quad) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(~0u, quad & 1 ? value[i] : value[i + 1], 1);
    value[i] = quad & 1 ? received : value[i], value[i + 1] = quad & 1 ? value[i + 1] : received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = __shfl_xor_sync(~0u, quad & 2 ? value[i] : value[i + 2], 2);
    value[i] = quad & 2 ? received : value[i], value[i + 2] = quad & 2 ? value[i + 2] : received;
  }
}

// The same to a row of T, for the whole warp: the threads of a quad exchange values, so that each writes 16 bytes at
// once.
template <typename T, int kCount>
__device__ __forceinline__ void store_final_row(T* row, bool valid, const float (&x)[kCount], int which, float factor,
                                                int quad) {
#pragma unroll
  for (int first = 0; first < kCount / 4; first += 4) {
    uint32_t value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = x + 4 * (first + i) + 2 * which;
      value[i] = pack_pair<T>(pair[0] * factor, pair[1] * factor);
    }
    transpose_quad(value, quad);
    if (valid) *reinterpret_cast<uint4*>(row + 8 * (first + quad)) = make_uint4(value[0], value[1], value[2], value[3]);
  }
}

}  // namespace mtraining::sm90
