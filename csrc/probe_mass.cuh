// Addresses of the mass of a list.
#pragma once
#include "probe_params.h"

namespace mtraining::probe {

// Values between those of a key over the first half of the probe rows and over the second.
__device__ __forceinline__ int64_t half_stride(const ProbeParams& params) {
  return int64_t{params.mass_blocks} * params.lists_per_rank * kBlock;
}

// The 64 values of one slot over the first half. `rank` is the outermost index of ProbeParams::mass, `list` one of its
// lists_per_rank.
__device__ __forceinline__ float* mass_of_slot(const ProbeParams& params, const ProbeDocument& document, int rank,
                                               int list, int slot) {
  const int64_t before = int64_t{document.first_mass_block} * params.lists_per_rank;
  return params.mass + rank * params.num_halves * half_stride(params) +
         (before + int64_t{list} * document.slots_per_rank + slot) * kBlock;
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

// Mass of a column: over all probe rows, and that with which it competes: twice that of the half which sees less of it.
struct ColumnMass {
  float whole, competing;
};

__device__ __forceinline__ ColumnMass column_mass(const ProbeParams& params, const float* of_first_half) {
  const float first = *of_first_half;
  if (params.num_halves == 1) return {first, first};
  const float second = of_first_half[half_stride(params)], whole = first + second;
  return {whole, whole > 0.f ? 2.f * fminf(first, second) : 0.f};  // the lesser of a number and none is the number
}

// The rate of a column with a mass to compete with, `block` counted from the document's first.
__device__ __forceinline__ float column_rate(const ProbeParams& params, const ProbeDocument& document, float mass,
                                             int block) {
  if (params.budget != kBudgetCost) return mass;
  return __fdiv_rn(mass, static_cast<float>(__ldg(params.visible_rows + document.first_of_order + block)));
}

__device__ __forceinline__ bool is_chosen(const Threshold& threshold, uint32_t bits, int line) {
  return bits > threshold.bits || (bits == threshold.bits && line <= threshold.last_tie);
}

}  // namespace mtraining::probe
