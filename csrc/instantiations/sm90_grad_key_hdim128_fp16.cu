#include "sm90_grad_key.cuh"

template const char* mtraining::sm90::launch_grad_key<__half, 128>(const TensorMaps&, const KernelArguments&,
                                                                   cudaStream_t);
