// Backward, row-major: dQ of two query tiles per CTA.
//
//   S = Q K^T,  dP = dO V^T,  P = exp2(S scale log2(e) - lse log2(e)),  dS = P (dP - delta),  dQ += scale dS K
//
// Q and dO stay in registers; the other warpgroup's products run under this one's arithmetic.
#pragma once
#include "sm90_rows.cuh"

namespace mtraining::sm90 {

struct GradRows {  // what a thread knows of its two rows: lse * log2(e), +inf where nothing flows; delta
  float lse0, lse1, delta0, delta1;
};

__device__ __forceinline__ GradRows load_statistics(const Job& job, const RowItem& item, const Place& place) {
  const AttentionParams& params = job.params;
  const int64_t num_slots = (params.seq_q + kBlock - 1) / kBlock;
  const int64_t head = item.batch * params.num_heads + item.head(place.consumer);
  const int slot = params.query_tiles[max(item.tile(place.consumer), 0)].slot;
  const float* at = job.statistics + (head * num_slots + slot) * (2 * kBlock) + place.first;
  return {at[0], at[8], at[kBlock], at[kBlock + 8]};
}

// What an item begins with: queries and grad_out from its two slots, and what is known of the thread's rows.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ GradRows take_grad_rows(uint32_t (&q)[Shape<kHeadDim>::kSteps][4],
                                                   uint32_t (&grad_out)[Shape<kHeadDim>::kSteps][4], Stream& ring,
                                                   const Job& job, int index, const Place& place) {
  take_rows<kHeadDim>(q, ring, place.consumer);
  ring.receive();
  take_rows<kHeadDim>(grad_out, ring, place.consumer);
  return load_statistics(job, locate_rows(index, job), place);
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

// Writes an item's dQ, after what is there with `resume`.
template <typename T, int kCount>
__device__ __forceinline__ void write_grad_query(const Job& job, int index, const Place& place, bool started,
                                                 float (&dq)[kCount]) {
  const AttentionParams& params = job.params;
  if (!started && params.resume && !params.final_grad_query.data) return;
  const ItemRows at(job, index, place);
#pragma unroll
  for (int i = 0; i < kCount; ++i) dq[i] *= params.softmax_scale;
  if (params.resume && at.valid0) add_previous(dq, at.row<float>(params.grad_query, 0) + 2 * place.quad, 0);
  if (params.resume && at.valid1) add_previous(dq, at.row<float>(params.grad_query, 1) + 2 * place.quad, 1);
  store_rows<T>(at, params.grad_query, params.final_grad_query, dq, 1.f, 1.f, place.quad);
}

// The weights of one tile of scores.
__device__ __forceinline__ void weigh_rows(const float (&s)[32], const GradRows& rows, float scale_log2,
                                           float (&weight)[32]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    weight[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, -rows.lse0));
    weight[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, -rows.lse0));
    weight[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, -rows.lse1));
    weight[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, -rows.lse1));
  }
}

// dS of one tile in the place of its weights.
__device__ __forceinline__ void grad_scores(float (&s)[32], const float (&dp)[32], const GradRows& rows) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    s[4 * j] *= dp[4 * j] - rows.delta0, s[4 * j + 1] *= dp[4 * j + 1] - rows.delta0;
    s[4 * j + 2] *= dp[4 * j + 2] - rows.delta1, s[4 * j + 3] *= dp[4 * j + 3] - rows.delta1;
  }
}

template <typename T, int kHeadDim, typename Stream>
__device__ __forceinline__ void consume_grad_query(Stream ring, const Job& job) {
  using S = Shape<kHeadDim>;
  const AttentionParams& params = job.params;
  const Place place;
  const float scale_log2 = params.softmax_scale * kLog2E;
  const uint32_t needed = kNeeded << place.consumer, diagonal = kDiagonal << place.consumer;
  uint32_t q[S::kSteps][4], grad_out[S::kSteps][4];
  for (int index = __shfl_sync(~0u, ring.receive().y, 0); index >= 0;) {
    const GradRows rows = take_grad_rows<kHeadDim>(q, grad_out, ring, job, index, place);
    float dq[S::kAccumulators], s[32], dp[32];
    uint32_t ds[4][4];
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) dq[i] = 0.f;
    bool started = false;
    for (uint2 entry = ring.receive();;) {
      if (!any_flag(entry.x, kItem | needed)) {
        ring.release(ring.slot), ring.step();
        entry = ring.receive();
        continue;
      }
      if (any_flag(entry.x, kItem)) {
        write_grad_query<T>(job, index, place, started, dq);
        index = __shfl_sync(~0u, entry.y, 0);
        break;
      }
      const int slot = ring.slot;
      const uint32_t keys = ring.low;
      pin_registers(s), pin_registers(dp);
      wgmma_fence();
      multiply_rows<T>(s, q, keys);
      wgmma_commit();
      multiply_rows<T>(dp, grad_out, keys + kNextTile<kHeadDim>);
      wgmma_commit();
      const uint2 word = ring.word(place.consumer);
      wgmma_wait<1>();
      pin_registers(s);
      mask_tile(s, ring, slot, entry.x, diagonal, word, place);
      weigh_rows(s, rows, scale_log2, s);
      wgmma_wait<0>();
      pin_registers(dp), pin_registers(s);
      grad_scores(s, dp, rows);
      pack_tile<T>(s, ds);
      pin_registers(dq);
      wgmma_fence();
      accumulate_tile<T>(dq, ds, keys);
      wgmma_commit();
      started = true;
      ring.step();
      entry = ring.receive();  // under the product
      wgmma_wait<0>();
      pin_registers(dq);
      ring.release(slot);
    }
  }
}

