// Backward, key-major: dK and dV of two tiles of keys per CTA, or of two tiles of packed columns.
//
//   S^T = K Q^T,  P^T = exp2(S^T scale log2(e) - lse log2(e)),  dP^T = V dO^T - delta,  dS^T = P^T dP^T
//   dV += P^T dO,  dK += scale dS^T Q
//
// Keys and values stay, in shared memory or with head_dim 64 in registers; queries and grad_out stream by.
#pragma once
#include "sm90_key_items.cuh"

namespace mtraining::sm90 {

// The diagonal block, transposed: a key (row) may be used from its own position on; `row` is the first of the thread's
// two.
__device__ __forceinline__ void mask_before_row(float (&s)[32], int row, int quad, float masked) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (j * 8 + quad * 2 + i % 2 < row + (i / 2) * 8) s[4 * j + i] = masked;
}

// What a slot says of a tile of scores, or of weights: those that do not count become `masked`. `bits` are the thread's
// rows of the word.
template <typename Stream>
__device__ __forceinline__ void mask_pairs(float (&s)[32], const Stream& ring, int slot, uint32_t flags, uint32_t bits,
                                           const Place& place, float masked = -INFINITY) {
  if (any_flag(flags, kPartial)) mask_range(s, ring.row_range(slot), place.quad, masked);
  if (any_flag(flags, kDiagonal << place.consumer)) mask_before_row(s, place.first, place.quad, masked);
  if (any_flag(flags, kQueryMask << place.consumer))
    mask_columns(s, ring.word(place.consumer, slot), place.quad, masked);
  else if (__any_sync(~0u, (bits & 257) != 257))
    mask_rows(s, bits, masked);
}

// The weights of a tile of scores, in their place; `at` is where the lse of the thread's first column lies.
__device__ __forceinline__ void weigh_columns(float (&s)[32], uint32_t at, float scale_log2) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 lse = load_shared_floats(at + 32 * j);
    s[4 * j] = exp2_approx(fmaf(s[4 * j], scale_log2, -lse.x));
    s[4 * j + 1] = exp2_approx(fmaf(s[4 * j + 1], scale_log2, -lse.y));
    s[4 * j + 2] = exp2_approx(fmaf(s[4 * j + 2], scale_log2, -lse.x));
    s[4 * j + 3] = exp2_approx(fmaf(s[4 * j + 3], scale_log2, -lse.y));
  }
}

// Writes a warpgroup's 64 rows of a gradient.
template <int kCount>
__device__ __forceinline__ void write_grad_rows(const Rows& grad, int batch, int head, int first_row, int begin,
                                                int end, const float (&x)[kCount], float factor, const Place& place) {
  float* out = static_cast<float*>(grad.data) + batch * grad.stride_batch + head * grad.stride_head +
               (first_row + place.first) * grad.stride_seq;
  if (place.first >= begin && place.first < end) store_row(out, x, 0, factor, place.quad);
  if (place.first + 8 >= begin && place.first + 8 < end) store_row(out + 8 * grad.stride_seq, x, 1, factor, place.quad);
}

template <int kCount>
__device__ __forceinline__ void write_grad_key(const Job& job, int index, const Place& place,
                                               const float (&dk)[kCount], const float (&dv)[kCount]) {
  const AttentionParams& params = job.params;
  const KeyItem item = locate_keys(index, job);
  const int tile_index = place.consumer ? item.tile1 : item.tile0;
  if (tile_index < 0) return;
  if (item.vertical) {
    const int first = tile_index * kBlock, end = params.max_vertical - first;
    write_grad_rows(params.grad_packed_key, item.index_row, item.head, first, 0, end, dk, params.softmax_scale, place);
    write_grad_rows(params.grad_packed_value, item.index_row, item.head, first, 0, end, dv, 1.f, place);
  } else {
    const Tile tile = params.key_tiles[tile_index];
    const int first = tile.slot * kBlock;
    const int begin = tile.row_begin, end = tile.row_end;
    write_grad_rows(params.grad_key, item.batch, item.head, first, begin, end, dk, params.softmax_scale, place);
    write_grad_rows(params.grad_value, item.batch, item.head, first, begin, end, dv, 1.f, place);
  }
}

