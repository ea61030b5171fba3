// Forward: out and lse of two query tiles per CTA, by the online softmax, from nothing or from a previous result.
//
// A warpgroup's products have to run while a softmax is computed; ForwardManner says how each head_dim sees to that.
// After a warpgroup's first tile no row's reference is infinite: a row that has met no key, which the row masks of
// block lists allow, has kLeastReference, against which its first key's weight is large.
#pragma once
#include <cmath>

#include "sm90_rows.cuh"

namespace mtraining::sm90 {

// The thread's two rows. Weights are exp(score - reference); sums are this thread's share. A reference is a score of the
// row, at first the largest, and is raised only when weights against it grow large: most tiles need no maximum.
struct RunningRows {
  float reference0, reference1, sum0, sum1;
};

constexpr float kLeastReference = -1e30f;

// What a thread's weights in a tile (their sum, or with kScoresAhead the largest) may be before the references are
// raised: far from what float16 can hold. kMostBits is its logarithm.
constexpr float kMostWeight = 1024.f, kMostBits = 10.f;

// The weights of one tile against the rows' references, and this thread's share of their sums.
__device__ __forceinline__ void weigh_tile(const float (&s)[32], const RunningRows& rows, float scale_log2,
                                           float (&weight)[32], float& sum0, float& sum1) {
  const float shift0 = -rows.reference0 * scale_log2, shift1 = -rows.reference1 * scale_log2;
  sum0 = sum1 = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    weight[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, shift0));
    weight[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, shift0));
    weight[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, shift1));
    weight[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, shift1));
    sum0 += weight[4 * j] + weight[4 * j + 1], sum1 += weight[4 * j + 2] + weight[4 * j + 3];
  }
}

// The largest score of a tile that this thread holds, of either row.
__device__ __forceinline__ void largest_scores(const float (&s)[32], float& max0, float& max1) {
  max0 = s[0], max1 = s[2];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    max0 = fmaxf(max0, fmaxf(s[4 * j], s[4 * j + 1]));
    max1 = fmaxf(max1, fmaxf(s[4 * j + 2], s[4 * j + 3]));
  }
}

// Makes the largest score so far the reference of each row; returns the factors for what was summed before.
__device__ __forceinline__ void raise_references(float max0, float max1, RunningRows& rows, float scale_log2,
                                                 float& factor0, float& factor1) {
  max0 = fmaxf(fmaxf(rows.reference0, kLeastReference), quad_max(max0));
  max1 = fmaxf(fmaxf(rows.reference1, kLeastReference), quad_max(max1));
  factor0 = exp2_approx((rows.reference0 - max0) * scale_log2);
  factor1 = exp2_approx((rows.reference1 - max1) * scale_log2);
  rows.reference0 = max0, rows.reference1 = max1;
  rows.sum0 *= factor0, rows.sum1 *= factor1;
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
  rows.reference0 = lse0 * inverse_scale, rows.reference1 = lse1 * inverse_scale;
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
  if (at.valid0) *at.scalar(params.lse, 0) = present0 ? rows.reference0 * scale + logf(sum0) : -INFINITY;
  if (at.valid1) *at.scalar(params.lse, 1) = present1 ? rows.reference1 * scale + logf(sum1) : -INFINITY;
}

// Copies the rows that an item's slot brings to this warpgroup, as they lie, and leaves the slot.
template <int kHeadDim, typename Stream>
__device__ __forceinline__ void keep_rows(uint32_t to, Stream& ring, int consumer) {
  const uint32_t from = ring.tile() + consumer * Shape<kHeadDim>::kTileBytes;
  warpgroup_barrier(consumer);  // the products of the item before have read theirs
#pragma unroll
  for (int at = threadIdx.x % 128 * 16; at < Shape<kHeadDim>::kTileBytes; at += 128 * 16)
    copy_shared(to + at, from + at);
  proxy_fence();
  warpgroup_barrier(consumer);
  ring.release(ring.slot), ring.step();
}

