// AccumulatorTile of groups of tiles, of gemm/wgmma_sp.cu with kTilesPerBlockedSum: one long row of roundings is cut into short ones.
// What the groups before the last have come to waits in the workspace, where each thread finds its own.
#pragma once
#include "gemm/wgmma_sp/accumulators.cuh"
#include "gemm/wgmma_sp/pipeline.cuh"

struct BlockedSum {
  static constexpr u32 kTiles = Config::kTilesPerBlockedSum ? Config::kTilesPerBlockedSum : 1;

  float* at;  // this thread's first four
  u32 start;  // of the slice: a tile of K

  __device__ __forceinline__ BlockedSum(const WgmmaSpParams& p, const TileScheduler& scheduler, u32 warpgroup,
                                        u32 slice)
      : start(first_k_tile(p, slice)) {
    at = p.groups + workspace_offset(workspace_cta(scheduler), warpgroup, 0);
  }

  // Whether a group, not the first one, begins with the tile.
  __device__ __forceinline__ bool begins(u32 tile) const {
    return Config::kTilesPerBlockedSum && tile > start && (tile - start) % kTiles == 0;
  }

  // A group's sums, which end before the tile, are added to those before it; they begin again.
  __device__ __forceinline__ void add(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], u32 tile) const {
    const bool first = tile - start == kTiles;
    each(sums, [first](float* v, float* to) {
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

  // The last group's sums become the slice's, which ends before the tile.
  __device__ __forceinline__ void finish(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], u32 tile) const {
    if (tile - start <= kTiles) return;
    each(sums, [](float* v, float* to) {
      float before[4];
      load_global_or_zeros(before, to, true);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = __fadd_rn(before[i], v[i]);
    });
  }

 private:
  template <class Do>
  __device__ __forceinline__ void each(AccumulatorTile (&sums)[Config::kMTilesPerWarpgroup], Do act) const {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
#pragma unroll
      for (int q = 0; q < Config::kAccumulators / 4; ++q)
        act(&sums[r][4 * q], at + (r * (Config::kAccumulators / 4) + q) * 512);
  }
};
