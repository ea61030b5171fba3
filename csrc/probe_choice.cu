// The passes beside those over scores: weights of the rows, the choice of columns and of distances.
#include "check.cuh"
#include "probe_search.cuh"
#include "probe_weights.cuh"

namespace mtraining::probe {
namespace {

constexpr int kMostCtas = 8;       // of a cluster, on every Hopper GPU
constexpr int kLinesOfCta = 8192;  // from which a list gets another CTA

// ---- lines -------------------------------------------------------------------------------------------------------

// Runs of distances behind the local ones, of which the last may be short.
__device__ __forceinline__ int num_runs(const ProbeParams& params, const ProbeDocument& document) {
  const int length = params.slash_run_length;
  return max(0, document.num_blocks - params.local_blocks + length - 1) / length;
}

// What chosen columns leave of a sum, if it is above 2^-kRoundingBits of it: 26 float32 roundings may be in the
// difference.
constexpr int kRoundingBits = 19;

__device__ __forceinline__ int64_t without_columns(int64_t sum, int64_t of_columns) {
  const int64_t left = sum - of_columns;
  return left > sum >> kRoundingBits ? left : 0;
}

// Runs of distances, or with the budget cost distances, behind the local ones.
struct DistanceLines {
  const ProbeParams& params;
  const ProbeDocument& document;
  const int64_t *sums, *of_columns;  // the latter null: columns are in

  __device__ __forceinline__ Line at(int run) const {
    const int64_t sum = of_columns ? without_columns(sums[run], of_columns[run]) : sums[run];
    float rate = static_cast<float>(sum * kMassUnit);
    if (params.budget == kBudgetCost) {
      const int rows = __ldg(params.visible_rows + document.first_of_order + params.local_blocks + run);
      rate = __fdiv_rn(rate, static_cast<float>(int64_t{kBlock} * rows));
    }
    return {bits_of(rate), sum, sum};
  }
  __device__ __forceinline__ int64_t pairs(int run) const {
    return int64_t{document.num_blocks - params.local_blocks - run} * (kBlock * kBlock);
  }
};

// Columns, and behind them distances.
struct ColumnLines {
  static __device__ __forceinline__ int64_t units(float mass) {
    return mass > 0.f ? __float2ll_rn(fminf(mass, 256.f) * kMassScale) : 0;
  }

  const ProbeParams& params;
  const ProbeDocument& document;
  int list;
  DistanceLines distances;

  __device__ __forceinline__ int num_columns() const { return document.num_blocks * kBlock; }

