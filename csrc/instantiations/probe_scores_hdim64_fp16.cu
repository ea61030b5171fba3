#include "probe_scores.cuh"

template const char* mtraining::probe::launch_scores<__half, 64>(ProbePass, const ProbeParams&,
                                                                  const DeviceLimits&, cudaStream_t);
