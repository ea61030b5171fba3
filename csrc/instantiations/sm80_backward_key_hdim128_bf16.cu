#include "sm80_backward_key.cuh"

template const char* mtraining::sm80::launch_backward_key<128, __nv_bfloat16>(Pass, const AttentionParams&,
                                                                              const float*, int, int64_t, cudaStream_t);
