// The mainloop of float32 in three bf16 terms, six products. W is float32 in shared memory: each thread splits the
// values that it multiplies in its registers, which then are the A operand of wgmma. X comes in three boxes of 64
// columns, the low term first. The products of terms i of W and j of X with i + j < 3 are added, the small ones first,
// where the tensor cores truncate little, and high * high last. The sums of each K tile move to float32 outside of the
// tensor cores. Without split-K the sums of kTilesPerBlockedSum tiles form a blocked sum.
//
// While the tensor cores multiply a K tile, the threads split the next one. Two warpgroups alternate at the tensor
// cores (kPingPong) through the named barriers kPingPongBarrier and kPingPongBarrier + 1.
#pragma once
#include "gemm/bf16_terms.cuh"
#include "gemm/wgmma_sp/blocked_sum.cuh"
#include "gemm/wgmma_sp/mainloop.cuh"

template <class Config> struct SplitRegistersMainloop : ConsumerPipeline {
  // A thread's float32 values and metadata of an m64 tile: two steps of 16 kept columns. Shared memory holds them in
  // fragment order: [step][columns 0-7, 8-15][warp][lane][row, row + 8][pair].
  struct Fragment {
    float values[4][4];
    u32 metadata[1];

    __device__ __forceinline__ void load(u32 at) {
#pragma unroll
      for (int i = 0; i < 4; ++i) load_shared_x4(values[i], at + (i * 128 + threadIdx.x % 128) * 16);
      load_shared_words(metadata, at + Tile::kValueBytes + threadIdx.x % 128 * 4);
    }
    // A value that depends on every load.
    __device__ __forceinline__ u32 mix() const {
      return bits_of(values[0][0]) ^ bits_of(values[1][0]) ^ bits_of(values[2][0]) ^ bits_of(values[3][0]) ^
             metadata[0];
    }
  };

  // The bf16 terms of a fragment, in the registers that wgmma takes.
  struct Terms {
    u32 words[2][Config::kSplitTerms][4], metadata[1];

    __device__ __forceinline__ void split(Fragment& fragment) {
      metadata[0] = fragment.metadata[0];
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int term = 0; term < Config::kSplitTerms; ++term) {
          words[i / 2][term][i % 2 * 2] = take_term(fragment.values[i][0], fragment.values[i][1]);
          words[i / 2][term][i % 2 * 2 + 1] = take_term(fragment.values[i][2], fragment.values[i][3]);
        }
    }
  };
  using Fragments = Fragment[Config::kMTilesPerWarpgroup];
  using TileTerms = Terms[Config::kMTilesPerWarpgroup];

  BlockedSum blocked_sum;

  __device__ __forceinline__ void multiply(Accumulators& totals, const TileScheduler& scheduler, u32 slice) {
    static_assert(Config::kTilesPerBlockedSum % 2 == 0, "two K tiles alternate between registers for their terms");
    start(totals, scheduler);
    blocked_sum = BlockedSum(p, scheduler, warpgroup, slice);
    const u32 begin = scheduler.first, end = scheduler.last;
    TileTerms even, odd;
    if (begin < end) load_and_split(even);
    for (u32 tile = begin; tile < end; tile += 2) {
      if (blocked_sum.begins(tile)) blocked_sum.add(totals, tile);
      multiply_tile(totals, even, odd, tile + 1 < end);
      if (tile + 1 < end) multiply_tile(totals, odd, even, tile + 2 < end);
    }
  }
  __device__ __forceinline__ void finish(Accumulators& accumulators, const TileScheduler& scheduler) const {
    if (Config::kTilesPerBlockedSum) blocked_sum.finish(accumulators, scheduler.last);
  }

 private:
  // Multiplies a K tile and meanwhile splits the next one.
  __device__ __forceinline__ void multiply_tile(Accumulators& totals, const TileTerms& terms, TileTerms& next,
                                                bool has_next) {
    u64 boxes[Config::kSplitTerms];
    wait_for_boxes(boxes);
    if constexpr (Config::kPingPong) named_barrier_sync(kPingPongBarrier + warpgroup, Config::kConsumerThreads);
    Accumulators sums;
    issue(sums, terms, boxes);
    if constexpr (Config::kPingPong) named_barrier_arrive(kPingPongBarrier + (warpgroup ^ 1), Config::kConsumerThreads);
    if (has_next) load_and_split(next);
    wgmma_wait<0>();
    fence(sums);
#pragma unroll
    for (int i = 0; i < Config::kSplitTerms; ++i, x.next()) release_x(x.stage);
    add(totals, sums);
  }

  // Box i holds term kSplitTerms - 1 - i of X. It is multiplied with the terms of W whose products with it are large
  // enough.
  __device__ __forceinline__ void issue(Accumulators& sums, const TileTerms& terms,
                                        const u64 (&boxes)[Config::kSplitTerms]) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kSplitTerms; ++i)
#pragma unroll
      for (int term = i; term >= 0; --term)
#pragma unroll
        for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
          const Terms& w = terms[r];
          constexpr ElementKind kTerm = ElementKind::BF16;
          if (i == 0) wgmma_sp_registers<kTerm, 0, 0, false>(sums[r], w.words[0][term], boxes[i], w.metadata[0]);
          else wgmma_sp_registers<kTerm, 0, 1, false>(sums[r], w.words[0][term], boxes[i], w.metadata[0]);
          wgmma_sp_registers<kTerm, 1, 1, false>(sums[r], w.words[1][term], boxes[i] + 4, w.metadata[0]);
        }
    wgmma_commit();
  }

  // An arrival at a barrier does not wait for loads in flight, and the wgmma of other warps can delay these loads for
  // as long as it takes to fill the stage anew. So the barrier's address is made to depend on what the loads bring.
  __device__ __forceinline__ void load_and_split(TileTerms& terms) {
    Fragments fragments;
    barrier_wait(barriers.weight_full(weight.stage), weight.parity);
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      fragments[r].load(base + weight.stage * Config::kWeightStageBytes +
                        (warpgroup * Config::kMTilesPerWarpgroup + r) * Tile::kBytes);
    u32 loaded = 0;
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      loaded ^= fragments[r].mix();
      terms[r].split(fragments[r]);
    }
    __syncwarp();
    release_weight(weight.stage, loaded & opaque_zero(p));
    weight.next();
  }
};
