// What csrc/instantiations/probe_* and probe_choice.cu compile and probe_launch.cu calls.
#pragma once
#include <cuda_runtime.h>

#include "probe_launch.h"

namespace mtraining::probe {

// Totals are integers, 2^38 for a weight of 1: the sum over 2^24 keys fits, and sums of weights below 2^-39 are lost.
constexpr float kTotalScale = 274877906944.f;
constexpr double kTotalUnit = 1. / 274877906944.;

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes;  // of a CTA
};

// One of the passes over scores: maximum, total or mass.
template <typename T, int kHeadDim>
const char* launch_scores(ProbePass pass, const ProbeParams& params, const DeviceLimits& limits, cudaStream_t stream);

// One of the passes after them.
const char* launch_choice(ProbePass pass, const ProbeParams& params, cudaStream_t stream);

}  // namespace mtraining::probe
