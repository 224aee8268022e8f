// The mainloop of float32 in two bf16 terms, three products. W was split when it was packed (kWPresplit): a K tile
// holds both terms, side by side in each row of 128 bytes, where wgmma reads them. X comes in two boxes of 64 columns,
// the low term first. The small products, low * high and high * low, are added before high * high. Sums move from the
// tensor cores to float32 every kTilesPerPromotion tiles.
//
// Shared memory limits this loop: wgmma.sp reads X at the full rate of 128 bytes per cycle, and all other reads and the
// loads of the producers come on top.
#pragma once
#include "gemm/wgmma_sp/mainloop.cuh"

template <class Config> struct PresplitMainloop : ConsumerPipeline {
  using Metadata = u32[Config::kMTilesPerWarpgroup][1];

  __device__ __forceinline__ void multiply(Accumulators& totals, const TileScheduler& scheduler, u32) {
    static_assert(Config::kTilesPerPromotion % 2 == 0, "two K tiles alternate between registers for metadata");
    start(totals, scheduler);
    const u32 begin = scheduler.first, end = scheduler.last;
    for (u32 tile = begin; tile < end;) {
      Accumulators sums;
      Metadata first, second;
      issue<0>(sums, first);
      advance();
#pragma unroll 1
      while (++tile < end) {
        issue<1>(sums, second);
        release_previous<1>();
        advance();
        if (++tile == end || (tile - begin) % Config::kTilesPerPromotion == 0) break;
        issue<1>(sums, first);
        release_previous<1>();
        advance();
      }
      release_previous<0>();
      fence(sums);
      add(totals, sums);
    }
  }
  __device__ __forceinline__ void finish(Accumulators&, const TileScheduler&) const {}

 private:
  __device__ __forceinline__ void advance() { x.next(), x.next(), weight.next(); }
  // Waits until at most kPending tiles are in flight, then releases the previous tile's stages.
  template <int kPending> __device__ __forceinline__ void release_previous() const {
    wgmma_wait<kPending>();
    release_x(x.stage >= 2 ? x.stage - 2 : x.stage + Config::kXStages - 2);
    release_x(x.stage >= 1 ? x.stage - 1 : Config::kXStages - 1);
    release_weight(weight.stage >= 1 ? weight.stage - 1 : Config::kWeightStages - 1);
  }

  // Issues the three products of a K tile.
  template <int kAdd> __device__ __forceinline__ void issue(Accumulators& sums, Metadata& metadata) {
    const u32 values = base + weight.stage * Config::kWeightStageBytes +
                       warpgroup * Config::kMTilesPerWarpgroup * Config::kWeightTileBytes;
    barrier_wait(barriers.weight_full(weight.stage), weight.parity);
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      load_shared_words(metadata[r], values + r * Config::kWeightTileBytes + Tile::kValueBytes + threadIdx.x % 128 * 4);
    u64 boxes[2];
    wait_for_boxes(boxes);
    const u64 high = matrix_descriptor(values);
    wgmma_fence();
    multiply_box<kAdd>(sums, high, boxes[0], metadata);
    multiply_box<1>(sums, high + 4, boxes[1], metadata);
    multiply_box<1>(sums, high, boxes[1], metadata);
    wgmma_commit();
  }
  // Multiplies one term of W with one term of X, in two steps. Descriptors count 16 bytes.
  template <int kAdd>
  __device__ __forceinline__ void multiply_box(Accumulators& sums, u64 a, u64 b, const Metadata& metadata) const {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      const u64 at = a + r * (Config::kWeightTileBytes >> 4);
      wgmma_sp<ElementKind::BF16, 0, kAdd, false>(sums[r], at, b, metadata[r][0]);
      wgmma_sp<ElementKind::BF16, 1, 1, false>(sums[r], at + 2, b + 4, metadata[r][0]);
    }
  }
};
