// Where the mass of a lane lies in memory.
#pragma once
#include "probe_params.h"

namespace mtraining::probe {

// The 64 values of one slot. `rank` is the outermost index of ProbeParams::mass, `lane` a list of it.
__device__ __forceinline__ float* mass_of_slot(const ProbeParams& params, const ProbeDocument& document, int rank,
                                               int lane, int slot) {
  const int64_t before = (int64_t{rank} * params.mass_blocks + document.first_mass_block) * params.lists_per_rank;
  return params.mass + (before + int64_t{lane} * document.slots_per_rank + slot) * kBlock;
}

// The same of one of the document's blocks, once the ranks have exchanged their mass.
__device__ __forceinline__ const float* mass_of_block(const ProbeParams& params, const ProbeDocument& document,
                                                      int lane, int block) {
  const int place = params.block_order[document.first_of_order + block];
  return mass_of_slot(params, document, place / document.slots_per_rank, lane, place % document.slots_per_rank);
}

// Where a ranked lane's blocks of one document begin in columns (times 64) and in distances.
__device__ __forceinline__ int64_t first_block_of(const ProbeParams& params, const ProbeDocument& document, int lane) {
  return int64_t{lane} * params.order_blocks + document.first_of_order;
}

}  // namespace mtraining::probe
