// Host side of the Hopper family: what a launch prepares once and hands to its kernels.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "lists.cuh"

namespace mtraining::sm90 {

// A tile of 64 rows lies in shared memory in strips of columns, as wide as the swizzle: 128 bytes, or 64 where head_dim
// is no multiple of 64 columns, so that no part of a tile is empty.
__host__ __device__ constexpr int strip_columns(int head_dim) { return head_dim % 64 ? 32 : 64; }

// TMA reads each tensor as (columns, rows, heads, batch rows); a box is 64 rows of a strip.
struct TensorMaps {
  CUtensorMap query, key, value, packed_key, packed_value, grad_out;
};

// Everything a kernel takes beside the maps.
struct Job {
  AttentionParams params;
  bool slash = false, vertical = false;     // which passes this launch makes
  bool lists = false;                       // the first of them goes over the pairs of block lists
  bool pairs_heads = false;                 // row-major kernels: a CTA takes two heads of a list, not two tiles
  int* counter = nullptr;                   // next work item; zero at the start of a launch
  const uint32_t* distance_bits = nullptr;  // [R, L, bit_words]: bit d is set where distance d is selected
  const float* statistics = nullptr;  // [B, Hq, query slots, 2, 64]: lse * log2(e), +inf where nothing flows; delta
  int bit_words = 0;
  int key_items = 0;  // dK, dV: items of a key/value head, packed columns apart
};

// Tiles come in pairs (2 p, 2 p + 1), in the sequence's order. With packed documents each pair is two items: the pair
// and nothing where its tiles are of one document, else one tile each.
__host__ __device__ inline int items_per_pair(const AttentionParams& params) {
  return params.num_documents > 1 ? 2 : 1;
}

// Each returns nullptr or a sentence. Defined in sm90_<kernel>.cuh, instantiated in instantiations/.
template <typename T, int kHeadDim>
const char* launch_forward(const TensorMaps& maps, const Job& job, cudaStream_t stream);
template <typename T, int kHeadDim>
const char* launch_grad_query(const TensorMaps& maps, const Job& job, cudaStream_t stream);
template <typename T, int kHeadDim>
const char* launch_grad_key(const TensorMaps& maps, const Job& job, cudaStream_t stream);

// Launches a persistent kernel, `kCtas` CTAs per multiprocessor, over `num_items` items, its counter set to zero first.
template <int kCtas = 1, typename Kernel>
const char* launch_persistent(Kernel kernel, int threads, int smem_bytes, int64_t num_items, const TensorMaps& maps,
                              const Job& job, cudaStream_t stream) {
  int multiprocessors = 0;
  cudaError_t error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, job.params.device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error == cudaSuccess)
    error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess) error = cudaMemsetAsync(job.counter, 0, sizeof(int), stream);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (num_items == 0) return nullptr;
  const int places = kCtas * multiprocessors;
  const int grid = static_cast<int>(num_items < places ? num_items : places);
  kernel<<<grid, threads, smem_bytes, stream>>>(maps, job);
  error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace mtraining::sm90
