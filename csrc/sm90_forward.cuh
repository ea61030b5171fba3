// Forward: out and lse of two query tiles per CTA, by the online softmax, from nothing or from a previous result.
//
// Queries stay in registers. The scores of the next tile are issued before the output of this one, so its softmax runs
// under that product. Every row of an active tile has a key (documents' masks and the causal one leave the first
// columns, words are the same for all rows), so after a warpgroup's first tile no row has an infinite maximum.
#pragma once
#include <cmath>

#include "sm90_rows.cuh"

namespace mtraining::sm90 {

struct RunningRows {  // the thread's two rows; sums are this thread's share
  float max0, max1, sum0, sum1;
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Online softmax of one tile: updates the rows, turns scores into weights in place, returns the factors for the output.
__device__ __forceinline__ void softmax_tile(float (&s)[32], RunningRows& rows, float scale_log2, float& factor0,
                                             float& factor1) {
  float max0 = s[0], max1 = s[2];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    max0 = fmaxf(max0, fmaxf(s[4 * j], s[4 * j + 1]));
    max1 = fmaxf(max1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
  max0 = fmaxf(rows.max0, quad_max(max0));
  max1 = fmaxf(rows.max1, quad_max(max1));
  factor0 = exp2_approx((rows.max0 - max0) * scale_log2);
  factor1 = exp2_approx((rows.max1 - max1) * scale_log2);
  rows.max0 = max0, rows.max1 = max1;
  const float shift0 = -max0 * scale_log2, shift1 = -max1 * scale_log2;
  float sum0 = rows.sum0 * factor0, sum1 = rows.sum1 * factor1;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    s[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, shift0));
    s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, shift0));
    s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, shift1));
    s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, shift1));
    sum0 += s[4 * j] + s[4 * j + 1], sum1 += s[4 * j + 2] + s[4 * j + 3];
  }
  rows.sum0 = sum0, rows.sum1 = sum1;
}

template <int kCount>
__device__ __forceinline__ void rescale(float (&o)[kCount], float factor0, float factor1) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    o[4 * j] *= factor0, o[4 * j + 1] *= factor0;
    o[4 * j + 2] *= factor1, o[4 * j + 3] *= factor1;
  }
}

// A previous result as the state of an online softmax whose sum is 1; no keys so far where there is none.
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
__device__ __forceinline__ void begin_rows(float (&o)[kCount], RunningRows& rows, const AttentionParams& params,
                                           const ItemRows& at, float inverse_scale, int quad) {
  const float lse0 = previous_lse(at.scalar(params.lse, 0), at.valid0, params.resume);
  const float lse1 = previous_lse(at.scalar(params.lse, 1), at.valid1, params.resume);
  const bool present0 = lse0 != -INFINITY, present1 = lse1 != -INFINITY;
  rows.max0 = lse0 * inverse_scale, rows.max1 = lse1 * inverse_scale;
  rows.sum0 = present0 && quad == 0 ? 1.f : 0.f, rows.sum1 = present1 && quad == 0 ? 1.f : 0.f;
  previous_out(o, at.row<float>(params.out, 0) + 2 * quad, 0, present0);
  previous_out(o, at.row<float>(params.out, 1) + 2 * quad, 1, present1);
}

// Normalises and writes out and lse; 0 and -inf in rows that met no key. An lse that no key was added to stays as it is.
template <typename T, int kCount>
__device__ __forceinline__ void write_rows(const AttentionParams& params, const ItemRows& at, const float (&o)[kCount],
                                           const RunningRows& rows, float scale, int quad, bool started) {
  const float sum0 = quad_sum(rows.sum0), sum1 = quad_sum(rows.sum1);
  const bool present0 = sum0 > 0.f, present1 = sum1 > 0.f;
  store_rows<T>(at, params.out, params.final_out, o, present0 ? 1.f / sum0 : 0.f, present1 ? 1.f / sum1 : 0.f, quad);
  if (quad > 0 || (!started && params.resume)) return;
  if (at.valid0) *at.scalar(params.lse, 0) = present0 ? rows.max0 * scale + logf(sum0) : -INFINITY;
  if (at.valid1) *at.scalar(params.lse, 1) = present1 ? rows.max1 * scale + logf(sum1) : -INFINITY;
}