template <typename T, int kHeadDim, typename Stream>
__device__ __forceinline__ void consume_grad_key(Stream ring, const GradKeyMemory<kHeadDim>& memory, const Job& job) {
  using S = Shape<kHeadDim>;
  const Place place;
  const int lane = threadIdx.x % 32;
  const float scale_log2 = job.params.softmax_scale * kLog2E;
  const uint32_t needed = kNeeded << place.consumer;
  const uint32_t key_low = S::descriptor_low(memory.resident + 2 * place.consumer * S::kTileBytes);
  uint32_t found = ring.receive().x;
  for (int index = ring.item(); index >= 0;) {
    ring.release(ring.slot), ring.step();
    barrier_wait(memory.resident_full, (found & kOddItem) != 0);
    float dk[S::kAccumulators], dv[S::kAccumulators], s[32], dp[32];
    uint32_t p[4][4], ds[4][4];
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) dk[i] = dv[i] = 0.f;
    auto issue_scores = [&] {
      const uint32_t delta_at =
          memory.statistics + ring.slot * GradKeyShape<kHeadDim>::kStatisticsBytes + 4 * kBlock + 8 * place.quad;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 delta = load_shared_floats(delta_at + 32 * j);
        dp[4 * j] = dp[4 * j + 2] = -delta.x, dp[4 * j + 1] = dp[4 * j + 3] = -delta.y;
      }
      pin_registers(dp), pin_registers(s);
      wgmma_fence();
      multiply_tiles<T, false, S::kSteps>(s, key_low, ring.low);
      wgmma_commit();
    };
    found = ring.seek(kItem | needed);
    const bool started = any_flag(found, needed);
    if (started) {
      issue_scores();
      // The scores of this tile are on their way.
      for (;;) {
        const int slot = ring.slot;
        const uint32_t queries = ring.low, grad_out = queries + kNextTile<kHeadDim>;
        const uint32_t statistics =
            memory.statistics + slot * GradKeyShape<kHeadDim>::kStatisticsBytes + 8 * place.quad;
        wgmma_fence();
        multiply_tiles<T, true, S::kSteps>(dp, key_low + kNextTile<kHeadDim>, grad_out);
        wgmma_commit();
        const uint32_t bits = ring.row_bits(place.consumer, place.first, slot);
        wgmma_wait<1>();
        pin_registers(s);
        mask_pairs(s, ring, slot, found, bits, place);
        weigh_columns(s, statistics, scale_log2);
        pack_tile<T>(s, p);
        pin_registers(dv);
        wgmma_fence();
        accumulate_tile<T>(dv, p, grad_out);
        wgmma_commit();
        wgmma_wait<1>();
        pin_registers(dp);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          s[4 * j] *= dp[4 * j], s[4 * j + 1] *= dp[4 * j + 1];
          s[4 * j + 2] *= dp[4 * j + 2], s[4 * j + 3] *= dp[4 * j + 3];
        }
        pack_tile<T>(s, ds);
        pin_registers(dk);
        wgmma_fence();
        accumulate_tile<T>(dk, ds, queries);
        wgmma_commit();
        // The next tile's scores follow this tile's last product at once.
        found = ring.seek_next(kItem | needed, slot);
        if (any_flag(found, needed)) {
          wgmma_wait<1>();
          pin_registers(dv);
          issue_scores();
          wgmma_wait<1>();
          pin_registers(dk);
          ring.release(slot);
          continue;
        }
        wgmma_wait<0>();
        pin_registers(dv), pin_registers(dk);
        ring.release(slot);
        if (any_flag(found, kItem)) break;
        found = ring.seek(kItem | needed);
        if (any_flag(found, kItem)) break;
        issue_scores();
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.resident_empty);
    write_grad_key(job, index, place, dk, dv);
    index = ring.item();
  }
}

