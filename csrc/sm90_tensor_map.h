// Host side: TMA maps of [batch, seq, heads, head_dim] tensors.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "sm90_launch.h"

namespace mtraining::sm90 {

// A map over (columns, rows, heads, batch rows) whose box is 64 rows of a strip; elements past an end read as zero.
// The runtime returns the driver's encoder, so nothing links against libcuda.
template <typename Params>  // with head_dim and dtype
inline bool encode_rows(CUtensorMap& map, const Params& params, const Rows& tensor, int rows, int heads, int batch) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<Encode>(entry);
  }();
  if (!encode) return false;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(params.head_dim), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  // The stride of a dimension of size 1 is arbitrary, but the encoder requires a multiple of 16 bytes.
  auto bytes = [](int64_t stride, int size) { return static_cast<cuuint64_t>(size == 1 ? 16 : stride * 2); };
  const cuuint64_t strides[3] = {bytes(tensor.stride_seq, rows), bytes(tensor.stride_head, heads),
                                 bytes(tensor.stride_batch, batch)};
  const int columns = strip_columns(params.head_dim);
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), kBlock, 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto type = params.dtype == kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&map, type, 4, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                columns == 64 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace mtraining::sm90
