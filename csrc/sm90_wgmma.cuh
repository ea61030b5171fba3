// wgmma of 64 x N x 16 with float32 accumulators, the shapes that the kernels use, and shared-memory descriptors.
#pragma once
#include "sm90_launch.h"
#include "sm90_ptx.cuh"

namespace mtraining::sm90 {

// ---- tiles in shared memory and their descriptors -------------------------------------------------------------------
// A tile is 64 rows, in strips of strip_columns() columns one after the other, swizzled over the width of a strip.
// A descriptor: bits 0-13 address, 16-29 leading offset, 32-45 stride offset (byte counts divided by 16), 62-63 swizzle
// (1 = 128 bytes, 2 = 64 bytes). The stride offset is that of eight rows.
//   K-major operand (the reduction is along a row): the leading offset is ignored; 16 columns are 32 bytes, within a
//     strip.
//   MN-major operand (the reduction is over rows): the leading offset is the distance between strips.
// Only the low half varies. It is made warp-uniform once per tile, and k steps add constants to it: otherwise every
// wgmma costs about seven integer instructions and two moves to uniform registers.
template <int kHeadDim>
struct Shape {
  static constexpr int kStripColumns = strip_columns(kHeadDim), kStrips = kHeadDim / kStripColumns;
  static constexpr int kRowBytes = 2 * kStripColumns, kStripBytes = kBlock * kRowBytes;
  static constexpr int kTileBytes = kStrips * kStripBytes;
  static constexpr int kSteps = kHeadDim / 16;        // k steps of a product over head_dim
  static constexpr int kAccumulators = kHeadDim / 2;  // per thread, of 64 rows by head_dim columns

  static __device__ __forceinline__ uint32_t descriptor_low(uint32_t address) {
    return __shfl_sync(~0u, (address >> 4) | (kStripBytes >> 4) << 16, 0);
  }
  static __device__ __forceinline__ uint64_t descriptor(uint32_t low, uint32_t offset_bytes) {
    constexpr uint32_t kHigh = (8 * kRowBytes >> 4) | (kRowBytes == 128 ? 1u : 2u) << 30;
    uint64_t d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low + (offset_bytes >> 4)), "r"(kHigh));
    return d;
  }
  static __device__ __forceinline__ uint64_t k_major(uint32_t low, int step) {
    constexpr int kStepsOfStrip = kRowBytes / 32;
    return descriptor(low, step / kStepsOfStrip * kStripBytes + step % kStepsOfStrip * 32);
  }
  static __device__ __forceinline__ uint64_t mn_major(uint32_t low, int step) {
    return descriptor(low, step * 16 * kRowBytes);
  }
};

// ---- instructions --------------------------------------------------------------------------------------------------
#define MTR_ACC8(d, i)                                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define MTR_ACC32(d, i) MTR_ACC8(d, i), MTR_ACC8(d, i + 8), MTR_ACC8(d, i + 16), MTR_ACC8(d, i + 24)
#define MTR_LIST32                                                                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define MTR_LIST48 \
  MTR_LIST32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MTR_LIST64 \
  MTR_LIST48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// a0-a3, b, acc and tb are the operand numbers that follow the accumulators.
#define MTR_RS(N, TYPE, LIST, ACC, a0, a1, a2, a3, b, acc, tb)                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #acc                                                       \
               ", 0;\n"                                                                                        \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST "}, {%" #a0 ", %" #a1 \
               ", %" #a2 ", %" #a3 "}, %" #b ", p, 1, 1, %" #tb ";\n}"                                         \
               : ACC                                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc), "r"(accumulate), "n"(kTransB))
#define MTR_SS(N, TYPE, LIST, ACC, a, b, acc, tb)                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #acc                                                    \
               ", 0;\n"                                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST "}, %" #a ", %" #b \
               ", p, 1, 1, 0, %" #tb ";\n}"                                                                 \
               : ACC                                                                                        \
               : "l"(a_desc), "l"(b_desc), "r"(accumulate), "n"(kTransB))

template <typename T>
constexpr bool kIsHalf = false;
template <>
inline constexpr bool kIsHalf<__half> = true;

// d[64 x N] = (accumulate ? d : 0) + a[64 x 16] b[16 x N], with N twice the count of accumulators. kTransB = 1: b is
// MN-major. The first form reads a from registers, the second from shared memory (K-major).
template <typename T, int kTransB>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b_desc, int accumulate) {
  if constexpr (kIsHalf<T>)
    MTR_RS(64, "f16", MTR_LIST32, MTR_ACC32(d, 0), 32, 33, 34, 35, 36, 37, 38);
  else
    MTR_RS(64, "bf16", MTR_LIST32, MTR_ACC32(d, 0), 32, 33, 34, 35, 36, 37, 38);
}
template <typename T, int kTransB>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a_desc, uint64_t b_desc, int accumulate) {
  if constexpr (kIsHalf<T>)
    MTR_SS(64, "f16", MTR_LIST32, MTR_ACC32(d, 0), 32, 33, 34, 35);
  else
    MTR_SS(64, "bf16", MTR_LIST32, MTR_ACC32(d, 0), 32, 33, 34, 35);
}
#define MTR_ACC48(d) MTR_ACC32(d, 0), MTR_ACC8(d, 32), MTR_ACC8(d, 40)
#define MTR_ACC64(d) MTR_ACC32(d, 0), MTR_ACC32(d, 32)
template <typename T, int kTransB>
__device__ __forceinline__ void wgmma(float (&d)[48], const uint32_t (&a)[4], uint64_t b_desc, int accumulate) {
  if constexpr (kIsHalf<T>)
    MTR_RS(96, "f16", MTR_LIST48, MTR_ACC48(d), 48, 49, 50, 51, 52, 53, 54);
  else
    MTR_RS(96, "bf16", MTR_LIST48, MTR_ACC48(d), 48, 49, 50, 51, 52, 53, 54);
}
template <typename T, int kTransB>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b_desc, int accumulate) {
  if constexpr (kIsHalf<T>)
    MTR_RS(128, "f16", MTR_LIST64, MTR_ACC64(d), 64, 65, 66, 67, 68, 69, 70);
  else
    MTR_RS(128, "bf16", MTR_LIST64, MTR_ACC64(d), 64, 65, 66, 67, 68, 69, 70);
}
template <typename T, int kTransB>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a_desc, uint64_t b_desc, int accumulate) {
  if constexpr (kIsHalf<T>)
    MTR_SS(128, "f16", MTR_LIST64, MTR_ACC64(d), 64, 65, 66, 67);
  else
    MTR_SS(128, "bf16", MTR_LIST64, MTR_ACC64(d), 64, 65, 66, 67);
}
#undef MTR_ACC8
#undef MTR_ACC32
#undef MTR_ACC48
#undef MTR_ACC64
#undef MTR_LIST32
#undef MTR_LIST48
#undef MTR_LIST64
#undef MTR_RS
#undef MTR_SS

}  // namespace mtraining::sm90
