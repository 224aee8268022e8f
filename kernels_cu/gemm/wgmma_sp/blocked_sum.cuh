// Blocked summation: each group of kTilesPerBlockedSum K tiles is summed separately. This shortens the chain of
// roundings. The total of the groups before the current one waits in the workspace, each thread's in its own place.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"

struct BlockedSum {
  static constexpr u32 kTiles = Config::kTilesPerBlockedSum ? Config::kTilesPerBlockedSum : 1;

  float* at;  // the place of this thread's first four totals
  u32 start;  // the first K tile of the slice

  BlockedSum() = default;
  __device__ __forceinline__ BlockedSum(const WgmmaSpParams& p, const TileScheduler& scheduler, u32 warpgroup,
                                        u32 slice)
      : start(first_k_tile(p, slice)) {
    at = p.blocked_sums + workspace_offset(workspace_cta(scheduler), warpgroup, 0);
  }

  // Whether the K tile begins a group other than the first.
  __device__ __forceinline__ bool begins(u32 tile) const {
    return Config::kTilesPerBlockedSum && tile > start && (tile - start) % kTiles == 0;
  }

  // Adds the sum of the group that ends before `tile` to the total, and clears the accumulators.
  __device__ __forceinline__ void add(Accumulators& accumulators, u32 tile) const {
    const bool first = tile - start == kTiles;
    each(accumulators, [first](Accumulator* v, float* to) {
      float before[4];
      load_global_or_zeros(before, to, !first);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!first) v[i] = __fadd_rn(before[i], v[i]);
      }
      store_global(to, bits_of(v[0]), bits_of(v[1]), bits_of(v[2]), bits_of(v[3]));
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = 0;
    });
  }

  // Adds the total to the sum of the last group, which ends before `tile`.
  __device__ __forceinline__ void finish(Accumulators& accumulators, u32 tile) const {
    if (tile - start <= kTiles) return;
    each(accumulators, [](Accumulator* v, float* to) {
      float before[4];
      load_global_or_zeros(before, to, true);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = __fadd_rn(before[i], v[i]);
    });
  }

 private:
  template <class Do> __device__ __forceinline__ void each(Accumulators& accumulators, Do act) const {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
#pragma unroll
      for (int q = 0; q < kQuads; ++q) act(&accumulators[r][4 * q], at + (r * kQuads + q) * 512);
  }
};
