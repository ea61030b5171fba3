#include "sm90_grad_key.cuh"

template const char* mtraining::sm90::launch_grad_key<__half, 64>(const TensorMaps&, const KernelArguments&,
                                                                  cudaStream_t);
