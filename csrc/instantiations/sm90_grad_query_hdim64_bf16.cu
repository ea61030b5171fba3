#include "sm90_grad_query.cuh"

template const char* mtraining::sm90::launch_grad_query<__nv_bfloat16, 64>(const TensorMaps&, const KernelArguments&,
                                                                           cudaStream_t);
