// dQ of one pass: a CTA computes one query tile of one head, over the same key tiles as the forward.
//
//   P = exp(softmax_scale * Q K^T - lse),  dS = P * (dO V^T - delta),  dQ += softmax_scale * dS K
#pragma once
#include "sm80_keys.cuh"

namespace mtraining::sm80 {

// Writes row r (of the thread's two), in T in the last step; with `resume`, adds the previous dQ.
template <int kHeadDim, typename T>
__device__ __forceinline__ void store_query_grad(const AttentionParams& params, const QueryCoord& coord, int64_t token,
                                                 int quad, float (&grad)[kHeadDim / 8][4], int r) {
  float scale = params.softmax_scale;
  float* const partial = row_pointer<float>(params.grad_query, coord.batch, token, coord.head);
  if (params.resume) {
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const float2 before = *reinterpret_cast<const float2*>(partial + 8 * j + 2 * quad);
      grad[j][2 * r] = fmaf(grad[j][2 * r], scale, before.x);
      grad[j][2 * r + 1] = fmaf(grad[j][2 * r + 1], scale, before.y);
    }
    scale = 1.f;
  }
  if (params.final_grad_query.data)
    store_row<kHeadDim>(row_pointer<T>(params.final_grad_query, coord.batch, token, coord.head), quad, grad, r, scale);
  else
    store_row<kHeadDim>(partial, quad, grad, r, scale);
}

template <int kHeadDim, typename T, Pass kPass>
__global__ void __launch_bounds__(kThreads, 2)
    backward_query_kernel(const __grid_constant__ AttentionParams params, const float* lse_log2) {
  using Layout = TileLayout<kHeadDim>;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t stages = smem_address(shared);
  constexpr int kStageBytes = 2 * Layout::kBytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
  const int row = warp * 16 + lane / 4;  // the first of the thread's two rows in the slot

  const QueryCoord coord = query_coord(params, blockIdx.x, blockIdx.y);
  using Keys = KeyTiles<kHeadDim, T, kPass>;
  const KeySource<T>& source = shared_source<Keys, T>(params, coord);
  __shared__ ListMask masks[2];
  Keys keys(params, source);
  KeyStep step;
  bool found = keys.next_tile(step);
  if (!found && params.resume && !params.final_grad_query.data) return;

  // Q and dO are copied to registers through the second stage.
  const int valid_rows = params.seq_q - static_cast<int>(coord.token);
  load_tile<kHeadDim>(stages + kStageBytes, row_pointer<const T>(params.query, coord.batch, coord.token, coord.head),
                      params.query.stride_seq, valid_rows);
  load_tile<kHeadDim>(stages + kStageBytes + Layout::kBytes,
                      row_pointer<const T>(params.grad_out, coord.batch, coord.token, coord.head),
                      params.grad_out.stride_seq, valid_rows);
  load_first(keys, found, step, stages, masks[0]);
  uint32_t query[kHeadDim / 16][4], grad_out[kHeadDim / 16][4];
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    load_left<kHeadDim>(query[k], stages + kStageBytes, warp * 16, k);
    load_left<kHeadDim>(grad_out[k], stages + kStageBytes + Layout::kBytes, warp * 16, k);
  }
  float lse[2], delta[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool owned = owns(coord.tile, row + 8 * r);
    const int64_t token = coord.token + row + 8 * r;
    lse[r] = owned ? lse_log2[(int64_t{blockIdx.y}) * params.seq_q + token] : INFINITY;
    delta[r] = owned ? *row_pointer(params.delta, coord.batch, token, coord.head) : 0.f;
  }

  float grad[kHeadDim / 8][4];
  clear(grad);
  const float scale_log2 = params.softmax_scale * kLog2E;
  const int document_column = coord.tile.first_token - coord.tile.block * kBlock;
  for (int stage = 0; found; stage ^= 1) {
    KeyStep following;
    const bool more = keys.next_tile(following);
    copy_async_wait_all();
    __syncthreads();  // this tile has arrived, and every warp has finished with the other stage
    if (more) keys.load(following, stages + (stage ^ 1) * kStageBytes, masks[stage ^ 1]);
    const uint32_t key_tile = stages + stage * kStageBytes, value_tile = key_tile + Layout::kBytes;
    float s[8][4], dp[8][4];
    score<kHeadDim, T>(s, [&](int k, uint32_t (&a)[4]) { copy(a, query[k]); }, key_tile);
    mask_scores<kPass>(s, source, step, masks[stage], document_column, row, quad);
    score<kHeadDim, T>(dp, [&](int k, uint32_t (&a)[4]) { copy(a, grad_out[k]); }, value_tile);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[j][i] = exp2_approx(fmaf(s[j][i], scale_log2, -lse[i / 2])) * (dp[j][i] - delta[i / 2]);
    accumulate<kHeadDim, T>(grad, s, key_tile);
    step = following, found = more;
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (owns(coord.tile, row + 8 * r))
      store_query_grad<kHeadDim, T>(params, coord, coord.token + row + 8 * r, quad, grad, r);
  }
}

// One pass over all query tiles of the call. `lse_log2` comes from prepare_lse.
template <int kHeadDim, typename T>
const char* launch_backward_query(Pass pass, const AttentionParams& params, const float* lse_log2,
                                  cudaStream_t stream) {
  const auto kernel = pass == Pass::kSlash      ? backward_query_kernel<kHeadDim, T, Pass::kSlash>
                      : pass == Pass::kVertical ? backward_query_kernel<kHeadDim, T, Pass::kVertical>
                                                : backward_query_kernel<kHeadDim, T, Pass::kLists>;
  constexpr int kSharedBytes = 4 * TileLayout<kHeadDim>::kBytes;
  const dim3 grid(params.num_query_tiles, params.batch * params.num_heads);
  if (const char* error =
          describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)))
    return error;
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(params, lse_log2);
  return launch_error();
}

}  // namespace mtraining::sm80
