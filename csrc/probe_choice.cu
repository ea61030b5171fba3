// From mass to lists: the fewest items that hold a share of a lane's mass, at most so many, ties to the lower position.
//
// The threshold is found digit by digit over the bits of the masses, from histograms of counts and of mantissas. Those
// are integers, so their sums are exact and do not depend on the order in which threads come.
#include <climits>

#include "check.cuh"
#include "probe_passes.h"
#include "probe_place.cuh"
#include "probe_sums.cuh"

namespace mtraining::probe {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kSmallThreads = 256;
constexpr int kBins = 256;
constexpr int kMantissaBits = 23;
constexpr uint32_t kNothing = ~0u;  // a threshold that no mass reaches

// ---- from sums to weights ---------------------------------------------------------------------------------------

constexpr int kPartThreads = 8;  // on a row

// Adds up the parts of a row's sums, against the exponent of all ranks. Grid: rows of all lanes, 32 a CTA.
__global__ void __launch_bounds__(32 * kPartThreads) merge_kernel(const __grid_constant__ ProbeParams params) {
  __shared__ long long shared[kPartThreads][kSlots][32];
  const int64_t rows = int64_t{params.batch} * params.num_heads * params.num_probe_rows;
  const int64_t row = int64_t{blockIdx.x} * 32 + threadIdx.x;  // P is a multiple of 64
  const int exponent = params.exponents[row];
  long long sums[kSlots] = {};
#pragma unroll 2
  for (int part = threadIdx.y; part < params.num_splits; part += kPartThreads) {
    const int down = exponent - params.part_exponents[part * rows + row];
    const int64_t* const from = params.part_sums + part * rows + row;
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
      if (i >= down) sums[i] += from[(i - down) * params.num_splits * rows];
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) shared[threadIdx.y][i][threadIdx.x] = sums[i];
  __syncthreads();
  if (threadIdx.y >= kSlots) return;
  long long sum = 0;
#pragma unroll
  for (int i = 0; i < kPartThreads; ++i) sum += shared[i][threadIdx.y][threadIdx.x];
  params.sums[threadIdx.y * rows + row] = sum;
}

// 2^x for x in the range of a double's exponent.
__device__ __forceinline__ double power_of_two(int x) { return __longlong_as_double(int64_t{x + 1023} << 52); }

// What a key's probability is made of; nothing for padding and for a row without keys. Grid: rows of all lanes.
__global__ void __launch_bounds__(kSmallThreads) weights_kernel(const __grid_constant__ ProbeParams params) {
  const int64_t rows = int64_t{params.batch} * params.num_heads * params.num_probe_rows;
  const int64_t row = int64_t{blockIdx.x} * kSmallThreads + threadIdx.x;
  if (row >= rows) return;
  double sum = 0.;  // in units of 2^(16 * exponent)
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
    sum += params.sums[i * rows + row] * power_of_two(-kMantissaBits - (i << kSlotBits));
  const int probe_row = row % params.num_probe_rows;
  float2 weight = {-INFINITY, 0.f};
  if (sum > 0. && params.positions[probe_row] >= 0) {
    const int power = ilogb(sum);
    const double share = sum * power_of_two(-power) * params.row_tiles[probe_row / kTileRows].rows_of_document;
    weight = {-static_cast<float>((params.exponents[row] << kSlotBits) + power), static_cast<float>(1. / share)};
  }
  reinterpret_cast<float2*>(params.weights)[row] = weight;
}

// ---- columns and what the verticals leave -------------------------------------------------------------------------

// A thread copies four neighbouring columns. Grid: columns, ranked lanes, documents.
__global__ void __launch_bounds__(kSmallThreads) columns_kernel(const __grid_constant__ ProbeParams params) {
  const ProbeDocument& document = params.documents[blockIdx.z];
  const int column = (blockIdx.x * kSmallThreads + threadIdx.x) * 4, block = column / kBlock, lane = blockIdx.y;
  if (block >= document.num_blocks) return;
  const float* const mass = mass_of_block(params, document, lane, block) + column % kBlock;
  float* const columns = params.columns + first_block_of(params, document, lane) * kBlock;
  *reinterpret_cast<float4*>(columns + column) = *reinterpret_cast<const float4*>(mass);
}

__device__ __forceinline__ uint32_t bits_of(float mass) { return mass > 0.f ? __float_as_uint(mass) : 0; }

__device__ __forceinline__ bool is_chosen(const Threshold& threshold, uint32_t bits, int item) {
  return bits > threshold.bits || (bits == threshold.bits && item <= threshold.last_tie);
}

// A warp finds what is left of one slot's keys. Grid: key tiles of a document, lists of the launch, documents.
__global__ void __launch_bounds__(kSmallThreads) left_kernel(const __grid_constant__ ProbeParams params) {
  const ProbeDocument& document = params.documents[blockIdx.z];
  const int at = document.first_key_tile + (blockIdx.x * kSmallThreads + threadIdx.x) / 32, list = blockIdx.y;
  if (at >= document.end_key_tile) return;
  const KeyTile& tile = params.key_tiles[at];
  const int rank = list / params.lists_per_rank, lane = list % params.lists_per_rank;
  const int64_t of_rank = int64_t{rank} * params.num_documents + blockIdx.z;
  const Threshold threshold = params.thresholds[of_rank * params.lists_per_rank + lane];
  const int slot = tile.slot - document.first_slot;
  const float* const mass = mass_of_slot(params, document, rank, lane, slot);
  const int begin = max(tile.begin, document.start + params.sink_tokens - tile.block * kBlock);
  uint32_t words[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = half * 32 + threadIdx.x % 32;
    const int item = (tile.block - document.first_block) * kBlock + key;
    words[half] = __ballot_sync(
        ~0u, begin <= key && key < tile.end && !is_chosen(threshold, bits_of(mass[key]), item));
  }
  if (threadIdx.x % 32 == 0)
    params.left[int64_t{list} * params.mass_blocks + document.first_mass_block + slot] =
        words[0] | uint64_t{words[1]} << 32;
}

// ---- the threshold ---------------------------------------------------------------------------------------------

constexpr int kMostItems = 1 << 25;  // 2^12 for each of a copy's items are no more than 2^32

// A copy for each lane of a warp, in a bank of its own. Mantissas are added as two halves of 12 bits.
struct Histogram {
  uint32_t count[kBins][32], low[kBins][32], high[kBins][32];

