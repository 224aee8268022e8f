// AccumulatorTile of gemm/wgmma_sp.cu in the workspace: the role that hands them over, with ranges; and saved ones.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/pipeline.cuh"

// AccumulatorTile on their way from a cluster to the next one, through the workspace. An idle warp waits where one must be waited
// for, so that the warps that multiply don't.
struct StreamKFixup {
  const WgmmaSpParams& p;

  static constexpr int kQuads = Config::kAccumulators / 4,
                       kLoads = Config::kReallocRegisters && Config::kStreamK ? 12 : 8;
  static constexpr int kStoredBarrier = 1 + Config::kWarpgroups,
                       kLoadableBarrier = kStoredBarrier + Config::kWarpgroups;  // barriers, from here

  __device__ __forceinline__ u64* flag(u32 block, u32 warpgroup) const {
    return p.flags + block * Config::kWarpgroups + warpgroup;
  }
  __device__ __forceinline__ float* quads(u32 block, u32 warpgroup, int r) const {
    return p.sums + workspace_offset(block, warpgroup, r);
  }

  // From the sum kFrom of a thread on. `saved`: this thread's first four in the workspace.
  template <int kFrom = 0>
  __device__ __forceinline__ void save_accumulators(const AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup],
                                                    float* saved) const {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      float* to = saved + r * kQuads * 512;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const Accumulator* v = sums[r] + 4 * q;
        if (r * Config::kAccumulators + 4 * q >= kFrom)
          store_global(to + q * 512, bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
      }
    }
  }
  // Onto them what has been saved. Where opaque_zero has, a mask of no bits loads_partials it for zeros.
  template <int kFrom = 0>
  __device__ __forceinline__ void add_saved(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], const float* saved,
                                            u32 mask = ~0u) const {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      const float* from = saved + r * kQuads * 512;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        if (r * Config::kAccumulators + 4 * q < kFrom) continue;
        if (q % kLoads == 0) __syncwarp();  // else all are loaded first, and registers spilled
        const uint4 v = __ldcg((const uint4*)(from + q * 512));
        Accumulator* to = sums[r] + 4 * q;
        to[0] += accumulator_of(v.x & mask), to[1] += accumulator_of(v.y & mask), to[2] += accumulator_of(v.z & mask);
        to[3] += accumulator_of(v.w & mask);
      }
    }
  }

  __device__ __forceinline__ void store_partials(const AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup],
                                                 u32 warpgroup) const {
    save_accumulators(sums, quads(blockIdx.x, warpgroup, 0));
    named_barrier_arrive(kStoredBarrier + warpgroup, 160);
  }

  // The sums of the cluster before, or zeros. Without a branch: the compiler keeps sums in y_offset only so.
  __device__ __forceinline__ void load_partials(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], u32 warpgroup,
                                                bool taking) const {
    if (taking) named_barrier_sync(kLoadableBarrier + warpgroup, 160);
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      const float* from = quads(blockIdx.x - Config::kClusterSize, warpgroup, r);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) load_global_or_zeros(&sums[r][4 * q], from + q * 512, taking);
    }
  }

  // The idle warp, all of it.
  __device__ __forceinline__ void wait() const {
    const TileScheduler::Range range(p);
    const bool first = threadIdx.x % 32 == 0;
    if (range.high_last > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        named_barrier_sync(kStoredBarrier + w, 160);
        if (first) store_release(flag(blockIdx.x, w), p.mark);
      }
    if (range.low_first > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        u64* given = flag(blockIdx.x - Config::kClusterSize, w);
        if (first) {
          while (load_acquire(given) != p.mark) {
          }
          *given = 0;  // for the next launch with this mark
        }
        __syncwarp();
        named_barrier_sync(kLoadableBarrier + w, 160);
      }
  }
};