template <typename T, int kHeadDim, typename Stream>
__device__ __forceinline__ void consume_forward(Stream ring, const Job& job) {
  using S = Shape<kHeadDim>;
  const AttentionParams& params = job.params;
  const Place place;
  const float scale = params.softmax_scale, scale_log2 = scale * kLog2E;
  const uint32_t needed = kNeeded << place.consumer, diagonal = kDiagonal << place.consumer;
  uint32_t q[S::kSteps][4];
  for (int index = __shfl_sync(~0u, ring.receive().y, 0); index >= 0;) {
    load_fragments(q, ring.tile() + place.consumer * S::kTileBytes);
    ring.release(ring.slot), ring.step();
    RunningRows rows;
    float o[S::kAccumulators], s[32];
    uint32_t p[4][4];
    float factor0, factor1;
    // pending: a tile's weights are in registers, their product with its values is still to come.
    bool started = false, pending = false;
    int pending_slot = 0;
    uint32_t pending_values = 0;
    auto finish_pending = [&] {
      pin_registers(o);
      wgmma_fence();
      accumulate_tile<T>(o, p, pending_values);
      wgmma_commit();
      wgmma_wait<0>();
      pin_registers(o);
      ring.release(pending_slot);
      pending = false;
    };
    auto mask = [&](uint32_t flags, uint2 word) {
      if (any_flag(flags, diagonal)) mask_after_row(s, place.first, place.quad);
      if ((word.x & word.y) != ~0u) mask_columns(s, word, place.quad);
    };
    for (uint2 entry = ring.receive();;) {
      if (!any_flag(entry.x, kItem | needed)) {
        ring.release(ring.slot), ring.step();
        // A pending tile holds its slot: nothing can arrive there before it is finished.
        if (pending && ring.slot == pending_slot) finish_pending();
        entry = ring.receive();
        continue;
      }
      if (any_flag(entry.x, kItem)) {
        if (pending) finish_pending();
        const ItemRows at(params, index, place);
        index = __shfl_sync(~0u, entry.y, 0);
        if (!started) {
          if (params.resume && !params.final_out.data) break;  // the previous result stays as it is
          begin_rows(o, rows, params, at, 1.f / scale, place.quad);
        }
        write_rows<T>(params, at, o, rows, scale, place.quad, started);
        break;
      }
      const int slot = ring.slot;
      const uint32_t keys = ring.low, flags = entry.x;
      const uint2 word = ring.word(place.consumer);
      ring.step();
      pin_registers(s);
      if (pending) {
        wgmma_fence();
        multiply_rows<T>(s, q, keys);
        wgmma_commit();
        accumulate_tile<T>(o, p, pending_values);
        wgmma_commit();
        wgmma_wait<1>();
        pin_registers(s);
        mask(flags, word);
        softmax_tile(s, rows, scale_log2, factor0, factor1);
        // The softmax is what the product with V hides. Left to itself ptxas moves the wait in front of it, so the wait
        // sits behind a branch that needs the whole softmax (the row sums).
        if (__any_sync(~0u, factor0 != 1.f || factor1 != 1.f || !(rows.sum0 + rows.sum1 > 0.f))) {
          wgmma_wait<0>();
          pin_registers(o);
          rescale(o, factor0, factor1);
        }
        // The next slot's description arrives under the product too, unless the pending tile still holds that slot.
        const bool blocked = ring.slot == pending_slot;
        if (!blocked) entry = ring.receive();
        wgmma_wait<0>();
        pin_registers(o);
        ring.release(pending_slot);
        if (blocked) entry = ring.receive();
        pin_registers(s);
      } else {
        if (!started)
          begin_rows(o, rows, params, ItemRows(params, index, place), 1.f / scale, place.quad), started = true;
        wgmma_fence();
        multiply_rows<T>(s, q, keys);
        wgmma_commit();
        wgmma_wait<0>();
        pin_registers(s);
        mask(flags, word);
        softmax_tile(s, rows, scale_log2, factor0, factor1);
        rescale(o, factor0, factor1);
        entry = ring.receive();
      }
      pack_tile<T>(s, p);  // after the wait: the product in flight reads the old weights
      pending = true, pending_slot = slot, pending_values = keys + kNextTile<kHeadDim>;
    }
  }
}

template <int kHeadDim>
struct ForwardRing {
  static constexpr int kSlotBytes = 2 * Shape<kHeadDim>::kTileBytes;  // keys and values, or the queries of an item
  using type = Ring<(kHeadDim > 64 ? 7 : 12), kSlotBytes>;
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Job job) {
  using Stream = typename ForwardRing<kHeadDim>::type;
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
    if (threadIdx.x < 32) produce_rows<kHeadDim, false>(ring, maps, job);
  } else {
    take_registers<kConsumerRegisters>();
    consume_forward<T, kHeadDim>(ring, job);
  }
}

template <typename T, int kHeadDim>
const char* launch_forward(const TensorMaps& maps, const Job& job, cudaStream_t stream) {
  return launch_persistent(forward_kernel<T, kHeadDim>, kThreads, ForwardRing<kHeadDim>::type::kBytes,
                           num_row_items(job.params), maps, job, stream);
}

}  // namespace mtraining::sm90