// kInTurn: tile by tile, with the queries in shared memory and the weights in the place of the scores: few enough
// registers for two CTAs on a multiprocessor. Where weights grow large, the whole warpgroup computes the scores again.
template <typename T, int kHeadDim, typename Stream>
__device__ __forceinline__ void consume_forward_in_turn(Stream ring, uint32_t queries, const Job& job) {
  using S = Shape<kHeadDim>;
  const AttentionParams& params = job.params;
  const Place place;
  const float scale = params.softmax_scale, scale_log2 = scale * kLog2E;
  const uint32_t needed = kNeeded << place.consumer, diagonal = kDiagonal << place.consumer;
  queries += place.consumer * S::kTileBytes;
  const uint32_t query_low = S::descriptor_low(queries);
  for (int index = __shfl_sync(~0u, ring.receive().y, 0); index >= 0;) {
    keep_rows<kHeadDim>(queries, ring, place.consumer);
    uint32_t found = ring.seek(kItem | needed);
    const bool started = any_flag(found, needed);
    const bool writes = started || !params.resume || params.final_out.data;  // else the previous result stays as it is
    RunningRows rows;
    float o[S::kAccumulators];
    if (writes) begin_rows(o, rows, params, ItemRows(job, index, place), 1.f / scale, place.quad);
    while (!any_flag(found, kItem)) {
      const int slot = ring.slot;
      const uint32_t keys = ring.low;
      float s[32], sum0, sum1;
      uint32_t p[4][4];
      auto compute_scores = [&] {
        pin_registers(s);
        wgmma_fence();
        multiply_tiles<T, false, S::kSteps>(s, query_low, keys);
        wgmma_commit();
        const uint2 word = ring.word(place.consumer, slot);
        wgmma_wait<0>();
        pin_registers(s);
        mask_tile(s, ring, slot, found, diagonal, word, place);
      };
      compute_scores();
      weigh_tile(s, rows, scale_log2, s, sum0, sum1);
      if (any_flag(warpgroup_any(place.consumer, !(sum0 + sum1 <= kMostWeight)), 1)) {
        float max0, max1, factor0, factor1;
        compute_scores();
        largest_scores(s, max0, max1);
        raise_references(max0, max1, rows, scale_log2, factor0, factor1);
        rescale(o, factor0, factor1);
        weigh_tile(s, rows, scale_log2, s, sum0, sum1);
      }
      rows.sum0 += sum0, rows.sum1 += sum1;
      pack_tile<T>(s, p);
      pin_registers(o);
      wgmma_fence();
      accumulate_tile<T>(o, p, keys + kNextTile<kHeadDim>);
      wgmma_commit();
      found = ring.seek_next(kItem | needed, slot);  // under the product
      wgmma_wait<0>();
      pin_registers(o);
      ring.release(slot);
      if (!any_flag(found, kItem | needed)) found = ring.seek(kItem | needed);
    }
    if (writes) write_rows<T>(params, ItemRows(job, index, place), o, rows, scale, place.quad, started);
    index = ring.item();
  }
}

// kScoresAhead: the scores of the next tile are issued before this one's softmax, into one of two buffers. Weights take
// the place of their scores, which cannot be weighed again then, so the largest score is compared with the reference
// beforehand. The tile after an item's last is the last once more, and its scores are dropped, so that no product
// depends on a branch.
template <typename T, int kHeadDim, typename Stream>
__device__ __forceinline__ void consume_forward_ahead(Stream ring, const Job& job) {
  using S = Shape<kHeadDim>;
  const AttentionParams& params = job.params;
  const Place place;
  const float scale = params.softmax_scale, scale_log2 = scale * kLog2E;
  const uint32_t needed = kNeeded << place.consumer, diagonal = kDiagonal << place.consumer;
  uint32_t q[S::kSteps][4];
  for (int index = __shfl_sync(~0u, ring.receive().y, 0); index >= 0;) {
    take_rows<kHeadDim>(q, ring, place.consumer);
    uint32_t found = ring.seek(kItem | needed);
    const bool started = any_flag(found, needed);
    const bool writes = started || !params.resume || params.final_out.data;  // else the previous result stays as it is
    RunningRows rows;
    float o[S::kAccumulators], s0[32], s1[32];
    uint32_t p[4][4];
    if (writes) begin_rows(o, rows, params, ItemRows(job, index, place), 1.f / scale, place.quad);
    int slot = 0;  // of the tile in hand; what the ring has received is the one after it
    uint32_t keys = 0, flags = 0;
    // Adds the tile whose scores are in `s`, while those of the next one come into `next`. False: there was none yet,
    // or none at all.
    auto add_tile = [&](float (&s)[32], float (&next)[32]) {
      const bool last = !any_flag(found, needed);
      const uint32_t values = keys + kNextTile<kHeadDim>, next_keys = last ? keys : ring.low;
      float max0, max1, sum0, sum1;
      pin_registers(next);
      wgmma_fence();
      multiply_rows<T>(next, q, next_keys);
      wgmma_commit();
      const uint2 word = ring.word(place.consumer, slot);
      mask_tile(s, ring, slot, flags, diagonal, word, place);
      largest_scores(s, max0, max1);
      // Written so that it holds where a row has no reference yet, whatever its scores.
      const float most_above = kMostBits / scale_log2;
      const bool within = max0 - rows.reference0 <= most_above && max1 - rows.reference1 <= most_above;
      if (__any_sync(~0u, !within)) {
        float factor0, factor1;
        raise_references(max0, max1, rows, scale_log2, factor0, factor1);
        wgmma_wait<0>();  // ptxas serialises the products of a tile if `o`, to which one adds, is touched amid them
        pin_registers(o);
        rescale(o, factor0, factor1);
      }
      weigh_tile(s, rows, scale_log2, s, sum0, sum1);
      rows.sum0 += sum0, rows.sum1 += sum1;
      pack_tile<T>(s, p);
      pin_registers(o);
      wgmma_fence();
      accumulate_tile<T>(o, p, values);
      wgmma_commit();
      const int next_slot = ring.slot;
      flags = found, keys = next_keys;
      if (!last) found = ring.seek_next(kItem | needed, slot);  // under the products
      wgmma_wait<0>();
      pin_registers(next), pin_registers(o);
      ring.release(slot);
      slot = next_slot;
      return !last;
    };
    while (!any_flag(found, kItem)) {
      slot = ring.slot, flags = found, keys = ring.low;
      pin_registers(s0);
      wgmma_fence();
      multiply_rows<T>(s0, q, keys);
      wgmma_commit();
      found = ring.seek_next(kItem | needed, slot);
      wgmma_wait<0>();
      pin_registers(s0);
      while (add_tile(s0, s1) && add_tile(s1, s0)) {
      }
      if (!any_flag(found, kItem)) found = ring.seek(kItem | needed);  // it stopped at a slot held
    }
    if (writes) write_rows<T>(params, ItemRows(job, index, place), o, rows, scale, place.quad, started);
    index = ring.item();
  }
}

