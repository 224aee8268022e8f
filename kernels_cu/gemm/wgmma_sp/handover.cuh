// The role of gemm/wgmma_sp.cu that hands sums over, with ranges.
#pragma once
#include "gemm/wgmma_sp/pipeline.cuh"
#include "gemm/wgmma_sp/sums.cuh"

// Sums on their way from a cluster to the next one, through the workspace. An idle warp waits where one must be waited
// for, so that the warps that multiply don't.
struct Handover {
  const WgmmaSpParams& p;

  static constexpr int kQuads = Config::kSums / 4;
  static constexpr int kGiven = 1 + Config::kWarpgroups, kTaken = kGiven + Config::kWarpgroups;  // barriers, from here

  __device__ __forceinline__ u64* flag(u32 block, u32 warpgroup) const {
    return p.flags + block * Config::kWarpgroups + warpgroup;
  }
  __device__ __forceinline__ float* quads(u32 block, u32 warpgroup, int r) const {
    return p.sums + place_of_sums(block, warpgroup, r);
  }

  __device__ __forceinline__ void give(const Sums (&sums)[Config::kRowBlocks], u32 warpgroup) const {
#pragma unroll
    for (int r = 0; r < Config::kRowBlocks; ++r) {
      float* to = quads(blockIdx.x, warpgroup, r);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const Sum* v = sums[r] + 4 * q;
        store_global(to + q * 512, bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
      }
    }
    threads_arrive(kGiven + warpgroup, 160);
  }

  // The sums of the cluster before, or zeros. Without a branch: the compiler keeps sums in place only so.
  __device__ __forceinline__ void take(Sums (&sums)[Config::kRowBlocks], u32 warpgroup, bool taking) const {
    if (taking) threads_meet(kTaken + warpgroup, 160);
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
        threads_meet(kGiven + w, 160);
        if (first) store_release(flag(blockIdx.x, w), p.mark);
      }
    if (range.low_first > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        u64* given = flag(blockIdx.x - Config::kCluster, w);
        if (first) {
          while (load_acquire(given) != p.mark) {
          }
          *given = 0;  // for the next launch with this mark
        }
        __syncwarp();
        threads_meet(kTaken + w, 160);
      }
  }
};
