// The mainloop of a consumer warpgroup, for kernels whose steps each fill one stage.
#pragma once
#include "blocksparse/pipeline.cuh"
#include "ptx/wgmma_dense.cuh"

// Returns the blocks of a stage that belong to one 64-row tile, as bits of each byte with the first block row in bit 0.
// The shuffle tells the compiler that the result is uniform in the warp.
template <u32 kTile> __device__ __forceinline__ u32 present_blocks(u32 present, u32 first) {
  return __shfl_sync(~0u, load_shared_as<u32>(present) >> first & kTile, 0);
}

// Multiplies 64 rows x kWarpgroupN of one warpgroup. ConsumerMainloop derives from it and has `issue(sums, present)`:
// the wgmma of the current stage for each block column whose byte in `present` is not 0.
//
// Constants of Config: kMayLackBlocks says whether a stage may lack the blocks of a 64-row tile, which has
// kBlockRowsPerM64 block rows; kSCpAsync says whether cp.async fills stages. kSyncsWarps: a warp syncs before it looks
// for blocks, which tells the compiler that its lanes are converged. If work tiles follow from a CTA's number, the
// compiler knows that. Otherwise it would check convergence in each step.
template <class Config, class ConsumerMainloop, bool kSyncsWarps = false> struct BlockMainloop {
  PipelineState<Config::kStages> at;
  u32 base, warpgroup_m, warpgroup_n;
  ConsumerRelease<Config> consumer_release;
  StageBarriers<Config> barriers;

  __device__ __forceinline__ u32 stage() const { return base + at.stage * Config::kStageBytes; }

  // Returns a byte for each block column of the stage, which is 0 if this warpgroup's block rows have no block in it.
  __device__ __forceinline__ u32 present(u32 stage) const {
    if constexpr (!Config::kMayLackBlocks) return 1;
    constexpr u32 kTile = ((1 << Config::kBlockRowsPerM64) - 1) * 0x01010101u;
    return present_blocks<kTile>(barriers.present(stage), warpgroup_m * Config::kBlockRowsPerM64);
  }

  // Keeps one step in flight and releases the previous stage meanwhile.
  template <class AccumulatorTile> __device__ __forceinline__ void multiply(AccumulatorTile& sums, int steps) {
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) sums[i] = 0;
    bool in_flight = false;
    u32 before = 0;
    for (int step = 0; step < steps; ++step, at.next()) {
      barrier_wait(barriers.full(at.stage), at.parity);
      if constexpr (Config::kSCpAsync) async_proxy_fence();  // wgmma sees what cp.async wrote only after this fence
      if constexpr (kSyncsWarps) __syncwarp();
      const u32 mine = present(at.stage);
      if (!mine) {
        wgmma_wait<0>();
        if (in_flight) consumer_release.release(before);
        in_flight = false;
        consumer_release.release(at.stage);
        continue;
      }
      static_cast<const ConsumerMainloop&>(*this).issue(sums, mine);
      wgmma_wait<1>();  // all but the step just issued
      if (in_flight) consumer_release.release(before);
      in_flight = true, before = at.stage;
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums);
    if (in_flight) consumer_release.release(before);
  }
};
