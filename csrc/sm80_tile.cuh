// 64-row tiles in shared memory, and the two products that the kernels of the family consist of.
//
// A warp owns 16 rows of the left operand. `score` multiplies them by the rows of a tile, over head_dim: S = Q K^T,
// dP = dO V^T. `accumulate` multiplies 16 x 64 weights by a tile, over its rows: O += P V, dQ += dS K.
#pragma once
#include "params.h"
#include "sm80_mma.cuh"

namespace mtraining::sm80 {

constexpr int kThreads = 128;
constexpr int kSteps = kBlock / 16;  // k16 steps over the rows of a tile

// 16-byte chunks of a row are permuted so that eight rows' chunks of one column fall into different banks.
template <int kHeadDim>
struct TileLayout {
  static_assert(kHeadDim == 64 || kHeadDim == 96 || kHeadDim == 128);
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kBytes = kBlock * kRowBytes;

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    const int permuted = kHeadDim == 96 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
    return row * kRowBytes + permuted * 16;
  }
};

// Starts the copy of 64 rows; rows from `valid_rows` on are set to zero.
template <int kHeadDim, typename T>
__device__ __forceinline__ void load_tile(uint32_t tile, const T* rows, int64_t stride, int valid_rows) {
  constexpr int kColumnThreads = kHeadDim == 96 ? 4 : kHeadDim / 8;  // threads side by side on one row
  constexpr int kRowStep = kThreads / kColumnThreads;                // a multiple of 8: the permutation stays the same
  const int row = threadIdx.x / kColumnThreads, chunk = threadIdx.x % kColumnThreads;
  const T* source = rows + row * stride + chunk * 8;
#pragma unroll
  for (int r = 0; r < kBlock; r += kRowStep) {
#pragma unroll
    for (int c = 0; c < TileLayout<kHeadDim>::kChunks; c += kColumnThreads)
      copy_async_16(tile + TileLayout<kHeadDim>::offset(row, chunk + c) + r * TileLayout<kHeadDim>::kRowBytes,
                    source + c * 8, row + r < valid_rows);
    source += kRowStep * stride;
  }
}

// Starts the copy of the first tile, if there is one (`found`), and waits for all copies.
template <typename Tiles, typename Step, typename Mask>
__device__ __forceinline__ void load_first(const Tiles& tiles, bool found, const Step& step, uint32_t stage,
                                           Mask& mask) {
  if (found)
    tiles.load(step, stage, mask);
  else
    copy_async_commit();
  copy_async_wait_all();
  __syncthreads();
}

// The left operand's fragment of dimensions 16 * step .. 16 * step + 15 of rows first_row .. first_row + 15.
template <int kHeadDim>
__device__ __forceinline__ void load_left(uint32_t (&fragment)[4], uint32_t tile, int first_row, int step) {
  const int lane = threadIdx.x % 32;
  load_matrices(fragment, tile + TileLayout<kHeadDim>::offset(first_row + lane % 16, 2 * step + lane / 16));
}

// s[16 x 8 * kColumns] = left * (tile rows first_row .. first_row + 8 * kColumns - 1)^T; left(step, fragment) loads the
// left operand's fragments.
template <int kHeadDim, typename T, int kColumns, typename Left>
__device__ __forceinline__ void score(float (&s)[kColumns][4], const Left& left, uint32_t tile, int first_row = 0) {
  const int lane = threadIdx.x % 32;
  const int row = first_row + (lane / 16) * 8 + lane % 8, half = (lane / 8) % 2;
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = 0.f;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    uint32_t a[4];
    left(step, a);
    const uint32_t address = tile + TileLayout<kHeadDim>::offset(row, 2 * step + half);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      uint32_t b[4];
      load_matrices(b, address + j * 8 * TileLayout<kHeadDim>::kRowBytes);
      multiply<T>(s[j], a, b[0], b[1]);
      multiply<T>(s[j + 1], a, b[2], b[3]);
    }
  }
}

// acc[16 x head_dim] += weights[16 x 8 * kColumns] * (tile rows first_row ..), the weights rounded to T.
template <int kHeadDim, typename T, int kColumns>
__device__ __forceinline__ void accumulate(float (&acc)[kHeadDim / 8][4], const float (&weights)[kColumns][4],
                                           uint32_t tile, int first_row = 0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < kColumns / 2; ++step) {
    const float (&w0)[4] = weights[2 * step];
    const float (&w1)[4] = weights[2 * step + 1];
    const uint32_t a[4] = {pack_pair<T>(w0[0], w0[1]), pack_pair<T>(w0[2], w0[3]), pack_pair<T>(w1[0], w1[1]),
                           pack_pair<T>(w1[2], w1[3])};
    const int row = first_row + step * 16 + lane % 16;
#pragma unroll
    for (int chunk = 0; chunk < kHeadDim / 8; chunk += 2) {
      uint32_t b[4];
      load_matrices_transposed(b, tile + TileLayout<kHeadDim>::offset(row, chunk + lane / 16));
      multiply<T>(acc[chunk], a, b[0], b[1]);
      multiply<T>(acc[chunk + 1], a, b[2], b[3]);
    }
  }
}

template <int kColumns>
__device__ __forceinline__ void clear(float (&acc)[kColumns][4]) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[j][i] = 0.f;
}

}  // namespace mtraining::sm80
