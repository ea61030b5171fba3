// What the selection kernels take: see probe_launch.h for the passes. No CUDA and no framework header.
//
// Legend: B = batch, Hq / Hkv = heads, D = head_dim, E = documents that are estimated, P = probe rows of all documents,
// those of each padded to whole tiles. Heads are counted over batch rows, b * Hq + h. A launch works on heads
// first_head .. end_head - 1. The mass of heads_per_list neighbours is added up, head by head, and each sum makes one
// list. Rank r of the group chooses the r-th lists_per_rank of a launch. Blocks and slots are those of params.h.
#pragma once
#include "params.h"

namespace mtraining {

constexpr int kTileRows = 64;  // probe rows that are multiplied together
constexpr int kUnitRows = 8;   // of one query block: what a warp's rows lie in

// A document that is estimated, and what this rank holds of it.
struct ProbeDocument {
  int32_t start, stop;                       // its tokens, global positions
  int32_t first_block, num_blocks;           // the blocks that they touch
  int32_t first_row_tile, num_row_tiles;     // among row_tiles
  int32_t first_slot, slots_per_rank;        // this rank's slot of its first block here, and slots that any rank sends
  int32_t first_key_tile, end_key_tile;      // among key_tiles
  int32_t first_mass_block, first_of_order;  // blocks before its own in a list's mass, and in block_order
  int32_t num_halves;  // that its probe rows are in: 1, or 2, and then the first 32 rows of each of
                       //   its row tiles are in one and the others in the other
};

// 64 probe rows of one document in units of eight; -1 and -1 where all of them are padding.
struct RowTile {
  int32_t first_position, last_position;  // of its rows, global
  int32_t last_block;                     // query block of its last row, global
  int32_t rows_of_document;               // without padding
};

// Keys begin .. end - 1 of one slot, 0 .. 64: those of one document.
struct KeyTile {
  int32_t slot, block, begin, end;
};

// The lines of a list that are chosen: those with larger bits of their rate, and those with equal bits up to last_tie.
// Lines are the document's columns, counted from its first block, and behind them its distances.
struct Threshold {
  uint32_t bits;
  int32_t last_tie;
};

enum ProbeBudget : int32_t {
  kBudgetTopP = 0,  // the fewest lines with a share of the mass, at most so many: columns, then distances
  kBudgetCost = 1   // columns and distances by mass for each pair, until a mass is reached
};

// Result of the choice of columns, for the choice of distances. Units of kMassUnit.
struct ColumnChoice {
  int64_t needed;  // mass that the columns do not cover; INT64_MAX: all
  int64_t pairs;   // of the chosen columns and the sinks
};

struct ProbeParams {
  // Sizes.
  int32_t device = 0;
  int32_t dtype = kBFloat16;  // of probe and key
  int32_t head_dim = 0;       // 64, 96 or 128
  int32_t batch = 0, num_heads = 0, num_kv_heads = 0;
  int32_t num_probe_rows = 0;  // P
  int32_t num_keys = 0;        // local tokens
  int32_t num_documents = 0;   // E
  int32_t num_key_tiles = 0;
  int32_t most_row_tiles = 0, most_key_tiles = 0, most_blocks = 0;  // of a document
  int32_t num_splits = 1;    // parts that a document's keys are cut into where rows stay
  int32_t mass_blocks = 0;   // of a list: sum over documents of slots_per_rank
  int32_t num_halves = 1;    // in `mass`: 2 where columns compete with their mass of the half that sees less
  int32_t order_blocks = 0;  // sum over documents of num_blocks
  int32_t first_head = 0, end_head = 0;
  int32_t heads_per_list = 1;  // first_head and end_head are multiples of it
  int32_t num_ranks = 1;       // of the group
  int32_t lists_per_rank = 0;
  int32_t num_ranked = 0;     // lists that this rank chooses
  float softmax_scale = 1.f;  // positive

  // The configuration.
  int32_t sink_tokens = 0, local_blocks = 0;
  int32_t budget = kBudgetTopP;
  int32_t max_vertical = 0, max_slash = 0;  // columns and distances beside these; cost reads neither
  int32_t slash_run_length = 1;             // neighbouring distances that are chosen together; 1 in cost
  double vertical_top_p = 1., slash_top_p = 1.;
  int64_t give_up = 0;                          // cost: mass of a list that may be missed, in units of kMassUnit
  double dense_above = 1.;                      // cost: density above which a list becomes dense
  int32_t seq_len = 0, num_blocks = 0;          // of the global sequence: they pad the lists
  int32_t vertical_width = 0, slash_width = 0;  // entries in a list
  int32_t chosen_width = 0;                     // of this rank's keys, in a list

  // Scores.
  Rows probe;                          // [B, P, Hq, D]
  Rows key;                            // [B, local tokens, Hkv, D]
  int32_t* part_exponents = nullptr;   // [num_splits, B * Hq, P]: see probe_sums.cuh
  int64_t* part_sums = nullptr;        // [kSlots, num_splits, B * Hq, P]
  const int32_t* exponents = nullptr;  // [B * Hq, P]: the largest of all parts and ranks; null: of the parts alone
  int64_t* sums = nullptr;             // [kSlots, B * Hq, P]: over all parts, then over all ranks
  float* weights = nullptr;            // [B * Hq, P, 2]: shift, weight: a key's probability over the document's rows
                                       //   is weight * 2^(shift + score in log2 units)

