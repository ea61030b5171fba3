// dK and dV of one pass: a CTA owns 64 key rows and visits the query tiles that attend to them.
//
//   P = exp(softmax_scale * K Q^T - lse),  dV += P dO,  dS = P * (V dO^T - delta),  dK += softmax_scale * dS Q
//
// Slash pass: the rows are one key tile of one key/value head. Key block b visits query blocks b + d for the distances
// d of each query head of the group, head by head; with block lists, the blocks whose list contains its chunk.
//
// Vertical pass: the rows are one tile of packed columns for one query head. The query tiles are a share of those with
// a nonzero mask over these columns. Both passes sum in a fixed order.
#pragma once
#include <type_traits>

#include "sm80_keys.cuh"

namespace mtraining::sm80 {

constexpr int kHalf = kBlock / 2;  // queries at a time: two gradients leave no registers for 64

// The rows that one CTA owns.
struct KeyCoord {
  Tile tile;        // slash: the key tile
  int column_tile;  // vertical: tile of packed columns
  int batch;
  int head;      // slash, lists: of key and value; vertical: of the queries
  int end_head;  // slash, lists: one past the last query head of the group
  int64_t index_row;
};

template <bool kVertical>
__device__ __forceinline__ KeyCoord key_coord(const AttentionParams& params) {
  KeyCoord coord;
  if constexpr (kVertical) {
    const int rows = num_index_rows(params) * params.num_heads;
    coord.column_tile = blockIdx.x / rows;  // the first columns first: they have the most queries
    coord.index_row = blockIdx.x % rows / params.num_heads, coord.head = blockIdx.x % params.num_heads;
    coord.batch = params.num_documents > 1 ? 0 : static_cast<int>(coord.index_row);
  } else {
    coord.tile = params.key_tiles[blockIdx.x];
    coord.batch = blockIdx.y / params.num_kv_heads, coord.head = blockIdx.y % params.num_kv_heads;
    coord.end_head = (coord.head + 1) * (params.num_heads / params.num_kv_heads);
    coord.index_row = coord.tile.index_row + coord.batch;
  }
  return coord;
}

// One tile of queries.
struct QueryStep {
  int index;  // slash: query slot; vertical: query tile
  int head;
  int distance;  // slash: query block - key block; lists: the block's index in the list
};

// The mask of a step. In shared memory, where it costs no registers until the tile has arrived.
struct QueryMask {
  uint64_t bits;     // vertical: valid keys; lists: queries that attend to the keys
  bool is_diagonal;  // keys and queries are in one block
  int first, last;   // columns first .. last - 1 are the document's
};

// Visits the query tiles in order.
template <int kHeadDim, typename T, Pass kPass>
class QueryTiles {
 public:
  static constexpr bool kVertical = kPass == Pass::kVertical;
  static constexpr int kStageBytes = 2 * TileLayout<kHeadDim>::kBytes + 2 * kBlock * sizeof(float);

  __device__ __forceinline__ QueryTiles(const AttentionParams& params, const KeyCoord& coord, const float* lse_log2,
                                        int splits)
      : params_(params), coord_(coord), lse_log2_(lse_log2) {
    if constexpr (kVertical) {
      const int document = params.num_documents > 1 ? static_cast<int>(coord.index_row) : 0;
      const int begin = params.document_tiles[document], end = params.document_tiles[document + 1];
      const int share = (end - begin + splits - 1) / splits, first = begin + static_cast<int>(blockIdx.y) * share;
      const int64_t list = int64_t{coord.batch} * params.num_lists + list_of(params, coord.head);
      bitmask_ = {params.vertical_bitmask + list * params.num_query_tiles * params.num_column_tiles + coord.column_tile,
                  params.num_column_tiles, first, min(end, first + share)};
    } else {
      head_ = coord.end_head - params.num_heads / params.num_kv_heads;
    }
  }

  __device__ __forceinline__ bool next_tile(QueryStep& step) {
    if constexpr (kVertical) {
      step.head = coord_.head;
      return bitmask_scheduler_.next_tile(bitmask_, step.index);
    } else {
      while (!next_tile_of_head(step)) {
        if (++head_ == coord_.end_head) return false;
        scheduler_ = Scheduler();
      }
      step.head = head_;
      return true;
    }
  }

