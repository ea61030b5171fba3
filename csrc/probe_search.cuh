// Choice of lines by a threshold on the bits of their rates, by one or several CTAs together.
//
// The threshold is found digit by digit from histograms of counts and of mass. Those are integers, so their sums are
// exact and depend neither on the order of threads nor on the number of CTAs.
#pragma once
#include <cooperative_groups.h>

#include <climits>

#include "probe_mass.cuh"
#include "probe_passes.h"

namespace mtraining::probe {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 4096;         // of the second and third digit
constexpr int kExponentBins = 256;  // of the first: few exponents are frequent, so each lane has a copy of these
constexpr int kHistogramSize = kExponentBins * 32;
constexpr int kDigits = 3;
constexpr uint32_t kNothing = ~0u;   // a threshold above all rates
constexpr int64_t kAll = INT64_MAX;  // a target above all mass

// The CTAs that work on one list: a cluster on Hopper, one CTA elsewhere.
struct CtaGroup {
  int rank = 0, size = 1;

  static __device__ __forceinline__ CtaGroup current() {
#if __CUDA_ARCH__ >= 900
    const auto cluster = cooperative_groups::this_cluster();
    return {static_cast<int>(cluster.block_rank()), static_cast<int>(cluster.num_blocks())};
#else
    return {};
#endif
  }

  __device__ __forceinline__ void synchronize() const {
#if __CUDA_ARCH__ >= 900
    cooperative_groups::this_cluster().sync();
#else
    __syncthreads();
#endif
  }

  // A CTA's own copy of something in shared memory.
  template <typename Value>
  __device__ __forceinline__ Value& copy_of(Value& shared, int cta) const {
#if __CUDA_ARCH__ >= 900
    return *cooperative_groups::this_cluster().map_shared_rank(&shared, cta);
#else
    return shared;
#endif
  }
};

// A line that may be chosen: bits of its rate, 0 without mass; the mass that it adds in the ranking; and all of its
// mass.
struct Line {
  uint32_t bits;
  int64_t mass, whole;
};

// What the search for a digit found.
struct Digit {
  uint32_t value;
  int count_above, count;  // lines above the digit, and with it
  int64_t mass_above, target;
  bool found;
};

struct Shared {
  uint32_t count[kHistogramSize], low[kHistogramSize],
      high[kHistogramSize];  // mass in two halves: shared memory adds 32 bits at once
  uint32_t total_low, total_high;
  int first_bin, last_tie;
  Digit digit;
  int64_t of_warps[3][kWarps], of_cta[3];
};

__device__ __forceinline__ void add_mass_halves(uint32_t& low, uint32_t& high, uint64_t mass) {
  const uint32_t part = static_cast<uint32_t>(mass);
  const uint32_t before = atomicAdd(&low, part);
  const uint32_t carry = before + part < part;
  atomicAdd(&high, static_cast<uint32_t>(mass >> 32) + carry);
}

__device__ __forceinline__ int64_t join_halves(uint32_t low, uint32_t high) {
  return static_cast<int64_t>(uint64_t{high} << 32 | low);
}

__device__ __forceinline__ int64_t warp_sum(int64_t x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, static_cast<long long>(x), step);
  return x;
}

// Sum over the lanes up to a thread's own.
__device__ __forceinline__ int64_t warp_prefix(int64_t x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long other = __shfl_up_sync(~0u, static_cast<long long>(x), step);
    if (static_cast<int>(threadIdx.x % 32) >= step) x += other;
  }
  return x;
}

// Sums of the threads' values: over the warps before a thread's own in all CTAs, and over all threads.
template <int kCount>
__device__ void sum_over_group(const CtaGroup& group, Shared& shared, const int64_t (&own)[kCount],
                               int64_t (&before)[kCount], int64_t (&total)[kCount]) {
  static_assert(kCount <= 3);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t sum = warp_sum(own[i]);
    if (lane == 0) shared.of_warps[i][warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t sum = shared.of_warps[i][lane];
    before[i] = warp_sum(lane < warp ? sum : 0);
    const int64_t of_cta = warp_sum(sum);
    if (threadIdx.x == 0) shared.of_cta[i] = of_cta;
  }
  group.synchronize();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int64_t sum = lane < group.size ? group.copy_of(shared.of_cta[i], lane) : 0;
    before[i] += warp_sum(lane < group.rank ? sum : 0);
    total[i] = warp_sum(sum);
  }
  group.synchronize();
}

