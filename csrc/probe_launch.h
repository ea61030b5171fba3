// The passes of a selection, in this order; between them the caller reduces over ranks. Each launches on `stream` and
// returns at once: nullptr, or a sentence that says what is wrong.
//
// Nothing here depends on the order in which CTAs run, on how many there are or on how keys are spread over ranks:
// integer sums are exact, and every float is summed in an order that its own tile fixes.
#pragma once
#include "probe_params.h"

namespace mtraining {

enum ProbePass : int32_t {
  kProbeSums = 0,       // part_exponents, part_sums: each row's exp(score) over this rank's keys
  kProbeMerge = 1,      // sums = the parts, against the exponents of all ranks; all-reduce them by sum. On one rank
                        //   weights at once
  kProbeWeights = 2,    // weights = 1 / sums
  kProbeMass = 3,       // mass: the mean probability of each of this rank's keys, or its part of either half of the
                        //   probe rows; all-to-all. distance_sums += it, by runs of distances; all-reduce them by sum
  kProbeVerticals = 4,  // the vertical lists and thresholds; all-gather these
  kProbeChosen = 5,     // chosen: this rank's keys that are verticals
  kProbeColumns = 6,    // distance_sums += their mass, by runs of distances; all-reduce them by sum
  kProbeSlashes = 7     // the slash lists
};

const char* probe_launch(ProbePass pass, const ProbeParams& params, void* stream);

// One of the passes over scores: sums, mass, columns. sm80: every GPU of compute
// capability 8.0 or newer. sm90: the Hopper family, compiled where csrc/ holds sm90_*.cu.
const char* sm80_probe_launch(ProbePass pass, const ProbeParams& params, void* stream);
const char* sm90_probe_launch(ProbePass pass, const ProbeParams& params, void* stream);

}  // namespace mtraining
