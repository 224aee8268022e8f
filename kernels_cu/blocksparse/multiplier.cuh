// The role that multiplies, of kernels whose steps are a stage each.
#pragma once
#include "blocksparse/stages.cuh"
#include "ptx/wgmma_dense.cuh"

// Of stages that may lack lines: those of a stage that are in a row tile, as bits of each byte, the first in bit 0.
// Shuffled, so that the compiler knows it to be the same for the warp.
template <u32 kTile> __device__ __forceinline__ u32 lines_of(u32 present, u32 first) {
  return __shfl_sync(~0u, load_shared_as<u32>(present) >> first & kTile, 0);
}

// One warpgroup's 64 rows x kColumns. Multiplier derives from it and has `issue(sums, lines)`: the wgmma of the stage
// at `at`, of those columns of blocks whose byte in `lines` isn't 0.
//
// Of Config: kMixed: whether a stage may lack a row tile's lines, kTileLines a tile; kByLanes: whether lanes copy.
template <class Config, class Multiplier> struct StepMultiplier {
  PipelineState<Config::kStages> at;
  u32 base, row_group, column_group;
  Reporter<Config> reporter;
  StageBarriers<Config> barriers;

  __device__ __forceinline__ u32 stage() const { return base + at.stage * Config::kStageBytes; }

  // Which columns of blocks of the stage this warpgroup's lines are in: a byte each, 0 where they are not.
  __device__ __forceinline__ u32 lines(u32 slot) const {
    if constexpr (!Config::kMixed) return 1;
    constexpr u32 kTile = ((1 << Config::kTileLines) - 1) * 0x01010101u;
    return lines_of<kTile>(barriers.present(slot), row_group * Config::kTileLines);
  }

  // One step in flight, the stage before it freed meanwhile.
  template <class Sums> __device__ __forceinline__ void multiply(Sums& sums, int steps) {
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) sums[i] = 0;
    bool flying = false;
    u32 before = 0;
    for (int step = 0; step < steps; ++step, at.next()) {
      barrier_wait(barriers.full(at.stage), at.parity);
      if constexpr (Config::kByLanes) async_proxy_fence();  // what lanes copied is seen by wgmma only after it
      const u32 mine = lines(at.stage);
      if (!mine) {
        wgmma_wait<0>();
        if (flying) reporter.release(before);
        flying = false;
        reporter.release(at.stage);
        continue;
      }
      static_cast<const Multiplier&>(*this).issue(sums, mine);
      wgmma_wait<1>();  // all but the step just issued
      if (flying) reporter.release(before);
      flying = true, before = at.stage;
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums);
    if (flying) reporter.release(before);
  }
};
