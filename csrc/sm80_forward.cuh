// Forward of one pass: a CTA computes O and lse of one query tile of one head.
//
//   S = Q K^T,  P = exp2(softmax_scale log2(e) S - row_max),  O += P V,  row_sum += sum(P)
//
// Four warps own 16 query rows each, with Q in registers. Tiles of 64 keys and values pass through two shared-memory
// stages; the copy of the next tile overlaps with the products of the current one. Three CTAs per multiprocessor.
#pragma once
#include "sm80_keys.cuh"

namespace mtraining::sm80 {

// The thread's two rows, 8 apart: the maximum so far (log2 units), and the thread's share of the sum so far.
struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};

  // Replaces S by P; `rescale` is the factor for what was accumulated before.
  __device__ __forceinline__ void update(float (&s)[8][4], float scale_log2, float (&rescale)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_max = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) tile_max = fmaxf(tile_max, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      tile_max = fmaxf(row_max[r], quad_max(tile_max) * scale_log2);
      const float shift = tile_max == -INFINITY ? 0.f : tile_max;  // -inf: a row without any key so far
      rescale[r] = exp2_approx(row_max[r] - shift);
      row_max[r] = tile_max;
      row_sum[r] *= rescale[r];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          s[j][i] = exp2_approx(fmaf(s[j][i], scale_log2, -shift));
          row_sum[r] += s[j][i];
        }
    }
  }
};

// CTAs per multiprocessor: 168 registers per thread with three, 128 with four.
template <int kHeadDim>
constexpr int kCtasPerSm = kHeadDim == 64 ? 4 : 3;

// Number of k16 steps of Q in registers; each thread stores its fragments of the others in shared memory, so that
// nothing spills.
template <int kHeadDim>
constexpr int kQueryInRegisters = kHeadDim == 128  ? 6
                                  : kHeadDim == 64 ? 2
                                                   : kHeadDim / 16;

// Resumes from a previous result: row_max is its lse, row_sum is 1.
template <int kHeadDim>
__device__ __forceinline__ void resume(const AttentionParams& params, int row, int quad, float (&out)[kHeadDim / 8][4],
                                       OnlineSoftmax& softmax) {
  const QueryCoord coord = query_coord(params, rematerialize(blockIdx.x), rematerialize(blockIdx.y));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!owns(coord.tile, row + 8 * r)) continue;
    const float lse = *row_pointer(params.lse, coord.batch, coord.token + row + 8 * r, coord.head);
    if (lse == -INFINITY) continue;
    softmax.row_max[r] = lse * kLog2E;
    softmax.row_sum[r] = quad == 0 ? 1.f : 0.f;  // the four threads of a row add their shares at the end
    const float* previous = row_pointer<float>(params.out, coord.batch, coord.token + row + 8 * r, coord.head);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(previous + 8 * j + 2 * quad);
      out[j][2 * r] = pair.x, out[j][2 * r + 1] = pair.y;
    }
  }
}

// Normalizes and writes out, in T in the last step, and lse.
template <int kHeadDim, typename T>
__device__ __forceinline__ void store(const AttentionParams& params, int row, int quad,
                                      const float (&out)[kHeadDim / 8][4], const OnlineSoftmax& softmax) {
  const QueryCoord coord = query_coord(params, rematerialize(blockIdx.x), rematerialize(blockIdx.y));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(softmax.row_sum[r]);
    if (!owns(coord.tile, row + 8 * r)) continue;
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    const int64_t token = coord.token + row + 8 * r;
    if (params.final_out.data)
      store_row<kHeadDim>(row_pointer<T>(params.final_out, coord.batch, token, coord.head), quad, out, r, inverse);
    else
      store_row<kHeadDim>(row_pointer<float>(params.out, coord.batch, token, coord.head), quad, out, r, inverse);
    if (quad == 0)
      *row_pointer(params.lse, coord.batch, token, coord.head) =
          sum > 0.f ? (softmax.row_max[r] + log2f(sum)) * kLn2 : -INFINITY;
  }
}

