// Backward, key-major: dK and dV of two tiles of keys per CTA, or of two tiles of packed columns.
//
//   S^T = K Q^T,  P^T = exp2(S^T scale log2(e) - lse log2(e)),  dP^T = V dO^T - delta,  dS^T = P^T dP^T
//   dV += P^T dO,  dK += scale dS^T Q
//
// K and V are resident, in shared memory or, with head_dim 64, in registers; Q and dO pass through the pipeline.
#pragma once
#include "sm90_key_items.cuh"

namespace mtraining::sm90 {

// The diagonal block, transposed: row (key) <= column (query); `row` is the first of the thread's two.
__device__ __forceinline__ void mask_before_row(float (&s)[32], int row, int quad, float masked) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (j * 8 + quad * 2 + i % 2 < row + (i / 2) * 8) s[4 * j + i] = masked;
}

// Applies a stage's mask to a tile of S^T, or of P^T: sets excluded elements to `masked`. `bits` are the thread's rows
// of the mask.
template <typename Pipeline>
__device__ __forceinline__ void mask_pairs(float (&s)[32], const Pipeline& pipeline, int stage, uint32_t flags,
                                           uint32_t bits, const ThreadPosition& thread, float masked = -INFINITY) {
  if (any_flag(flags, kPartial)) mask_range(s, pipeline.row_range(stage), thread.quad, masked);
  if (any_flag(flags, kDiagonal << thread.consumer)) mask_before_row(s, thread.row, thread.quad, masked);
  if (any_flag(flags, kQueryMask << thread.consumer))
    mask_columns(s, pipeline.mask(thread.consumer, stage), thread.quad, masked);
  else if (__any_sync(~0u, (bits & 257) != 257))
    mask_rows(s, bits, masked);
}

// P^T of a tile of S^T, in its registers; `at` is the address of the lse of the thread's first column.
__device__ __forceinline__ void exp2_columns(float (&s)[32], uint32_t at, float scale_log2) {
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
                                                int end, const float (&x)[kCount], float factor,
                                                const ThreadPosition& thread) {
  float* out = static_cast<float*>(grad.data) + batch * grad.stride_batch + head * grad.stride_head +
               (first_row + thread.row) * grad.stride_seq;
  if (thread.row >= begin && thread.row < end) store_row(out, x, 0, factor, thread.quad);
  if (thread.row + 8 >= begin && thread.row + 8 < end) store_row(out + 8 * grad.stride_seq, x, 1, factor, thread.quad);
}

template <int kCount>
__device__ __forceinline__ void store_grad_key(const KernelArguments& args, int index, const ThreadPosition& thread,
                                               const float (&dk)[kCount], const float (&dv)[kCount]) {
  const AttentionParams& params = args.params;
  const KeyItem item = locate_keys(index, args);
  const int tile_index = thread.consumer ? item.tile1 : item.tile0;
  if (tile_index < 0) return;
  if (item.vertical) {
    const int first = tile_index * kBlock, end = params.max_vertical - first;
    write_grad_rows(params.grad_packed_key, item.index_row, item.head, first, 0, end, dk, params.softmax_scale, thread);
    write_grad_rows(params.grad_packed_value, item.index_row, item.head, first, 0, end, dv, 1.f, thread);
  } else {
    const Tile tile = params.key_tiles[tile_index];
    const int first = tile.slot * kBlock;
    const int begin = tile.row_begin, end = tile.row_end;
    write_grad_rows(params.grad_key, item.batch, item.head, first, begin, end, dk, params.softmax_scale, thread);
    write_grad_rows(params.grad_value, item.batch, item.head, first, begin, end, dv, 1.f, thread);
  }
}