// What runs under a softmax: the scores of the warpgroup's next tile, for which nobody waits then. With head_dim 64
// they are too short, so a multiprocessor takes two CTAs instead, and what runs is the products of three other
// warpgroups. docs/kernels.md has what was timed.
enum class ForwardManner { kInTurn, kScoresAhead };

// How a multiprocessor is divided. Of the registers that 384 threads start with, 168 or 80 each, none stays unused.
template <int kHeadDim>
struct ForwardPlan {
  static constexpr ForwardManner kManner = kHeadDim == 64 ? ForwardManner::kInTurn : ForwardManner::kScoresAhead;
  static constexpr int kCtas = kManner == ForwardManner::kInTurn ? 2 : 1;
  static constexpr int kForProducer = kCtas == 1 ? kProducerRegisters : 32;
  static constexpr int kForConsumer = kCtas == 1 ? kConsumerRegisters : 104;
  static constexpr int kQueryBytes = kCtas == 1 ? 0 : 2 * Shape<kHeadDim>::kTileBytes;
  static constexpr int kStages = kHeadDim == 64 ? 6 : kHeadDim == 96 ? 9 : 7;
  using Stream = Ring<kHeadDim, kStages>;  // keys and values, or the queries of an item
  static constexpr int kBytes = kQueryBytes + Stream::kBytes;
  static_assert(kCtas * (kBytes + kSharedBase) <= 228 * 1024, "shared memory of a multiprocessor");
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, ForwardPlan<kHeadDim>::kCtas)
    forward_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Job job) {
  using Plan = ForwardPlan<kHeadDim>;
  check_shared_base();
  const int warpgroup = threadIdx.x / 128;
  const typename Plan::Stream ring(kSharedBase + Plan::kQueryBytes, warpgroup == 0);
  auto consume = [&] {
    if constexpr (Plan::kManner == ForwardManner::kInTurn)
      consume_forward_in_turn<T, kHeadDim>(ring, kSharedBase, job);
    else
      consume_forward_ahead<T, kHeadDim>(ring, job);
  };
  divide_threads<Plan::kForProducer, Plan::kForConsumer>(
      warpgroup, [&] { ring.init(); }, [&] { produce_rows<kHeadDim, false>(ring, maps, job); }, consume);
}

template <typename T, int kHeadDim>
const char* launch_forward(const TensorMaps& maps, const Job& job, cudaStream_t stream) {
  using Plan = ForwardPlan<kHeadDim>;
  return launch_persistent<Plan::kCtas>(forward_kernel<T, kHeadDim>, kThreads, Plan::kBytes, num_row_items(job), maps,
                                        job, stream);
}

}  // namespace mtraining::sm90
