// Entry point of the Hopper family: checks, tensor maps, scratch, and dispatch to an instantiation.
#include "launch.h"
#include "packed_parts.h"
#include "sm90_prepare.h"
#include "sm90_tensor_map.h"

namespace mtraining {
namespace sm90 {
namespace {

bool is_backward(Operation o) {
  return o == kSlashBackward || o == kVerticalBackward || o == kBackward || o == kListBackward;
}
bool has_lists(Operation o) { return o == kListForward || o == kListBackward; }
bool has_slashes(Operation o) { return o != kVerticalForward && o != kVerticalBackward; }
bool has_verticals(Operation o) { return o != kSlashForward && o != kSlashBackward && !has_lists(o); }

template <typename T, int kHeadDim>
const char* launch(const TensorMaps& maps, const KernelArguments& args, bool backward, cudaStream_t stream) {
  if (!backward) return launch_forward<T, kHeadDim>(maps, args, stream);
  if (wants_grad_query(args.params))
    if (const char* error = launch_grad_query<T, kHeadDim>(maps, args, stream)) return error;
  return wants_grad_key(args.params) ? launch_grad_key<T, kHeadDim>(maps, args, stream) : nullptr;
}

template <typename T>
const char* choose_head_dim(const TensorMaps& maps, const KernelArguments& args, bool backward, cudaStream_t stream) {
  switch (args.params.head_dim) {
    case 128: return launch<T, 128>(maps, args, backward, stream);
    case 64: return launch<T, 64>(maps, args, backward, stream);
    case 96: return launch<T, 96>(maps, args, backward, stream);
    default: return "the Hopper kernels have head_dim 64, 96 and 128";
  }
}

// Whether the gradients of packed rows are computed in parts, one for each query head, at the end of the scratch.
bool has_parts(Operation operation, const AttentionParams& params) {
  return is_backward(operation) && has_verticals(operation) && wants_grad_key(params) && params.num_column_tiles > 0 &&
         needs_parts(params, 1);
}

// The maps of all tensors that a launch reads by TMA.
bool encode_maps(TensorMaps& maps, const KernelArguments& args, bool backward) {
  const AttentionParams& p = args.params;
  bool good = encode_rows(maps.query, p, p.query, p.seq_q, p.num_heads, p.batch);
  if (args.slash)
    good = good && encode_rows(maps.key, p, p.key, p.seq_kv, p.num_kv_heads, p.batch) &&
           encode_rows(maps.value, p, p.value, p.seq_kv, p.num_kv_heads, p.batch);
  if (args.vertical) {
    const int rows = num_index_rows(p);
    good = good && encode_rows(maps.packed_key, p, p.packed_key, p.max_vertical, p.num_lists, rows) &&
           encode_rows(maps.packed_value, p, p.packed_value, p.max_vertical, p.num_lists, rows);
  }
  return good && (!backward || encode_rows(maps.grad_out, p, p.grad_out, p.seq_q, p.num_heads, p.batch));
}

}  // namespace
}  // namespace sm90

int64_t sm90_workspace_bytes(Operation operation, const AttentionParams& params) {
  const int64_t part_bytes = sm90::has_parts(operation, params) ? 2 * part_floats(params) * sizeof(float) : 0;
  return sm90::workspace_bytes(params, sm90::is_backward(operation)) + part_bytes;
}

const char* sm90_launch(Operation operation, const AttentionParams& params, void* stream_pointer) {
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  if (params.num_query_tiles == 0) return nullptr;
  if (const cudaError_t error = cudaSetDevice(params.device)) return cudaGetErrorString(error);
  const bool backward = sm90::is_backward(operation), in_parts = sm90::has_parts(operation, params);
  auto* const scratch = static_cast<uint8_t*>(params.workspace);
  const PackedParts parts = {reinterpret_cast<float*>(scratch + sm90::workspace_bytes(params, backward)), 1};
  sm90::KernelArguments args;
  args.params = in_parts ? into_parts(params, parts) : params;
  args.slash = sm90::has_slashes(operation) && params.seq_kv > 0;
  args.lists = sm90::has_lists(operation);
  args.vertical = sm90::has_verticals(operation) && params.num_column_tiles > 0;
  args.pairs_heads = heads_per_list(params) % 2 == 0;
  args.key_items = (params.num_key_tiles + 1) / 2 * sm90::items_per_pair(params);
  sm90::partition_workspace(args);
  sm90::TensorMaps maps = {};
  if (!sm90::encode_maps(maps, args, backward)) return "a tensor has strides that TMA cannot read";
  if (args.slash && !args.lists) sm90::fill_distance_bits(args, stream);
  if (backward) sm90::fill_statistics(args, stream);
  const auto run = params.dtype == kFloat16 ? sm90::choose_head_dim<__half> : sm90::choose_head_dim<__nv_bfloat16>;
  if (const char* error = run(maps, args, backward, stream)) return error;
  return in_parts ? sum_packed_parts(params, parts, stream) : nullptr;
}

}  // namespace mtraining
