#include "sm90_forward.cuh"

template const char* mtraining::sm90::launch_forward<__half, 64>(const TensorMaps&, const KernelArguments&,
                                                                 cudaStream_t);
