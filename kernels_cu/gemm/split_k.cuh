// Slices of K: where they begin, how their sums lie in shared memory, how they are folded. What the kernels that cut
// K share: for as many slices they give the same bits.
#pragma once
#include "common/types.cuh"

// The first tile of K that belongs to `slice`; the end of a slice is the next one's beginning.
template <int kSplitK> __device__ __forceinline__ u32 slice_begin(u32 k_tiles, u32 slice) {
  return k_tiles * slice / kSplitK;
}

// Folds all into the first, from the first to the last, ((0+1)+2)+3: this order fixes the bits.
template <class Sum, int kSplitK> __device__ __forceinline__ void reduce_in_order(Sum (&slices)[kSplitK]) {
#pragma unroll
  for (int s = 1; s < kSplitK; ++s) slices[0] += slices[s];
}

// The sums of a block that are to be folded, 4 bytes each: [token][row], or [row][token] where Y lies in columns.
// The padding keeps the fragment stores off each other's banks.
template <int kRows, int kTileN, bool kColumns> struct ReduceBuffer {
  static constexpr int kPitch = kColumns ? kTileN + (kTileN % 16 == 0 ? 8 : 0) : kRows + 4;
  static constexpr int kBytes = 4 * kPitch * (kColumns ? kRows : kTileN);
  static __device__ __forceinline__ u32 offset(int token, int row) {
    return (kColumns ? row * kPitch + token : token * kPitch + row) * 4;
  }
};
