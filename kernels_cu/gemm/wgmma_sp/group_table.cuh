// The table of token groups of gemm/wgmma_sp.cu. Every CTA makes it in shared memory from what the device has.
//
// Group g's tokens are the rows [begin, end) of X and Y, and its weight is the g-th of the stacked weights.
#pragma once
#include "gemm/token_groups.cuh"
#include "gemm/wgmma_sp/config.cuh"

struct GroupTable {
  u32 at;      // shared memory address: groups + 1 numbers of work tiles, then begins, then ends, then warps' totals
  u32 groups;  // number of groups

  __device__ __forceinline__ GroupTable(const WgmmaSpParams& p)
      : at(shared_address(shared) + Config::kGroupTableAt), groups(p.groups) {}
  // Number of work tiles of all groups before group g.
  __device__ __forceinline__ u32 tiles_before(u32 g) const { return load_shared_as<u32>(at + 4 * g); }
  __device__ __forceinline__ u32 begin(u32 g) const { return load_shared_as<u32>(at + 4 * (groups + 1 + g)); }
  __device__ __forceinline__ u32 end(u32 g) const { return load_shared_as<u32>(at + 4 * (2 * groups + 1 + g)); }
  __device__ __forceinline__ u32 work_tiles() const { return tiles_before(groups); }

  // The group that has work tile `index`, which is below work_tiles().
  __device__ __forceinline__ u32 group_of(u32 index) const {
    u32 low = 0, high = groups;
    while (high - low > 1) {
      const u32 middle = (low + high) / 2;
      if (tiles_before(middle) <= index) low = middle;
      else high = middle;
    }
    return low;
  }

  // All threads of the CTA make the table. m_blocks is the number of work tiles along a group's rows of W.
  __device__ __forceinline__ void make(const WgmmaSpParams& p, u32 m_blocks) const {
    constexpr u32 kWarps = Config::kThreads / 32;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, totals = at + 4 * (3 * groups + 1);
    u32 done = 0;  // work tiles of the groups that earlier rounds have counted
    if (threadIdx.x == 0) store_shared(at, 0u);
    for (u32 first = 0; first < groups; first += Config::kThreads) {
      const u32 g = first + threadIdx.x;
      u32 tiles = 0;
      if (g < groups) {
        const auto [begin, end] = token_range(p.group_tokens, p.group_places, p.n, g);
        store_shared(at + 4 * (groups + 1 + g), (u32)begin);
        store_shared(at + 4 * (2 * groups + 1 + g), (u32)end);
        tiles = ((u32)(end - begin) + Config::kTileN - 1) / Config::kTileN * m_blocks;
      }
#pragma unroll
      for (u32 step = 1; step < 32; step *= 2) {
        const u32 below = __shfl_up_sync(~0u, tiles, step);
        if (lane >= step) tiles += below;
      }
      if (lane == 31) store_shared(totals + 4 * warp, tiles);
      __syncthreads();
      u32 before = done;
#pragma unroll
      for (u32 w = 0; w < kWarps; ++w) {
        const u32 total = load_shared_as<u32>(totals + 4 * w);
        if (w < warp) before += total;
        done += total;
      }
      if (g < groups) store_shared(at + 4 * (g + 1), before + tiles);
      __syncthreads();
    }
  }
};