// A range of lines, in order: those of a warp, or of a CTA.
struct Range {
  int begin, end;
};

__device__ __forceinline__ Range range_of(const CtaGroup& group, int num_lines, int first_warp, int num_warps) {
  const int all = group.size * kWarps, of_warp = ((num_lines + 31) / 32 + all - 1) / all * 32;
  const int64_t first = int64_t{group.rank * kWarps + first_warp} * of_warp;
  return {static_cast<int>(min(first, int64_t{num_lines})),
          static_cast<int>(min(first + int64_t{num_warps} * of_warp, int64_t{num_lines}))};
}

__device__ __forceinline__ Range warp_range(const CtaGroup& group, int num_lines) {
  return range_of(group, num_lines, threadIdx.x / 32, 1);
}

// Adds the CTA's lines whose bits begin with `prefix` to its histogram of the digit that follows, and returns the whole
// mass of the thread's lines below `num_counted`.
template <typename Lines>
__device__ int64_t fill_histogram(const CtaGroup& group, Shared& shared, const Lines& lines, int num_lines,
                                  int num_counted, uint32_t prefix, int shift, int width) {
  int64_t total = 0;
  const Range range = range_of(group, num_lines, 0, kWarps);
#pragma unroll 2
  for (int i = range.begin + static_cast<int>(threadIdx.x); i < range.end; i += kThreads) {
    const Line line = lines.at(i);
    total += i < num_counted ? line.whole : 0;
    if (line.bits == 0 || (line.bits >> shift) >> width != prefix) continue;
    const uint32_t digit = (line.bits >> shift) & ((1u << width) - 1);
    const uint32_t bin = (1 << width) == kExponentBins ? digit * 32 + threadIdx.x % 32 : digit;
    atomicAdd(&shared.count[bin], 1u);
    add_mass_halves(shared.low[bin], shared.high[bin], line.mass);
  }
  return total;
}

// Adds up the lanes' copies of the first digit's bins, and leaves the sums in the first entries.
__device__ void merge_copies(Shared& shared) {
  static_assert(kExponentBins == 8 * kWarps);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t count = 0;
  int64_t mass = 0;  // lane i holds bin warp + 32 * i
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const int at = (warp + kWarps * i) * 32 + lane;
    const uint32_t of_bin = __reduce_add_sync(~0u, shared.count[at]);
    const int64_t mass_of_bin = warp_sum(join_halves(shared.low[at], shared.high[at]));
    if (lane == i) count = of_bin, mass = mass_of_bin;
  }
  __syncthreads();
  if (lane < 8) {
    const int bin = warp + kWarps * lane;
    shared.count[bin] = count;
    shared.low[bin] = static_cast<uint32_t>(mass);
    shared.high[bin] = static_cast<uint32_t>(static_cast<uint64_t>(mass) >> 32);
  }
  __syncthreads();
}

// Finds the first bin from the largest down in which the target or the cap is reached. For one CTA.
__device__ void find_digit(Shared& shared, int width, int64_t mass_above, int count_above, int64_t target,
                           int at_most) {
  constexpr int kBinsOfThread = kBins / kThreads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, top = (1 << width) - 1;
  const int first = static_cast<int>(threadIdx.x) * kBinsOfThread;  // counted from the top
  int64_t count = 0, mass = 0;
  for (int i = first; i < first + kBinsOfThread && i <= top; ++i) {
    count += shared.count[top - i];
    mass += join_halves(shared.low[top - i], shared.high[top - i]);
  }
  const int64_t counts = warp_prefix(count), masses = warp_prefix(mass);
  if (lane == 31) shared.of_warps[0][warp] = counts, shared.of_warps[1][warp] = masses;
  __syncthreads();
  count = count_above + counts - count + warp_sum(lane < warp ? shared.of_warps[0][lane] : 0);
  mass = mass_above + masses - mass + warp_sum(lane < warp ? shared.of_warps[1][lane] : 0);
  Digit digit = {0, 0, 0, 0, target, false};
  int reaching = INT_MAX;
  for (int i = first; i < first + kBinsOfThread && i <= top; ++i) {
    const uint32_t lines = shared.count[top - i];
    if (lines == 0 || digit.found) continue;
    const int64_t next = mass + join_halves(shared.low[top - i], shared.high[top - i]);
    if (next >= target || count + lines >= at_most) {
      digit = {static_cast<uint32_t>(top - i), static_cast<int>(count), static_cast<int>(lines), mass, target, true};
      reaching = i;
    }
    mass = next, count += lines;
  }
  if (digit.found) atomicMin(&shared.first_bin, reaching);
  __syncthreads();
  const int reached = shared.first_bin;
  if (target <= 0 || reached == INT_MAX ? threadIdx.x == 0 : reaching == reached) {
    if (target <= 0) digit.found = false;
    shared.digit = digit;
  }
}

