// What kernels share whose operands come in stages, some to every block of a cluster: a Config's kStages and kShare.
#pragma once
#include "common/pipeline_state.cuh"
#include "ptx/tma.cuh"

// Items ----------------------------------------------------------------------------------------------

// The item of a cluster's turn: cluster c of G takes item c, then 2G - 1 - c, then 2G + c. In its last turn it may have
// none: the item is then past items_of(p), which a kernel has.
template <class Config> __device__ __forceinline__ u32 item_of(u32 turn) {
  const u32 clusters = gridDim.x / Config::kShare, mine = blockIdx.x / Config::kShare;
  return turn * clusters + (turn % 2 ? clusters - 1 - mine : mine);
}
template <class Config, class Params> __device__ __forceinline__ u32 turns_of(const Params& p) {
  const u32 clusters = gridDim.x / Config::kShare;
  return (items_of(p) + clusters - 1) / clusters;
}

// Barriers -------------------------------------------------------------------------------------------

template <class Config> struct StageBarriers {
  u32 at;
  __device__ __forceinline__ u32 full(u32 slot) const { return at + 8 * slot; }
  __device__ __forceinline__ u32 free(u32 slot) const { return at + 8 * (Config::kStages + slot); }
  // A word: which lines a stage has, a byte for each column of blocks.
  __device__ __forceinline__ u32 present(u32 slot) const { return at + 16 * Config::kStages + 4 * slot; }
};

// Who tells the blocks of a cluster that a stage is free, for a warp: a lane each block. What is in a stage is read by
// wgmma; kRead: by threads, too, such as which lines it has, which their own block wrote. The report to that block must
// then come after what they read.
template <class Config, bool kRead = (Config::kLines > 1)> struct Reporter {
  u32 free;  // of the first stage, in the block that this lane reports to

  static __device__ __forceinline__ bool is_own() { return threadIdx.x % 32 == blockIdx.x % Config::kShare; }

  __device__ __forceinline__ explicit Reporter(u32 barrier) : free(barrier) {
    if constexpr (Config::kShare > 1)
      if (!kRead || !is_own()) free = cluster_address(barrier, threadIdx.x % 32 % Config::kShare);
  }
  __device__ __forceinline__ void release(u32 slot) const {
    if (threadIdx.x % 32 >= Config::kShare) return;
    if (Config::kShare == 1 || (kRead && is_own())) barrier_arrive(free + 8 * slot);
    else barrier_arrive_cluster(free + 8 * slot);
  }
};