  // What reduce_histogram leaves: items of a bin, and their mass.
  __device__ __forceinline__ uint32_t& items(int bin) { return count[bin][0]; }
  __device__ __forceinline__ double& mass(int bin) { return *reinterpret_cast<double*>(low[bin]); }
};

struct Shared {
  uint32_t digit;           // what a search found: the digit that the threshold has,
  uint32_t taken, ties;     //   items above it, and items that have it
  double before;            //   and the mass of those above
  double target;
  bool found;
  int larger[kWarps], equal[kWarps];  // items of each warp's share of the list
};

struct Items {
  const float* mass;
  int count;
};

// The unit of the mantissas of floats with this exponent field; denormals have that of field 1.
__device__ __forceinline__ double mantissa_unit(uint32_t exponent) {
  return power_of_two(max(static_cast<int>(exponent), 1) - 127 - kMantissaBits);
}

// Counts the items whose bits begin with `prefix`, by the digit that follows.
__device__ void fill_histogram(Histogram& histogram, const Items& items, uint32_t prefix, int shift, int bits) {
  uint32_t* const words = &histogram.count[0][0];
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Histogram) / 4); i += kThreads) words[i] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32;
#pragma unroll 8
  for (int i = threadIdx.x; i < items.count; i += kThreads) {
    const uint32_t value = bits_of(items.mass[i]);
    if (value == 0 || (value >> shift) >> bits != prefix) continue;
    const uint32_t digit = (value >> shift) & ((1u << bits) - 1);
    const uint32_t mantissa = (value & 0x7fffff) | (value >> kMantissaBits ? 0x800000 : 0);
    atomicAdd(&histogram.count[digit][lane], 1u);
    atomicAdd(&histogram.low[digit][lane], mantissa & 0xfff);
    atomicAdd(&histogram.high[digit][lane], mantissa >> 12);
  }
  __syncthreads();
}

