#include "sm80_forward.cuh"

template const char* mtraining::sm80::launch_forward<96, __half>(Pass, const AttentionParams&, cudaStream_t);
