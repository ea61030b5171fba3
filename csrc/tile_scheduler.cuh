// Tile schedulers: iterators over the tiles that a CTA visits. Every warp iterates on its own and all warps reach the
// same result, so neither shared memory nor a barrier is needed: lane i loads entry 32 * n + i of the list, and a
// ballot selects the entries to visit.
#pragma once
#include <climits>

#include "lists.cuh"

namespace mtraining {

// The ascending distances of one list, and the blocks at these distances from one block: origin + direction * distance,
// up to distance <= limit. Lives in shared memory, where it costs no registers.
struct SlashList {
  const int32_t* distances;
  int count, origin, limit;
};

// Visits the blocks of a list that have a slot in `slots`.
template <int kDirection>
class SlashTileScheduler {
 public:
  // Slot and distance of the next block; false at the end.
  __device__ __forceinline__ bool next_tile(const SlashList& list, const int32_t* slots, int& slot, int& distance) {
    while (active_ == 0) {
      if (base_ >= list.count) return false;
      load(list, slots);
    }
    const int lane = __ffs(active_) - 1;
    active_ &= active_ - 1;
    slot = __shfl_sync(~0u, slot_, lane);
    distance = __shfl_sync(~0u, distance_, lane);
    return true;
  }

 private:
  __device__ __forceinline__ void load(const SlashList& list, const int32_t* slots) {
    const int i = base_ + static_cast<int>(threadIdx.x % 32);
    distance_ = i < list.count ? list.distances[i] : INT_MAX;
    const bool inside = distance_ <= list.limit;
    slot_ = inside ? slots[list.origin + kDirection * distance_] : -1;
    active_ = __ballot_sync(~0u, slot_ >= 0);
    // Distances ascend: once one exceeds the limit, all later ones do.
    base_ = __ballot_sync(~0u, inside) == ~0u ? base_ + 32 : INT_MAX;
  }

  int base_ = 0, slot_, distance_;
  unsigned active_ = 0;
};

// The chunks of one block list, restricted to blocks first_block..last_block. `index` numbers the blocks of all chunks
// consecutively. kSingle: chunks of one block. Lives in shared memory.
template <bool kSingle>
struct ChunkList {
  const int32_t* chunks;
  const uint64_t* row_masks;  // null: every row attends to every chunk
  int count, chunk_blocks, first_block, last_block;

  __device__ __forceinline__ int num_blocks() const { return kSingle ? count : count * chunk_blocks; }
  __device__ __forceinline__ int entry(int index) const {
    return kSingle ? index : static_cast<unsigned>(index) / static_cast<unsigned>(chunk_blocks);
  }
  __device__ __forceinline__ int block(int index) const {
    const int at = entry(index);
    return kSingle ? chunks[at] : (chunks[at] - at) * chunk_blocks + index;
  }
  // The query rows that attend to the block.
  __device__ __forceinline__ uint64_t rows(int index) const {
    return row_masks ? row_masks[entry(index)] : ~uint64_t{0};
  }
};

// List i of one (batch row, list of heads).
template <bool kSingle>
__device__ __forceinline__ ChunkList<kSingle> chunk_list(const BlockLists& lists, int64_t list, int64_t i,
                                                         int chunk_blocks, int first_block, int last_block) {
  const int32_t* const start = lists.starts + list * lists.stride + i;
  return {lists.entries + start[0],
          lists.row_masks ? lists.row_masks + start[0] : nullptr,
          start[1] - start[0],
          chunk_blocks,
          first_block,
          last_block};
}

// Visits the blocks of a chunk list that have a slot in `slots`.
template <bool kSingle>
class ChunkTileScheduler {
 public:
  // Slot and index of the next block; false at the end.
  __device__ __forceinline__ bool next_tile(const ChunkList<kSingle>& list, const int32_t* slots, int& slot,
                                            int& index) {
    while (active_ == 0) {
      if (base_ >= list.num_blocks()) return false;
      load(list, slots);
    }
    const int lane = __ffs(active_) - 1;
    active_ &= active_ - 1;
    slot = __shfl_sync(~0u, slot_, lane);
    index = base_ - 32 + lane;
    return true;
  }

 private:
  __device__ __forceinline__ void load(const ChunkList<kSingle>& list, const int32_t* slots) {
    const int index = base_ + static_cast<int>(threadIdx.x % 32);
    const int block = index < list.num_blocks() ? list.block(index) : -1;
    slot_ = block >= list.first_block && block <= list.last_block ? slots[block] : -1;
    active_ = __ballot_sync(~0u, slot_ >= 0);
    base_ += 32;
  }

  int base_ = 0, slot_;
  unsigned active_ = 0;
};

// Masks begin..end - 1 of a bitmask, 64 bits each, `stride` apart in memory.
struct BitmaskList {
  const uint64_t* masks;
  int64_t stride;
  int begin, end;
};

// Visits the nonzero masks.
class BitmaskTileScheduler {
 public:
  // Index of the next nonzero mask; false at the end.
  __device__ __forceinline__ bool next_tile(const BitmaskList& list, int& index) {
    while (active_ == 0) {
      if (list.begin + base_ >= list.end) return false;
      const int i = list.begin + base_ + static_cast<int>(threadIdx.x % 32);
      active_ = __ballot_sync(~0u, i < list.end && list.masks[i * list.stride] != 0);
      base_ += 32;
    }
    index = list.begin + base_ - 32 + __ffs(active_) - 1;
    active_ &= active_ - 1;
    return true;
  }

 private:
  int base_ = 0;
  unsigned active_ = 0;
};

}  // namespace mtraining
