// The element types: how they are stored, and their conversions.
#pragma once
#include "common/types.cuh"

// The numbers by which the host passes an element type. S4 is one of stored weights alone.
enum class ElementKind { F32 = 0, F16 = 1, BF16 = 2, S8 = 3, FP8_E4M3 = 4, I32 = 5, S4 = 6, FP8_E5M2 = 7 };

// The storage type of an element and its conversions. to_float is exact but for large integers, which it
// rounds to nearest even, as from_float does.
template <ElementKind kKind> struct Element;

template <> struct Element<ElementKind::F32> {
  using Bits = u32;
  static __device__ __forceinline__ float to_float(u32 b) { return __uint_as_float(b); }
  static __device__ __forceinline__ u32 from_float(float v) { return __float_as_uint(v); }
};

template <> struct Element<ElementKind::F16> {
  using Bits = u16;
  static __device__ __forceinline__ float to_float(u16 b) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(b));
    return v;
  }
  static __device__ __forceinline__ u16 from_float(float v) {
    u16 b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(v));
    return b;
  }
  // Converts two values; `low` takes the lower half.
  static __device__ __forceinline__ u32 pair(float low, float high) {
    u32 b;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(high), "f"(low));
    return b;
  }
};

template <> struct Element<ElementKind::BF16> {
  using Bits = u16;
  static __device__ __forceinline__ float to_float(u16 b) { return __uint_as_float((u32)b << 16); }
  static __device__ __forceinline__ u16 from_float(float v) {
    u16 b;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(v));
    return b;
  }
  static __device__ __forceinline__ u32 pair(float low, float high) {
    u32 b;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(b) : "f"(high), "f"(low));
    return b;
  }
};

// Integers round to nearest even and saturate; NaN becomes 0.
template <> struct Element<ElementKind::I32> {
  using Bits = u32;
  static __device__ __forceinline__ float to_float(u32 b) { return __int2float_rn((int)b); }
  static __device__ __forceinline__ u32 from_float(float v) {
    int b;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(b) : "f"(v));
    return (u32)b;
  }
};

template <> struct Element<ElementKind::S8> {
  using Bits = u8;
  static __device__ __forceinline__ float to_float(u8 b) { return (float)(signed char)b; }
  static __device__ __forceinline__ u8 from_float(float v) {
    int b;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(b) : "f"(v));
    return (u8)max(-128, min(127, b));
  }
};

// The 8-bit floats (sm_89) round to nearest even and saturate, Inf too; NaN becomes 0x7f.
constexpr bool is_fp8(ElementKind kind) { return kind == ElementKind::FP8_E4M3 || kind == ElementKind::FP8_E5M2; }

template <> struct Element<ElementKind::FP8_E4M3> {
  using Bits = u8;
  static __device__ __forceinline__ float to_float(u8 b) {
    u32 v;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"((u16)b));
    return Element<ElementKind::F16>::to_float((u16)v);
  }
  static __device__ __forceinline__ u8 from_float(float v) { return (u8)pair(v, 0.0f); }
  static __device__ __forceinline__ u16 pair(float low, float high) {
    u16 b;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(b) : "f"(high), "f"(low));
    return b;
  }
};

template <> struct Element<ElementKind::FP8_E5M2> {
  using Bits = u8;
  // The upper byte of an f16.
  static __device__ __forceinline__ float to_float(u8 b) { return Element<ElementKind::F16>::to_float((u16)b << 8); }
  static __device__ __forceinline__ u8 from_float(float v) { return (u8)pair(v, 0.0f); }
  static __device__ __forceinline__ u16 pair(float low, float high) {
    u16 b;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(b) : "f"(high), "f"(low));
    return b;
  }
};

// Replaces every NaN by one pattern, which the conversions above map to 0x7fff.
__device__ __forceinline__ float canonical_nan(float v) { return v == v ? v : __uint_as_float(0x7fffffffu); }
