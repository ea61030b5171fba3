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

// A copy that ptxas cannot see through; `zero` is 0 at run time. With head_dim 64 the products dO V^T and dS K have one
// shape, and ptxas 13.0 then keeps dO and dS in the same registers although dO is needed again for the next tile.
template <int kSteps>
__device__ __forceinline__ void copy_fragments(uint32_t (&to)[kSteps][4], const uint32_t (&from)[kSteps][4],
                                               uint32_t zero) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("xor.b32 %0, %1, %2;" : "=r"(to[k][i]) : "r"(from[k][i]), "r"(zero));
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
    take_rows<kHeadDim>(q, ring, place.consumer);
    ring.receive();
    take_rows<kHeadDim>(grad_out, ring, place.consumer);
    const GradRows rows = load_statistics(job, locate_rows(index, job), place);
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
      uint32_t grad_out_copy[S::kSteps][4];
      if constexpr (kHeadDim == 64) copy_fragments(grad_out_copy, grad_out, entry.y);
      pin_registers(s), pin_registers(dp);
      wgmma_fence();
      multiply_rows<T>(s, q, keys);
      wgmma_commit();
      if constexpr (kHeadDim == 64)
        multiply_rows<T>(dp, grad_out_copy, keys + kNextTile<kHeadDim>);
      else
        multiply_rows<T>(dp, grad_out, keys + kNextTile<kHeadDim>);
      wgmma_commit();
      const uint2 word = ring.word(place.consumer);
      wgmma_wait<1>();
      pin_registers(s);
      if (any_flag(entry.x, diagonal)) mask_after_row(s, place.first, place.quad);
      mask_words(s, ring, slot, entry.x, word, place);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        s[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, -rows.lse0));
        s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, -rows.lse0));
        s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, -rows.lse1));
        s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, -rows.lse1));
      }
      wgmma_wait<0>();
      pin_registers(dp), pin_registers(s);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        s[4 * j] *= dp[4 * j] - rows.delta0, s[4 * j + 1] *= dp[4 * j + 1] - rows.delta0;
        s[4 * j + 2] *= dp[4 * j + 2] - rows.delta1, s[4 * j + 3] *= dp[4 * j + 3] - rows.delta1;
      }
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

template <int kHeadDim>
struct GradQueryRing {
  static constexpr int kSlotBytes =
      2 * Shape<kHeadDim>::kTileBytes;  // keys and values, or two tiles of rows of an item
  using type = Ring<(kHeadDim > 64 ? 7 : 12), kSlotBytes>;
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    grad_query_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Job job) {
  using Stream = typename GradQueryRing<kHeadDim>::type;
  check_shared_base();
  const int warpgroup = threadIdx.x / 128;
  const Stream ring(kSharedBase, warpgroup == 0);
  if (threadIdx.x == 0) {
    ring.init();
    barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x < 32) produce_rows<kHeadDim, true>(ring, maps, job);
  } else {
    take_registers<kConsumerRegisters>();
    consume_grad_query<T, kHeadDim>(ring, job);
  }
}

template <typename T, int kHeadDim>
const char* launch_grad_query(const TensorMaps& maps, const Job& job, cudaStream_t stream) {
  return launch_persistent(grad_query_kernel<T, kHeadDim>, kThreads, GradQueryRing<kHeadDim>::type::kBytes,
                           num_row_items(job), maps, job, stream);
}

}  // namespace mtraining::sm90
