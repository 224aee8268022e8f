// wgmma.sp m64nNk32 (sm_90a): D[64 x N] += A[64 x 32, 2:4] * B[32 x N], all operands in shared memory.
//
// A and B are K-major under the 128-byte swizzle. The accumulators of warp w, lane 4g + t: d[4j], d[4j + 1] are row
// 16w + g, columns 8j + 2t and + 1; d[4j + 2], d[4j + 3] the same of row + 8.
#pragma once
#include "ptx_tma.cuh"

// Descriptor of an operand at `address`: 8-row groups of 1024 bytes, 128-byte swizzle (PTX ISA, "Matrix Descriptor Format").
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties accumulators to this point of the program: the compiler may otherwise copy them before a wait, or after an issue.
template <int kCount> __device__ __forceinline__ void wgmma_settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Lists of accumulators: S24_D8(i) are the operands, the strings their numbers in the assembly text.
#define S24_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define S24_D8(i) S24_D4(i), S24_D4(i + 4)
#define S24_D16(i) S24_D8(i), S24_D8(i + 8)
#define S24_D32(i) S24_D16(i), S24_D16(i + 16)
#define S24_N4 \
  "%0, %1, %2, %3"
#define S24_N8 S24_N4 \
  ", %4, %5, %6, %7"
#define S24_N16 S24_N8 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define S24_N32 S24_N16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define S24_N64 S24_N32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define S24_N96 S24_N64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define S24_N128 S24_N96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// numbers: the accumulators; a to s: the numbers of the operands after them.
#define S24_WGMMA_SP(n, type, numbers, a_, b_, m_, s_, ...)                                                    \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, 1, 0;\n\t"                                               \
               "wgmma.mma_async.sp.sync.aligned.m64n" n "k32.f32." type "." type " {" numbers "}, " a_ ", " b_ \
               ", " m_ ", " s_ ", p, 1, 1, 0, 0;\n\t}"                                                         \
               : __VA_ARGS__                                                                                   \
               : "l"(a), "l"(b), "r"(metadata), "n"(kSelector))
#define S24_WGMMA_SP_N(n, ...)                                                 \
  if constexpr (kElement == S24_F16) S24_WGMMA_SP(n, "f16", __VA_ARGS__);      \
  else S24_WGMMA_SP(n, "bf16", __VA_ARGS__)

// One asynchronous step. kSelector: which lane pair of every quad holds the metadata; `metadata` as in mma.sp m16n8k32.
template <int kElement, int kSelector, int kCount>
__device__ __forceinline__ void wgmma_sp(float (&d)[kCount], u64 a, u64 b, u32 metadata) {
  if constexpr (kCount == 4) {
    S24_WGMMA_SP_N("8", S24_N4, "%4", "%5", "%6", "%7", S24_D4(0));
  } else if constexpr (kCount == 8) {
    S24_WGMMA_SP_N("16", S24_N8, "%8", "%9", "%10", "%11", S24_D8(0));
  } else if constexpr (kCount == 16) {
    S24_WGMMA_SP_N("32", S24_N16, "%16", "%17", "%18", "%19", S24_D16(0));
  } else if constexpr (kCount == 32) {
    S24_WGMMA_SP_N("64", S24_N32, "%32", "%33", "%34", "%35", S24_D32(0));
  } else if constexpr (kCount == 64) {
    S24_WGMMA_SP_N("128", S24_N64, "%64", "%65", "%66", "%67", S24_D32(0), S24_D32(32));
  } else if constexpr (kCount == 96) {
    S24_WGMMA_SP_N("192", S24_N96, "%96", "%97", "%98", "%99", S24_D32(0), S24_D32(32), S24_D32(64));
  } else if constexpr (kCount == 128) {
    S24_WGMMA_SP_N("256", S24_N128, "%128", "%129", "%130", "%131", S24_D32(0), S24_D32(32), S24_D32(64), S24_D32(96));
  } else {
    static_assert(kCount == 4, "no wgmma of this width");
  }
}
