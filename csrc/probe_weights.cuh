// From the sums of parts to the weights of rows: a key's probability is weight * 2^(shift + score in log2 units).
#pragma once
#include "probe_passes.h"
#include "probe_sums.cuh"

namespace mtraining::probe {

constexpr int kPartThreads = 8, kWeightThreads = 256;

// 2^x for x in the range of a double's exponent.
__device__ __forceinline__ double power_of_two(int x) { return __longlong_as_double(int64_t{x + 1023} << 52); }

// Writes the weight of a row: nothing for padding and for a row without keys.
__device__ __forceinline__ void write_weight(const ProbeParams& params, int64_t row, int exponent,
                                             const long long (&slots)[kSlots]) {
  double sum = 0.;  // in units of 2^(16 * exponent)
#pragma unroll
  for (int i = 0; i < kSlots; ++i) sum += slots[i] * power_of_two(-kMantissaBits - (i << kSlotBits));
  const int probe_row = row % params.num_probe_rows;
  float2 weight = {-INFINITY, 0.f};
  if (sum > 0. && params.positions[probe_row] >= 0) {
    const int power = ilogb(sum);
    const double share = sum * power_of_two(-power) * params.row_tiles[probe_row / kTileRows].rows_of_document;
    weight = {-static_cast<float>((exponent << kSlotBits) + power), static_cast<float>(1. / share)};
  }
  reinterpret_cast<float2*>(params.weights)[row] = weight;
}

// Adds up the parts of a row's sums, against the exponent of all ranks or, on one rank, of the parts. On one rank it
// writes the weights as well. Grid: rows of all heads, 32 a CTA, as P is a multiple of 64.
__global__ void __launch_bounds__(32 * kPartThreads) merge_kernel(const __grid_constant__ ProbeParams params) {
  __shared__ long long shared[kPartThreads][kSlots][32];
  __shared__ int largest[kPartThreads][32];
  const int x = threadIdx.x, y = threadIdx.y;
  const int64_t rows = int64_t{params.batch} * params.num_heads * params.num_probe_rows;
  const int64_t row = int64_t{blockIdx.x} * 32 + x;
  int exponent = kNoExponent;
  if (params.exponents) {
    exponent = params.exponents[row];
  } else {
    for (int part = y; part < params.num_splits; part += kPartThreads)
      exponent = max(exponent, params.part_exponents[part * rows + row]);
    largest[y][x] = exponent;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPartThreads; ++i) exponent = max(exponent, largest[i][x]);
  }
  long long sums[kSlots] = {};
#pragma unroll 2
  for (int part = y; part < params.num_splits; part += kPartThreads) {
    const int down = exponent - params.part_exponents[part * rows + row];
    const int64_t* const from = params.part_sums + part * rows + row;
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (i >= down) sums[i] += from[(i - down) * params.num_splits * rows];
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) shared[y][i][x] = sums[i];
  __syncthreads();
  if (y >= kSlots) return;
  long long sum = 0;
#pragma unroll
  for (int i = 0; i < kPartThreads; ++i) sum += shared[i][y][x];
  if (params.sums) {
    params.sums[y * rows + row] = sum;
    return;
  }
  shared[0][y][x] = sum;  // read above by the same thread only
  asm volatile("bar.sync 1, %0;" ::"n"(32 * kSlots) : "memory");
  if (y > 0) return;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) sums[i] = shared[0][i][x];
  write_weight(params, row, exponent, sums);
}

// The weights from the sums over all ranks. Grid: rows of all heads.
__global__ void __launch_bounds__(kWeightThreads) weights_kernel(const __grid_constant__ ProbeParams params) {
  const int64_t rows = int64_t{params.batch} * params.num_heads * params.num_probe_rows;
  const int64_t row = int64_t{blockIdx.x} * kWeightThreads + threadIdx.x;
  if (row >= rows) return;
  long long slots[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) slots[i] = params.sums[i * rows + row];
  write_weight(params, row, params.exponents[row], slots);
}

}  // namespace mtraining::probe
