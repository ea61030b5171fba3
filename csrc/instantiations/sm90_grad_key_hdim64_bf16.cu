#include "sm90_grad_key.cuh"

template const char* mtraining::sm90::launch_grad_key<__nv_bfloat16, 64>(const TensorMaps&, const KernelArguments&,
                                                                         cudaStream_t);
