// wgmma.sp (sm_90a): D[64 x N] (+)= A[64 x K, 2:4] * B[K x N], operands in shared memory; K is 32 for 16-bit
// elements, 64 for 8-bit ones: 32 bytes of a row of A, 64 of a row of B.
//
// A is K-major under the 128-byte swizzle. B is K-major under the same swizzle, or N-major. Warp w, lane 4g + t has
// these accumulators: d[4j] and d[4j + 1] are row 16w + g, columns 8j + 2t and 8j + 2t + 1; d[4j + 2] and d[4j + 3] are
// row 16w + g + 8 of the same columns.
#pragma once
#include "ptx/tma.cuh"

// The descriptor of a K-major operand at `address`: 8-row groups of 1024 bytes, 128-byte swizzle (PTX ISA, "Matrix
// Descriptor Format").
__device__ __forceinline__ u64 matrix_descriptor(u32 address) {
  return (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address & 0x3ffff) >> 4;
}

// The descriptor of an N-major operand of 16-bit elements. Groups of kLineBytes along N lie kGroupBytes apart. A group
// has a line for every k, under the swizzle of the line's width (16 bytes: none).
template <int kLineBytes, int kGroupBytes>
__device__ __forceinline__ constexpr u64 matrix_descriptor_n_major(u32 address) {
  constexpr u64 kSwizzle = kLineBytes == 128 ? 1 : kLineBytes == 64 ? 2 : kLineBytes == 32 ? 3 : 0;
  constexpr u64 kEightLines = 8 * kLineBytes >> 4, kGroup = kGroupBytes >> 4;
  // Without a swizzle, the two distances change places.
  constexpr u64 kLeading = kSwizzle ? kGroup : kEightLines, kStride = kSwizzle ? kEightLines : kGroup;
  return kSwizzle << 62 | kStride << 32 | kLeading << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties accumulators to this point of the program. Otherwise the compiler may copy them before a wait, or after an
// issue.
template <int kCount> __device__ __forceinline__ void wgmma_fence_operand(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount> __device__ __forceinline__ void wgmma_fence_operand(int (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// The text and the operands of the instruction. S24_D*(c, i) lists accumulators from the i-th under constraint c,
// S24_N* their numbers in the text.
#define S24_D4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define S24_D8(c, i) S24_D4(c, i), S24_D4(c, i + 4)
#define S24_D12(c, i) S24_D8(c, i), S24_D4(c, i + 8)
#define S24_D16(c, i) S24_D12(c, i), S24_D4(c, i + 12)
#define S24_D24(c, i) S24_D16(c, i), S24_D8(c, i + 16)
#define S24_D32(c, i) S24_D24(c, i), S24_D8(c, i + 24)
#define S24_D40(c, i) S24_D32(c, i), S24_D8(c, i + 32)
#define S24_D48(c, i) S24_D40(c, i), S24_D8(c, i + 40)
#define S24_D56(c, i) S24_D48(c, i), S24_D8(c, i + 48)
#define S24_D64(c, i) S24_D56(c, i), S24_D8(c, i + 56)
#define S24_D72(c, i) S24_D64(c, i), S24_D8(c, i + 64)
#define S24_D80(c, i) S24_D72(c, i), S24_D8(c, i + 72)
#define S24_D88(c, i) S24_D80(c, i), S24_D8(c, i + 80)
#define S24_D96(c, i) S24_D88(c, i), S24_D8(c, i + 88)
#define S24_D104(c, i) S24_D96(c, i), S24_D8(c, i + 96)
#define S24_D112(c, i) S24_D104(c, i), S24_D8(c, i + 104)
#define S24_D120(c, i) S24_D112(c, i), S24_D8(c, i + 112)
#define S24_D128(c, i) S24_D120(c, i), S24_D8(c, i + 120)
#define S24_N4 "%0, %1, %2, %3"
#define S24_N8 S24_N4 ", %4, %5, %6, %7"
#define S24_N12 S24_N8 ", %8, %9, %10, %11"
#define S24_N16 S24_N12 ", %12, %13, %14, %15"
#define S24_N24 S24_N16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define S24_N32 S24_N24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define S24_N40 S24_N32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define S24_N48 S24_N40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define S24_N56 S24_N48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define S24_N64 S24_N56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define S24_N72 S24_N64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define S24_N80 S24_N72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define S24_N88 S24_N80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define S24_N96 S24_N88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define S24_N104 S24_N96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define S24_N112 S24_N104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define S24_N120 S24_N112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define S24_N128 S24_N120 ", %120, %121, %122, %123, %124, %125, %126, %127"

// shape_types: shape and types in the instruction's name. tail: operands that only some types have. d_, c: the list of
// accumulators, and their constraint. numbers: the accumulators' operand numbers; a_, b_, m_, s_, f_: the next five.
#define S24_WGMMA_SP_OF(shape_types, tail, d_, c, numbers, a_, b_, m_, s_, f_)                                         \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " f_ ", 0;\n\t"                                                   \
               "wgmma.mma_async.sp.sync.aligned." shape_types " {" numbers "}, " a_ ", " b_ ", " m_ ", " s_ ", p" tail \
               ";\n\t}"                                                                                                \
               : d_(c, 0)                                                                                              \
               : "l"(a), "l"(b), "r"(metadata), "n"(kSelector), "n"(kAdd))
#define S24_WGMMA_SP(n, d_, ...)                                                          \
  if constexpr (kElement == ElementKind::F16 && !kNMajor)                                 \
    S24_WGMMA_SP_OF("m64n" n "k32.f32.f16.f16", ", 1, 1, 0, 0", d_, "+f", __VA_ARGS__);   \
  else if constexpr (kElement == ElementKind::F16)                                        \
    S24_WGMMA_SP_OF("m64n" n "k32.f32.f16.f16", ", 1, 1, 0, 1", d_, "+f", __VA_ARGS__);   \
  else if constexpr (kElement == ElementKind::BF16 && !kNMajor)                           \
    S24_WGMMA_SP_OF("m64n" n "k32.f32.bf16.bf16", ", 1, 1, 0, 0", d_, "+f", __VA_ARGS__); \
  else if constexpr (kElement == ElementKind::BF16)                                       \
    S24_WGMMA_SP_OF("m64n" n "k32.f32.bf16.bf16", ", 1, 1, 0, 1", d_, "+f", __VA_ARGS__); \
  else if constexpr (kElement == ElementKind::FP8_E4M3 && kXElement == kElement)          \
    S24_WGMMA_SP_OF("m64n" n "k64.f32.e4m3.e4m3", ", 1, 1", d_, "+f", __VA_ARGS__);       \
  else if constexpr (kElement == ElementKind::FP8_E4M3)                                   \
    S24_WGMMA_SP_OF("m64n" n "k64.f32.e4m3.e5m2", ", 1, 1", d_, "+f", __VA_ARGS__);       \
  else if constexpr (kElement == ElementKind::FP8_E5M2 && kXElement == kElement)          \
    S24_WGMMA_SP_OF("m64n" n "k64.f32.e5m2.e5m2", ", 1, 1", d_, "+f", __VA_ARGS__);       \
  else if constexpr (kElement == ElementKind::FP8_E5M2)                                   \
    S24_WGMMA_SP_OF("m64n" n "k64.f32.e5m2.e4m3", ", 1, 1", d_, "+f", __VA_ARGS__);       \
  else S24_WGMMA_SP_OF("m64n" n "k64.s32.s8.s8", "", d_, "+r", __VA_ARGS__)

// Issues one step. Sum is int for s8, else float. kSelector names the lane pair of every quad that holds the metadata
// of 16-bit elements, and is 0 for others; `metadata` is as in mma.sp. With kAdd = 0, d is overwritten. With kNMajor, B
// is N-major. An element of fp8 may be multiplied with either kind of fp8.
template <ElementKind kElement, int kSelector, int kAdd, bool kNMajor, ElementKind kXElement = kElement, class Sum,
          int kCount>
__device__ __forceinline__ void wgmma_sp(Sum (&d)[kCount], u64 a, u64 b, u32 metadata) {
  if constexpr (kCount == 4) {
    S24_WGMMA_SP("8", S24_D4, S24_N4, "%4", "%5", "%6", "%7", "%8");
  } else if constexpr (kCount == 8) {
    S24_WGMMA_SP("16", S24_D8, S24_N8, "%8", "%9", "%10", "%11", "%12");
  } else if constexpr (kCount == 12) {
    S24_WGMMA_SP("24", S24_D12, S24_N12, "%12", "%13", "%14", "%15", "%16");
  } else if constexpr (kCount == 16) {
    S24_WGMMA_SP("32", S24_D16, S24_N16, "%16", "%17", "%18", "%19", "%20");
  } else if constexpr (kCount == 24) {
    S24_WGMMA_SP("48", S24_D24, S24_N24, "%24", "%25", "%26", "%27", "%28");
  } else if constexpr (kCount == 32) {
    S24_WGMMA_SP("64", S24_D32, S24_N32, "%32", "%33", "%34", "%35", "%36");
  } else if constexpr (kCount == 40) {
    S24_WGMMA_SP("80", S24_D40, S24_N40, "%40", "%41", "%42", "%43", "%44");
  } else if constexpr (kCount == 48) {
    S24_WGMMA_SP("96", S24_D48, S24_N48, "%48", "%49", "%50", "%51", "%52");
  } else if constexpr (kCount == 56) {
    S24_WGMMA_SP("112", S24_D56, S24_N56, "%56", "%57", "%58", "%59", "%60");
  } else if constexpr (kCount == 64) {
    S24_WGMMA_SP("128", S24_D64, S24_N64, "%64", "%65", "%66", "%67", "%68");
  } else if constexpr (kCount == 72) {
    S24_WGMMA_SP("144", S24_D72, S24_N72, "%72", "%73", "%74", "%75", "%76");
  } else if constexpr (kCount == 80) {
    S24_WGMMA_SP("160", S24_D80, S24_N80, "%80", "%81", "%82", "%83", "%84");
  } else if constexpr (kCount == 88) {
    S24_WGMMA_SP("176", S24_D88, S24_N88, "%88", "%89", "%90", "%91", "%92");
  } else if constexpr (kCount == 96) {
    S24_WGMMA_SP("192", S24_D96, S24_N96, "%96", "%97", "%98", "%99", "%100");
  } else if constexpr (kCount == 104) {
    S24_WGMMA_SP("208", S24_D104, S24_N104, "%104", "%105", "%106", "%107", "%108");
  } else if constexpr (kCount == 112) {
    S24_WGMMA_SP("224", S24_D112, S24_N112, "%112", "%113", "%114", "%115", "%116");
  } else if constexpr (kCount == 120) {
    S24_WGMMA_SP("240", S24_D120, S24_N120, "%120", "%121", "%122", "%123", "%124");
  } else if constexpr (kCount == 128) {
    S24_WGMMA_SP("256", S24_D128, S24_N128, "%128", "%129", "%130", "%131", "%132");
  } else {
    static_assert(kCount < 0, "no wgmma of this width");
  }
}
#undef S24_WGMMA_SP
#undef S24_WGMMA_SP_OF

// A step of wgmma.sp with A in registers, for 16-bit elements. Warp w, lane 4g + t has four words, each a pair of kept
// values: row 16w + g, kept columns 2t and 2t + 1; row 16w + g + 8, the same columns; then both rows 8 kept columns
// further. The registers must keep their values until the step is done.
#define S24_WGMMA_SP_A_OF(types, transposed, n, accumulators, numbers, a0, a1, a2, a3, b_, m_, s_, f_)          \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " f_ ", 0;\n\t"                                            \
               "wgmma.mma_async.sp.sync.aligned.m64n" n "k32.f32." types " {" numbers "}, {" a0 ", " a1 ", " a2 \
               ", " a3 "}, " b_ ", " m_ ", " s_ ", p, 1, 1, " transposed ";\n\t}"                               \
               : accumulators("+f", 0)                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata), "n"(kSelector), "n"(kAdd))
#define S24_WGMMA_SP_A(...)                                                                               \
  if constexpr (kElement == ElementKind::F16 && !kNMajor) S24_WGMMA_SP_A_OF("f16.f16", "0", __VA_ARGS__); \
  else if constexpr (kElement == ElementKind::F16) S24_WGMMA_SP_A_OF("f16.f16", "1", __VA_ARGS__);        \
  else if constexpr (!kNMajor) S24_WGMMA_SP_A_OF("bf16.bf16", "0", __VA_ARGS__);                          \
  else S24_WGMMA_SP_A_OF("bf16.bf16", "1", __VA_ARGS__)
template <ElementKind kElement, int kSelector, int kAdd, bool kNMajor, int kCount>
__device__ __forceinline__ void wgmma_sp_registers(float (&d)[kCount], const u32 (&a)[4], u64 b, u32 metadata) {
  static_assert(kElement == ElementKind::F16 || kElement == ElementKind::BF16);
  if constexpr (kCount == 4) {
    S24_WGMMA_SP_A("8", S24_D4, S24_N4, "%4", "%5", "%6", "%7", "%8", "%9", "%10", "%11");
  } else if constexpr (kCount == 8) {
    S24_WGMMA_SP_A("16", S24_D8, S24_N8, "%8", "%9", "%10", "%11", "%12", "%13", "%14", "%15");
  } else if constexpr (kCount == 12) {
    S24_WGMMA_SP_A("24", S24_D12, S24_N12, "%12", "%13", "%14", "%15", "%16", "%17", "%18", "%19");
  } else if constexpr (kCount == 16) {
    S24_WGMMA_SP_A("32", S24_D16, S24_N16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23");
  } else if constexpr (kCount == 24) {
    S24_WGMMA_SP_A("48", S24_D24, S24_N24, "%24", "%25", "%26", "%27", "%28", "%29", "%30", "%31");
  } else if constexpr (kCount == 32) {
    S24_WGMMA_SP_A("64", S24_D32, S24_N32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39");
  } else if constexpr (kCount == 40) {
    S24_WGMMA_SP_A("80", S24_D40, S24_N40, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47");
  } else if constexpr (kCount == 48) {
    S24_WGMMA_SP_A("96", S24_D48, S24_N48, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55");
  } else if constexpr (kCount == 56) {
    S24_WGMMA_SP_A("112", S24_D56, S24_N56, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63");
  } else if constexpr (kCount == 64) {
    S24_WGMMA_SP_A("128", S24_D64, S24_N64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71");
  } else if constexpr (kCount == 72) {
    S24_WGMMA_SP_A("144", S24_D72, S24_N72, "%72", "%73", "%74", "%75", "%76", "%77", "%78", "%79");
  } else if constexpr (kCount == 80) {
    S24_WGMMA_SP_A("160", S24_D80, S24_N80, "%80", "%81", "%82", "%83", "%84", "%85", "%86", "%87");
  } else if constexpr (kCount == 88) {
    S24_WGMMA_SP_A("176", S24_D88, S24_N88, "%88", "%89", "%90", "%91", "%92", "%93", "%94", "%95");
  } else if constexpr (kCount == 96) {
    S24_WGMMA_SP_A("192", S24_D96, S24_N96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103");
  } else if constexpr (kCount == 104) {
    S24_WGMMA_SP_A("208", S24_D104, S24_N104, "%104", "%105", "%106", "%107", "%108", "%109", "%110", "%111");
  } else if constexpr (kCount == 112) {
    S24_WGMMA_SP_A("224", S24_D112, S24_N112, "%112", "%113", "%114", "%115", "%116", "%117", "%118", "%119");
  } else if constexpr (kCount == 120) {
    S24_WGMMA_SP_A("240", S24_D120, S24_N120, "%120", "%121", "%122", "%123", "%124", "%125", "%126", "%127");
  } else if constexpr (kCount == 128) {
    S24_WGMMA_SP_A("256", S24_D128, S24_N128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135");
  } else {
    static_assert(kCount < 0, "no wgmma of this width");
  }
}
#undef S24_WGMMA_SP_A
#undef S24_WGMMA_SP_A_OF
