// The mainloop of elements of 16 and 8 bits. A K tile of W is multiplied in two halves, each with one box of X. One
// half is in flight while the stages of the half before it are released. A quantized W becomes elements in registers
// (quantized_half.cuh) while the half before it is in flight.
//
// K may be summed in kKChunks chunks one after the other, which gives the bits of split-K with as many slices. Products
// of fp8 may be promoted (kPromote): the tensor cores add them with few bits, so their sums move to float32 after every
// box.
#pragma once
#include "gemm/wgmma_sp/mainloop.cuh"
#include "gemm/wgmma_sp/quantized_half.cuh"

template <class Config> struct SparseMainloop : ConsumerPipeline {
  using Tile = typename Config::Tile;
  using Metadata = u32[Config::kMTilesPerWarpgroup][Tile::kWords / 2];

  u32 last_weight = 0, last_x = 0;  // stages that the wgmma in flight read

  __device__ __forceinline__ void multiply(Accumulators& accumulators, const TileScheduler& scheduler, u32) {
    const u32 tiles = scheduler.last - scheduler.first;
    if constexpr (Config::kPromote) {
      multiply_promoted(accumulators, tiles);
    } else {
      start(accumulators, scheduler);
      if constexpr (Config::kKChunks == 1) accumulate(accumulators, tiles);
      else if constexpr (Config::kStreamK) multiply_range(accumulators, scheduler);
      else multiply_k_chunks(accumulators, tiles);
    }
  }
  // Adds the sum of the earlier K chunks to that of the last one.
  __device__ __forceinline__ void finish(Accumulators& accumulators, const TileScheduler& scheduler) const {
    if constexpr (Config::kStreamK && Config::kKChunks > 1) add_saved(accumulators, saved_chunks(scheduler));
  }

 private:
  static __device__ __forceinline__ u64 x_descriptor(u32 address) {
    if constexpr (Config::kXColumnMajor)
      return matrix_descriptor_n_major<2 * Config::kTokenGroup, Config::kTokenGroupBytes>(address);
    else return matrix_descriptor(address);
  }

  // From the descriptor of a box of X to that of the second half of its columns.
  static constexpr u64 kSecondX = Config::kXColumnMajor ? 4 * Config::kTokenGroup : 4;

  // The address of this warpgroup's tiles in a stage of W.
  __device__ __forceinline__ u32 weight_address(u32 stage) const {
    return base + stage * Config::kWeightStageBytes + warpgroup * Config::kMTilesPerWarpgroup * Tile::kBytes;
  }

  // Issues two steps: half a K tile of W with one stage of X. wgmma may read the metadata at any time until it is done,
  // so two halves in flight have different registers for it.
  template <int kHalf> __device__ __forceinline__ void multiply_half(Accumulators& accumulators, Metadata& metadata) {
    const u32 values = weight_address(weight.stage);
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      load_shared_words(metadata[r], values + r * Tile::kBytes + Tile::kValueBytes +
                                         (threadIdx.x % 128 * Tile::kWords + kHalf * Tile::kWords / 2) * 4);
    barrier_wait(barriers.x_full(x.stage), x.parity);
    const u64 a = matrix_descriptor(values);
    const u64 b = x_descriptor(base + Config::kXAt + x.stage * Config::kXStageBytes);
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {  // the selector is an immediate; descriptors count 16 bytes
      const u64 at = a + r * (Tile::kBytes >> 4) + kHalf * 4;
      wgmma_sp<Config::kElement, 0, Config::kPromote ? 0 : 1, Config::kXColumnMajor, Config::kXElement>(
          accumulators[r], at, b, metadata[r][0]);
      wgmma_sp<Config::kElement, Config::kEightBit ? 0 : 1, 1, Config::kXColumnMajor, Config::kXElement>(
          accumulators[r], at + 2, b + kSecondX, metadata[r][Config::kEightBit ? 1 : 0]);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release_previous() const {
    release_x(last_x);
    release_weight(last_weight);
  }

  // Adds the products of the next K tiles to the accumulators.
  __device__ __forceinline__ void accumulate(Accumulators& accumulators, u32 tiles) {
    if constexpr (Config::kQuantized) accumulate_quantized(accumulators, tiles);
    else accumulate_elements(accumulators, tiles);
  }
  __device__ __forceinline__ void accumulate_elements(Accumulators& accumulators, u32 tiles) {
    Metadata first, second;
    for (u32 at = 0; at < tiles; ++at) {
      barrier_wait(barriers.weight_full(weight.stage), weight.parity);
      multiply_half<0>(accumulators, first);
      wgmma_wait<1>();  // only the half just issued is in flight
      if (at > 0) release_previous();
      last_x = x.stage, last_weight = weight.stage;
      x.next();
      multiply_half<1>(accumulators, second);
      wgmma_wait<1>();
      release_x(last_x);
      last_x = x.stage;
      x.next(), weight.next();
    }
    wgmma_wait<0>();
    fence(accumulators);
    if (tiles > 0) release_previous();
  }

  // While wgmma multiplies a half, the threads make the elements of the next one and load the stored values of the one
  // after it. The issue of wgmma waits for the elements, so a stage of W has been read when it is released.
  __device__ __forceinline__ void accumulate_quantized(Accumulators& accumulators, u32 tiles) {
    const typename StoredHalves<Config>::Offsets offsets;
    StoredHalves<Config> stored;
    QuantizedHalf<Config> first, second;
    const auto load_first = [&] {
      barrier_wait(barriers.weight_full(weight.stage), weight.parity);
      stored.template load<0>(weight_address(weight.stage), offsets);
    };
    const auto multiply = [&](const QuantizedHalf<Config>& half, u32 x_stage) {
      if constexpr (!Config::kJointStages) barrier_wait(barriers.x_full(x_stage), x.parity);
      const u64 b = x_descriptor(base + Config::kXAt + x_stage * Config::kXStageBytes);
      wgmma_fence();
      half.multiply(accumulators, b, b + kSecondX);
      wgmma_commit();
    };
    if (tiles > 0) load_first();
    for (u32 at = 0; at < tiles; ++at) {
      const u32 stage = weight.stage;
      first.dequantize(stored, opaque_zero(p));
      stored.template load<1>(weight_address(stage), offsets);
      multiply(first, Config::kJointStages ? 2 * stage : x.stage);
      wgmma_wait<1>();
      if (at > 0) release_last();
      last_x = x.stage, last_weight = stage;
      x.next(), weight.next();
      second.dequantize(stored, opaque_zero(p));
      if (at + 1 < tiles) load_first();
      multiply(second, Config::kJointStages ? 2 * stage + 1 : x.stage);
      if constexpr (!Config::kJointStages) release_weight(stage);
      wgmma_wait<1>();
      if constexpr (!Config::kJointStages) {
        release_x(last_x);
        last_x = x.stage;
        x.next();
      }
    }
    wgmma_wait<0>();
    fence(accumulators);
    if (tiles > 0) release_last();
  }
  // Releases the stage of X that the last finished half has read, or the joint stage if it was its second half.
  __device__ __forceinline__ void release_last() const {
    if constexpr (Config::kJointStages) release_weight(last_weight);
    else release_x(last_x);
  }

  // Sums all of K in kKChunks chunks. Registers hold as many accumulators of the earlier chunks as they can, the
  // workspace holds the others.
  __device__ __forceinline__ void multiply_k_chunks(Accumulators& accumulators, u32 tiles) {
    // The address is computed anew for each use: few registers are left.
    const auto saved = [&] { return p.partials + workspace_offset(blockIdx.x, warpgroup, 0); };
    accumulate(accumulators, tiles / Config::kKChunks);
#pragma unroll 1
    for (u32 chunk = 1; chunk < Config::kKChunks; ++chunk) {
      Accumulator held[Config::kHeldAccumulators > 0 ? Config::kHeldAccumulators : 1];
      // The compiler would keep a plain copy and its original in one place, and spill both.
#pragma unroll
      for (int i = 0; i < Config::kHeldAccumulators; ++i)
        held[i] = accumulator_of(bits_of(accumulators[i / Config::kAccumulators][i % Config::kAccumulators]) ^
                                 opaque_zero(p));
      save_accumulators<Config::kHeldAccumulators>(accumulators, saved());
      clear(accumulators);
      accumulate(accumulators, tiles * (chunk + 1) / Config::kKChunks - tiles * chunk / Config::kKChunks);
#pragma unroll
      for (int i = 0; i < Config::kHeldAccumulators; ++i)
        accumulators[i / Config::kAccumulators][i % Config::kAccumulators] += held[i];
      add_saved<Config::kHeldAccumulators>(accumulators, saved());
    }
  }

  // Sums the K tiles that a stream-K range has of a work tile. Chunks may end anywhere in the range. The accumulators
  // begin as the sum of the first chunk so far; the sum of the chunks before it waits in the workspace. The additions
  // stand in no branch, because the compiler would move the accumulators there.
  __device__ __forceinline__ void multiply_range(Accumulators& accumulators, const TileScheduler& scheduler) {
    const u32 tiles = (u32)p.k_tiles;
    const auto begin = [tiles](u32 chunk) { return tiles * chunk / Config::kKChunks; };
    float* saved = saved_chunks(scheduler);
    u32 tile = scheduler.first, chunk = tile ? (tile * Config::kKChunks - 1) / tiles : 0;  // the previous tile's chunk
#pragma unroll 1
    while (true) {
      const u32 end = min(begin(chunk + 1), scheduler.last);
      accumulate(accumulators, end - tile);
      if (end == scheduler.last) break;
      if constexpr (Config::kKChunks > 2) add_saved(accumulators, saved, begin(chunk) > 0 ? ~0u : 0);
      save_accumulators(accumulators, saved);
      clear(accumulators);
      tile = end, ++chunk;
    }
  }
  __device__ __forceinline__ float* saved_chunks(const TileScheduler& scheduler) const {
    return p.blocked_sums + workspace_offset(workspace_cta(scheduler), warpgroup, 0);
  }

  // Sums all of K box by box in float32. The wgmma of the other warpgroup run while this one adds.
  __device__ __forceinline__ void multiply_promoted(Accumulators& totals, u32 tiles) {
    clear(totals);
    Accumulators sums;
    Metadata metadata;
    for (u32 at = 0; at < tiles; ++at) {
      barrier_wait(barriers.weight_full(weight.stage), weight.parity);
      multiply_half<0>(sums, metadata);
      promote(totals, sums);
      multiply_half<1>(sums, metadata);
      promote(totals, sums);
      release_weight(weight.stage);
      weight.next();
    }
  }
  __device__ __forceinline__ void promote(Accumulators& totals, Accumulators& sums) {
    wgmma_wait<0>();
    fence(sums);
    release_x(x.stage);
    x.next();
    add(totals, sums);
  }
};
