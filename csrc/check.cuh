// Host side: CUDA errors as messages.
#pragma once
#include <cuda_runtime.h>

namespace mtraining {

inline const char* describe(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

// This library links its own CUDA runtime, so the caller's current device is set here too.
inline const char* use_device(int device) { return describe(cudaSetDevice(device)); }

// The last launch's error, without waiting for the kernel.
inline const char* launch_error() { return describe(cudaGetLastError()); }

}  // namespace mtraining
