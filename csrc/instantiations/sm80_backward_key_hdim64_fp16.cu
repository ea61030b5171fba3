#include "sm80_backward_key.cuh"

template const char* mtraining::sm80::launch_backward_key<64, __half>(Pass, const AttentionParams&, const float*, int,
                                                                      int64_t, cudaStream_t);
