// Work distribution and barriers of kernels that load operands in stages, some for every CTA of a cluster. Config has
// kStages and kClusterN.
#pragma once
#include "common/pipeline_state.cuh"
#include "ptx/tma.cuh"

// Work tiles -----------------------------------------------------------------------------------------

// The work tile of a cluster in a round: cluster c of G takes work tile c, then 2G - 1 - c, then 2G + c. In the last
// round the index may be past the last work tile, which work_tile_count(p) tells.
__device__ __forceinline__ constexpr u32 work_tile_of(u32 round, u32 cluster, u32 clusters) {
  return round * clusters + (round % 2 ? clusters - 1 - cluster : cluster);
}
template <class Config> __device__ __forceinline__ u32 work_tile_of(u32 round) {
  return work_tile_of(round, blockIdx.x / Config::kClusterN, gridDim.x / Config::kClusterN);
}
template <class Config, class Params> __device__ __forceinline__ u32 rounds_of(const Params& p) {
  const u32 clusters = gridDim.x / Config::kClusterN;
  return (work_tile_count(p) + clusters - 1) / clusters;
}

// Barriers -------------------------------------------------------------------------------------------

template <class Config> struct StageBarriers {
  u32 at;
  __device__ __forceinline__ u32 full(u32 stage) const { return at + 8 * stage; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return at + 8 * (Config::kStages + stage); }
  // A word that tells which blocks a stage has, one byte for each block column.
  __device__ __forceinline__ u32 present(u32 stage) const { return at + 16 * Config::kStages + 4 * stage; }
};

// Releases a stage for a warp: one lane arrives at the empty barrier of each CTA of the cluster. wgmma reads a stage's
// operands. With kRead threads read the stage, too, for instance the word that tells which blocks it has. Their own CTA
// wrote that word, so the arrival at its barrier must be ordered after these reads.
template <class Config, bool kRead = (Config::kPanelBlockRows > 1)> struct ConsumerRelease {
  u32 empty;  // empty barrier of stage 0 in the CTA that this lane releases to

  static __device__ __forceinline__ bool is_own() { return threadIdx.x % 32 == blockIdx.x % Config::kClusterN; }

  __device__ __forceinline__ explicit ConsumerRelease(u32 barrier) : empty(barrier) {
    if constexpr (Config::kClusterN > 1)
      if (!kRead || !is_own()) empty = cluster_address(barrier, threadIdx.x % 32 % Config::kClusterN);
  }
  __device__ __forceinline__ void release(u32 stage) const {
    if (threadIdx.x % 32 >= Config::kClusterN) return;
    if (Config::kClusterN == 1 || (kRead && is_own())) barrier_arrive(empty + 8 * stage);
    else barrier_arrive_cluster(empty + 8 * stage);
  }
};