  // Starts the copy of a step's query rows to `stage`, followed by its grad_out rows, lse and delta; writes its mask.
  __device__ __forceinline__ void load(const QueryStep& step, uint32_t stage, QueryMask& mask) const {
    if (threadIdx.x == 0) mask = mask_of(step);
    using Layout = TileLayout<kHeadDim>;
    const int64_t token = int64_t{kVertical ? params_.query_tiles[step.index].slot : step.index} * kBlock;
    const int valid_rows = params_.seq_q - static_cast<int>(token);
    load_tile<kHeadDim>(stage, row_pointer<const T>(params_.query, coord_.batch, token, step.head),
                        params_.query.stride_seq, valid_rows);
    load_tile<kHeadDim>(stage + Layout::kBytes, row_pointer<const T>(params_.grad_out, coord_.batch, token, step.head),
                        params_.grad_out.stride_seq, valid_rows);
    const int row = threadIdx.x % kBlock;
    const int64_t head = int64_t{coord_.batch} * params_.num_heads + step.head;
    const float* scalars = threadIdx.x < kBlock ? lse_log2_ + head * params_.seq_q + token
                                                : row_pointer(params_.delta, coord_.batch, token, step.head);
    copy_async_4(stage + 2 * Layout::kBytes + threadIdx.x * sizeof(float), scalars + row, row < valid_rows);
    copy_async_commit();
  }

  // Sets excluded elements of P^T to zero. Rows are keys, `row` the thread's first; columns are queries, from
  // first_column on.
  static __device__ __forceinline__ void apply_mask(float (&p)[kHalf / 8][4], const QueryMask& mask, int row, int quad,
                                                    int first_column) {
    const bool whole = kPass == Pass::kSlash || mask.bits == ~uint64_t{0};
    if (whole && !mask.is_diagonal && mask.first <= 0 && mask.last >= kBlock) return;
#pragma unroll
    for (int j = 0; j < kHalf / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = first_column + 8 * j + 2 * quad + i % 2, key = row + 8 * (i / 2);
        const bool causal = kVertical || !mask.is_diagonal || key <= column;
        const bool attends = kPass == Pass::kSlash || (mask.bits >> (kVertical ? key : column)) & 1;
        if (!causal || !attends || (kVertical && column < mask.first) || column >= mask.last) p[j][i] = 0.f;
      }
  }

 private:
  __device__ __forceinline__ QueryMask mask_of(const QueryStep& step) const {
    if constexpr (kVertical) {
      const Tile& tile = params_.query_tiles[step.index];
      return {bitmask_.masks[step.index * bitmask_.stride], false, tile.row_begin, tile.row_end};
    }
    int block = coord_.tile.block + step.distance;
    uint64_t rows = ~uint64_t{0};
    if constexpr (kPass == Pass::kLists) {
      const ChunkList<true> list = chunks(step.head);
      block = list.block(step.distance), rows = list.rows(step.distance);
    }
    return {rows, block == coord_.tile.block, 0, coord_.tile.end_token - block * kBlock};
  }

  // The next tile of the current head.
  __device__ __forceinline__ bool next_tile_of_head(QueryStep& step) {
    if constexpr (kPass == Pass::kLists)
      return scheduler_.next_tile(chunks(head_), params_.query_slots, step.index, step.distance);
    else
      return scheduler_.next_tile(slashes(), params_.query_slots, step.index, step.distance);
  }

  // The query blocks whose list contains the tile's chunk, from its own block on.
  __device__ __forceinline__ ChunkList<true> chunks(int head) const {
    return chunk_list<true>(params_.key_lists, int64_t{coord_.batch} * params_.num_lists + list_of(params_, head),
                            coord_.tile.block / params_.chunk_blocks, 1, coord_.tile.block,
                            (coord_.tile.end_token - 1) / kBlock);
  }

