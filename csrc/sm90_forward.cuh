// Forward: out and lse of two query tiles per CTA, by the online softmax, from nothing or from a previous result.
//
//   S = Q K^T,  P = exp2((S - row_max) scale log2(e)),  O += P V,  row_sum += sum(P)
//
// Products have to overlap with the softmax; ForwardSchedule is the implementation of that for each head_dim. After a
// warpgroup's first tile row_max is finite in every row: a row without any key so far, which the row masks of block
// lists allow, has kMinRowMax, relative to which P of its first key is large.
#pragma once
#include <cmath>

#include "sm90_rows.cuh"

namespace mtraining::sm90 {

// The thread's two rows. row_max is the maximum of the row's scores when it was last updated; later tiles update it
// only where P relative to it grows large, so most tiles need no maximum, no shuffles and no rescaling. row_sum is this
// thread's share.
struct OnlineSoftmax {
  float row_max0, row_max1, row_sum0, row_sum1;
};

constexpr float kMinRowMax = -1e30f;

// Upper bound of a thread's P in a tile (of the sum, or with kPrefetchScores of the largest) before row_max is updated
// and O rescaled: far below the largest float16. kRescaleThresholdLog2 is its logarithm.
constexpr float kRescaleThreshold = 1024.f, kRescaleThresholdLog2 = 10.f;

// P of one tile of S, and this thread's share of its row sums.
__device__ __forceinline__ void exp2_tile(const float (&s)[32], const OnlineSoftmax& softmax, float scale_log2,
                                          float (&p)[32], float& sum0, float& sum1) {
  const float shift0 = -softmax.row_max0 * scale_log2, shift1 = -softmax.row_max1 * scale_log2;
  sum0 = sum1 = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    p[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, shift0));
    p[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, shift0));
    p[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, shift1));
    p[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, shift1));
    sum0 += p[4 * j] + p[4 * j + 1], sum1 += p[4 * j + 2] + p[4 * j + 3];
  }
}

// The largest element of a tile of S that this thread holds, of either row.
__device__ __forceinline__ void thread_row_max(const float (&s)[32], float& max0, float& max1) {
  max0 = s[0], max1 = s[2];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    max0 = fmaxf(max0, fmaxf(s[4 * j], s[4 * j + 1]));
    max1 = fmaxf(max1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
}

// Updates row_max to the largest score so far; returns the factors for O and rescales row_sum.
__device__ __forceinline__ void update_row_max(float max0, float max1, OnlineSoftmax& softmax, float scale_log2,
                                               float& factor0, float& factor1) {
  max0 = fmaxf(fmaxf(softmax.row_max0, kMinRowMax), quad_max(max0));
  max1 = fmaxf(fmaxf(softmax.row_max1, kMinRowMax), quad_max(max1));
  factor0 = exp2_approx((softmax.row_max0 - max0) * scale_log2);
  factor1 = exp2_approx((softmax.row_max1 - max1) * scale_log2);
  softmax.row_max0 = max0, softmax.row_max1 = max1;
  softmax.row_sum0 *= factor0, softmax.row_sum1 *= factor1;
}

template <int kCount>
__device__ __forceinline__ void rescale_o(float (&o)[kCount], float factor0, float factor1) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    o[4 * j] *= factor0, o[4 * j + 1] *= factor0;
    o[4 * j + 2] *= factor1, o[4 * j + 3] *= factor1;
  }
}

