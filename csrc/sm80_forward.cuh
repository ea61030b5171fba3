// Forward of one pass: a CTA computes one query tile of one head.
//
// Four warps own 16 query rows each, with Q in registers. Key and value tiles of 64 rows come through a ring of two
// shared-memory stages; the next one is in flight while the tensor cores work on this one. Three CTAs share an SM.
#pragma once
#include "sm80_keys.cuh"

namespace mtraining::sm80 {

// A thread's two rows, 8 apart: running maximum (log2 units) and the thread's share of the running sum.
struct OnlineSoftmax {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};

  // Turns scores into weights in place; `factor` is what earlier results shrink by.
  __device__ __forceinline__ void step(float (&s)[8][4], float scale_log2, float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(s[0][2 * r], s[0][2 * r + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) top = fmaxf(top, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      top = fmaxf(max[r], quad_max(top) * scale_log2);
      const float shift = top == -INFINITY ? 0.f : top;  // a row that has met no key yet
      factor[r] = exp2_approx(max[r] - shift);
      max[r] = top;
      sum[r] *= factor[r];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 2 * r; i < 2 * r + 2; ++i) {
          s[j][i] = exp2_approx(fmaf(s[j][i], scale_log2, -shift));
          sum[r] += s[j][i];
        }
    }
  }
};

// CTAs on an SM: 168 registers a thread for three, 128 for four.
template <int kHeadDim>
constexpr int kCtasPerSm = kHeadDim == 64 ? 4 : 3;

// How many of Q's k16 steps stay in registers; each thread parks the fragments of the others in shared memory, so that
// nothing spills.
template <int kHeadDim>
constexpr int kQueryInRegisters = kHeadDim == 128 ? 6 : kHeadDim == 64 ? 2 : kHeadDim / 16;

// Takes a previous result up again: its maximum is its lse, its sum 1.
template <int kHeadDim>
__device__ __forceinline__ void resume(const AttentionParams& params, int row, int quad, float (&out)[kHeadDim / 8][4],
                                       OnlineSoftmax& softmax) {
  const QueryPlace place = query_place(params, launder(blockIdx.x), launder(blockIdx.y));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!owns(place.tile, row + 8 * r)) continue;
    const float lse = *row_pointer(params.lse, place.batch, place.token + row + 8 * r, place.head);
    if (lse == -INFINITY) continue;
    softmax.max[r] = lse * kLog2E;
    softmax.sum[r] = quad == 0 ? 1.f : 0.f;  // the four threads of a row add their shares at the end
    const float* previous = row_pointer<float>(params.out, place.batch, place.token + row + 8 * r, place.head);
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      const float2 pair = *reinterpret_cast<const float2*>(previous + 8 * j + 2 * quad);
      out[j][2 * r] = pair.x, out[j][2 * r + 1] = pair.y;
    }
  }
}

// Normalises and writes out, in T in the last step, and lse.
template <int kHeadDim, typename T>
__device__ __forceinline__ void store(const AttentionParams& params, int row, int quad,
                                      const float (&out)[kHeadDim / 8][4], const OnlineSoftmax& softmax) {
  const QueryPlace place = query_place(params, launder(blockIdx.x), launder(blockIdx.y));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = quad_sum(softmax.sum[r]);
    if (!owns(place.tile, row + 8 * r)) continue;
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    const int64_t token = place.token + row + 8 * r;
    if (params.final_out.data)
      store_row<kHeadDim>(row_pointer<T>(params.final_out, place.batch, token, place.head), quad, out, r, inverse);
    else
      store_row<kHeadDim>(row_pointer<float>(params.out, place.batch, token, place.head), quad, out, r, inverse);
    if (quad == 0)
      *row_pointer(params.lse, place.batch, token, place.head) =
          sum > 0.f ? (softmax.max[r] + log2f(sum)) * kLn2 : -INFINITY;
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

  const QueryPlace place = query_place(params, blockIdx.x, blockIdx.y);
  using Keys = KeyTiles<kHeadDim, T, kPass>;
  __shared__ KeySource<T> source;
  __shared__ ListMask masks[2];
  if (threadIdx.x == 0) source = Keys::source(params, place);
  __syncthreads();
  Keys keys(params, source);
  KeyStep step;
  bool found = keys.next(step);
  if (!found && params.resume && !params.final_out.data) return;  // the previous result stays as it is

  // Q passes through the second stage on its way to registers.
  load_tile<kHeadDim>(stages + kStageBytes, row_pointer<const T>(params.query, place.batch, place.token, place.head),
                      params.query.stride_seq, params.seq_q - static_cast<int>(place.token));
  if (found)
    keys.load(step, stages, masks[0]);
  else
    copy_async_commit();
  copy_async_wait_all();
  __syncthreads();
  uint32_t query[kQueryInRegisters<kHeadDim>][4];
  uint4* const parked = reinterpret_cast<uint4*>(shared + 2 * kStageBytes) + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    uint32_t a[4];
    load_left<kHeadDim>(a, stages + kStageBytes, warp * 16, k);
    if (k < kQueryInRegisters<kHeadDim>)
      copy(query[k], a);
    else
      parked[(k - kQueryInRegisters<kHeadDim>)*kThreads] = make_uint4(a[0], a[1], a[2], a[3]);
  }
  const auto left = [&](int k, uint32_t(&a)[4]) {
    if (k < kQueryInRegisters<kHeadDim>) return copy(a, query[k]);
    const uint4 fragment = parked[(k - kQueryInRegisters<kHeadDim>)*kThreads];
    a[0] = fragment.x, a[1] = fragment.y, a[2] = fragment.z, a[3] = fragment.w;
  };

  float out[kHeadDim / 8][4];
  clear(out);
  OnlineSoftmax softmax;
  if (params.resume) resume<kHeadDim>(params, row, quad, out, softmax);

  const float scale_log2 = params.softmax_scale * kLog2E;
  const int document_column = place.tile.first_token - place.tile.block * kBlock;
  for (int stage = 0; found; stage ^= 1) {
    KeyStep following;
    const bool more = keys.next(following);
    copy_async_wait_all();
    __syncthreads();  // this tile has arrived, and every warp has left the other stage
    if (more) keys.load(following, stages + (stage ^ 1) * kStageBytes, masks[stage ^ 1]);
    const uint32_t key_tile = stages + stage * kStageBytes, value_tile = key_tile + Layout::kBytes;
    float s[8][4];
    score<kHeadDim, T>(s, left, key_tile);
    mask_scores<kPass>(s, source, step, masks[stage], document_column, row, quad);
    float factor[2];
    softmax.step(s, scale_log2, factor);
    if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[j][i] *= factor[i / 2];
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
  constexpr int kParked = kHeadDim / 16 - kQueryInRegisters<kHeadDim>;
  constexpr int kSharedBytes = 4 * TileLayout<kHeadDim>::kBytes + kParked * kThreads * sizeof(uint4);
  const dim3 grid(params.num_query_tiles, params.batch * params.num_heads);
  if (const char* error = describe(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes)))
    return error;
  kernel<<<grid, kThreads, kSharedBytes, stream>>>(params);
  return launch_error();
}

}  // namespace mtraining::sm80
