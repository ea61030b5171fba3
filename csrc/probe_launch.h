// The passes of a selection, in this order; between them the caller reduces over ranks. Each launches on `stream` and
// returns at once: nullptr, or a sentence that says what is wrong.
//
// Nothing here depends on the order in which CTAs run, on how many there are or on how keys are spread over ranks:
// maxima and integer sums are exact, and every float is summed in an order that its own tile fixes.
#pragma once
#include "probe_params.h"

namespace mtraining {

enum ProbePass : int32_t {
  kProbeMaximum = 0,   // maximum = max(maximum, query . key of this rank's keys); all-reduce it by max
  kProbeTotal = 1,     // total += exp(score - maximum) of this rank's keys; all-reduce it by sum
  kProbeMass = 2,      // mass: the mean probability of each of this rank's keys, by group; all-to-all
  kProbeColumns = 3,   // columns = mass over all groups
  kProbeVerticals = 4, // the vertical lists and thresholds
  kProbeDistances = 5, // distances = mass of what is no vertical, by runs of distances
  kProbeSlashes = 6    // the slash lists
};

const char* probe_launch(ProbePass pass, const ProbeParams& params, void* stream);

}  // namespace mtraining
