// Backward, row-major: dQ of two query tiles per CTA.
//
//   S = Q K^T,  dP = dO V^T,  P = exp2(S scale log2(e) - lse log2(e)),  dS = P (dP - delta),  dQ += scale dS K
//
// Q and dO are in registers; the products of one warpgroup overlap with the arithmetic of the other.
#pragma once
#include "sm90_rows.cuh"

namespace mtraining::sm90 {

struct RowStatistics {  // of the thread's two rows: lse * log2(e), +inf where the gradient is zero; delta
  float lse0, lse1, delta0, delta1;
};

__device__ __forceinline__ RowStatistics load_statistics(const KernelArguments& args, const RowItem& item,
                                                         const ThreadPosition& thread) {
  const AttentionParams& params = args.params;
  const int64_t num_slots = (params.seq_q + kBlock - 1) / kBlock;
  const int64_t head = item.batch * params.num_heads + item.head(thread.consumer);
  const int slot = params.query_tiles[max(item.tile(thread.consumer), 0)].slot;
  const float* at = args.statistics + (head * num_slots + slot) * (2 * kBlock) + thread.row;
  return {at[0], at[8], at[kBlock], at[kBlock + 8]};
}

// Loads Q and dO from an item's two stages, and the statistics of the thread's rows.
template <int kHeadDim, typename Pipeline>
__device__ __forceinline__ RowStatistics receive_grad_rows(uint32_t (&q)[Shape<kHeadDim>::kSteps][4],
                                                           uint32_t (&grad_out)[Shape<kHeadDim>::kSteps][4],
                                                           Pipeline& pipeline, const KernelArguments& args, int index,
                                                           const ThreadPosition& thread) {
  receive_fragments<kHeadDim>(q, pipeline, thread.consumer);
  pipeline.consumer_wait();
  receive_fragments<kHeadDim>(grad_out, pipeline, thread.consumer);
  return load_statistics(args, locate_rows(index, args), thread);
}

// Adds the dQ of earlier steps to one of the thread's two rows.
template <int kCount>
__device__ __forceinline__ void add_previous(float (&dq)[kCount], const float* row, int which) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 before = *reinterpret_cast<const float2*>(row + 8 * j);
    dq[4 * j + 2 * which] += before.x, dq[4 * j + 2 * which + 1] += before.y;
  }
}

// Writes an item's dQ; with `resume`, adds the previous dQ.
template <typename T, int kCount>
__device__ __forceinline__ void store_grad_query(const KernelArguments& args, int index, const ThreadPosition& thread,
                                                 bool started, float (&dq)[kCount]) {
  const AttentionParams& params = args.params;
  if (!started && params.resume && !params.final_grad_query.data) return;
  const ItemRows at(args, index, thread);
#pragma unroll
  for (int i = 0; i < kCount; ++i) dq[i] *= params.softmax_scale;
  if (params.resume && at.valid0) add_previous(dq, at.row<float>(params.grad_query, 0) + 2 * thread.quad, 0);
  if (params.resume && at.valid1) add_previous(dq, at.row<float>(params.grad_query, 1) + 2 * thread.quad, 1);
  store_rows<T>(at, params.grad_query, params.final_grad_query, dq, 1.f, 1.f, thread.quad);
}

// P of one tile of S.
__device__ __forceinline__ void exp2_rows(const float (&s)[32], const RowStatistics& rows, float scale_log2,
                                          float (&p)[32]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    p[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, -rows.lse0));
    p[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, -rows.lse0));
    p[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, -rows.lse1));
    p[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, -rows.lse1));
  }
}

// dS of one tile, in the registers of P.
__device__ __forceinline__ void compute_ds(float (&s)[32], const float (&dp)[32], const RowStatistics& rows) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    s[4 * j] *= dp[4 * j] - rows.delta0, s[4 * j + 1] *= dp[4 * j + 1] - rows.delta0;
    s[4 * j + 2] *= dp[4 * j + 2] - rows.delta1, s[4 * j + 3] *= dp[4 * j + 3] - rows.delta1;
  }
}

