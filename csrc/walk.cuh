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
