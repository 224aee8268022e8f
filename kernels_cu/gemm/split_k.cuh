// Split-K: where a slice of K begins, how the sums of slices lie in shared memory, and the order of their reduction.
// All kernels that split K share it, so for as many slices they give the same bits.
#pragma once
#include "common/types.cuh"

// The first K tile of `slice`. A slice ends where the next one begins.
template <int kSplitK> __device__ __forceinline__ u32 slice_begin(u32 k_tiles, u32 slice) {
  return k_tiles * slice / kSplitK;
}

// Reduces all slices into the first one, ((0+1)+2)+3. The order fixes the bits.
template <class Sum, int kSplitK> __device__ __forceinline__ void reduce_in_order(Sum (&slices)[kSplitK]) {
#pragma unroll
  for (int s = 1; s < kSplitK; ++s) slices[0] += slices[s];
}

// The buffer of a CTA's sums, 4 bytes each: [token][row], or [row][token] for a column-major Y. Padding spreads the
// stores of a fragment over the banks.
template <int kRows, int kTokens, bool kColumnMajor> struct ReduceBuffer {
  static constexpr int kPitch = kColumnMajor ? kTokens + (kTokens % 16 == 0 ? 8 : 0) : kRows + 4;
  static constexpr int kBytes = 4 * kPitch * (kColumnMajor ? kRows : kTokens);
  static __device__ __forceinline__ u32 offset(int token, int row) {
    return (kColumnMajor ? row * kPitch + token : token * kPitch + row) * 4;
  }
};