// The same with the scores of the next tile issued before this one's weights are computed, for which head_dim 128 has
// too few registers: whatever a warpgroup computes, its next products are under way. The tile after an item's last is
// the last once more, and its scores are dropped, so that no product depends on a branch.
template <typename T, int kHeadDim, typename Stream>
__device__ __forceinline__ void consume_grad_query_ahead(Stream ring, const Job& job) {
  using S = Shape<kHeadDim>;
  const AttentionParams& params = job.params;
  const Place place;
  const float scale_log2 = params.softmax_scale * kLog2E;
  const uint32_t needed = kNeeded << place.consumer, diagonal = kDiagonal << place.consumer;
  uint32_t q[S::kSteps][4], grad_out[S::kSteps][4];
  for (int index = __shfl_sync(~0u, ring.receive().y, 0); index >= 0;) {
    const GradRows rows = take_grad_rows<kHeadDim>(q, grad_out, ring, job, index, place);
    float dq[S::kAccumulators], s0[32], s1[32], dp[32];
    uint32_t ds[4][4];
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) dq[i] = 0.f;
    uint2 entry = ring.seek_entry(kItem | needed, kNoSlot);
    const bool started = any_flag(entry.x, needed);
    int slot = 0;  // of the tile in hand; what the ring has received is the one after it
    uint32_t keys = 0, flags = 0;
    // Adds the tile whose scores are in `s`, while those of the next one come into `next`. False: there was none yet,
    // or none at all.
    auto add_tile = [&](float (&s)[32], float (&next)[32]) {
      const bool last = !any_flag(entry.x, needed);
      const uint32_t next_keys = last ? keys : ring.low;
      pin_registers(dp), pin_registers(next);
      wgmma_fence();
      multiply_rows<T>(dp, grad_out, keys + kNextTile<kHeadDim>);
      wgmma_commit();
      multiply_rows<T>(next, q, next_keys);
      wgmma_commit();
      const uint2 word = ring.word(place.consumer, slot);
      // Weights are masked, not scores: these branches keep ptxas from moving the wait in front of the exponentials.
      weigh_rows(s, rows, scale_log2, s);
      mask_tile(s, ring, slot, flags, diagonal, word, place, 0.f);
      wgmma_wait<1>();  // for dP
      pin_registers(dp), pin_registers(s);
      grad_scores(s, dp, rows);
      pack_tile<T>(s, ds);
      pin_registers(dq);
      wgmma_fence();
      accumulate_tile<T>(dq, ds, keys);
      wgmma_commit();
      const int next_slot = ring.slot;
      flags = entry.x, keys = next_keys;
      if (!last) ring.step(), entry = ring.seek_entry(kItem | needed, slot);  // under the products
      wgmma_wait<0>();
      pin_registers(next), pin_registers(dq);
      ring.release(slot);
      slot = next_slot;
      return !last;
    };
    while (!any_flag(entry.x, kItem)) {
      slot = ring.slot, flags = entry.x, keys = ring.low;
      pin_registers(s0);
      wgmma_fence();
      multiply_rows<T>(s0, q, keys);
      wgmma_commit();
      ring.step(), entry = ring.seek_entry(kItem | needed, slot);
      wgmma_wait<0>();
      pin_registers(s0);
      while (add_tile(s0, s1) && add_tile(s1, s0)) {
      }
      if (!any_flag(entry.x, kItem)) entry = ring.seek_entry(kItem | needed, kNoSlot);  // it stopped at a slot held
    }
    write_grad_query<T>(job, index, place, started, dq);
    index = __shfl_sync(~0u, entry.y, 0);
  }
}

template <int kHeadDim>  // keys and values, or two tiles of rows of an item
using GradQueryRing = Ring<kHeadDim, kHeadDim == 64 ? 12 : kHeadDim == 96 ? 9 : 7>;

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    grad_query_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Job job) {
  using Stream = GradQueryRing<kHeadDim>;
  check_shared_base();
  const int warpgroup = threadIdx.x / 128;
  const Stream ring(kSharedBase, warpgroup == 0);
  auto consume = [&] {
    if constexpr (kHeadDim > 96)
      consume_grad_query<T, kHeadDim>(ring, job);
    else
      consume_grad_query_ahead<T, kHeadDim>(ring, job);
  };
  divide_threads<kProducerRegisters, kConsumerRegisters>(
      warpgroup, [&] { ring.init(); }, [&] { produce_rows<kHeadDim, true>(ring, maps, job); }, consume);
}

template <typename T, int kHeadDim>
const char* launch_grad_query(const TensorMaps& maps, const Job& job, cudaStream_t stream) {
  return launch_persistent(grad_query_kernel<T, kHeadDim>, kThreads, GradQueryRing<kHeadDim>::kBytes,
                           num_row_items(job), maps, job, stream);
}

}  // namespace mtraining::sm90
