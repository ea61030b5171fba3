// Exact sums of exponentials: integers in slots of 16 binary exponents, of which the largest kSlots are kept.
//
// What is added is a float, mantissa * 2^exponent, that its own keys fix. Rounded to kMantissaBits it lies in the slot
// of its exponent as an integer, and integers may be added in any order. Which slots are kept follows from the largest
// exponent alone: a sum in a slot that falls out would fall out in any order. So a row's sums are the same bits however
// its keys are spread over threads, CTAs and ranks.
#pragma once
#include <cstdint>

#include "arithmetic.cuh"

namespace mtraining::probe {

constexpr int kSlots = 4;                // what lies 2^48 below the largest summand, or deeper, is lost
constexpr int kSlotBits = 4;             // log2 of the exponents of a slot
constexpr int kMantissaBits = 22;        // below the point: summands are below 2^5, so 2^20 of them fit into a slot
constexpr int kNoExponent = -(1 << 17);  // of a row without keys, in slots

struct SlotSums {
  int exponent = kNoExponent;  // of the largest slot: it counts in units of 2^(16 * exponent - kMantissaBits)
  long long slots[kSlots] = {};

  // Makes `larger` the largest slot.
  __device__ __forceinline__ void raise(int larger) {
    const int up = larger - exponent;
    if (up <= 0) return;
#pragma unroll
    for (int i = kSlots - 1; i >= 0; --i) {
      long long moved = 0;
#pragma unroll
      for (int from = 0; from < i; ++from) moved = i - from == up ? slots[from] : moved;
      slots[i] = moved;
    }
    exponent = larger;
  }

  // Adds sum * 2^power, 0 <= sum < 32. For all threads of a warp: most have nothing for the lower slots.
  __device__ __forceinline__ void add(float sum, int power) {
    const int slot = power >> kSlotBits;
    if (slot > exponent) raise(slot);
    const int below = exponent - slot;
    const unsigned unit = 1u << (power & ((1 << kSlotBits) - 1));
    const unsigned mantissa = __float2uint_rn(sum * (1 << kMantissaBits));
    const auto add_to = [&](int i) {
      slots[i] += static_cast<long long>(static_cast<unsigned long long>(mantissa) * (below == i ? unit : 0u));
    };
    static_assert(kSlots == 4);
    add_to(0);
    if (!__any_sync(~0u, below > 0)) return;
    add_to(1);
    if (!__any_sync(~0u, below > 1)) return;
    add_to(2);
    add_to(3);
  }

  // Adds what another thread of the warp holds.
  __device__ __forceinline__ void add_from(int lane_mask) {
    const int other = __shfl_xor_sync(~0u, exponent, lane_mask);
    const int down = max(0, exponent - other);
    long long others[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) others[i] = __shfl_xor_sync(~0u, slots[i], lane_mask);
    raise(other);
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
#pragma unroll
      for (int from = 0; from <= i; ++from) slots[i] += i - from == down ? others[from] : 0;
  }
};

}  // namespace mtraining::probe