// A consumer warpgroup's loop over work items. With head_dim 128 there are too few registers for kPrefetchScores.
template <typename T, int kHeadDim, Schedule kSchedule, typename Pipeline>
__device__ __forceinline__ void consume_grad_query(Pipeline pipeline, const KernelArguments& args) {
  using S = Shape<kHeadDim>;
  constexpr bool kPrefetch = kSchedule == Schedule::kPrefetchScores;
  const AttentionParams& params = args.params;
  const ThreadPosition thread;
  const float scale_log2 = params.softmax_scale * kLog2E;
  const uint32_t needed = kNeeded << thread.consumer, diagonal = kDiagonal << thread.consumer;
  uint32_t q[S::kSteps][4], grad_out[S::kSteps][4];
  for (int index = __shfl_sync(~0u, pipeline.consumer_wait().y, 0); index >= 0;) {
    const RowStatistics rows = receive_grad_rows<kHeadDim>(q, grad_out, pipeline, args, index, thread);
    float dq[S::kAccumulators], dp[32];
    uint32_t ds[4][4];
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) dq[i] = 0.f;
    uint2 entry;
    bool started;
    if constexpr (kPrefetch) {
      float s0[32], s1[32];
      entry = pipeline.next_entry(kItem | needed, kNoStage);
      started = any_flag(entry.x, needed);
      int stage = 0;  // of the current tile; the pipeline is at the next one
      uint32_t keys = 0, flags = 0;
      // Accumulates the tile whose S is in `s`, while S of the next tile is computed into `next`. False where the next
      // tile has not arrived or the item ends.
      auto accumulate = [&](float (&s)[32], float (&next)[32]) {
        const bool last = !any_flag(entry.x, needed);
        const uint32_t next_keys = last ? keys : pipeline.low;
        pin_registers(dp), pin_registers(next);
        wgmma_fence();
        gemm_rs<T>(dp, grad_out, keys + kNextTile<kHeadDim>);
        wgmma_commit();
        gemm_rs<T>(next, q, next_keys);
        wgmma_commit();
        const uint2 mask = pipeline.mask(thread.consumer, stage);
        // P is masked rather than S: these branches prevent ptxas from moving the wait before the exponentials.
        exp2_rows(s, rows, scale_log2, s);
        mask_tile(s, pipeline, stage, flags, diagonal, mask, thread, 0.f);
        wgmma_wait<1>();  // for dP
        pin_registers(dp), pin_registers(s);
        compute_ds(s, dp, rows);
        pack_tile<T>(s, ds);
        pin_registers(dq);
        wgmma_fence();
        gemm_rs_accumulate<T>(dq, ds, keys);
        wgmma_commit();
        const int next_stage = pipeline.stage;
        flags = entry.x, keys = next_keys;
        if (!last) pipeline.advance(), entry = pipeline.next_entry(kItem | needed, stage);  // under the products
        wgmma_wait<0>();
        pin_registers(next), pin_registers(dq);
        pipeline.consumer_release(stage);
        stage = next_stage;
        return !last;
      };
      while (!any_flag(entry.x, kItem)) {
        stage = pipeline.stage, flags = entry.x, keys = pipeline.low;
        pin_registers(s0);
        wgmma_fence();
        gemm_rs<T>(s0, q, keys);
        wgmma_commit();
        pipeline.advance(), entry = pipeline.next_entry(kItem | needed, stage);
        wgmma_wait<0>();
        pin_registers(s0);
        while (accumulate(s0, s1) && accumulate(s1, s0)) {
        }
        if (!any_flag(entry.x, kItem))
          entry = pipeline.next_entry(kItem | needed, kNoStage);  // stopped before the held stage
      }
    } else {
      float s[32];
      started = false;
      for (entry = pipeline.consumer_wait();;) {
        if (!any_flag(entry.x, kItem | needed)) {
          pipeline.consumer_release(pipeline.stage), pipeline.advance();
          entry = pipeline.consumer_wait();
          continue;
        }
        if (any_flag(entry.x, kItem)) break;
        const int stage = pipeline.stage;
        const uint32_t keys = pipeline.low;
        pin_registers(s), pin_registers(dp);
        wgmma_fence();
        gemm_rs<T>(s, q, keys);
        wgmma_commit();
        gemm_rs<T>(dp, grad_out, keys + kNextTile<kHeadDim>);
        wgmma_commit();
        const uint2 mask = pipeline.mask(thread.consumer);
        wgmma_wait<1>();
        pin_registers(s);
        mask_tile(s, pipeline, stage, entry.x, diagonal, mask, thread);
        exp2_rows(s, rows, scale_log2, s);
        wgmma_wait<0>();
        pin_registers(dp), pin_registers(s);
        compute_ds(s, dp, rows);
        pack_tile<T>(s, ds);
        pin_registers(dq);
        wgmma_fence();
        gemm_rs_accumulate<T>(dq, ds, keys);
        wgmma_commit();
        started = true;
        pipeline.advance();
        entry = pipeline.consumer_wait();  // under the product
        wgmma_wait<0>();
        pin_registers(dq);
        pipeline.consumer_release(stage);
      }
    }
    store_grad_query<T>(args, index, thread, started, dq);
    index = __shfl_sync(~0u, entry.y, 0);
  }
}

template <int kHeadDim>  // a stage: keys and values, or two tiles of rows of an item
using GradQueryPipeline = TilePipeline<kHeadDim, kHeadDim == 64   ? 12
                                                 : kHeadDim == 96 ? 9
                                                                  : 7>;

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    grad_query_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ KernelArguments args) {
  using Pipeline = GradQueryPipeline<kHeadDim>;
  check_shared_base();
  const int warpgroup = threadIdx.x / 128;
  const Pipeline pipeline(kSharedBase, warpgroup == 0);
  constexpr Schedule kSchedule = kHeadDim == 128 ? Schedule::kTileByTile : Schedule::kPrefetchScores;
  warp_specialize<kProducerRegisters, kConsumerRegisters>(
      warpgroup, [&] { pipeline.init(); }, [&] { produce_rows<kHeadDim, true>(pipeline, maps, args); },
      [&] { consume_grad_query<T, kHeadDim, kSchedule>(pipeline, args); });
}

template <typename T, int kHeadDim>
const char* launch_grad_query(const TensorMaps& maps, const KernelArguments& args, cudaStream_t stream) {
  return launch_persistent(grad_query_kernel<T, kHeadDim>, kThreads, GradQueryPipeline<kHeadDim>::kBytes,
                           num_row_items(args), maps, args, stream);
}

}  // namespace mtraining::sm90
