// The fix-up of stream-K: partial sums of a split tile travel through the workspace from one cluster to the next.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"

// Consumer warpgroups store and load the partial sums. A warp that is otherwise idle waits for the flags, so that the
// consumers need not, and tells them through named barriers.
struct StreamKFixup {
  const WgmmaSpParams& p;

  // Named barriers, one per warpgroup: partial sums have been stored; partial sums can be loaded.
  static constexpr int kStoredBarrier = 1 + Config::kWarpgroups,
                       kLoadableBarrier = kStoredBarrier + Config::kWarpgroups;

  __device__ __forceinline__ u64* flag(u32 cta, u32 warpgroup) const {
    return p.flags + cta * Config::kWarpgroups + warpgroup;
  }

  __device__ __forceinline__ void store_partials(const Accumulators& accumulators, u32 warpgroup) const {
    save_accumulators(accumulators, p.partials + workspace_offset(blockIdx.x, warpgroup, 0));
    named_barrier_arrive(kStoredBarrier + warpgroup, 160);
  }

  // Loads the partial sums of the previous cluster, or zeros. The loads are predicated: only without a branch does the
  // compiler keep the accumulators in place.
  __device__ __forceinline__ void load_partials(Accumulators& accumulators, u32 warpgroup, bool loads) const {
    if (loads) named_barrier_sync(kLoadableBarrier + warpgroup, 160);
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      const float* from = p.partials + workspace_offset(blockIdx.x - Config::kClusterSize, warpgroup, r);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) load_global_or_zeros(&accumulators[r][4 * q], from + q * 512, loads);
    }
  }

  // Sets and awaits the flags of a cluster's split tiles. All threads of the idle warp call it.
  __device__ __forceinline__ void exchange_flags() const {
    const TileScheduler::Range range(p);
    const bool first = threadIdx.x % 32 == 0;
    if (range.high_last > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        named_barrier_sync(kStoredBarrier + w, 160);
        if (first) store_release(flag(blockIdx.x, w), p.launch_id);
      }
    if (range.low_first > 0)
      for (u32 w = 0; w < Config::kWarpgroups; ++w) {
        u64* stored = flag(blockIdx.x - Config::kClusterSize, w);
        if (first) {
          while (load_acquire(stored) != p.launch_id) {
          }
          *stored = 0;  // a launch that is repeated with the same id finds no flag set
        }
        __syncwarp();
        named_barrier_sync(kLoadableBarrier + w, 160);
      }
  }
};