// A consumer warpgroup's loop over work items.
//
// kTileByTile: K and V are in shared memory. S of the next tile is issued right after this tile's last product, before
// that is waited for, and dP accumulates on -delta.
//
// kPrefetchScores: K and V are in registers; head_dim 64 has enough for them and for two buffers. P is masked rather
// than S: these branches prevent ptxas from moving the wait before the exponentials.
template <typename T, int kHeadDim, Schedule kSchedule, typename Pipeline>
__device__ __forceinline__ void consume_grad_key(Pipeline pipeline, const GradKeyMemory<kHeadDim>& memory,
                                                 const KernelArguments& args) {
  using S = Shape<kHeadDim>;
  constexpr bool kPrefetch = kSchedule == Schedule::kPrefetchScores;
  const ThreadPosition thread;
  const int lane = threadIdx.x % 32;
  const float scale_log2 = args.params.softmax_scale * kLog2E;
  const uint32_t needed = kNeeded << thread.consumer;
  const uint32_t key_low = S::descriptor_low(memory.resident + 2 * thread.consumer * S::kTileBytes);
  uint32_t key[S::kSteps][4], value[S::kSteps][4];
  uint32_t found = pipeline.consumer_wait().x;
  for (int index = pipeline.item(); index >= 0;) {
    pipeline.consumer_release(pipeline.stage), pipeline.advance();
    barrier_wait(memory.resident_full, (found & kOddPhase) != 0);
    if constexpr (kPrefetch) {
      load_fragments(key, memory.resident + 2 * thread.consumer * S::kTileBytes);
      load_fragments(value, memory.resident + (2 * thread.consumer + 1) * S::kTileBytes);
      proxy_fence();
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.resident_empty);
    }
    float dk[S::kAccumulators], dv[S::kAccumulators], dp[32];
    uint32_t p[4][4], ds[4][4];
#pragma unroll
    for (int i = 0; i < S::kAccumulators; ++i) dk[i] = dv[i] = 0.f;
    if constexpr (kPrefetch) {
      float s0[32], s1[32];
      int stage = 0;  // of the current tile; the pipeline is at the next one
      uint32_t queries = 0, flags = 0;
      // Accumulates the tile whose S is in `s`, while S of the next tile is computed into `next`. False where the next
      // tile has not arrived or the item ends.
      auto accumulate = [&](float (&s)[32], float (&next)[32]) {
        const bool last = !any_flag(found, needed);
        const uint32_t grad_out = queries + kNextTile<kHeadDim>, next_queries = last ? queries : pipeline.low;
        pin_registers(dp), pin_registers(next);
        wgmma_fence();
        gemm_rs<T>(dp, value, grad_out);
        wgmma_commit();
        gemm_rs<T>(next, key, next_queries);
        wgmma_commit();
        const uint32_t statistics =
            memory.statistics + stage * GradKeyShape<kHeadDim>::kStatisticsBytes + 8 * thread.quad;
        exp2_columns(s, statistics, scale_log2);
        mask_pairs(s, pipeline, stage, flags, pipeline.row_bits(thread.consumer, thread.row, stage), thread, 0.f);
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
        gemm_rs_accumulate<T>(dv, p, grad_out);
        gemm_rs_accumulate<T>(dk, ds, queries);
        wgmma_commit();
        const int next_stage = pipeline.stage;
        flags = found, queries = next_queries;
        if (!last) found = pipeline.try_next_tile(kItem | needed, stage);  // under the products
        wgmma_wait<0>();
        pin_registers(next), pin_registers(dv), pin_registers(dk);
        pipeline.consumer_release(stage);
        stage = next_stage;
        return !last;
      };
      for (found = pipeline.next_tile(kItem | needed); !any_flag(found, kItem);) {
        stage = pipeline.stage, flags = found, queries = pipeline.low;
        pin_registers(s0);
        wgmma_fence();
        gemm_rs<T>(s0, key, queries);
        wgmma_commit();
        found = pipeline.try_next_tile(kItem | needed, stage);
        wgmma_wait<0>();
        pin_registers(s0);
        while (accumulate(s0, s1) && accumulate(s1, s0)) {
        }
        if (!any_flag(found, kItem)) found = pipeline.next_tile(kItem | needed);  // stopped before the held stage
      }
    } else {
      float s[32];
      auto issue_scores = [&] {
        const uint32_t delta_at = memory.statistics + pipeline.stage * GradKeyShape<kHeadDim>::kStatisticsBytes +
                                  4 * kBlock + 8 * thread.quad;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 delta = load_shared_floats(delta_at + 32 * j);
          dp[4 * j] = dp[4 * j + 2] = -delta.x, dp[4 * j + 1] = dp[4 * j + 3] = -delta.y;
        }
        pin_registers(dp), pin_registers(s);
        wgmma_fence();
        gemm_ss<T, false, S::kSteps>(s, key_low, pipeline.low);
        wgmma_commit();
      };
      found = pipeline.next_tile(kItem | needed);
      const bool started = any_flag(found, needed);
      if (started) {
        issue_scores();
        // S of this tile is in flight.
        for (;;) {
          const int stage = pipeline.stage;
          const uint32_t queries = pipeline.low, grad_out = queries + kNextTile<kHeadDim>;
          const uint32_t statistics =
              memory.statistics + stage * GradKeyShape<kHeadDim>::kStatisticsBytes + 8 * thread.quad;
          wgmma_fence();
          gemm_ss<T, true, S::kSteps>(dp, key_low + kNextTile<kHeadDim>, grad_out);
          wgmma_commit();
          const uint32_t bits = pipeline.row_bits(thread.consumer, thread.row, stage);
          wgmma_wait<1>();
          pin_registers(s);
          mask_pairs(s, pipeline, stage, found, bits, thread);
          exp2_columns(s, statistics, scale_log2);
          pack_tile<T>(s, p);
          pin_registers(dv);
          wgmma_fence();
          gemm_rs_accumulate<T>(dv, p, grad_out);
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
          gemm_rs_accumulate<T>(dk, ds, queries);
          wgmma_commit();
          // S of the next tile is issued right after this tile's last product.
          found = pipeline.try_next_tile(kItem | needed, stage);
          if (any_flag(found, needed)) {
            wgmma_wait<1>();
            pin_registers(dv);
            issue_scores();
            wgmma_wait<1>();
            pin_registers(dk);
            pipeline.consumer_release(stage);
            continue;
          }
          wgmma_wait<0>();
          pin_registers(dv), pin_registers(dk);
          pipeline.consumer_release(stage);
          if (any_flag(found, kItem)) break;
          found = pipeline.next_tile(kItem | needed);
          if (any_flag(found, kItem)) break;
          issue_scores();
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.resident_empty);
    }
    store_grad_key(args, index, thread, dk, dv);
    index = pipeline.item();
  }
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1)
    grad_key_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ KernelArguments args) {
  using Pipeline = typename GradKeyShape<kHeadDim>::Pipeline;
  check_shared_base();
  const int warpgroup = threadIdx.x / 128;
  const GradKeyMemory<kHeadDim> memory(kSharedBase);
  const Pipeline pipeline(memory.pipeline, warpgroup == 0);
  auto init = [&] {
    pipeline.init();
    barrier_init(memory.resident_full, 1);
    barrier_init(memory.resident_empty, kConsumerWarps);
  };
  constexpr Schedule kSchedule = kHeadDim == 64 ? Schedule::kPrefetchScores : Schedule::kTileByTile;
  warp_specialize<kProducerRegisters, kConsumerRegisters>(
      warpgroup, init, [&] { produce_keys<kHeadDim>(pipeline, memory, maps, args); },
      [&] { consume_grad_key<T, kHeadDim, kSchedule>(pipeline, memory, args); });
}

template <typename T, int kHeadDim>
const char* launch_grad_key(const TensorMaps& maps, const KernelArguments& args, cudaStream_t stream) {
  static_assert(GradKeyShape<kHeadDim>::kBytes <= 227 * 1024, "shared memory of a CTA");
  return launch_persistent(grad_key_kernel<T, kHeadDim>, kThreads, GradKeyShape<kHeadDim>::kBytes, num_key_items(args),
                           maps, args, stream);
}

}  // namespace mtraining::sm90
