// Host side: CUDA errors as sentences.
#pragma once
#include <cuda_runtime.h>

namespace mtraining {

inline const char* describe(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

// This library has a CUDA runtime of its own, so the device that the caller made current is set here too.
inline const char* use_device(int device) { return describe(cudaSetDevice(device)); }

// The last launch's error, without waiting for the kernel.
inline const char* launch_error() { return describe(cudaGetLastError()); }

}  // namespace mtraining
