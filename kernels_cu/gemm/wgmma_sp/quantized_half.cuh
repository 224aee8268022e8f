// Half a K tile of a quantized W, two steps of wgmma: as a thread loads it, and as the elements that wgmma reads from
// the thread's registers.
#pragma once
#include "common/dequantize.cuh"
#include "gemm/wgmma_sp/accumulators.cuh"

// A thread's part of half an m64 tile.
template <class Config> struct StoredHalf {
  using Tile = typename Config::Tile;
  using Scales = RowScales<Config::kElement, Config::kWeightScale>;
  static constexpr bool kNibbles = Config::kWeight == ElementKind::S4;
  static constexpr int kWordsPerStep = kNibbles ? 1 : 2;
  u32 words[2 * kWordsPerStep], metadata[1];
  Scales scales[Tile::kGroups == 4 ? 2 : 1];

  // The offsets in a tile at which a thread finds its part of each kind. The compiler must not merge them with
  // constants, which loads add for nothing.
  struct Offsets {
    u32 values, metadata, scales;

    __device__ __forceinline__ Offsets() {
      const u32 thread = threadIdx.x % 128;
      values = thread * 16, metadata = thread * Tile::kWords * 4, scales = thread / 4 * 2 * Scales::kBytes;
      asm volatile("" : "+r"(values), "+r"(metadata), "+r"(scales));
    }
  };

  template <int kHalf> __device__ __forceinline__ void load(u32 tile, const Offsets& at) {
    load_shared_words(words, tile + at.values + kHalf * (kNibbles ? 8 : 2048));
    load_shared_words(metadata, tile + at.metadata + (Tile::kValueBytes + kHalf * 4));
    load_scales<kHalf * Tile::kGroups / 2>(scales[0], tile, at);
    if constexpr (Tile::kGroups == 4) load_scales<kHalf * 2 + 1>(scales[1], tile, at);
  }
  // Makes the fragment of a step.
  template <int kStep> __device__ __forceinline__ void dequantize(u32 (&to)[4]) const {
    const Scales& of = scales[Tile::kGroups == 4 ? kStep : 0];
    const u32* stored = words + kStep * kWordsPerStep;
    to[0] = of.template multiply<0>(element_pair<0>(stored[0]));
    to[1] = of.template multiply<1>(element_pair<1>(stored[0]));
    to[2] = of.template multiply<0>(element_pair<kNibbles ? 2 : 0>(stored[kWordsPerStep - 1]));
    to[3] = of.template multiply<1>(element_pair<kNibbles ? 3 : 1>(stored[kWordsPerStep - 1]));
  }

 private:
  // Loads the scales of this thread's two rows for a group of the tile's columns.
  template <int kGroup>
  static __device__ __forceinline__ void load_scales(Scales& scales, u32 tile, const Offsets& at) {
    scales.load(tile + at.scales + (Tile::kScalesAt + kGroup * Tile::kRows * Scales::kBytes));
  }
  template <int kPart> static __device__ __forceinline__ u32 element_pair(u32 word) {
    return stored_pair<Config::kWeight, Config::kElement, kPart>(word);
  }
};

// A thread's part of half a K tile of all m64 tiles of its warpgroup.
template <class Config> struct StoredHalves {
  using Offsets = typename StoredHalf<Config>::Offsets;
  StoredHalf<Config> of[Config::kMTilesPerWarpgroup];

  template <int kHalf> __device__ __forceinline__ void load(u32 tile, const Offsets& at) {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      of[r].template load<kHalf>(tile + r * Config::Tile::kBytes, at);
  }
};

// The operands of wgmma for half a K tile of all m64 tiles of a warpgroup. wgmma may read its registers until it is
// done, so two halves in flight use different registers.
template <class Config> struct QuantizedHalf {
  u32 elements[Config::kMTilesPerWarpgroup][2][4], metadata[Config::kMTilesPerWarpgroup];

  // `zero` is 0, which the compiler must not know: it would load metadata straight to the registers that wgmma reads,
  // and then wait for all wgmma before each load.
  __device__ __forceinline__ void dequantize(const StoredHalves<Config>& stored, u32 zero) {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r) {
      metadata[r] = stored.of[r].metadata[0] ^ zero;
      stored.of[r].template dequantize<0>(elements[r][0]);
      stored.of[r].template dequantize<1>(elements[r][1]);
    }
  }
  // The m64 tiles follow each other within a step, so that a descriptor is moved to uniform registers once.
  __device__ __forceinline__ void multiply(Accumulators& accumulators, u64 x, u64 second_x) const {
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      wgmma_sp_registers<Config::kElement, 0, 1, Config::kXColumnMajor>(accumulators[r], elements[r][0], x,
                                                                        metadata[r]);
#pragma unroll
    for (int r = 0; r < Config::kMTilesPerWarpgroup; ++r)
      wgmma_sp_registers<Config::kElement, 1, 1, Config::kXColumnMajor>(accumulators[r], elements[r][1], second_x,
                                                                        metadata[r]);
  }
};
