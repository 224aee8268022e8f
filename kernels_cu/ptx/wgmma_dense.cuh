// wgmma (sm_90a) of two dense operands in shared memory: D[64 x N] += A[64 x K] * B[K x N]; K is 32 bytes: 16 of 16-bit
// elements, 32 of 8-bit ones, which are K-major.
//
// Either operand is K-major or M- (N-) major, under the swizzle of its lines' length: 32, 64 or 128 bytes. A line of a
// K-major operand has k of one m (n). A line of the other order has m (n) of one k, and further m (n) lie kGroupBytes
// behind. The accumulators are laid out as in ptx/wgmma.cuh.
#pragma once
#include "ptx/wgmma.cuh"

enum class Major { K = 0, MN = 1 };

// The descriptors of one operand. They count 16 bytes, and each step adds kStep.
template <Major kMajor, u32 kLineBytes, u32 kGroupBytes> struct DenseOperand {
  static constexpr u32 kStep = (kMajor == Major::K ? 32 : 16 * kLineBytes) >> 4;
  static constexpr u64 kSwizzle = kLineBytes == 128 ? 1 : kLineBytes == 64 ? 2 : 3;
  // `address` is that of the first line, which lies a multiple of 8 lines into the swizzle's pattern.
  static __device__ __forceinline__ u64 descriptor(u32 address) {
    return kSwizzle << 62 | (u64)(8 * kLineBytes >> 4) << 32 | (u64)(kMajor == Major::K ? 1 : kGroupBytes >> 4) << 16 |
           (address & 0x3ffff) >> 4;
  }
};

#define S24_WGMMA_OF(shape_types, tail, d_, c, numbers, a_, b_)                                         \
  asm volatile("wgmma.mma_async.sync.aligned." shape_types " {" numbers "}, " a_ ", " b_ ", 1" tail ";" \
               : d_(c, 0)                                                                               \
               : "l"(a), "l"(b), "n"((int)kMajorA), "n"((int)kMajorB))
#define S24_WGMMA(n, d_, numbers, a_, b_, ta_, tb_)                                                 \
  if constexpr (kElement == ElementKind::F16)                                                       \
    S24_WGMMA_OF("m64n" n "k16.f32.f16.f16", ", 1, 1, " ta_ ", " tb_, d_, "+f", numbers, a_, b_);   \
  else if constexpr (kElement == ElementKind::BF16)                                                 \
    S24_WGMMA_OF("m64n" n "k16.f32.bf16.bf16", ", 1, 1, " ta_ ", " tb_, d_, "+f", numbers, a_, b_); \
  else if constexpr (kElement == ElementKind::FP8_E4M3)                                             \
    S24_WGMMA_OF("m64n" n "k32.f32.e4m3.e4m3", ", 1, 1", d_, "+f", numbers, a_, b_);                \
  else S24_WGMMA_OF("m64n" n "k32.s32.s8.s8", "", d_, "+r", numbers, a_, b_)

// Issues one step. Sum is int for s8, else float.
template <ElementKind kElement, Major kMajorA, Major kMajorB, class Sum, int kCount>
__device__ __forceinline__ void wgmma_dense(Sum (&d)[kCount], u64 a, u64 b) {
  static_assert(
      kElement == ElementKind::F16 || kElement == ElementKind::BF16 || (kMajorA == Major::K && kMajorB == Major::K),
      "8-bit elements are K-major");
  if constexpr (kCount == 32) {
    S24_WGMMA("64", S24_D32, S24_N32, "%32", "%33", "%34", "%35");
  } else if constexpr (kCount == 64) {
    S24_WGMMA("128", S24_D64, S24_N64, "%64", "%65", "%66", "%67");
  } else if constexpr (kCount == 96) {
    S24_WGMMA("192", S24_D96, S24_N96, "%96", "%97", "%98", "%99");
  } else if constexpr (kCount == 128) {
    S24_WGMMA("256", S24_D128, S24_N128, "%128", "%129", "%130", "%131");
  } else {
    static_assert(kCount < 0, "no wgmma of this width");
  }
}
#undef S24_WGMMA
#undef S24_WGMMA_OF
