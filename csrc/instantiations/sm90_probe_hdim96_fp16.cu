#include "sm90_probe.cuh"

template const char* mtraining::probe::launch_sm90_scores<__half, 96>(ProbePass, const ProbeParams&, int, cudaStream_t);
