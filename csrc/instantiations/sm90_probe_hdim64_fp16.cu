#include "sm90_probe.cuh"

template const char* mtraining::probe::launch_sm90_scores<__half, 64>(ProbePass, const ProbeParams&, int, cudaStream_t);
