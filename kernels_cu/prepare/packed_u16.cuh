// Bytes and 16-bit halves of a 32-bit word. Bits are moved and compared, never rounded.
#pragma once
#include "common/types.cuh"

// Picks bytes 0-3 of a and 4-7 of b by the nibbles of the selector; bit 3 of a nibble spreads the byte's sign.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

__device__ __forceinline__ u32 majority(u32 a, u32 b, u32 c) { return (a & b) | (c & (a | b)); }

// Sum of unsigned 16-bit halves.
__device__ __forceinline__ u32 add_u16x2(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 d;
  asm("add.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return ((a & 0x7fff7fffu) + (b & 0x7fff7fffu)) ^ ((a ^ b) & 0x80008000u);
#endif
}

// Bits 15 and 31 of the result: whether each half of a is at least that of b.
__device__ __forceinline__ u32 u16x2_at_least(u32 a, u32 b) {
  const u32 tops = 0x80008000u, difference = (a | tops) - (b & ~tops);
  return (a & ~b) | (~(a ^ b) & difference);
}

__device__ __forceinline__ u32 min_u16x2(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 d;
  asm("min.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  const u32 larger = prmt(u16x2_at_least(a, b), 0, 0xbb99);
  return (b & larger) | (a & ~larger);
#endif
}

constexpr u32 kBothHalves = 0x00010001u;  // times a number: both halves hold it
