// The arguments of every launcher: structs of device pointers, strides and sizes, free of CUDA and framework headers.
//
// Legend: B = batch, Sq / Sk = local query / key tokens, Hq / Hkv = heads, D = head_dim, R = index rows (the batch, or
// the packed documents), L = lists of the index, V = width of the vertical table, C = column tiles: ceil(V / 64). A
// "slot" is 64 consecutive tokens of a local tensor; a "block" is 64 consecutive positions of the global sequence; a
// "column tile" is 64 consecutive packed columns. Strides count elements.
#pragma once
#include <cstdint>

namespace mtraining {

constexpr int kBlock = 64;  // tokens in a slot or block, columns in a column tile

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
  int32_t slot;       // of the 64 rows in the local tensor
  int32_t block;      // of the 64 rows in the global sequence
  int32_t row_begin;  // rows row_begin..row_end - 1 of the slot belong to the tile; other rows are neither written nor,
  int32_t row_end;    //   with `resume`, read
  int32_t index_row;  // document; the row of the index and of packed tensors is index_row + batch
  int32_t first_token;  // first global position of the document
  int32_t end_token;    // one past its last
  int32_t reserved;     // keeps a tile at 32 bytes
};

// Lists of int32 for every batch row and list of heads: the key chunks of each query block, or the query blocks of each
// key chunk. List i of row b and list l is entries starts[(b * L + l) * stride + i] to starts[... + 1], ascending.
struct BlockLists {
  const int32_t* starts = nullptr;
  const int32_t* entries = nullptr;
  const uint64_t* row_masks = nullptr;  // of each entry: the rows of its query block that attend to the keys; null: all
  int64_t stride = 0;
};

struct AttentionParams {
  // Sizes.
  int32_t device = 0;         // CUDA device of every pointer
  int32_t dtype = kBFloat16;  // of query, key, value, packed rows and grad_out
  int32_t head_dim = 0;       // 64, 96 or 128
  int32_t batch = 0;          // 1 with packed documents
  int32_t seq_q = 0, seq_kv = 0;
  int32_t num_heads = 0, num_kv_heads = 0;
  int32_t num_lists = 0;      // L: Hq, or Hkv. Query head h has list h / (Hq / L)
  int32_t num_blocks = 0;     // blocks of the global sequence, including a partial last one
  int32_t num_documents = 1;  // 1 when each batch row is one document
  int32_t num_query_tiles = 0, num_key_tiles = 0;
  int32_t max_vertical = 0;      // V
  int32_t num_column_tiles = 0;  // C
  int32_t chunk_blocks = 1;      // blocks in a key chunk of the block lists
  int32_t resume = 0;            // 1: out and lse, or grad_query, hold the previous result; 0: they are uninitialized
  float softmax_scale = 1.f;     // positive

  // Inputs.
  Rows query;         // [B, Sq, Hq, D]
  Rows key, value;    // [B, Sk, Hkv, D]
  Rows packed_key;    // [R, V, L, D]: row j of a list is the key at vertical[row][list][j];
  Rows packed_value;  //   rows past a list's count are finite
  Rows grad_out;      // [B, Sq, Hq, D]
  RowScalars delta;   // sum(grad_out * out) - grad_lse

  // Results, written whole: in float32, the final ones in dtype.
  Rows out;                   // [B, Sq, Hq, D]: read with resume, where lse is not -inf
  Rows final_out;             // written instead of out by the last step; else a null address
  RowScalars lse;             // natural logarithm; -inf in a row without keys. Read only in a backward
  Rows grad_query;            // [B, Sq, Hq, D]: read with resume
  Rows final_grad_query;      // written instead of grad_query by the last step; else a null address
  Rows grad_key, grad_value;  // [B, Sk, Hkv, D], of this launch's pairs alone
  Rows final_grad_key;        // unpack_vertical_grad: the sums including the gradients of packed rows
  Rows final_grad_value;
  Rows grad_packed_key;  // [R, V, L, D]: the sums over the heads of a list, in order of heads
  Rows grad_packed_value;

  // The index, as in VerticalSlashIndex.
  Table vertical;      // [R, L, V] positions, ascending
  Table num_vertical;  // [R, L]
  Table slash;         // [R, L, *] block distances, ascending from 0
  Table num_slash;     // [R, L]