// Adds up the copies. All items of a bin have one exponent: the digit's, or that of the prefix.
__device__ void reduce_histogram(Histogram& histogram, uint32_t exponent, bool is_exponent) {
  const int lane = threadIdx.x % 32;
  for (int bin = threadIdx.x / 32; bin < kBins; bin += kWarps) {
    const uint32_t items = __reduce_add_sync(~0u, histogram.count[bin][lane]);
    double mantissas = histogram.low[bin][lane] + 4096. * histogram.high[bin][lane];  // exact, and so are the sums
#pragma unroll
    for (int step = 16; step > 0; step /= 2) mantissas += __shfl_xor_sync(~0u, mantissas, step);
    __syncwarp();  // the mass takes two words of `low`, and shuffles do not order lane 1's read of the second
    if (lane == 0) {
      histogram.items(bin) = items;
      histogram.mass(bin) = mantissas * mantissa_unit(is_exponent ? bin : exponent);
    }
  }
  __syncthreads();
}

// One warp walks the bins from the largest down, eight to a thread, to the one in which the target or the cap is
// reached. Where none is, because sums of floats were rounded another way, the last bin that has items ends a prefix.
__device__ void find_digit(Shared& shared, Histogram& histogram, double top_p, uint32_t at_most, bool is_first) {
  constexpr int kBinsOfThread = kBins / 32;
  const int lane = threadIdx.x, top = kBins - 1 - lane * kBinsOfThread;
  double mass = 0., own = 0.;
  uint32_t count = 0, own_count = 0;
  for (int i = 0; i < kBinsOfThread; ++i) {
    own += histogram.mass(top - i);
    own_count += histogram.items(top - i);
  }
  mass = own;
  count = own_count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const double other = __shfl_up_sync(~0u, mass, step);
    const uint32_t others = __shfl_up_sync(~0u, count, step);
    if (lane >= step) mass += other, count += others;
  }
  const double total = __shfl_sync(~0u, mass, 31);
  if (is_first && lane == 0) shared.target = top_p < 1. ? top_p * total : INFINITY;
  __syncwarp();
  double before = __shfl_up_sync(~0u, mass, 1);
  uint32_t taken = (is_first ? 0 : shared.taken) + count - own_count;
  before = (is_first ? 0. : shared.before) + (lane > 0 ? before : 0.);
  __syncwarp();
  int reached = -1, last = -1;
  double before_last = 0., before_reached = 0.;
  uint32_t taken_last = 0, taken_reached = 0;
  for (int i = 0; i < kBinsOfThread; ++i) {
    const uint32_t items = histogram.items(top - i);
    if (items == 0) continue;
    last = top - i, before_last = before, taken_last = taken;
    before += histogram.mass(top - i);
    taken += items;
    if (reached < 0 && (before >= shared.target || taken >= at_most))
      reached = last, before_reached = before_last, taken_reached = taken_last;
  }
  const unsigned reaching = __ballot_sync(~0u, reached >= 0), filled = __ballot_sync(~0u, last >= 0);
  const bool use_last = !reaching && !is_first;
  const int chosen = reaching ? __ffs(reaching) - 1 : 31 - __clz(filled);
  const bool found = reaching || (use_last && filled);
  if (lane == 0) shared.found = found;
  if (lane == chosen && found) {
    shared.digit = use_last ? last : reached;
    shared.before = use_last ? before_last : before_reached;
    shared.taken = use_last ? taken_last : taken_reached;
    shared.ties = histogram.items(use_last ? last : reached);
  }
}

// The bits that the last items of the choice have, and how many of these are in, from the lowest position on.
__device__ void find_threshold(Shared& shared, Histogram& histogram, const Items& items, double top_p, int at_most,
                               uint32_t& bits, int& ties) {
  bits = kNothing, ties = 0;
  if (at_most <= 0) return;
  constexpr int kDigits = 4;  // the exponent, then 8, 8 and 7 bits of the mantissa
  uint32_t prefix = 0;
#pragma unroll 1
  for (int digit = 0; digit < kDigits; ++digit) {
    const int shift = max(0, kMantissaBits - 8 * digit), width = digit == kDigits - 1 ? 7 : 8;
    fill_histogram(histogram, items, prefix, shift, width);
    const uint32_t exponent = digit == 0 ? 0 : prefix >> (kMantissaBits - shift - width);
    reduce_histogram(histogram, exponent, digit == 0);
    if (threadIdx.x < 32) find_digit(shared, histogram, top_p, at_most, digit == 0);
    __syncthreads();
    if (!shared.found) {  // every item with mass is in
      bits = 0;
      return;
    }
    prefix = prefix << width | shared.digit;
    __syncthreads();
  }
  bits = prefix;
  const double one = __uint_as_float(bits), lacking = ceil((shared.target - shared.before) / one);
  const double most = min(shared.ties, static_cast<uint32_t>(at_most) - shared.taken);
  ties = static_cast<int>(fmin(fmax(lacking, 1.), most));
}

