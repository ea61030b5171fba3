// Gradients of packed rows in parts: one for each query head of a list and, where a kernel splits its queries, for each
// share of them. One CTA writes a part; a kernel sums the parts afterwards in a fixed order.
#pragma once
#include <cuda_runtime.h>

#include "params.h"

namespace mtraining {

// float32 [splits, 2, R, Hq, V, D], of key and of value.
struct PackedParts {
  float* data;
  int splits;
};

// Number of elements in the parts of one split, of key alone.
int64_t part_floats(const AttentionParams& params);

// Whether `splits` shares of the queries, or heads that share a list, need parts.
bool needs_parts(const AttentionParams& params, int splits);

// The same parameters with grad_packed_key and grad_packed_value pointing to the parts, one for each head of a list.
AttentionParams into_parts(const AttentionParams& params, const PackedParts& parts);

// Sums the parts into params.grad_packed_key and params.grad_packed_value: head by head, split by split.
const char* sum_packed_parts(const AttentionParams& params, const PackedParts& parts, cudaStream_t stream);

}  // namespace mtraining
