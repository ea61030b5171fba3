// The functions that the binding calls. Each launches on `stream` and returns at once: nullptr, or an error message (a
// shape that the family does not support, or a CUDA error).
#pragma once
#include "params.h"

namespace mtraining {

// Passes over vertical or slash pairs, both in one launch (Hopper family only), and passes over the pairs of block
// lists. `forward` and `backward` of backends/protocol.py are built from them in backends/cuda/operators.py.
enum Operation : int32_t {
  kSlashForward = 0,
  kVerticalForward = 1,
  kSlashBackward = 2,
  kVerticalBackward = 3,
  kForward = 4,
  kBackward = 5,
  kListForward = 6,
  kListBackward = 7
};

// Copies the rows of key and value at the positions params.vertical to packed_key and packed_value; padding, and rows
// without a slot in key_slots, are set to zero.
const char* pack_vertical(const AttentionParams& params, void* stream);

// final_grad_key and final_grad_value: grad_key and grad_value, plus grad_packed_key and grad_packed_value at the rows
// that they were packed from.
const char* unpack_vertical_grad(const AttentionParams& params, void* stream);

const char* softmax_delta(const DeltaParams& params, void* stream);

// Fills params.vertical_bitmask from the index and the query tiles; the vertical operations read it.
const char* fill_vertical_bitmask(const AttentionParams& params, void* stream);

// The mma.sync family: every GPU of compute capability 8.0 or newer.
int64_t sm80_workspace_bytes(Operation operation, const AttentionParams& params);
const char* sm80_launch(Operation operation, const AttentionParams& params, void* stream);

// The Hopper family (sm_90a): compiled where csrc/ holds sm90_*.cu.
int64_t sm90_workspace_bytes(Operation operation, const AttentionParams& params);
const char* sm90_launch(Operation operation, const AttentionParams& params, void* stream);

}  // namespace mtraining
