// Conversion to and from 8-bit floats (sm_89).
#pragma once
#include "common/types.cuh"

// Two floats as fp8_e4m3, rounded to nearest even and clamped to +-448; NaN becomes 0x7f. `low` takes the lower byte.
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
  u16 b;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(b) : "f"(high), "f"(low));
  return b;
}

// Two values of fp8_e4m3, the first in the lower byte, as f16 values, which are the same.
__device__ __forceinline__ u32 f16_pair_of_e4m3(u16 pair) {
  u32 b;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(b) : "h"(pair));
  return b;
}
