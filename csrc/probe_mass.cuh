// Addresses of the mass of a list.
#pragma once
#include "probe_params.h"

namespace mtraining::probe {

// The 64 values of one slot. `rank` is the outermost index of ProbeParams::mass, `list` one of its lists_per_rank.
__device__ __forceinline__ float* mass_of_slot(const ProbeParams& params, const ProbeDocument& document, int rank,
                                               int list, int slot) {
  const int64_t before = (int64_t{rank} * params.mass_blocks + document.first_mass_block) * params.lists_per_rank;
  return params.mass + (before + int64_t{list} * document.slots_per_rank + slot) * kBlock;
}

// The same of one of the document's blocks, once the ranks have exchanged their mass.
__device__ __forceinline__ const float* mass_of_block(const ProbeParams& params, const ProbeDocument& document,
                                                      int list, int block) {
  const int slot = params.block_order[document.first_of_order + block];
  return mass_of_slot(params, document, slot / document.slots_per_rank, list, slot % document.slots_per_rank);
}

// Index of a list's first block of one document in distance_sums.
__device__ __forceinline__ int64_t first_block_of(const ProbeParams& params, const ProbeDocument& document, int list) {
  return int64_t{list} * params.order_blocks + document.first_of_order;
}

// The bits of a line's rate: ordered as the rates are, and 0 where there is no mass or no number.
__device__ __forceinline__ uint32_t bits_of(float rate) { return rate > 0.f ? __float_as_uint(rate) : 0; }

// The rate of a column, `block` counted from the document's first.
__device__ __forceinline__ float column_rate(const ProbeParams& params, const ProbeDocument& document, float mass,
                                             int block) {
  if (params.budget != kBudgetCost) return mass;
  return __fdiv_rn(mass, static_cast<float>(__ldg(params.visible_rows + document.first_of_order + block)));
}

__device__ __forceinline__ bool is_chosen(const Threshold& threshold, uint32_t bits, int line) {
  return bits > threshold.bits || (bits == threshold.bits && line <= threshold.last_tie);
}

}  // namespace mtraining::probe