  // The list of the current head; built at each use, or it would occupy registers through the loop.
  __device__ __forceinline__ SlashList slashes() const {
    const int list = params_.num_lists == params_.num_heads ? head_ : coord_.head;  // of a head, or of its group
    return {table_row(params_.slash, coord_.index_row, list), *table_row(params_.num_slash, coord_.index_row, list),
            coord_.tile.block, (coord_.tile.end_token - 1) / kBlock - coord_.tile.block};
  }

  const AttentionParams& params_;
  const KeyCoord& coord_;
  const float* lse_log2_;
  int head_;
  using Scheduler = std::conditional_t<kPass == Pass::kLists, ChunkTileScheduler<true>, SlashTileScheduler<1>>;
  Scheduler scheduler_;
  BitmaskList bitmask_;
  BitmaskTileScheduler bitmask_scheduler_;
};

// Writes the sums of the CTA's rows.
template <int kHeadDim, bool kVertical>
__device__ __forceinline__ void store_key_grads(const AttentionParams& params, const KeyCoord& coord,
                                                int64_t split_stride, int row, int quad,
                                                const float (&grad_key)[kHeadDim / 8][4],
                                                const float (&grad_value)[kHeadDim / 8][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = row + 8 * r;
    if constexpr (!kVertical) {
      if (!owns(coord.tile, key)) continue;
      const int64_t token = int64_t{coord.tile.slot} * kBlock + key;
      float* key_row = row_pointer<float>(params.grad_key, coord.batch, token, coord.head);
      float* value_row = row_pointer<float>(params.grad_value, coord.batch, token, coord.head);
      store_row<kHeadDim>(key_row, quad, grad_key, r, params.softmax_scale);
      store_row<kHeadDim>(value_row, quad, grad_value, r, 1.f);
    } else {
      const int column = coord.column_tile * kBlock + key;
      if (column >= params.max_vertical) continue;
      const int64_t split = blockIdx.y * split_stride;
      float* key_row = row_pointer<float>(params.grad_packed_key, coord.index_row, column, coord.head) + split;
      float* value_row = row_pointer<float>(params.grad_packed_value, coord.index_row, column, coord.head) + split;
      store_row<kHeadDim>(key_row, quad, grad_key, r, params.softmax_scale);
      store_row<kHeadDim>(value_row, quad, grad_value, r, 1.f);
    }
  }
}

template <int kHeadDim, typename T, Pass kPass>
__global__ void __launch_bounds__(kThreads, 2)
    backward_key_kernel(const __grid_constant__ AttentionParams params, const float* lse_log2, int splits,
                        int64_t split_stride) {
  using Layout = TileLayout<kHeadDim>;
  using Queries = QueryTiles<kHeadDim, T, kPass>;
  constexpr bool kVertical = kPass == Pass::kVertical;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t key_tile = smem_address(shared), value_tile = key_tile + Layout::kBytes;
  constexpr int kStagesAt = 2 * Layout::kBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
  const int row = warp * 16 + lane / 4;  // the first of the thread's two key rows

  __shared__ QueryMask masks[2];
  __shared__ KeyCoord coord;  // shared memory costs no registers
  if (threadIdx.x == 0) coord = key_coord<kVertical>(params);
  __syncthreads();
  Queries queries(params, coord, lse_log2, splits);
  QueryStep step;
  bool found = queries.next_tile(step);

  if constexpr (kVertical) {
    const int first = coord.column_tile * kBlock, valid_rows = params.max_vertical - first;
    const int list = list_of(params, coord.head);
    load_tile<kHeadDim>(key_tile, row_pointer<const T>(params.packed_key, coord.index_row, first, list),
                        params.packed_key.stride_seq, valid_rows);
    load_tile<kHeadDim>(value_tile, row_pointer<const T>(params.packed_value, coord.index_row, first, list),
                        params.packed_value.stride_seq, valid_rows);
  } else {
    const int64_t token = int64_t{coord.tile.slot} * kBlock;
    const int valid_rows = params.seq_kv - static_cast<int>(token);
    load_tile<kHeadDim>(key_tile, row_pointer<const T>(params.key, coord.batch, token, coord.head),
                        params.key.stride_seq, valid_rows);
    load_tile<kHeadDim>(value_tile, row_pointer<const T>(params.value, coord.batch, token, coord.head),
                        params.value.stride_seq, valid_rows);
  }
  if (found)
    queries.load(step, key_tile + kStagesAt, masks[0]);
  else
    copy_async_commit();

  float grad_key[kHeadDim / 8][4], grad_value[kHeadDim / 8][4];
  clear(grad_key);
  clear(grad_value);
  const float scale_log2 = params.softmax_scale * kLog2E;
  for (int stage = 0; found; stage ^= 1) {
    QueryStep following;
    const bool more = queries.next_tile(following);
    copy_async_wait_all();
    __syncthreads();  // this tile has arrived, and every warp has finished with the other stage
    if (more) queries.load(following, key_tile + kStagesAt + (stage ^ 1) * Queries::kStageBytes, masks[stage ^ 1]);
    const int stage_at = kStagesAt + stage * Queries::kStageBytes;
    const uint32_t query_tile = key_tile + stage_at, grad_out_tile = query_tile + Layout::kBytes;
    const float* lse = reinterpret_cast<const float*>(shared + stage_at + 2 * Layout::kBytes);
    const float* delta = lse + kBlock;
#pragma unroll 1
    for (int half = 0; half < kBlock; half += kHalf) {
      float p[kHalf / 8][4], ds[kHalf / 8][4];
      score<kHeadDim, T>(
          p, [&](int k, uint32_t (&a)[4]) { load_left<kHeadDim>(a, key_tile, warp * 16, k); }, query_tile, half);
#pragma unroll
      for (int j = 0; j < kHalf / 8; ++j) {
        const float2 shift = *reinterpret_cast<const float2*>(lse + half + 8 * j + 2 * quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) p[j][i] = exp2_approx(fmaf(p[j][i], scale_log2, i % 2 ? -shift.y : -shift.x));
      }
      Queries::apply_mask(p, masks[stage], row, quad, half);
      score<kHeadDim, T>(
          ds, [&](int k, uint32_t (&a)[4]) { load_left<kHeadDim>(a, value_tile, warp * 16, k); }, grad_out_tile, half);
      accumulate<kHeadDim, T>(grad_value, p, grad_out_tile, half);
#pragma unroll
      for (int j = 0; j < kHalf / 8; ++j) {
        const float2 shift = *reinterpret_cast<const float2*>(delta + half + 8 * j + 2 * quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[j][i] = p[j][i] * (ds[j][i] - (i % 2 ? shift.y : shift.x));
      }
      accumulate<kHeadDim, T>(grad_key, ds, query_tile, half);
    }
    step = following, found = more;
  }
  copy_async_wait_all();
  store_key_grads<kHeadDim, kVertical>(params, coord, split_stride, row, quad, grad_key, grad_value);
}

// One pass over all key tiles, or over all packed columns. `lse_log2` comes from prepare_lse.
template <int kHeadDim, typename T>
const char* launch_backward_key(Pass pass, const AttentionParams& params, const float* lse_log2, int splits,
                                int64_t split_stride, cudaStream_t stream) {
  const auto kernel = pass == Pass::kSlash      ? backward_key_kernel<kHeadDim, T, Pass::kSlash>
                      : pass == Pass::kVertical ? backward_key_kernel<kHeadDim, T, Pass::kVertical>
                                                : backward_key_kernel<kHeadDim, T, Pass::kLists>;
  constexpr int kSharedBytes =
      2 * TileLayout<kHeadDim>::kBytes + 2 * QueryTiles<kHeadDim, T, Pass::kSlash>::kStageBytes;
  const dim3 grid = pass == Pass::kVertical
                        ? dim3(params.num_column_tiles * num_index_rows(params) * params.num_heads, splits)
                        : dim3(params.num_key_tiles, params.batch * params.num_kv_heads);
  if (const char* error =
          describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)))
    return error;
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(params, lse_log2, splits, split_stride);
  return launch_error();
}

}  // namespace mtraining::sm80
