// Sorts the choices of a router by group, those of one group in their order: each gets a place in the groups. Writes
// the groups' offsets, the row of X of each place, and the place of each choice.
//
//   role        threads       work
//   route_rows  32 * kWarps   one CTA; each warp takes a range of choices, of which several are in flight
//
//   barriers     __syncthreads alone
//   registers    the choices in flight; shared memory has a count of each warp and bucket
//
//   warp | count its choices of each bucket | all: places where they begin | give places to its choices, in order |
//
// Buckets: one for choices below 0, then one for each group, then one for choices that name no group.
#include "common/types.cuh"
#include "gemm/params/route_rows.cuh"
#include "ptx/async.cuh"

// All compile-time constants; macros are read here alone.
struct Config {
  static constexpr int kWarps = S24_WARPS;
  static constexpr int kThreads = 32 * kWarps, kInFlight = 8;
};

// Calls each(bucket, choice, mask of the lanes with the same bucket) for all choices of a warp, in order. Lanes behind
// the last choice take part with a bucket of their own.
template <class Each> __device__ __forceinline__ void for_choices(const RouteRowsParams& p, Each each) {
  const u32 lane = threadIdx.x % 32, chunks = (u32)((p.n + 31) / 32),
            own = (chunks + Config::kWarps - 1) / Config::kWarps;
  const u32 begin = threadIdx.x / 32 * own, end = min(begin + own, chunks);
  for (u32 chunk = begin; chunk < end; chunk += Config::kInFlight) {
    int named[Config::kInFlight];
#pragma unroll
    for (int i = 0; i < Config::kInFlight; ++i) {
      const i64 choice = (i64)(chunk + i) * 32 + lane;
      named[i] = chunk + i < end && choice < p.n ? p.experts[choice] : 0;
    }
#pragma unroll
    for (int i = 0; i < Config::kInFlight; ++i) {
      if (chunk + i >= end) break;
      const i64 choice = (i64)(chunk + i) * 32 + lane;
      const u32 group = named[i] < 0 ? 0 : min((u32)named[i], p.groups) + 1;
      const u32 bucket = choice < p.n ? group : p.groups + 2;
      each(bucket, choice, __match_any_sync(~0u, bucket));
      __syncwarp();
    }
  }
}

// Exclusive scan over all threads' numbers.
__device__ __forceinline__ int scanned(int mine) {
  __shared__ int sums[Config::kWarps];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = 0;
  for (u32 other = 0; other < warp; ++other) before += sums[other];
  return before + sum - mine;
}

// Replaces the counts [warps][buckets] by the places where each warp's choices of each bucket begin.
__device__ __forceinline__ void begin_places(const RouteRowsParams& p, int* counts) {
  const u32 buckets = p.groups + 2, own = (buckets + Config::kThreads - 1) / Config::kThreads;
  const u32 begin = min(threadIdx.x * own, buckets), end = min(begin + own, buckets);
  int total = 0;
  for (u32 bucket = begin; bucket < end; ++bucket)
    for (int warp = 0; warp < Config::kWarps; ++warp) total += counts[warp * buckets + bucket];
  int at = scanned(total);
  for (u32 bucket = begin; bucket < end; ++bucket) {
    if (bucket) p.offsets[bucket - 1] = at;  // the first bucket is no group
    for (int warp = 0; warp < Config::kWarps; ++warp) {
      const int count = counts[warp * buckets + bucket];
      counts[warp * buckets + bucket] = at;
      at += count;
    }
  }
}

extern "C" __global__ void __launch_bounds__(Config::kThreads) route_rows(const __grid_constant__ RouteRowsParams p) {
  extern __shared__ int counts[];  // [warps][buckets], then the places where they begin
  const u32 buckets = p.groups + 2, lane = threadIdx.x % 32;
  int* const own = counts + threadIdx.x / 32 * buckets;
  for (u32 i = threadIdx.x; i < Config::kWarps * buckets; i += Config::kThreads) counts[i] = 0;
  grid_dependency_wait();
  launch_dependent_grids();
  __syncthreads();
  for_choices(p, [&](u32 bucket, i64 choice, u32 same) {
    if (choice < p.n && lane == __ffs(same) - 1) own[bucket] += __popc(same);
  });
  __syncthreads();
  begin_places(p, counts);
  __syncthreads();
  for_choices(p, [&](u32 bucket, i64 choice, u32 same) {
    int place = 0;
    if (choice < p.n) {
      place = own[bucket] + __popc(same & ((1u << lane) - 1));
      p.places[choice] = place;
      p.rows[place] = (int)((u32)choice / p.top_k);
    }
    __syncwarp();
    if (choice < p.n && lane == __ffs(same) - 1) own[bucket] = place + __popc(same);
  });
}