  // Mass. That of a list is, document by document, [slots_per_rank, 64].
  float* mass = nullptr;  // [ranks, num_halves, E, lists_per_rank, ...]: by the rank that will choose by
                          //   it; or exchanged, by the rank whose keys they are. Of a document whose rows
                          //   are in fewer halves, half of its mass in each
  ColumnChoice* column_choices = nullptr;  // [E, lists_per_rank]
  Threshold* verticals = nullptr;          // [E, lists_per_rank]
  const Threshold* thresholds = nullptr;   // [ranks, E, lists_per_rank]: every rank's verticals
  int32_t* num_chosen = nullptr;           // [ranks * lists_per_rank, E]: this rank's keys that are verticals; 0 before
  int32_t* chosen = nullptr;  // [ranks * lists_per_rank, E, chosen_width, 2]: local token and global block of each;
                              //   those of 32 key tiles are ascending and beside each other
  int64_t* distance_sums = nullptr;  // [ranks * lists_per_rank, order_blocks]: mass of each run of distances after the
                                     //   local ones, in units of kMassUnit; 0 before: that of all keys, then in a
                                     //   tensor of its own that of the verticals. Where lists are chosen it begins
                                     //   with the first of this rank, over the keys of all ranks
  const int64_t* column_sums = nullptr;  // the same of the verticals alone, for the choice of distances
  int32_t* lists = nullptr;              // [E, num_ranked, vertical_width + 1 + slash_width + 1]: list, count, twice
  int64_t list_stride_document = 0, list_stride = 0;
  float* rates = nullptr;    // the same without counts: rate of each entry, infinite where always selected and
                             //   0 behind the last; null: not wanted, and a list may become dense
  int64_t* pairs = nullptr;  // [E, num_ranked]: of each list; written with rates
  int64_t rate_stride_document = 0, rate_stride = 0, pair_stride_document = 0;

  // Tables.
  const ProbeDocument* documents = nullptr;  // [E]
  const RowTile* row_tiles = nullptr;
  const KeyTile* key_tiles = nullptr;     // [num_key_tiles], document by document
  const int32_t* positions = nullptr;     // [P], global; -1: padding
  const int32_t* unit_blocks = nullptr;   // [P / 8]: query block of a unit, global; INT32_MIN / 2: no rows
  const int32_t* block_order = nullptr;   // [order_blocks]: rank * slots_per_rank + slot, slots from the first_slot
  const int32_t* visible_rows = nullptr;  // [order_blocks]: probe rows at least so many blocks behind the document's
                                          //   first block, 1 where there are none
};

// Every field by its name in Python.
template <typename Bind>
void bind_fields(Bind& bind, const ProbeParams*) {
  using P = ProbeParams;
  bind("device", &P::device);
  bind("dtype", &P::dtype);
  bind("head_dim", &P::head_dim);
  bind("batch", &P::batch);
  bind("num_heads", &P::num_heads);
  bind("num_kv_heads", &P::num_kv_heads);
  bind("num_probe_rows", &P::num_probe_rows);
  bind("num_keys", &P::num_keys);
  bind("num_documents", &P::num_documents);
  bind("num_key_tiles", &P::num_key_tiles);
  bind("most_row_tiles", &P::most_row_tiles);
  bind("most_key_tiles", &P::most_key_tiles);
  bind("most_blocks", &P::most_blocks);
  bind("num_splits", &P::num_splits);
  bind("mass_blocks", &P::mass_blocks);
  bind("num_halves", &P::num_halves);
  bind("order_blocks", &P::order_blocks);
  bind("first_head", &P::first_head);
  bind("end_head", &P::end_head);
  bind("heads_per_list", &P::heads_per_list);
  bind("num_ranks", &P::num_ranks);
  bind("lists_per_rank", &P::lists_per_rank);
  bind("num_ranked", &P::num_ranked);
  bind("sink_tokens", &P::sink_tokens);
  bind("local_blocks", &P::local_blocks);
  bind("budget", &P::budget);
  bind("max_vertical", &P::max_vertical);
  bind("max_slash", &P::max_slash);
  bind("slash_run_length", &P::slash_run_length);
  bind("seq_len", &P::seq_len);
  bind("num_blocks", &P::num_blocks);
  bind("vertical_width", &P::vertical_width);
  bind("slash_width", &P::slash_width);
  bind("chosen_width", &P::chosen_width);
  bind("softmax_scale", &P::softmax_scale);
  bind("vertical_top_p", &P::vertical_top_p);
  bind("slash_top_p", &P::slash_top_p);
  bind("give_up", &P::give_up);
  bind("dense_above", &P::dense_above);
  bind("list_stride_document", &P::list_stride_document);
  bind("list_stride", &P::list_stride);
  bind("rate_stride_document", &P::rate_stride_document);
  bind("rate_stride", &P::rate_stride);
  bind("pair_stride_document", &P::pair_stride_document);
  bind("probe", &P::probe);
  bind("key", &P::key);
  bind("part_exponents", &P::part_exponents);
  bind("part_sums", &P::part_sums);
  bind("exponents", &P::exponents);
  bind("sums", &P::sums);
  bind("weights", &P::weights);
  bind("mass", &P::mass);
  bind("column_choices", &P::column_choices);
  bind("verticals", &P::verticals);
  bind("thresholds", &P::thresholds);
  bind("num_chosen", &P::num_chosen);
  bind("chosen", &P::chosen);
  bind("distance_sums", &P::distance_sums);
  bind("column_sums", &P::column_sums);
  bind("lists", &P::lists);
  bind("rates", &P::rates);
  bind("pairs", &P::pairs);
  bind("documents", &P::documents);
  bind("row_tiles", &P::row_tiles);
  bind("key_tiles", &P::key_tiles);
  bind("positions", &P::positions);
  bind("unit_blocks", &P::unit_blocks);
  bind("block_order", &P::block_order);
  bind("visible_rows", &P::visible_rows);
}

}  // namespace mtraining