// A previous result as the state of an online softmax with row_sum 1; the empty state where there is none.
__device__ __forceinline__ float previous_lse(const float* lse, bool valid, bool resume) {
  return resume && valid ? *lse : -INFINITY;
}
template <int kCount>
__device__ __forceinline__ void previous_out(float (&o)[kCount], const float* out, int which, bool present) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 x = present ? *reinterpret_cast<const float2*>(out + 8 * j) : make_float2(0.f, 0.f);
    o[4 * j + 2 * which] = x.x, o[4 * j + 2 * which + 1] = x.y;
  }
}
template <int kCount>
__device__ __forceinline__ void init_rows(float (&o)[kCount], OnlineSoftmax& softmax, const AttentionParams& params,
                                          const ItemRows& at, float inverse_scale, int quad) {
  const float lse0 = previous_lse(at.scalar(params.lse, 0), at.valid0, params.resume);
  const float lse1 = previous_lse(at.scalar(params.lse, 1), at.valid1, params.resume);
  const bool present0 = lse0 != -INFINITY, present1 = lse1 != -INFINITY;
  softmax.row_max0 = lse0 * inverse_scale, softmax.row_max1 = lse1 * inverse_scale;
  softmax.row_sum0 = present0 && quad == 0 ? 1.f : 0.f, softmax.row_sum1 = present1 && quad == 0 ? 1.f : 0.f;
  previous_out(o, at.row<float>(params.out, 0) + 2 * quad, 0, present0);
  previous_out(o, at.row<float>(params.out, 1) + 2 * quad, 1, present1);
}

// Normalizes and writes out and lse; 0 and -inf in rows without keys. With `resume`, lse is not written where no key
// was added.
template <typename T, int kCount>
__device__ __forceinline__ void store_out(const AttentionParams& params, const ItemRows& at, const float (&o)[kCount],
                                          const OnlineSoftmax& softmax, float scale, int quad, bool started) {
  const float sum0 = quad_sum(softmax.row_sum0), sum1 = quad_sum(softmax.row_sum1);
  const bool present0 = sum0 > 0.f, present1 = sum1 > 0.f;
  store_rows<T>(at, params.out, params.final_out, o, present0 ? 1.f / sum0 : 0.f, present1 ? 1.f / sum1 : 0.f, quad);
  if (quad > 0 || (!started && params.resume)) return;
  if (at.valid0) *at.scalar(params.lse, 0) = present0 ? softmax.row_max0 * scale + logf(sum0) : -INFINITY;
  if (at.valid1) *at.scalar(params.lse, 1) = present1 ? softmax.row_max1 * scale + logf(sum1) : -INFINITY;
}

// Copies this warpgroup's rows from an item's stage to its own tile, in the same layout, and releases the stage.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ void receive_tile(uint32_t to, Pipeline& pipeline, int consumer) {
  const uint32_t from = pipeline.tile() + consumer * Shape<kHeadDim>::kTileBytes;
  warpgroup_barrier(consumer);  // the products of the previous item have finished reading
#pragma unroll
  for (int at = threadIdx.x % 128 * 16; at < Shape<kHeadDim>::kTileBytes; at += 128 * 16)
    copy_shared(to + at, from + at);
  proxy_fence();
  warpgroup_barrier(consumer);
  pipeline.consumer_release(pipeline.stage), pipeline.advance();
}