template <int kHeadDim, typename T, Pass kPass>
__global__ void __launch_bounds__(kThreads, kCtasPerSm<kHeadDim>)
    forward_kernel(const __grid_constant__ AttentionParams params) {
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
  if (!found && params.resume && !params.final_out.data) return;  // the previous result is unchanged

  // Q is copied to registers through the second stage.
  load_tile<kHeadDim>(stages + kStageBytes, row_pointer<const T>(params.query, coord.batch, coord.token, coord.head),
                      params.query.stride_seq, params.seq_q - static_cast<int>(coord.token));
  load_first(keys, found, step, stages, masks[0]);
  uint32_t query[kQueryInRegisters<kHeadDim>][4];
  uint4* const shared_query = reinterpret_cast<uint4*>(shared + 2 * kStageBytes) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    uint32_t a[4];
    load_left<kHeadDim>(a, stages + kStageBytes, warp * 16, k);
    if (k < kQueryInRegisters<kHeadDim>)
      copy(query[k], a);
    else
      shared_query[(k - kQueryInRegisters<kHeadDim>)*kThreads] = make_uint4(a[0], a[1], a[2], a[3]);
  }
  const auto left = [&](int k, uint32_t (&a)[4]) {
    if (k < kQueryInRegisters<kHeadDim>) return copy(a, query[k]);
    const uint4 fragment = shared_query[(k - kQueryInRegisters<kHeadDim>)*kThreads];
    a[0] = fragment.x, a[1] = fragment.y, a[2] = fragment.z, a[3] = fragment.w;
  };

  float out[kHeadDim / 8][4];
  clear(out);
  OnlineSoftmax softmax;
  if (params.resume) resume<kHeadDim>(params, row, quad, out, softmax);

  const float scale_log2 = params.softmax_scale * kLog2E;
  const int document_column = coord.tile.first_token - coord.tile.block * kBlock;
  for (int stage = 0; found; stage ^= 1) {
    KeyStep following;
    const bool more = keys.next_tile(following);
    copy_async_wait_all();
    __syncthreads();  // this tile has arrived, and every warp has finished with the other stage
    if (more) keys.load(following, stages + (stage ^ 1) * kStageBytes, masks[stage ^ 1]);
    const uint32_t key_tile = stages + stage * kStageBytes, value_tile = key_tile + Layout::kBytes;
    float s[8][4];
    score<kHeadDim, T>(s, left, key_tile);
    mask_scores<kPass>(s, source, step, masks[stage], document_column, row, quad);
    float rescale[2];
    softmax.update(s, scale_log2, rescale);
    if (__any_sync(~0u, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[j][i] *= rescale[i / 2];
    }
    accumulate<kHeadDim, T>(out, s, value_tile);
    step = following, found = more;
  }

  store<kHeadDim, T>(params, row, quad, out, softmax);
}

// One pass over all query tiles of the call.
template <int kHeadDim, typename T>
const char* launch_forward(Pass pass, const AttentionParams& params, cudaStream_t stream) {
  const auto kernel = pass == Pass::kSlash      ? forward_kernel<kHeadDim, T, Pass::kSlash>
                      : pass == Pass::kVertical ? forward_kernel<kHeadDim, T, Pass::kVertical>
                                                : forward_kernel<kHeadDim, T, Pass::kLists>;
  constexpr int kSharedQuery = kHeadDim / 16 - kQueryInRegisters<kHeadDim>;
  constexpr int kSharedBytes = 4 * TileLayout<kHeadDim>::kBytes + kSharedQuery * kThreads * sizeof(uint4);
  const dim3 grid(params.num_query_tiles, params.batch * params.num_heads);
  if (const char* error =
          describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)))
    return error;
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(params);
  return launch_error();
}

}  // namespace mtraining::sm80
