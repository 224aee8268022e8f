// Sums of gemm/wgmma_sp.cu in the workspace: the role that hands them over, with ranges; and parked ones.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/pipeline.cuh"

// Sums on their way from a cluster to the next one, through the workspace. An idle warp waits where one must be waited
// for, so that the warps that multiply don't.
struct Handover {
  const WgmmaSpParams& p;

  static constexpr int kQuads = Config::kSums / 4, kLoads = Config::kTrade && Config::kRanges ? 12 : 8;
  static constexpr int kGiven = 1 + Config::kWarpgroups, kTaken = kGiven + Config::kWarpgroups;  // barriers, from here

  __device__ __forceinline__ u64* flag(u32 block, u32 warpgroup) const {
    return p.flags + block * Config::kWarpgroups + warpgroup;
  }
  __device__ __forceinline__ float* quads(u32 block, u32 warpgroup, int r) const {
    return p.partials + place_of_sums(block, warpgroup, r);
  }

  // From the sum kFrom of a thread on. `parked`: this thread's first four in the workspace.
  template <int kFrom = 0>
  __device__ __forceinline__ void park(const Sums (&sums)[Config::kRowBlocks], float* parked) const {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
      float* to = parked + r * kQuads * 512;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const Sum* v = sums[r] + 4 * q;
        if (r * Config::kSums + 4 * q >= kFrom)
          store_global(to + q * 512, bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
      }
    }
  }
  // Onto them what has been parked. Where nothing has, a mask of no bits takes it for zeros.
  template <int kFrom = 0> __device__ __forceinline__ void add_parked(Sums (&sums)[Config::kRowBlocks],
                                                                      const float* parked, u32 mask = ~0u) const {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
      const float* from = parked + r * kQuads * 512;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        if (r * Config::kSums + 4 * q < kFrom) continue;
        if (q % kLoads == 0) __syncwarp();  // else all are loaded first, and registers spilled
        const uint4 v = __ldcg((const uint4*)(from + q * 512));
        Sum* to = sums[r] + 4 * q;
        to[0] += sum_of(v.x & mask), to[1] += sum_of(v.y & mask), to[2] += sum_of(v.z & mask);
        to[3] += sum_of(v.w & mask);
      }
    }
  }

  __device__ __forceinline__ void give(const Sums (&sums)[Config::kRowBlocks], u32 warpgroup) const {
    park(sums, quads(blockIdx.x, warpgroup, 0));
    named_barrier_arrive(kGiven + warpgroup, 160);
  }

  // The sums of the cluster before, or zeros. Without a branch: the compiler keeps sums in place only so.
  __device__ __forceinline__ void take(Sums (&sums)[Config::kRowBlocks], u32 warpgroup, bool taking) const {
    if (taking) named_barrier_sync(kTaken + warpgroup, 160);
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
      const float* from = quads(blockIdx.x - Config::kCluster, warpgroup, r);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) load_global_or_zeros(&sums[r][4 * q], from + q * 512, taking);
    }
  }

  // The idle warp, all of it.
  __device__ __forceinline__ void wait() const {
    const Turns::Range range(p);
    const bool first = threadIdx.x % 32 == 0;
    if (range.high_last > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        named_barrier_sync(kGiven + w, 160);
        if (first) store_release(flag(blockIdx.x, w), p.launch_id);
      }
    if (range.low_first > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        u64* given = flag(blockIdx.x - Config::kCluster, w);
        if (first) {
          while (load_acquire(given) != p.launch_id) {
          }
          *given = 0;  // for the next launch with this mark
        }
        __syncwarp();
        named_barrier_sync(kTaken + w, 160);
      }
  }
};
