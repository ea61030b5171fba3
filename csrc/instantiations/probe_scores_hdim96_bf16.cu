#include "probe_scores.cuh"

template const char* mtraining::probe::launch_scores<__nv_bfloat16, 96>(ProbePass, const ProbeParams&,
                                                                  const DeviceLimits&, cudaStream_t);
