#include "sm80_probe.cuh"

template const char* mtraining::probe::launch_sm80_scores<__nv_bfloat16, 128>(ProbePass, const ProbeParams&,
                                                                              cudaStream_t);