// ---- lists -----------------------------------------------------------------------------------------------------

struct List {
  int32_t* entries;
  int width, padding;   // the count stands at [width]
  int first, kept;      // entries first .. first + kept - 1 stand in front
  int offset;           // item i is entries offset + i * length and those after it,
  int length, end;      // `length` of them, the last item as far as they are below `end`
};

// Writes the list and returns, in the thread that meets it, the last tie that is in; elsewhere -1.
__device__ int write_list(Shared& shared, const Items& items, const List& list, uint32_t bits, int ties) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int share = (items.count + kThreads - 1) / kThreads * 32;  // items of a warp
  const int begin = min(warp * share, items.count), end = min(begin + share, items.count);
  int larger = 0, equal = 0;
#pragma unroll 4
  for (int i = begin + lane; i < end; i += 32) {
    const uint32_t value = bits_of(items.mass[i]);
    larger += value > bits;
    equal += value == bits && ties > 0;
  }
  larger = __reduce_add_sync(~0u, larger);
  equal = __reduce_add_sync(~0u, equal);
  if (lane == 0) shared.larger[warp] = larger, shared.equal[warp] = equal;
  __syncthreads();
  larger = __reduce_add_sync(~0u, lane < warp ? shared.larger[lane] : 0);
  equal = __reduce_add_sync(~0u, lane < warp ? shared.equal[lane] : 0);
  const int all_equal = __reduce_add_sync(~0u, shared.equal[lane]);
  const int chosen = __reduce_add_sync(~0u, shared.larger[lane]) + min(ties, all_equal);
  const int past_end = max(0, list.offset + items.count * list.length - list.end);  // entries that the last item lacks
  const uint32_t last = items.count > 0 ? bits_of(items.mass[items.count - 1]) : 0;
  const bool last_chosen = items.count > 0 && (last > bits || (last == bits && ties > 0 && all_equal <= ties));
  const unsigned below = (1u << lane) - 1;
  int last_tie = -1;
#pragma unroll 4
  for (int first = begin; first < end; first += 32) {
    const uint32_t value = first + lane < end ? bits_of(items.mass[first + lane]) : 0;
    const bool is_larger = value > bits, is_equal = first + lane < end && value == bits && ties > 0;
    const unsigned larger_mask = __ballot_sync(~0u, is_larger), equal_mask = __ballot_sync(~0u, is_equal);
    const int tie = equal + __popc(equal_mask & below);
    if (is_larger || (is_equal && tie < ties)) {
      const int place = larger + __popc(larger_mask & below) + min(tie, ties);
      const int entry = list.offset + (first + lane) * list.length;
      for (int i = 0; i < list.length && entry + i < list.end; ++i)
        list.entries[list.kept + place * list.length + i] = entry + i;
    }
    if (is_equal && tie == ties - 1) last_tie = first + lane;
    larger += __popc(larger_mask);
    equal += __popc(equal_mask);
  }
  const int count = list.kept + chosen * list.length - (last_chosen ? past_end : 0);
  for (int i = threadIdx.x; i < list.kept; i += kThreads) list.entries[i] = list.first + i;
  for (int i = count + threadIdx.x; i < list.width; i += kThreads) list.entries[i] = list.padding;
  if (threadIdx.x == 0) list.entries[list.width] = count;
  return last_tie;
}

