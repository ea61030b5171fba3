#include "sm80_backward_query.cuh"

template const char* mtraining::sm80::launch_backward_query<64, __nv_bfloat16>(Pass, const AttentionParams&,
                                                                               const float*, cudaStream_t);
