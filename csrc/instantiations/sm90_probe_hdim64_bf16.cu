#include "sm90_probe.cuh"

template const char* mtraining::probe::launch_sm90_scores<__nv_bfloat16, 64>(ProbePass, const ProbeParams&, int,
                                                                             cudaStream_t);