// A consumer warpgroup's loop over work items.
//
// kTileByTile: Q is in shared memory, at `shared_query`, and P in the registers of S: few enough registers for two CTAs
// per multiprocessor. Where P exceeds the threshold, the whole warpgroup computes S again.
//
// kPrefetchScores: Q is in registers. P replaces S in its registers, so the maximum is compared with the threshold
// beforehand.
template <typename T, int kHeadDim, Schedule kSchedule, typename Pipeline>
__device__ __forceinline__ void consume_forward(Pipeline pipeline, uint32_t shared_query, const KernelArguments& args) {
  using S = Shape<kHeadDim>;
  constexpr bool kPrefetch = kSchedule == Schedule::kPrefetchScores;
  const AttentionParams& params = args.params;
  const ThreadPosition thread;
  const float scale = params.softmax_scale, scale_log2 = scale * kLog2E;
  const uint32_t needed = kNeeded << thread.consumer, diagonal = kDiagonal << thread.consumer;
  shared_query += thread.consumer * S::kTileBytes;
  const uint32_t query_low = S::descriptor_low(shared_query);
  uint32_t q[S::kSteps][4];
  for (int index = __shfl_sync(~0u, pipeline.consumer_wait().y, 0); index >= 0;) {
    if constexpr (kPrefetch)
      receive_fragments<kHeadDim>(q, pipeline, thread.consumer);
    else
      receive_tile<kHeadDim>(shared_query, pipeline, thread.consumer);
    uint32_t found = pipeline.next_tile(kItem | needed);
    const bool started = any_flag(found, needed);
    const bool writes = started || !params.resume || params.final_out.data;  // else the previous result is unchanged
    OnlineSoftmax softmax;
    float o[S::kAccumulators];
    uint32_t p[4][4];
    if (writes) init_rows(o, softmax, params, ItemRows(args, index, thread), 1.f / scale, thread.quad);
    if constexpr (kPrefetch) {
      float s0[32], s1[32];
      int stage = 0;  // of the current tile; the pipeline is at the next one
      uint32_t keys = 0, flags = 0;
      // Accumulates the tile whose S is in `s`, while S of the next tile is computed into `next`. False where the next
      // tile has not arrived or the item ends.
      auto accumulate = [&](float (&s)[32], float (&next)[32]) {
        const bool last = !any_flag(found, needed);
        const uint32_t values = keys + kNextTile<kHeadDim>, next_keys = last ? keys : pipeline.low;
        float max0, max1, sum0, sum1;
        pin_registers(next);
        wgmma_fence();
        gemm_rs<T>(next, q, next_keys);
        wgmma_commit();
        const uint2 mask = pipeline.mask(thread.consumer, stage);
        mask_tile(s, pipeline, stage, flags, diagonal, mask, thread);
        thread_row_max(s, max0, max1);
        // In this form the test also fails where row_max is -inf, whatever the scores are.
        const float threshold = kRescaleThresholdLog2 / scale_log2;
        const bool within = max0 - softmax.row_max0 <= threshold && max1 - softmax.row_max1 <= threshold;
        if (__any_sync(~0u, !within)) {
          float factor0, factor1;
          update_row_max(max0, max1, softmax, scale_log2, factor0, factor1);
          wgmma_wait<0>();  // ptxas serializes a tile's products where their accumulator `o` is modified between them
          pin_registers(o);
          rescale_o(o, factor0, factor1);
        }
        exp2_tile(s, softmax, scale_log2, s, sum0, sum1);
        softmax.row_sum0 += sum0, softmax.row_sum1 += sum1;
        pack_tile<T>(s, p);
        pin_registers(o);
        wgmma_fence();
        gemm_rs_accumulate<T>(o, p, values);
        wgmma_commit();
        const int next_stage = pipeline.stage;
        flags = found, keys = next_keys;
        if (!last) found = pipeline.try_next_tile(kItem | needed, stage);  // under the products
        wgmma_wait<0>();
        pin_registers(next), pin_registers(o);
        pipeline.consumer_release(stage);
        stage = next_stage;
        return !last;
      };
      while (!any_flag(found, kItem)) {
        stage = pipeline.stage, flags = found, keys = pipeline.low;
        pin_registers(s0);
        wgmma_fence();
        gemm_rs<T>(s0, q, keys);
        wgmma_commit();
        found = pipeline.try_next_tile(kItem | needed, stage);
        wgmma_wait<0>();
        pin_registers(s0);
        while (accumulate(s0, s1) && accumulate(s1, s0)) {
        }
        if (!any_flag(found, kItem)) found = pipeline.next_tile(kItem | needed);  // stopped before the held stage
      }
    } else {
      while (!any_flag(found, kItem)) {
        const int stage = pipeline.stage;
        const uint32_t keys = pipeline.low;
        float s[32], sum0, sum1;
        auto compute_scores = [&] {
          pin_registers(s);
          wgmma_fence();
          gemm_ss<T, false, S::kSteps>(s, query_low, keys);
          wgmma_commit();
          const uint2 mask = pipeline.mask(thread.consumer, stage);
          wgmma_wait<0>();
          pin_registers(s);
          mask_tile(s, pipeline, stage, found, diagonal, mask, thread);
        };
        compute_scores();
        exp2_tile(s, softmax, scale_log2, s, sum0, sum1);
        if (any_flag(warpgroup_any(thread.consumer, !(sum0 + sum1 <= kRescaleThreshold)), 1)) {
          float max0, max1, factor0, factor1;
          compute_scores();
          thread_row_max(s, max0, max1);
          update_row_max(max0, max1, softmax, scale_log2, factor0, factor1);
          rescale_o(o, factor0, factor1);
          exp2_tile(s, softmax, scale_log2, s, sum0, sum1);
        }
        softmax.row_sum0 += sum0, softmax.row_sum1 += sum1;
        pack_tile<T>(s, p);
        pin_registers(o);
        wgmma_fence();
        gemm_rs_accumulate<T>(o, p, keys + kNextTile<kHeadDim>);
        wgmma_commit();
        found = pipeline.try_next_tile(kItem | needed, stage);  // under the product
        wgmma_wait<0>();
        pin_registers(o);
        pipeline.consumer_release(stage);
        if (!any_flag(found, kItem | needed)) found = pipeline.next_tile(kItem | needed);
      }
    }
    if (writes) store_out<T>(params, ItemRows(args, index, thread), o, softmax, scale, thread.quad, started);
    index = pipeline.item();
  }
}

