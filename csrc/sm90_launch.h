// Host side of the Hopper family: the arguments of a kernel and its launch.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "lists.cuh"

namespace mtraining::sm90 {

// A tile of 64 rows is stored in shared memory in strips of columns, as wide as the swizzle: 128 bytes, or 64 where
// head_dim is not a multiple of 64 columns, so that no part of a tile is unused.
__host__ __device__ constexpr int strip_columns(int head_dim) { return head_dim % 64 ? 32 : 64; }

// TMA reads each tensor as (columns, rows, heads, batch rows); a box is 64 rows of a strip.
struct TensorMaps {
  CUtensorMap query, key, value, packed_key, packed_value, grad_out;
};

// The arguments of a kernel beside the tensor maps.
struct KernelArguments {
  AttentionParams params;
  bool slash = false, vertical = false;     // the passes of this launch
  bool lists = false;                       // the first pass is over the pairs of block lists
  bool pairs_heads = false;                 // row-major kernels: a CTA processes two heads of a list, not two tiles
  int* counter = nullptr;                   // next work item; zero at the start of a launch
  const uint32_t* distance_bits = nullptr;  // [R, L, distance_bits_stride]: bit d is set where distance d is selected
  const float* statistics = nullptr;  // [B, Hq, query slots, 2, 64]: lse * log2(e), +inf in rows without keys; delta
  int distance_bits_stride = 0;       // integers of one list
  int key_items = 0;                  // dK, dV: items of a key/value head, without packed columns
};

// Tiles form pairs (2 p, 2 p + 1), in the order of the sequence. With packed documents each pair is two items: the pair
// and an empty one where both tiles are in one document, else one tile each.
__host__ __device__ inline int items_per_pair(const AttentionParams& params) {
  return params.num_documents > 1 ? 2 : 1;
}

// Each returns nullptr or an error message. Defined in sm90_<kernel>.cuh, instantiated in instantiations/.
template <typename T, int kHeadDim>
const char* launch_forward(const TensorMaps& maps, const KernelArguments& args, cudaStream_t stream);
template <typename T, int kHeadDim>
const char* launch_grad_query(const TensorMaps& maps, const KernelArguments& args, cudaStream_t stream);
template <typename T, int kHeadDim>
const char* launch_grad_key(const TensorMaps& maps, const KernelArguments& args, cudaStream_t stream);

// Launches a persistent kernel over `num_items` items, `kCtas` CTAs per multiprocessor, after resetting its counter.
template <int kCtas = 1, typename Kernel>
const char* launch_persistent(Kernel kernel, int threads, int smem_bytes, int64_t num_items, const TensorMaps& maps,
                              const KernelArguments& args, cudaStream_t stream) {
  int multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, args.params.device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) error = cudaMemsetAsync(args.counter, 0, sizeof(int), stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (num_items == 0) return nullptr;
  const int resident = kCtas * multiprocessors;
  const int grid = static_cast<int>(num_items < resident ? num_items : resident);
  kernel<<<grid, threads, smem_bytes, stream>>>(maps, args);
  error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace mtraining::sm90