// The last of the lines with a digit's bits that are in: from the first on, until the target or the cap is reached.
template <typename Lines>
__device__ int find_last_tie(const CtaGroup& group, Shared& shared, const Lines& lines, int num_lines, uint32_t bits,
                             const Digit& digit, int at_most) {
  const int lane = threadIdx.x % 32;
  const Range range = warp_range(group, num_lines);
  int64_t own[2] = {}, before[2], total[2];
#pragma unroll 1
  for (int i = range.begin + lane; i < range.end; i += 32) {
    const Line line = lines.at(i);
    if (line.bits == bits) own[0] += 1, own[1] += line.mass;
  }
  sum_over_group(group, shared, own, before, total);
  int64_t count = digit.count_above + before[0], mass = digit.mass_above + before[1];
  int last = -1;
  for (int first = range.begin; first < range.end; first += 32) {
    const Line line = first + lane < range.end ? lines.at(first + lane) : Line{0, 0, 0};
    const bool equal = line.bits == bits;
    const unsigned mask = __ballot_sync(~0u, equal);
    if (mask == 0) continue;
    const int64_t up_to = warp_prefix(equal ? line.mass : 0);
    const int64_t mass_before = mass + up_to - (equal ? line.mass : 0);
    if (equal && mass_before < digit.target && count + __popc(mask & ((1u << lane) - 1)) < at_most) last = first + lane;
    mass += __shfl_sync(~0u, static_cast<long long>(up_to), 31);
    count += __popc(mask);
  }
  last = __reduce_max_sync(~0u, last);
  if (lane == 0) atomicMax(&shared.last_tie, last);
  group.synchronize();
  last = __reduce_max_sync(~0u, lane < group.size ? group.copy_of(shared.last_tie, lane) : -1);
  group.synchronize();
  return last;
}

// The lines of the largest rates, until target_of(whole mass of the lines below num_counted) is reached, that which
// reaches it included, at most so many. Ties: the first lines. `target` becomes the mass to reach.
template <typename Lines, typename TargetOf>
__device__ Threshold find_threshold(const CtaGroup& group, Shared& shared, const Lines& lines, int num_lines,
                                    int num_counted, int at_most, const TargetOf& target_of, int64_t& target) {
  target = kAll;
  if (at_most <= 0) return {kNothing, -1};
  uint32_t prefix = 0;
  Digit digit = {};
#pragma unroll 1
  for (int number = 0; number < kDigits; ++number) {
    const int width = number == 0 ? 8 : number == 1 ? 12 : 11;  // 31 bits, as no rate has a sign
    const int shift = number == 0 ? 23 : number == 1 ? 11 : 0;
    for (int i = threadIdx.x; i < (number == 0 ? kHistogramSize : kBins); i += kThreads)
      shared.count[i] = shared.low[i] = shared.high[i] = 0;
    if (threadIdx.x == 0) shared.total_low = shared.total_high = 0, shared.first_bin = INT_MAX, shared.last_tie = -1;
    group.synchronize();
    const int64_t counted =
        warp_sum(fill_histogram(group, shared, lines, num_lines, num_counted, prefix, shift, width));
    if (threadIdx.x % 32 == 0) add_mass_halves(shared.total_low, shared.total_high, counted);
    __syncthreads();
    if (number == 0) {
      merge_copies(shared);
      group.synchronize();  // the first entries of the leader are its sums now, and no longer copies
    }
    if (group.rank > 0) {
      Shared& leader = group.copy_of(shared, 0);
      for (int i = threadIdx.x; i < 1 << width; i += kThreads) {
        if (shared.count[i] == 0) continue;
        atomicAdd(&leader.count[i], shared.count[i]);
        add_mass_halves(leader.low[i], leader.high[i], join_halves(shared.low[i], shared.high[i]));
      }
      if (threadIdx.x == 0)
        add_mass_halves(leader.total_low, leader.total_high, join_halves(shared.total_low, shared.total_high));
    }
    group.synchronize();
    if (group.rank == 0) {
      if (number == 0) target = target_of(join_halves(shared.total_low, shared.total_high));
      find_digit(shared, width, digit.mass_above, digit.count_above, target, at_most);
    }
    group.synchronize();
    digit = group.copy_of(shared.digit, 0);
    target = digit.target;
    if (!digit.found) return {target > 0 ? 0 : kNothing, -1};  // all lines with mass, or none
    prefix = prefix << width | digit.value;
  }
  if (digit.count == 1) return {prefix, INT_MAX};
  return {prefix, find_last_tie(group, shared, lines, num_lines, prefix, digit, at_most)};
}

