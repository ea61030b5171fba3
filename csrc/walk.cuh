// Which blocks or words a CTA visits. Every warp walks on its own and all come to the same answers, so no shared memory
// and no barrier is needed: lane i holds entry 32 * chunk + i of the list, a ballot says which entries count.
#pragma once
#include <climits>

#include "lists.cuh"

namespace mtraining {

// The ascending distances of one list, and the blocks that they lead to from one block: origin + direction * distance,
// as far as distance <= limit. Lives in shared memory, where it costs no registers.
struct SlashList {
  const int32_t* distances;
  int count, origin, limit;
};

// Walks the blocks of a list that `slots` holds.
template <int kDirection>
class SlashWalker {
 public:
  // The next block's slot and distance; false at the end.
  __device__ __forceinline__ bool next(const SlashList& list, const int32_t* slots, int& slot, int& distance) {
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
    // Ascending: once a distance is past the limit, all are.
    base_ = __ballot_sync(~0u, inside) == ~0u ? base_ + 32 : INT_MAX;
  }

  int base_ = 0, slot_, distance_;
  unsigned active_ = 0;
};

// Chunks of blocks of one block list, of which those from first_block to last_block count. Its blocks are numbered through,
// chunk after chunk: that number is a block's place. kSingle: chunks are of one block. Lives in shared memory.
template <bool kSingle>
struct ChunkList {
  const int32_t* chunks;
  const uint64_t* row_masks;  // null: all rows see every chunk
  int count, chunk_blocks, first_block, last_block;

  __device__ __forceinline__ int num_places() const { return kSingle ? count : count * chunk_blocks; }
  __device__ __forceinline__ int entry(int place) const {
    return kSingle ? place : static_cast<unsigned>(place) / static_cast<unsigned>(chunk_blocks);
  }
  __device__ __forceinline__ int block(int place) const {
    const int at = entry(place);
    return kSingle ? chunks[at] : (chunks[at] - at) * chunk_blocks + place;
  }
  // The rows of queries that see the block.
  __device__ __forceinline__ uint64_t rows(int place) const {
    return row_masks ? row_masks[entry(place)] : ~uint64_t{0};
  }
};

// List i of a batch row and a list of heads.
template <bool kSingle>
__device__ __forceinline__ ChunkList<kSingle> chunk_list(const BlockLists& lists, int64_t list, int64_t i,
                                                         int chunk_blocks, int first_block, int last_block) {
  const int32_t* const start = lists.starts + list * lists.stride + i;
  return {lists.entries + start[0], lists.row_masks ? lists.row_masks + start[0] : nullptr, start[1] - start[0],
          chunk_blocks, first_block, last_block};
}

// Walks the blocks of a list of chunks that `slots` holds.
template <bool kSingle>
class ChunkWalker {
 public:
  // The next block's slot and place; false at the end.
  __device__ __forceinline__ bool next(const ChunkList<kSingle>& list, const int32_t* slots, int& slot, int& place) {
    while (active_ == 0) {
      if (base_ >= list.num_places()) return false;
      load(list, slots);
    }
    const int lane = __ffs(active_) - 1;
    active_ &= active_ - 1;
    slot = __shfl_sync(~0u, slot_, lane);
    place = base_ - 32 + lane;
    return true;
  }

 private:
  __device__ __forceinline__ void load(const ChunkList<kSingle>& list, const int32_t* slots) {
    const int place = base_ + static_cast<int>(threadIdx.x % 32);
    const int block = place < list.num_places() ? list.block(place) : -1;
    slot_ = block >= list.first_block && block <= list.last_block ? slots[block] : -1;
    active_ = __ballot_sync(~0u, slot_ >= 0);
    base_ += 32;
  }

  int base_ = 0, slot_;
  unsigned active_ = 0;
};

// Words `stride` apart in memory.
struct WordList {
  const uint64_t* words;
  int64_t stride;
  int begin, end;
};

// Walks the words that are not zero.
class WordWalker {
 public:
  // The next word's place; false at the end.
  __device__ __forceinline__ bool next(const WordList& list, int& place) {
    while (active_ == 0) {
      if (list.begin + base_ >= list.end) return false;
      const int i = list.begin + base_ + static_cast<int>(threadIdx.x % 32);
      active_ = __ballot_sync(~0u, i < list.end && list.words[i * list.stride] != 0);
      base_ += 32;
    }
    place = list.begin + base_ - 32 + __ffs(active_) - 1;
    active_ &= active_ - 1;
    return true;
  }

 private:
  int base_ = 0;
  unsigned active_ = 0;
};

}  // namespace mtraining