  // Alternatively the index as in BlockListIndex, and its transpose for the gradients of keys.
  BlockLists query_lists;  // by query slot: key chunks
  BlockLists key_lists;    // by key chunk: global query blocks

  // Geometry, as in BlockGeometry.
  const Tile* query_tiles = nullptr;        // [num_query_tiles]
  const Tile* key_tiles = nullptr;          // [num_key_tiles]
  const int32_t* query_slots = nullptr;     // [num_blocks]: slot of each global block in query, or -1
  const int32_t* key_slots = nullptr;       // [num_blocks]: slot of each global block in key and value, or -1
  const int32_t* document_tiles = nullptr;  // [num_documents + 1]: first query tile of each document

  // [B, L, num_query_tiles, C]: bit c of column tile w: the query tile attends to packed column 64 * w + c, which lies
  // in its document, in an earlier block, and in no slash. Filled by fill_vertical_bitmask.
  uint64_t* vertical_bitmask = nullptr;

  void* workspace = nullptr;  // workspace_bytes(operation, params) bytes of scratch, 256-byte aligned, uninitialized
};

// Every field by its name in Python. A name with two fields takes one tensor of key and value: [2, ...].
template <typename Bind>
void bind_fields(Bind& bind, const AttentionParams*) {
  using P = AttentionParams;
  bind("device", &P::device);
  bind("dtype", &P::dtype);
  bind("head_dim", &P::head_dim);
  bind("batch", &P::batch);
  bind("seq_q", &P::seq_q);
  bind("seq_kv", &P::seq_kv);
  bind("num_heads", &P::num_heads);
  bind("num_kv_heads", &P::num_kv_heads);
  bind("num_lists", &P::num_lists);
  bind("num_blocks", &P::num_blocks);
  bind("num_documents", &P::num_documents);
  bind("num_query_tiles", &P::num_query_tiles);
  bind("num_key_tiles", &P::num_key_tiles);
  bind("max_vertical", &P::max_vertical);
  bind("num_column_tiles", &P::num_column_tiles);
  bind("chunk_blocks", &P::chunk_blocks);
  bind("resume", &P::resume);
  bind("softmax_scale", &P::softmax_scale);
  bind("query", &P::query);
  bind("key", &P::key);
  bind("value", &P::value);
  bind.packed("packed", &P::packed_key, &P::packed_value);
  bind("grad_out", &P::grad_out);
  bind("delta", &P::delta);
  bind("out", &P::out);
  bind("final_out", &P::final_out);
  bind("lse", &P::lse);
  bind("grad_query", &P::grad_query);
  bind("final_grad_query", &P::final_grad_query);
  bind("grad_keys", &P::grad_key, &P::grad_value);
  bind("final_grad_keys", &P::final_grad_key, &P::final_grad_value);
  bind.packed("grad_packed", &P::grad_packed_key, &P::grad_packed_value);
  bind("vertical", &P::vertical);
  bind("num_vertical", &P::num_vertical);
  bind("slash", &P::slash);
  bind("num_slash", &P::num_slash);
  bind("query_lists", &P::query_lists);
  bind("key_lists", &P::key_lists);
  bind("query_tiles", &P::query_tiles);
  bind("key_tiles", &P::key_tiles);
  bind("query_slots", &P::query_slots);
  bind("key_slots", &P::key_slots);
  bind("document_tiles", &P::document_tiles);
  bind("vertical_bitmask", &P::vertical_bitmask);
  bind("workspace", &P::workspace);
}

// The passes of a backward: over queries, over keys, or both. The results of a pass that is not made have no address.
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

template <typename Bind>
void bind_fields(Bind& bind, const DeltaParams*) {
  using P = DeltaParams;
  bind("device", &P::device);
  bind("dtype", &P::dtype);
  bind("batch", &P::batch);
  bind("seq", &P::seq);
  bind("num_heads", &P::num_heads);
  bind("head_dim", &P::head_dim);
  bind("grad_out", &P::grad_out);
  bind("out", &P::out);
  bind("grad_lse", &P::grad_lse);
  bind("delta", &P::delta);
}

}  // namespace mtraining
