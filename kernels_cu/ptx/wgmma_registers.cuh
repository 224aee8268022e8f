// wgmma (sm_90a) of dense 16-bit operands with A [64 x 16] from shared memory, or from registers; D is 64 x N.
//
// Warp w, lane 4g + t has this fragment of A: a[0] is row 16w + g, columns 2t and 2t + 1; a[1] is row 16w + g + 8 of
// the same columns; a[2] and a[3] are these rows 8 columns further. So the accumulators of 16 adjacent columns, rounded
// to pairs, are a fragment of A.
#pragma once
#include "ptx/wgmma_dense.cuh"

// c is the constraint of D.
#define S24_WGMMA_OF(shape_types, d_, c, numbers, text, ...) \
  asm volatile("wgmma.mma_async.sync.aligned." shape_types " {" numbers "}, " text ";" : d_(c, 0) : __VA_ARGS__)
#define S24_WGMMA(n, ...)                                                                            \
  if constexpr (kElement == ElementKind::F16) S24_WGMMA_OF("m64n" n "k16.f32.f16.f16", __VA_ARGS__); \
  else S24_WGMMA_OF("m64n" n "k16.f32.bf16.bf16", __VA_ARGS__)

// Issues a step of 16 k: D = A * (kSign * B), or += where kAdd is 1, with A and B K-major in shared memory.
template <ElementKind kElement, int kAdd, int kSign, int kCount>
__device__ __forceinline__ void wgmma_signed(float (&d)[kCount], u64 a, u64 b) {
  static_assert(kCount == 16 || kCount == 32 || kCount == 64, "no wgmma of this width");
  if constexpr (kCount == 16 && !kAdd) {
    S24_WGMMA("32", S24_D16, "=f", S24_N16, "%16, %17, 0, 1, %18, 0, 0", "l"(a), "l"(b), "n"(kSign));
  } else if constexpr (kCount == 16) {
    S24_WGMMA("32", S24_D16, "+f", S24_N16, "%16, %17, 1, 1, %18, 0, 0", "l"(a), "l"(b), "n"(kSign));
  } else if constexpr (kCount == 32 && !kAdd) {
    S24_WGMMA("64", S24_D32, "=f", S24_N32, "%32, %33, 0, 1, %34, 0, 0", "l"(a), "l"(b), "n"(kSign));
  } else if constexpr (kCount == 32) {
    S24_WGMMA("64", S24_D32, "+f", S24_N32, "%32, %33, 1, 1, %34, 0, 0", "l"(a), "l"(b), "n"(kSign));
  } else if constexpr (!kAdd) {
    S24_WGMMA("128", S24_D64, "=f", S24_N64, "%64, %65, 0, 1, %66, 0, 0", "l"(a), "l"(b), "n"(kSign));
  } else {
    S24_WGMMA("128", S24_D64, "+f", S24_N64, "%64, %65, 1, 1, %66, 0, 0", "l"(a), "l"(b), "n"(kSign));
  }
}

// Issues a step of 16 k with A in registers and B K-major in shared memory: D = A * (kSign * B), or +=.
template <ElementKind kElement, int kAdd, int kSign, int kCount>
__device__ __forceinline__ void wgmma_signed(float (&d)[kCount], const u32 (&a)[4], u64 b) {
  static_assert(kCount == 32 || kCount == 64, "no wgmma of this width");
  if constexpr (kCount == 32 && !kAdd) {
    S24_WGMMA("64", S24_D32, "=f", S24_N32, "{%32, %33, %34, %35}, %36, 0, 1, %37, 0", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b), "n"(kSign));
  } else if constexpr (kCount == 32) {
    S24_WGMMA("64", S24_D32, "+f", S24_N32, "{%32, %33, %34, %35}, %36, 1, 1, %37, 0", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b), "n"(kSign));
  } else if constexpr (!kAdd) {
    S24_WGMMA("128", S24_D64, "=f", S24_N64, "{%64, %65, %66, %67}, %68, 0, 1, %69, 0", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b), "n"(kSign));
  } else {
    S24_WGMMA("128", S24_D64, "+f", S24_N64, "{%64, %65, %66, %67}, %68, 1, 1, %69, 0", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b), "n"(kSign));
  }
}

// Issues a step of 16 k: D = A * B, or += where kAdd is 1, with A in registers and B N-major in shared memory.
template <ElementKind kElement, int kAdd, int kCount>
__device__ __forceinline__ void wgmma_registers(float (&d)[kCount], const u32 (&a)[4], u64 b) {
  static_assert(kCount == 16 || kCount == 32 || kCount == 64, "no wgmma of this width");
  if constexpr (kCount == 16) {
    S24_WGMMA("32", S24_D16, "+f", S24_N16, "{%16, %17, %18, %19}, %20, %21, 1, 1, 1", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b), "n"(kAdd));
  } else if constexpr (kCount == 32) {
    S24_WGMMA("64", S24_D32, "+f", S24_N32, "{%32, %33, %34, %35}, %36, %37, 1, 1, 1", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b), "n"(kAdd));
  } else {
    S24_WGMMA("128", S24_D64, "+f", S24_N64, "{%64, %65, %66, %67}, %68, %69, 1, 1, 1", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b), "n"(kAdd));
  }
}
#undef S24_WGMMA
#undef S24_WGMMA_OF
