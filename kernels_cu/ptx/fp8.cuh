// Conversion to 8-bit floats (sm_89).
#pragma once
#include "common/types.cuh"

// Two floats as fp8_e4m3, rounded to nearest even and clamped to +-448; NaN becomes 0x7f. `low` takes the lower byte.
__device__ __forceinline__ u16 e4m3_pair(float low, float high) {
  u16 b;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(b) : "f"(high), "f"(low));
  return b;
}
