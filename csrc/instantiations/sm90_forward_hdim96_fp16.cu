#include "sm90_forward.cuh"

template const char* mtraining::sm90::launch_forward<__half, 96>(const TensorMaps&, const KernelArguments&,
                                                                 cudaStream_t);
