// Boxes of X that end with its tokens. Beyond the matrix TMA takes three times as long to fill a line with zeros as to
// load one. Lines that are not loaded keep what they held: no result is stored for their tokens.
#pragma once
#include "common/types.cuh"

template <class Config> struct TokenBoxes {
  static constexpr bool kLines = Config::kDenseMajor == Major::K;  // a line of a box is a token; else 64 tokens are
  static constexpr u32 kGroup = kLines ? 1 : 64;

  // Returns how many tokens of the tile that begins with `token` are loaded.
  static __device__ __forceinline__ constexpr u32 loaded(u32 token, u32 tokens) {
    const u32 left = tokens > token ? tokens - token : 0, whole = (left + kGroup - 1) / kGroup * kGroup;
    return whole < (u32)Config::kTileN ? whole : (u32)Config::kTileN;
  }
  // Returns the map whose boxes have `loaded` tokens; at least one.
  template <class Params> static __device__ __forceinline__ const TensorMap* map(const Params& p, u32 loaded) {
    return loaded < (u32)Config::kTileN ? &p.right_tail_map : &p.right_map;
  }
};
