#include "sm90_forward.cuh"

template const char* mtraining::sm90::launch_forward<__half, 128>(const TensorMaps&, const KernelArguments&,
                                                                  cudaStream_t);