// With head_dim 64 S is too short a product to overlap with a softmax, so two CTAs share a multiprocessor instead;
// timings: docs/kernels.md. All registers that 384 threads start with, 168 or 80 each, are in use.
template <int kHeadDim>
struct ForwardTraits {
  static constexpr Schedule kSchedule = kHeadDim == 64 ? Schedule::kTileByTile : Schedule::kPrefetchScores;
  static constexpr int kCtas = kSchedule == Schedule::kTileByTile ? 2 : 1;
  static constexpr int kForProducer = kCtas == 1 ? kProducerRegisters : 32;
  static constexpr int kForConsumer = kCtas == 1 ? kConsumerRegisters : 104;
  static constexpr int kQueryBytes = kCtas == 1 ? 0 : 2 * Shape<kHeadDim>::kTileBytes;
  static constexpr int kStages = kHeadDim == 64 ? 6 : kHeadDim == 96 ? 9 : 7;
  using Pipeline = TilePipeline<kHeadDim, kStages>;  // a stage: keys and values, or the queries of an item
  static constexpr int kBytes = kQueryBytes + Pipeline::kBytes;
  static_assert(kCtas * (kBytes + kSharedBase) <= 228 * 1024, "shared memory of a multiprocessor");
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, ForwardTraits<kHeadDim>::kCtas)
    forward_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ KernelArguments args) {
  using Traits = ForwardTraits<kHeadDim>;
  check_shared_base();
  const int warpgroup = threadIdx.x / 128;
  const typename Traits::Pipeline pipeline(kSharedBase + Traits::kQueryBytes, warpgroup == 0);
  warp_specialize<Traits::kForProducer, Traits::kForConsumer>(
      warpgroup, [&] { pipeline.init(); }, [&] { produce_rows<kHeadDim, false>(pipeline, maps, args); },
      [&] { consume_forward<T, kHeadDim, Traits::kSchedule>(pipeline, kSharedBase, args); });
}

template <typename T, int kHeadDim>
const char* launch_forward(const TensorMaps& maps, const KernelArguments& args, cudaStream_t stream) {
  using Traits = ForwardTraits<kHeadDim>;
  return launch_persistent<Traits::kCtas>(forward_kernel<T, kHeadDim>, kThreads, Traits::kBytes, num_row_items(args),
                                          maps, args, stream);
}

}  // namespace mtraining::sm90