  __device__ __forceinline__ Line at(int line) const {
    if (line >= num_columns()) return distances.at(line - num_columns());
    const int block = line / kBlock;
    const ColumnMass mass = column_mass(params, mass_of_block(params, document, list, block) + line % kBlock);
    return {bits_of(column_rate(params, document, mass.competing, block)), units(mass.competing), units(mass.whole)};
  }
  __device__ __forceinline__ int64_t pairs(int column) const {
    return document.stop - (document.first_block * kBlock + column);
  }
};

// The mass that holds a share of all.
__device__ __forceinline__ int64_t share_of(double top_p, int64_t total) {
  return top_p < 1. ? static_cast<int64_t>(ceil(top_p * total)) : kAll;
}

constexpr int kTokensPerColumn = 16;  // of cost, at most: selection/budget.py

// ---- kernels -----------------------------------------------------------------------------------------------------

// A CtaGroup for each list of each document. `distance_sums` begins with the first list that this rank chooses.
__global__ void __launch_bounds__(kThreads) verticals_kernel(const __grid_constant__ ProbeParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const CtaGroup group = CtaGroup::current();
  const ProbeDocument& document = params.documents[blockIdx.y];
  const int list = blockIdx.x / group.size;
  const bool by_cost = params.budget == kBudgetCost;
  const int64_t* const sums = params.distance_sums + first_block_of(params, document, list);
  const ColumnLines lines = {params, document, list, {params, document, sums, nullptr}};
  const int num_columns = lines.num_columns(), length = document.stop - document.start;
  const int most = by_cost ? (length + kTokensPerColumn - 1) / kTokensPerColumn : params.max_vertical;
  Threshold threshold;
  Chosen chosen;
  int64_t target = 0;
  bool is_capped = false;  // cost: the columns of the largest rates, as many as there may be
#pragma unroll 1
  while (true) {
    const auto target_of = [&](int64_t total) {
      if (!by_cost) return share_of(params.vertical_top_p, total);
      return is_capped || params.give_up < 0 ? kAll : total - params.give_up;
    };
    const bool jointly = by_cost && !is_capped;
    const int num_lines = num_columns + (jointly ? num_runs(params, document) : 0);
    int64_t target_of_search;
    threshold = find_threshold(group, shared, lines, num_lines, num_columns, jointly ? INT_MAX : most, target_of,
                               target_of_search);
    if (!is_capped) target = target_of_search;
    chosen = count_chosen(group, shared, lines, num_columns, threshold);
    if (is_capped || chosen.count <= most) break;
    is_capped = true;
  }
  const int sinks = min(params.sink_tokens, length);
  const int64_t of_document = blockIdx.y;
  const List to = {
      params.lists + of_document * params.list_stride_document + list * params.list_stride,
      params.rates ? params.rates + of_document * params.rate_stride_document + list * params.rate_stride : nullptr,
      params.vertical_width,
      params.seq_len,
      document.start,
      sinks,
      document.first_block * kBlock,
      1,
      INT_MAX};
  write_list(group, lines, num_columns, to, threshold, chosen);
  if (group.rank > 0 || threadIdx.x > 0) return;
  const int64_t index = of_document * params.lists_per_rank + list;
  params.verticals[index] = threshold;
  if (!by_cost) return;
  params.column_choices[index] = {target == kAll ? kAll : target - chosen.mass,
                                  chosen.pairs + int64_t{sinks} * length - int64_t{sinks} * (sinks - 1) / 2};
}

// The same of distances, and of the list as a whole whether it is dense.
__global__ void __launch_bounds__(kThreads) slashes_kernel(const __grid_constant__ ProbeParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const CtaGroup group = CtaGroup::current();
  const ProbeDocument& document = params.documents[blockIdx.y];
  const int list = blockIdx.x / group.size, num_lines = num_runs(params, document);
  const bool by_cost = params.budget == kBudgetCost;
  const int64_t first_block = first_block_of(params, document, list);
  const DistanceLines lines = {params, document, params.distance_sums + first_block, params.column_sums + first_block};
  const int64_t of_document = blockIdx.y;
  const ColumnChoice columns =
      by_cost ? params.column_choices[of_document * params.lists_per_rank + list] : ColumnChoice{0, 0};
  const auto target_of = [&](int64_t total) { return by_cost ? columns.needed : share_of(params.slash_top_p, total); };
  int64_t target;
  Threshold threshold =
      find_threshold(group, shared, lines, num_lines, num_lines,
                     by_cost ? INT_MAX : params.max_slash / params.slash_run_length, target_of, target);
  Chosen chosen = count_chosen(group, shared, lines, num_lines, threshold);
  int always = min(params.local_blocks, document.num_blocks);
  int32_t* const entries = params.lists + of_document * params.list_stride_document + list * params.list_stride;
  if (by_cost) {
    const int64_t length = document.stop - document.start, causal = length * (length + 1) / 2;
    const int64_t local = int64_t{always} * document.num_blocks - int64_t{always} * (always - 1) / 2;
    const int64_t pairs = min(columns.pairs + chosen.pairs + local * (kBlock * kBlock), causal);
    if (params.rates) {
      if (threadIdx.x == 0) params.pairs[of_document * params.pair_stride_document + list] = pairs;
    } else if (pairs > params.dense_above * causal) {
      threshold = {kNothing, -1};
      chosen = {};
      always = document.num_blocks;
      for (int i = threadIdx.x; i < params.vertical_width; i += kThreads) entries[i] = params.seq_len;
      if (threadIdx.x == 0) entries[params.vertical_width] = 0;
    }
  }
  const List to = {entries + params.vertical_width + 1,
                   params.rates ? params.rates + of_document * params.rate_stride_document + list * params.rate_stride +
                                      params.vertical_width
                                : nullptr,
                   params.slash_width,
                   params.num_blocks,
                   0,
                   always,
                   params.local_blocks,
                   params.slash_run_length,
                   document.num_blocks};
  write_list(group, lines, num_lines, to, threshold, chosen);
}

// The chosen columns among this rank's keys, those of a warp in one key tile. Grid: key tiles of a document by kWarps,
// lists of the launch, documents. In which order CTAs come to write changes no result.
__global__ void __launch_bounds__(kThreads) chosen_kernel(const __grid_constant__ ProbeParams params) {
  __shared__ int first[kWarps];
  const ProbeDocument& document = params.documents[blockIdx.z];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int at = document.first_key_tile + static_cast<int>(blockIdx.x) * kWarps + warp;
  const int rank = blockIdx.y / params.lists_per_rank, list = blockIdx.y % params.lists_per_rank;
  uint32_t halves[2] = {};
  KeyTile tile = {};
  if (at < document.end_key_tile) {
    tile = params.key_tiles[at];
    const int64_t of_rank = int64_t{rank} * params.num_documents + blockIdx.z;
    const Threshold threshold = params.thresholds[of_rank * params.lists_per_rank + list];
    const int block = tile.block - document.first_block;
    const float* const mass = mass_of_slot(params, document, rank, list, tile.slot - document.first_slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = half * 32 + lane;
      const uint32_t bits = bits_of(column_rate(params, document, column_mass(params, mass + key).competing, block));
      halves[half] = __ballot_sync(~0u, bits > 0 && is_chosen(threshold, bits, block * kBlock + key));
    }
  }
  if (lane == 0) first[warp] = __popc(halves[0]) + __popc(halves[1]);
  __syncthreads();
  const int64_t of_list = int64_t{blockIdx.y} * params.num_documents + blockIdx.z;
  if (warp == 0) {
    const int own = first[lane], up_to = static_cast<int>(warp_prefix(own));
    const int before = lane == 31 && up_to > 0 ? atomicAdd(params.num_chosen + of_list, up_to) : 0;
    first[lane] = __shfl_sync(~0u, before, 31) + up_to - own;
  }
  __syncthreads();
  int to = first[warp];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t mask = halves[half];
    if (mask >> lane & 1)
      reinterpret_cast<int2*>(params.chosen)[of_list * params.chosen_width + to + __popc(mask & ((1u << lane) - 1))] = {
          tile.slot * kBlock + half * 32 + lane, tile.block};
    to += __popc(mask);
  }
}

// ---- launches ----------------------------------------------------------------------------------------------------

// `most_lines`: of a document. More CTAs work on a long list where the device has clusters and room for them.
const char* launch_lists(void (*kernel)(const ProbeParams), const ProbeParams& params, int64_t most_lines,
                         cudaStream_t stream) {
  int major, multiprocessors;
  if (const char* error = describe(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, params.device)))
    return error;
  if (const char* error =
          describe(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, params.device)))
    return error;
  if (const char* error =
          describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared))))
    return error;
  const int64_t lists = int64_t{params.num_ranked} * params.num_documents;
  unsigned ctas = 1;
  if (major == 9)  // code for sm_90a: other architectures run that without clusters
    while (ctas < kMostCtas && ctas * kLinesOfCta < most_lines && ctas * lists < 2 * multiprocessors) ctas *= 2;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {ctas, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(params.num_ranked * ctas, params.num_documents);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = ctas > 1 ? 1 : 0;
  return describe(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace

const char* launch_choice(ProbePass pass, const ProbeParams& params, cudaStream_t stream) {
  const auto divide = [](int64_t a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
  const int64_t rows = int64_t{params.batch} * params.num_heads * params.num_probe_rows;
  switch (pass) {
    case kProbeMerge:
      merge_kernel<<<divide(rows, 32), dim3(32, kPartThreads), 0, stream>>>(params);
      return launch_error();
    case kProbeWeights:
      weights_kernel<<<divide(rows, kWeightThreads), kWeightThreads, 0, stream>>>(params);
      return launch_error();
    case kProbeChosen: {
      const dim3 grid(divide(params.most_key_tiles, kWarps),
                      (params.end_head - params.first_head) / params.heads_per_list, params.num_documents);
      if (grid.x > 0) chosen_kernel<<<grid, kThreads, 0, stream>>>(params);
      return launch_error();
    }
    case kProbeVerticals:
      if (params.num_ranked == 0) return nullptr;
      return launch_lists(verticals_kernel, params, int64_t{params.most_blocks} * kBlock, stream);
    case kProbeSlashes:
      if (params.num_ranked == 0) return nullptr;
      return launch_lists(slashes_kernel, params, 0, stream);
    default: return "a pass over scores is launched by the kernels of a family";
  }
}

}  // namespace mtraining::probe
