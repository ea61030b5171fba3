// What the selection kernels take: see probe_launch.h for the passes. No CUDA and no framework header.
//
// Legend: B = batch, Hq / Hkv = heads, D = head_dim, E = documents that are estimated, P = probe rows of all documents,
// those of each padded to whole tiles. A "lane" is one query head of one batch row, b * Hq + h. A launch works on lanes
// first_lane .. end_lane - 1. The mass of heads_per_list neighbours is added up before the ranks exchange it; what is
// chosen for each sum is one list, and from there on a lane is a list. Rank r of the group ranks the r-th lists_per_rank
// of a launch. Blocks and slots are those of params.h.
#pragma once
#include "params.h"

namespace mtraining {

constexpr int kTileRows = 64;  // probe rows that are multiplied together
constexpr int kUnitRows = 8;   // of one query block: what a warp's rows lie in

// A document that is estimated, and what this rank holds of it.
struct ProbeDocument {
  int32_t start, stop;                      // its tokens, global positions
  int32_t first_block, num_blocks;          // the blocks that they touch
  int32_t first_row_tile, num_row_tiles;    // among row_tiles
  int32_t first_slot, slots_per_rank;       // this rank's slot of its first block here, and slots that any rank sends
  int32_t first_key_tile, end_key_tile;     // among key_tiles
  int32_t first_mass_block, first_of_order; // blocks before its own in a lane's mass, and in block_order
};

// 64 probe rows of one document in units of eight; -1 and -1 where all of them are padding.
struct RowTile {
  int32_t first_position, last_position;    // of its rows, global
  int32_t last_block;                       // query block of its last row, global
  int32_t rows_of_document;                 // without padding
};

// Keys begin .. end - 1 of one slot, 0 .. 64: those of one document.
struct KeyTile {
  int32_t slot, block, begin, end;
};

// Which items of a list are chosen: those with larger bits, and those with equal bits up to last_tie.
struct Threshold {
  uint32_t bits;
  int32_t last_tie;
};

struct ProbeParams {
  // Sizes.
  int32_t device = 0;
  int32_t dtype = kBFloat16;           // of probe and key
  int32_t head_dim = 0;                // 64, 96 or 128
  int32_t batch = 0, num_heads = 0, num_kv_heads = 0;
  int32_t num_probe_rows = 0;          // P
  int32_t num_keys = 0;                // local tokens
  int32_t num_documents = 0;           // E
  int32_t num_key_tiles = 0;
  int32_t most_row_tiles = 0, most_key_tiles = 0, most_blocks = 0;  // of a document
  int32_t num_splits = 1;              // parts that a document's keys are cut into where rows stay
  int32_t mass_blocks = 0;             // of a lane: sum over documents of slots_per_rank
  int32_t order_blocks = 0;            // sum over documents of num_blocks
  int32_t first_lane = 0, end_lane = 0;
  int32_t heads_per_list = 1;          // first_lane and end_lane are multiples of it
  int32_t num_ranks = 1;               // of the group
  int32_t lists_per_rank = 0;
  int32_t num_ranked = 0;              // lists that this rank ranks
  float softmax_scale = 1.f;           // positive

  // The configuration.
  int32_t sink_tokens = 0, local_blocks = 0;
  int32_t max_vertical = 0, max_slash = 0;
  int32_t slash_run_length = 1;                       // neighbouring distances that are chosen together
  double vertical_top_p = 1., slash_top_p = 1.;
  int32_t seq_len = 0, num_blocks = 0;                // of the global sequence: they pad the lists
  int32_t vertical_width = 0, slash_width = 0;        // entries in a list

  // Scores.
  Rows probe;                          // [B, P, Hq, D]
  Rows key;                            // [B, local tokens, Hkv, D]
  int32_t* part_exponents = nullptr;   // [num_splits, B * Hq, P]: see probe_sums.cuh
  int64_t* part_sums = nullptr;        // [kSlots, num_splits, B * Hq, P]
  const int32_t* exponents = nullptr;  // [B * Hq, P]: the largest of all parts and ranks
  int64_t* sums = nullptr;             // [kSlots, B * Hq, P]: over all parts, then over all ranks
  float* weights = nullptr;            // [B * Hq, P, 2]: shift, weight: a key's probability over the document's rows
                                       //   is weight * 2^(shift + score in log2 units)

  // Mass. A lane's mass is, document by document, [slots_per_rank, 64].
  float* mass = nullptr;               // [heads_per_list, ranks, E, lists_per_rank, ...]: by the rank that will rank
                                       //   it; added up over heads; or exchanged, [ranks, ...]: by whose keys they are
  float* columns = nullptr;            // [num_ranked, order_blocks, 64]: in the order of the blocks
  Threshold* verticals = nullptr;      // [E, lists_per_rank]
  const Threshold* thresholds = nullptr;  // [ranks, E, lists_per_rank]: every rank's verticals
  uint64_t* left = nullptr;            // [ranks * lists_per_rank, mass_blocks]: a bit for each of this rank's keys that
                                       //   is neither sink nor vertical
  int64_t* distance_sums = nullptr;    // [ranks * lists_per_rank, order_blocks]: mass of each run of distances after the
                                       //   local ones, in units of kDistanceUnit; 0 before
  float* distances = nullptr;          // [num_ranked, order_blocks]: the same as floats, of the ranked lists: those that
                                       //   distance_sums begins with
  int32_t* lists = nullptr;            // [E, num_ranked, vertical_width + 1 + slash_width + 1]: list, count, twice
  int64_t list_stride_document = 0, list_stride_lane = 0;

  // Tables.
  const ProbeDocument* documents = nullptr;  // [E]
  const RowTile* row_tiles = nullptr;
  const KeyTile* key_tiles = nullptr;        // [num_key_tiles], document by document
  const int32_t* positions = nullptr;        // [P], global; -1: padding
  const int32_t* unit_blocks = nullptr;      // [P / 8]: query block of a unit, global; INT32_MIN / 2: no rows
  const int32_t* block_order = nullptr;      // [order_blocks]: rank * slots_per_rank + slot, slots from the first_slot
};

}  // namespace mtraining