// The same with the scores of the next tile issued before this one's weights are computed, and keys and values in
// registers, for both of which head_dim 64 has enough: whatever a warpgroup computes, its next products are under way.
// The tile after an item's last is the last once more, and its scores are dropped, so that no product depends on a
// branch. Weights are masked, not scores: these branches keep ptxas from moving the wait in front of the exponentials.
template <typename T, int kHeadDim, typename Stream>
__device__ __forceinline__ void consume_grad_key_ahead(Stream ring, const GradKeyMemory<kHeadDim>& memory,
                                                       const Job& job) {
  using S = Shape<kHeadDim>;
  const Place place;
  const int lane = threadIdx.x % 32;
  const float scale_log2 = job.params.softmax_scale * kLog2E;
  const uint32_t needed = kNeeded << place.consumer;
  uint32_t key[S::kSteps][4], value[S::kSteps][4];
  uint32_t found = ring.receive().x;
  for (int index = ring.item(); index >= 0;) {
    ring.release(ring.slot), ring.step();
    barrier_wait(memory.resident_full, (found & kOddItem) != 0);
    load_fragments(key, memory.resident + 2 * place.consumer * S::kTileBytes);
    load_fragments(value, memory.resident + (2 * place.consumer + 1) * S::kTileBytes);
    proxy_fence();
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.resident_empty);
    float dk[S::kAccumulators], dv[S::kAccumulators], s0[32], s1[32], dp[32];
    uint32_t p[4][4], ds[4][4];
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) dk[i] = dv[i] = 0.f;
    int slot = 0;  // of the tile in hand; what the ring has received is the one after it
    uint32_t queries = 0, flags = 0;
    // Adds the tile whose scores are in `s`, while those of the next one come into `next`. False: there was none yet,
    // or none at all.
    auto add_tile = [&](float (&s)[32], float (&next)[32]) {
      const bool last = !any_flag(found, needed);
      const uint32_t grad_out = queries + kNextTile<kHeadDim>, next_queries = last ? queries : ring.low;
      pin_registers(dp), pin_registers(next);
      wgmma_fence();
      multiply_rows<T>(dp, value, grad_out);
      wgmma_commit();
      multiply_rows<T>(next, key, next_queries);
      wgmma_commit();
      const uint32_t statistics = memory.statistics + slot * GradKeyShape<kHeadDim>::kStatisticsBytes + 8 * place.quad;
      weigh_columns(s, statistics, scale_log2);
      mask_pairs(s, ring, slot, flags, ring.row_bits(place.consumer, place.first, slot), place, 0.f);
      wgmma_wait<1>();  // for dP
      pin_registers(dp), pin_registers(s);
      pack_tile<T>(s, p);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 delta = load_shared_floats(statistics + 4 * kBlock + 32 * j);
        s[4 * j] *= dp[4 * j] - delta.x, s[4 * j + 1] *= dp[4 * j + 1] - delta.y;
        s[4 * j + 2] *= dp[4 * j + 2] - delta.x, s[4 * j + 3] *= dp[4 * j + 3] - delta.y;
      }
      pack_tile<T>(s, ds);
      pin_registers(dv), pin_registers(dk);
      wgmma_fence();
      accumulate_tile<T>(dv, p, grad_out);
      accumulate_tile<T>(dk, ds, queries);
      wgmma_commit();
      const int next_slot = ring.slot;
      flags = found, queries = next_queries;
      if (!last) found = ring.seek_next(kItem | needed, slot);  // under the products
      wgmma_wait<0>();
      pin_registers(next), pin_registers(dv), pin_registers(dk);
      ring.release(slot);
      slot = next_slot;
      return !last;
    };
    for (found = ring.seek(kItem | needed); !any_flag(found, kItem);) {
      slot = ring.slot, flags = found, queries = ring.low;
      pin_registers(s0);
      wgmma_fence();
      multiply_rows<T>(s0, key, queries);
      wgmma_commit();
      found = ring.seek_next(kItem | needed, slot);
      wgmma_wait<0>();
      pin_registers(s0);
      while (add_tile(s0, s1) && add_tile(s1, s0)) {
      }
      if (!any_flag(found, kItem)) found = ring.seek(kItem | needed);  // it stopped at a slot held
    }
    write_grad_key(job, index, place, dk, dv);
    index = ring.item();
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    grad_key_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Job job) {
  using Stream = typename GradKeyShape<kHeadDim>::Stream;
  check_shared_base();
  const int warpgroup = threadIdx.x / 128;
  const GradKeyMemory<kHeadDim> memory(kSharedBase);
  const Stream ring(memory.ring, warpgroup == 0);
  auto init = [&] {
    ring.init();
    barrier_init(memory.resident_full, 1);
    barrier_init(memory.resident_empty, kConsumerWarps);
  };
  auto consume = [&] {
    if constexpr (kHeadDim > 64)
      consume_grad_key<T, kHeadDim>(ring, memory, job);
    else
      consume_grad_key_ahead<T, kHeadDim>(ring, memory, job);
  };
  divide_threads<kProducerRegisters, kConsumerRegisters>(
      warpgroup, init, [&] { produce_keys<kHeadDim>(ring, memory, maps, job); }, consume);
}

template <typename T, int kHeadDim>
const char* launch_grad_key(const TensorMaps& maps, const Job& job, cudaStream_t stream) {
  static_assert(GradKeyShape<kHeadDim>::kBytes <= 227 * 1024, "shared memory of a CTA");
  return launch_persistent(grad_key_kernel<T, kHeadDim>, kThreads, GradKeyShape<kHeadDim>::kBytes, num_key_items(job),
                           maps, job, stream);
}

}  // namespace mtraining::sm90
