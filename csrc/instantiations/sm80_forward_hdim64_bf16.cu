#include "sm80_forward.cuh"

template const char* mtraining::sm80::launch_forward<64, __nv_bfloat16>(Pass, const AttentionParams&, cudaStream_t);