// One lane of one document a CTA.
__global__ void __launch_bounds__(kThreads) verticals_kernel(const __grid_constant__ ProbeParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared shared;
  const ProbeDocument& document = params.documents[blockIdx.y];
  const int lane = blockIdx.x;
  const Items items = {params.columns + first_block_of(params, document, lane) * kBlock,
                       document.num_blocks * kBlock};
  int32_t* const entries =
      params.lists + blockIdx.y * params.list_stride_document + lane * params.list_stride_lane;
  const List list = {entries, params.vertical_width, params.seq_len, document.start,
                     min(params.sink_tokens, document.stop - document.start), document.first_block * kBlock,
                     1, INT_MAX};
  uint32_t bits;
  int ties;
  find_threshold(shared, *reinterpret_cast<Histogram*>(memory), items, params.vertical_top_p, params.max_vertical,
                 bits, ties);
  const int last_tie = write_list(shared, items, list, bits, ties);
  Threshold* const threshold = params.verticals + blockIdx.y * params.lists_per_rank + lane;
  if (threadIdx.x == 0) threshold->bits = bits;
  if (ties == 0 ? threadIdx.x == 0 : last_tie >= 0) threshold->last_tie = last_tie;
}

// Runs of distances behind the local ones, of which the last may be short.
__device__ __forceinline__ int num_runs(const ProbeParams& params, const ProbeDocument& document) {
  const int length = params.slash_run_length;
  return max(0, document.num_blocks - params.local_blocks + length - 1) / length;
}

// The same of distances. `distance_sums` begins with the first list that this rank ranks.
__global__ void __launch_bounds__(kThreads) slashes_kernel(const __grid_constant__ ProbeParams params) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Shared shared;
  const ProbeDocument& document = params.documents[blockIdx.y];
  const int lane = blockIdx.x;
  const Items items = {params.distances + first_block_of(params, document, lane), num_runs(params, document)};
  const int64_t* const sums = params.distance_sums + first_block_of(params, document, lane);
  for (int i = threadIdx.x; i < items.count; i += kThreads)
    params.distances[first_block_of(params, document, lane) + i] = static_cast<float>(sums[i] * kDistanceUnit);
  __syncthreads();
  int32_t* const entries = params.lists + blockIdx.y * params.list_stride_document +
                           lane * params.list_stride_lane + params.vertical_width + 1;
  const List list = {entries, params.slash_width, params.num_blocks, 0,
                     min(params.local_blocks, document.num_blocks), params.local_blocks,
                     params.slash_run_length, document.num_blocks};
  uint32_t bits;
  int ties;
  find_threshold(shared, *reinterpret_cast<Histogram*>(memory), items, params.slash_top_p,
                 params.max_slash / params.slash_run_length, bits, ties);
  write_list(shared, items, list, bits, ties);
}

const char* launch_lists(void (*kernel)(const ProbeParams), const ProbeParams& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Histogram);
  if (const char* error =
          describe(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  kernel<<<dim3(params.num_ranked, params.num_documents), kThreads, kBytes, stream>>>(params);
  return launch_error();
}

}  // namespace

const char* launch_choice(ProbePass pass, const ProbeParams& params, cudaStream_t stream) {
  const auto divide = [](int64_t a, int b) { return static_cast<unsigned>((a + b - 1) / b); };
  const int64_t rows = int64_t{params.batch} * params.num_heads * params.num_probe_rows;
  if (pass == kProbeMerge) {
    merge_kernel<<<divide(rows, 32), dim3(32, kPartThreads), 0, stream>>>(params);
    return launch_error();
  }
  if (pass == kProbeWeights) {
    weights_kernel<<<divide(rows, kSmallThreads), kSmallThreads, 0, stream>>>(params);
    return launch_error();
  }
  if (pass == kProbeLeft) {
    const dim3 grid(divide(params.most_key_tiles, kSmallThreads / 32),
                    (params.end_lane - params.first_lane) / params.heads_per_list, params.num_documents);
    if (grid.x > 0) left_kernel<<<grid, kSmallThreads, 0, stream>>>(params);
    return launch_error();
  }
  if (params.num_ranked == 0) return nullptr;
  if (params.most_blocks > kMostItems / kBlock) return "documents of more than 33554432 tokens are not ranked";
  if (pass == kProbeVerticals) return launch_lists(verticals_kernel, params, stream);
  if (pass == kProbeSlashes) return launch_lists(slashes_kernel, params, stream);
  const dim3 grid(divide(int64_t{params.most_blocks} * kBlock, 4 * kSmallThreads), params.num_ranked,
                  params.num_documents);
  columns_kernel<<<grid, kSmallThreads, 0, stream>>>(params);
  return launch_error();
}

}  // namespace mtraining::probe