// ---- lists -----------------------------------------------------------------------------------------------------

// Lines that are chosen: before a warp's range, and all of them, with their whole mass and pairs.
struct Chosen {
  int before, count;
  int64_t mass, pairs;
};

template <typename Lines>
__device__ Chosen count_chosen(const CtaGroup& group, Shared& shared, const Lines& lines, int num_lines,
                               const Threshold& threshold) {
  const Range range = warp_range(group, num_lines);
  int64_t own[3] = {}, before[3], total[3];
#pragma unroll 4
  for (int i = range.begin + static_cast<int>(threadIdx.x % 32); i < range.end; i += 32) {
    const Line line = lines.at(i);
    if (is_chosen(threshold, line.bits, i)) own[0] += 1, own[1] += line.whole, own[2] += lines.pairs(i);
  }
  sum_over_group(group, shared, own, before, total);
  return {static_cast<int>(before[0]), static_cast<int>(total[0]), total[1], total[2]};
}

struct List {
  int32_t* entries;
  float* rates;        // null: not wanted
  int width, padding;  // the count is at [width]
  int first, always;   // entries first .. first + always - 1 are in front
  int offset;          // line i is entries offset + i * length and those after it,
  int length, end;     //   `length` of them, the last line as far as they are below `end`
};

template <typename Lines>
__device__ void write_list(const CtaGroup& group, const Lines& lines, int num_lines, const List& list,
                           const Threshold& threshold, const Chosen& chosen) {
  const int lane = threadIdx.x % 32;
  const Range range = warp_range(group, num_lines);
  int index = chosen.before;
#pragma unroll 2
  for (int first = range.begin; first < range.end; first += 32) {
    const uint32_t bits = first + lane < range.end ? lines.at(first + lane).bits : 0;
    const bool taken = is_chosen(threshold, bits, first + lane) && first + lane < range.end;
    const unsigned mask = __ballot_sync(~0u, taken);
    if (taken) {
      const int to = list.always + (index + __popc(mask & ((1u << lane) - 1))) * list.length;
      const int entry = list.offset + (first + lane) * list.length;
      for (int i = 0; i < list.length && entry + i < list.end; ++i) {
        list.entries[to + i] = entry + i;
        if (list.rates) list.rates[to + i] = __uint_as_float(bits);
      }
    }
    index += __popc(mask);
  }
  int count = list.always + chosen.count * list.length;
  if (num_lines > 0 && is_chosen(threshold, lines.at(num_lines - 1).bits, num_lines - 1))
    count -= max(0, list.offset + num_lines * list.length - list.end);  // entries that the last line lacks
  const int thread = group.rank * kThreads + static_cast<int>(threadIdx.x), threads = group.size * kThreads;
  for (int i = thread; i < list.always; i += threads) {
    list.entries[i] = list.first + i;
    if (list.rates) list.rates[i] = INFINITY;
  }
  for (int i = count + thread; i < list.width; i += threads) {
    list.entries[i] = list.padding;
    if (list.rates) list.rates[i] = 0.f;
  }
  if (thread == 0) list.entries[list.width] = count;
}

}  // namespace mtraining::probe
