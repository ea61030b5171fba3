#include "sm80_probe.cuh"

template const char* mtraining::probe::launch_sm80_scores<__half, 128>(ProbePass, const ProbeParams&, cudaStream_t);
