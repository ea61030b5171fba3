// The lists of an index: the heads that share one, and the addresses of its entries.
#pragma once
#include "params.h"

namespace mtraining {

__host__ __device__ inline int heads_per_list(const AttentionParams& params) {
  return params.num_heads / params.num_lists;
}
// The list of a query head.
__host__ __device__ inline int list_of(const AttentionParams& params, int head) {
  return head / heads_per_list(params);
}

// Rows of the index and of packed tensors: of the batch, or of a batch of one its documents.
__host__ __device__ inline int num_index_rows(const AttentionParams& params) {
  return params.batch + params.num_documents - 1;
}

// The entries of one (index row, list) of a table.
__device__ __forceinline__ const int32_t* table_row(const Table& table, int64_t row, int list) {
  return table.data + row * table.stride_row + list * table.stride_list;
}

}  // namespace mtraining
