#include "sm90_forward.cuh"

template const char* mtraining::sm90::launch_forward<__nv_bfloat16, 128>(const TensorMaps&, const KernelArguments&,
                                                                         cudaStream_t);
