// What every launcher takes. Plain structs of device pointers, strides and sizes: no CUDA and no framework header.
//
// Legend: B = batch, Sq / Sk = local query / key tokens, Hq / Hkv = heads, D = head_dim, R = index rows (the batch, or
// the packed documents), L = lists of the index, V = width of the vertical table. A "slot" is 64 consecutive tokens of a local tensor; a
// "block" is 64 consecutive positions of the global sequence. Strides count elements.
#pragma once
#include <cstdint>

namespace mtraining {

constexpr int kBlock = 64;  // tokens in a slot or block, and columns in a word

enum DType : int32_t { kBFloat16 = 0, kFloat16 = 1 };

// [batch, seq, heads, head_dim], head_dim contiguous, every row 16-byte aligned.
struct Rows {
  void* data = nullptr;
  int64_t stride_batch = 0, stride_seq = 0, stride_head = 0;
};

// float32 [batch, heads, seq], seq contiguous.
struct RowScalars {
  float* data = nullptr;
  int64_t stride_batch = 0, stride_head = 0;
};

// int32 [index rows, lists] or [index rows, lists, width], width contiguous; a stride is 0 where a table was expanded.
struct Table {
  const int32_t* data = nullptr;
  int64_t stride_row = 0, stride_list = 0;
};

// The rows of one slot that belong to one document. Every token of a local tensor is in exactly one tile; without
// packed documents a tile is a whole slot. Tables of tiles are sorted by document, then by block.
struct Tile {
  int32_t slot;         // where the 64 rows are in the local tensor
  int32_t block;        // which global block they are
  int32_t row_begin;    // rows row_begin..row_end - 1 of the slot are the tile's, 0..64; other rows are neither
  int32_t row_end;      //   written nor, where a previous result would be resumed, read
  int32_t index_row;    // document; the row of the index and of packed tensors is index_row + batch
  int32_t first_token;  // first global position of the document
  int32_t end_token;    // one past its last
  int32_t reserved;     // keeps a tile at 32 bytes
};

// Lists of int32 for every batch row and list of heads: what query blocks keep, or who keeps a chunk of keys. List i of
// row b and list l is entries starts[(b * L + l) * stride + i] up to starts[... + 1], ascending.
struct BlockLists {
  const int32_t* starts = nullptr;
  const int32_t* entries = nullptr;
  const uint64_t* row_masks = nullptr;  // for each entry the rows of its query block that see the keys; null: all
  int64_t stride = 0;
};

struct AttentionParams {
  // Sizes.
  int32_t device = 0;          // CUDA device that every pointer belongs to
  int32_t dtype = kBFloat16;   // of query, key, value, packed rows and grad_out
  int32_t head_dim = 0;        // 64, 96 or 128
  int32_t batch = 0;           // 1 with packed documents
  int32_t seq_q = 0, seq_kv = 0;
  int32_t num_heads = 0, num_kv_heads = 0;
  int32_t num_lists = 0;       // L: Hq, or Hkv. Query head h has list h / (Hq / L)
  int32_t num_blocks = 0;      // blocks of the global sequence, a short last one included
  int32_t num_documents = 1;   // 1 when each batch row is one document
  int32_t num_query_tiles = 0, num_key_tiles = 0;
  int32_t max_vertical = 0;    // V
  int32_t num_words = 0;       // ceil(V / 64)
  int32_t chunk_blocks = 1;    // blocks in a chunk of keys that block lists name
  int32_t resume = 0;          // 1 = out and lse, or grad_query, hold what to go on from; 0 = they hold garbage
  float softmax_scale = 1.f;   // positive

  // Inputs.
  Rows query;                  // [B, Sq, Hq, D]
  Rows key, value;             // [B, Sk, Hkv, D]
  Rows packed_key;             // [R, V, L, D]: row j of a list is the key at vertical[row][list][j];
  Rows packed_value;           //   rows past a list's count are finite
  Rows grad_out;               // [B, Sq, Hq, D]
  RowScalars delta;            // sum(grad_out * out) - grad_lse

  // Results, written whole: float32, but of dtype those called final.
  Rows out;                    // [B, Sq, Hq, D]: read with resume; where lse is -inf it may hold anything
  Rows final_out;              // written in the place of out by the last step; else a null address
  RowScalars lse;              // natural logarithm; -inf in a row without keys. Read only in a backward
  Rows grad_query;             // [B, Sq, Hq, D]: read with resume
  Rows final_grad_query;       // written in the place of grad_query by the last step; else a null address
  Rows grad_key, grad_value;   // [B, Sk, Hkv, D], of this launch's pairs alone
  Rows final_grad_key;         // unpack_vertical_grad: the sums with what the packed rows bring
  Rows final_grad_value;
  Rows grad_packed_key;        // [R, V, L, D]: the sums over the heads of a list, in their order
  Rows grad_packed_value;

  // The index, as VerticalSlashIndex holds it.
  Table vertical;              // [R, L, V] positions, ascending
  Table num_vertical;          // [R, L]
  Table slash;                 // [R, L, *] block distances, ascending from 0
  Table num_slash;             // [R, L]

  // In their place the index as BlockListIndex holds it, and its transpose for the gradients of keys.
  BlockLists query_lists;      // by query slot: chunks of keys
  BlockLists key_lists;        // by chunk of keys: global query blocks

  // Geometry, from the host side's BlockGeometry.
  const Tile* query_tiles = nullptr;        // [num_query_tiles]
  const Tile* key_tiles = nullptr;          // [num_key_tiles]
  const int32_t* query_slots = nullptr;     // [num_blocks]: slot of each global block in query, or -1
  const int32_t* key_slots = nullptr;       // [num_blocks]: slot of each global block in key and value, or -1
  const int32_t* document_tiles = nullptr;  // [num_documents + 1]: first query tile of each document

  // [B, L, num_query_tiles, num_words]: bit c of word w: the tile's rows may use packed column 64 * w + c, because it
  // lies in the tile's document, in an earlier block, and in no slash. Filled by fill_vertical_words.
  uint64_t* vertical_words = nullptr;

  void* workspace = nullptr;  // workspace_bytes(operation, params) bytes of scratch, 256-byte aligned, no initial value
};

// Which passes a backward makes: that over queries, that over keys, or both; of the other the results have no address.
inline bool wants_grad_query(const AttentionParams& params) {
  return params.grad_query.data || params.final_grad_query.data;
}
inline bool wants_grad_key(const AttentionParams& params) {
  return params.grad_key.data || params.grad_packed_key.data;
}

// delta = sum(grad_out * out) - grad_lse, row by row.
struct DeltaParams {
  int32_t device = 0, dtype = kBFloat16;
  int32_t batch = 0, seq = 0, num_heads = 0, head_dim = 0;
  Rows grad_out, out;   // [batch, seq, num_heads, head_dim], both of dtype
  RowScalars grad_lse;  // a null address where lse has no gradient
  RowScalars delta;     // the result
};

}  // namespace mtraining
