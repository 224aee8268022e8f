// Philox4x32-10, a counter-based generator: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, Parallel Random
// Numbers: As Easy as 1, 2, 3 (SC 2011), section 3.3 and its constants.
#pragma once
#include "common/types.cuh"

// Replaces a counter by its four random words.
__device__ __forceinline__ void philox(u32 (&words)[4], const u32 (&key)[2]) {
#pragma unroll
  for (u32 round = 0; round < 10; ++round) {
    const u64 left = (u64)words[0] * 0xd2511f53u, right = (u64)words[2] * 0xcd9e8d57u;
    words[0] = (u32)(right >> 32) ^ words[1] ^ (key[0] + round * 0x9e3779b9u), words[1] = (u32)right;
    words[2] = (u32)(left >> 32) ^ words[3] ^ (key[1] + round * 0xbb67ae85u), words[3] = (u32)left;
  }
}
