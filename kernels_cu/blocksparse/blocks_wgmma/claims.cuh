// How a cluster of blocksparse/blocks_wgmma.cu tells its warps which work tile it has claimed.
#pragma once
#include "blocksparse/blocks_wgmma/config.cuh"
#include "ptx/tma.cuh"

// The slots in shared memory through which a cluster's warps learn which work tiles it has claimed.
struct Claims {
  static constexpr u32 kSlots = 4, kReaders = Config::kClusterN * (4 + 4 * Config::kWarpgroups) - 1;
  u32 base;

  __device__ __forceinline__ u32 full(u32 slot) const { return base + Config::kClaimsAt + 8 * slot; }
  __device__ __forceinline__ u32 empty(u32 slot) const { return full(kSlots + slot); }
  __device__ __forceinline__ u32 index(u32 slot) const { return full(2 * kSlots) + 4 * slot; }

  __device__ __forceinline__ void init() const {
    for (u32 slot = 0; slot < kSlots; ++slot) barrier_init(full(slot), 1), barrier_init(empty(slot), kReaders);
  }
  // Tells all warps of the cluster. All lanes of a warp call it together.
  __device__ __forceinline__ void publish(u32 slot, u32 parity, u32 claimed) const {
    const u32 lane = threadIdx.x % 32;
    barrier_wait(empty(slot), parity ^ 1);
    if constexpr (Config::kClusterN == 1) {
      if (lane == 0) store_shared(index(slot), claimed);
      if (lane == 0) barrier_arrive(full(slot));
    } else if (lane < Config::kClusterN) {
      store_cluster(cluster_address(index(slot), lane), claimed);
      barrier_arrive_release_cluster(cluster_address(full(slot), lane));
    }
  }
  // Returns the claim that was published. All lanes of a warp call it together.
  __device__ __forceinline__ u32 read(u32 slot, u32 parity) const {
    if constexpr (Config::kClusterN == 1) barrier_wait(full(slot), parity);
    else barrier_wait_cluster(full(slot), parity);
    const u32 claimed = __shfl_sync(~0u, load_shared_as<u32>(index(slot)), 0);
    // An arrival does not wait for loads in flight, and ptxas drops shuffles of what it knows to be uniform. So the
    // barrier's address is made to depend on the claim, whose top bit is 0.
    const u32 read = empty(slot) + (claimed >> 31);
    if (threadIdx.x % 32 == 0) {
      if (blockIdx.x % Config::kClusterN == 0) barrier_arrive(read);
      else barrier_arrive_cluster(cluster_address(read, 0));
    }
    return claimed;
  }
};
